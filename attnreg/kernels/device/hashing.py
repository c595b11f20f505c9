"""The hash of `attnreg.functional.seeded`, bit for bit, and the argument of a kernel for a draw.

A draw is a tuple: three parts of its mixed seed, to which the index of the first query is added; its drop rate, and a
pointer to the rate if it is in memory; the divisor of kept values, or for a rate in memory whether it has one; 0 where
samples share decisions, and 0 where heads do; and pointers to the indices of samples, of their first queries and of
their first keys, the last two with their strides. A pointer may be ``None``.
"""

import triton
import triton.language as tl

GOLDEN = tl.constexpr(0x9E3779B1)
RATE, DIVIDE, BY_SAMPLE, BY_HEAD = tl.constexpr(3), tl.constexpr(5), tl.constexpr(6), tl.constexpr(7)
SAMPLES, QUERIES, KEYS = tl.constexpr(8), tl.constexpr(9), tl.constexpr(11)
NEVER = tl.constexpr(-(2**31))  # threshold of a rate of 0


@triton.jit
def mixed(x):
    """Apply the finalizer of splitmix64."""
    x = x.to(tl.uint64, bitcast=True)
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def row_word(draw, b, h, q):
    """Return the 64 bits from which the numbers of a row follow; b, h and q are indices within the tensor."""
    b = b * draw[BY_SAMPLE]
    sample = b.to(tl.int64)
    query = q.to(tl.int64)
    if draw[SAMPLES] is not None:
        sample = tl.load(draw[SAMPLES] + b).to(tl.int64)
    if draw[QUERIES] is not None:
        query += tl.load(draw[QUERIES] + b * draw[QUERIES + 1]).to(tl.int64)
    seed = tl.cast(draw[0], tl.int64) + (tl.cast(draw[1], tl.int64) << 22) + (tl.cast(draw[2], tl.int64) << 44)
    return mixed((sample << 40) + ((h * draw[BY_HEAD]).to(tl.int64) << 28) + query + seed)


@triton.jit
def key_steps(draw, b, k):
    """Return the numbers that keys add to the first half of a row's word."""
    if draw[KEYS] is not None:
        k += tl.load(draw[KEYS] + b * draw[BY_SAMPLE] * draw[KEYS + 1]).to(tl.int32)
    return k.to(tl.uint32, bitcast=True) * GOLDEN


@triton.jit
def hashed(word, steps):
    """Hash a row's word and the steps of keys, which broadcast, to int32."""
    y = word.to(tl.uint32) + steps
    y = ((y ^ (y >> 16)) * 0x7FEB352D) ^ (word >> 32).to(tl.uint32)
    y = (y ^ (y >> 15)) * 0x846CA68B
    y = y ^ (y >> 16)
    return y.to(tl.int32, bitcast=True)


@triton.jit
def as_float(hashed):
    """Turn hashed numbers into multiples of 2^-24 in [0, 1)."""
    return ((hashed >> 8) + 8388608).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def rate_of(draw):
    """Return the drop rate, float32, wherever it is."""
    rate = tl.load(draw[RATE + 1]).to(tl.float32) if draw[RATE + 1] is not None else tl.cast(draw[RATE], tl.float32)
    return rate


@triton.jit
def threshold_of(draw):
    """Return the hashed number above which a position is kept; NEVER if all are kept."""
    share = tl.minimum(tl.maximum(rate_of(draw), 0.0), 1.0)
    return tl.where(share > 0.0, (tl.ceil(share * 16777216.0).to(tl.int64) * 256 - 2147483649), NEVER).to(tl.int32)


@triton.jit
def kept(word, steps, threshold, draw):
    """Decide whether to keep; the lowest hashed number matters only to a rate of 0, which only memory can hold."""
    keep = hashed(word, steps) > threshold
    if draw[RATE + 1] is not None:
        keep = keep | (threshold == NEVER)
    return keep


@triton.jit
def factor_of(draw):
    """Return the factor on kept values; 1 at a rate of 1, which keeps none."""
    left = tl.cast(draw[DIVIDE], tl.float32)
    if draw[RATE + 1] is not None:
        left = 1.0 - rate_of(draw) * left
        left = tl.where(left == 0.0, 1.0, left)
    return tl.div_rn(tl.cast(1.0, tl.float32), left)
