"""Whole attention heads: which are kept, and what that does to the rest."""

from __future__ import annotations

import torch
from torch import Tensor


def sample_heads(
    p: float | Tensor,
    shape: tuple[int, int],
    *,
    device: torch.device | str | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""Drop each head of a sample with probability p, never all of them.

    .. math:: \xi_{bh} = [\,u_{bh} \ge \min(p, \max_{h'} u_{bh'})\,], \quad u \sim U(0, 1)

    Where all heads would go, the one of largest u stays: each is that one with probability 1/H. So a head is kept with
    probability :math:`1 - p + p^H / H`, and at least one is at p = 1.

    Args:
        p: drop probability, in ``[0, 1]``.
        shape: ``(B, H)``.
        device: where to draw.
        generator: source of randomness; the global one by default, which gradient checkpointing replays.

    Returns:
        bool, ``(B, H)``, ``True`` = kept.

    Example:
        >>> sample_heads(1.0, (3, 8)).sum(1)
        tensor([1, 1, 1])
    """
    uniform = torch.rand(shape, device=device, generator=generator)
    largest = uniform.amax(1, keepdim=True)
    return uniform >= torch.minimum(largest, torch.as_tensor(p, dtype=uniform.dtype, device=uniform.device))


def rescaled_heads(keep: Tensor) -> Tensor:
    r"""The factors by which the heads of a layer are multiplied, so that their sum stays that of H heads.

    .. math:: f_{bh} = \xi_{bh} \, H / \textstyle\sum_{h'} \xi_{bh'}

    Args:
        keep: bool, ``(B, H)``, ``True`` = kept; at least one head of each sample is.

    Returns:
        float32, ``(B, H)``; each row sums up to H.

    Example:
        >>> rescaled_heads(torch.tensor([[True, False, True, False]]))
        tensor([[2., 0., 2., 0.]])
    """
    return keep.float() * (keep.shape[1] / keep.sum(1, keepdim=True))


def head_importance(attribution: Tensor) -> Tensor:
    r"""How much a score depends on each head: the derivative by a gate on its attention weights, without its sign.

    .. math:: I_h = \Big| \frac{\partial s}{\partial \xi_h} \Big|
              = \Big| \sum_{b,q,k} A_{bhqk} \frac{\partial s}{\partial A_{bhqk}} \Big|, \quad A_h \leftarrow \xi_h A_h

    Args:
        attribution: ``(B, H, Q, K)``, the attention weights times the gradients of the score by them.

    Returns:
        ``(H,)``, in float32 at least.

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
        n: how many to drop, exactly; which of equal ones is open.

    Returns:
        bool, ``(H,)``, ``True`` = kept.

    Example:
        >>> without_top(torch.tensor([0.1, 0.7, 0.3]), 1)
        tensor([ True, False,  True])
    """
    return torch.ones_like(values, dtype=torch.bool).scatter(0, values.topk(n).indices, False)
