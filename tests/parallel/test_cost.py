"""Test the cost model: its formulas, and bounds that hold for any formulas."""

from __future__ import annotations

import numpy as np
import pytest

import ringweave as rw
from ringweave.parallel.planning.choice import portfolio
from ringweave.parallel.planning.cost import Load, Machine, cost_of, estimate
from ringweave.parallel.planning.demand import Demand
from ringweave.parallel.planning.movement import movement
from ringweave.parallel.planning.placement import contiguous, residues, striped
from ringweave.parallel.planning.workload import Widths, Workload
from ringweave.patterns import Pattern
from ringweave.plan import branches
from ringweave_lab.simulation.other_systems import other_systems

from .test_demand import tokens_moved

TILE = 128
WIDTHS = Widths()
MACHINE = Machine(flops=1e12, bandwidth=1e9, latency=1e-5)


def load_of(pattern: Pattern, tokens: int, ranks: int, heads: tuple[int, int] = (8, 2)) -> Load:
    placement = contiguous(tokens, ranks, TILE)
    program = branches(pattern, tokens, tokens, heads=heads[0])
    return Load.of([Demand.of(branch, placement, heads[0] // heads[1]) for branch in program], WIDTHS)


def one_head(pattern: Pattern, tokens: int) -> Workload:
    return Workload([branches(pattern, tokens, tokens)], tokens, (1, 1))


def test_a_window_over_two_ranks_by_hand() -> None:
    load = load_of(rw.SlidingWindow(TILE) & rw.Causal(), 8 * TILE, 2)
    tile = 4 * 128 * TILE**2 * 8  # four operations a channel and pair, eight heads
    # rows of two tiles but the first of one; the second rank's first row attends one tile of the first rank
    assert load.local.tolist() == [7 * tile, 7 * tile]
    assert load.remote.tolist() == [0, tile]
    received = TILE * 2 * (128 + 128) * 2
    assert load.received.tolist() == [0, received]
    assert load.senders.tolist() == [[False, False], [True, False]]
    found = estimate("contiguous", [load], MACHINE)
    assert (found.bytes_worst, found.bytes_total, found.messages, found.stages) == (received, received, 1, 1)
    assert found.imbalance == pytest.approx(8 / 7.5)
    wait = received / 1e9 + 1e-5
    assert found.allgather == pytest.approx(max(7 * tile / 1e12, wait) + tile / 1e12)
    # one message: equal, plus a launch for its stage
    assert found.ring == pytest.approx(found.allgather + 1e-5)
    assert found.ideal == pytest.approx(7.5 * tile / 1e12)
    assert found.efficiency == pytest.approx(found.ideal / found.allgather)
    slow = estimate("contiguous", [load], Machine(1e12, 1e5, 0))
    assert slow.allgather == pytest.approx(received / 1e5 + tile / 1e12)


def test_a_ring_computes_while_it_waits() -> None:
    """With many stages, only the last stage's work follows the last message."""
    load = load_of(rw.Causal(), 64 * TILE, 8)
    found = estimate("contiguous", [load], Machine(1e13, 4e9, 0))
    received, remote = load.received[7] / 4e9, load.remote[7] / 1e13
    assert received < remote
    assert found.allgather == pytest.approx(max(received, load.local[7] / 1e13) + remote)
    assert found.ring == pytest.approx(max(load.local[7] / 1e13 + remote, received + remote / 7))
    assert found.ring < found.allgather


@pytest.mark.parametrize(
    "pattern",
    [
        rw.SlidingWindow(500) & rw.Causal(),
        rw.patterns.longformer(256, 1),
        rw.Dilated(32, 16),
        rw.LongNet([512, 1024], [1, 4]),
    ],
    ids=repr,
)
def test_what_no_placement_changes(pattern: Pattern) -> None:
    """Operations are those of the plan, no time is below the mean's, and bytes are those that the exchange counts."""
    tokens = 64 * TILE
    program = branches(pattern, tokens, tokens, heads=8)
    totals = set()
    for placement in [*portfolio(tokens, 4, TILE, (1, 16)), striped(tokens, 4, 32)]:
        demands = [Demand.of(branch, placement, 4) for branch in program]
        load = Load.of(demands, WIDTHS)
        totals.add(round(float((load.local + load.remote).sum())))
        assert (load.local >= 0).all()
        assert (load.remote >= -1e-6).all()
        found = cost_of(Workload([program], tokens, (8, 2)), placement, MACHINE)
        assert found.ideal <= found.seconds <= min(found.allgather, found.ring)
        assert found.bytes_total == load.received.sum() >= found.bytes_worst
        received = np.zeros(4)
        for demand in demands:
            moves = movement(demand, WIDTHS.bytes_of_key * demand.tile, WIDTHS.bytes_of_query * demand.tile)
            if not any(move.queries.any() for move in moves):
                received += tokens_moved(demand).sum(1) * WIDTHS.bytes_of_key
                continue
            for kind, move in zip(demand.kinds, moves, strict=True):
                keys = move.keys.copy()
                keys[demand.owner, np.arange(len(demand.owner))] = False
                received += len(kind.members) * TILE * WIDTHS.bytes_of_key * keys.sum(1)
                to, tile = np.nonzero(move.queries)
                size = len(kind.members) * kind.queries * TILE
                np.add.at(received, to, size * 128 * 2)
                np.add.at(received, demand.owner[tile], size * (128 + 1) * 4)
        np.testing.assert_allclose(load.received, received)
    assert len(totals) == 1


def test_one_rank_waits_for_nothing() -> None:
    found = cost_of(one_head(rw.Causal(), 4096), contiguous(4096, 1, TILE), MACHINE)
    assert (found.bytes_worst, found.stages, found.messages, found.imbalance) == (0, 0, 0, 1)
    assert found.efficiency == pytest.approx(1)


def test_nothing_to_compute() -> None:
    found = cost_of(one_head(~rw.Full(), 4096), contiguous(4096, 2, TILE), MACHINE)
    assert (found.seconds, found.efficiency, found.imbalance) == (0, 1, 1)


def test_residues_with_as_many_views_as_ranks_receive_nothing() -> None:
    workload = one_head(rw.Dilated(32, 16), 64 * TILE)
    assert cost_of(workload, residues(64 * TILE, 8, TILE), MACHINE).bytes_total == 0


def test_other_systems_in_closed_form() -> None:
    tokens, ranks = 64 * TILE, 4
    workload = Workload([branches(rw.Full(), tokens, tokens, heads=8)], tokens, (8, 4))
    found = other_systems(workload, ranks, TILE, MACHINE)
    compute = 64 * 64 * 8 * 4 * 128 * TILE**2 / ranks / 1e12
    keys = tokens * 3 / 4 * 4 * 512
    ring, gather, ulysses = found["full ring"], found["all-gather"], found["Ulysses"]
    assert ring is not None
    assert gather is not None
    assert ulysses is not None
    assert ring.bytes_worst == gather.bytes_worst == keys
    assert gather.seconds == pytest.approx(keys / 1e9 + 3e-5 + compute)
    assert ring.seconds == pytest.approx(3 * max(compute / 4, keys / 3 / 1e9 + 1e-5) + compute / 4)
    assert (ring.messages, ring.stages) == (3, 3)
    # a quarter of the tokens moves to other ranks: q, k and v there, and the output back
    crosses = tokens / 4 * 3 / 4 * (8 * 128 + 4 * 256 + 8 * 128) * 2
    assert ulysses.bytes_worst == crosses
    assert ulysses.seconds == pytest.approx(crosses / 1e9 + 6e-5 + compute)
    assert other_systems(workload, 8, TILE, MACHINE)["Ulysses"] is None
    assert other_systems(workload, 3, TILE, MACHINE)["Ulysses"] is None


def test_ulysses_is_as_balanced_as_heads_are() -> None:
    pattern = rw.PerHead([rw.Full(), rw.Full(), rw.SlidingWindow(64), rw.SlidingWindow(64)])
    program = branches(pattern, 32 * TILE, 32 * TILE, heads=4)
    found = other_systems(Workload([program], 32 * TILE, (4, 2)), 2, TILE, MACHINE)["Ulysses"]
    assert found is not None
    rows, tiles = 32 * 32, 32 + 31
    assert found.imbalance == pytest.approx(2 * rows / (rows + tiles))
