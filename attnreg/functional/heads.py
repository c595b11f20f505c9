"""Whole attention heads: sampling, rescaling and ranking them."""

from __future__ import annotations

import torch
from torch import Tensor


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


def rescaled_heads(keep: Tensor) -> Tensor:
    r"""Compute factors that scale the kept heads up, so that the factors of a sample sum to H.

    .. math:: f_{bh} = \xi_{bh} \, H / \textstyle\sum_{h'} \xi_{bh'}

    Args:
        keep: bool, ``(B, H)``, ``True`` = kept; each sample must keep at least one head.

    Returns:
        float32, ``(B, H)``; each row sums to H.

    Example:
        >>> rescaled_heads(torch.tensor([[True, False, True, False]]))
        tensor([[2., 0., 2., 0.]])
    """
    return keep.float() * (keep.shape[1] / keep.sum(1, keepdim=True))


def head_importance(attribution: Tensor) -> Tensor:
    r"""Compute each head's importance: the absolute derivative of a score by a gate on the head's attention weights.

    .. math:: I_h = \Big| \frac{\partial s}{\partial \xi_h} \Big|
              = \Big| \sum_{b,q,k} A_{bhqk} \frac{\partial s}{\partial A_{bhqk}} \Big|, \quad A_h \leftarrow \xi_h A_h

    Args:
        attribution: ``(B, H, Q, K)``, the attention weights times the score's gradient with respect to them.

    Returns:
        ``(H,)``, in float32 or wider.

    Reference:
        Are Sixteen Heads Really Better than One? (NeurIPS 2019, arXiv 1905.10650), Section 4.1.

    Example:
        >>> head_importance(torch.tensor([[[[1.0, -3.0]], [[0.5, 0.5]]]]))
        tensor([2., 1.])
    """
    return attribution.sum((0, 2, 3), dtype=torch.promote_types(attribution.dtype, torch.float32)).abs()


def without_top(values: Tensor, n: int) -> Tensor:
    """Keep all but the n highest values.

    Args:
        values: ``(H,)``.
        n: number of values to drop; ties are broken arbitrarily.

    Returns:
        bool, ``(H,)``, ``True`` = kept.

    Example:
        >>> without_top(torch.tensor([0.1, 0.7, 0.3]), 1)
        tensor([ True, False,  True])
    """
    return torch.ones_like(values, dtype=torch.bool).scatter(0, values.topk(n).indices, False)
