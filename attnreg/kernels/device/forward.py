"""Attention, forward, with an online softmax: FlashAttention-2 (arXiv 2307.08691, Algorithm 1), under decisions."""

import triton
import triton.language as tl

from attnreg.kernels.device.hashing import factor_of, kept, key_steps, threshold_of
from attnreg.kernels.device.tiles import (
    DEAD,
    FILL,
    LOG2_E,
    START,
    keys_of,
    load_mask,
    load_rows,
    mask_of,
    score_tile,
    store_rows,
    word_of,
)


@triton.jit(do_not_specialize=["scores", "first", "second", "H", "QLEN", "KLEN", "OFFSET", "scale"])
def attend(q, k, v, out, sums, dropped, real, valid, keep, bias, scores, first, second, sq, sk, sv, H, GROUP,
           QLEN, KLEN, OFFSET, scale, CAUSAL: tl.constexpr, VALID: tl.constexpr, KEEP: tl.constexpr,
           BIAS: tl.constexpr, SCORES: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
           PRECISION: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr,
           BLOCK_N: tl.constexpr):  # fmt: skip
    """Compute a block of queries of one head; the longest causal blocks begin first."""
    blocks = tl.cdiv(QLEN, BLOCK_M)
    bh = tl.program_id(0) // blocks
    block = blocks - 1 - tl.program_id(0) % blocks
    b, h = bh // H, bh % H
    b64, h64, g64 = b.to(tl.int64), h.to(tl.int64), (h // GROUP).to(tl.int64)
    offs_m, offs_n, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, D)
    rows = block * BLOCK_M + offs_m
    row = rows[:, None]
    query = load_rows(q + b64 * sq[0] + h64 * sq[1], block * BLOCK_M, sq[2], offs_m, d, QLEN, DIM, True)
    k += b64 * sk[0] + g64 * sk[1]
    v += b64 * sv[0] + g64 * sv[1]
    valid_at = mask_of(valid, b, h) if VALID else 0
    keep_at = mask_of(keep, b, h) if KEEP else 0
    bias_at = mask_of(bias, b, h) if BIAS else 0
    factor = 1.0
    if SCORES:
        word_s, limit_s = word_of(scores, b, h, row, SCORES), threshold_of(scores)
    if FIRST:
        word_1, limit_1 = word_of(first, b, h, row, FIRST), threshold_of(first)
        factor *= factor_of(first)
    if SECOND:
        word_2, limit_2 = word_of(second, b, h, row, SECOND), threshold_of(second)
        factor *= factor_of(second)
    whole, end = keys_of(block, OFFSET, KLEN, CAUSAL, BLOCK_M, BLOCK_N)
    acc = tl.zeros((BLOCK_M, D), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    most = tl.full((BLOCK_M,), START, tl.float32)
    count = tl.zeros((BLOCK_M,), tl.int32)
    for EDGE in tl.static_range(2):
        for start in range(whole if EDGE else 0, end if EDGE else whole, BLOCK_N):
            col = (start + offs_n)[None, :]
            keys = load_rows(k, start, sk[2], offs_n, d, KLEN, DIM, EDGE)
            values = load_rows(v, start, sv[2], offs_n, d, KLEN, DIM, EDGE)
            s = tl.dot(query, tl.trans(keys), input_precision=PRECISION) * (scale * LOG2_E)
            stays = tl.full((1, 1), 1, tl.int1)
            if SCORES:
                stays = stays & kept(word_s, key_steps(scores, b, col), limit_s, scores)
            if KEEP:
                stays = stays & (load_mask(keep_at, keep, row, col, QLEN, KLEN, KEEP) != 0)
            s = score_tile(s, row, col, FILL, stays, valid, valid_at, bias, bias_at, OFFSET, QLEN, KLEN, CAUSAL,
                                 EDGE, SCORES + KEEP, VALID, BIAS)  # fmt: skip
            lost = s == FILL
            new = tl.maximum(most, tl.max(s, 1))
            p = tl.exp2(s - new[:, None])
            fade = tl.exp2(most - new)
            total = total * fade + tl.sum(p, 1)
            if FIRST:
                keep_1 = kept(word_1, key_steps(first, b, col), limit_1, first)
                p = tl.where(keep_1, p, 0.0)
                if dropped is not None:
                    lost = lost | ((keep_1 == 0) & (s > float("-inf")))
            if SECOND:
                p = tl.where(kept(word_2, key_steps(second, b, col), limit_2, second), p, 0.0)
            if dropped is not None:
                count += tl.sum(lost.to(tl.int32), 1)
            acc = tl.dot(p.to(values.dtype), values, acc * fade[:, None], input_precision=PRECISION)
            most = new
    acc = acc * (factor / tl.where(total == 0.0, 1.0, total))[:, None]
    # the output is stored as (B, Q, H, D)
    store_rows(out + b64 * QLEN * H * DIM + h64 * DIM, block * BLOCK_M, H * DIM, offs_m, d, QLEN, acc, DIM)
    row_sum = tl.where(most > DEAD, most + tl.log2(total), FILL * total)
    tl.store(sums + bh.to(tl.int64) * QLEN + rows, tl.where(total == 0.0, float("inf"), row_sum), mask=rows < QLEN)
    if dropped is not None:
        counted = rows < QLEN
        if real is not None:
            real_at = real[0] + b64 * real[1] + h64 * real[2] + rows.to(tl.int64) * real[3]
            counted = tl.load(real_at, mask=counted, other=0) != 0
        tl.atomic_add(dropped, tl.sum(tl.where(counted, count, 0).to(tl.int64), 0), sem="relaxed")
