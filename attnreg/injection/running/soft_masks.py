"""Tell a model's own mask of -100 or -1000 from scores that are as low: a mask is seen when it is added."""

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
    return frozenset(getattr(where, name) for name in names for where in (torch, Tensor) if hasattr(where, name))


CUTS = functions(*_CUT)
ADDS = functions(*_ADD, *_FILL, "baddbmm", "baddbmm_") | CUTS
MULTIPLIES = functions(*_MULTIPLY)
ADDS_OR_MULTIPLIES = ADDS | MULTIPLIES


class SoftMasks:
    """What may have masked the scores of one module call with a value that scores themselves can have."""

    def __init__(self) -> None:
        self._makes_scores = False
        self._added: list[Any] = []

    def note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        """Note a call of one of :data:`ADDS_OR_MULTIPLIES` in the module."""
        if func in MULTIPLIES:
            self._makes_scores = True
        if func in ADDS:
            given = (*args, *(kwargs or {}).values())
            if not any(isinstance(each, Tensor) and each.is_floating_point() for each in given):
                return  # of positions, say
            for each in given:
                # A learned bias is no mask, nor the highest value of a cosine; and scores are not kept in memory.
                is_number = isinstance(each, (float, int)) and (each < 0 or func not in CUTS)
                if is_number or (isinstance(each, Tensor) and not each.requires_grad):
                    self._added.append(each)

    def allowed(self, scores: Tensor) -> Tensor:
        """Return the positions that the model's own mask allows, given the scores ``(B, H, Q, K)`` that it changed.

        If a parent module makes the scores, the mask cannot be seen, and scores far below the others count as masked.
        """
        given = [each for each in self._added if not isinstance(each, Tensor)]
        if not self._makes_scores or any(REACH < abs(each) < -FORBIDDEN_BELOW for each in given):
            return allowed(scores)
        open_ = scores.detach() > FORBIDDEN_BELOW
        tensors = [each for each in self._added if isinstance(each, Tensor) and each.dtype != torch.bool]
        if not tensors or not has_low(scores.detach()):
            return open_
        return open_ & (allowed(scores) | ~torch.stack([_is_mask(each) for each in tensors]).any())


def _is_mask(added: Tensor) -> Tensor:
    """Whether a tensor holds one or two values as of a mask, and no others so far from 0; 0-d."""
    added = (added.detach() * 1.0).abs()  # in floating point
    far = (added > REACH) & (added < -FORBIDDEN_BELOW)
    low, high = added.masked_fill(~far, torch.inf).amin(), added.masked_fill(~far, 0.0).amax()
    return far.any() & ((added == low) | (added == high) | ~far).all()
