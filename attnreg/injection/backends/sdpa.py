"""Attention through torch's fused kernel, ``F.scaled_dot_product_attention``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attnreg.injection.backends.allowed import Allowed
from attnreg.injection.backends.base import Backend, Call, Masking
from attnreg.injection.backends.fused import Attention
from attnreg.injection.backends.layout import STANDARD, Layout

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
        shape = shape_of_scores(query, key)
        allowed = Allowed.of_sdpa(materialized(attn_mask), is_causal, *shape[-2:])
        return Call(shape, query=query, key=key, valid=allowed.valid(query.device))

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
        mask = attn_mask if attn_mask is None or type(attn_mask) is Tensor else materialized(attn_mask)
        allowed = mode.read(mask, is_causal, shape[-2], shape[-1], query.device)
        with_sinks, queries, keys, values = allowed, query, key, value
        if not (layout.is_plain and query.ndim == key.ndim == 4 and query.shape[0] == key.shape[0]):
            queries, keys, values = (layout.canonical_rows(_expanded(x, shape)) for x in (query, key, value))
            with_sinks, allowed = _canonical(allowed, layout, shape, query.device)

        def run() -> Tensor:
            out = func(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
            return out if layout.dims == STANDARD else layout.canonical_rows(out)

        attention = Attention(queries, keys, values, allowed, with_sinks, layout, scale, dropout_p, enable_gqa)
        if mode.tap is not None and mode.taps_output and not dropout_p:
            out = mode.tap.output(run(), layout.of_keys(values, dim=-2))
        else:
            keys = layout.of_keys(keys, dim=-2) if layout.has_sinks else keys
            site_shape = (*queries.shape[:-1], keys.shape[-2])
            fields: Any = {"query": queries, "key": keys, "bias": allowed.bias, "scale": scale, "in_kernel": True}
            out = attention.under(mode.ask(site, site_shape, allowed, like=query, **fields), mode, run)
        return out if layout.dims == STANDARD else layout.restored(out, (*shape[:-1], out.shape[-1]))


def note_packed(x: Tensor, reshaped: Tensor) -> None:
    """Mark queries ``(B, H, 1, D)`` that become ``(B, H_kv, H / H_kv, D)``: transformers packs queries of one token."""
    is_one = x.ndim == reshaped.ndim == 4 and x.shape[2] == 1 < reshaped.shape[2]
    if is_one and x.shape[::3] == reshaped.shape[::3] and not torch.compiler.is_compiling():
        setattr(reshaped, PACKED, True)


def unpacked(
    attend: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *options: Any
) -> Tensor:
    """Compute the attention of packed queries with the heads as heads, not as queries."""
    wide, mask = (None if x is None else x.flatten(1, 2).unsqueeze(2) for x in (query, mask))
    return attend(wide, key, value, mask, *options, enable_gqa=True).unflatten(1, query.shape[1:3]).squeeze(3)


def shape_of_scores(query: Tensor, key: Tensor) -> tuple[int, ...]:
    """Return ``(..., Q, K)``: queries and keys broadcast, unless several query heads share a key head."""
    lead, of_keys = tuple(query.shape[:-2]), tuple(key.shape[:-2])
    if lead != of_keys:
        pairs = zip(lead, of_keys, strict=False)
        if len(lead) != len(of_keys) or any(a != b and 1 in (a, b) for a, b in pairs):
            lead = tuple(torch.broadcast_shapes(lead, of_keys))
    return (*lead, query.shape[-2], key.shape[-2])


def _expanded(rows: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Expand queries, keys or values that broadcast to all samples and heads of the scores."""
    lead = tuple(rows.shape[:-2])
    fits = len(lead) == len(shape) - 2 and not any(a == 1 < b for a, b in zip(lead[:-1], shape, strict=False))
    return rows if fits else rows.expand(*shape[:-2], *rows.shape[-2:])


def _canonical(
    allowed: Allowed, layout: Layout, shape: tuple[int, ...], device: torch.device
) -> tuple[Allowed, Allowed]:
    """Return the allowed positions in ``(B, H, Q, K)``: of all columns, and of keys alone."""
    masks = (allowed.valid(device), allowed.bias)
    valid, bias = (None if mask is None else layout.canonical_mask(mask, shape) for mask in masks)
    key_valid, key_bias = (None if mask is None else layout.of_keys(mask) for mask in (valid, bias))
    return Allowed(valid, bias), Allowed(key_valid, key_bias)


def materialized(attn_mask: Tensor | None) -> Tensor | None:
    """Return a mask as a plain tensor, also if it is a ``torch.nn.attention.bias`` object."""
    make = getattr(attn_mask, "_materialize", None)
    return attn_mask if make is None else make(attn_mask.device)  # type: ignore[union-attr]


BACKEND = FusedAttention()
