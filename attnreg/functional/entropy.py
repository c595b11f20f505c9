"""The entropy of attention."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def attention_entropy(scores: Tensor, valid: Tensor | None = None) -> Tensor:
    r"""Compute the entropy of each row of attention weights, from its scores.

    .. math:: H_i = -\sum_j A_{ij} \log A_{ij}, \qquad A_i = \mathrm{softmax}(S_i \text{ where valid})

    Args:
        scores: ``(B, H, Q, K)``, S.
        valid: bool, broadcastable to ``(B, H, Q, K)``, ``True`` = allowed by the model.

    Returns:
        ``(B, H, Q)``, in float32 or wider; 0 in rows without a valid key.

    Example:
        >>> attention_entropy(torch.zeros(2, 4), torch.tensor([[True, True, False, False], [True] * 4]))
        tensor([0.6931, 1.3863])
    """
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if valid is None:
        logs = scores.log_softmax(-1)
        return -(logs.exp() * logs).sum(-1)
    valid = torch.atleast_2d(valid)
    orphan = ~valid.any(-1, keepdim=True)
    logs = scores.masked_fill(orphan, 0.0).masked_fill(~(valid | orphan), -math.inf).log_softmax(-1)
    logs = logs.masked_fill(~valid, 0.0)
    return -(logs.exp() * valid * logs).sum(-1)
