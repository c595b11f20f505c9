"""Attention through torch's fused kernel, ``F.scaled_dot_product_attention``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attnreg import functional
from attnreg.functional.attention import per_head
from attnreg.functional.validity import allowed
from attnreg.injection.backends.base import Backend, Call, Masking

PACKED = "_attnreg_packed"  # marks queries whose heads are packed; see `note_packed`


class FusedAttention(Backend):
    """``F.scaled_dot_product_attention``."""

    name = "sdpa"
    functions = (F.scaled_dot_product_attention,)

    def read(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Call:
        """Read a call, which is always attention."""
        valid, _ = split_attention_mask(materialized(attn_mask), is_causal, query, key)
        return Call(shape_of_scores(query, key), query=query, key=key, valid=valid)

    def intercept(
        self,
        mode: Masking,
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
        """Run fused attention with the provider's mask."""
        if hasattr(query, PACKED):
            attend = functools.partial(self.intercept, mode, func)
            return unpacked(attend, query, key, value, attn_mask, dropout_p, is_causal, scale)
        shape = shape_of_scores(query, key)
        site = mode.expect(self.name, shape)
        if site is None:
            return func(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        layout = site.layout
        queries, keys, values = (layout.canonical_rows(_of_lead(x, shape)) for x in (query, key, value))
        if mode.tap is not None and mode.taps_output and not dropout_p:
            out = func(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
            out = mode.tap.output(layout.canonical_rows(out), layout.of_keys(values, dim=-2))
            return layout.restored_rows(out, shape[:-1])
        valid, bias = split_attention_mask(materialized(attn_mask), is_causal, query, key)
        valid, bias = (None if x is None else layout.canonical_mask(x, shape) for x in (valid, bias))
        own_valid, own_bias = (None if x is None else layout.of_keys(x) for x in (valid, bias))
        full = (*queries.shape[:-1], keys.shape[-2])
        own = (*full[:-1], layout.number_of_keys(full[-1]))
        own_keys = layout.of_keys(keys, dim=-2)
        mask = mode.ask(site, own, own_valid, like=query, query=queries, key=own_keys, bias=own_bias, scale=scale)
        if mask is None and mode.tap is None:
            return func(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        if mask is not None and mask.drops_layer:
            # Empty sums keep Q, K and a learned bias in the graph with zero gradients, and cannot add a NaN.
            unused = (x[:0].sum() for x in (queries, keys, bias) if x is not None)
            out = functional.uniform_attention(layout.of_keys(values, dim=-2), own_valid, own) + sum(unused)
            return layout.restored_rows(out, shape[:-1])
        keep = None if mask is None else mask.scores
        gamma = None if mask is None or dropout_p or layout.has_sinks else mask.relaxed  # dropout is of relaxed weights
        if keep is None and gamma is not None:
            keep = torch.ones((), dtype=torch.bool, device=queries.device)
        if keep is not None:
            keep, valid = layout.around_keys(keep, own_valid, full)
        if bias is not None and valid is not None:
            # A query row without a valid key keeps the weights that the model's finite biases give it.
            orphan = ~valid.any(-1, keepdim=True)
            valid = valid | orphan
            keep = keep if keep is None else keep | orphan
        has_relaxed = mask is not None and mask.relaxed is not None
        is_fused = mask is not None and not mask.has_products and (gamma is not None or not has_relaxed)
        if keep is not None and mask is not None and is_fused and mode.tap is None:
            out = functional.scores_dropout(
                queries, keys, values, keep, valid, bias, scale, dropout_p=dropout_p, enable_gqa=enable_gqa
            )
            if gamma is not None:
                out = functional.relaxed_output(out, values, gamma, mask.scores, own_valid, own)
            return layout.restored_rows(out, shape[:-1])
        if enable_gqa:
            keys, values = (per_head(x, queries.shape[1]) for x in (keys, values))
        weights = functional.attention_weights(queries, keys, valid, bias, scale, keep)
        weights = mode.finish(layout, weights, mask, own_valid)
        weights = F.dropout(weights, dropout_p) if dropout_p else weights
        return layout.restored_rows(weights @ values, shape[:-1])


def note_packed(x: Tensor, reshaped: Tensor) -> None:
    """Mark queries ``(B, H, 1, D)`` that become ``(B, H_kv, H / H_kv, D)``: transformers packs those of one token."""
    same_ends = x.dim() == reshaped.dim() == 4 and x.shape[::3] == reshaped.shape[::3]
    if same_ends and x.shape[2] == 1 < reshaped.shape[2] and not torch.compiler.is_compiling():
        setattr(reshaped, PACKED, True)


def unpacked(
    attend: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *options: Any
) -> Tensor:
    """Compute the attention of packed queries with the heads as heads, not as queries."""
    wide, mask = (None if x is None else x.flatten(1, 2).unsqueeze(2) for x in (query, mask))
    return attend(wide, key, value, mask, *options, enable_gqa=True).unflatten(1, query.shape[1:3]).squeeze(3)


def shape_of_scores(query: Tensor, key: Tensor) -> tuple[int, ...]:
    """Return ``(..., Q, K)``: queries and keys broadcast, unless several query heads share a key head."""
    lead = tuple(query.shape[:-2])
    pairs = zip(lead, key.shape, strict=False)
    if len(lead) != key.dim() - 2 or any(a != b and 1 in (a, b) for a, b in pairs):
        lead = tuple(torch.broadcast_shapes(lead, key.shape[:-2]))
    return (*lead, query.shape[-2], key.shape[-2])


def _of_lead(rows: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Expand queries, keys or values that broadcast to all samples and heads of the scores."""
    lead = tuple(rows.shape[:-2])
    fits = len(lead) == len(shape) - 2 and not any(a == 1 < b for a, b in zip(lead[:-1], shape, strict=False))
    return rows if fits else rows.expand(*shape[:-2], *rows.shape[-2:])


def split_attention_mask(
    attn_mask: Tensor | None, is_causal: bool, query: Tensor, key: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Split the mask arguments of torch's fused attention into the valid positions, bool, and a float bias."""
    valid = bias = None
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        valid = attn_mask
    elif attn_mask is not None:
        valid, bias = allowed(attn_mask), attn_mask
    if is_causal:
        causal = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        valid = causal if valid is None else valid & causal
    return valid, bias


def materialized(attn_mask: Tensor | None) -> Tensor | None:
    """Return a mask as a plain tensor, also if it is a ``torch.nn.attention.bias`` object."""
    make = getattr(attn_mask, "_materialize", None)
    return attn_mask if make is None else make(attn_mask.device)  # type: ignore[union-attr]


BACKEND = FusedAttention()
