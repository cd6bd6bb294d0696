"""The Triton kernels: forward by rows; backward as delta, dQ by rows, dK and dV by columns.

One program computes (a part of) one tile of queries, or of keys, over its list of tiles, in one loop: a full tile is a
partial one whose mask words are all ones, so that the loop has no branch. Ends of the sequence are cut out of the
words too. Softmax is in powers of two with the scale folded in. Every program writes its own results: no atomics, the
same bits each time. A long list is not split among programs yet.

Names: (b, h) batch element and head; a *task* is pair * tiles + tile, pairs being batch * heads + head; *code* is the
plan's mask number of a tile, -1 for a full one; *keep* is how many positions from a tile's first are inside the length.
"""

# Triton reads these functions' source: it wants neither annotations nor the usual style of names
# ruff: noqa: N803, N806, RET505

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _word(words, at, code, index: tl.constexpr, shift, keep, MASKED: tl.constexpr):
    """Mask word ``index`` of some rows from bit ``shift``, all ones for a full tile, cut at the end of the sequence."""
    left = keep - 32 * index
    cut = tl.where(left >= 32, -1, (1 << tl.minimum(tl.maximum(left, 0), 31)) - 1)
    if MASKED:
        return tl.load(words + at + index, mask=code >= 0, other=-1) >> shift & cut
    else:
        return tl.zeros_like(at).to(tl.int32) | cut


@triton.jit
def _allowed(words, code, side, row, first, keep, WORDS: tl.constexpr, SIZE: tl.constexpr, MASKED: tl.constexpr):
    """Which of (rows, SIZE) pairs may attend; ``row`` in a mask of ``side`` rows, columns from ``first`` on."""
    lane = tl.arange(0, SIZE)[None, :]
    at = (tl.maximum(code, 0).to(tl.int64) * side + row) * WORDS + first // 32
    # blocks of 16 may begin in the middle of a word
    found = _word(words, at, code, 0, first % 32 if SIZE < 32 else 0, keep, MASKED)[:, None]
    if SIZE > 32:
        found = tl.where(lane < 32, found, _word(words, at, code, 1, 0, keep, MASKED)[:, None])
    if SIZE > 64:
        found = tl.where(lane < 64, found, _word(words, at, code, 2, 0, keep, MASKED)[:, None])
        found = tl.where(lane < 96, found, _word(words, at, code, 3, 0, keep, MASKED)[:, None])
    return ((found >> (lane % 32)) & 1) != 0


@triton.jit
def _alive(live, code, first, keep, WORDS: tl.constexpr, SIZE: tl.constexpr, MASKED: tl.constexpr):
    """Which positions of a tile are inside the length and take part in at least one allowed pair of it."""
    lane = tl.arange(0, SIZE)
    inside = lane < keep
    if MASKED:
        at = tl.maximum(code, 0).to(tl.int64) * WORDS + (first + lane) // 32
        word = tl.load(live + at, mask=inside & (code >= 0), other=-1)
        inside = inside & (((word >> (lane % 32)) & 1) != 0)
    return inside


@triton.jit
def _tile(base, first, stride, inside, SIZE: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, WIDE: tl.constexpr):
    """(SIZE, PADDED) of a (tokens, DIM) matrix from row ``first`` on; 0 where not ``inside`` and past DIM."""
    token = tl.arange(0, SIZE)
    if WIDE:
        token = token.to(tl.int64)
    channel = tl.arange(0, PADDED)[None, :]
    mask = inside[:, None]
    if DIM != PADDED:
        mask = mask & (channel < DIM)
    at = base + first.to(tl.int64) * stride
    return tl.load(at + token[:, None] * stride + channel, mask=mask, other=0.0)


@triton.jit
def _store(base, first, values, inside, SIZE: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr):
    """The inverse of ``_tile`` for a contiguous matrix, in the type of its storage."""
    token = tl.arange(0, SIZE)[:, None]
    channel = tl.arange(0, PADDED)[None, :]
    at = base + first.to(tl.int64) * DIM + token * DIM + channel
    tl.store(at, values.to(base.dtype.element_ty), mask=inside[:, None] & (channel < DIM))


@triton.jit
def forward(
    q, k, v, out, lse, queue, group, row_ptr, col, bits, masks, live,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n,
    heads, ratio, nq, nk, q_tiles, scale,
    D: tl.constexpr, DV: tl.constexpr, PAD_D: tl.constexpr, PAD_DV: tl.constexpr,
    Q_TILE: tl.constexpr, KV_TILE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr, FOLDED: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out and lse of BLOCK_M queries; ``scale`` is in powers of two, folded where it is positive."""
    PARTS_M: tl.constexpr = Q_TILE // BLOCK_M
    PARTS_N: tl.constexpr = KV_TILE // BLOCK_N
    WORDS: tl.constexpr = (KV_TILE + 31) // 32
    program = tl.program_id(0)
    task = tl.load(queue + program // PARTS_M)
    part_m = program % PARTS_M
    pair, tile = task // q_tiles, task % q_tiles
    b, h = (pair // heads).to(tl.int64), pair % heads
    kv_head = (h // ratio).to(tl.int64)
    list_at = row_ptr + tl.load(group + pair) * (q_tiles + 1) + tile
    begin, end = tl.load(list_at), tl.load(list_at + 1)

    row = part_m * BLOCK_M + tl.arange(0, BLOCK_M)
    q_first = tile * Q_TILE + part_m * BLOCK_M
    mine = q_first + tl.arange(0, BLOCK_M) < nq
    queries = _tile(q + b * q_b + h.to(tl.int64) * q_h, q_first, q_n, mine, BLOCK_M, D, PAD_D, WIDE)
    keys_at = k + b * k_b + kv_head * k_h
    values_at = v + b * v_b + kv_head * v_h
    factor = scale if FOLDED else 1.0

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, PAD_DV], tl.float32)
    for step in tl.range(begin * PARTS_N, end * PARTS_N, num_stages=STAGES):
        entry, part_n = step // PARTS_N, (step % PARTS_N) * BLOCK_N
        first = tl.load(col + entry) * KV_TILE + part_n
        code = tl.load(bits + entry)
        keep = nk - first
        keys = _tile(keys_at, first, k_n, tl.arange(0, BLOCK_N) < keep, BLOCK_N, D, PAD_D, WIDE)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        if not FOLDED:
            scores *= scale
        allowed = _allowed(masks, code, Q_TILE, row, part_n, keep, WORDS, BLOCK_N, MASKED)
        scores = tl.where(allowed, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * factor)
        # a row that has met no key yet: exp2(-inf - 0), not exp2(-inf + inf)
        guard = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.math.exp2(scores * factor - guard[:, None])
        decay = tl.math.exp2(top - guard)
        total = total * decay + tl.sum(weights, 1)
        alive = _alive(live, code, part_n, keep, WORDS, BLOCK_N, MASKED)
        values = _tile(values_at, first, v_n, alive, BLOCK_N, DV, PAD_DV, WIDE)
        acc = tl.dot(weights.to(values.dtype), values, acc * decay[:, None], input_precision="ieee")
        top = new_top

    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    acc = acc / total[:, None]
    row_lse = tl.where(empty, float("-inf"), (top + tl.math.log2(total)) * LN_2)
    rows_at = pair.to(tl.int64) * nq
    _store(out + rows_at * DV, q_first, acc, mine, BLOCK_M, DV, PAD_DV)
    tl.store(lse + rows_at + q_first + tl.arange(0, BLOCK_M), row_lse, mask=mine)


@triton.jit
def delta(
    dout, out, lse, dlse, result,
    g_b, g_h, g_n, o_b, o_h, o_n, l_b, l_h, l_n, s_b, s_h, s_n,
    heads, nq,
    DV: tl.constexpr, PAD_DV: tl.constexpr, BLOCK_M: tl.constexpr, SLOPED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """rowsum(dout * out) - dlse of BLOCK_M queries; 0 where lse is -inf."""
    blocks = tl.cdiv(nq, BLOCK_M)
    pair, first = tl.program_id(0) // blocks, (tl.program_id(0) % blocks) * BLOCK_M
    b, h = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    token = first + tl.arange(0, BLOCK_M)
    mine = token < nq
    slopes = _tile(dout + b * g_b + h * g_h, first, g_n, mine, BLOCK_M, DV, PAD_DV, WIDE)
    outs = _tile(out + b * o_b + h * o_h, first, o_n, mine, BLOCK_M, DV, PAD_DV, WIDE)
    found = tl.sum(slopes.to(tl.float32) * outs.to(tl.float32), 1)
    if SLOPED:
        found -= tl.load(dlse + b * s_b + h * s_h + token.to(tl.int64) * s_n, mask=mine, other=0.0).to(tl.float32)
    row_lse = tl.load(lse + b * l_b + h * l_h + token.to(tl.int64) * l_n, mask=mine, other=0.0)
    tl.store(result + pair.to(tl.int64) * nq + token, tl.where(row_lse == float("-inf"), 0.0, found), mask=mine)


@triton.jit
def backward_q(
    q, k, v, dout, lse, slope, dq, queue, group, row_ptr, col, bits, masks, live,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, g_b, g_h, g_n, l_b, l_h, l_n, s_b, s_h, s_n,
    heads, ratio, nq, nk, q_tiles, scale,
    D: tl.constexpr, DV: tl.constexpr, PAD_D: tl.constexpr, PAD_DV: tl.constexpr,
    Q_TILE: tl.constexpr, KV_TILE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dQ of BLOCK_M queries; ``slope`` is delta."""
    PARTS_M: tl.constexpr = Q_TILE // BLOCK_M
    PARTS_N: tl.constexpr = KV_TILE // BLOCK_N
    WORDS: tl.constexpr = (KV_TILE + 31) // 32
    program = tl.program_id(0)
    task = tl.load(queue + program // PARTS_M)
    part_m = program % PARTS_M
    pair, tile = task // q_tiles, task % q_tiles
    b, h = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    kv_head = h // ratio
    list_at = row_ptr + tl.load(group + pair) * (q_tiles + 1) + tile
    begin, end = tl.load(list_at), tl.load(list_at + 1)

    row = part_m * BLOCK_M + tl.arange(0, BLOCK_M)
    q_first = tile * Q_TILE + part_m * BLOCK_M
    token = (q_first + tl.arange(0, BLOCK_M)).to(tl.int64)
    mine = token < nq
    queries = _tile(q + b * q_b + h * q_h, q_first, q_n, mine, BLOCK_M, D, PAD_D, WIDE)
    slopes = _tile(dout + b * g_b + h * g_h, q_first, g_n, mine, BLOCK_M, DV, PAD_DV, WIDE)
    row_lse = tl.load(lse + b * l_b + h * l_h + token * l_n, mask=mine, other=0.0) * LOG2_E
    row_slope = tl.load(slope + b * s_b + h * s_h + token * s_n, mask=mine, other=0.0)
    keys_at = k + b * k_b + kv_head * k_h
    values_at = v + b * v_b + kv_head * v_h

    acc = tl.zeros([BLOCK_M, PAD_D], tl.float32)
    for step in tl.range(begin * PARTS_N, end * PARTS_N, num_stages=STAGES):
        entry, part_n = step // PARTS_N, (step % PARTS_N) * BLOCK_N
        first = tl.load(col + entry) * KV_TILE + part_n
        code = tl.load(bits + entry)
        keep = nk - first
        # keys that nobody here attends are summed over with weight 0: they must be finite
        alive = _alive(live, code, part_n, keep, WORDS, BLOCK_N, MASKED)
        keys = _tile(keys_at, first, k_n, alive, BLOCK_N, D, PAD_D, WIDE)
        values = _tile(values_at, first, v_n, tl.arange(0, BLOCK_N) < keep, BLOCK_N, DV, PAD_DV, WIDE)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        value_slopes = tl.dot(slopes, tl.trans(values), input_precision="ieee")
        score_slopes = tl.math.exp2(scores * (scale * LOG2_E) - row_lse[:, None]) * (value_slopes - row_slope[:, None])
        allowed = _allowed(masks, code, Q_TILE, row, part_n, keep, WORDS, BLOCK_N, MASKED)
        score_slopes = tl.where(allowed, score_slopes, 0.0)
        acc = tl.dot(score_slopes.to(keys.dtype), keys, acc, input_precision="ieee")
    _store(dq + pair.to(tl.int64) * nq * D, q_first, acc * scale, mine, BLOCK_M, D, PAD_D)


@triton.jit
def backward_kv(
    q, k, v, dout, lse, slope, dk, dv, queue, group, col_ptr, row, bits_t, masks_t, live_t,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, g_b, g_h, g_n, l_b, l_h, l_n, s_b, s_h, s_n,
    heads, ratio, nq, nk, kv_tiles, scale,
    D: tl.constexpr, DV: tl.constexpr, PAD_D: tl.constexpr, PAD_DV: tl.constexpr,
    Q_TILE: tl.constexpr, KV_TILE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dK and dV of BLOCK_N keys, over all query heads of their key head; scores are transposed, keys by queries."""
    PARTS_M: tl.constexpr = Q_TILE // BLOCK_M
    PARTS_N: tl.constexpr = KV_TILE // BLOCK_N
    WORDS: tl.constexpr = (Q_TILE + 31) // 32
    program = tl.program_id(0)
    task = tl.load(queue + program // PARTS_N)
    part_n = program % PARTS_N
    pair, tile = task // kv_tiles, task % kv_tiles
    kv_heads = heads // ratio
    b, kv_head = (pair // kv_heads).to(tl.int64), (pair % kv_heads).to(tl.int64)

    line = part_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k_first = tile * KV_TILE + part_n * BLOCK_N
    mine = k_first + tl.arange(0, BLOCK_N) < nk
    keys = _tile(k + b * k_b + kv_head * k_h, k_first, k_n, mine, BLOCK_N, D, PAD_D, WIDE)
    values = _tile(v + b * v_b + kv_head * v_h, k_first, v_n, mine, BLOCK_N, DV, PAD_DV, WIDE)
    key_acc = tl.zeros([BLOCK_N, PAD_D], tl.float32)
    value_acc = tl.zeros([BLOCK_N, PAD_DV], tl.float32)
    for member in range(ratio):
        h = kv_head * ratio + member
        list_at = col_ptr + tl.load(group + b * heads + h) * (kv_tiles + 1) + tile
        begin, end = tl.load(list_at), tl.load(list_at + 1)
        queries_at = q + b * q_b + h * q_h
        slopes_at = dout + b * g_b + h * g_h
        lse_at = lse + b * l_b + h * l_h
        slope_at = slope + b * s_b + h * s_h
        for step in tl.range(begin * PARTS_M, end * PARTS_M, num_stages=STAGES):
            entry, part_m = step // PARTS_M, (step % PARTS_M) * BLOCK_M
            first = tl.load(row + entry) * Q_TILE + part_m
            code = tl.load(bits_t + entry)
            keep = nq - first
            token = (first + tl.arange(0, BLOCK_M)).to(tl.int64)
            inside = token < nq
            # queries that attend nothing here are summed over with weight 0: they and their slopes must be finite
            alive = _alive(live_t, code, part_m, keep, WORDS, BLOCK_M, MASKED)
            queries = _tile(queries_at, first, q_n, alive, BLOCK_M, D, PAD_D, WIDE)
            slopes = _tile(slopes_at, first, g_n, alive, BLOCK_M, DV, PAD_DV, WIDE)
            row_lse = tl.load(lse_at + token * l_n, mask=inside, other=0.0) * LOG2_E
            row_slope = tl.load(slope_at + token * s_n, mask=inside, other=0.0)
            scores = tl.dot(keys, tl.trans(queries), input_precision="ieee")
            allowed = _allowed(masks_t, code, KV_TILE, line, part_m, keep, WORDS, BLOCK_M, MASKED)
            weights = tl.math.exp2(scores * (scale * LOG2_E) - row_lse[None, :])
            weights = tl.where(allowed, weights, 0.0)
            value_acc = tl.dot(weights.to(slopes.dtype), slopes, value_acc, input_precision="ieee")
            value_slopes = tl.dot(values, tl.trans(slopes), input_precision="ieee")
            score_slopes = tl.where(allowed, weights * (value_slopes - row_slope[None, :]), 0.0)
            key_acc = tl.dot(score_slopes.to(queries.dtype), queries, key_acc, input_precision="ieee")
    keys_done = pair.to(tl.int64) * nk
    _store(dk + keys_done * D, k_first, key_acc * scale, mine, BLOCK_N, D, PAD_D)
    _store(dv + keys_done * DV, k_first, value_acc, mine, BLOCK_N, DV, PAD_DV)
