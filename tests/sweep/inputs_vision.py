"""What models of images and videos take, where it does not follow from names."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.sweep.inputs import BATCH, GRID, Inputs, field, given, image, mask, normal, only, whole, words

TWO_IMAGES = ["efficientloftr", "lightglue", "superglue"]
VIDEOS = ["timesformer", "videomae", "vivit", "xclip"]


def squares(model: nn.Module) -> Tensor:
    """Images that are already cut into patches, with a dimension for the sample."""
    patch = field(model, "patch_size")
    return normal(BATCH, GRID**2, field(model, "num_channels", default=3) * patch**2)


def video(model: nn.Module) -> Tensor:
    return image(model, field(model, "num_frames", "frames_per_clip", default=2))


# The second image is half as high: the last patches are padding.
RAGGED = {"pixel_values": squares, "pixel_attention_mask": mask(GRID**2, GRID**2 // 2), "spatial_shapes": torch.tensor([[GRID, GRID], [GRID // 2, GRID]])}  # fmt: skip


def _features(model: nn.Module) -> Inputs:
    width = model.config.hidden_size
    return {
        "vision_features": [normal(BATCH, width, GRID, GRID)],
        "vision_pos_embeds": [normal(BATCH, width, GRID, GRID)],
        "text_features": normal(BATCH, 7, width),
        "text_mask": mask(7).bool(),
    }


def _queries(model: nn.Module) -> Inputs:
    width = model.config.hidden_size
    return {
        "vision_features": normal(BATCH, GRID**2, width),
        "vision_pos_encoding": normal(BATCH, GRID**2, width),
        "text_features": normal(BATCH, 7, width),
        "text_mask": mask(7).bool(),
        "spatial_shapes": torch.tensor([[GRID, GRID]]),
    }


def _masks(model: nn.Module) -> Inputs:
    width = model.config.hidden_size
    return {
        "decoder_queries": normal(BATCH, 10, width),
        "backbone_features": [normal(BATCH, width, GRID * times, GRID * times) for times in (4, 2, 1)],
        "encoder_hidden_states": normal(BATCH, GRID**2, width),
        "prompt_features": normal(BATCH, 7, width),
        "prompt_mask": mask(7).bool(),
    }


INPUTS: dict[str, Callable[[nn.Module], Inputs]] = {
    **{name: given(pixel_values=lambda model: image(model, 2)) for name in TWO_IMAGES},
    **{name: given(pixel_values=video) for name in VIDEOS},
    "bridgetower_vision_model": only(image=image),
    "depth_pro": only(pixel_values=normal(BATCH, 3, 128, 128)),
    "florence_vision": only(hidden_states=image),
    "omdet-turbo": given(
        classes_input_ids=words,
        classes_attention_mask=mask(7),
        tasks_input_ids=words,
        tasks_attention_mask=mask(7),
        classes_structure=torch.ones(BATCH, dtype=torch.long),
    ),
    "oneformer": given(task_inputs=lambda model: normal(BATCH, model.config.task_seq_len)),
    "pp_ocrv5_mobile_rec": only(pixel_values=normal(BATCH, 3, 96, 128)),
    "pp_ocrv5_server_rec": only(pixel_values=normal(BATCH, 3, 48, 128)),
    "pp_ocrv6_small_rec": only(pixel_values=normal(BATCH, 3, 48, 128)),
    "pp_ocrv6_tiny_rec": only(pixel_values=normal(BATCH, 3, 48, 128)),
    "sam3_detr_decoder": _queries,
    "sam3_detr_encoder": _features,
    "sam3_lite_text_detr_decoder": _queries,
    "sam3_lite_text_detr_encoder": _features,
    "sam3_lite_text_mask_decoder": _masks,
    "sam3_mask_decoder": _masks,
    "seggpt": only(**{name: normal(BATCH, 3, 32, 32) for name in ("pixel_values", "prompt_pixel_values", "prompt_masks")}),
    "siglip2": given(**RAGGED),
    "siglip2_vision_model": given(**RAGGED),
    # Its positions are made for a batch of one.
    "tvp": only(input_ids=whole(40, 90, 1, 7), attention_mask=mask(7)[1:], pixel_values=normal(1, 2, 3, 64, 64)),
    "uvdoc": only(pixel_values=normal(BATCH, 3, 128, 128)),
    "videomt": only(pixel_values_videos=video),
    "videoprism": given(pixel_values_videos=video),
    "videoprism_vision_model": given(pixel_values_videos=video),
    "vit_mae": given(noise=normal(BATCH, GRID**2)),
    "vjepa2": given(pixel_values_videos=video),
    "xclip_vision_model": only(pixel_values=lambda model: video(model).flatten(0, 1)),
}  # fmt: skip
