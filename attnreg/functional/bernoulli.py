"""Independent decisions: log-probability, entropy, drop rate, and gradients through them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def bernoulli_log_prob(logits: Tensor, keep: Tensor, valid: Tensor, draws: int = 1) -> Tensor:
    r"""Compute the mean log-probability of decisions over the valid units, ``(B,)``; 0 for a sample without any.

    .. math:: \log P(a) = \frac{1}{n} \sum_{ij \in \text{valid}} \log P(d_{ij}), \qquad P(d_{ij} = 1) = \sigma(s_{ij})

    ``logits`` are ``(B, ...)``, those of keeping. For several ``draws`` from the same logits, ``keep`` is how many of
    them kept each unit, since :math:`\log\sigma(-s) = \log\sigma(s) - s`.

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
    cross = F.softplus(logits.new_tensor(prior).logit()) - torch.sigmoid(logits) * logits.new_tensor(prior).logit()
    return cross - bernoulli_entropy(logits)


def drop_rate(keep: Tensor, units: Tensor | None = None, *, by_head: bool = False) -> Tensor:
    """Compute the share of dropped units: float32, 0-d, or ``(H,)`` with ``by_head``; 0 if there is no unit to count.

    ``keep`` may also be a factor that is 0 where dropped, in all four dimensions with ``by_head``; ``units`` (default:
    all) are those to count.

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
    """Relax drop decisions to z in ``[0, 1]``, 1 = dropped, as :class:`attnreg.ConcreteDropout` does.

    They are differentiable by ``logits``, those of dropping, which broadcast to ``uniform``.

    Example:
        >>> concrete_drop(torch.tensor(0.0), torch.tensor([0.1, 0.5, 0.9]))
        tensor([2.8680e-10, 5.0000e-01, 1.0000e+00])
    """
    return torch.sigmoid((logits + torch.logit(uniform)) / temperature)


def straight_through(hard: Tensor, soft: Tensor, *, reverse: bool = False) -> Tensor:
    """Return hard decisions, bool or numeric, in the dtype of soft ones and with their gradient.

    With ``reverse``, the gradient is reversed, so that parameters learned through it raise the loss.

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

    The losses are those under the two :func:`opposite_draws`, 0-d; ``noise`` is u - 1/2, summed over the decisions of
    each logit. See ARM (arXiv 1807.11143), Theorem 1.

    Example:
        >>> arm_gradient(torch.tensor(2.0), torch.tensor(1.0), torch.tensor([0.25, -0.5]))
        tensor([ 0.2500, -0.5000])
    """
    return (first - second) * noise
