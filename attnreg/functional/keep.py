"""What to keep: drawn at random, by rank, or by a structure."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from attnreg.errors import InputError


def sample_keep(
    logits: Tensor,
    shape: Sequence[int] | None = None,
    *,
    uniform: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""Draw hard keep decisions with logistic (Gumbel-difference) noise, as AttendOut does (arXiv 2104.04692, 4.1).

    .. math::
        d = [\,s + \mathrm{logit}(u) > 0\,] = [\,u > \sigma(-s)\,], \quad u \sim U(0, 1), \qquad P(d = 1) = \sigma(s)

    The logits of keeping must broadcast to ``shape`` (default: their own), the shape of the decisions and of u.

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
    """Draw hard keep decisions that drop windows along the last dimension, as :class:`attnreg.DropAttention` does.

    ``uniform`` has a number for each seed: in ``shape``, with ``window - 1`` more in the last dimension.

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

    u and the decisions have the ``shape`` ``(B, H)``.

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

    In ``valid``, bool, ``(B, T)``, ``True`` is a token, which j counts, and ``False`` padding, which is kept. At the
    tokens in ``starts``, likewise, a span may begin; it begins earlier where it would not fit, and anywhere without
    any. The places follow from ``uniform``, ``(B, 1)``.

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
    r"""Draw hard decisions twice, once from noise u and once from its opposite, 1 - u (ARM, arXiv 1807.11143).

    .. math:: d^{(1)} = [\,u > \sigma(-\phi)\,], \quad d^{(2)} = [\,u < \sigma(\phi)\,], \qquad
              P(d^{(1)} = 1) = P(d^{(2)} = 1) = \sigma(\phi)

    Example:
        >>> first, second = opposite_draws(torch.tensor(0.0), torch.tensor([0.2, 0.7]))
        >>> first.tolist(), second.tolist()
        ([False, True], [True, False])
    """
    return uniform > torch.sigmoid(-logits), uniform < torch.sigmoid(logits)


def rescaled_heads(keep: Tensor) -> Tensor:
    """Compute factors of heads, float32, ``(B, H)``, that scale the kept ones up, so that those of a sample sum to H.

    Each sample must ``keep`` at least one head, bool, ``(B, H)``.

    Example:
        >>> rescaled_heads(torch.tensor([[True, False, True, False]]))
        tensor([[2., 0., 2., 0.]])
    """
    return keep.float() * (keep.shape[1] / keep.sum(1, keepdim=True))


def head_importance(attribution: Tensor) -> Tensor:
    """Compute each head's importance, ``(H,)``, in float32 or wider, as :class:`attnreg.HeadMask` defines it.

    Args:
        attribution: ``(B, H, Q, K)``, the attention weights times the score's gradient with respect to them.

    Example:
        >>> head_importance(torch.tensor([[[[1.0, -3.0]], [[0.5, 0.5]]]]))
        tensor([2., 1.])
    """
    return attribution.sum((0, 2, 3), dtype=torch.promote_types(attribution.dtype, torch.float32)).abs()


def without_top(values: Tensor, n: int) -> Tensor:
    """Keep all but the n highest of some values, ``(H,)``; ties are broken arbitrarily.

    Example:
        >>> without_top(torch.tensor([0.1, 0.7, 0.3]), 1)
        tensor([ True, False,  True])
    """
    return torch.ones_like(values, dtype=torch.bool).scatter(0, values.topk(n).indices, False)


def window_mask(length: int, distance: int, *, device: torch.device | str | None = None) -> Tensor:
    """Keep pairs of positions of a sequence of N that are at most a distance apart; bool, ``(N, N)``.

    Example:
        >>> window_mask(3, 1).int()
        tensor([[1, 1, 0],
                [1, 1, 1],
                [0, 1, 1]], dtype=torch.int32)
    """
    places = torch.arange(length, device=device)
    return (places[:, None] - places).abs() <= distance


def ancestor_mask(parents: Tensor) -> Tensor:
    """Keep, for each word of a parse, the word itself and its ancestors (SG-Net, AAAI 2020, arXiv 1908.05147).

    ``parents``, long, ``(..., N)``, is the position of each word's head, -1 where it has none (a root, padding); any
    other raises ``InputError``. Returns bool, ``(..., N, N)``.

    Example:
        >>> ancestor_mask(torch.tensor([1, 2, -1])).int()
        tensor([[1, 1, 1],
                [0, 1, 1],
                [0, 0, 1]], dtype=torch.int32)
    """
    length = parents.shape[-1]
    if ((parents < -1) | (parents >= length)).any():
        raise InputError(f"Expected `parents` in -1..{length - 1}, got {parents.tolist()}.")
    reached = F.one_hot(parents + 1, length + 1)[..., 1:].float()
    reached = (reached + torch.eye(length, device=parents.device)).clamp(max=1)
    for _ in range((length - 1).bit_length()):  # each product doubles the length of the paths
        reached = (reached @ reached).clamp(max=1)
    return reached > 0
