"""The gradients of attention: FlashAttention-2 (arXiv 2307.08691, Algorithm 2), in two kernels and with no atomics."""

import triton
import triton.language as tl

from attnreg.kernels.device.hashing import factor_of, kept, key_steps, threshold_of
from attnreg.kernels.device.tiles import (
    DEAD,
    FILL,
    LOG2_E,
    PER_SCORE,
    keys_of,
    load_mask,
    load_rows,
    mask_of,
    queries_of,
    score_tile,
    store_rows,
    word_of,
)


@triton.jit
def padded(length):
    """Return the number of allocated rows of a head: whole blocks, so that rows are loaded several at a time, unmasked.

    The compiler would otherwise have to know that the length is divisible by 16.
    """
    return (length + 127) // 128 * 128


@triton.jit
def opened(sums):
    """Return the log2 of the sum of rows, and the value of dropped scores: 0 in rows that drop all, else FILL."""
    dead = sums < DEAD
    return tl.where(dead, tl.log2(tl.where(dead, sums / FILL, 1.0)), sums), tl.where(dead, 0.0, FILL)


@triton.jit
def saved_word(words, at):
    """Load the words of rows, uint64, (1, M)."""
    return tl.load(words + at).to(tl.uint64, bitcast=True)[None, :]


@triton.jit(do_not_specialize=["scores", "first", "second", "H", "QLEN", "KLEN", "OFFSET", "scale"])
def query_gradient(q, k, v, out, grad, dq, sums, deltas, lses, fills, words, valid, keep, bias, scores, first, second,
                   sq, sk, sv, sg, H, GROUP, QLEN, KLEN, OFFSET, scale, CAUSAL: tl.constexpr, VALID: tl.constexpr,
                   KEEP: tl.constexpr, BIAS: tl.constexpr, SCORES: tl.constexpr, FIRST: tl.constexpr,
                   SECOND: tl.constexpr, PRECISION: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr,
                   BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """Compute the gradient of a block of queries, and store numbers of its rows for the other kernel.

    These are delta, the sum of the output times its gradient, the log2 of the sum of the row, the score where it drops,
    and the words of the hash: the other kernel would compute them again in every thread that holds a row.
    """
    blocks = tl.cdiv(QLEN, BLOCK_M)
    bh = tl.program_id(0) // blocks
    block = blocks - 1 - tl.program_id(0) % blocks
    b, h = bh // H, bh % H
    b64, h64, g64 = b.to(tl.int64), h.to(tl.int64), (h // GROUP).to(tl.int64)
    offs_m, offs_n, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, D)
    rows = block * BLOCK_M + offs_m
    row, inside = rows[:, None], rows < QLEN
    at, own = bh.to(tl.int64) * padded(QLEN) + rows, b64 * QLEN * H * DIM + h64 * DIM
    query = load_rows(q + b64 * sq[0] + h64 * sq[1], block * BLOCK_M, sq[2], offs_m, d, QLEN, DIM, True)
    do = load_rows(grad + b64 * sg[0] + h64 * sg[1], block * BLOCK_M, sg[2], offs_m, d, QLEN, DIM, True)
    o = load_rows(out + own, block * BLOCK_M, H * DIM, offs_m, d, QLEN, DIM, True)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    lse, fill = opened(tl.load(sums + bh.to(tl.int64) * QLEN + rows, mask=inside, other=float("inf")))
    tl.store(deltas + at, delta)
    tl.store(lses + at, lse)
    if SCORES + KEEP:
        tl.store(fills + at, fill)
    lse, fill, delta = lse[:, None], fill[:, None], delta[:, None]
    k += b64 * sk[0] + g64 * sk[1]
    v += b64 * sv[0] + g64 * sv[1]
    valid_at = mask_of(valid, b, h) if VALID else 0
    keep_at = mask_of(keep, b, h) if KEEP else 0
    bias_at = mask_of(bias, b, h) if BIAS else 0
    factor = 1.0
    if SCORES:
        word_s, limit_s = word_of(scores, b, h, row, SCORES), threshold_of(scores)
        if SCORES == PER_SCORE:
            tl.store(words[0] + at[:, None], word_s.to(tl.int64, bitcast=True))
    if FIRST:
        word_1, limit_1 = word_of(first, b, h, row, FIRST), threshold_of(first)
        factor *= factor_of(first)
        if FIRST == PER_SCORE:
            tl.store(words[1] + at[:, None], word_1.to(tl.int64, bitcast=True))
    if SECOND:
        word_2, limit_2 = word_of(second, b, h, row, SECOND), threshold_of(second)
        factor *= factor_of(second)
        if SECOND == PER_SCORE:
            tl.store(words[2] + at[:, None], word_2.to(tl.int64, bitcast=True))
    whole, end = keys_of(block, OFFSET, KLEN, CAUSAL, BLOCK_M, BLOCK_N)
    acc = tl.zeros((BLOCK_M, D), tl.float32)
    for EDGE in tl.static_range(2):
        for start in range(whole if EDGE else 0, end if EDGE else whole, BLOCK_N):
            col = (start + offs_n)[None, :]
            keys = load_rows(k, start, sk[2], offs_n, d, KLEN, DIM, EDGE)
            values = load_rows(v, start, sv[2], offs_n, d, KLEN, DIM, EDGE)
            s = tl.dot(query, tl.trans(keys), input_precision=PRECISION) * (scale * LOG2_E)
            dp = tl.dot(do, tl.trans(values), input_precision=PRECISION)
            stays = tl.full((1, 1), 1, tl.int1)
            if SCORES:
                stays = stays & kept(word_s, key_steps(scores, b, col), limit_s, scores)
            if KEEP:
                stays = stays & (load_mask(keep_at, keep, row, col, QLEN, KLEN, KEEP) != 0)
            s = score_tile(s, row, col, fill, stays, valid, valid_at, bias, bias_at, OFFSET, QLEN, KLEN, CAUSAL,
                              EDGE, SCORES + KEEP, VALID, BIAS)  # fmt: skip
            p = tl.exp2(s - lse)
            if FIRST:
                dp = tl.where(kept(word_1, key_steps(first, b, col), limit_1, first), dp, 0.0)
            if SECOND:
                dp = tl.where(kept(word_2, key_steps(second, b, col), limit_2, second), dp, 0.0)
            if FIRST + SECOND:
                dp *= factor
            ds = p * (dp - delta)
            if SCORES + KEEP:
                ds = tl.where(stays, ds, 0.0)
            acc = tl.dot(ds.to(keys.dtype), keys, acc, input_precision=PRECISION)
    store_rows(dq + own, block * BLOCK_M, H * DIM, offs_m, d, QLEN, acc * scale, DIM)


@triton.jit(do_not_specialize=["scores", "first", "second", "H", "QLEN", "KLEN", "OFFSET", "scale"])
def key_gradients(q, k, v, grad, dk, dv, deltas, lses, fills, words, valid, keep, bias, scores, first, second, sq, sk,
                  sv, sg, H, GROUP, QLEN, KLEN, OFFSET, scale, CAUSAL: tl.constexpr, VALID: tl.constexpr,
                  KEEP: tl.constexpr, BIAS: tl.constexpr, SCORES: tl.constexpr, FIRST: tl.constexpr,
                  SECOND: tl.constexpr, PRECISION: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr,
                  BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """Compute the gradients of a block of keys and values, over the queries of all heads that share them.

    Keys past the end need no mask: their rows are not stored.
    """
    blocks = tl.cdiv(KLEN, BLOCK_N)
    groups = H // GROUP
    bg = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    b, g = bg // groups, bg % groups
    b64, g64 = b.to(tl.int64), g.to(tl.int64)
    offs_m, offs_n, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, D)
    col = (block * BLOCK_N + offs_n)[:, None]
    keys = load_rows(k + b64 * sk[0] + g64 * sk[1], block * BLOCK_N, sk[2], offs_n, d, KLEN, DIM, True)
    values = load_rows(v + b64 * sv[0] + g64 * sv[1], block * BLOCK_N, sv[2], offs_n, d, KLEN, DIM, True)
    factor = 1.0
    if SCORES:
        limit_s = threshold_of(scores)
    if FIRST:
        limit_1 = threshold_of(first)
        factor *= factor_of(first)
    if SECOND:
        limit_2 = threshold_of(second)
        factor *= factor_of(second)
    early, whole = queries_of(block, OFFSET, QLEN, CAUSAL, BLOCK_M, BLOCK_N)
    acc_k = tl.zeros((BLOCK_N, D), tl.float32)
    acc_v = tl.zeros((BLOCK_N, D), tl.float32)
    for member in range(GROUP):
        h = g * GROUP + member
        h64 = h.to(tl.int64)
        head = (b64 * H + h64) * padded(QLEN)
        q_h, grad_h = q + b64 * sq[0] + h64 * sq[1], grad + b64 * sg[0] + h64 * sg[1]
        valid_at = mask_of(valid, b, h) if VALID else 0
        keep_at = mask_of(keep, b, h) if KEEP else 0
        bias_at = mask_of(bias, b, h) if BIAS else 0
        for INNER in tl.static_range(1 - CAUSAL, 2):  # the causal edge first
            for start in range(whole if INNER else early, QLEN if INNER else whole, BLOCK_M):
                rows = start + offs_m
                at, row = head + rows, rows[None, :]
                query = load_rows(q_h, start, sq[2], offs_m, d, QLEN, DIM, True)
                do = load_rows(grad_h, start, sg[2], offs_m, d, QLEN, DIM, True)
                lse = tl.load(lses + at)[None, :]
                fill = tl.load(fills + at)[None, :] if SCORES + KEEP else 0.0
                delta = tl.load(deltas + at)[None, :]
                s = tl.dot(keys, tl.trans(query), input_precision=PRECISION) * (scale * LOG2_E)
                stays = tl.full((1, 1), 1, tl.int1)
                if SCORES:
                    word_s = saved_word(words[0], at) if SCORES == PER_SCORE else word_of(scores, b, h, h, SCORES)
                    stays = stays & kept(word_s, key_steps(scores, b, col), limit_s, scores)
                if KEEP:
                    stays = stays & (load_mask(keep_at, keep, row, col, QLEN, KLEN, KEEP) != 0)
                s = score_tile(s, row, col, fill, stays, valid, valid_at, bias, bias_at, OFFSET, QLEN, KLEN, CAUSAL,
                                  INNER == 0, SCORES + KEEP, VALID, BIAS)  # fmt: skip
                p = tl.exp2(s - lse)
                dp = tl.dot(values, tl.trans(do), input_precision=PRECISION)
                used = p
                if FIRST:
                    word_1 = saved_word(words[1], at) if FIRST == PER_SCORE else word_of(first, b, h, h, FIRST)
                    keep_1 = kept(word_1, key_steps(first, b, col), limit_1, first)
                    used, dp = tl.where(keep_1, used, 0.0), tl.where(keep_1, dp, 0.0)
                if SECOND:
                    word_2 = saved_word(words[2], at) if SECOND == PER_SCORE else word_of(second, b, h, h, SECOND)
                    keep_2 = kept(word_2, key_steps(second, b, col), limit_2, second)
                    used, dp = tl.where(keep_2, used, 0.0), tl.where(keep_2, dp, 0.0)
                if FIRST + SECOND:
                    dp *= factor
                acc_v = tl.dot(used.to(do.dtype), do, acc_v, input_precision=PRECISION)
                ds = p * (dp - delta)
                if SCORES + KEEP:
                    ds = tl.where(stays, ds, 0.0)
                acc_k = tl.dot(ds.to(query.dtype), query, acc_k, input_precision=PRECISION)
    own = b64 * KLEN * groups * DIM + g64 * DIM  # the gradients are stored as (B, K, Hkv, D)
    store_rows(dk + own, block * BLOCK_N, groups * DIM, offs_n, d, KLEN, acc_k * scale, DIM)
    store_rows(dv + own, block * BLOCK_N, groups * DIM, offs_n, d, KLEN, acc_v * factor, DIM)
