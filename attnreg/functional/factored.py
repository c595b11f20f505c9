r"""The gradient with respect to attention weights as a product of two small factors.

Attention returns :math:`O = A V`, so :math:`\partial s / \partial A = (\partial s / \partial O) V^\top` exactly. The
factors take Q·D and K·D numbers per head, the product Q·K.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attnreg.functional.region import Region, candidate_region

POSITIONS = 2**22  # of the product, in memory at a time


def weights_gradient(output_gradient: Tensor, value: Tensor) -> Tensor:
    r"""Compute a score's gradient with respect to attention weights A from that with respect to the output O.

    .. math:: \frac{\partial s}{\partial A} = \frac{\partial s}{\partial O} V^\top, \quad O = A V

    Args:
        output_gradient: ``(B, H, Q, D)``.
        value: ``(B, H, K, D)``, or ``(B, H_kv, K, D)`` with H a multiple of H_kv.

    Returns:
        ``(B, H, Q, K)``, in float32 or wider, also under autocast.

    Example:
        >>> weights_gradient(torch.tensor([[[[1.0, 2.0]]]]), torch.tensor([[[[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]]]))
        tensor([[[[1., 2., 3.]]]])
    """
    dtype = torch.promote_types(output_gradient.dtype, torch.float32)
    with torch.autocast(output_gradient.device.type, enabled=False):
        return output_gradient.to(dtype) @ _of_heads(value, output_gradient).to(dtype).transpose(-1, -2)


def factored_region(
    output_gradient: Tensor,
    value: Tensor,
    valid: Tensor | None,
    p: float,
    region: Region = "high",
    *,
    positions: int = POSITIONS,
) -> Tensor:
    """Select the candidate region of :func:`weights_gradient` in chunks of query rows.

    Args:
        output_gradient: ``(B, H, Q, D)``.
        value: ``(B, H, K, D)``, or ``(B, H_kv, K, D)`` with H a multiple of H_kv.
        valid: bool, broadcastable to ``(B, H, Q, K)``, ``True`` = allowed by the model; ``None`` means all.
        p: share of the valid keys, in ``[0, 1]``.
        region: ``"high"`` (highest attributions) or ``"low"`` (lowest).
        positions: about how many entries of the gradient are in memory at a time; at least one query row is.

    Returns:
        bool, ``(B, H, Q, K)``, ``True`` = in the region, as :func:`candidate_region` returns.

    Raises:
        ValueError: as :func:`candidate_region`.

    Example:
        >>> value = torch.tensor([0.1, 0.4, 0.3, 0.2]).view(1, 1, 4, 1)
        >>> factored_region(torch.ones(1, 1, 1, 1), value, None, p=0.5)
        tensor([[[[False,  True,  True, False]]]])
    """
    value = _of_heads(value, output_gradient)
    rows = max(1, positions // max(1, math.prod(output_gradient.shape[:2]) * value.shape[-2]))
    chunks = []
    for first in range(0, output_gradient.shape[-2], rows):
        gradient = weights_gradient(output_gradient[..., first : first + rows, :], value)
        open_ = valid
        if valid is not None and valid.dim() > 1 and valid.shape[-2] > 1:
            open_ = valid[..., first : first + rows, :]
        chunks.append(candidate_region(gradient, open_, p, region))
    return chunks[0] if len(chunks) == 1 else torch.cat(chunks, -2)


def _of_heads(value: Tensor, output_gradient: Tensor) -> Tensor:
    return value.repeat_interleave(output_gradient.shape[1] // value.shape[1], 1)
