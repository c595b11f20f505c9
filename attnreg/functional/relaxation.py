"""Gradients for decisions: relaxed, straight-through, reversed, or estimated from two opposite draws."""

from __future__ import annotations

import torch
from torch import Tensor


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
