"""What models of images or sounds and words take, where it does not follow from names."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.sweep.inputs import (
    BATCH,
    FRAMES,
    GRID,
    LENGTH,
    Inputs,
    field,
    given,
    grid,
    image,
    mask,
    normal,
    only,
    patches,
    whole,
    words,
)
from tests.sweep.inputs_audio import frames_first
from tests.sweep.inputs_vision import squares

# A sample's images, only one here, stand in a dimension of their own.
ONE_IMAGE = ["colmodernvbert", "idefics2", "idefics3", "modernvbert", "perception_lm", "smolvlm", "ultravbert"]
# An image and a smaller copy of it.
TILED = ["llava_next", "llava_next_video", "llava_onevision"]
SIZES = torch.full((BATCH, 2), GRID)


def _row(model: nn.Module) -> Tensor:
    """All patches side by side."""
    patch = field(model, "patch_size")
    return normal(1, 3, patch, BATCH * GRID**2 * patch)


def _cells(model: nn.Module) -> Tensor:
    patch = field(model, "patch_size")
    return normal(BATCH * GRID**2, 3, patch, patch)


def _places(side: int) -> Tensor:
    rows = torch.arange(side)
    return torch.cartesian_prod(rows, rows).expand(BATCH, -1, -1).contiguous()


def _placed(model: nn.Module) -> Tensor:
    """Patches of an image with six on each side, for pooling of three by three."""
    return normal(BATCH, 36, 3 * field(model, "patch_size") ** 2)


def _merged(model: nn.Module) -> Tensor:
    """Squares of patches that become one vector each."""
    side = 2 * field(model, "patch_size")
    return normal(BATCH * 4, side, side, 3)


def _folded(model: nn.Module) -> Tensor:
    """Patches in time and space, the channels last."""
    side, times = field(model, "patch_size"), field(model, "temporal_patch_size")
    return normal(BATCH * 2, times, side, side, 3)


def flattened(model: nn.Module) -> Tensor:
    """Patches, with the row and the column of each before it; the second image is smaller."""
    places = torch.cartesian_prod(torch.arange(1, GRID + 1), torch.arange(1, GRID + 1)).expand(BATCH, -1, -1)
    width = field(model, "patch_embed_hidden_size")
    both = torch.cat([places.float(), normal(BATCH, GRID**2, width)], -1)
    both[1, -GRID:] = 0
    return both


MINICPM = {"pixel_values": _row, "target_sizes": SIZES}
WHOLE = {"pixel_values": squares, "pixel_attention_mask": mask(GRID**2, 0), "spatial_shapes": SIZES}
HEARD = {"feature_attention_mask": mask(FRAMES, 0)}

INPUTS: dict[str, Callable[[nn.Module], Inputs]] = {
    **{name: given(pixel_values=lambda model: image(model, 1)) for name in ONE_IMAGE},
    **{name: given(pixel_values=lambda model: image(model, 2)) for name in TILED},
    **{name: given(**MINICPM) for name in ("minicpm_ocr", "minicpmv4_6", "minicpmv4_7")},
    **{name: only(**MINICPM) for name in ("minicpm_ocr_vision", "minicpmv4_6_vision", "minicpmv4_7_vision")},
    "blip-2": given(counts={"image": 10}),
    "blip_2_qformer": only(
        query_embeds=lambda model: normal(BATCH, 10, model.config.hidden_size),
        encoder_hidden_states=lambda model: normal(BATCH, LENGTH, model.config.encoder_hidden_size),
        encoder_attention_mask=mask(LENGTH),
    ),
    "colqwen2": given(pixel_values=lambda model: patches(model).unflatten(0, (BATCH, -1))),
    "deepseek_ocr2_encoder": only(inputs_embeds=lambda model: normal(BATCH, LENGTH, model.config.hidden_size), num_patches=4),
    "deepseek_vl_hybrid": given(high_res_pixel_values=lambda model: image(model)),
    "dots3_note": given(chunk_sample_lengths=torch.tensor([FRAMES, FRAMES]) * 160),
    "embedding_gemma2": given(pixel_values=_placed, image_position_ids=_places(6), input_features=frames_first, input_features_mask=mask(FRAMES, 0).bool()),
    "fuyu": given(pixel_values=squares),
    "gemma4": given(pixel_values=_placed, image_position_ids=_places(6), input_features=frames_first, input_features_mask=mask(FRAMES, 0).bool()),
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
    "idefics2_perceiver": only(context=lambda model: normal(BATCH, LENGTH, model.config.hidden_size), attention_mask=mask(LENGTH)),
    "inkling2": given(pixel_values=_merged, image_grid_thw=torch.tensor([[1, 2, 2]] * BATCH)),
    "inkling2_vision": given(pixel_values=_merged, image_grid_thw=torch.tensor([[1, 2, 2]] * BATCH)),
    "inkling_mm_model": given(
        pixel_values=_folded,
        audio_input_ids=lambda m: whole(0, m.config.audio_config.mel_vocab_size, BATCH, 5, m.config.audio_config.n_mel_bins),
        audio_input_ids_mask=mask(5, 0).bool(),
    ),
    "inkling_vision": only(pixel_values=_folded),
    "instructblip": given(qformer_input_ids=words, qformer_attention_mask=mask(LENGTH), counts={"image": 10}),
    "instructblipvideo": given(pixel_values=lambda model: image(model, 2), qformer_input_ids=words, qformer_attention_mask=mask(LENGTH), counts={"image": 20}),
    "kimi_k25": given(pixel_values=_cells),
    "kimi_k25_vision": given(pixel_values=_cells),
    "kosmos-2": given(image_embeds_position_mask=torch.tensor([[0, 1, 1, 1, 1, 0, 0]] * BATCH).bool()),
    "kosmos-2.5": given(flattened_patches=flattened, image_embeds_position_mask=torch.tensor([[0, 1, 1, 1, 1, 0, 0]] * BATCH).bool()),
    "kosmos_2_5_vision_model": only(flattened_patches=flattened),
    "lfm2_vl": given(**WHOLE),
    "llava": given(image_sizes=None),
    "mllama": given(
        pixel_values=lambda model: image(model, 1, 4),
        aspect_ratio_ids=torch.ones(BATCH, 1, dtype=torch.long),
        aspect_ratio_mask=torch.tensor([[[1, 1, 1, 1]], [[1, 1, 0, 0]]]),
        cross_attention_mask=torch.ones(BATCH, LENGTH, 1, 4, dtype=torch.long),
    ),
    "mllama_vision_model": only(
        pixel_values=lambda model: image(model, 1, 4),
        aspect_ratio_ids=torch.ones(BATCH, 1, dtype=torch.long),
        aspect_ratio_mask=torch.tensor([[[1, 1, 1, 1]], [[1, 1, 0, 0]]]),
    ),
    "molmo2": given(pixel_values=squares, image_token_pooling=torch.arange(BATCH * GRID**2).reshape(-1, 4), image_grids=torch.tensor([[2, 2, 0, 0]] * BATCH)),
    "molmo2_adapter": only(
        image_features=lambda m: normal(BATCH, GRID**2, m.config.hidden_size * len(m.config.vision_feature_layer)),
        pooled_patches_idx=torch.arange(BATCH * GRID**2).reshape(-1, 4),
    ),
    "molmo2_vision": only(pixel_values=squares),
    "muse_glimmer_assistant": only(
        # Else one is made for the noise alone.
        attention_mask={"full_attention": None, "sliding_attention": None},
        noise_embeds=lambda model: normal(BATCH, LENGTH, model.config.hidden_size),
        context_hidden_states=lambda m: normal(BATCH, 5, 5 * m.config.hidden_size),
    ),
    "muse_spark": given(input_values=normal(BATCH, 2 * 1920)),
    "nemotron_h_omni": given(pixel_values=patches, image_grid_hw=SIZES, input_features=None, input_features_mask=None),
    "neomme": given(pixel_values=patches),
    "paddleocr_vl": given(pixel_values=_cells),
    "paddleocr_vl_vision": given(pixel_values=lambda model: _cells(model).unsqueeze(0), grid_thw=grid),
    "phi4_multimodal": given(
        image_pixel_values=normal(BATCH, 2, 3, 32, 32),
        image_sizes=torch.full((BATCH, 2), 32),
        image_attention_mask=torch.ones(BATCH, 2, GRID, GRID),
        audio_input_features=lambda model: normal(BATCH, FRAMES, model.config.audio_config.input_size),
        audio_embed_sizes=torch.full((BATCH,), FRAMES // 8),
        audio_attention_mask=torch.ones(BATCH, FRAMES, dtype=torch.bool),
        counts={"image": 13, "audio": FRAMES // 8},
    ),
    "pi0": given(
        action_embeds=lambda model: normal(BATCH, 5, model.config.dit_config.hidden_size),
        pixel_values=lambda model: image(model, 1),
        pixel_attention_mask=torch.ones(BATCH, 1, dtype=torch.bool),
        counts={"image": GRID**2},
    ),
    "pix2struct": given(flattened_patches=flattened),
    "pix2struct_vision_model": only(flattened_patches=flattened),
    "qwen2_5_omni_thinker": given(**HEARD),
    "qwen3_omni_moe_thinker": given(**HEARD),
    "unlimited_ocr_vision_encoder": only(patch_embeds=lambda model: normal(BATCH, model.config.hidden_size, GRID, GRID)),
    "video_llama_3": given(image_merge_sizes=torch.full((BATCH,), 2)),
    "video_llama_3_vision": given(merge_sizes=torch.full((BATCH,), 2)),
}  # fmt: skip
