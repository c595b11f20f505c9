"""Independent keep-or-drop decisions: drawing them, their log-probability, their rate."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def sample_keep(
    logits: Tensor, shape: Sequence[int] | None = None, *, generator: torch.Generator | None = None
) -> Tensor:
    r"""Draw hard keep decisions with logistic (Gumbel-difference) noise.

    .. math::
        d = [\,s + \mathrm{logit}(u) > 0\,] = [\,u > \sigma(-s)\,], \quad u \sim U(0, 1), \qquad P(d = 1) = \sigma(s)

    Args:
        logits: any shape, the logits of keeping.
        shape: of the decisions, to which ``logits`` can be broadcast; their own by default.
        generator: source of randomness; the global one by default, which gradient checkpointing replays.

    Returns:
        bool, of that shape, ``True`` = kept.

    Reference:
        AttendOut (arXiv 2104.04692), Section 4.1.

    Example:
        >>> sample_keep(torch.tensor([-100.0, 100.0]))
        tensor([False,  True])
    """
    shape = logits.shape if shape is None else shape
    uniform = torch.rand(shape, dtype=logits.dtype, device=logits.device, generator=generator)
    return uniform > torch.sigmoid(-logits)


def sample_windows(
    shape: Sequence[int],
    p: float,
    window: int = 1,
    *,
    device: torch.device | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""Draw hard keep decisions of which neighbours along the last dimension are dropped together.

    .. math:: d_j = \prod_{i = j-w+1}^{j} (1 - s_i), \quad s_i \sim \mathrm{Bernoulli}(p / w), \qquad
              P(d_j = 0) = 1 - (1 - p / w)^w

    Seeds before the first position count, so that this is the rate everywhere.

    Args:
        shape: of the decisions.
        p: the rate at which units would be dropped if windows did not overlap, in ``[0, 1]``.
        window: w, how many units a seed drops: itself and those after it.
        device: where they are wanted.
        generator: source of randomness; the global one by default, which gradient checkpointing replays.

    Returns:
        bool, of that shape, ``True`` = kept.

    Reference:
        DropAttention (arXiv 1907.11065).

    Example:
        >>> sample_windows((2, 3), p=1.0)
        tensor([[False, False, False],
                [False, False, False]])
    """
    seeds = (*shape[:-1], shape[-1] + window - 1)
    kept = torch.rand(seeds, device=device, generator=generator) >= p / window
    return kept if window == 1 else kept.unfold(-1, window, 1).all(-1)


def bernoulli_log_prob(logits: Tensor, keep: Tensor, valid: Tensor, draws: int = 1) -> Tensor:
    r"""Mean log-probability of the decisions taken, over the units that count.

    .. math:: \log P(a) = \frac{1}{n} \sum_{ij \in \text{valid}} \log P(d_{ij}), \qquad P(d_{ij} = 1) = \sigma(s_{ij})

    Since :math:`\log\sigma(-s) = \log\sigma(s) - s`, several draws from the same logits need no more than their number
    and how many of them kept the unit.

    Args:
        logits: ``(B, ...)``, the logits of keeping.
        keep: bool, the shape of ``logits``: the decisions taken; or how many of the draws kept each unit.
        valid: bool, broadcastable to ``logits``: the units that count.
        draws: number of decisions taken with each logit.

    Returns:
        ``(B,)``; 0 for a sample in which no unit counts.

    Reference:
        AttendOut (arXiv 2104.04692), Eq. 5.

    Example:
        >>> bernoulli_log_prob(torch.zeros(1, 2, 2), torch.tensor([[[True, False], [True, True]]]), torch.tensor(True))
        tensor([-0.6931])
    """
    per_unit = draws * F.logsigmoid(logits) - (draws - keep.to(logits.dtype)) * logits
    valid = valid.expand(logits.shape)
    total = per_unit.masked_fill(~valid, 0.0).flatten(1).sum(1)
    return total / (draws * valid.flatten(1).sum(1)).clamp(min=1)


def bernoulli_entropy(logits: Tensor) -> Tensor:
    r"""Entropy of decisions, in nats.

    .. math:: H(p) = -p \log p - (1 - p) \log (1 - p), \qquad p = \sigma(s)

    Args:
        logits: s, any shape.

    Returns:
        that shape; differentiable also where p is all but 0 or 1.

    Example:
        >>> bernoulli_entropy(torch.tensor([0.0, 200.0]))
        tensor([0.6931, 0.0000])
    """
    return F.softplus(logits) - logits * torch.sigmoid(logits)


def bernoulli_kl(logits: Tensor, prior: float) -> Tensor:
    r"""Kullback-Leibler divergence of decisions from a prior.

    .. math:: p \log\frac{p}{p_0} + (1 - p) \log\frac{1 - p}{1 - p_0}, \qquad p = \sigma(s)

    Args:
        logits: s, any shape.
        prior: :math:`p_0`, in ``(0, 1)``.

    Returns:
        that shape.

    Example:
        >>> bernoulli_kl(torch.tensor([0.0, 200.0]), prior=0.5)
        tensor([0.0000, 0.6931])
    """
    cross = F.softplus(logits.new_tensor(prior).logit()) - torch.sigmoid(logits) * logits.new_tensor(prior).logit()
    return cross - bernoulli_entropy(logits)


def drop_rate(keep: Tensor, units: Tensor | None = None, *, by_head: bool = False) -> Tensor:
    """Share of dropped units.

    Args:
        keep: bool, or a factor that is 0 where dropped, broadcastable to ``(B, H, Q, K)``.
        units: bool, broadcastable with ``keep``: the units that count; ``None`` means all.
        by_head: one rate for each head of ``keep``, ``(B, H, Q, K)``.

    Returns:
        0-d float32 tensor in ``[0, 1]``, or ``(H,)`` of them; 0 where no unit counts.

    Example:
        >>> drop_rate(torch.tensor([True, False, False]), torch.tensor([True, True, False]))
        tensor(0.5000)
    """
    dropped = keep == 0
    if units is not None:
        dropped, units = torch.broadcast_tensors(dropped, units)
    dims = (0, 2, 3) if by_head else tuple(range(dropped.dim()))
    if units is None:
        return dropped.sum(dims) / (dropped.numel() // (dropped.shape[1] if by_head else 1))
    return (dropped & units).sum(dims) / units.sum(dims).clamp(min=1)
