"""What the configurations of models of images or sounds and words need besides being small."""

from __future__ import annotations

from typing import Any

# A window of one merged patch.
WINDOW = {"window_size": 16}
TILES = {"image_grid_pinpoints": [[32, 32]]}
POOLED = {"mm_tokens_per_image": 4}
# Where the vectors of an image are merged, or handed on to the words besides the last ones.
MERGED = {"insert_layer_id": 0}
DEEP = {"deepstack_visual_indexes": [0]}
THAWED = {"freeze_text_layers": False, "freeze_vision_layers": False}

CHANGES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(["minicpm_ocr", "minicpm_ocr_vision"], MERGED),
    **dict.fromkeys(["minicpmv4_6", "minicpmv4_6_vision", "minicpmv4_7", "minicpmv4_7_vision"], MERGED),
    **dict.fromkeys(["qwen3_vl_vision", "qwen3_vl_moe_vision", "qwen3_omni_moe_vision_encoder"], DEEP),
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "chameleon": {
        "vocabulary_map": {"<image>": 10, **{f"IMGIMG{chr(ord('A') + i)}Z": 20 + i for i in range(8)}},
        "vq_config": {"num_embeddings": 8, "base_channels": 32, "channel_multiplier": [1] * 5, "resolution": 32},
    },
    "cohere_compass_vision": DEEP,
    "deepseek_ocr2_sam_vision_model": {"downsample_channels": [32, 32], "image_size": 64},
    "deepseek_vl_hybrid": {"high_res_vision_config": {"global_attn_indexes": [0]}},
    "embedding_gemma2": {"vision_config": {"model_type": "gemma4_vision"}, "audio_config": {"model_type": "gemma4_audio"}},
    "emu3": {
        "vocabulary_map": {"<image>": 10, "<|extra_200|>": 11, **{f"<|visual token {i:06}|>": 20 + i for i in range(64)}},
        "vq_config": {"base_channels": 32, "hidden_size": 128},
    },
    "exaone4_5_vision": WINDOW,
    "fast_vlm": {"vision_config": {"model_type": "convnext", "hidden_size": 32}},
    "flava_image_codebook": {"freeze": False},
    "gemma3": POOLED,
    "gemma4": {"vision_config": {"model_type": "gemma4_vision"}, "audio_config": {"model_type": "gemma4_audio"}},
    "gemma4_unified": {"vision_config": {"model_type": "gemma4_unified_vision"}, "audio_config": {"model_type": "gemma4_unified_audio"}},
    "granite4_vision": {
        **TILES,
        "deepstack_layer_map": [[-1, 0]],
        "spatial_target_layers": [1],
        "vision_config": {"hidden_size": 64},
        "qformer_config": {"hidden_size": 64, "encoder_hidden_size": 64},
        "downsample_rate": "1/2",
    },
    "granite_docling_vision": {"deepstack_visual_indexes": [0], "image_size": 32},
    "idefics": THAWED,
    "janus_vqgan": {"base_channels": 32, "channel_multiplier": [1] * 5, "num_patches": 2},
    "kosmos-2": {"latent_query_num": 4},
    "kosmos-2.5": {"latent_query_num": 4},
    "llama4_vision_model": {"intermediate_size": 128},
    "llava_next": TILES,
    "llava_next_video": TILES,
    "llava_onevision": TILES,
    "mllama_text_model": {"num_hidden_layers": 3, "cross_attention_layers": [1]},
    "mllama_vision_model": {"num_global_layers": 1, "intermediate_layers_indices": [0, 1], "vision_output_dim": 96},
    "molmo2": {"image_patch_id": 39, "adapter_config": {"vision_feature_layer": [1, 0]}},
    "molmo2_vision": {"image_size": [32, 32], "num_position_embeddings": 16},
    "muse_glimmer": {"out_hidden_size": 128},
    "muse_spark": {"out_hidden_size": 128},
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}},
    "perception_lm": {"vision_config": {"model_type": "siglip_vision_model", "model_args": {"embed_dim": 32}}, "vision_use_cls_token": False},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 9},
    "qwen2_5_omni_vision_encoder": WINDOW,
    "qwen2_5_vl_vision": WINDOW,
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 9},
    "shieldgemma2": POOLED,
    "t5gemma2_encoder": POOLED,
    "vipllava": {"vision_feature_layers": [-1, -2, 0, 1, 2]},
}  # fmt: skip
