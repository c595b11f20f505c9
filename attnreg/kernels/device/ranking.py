"""The kernel of AD-DROP's candidate region: the gradients of a block of rows, ranked in registers."""

import triton
import triton.language as tl

from attnreg.kernels.device.tiles import PER_SCORE, load_mask, load_rows, mask_of

LEAST = tl.constexpr(-(2**31))  # below the code of -inf
INFINITE = tl.constexpr(0x7F800000)  # the code of inf; those of NaN are above
NO_NUMBER = tl.constexpr(0x7FFFFFFF)
FRACTION = tl.constexpr(50)  # bits of a share after the binary point
HALF = tl.constexpr(562949)  # of the ninth decimal, to which shares are rounded, in these units
UP = tl.constexpr(2**50 - 1 - 562949)  # rounds up what is above it


@triton.jit
def code_of(x):
    """Return int32 in the order of float32: negative numbers have their bits flipped, and both zeros are one."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), NO_NUMBER)


@triton.jit(do_not_specialize=["share", "H", "QLEN"])
def select_keys(grad, value, out, valid, sg, sv, share, H, GROUP, QLEN, KLEN, VALID: tl.constexpr, LOW: tl.constexpr,
                PRECISION: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
                K: tl.constexpr):  # fmt: skip
    """Write the region of a block of rows of one head: R rows, all keys, D dimensions at a time.

    The code of the value at the rank where the region ends is between two bounds, which are halved until as many codes
    are at or above the lower bound as the rank needs, or, with ties, until nothing is between the bounds. This takes
    fewer steps than a sort: 18 on average, 32 at most.
    """
    blocks = tl.cdiv(QLEN, R)
    bh = tl.program_id(0) // blocks
    start = tl.program_id(0) % blocks * R
    b, h = bh // H, bh % H
    offs, cols = tl.arange(0, R), tl.arange(0, K)
    rows, col = (start + offs)[:, None], cols[None, :]
    grad += b.to(tl.int64) * sg[0] + h.to(tl.int64) * sg[1]
    value += b.to(tl.int64) * sv[0] + (h // GROUP).to(tl.int64) * sv[1]
    attribution = tl.zeros((R, K), tl.float32)
    for first in range(0, DIM, D):
        d = first + tl.arange(0, D)
        part = load_rows(grad, start, sg[2], offs, d, QLEN, DIM, True)
        values = load_rows(value, 0, sv[2], cols, d, KLEN, DIM, True)
        attribution = tl.dot(part, tl.trans(values), attribution, input_precision=PRECISION)
    seen = (col < KLEN) & (rows < QLEN)
    if VALID:
        seen = seen & (load_mask(mask_of(valid, b, h), valid, rows, col, QLEN, KLEN, PER_SCORE) != 0)
    code = tl.where(seen, code_of(attribution), LEAST)  # all that is kept of a position
    n = tl.sum((code > LEAST).to(tl.int32), 1)
    low, high = tl.min(tl.where(code > LEAST, code, NO_NUMBER), 1), tl.max(code, 1)
    exact = n.to(tl.int64) * tl.cast(share, tl.int64)
    if LOW:
        size = ((exact + HALF) >> FRACTION).to(tl.int32)
        rank = n - size  # keys at or above the end
    else:
        size = ((exact + UP) >> FRACTION).to(tl.int32)
        rank = size
    ranked = (high > low) & (high <= INFINITE) & (size > 0)  # a NaN is above all, and is below nothing
    high = tl.where(ranked, high + 1, low)
    low = tl.where(rank == 0, high, low)  # all keys are in the low region
    going = ranked & (rank < n) & (rank > 0) & (low + 1 < high)
    left = tl.max(going.to(tl.int32), 0)
    while left > 0:
        middle = (low & high) + ((low ^ high) >> 1)
        count = tl.sum((code >= middle[:, None]).to(tl.int32), 1)
        low = tl.where(going & (count >= rank), middle, low)
        high = tl.where(going & (count < rank), middle, high)
        going = going & (count != rank) & (low + 1 < high)
        left = tl.max(going.to(tl.int32), 0)
    inside = (code < low[:, None]) & (code > LEAST) if LOW else code >= low[:, None]
    at = out + (bh.to(tl.int64) * QLEN + start) * KLEN + (offs[:, None] * KLEN + col)
    tl.store(at, inside & ranked[:, None], mask=(col < KLEN) & (rows < QLEN))
