"""Sampling for hidden states."""

from __future__ import annotations

import torch
from torch import Tensor


def sample_spans(
    p: float | Tensor,
    valid: Tensor,
    *,
    starts: Tensor | None = None,
    uniform: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""Drop one span of neighbouring tokens per sample: a share p of its tokens, rounded; padding does not count.

    .. math:: \text{dropped: } s_b \le j < s_b + l_b, \qquad l_b = \lfloor p n_b + \tfrac12 \rfloor, \qquad
        s_b \sim U\{0, \dots, n_b - l_b\}

    Args:
        p: share of the tokens to drop, in ``[0, 1]``.
        valid: bool, ``(B, T)``, ``True`` = a token that is not padding; j counts these.
        starts: bool, ``(B, T)``, the tokens at which a span begins; it begins earlier where it would not fit. ``None``,
            or a sample without any, lets spans begin anywhere.
        uniform: numbers in ``[0, 1)``, ``(B, 1)``, from which the spans' places follow (default: drawn here).
        generator: source of randomness (default: torch's global generator).

    Returns:
        bool, ``(B, T)``, ``True`` = kept; padding is kept.

    Example:
        >>> valid = torch.tensor([[True, True, True, True, False], [True, True, False, False, False]])
        >>> (~sample_spans(0.5, valid)).sum(1)
        tensor([2, 1])
    """
    lengths = valid.sum(1, keepdim=True)
    size = (p * lengths + 0.5).floor()
    if uniform is None:
        uniform = torch.rand(size.shape, device=valid.device, generator=generator)
    start = (uniform * (lengths - size + 1)).floor()
    number = valid.cumsum(1) - 1
    if starts is not None:
        starts = starts & valid
        among = starts.sum(1, keepdim=True)
        drawn = starts & (starts.cumsum(1) - 1 == (uniform * among).floor())
        at = (number * drawn).sum(1, keepdim=True)
        start = torch.where(among > 0, torch.minimum(at, lengths - size), start)
    return ~(valid & (number >= start) & (number < start + size))
