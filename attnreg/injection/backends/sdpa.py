"""Attention in one call of torch's fused kernel, ``F.scaled_dot_product_attention``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor

from attnreg import functional
from attnreg.injection.layout import batch_and_heads, split_attention_mask
from attnreg.masks import Mask

if TYPE_CHECKING:
    from attnreg.injection.mode import AttentionMode
    from attnreg.injection.tap import Tap

FUNCTIONS = (F.scaled_dot_product_attention,)


def intercept(
    mode: AttentionMode,
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Fused attention with the provider's mask."""
    raw = query, key, value, attn_mask
    lead = query.shape[:-2]
    if len(lead) != 2:
        batch, heads = batch_and_heads(lead, mode.batch_size)
        if attn_mask is not None:
            attn_mask = attn_mask.expand(*lead, *attn_mask.shape[-2:]).reshape(batch, heads, *attn_mask.shape[-2:])
        query, key, value = (x.reshape(batch, heads, *x.shape[-2:]) for x in (query, key, value))
    shape = (*query.shape[:-1], key.shape[-2])
    valid, bias = split_attention_mask(attn_mask, is_causal, query, key)
    mask = mode.ask(shape, valid, like=query, query=query, key=key)
    if mask is None and mode.tap is None:
        return func(*raw, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    out = _attend(mask or Mask(), mode.tap, shape, query, key, value, valid, bias, dropout_p, scale, enable_gqa)
    return out.reshape(*lead, *out.shape[-2:])


def _attend(
    mask: Mask,
    tap: Tap | None,
    shape: tuple[int, ...],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    valid: Tensor | None,
    bias: Tensor | None,
    dropout_p: float,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    keep = mask.scores
    if mask.drops_layer:
        # Empty sums: Q, K and a learned bias stay in the graph, with zero gradients, and cannot spoil the value.
        unused = (x[:0].sum() for x in (query, key, bias) if x is not None)
        return functional.uniform_attention(value, valid, shape) + sum(unused)
    if bias is not None and valid is not None:
        # A row without a valid key stays as the model's finite biases make it.
        orphan = ~valid.any(-1, keepdim=True)
        valid = valid | orphan
        keep = keep if keep is None else keep | orphan
    if keep is not None and mask.weights is None and mask.normalized is None:
        return functional.scores_dropout(
            query, key, value, keep, valid, bias, scale, dropout_p=dropout_p, enable_gqa=enable_gqa
        )
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    weights = mask.of_weights(functional.attention_weights(query, key, valid, bias, scale, keep), valid)
    if tap is not None:
        weights = tap(weights)
    return F.dropout(weights, dropout_p) @ value if dropout_p else weights @ value
