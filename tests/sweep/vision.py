"""What models of images and videos need besides being small, and what they take, where names do not tell."""

import torch

from tests.sweep.inputs import field, given, image, mask, normal, only, whole, words
from tests.sweep.shrink import BATCH, GRID

# Its last stage is as large as a window.
WINDOWS = {"image_size": 64, "window_size": 2, "num_heads": [2, 4, 4, 4]}
SCALED = {"width_coefficient": 0.1, "depth_coefficient": 0.5, "hidden_dim": 128}
RESNET = {"backbone_config": {"model_type": "resnet"}}
HIERA = {
    "hidden_size": 16, "image_size": [64, 64], "embed_dim_per_stage": [16, 32, 64, 128],
    "num_attention_heads_per_stage": [1, 2, 4, 4], "blocks_per_stage": [1, 1, 2, 1], "global_attention_blocks": [3],
    "window_size_per_stage": [4, 2, 2, 2], "window_positional_embedding_background_size": [4, 4],
}  # fmt: skip
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

CHANGES = {
    **dict.fromkeys(["conditional_detr", "dab-detr", "detr", "table-transformer"], RESNET),
    **dict.fromkeys(["donut-swin", "maskformer-swin", "swin", "swinv2"], WINDOWS),
    **dict.fromkeys(["align_vision_model", "efficientnet"], SCALED),
    **{name: {"pos_embed_rescale": None} for name in ["dinov3_vit", "eomt_dinov3", "sapiens2"]},
    **{name: {"max_text_length": 5} for name in ["slanet", "slanext"]},
    "align": {"projection_dim": 8},
    "bit": {"num_groups": 4},
    "bridgetower_vision_model": {"hidden_size": 64},
    "chmv2": {"post_process_channels": [32] * 4, "backbone_config": {"return_class_token": True}},
    "cvt": {"num_heads": [1, 2, 4], "depth": [1, 2, 3], "embed_dim": [16, 32, 32]},
    "deformable_detr": {"backbone_config": {"model_type": "resnet", "out_indices": [2, 3, 4]}},
    "depth_pro": {"scaled_images_feature_dims": [32, 32, 32], "intermediate_feature_dims": [32, 32], "patch_size": 32, "intermediate_hook_ids": [1, 0]},
    "dinov3_convnext": {"hidden_sizes": [8, 16, 16, 32]},
    "efficientloftr": {"num_attention_heads": 8, "out_features": [8, 16, 16, 32], "stage_num_blocks": [1, 1, 1, 1], "hidden_size": 32},
    "layoutlmv3": {"coordinate_size": 4, "shape_size": 8},
    "levit": {"num_attention_heads": [2, 4, 4], "key_dim": [8, 8, 8], "hidden_sizes": [16, 32, 32], "image_size": 64, "patch_size": 16},
    "lw_detr": {"projector_scale_factors": [1.0]},
    "lw_detr_vit": {"num_windows": 4},
    "mgp-str": {"num_bpe_labels": 99, "num_wordpiece_labels": 99},
    "mobilenet_v1": {"depth_multiplier": 0.25},
    "mobilevitv2": {"image_size": 64},
    "omdet-turbo": {
        "apply_layernorm_after_vision_backbone": False, "class_embed_dim": 48, "text_config": {"hidden_size": 48},
        "text_projection_in_dim": 48, "text_projection_out_dim": 48,
        "backbone_config": {"model_type": "swin", "out_indices": [2, 3, 4]}, "encoder_in_channels": [64, 128, 256],
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
    "seggpt": {"image_size": [64, 32]},
    "superpoint": {"keypoint_decoder_dim": 65},
    "tipsv2_dpt": {"neck_hidden_sizes": [32] * 4},
    "tvp": {"max_img_size": 64, "visual_prompt_size": 8, "num_frames": 2},
    "uvdoc": {"backbone_config": {"out_indices": [1, 2, 3, 4, 5, 6]}},
    "vitmatte": {
        "backbone_config": {"patch_size": 16, "image_size": 64, "num_channels": 4},
        "fusion_hidden_sizes": [32, 32, 16, 16], "convstream_hidden_sizes": [16, 16, 16],
    },
    "xclip_vision_model": {"num_frames": 2},
    "vjepa2": {"frames_per_clip": 4},
}  # fmt: skip

TWO_IMAGES = ["efficientloftr", "lightglue", "superglue"]
VIDEOS = ["timesformer", "videomae", "vivit", "xclip"]
VIDEOS_BY_NAME = ["videoprism", "videoprism_vision_model", "vjepa2"]
LINES = ["pp_ocrv5_server_rec", "pp_ocrv6_small_rec", "pp_ocrv6_tiny_rec"]


def squares(model):
    """Images that are already cut into patches, with a dimension for the sample."""
    patch = field(model, "patch_size")
    return normal(BATCH, GRID**2, field(model, "num_channels", default=3) * patch**2)


def video(model):
    return image(model, field(model, "num_frames", "frames_per_clip", default=2))


# The second image is half as high: the last patches are padding.
RAGGED = {"pixel_values": squares, "pixel_attention_mask": mask(GRID**2, GRID**2 // 2), "spatial_shapes": torch.tensor([[GRID, GRID], [GRID // 2, GRID]])}  # fmt: skip


def _described(model):
    return {"text_features": normal(BATCH, 7, model.config.hidden_size), "text_mask": mask(7).bool()}


def _features(model):
    size = (BATCH, model.config.hidden_size, GRID, GRID)
    return {"vision_features": [normal(*size)], "vision_pos_embeds": [normal(*size)], **_described(model)}


def _queries(model):
    size, shapes = (BATCH, GRID**2, model.config.hidden_size), torch.tensor([[GRID, GRID]])
    seen = {"vision_features": normal(*size), "vision_pos_encoding": normal(*size), "spatial_shapes": shapes}
    return {**seen, **_described(model)}


def _masks(model):
    width = model.config.hidden_size
    return {
        "decoder_queries": normal(BATCH, 10, width),
        "backbone_features": [normal(BATCH, width, GRID * times, GRID * times) for times in (4, 2, 1)],
        "encoder_hidden_states": normal(BATCH, GRID**2, width),
        "prompt_features": normal(BATCH, 7, width),
        "prompt_mask": mask(7).bool(),
    }


INPUTS = {
    **{name: given(pixel_values=lambda model: image(model, 2)) for name in TWO_IMAGES},
    **{name: given(pixel_values=video) for name in VIDEOS},
    **{name: given(pixel_values_videos=video) for name in VIDEOS_BY_NAME},
    **{name: only(pixel_values=normal(BATCH, 3, 48, 128)) for name in LINES},
    **{f"sam3_{which}detr_decoder": _queries for which in ("", "lite_text_")},
    **{f"sam3_{which}detr_encoder": _features for which in ("", "lite_text_")},
    **{f"sam3_{which}mask_decoder": _masks for which in ("", "lite_text_")},
    **{name: given(**RAGGED) for name in ("siglip2", "siglip2_vision_model")},
    "bridgetower_vision_model": only(image=image),
    "depth_pro": only(pixel_values=normal(BATCH, 3, 128, 128)),
    "florence_vision": only(hidden_states=image),
    "omdet-turbo": given(
        classes_input_ids=words, classes_attention_mask=mask(7), tasks_input_ids=words, tasks_attention_mask=mask(7),
        classes_structure=torch.ones(BATCH, dtype=torch.long),
    ),
    "oneformer": given(task_inputs=lambda model: normal(BATCH, model.config.task_seq_len)),
    "pp_ocrv5_mobile_rec": only(pixel_values=normal(BATCH, 3, 96, 128)),
    "seggpt": only(**{name: normal(BATCH, 3, 32, 32) for name in ("pixel_values", "prompt_pixel_values", "prompt_masks")}),
    # Its positions are made for a batch of one.
    "tvp": only(input_ids=whole(40, 90, 1, 7), attention_mask=mask(7)[1:], pixel_values=normal(1, 2, 3, 64, 64)),
    "uvdoc": only(pixel_values=normal(BATCH, 3, 128, 128)),
    "videomt": only(pixel_values_videos=video),
    "vit_mae": given(noise=normal(BATCH, GRID**2)),
    "xclip_vision_model": only(pixel_values=lambda model: video(model).flatten(0, 1)),
}  # fmt: skip
