"""Independent keep-or-drop decisions: sampling, log-probability, entropy and drop rate."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
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


def bernoulli_log_prob(logits: Tensor, keep: Tensor, valid: Tensor, draws: int = 1) -> Tensor:
    r"""Compute the mean log-probability of decisions over the valid units.

    .. math:: \log P(a) = \frac{1}{n} \sum_{ij \in \text{valid}} \log P(d_{ij}), \qquad P(d_{ij} = 1) = \sigma(s_{ij})

    Since :math:`\log\sigma(-s) = \log\sigma(s) - s`, several draws from the same logits need only their number and the
    number of them that kept each unit.

    Args:
        logits: ``(B, ...)``, the logits of keeping.
        keep: the decisions, bool, in the shape of ``logits``; for several draws, how many of them kept each unit.
        valid: bool, broadcastable to ``logits``: the units to count.
        draws: number of draws from each logit.

    Returns:
        ``(B,)``; 0 for a sample without valid units.

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
    r"""Compute the entropy of decisions, in nats.

    .. math:: H(p) = -p \log p - (1 - p) \log (1 - p), \qquad p = \sigma(s)

    Args:
        logits: s, any shape.

    Returns:
        the shape of ``logits``; differentiable even where p is close to 0 or 1.

    Example:
        >>> bernoulli_entropy(torch.tensor([0.0, 200.0]))
        tensor([0.6931, 0.0000])
    """
    return F.softplus(logits) - logits * torch.sigmoid(logits)


def bernoulli_kl(logits: Tensor, prior: float) -> Tensor:
    r"""Compute the Kullback-Leibler divergence of decisions from a prior.

    .. math:: p \log\frac{p}{p_0} + (1 - p) \log\frac{1 - p}{1 - p_0}, \qquad p = \sigma(s)

    Args:
        logits: s, any shape.
        prior: :math:`p_0`, in ``(0, 1)``.

    Returns:
        the shape of ``logits``.

    Example:
        >>> bernoulli_kl(torch.tensor([0.0, 200.0]), prior=0.5)
        tensor([0.0000, 0.6931])
    """
    cross = F.softplus(logits.new_tensor(prior).logit()) - torch.sigmoid(logits) * logits.new_tensor(prior).logit()
    return cross - bernoulli_entropy(logits)


def drop_rate(keep: Tensor, units: Tensor | None = None, *, by_head: bool = False) -> Tensor:
    """Compute the share of dropped units.

    Args:
        keep: bool, or a factor that is 0 where dropped, broadcastable to ``(B, H, Q, K)``.
        units: bool, broadcastable with ``keep``: the units to count; ``None`` means all.
        by_head: return one rate for each head; ``keep`` must then have the dimensions ``(B, H, Q, K)``.

    Returns:
        float32 in ``[0, 1]``, 0-d, or ``(H,)`` with ``by_head``; 0 if there is no unit to count.

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
