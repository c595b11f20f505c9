"""Drawing what to keep: single units, windows, heads, spans of tokens, and two opposite draws."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def sample_keep(
    logits: Tensor,
    shape: Sequence[int] | None = None,
    *,
    uniform: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""Draw hard keep decisions with logistic (Gumbel-difference) noise.

    .. math::
        d = [\,s + \mathrm{logit}(u) > 0\,] = [\,u > \sigma(-s)\,], \quad u \sim U(0, 1), \qquad P(d = 1) = \sigma(s)

    Args:
        logits: logits of keeping, any shape.
        shape: shape of the decisions, to which ``logits`` must broadcast (default: the shape of ``logits``).
        uniform: u, in this shape (default: drawn here).
        generator: source of randomness (default: torch's global generator).

    Returns:
        bool, in this shape, ``True`` = kept.

    Reference:
        AttendOut (arXiv 2104.04692), Section 4.1.

    Example:
        >>> sample_keep(torch.tensor([-100.0, 100.0]))
        tensor([False,  True])
    """
    shape = logits.shape if shape is None else shape
    if uniform is None:
        uniform = torch.rand(shape, dtype=logits.dtype, device=logits.device, generator=generator)
    return uniform > torch.sigmoid(-logits)


def sample_windows(
    shape: Sequence[int],
    p: float,
    window: int = 1,
    *,
    uniform: Tensor | None = None,
    device: torch.device | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""Draw hard keep decisions that drop windows of neighbours along the last dimension.

    .. math:: d_j = \prod_{i = j-w+1}^{j} (1 - s_i), \quad s_i \sim \mathrm{Bernoulli}(p / w), \qquad
              P(d_j = 0) = 1 - (1 - p / w)^w

    Windows may begin before the first position, so all positions have the same drop rate.

    Args:
        shape: shape of the decisions.
        p: drop rate that windows would have if they did not overlap, in ``[0, 1]``.
        window: w, the number of units that a seed drops: its own and the ``w - 1`` after it.
        uniform: numbers in ``[0, 1)``, one for each seed: in ``shape``, with ``window - 1`` more in the last dimension
            (default: drawn here).
        device: device of the decisions.
        generator: source of randomness (default: torch's global generator).

    Returns:
        bool, in this shape, ``True`` = kept.

    Reference:
        DropAttention (arXiv 1907.11065).

    Example:
        >>> sample_windows((2, 3), p=1.0)
        tensor([[False, False, False],
                [False, False, False]])
    """
    if uniform is None:
        seeds = (*shape[:-1], shape[-1] + window - 1)
        uniform = torch.rand(seeds, device=device, generator=generator)
    kept = uniform >= p / window
    return kept if window == 1 else kept.unfold(-1, window, 1).all(-1)


def sample_heads(
    p: float | Tensor,
    shape: tuple[int, int],
    *,
    uniform: Tensor | None = None,
    device: torch.device | str | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""Drop each head of a sample with probability p, but never all of them.

    .. math:: \xi_{bh} = [\,u_{bh} \ge \min(p, \max_{h'} u_{bh'})\,], \quad u \sim U(0, 1)

    If all heads would be dropped, the one with the largest u is kept, which is each head with probability 1/H. A head
    is therefore kept with probability :math:`1 - p + p^H / H`, and one head is kept even at p = 1.

    Args:
        p: drop probability, in ``[0, 1]``.
        shape: ``(B, H)``.
        uniform: u, ``(B, H)`` (default: drawn here).
        device: device of the decisions.
        generator: source of randomness (default: torch's global generator).

    Returns:
        bool, ``(B, H)``, ``True`` = kept.

    Example:
        >>> sample_heads(1.0, (3, 8)).sum(1)
        tensor([1, 1, 1])
    """
    if uniform is None:
        uniform = torch.rand(shape, device=device, generator=generator)
    largest = uniform.amax(1, keepdim=True)
    return uniform >= torch.minimum(largest, torch.as_tensor(p, dtype=uniform.dtype, device=uniform.device))


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


def opposite_draws(logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    r"""Draw hard decisions twice, once from noise u and once from its opposite, 1 - u.

    .. math:: d^{(1)} = [\,u > \sigma(-\phi)\,], \quad d^{(2)} = [\,u < \sigma(\phi)\,], \qquad
              P(d^{(1)} = 1) = P(d^{(2)} = 1) = \sigma(\phi)

    Args:
        logits: :math:`\phi`, broadcastable to ``uniform``.
        uniform: u, drawn from ``[0, 1)``.

    Returns:
        both draws, bool.

    Reference:
        ARM (arXiv 1807.11143).

    Example:
        >>> first, second = opposite_draws(torch.tensor(0.0), torch.tensor([0.2, 0.7]))
        >>> first.tolist(), second.tolist()
        ([False, True], [True, False])
    """
    return uniform > torch.sigmoid(-logits), uniform < torch.sigmoid(logits)
