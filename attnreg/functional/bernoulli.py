"""Independent decisions: log-probability, entropy, drop rate, and gradients through them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


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


def concrete_drop(logits: Tensor, uniform: Tensor, temperature: float = 0.1) -> Tensor:
    r"""Relax drop decisions, so that they are differentiable with respect to the logits.

    .. math:: z = \sigma\!\left(\frac{1}{t}\left(\log\frac{p}{1-p} + \log\frac{u}{1-u}\right)\right), \qquad
              P(z > 1/2) = p = \sigma(\text{logit})

    Args:
        logits: the logits of dropping, broadcastable to ``uniform``.
        uniform: u, drawn from ``[0, 1)``.
        temperature: t; smaller values move z closer to 0 or 1.

    Returns:
        z in ``[0, 1]``, 1 = dropped.

    Reference:
        Concrete Dropout (arXiv 1705.07832), Section 3.

    Example:
        >>> concrete_drop(torch.tensor(0.0), torch.tensor([0.1, 0.5, 0.9]))
        tensor([2.8680e-10, 5.0000e-01, 1.0000e+00])
    """
    return torch.sigmoid((logits + torch.logit(uniform)) / temperature)


def straight_through(hard: Tensor, soft: Tensor, *, reverse: bool = False) -> Tensor:
    r"""Return hard decisions with the gradient of soft ones.

    Args:
        hard: the values, bool or numeric.
        soft: the source of the gradient, in the same shape.
        reverse: reverse the gradient, so that parameters learned through it raise the loss.

    Returns:
        the values of ``hard`` in the dtype of ``soft``.

    Example:
        >>> p = torch.tensor([0.4, 0.6], requires_grad=True)
        >>> m = straight_through(p > 0.5, p, reverse=True)
        >>> m.tolist(), torch.autograd.grad(m.sum(), p)[0].tolist()
        ([0.0, 1.0], [-1.0, -1.0])
    """
    change = soft.detach() - soft if reverse else soft - soft.detach()
    return hard.to(soft.dtype) + change


def arm_gradient(first: Tensor, second: Tensor, noise: Tensor) -> Tensor:
    r"""Estimate, without bias, the gradient of an expected loss with respect to the logits of its decisions.

    .. math:: \frac{\partial}{\partial\phi_i} E_d[f(d)] = E_u\big[\big(f(d^{(1)}) - f(d^{(2)})\big)(u_i -
              \tfrac{1}{2})\big]

    If several decisions share a logit, sum :math:`u_i - 1/2` over them.

    Args:
        first: loss under the first of the :func:`opposite_draws`, 0-d.
        second: loss under the second, 0-d.
        noise: u - 1/2, summed over the decisions of each logit.

    Returns:
        the shape of ``noise``.

    Reference:
        ARM (arXiv 1807.11143), Theorem 1.

    Example:
        >>> arm_gradient(torch.tensor(2.0), torch.tensor(1.0), torch.tensor([0.25, -0.5]))
        tensor([ 0.2500, -0.5000])
    """
    return (first - second) * noise
