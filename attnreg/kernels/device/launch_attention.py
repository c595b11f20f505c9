"""The launches of the kernels of attention: one forward, two backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from attnreg.kernels.device.backward import key_gradients, query_gradient
from attnreg.kernels.device.draws import Draw
from attnreg.kernels.device.forward import attend
from attnreg.kernels.launching import is_interpreted, launch, likeness

PER_KEY, PER_SCORE = 1, 2
LARGEST_STRIDE = 2**22  # elements between two rows, so that offsets within a block fit in 32 bits
DENSE = torch.contiguous_format
SMALL = 32, 32, 4, 1
Mask = tuple[Tensor, int, int, int, int]
BIASED = "64, biased"  # smaller blocks, so that a tile of the bias fits into registers, too
#: BLOCK_M, BLOCK_N, num_warps and num_stages by kernel and largest head size, or float32, which takes no tensor cores.
#: A block of queries of `query_gradient` must be whole blocks of `key_gradients`, which reads rows that it wrote.
CONFIGS: dict[tuple[str, int | str], tuple[int, int, int, int]] = {
    ("attend", 64): (128, 64, 4, 3), ("query_gradient", 64): (64, 64, 4, 2), ("key_gradients", 64): (64, 64, 4, 2),
    ("attend", BIASED): (64, 64, 4, 3), ("query_gradient", BIASED): (64, 64, 4, 2),
    ("key_gradients", BIASED): (32, 64, 4, 2),
    ("attend", 128): (128, 64, 8, 2), ("query_gradient", 128): (128, 32, 8, 2), ("key_gradients", 128): (32, 128, 8, 2),
    ("attend", 256): (64, 64, 8, 2), ("query_gradient", 256): (64, 32, 8, 1), ("key_gradients", 256): (32, 64, 8, 1),
    **{(kernel, "float32"): SMALL for kernel in ("attend", "query_gradient", "key_gradients")},
}  # fmt: skip
if is_interpreted():
    CONFIGS = dict.fromkeys(CONFIGS, (16, 16, 1, 1))


class Call(NamedTuple):
    """The arguments that all kernels of a call share."""

    masks: tuple[Mask | None, ...]  # valid, keep and bias
    draws: tuple[tuple[Any, ...] | None, ...]  # of scores, and two of weights
    scalars: tuple[Any, ...]  # H, GROUP, QLEN, KLEN, OFFSET, scale
    constants: tuple[Any, ...]  # CAUSAL, VALID, KEEP, BIAS, SCORES, FIRST, SECOND, PRECISION, DIM, D
    head_class: int | str
    rows: tuple[Tensor, int, int, int] | None
    alike: tuple[Any, ...] | None


def prepared(
    query: Tensor,
    key: Tensor,
    valid: Tensor | None,
    keep: Tensor | None,
    bias: Tensor | None,
    rows: Tensor | None,
    draws: Sequence[Draw | None],
    draw_kinds: Sequence[int],
    causal: int | None,
    scale: float,
) -> Call:
    """Turn the arguments of a call into arguments of its kernels."""
    (batch, heads, queries, size), (shared, keys) = query.shape, key.shape[1:3]
    masks: list[Mask | None] = [None] * 3
    kinds = [0] * 3
    for i, mask in enumerate((valid, keep, bias)):
        if mask is not None:
            mask = mask.expand(batch, heads, queries, keys)
            strides = mask.stride()
            kinds[i] = PER_SCORE if strides[2] else PER_KEY
            masks[i] = mask, strides[0], strides[1], strides[2], strides[3]
    arguments = tuple(None if draw is None else draw.argument for draw in draws)
    kinds += [kind if argument else 0 for kind, argument in zip(draw_kinds, arguments, strict=True)]
    single = query.dtype is torch.float32
    width = max(16, 1 << (size - 1).bit_length())
    constants = (causal is not None, *kinds, "ieee" if single else "tf32", size, width)
    head_class = "float32" if single else max(64, width)
    head_class = BIASED if head_class == 64 and bias is not None else head_class
    if rows is not None:
        rows = rows.expand(batch, heads, queries, 1)
    real = None if rows is None else (rows, rows.stride(0), rows.stride(1), rows.stride(2))
    scalars = heads, heads // shared, queries, keys, causal or 0, scale
    alike = likeness((*masks, *arguments, *scalars, real))
    return Call(tuple(masks), arguments, scalars, constants, head_class, real, alike)


def forward(query: Tensor, key: Tensor, value: Tensor, call: Call, counts: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the output and one number per row, see `device.tiles`; add to the counts."""
    batch, heads, queries, size = query.shape
    out = torch.empty((batch, queries, heads, size), dtype=query.dtype, device=query.device).transpose(1, 2)
    sums = torch.empty((batch, heads, queries), dtype=torch.float32, device=query.device)
    strides = query.stride()[:3], key.stride()[:3], value.stride()[:3]
    alike = _with((query, key, value, counts, strides), call)
    arguments = (query, key, value, out, sums, counts, call.rows, *call.masks, *call.draws, *strides, *call.scalars)
    _launch(attend, call, query.device, batch * heads, queries, 0, arguments, alike)
    return out, sums


def backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, call: Call
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value."""
    (batch, heads, queries, _), (shared, keys) = query.shape, key.shape[1:3]
    grad = addressable(grad.to(query.dtype))
    dq, dk, dv = (torch.empty_like(x.transpose(1, 2), memory_format=DENSE).transpose(1, 2) for x in (query, key, value))
    room = batch, heads, -(-queries // 128) * 128  # see `device.backward.padded`
    rows = torch.empty((3, *room), dtype=torch.float32, device=sums.device).unbind()
    words = tuple(
        torch.empty(room, dtype=torch.int64, device=sums.device) if kind == PER_SCORE else None
        for kind in call.constants[4:7]
    )
    strides = tuple(x.stride()[:3] for x in (query, key, value, grad))
    shares = (*rows, words, *call.masks, *call.draws, *strides, *call.scalars)
    alike = _with((query, key, value, grad, out, sums, strides), call)
    blocks = (CONFIGS[kernel.__name__, call.head_class][0] for kernel in (query_gradient, key_gradients))
    assert next(blocks) % next(blocks) == 0, "a block of rows must have been written whole"
    queried = (query, key, value, out, grad, dq, sums, *shares)
    _launch(query_gradient, call, query.device, batch * heads, queries, 0, queried, alike)
    keyed = (query, key, value, grad, dk, dv, *shares)
    _launch(key_gradients, call, query.device, batch * shared, keys, 1, keyed, alike)
    return dq, dk, dv


def _with(arguments: tuple[Any, ...], call: Call) -> tuple[Any, ...] | None:
    """Return the likeness of a launch, without tensors that are allocated in this module, which are aligned."""
    alike = likeness(arguments)
    return None if alike is None or call.alike is None else (alike, call.alike)


def _launch(kernel: Any, call: Call, device: torch.device, heads: int, length: int, side: int,
            arguments: tuple[Any, ...], alike: tuple[Any, ...] | None) -> None:  # fmt: skip
    """Launch a kernel in blocks of queries (side 0) or keys (1): in small blocks, once larger ones did not fit."""
    while True:
        config = CONFIGS[kernel.__name__, call.head_class]
        grid, constants = (heads * -(-length // config[side]), 1, 1), (*call.constants, *config[:2])
        try:
            return launch(kernel, grid, device, arguments, constants, alike, warps=config[2], stages=config[3])
        except OutOfResources:
            if config == SMALL:
                raise
            for function in (attend, query_gradient, key_gradients):
                CONFIGS[function.__name__, call.head_class] = SMALL


def addressable(x: Tensor) -> Tensor:
    """Return a tensor whose last dimension is dense and whose rows are near enough to each other."""
    return x if x.stride(-1) == 1 and x.stride(-2) < LARGEST_STRIDE else x.contiguous()
