"""Gradients for decisions: relaxed, straight through, reversed, and estimated from two opposite draws."""

from __future__ import annotations

import torch
from torch import Tensor


def concrete_drop(logits: Tensor, uniform: Tensor, temperature: float = 0.1) -> Tensor:
    r"""Relaxed decisions to drop, differentiable in the logits.

    .. math:: z = \sigma\!\left(\frac{1}{t}\left(\log\frac{p}{1-p} + \log\frac{u}{1-u}\right)\right), \qquad
              P(z > 1/2) = p = \sigma(\text{logit})

    Args:
        logits: the logits of dropping, broadcastable to ``uniform``.
        uniform: u, drawn from ``[0, 1)``.
        temperature: t; the smaller, the nearer z is to 0 or 1.

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
    r"""Hard decisions with the gradient of soft ones.

    Args:
        hard: bool, or numbers: the value.
        soft: the gradient, of the same shape.
        reverse: turn the gradient round, so that what is learned through it raises the loss.

    Returns:
        in the dtype of ``soft``: the values of ``hard``.

    Example:
        >>> p = torch.tensor([0.4, 0.6], requires_grad=True)
        >>> m = straight_through(p > 0.5, p, reverse=True)
        >>> m.tolist(), torch.autograd.grad(m.sum(), p)[0].tolist()
        ([0.0, 1.0], [-1.0, -1.0])
    """
    change = soft.detach() - soft if reverse else soft - soft.detach()
    return hard.to(soft.dtype) + change


def opposite_draws(logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    r"""Two draws of hard decisions from the same noise, as unlike each other as can be.

    .. math:: d^{(1)} = [\,u > \sigma(-\phi)\,], \quad d^{(2)} = [\,u < \sigma(\phi)\,], \qquad
              P(d^{(1)} = 1) = P(d^{(2)} = 1) = \sigma(\phi)

    Args:
        logits: :math:`\phi`, broadcastable to ``uniform``.
        uniform: u, drawn from ``[0, 1)``.

    Returns:
        both, bool.

    Reference:
        ARM (arXiv 1807.11143).

    Example:
        >>> first, second = opposite_draws(torch.tensor(0.0), torch.tensor([0.2, 0.7]))
        >>> first.tolist(), second.tolist()
        ([False, True], [True, False])
    """
    return uniform > torch.sigmoid(-logits), uniform < torch.sigmoid(logits)


def arm_gradient(first: Tensor, second: Tensor, noise: Tensor) -> Tensor:
    r"""Estimate the gradient of an expected loss with respect to the logits of its decisions, without bias.

    .. math:: \frac{\partial}{\partial\phi_i} E_d[f(d)] = E_u\big[\big(f(d^{(1)}) - f(d^{(2)})\big)(u_i -
              \tfrac{1}{2})\big]

    For decisions that share a logit, :math:`u_i - 1/2` is summed over them.

    Args:
        first: the loss under the first of :func:`opposite_draws`, 0-d.
        second: the loss under the second.
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
