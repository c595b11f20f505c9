"""Whole attention heads: rescaling and ranking them."""

from __future__ import annotations

import torch
from torch import Tensor


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
