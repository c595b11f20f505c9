"""From the layouts in which models hold attention to ``(B, H, Q, K)`` and back."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Additive masks are written as -inf, finfo.min, -1e30 or -1e4; honest scores and biases stay far above this.
FORBIDDEN_BELOW = -5e3


def split_attention_mask(
    attn_mask: Tensor | None, is_causal: bool, query: Tensor, key: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """What torch's fused attention takes as a mask, as ``(valid, bias)``.

    Args:
        attn_mask: bool or float, broadcastable to ``(..., Q, K)``, or ``None``.
        is_causal: whether only keys up to the query's own position are allowed.
        query: ``(..., Q, D)``.
        key: ``(..., K, D)``.

    Returns:
        valid: bool, ``True`` = allowed, or ``None``; bias: the float mask, or ``None``.
    """
    valid = bias = None
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        valid = attn_mask
    elif attn_mask is not None:
        valid, bias = attn_mask > FORBIDDEN_BELOW, attn_mask
    if is_causal:
        causal = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        valid = causal if valid is None else valid & causal
    return valid, bias


def batch_and_heads(lead: torch.Size, batch_size: int | None) -> tuple[int, int]:
    """Read ``(B, H)`` off the leading dimensions of attention scores.

    Args:
        lead: all dimensions of the scores but the last two; one dimension holds ``B * H``, and of more than two, the
            last is H.
        batch_size: B, where it is known.

    Example:
        >>> batch_and_heads(torch.Size([8]), batch_size=2)
        (2, 4)
    """
    if len(lead) == 1:
        batch = batch_size if batch_size and lead[0] % batch_size == 0 else lead[0]
        return batch, lead[0] // batch
    return math.prod(lead[:-1]), lead[-1]
