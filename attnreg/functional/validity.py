"""Which positions of an attention matrix count, which a model forbids, and where sequences begin."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from attnreg.functional.seeded import is_traced

# Most additive masks hold -inf, finfo.min, -1e30 or -1e4. Real scores and biases stay far above this limit.
FORBIDDEN_BELOW = -5e3
# Some hold -100 (Swin) or -1000. Such a value is at least REACH below the highest of its row, and a gap of at least GAP
# separates it from the allowed values, in every head. ALiBi's slopes reach as low, but leave no gap.
REACH = 50.0
GAP = 30.0


def allowed(additive: Tensor) -> Tensor:
    """Return the positions that an additive mask allows, from the mask or from masked scores, ``(B, H, Q, K)``."""
    additive = additive.detach()
    open_ = additive > FORBIDDEN_BELOW
    if not has_low(additive):
        return open_
    highest = additive.amax(-1, keepdim=True)
    far = open_ & (additive < highest - REACH)
    nearest = additive.masked_fill(~open_ | far, math.inf).amin(-1, keepdim=True)
    farthest = additive.masked_fill(~far, -math.inf).amax(-1, keepdim=True)
    forbidden = far & (farthest < nearest - GAP)
    if forbidden.dim() > 2:
        forbidden = forbidden.all(-3, keepdim=True)
    return open_ & ~forbidden


def has_low(additive: Tensor) -> bool:
    """Whether there may be values from -5000 to -50, which can be scores or a mask."""
    if additive.is_cuda or is_traced():  # reading values is slow or impossible
        return True
    return bool(((additive > FORBIDDEN_BELOW) & (additive < -REACH)).any())


def units(valid: Tensor, shape: Sequence[int], *, self_attention: bool = True) -> Tensor:
    """Select the valid positions of real query rows, which drop rates and log-probabilities count.

    A model's mask forbids padding *keys* but does not mask the rows of padding *queries*. In self-attention, a query is
    padding if no query may attend to the key at its position. Rows of padding or without a valid key do not count.

    Without ``self_attention``, queries and keys are different sequences. Returns bool, broadcastable to ``shape``.

    Example:
        >>> units(torch.tensor([True, False]).view(1, 1, 1, 2), (1, 1, 2, 2)).int()[0, 0]
        tensor([[1, 0],
                [0, 0]], dtype=torch.int32)
    """
    valid = torch.atleast_2d(valid)
    if not self_attention or shape[-2] != shape[-1]:
        return valid
    keys = valid.any(-2).expand(*valid.shape[:-2], shape[-1])
    if len(shape) == 4 and valid.dim() > 2:
        keys = keys.any(-2, keepdim=True)  # a position is padding for all heads
    return valid & keys.unsqueeze(-1)


def summed(units: Tensor | None, shape: Sequence[int], like: Sequence[int]) -> Tensor | int:
    """Count units, bool, broadcastable to ``shape``, for every position of a tensor of shape ``like``."""
    like = (*[1] * (len(shape) - len(like)), *like)
    shared = [dim for dim, size in enumerate(like) if size == 1]
    if units is None:
        return math.prod(shape[dim] for dim in shared)
    units = units.view(*[1] * (len(shape) - units.dim()), *units.shape)
    times = math.prod(shape[dim] for dim in shared if units.shape[dim] == 1)
    counts = units.sum(shared, keepdim=True) * times if shared else units
    return counts.reshape(()) if len(shared) == len(shape) else counts


def sequence_starts(valid: Tensor | None, shape: Sequence[int], *, self_attention: bool = True) -> Tensor:
    """Find where sequences begin, bool, ``(B, K)``, also after left padding and in rows that pack several sequences.

    In self-attention, a sequence begins at a position whose first allowed key is that position itself. In other
    attention, it begins at the first key that any query may attend to. Arguments are as in :func:`units`.

    Example:
        >>> packed = torch.block_diag(torch.ones(1, 1), torch.ones(2, 2)).bool()
        >>> sequence_starts(packed, (1, 2, 3, 3))
        tensor([[ True,  True, False]])
    """
    batch, _, queries, keys = shape
    if valid is None:
        return (torch.arange(keys) == 0).expand(batch, keys)
    valid = torch.atleast_2d(valid)
    valid = valid.reshape(*[1] * (4 - valid.dim()), *valid.shape).any(1)
    positions = torch.arange(keys, device=valid.device)
    if not self_attention or queries != keys:
        seen = valid.any(-2)
        return ((positions == seen.int().argmax(-1, keepdim=True)) & seen).expand(batch, keys)
    first = valid.int().argmax(-1).expand(-1, queries)  # the first allowed key of a query
    return ((first == positions) & valid.any(-1)).expand(batch, keys)


def mean_over(values: Tensor, units: Tensor | None) -> Tensor:
    """Return the mean of the values at valid units (``None`` means all), 0-d; 0 without units."""
    if units is None:
        return values.mean()
    units = units.expand(values.shape)
    return values.masked_fill(~units, 0.0).sum() / units.sum().clamp(min=1)
