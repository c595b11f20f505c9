"""What the configurations of models of images need besides being small."""

from __future__ import annotations

from typing import Any

# Its last stage is as large as a window.
WINDOWS = {"image_size": 64, "window_size": 2, "num_heads": [2, 4, 4, 4]}
SCALED = {"width_coefficient": 0.1, "depth_coefficient": 0.5, "hidden_dim": 128}
RESNET = {"backbone_config": {"model_type": "resnet"}}
HIERA = {
    "hidden_size": 16,
    "image_size": [64, 64],
    "embed_dim_per_stage": [16, 32, 64, 128],
    "num_attention_heads_per_stage": [1, 2, 4, 4],
    "blocks_per_stage": [1, 1, 2, 1],
    "global_attention_blocks": [3],
    "window_size_per_stage": [4, 2, 2, 2],
    "window_positional_embedding_background_size": [4, 4],
}
HIERA_PYRAMID = {"backbone_channel_list": [128, 64, 32, 16], "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]]}

# The kernels and paddings of its convolutions, in both directions and in each.
LONG = {"longratio": 7, "midratio": 5, "shortratio": 3}
INTRACLASS = {
    "reduce_channel": [1, 1, 0],
    "return_channel": [1, 1, 0],
    **{f"vertical_long_to_small_conv_{name}": [[n, 1], [1, 1], [n // 2, 0]] for name, n in LONG.items()},
    **{f"horizontal_small_to_long_conv_{name}": [[1, n], [1, 1], [0, n // 2]] for name, n in LONG.items()},
    **{f"symmetric_conv_long_{name}": [[n, n], [1, 1], [n // 2, n // 2]] for name, n in LONG.items()},
}
LARGE_KERNELS = {"intraclass_block_config": INTRACLASS, "scale_factor_list": [1, 2, 4, 8], "kernel_list": [3, 2, 2]}

# Each of its stages halves both sides.
HALVING = {"backbone_config": {"out_indices": [1, 2, 3, 4], "block_configs": [[[3, 32, 32, stride, False]] for stride in (1, 2, 2, 2)]}}  # fmt: skip

CHANGES: dict[str, dict[str, Any]] = {
    "align": {"projection_dim": 8},
    "align_vision_model": SCALED,
    "bit": {"num_groups": 4},
    "bridgetower_vision_model": {"hidden_size": 64},
    "chmv2": {"post_process_channels": [32] * 4, "backbone_config": {"return_class_token": True}},
    "conditional_detr": RESNET,
    "cvt": {"num_heads": [1, 2, 4], "depth": [1, 2, 3], "embed_dim": [16, 32, 32]},
    "dab-detr": RESNET,
    "deformable_detr": {"backbone_config": {"model_type": "resnet", "out_indices": [2, 3, 4]}},
    "depth_pro": {"scaled_images_feature_dims": [32, 32, 32], "intermediate_feature_dims": [32, 32], "patch_size": 32, "intermediate_hook_ids": [1, 0]},
    "detr": RESNET,
    "dinov3_convnext": {"hidden_sizes": [8, 16, 16, 32]},
    "dinov3_vit": {"pos_embed_rescale": None},
    "donut-swin": WINDOWS,
    "efficientloftr": {"num_attention_heads": 8, "out_features": [8, 16, 16, 32], "stage_num_blocks": [1, 1, 1, 1], "hidden_size": 32},
    "efficientnet": SCALED,
    "eomt_dinov3": {"pos_embed_rescale": None},
    "layoutlmv3": {"coordinate_size": 4, "shape_size": 8},
    "levit": {"num_attention_heads": [2, 4, 4], "key_dim": [8, 8, 8], "hidden_sizes": [16, 32, 32], "image_size": 64, "patch_size": 16},
    "lw_detr": {"projector_scale_factors": [1.0]},
    "lw_detr_vit": {"num_windows": 4},
    "maskformer-swin": WINDOWS,
    "mgp-str": {"num_bpe_labels": 99, "num_wordpiece_labels": 99},
    "mobilenet_v1": {"depth_multiplier": 0.25},
    "mobilevitv2": {"image_size": 64},
    "omdet-turbo": {
        "apply_layernorm_after_vision_backbone": False,
        "class_embed_dim": 48,
        "text_config": {"hidden_size": 48},
        "text_projection_in_dim": 48,
        "text_projection_out_dim": 48,
        "backbone_config": {"model_type": "swin", "out_indices": [2, 3, 4]},
        "encoder_in_channels": [64, 128, 256],
    },
    "pp_doclayout_v2": {"reading_order_config": {"max_2d_position_embeddings": 1024}, "class_thresholds": [0.1, 0.1], "class_order": [0, 1]},
    "pp_lcnet_v4": {
        "stem_channels": [3, 16, 32],
        "block_configs": [[[3, 32, 32, 1, True]], [[3, 32, 32, 1, False]], [[3, 32, 32, [2, 1], True]], [[3, 32, 32, [2, 1], False]]],
    },
    "pp_ocrv5_server_det": LARGE_KERNELS,
    "pp_ocrv6_medium_det": {**LARGE_KERNELS, **HALVING},
    "pp_ocrv6_small_det": {"layer_list_out_channels": [32] * 4, **HALVING},
    "pvt": {"hidden_sizes": [16, 32, 32, 32], "num_attention_heads": [1, 2, 4, 4], "num_encoder_blocks": 4},
    "sam2": {"prompt_encoder_config": {"image_size": 64, "patch_size": 16}},
    "sam2_hiera_det_model": HIERA,
    "sam2_vision_model": HIERA_PYRAMID,
    "sam3_tracker": {"vision_config": {"backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]]}},
    "sam_vision_model": {"global_attn_indexes": [1], "window_size": 2},
    "sapiens2": {"pos_embed_rescale": None},
    "seggpt": {"image_size": [64, 32]},
    "slanet": {"max_text_length": 5},
    "slanext": {"max_text_length": 5},
    "superpoint": {"keypoint_decoder_dim": 65},
    "swin": WINDOWS,
    "swinv2": WINDOWS,
    "table-transformer": RESNET,
    "tipsv2_dpt": {"neck_hidden_sizes": [32] * 4},
    "tvp": {"max_img_size": 64, "visual_prompt_size": 8, "num_frames": 2},
    "uvdoc": {"backbone_config": {"out_indices": [1, 2, 3, 4, 5, 6]}},
    "vitmatte": {
        "backbone_config": {"patch_size": 16, "image_size": 64, "num_channels": 4},
        "fusion_hidden_sizes": [32, 32, 16, 16],
        "convstream_hidden_sizes": [16, 16, 16],
    },
    "xclip_vision_model": {"num_frames": 2},
    "vjepa2": {"frames_per_clip": 4},
}  # fmt: skip
