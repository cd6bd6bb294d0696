"""Zones of comparisons, compared with the comparison of every pair."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from ringweave.relation.arrays import Bool, Int64
from ringweave.relation.comparisons import AtMost, Comparison, Listed, Rectangles, Runs, _stretches
from ringweave.relation.tiles import strips
from ringweave.relation.zones import Zones

Values = NDArray[np.int64] | NDArray[np.float64]


def values(rng: np.random.Generator, batch: int, n: int) -> Values:
    """Draw values of tokens, many of which are equal, ascend, descend or repeat."""
    place = np.arange(n)
    each: list[Values] = [
        rng.integers(0, 5, (batch, n)),
        np.sort(rng.integers(-3, 9, (batch, n)), 1),
        np.tile(place - rng.integers(0, 5), (batch, 1)),
        np.tile(-place % 7, (batch, 1)),
        np.repeat(rng.integers(0, 9, (batch, n)), 3, 1)[:, :n],
        rng.choice([-np.inf, -1.0, -0.0, 0.0, 0.5, np.inf], (batch, n)),
        rng.choice([np.iinfo(np.int64).min, -1, 0, np.iinfo(np.int64).max], (batch, n)),
    ]
    return each[rng.integers(len(each))]


def drawn(rng: np.random.Generator, batch: int, nq: int, nk: int, first: int) -> tuple[Comparison, Bool]:
    """Draw a comparison and its pairs."""
    u, v = values(rng, batch, nq), values(rng, batch, nk)
    if rng.random() < 0.5:
        no = bool(rng.random() < 0.3)
        return AtMost(Runs.of(u, first), Runs.of(v), no), (u[:, :, None] <= v[:, None]) != no
    lists = np.stack([u, *(values(rng, batch, nq) for _ in range(rng.integers(3)))], -1).astype(np.float64)
    lists[rng.random(lists.shape) < 0.1] = np.nan
    v = np.where(rng.random(v.shape) < 0.1, np.nan, v)
    q = Runs.of(lists, first)
    number = np.arange(len(q.start))
    made = Listed(q._replace(value=number), np.repeat(number, lists.shape[2]), q.value.ravel(), Runs.of(v))
    return made, (lists[:, :, None] == v[:, None, :, None]).any(-1)


def counted(zones: Int64, element: Int64, shape: tuple[int, int, int], first: int) -> Int64:
    """Return the number of zones with each pair."""
    found = np.zeros(shape, np.int64)
    q, k = np.arange(shape[1])[:, None] + first, np.arange(shape[2])
    for (q0, q1, k0, k1, d0, d1), b in zip(zones.tolist(), element.tolist(), strict=True):
        found[b] += (q0 <= q) & (q < q1) & (k0 <= k) & (k < k1) & (d0 <= k - q) & (k - q < d1)
    return found


@pytest.mark.parametrize("seed", range(8))
def test_zones_have_the_pairs_of_comparisons(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(250):
        batch, nq, nk, first = rng.integers(1, 4), rng.integers(1, 14), rng.integers(1, 16), int(rng.choice([0, 5, -3]))
        left, want = Rectangles.whole(batch, first, nq, nk), np.ones((batch, nq, nk), np.bool_)
        for _ in range(rng.integers(1, 4)):
            comparison, pairs = drawn(rng, batch, nq, nk, first)
            found = comparison.cut(left, 10**6)
            assert found is not None
            left, want = found, want & pairs
        # each pair is in one zone at most
        assert np.array_equal(counted(*left.zones(), (batch, nq, nk), first), want)


@pytest.mark.parametrize("seed", range(4))
def test_comparisons_of_many_rectangles_are_given_up(seed: int) -> None:
    """Nothing longer than the limit is listed, and a limit that suffices changes nothing."""
    rng = np.random.default_rng(seed)
    whole = Rectangles.whole(1, 0, 60, 60)
    for _ in range(50):
        comparison, _ = drawn(rng, 1, 60, 60, 0)
        every = comparison.cut(whole, 10**6)
        assert every is not None
        if len(every.q0) > 1:
            assert comparison.cut(whole, len(every.q0) // 2) is None
        again = comparison.cut(whole, max(comparison.size, 60 * 60))
        assert again is not None
        assert all(np.array_equal(a, b) for a, b in zip(every, again, strict=True))


def test_zones_are_few() -> None:
    place = np.arange(1000)[None]
    cases: list[tuple[Values, Values, int]] = [
        # a band of distances, in which the ends of the keys cut the first and the last queries
        (place - 40, place, 2),
        # one interval for each run of queries
        (place // 100, place, 10),
        # the keys ascend in two pieces
        (place // 100, place % 500, 19),
        # they descend
        (place // 100, -place, 1),
        # 10 runs of keys; queries between two of their values have equal keys
        (place, place // 100 * 100, 10),
    ]
    for u, v, most in cases:
        found = AtMost(Runs.of(u), Runs.of(v)).cut(Rectangles.whole(1, 0, 1000, 1000), 10**6)
        assert found is not None
        assert len(found.zones()[0]) <= most


def test_stretches() -> None:
    """An item begins a stretch if it is apart, or follows in another way than the items before it in the stretch."""
    rng = np.random.default_rng(0)
    for _ in range(1000):
        items = int(rng.integers(0, 12))
        code = rng.integers(-1, 3, max(items - 1, 0))
        first = [0][:items]
        for i in range(1, items):
            if code[i - 1] < 0 or (first[-1] < i - 1 and code[i - 1] != code[i - 2]):
                first.append(i)
        assert _stretches(code, items).tolist() == first


def test_tiles_that_several_zones_fill() -> None:
    """A tile is known to be full, without an evaluation, where all of its queries have all of its keys."""
    place = np.arange(4096)
    frame, zero = strips(4096, 4096, (128, 128)), np.zeros(4096, np.int64)
    filled = Zones((place, place + 1), (zero, place + place * 7 % 5 + 1)).filled(frame)
    # every tile before the diagonal
    assert int((filled.stop - filled.start).sum()) == 32 * 31 // 2
    # a query in no zone leaves its strip open
    gap = np.delete(place, 200)
    places = Zones((gap, gap + 1), (zero[1:], zero[1:] + 4096)).filled(frame).places()
    assert set(range(32)) - set((places // 32).tolist()) == {1}
