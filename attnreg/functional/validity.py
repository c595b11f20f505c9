"""Which positions of an attention matrix count."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def units(valid: Tensor, shape: Sequence[int], *, self_attention: bool = True) -> Tensor:
    """Valid positions of real query rows: the ones that drop rates and log-probabilities count.

    A model's mask forbids padding *keys* but leaves the rows of padding *queries* as they are. In self-attention a
    query is padding where the same position is a key that nobody may attend to; such rows do not count, and neither
    do rows without a valid key.

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
    """Where sequences begin: at the first position, the first after left padding, and wherever a packed one begins.

    In self-attention a sequence begins at a position that is the first that it may attend to itself. In other attention
    it begins at the first key that any query may attend to.

    Args:
        valid: bool, broadcastable to ``(B, H, Q, K)``, ``True`` = allowed by the model; ``None`` for all.
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
    first = valid.int().argmax(-1).expand(-1, queries)  # of each query
    return ((first == positions) & valid.any(-1)).expand(batch, keys)
