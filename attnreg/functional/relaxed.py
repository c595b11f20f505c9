r"""Relaxed attention: spread a share of each row's attention weights evenly over its keys.

.. math:: A'_{ij} = (1 - \gamma) A_{ij} + \gamma \frac{m_{ij}}{\sum_k m_{ik}} \sum_k A_{ik}

m is 1 for the valid keys of row i that are kept, or for all its valid keys if none is. A row without valid keys stays
as it is. Rows of A sum to 1, unless part of the weight is on sinks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attnreg.functional.attention import uniform_attention


def relaxed_weights(weights: Tensor, gamma: Tensor, keep: Tensor | None = None, valid: Tensor | None = None) -> Tensor:
    """Relax attention weights.

    Args:
        weights: ``(B, H, Q, K)``, A.
        gamma: the share to spread, 0-d or broadcastable to ``(B, H, Q, 1)``.
        keep: bool, broadcastable to ``(B, H, Q, K)``, ``True`` = kept; ``None`` keeps all.
        valid: bool, broadcastable to ``(B, H, Q, K)``, ``True`` = allowed by the model; ``None`` allows all.

    Returns:
        ``(B, H, Q, K)``.

    Example:
        >>> weights = torch.tensor([[1.0, 0.0, 0.0]])
        >>> relaxed_weights(weights, torch.tensor(0.5), valid=torch.tensor([True, True, False]))
        tensor([[0.7500, 0.2500, 0.0000]])
    """
    gamma = gamma.to(weights.dtype)
    open_ = _open(keep, valid, weights.shape[-1], weights.device).to(weights.dtype)
    share = open_ / open_.sum(-1, keepdim=True).clamp(min=1)
    mixed = weights + gamma * (share * weights.sum(-1, keepdim=True) - weights)
    return mixed if valid is None else torch.where(torch.atleast_2d(valid).any(-1, keepdim=True), mixed, weights)


def relaxed_output(
    output: Tensor,
    value: Tensor,
    gamma: Tensor,
    keep: Tensor | None,
    valid: Tensor | None,
    shape: Sequence[int],
) -> Tensor:
    r"""Relax attention by its output, without its weights: :math:`(1 - \gamma) A V + \gamma U V`.

    Args:
        output: ``(B, H, Q, D)``, attention under ``keep`` and ``valid``, without dropout of its weights.
        value: ``(B, H, K, D)``, or ``(B, H_kv, K, D)`` with H a multiple of H_kv.
        gamma: as in :func:`relaxed_weights`, as are ``keep`` and ``valid``.
        keep: which scores are kept.
        valid: which positions the model allows.
        shape: ``(B, H, Q, K)``.

    Returns:
        ``(B, H, Q, D)``.

    Example:
        >>> value = torch.tensor([[1.0], [3.0]]).view(1, 1, 2, 1)
        >>> relaxed_output(value, value, torch.tensor(1.0), None, None, (1, 1, 2, 2)).flatten()
        tensor([2., 2.])
    """
    open_ = None if keep is None and valid is None else _open(keep, valid, shape[-1], value.device)
    mixed = output + gamma.to(output.dtype) * (uniform_attention(value, open_, shape) - output)
    return mixed if valid is None else torch.where(torch.atleast_2d(valid).any(-1, keepdim=True), mixed, output)


def _open(keep: Tensor | None, valid: Tensor | None, keys: int, device: torch.device) -> Tensor:
    """Return the keys over which a row is spread, bool, broadcastable to ``(B, H, Q, K)``, K in full."""
    everything = torch.ones(1, keys, dtype=torch.bool, device=device)
    valid = everything if valid is None else torch.atleast_2d(valid) & everything
    if keep is None:
        return valid
    allowed = torch.atleast_2d(keep) & valid
    return torch.where(allowed.any(-1, keepdim=True), allowed, valid)
