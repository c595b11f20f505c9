"""Which positions of an attention matrix count, and where sequences begin."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def units(valid: Tensor, shape: Sequence[int], *, self_attention: bool = True) -> Tensor:
    """Select the valid positions of real query rows, which drop rates and log-probabilities count.

    A model's mask forbids padding *keys* but does not mask the rows of padding *queries*. In self-attention, a query is
    padding if no query may attend to the key at its position. Rows of padding do not count, nor do rows without a valid
    key.

    Args:
        valid: bool, broadcastable to ``(B, H, Q, K)``, ``True`` = allowed by the model.
        shape: ``(B, H, Q, K)``.
        self_attention: whether queries and keys are the same sequence.

    Returns:
        bool, broadcastable to ``(B, H, Q, K)``.

    Example:
        >>> units(torch.tensor([True, False]).view(1, 1, 1, 2), (1, 1, 2, 2)).int()[0, 0]
        tensor([[1, 0],
                [0, 0]], dtype=torch.int32)
    """
    valid = torch.atleast_2d(valid)
    if not self_attention or shape[-2] != shape[-1]:
        return valid
    keys = valid.any(-2).expand(*valid.shape[:-2], shape[-1])
    if valid.dim() == 4:
        keys = keys.any(-2, keepdim=True)  # a position is padding for all heads
    return valid & keys.unsqueeze(-1)


def sequence_starts(valid: Tensor | None, shape: Sequence[int], *, self_attention: bool = True) -> Tensor:
    """Find where sequences begin, also after left padding and in rows that pack several sequences.

    In self-attention, a sequence begins at each position whose first allowed key is that position itself. In other
    attention, it begins at the first key that any query may attend to.

    Args:
        valid: bool, broadcastable to ``(B, H, Q, K)``, ``True`` = allowed by the model; ``None`` means all.
        shape: ``(B, H, Q, K)``.
        self_attention: whether queries and keys are the same sequence.

    Returns:
        bool, ``(B, K)``.

    Example:
        >>> left_padded = torch.tensor([False, True, True]).view(1, 1, 1, 3)
        >>> sequence_starts(left_padded, (1, 2, 3, 3))
        tensor([[False,  True, False]])
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
    first = valid.int().argmax(-1).expand(-1, queries)  # the first allowed key of each query
    return ((first == positions) & valid.any(-1)).expand(batch, keys)
