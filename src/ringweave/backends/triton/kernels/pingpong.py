"""Gluon kernel for sm_90 that computes out and lse by rows: one warp loads, and two groups of warps multiply in turn.

The kernel is persistent: a program computes every ``num_programs``-th item of the queue. One warp walks the lists and
copies tiles of queries, keys and values into rings of buffers; it loads the next item while the current one is
computed. Each of the two groups computes 64 rows of a query tile. A group issues the product for its next scores and
the product of its last weights together. Then it leaves the tensor cores to the other group while it computes its
weights. Barriers enforce these turns, so that the softmax of one group overlaps with the products of the other.
"""

# Triton parses the source of these functions, which rules out annotations and the usual style of names
# ruff: noqa: N803, N806

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .loads import SIZES, record_of

record = gluon.jit(record_of.fn)
LN_2 = gl.constexpr(0.6931471805599453)
ROWS = gl.constexpr(64)
# number of query tiles in the ring of buffers
HELD = gl.constexpr(2)


@gluon.jit
def barriers(number: gl.constexpr, arrivals: gl.constexpr):
    """Allocate ``number`` mbarriers, each completed by ``arrivals`` arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [number, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(number):
        mbarrier.init(made.index(index), count=arrivals)
    return made


@gluon.jit(do_not_specialize=SIZES)
def pingpong(
    q, k, v, out, lse, records, col, bits, masks, items, heads, ratio, nq, nk, scale,
    D: gl.constexpr, DV: gl.constexpr, KV_TILE: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr,
    RAGGED: gl.constexpr,
):  # fmt: skip
    """Compute out and lse of query tiles of 128; ``q``, ``k`` and ``v`` are descriptors, ``q`` for half a tile."""
    queries = gl.allocate_shared_memory(q.dtype, [2 * HELD, 1, 1, ROWS, D], q.layout)
    keys = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, KV_TILE, D], k.layout)
    values = gl.allocate_shared_memory(v.dtype, [STAGES, 1, 1, KV_TILE, DV], v.layout)
    q_full, q_free = barriers(2 * HELD, 1), barriers(2 * HELD, 1)
    k_full, k_free = barriers(STAGES, 1), barriers(STAGES, 2)
    v_full, v_free = barriers(STAGES, 1), barriers(STAGES, 2)
    turn = barriers(2, 1)
    tiles = (queries, keys, values)
    marks = (q_full, q_free, k_full, k_free, v_full, v_free, turn)
    lists = (records, col, bits, masks, items)
    sizes = (heads, nq, nk, scale)
    gl.warp_specialize(
        [
            (attend, (tiles, marks, lists, sizes, out, lse, 0, D, DV, KV_TILE, STAGES, MASKED, RAGGED)),
            (attend, (tiles, marks, lists, sizes, out, lse, 1, D, DV, KV_TILE, STAGES, MASKED, RAGGED)),
            (load, (q, k, v, tiles, marks, records, col, items, ratio, KV_TILE, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def load(q, k, v, tiles, marks, records, col, items, ratio, KV_TILE: gl.constexpr, STAGES: gl.constexpr):
    """Copy the tiles of all of a program's items as buffers become free."""
    queries, keys, values = tiles
    q_full, q_free, k_full, k_free, v_full, v_free, _ = marks
    taken = 0
    done = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        b, head, q_tile, begin, end, _slot = record(records, item, False)
        first, kv_head = q_tile * (2 * ROWS), head // ratio
        if begin < end:
            token = gl.load(col + begin) * KV_TILE
            for half in gl.static_range(2):
                at = taken % HELD * 2 + half
                mbarrier.wait(q_free.index(at), taken // HELD & 1 ^ 1)
                mbarrier.expect(q_full.index(at), q.block_type.nbytes)
                tma.async_copy_global_to_shared(
                    q, [b, head, first + half * ROWS, 0], q_full.index(at), queries.index(at)
                )
            taken += 1
            for step in range(begin, end):
                # load the next tile's index early, since its copy waits for it
                following = gl.load(col + gl.minimum(step + 1, end - 1)) * KV_TILE
                slot, parity = done % STAGES, done // STAGES & 1 ^ 1
                mbarrier.wait(k_free.index(slot), parity)
                mbarrier.expect(k_full.index(slot), k.block_type.nbytes)
                tma.async_copy_global_to_shared(k, [b, kv_head, token, 0], k_full.index(slot), keys.index(slot))
                mbarrier.wait(v_free.index(slot), parity)
                mbarrier.expect(v_full.index(slot), v.block_type.nbytes)
                tma.async_copy_global_to_shared(v, [b, kv_head, token, 0], v_full.index(slot), values.index(slot))
                token = following
                done += 1


@gluon.jit
def held(scores, masks, code, row, keep, KV_TILE: gl.constexpr, MASKED: gl.constexpr):
    """Replace scores of pairs that are masked or past the sequence's end by -inf."""
    WORDS: gl.constexpr = KV_TILE // 32
    layout: gl.constexpr = scores.type.layout
    lane = gl.arange(0, KV_TILE, layout=gl.SliceLayout(0, layout))[None, :]
    at = (gl.maximum(code, 0).to(gl.int64) * (2 * ROWS) + row) * WORDS
    found = gl.zeros([ROWS], gl.int32, gl.SliceLayout(1, layout))[:, None]
    for index in gl.static_range(WORDS):
        left = keep - 32 * index
        word = gl.full([ROWS], -1, gl.int32, gl.SliceLayout(1, layout))
        if MASKED:
            word = gl.load(masks + at + index, mask=code >= 0, other=-1)
        word = word & gl.where(left >= 32, -1, (1 << gl.minimum(gl.maximum(left, 0), 31)) - 1)
        found = gl.where(lane // 32 == index, word[:, None], found)
    # a thread's columns differ only in bits 0, 3 and 4, so the shift by the other bits is computed once for all columns
    return gl.where((((found >> (lane & 6)) >> (lane & 25)) & 1) != 0, scores, float("-inf"))


@gluon.jit
def attend(
    tiles, marks, lists, sizes, out, lse, WHICH: gl.constexpr,
    D: gl.constexpr, DV: gl.constexpr, KV_TILE: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr,
    RAGGED: gl.constexpr,
):  # fmt: skip
    """Compute half of the rows of all of a program's items."""
    queries, keys, values = tiles
    q_full, q_free, k_full, k_free, v_full, v_free, turn = marks
    records, col, bits, masks, items = lists
    heads, nq, nk, scale = sizes
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KV_TILE, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    by_row: gl.constexpr = gl.SliceLayout(1, s_layout)
    local = WHICH * ROWS + gl.arange(0, ROWS, layout=by_row)
    out_local = WHICH * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, o_layout))
    channel = gl.arange(0, DV, layout=gl.SliceLayout(0, o_layout))
    taken = 0
    done = 0
    turns = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        b, head, q_tile, begin, end, _slot = record(records, item, False)
        first = q_tile * (2 * ROWS)
        top = gl.full([ROWS], float("-inf"), gl.float32, by_row)
        total = gl.zeros([ROWS], gl.float32, by_row)
        acc = gl.zeros([ROWS, DV], gl.float32, o_layout)
        if begin < end:
            at = taken % HELD * 2 + WHICH
            mine = queries.index(at).reshape([ROWS, D])
            mbarrier.wait(q_full.index(at), taken // HELD & 1)
            slot, parity = done % STAGES, done // STAGES & 1
            mbarrier.wait(k_full.index(slot), parity)
            zeros = gl.zeros([ROWS, KV_TILE], gl.float32, s_layout)
            tile = keys.index(slot).reshape([KV_TILE, D])
            scores = warpgroup_mma(mine, tile.permute([1, 0]), zeros, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(0, [scores])
            mbarrier.arrive(k_free.index(slot))
            code = gl.load(bits + begin)
            if MASKED or RAGGED:
                keep = nk - gl.load(col + begin) * KV_TILE
                if (code >= 0) | (keep < KV_TILE):
                    scores = held(scores, masks, code, local, keep, KV_TILE, MASKED)
            top = gl.max(scores, 1) * scale
            guard = gl.where(top == float("-inf"), 0.0, top)
            weights = gl.exp2(scores * scale - guard[:, None])
            total = gl.sum(weights, 1)
            left = gl.convert_layout(weights.to(values.dtype), p_layout)
            for step in range(begin + 1, end):
                before, before_parity = slot, parity
                done += 1
                slot, parity = done % STAGES, done // STAGES & 1
                mbarrier.wait(turn.index(WHICH), turns & 1 ^ (1 - WHICH))
                turns += 1
                mbarrier.wait(k_full.index(slot), parity)
                tile = keys.index(slot).reshape([KV_TILE, D])
                scores = warpgroup_mma(mine, tile.permute([1, 0]), zeros, use_acc=False, is_async=True)
                mbarrier.wait(v_full.index(before), before_parity)
                acc = warpgroup_mma(left, values.index(before).reshape([KV_TILE, DV]), acc, is_async=True)
                mbarrier.arrive(turn.index(1 - WHICH))
                scores = warpgroup_mma_wait(1, [scores])
                mbarrier.arrive(k_free.index(slot))
                code = gl.load(bits + step)
                if MASKED or RAGGED:
                    keep = nk - gl.load(col + step) * KV_TILE
                    if (code >= 0) | (keep < KV_TILE):
                        scores = held(scores, masks, code, local, keep, KV_TILE, MASKED)
                new_top = gl.maximum(top, gl.max(scores, 1) * scale)
                # a row without any key so far needs exp2(-inf - 0), not exp2(-inf + inf)
                guard = gl.where(new_top == float("-inf"), 0.0, new_top)
                weights = gl.exp2(scores * scale - guard[:, None])
                decay = gl.exp2(top - guard)
                total = total * decay + gl.sum(weights, 1)
                top = new_top
                acc = warpgroup_mma_wait(0, [acc])
                mbarrier.arrive(v_free.index(before))
                acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, o_layout))[:, None]
                left = gl.convert_layout(weights.to(values.dtype), p_layout)
            mbarrier.arrive(q_free.index(at))
            taken += 1
            done += 1
            mbarrier.wait(v_full.index(slot), parity)
            acc = warpgroup_mma(left, values.index(slot).reshape([KV_TILE, DV]), acc, is_async=True)
            acc = warpgroup_mma_wait(0, [acc])
            mbarrier.arrive(v_free.index(slot))
        empty = total == 0.0
        total = gl.where(empty, 1.0, total)
        acc = acc / gl.convert_layout(total, gl.SliceLayout(1, o_layout))[:, None]
        row_lse = gl.where(empty, float("-inf"), (top + gl.log2(total)) * LN_2)
        line = (b * heads + head).to(gl.int64) * nq + first
        gl.store(
            out + (line + out_local)[:, None] * DV + channel[None, :],
            acc.to(out.dtype.element_ty),
            mask=(first + out_local < nq)[:, None],
        )
        gl.store(lse + line + local, row_lse, mask=first + local < nq)
