"""Attention under a mask of its scores or weights: dropped, renormalized, uniform, relaxed; its entropy."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from attnreg.errors import InputError
from attnreg.functional.blocks import closed, dropped_weights, in_blocks
from attnreg.functional.seeded import is_traced

MINUS_INFINITY = np.uint32(0xFF800000)  # as a float32 of the same bits
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def scores_dropout(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keep: Tensor,
    valid: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    *,
    dropout_p: float = 0.0,
    enable_gqa: bool = False,
    traced: bool | None = None,
) -> Tensor:
    r"""Compute attention with dropped scores set to :math:`-\infty` before the softmax.

    It runs in torch's fused attention. A row whose valid keys are all dropped attends uniformly to them (AttendOut,
    Eq. 4): its query and bias are set to zero, so that its scores are equal and their gradients vanish. A row without
    any valid key returns zeros.

    ``bias``, broadcastable to ``(B, H, Q, K)``, is added to the scores; ``scale`` multiplies :math:`QK^\top` (default:
    :math:`1/\sqrt D`). ``dropout_p`` is the probability of the model's dropout of weights. With ``enable_gqa``,
    several query heads share one key head. ``traced`` says whether torch traces the call (default: it is found out).
    Returns ``(B, H, Q, D)``.

    Example:
        >>> q = k = v = torch.eye(2).view(1, 1, 2, 2)
        >>> keep = torch.tensor([[True, False], [False, False]])
        >>> scores_dropout(q, k, v, keep)[0, 0]
        tensor([[1.0000, 0.0000],
                [0.5000, 0.5000]])
    """
    keep = keep if len(keep.shape) > 1 else torch.atleast_2d(keep)
    attended = keep if valid is None else keep & valid
    is_plain = query.is_cpu and not (is_traced() if traced is None else traced)
    dead = ~(_any(attended) if is_plain else attended.any(-1, keepdim=True))
    if not is_plain or bool(dead.any()):  # reading a value would wait for a GPU
        attended = attended | dead if valid is None else attended | (dead & valid)
        query = query.masked_fill(dead, 0.0)
        bias = None if bias is None else bias.masked_fill(dead, 0.0)
    if bias is not None:
        attn_mask = bias.masked_fill(~attended, -math.inf)
    else:
        attn_mask = _additive(attended, query.dtype) if is_plain else attended
    full = *attn_mask.shape[:-2], query.shape[-2], key.shape[-2]
    attn_mask = attn_mask if attn_mask.shape == full else attn_mask.expand(full)
    return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, scale=scale, enable_gqa=enable_gqa)


def _any(attended: Tensor) -> Tensor:
    """Return whether any value of a row is true; eight bytes at a time, where torch allows it."""
    if attended.is_contiguous() and not attended.shape[-1] % 8:
        attended = attended.view(torch.int64)
    return attended.any(-1, keepdim=True)


def _additive(attended: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask of 0 and minus infinity, which numpy computes in a third of torch's time."""
    if dtype != torch.float32 or torch.is_autocast_enabled("cpu"):
        return attended
    return torch.from_numpy(np.multiply(~attended.numpy(), MINUS_INFINITY)).view(torch.float32)


def weights_dropout(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keep: Tensor,
    valid: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    *,
    rescale: bool = False,
    p: float | None = None,
) -> Tensor:
    r"""Compute attention with dropped weights set to zero after the softmax.

    Arguments and result are as in :func:`scores_dropout`; ``keep`` may also be a float factor. With ``rescale``, kept
    weights are divided by :math:`1 - p`, as by :class:`torch.nn.Dropout`; the drop probability p must be in ``[0, 1)``.

    Example:
        >>> q = k = torch.zeros(1, 1, 2, 2)
        >>> v = torch.eye(2).view(1, 1, 2, 2)
        >>> weights_dropout(q, k, v, torch.tensor([[True, False]]), rescale=True, p=0.5)[0, 0]
        tensor([[1., 0.],
                [1., 0.]])
    """
    if rescale and (p is None or not 0 <= p < 1):
        raise InputError(f"Expected `p` in [0, 1) with rescale=True, got {p}.")
    share = 1 / (1 - p) if rescale and p is not None else 1.0
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if query.is_cpu and not is_traced() and bias is None and keep.dtype == torch.bool and in_blocks(query, key, value):
        return dropped_weights(query, key, value, keep, closed(valid, query), scale, share)
    weights = attention_weights(query, key, valid, bias, scale) * keep
    return (weights if share == 1 else weights * share) @ value


def attention_weights(
    query: Tensor,
    key: Tensor,
    valid: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    keep: Tensor | None = None,
) -> Tensor:
    """Compute the attention weights A, optionally under scores dropout; arguments as in :func:`scores_dropout`.

    Rows sum to 1, rows without a valid key to 0.

    Example:
        >>> q = k = torch.zeros(1, 1, 2, 2)
        >>> attention_weights(q, k, valid=torch.tensor([[True, False], [False, False]]))[0, 0]
        tensor([[1., 0.],
                [0., 0.]])
    """
    scores = (query * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.transpose(-2, -1)
    orphan = None
    if valid is not None:
        orphan = ~valid.any(-1, keepdim=True)
        scores = scores.masked_fill(~(valid | orphan), -math.inf)
        bias = None if bias is None else bias.masked_fill(orphan, 0.0)  # minus infinity alone has NaN as gradient
    if bias is not None:
        scores = scores + bias
    if keep is not None:
        scores = masked_scores(scores, keep, valid)
    weights = scores.softmax(-1)
    return weights if orphan is None else weights.masked_fill(orphan, 0.0)


def apply_score_mod(score_mod: ScoreMod | None, scores: Tensor) -> Tensor:
    """Apply a score function of ``flex_attention``, which takes one score at a time, to all scores.

    It is a function of a score and of its sample, head, query and key index; ``None`` changes nothing.

    Example:
        >>> apply_score_mod(lambda score, b, h, q, k: score - (q - k).abs(), torch.zeros(1, 1, 2, 2))[0, 0]
        tensor([[ 0., -1.],
                [-1.,  0.]])
    """
    if score_mod is None:
        return scores
    function: Callable[..., Tensor] = score_mod
    for dim in (3, 2, 1, 0):
        function = torch.vmap(function, in_dims=(0, *(0 if index == dim else None for index in range(4))))
    return function(scores, *(torch.arange(size, device=scores.device) for size in scores.shape))


def masked_scores(scores: Tensor, keep: Tensor, valid: Tensor | None = None) -> Tensor:
    r"""Set dropped scores to :math:`-\infty`, and make fully dropped rows uniform over their valid keys.

    The model's mask is already applied to the scores. Rows without a valid key are unchanged.

    Example:
        >>> masked_scores(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[True, False], [False, False]]))
        tensor([[1., -inf],
                [0., 0.]])
    """
    if valid is None:
        valid = torch.ones((), dtype=torch.bool, device=scores.device)
    keep, valid = torch.atleast_2d(keep), torch.atleast_2d(valid)
    allowed = keep & valid
    dead = ~allowed.any(-1, keepdim=True)
    orphan = ~valid.any(-1, keepdim=True)
    uniform = scores.new_zeros(()).masked_fill(~(dead & valid), -math.inf)
    return torch.where(allowed | orphan, scores, uniform)


def renormalized(weights: Tensor, factor: Tensor, valid: Tensor | None = None, *, detach_sum: bool = False) -> Tensor:
    r"""Multiply attention weights by a mask and divide every row by its sum, so that it sums to 1 again.

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
    if valid is not None:  # a model's mask of -100 leaves a little weight, which in a dropped row would be the only one
        valid = torch.atleast_2d(valid)
        weights = weights.masked_fill(~valid & valid.any(-1, keepdim=True), 0.0)
    total = weights.sum(-1, keepdim=True)
    if detach_sum:
        total = total.detach()
    dead = total < torch.finfo(weights.dtype).tiny
    if valid is None:
        uniform = weights.new_tensor(1.0 / weights.shape[-1])
    else:
        uniform = _shares(valid, weights.shape[-1], weights.dtype)
    return torch.where(dead, uniform, weights / total.masked_fill(dead, 1.0))


def uniform_attention(value: Tensor, valid: Tensor | None, shape: Sequence[int], *, dropout_p: float = 0.0) -> Tensor:
    """Attend equally to all valid keys, as in a layer whose scores are all dropped (AttendOut, Eq. 4).

    ``value`` may have fewer heads, ``(B, H_kv, K, D)`` with H a multiple of H_kv. ``dropout_p`` is the probability of
    the model's dropout of weights.

    Returns:
        ``(B, H, Q, D)``: the mean of ``value`` over the valid keys of a row; zeros in rows without a valid key.

    Example:
        >>> value = torch.tensor([[1.0], [3.0], [100.0]]).view(1, 1, 3, 1)
        >>> uniform_attention(value, torch.tensor([True, True, False]), (1, 1, 2, 3)).flatten()
        tensor([2., 2.])
    """
    value, queries = per_head(value, shape[-3]), shape[-2]
    if dropout_p:
        shares = _shares(_open(None, valid, shape[-1], value.device), shape[-1], value.dtype)
        return F.dropout(shares.expand(*shape), dropout_p) @ value
    out = value.mean(-2, keepdim=True) if valid is None else _shares(valid, value.shape[-2], value.dtype) @ value
    return out.expand(*out.shape[:-2], queries, out.shape[-1])


def relaxed_weights(weights: Tensor, gamma: Tensor, keep: Tensor | None = None, valid: Tensor | None = None) -> Tensor:
    r"""Spread a share of every row's attention weights evenly over its keys.

    .. math:: A'_{ij} = (1 - \gamma) A_{ij} + \gamma \frac{m_{ij}}{\sum_k m_{ik}} \sum_k A_{ik}

    m is 1 for the kept valid keys of row i, or for all its valid keys if none is kept. A row without valid keys does
    not change. Rows of A sum to 1, unless part of the weight is on sinks.

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
    r"""Compute the entropy of every row of attention weights, from its scores.

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


def per_head(shared: Tensor, heads: int) -> Tensor:
    """Repeat keys or values that several query heads share, ``(..., H_kv, K, D)``, for all these heads."""
    groups = shared.shape[-3]
    return shared if groups == heads else shared.repeat_interleave(heads // groups, -3)


def _shares(open_: Tensor, keys: int, dtype: torch.dtype) -> Tensor:
    """Return 1 / n at the n open keys of a row, and 0 elsewhere."""
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
