"""Attention under a mask: scores dropout, weights dropout, and rows in which every valid key is dropped."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from attnreg.errors import InputError

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
) -> Tensor:
    r"""Compute attention with dropped scores set to :math:`-\infty` before the softmax.

    It runs in torch's fused attention. A row whose valid keys are all dropped attends uniformly to them (AttendOut,
    Eq. 4): its query and bias are set to zero, so that its scores are equal and their gradients vanish. A row without
    any valid key returns zeros.

    ``bias``, broadcastable to ``(B, H, Q, K)``, is added to the scores; ``scale`` multiplies :math:`QK^\top` (default:
    :math:`1/\sqrt D`). ``dropout_p`` is the probability of the model's own dropout of weights. With ``enable_gqa``,
    several query heads share one key head. Returns ``(B, H, Q, D)``.

    Example:
        >>> q = k = v = torch.eye(2).view(1, 1, 2, 2)
        >>> keep = torch.tensor([[True, False], [False, False]])
        >>> scores_dropout(q, k, v, keep)[0, 0]
        tensor([[1.0000, 0.0000],
                [0.5000, 0.5000]])
    """
    keep = torch.atleast_2d(keep)
    allowed = keep if valid is None else keep & valid
    dead = ~allowed.any(-1, keepdim=True)
    attended = allowed | dead if valid is None else allowed | (dead & valid)
    attended = attended.expand(*attended.shape[:-2], query.shape[-2], key.shape[-2])
    attn_mask = attended if bias is None else bias.masked_fill(dead, 0.0).masked_fill(~attended, -math.inf)
    return F.scaled_dot_product_attention(
        query.masked_fill(dead, 0.0), key, value, attn_mask, dropout_p, scale=scale, enable_gqa=enable_gqa
    )


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
    weights = attention_weights(query, key, valid, bias, scale)
    if rescale:
        if p is None or not 0 <= p < 1:
            raise InputError(f"Expected `p` in [0, 1) with rescale=True, got {p}.")
        weights = weights / (1 - p)
    return (weights * keep) @ value


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
    if bias is not None:
        scores = scores + bias
    orphan = None
    if valid is not None:
        orphan = ~valid.any(-1, keepdim=True)
        scores = scores.masked_fill(~(valid | orphan), -math.inf)
    if keep is not None:
        scores = masked_scores(scores, keep, valid)
    weights = scores.softmax(-1)
    return weights if orphan is None else weights.masked_fill(orphan, 0.0)


def apply_score_mod(score_mod: ScoreMod | None, scores: Tensor) -> Tensor:
    """Apply a score function of ``flex_attention``, which takes one score at a time, to all scores.

    Args:
        score_mod: function of a score and of its sample, head, query and key index; ``None`` changes nothing.
        scores: ``(B, H, Q, K)``.

    Example:
        >>> apply_score_mod(lambda score, b, h, q, k: score - (q - k).abs(), torch.zeros(1, 1, 2, 2))[0, 0]
        tensor([[ 0., -1.],
                [-1.,  0.]])
    """
    if score_mod is None:
        return scores
    function: Callable[..., Tensor] = score_mod
    for place in (4, 3, 2, 1):
        function = torch.vmap(function, in_dims=(0, *(0 if each == place else None for each in (1, 2, 3, 4))))
    return function(scores, *(torch.arange(size, device=scores.device) for size in scores.shape))


def masked_scores(scores: Tensor, keep: Tensor, valid: Tensor | None = None) -> Tensor:
    r"""Set dropped scores to :math:`-\infty`, and make fully dropped rows uniform over their valid keys.

    The model's own mask is already applied to the scores. Rows without a valid key are unchanged.

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
