"""Kernels that compute out and lse by rows, and join the partial results of long lists."""

# Triton parses the source of these functions, which rules out annotations and the usual style of names
# ruff: noqa: N803, N806

from __future__ import annotations

import triton
import triton.language as tl

from .loads import (
    LN_2,
    LOG2_E,
    SIZES,
    held,
    living,
    of_codes,
    of_head,
    paged_tile,
    partly,
    record_of,
    rows,
    scales,
    spread,
    store_rows,
    strides,
    tile,
    within,
    zeroed,
)  # fmt: skip
from .score_terms import kept, query_heads, scored, standing


@triton.jit(do_not_specialize=SIZES)
def forward(
    q, k, v, out, lse, sums, tops, records, col, bits, masks, live,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n,
    heads, ratio, nq, nk, scale, places, tables, numbers, drop, table, lengths, columns,
    k_scale, v_scale,
    D: tl.constexpr, DV: tl.constexpr, PAD_D: tl.constexpr, PAD_DV: tl.constexpr,
    Q_TILE: tl.constexpr, KV_TILE: tl.constexpr, TILES: tl.constexpr,
    HEADS: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    SPLIT: tl.constexpr, MASKED: tl.constexpr, FOLDED: tl.constexpr, WIDE: tl.constexpr,
    STEP: tl.constexpr, RAGGED: tl.constexpr, DESCRIBED: tl.constexpr,
    PRECISION: tl.constexpr, TERMS: tl.constexpr, SCORED: tl.constexpr, PAGE: tl.constexpr,
    BRANCHED: tl.constexpr, DEAD: tl.constexpr,
):  # fmt: skip
    """Compute out and lse of HEADS x ROWS queries.

    Without terms, ``scale`` includes the factor log2(e), and if it is positive (FOLDED), it is applied after the
    maximum. With terms, neither holds. If PAGE is not 0, keys and values are stored in pages of PAGE tokens: ``table``,
    with ``columns`` columns, has the page numbers, ``lengths`` the numbers of keys, and ``k_b`` and ``v_b`` are the
    strides over pages. With ``k_scale`` and ``v_scale``, keys and values are stored in 8 bits: the stored codes are
    multiplied, and the scales are applied to the products. DEAD: descriptors also load the values of keys that no query
    of their tile attends, which have to be zeroed.
    """
    BLOCK_M: tl.constexpr = HEADS * ROWS
    PARTS_N: tl.constexpr = KV_TILE // BLOCK_N
    WORDS: tl.constexpr = (KV_TILE + 31) // 32
    factor = scale if FOLDED else 1.0
    q_b, q_h, q_n = strides(q_b, q_h, q_n, STEP, WIDE)
    k_b, k_h, k_n = strides(k_b, k_h, k_n, STEP, WIDE)
    v_b, v_h, v_n = strides(v_b, v_h, v_n, STEP, WIDE)
    program = tl.program_id(0)
    # the compiler serialises fewer products in one turn of a loop than without it
    for index in range(program, program + 1):
        item, part = index // PARTS, index % PARTS
        local = tl.arange(0, BLOCK_M)
        b, head, at, begin, end, slot = record_of(records, item, SPLIT)
        q_first, kv_head = at * (Q_TILE * TILES) + part * ROWS, (head // ratio).to(tl.int64)
        row = part * ROWS + (local % ROWS if HEADS > 1 else local)
        mine = within(local, head, ratio, q_first, nq, HEADS, ROWS)
        pair = b * heads + head
        b, head = b.to(tl.int64), head.to(tl.int64)
        queries_at = q + b * q_b + head * q_h + q_first.to(tl.int64) * q_n
        queries = rows(queries_at, spread(local, q_h, q_n, HEADS, ROWS, WIDE), mine, D, PAD_D)
        keys_at = k if DESCRIBED else of_head(k, b, k_b, kv_head, k_h, PAGE)
        values_at = v if DESCRIBED else of_head(v, b, v_b, kv_head, v_h, PAGE)
        end_n = nk
        if PAGE:
            pages = table + b * columns
            end_n = tl.load(lengths + b)
        if SCORED:
            head_at = query_heads(places[0], head, local, mine, HEADS, ROWS)
            token = (q_first + (local % ROWS if HEADS > 1 else local))[:, None]
            row_at, query_at = standing(places[1], places[3], token, b, nq, 0)

        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, PAD_DV], tl.float32)
        for step in tl.range(begin * PARTS_N, end * PARTS_N, num_stages=STAGES):
            entry, part_n = step // PARTS_N, (step % PARTS_N) * BLOCK_N
            first = tl.load(col + entry) * KV_TILE + part_n
            code = tl.load(bits + entry * TILES)
            keep = end_n - first
            codes, other = code, code
            if TILES > 1:
                other = tl.load(bits + entry * TILES + 1)
                codes = tl.where(row < Q_TILE, code, other)
            partial = partly(code, other, keep, BLOCK_N, TILES, MASKED)
            inside = tl.arange(0, BLOCK_N) < keep
            if PAGE:
                keys = paged_tile(keys_at, pages, first, keep, k_b, k_n, inside, BLOCK_N, D, PAD_D, PAGE)
            else:
                keys = tile(k, keys_at, b, kv_head, first, k_n, inside, BLOCK_N, D, PAD_D, WIDE, DESCRIBED)
            if k_scale is not None:
                keys = of_codes(keys, queries.dtype)
            scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
            if k_scale is not None:
                of = scales(k_scale, table, columns, b, kv_head, heads // ratio, nk, first, keep, inside, BLOCK_N, PAGE)
                scores *= of[None, :]
            if not FOLDED:
                scores *= scale
            if SCORED:
                column_at, key_at = standing(places[2], places[3], first + tl.arange(0, BLOCK_N)[None, :], b, nk, 1)
            if TERMS is not None:
                distance, has = key_at - query_at, mine[:, None] & inside[None, :]
                scores = scored(scores, b, head_at, row_at, column_at, distance, has, TERMS, tables, numbers)[0]
                scores *= LOG2_E
            line = row % Q_TILE if TILES > 1 else row
            scores = held(
                scores, float("-inf"), partial, masks, codes, Q_TILE, line, part_n, keep, WORDS, BLOCK_N,
                MASKED, RAGGED, BRANCHED,
            )  # fmt: skip
            new_top = tl.maximum(top, tl.max(scores, 1) * factor)
            # a row without any key so far needs exp2(-inf - 0), not exp2(-inf + inf)
            guard = tl.where(new_top == float("-inf"), 0.0, new_top)
            weights = tl.math.exp2(scores * factor - guard[:, None])
            decay = tl.math.exp2(top - guard)
            total = total * decay + tl.sum(weights, 1)
            if drop is not None:
                weights = tl.where(kept(b, head_at, query_at, key_at, drop), weights, 0.0)
            used = living(live, code, other, part_n, keep, WORDS, BLOCK_N, TILES, MASKED)
            if PAGE:
                values = paged_tile(values_at, pages, first, keep, v_b, v_n, used, BLOCK_N, DV, PAD_DV, PAGE)
            else:
                values = tile(v, values_at, b, kv_head, first, v_n, used, BLOCK_N, DV, PAD_DV, WIDE, DESCRIBED)
            if DEAD:
                values = zeroed(values, partial, live, code, other, part_n, keep, WORDS, BLOCK_N, TILES, BRANCHED)
            if v_scale is not None:
                of = scales(v_scale, table, columns, b, kv_head, heads // ratio, nk, first, keep, used, BLOCK_N, PAGE)
                if queries.dtype == tl.float16:
                    # float16's exponent range is too small for weights times scales
                    values = (of_codes(values, tl.float32) * of[:, None]).to(tl.float16)
                else:
                    weights *= of[None, :]
                    values = of_codes(values, queries.dtype)
            acc = tl.dot(weights.to(values.dtype), values, acc * decay[:, None], input_precision=PRECISION)
            top = new_top

        empty = total == 0.0
        total = tl.where(empty, 1.0, total)
        if drop is not None:
            acc *= drop[5]
        acc = acc / total[:, None]
        row_lse = tl.where(empty, float("-inf"), (top + tl.math.log2(total)) * LN_2)
        if SPLIT:
            line = (slot * PARTS + part).to(tl.int64) * BLOCK_M
            store_rows(sums + line * DV, local * DV, acc, mine & (slot >= 0), DV, PAD_DV)
            tl.store(tops + line + local, row_lse, mask=mine & (slot >= 0))
            mine = mine & (slot < 0)
        line, lines = pair.to(tl.int64) * nq + q_first, spread(local, nq, 1, HEADS, ROWS, False)
        store_rows(out + line * DV, lines * DV, acc, mine, DV, PAD_DV)
        tl.store(lse + line + lines, row_lse, mask=mine)


@triton.jit(do_not_specialize=SIZES)
def join(
    sums, tops, result, lse, splits, heads, ratio, tokens,
    DIM: tl.constexpr, PADDED: tl.constexpr, SPAN: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr,
    PARTS: tl.constexpr, SHARES: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Add the partial results of split tasks, a row per program, SHARES of them side by side.

    The order of the additions depends on nothing but the number of shares. WEIGHTED: partial outs are weighted by their
    lse, and lse is written too.
    """
    BLOCK_M: tl.constexpr = HEADS * ROWS
    split = tl.program_id(0) // (PARTS * BLOCK_M)
    at = tl.program_id(0) % (PARTS * BLOCK_M)
    local = at % BLOCK_M
    of = splits + 5 * split
    b, head, tile_at, first, count = tl.load(of), tl.load(of + 1), tl.load(of + 2), tl.load(of + 3), tl.load(of + 4)
    token = tile_at * SPAN + at // BLOCK_M * ROWS
    mine = within(local, head, ratio, token, tokens, HEADS, ROWS)
    share = tl.arange(0, SHARES)
    # one element, since a row has no axis of rows
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([PADDED], tl.float32)
    for begin in range(0, count, SHARES):
        line = (first + begin + share).to(tl.int64) * (PARTS * BLOCK_M) + at
        inside = mine & (begin + share < count)
        part = rows(sums, line * DIM, inside, DIM, PADDED)
        if WEIGHTED:
            part_top = tl.load(tops + line, mask=inside, other=float("-inf")) * LOG2_E
            new_top = tl.maximum(top, tl.max(part_top, 0))
            guard = tl.where(new_top == float("-inf"), 0.0, new_top)
            decay, weight = tl.math.exp2(top - guard), tl.math.exp2(part_top - guard)
            total = total * decay + tl.sum(weight, 0)
            acc = acc * decay + tl.sum(part * weight[:, None], 0)
            top = new_top
        else:
            acc += tl.sum(part, 0)
    # int64 before the product, as a call may have more rows than 32 bits count
    line = (b * heads + head).to(tl.int64) * tokens + token + spread(local, tokens, 1, HEADS, ROWS, False)
    at_row, alone = tl.zeros([1], tl.int64), mine & (tl.arange(0, 1) == 0)
    if WEIGHTED:
        empty = total == 0.0
        total = tl.where(empty, 1.0, total)
        acc = acc / total
        row_lse = tl.where(empty, float("-inf"), (top + tl.math.log2(total)) * LN_2)
        tl.store(lse + line + at_row, row_lse, mask=alone)
    store_rows(result + line * DIM, at_row, acc[None, :], alone, DIM, PADDED)
