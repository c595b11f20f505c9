"""Tell a model's mask of -100 or -1000 from scores that are as low: a mask is seen when it is added."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnreg.functional.validity import FORBIDDEN_BELOW, REACH, allowed, has_low

_ADD = "add", "add_", "__add__", "__radd__", "__iadd__", "sub", "sub_", "__sub__", "__rsub__", "__isub__", "rsub"
_FILL = "masked_fill", "masked_fill_", "where", "__setitem__", "index_fill", "index_fill_", "masked_scatter", "addcmul"
_CUT = "clamp", "clamp_", "clamp_min", "clamp_min_", "clip", "clip_", "maximum", "minimum", "nan_to_num", "nan_to_num_"
_MULTIPLY = "matmul", "__matmul__", "__rmatmul__", "bmm", "einsum", "mm", "tensordot", "inner", "baddbmm", "baddbmm_"


def functions(*names: str) -> frozenset[Any]:
    """Return the functions and methods of torch of these names."""
    return frozenset(getattr(owner, name) for name in names for owner in (torch, Tensor) if hasattr(owner, name))


CUTS = functions(*_CUT)
ADDS = functions(*_ADD, *_FILL, "baddbmm", "baddbmm_") | CUTS
MULTIPLIES = functions(*_MULTIPLY)
ADDS_OR_MULTIPLIES = ADDS | MULTIPLIES


class SoftMasks:
    """Values that may have masked the scores of one module call, but that scores can have, too."""

    def __init__(self) -> None:
        self._has_products = False
        self._added: list[Any] = []

    def note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        """Note a call of one of :data:`ADDS_OR_MULTIPLIES` in the module."""
        if func in MULTIPLIES:
            self._has_products = True
        if func in ADDS:
            values = (*args, *(kwargs or {}).values())
            if not any(isinstance(value, Tensor) and value.is_floating_point() for value in values):
                return  # integers, such as positions
            for value in values:
                # A learned bias is no mask, nor the highest value of a cosine; and scores are not kept in memory.
                is_number = isinstance(value, (float, int)) and (value < 0 or func not in CUTS)
                if is_number or (isinstance(value, Tensor) and not value.requires_grad):
                    self._added.append(value)

    def allowed(self, scores: Tensor) -> Tensor:
        """Return the positions that the model's mask allows, from the scores ``(B, H, Q, K)`` that it changed.

        If a parent module computes the scores, the mask is not seen, and scores far below the others count as masked.
        """
        numbers = [value for value in self._added if not isinstance(value, Tensor)]
        if not self._has_products or any(REACH < abs(number) < -FORBIDDEN_BELOW for number in numbers):
            return allowed(scores)
        open_ = scores.detach() > FORBIDDEN_BELOW
        tensors = [value for value in self._added if isinstance(value, Tensor) and value.dtype != torch.bool]
        if not tensors or not has_low(scores.detach()):
            return open_
        return open_ & (allowed(scores) | ~torch.stack([*map(_is_mask, tensors)]).any())


def _is_mask(added: Tensor) -> Tensor:
    """Whether a tensor holds one or two values that masks have, and no other values so far from 0; 0-d."""
    added = (added.detach() * 1.0).abs()  # in floating point
    far = (added > REACH) & (added < -FORBIDDEN_BELOW)
    low, high = added.masked_fill(~far, torch.inf).amin(), added.masked_fill(~far, 0.0).amax()
    return far.any() & ((added == low) | (added == high) | ~far).all()
