"""Find the positions that a model's own mask allows."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Most additive masks hold -inf, finfo.min, -1e30 or -1e4. Real scores and biases stay far above this limit.
FORBIDDEN_BELOW = -5e3
# Some hold -100 (Swin) or -1000. Such a value is at least REACH below the highest of its row, and a gap of at least GAP
# separates it from the allowed values, in every head. ALiBi's slopes reach as low, but leave no gap.
REACH = 50.0
GAP = 30.0


def allowed(additive: Tensor) -> Tensor:
    """Return the positions that an additive mask allows.

    Args:
        additive: the mask, or scores that it was added to, ``(B, H, Q, K)``; fewer dimensions broadcast.

    Returns:
        bool, of the same shape, ``True`` = allowed.

    Example:
        >>> allowed(torch.tensor([[0.0, 2.0, -100.0], [0.0, -1e4, -float("inf")], [0.0, -20.0, -45.0]]))
        tensor([[ True,  True, False],
                [ True, False, False],
                [ True,  True,  True]])
    """
    additive = additive.detach()
    open_ = additive > FORBIDDEN_BELOW
    unknown = additive.is_cuda or torch.compiler.is_compiling() or transformed()  # reading values is slow or impossible
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
    """Whether a function transform such as ``vmap`` is running, in which tensor values cannot be read."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def split_attention_mask(
    attn_mask: Tensor | None, is_causal: bool, query: Tensor, key: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Split the mask arguments of torch's fused attention into ``(valid, bias)``.

    Args:
        attn_mask: bool or float, broadcastable to ``(..., Q, K)``, or ``None``.
        is_causal: whether each query may attend only to keys up to its own position.
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
