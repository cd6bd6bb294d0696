"""A plan has exactly the pairs of its pattern's dense mask, by rows and columns, for any tile, length, offset, batch and head."""

from __future__ import annotations

import math
import pickle
import time
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

import ringweave as rw
from ringweave.patterns import Pattern, rebuild
from ringweave.patterns.shifted import places
from ringweave.plan import pack_masks, unpack_masks
from ringweave.plan.from_pattern import build

from ..cases import PATTERNS
from ..fuzz.sizes import Sizes
from ..fuzz.strategies import relations
from ..fuzz.trees import Tree, counts, made


def spells_out(
    pattern: Pattern, nq: int, nk: int, heads: int, batch: int, tile: tuple[int, int], q_offset: int = 0
) -> None:
    plan = build(pattern, nq, nk, heads=heads, batch=batch, q_offset=q_offset, tile=tile)
    # rows of a pattern that counts by places belong to the queries of a whole call, of which the plan is a piece
    first, rows = (0, nk) if places(pattern) else (q_offset, nq)
    dense = pattern.to_dense(rows, nk, heads, batch=batch, q_offset=first)[:, :, q_offset - first :][:, :, :nq]
    is_plan_of(plan, dense)


def is_plan_of(plan: rw.BlockPlan, dense: torch.Tensor) -> None:
    assert torch.equal(plan.to_dense(), dense)
    assert plan.pairs() == int(dense.sum())
    by_columns_agree(plan)
    # exact: no listed tile is empty, and no partial tile is full
    padded = torch.nn.functional.pad(dense, (0, -plan.nk % plan.kv_tile, 0, -plan.nq % plan.q_tile))
    used = padded.unflatten(3, (-1, plan.kv_tile)).unflatten(2, (-1, plan.q_tile)).any(5).any(3)
    assert plan.tiles == int(used.sum())
    if plan.mask_words.shape[0]:
        words = {mask.numpy().tobytes() for mask in plan.mask_words}
        assert len(words) == plan.mask_words.shape[0]


def by_columns_agree(plan: rw.BlockPlan) -> None:
    rows = {
        (g, i, int(plan.col[e]), int(plan.mask_id[e]))
        for g in range(plan.row_ptr.shape[0])
        for i in range(plan.q_tiles)
        for e in range(int(plan.row_ptr[g, i]), int(plan.row_ptr[g, i + 1]))
    }
    columns = [
        (g, int(plan.row[e]), j, int(plan.mask_id_t[e]))
        for g in range(plan.row_ptr.shape[0])
        for j in range(plan.kv_tiles)
        for e in range(int(plan.col_ptr[g, j]), int(plan.col_ptr[g, j + 1]))
    ]
    assert rows == set(columns)
    assert len(columns) == plan.nnz
    for ptr, index in ((plan.row_ptr, plan.col), (plan.col_ptr, plan.row)):
        for line in ptr.tolist():
            for a, b in pairwise(line):
                part = index[a:b]
                assert (part.diff() > 0).all()
    assert sorted(plan.launch_order.tolist()) == list(range(plan.launch_order.numel()))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("tokens", [1, 63, 128, 1000])
@pytest.mark.parametrize("name", list(PATTERNS))
def test_plan_equals_dense_mask(name: str, tokens: int) -> None:
    for tile in ((16, 16), (32, 64), (128, 128)):
        if tokens // tile[0] < 40:
            spells_out(PATTERNS[name](tokens), tokens, tokens, 4, 1, tile)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", list(PATTERNS))
def test_plan_equals_dense_mask_of_a_long_sequence(name: str) -> None:
    # a window has more tiles than are classified one by one
    tokens, tile = 33 * 64 + 1, 64
    pattern = PATTERNS[name](tokens)
    # heads that share their pairs are tested with fewer tokens
    heads = 1 if pattern.select(0, 0) is pattern else 4
    dense = pattern.to_dense(tokens, heads=heads)
    assert torch.equal(pattern.plan(tokens, heads=heads, tile=tile).to_dense(), dense)
    share = dense.count_nonzero().item() / dense.numel()
    assert pattern.density(tokens, heads=heads) == pytest.approx(share, rel=1e-5)


@pytest.mark.parametrize("name", list(PATTERNS))
def test_plan_equals_dense_mask_wherever_the_diagonal_crosses_a_tile(name: str) -> None:
    """At every query offset, classifying a tile by its corners gives exactly the pattern's pairs."""
    pattern = PATTERNS[name](90)
    for q_offset in range(19):
        spells_out(pattern, 66, 90, 4, 1, (16, 16), q_offset)


SIDES = st.sampled_from([16, 32, 48, 128])


@settings(max_examples=100)
@given(relations(), st.tuples(SIDES, SIDES))
def test_any_relation(drawn: tuple[Tree, Sizes], tile: tuple[int, int]) -> None:
    """Masks and plans of any expression of any patterns have the pairs of its definition in numpy."""
    tree, s = drawn
    pattern, dense = made(tree, s), torch.from_numpy(counts(tree, s)[0] > 0)
    sizes = {"heads": s.heads, "batch": s.batch, "q_offset": s.q_offset}
    assert torch.equal(pattern.to_dense(s.nq, s.nk, **sizes), dense)
    is_plan_of(pattern.plan(s.nq, s.nk, **sizes, tile=tile), dense)
    if "TokenMask" not in pattern.spec:
        assert rebuild(pattern.spec, pattern.tables) == pattern


def test_tables_of_one_text_keep_their_places() -> None:
    pattern = rw.Documents([1, 1]) & rw.Causal() & rw.Documents([2])
    assert rebuild(pattern.spec, pattern.tables).spec == pattern.spec
    assert rebuild(pattern.spec, pattern.tables) == pattern


def test_per_batch_and_per_head_groups() -> None:
    table = torch.rand(3, 2, 5, 5) < 0.5
    spells_out(rw.BlockTable(table, 16) & rw.Causal(), 75, 75, 2, 3, (16, 16))
    spells_out(rw.BlockTable(table, 16), 80, 80, 2, 3, (16, 16))
    spells_out(rw.BlockTable(table[:, :1], 16), 80, 80, 4, 3, (16, 16))
    spells_out(rw.from_mask_mod(lambda b, h, q, k: (q + b * k) % (h + 2) == 0), 75, 75, 2, 3, (16, 16))


def test_equal_heads_share_their_rows() -> None:
    one = rw.Causal().plan(1000)
    many = rw.PerHead([rw.Causal(), rw.Causal(), rw.SlidingWindow(9), rw.Causal()]).plan(1000, heads=4)
    assert many.row_ptr.shape[0] == 2
    assert many.row_set.tolist() == [[0, 0, 1, 0]]
    assert many.nnz == one.nnz + rw.SlidingWindow(9).plan(1000).nnz


MASKS = [torch.tensor(mask, dtype=torch.bool) for mask in ([[1], [0]], [1], [[1, 0]], [[1, 0], [0, 0]])]
LENGTHS = [torch.tensor(stop, dtype=dtype) for stop, dtype in (([3, 0], torch.int32), ([3], torch.int64))]


@pytest.mark.parametrize(
    ("heads", "nq", "nk"),
    [
        ([rw.Sinks(MASKS[0]), rw.Sinks(MASKS[1])], 1, 1),
        ([rw.Global(MASKS[0]) & rw.Causal(), rw.Global(MASKS[1]) & rw.Causal()], 1, 1),
        ([~rw.Sinks(MASKS[3]), ~rw.Sinks(MASKS[2])], 2, 2),
        ([rw.KeyPadding(LENGTHS[0]), rw.KeyPadding(LENGTHS[1])], 3, 3),
        ([rw.Causal().within(rw.KeyPadding(LENGTHS[0])), rw.Causal().within(rw.KeyPadding(LENGTHS[1]))], 3, 3),
        # a table of one row is that of a step at any position
        ([rw.BlockTable(MASKS[2], 16), rw.BlockTable(MASKS[3], 16)], 16, 32),
        ([rw.BlockTable(MASKS[2].expand(2, 1, 1, 2), 16), rw.BlockTable(MASKS[3].expand(2, 1, 2, 2), 16)], 16, 32),
    ],
)
def test_heads_with_equal_bytes_of_other_shapes_or_dtypes_have_rows_of_their_own(
    heads: list[Pattern], nq: int, nk: int
) -> None:
    spells_out(rw.PerHead(heads), nq, nk, 2, 2, (16, 16), nk - nq)
    spells_out(rw.PerHead(heads[::-1]), nq, nk, 2, 2, (16, 16), nk - nq)


@st.composite
def of_tensor(draw: st.DrawFn, kind: int, n: int, batch: int) -> Pattern:
    lead = draw(st.sampled_from([(), (1,), (batch,)]))

    def numbers(shape: tuple[int, ...], most: int) -> torch.Tensor:
        dtype = draw(st.sampled_from([torch.uint8, torch.int32, torch.int64]))
        size = math.prod(shape)
        return torch.tensor(draw(st.lists(st.integers(0, most), min_size=size, max_size=size)), dtype=dtype).view(shape)

    match kind:
        case 0:
            return rw.Sinks(numbers((*lead, n), 1).bool())
        case 1:
            return rw.Global(numbers((*lead, n), 1).bool())
        case 2:
            return rw.KeyPadding(numbers(lead or (1,), n))
        case 3:
            return rw.Documents(ids=numbers((*lead, n), 2))
        case _:
            return rw.BlockTable(numbers((*lead, *((1,) * len(lead)), n, n), 1).bool(), 1)


@settings(max_examples=100)
@given(st.data())
def test_any_heads_of_few_tokens(data: st.DataObject) -> None:
    """Few tokens have many tensors of equal bytes."""
    kind, n, batch = (data.draw(st.integers(*ends)) for ends in ((0, 4), (1, 3), (2, 4)))
    one, other, third = (data.draw(of_tensor(kind, n, batch)) for _ in range(3))
    pattern = rw.PerHead([one, other, third, one & rw.Causal(), other & rw.Causal(), one | ~other, other | ~one])
    dense = pattern.to_dense(n, heads=7, batch=batch)
    assert torch.equal(build(pattern, n, n, heads=7, batch=batch, tile=(16, 16)).to_dense(), dense)


def test_many_tables_are_told_apart_quickly() -> None:
    """Equal rows of a table are found by value, not by comparing all pairs of heads."""
    mask = torch.rand(4, 64, 16, 16) < 0.5
    mask[1] = mask[0]
    start = time.thread_time()
    plan = (rw.BlockTable(mask, 128) & rw.SlidingWindow(4096, 4096)).plan(2048, heads=64, batch=4)
    assert time.thread_time() - start < 2.0
    assert plan.row_ptr.shape[0] == 3 * 64
    assert torch.equal(plan.row_set[0], plan.row_set[1])


def test_masks_do_not_grow_with_the_length() -> None:
    for pattern in (rw.SlidingWindow(1000) | rw.Sinks(5), rw.Dilated(64, 16), rw.Segments(96)):
        assert pattern.plan(2**14).mask_words.shape[0] == pattern.plan(2**17).mask_words.shape[0] <= 32


def test_documents_of_any_length_have_few_masks() -> None:
    lengths = torch.randint(500, 3000, (600,))
    assert rw.Documents(lengths).plan(int(lengths.sum())).mask_words.shape[0] < 4 * 600


def test_a_table_is_planned_on_its_own_grid() -> None:
    table = rw.patterns.random_blocks(1024, 0.25, block_size=64)
    plan = table.plan(1024)
    assert (plan.q_tile, plan.kv_tile, plan.nnz, plan.mask_words.shape[0]) == (64, 64, 64, 0)
    assert (table & rw.Causal()).plan(1024).q_tile == 64
    assert rw.patterns.random_blocks(1024, 0.25, block_size=100).plan(1024).q_tile == 128


def test_order_starts_with_the_longest_rows() -> None:
    plan = (rw.SlidingWindow(100) | rw.Global([5000])).plan(8192)
    counts = plan.row_ptr.diff(dim=1).reshape(-1)
    assert int(plan.launch_order[0]) == int(counts.argmax())
    interior = plan.launch_order[1:].long()
    assert (interior.diff() == 1).float().mean() > 0.9


def test_table_plan_and_general_plan_agree() -> None:
    table = rw.patterns.random_blocks(1000, 0.5, block_size=64, heads=2)
    direct = table.plan(1000, heads=2, tile=64)
    general = (table & rw.SlidingWindow(5000, 5000)).plan(1000, heads=2, tile=64)
    for name in ("row_ptr", "col", "mask_id", "col_ptr", "row", "mask_id_t", "row_set", "launch_order"):
        assert torch.equal(getattr(direct, name), getattr(general, name)), name


def test_plan_is_a_pytree_and_pickles() -> None:
    plan = (rw.SlidingWindow(30) | rw.Sinks(3)).plan(500)
    tensors, spec = pytree.tree_flatten(plan)
    assert len(tensors) == 9
    assert pytree.tree_unflatten(tensors, spec).nq == 500
    assert torch.equal(pickle.loads(pickle.dumps(plan)).to_dense(), plan.to_dense())
    assert plan.to("cpu").nnz == plan.nnz


@pytest.mark.measures
def test_planning_is_quick_and_small() -> None:
    pattern = (rw.SlidingWindow(1024) | rw.Sinks(64)) & rw.Causal()
    n = 2**20
    assert min(_seconds(pattern, n) for _ in range(5)) <= 0.050
    plan = build(pattern, n, n, tile=(128, 128))
    assert plan.nbytes <= 64 * plan.nnz
    table = rw.patterns.random_blocks(65536, 0.1)
    assert min(_seconds(table, 65536) for _ in range(5)) <= 0.030


def _seconds(pattern: Pattern, n: int) -> float:
    # CPU time of this thread, so that other processes do not count
    start = time.thread_time()
    build(pattern, n, n, tile=(128, 128))
    return time.thread_time() - start


def test_masks_are_packed_and_unpacked() -> None:
    """Every bit of a mask comes back from its words, and so does the last bit of a word."""
    dense = torch.rand(3, 16, 70) > 0.5
    dense[0] = True
    words = pack_masks(dense)
    assert words.dtype == torch.int32
    assert torch.equal(unpack_masks(words, 70), dense)
