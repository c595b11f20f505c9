"""What models of images or sounds and words need besides being small, and what they take, where names do not tell."""

import torch

from tests.sweep.audio import frames_first
from tests.sweep.inputs import field, given, grid, image, mask, normal, only, patches, states, whole, words
from tests.sweep.shrink import BATCH, FRAMES, GRID, LENGTH
from tests.sweep.vision import squares

# A window of one merged patch.
WINDOW = {"window_size": 16}
TILES = {"image_grid_pinpoints": [[32, 32]]}
POOLED = {"mm_tokens_per_image": 4}
# Where the vectors of an image are merged, or handed on to the words besides the last ones.
MERGED = {"insert_layer_id": 0}
GEMMA4 = {"vision_config": {"model_type": "gemma4_vision"}, "audio_config": {"model_type": "gemma4_audio"}}
DEEP = {"deepstack_visual_indexes": [0]}

CHANGES = {
    **{f"minicpm{which}": MERGED for which in ("_ocr", "_ocr_vision", "v4_6", "v4_6_vision", "v4_7", "v4_7_vision")},
    **dict.fromkeys(["cohere_compass_vision", "qwen3_vl_vision", "qwen3_vl_moe_vision"], DEEP),
    "qwen3_omni_moe_vision_encoder": DEEP,
    **dict.fromkeys(["exaone4_5_vision", "qwen2_5_omni_vision_encoder", "qwen2_5_vl_vision"], WINDOW),
    **dict.fromkeys(["gemma3", "shieldgemma2", "t5gemma2_encoder"], POOLED),
    **dict.fromkeys(["llava_next", "llava_next_video", "llava_onevision"], TILES),
    **dict.fromkeys(["embedding_gemma2", "gemma4"], GEMMA4),
    **{name: {"latent_query_num": 4} for name in ["kosmos-2", "kosmos-2.5"]},
    **{name: {"out_hidden_size": 128} for name in ["muse_glimmer", "muse_spark"]},
    **{name: {"vision_start_token_id": 9} for name in ["qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"]},
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "apertus1p5": {"text_config": {"vocab_size": 260}, "image_token_offset": 100, "audio_token_offset": 164},
    "chameleon": {
        "vocabulary_map": {"<image>": 10, **{f"IMGIMG{chr(ord('A') + i)}Z": 20 + i for i in range(8)}},
        "vq_config": {"num_embeddings": 8, "base_channels": 32, "channel_multiplier": [1] * 5, "resolution": 32},
    },
    "deepseek_ocr2_sam_vision_model": {"downsample_channels": [32, 32], "image_size": 64},
    "deepseek_vl_hybrid": {"high_res_vision_config": {"global_attn_indexes": [0]}},
    "emu3": {
        "vocabulary_map": {"<image>": 10, "<|extra_200|>": 11, **{f"<|visual token {i:06}|>": 20 + i for i in range(64)}},
        "vq_config": {"base_channels": 32, "hidden_size": 128},
    },
    "fast_vlm": {"vision_config": {"model_type": "convnext", "hidden_size": 32}},
    "flava_image_codebook": {"freeze": False},
    "gemma4_unified": {"vision_config": {"model_type": "gemma4_unified_vision"}, "audio_config": {"model_type": "gemma4_unified_audio"}},
    "granite4_vision": {
        **TILES, "deepstack_layer_map": [[-1, 0]], "spatial_target_layers": [1], "vision_config": {"hidden_size": 64},
        "qformer_config": {"hidden_size": 64, "encoder_hidden_size": 64}, "downsample_rate": "1/2",
    },
    "granite_docling_vision": {"deepstack_visual_indexes": [0], "image_size": 32},
    "idefics": {"freeze_text_layers": False, "freeze_vision_layers": False},
    "janus_vqgan": {"base_channels": 32, "channel_multiplier": [1] * 5, "num_patches": 2},
    "llama4_vision_model": {"intermediate_size": 128},
    "mllama_text_model": {"num_hidden_layers": 3, "cross_attention_layers": [1]},
    "mllama_vision_model": {"num_global_layers": 1, "intermediate_layers_indices": [0, 1], "vision_output_dim": 96},
    "molmo2": {"image_patch_id": 39, "adapter_config": {"vision_feature_layer": [1, 0]}},
    "molmo2_vision": {"image_size": [32, 32], "num_position_embeddings": 16},
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}},
    "perception_lm": {"vision_config": {"model_type": "siglip_vision_model", "model_args": {"embed_dim": 32}}, "vision_use_cls_token": False},
    "vipllava": {"vision_feature_layers": [-1, -2, 0, 1, 2]},
}  # fmt: skip

# A sample's images, only one here, stand in a dimension of their own.
ONE_IMAGE = ["colmodernvbert", "idefics2", "idefics3", "modernvbert", "perception_lm", "smolvlm", "ultravbert"]
# An image and a smaller copy of it.
TILED = ["llava_next", "llava_next_video", "llava_onevision"]
SIZES = torch.full((BATCH, 2), GRID)


def _row(model):
    """All patches side by side."""
    patch = field(model, "patch_size")
    return normal(1, 3, patch, BATCH * GRID**2 * patch)


def _cells(model):
    patch = field(model, "patch_size")
    return normal(BATCH * GRID**2, 3, patch, patch)


def _places(side):
    rows = torch.arange(side)
    return torch.cartesian_prod(rows, rows).expand(BATCH, -1, -1).contiguous()


def _placed(model):
    """Patches of an image with six on each side, for pooling of three by three."""
    return normal(BATCH, 36, 3 * field(model, "patch_size") ** 2)


def _merged(model):
    """Squares of patches that become one vector each."""
    side = 2 * field(model, "patch_size")
    return normal(BATCH * 4, side, side, 3)


def _folded(model):
    """Patches in time and space, the channels last."""
    side, times = field(model, "patch_size"), field(model, "temporal_patch_size")
    return normal(BATCH * 2, times, side, side, 3)


def flattened(model):
    """Patches, with the row and the column of each before it; the second image is smaller."""
    places = torch.cartesian_prod(torch.arange(1, GRID + 1), torch.arange(1, GRID + 1)).expand(BATCH, -1, -1)
    width = field(model, "patch_embed_hidden_size")
    both = torch.cat([places.float(), normal(BATCH, GRID**2, width)], -1)
    both[1, -GRID:] = 0
    return both


MINICPM = {"pixel_values": _row, "target_sizes": SIZES}
WHOLE = {"pixel_values": squares, "pixel_attention_mask": mask(GRID**2, 0), "spatial_shapes": SIZES}
PLACED = {
    "pixel_values": _placed, "image_position_ids": _places(6),
    "input_features": frames_first, "input_features_mask": mask(FRAMES, 0).bool(),
}  # fmt: skip
SMALL_GRIDS = {"pixel_values": _merged, "image_grid_thw": torch.tensor([[1, 2, 2]] * BATCH)}
SEEN = {"image_embeds_position_mask": torch.tensor([[0, 1, 1, 1, 1, 0, 0]] * BATCH).bool()}
TILES_OF_TWO = {
    "pixel_values": lambda model: image(model, 1, 4), "aspect_ratio_ids": torch.ones(BATCH, 1, dtype=torch.long),
    "aspect_ratio_mask": torch.tensor([[[1, 1, 1, 1]], [[1, 1, 0, 0]]]),
}  # fmt: skip

INPUTS = {
    **{name: given(pixel_values=lambda model: image(model, 1)) for name in ONE_IMAGE},
    **{name: given(pixel_values=lambda model: image(model, 2)) for name in TILED},
    **{name: given(**MINICPM) for name in ("minicpm_ocr", "minicpmv4_6", "minicpmv4_7")},
    **{name: only(**MINICPM) for name in ("minicpm_ocr_vision", "minicpmv4_6_vision", "minicpmv4_7_vision")},
    **{name: given(**PLACED) for name in ("embedding_gemma2", "gemma4")},
    **{name: given(pixel_values=_cells) for name in ("kimi_k25", "kimi_k25_vision", "paddleocr_vl")},
    **{name: given(**SMALL_GRIDS) for name in ("inkling2", "inkling2_loop", "inkling2_vision")},
    **{name: only(flattened_patches=flattened) for name in ("kosmos_2_5_vision_model", "pix2struct_vision_model")},
    **{f"qwen{which}_thinker": given(feature_attention_mask=mask(FRAMES, 0)) for which in ("2_5_omni", "3_omni_moe")},
    "blip-2": given(counts={"image": 10}),
    "blip_2_qformer": only(
        query_embeds=states(10, "hidden_size"), encoder_hidden_states=states(width="encoder_hidden_size"),
        encoder_attention_mask=mask(LENGTH),
    ),
    "colqwen2": given(pixel_values=lambda model: patches(model).unflatten(0, (BATCH, -1))),
    "deepseek_ocr2_encoder": only(inputs_embeds=states(), num_patches=4),
    "deepseek_vl_hybrid": given(high_res_pixel_values=lambda model: image(model)),
    "dots3_note": given(chunk_sample_lengths=torch.tensor([FRAMES, FRAMES]) * 160),
    "fuyu": given(pixel_values=squares),
    "gemma4_unified": given(
        pixel_values=lambda model: normal(BATCH, 4, model.config.vision_config.model_patch_size**2 * 3),
        image_position_ids=_places(2),
        input_features=lambda model: normal(BATCH, 5, field(model, "audio_embed_dim", default=32)),
        input_features_mask=mask(5, 0).bool(),
    ),
    "gemma4_vision": only(pixel_values=_placed, pixel_position_ids=_places(6)),
    # The second image of each sample is still to be made.
    "glm_image": given(image_grid_thw=torch.tensor([[1, GRID, GRID], [1, 2, 2]] * BATCH), images_per_sample=torch.full((BATCH,), 2), counts={"image": GRID**2}),
    "granite4_vision": given(pixel_values=lambda model: image(model, 2), counts={"image": 10}),
    "granite_docling": given(pixel_values=lambda model: image(model, 1), pixel_attention_mask=torch.ones(BATCH, 1, dtype=torch.bool)),
    "idefics": given(pixel_values=lambda m: image(m, 1), image_attention_mask=torch.ones(BATCH, LENGTH, 1, dtype=torch.long)),
    "idefics2_perceiver": only(context=states(), attention_mask=mask(LENGTH)),
    "inkling_mm_model": given(
        pixel_values=_folded,
        audio_input_ids=lambda m: whole(0, m.config.audio_config.mel_vocab_size, BATCH, 5, m.config.audio_config.n_mel_bins),
        audio_input_ids_mask=mask(5, 0).bool(),
    ),
    "inkling_vision": only(pixel_values=_folded),
    "instructblip": given(qformer_input_ids=words, qformer_attention_mask=mask(LENGTH), counts={"image": 10}),
    "instructblipvideo": given(pixel_values=lambda model: image(model, 2), qformer_input_ids=words, qformer_attention_mask=mask(LENGTH), counts={"image": 20}),
    "kosmos-2": given(**SEEN),
    "kosmos-2.5": given(flattened_patches=flattened, **SEEN),
    "lfm2_vl": given(**WHOLE),
    "llava": given(image_sizes=None),
    "mllama": given(**TILES_OF_TWO, cross_attention_mask=torch.ones(BATCH, LENGTH, 1, 4, dtype=torch.long)),
    "mllama_vision_model": only(**TILES_OF_TWO),
    "molmo2": given(pixel_values=squares, image_token_pooling=torch.arange(BATCH * GRID**2).reshape(-1, 4), image_grids=torch.tensor([[2, 2, 0, 0]] * BATCH)),
    "molmo2_adapter": only(
        image_features=lambda m: normal(BATCH, GRID**2, m.config.hidden_size * len(m.config.vision_feature_layer)),
        pooled_patches_idx=torch.arange(BATCH * GRID**2).reshape(-1, 4),
    ),
    "molmo2_vision": only(pixel_values=squares),
    "muse_glimmer_assistant": only(
        # Else one is made for the noise alone.
        attention_mask={"full_attention": None, "sliding_attention": None},
        noise_embeds=states(),
        context_hidden_states=lambda m: normal(BATCH, 5, 5 * m.config.hidden_size),
    ),
    "muse_spark": given(input_values=normal(BATCH, 2 * 1920)),
    "nemotron_h_omni": given(pixel_values=patches, image_grid_hw=SIZES, input_features=None, input_features_mask=None),
    "neomme": given(pixel_values=patches),
    "paddleocr_vl_vision": given(pixel_values=lambda model: _cells(model).unsqueeze(0), grid_thw=grid),
    "phi4_multimodal": given(
        image_pixel_values=normal(BATCH, 2, 3, 32, 32), image_sizes=torch.full((BATCH, 2), 32),
        image_attention_mask=torch.ones(BATCH, 2, GRID, GRID),
        audio_input_features=lambda model: normal(BATCH, FRAMES, model.config.audio_config.input_size),
        audio_embed_sizes=torch.full((BATCH,), FRAMES // 8),
        audio_attention_mask=torch.ones(BATCH, FRAMES, dtype=torch.bool), counts={"image": 13, "audio": FRAMES // 8},
    ),
    "pix2struct": given(flattened_patches=flattened),
    "pi0": given(
        action_embeds=lambda model: normal(BATCH, 5, model.config.dit_config.hidden_size),
        pixel_values=lambda model: image(model, 1), pixel_attention_mask=torch.ones(BATCH, 1, dtype=torch.bool),
        counts={"image": GRID**2},
    ),
    "unlimited_ocr_vision_encoder": only(patch_embeds=lambda model: normal(BATCH, model.config.hidden_size, GRID, GRID)),
    "video_llama_3": given(image_merge_sizes=torch.full((BATCH,), 2)),
    "video_llama_3_vision": given(merge_sizes=torch.full((BATCH,), 2)),
}  # fmt: skip
