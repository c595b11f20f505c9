"""What a Generator reads of a model's inputs: token ids or images, and the positions that attention allows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attnreg.errors import InputError


class TokenInputs:
    """Reads token ids from a model's inputs; ``pad_token_id`` tells padding where there is no ``attention_mask``."""

    def __init__(self, max_length: int, pad_token_id: int | None, *, causal: bool) -> None:
        self.max_length, self.pad_token_id, self.causal = max_length, pad_token_id, causal

    def read(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return the token ids, ``(B, N)``; the choices of multiple choice count as samples."""
        ids = inputs.get("input_ids")
        if ids is None:
            integer = (v for v in inputs.values() if isinstance(v, Tensor) and v.dtype == torch.long and v.dim() > 1)
            ids = next(integer, None)
        if ids is None:
            raise InputError(
                f"The model's inputs {sorted(inputs)} hold no token ids, which G-Net reads: pass `input_ids`."
            )
        if ids.shape[-1] > self.max_length:
            raise InputError(
                f"Expected at most {self.max_length} tokens, got {ids.shape[-1]}: truncate them, or make the G-Net "
                "with a larger `max_length`."
            )
        return ids.reshape(-1, ids.shape[-1])

    def allowed(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return which positions attention allows, bool, ``(B, N, N)``."""
        ids, mask = self.read(inputs), inputs.get("attention_mask")
        if mask is None:
            mask = torch.ones_like(ids) if self.pad_token_id is None else ids != self.pad_token_id
        length = ids.shape[-1]
        if mask.numel() != ids.numel():
            raise InputError(f"Expected `attention_mask` to have the shape of the token ids, got {tuple(mask.shape)}.")
        allowed = mask.reshape(-1, 1, length).bool().expand(-1, length, length)
        return allowed.tril() if self.causal else allowed

    def types(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return the type of each key, ``(B, N)``: its token id."""
        return self.read(inputs)


class ImageInputs:
    """Reads images from a model's inputs, of patches ``(C, height, width)`` after ``before`` other tokens."""

    def __init__(self, patch: Sequence[int], before: int, max_length: int) -> None:
        self.patch, self.before, self.max_length = patch, before, max_length

    def read(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return the images, ``(B, C, height, width)``."""
        pixels = image_in(inputs)
        if pixels is None or pixels.shape[1:2] != (self.patch[0],):
            shape = "none" if pixels is None else tuple(pixels.shape)
            raise InputError(
                f"Expected images of {self.patch[0]} channels, which this G-Net reads, as `pixel_values`, got {shape}."
            )
        if (length := self._length(pixels)) > self.max_length:
            raise InputError(
                f"Expected images of at most {self.max_length} tokens, got {length}: resize them, or make the G-Net "
                "with a larger `max_length`."
            )
        return pixels

    def allowed(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return which positions attention allows, ``(B, N, N)``: all, because none is padding."""
        pixels = self.read(inputs)
        length = self._length(pixels)
        return torch.ones((), dtype=torch.bool, device=pixels.device).expand(len(pixels), length, length)

    def types(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return the type of each key, ``(B, N)``: its position."""
        pixels = self.read(inputs)
        return torch.arange(self._length(pixels), device=pixels.device).expand(len(pixels), -1)

    def _length(self, pixels: Tensor) -> int:
        return self.before + number_of_patches(pixels, *self.patch[1:])


def image_in(inputs: Any) -> Tensor | None:
    """Return the images among a model's inputs, ``(B, C, height, width)``."""
    values = list(inputs.values()) if isinstance(inputs, Mapping) else list(inputs)
    named = inputs.get("pixel_values") if isinstance(inputs, Mapping) else None
    images = (v for v in (named, *values) if isinstance(v, Tensor) and v.is_floating_point() and v.dim() == 4)
    return next(images, None)


def number_of_patches(images: Tensor, height: int, width: int) -> int:
    """Return the number of patches of an image."""
    return (images.shape[-2] // height) * (images.shape[-1] // width)
