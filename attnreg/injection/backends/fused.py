"""Fused attention under a mask: within a kernel, by its output, or written out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attnreg import functional, kernels
from attnreg.functional.attention import per_head, scores_dropout
from attnreg.functional.blocks import closed, dropped_weights, in_blocks
from attnreg.functional.seeded import is_traced, transformed
from attnreg.injection.backends.allowed import Allowed
from attnreg.injection.backends.base import Masking, Watching
from attnreg.injection.backends.layout import Layout
from attnreg.masks import Mask

LARGEST_HEAD = 256
LARGEST_HEAD_32 = 128  # in float32: of larger heads, even small blocks take 128 KiB of shared memory, and spill
KERNEL_DTYPES = torch.float16, torch.bfloat16
LONG = 2**24  # positions; from here on, a mask takes so much memory that the kernel, slow in float32, is better


@dataclass(frozen=True, eq=False)
class Attention:
    """A call of fused attention, in ``(B, H, Q, K)``."""

    query: Tensor  # (B, H, Q, D)
    key: Tensor  # (B, H_kv, K, D)
    value: Tensor  # (B, H_kv, K, D_v)
    allowed: Allowed  # the positions of keys
    with_sinks: Allowed  # the positions of all columns
    layout: Layout
    scale: float | None
    dropout_p: float
    enable_gqa: bool

    def under(self, mask: Mask | None, mode: Masking, run: Callable[[], Tensor]) -> Tensor:
        """Return the output ``(B, H, Q, D_v)`` under a mask; ``run`` computes it without one."""
        if mask is None and mode.tap is None:
            mode.note(None)
            return run()
        if mask is None:
            return self._written_out(None, mode)
        rest, factor = mask, None
        if mask.scores is not None and mask.drops_layer:
            if not self.layout.has_sinks:
                mode.note(mask)
                return self._uniform()
            # Rows without valid keys attend to the sinks, so that the scores are needed.
            rest = mask = replace(mask, scores=mask.scores.to(self.query.device))
        if mask.weights is not None and not self.layout.has_sinks:
            rest, factor = mask.factored()
        if factor is not None and rest.is_empty:
            mode.count(mask.kept, factor)
            out = run()
        elif (options := self.kernel_options(rest, mode) if kernels.runs_on(self.query.device) else None) is not None:
            if self.dropout_p:  # after the mask's decisions on weights, which alone count
                shape = (*self.query.shape[:-1], self.key.shape[-2])
                dropout = mode.own_dropout(self.query, shape, self.dropout_p)
                options["weights"] = *(options["weights"] or (None,)), dropout
            if len(rest.drawn_weights) > 1:  # the kernel counts what the first of them drops
                mode.note(mask)
            else:
                options["counts"], options["rows"] = mode.counter(factor)
            out = kernels.attention(self.query, self.key, self.value, **options)
        elif (
            mode.tap is None and not rest.has_factors and self.with_sinks is self.allowed and self.allowed.bias is None
        ):
            keep = rest.scores
            for drawn in rest.drawn:
                keep = drawn.written_out() if keep is None else keep & drawn.written_out()
            assert keep is not None
            mode.count(keep if mask.kept is None else mask.kept, factor)
            valid, traced = self.allowed.valid(self.query.device), not mode.is_quiet and is_traced()
            others: Any = {"scale": self.scale, "dropout_p": self.dropout_p, "enable_gqa": self.enable_gqa}
            out = scores_dropout(self.query, self.key, self.value, keep, valid, traced=traced, **others)
        elif rest.drawn_weights and (dropped := self._of_weights(rest, factor, mode)) is not None:
            out = dropped
        else:
            written = rest.written_out(self.query.dtype)
            mode.count(written.units_kept, factor)
            out = self._written_out(written, mode)
        if factor is None:
            return out
        return out * (factor if factor.dtype == out.dtype else factor.to(out.dtype))

    def kernel_options(self, mask: Mask, mode: Watching) -> dict[str, Any] | None:
        """Return the kernel's arguments for a mask that the kernel can apply, where it is faster than torch's."""
        query, (*_, queries, size) = self.query, self.query.shape
        keys, device, bias = self.key.shape[-2], query.device, self.allowed.bias
        if (
            not (kernels.runs_on(device) and kernels.multiplies(device))
            or self.layout.has_sinks
            or not mask.drops_in_kernel
            or mask.kept is not None
            # Without gradients, nobody knows whether the bias is trained: the repetition of a checkpoint decides alike.
            or (bias is not None and (bias.requires_grad or not mode.has_grad()))
            or not size == self.value.shape[-1] <= LARGEST_HEAD
            or (not torch.compiler.is_compiling() and transformed())
        ):
            return None
        is_cast = torch.is_autocast_enabled(device.type)
        dtype = torch.get_autocast_dtype(device.type) if is_cast else query.dtype
        fits = dtype == torch.float32 and queries * keys >= LONG and size <= LARGEST_HEAD_32
        if dtype not in KERNEL_DTYPES and not fits:
            return None
        for drawn in mask.drawn + mask.drawn_weights:
            if drawn.shape[3] != keys:
                return None
        if len(mask.drawn_weights) + bool(self.dropout_p) > 2:
            return None
        keep = mask.scores
        for drawn in mask.drawn[1:]:
            keep = drawn.written_out() if keep is None else keep & drawn.written_out()
        valid, bias = (self.allowed.by_mask, None) if bias is None else (None, self.allowed.shut_bias(device))
        return {
            "valid": None if valid is None else _in_four_dims(valid, keys),
            "causal": None if self.allowed.causal is None else 0,
            "bias": None if bias is None else _in_four_dims(bias, keys),
            "keep": None if keep is None else _in_four_dims(keep, keys),
            "scale": self.scale,
            "scores": mask.drawn[0] if mask.drawn else None,
            "weights": mask.drawn_weights,
        }

    def _of_weights(self, mask: Mask, factor: Tensor | None, mode: Masking) -> Tensor | None:
        """Drop weights by the decisions of one draw, block by block, so that weights are never all in memory."""
        query, allowed = self.query, self.allowed
        if mask.drawn or mask.scores is not None or not mask.drops_in_kernel or len(mask.drawn_weights) > 1:
            return None
        if not query.is_cpu or self.dropout_p or self.with_sinks is not allowed or allowed.bias is not None:
            return None
        key, value = self.key, self.value
        if key.shape[1] != query.shape[1]:
            key, value = per_head(key, query.shape[1]), per_head(value, query.shape[1])
        if (not mode.is_quiet and is_traced()) or not in_blocks(query, key, value):
            return None
        (drawn,) = mask.drawn_weights
        keep = drawn.written_out()
        mode.count(keep if mask.kept is None else mask.kept, factor)
        shut = allowed.once(("closed", query.dtype), lambda: closed(allowed.valid(query.device), query))
        scale = query.shape[-1] ** -0.5 if self.scale is None else self.scale
        return dropped_weights(query, key, value, keep, shut, scale, 1 / float(drawn.divisor))

    def _uniform(self) -> Tensor:
        """Attend evenly, without scores; only where there are no sinks."""
        # Empty sums keep Q, K and a learned bias in the graph with zero gradients, and cannot add a NaN.
        unused = (x[:0].sum() for x in (self.query, self.key, self.with_sinks.bias) if x is not None)
        shape, valid = (*self.query.shape[:-1], self.value.shape[-2]), self.allowed.valid(self.query.device)
        return functional.uniform_attention(self.value, valid, shape, dropout_p=self.dropout_p) + sum(unused)

    def _written_out(self, mask: Mask | None, mode: Masking) -> Tensor:
        """Apply a mask of tensors: to the scores of the fused kernel if it has no factors, else to weights."""
        query, key, value, layout, scale, dropout_p = (
            self.query, self.key, self.value, self.layout, self.scale, self.dropout_p
        )  # fmt: skip
        key_valid = valid = self.allowed.valid(query.device)
        if self.with_sinks is not self.allowed:
            valid = self.with_sinks.valid(query.device)
        bias = self.with_sinks.bias
        full = (*query.shape[:-1], key.shape[-2])
        keep = None if mask is None else mask.scores
        gamma = None if mask is None or dropout_p or layout.has_sinks else mask.relaxed  # dropout is of relaxed weights
        if keep is None and gamma is not None:
            keep = torch.ones((), dtype=torch.bool, device=query.device)
        if keep is not None and layout.has_sinks:
            keep, open_ = layout.around_keys(keep, key_valid, full)
            valid = open_ if valid is None or open_ is None else open_ & valid
        elif keep is not None:
            valid = key_valid
        if bias is not None and valid is not None:
            # A query row without a valid key keeps the weights that the model's finite biases give it.
            orphan = ~valid.any(-1, keepdim=True)
            valid = valid | orphan
            keep = keep if keep is None else keep | orphan
        has_relaxed = mask is not None and mask.relaxed is not None
        is_fused = mask is not None and not mask.has_products and (gamma is not None or not has_relaxed)
        if keep is not None and mask is not None and is_fused and mode.tap is None:
            out = functional.scores_dropout(
                query, key, value, keep, valid, bias, scale, dropout_p=dropout_p, enable_gqa=self.enable_gqa
            )
            if gamma is None:
                return out
            key_shape = (*full[:-1], layout.number_of_keys(full[-1]))
            return functional.relaxed_output(out, value, gamma, mask.scores, key_valid, key_shape)
        if self.enable_gqa:
            key, value = (per_head(x, query.shape[1]) for x in (key, value))
        weights = functional.attention_weights(query, key, valid, bias, scale, keep)
        weights = mode.finish(layout, weights, mask, key_valid)
        weights = F.dropout(weights, dropout_p) if dropout_p else weights
        return weights @ value


def _in_four_dims(mask: Tensor, keys: int) -> Tensor:
    """Return a mask with four dimensions, expanded over the keys."""
    mask = mask.view(*[1] * (4 - mask.dim()), *mask.shape)
    return mask.expand(*mask.shape[:3], keys)
