"""Dropout of any tensor from a seed: its mask is never in memory, and computed again for the gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnreg.errors import InputError
from attnreg.kernels.device.draws import Draw, table_of
from attnreg.kernels.device.drop import drop_values, scale_heads
from attnreg.kernels.device.numbers import blocks_of
from attnreg.kernels.launching import HOST_READS, launch, likeness

DTYPES = torch.float16, torch.bfloat16, torch.float32
MOST_HEADS = 4096
Sizes = tuple[int, int, int, int]
Layout = tuple[Sizes, Sequence[int]]  # and whether decisions differ by query, and by key


def dropout(
    x: Tensor,
    seed: int | Tensor,
    p: float | Tensor,
    *,
    shape: Sequence[int] | None = None,
    rescale: bool = True,
    first_query: int | Tensor = 0,
    samples: Tensor | None = None,
    first_key: Tensor | None = None,
    valid: Tensor | None = None,
    counts: Tensor | None = None,
) -> Tensor:
    r"""Set values to zero where :func:`attnreg.functional.seeded_keep` drops, and divide the others by 1 - p.

    .. math:: y = x \cdot M / (1 - p)

    Args:
        x: float16, bfloat16 or float32, of at most four dimensions.
        seed: as in `seeded_keep`, as are ``p``, ``first_query``, ``samples`` and ``first_key``.
        p: the drop rate, a number or 0-d.
        shape: the shape of the decisions, ``(B, H, Q, K)`` (default: that of x, with ones in front). A size is that
            of x, or 1 in dimensions of x that share decisions; the first dimension of x is B, the last ones Q and K.
        rescale: whether to divide by 1 - p.
        first_query: index of the first query.
        samples: indices of the samples.
        first_key: index of the first key.
        valid: the tokens to count, bool: the shape of x without its last dimension.
        counts: int64, ``(2,)``, to which are added: the numbers of nonzero values that are dropped, and of all.

    Raises:
        InputError: if the arguments do not fit together.
    """
    sizes, by = _layout(x.shape, shape)
    decisions = sizes if shape is None else tuple(shape)
    first, queries, fits = table_of(first_query, decisions[0], x.device)
    _, keys, fit = table_of(first_key, decisions[0], x.device)
    if not (fits and fit) or (samples is not None and samples.shape != (decisions[0],)):
        raise InputError(f"Expected `samples`, `first_query` and `first_key` for {decisions[0]} samples.")
    if x.dtype not in DTYPES:
        raise InputError(f"Expected float16, bfloat16 or float32, got {x.dtype}.")
    if valid is not None and valid.numel() * x.shape[-1] != x.numel():
        raise InputError(f"Expected `valid` of shape {tuple(x.shape[:-1])}, got {tuple(valid.shape)}.")
    samples = None if samples is None else samples.to(x.device)
    draw = Draw(seed, p, samples, queries, keys, first, by[0], by[1], int(rescale))
    if torch.compiler.is_compiling():
        rest = (torch.as_tensor(seed), torch.as_tensor(p), samples, queries, keys, [*draw[5:], *sizes, *by[2:]])
        out, counted = dropout_op(x, *rest, valid, counts is not None)
        if counts is not None:
            counts.add_(counted)
        return out
    dropped: Tensor = _Dropout.apply(x, draw, (sizes, by[2:]), valid, counts)
    return dropped


def head_factors(
    seed: int | Tensor,
    batch: int,
    heads: int,
    p: float | Tensor,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    samples: Tensor | None = None,
) -> Tensor:
    r"""Return the factors of the heads of all samples, as :class:`attnreg.DropHead` computes them, bit for bit.

    .. math:: \xi_{bh} H / \sum_{h'} \xi_{bh'}, \qquad \xi = \text{sample\_heads}(p, u)

    Returns:
        ``(B, H)``; u is ``seeded_uniform(seed, (batch, heads), samples=samples)``.

    Raises:
        InputError: if there are more than 4096 heads.
    """
    if heads > MOST_HEADS:
        raise InputError(f"Expected at most {MOST_HEADS} heads, got {heads}.")
    samples = None if samples is None else samples.to(device)
    if torch.compiler.is_compiling():
        return head_factors_op(torch.as_tensor(seed), torch.as_tensor(p), samples, batch, heads, dtype, device)
    return _head_factors(Draw(seed, p, None, None, None), samples, batch, heads, dtype, device)


class _Dropout(torch.autograd.Function):
    """Dropout outside of compiled code; its gradient is the same function."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        draw: Draw,
        layout: tuple[Sizes, Sequence[int]],
        valid: Tensor | None,
        counts: Tensor | None,
    ) -> Tensor:
        ctx.draw, ctx.layout = draw, layout
        return _dropout(x, draw, *layout, valid, counts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _Dropout.apply(grad, ctx.draw, ctx.layout, None, None), None, None, None, None


def _dropout(
    x: Tensor, draw: Draw, sizes: Sizes, by: Sequence[int], valid: Tensor | None, counts: Tensor | None
) -> Tensor:
    argument = draw.argument
    if argument is None or not x.numel():
        if counts is not None:
            there = x != 0 if valid is None else (x != 0) & valid.view(*x.shape[:-1], 1)
            counts[1] += there.sum()
        return x.clone()
    x = x.contiguous()
    out = torch.empty_like(x)
    _, heads, queries, keys = sizes
    rows = x.numel() // keys
    grid, r, k = blocks_of(rows, keys)
    valid = None if valid is None else valid.contiguous()
    arguments = (x, out, counts, valid, argument, rows, heads, queries, keys, *by)
    launch(drop_values, grid, x.device, arguments, (r, k), likeness(arguments))
    return out


def _head_factors(
    draw: Draw, samples: Tensor | None, batch: int, heads: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    out = torch.empty((batch, heads), dtype=dtype, device=device)
    argument = draw.argument
    if argument is None or not out.numel():
        return out.fill_(1.0)
    width = 1 << (heads - 1).bit_length()
    r = max(1, 1024 // width)
    arguments = (out, argument, samples, batch, heads)
    launch(scale_heads, (-(-batch // r), 1, 1), out.device, arguments, (r, width), likeness(arguments))
    return out


def _layout(x: Sequence[int], shape: Sequence[int] | None) -> tuple[Sizes, tuple[int, ...]]:
    """Return the size of x in four dimensions, and in which of these decisions differ."""
    if len(x) > 4 or (shape is not None and len(shape) != 4):
        raise InputError(f"Expected a tensor of at most four dimensions, got {tuple(x)}.")
    if shape is None:
        sizes = (1,) * (4 - len(x)) + tuple(x)
    elif math.prod(shape) == math.prod(x):
        sizes = tuple(shape)
    else:
        sizes = (*x[:1], *(1,) * (4 - len(x)), *x[1:])
    decisions = sizes if shape is None else shape
    if len(sizes) != 4 or any(a not in (1, b) for a, b in zip(decisions, sizes, strict=True)):
        raise InputError(f"Expected decisions of a shape that broadcasts to {tuple(x)}, got {tuple(decisions)}.")
    by = tuple(int(a > 1) for a in decisions)
    return (sizes[0], sizes[1], sizes[2], sizes[3]), by


def _unpacked(seed: Tensor, rate: Tensor, samples: Tensor | None, queries: Tensor | None, keys: Tensor | None,
              layout: Sequence[int]) -> tuple[Draw, Sizes, Sequence[int]]:  # fmt: skip
    first, by_sample, by_head, divide, *sizes = layout
    draw = Draw(int(seed), rate, samples, queries, keys, first, by_sample, by_head, divide)
    return draw, (sizes[0], sizes[1], sizes[2], sizes[3]), sizes[4:]


DROPOUT = (
    "(Tensor x, Tensor seed, Tensor rate, Tensor? samples, Tensor? queries, Tensor? keys, SymInt[] layout, "
    "Tensor? valid, bool counted) -> (Tensor, Tensor)"
)
HEADS = (
    "(Tensor seed, Tensor rate, Tensor? samples, SymInt batch, SymInt heads, ScalarType dtype, Device device) -> Tensor"
)


@torch.library.custom_op("attnreg::dropout", mutates_args=(), schema=DROPOUT, tags=HOST_READS)
def dropout_op(x: Tensor, seed: Tensor, rate: Tensor, samples: Tensor | None, queries: Tensor | None,
               keys: Tensor | None, layout: Sequence[int], valid: Tensor | None,
               counted: bool) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the dropped tensor, and the two counts."""
    counts = torch.zeros(2, dtype=torch.int64, device=x.device)
    draw, sizes, by = _unpacked(seed, rate, samples, queries, keys, layout)
    return _dropout(x, draw, sizes, by, valid, counts if counted else None), counts


@dropout_op.register_fake
def _(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, memory_format=torch.contiguous_format), x.new_empty(2, dtype=torch.int64)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, *draw, layout, _, _ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*draw)
    ctx.layout = layout


def _backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    return dropout_op(grad, *ctx.saved_tensors, ctx.layout, None, False)[0], *[None] * 8


dropout_op.register_autograd(_backward, setup_context=_save)


@torch.library.custom_op("attnreg::head_factors", mutates_args=(), schema=HEADS, tags=HOST_READS)
def head_factors_op(seed: Tensor, rate: Tensor, samples: Tensor | None, batch: int, heads: int, dtype: torch.dtype,
                    device: torch.device) -> Tensor:  # fmt: skip
    """Return the factors of heads."""
    return _head_factors(Draw(int(seed), rate, None, None, None), samples, batch, heads, dtype, device)


@head_factors_op.register_fake
def _(seed: Tensor, rate: Tensor, samples: Tensor | None, batch: int, heads: int, dtype: torch.dtype,
      device: torch.device) -> Tensor:  # fmt: skip
    return torch.empty((batch, heads), dtype=dtype, device=device)
