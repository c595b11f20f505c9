"""Kernels that drop values of a tensor, scale heads, and write the numbers of a draw, or its decisions, to memory."""

import triton
import triton.language as tl

from attnreg.kernels.device.hashing import as_float, factor_of, hashed, kept, key_steps, rate_of, row_word, threshold_of


@triton.jit(do_not_specialize=["rows", "heads", "queries", "by_query", "by_key"])
def drop_values(x, out, counts, real, draw, rows, heads, queries, keys, by_query, by_key, R: tl.constexpr,
                K: tl.constexpr):  # fmt: skip
    """Drop values of a block of rows; count those that were not zero, dropped ones first.

    The factor is rounded to the type of the values, as if it were a tensor of theirs.
    """
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    k = tl.program_id(1) * K + tl.arange(0, K)
    b, h, q = tl.where(row < rows, row // queries // heads, 0), row // queries % heads, row % queries
    word = row_word(draw, b, h, q * by_query)[:, None]
    keep = kept(word, key_steps(draw, b[:, None], (k * by_key)[None, :]), threshold_of(draw), draw)
    at, inside = row[:, None] * keys + k[None, :], (row < rows)[:, None] & (k < keys)[None, :]
    values = tl.load(x + at, mask=inside, other=0.0)
    factor = factor_of(draw).to(values.dtype)
    tl.store(out + at, tl.where(keep, values.to(tl.float32) * factor.to(tl.float32), 0.0), mask=inside)
    if counts is not None:
        there = values != 0.0
        if real is not None:
            there = there & (tl.load(real + row, mask=row < rows, other=0) != 0)[:, None]
        lost = tl.sum(tl.sum((there & (keep == 0)).to(tl.int32), 1), 0)
        tl.atomic_add(counts, lost.to(tl.int64), sem="relaxed")
        tl.atomic_add(counts + 1, tl.sum(tl.sum(there.to(tl.int32), 1), 0).to(tl.int64), sem="relaxed")


@triton.jit(do_not_specialize=["batch", "heads"])
def scale_heads(out, draw, samples, batch, heads, R: tl.constexpr, HEADS: tl.constexpr):
    """Write the factors of the heads of R samples, as `attnreg.DropHead` makes them; see `sample_heads`."""
    row, k = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R), tl.arange(0, HEADS)
    inside = (k < heads)[None, :] & (row < batch)[:, None]
    # `seeded_uniform` takes the samples of two dimensions for queries
    sample = row if samples is None else tl.load(samples + row, mask=row < batch, other=0).to(tl.int64)
    word = row_word(draw, row * 0, row * 0, sample)[:, None]
    u = as_float(hashed(word, key_steps(draw, row[:, None] * 0, k[None, :])))
    u = tl.where(inside, u, -1.0)
    keep = (u >= tl.minimum(tl.max(u, 1)[:, None], rate_of(draw))) & inside
    left = tl.maximum(tl.sum(keep.to(tl.float32), 1), 1.0)
    share = tl.div_rn(tl.cast(1.0, tl.float32), left) * tl.cast(heads, tl.float32)  # as torch divides H by a tensor
    tl.store(out + row[:, None] * heads + k[None, :], tl.where(keep, share[:, None], 0.0), mask=inside)


@triton.jit(do_not_specialize=["draw", "rows", "heads", "queries", "keys"])
def write_numbers(out, draw, rows, heads, queries, keys, KEEP: tl.constexpr, R: tl.constexpr, K: tl.constexpr):
    """Write one block of rows and keys: bool decisions, or float32 in [0, 1)."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    k = tl.program_id(1) * K + tl.arange(0, K)
    inside = row < rows
    b, h, q = tl.where(inside, row // queries // heads, 0), row // queries % heads, row % queries
    word = row_word(draw, b, h, q)[:, None]
    steps = key_steps(draw, b[:, None], k[None, :])
    value = kept(word, steps, threshold_of(draw), draw) if KEEP else as_float(hashed(word, steps))
    tl.store(out + row[:, None] * keys + k[None, :], value, mask=inside[:, None] & (k < keys)[None, :])
