"""Test simulations of many ranks: the design's efficiency table, the counts, and the time of a simulation."""

from __future__ import annotations

import time

import pytest

import ringweave as rw
from ringweave.errors import ShapeError
from ringweave.parallel.planning.demand import Demand
from ringweave.parallel.planning.placement import contiguous
from ringweave.patterns import Pattern
from ringweave.plan import branches
from ringweave_lab.bench.cases.ring import documents
from ringweave_lab.simulation.simulate import simulate
from tests.parallel.test_demand import tokens_moved

MILLION = 2**20
MODEL: dict[str, Pattern] = {
    "window": rw.SlidingWindow(4096) & rw.Causal(),
    "short window": rw.SlidingWindow(1024) & rw.Causal(),
    "dilated": rw.Dilated(512, 16),
    "far dilated": rw.Dilated(64, 64) & rw.Causal(),
    "documents": rw.Documents([8192] * 128) & rw.Causal(),
    "long documents": rw.Documents([65536] * 16),
}


@pytest.mark.parametrize("name", list(MODEL))
def test_efficiency_up_to_256_gpus(name: str) -> None:
    """Test efficiency for 1M tokens, 32:8 heads, D 128, bfloat16, 500 TFLOP/s and 50 GB/s."""
    for row in simulate(MODEL[name], MILLION, [8, 32, 64, 128, 256]):
        assert row.ringweave.efficiency >= 0.8, row.ranks
        for each in row.other_systems.values():
            assert each is None or each.efficiency <= row.ringweave.efficiency + 1e-9
    if name == "window":
        ring = row.other_systems["full ring"]
        assert ring is not None
        assert ring.efficiency == pytest.approx(0.0064, abs=0.0002)


def test_uneven_documents_are_bound_by_the_longest() -> None:
    """The longest document is a bound: its last rows need all its keys, so no placement is faster than receiving them.

    A mean rank that computes longer than that is efficient; otherwise the time is near the bound.
    """
    lengths = documents(MILLION, 0)
    rows = simulate(rw.Documents(lengths) & rw.Causal(), MILLION, [8, 16, 256])
    assert all(row.ringweave.efficiency >= 0.95 for row in rows[:2])
    for row in rows:
        receive = (max(lengths) - MILLION / row.ranks) * 8 * 512 / 50e9
        bound = row.ringweave.ideal / max(receive, row.ringweave.ideal)
        assert 0.5 * bound <= row.ringweave.efficiency <= bound


def test_counts_are_those_of_the_plan() -> None:
    pattern = MODEL["window"]
    (row,) = simulate(pattern, 2**16, [8], heads=(8, 2), head_dim=64, itemsize=4)
    (branch,) = branches(pattern, 2**16, 2**16, heads=8)
    moved = tokens_moved(Demand.of(branch, contiguous(2**16, 8, 128), 4))
    assert row.ringweave.name == "contiguous"
    assert row.ringweave.bytes_worst == moved.sum(1).max() * (64 + 64) * 4
    assert row.ringweave.bytes_total == moved.sum() * (64 + 64) * 4


def test_layers_share_a_placement() -> None:
    local, dense = rw.SlidingWindow(1024) & rw.Causal(), rw.Causal()
    (both,) = simulate([local, dense], 2**16, [8])
    (alone,) = simulate(local, 2**16, [8])
    assert (both.ringweave.name, alone.ringweave.name) == ("zigzag", "contiguous")
    ring, ring_alone = both.other_systems["full ring"], alone.other_systems["full ring"]
    assert ring is not None
    assert ring_alone is not None
    assert ring.bytes_worst == 2 * ring_alone.bytes_worst


def test_larger_tiles_count_the_same_for_dense_patterns(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = simulate(rw.Causal(), 2**17, [4, 16])
    monkeypatch.setattr("ringweave_lab.simulation.simulate._MANY", 2**14)
    coarse = simulate(rw.Causal(), 2**17, [4, 16])
    for a, b in zip(exact, coarse, strict=True):
        assert (a.ringweave.name, a.ringweave.stages) == (b.ringweave.name, b.ringweave.stages)
        assert a.ringweave.bytes_total == b.ringweave.bytes_total
        assert a.ringweave is not b.ringweave
        assert a.ringweave.ideal == pytest.approx(b.ringweave.ideal, rel=0.01)


@pytest.mark.parametrize("pattern", [MODEL["window"], rw.LongNet([4096, 65536], [1, 16], causal=True)], ids=repr)
def test_thousands_of_ranks_take_seconds(pattern: Pattern) -> None:
    begin = time.process_time()
    rows = simulate(pattern, MILLION, [8, 64, 512, 4096])
    assert time.process_time() - begin < 20
    assert [row.ranks for row in rows] == [8, 64, 512, 4096]
    assert all(0 < row.ringweave.efficiency <= 1 for row in rows)


def test_what_cannot_be() -> None:
    with pytest.raises(ShapeError, match=r"heads: got \(6, 4\); wanted query heads, a multiple of key heads"):
        simulate(rw.Causal(), 4096, [2], heads=(6, 4))
    with pytest.raises(ShapeError, match=r"ranks: got 512; wanted at most 256"):
        simulate(rw.Causal(), 4096, [512])
    with pytest.raises(ShapeError, match=r"ranks: got 0"):
        simulate(rw.Causal(), 4096, [0])
    (row,) = simulate(rw.Causal(), 10, [1])
    assert row.ringweave.bytes_total == 0
