"""Attention with dropped weights on a CPU, a few rows at a time, so that they stay in its cache."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import torch
from torch import Tensor

BLOCK = 2**17  # positions computed at once


def in_blocks(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether :func:`dropped_weights` supports these tensors of a CPU."""
    fits = query.ndim == 4 and query.shape[:2] == key.shape[:-2] == value.shape[:-2]
    return fits and not torch.is_autocast_enabled("cpu")


def dropped_weights(
    query: Tensor, key: Tensor, value: Tensor, keep: Tensor, closed: Tensor | None, scale: float, share: float
) -> Tensor:
    """Compute :func:`weights_dropout` on a CPU, outside of transforms; ``closed`` is the result of :func:`closed`."""
    # This is `apply` without its checks for function transforms.
    return super(torch.autograd.Function, _WeightsDropout).apply(query, key, value, keep, closed, scale, share)


def closed(valid: Tensor | None, like: Tensor) -> Tensor | None:
    """Return minus infinity at positions that are not valid, and 0 elsewhere, with four dimensions."""
    if valid is None:
        return None
    return like.new_zeros(()).masked_fill(~valid, -math.inf).view(*[1] * (4 - valid.dim()), *valid.shape)


class _WeightsDropout(torch.autograd.Function):
    """Attention whose weights, a few rows at a time, are computed again for the gradient.

    On a CPU this takes a third of the time: the weights stay in its cache, and are changed in place.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, keep: Tensor, closed: Tensor | None, *rest: float
    ) -> Tensor:
        ctx.rest = scale, share = rest
        full = *query.shape[:-1], key.shape[-2]
        out, total = query.new_empty(*full[:-1], value.shape[-1]), query.new_empty(*full[:-1], 1)
        kept = keep.view(torch.int8).expand(full)  # int8 becomes float in a fifth of the time of bool
        scaled, keys, values = (query * scale).contiguous(), key.contiguous(), value.contiguous()
        wide, least = None if closed is None else closed.expand(full), torch.finfo(query.dtype).min
        for rows, columns in _blocks(full):
            weights = scaled[rows] @ keys[columns].mT
            weights = weights if wide is None else weights.add_(wide[rows])
            top = weights.amax(-1, keepdim=True).clamp_(min=least)
            weights = weights.sub_(top).exp_()
            sums = weights.sum(-1, keepdim=True)
            sums = sums.clamp_(min=1)  # a row without a valid key has the sum 0, and weights of 0 in both passes
            total[rows] = top + sums.log()
            weights *= kept[rows].to(weights.dtype)
            out[rows] = (weights @ values[columns]).div_(sums)
        out *= share
        ctx.save_for_backward(query, key, value, keep, closed, out, total)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, keep, closed, out, total = ctx.saved_tensors
        scale, share = ctx.rest
        if torch.is_grad_enabled():  # the gradients need gradients, too
            inputs = [x for x in (query, key, value) if x.requires_grad]
            weights = scale * query @ key.mT
            if closed is not None:
                orphan = (closed == -math.inf).all(-1, keepdim=True)
                weights = weights + closed.masked_fill(orphan, 0.0)
                keep = keep & ~orphan
            out = (weights.softmax(-1) * keep * share) @ value
            grads = iter(torch.autograd.grad(out, inputs, grad, create_graph=True))
            return *(next(grads) if x.requires_grad else None for x in (query, key, value)), None, None, None, None
        full = *query.shape[:-1], key.shape[-2]
        of_query, of_key, of_value = (torch.zeros(x.shape, dtype=x.dtype) for x in (query, key, value))
        mean, grad = (grad * out).sum(-1, keepdim=True), (grad * share).contiguous()
        keep = keep.view(torch.int8).expand(full)
        scaled, keys, values = (query * scale).contiguous(), key.contiguous(), value.contiguous()
        wide = None if closed is None else closed.expand(full)
        for rows, columns in _blocks(full):
            weights = scaled[rows] @ keys[columns].mT
            weights = weights if wide is None else weights.add_(wide[rows])
            weights = weights.sub_(total[rows]).exp_()
            kept = keep[rows].to(weights.dtype).mul_(weights)
            inner = (grad[rows] @ values[columns].mT).mul_(kept).addcmul_(weights, mean[rows], value=-1)
            of_query[rows] = (inner @ keys[columns]).mul_(scale)
            of_key[columns] += inner.mT @ scaled[rows]
            of_value[columns] += kept.mT @ grad[rows]
        return of_query, of_key, of_value, None, None, None, None


@functools.lru_cache(maxsize=8)
def _blocks(shape: tuple[int, ...]) -> list[tuple[Any, Any]]:
    """Return slices of samples, heads and query rows to compute at once, and the slices of their keys."""
    batch, heads, queries, keys = shape
    room = max(1, BLOCK // max(1, keys))
    sample_step, head_step = max(1, room // max(1, heads * queries)), max(1, room // max(1, queries))
    blocks = []
    for b, h in itertools.product(range(0, batch, sample_step), range(0, heads, head_step)):
        columns = slice(b, b + sample_step), slice(h, h + head_step)
        blocks += [((*columns, slice(q, q + room)), columns) for q in range(0, queries, room)]
    return blocks
