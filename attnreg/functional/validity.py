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
    return valid & keys.unsqueeze(-1)
