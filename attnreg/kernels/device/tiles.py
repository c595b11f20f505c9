"""Code that the attention kernels share: loads of tiles, scores under masks, and the ends of causal loops.

A mask is a tuple ``(pointer, stride of samples, of heads, of queries, of keys)`` or ``None``. Decisions of the kind
PER_KEY differ by key alone, so that a block of keys loads them once, decisions of PER_SCORE by query and key.

A dropped score is FILL, an invalid one -inf, and the running maximum of a row starts at START, below FILL: so a row
whose valid keys are all dropped becomes uniform over them (AttendOut, Eq. 4), and a row without a valid key sums to 0,
with no special case. A row is stored as one number: the log2 of its sum; FILL times the number of its valid keys where
all are dropped; and +inf without a valid key, so that its weights are 0 again.
"""

import triton
import triton.language as tl

from attnreg.kernels.device.hashing import row_word

LOG2_E = tl.constexpr(1.4426950408889634)
FILL = tl.constexpr(-1.0e30)  # in units of log2, as all scores are
START = tl.constexpr(-2.0e30)
DEAD = tl.constexpr(-5.0e29)  # a row is below it if its valid keys are all dropped
PER_KEY = tl.constexpr(1)
PER_SCORE = tl.constexpr(2)


@triton.jit
def load_rows(base, start, stride, offsets, d, length, DIM: tl.constexpr, EDGE: tl.constexpr):
    """Load rows ``(N, D)``; EDGE if some may be past the end. D is DIM, padded with zeros to a power of two."""
    at = base + tl.cast(start, tl.int64) * stride + (offsets[:, None] * stride + d[None, :])
    inside = (start + offsets < length)[:, None]
    if d.shape[0] == DIM:
        rows = tl.load(at, mask=inside, other=0.0) if EDGE else tl.load(at)
    else:
        rows = tl.load(at, mask=inside & (d < DIM)[None, :] if EDGE else (d < DIM)[None, :], other=0.0)
    return rows


@triton.jit
def store_rows(base, start, stride, offsets, d, length, values, DIM: tl.constexpr):
    """Store rows, as they are loaded."""
    at = base + tl.cast(start, tl.int64) * stride + (offsets[:, None] * stride + d[None, :])
    inside = (start + offsets < length)[:, None]
    if d.shape[0] != DIM:
        inside = inside & (d < DIM)[None, :]
    tl.store(at, values.to(base.dtype.element_ty), mask=inside)


@triton.jit
def mask_of(mask, b, h):
    """Return where the mask of a sample and head begins."""
    return mask[0] + b.to(tl.int64) * mask[1] + h.to(tl.int64) * mask[2]


@triton.jit
def load_mask(base, mask, rows, cols, QLEN, KLEN, KIND: tl.constexpr):
    """Load a tile of a mask, one row if it is PER_KEY; rows and cols are (M, 1) and (1, N), or (1, M) and (N, 1)."""
    at = base + cols.to(tl.int64) * mask[4]
    inside = cols < KLEN
    if KIND == PER_SCORE:
        at = at + rows.to(tl.int64) * mask[3]
        inside = inside & (rows < QLEN)
    return tl.load(at, mask=inside, other=0)


@triton.jit
def word_of(draw, b, h, rows, KIND: tl.constexpr):
    """Return the words of the rows of a draw, in the shape of rows; one if it is PER_KEY."""
    return row_word(draw, b, h, rows if KIND == PER_SCORE else h * 0)


@triton.jit
def score_tile(s, rows, cols, fill, keep, valid, valid_at, bias, bias_at, OFFSET, QLEN, KLEN, CAUSAL: tl.constexpr,
               EDGE: tl.constexpr, KEEP: tl.constexpr, VALID: tl.constexpr, BIAS: tl.constexpr):  # fmt: skip
    """Add the bias, fill dropped scores, and make invalid ones -inf, as the bias may have done."""
    if BIAS:
        s += load_mask(bias_at, bias, rows, cols, QLEN, KLEN, BIAS).to(tl.float32) * LOG2_E
        if KEEP:
            keep = keep | (s == float("-inf"))
    if KEEP:
        s = tl.where(keep, s, fill)
    if EDGE:
        seen = cols < KLEN
        if CAUSAL:
            seen = seen & (cols <= rows + OFFSET)
        s = tl.where(seen, s, float("-inf"))
    if VALID:
        s = tl.where(load_mask(valid_at, valid, rows, cols, QLEN, KLEN, VALID) != 0, s, float("-inf"))
    return s


@triton.jit
def keys_of(block, OFFSET, KLEN, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return where end the whole blocks of keys that all queries of a block see, and the keys that any sees."""
    end, whole = block * 0 + KLEN, block * 0 + KLEN
    if CAUSAL:
        end = tl.minimum(tl.maximum((block + 1) * BLOCK_M + OFFSET, 0), end)
        whole = tl.minimum(tl.maximum(block * BLOCK_M + OFFSET + 1, 0), whole)
    return whole // BLOCK_N * BLOCK_N, end


@triton.jit
def queries_of(block, OFFSET, QLEN, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the first query that sees any key of a block, and the first of the blocks that see all of them."""
    first, whole = block * 0, block * 0
    if CAUSAL:
        first = tl.maximum(block * BLOCK_N - OFFSET, 0) // BLOCK_M * BLOCK_M
        whole = tl.cdiv(tl.maximum(block * BLOCK_N + BLOCK_N - 1 - OFFSET, 0), BLOCK_M) * BLOCK_M
        whole = tl.minimum(whole, tl.cdiv(QLEN, BLOCK_M) * BLOCK_M)
    return first, whole
