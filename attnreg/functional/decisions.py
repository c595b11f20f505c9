"""Decisions to keep: drawn, relaxed, by rank or by a structure; their probability, entropy and rate."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from attnreg.errors import InputError


def sample_keep(logits: Tensor, uniform: Tensor) -> Tensor:
    r"""Draw hard keep decisions with logistic (Gumbel-difference) noise, as AttendOut does (arXiv 2104.04692, 4.1).

    .. math::
        d = [\,s + \mathrm{logit}(u) > 0\,] = [\,u > \sigma(-s)\,], \quad u \sim U(0, 1), \qquad P(d = 1) = \sigma(s)

    The logits of keeping must broadcast to the shape of u.

    Example:
        >>> sample_keep(torch.tensor([-100.0, 100.0]), uniform=torch.tensor(0.5))
        tensor([False,  True])
    """
    return uniform > torch.sigmoid(-logits)


def sample_windows(uniform: Tensor, p: float, window: int = 1) -> Tensor:
    """Draw hard keep decisions that drop windows along the last dimension, as :class:`attnreg.DropAttention` does.

    Every number of ``uniform`` may begin a window; there are ``window - 1`` more in the last dimension than decisions.

    Example:
        >>> sample_windows(torch.tensor([0.9, 0.1, 0.9, 0.9]), p=0.4, window=2)
        tensor([False, False,  True])
    """
    kept = uniform >= p / window
    return kept if window == 1 else kept.unfold(-1, window, 1).all(-1)


def sample_heads(p: float | Tensor, uniform: Tensor) -> Tensor:
    r"""Drop every head of a sample with probability p, but never all of them.

    .. math:: \xi_{bh} = [\,u_{bh} \ge \min(p, \max_{h'} u_{bh'})\,], \quad u \sim U(0, 1)

    If all heads would be dropped, the one with the largest u is kept; all heads are equally likely to be this one. A
    head is therefore kept with probability :math:`1 - p + p^H / H`, and one head is kept even at p = 1.

    u and the decisions have the shape ``(B, H)``.

    Example:
        >>> sample_heads(1.0, torch.rand(3, 8)).sum(1)
        tensor([1, 1, 1])
    """
    p = p if type(p) is float or not isinstance(p, Tensor) else p.to(uniform)  # a call less in most layers
    return uniform >= uniform.amax(1, keepdim=True).clamp(max=p)


def sample_spans(p: float | Tensor, valid: Tensor, uniform: Tensor, *, starts: Tensor | None = None) -> Tensor:
    r"""Drop one span of neighbouring tokens per sample: a share p of its tokens, rounded; padding does not count.

    .. math:: \text{dropped: } s_b \le j < s_b + l_b, \qquad l_b = \lfloor p n_b + \tfrac12 \rfloor, \qquad
        s_b \sim U\{0, \dots, n_b - l_b\}

    In ``valid``, bool, ``(B, T)``, ``True`` is a token, which j counts, and ``False`` padding, which is kept. A span
    begins at a token in ``starts``, bool, ``(B, T)``, or earlier where it would not fit; without starts, at any token.
    The positions follow from ``uniform``, ``(B, 1)``.

    Example:
        >>> valid = torch.tensor([[True, True, True, True, False], [True, True, False, False, False]])
        >>> (~sample_spans(0.5, valid, torch.rand(2, 1))).sum(1)
        tensor([2, 1])
    """
    lengths = valid.sum(1, keepdim=True)
    size = (p * lengths + 0.5).floor()
    start = (uniform * (lengths - size + 1)).floor()
    number = valid.cumsum(1) - 1
    if starts is not None:
        starts = starts & valid
        choices = starts.sum(1, keepdim=True)
        drawn = starts & (starts.cumsum(1) - 1 == (uniform * choices).floor())
        begin = (number * drawn).sum(1, keepdim=True)
        start = torch.where(choices > 0, torch.minimum(begin, lengths - size), start)
    return ~(valid & (number >= start) & (number < start + size))


def ancestor_mask(parents: Tensor) -> Tensor:
    """Keep, for every word of a parse, the word itself and its ancestors (SG-Net, AAAI 2020, arXiv 1908.05147).

    ``parents``, long, ``(..., N)``, is the position of a word's head, -1 where it has none (a root, padding); any other
    number raises ``InputError``. Returns bool, ``(..., N, N)``.

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
    for _ in range((length - 1).bit_length()):  # a product doubles the length of the paths
        reached = (reached @ reached).clamp(max=1)
    return reached > 0


def bernoulli_log_prob(logits: Tensor, keep: Tensor, valid: Tensor, draws: int = 1) -> Tensor:
    r"""Compute the mean log-probability of decisions over the valid units, ``(B,)``; 0 for a sample without units.

    .. math:: \log P(a) = \frac{1}{n} \sum_{ij \in \text{valid}} \log P(d_{ij}), \qquad P(d_{ij} = 1) = \sigma(s_{ij})

    ``logits`` of keeping are ``(B, ...)``. For several ``draws`` from the same logits, ``keep`` is the number of draws
    that kept a unit, since :math:`\log\sigma(-s) = \log\sigma(s) - s`.

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
    r"""Compute the entropy of decisions from their logits s, in nats; differentiable even if p is close to 0 or 1.

    .. math:: H(p) = -p \log p - (1 - p) \log (1 - p), \qquad p = \sigma(s)

    Example:
        >>> bernoulli_entropy(torch.tensor([0.0, 200.0]))
        tensor([0.6931, 0.0000])
    """
    return F.softplus(logits) - logits * torch.sigmoid(logits)


def bernoulli_kl(logits: Tensor, prior: float) -> Tensor:
    r"""Compute the Kullback-Leibler divergence of decisions, by their logits s, from a prior :math:`p_0` in ``(0, 1)``.

    .. math:: p \log\frac{p}{p_0} + (1 - p) \log\frac{1 - p}{1 - p_0}, \qquad p = \sigma(s)

    Example:
        >>> bernoulli_kl(torch.tensor([0.0, 200.0]), prior=0.5)
        tensor([0.0000, 0.6931])
    """
    other = math.log1p(-prior)
    return -other - torch.sigmoid(logits) * (math.log(prior) - other) - bernoulli_entropy(logits)


def drop_rate(keep: Tensor, units: Tensor | None = None) -> Tensor:
    """Compute the share of dropped units: float32, 0-d; 0 if there is no unit to count.

    ``keep`` may be a factor, 0 where dropped. ``units`` marks the units to count.

    Example:
        >>> drop_rate(torch.tensor([True, False, False]), torch.tensor([True, True, False]))
        tensor(0.5000)
    """
    dropped = keep == 0
    if units is None:
        return dropped.sum() / max(dropped.numel(), 1)
    dropped, units = torch.broadcast_tensors(dropped, units)
    return (dropped & units).sum() / units.sum().clamp(min=1)


def concrete_drop(logits: Tensor, uniform: Tensor, temperature: float = 0.1) -> Tensor:
    """Relax drop decisions to z in ``[0, 1]``, 1 = dropped, as :class:`attnreg.ConcreteDropout` does.

    They are differentiable by the ``logits`` of dropping, which broadcast to ``uniform``.

    Example:
        >>> concrete_drop(torch.tensor(0.0), torch.tensor([0.1, 0.5, 0.9]))
        tensor([2.8680e-10, 5.0000e-01, 1.0000e+00])
    """
    return torch.sigmoid((logits + torch.logit(uniform)) / temperature)


def straight_through(hard: Tensor, soft: Tensor, *, reverse: bool = False) -> Tensor:
    """Return hard decisions, bool or numeric, in the dtype of soft decisions and with their gradient.

    With ``reverse``, the gradient is reversed, so that parameters learned through it raise the loss.

    Example:
        >>> p = torch.tensor([0.4, 0.6], requires_grad=True)
        >>> m = straight_through(p > 0.5, p, reverse=True)
        >>> m.tolist(), torch.autograd.grad(m.sum(), p)[0].tolist()
        ([0.0, 1.0], [-1.0, -1.0])
    """
    change = soft.detach() - soft if reverse else soft - soft.detach()
    return hard.to(soft.dtype) + change
