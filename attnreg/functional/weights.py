"""Attention weights after the softmax: renormalized, uniform or relaxed, and their entropy."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def renormalized(weights: Tensor, factor: Tensor, valid: Tensor | None = None, *, detach_sum: bool = False) -> Tensor:
    r"""Multiply attention weights by a mask and divide each row by its sum, so that it sums to 1 again.

    .. math:: A'_{ij} = \frac{A_{ij} M_{ij}}{\sum_k A_{ik} M_{ik}}

    The ``factor`` M is bool or float, broadcastable to ``(B, H, Q, K)``. A fully dropped row becomes uniform over its
    valid keys. With ``detach_sum``, no gradient passes through the sum.

    Example:
        >>> weights = torch.tensor([[0.2, 0.3, 0.5], [0.0, 0.5, 0.5]])
        >>> renormalized(weights, torch.tensor([True, True, False]))
        tensor([[0.4000, 0.6000, 0.0000],
                [0.0000, 1.0000, 0.0000]])
    """
    weights = weights * (factor.to(weights.dtype) if factor.is_floating_point() else factor)
    total = weights.sum(-1, keepdim=True)
    if detach_sum:
        total = total.detach()
    dead = total < torch.finfo(weights.dtype).tiny
    if valid is None:
        uniform = weights.new_tensor(1.0 / weights.shape[-1])
    else:
        uniform = _shares(valid, weights.shape[-1], weights.dtype)
    return torch.where(dead, uniform, weights / total.masked_fill(dead, 1.0))


def uniform_attention(value: Tensor, valid: Tensor | None, shape: Sequence[int]) -> Tensor:
    """Attend equally to all valid keys, as in a layer whose scores are all dropped (AttendOut, Eq. 4).

    ``value`` may have fewer heads, ``(B, H_kv, K, D)`` with H a multiple of H_kv.

    Returns:
        ``(B, H, Q, D)``: the mean of ``value`` over the valid keys of each row; zeros in rows without any.

    Example:
        >>> value = torch.tensor([[1.0], [3.0], [100.0]]).view(1, 1, 3, 1)
        >>> uniform_attention(value, torch.tensor([True, True, False]), (1, 1, 2, 3)).flatten()
        tensor([2., 2.])
    """
    heads, queries = shape[-3], shape[-2]
    if value.shape[-3] != heads:
        value = value.repeat_interleave(heads // value.shape[-3], dim=-3)
    out = value.mean(-2, keepdim=True) if valid is None else _shares(valid, value.shape[-2], value.dtype) @ value
    return out.expand(*out.shape[:-2], queries, out.shape[-1])


def relaxed_weights(weights: Tensor, gamma: Tensor, keep: Tensor | None = None, valid: Tensor | None = None) -> Tensor:
    r"""Spread a share of each row's attention weights evenly over its keys.

    .. math:: A'_{ij} = (1 - \gamma) A_{ij} + \gamma \frac{m_{ij}}{\sum_k m_{ik}} \sum_k A_{ik}

    m is 1 for the valid keys of row i that are kept, or for all its valid keys if none is. A row without valid keys
    stays as it is. Rows of A sum to 1, unless part of the weight is on sinks.

    The share ``gamma`` is 0-d or broadcastable to ``(B, H, Q, 1)``.

    Example:
        >>> weights = torch.tensor([[1.0, 0.0, 0.0]])
        >>> relaxed_weights(weights, torch.tensor(0.5), valid=torch.tensor([True, True, False]))
        tensor([[0.7500, 0.2500, 0.0000]])
    """
    gamma = gamma.to(weights.dtype)
    share = _shares(_open(keep, valid, weights.shape[-1], weights.device), weights.shape[-1], weights.dtype)
    mixed = weights + gamma * (share * weights.sum(-1, keepdim=True) - weights)
    return mixed if valid is None else torch.where(torch.atleast_2d(valid).any(-1, keepdim=True), mixed, weights)


def relaxed_output(
    output: Tensor, value: Tensor, gamma: Tensor, keep: Tensor | None, valid: Tensor | None, shape: Sequence[int]
) -> Tensor:
    r"""Relax attention by its output, without its weights: :math:`(1 - \gamma) A V + \gamma U V`.

    ``output``, ``(B, H, Q, D)``, is attention under ``keep`` and ``valid``, without dropout of its weights. The other
    arguments are as in :func:`relaxed_weights` and :func:`uniform_attention`.

    Example:
        >>> value = torch.tensor([[1.0], [3.0]]).view(1, 1, 2, 1)
        >>> relaxed_output(value, value, torch.tensor(1.0), None, None, (1, 1, 2, 2)).flatten()
        tensor([2., 2.])
    """
    open_ = None if keep is None and valid is None else _open(keep, valid, shape[-1], value.device)
    mixed = output + gamma.to(output.dtype) * (uniform_attention(value, open_, shape) - output)
    return mixed if valid is None else torch.where(torch.atleast_2d(valid).any(-1, keepdim=True), mixed, output)


def attention_entropy(scores: Tensor, valid: Tensor | None = None) -> Tensor:
    r"""Compute the entropy of each row of attention weights, from its scores.

    .. math:: H_i = -\sum_j A_{ij} \log A_{ij}, \qquad A_i = \mathrm{softmax}(S_i \text{ where valid})

    Returns:
        ``(B, H, Q)``, in float32 or wider; 0 in rows without a valid key.

    Example:
        >>> attention_entropy(torch.zeros(2, 4), torch.tensor([[True, True, False, False], [True] * 4]))
        tensor([0.6931, 1.3863])
    """
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if valid is None:
        logs = scores.log_softmax(-1)
        return -(logs.exp() * logs).sum(-1)
    valid = torch.atleast_2d(valid)
    orphan = ~valid.any(-1, keepdim=True)
    logs = scores.masked_fill(orphan, 0.0).masked_fill(~(valid | orphan), -math.inf).log_softmax(-1)
    logs = logs.masked_fill(~valid, 0.0)
    return -(logs.exp() * valid * logs).sum(-1)


def _shares(open_: Tensor, keys: int, dtype: torch.dtype) -> Tensor:
    """Return 1 / n at the n open keys of each row, and 0 elsewhere."""
    open_ = torch.atleast_2d(open_)
    share = open_.expand(*open_.shape[:-1], keys).to(dtype)
    return share / share.sum(-1, keepdim=True).clamp(min=1)


def _open(keep: Tensor | None, valid: Tensor | None, keys: int, device: torch.device) -> Tensor:
    """Return the keys over which a row is spread, bool, broadcastable to ``(B, H, Q, K)``, K in full."""
    everything = torch.ones(1, keys, dtype=torch.bool, device=device)
    valid = everything if valid is None else torch.atleast_2d(valid) & everything
    if keep is None:
        return valid
    allowed = torch.atleast_2d(keep) & valid
    return torch.where(allowed.any(-1, keepdim=True), allowed, valid)
