"""The random numbers of a draw, or its decisions, in one launch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from attnreg.kernels.device.draws import Draw, table_of
from attnreg.kernels.device.drop import write_numbers
from attnreg.kernels.launching import HOST_READS, launch, likeness

BLOCK = 2048  # numbers in a block
KEYS = 16, 128, 512  # keys in a block: the fewest that hold all


def numbers(
    seed: int | Tensor,
    shape: Sequence[int],
    p: float | Tensor | None,
    device: torch.device,
    first_query: int | Tensor = 0,
    samples: Tensor | None = None,
    first_key: Tensor | None = None,
) -> Tensor | None:
    """Return decisions, or without p numbers; ``None`` if no kernel supports these indices.

    A kernel supports samples of four dimensions, and first queries and keys that are one number or one per sample,
    ``(B, 1, 1)``.
    """
    count = math.prod(shape[:-3])
    first, queries, fits = table_of(first_query, count, device)
    none, keys, fit = table_of(first_key, count, device)
    if not (fits and fit) or none or (isinstance(seed, Tensor) and not seed.is_cpu):
        return None
    if samples is not None:
        if len(shape) != 4:
            return None
        samples = samples.to(device)
    if torch.compiler.is_compiling():  # tensors, so that compiled code serves all seeds and rates
        rate = None if p is None else torch.as_tensor(p)
        return numbers_op(torch.as_tensor(seed), rate, list(shape), samples, queries, keys, first, device)
    return _numbers(Draw(seed, 1.0 if p is None else p, samples, queries, keys, first), shape, p is not None, device)


def _numbers(draw: Draw, shape: Sequence[int], decided: bool, device: torch.device) -> Tensor:
    out = torch.empty(tuple(shape), dtype=torch.bool if decided else torch.float32, device=device)
    if not out.numel():
        return out
    argument = draw.argument
    if argument is None:
        return out.fill_(True)
    heads, queries, keys = (1, 1, 1, *shape)[-3:]
    rows = out.numel() // keys
    grid, r, k = blocks_of(rows, keys)
    arguments = (out, argument, rows, heads, queries, keys)
    launch(write_numbers, grid, out.device, arguments, (decided, r, k), likeness(arguments))
    return out


def blocks_of(rows: int, keys: int) -> tuple[tuple[int, int, int], int, int]:
    """Return a grid of blocks, and the number of rows and keys in a block."""
    k = next((size for size in KEYS if size >= keys), KEYS[-1])
    r = BLOCK // k
    return (-(-rows // r), -(-keys // k), 1), r, k


SCHEMA = (
    "(Tensor seed, Tensor? rate, SymInt[] shape, Tensor? samples, Tensor? queries, Tensor? keys, "
    "SymInt first_query, Device device) -> Tensor"
)


@torch.library.custom_op("attnreg::numbers", mutates_args=(), schema=SCHEMA, tags=HOST_READS)
def numbers_op(seed: Tensor, rate: Tensor | None, shape: Sequence[int], samples: Tensor | None,
               queries: Tensor | None, keys: Tensor | None, first_query: int,
               device: torch.device) -> Tensor:  # fmt: skip
    """Return decisions, or without a rate numbers."""
    draw = Draw(seed, 1.0 if rate is None else rate, samples, queries, keys, first_query)
    return _numbers(draw, shape, rate is not None, device)


@numbers_op.register_fake
def _(seed: Tensor, rate: Tensor | None, shape: Sequence[int], samples: Tensor | None, queries: Tensor | None,
      keys: Tensor | None, first_query: int, device: torch.device) -> Tensor:  # fmt: skip
    return torch.empty(tuple(shape), dtype=torch.float32 if rate is None else torch.bool, device=device)
