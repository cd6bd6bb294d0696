"""Tables per key head, of one row for a decoding step, and with blocks that are parts of tiles have the pairs of their definition."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import ringweave as rw
from ringweave.patterns import BlockTable, Pattern, rebuild
from ringweave.plan.block_plan import Extent
from ringweave.plan.from_pattern import build
from ringweave.plan.from_table import fine, from_fine_table, from_table

from .test_tables import NothingRead

N, SIDE, BLOCKS = 128, 32, 4
MASK = torch.rand(2, 2, BLOCKS, BLOCKS, generator=torch.Generator().manual_seed(0)) < 0.5


def of_indices(mask: Tensor, side: int = SIDE) -> BlockTable:
    indices = mask.int().sort(dim=-1, descending=True, stable=True).indices
    return rw.BlockTable(None, side, indices=indices, counts=mask.sum(-1), key_blocks=mask.shape[-1], heads="kv")


COMBINED: dict[str, Callable[[BlockTable], Pattern]] = {
    "alone": lambda table: table,
    "causal": lambda table: table & rw.Causal(),
    "or a window": lambda table: ~table | rw.SlidingWindow(3),
    "of heads": lambda table: rw.PerHead([table] * 3 + [rw.Causal()] * 3),
}


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("name", COMBINED)
def test_a_table_of_key_heads_is_that_of_their_query_heads(name: str, listed: bool) -> None:
    table = of_indices(MASK) if listed else rw.BlockTable(MASK, SIDE, heads="kv")
    pattern = COMBINED[name](table)
    spelled = COMBINED[name](rw.BlockTable(MASK.repeat_interleave(3, 1), SIDE))
    dense = spelled.to_dense(N, heads=6, batch=2)
    assert torch.equal(pattern.to_dense(N, heads=6, batch=2), dense)
    assert pattern.density(N, heads=6, batch=2) == spelled.density(N, heads=6, batch=2)
    bound = pattern.bound(6, 2)
    assert rebuild(bound.spec, bound.tables) == bound
    assert rebuild(pattern.spec, pattern.tables) == pattern
    assert bound.bound(6, 2) is bound
    for tile in ((SIDE, SIDE), (16, 64)):
        plan = build(bound, N, N, heads=6, batch=2, tile=tile)
        assert torch.equal(plan.to_dense(), dense)
        assert name != "alone" or tile != (SIDE, SIDE) or plan.row_ptr.shape[0] == 4
    if not isinstance(bound, rw.PerHead):
        assert build(bound, N, N, heads=6, batch=2, tile=(SIDE, SIDE), device="meta").row_set.shape == (2, 6)
    q, k = torch.randn(2, 6, N, 16), torch.randn(2, 2, N, 16)
    torch.testing.assert_close(rw.attention(q, k, k, pattern), rw.attention(q, k, k, spelled, backend="reference"))
    assert torch.equal(rw.attention_weights(q, k, pattern).to_dense() > 0, dense)
    facts = rw.explain(pattern, N, heads=6, kv_heads=2, batch=2, as_dict=True)
    assert facts["pairs"]["allowed"] == int(dense.sum())


@pytest.mark.parametrize(("first", "nq"), [(0, 1), (97, 1), (127, 1), (60, 9), (96, 32)])
@pytest.mark.parametrize("name", ["alone", "causal"])
def test_a_table_of_one_row_is_that_of_a_step_anywhere(name: str, first: int, nq: int) -> None:
    row = MASK[:, :, :1]
    pattern = COMBINED[name](of_indices(row))
    rows = -(-(first + nq) // SIDE)
    spelled = COMBINED[name](rw.BlockTable(row.expand(2, 2, rows, BLOCKS).repeat_interleave(3, 1), SIDE))
    dense = spelled.to_dense(nq, N, 6, batch=2, q_offset=first)
    assert torch.equal(pattern.to_dense(nq, N, 6, batch=2, q_offset=first), dense)
    for tile in ((SIDE, SIDE), (16, 64)):
        plan = build(pattern.bound(6), nq, N, heads=6, batch=2, q_offset=first, tile=tile)
        assert torch.equal(plan.to_dense(), dense)
        assert plan.q_offset == first
    unread = COMBINED[name](of_indices(row.to("meta"))).bound(6)
    plan = build(unread, nq, N, heads=6, batch=2, q_offset=first, tile=(SIDE, SIDE), device="meta")
    assert not plan.counted
    q, k = torch.randn(2, 6, nq, 16), torch.randn(2, 2, N, 16)
    want = rw.attention(q, k, k, spelled, q_offset=first, backend="reference")
    for offset in (first, torch.tensor([first, first])):
        torch.testing.assert_close(rw.attention(q, k, k, pattern, q_offset=offset), want)


@pytest.mark.parametrize("lead", [(), (2,), (2, 2)], ids=str)
@pytest.mark.parametrize(
    ("nq", "nk", "side", "tile"),
    [
        (200, 300, (1, 128), (128, 128)), (200, 300, (1, 128), (16, 128)), (200, 310, (4, 32), (32, 64)),
        (129, 257, (16, 64), (128, 128)), (128, 256, (1, 64), (128, 128)),
    ],
)  # fmt: skip
def test_blocks_that_are_parts_of_tiles(
    nq: int, nk: int, side: tuple[int, int], tile: tuple[int, int], lead: tuple[int, ...]
) -> None:
    for density in (0.02, 0.5, 1.0):
        generator = torch.Generator().manual_seed(0)
        mask = torch.rand(*lead, -(-nq // side[0]), -(-nk // side[1]), generator=generator) < density
        pattern = rw.BlockTable(mask, side, heads="kv").bound(4)
        assert isinstance(pattern, BlockTable)
        assert fine(pattern, tile)
        dense = pattern.to_dense(nq, nk, 4, batch=2)
        plan = build(pattern, nq, nk, heads=4, batch=2, tile=tile)
        assert torch.equal(plan.to_dense(), dense)
        assert plan.pairs() == int(dense.sum())
        # full tiles have no mask, and empty tiles are not listed
        other = build(pattern & rw.Full() | ~rw.Full() & rw.Causal(), nq, nk, heads=4, batch=2, tile=tile)
        assert (plan.tiles, plan.computed_pairs()) == (other.tiles, other.computed_pairs())
        with NothingRead():
            spare = from_fine_table(pattern, Extent(nq, nk, 4, 2, tile), spare=True)
        assert torch.equal(spare.to_dense(), dense)
        assert not spare.counted


def test_a_list_for_every_token_attends_its_blocks() -> None:
    indices = torch.rand(2, 300, 3, generator=torch.Generator().manual_seed(0)).argsort(-1)[..., :2]
    pattern = rw.BlockTable(
        None, (1, 128), indices=indices, counts=torch.full((2, 300), 2), key_blocks=3, heads="kv"
    )  # fmt: skip
    q, k, v = torch.randn(1, 4, 300, 16), torch.randn(1, 2, 300, 16), torch.randn(1, 2, 300, 24)
    torch.testing.assert_close(rw.attention(q, k, v, pattern), rw.attention(q, k, v, pattern, backend="reference"))


def test_fresh_tables_are_planned_as_others() -> None:
    """For a table with one head for all, heads="kv" makes no difference."""
    one = rw.BlockTable(MASK[0, 0], SIDE, heads="kv")
    assert one.group == 1
    assert one.spec == "BlockTable(_, 32)"
    plan = from_table(one, Extent(N, N, 6, 2, (SIDE, SIDE)))
    assert plan.row_set.unique().tolist() == [0]
