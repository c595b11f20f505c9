"""Independent keep-or-drop decisions: drawing them, their log-probability, their rate."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def sample_keep(logits: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
    r"""Draw hard keep decisions with logistic (Gumbel-difference) noise.

    .. math:: d = [\,s + \mathrm{logit}(u) > 0\,], \quad u \sim U(0, 1), \qquad P(d = 1) = \sigma(s)

    Args:
        logits: any shape, the logits of keeping.
        generator: source of randomness; the global one by default, which gradient checkpointing replays.

    Returns:
        bool, the shape of ``logits``, ``True`` = kept.

    Reference:
        AttendOut (arXiv 2104.04692), Section 4.1.

    Example:
        >>> sample_keep(torch.tensor([-100.0, 100.0]))
        tensor([False,  True])
    """
    uniform = torch.rand(logits.shape, dtype=logits.dtype, device=logits.device, generator=generator)
    return logits + torch.logit(uniform) > 0


def bernoulli_log_prob(logits: Tensor, keep: Tensor, valid: Tensor) -> Tensor:
    r"""Mean log-probability of the decisions taken, over the units that count.

    .. math:: \log P(a) = \frac{1}{n} \sum_{ij \in \text{valid}} \log P(d_{ij}), \qquad P(d_{ij} = 1) = \sigma(s_{ij})

    Args:
        logits: ``(B, ...)``, the logits of keeping.
        keep: bool, the shape of ``logits``: the decisions taken.
        valid: bool, broadcastable to ``logits``: the units that count.

    Returns:
        ``(B,)``; 0 for a sample in which no unit counts.

    Reference:
        AttendOut (arXiv 2104.04692), Eq. 5.

    Example:
        >>> bernoulli_log_prob(torch.zeros(1, 2, 2), torch.tensor([[[True, False], [True, True]]]), torch.tensor(True))
        tensor([-0.6931])
    """
    per_unit = F.logsigmoid(torch.where(keep, logits, -logits))
    valid = valid.expand(logits.shape)
    total = per_unit.masked_fill(~valid, 0.0).flatten(1).sum(1)
    return total / valid.flatten(1).sum(1).clamp(min=1)


def drop_rate(keep: Tensor, units: Tensor | None = None) -> Tensor:
    """Share of dropped units.

    Args:
        keep: bool, or a factor that is 0 where dropped, broadcastable to ``(B, H, Q, K)``.
        units: bool, broadcastable with ``keep``: the units that count; ``None`` means all.

    Returns:
        0-d float32 tensor in ``[0, 1]``; 0 where no unit counts.

    Example:
        >>> drop_rate(torch.tensor([True, False, False]), torch.tensor([True, True, False]))
        tensor(0.5000)
    """
    dropped = keep == 0
    if units is None:
        return dropped.count_nonzero() / dropped.numel()
    dropped, units = torch.broadcast_tensors(dropped, units)
    return (dropped & units).count_nonzero() / units.count_nonzero().clamp(min=1)
