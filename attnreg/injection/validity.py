"""What a model's own mask forbids."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Additive masks are written as -inf, finfo.min, -1e30 or -1e4; honest scores and biases stay far above this.
FORBIDDEN_BELOW = -5e3
# Others are written as -100 (Swin) or -1000. Such a value lies this far below the highest of its row, and is parted
# from those that do not by at least that gap, in every head. ALiBi's slopes go as far down, but leave no gap.
REACH = 50.0
GAP = 30.0


def allowed(additive: Tensor) -> Tensor:
    """The positions that an additive mask leaves open.

    Args:
        additive: ``(B, H, Q, K)``, the mask, or scores that it was added to; fewer dimensions broadcast.

    Returns:
        bool, of the same shape.

    Example:
        >>> allowed(torch.tensor([[0.0, 2.0, -100.0], [0.0, -1e4, -float("inf")], [0.0, -20.0, -45.0]]))
        tensor([[ True,  True, False],
                [ True, False, False],
                [ True,  True,  True]])
    """
    additive = additive.detach()
    open_ = additive > FORBIDDEN_BELOW
    unknown = additive.is_cuda or torch.compiler.is_compiling() or transformed()  # looking costs time, or cannot be
    if not unknown and not bool((open_ & (additive < -REACH)).any()):
        return open_
    highest = additive.amax(-1, keepdim=True)
    far = open_ & (additive < highest - REACH)
    nearest = additive.masked_fill(~open_ | far, math.inf).amin(-1, keepdim=True)
    farthest = additive.masked_fill(~far, -math.inf).amax(-1, keepdim=True)
    forbidden = far & (farthest < nearest - GAP)
    if forbidden.dim() > 2:
        forbidden = forbidden.all(-3, keepdim=True)
    return open_ & ~forbidden


def transformed() -> bool:
    """Whether a function transform such as ``vmap`` is running, in which values cannot be looked at."""
    return torch._C._functorch.peek_interpreter_stack() is not None


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
        valid, bias = allowed(attn_mask), attn_mask
    if is_causal:
        causal = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        valid = causal if valid is None else valid & causal
    return valid, bias
