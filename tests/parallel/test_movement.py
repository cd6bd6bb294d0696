"""Test covers: valid, minimal against brute force, below the cap, and with every edge of a plan computed exactly once."""

from __future__ import annotations

import importlib.util
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ringweave as rw
from ringweave.parallel.planning import movement as module
from ringweave.parallel.planning.demand import Demand
from ringweave.parallel.planning.movement import Moves, edges, movement
from ringweave.parallel.planning.placement import Placement, contiguous, striped
from ringweave.patterns import Pattern
from ringweave.plan import branches

TILE = 32
NO_CAP = 1e9


def demand_of(pattern: Pattern, placement: Placement, heads: tuple[int, int] = (1, 1)) -> Demand:
    (branch,) = branches(pattern, placement.tokens, placement.tokens, heads=heads[0])
    return Demand.of(branch, placement, heads[0] // heads[1])


def check_computed_once(demand: Demand, moves: tuple[Moves, ...]) -> None:
    """A pair of tiles is computed by the query's or the key's rank, which receives the other tile; no other tiles are moved."""
    for kind, move in zip(demand.kinds, moves, strict=True):
        row, col, _ = edges(demand, kind)
        a, b = demand.owner[row], demand.owner[col]
        at_key = move.queries[b, row]
        assert not at_key[a == b].any()
        assert move.keys[a[~at_key], col[~at_key]].all()
        used = np.zeros_like(move.queries)
        used[b[at_key], row[at_key]] = True
        np.testing.assert_array_equal(move.queries, used)
        wanted = np.zeros_like(move.keys)
        wanted[a[~at_key], col[~at_key]] = True
        wanted[demand.owner, np.arange(len(demand.owner))] = True
        np.testing.assert_array_equal(move.keys, wanted)


def bytes_of(demand: Demand, moves: tuple[Moves, ...], of_key: int, of_query: int) -> int:
    total = 0
    for kind, move in zip(demand.kinds, moves, strict=True):
        received = move.keys.sum() - len(demand.owner)
        total += len(kind.members) * int(received * of_key + move.queries.sum() * of_query * kind.queries)
    return total


def least(demand: Demand, of_key: int, of_query: int) -> int:
    """Return the fewest bytes, by trying every set of moved queries of every pair of ranks."""
    total = 0
    for kind in demand.kinds:
        row, col, _ = edges(demand, kind)
        a, b = demand.owner[row], demand.owner[col]
        for pair in itertools.permutations(range(demand.placement.ranks), 2):
            inside = (a == pair[0]) & (b == pair[1])
            ends = list(zip(row[inside].tolist(), col[inside].tolist(), strict=True))
            queries = sorted({i for i, _ in ends})
            best = None
            for size in range(len(queries) + 1):
                for moved in itertools.combinations(queries, size):
                    keys = {j for i, j in ends if i not in moved}
                    cost = len(keys) * of_key + size * of_query * kind.queries
                    best = cost if best is None else min(best, cost)
            total += (best or 0) * len(kind.members)
    return total


@st.composite
def tables(draw: st.DrawFn) -> tuple[torch.Tensor, Placement]:
    ranks = draw(st.sampled_from([2, 3]))
    side = ranks * draw(st.integers(2, 10 // ranks))
    bits = draw(st.lists(st.booleans(), min_size=side * side, max_size=side * side))
    mask = torch.tensor(bits).reshape(side, side)
    # some rows and columns attend, and are attended, everywhere, where covers save most
    for line in draw(st.sets(st.integers(0, side - 1), max_size=2)):
        mask[line] = True
    for line in draw(st.sets(st.integers(0, side - 1), max_size=1)):
        mask[:, line] = True
    make = draw(st.sampled_from([contiguous, striped]))
    return mask, make(side * TILE, ranks, TILE)


@pytest.mark.parametrize("heads", [(1, 1), (4, 2)])
@given(case=tables(), of_key=st.integers(1, 12), of_query=st.integers(1, 12))
def test_movement_is_valid_and_minimal(
    heads: tuple[int, int], case: tuple[torch.Tensor, Placement], of_key: int, of_query: int
) -> None:
    pytest.importorskip("scipy")
    mask, placement = case
    demand = demand_of(rw.BlockTable(mask, TILE), placement, heads)
    moves = movement(demand, of_key, of_query, NO_CAP)
    check_computed_once(demand, moves)
    assert bytes_of(demand, moves, of_key, of_query) == least(demand, of_key, of_query)


def test_a_flow_decides_where_no_rule_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that share keys in pairs, where no rule decides between queries and keys, are decided by a maximum flow."""
    pytest.importorskip("scipy")
    mask = torch.zeros(8, 8, dtype=torch.bool)
    for i, keys in enumerate([(4, 5, 6), (5, 6, 7), (6, 7, 4), (7, 4, 5)]):
        mask[i, list(keys)] = True
    mask[0, 0] = True
    demand = demand_of(rw.BlockTable(mask, TILE), contiguous(8 * TILE, 2, TILE))
    calls = []
    cut = module._cut
    monkeypatch.setattr(module, "_cut", lambda *given: calls.append(given) or cut(*given))
    moves = movement(demand, 5, 4, NO_CAP)
    assert len(calls) == 1
    check_computed_once(demand, moves)
    assert bytes_of(demand, moves, 5, 4) == least(demand, 5, 4) == 16


@pytest.mark.parametrize(
    ("where", "name", "value"), [(importlib.util, "find_spec", lambda name: None), (module, "_MAX_FLOW", 16)]
)
def test_where_no_flow_is_solved_such_pairs_move_keys(
    monkeypatch: pytest.MonkeyPatch, where: object, name: str, value: object
) -> None:
    """Without scipy, or if the flow exceeds 32 bits, such pairs move keys."""
    mask = torch.zeros(8, 8, dtype=torch.bool)
    for i, keys in enumerate([(4, 5, 6), (5, 6, 7), (6, 7, 4), (7, 4, 5)]):
        mask[i, list(keys)] = True
    demand = demand_of(rw.BlockTable(mask, TILE), contiguous(8 * TILE, 2, TILE))
    monkeypatch.setattr(where, name, value)
    (move,) = movement(demand, 5, 4, NO_CAP)
    assert not move.queries.any()
    check_computed_once(demand, (move,))


@settings(max_examples=100)
@given(case=tables(), of_key=st.integers(1, 12), of_query=st.integers(1, 6), cap=st.floats(0.5, 1.5))
def test_delegated_work_stays_under_the_cap(
    case: tuple[torch.Tensor, Placement], of_key: int, of_query: int, cap: float
) -> None:
    mask, placement = case
    demand = demand_of(rw.BlockTable(mask, TILE), placement, (4, 2))
    moves = movement(demand, of_key, of_query, cap)
    check_computed_once(demand, moves)
    before = demand.work()
    after = before.copy()
    took = np.zeros(len(before), bool)
    for kind, move in zip(demand.kinds, moves, strict=True):
        row, col, work = edges(demand, kind)
        sent = move.queries[demand.owner[col], row]
        np.add.at(after, demand.owner[col[sent]], work[sent])
        took[demand.owner[col[sent]]] = True
        np.subtract.at(after, demand.owner[row[sent]], work[sent])
    assert after.sum() == pytest.approx(before.sum())
    assert (after[took] <= cap * before.mean() + 1e-9).all()
    keys_only = tuple(Moves(move.keys, np.zeros_like(move.queries)) for move in movement(demand, of_key, of_query, 0.0))
    least_bytes, most = least(demand, of_key, of_query), bytes_of(demand, keys_only, of_key, of_query)
    assert least_bytes <= bytes_of(demand, moves, of_key, of_query) <= most


def test_a_cap_that_nothing_fits_moves_keys_only() -> None:
    demand = demand_of(rw.patterns.longformer(TILE, 1), contiguous(64 * 128, 4, 128))
    (free,), (tight,) = movement(demand, 2, 3, NO_CAP), movement(demand, 2, 3, 0.1)
    assert free.queries.any()
    assert not tight.queries.any()
    check_computed_once(demand, (tight,))


def test_global_rows_go_out_and_windows_stay() -> None:
    demand = demand_of(rw.patterns.longformer(256, 1), contiguous(512 * 128, 8, 128))
    (move,) = movement(demand, 65536, 98816)
    assert np.argwhere(move.queries).tolist() == [[rank, 0] for rank in range(1, 8)]
    # each rank needs the first tile, and two tiles of each neighbour
    assert (move.keys.sum(1) - 64).tolist() == [2] + [2 + 2 + 1] * 6 + [2 + 1]
    check_computed_once(demand, (move,))


@pytest.mark.parametrize("pattern", [rw.SlidingWindow(700) & rw.Causal(), rw.Causal(), rw.Full()], ids=repr)
def test_dense_and_local_patterns_are_proven_without_a_flow(pattern: Pattern, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("solved")

    monkeypatch.setattr(module, "_solve", refuse)
    demand = demand_of(pattern, contiguous(128 * 128, 8, 128))
    (move,) = movement(demand, 65536, 98816)
    assert not move.queries.any()
    check_computed_once(demand, (move,))


def test_heads_of_one_key_head_are_covered_together() -> None:
    """A row that is global for one of two query heads counts the queries of both heads, but moves the work of one."""
    pattern = rw.PerHead([rw.patterns.longformer(128, 1), rw.SlidingWindow(128, 128)])
    demand = demand_of(pattern, contiguous(64 * 128, 4, 128), (2, 1))
    (kind,) = demand.kinds
    assert (kind.groups, kind.uses, kind.queries) == ((0, 1), (1, 1), 2)
    row, _, work = edges(demand, kind)
    assert work.sum() == demand.work().sum()
    assert work[row == 0].tolist() == [2.0, 2.0] + [1.0] * 62
    moves = movement(demand, 65536, 98816)
    assert moves[0].queries[1:, 0].all()
    check_computed_once(demand, moves)


def test_tiles_cut_between_ranks_move_keys_only() -> None:
    demand = demand_of(rw.patterns.longformer(256, 1), striped(64 * 128, 8, 64))
    assert demand.runs_per_tile == 2
    (move,) = movement(demand, 65536, 98816)
    assert not move.queries.any()
    np.testing.assert_array_equal(move.keys, demand.needs[0])
