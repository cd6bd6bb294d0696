"""Lists are planned like masks, in time and memory that grow with the number of set blocks."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ringweave as rw
from ringweave.patterns import Pattern
from ringweave.plan import BlockPlan
from ringweave.plan import from_table as tables
from ringweave.plan.block_plan import Extent
from ringweave.plan.csr import TileList, _on_device, to_csr
from ringweave.plan.from_pattern import _new_context, _table_context, build

from ..patterns.test_table import listed

SIDE = 16
LISTS = ("col", "mask_id", "row", "mask_id_t")
NOTHING = "~Full()"
OTHERS = ("row_ptr", "col_ptr", "launch_order", "row_set", "mask_words")


def same(plan: BlockPlan, other: BlockPlan) -> None:
    """Two plans have equal lists up to their number of tiles; spare entries after it are not compared."""
    nnz = int(other.row_ptr[-1, -1])
    for name in OTHERS:
        assert torch.equal(getattr(plan, name), getattr(other, name)), name
    for name in LISTS:
        assert torch.equal(getattr(plan, name)[:nnz], getattr(other, name)[:nnz]), name


@given(listed(SIDE), st.data())
def test_lists_are_planned_as_their_mask(drawn: tuple[rw.BlockTable, Tensor], data: st.DataObject) -> None:
    table, mask = drawn
    of_mask = rw.BlockTable(mask, SIDE)
    nq, nk = (
        mask.shape[-2] * SIDE - data.draw(st.integers(0, 15)),
        mask.shape[-1] * SIDE - data.draw(st.integers(0, 15)),
    )
    batch, heads = (side or 2 for side in table.extents())
    sizes: dict[str, Any] = {"heads": heads, "batch": batch}
    plan = build(of_mask, nq, nk, **sizes, tile=(SIDE, SIDE))
    assert torch.equal(plan.to_dense(), of_mask.to_dense(nq, nk, heads, batch=batch))
    same(build(table, nq, nk, **sizes, tile=(SIDE, SIDE)), plan)
    for pattern in (table, of_mask):
        spare = tables.from_table(pattern, Extent(nq, nk, heads, batch, (SIDE, SIDE)), spare=True)
        assert spare.capacity == pattern.blocks.table.numel()
        same(spare, plan)
    # also on another grid, by the general algorithm
    tile = data.draw(st.sampled_from([(32, 32), (16, 64), (48, 16)]))
    same(build(table, nq, nk, **sizes, tile=tile), build(of_mask, nq, nk, **sizes, tile=tile))


INSIDE: dict[str, Pattern] = {
    "causal": rw.Causal(),
    "nothing": ~rw.Full(),
    "everything": rw.Full(),
    "window": rw.SlidingWindow(20, 3) | rw.Sinks(3),
    "strided": rw.Strided(7),
    "periodic": rw.patterns.Periodic(64, 0, 16),
}


@given(listed(SIDE), st.data())
def test_lists_among_patterns(drawn: tuple[rw.BlockTable, Tensor], data: st.DataObject) -> None:
    """A table within other patterns has the tiles and masks of the evaluated combination."""
    table, mask = drawn
    nq, nk = (
        mask.shape[-2] * SIDE - data.draw(st.integers(0, 15)),
        mask.shape[-1] * SIDE - data.draw(st.integers(0, 15)),
    )
    batch, heads = (side or 3 for side in table.extents())
    rest = INSIDE[data.draw(st.sampled_from(list(INSIDE)))]
    if data.draw(st.booleans()):
        rest = rw.PerHead([rest, *data.draw(st.permutations(list(INSIDE.values())))[: heads - 1]])
    other = INSIDE[data.draw(st.sampled_from(list(INSIDE)))]
    context = _table_context(rest.spec, other.spec, Extent(nq, nk, heads, batch, (SIDE, SIDE)), table.blocks.shape[:-2])
    combined = table & rest | ~table & other
    general = build(combined, nq, nk, heads=heads, batch=batch, tile=(SIDE, SIDE))
    there, inside, outside = (each.to_dense(nq, nk, heads, batch=batch) for each in (table, rest, other))
    dense = there & inside | ~there & outside
    assert torch.equal(general.to_dense(), dense)
    plans = [
        tables.from_table(pattern, Extent(nq, nk, heads, batch, (SIDE, SIDE)), spare=spare, context=context)
        for pattern in (table, rw.BlockTable(mask, SIDE))
        for spare in (False, True)
    ]
    for plan in plans:
        same(plan, plans[0])
        assert torch.equal(plan.to_dense(), dense)
        assert (plan.tiles, plan.pairs()) == (general.tiles, general.pairs())


@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 6), st.floats(0, 1), st.integers(0, 99))
def test_tiles_are_sorted_into_rows_and_columns(sets: int, rows: int, width: int, share: float, seed: int) -> None:
    """On a host and on a device, with and without unused places between the tiles."""
    generator = torch.Generator().manual_seed(seed)
    used = torch.rand(sets, rows, width, generator=generator) < share
    every = TileList(*(side.reshape(-1) for side in torch.meshgrid(*map(torch.arange, used.shape), indexing="ij")))
    every = every._replace(mask_id=torch.randint(-1, 9, (used.numel(),), generator=generator, dtype=torch.int32))
    tiles = TileList(*(side[used.view(-1)] for side in every))
    places = every._replace(set=torch.where(used.view(-1), every.set, -1))
    host, device = to_csr(tiles, sets, (rows, width)), _on_device(tiles, sets, (rows, width), False)
    spare = to_csr(places, sets, (rows, width), spare=True)
    for name, found in host._asdict().items():
        assert torch.equal(found, getattr(device, name)), name
        assert torch.equal(found, getattr(spare, name)[: len(found)]), name
    assert torch.equal(host.row_ptr.diff(dim=1), used.sum(2))
    assert torch.equal(host.col_ptr.diff(dim=1), used.sum(1))
    masks = every.mask_id.view(used.shape)
    assert torch.equal(host.col, tiles.col)
    assert torch.equal(host.mask_id, tiles.mask_id)
    assert torch.equal(host.row, used.mT.nonzero()[:, 2])
    assert torch.equal(host.mask_id_t, masks.mT[used.mT])


def test_runs_of_codes_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of a causal pattern has three runs of codes: full tiles, the diagonal, and empty tiles."""

    def runs(tokens: int) -> int:
        return len(_table_context("Causal()", NOTHING, Extent(tokens, tokens, 4, 1, (SIDE, SIDE)), (4,)).starts)

    assert runs(128 * SIDE) <= 4 * 128
    # a few rows of tiles together
    whole = _new_context("SlidingWindow(90)", NOTHING, Extent(999, 999, 1, 1, (SIDE, SIDE)), ())
    monkeypatch.setattr("ringweave.chunks._BUDGET", 1)
    parts = _new_context("SlidingWindow(90)", NOTHING, Extent(999, 999, 1, 1, (SIDE, SIDE)), ())
    place = torch.arange(63 * 63)
    one, two = (each.at(torch.zeros_like(place), place, 63 * 63) for each in (whole, parts))
    # numbers of masks follow the order of discovery
    assert torch.equal(one < 0, two < 0)
    assert torch.equal(one[one < 0], two[two < 0])
    assert torch.equal(whole.mask_words[one[one >= 0]], parts.mask_words[two[two >= 0]])


class _Largest(TorchDispatchMode):
    """Record the bytes of the largest tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor):
                # count the storage: a view has that of its base
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return result


@contextmanager
def bounded(arrays: int, tensor: int | None = None) -> Iterator[None]:
    """Check the bytes of arrays, in total at any time and in each tensor."""
    with _Largest():
        # modules that torch imports at first use do not count
        rw.patterns.random_blocks(512, 0.1, block_size=SIDE).plan(512)
    tracemalloc.start()
    try:
        with _Largest() as made:
            yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= arrays
    assert made.bytes <= (arrays if tensor is None else tensor)


def test_the_bound_of_memory_notices_dense_arrays() -> None:
    with pytest.raises(AssertionError), bounded(2**20):
        torch.zeros(2**10, 2**11, dtype=torch.bool)
    with pytest.raises(AssertionError), bounded(2**20):
        np.zeros(2**21, np.bool_)


def test_bigbird_of_a_million_tokens_grows_with_its_tiles() -> None:
    """BigBird over a million tokens grows with its tiles: 3 of 16,384 random blocks a row; a whole table would take 268 MB."""
    rw.patterns.bigbird(4096).plan(4096)
    n, tiles = 2**20, 215_000
    with bounded(40 * 3 * 2**14):
        pattern = rw.patterns.bigbird(n)
    with bounded(150 * tiles):
        plan = build(pattern, n, n, tile=(64, 64))
    assert 0.9 * tiles < plan.tiles < tiles


@pytest.mark.parametrize("spare", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_top_k_grows_with_the_chosen_blocks(spare: bool, inside: bool) -> None:
    """A table of 8 of 4,096 blocks a row, for two heads, grows with chosen blocks; a mask would take 512 bytes for each."""
    blocks, heads, chosen = 4096, 2, 8
    n = blocks * SIDE
    indices = torch.randint(0, blocks, (heads, blocks, chosen), generator=torch.Generator().manual_seed(0))
    counts = torch.full((heads, blocks), chosen)
    places = heads * blocks * chosen
    with bounded(80 * places):
        table = rw.BlockTable(indices=indices, counts=counts, key_blocks=blocks, block_size=SIDE)
        context = None
        if inside:
            context = _new_context("SlidingWindow(9999)", NOTHING, Extent(n, n, heads, 1, (SIDE, SIDE)), (heads,))
        plan = tables.from_table(table, Extent(n, n, heads, 1, (SIDE, SIDE)), spare=spare, context=context)
        build(table & rw.Causal(), n, n, heads=heads, tile=(SIDE, SIDE))
    expected = places * (1 - (1 - 1 / blocks) ** chosen) * blocks / chosen
    if not inside:
        assert plan.tiles == pytest.approx(expected, rel=0.01)
    assert math.prod(table.mask.shape) > 400 * places


def test_a_mask_is_read_in_pieces() -> None:
    """Planning a table from a mask needs its bytes once, and no further array of its size."""
    blocks = 4096
    table = rw.BlockTable(torch.eye(blocks, dtype=torch.bool), SIDE)
    n = blocks * SIDE
    for pattern in (table, table & rw.SlidingWindow(100)):
        with bounded(blocks**2 // 2, tensor=blocks**2):
            assert build(pattern, n, n, tile=(SIDE, SIDE)).tiles == blocks
