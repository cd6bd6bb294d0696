"""Kernels that compute the gradients: delta by rows, dQ by rows, dK and dV by columns."""

# Triton parses the source of these functions, which rules out annotations and the usual style of names
# ruff: noqa: N803, N806

from __future__ import annotations

import triton
import triton.language as tl

from .loads import (
    LOG2_E,
    SIZES,
    alive,
    held,
    living,
    partly,
    record_of,
    rows,
    spread,
    store_rows,
    strides,
    tile,
    within,
    zeroed,
)
from .score_terms import chained, kept, query_heads, scored, standing


@triton.jit(do_not_specialize=SIZES)
def delta(
    dout, out, lse, dlse, result,
    g_b, g_h, g_n, o_b, o_h, o_n, l_b, l_h, l_n, s_b, s_h, s_n,
    heads, nq,
    DV: tl.constexpr, PAD_DV: tl.constexpr, BLOCK_M: tl.constexpr, STEP: tl.constexpr, SLOPED: tl.constexpr,
):  # fmt: skip
    """Compute rowsum(dout * out) - dlse of BLOCK_M queries; 0 where lse is -inf."""
    g_b, g_h, g_n = strides(g_b, g_h, g_n, STEP, True)
    o_b, o_h, o_n = strides(o_b, o_h, o_n, STEP, True)
    blocks = tl.cdiv(nq, BLOCK_M)
    pair, first = tl.program_id(0) // blocks, (tl.program_id(0) % blocks) * BLOCK_M
    b, h = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    token = (first + tl.arange(0, BLOCK_M)).to(tl.int64)
    mine = token < nq
    slopes = rows(dout + b * g_b + h * g_h, token * g_n, mine, DV, PAD_DV)
    outs = rows(out + b * o_b + h * o_h, token * o_n, mine, DV, PAD_DV)
    delta_row = tl.sum(slopes.to(tl.float32) * outs.to(tl.float32), 1)
    if SLOPED:
        delta_row -= tl.load(dlse + b * s_b + h * s_h + token * s_n, mask=mine, other=0.0).to(tl.float32)
    row_lse = tl.load(lse + b * l_b + h * l_h + token * l_n, mask=mine, other=0.0)
    tl.store(result + pair.to(tl.int64) * nq + token, tl.where(row_lse == float("-inf"), 0.0, delta_row), mask=mine)


@triton.jit(do_not_specialize=SIZES)
def backward_q(
    q, k, v, dout, lse, slope, dq, sums, records, col, bits, masks, live,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, g_b, g_h, g_n, l_b, l_h, l_n, s_b, s_h, s_n,
    heads, ratio, nq, nk, scale, places, tables, numbers, drop,
    D: tl.constexpr, DV: tl.constexpr, PAD_D: tl.constexpr, PAD_DV: tl.constexpr,
    Q_TILE: tl.constexpr, KV_TILE: tl.constexpr, TILES: tl.constexpr,
    HEADS: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    SPLIT: tl.constexpr, MASKED: tl.constexpr, WIDE: tl.constexpr,
    STEP: tl.constexpr, RAGGED: tl.constexpr, DESCRIBED: tl.constexpr, PRECISION: tl.constexpr,
    TERMS: tl.constexpr, HOLES: tl.constexpr, SCORED: tl.constexpr, BRANCHED: tl.constexpr,
    DEAD: tl.constexpr,
):  # fmt: skip
    """Compute dQ of HEADS x ROWS queries; ``slope`` is delta.

    HOLES: a term may leave a row without any weight. DEAD: descriptors also load keys that no query of their tile
    attends, which have to be zeroed.
    """
    BLOCK_M: tl.constexpr = HEADS * ROWS
    PARTS_N: tl.constexpr = KV_TILE // BLOCK_N
    WORDS: tl.constexpr = (KV_TILE + 31) // 32
    q_b, q_h, q_n = strides(q_b, q_h, q_n, STEP, WIDE)
    k_b, k_h, k_n = strides(k_b, k_h, k_n, STEP, WIDE)
    v_b, v_h, v_n = strides(v_b, v_h, v_n, STEP, WIDE)
    g_b, g_h, g_n = strides(g_b, g_h, g_n, STEP, WIDE)
    program = tl.program_id(0)
    # the compiler serialises fewer products in one turn of a loop than without it
    for index in range(program, program + 1):
        item, part = index // PARTS, index % PARTS
        local = tl.arange(0, BLOCK_M)
        b, head, at, begin, end, slot = record_of(records, item, SPLIT)
        q_first, kv_head = at * (Q_TILE * TILES) + part * ROWS, (head // ratio).to(tl.int64)
        row = part * ROWS + (local % ROWS if HEADS > 1 else local)
        token = q_first.to(tl.int64)
        mine = within(local, head, ratio, q_first, nq, HEADS, ROWS)
        pair = b * heads + head
        b, head = b.to(tl.int64), head.to(tl.int64)
        queries_at = q + b * q_b + head * q_h + token * q_n
        queries = rows(queries_at, spread(local, q_h, q_n, HEADS, ROWS, WIDE), mine, D, PAD_D)
        slopes_at = dout + b * g_b + head * g_h + token * g_n
        slopes = rows(slopes_at, spread(local, g_h, g_n, HEADS, ROWS, WIDE), mine, DV, PAD_DV)
        lse_at = lse + b * l_b + head * l_h + token * l_n + spread(local, l_h, l_n, HEADS, ROWS, WIDE)
        row_lse = tl.load(lse_at, mask=mine, other=0.0) * LOG2_E
        slope_at = slope + b * s_b + head * s_h + token * s_n + spread(local, s_h, s_n, HEADS, ROWS, WIDE)
        row_slope = tl.load(slope_at, mask=mine, other=0.0)
        keys_at = k if DESCRIBED else k + b * k_b + kv_head * k_h
        values_at = v if DESCRIBED else v + b * v_b + kv_head * v_h
        if SCORED:
            head_at = query_heads(places[0], head, local, mine, HEADS, ROWS)
            of = (q_first + (local % ROWS if HEADS > 1 else local))[:, None]
            row_at, query_at = standing(places[1], places[3], of, b, nq, 0)

        acc = tl.zeros([BLOCK_M, PAD_D], tl.float32)
        for step in tl.range(begin * PARTS_N, end * PARTS_N, num_stages=STAGES):
            entry, part_n = step // PARTS_N, (step % PARTS_N) * BLOCK_N
            first = tl.load(col + entry) * KV_TILE + part_n
            code = tl.load(bits + entry * TILES)
            keep = nk - first
            codes, other = code, code
            if TILES > 1:
                other = tl.load(bits + entry * TILES + 1)
                codes = tl.where(row < Q_TILE, code, other)
            # keys that no query of the tile attends enter the sum with weight 0, so they must be finite
            used = living(live, code, other, part_n, keep, WORDS, BLOCK_N, TILES, MASKED)
            partial = partly(code, other, keep, BLOCK_N, TILES, MASKED)
            keys = tile(k, keys_at, b, kv_head, first, k_n, used, BLOCK_N, D, PAD_D, WIDE, DESCRIBED)
            inside = tl.arange(0, BLOCK_N) < keep
            values = tile(v, values_at, b, kv_head, first, v_n, inside, BLOCK_N, DV, PAD_DV, WIDE, DESCRIBED)
            scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
            value_slopes = tl.dot(slopes, tl.trans(values), input_precision=PRECISION)
            if SCORED:
                column_at, key_at = standing(places[2], places[3], first + tl.arange(0, BLOCK_N)[None, :], b, nk, 1)
                distance = key_at - query_at
            if TERMS is None:
                weights = tl.math.exp2(scores * (scale * LOG2_E) - row_lse[:, None])
            else:
                has = mine[:, None] & inside[None, :]
                scores, caps = scored(
                    scores * scale, b, head_at, row_at, column_at, distance, has, TERMS, tables, numbers
                )
                weights = tl.math.exp2(scores * LOG2_E - row_lse[:, None])
            if drop is not None:
                value_slopes = tl.where(kept(b, head_at, query_at, key_at, drop), value_slopes * drop[5], 0.0)
            score_slopes = weights * (value_slopes - row_slope[:, None])
            if TERMS is not None:
                # before the mask, since a slope may be NaN for a key that the row may not attend
                score_slopes = chained(score_slopes, caps, TERMS)
            line = row % Q_TILE if TILES > 1 else row
            score_slopes = held(
                score_slopes, 0.0, partial, masks, codes, Q_TILE, line, part_n, keep, WORDS, BLOCK_N,
                MASKED, RAGGED, BRANCHED,
            )  # fmt: skip
            if HOLES:
                score_slopes = tl.where((row_lse != float("-inf"))[:, None], score_slopes, 0.0)
            if DEAD:
                keys = zeroed(keys, partial, live, code, other, part_n, keep, WORDS, BLOCK_N, TILES, BRANCHED)
            acc = tl.dot(score_slopes.to(keys.dtype), keys, acc, input_precision=PRECISION)
        if SPLIT:
            sums_at = sums + (slot * PARTS + part).to(tl.int64) * (BLOCK_M * D)
            store_rows(sums_at, local * D, acc * scale, mine & (slot >= 0), D, PAD_D)
            mine = mine & (slot < 0)
        dq_at = dq + (pair.to(tl.int64) * nq + q_first) * D
        store_rows(dq_at, spread(local, nq, 1, HEADS, ROWS, False) * D, acc * scale, mine, D, PAD_D)


@triton.jit(do_not_specialize=SIZES)
def backward_kv(
    q, k, v, dout, lse, slope, dk, dv, key_sums, value_sums,
    records, row, bits_t, masks_t, live_t,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, g_b, g_h, g_n, l_b, l_h, l_n, s_b, s_h, s_n,
    heads, ratio, nq, nk, scale, places, tables, numbers, drop,
    D: tl.constexpr, DV: tl.constexpr, PAD_D: tl.constexpr, PAD_DV: tl.constexpr,
    Q_TILE: tl.constexpr, KV_TILE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    SPLIT: tl.constexpr, MASKED: tl.constexpr, WIDE: tl.constexpr,
    SHARED: tl.constexpr, STEP: tl.constexpr, RAGGED: tl.constexpr, DESCRIBED: tl.constexpr, PRECISION: tl.constexpr,
    TERMS: tl.constexpr, HOLES: tl.constexpr, SCORED: tl.constexpr, BRANCHED: tl.constexpr,
):  # fmt: skip
    """Compute dK and dV of BLOCK_N keys, summed over the query heads of their key head; scores are keys by queries."""
    PARTS: tl.constexpr = KV_TILE // BLOCK_N
    PARTS_M: tl.constexpr = Q_TILE // BLOCK_M
    WORDS: tl.constexpr = (Q_TILE + 31) // 32
    q_b, q_h, q_n = strides(q_b, q_h, q_n, STEP, WIDE)
    k_b, k_h, k_n = strides(k_b, k_h, k_n, STEP, WIDE)
    v_b, v_h, v_n = strides(v_b, v_h, v_n, STEP, WIDE)
    g_b, g_h, g_n = strides(g_b, g_h, g_n, STEP, WIDE)
    program = tl.program_id(0)
    # the compiler serialises fewer products in one turn of a loop than without it
    for index in range(program, program + 1):
        item, part = index // PARTS, index % PARTS
        local = tl.arange(0, BLOCK_N)
        line = part * BLOCK_N + local
        members = 1 if SHARED else ratio
        b, kv_head, at, _, _, slot = record_of(records, item * members, SPLIT)
        pair = b * (heads // ratio) + kv_head
        b, kv_head = b.to(tl.int64), kv_head.to(tl.int64)
        k_first = at * KV_TILE + part * BLOCK_N
        mine = k_first + local < nk
        keys_at = k + b * k_b + kv_head * k_h + k_first.to(tl.int64) * k_n
        keys = rows(keys_at, spread(local, 0, k_n, 1, BLOCK_N, WIDE), mine, D, PAD_D)
        values_at = v + b * v_b + kv_head * v_h + k_first.to(tl.int64) * v_n
        values = rows(values_at, spread(local, 0, v_n, 1, BLOCK_N, WIDE), mine, DV, PAD_DV)
        if SCORED:
            column_at, key_at = standing(places[2], places[3], (k_first + local)[:, None], b, nk, 1)
        key_acc = tl.zeros([BLOCK_N, PAD_D], tl.float32)
        value_acc = tl.zeros([BLOCK_N, PAD_DV], tl.float32)
        # if the heads share a list, one loop passes over it once per head
        for member in range(members):
            h = kv_head * ratio + member
            _, _, _, begin, end, _ = record_of(records, item * members + member, SPLIT)
            length = (end - begin) * PARTS_M
            for step in tl.range(0, length * ratio if SHARED else length, num_stages=STAGES):
                if SHARED:
                    h = kv_head * ratio + step // length
                    step = step % length
                queries_at = q if DESCRIBED else q + b * q_b + h * q_h
                slopes_at = dout if DESCRIBED else dout + b * g_b + h * g_h
                lse_at = lse + b * l_b + h * l_h
                slope_at = slope + b * s_b + h * s_h
                entry, part_m = begin + step // PARTS_M, (step % PARTS_M) * BLOCK_M
                first = tl.load(row + entry) * Q_TILE + part_m
                code = tl.load(bits_t + entry)
                keep = nq - first
                of = (first + tl.arange(0, BLOCK_M)).to(tl.int64)
                # queries that attend no key of the tile enter the sums with weight 0, so they and dout must be finite
                partial = partly(code, code, keep, BLOCK_M, 1, MASKED)
                used = alive(live_t, code, part_m, keep, WORDS, BLOCK_M, MASKED)
                queries = tile(q, queries_at, b, h, first, q_n, used, BLOCK_M, D, PAD_D, WIDE, DESCRIBED)
                slopes = tile(dout, slopes_at, b, h, first, g_n, used, BLOCK_M, DV, PAD_DV, WIDE, DESCRIBED)
                if RAGGED:
                    row_lse = tl.load(lse_at + of * l_n, mask=of < nq, other=0.0) * LOG2_E
                    row_slope = tl.load(slope_at + of * s_n, mask=of < nq, other=0.0)
                else:
                    row_lse = tl.load(lse_at + of * l_n) * LOG2_E
                    row_slope = tl.load(slope_at + of * s_n)
                if HOLES:
                    alive_rows = row_lse != float("-inf")
                    queries = tl.where(alive_rows[:, None], queries, 0.0).to(queries.dtype)
                    slopes = tl.where(alive_rows[:, None], slopes, 0.0).to(slopes.dtype)
                scores = tl.dot(keys, tl.trans(queries), input_precision=PRECISION)
                if SCORED:
                    head_at = tl.load(places[0] + h)
                    row_at, query_at = standing(places[1], places[3], of[None, :], b, nq, 0)
                if TERMS is None:
                    weights = tl.math.exp2(scores * (scale * LOG2_E) - row_lse[None, :])
                else:
                    distance, has = key_at - query_at, mine[:, None] & (of < nq)[None, :]
                    scores, caps = scored(
                        scores * scale, b, head_at, row_at, column_at, distance, has, TERMS, tables, numbers
                    )
                    weights = tl.math.exp2(scores * LOG2_E - row_lse[None, :])
                if HOLES:
                    weights = tl.where(alive_rows[None, :], weights, 0.0)
                weights = held(
                    weights, 0.0, partial, masks_t, code, KV_TILE, line, part_m, keep, WORDS, BLOCK_M,
                    MASKED, RAGGED, BRANCHED,
                )  # fmt: skip
                after = weights
                if drop is not None:
                    stays = kept(b, head_at, query_at, key_at, drop)
                    after = tl.where(stays, weights * drop[5], 0.0)
                value_acc = tl.dot(after.to(slopes.dtype), slopes, value_acc, input_precision=PRECISION)
                value_slopes = tl.dot(values, tl.trans(slopes), input_precision=PRECISION)
                if drop is not None:
                    value_slopes = tl.where(stays, value_slopes * drop[5], 0.0)
                score_slopes = weights * (value_slopes - row_slope[None, :])
                if TERMS is not None:
                    score_slopes = chained(score_slopes, caps, TERMS)
                # mask again, since a weight of 0 times an infinite number is NaN
                score_slopes = held(
                    score_slopes, 0.0, partial, masks_t, code, KV_TILE, line, part_m,
                    keep, WORDS, BLOCK_M, MASKED, RAGGED, BRANCHED,
                )  # fmt: skip
                key_acc = tl.dot(score_slopes.to(queries.dtype), queries, key_acc, input_precision=PRECISION)
        if SPLIT:
            line = (slot * PARTS + part).to(tl.int64) * BLOCK_N
            store_rows(key_sums + line * D, local * D, key_acc * scale, mine & (slot >= 0), D, PAD_D)
            store_rows(value_sums + line * DV, local * DV, value_acc, mine & (slot >= 0), DV, PAD_DV)
            mine = mine & (slot < 0)
        line = pair.to(tl.int64) * nk + k_first
        store_rows(dk + line * D, local * D, key_acc * scale, mine, D, PAD_D)
        store_rows(dv + line * DV, local * DV, value_acc, mine, DV, PAD_DV)
