"""Plans of block tables are exact on a CPU; on a GPU they have spare entries, and nothing is read back to build them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import ringweave as rw
from ringweave.backends import dense_batched
from ringweave.backends.backend import Upstream
from ringweave.call import Operands
from ringweave.errors import PatternError
from ringweave.patterns.reader import rebuild
from ringweave.plan import BlockPlan, Branch
from ringweave.plan import from_table as tables
from ringweave.plan.block_plan import Extent
from ringweave.plan.from_pattern import _table_context, build
from ringweave.plan.from_table import split

N, SIDE = 512, 64
BLOCKS = N // SIDE


def table(density: float, *shape: int) -> rw.BlockTable:
    mask = torch.rand(*shape, BLOCKS, BLOCKS, generator=torch.Generator().manual_seed(1)) < density
    return rw.BlockTable(mask, SIDE)


def chosen() -> tuple[Tensor, Tensor]:
    """Return three key blocks for each query block of two batch elements and four heads, fewer for some rows."""
    indices = torch.rand(2, 4, BLOCKS, BLOCKS, generator=torch.Generator().manual_seed(2)).topk(3).indices
    return indices, torch.arange(BLOCKS).expand(2, 4, -1) % 4


def of_indices(device: str = "cpu") -> rw.BlockTable:
    indices, counts = (x.to(device) for x in chosen())
    return rw.BlockTable(indices=indices, counts=counts, key_blocks=BLOCKS, block_size=SIDE)


TABLES: dict[str, Callable[[], rw.BlockTable]] = {
    "one": lambda: table(0.4),
    "per_head": lambda: table(0.4, 4),
    "per_batch": lambda: table(0.3, 2, 1),
    "nothing": lambda: table(0.0, 4),
    "everything": lambda: table(2.0),
    "indices": of_indices,
}


def planned(pattern: rw.BlockTable, spare: bool) -> BlockPlan:
    return tables.from_table(pattern, Extent(N, N, 4, 2, (SIDE, SIDE)), spare=spare)


@pytest.mark.parametrize("name", list(TABLES))
def test_a_plan_with_places_to_spare_holds_the_same_tiles(name: str) -> None:
    pattern = TABLES[name]()
    exact, spare = planned(pattern, False), planned(pattern, True)
    assert exact.capacity == exact.nnz == spare.nnz <= spare.capacity
    assert spare.capacity == pattern.blocks.table.numel()
    for which in ("row_ptr", "col_ptr", "row_set", "launch_order", "mask_words"):
        assert torch.equal(getattr(exact, which), getattr(spare, which)), which
    for which in ("col", "row", "mask_id", "mask_id_t"):
        assert torch.equal(getattr(exact, which), getattr(spare, which)[: exact.nnz]), which
    dense = pattern.to_dense(N, heads=4, batch=2)
    assert torch.equal(spare.to_dense(), dense)
    assert spare.tiles == exact.tiles
    assert spare.density == exact.density
    assert spare.pairs() == int(dense.sum())
    assert torch.equal(spare.tile_rows(), exact.tile_rows())
    assert spare.to("cpu").capacity == exact.nnz
    assert torch.equal(spare.to_block_mask().to_dense(), exact.to_block_mask().to_dense())


def test_kernels_read_through_the_offsets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels ignore spare entries, whatever they contain."""
    pattern = table(0.4, 4)
    spare = planned(pattern, True)
    for which in ("col", "row", "mask_id", "mask_id_t"):
        getattr(spare, which)[spare.nnz :] = -(2**30)
    q, k, v = torch.randn(2, 4, N, 16), torch.randn(2, 2, N, 16), torch.randn(2, 2, N, 16)
    branch = Branch.whole(pattern, N, N, heads=4, batch=2)
    monkeypatch.setattr(Branch, "plan", lambda self, device, tile=None: spare)
    inputs = Operands(q, k, v, 0.25)
    out, lse = dense_batched.forward(inputs, branch, torch.float32)
    upstream = Upstream(out, lse, out.square().sum(-1))
    grads = dense_batched.backward(upstream, inputs, branch, torch.float32)
    monkeypatch.undo()
    assert torch.equal(out, rw.attention(q, k, v, pattern, backend="dense_batched"))
    again = dense_batched.backward(upstream, inputs, branch, torch.float32)
    assert all(torch.equal(one, two) for one, two in zip(grads, again, strict=True))


PER_HEAD = rw.PerHead([rw.Causal(), rw.SlidingWindow(70), ~rw.Causal(), rw.Causal()])
WINDOW = rw.SlidingWindow(100) | rw.Sinks(3)
#: expressions that a table may be an operand of: with shared masks, masks per head, and tiles that are empty with it, without it, or never
AROUND: dict[str, Callable[[rw.Pattern], rw.Pattern]] = {
    "within causal": lambda table: table & rw.Causal(),
    "within a window": lambda table: table & WINDOW,
    "within patterns per head": lambda table: table & PER_HEAD,
    "within all": lambda table: table & rw.Segments(1000),
    "or a window": lambda table: table | WINDOW,
    "or patterns per head": lambda table: table | PER_HEAD,
    "or a window, within causal": lambda table: (table | rw.SlidingWindow(64)) & rw.Causal() | rw.Sinks(2),
    "the others": lambda table: ~table & rw.Causal(),
    "here these, there those": lambda table: table & rw.Causal() | ~table & rw.SlidingWindow(40, 90),
}


@pytest.mark.parametrize("of", list(AROUND))
@pytest.mark.parametrize("name", ["one", "per_head", "per_batch", "indices", "nothing"])
def test_a_table_among_patterns(name: str, of: str) -> None:
    """A table within other patterns has the tiles and masks of the general plan, which evaluates the combination."""
    tokens = N - 20
    pattern = TABLES[name]()
    combined = AROUND[of](pattern)
    general = build(combined, tokens, tokens, heads=4, batch=2, tile=(SIDE, SIDE))
    parts = split(combined, (SIDE, SIDE))
    assert parts is not None
    table, every, none = parts
    assert table == pattern
    context = _table_context(
        every.spec, none.spec, Extent(tokens, tokens, 4, 2, (SIDE, SIDE)), pattern.blocks.shape[:-2]
    )

    def planned_around(spare: bool) -> BlockPlan:
        return tables.from_table(pattern, Extent(tokens, tokens, 4, 2, (SIDE, SIDE)), spare=spare, context=context)

    exact = planned_around(False)
    with NothingRead():
        spare = planned_around(True)
    assert (
        spare.capacity
        == pattern.blocks.table.numel() // pattern.blocks.table[..., 0, 0].numel() * len(context.of_table)
        + context.outside.numel()
    )
    for plan in (exact, spare):
        assert torch.equal(plan.to_dense(), general.to_dense())
        assert torch.equal(plan.to("cpu").col, exact.col)
        assert torch.equal(plan.to("cpu").mask_id_t, exact.mask_id_t)
        assert plan.pairs() == general.pairs()
        assert plan.tiles == general.tiles
        # both have equally many full tiles
        assert int((plan.listed()[2] < 0).sum()) == int((exact.mask_id < 0).sum())
        dense = general.to_dense()
        assert torch.equal(dense, combined.to_dense(tokens, heads=4, batch=2) > 0)
    # also by columns
    mirrored = torch.zeros_like(dense)
    counts = spare.col_ptr.diff(dim=1).reshape(-1).long()
    column = torch.arange(counts.numel()).repeat_interleave(counts)
    for b in range(2):
        for h in range(4):
            mine = column // spare.kv_tiles == int(spare.row_set[b, h])
            for k, q in zip(
                (column[mine] % spare.kv_tiles).tolist(), spare.row[: len(column)][mine].tolist(), strict=True
            ):
                mirrored[b, h, q * SIDE : (q + 1) * SIDE, k * SIDE : (k + 1) * SIDE] = True
    assert not (dense & ~mirrored).any()


def test_a_table_among_patterns_without_data() -> None:
    table, window = of_indices("meta"), rw.SlidingWindow(SIDE)
    room = 2 * 4 * BLOCKS * 3
    for pattern, places in (
        (table & rw.Causal() & rw.SlidingWindow(300), room),
        (table & rw.Causal() | window, room + 2 * 4 * (2 * BLOCKS - 1)),
    ):
        plan = build(pattern, N, N, heads=4, batch=2, tile=(SIDE, SIDE), device="meta")
        assert plan.capacity == places
        assert plan.mask_words.shape[0] > 0
        assert plan.row_set.shape == (2, 4)
        assert not plan.counted


def test_which_combinations_are_planned_around_a_table() -> None:
    table, other = of_indices(), TABLES["one"]()
    again = rebuild(table.spec, table.tables)
    parts = split(again & rw.Causal() | table & WINDOW, (SIDE, SIDE))
    assert parts is not None
    assert parts[0] is again
    for pattern in (rw.Causal(), table | other, rw.Causal() | rw.PerHead([table.select(0, 0)] * 4)):
        assert split(pattern, (SIDE, SIDE)) is None
    assert split(table | rw.Causal(), (128, 128)) is None


def test_a_table_and_that_of_its_first_head_are_two_tables() -> None:
    """They begin at one address."""
    table = of_indices()
    for first in (table.select(0, 0), rw.BlockTable.of(table.blocks.some(slice(0, 1)), table.block_size)):
        for pattern in (table & ~first, first | ~table):
            spells = pattern.to_dense(N, heads=4, batch=2)
            assert torch.equal(build(pattern, N, N, heads=4, batch=2, tile=(SIDE, SIDE)).to_dense(), spells)


class NothingRead(TorchDispatchMode):
    """Fail on operators that make a result's shape or the host's next step depend on values."""

    READING = ("_local_scalar_dense", "item", "nonzero", "masked_select", "unique", "repeat_interleave", "is_nonzero")

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        self.called.append(name)
        assert not name.startswith(self.READING), name
        if name in ("index", "index_put", "index_put_"):
            assert not any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1]), name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", list(TABLES))
def test_nothing_is_read_back(name: str) -> None:
    pattern = TABLES[name]()
    with NothingRead() as watched:
        planned(pattern, True)
    assert "scatter_" in watched.called
    with pytest.raises(AssertionError, match="nonzero"), NothingRead():
        pattern.mask.nonzero()


def test_tables_without_data() -> None:
    """From construction to plan, a table is planned on tensors without values: reading one would fail."""
    pattern = of_indices("meta")
    assert pattern.spec == "BlockTable(_, 64, key_blocks=8)"
    again = rebuild(pattern.spec, pattern.tables)
    assert isinstance(again, rw.BlockTable)
    assert (again.blocks.most, again.blocks.shape) == (3, (2, 4, BLOCKS, BLOCKS))
    plan = build(pattern, N, N, heads=4, batch=2, tile=(SIDE, SIDE), device="meta")
    assert plan.capacity == 2 * 4 * BLOCKS * 3
    assert plan.col.device.type == "meta"
    mask = rw.BlockTable(torch.empty(BLOCKS, BLOCKS, dtype=torch.bool, device="meta"), SIDE)
    assert mask.spec == "BlockTable(_, 64)"
    assert build(mask, N, N, tile=(SIDE, SIDE), device="meta").capacity == BLOCKS**2


def test_a_huge_table_is_planned_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a table so large that spare entries for all blocks would cost more than a wait, the plan is exact."""
    monkeypatch.setattr(tables, "MOST_PLACES", BLOCKS**2 - 1)
    mask = rw.BlockTable(torch.empty(BLOCKS, BLOCKS, dtype=torch.bool, device="meta"), SIDE)
    with pytest.raises((NotImplementedError, RuntimeError), match="nonzero"):
        build(mask, N, N, tile=(SIDE, SIDE), device="meta")


def test_indices_out_of_range() -> None:
    with pytest.raises(PatternError, match=r"indices: got 0\.\.8; wanted 0\.\.7"):
        rw.BlockTable(indices=torch.tensor([[0, 8]]), counts=torch.tensor([2]), key_blocks=8)
    # entries past the count are not checked
    free = rw.BlockTable(indices=torch.tensor([[0, 8]]), counts=torch.tensor([1]), key_blocks=8)
    assert free.mask.tolist() == [[True] + 7 * [False]]


@pytest.mark.gpu
def test_planning_does_not_wait_on_a_gpu() -> None:
    indices, counts = (x.cuda() for x in chosen())
    mask = table(0.4, 4).mask.cuda()
    # the pattern around the table is planned in advance
    causal = rw.BlockTable(mask, SIDE) & rw.Causal()
    causal.plan(N, heads=4, batch=2, device="cuda")
    window = rw.SlidingWindow(SIDE) & rw.Causal()
    (causal | window).plan(N, heads=4, batch=2, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for pattern in (
            rw.BlockTable(indices=indices, counts=counts, key_blocks=BLOCKS, block_size=SIDE),
            rw.BlockTable(mask, SIDE),
            causal,
            rw.BlockTable(mask, SIDE) & rw.Causal() | window,
            rw.BlockTable(mask, SIDE) & rw.Causal(),
        ):
            plan = pattern.plan(N, heads=4, batch=2, device="cuda")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(plan.to_dense(), (table(0.4, 4) & rw.Causal()).to_dense(N, heads=4, batch=2) > 0)
