"""Kernels that write the random numbers of a draw, or its decisions, to memory."""

import triton
import triton.language as tl

from attnreg.kernels.device.hashing import as_float, hashed, kept, key_steps, row_word, threshold_of


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
