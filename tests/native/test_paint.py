"""Zones are painted as their definition by pairs says: every bit of a tile, and no bit outside of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringweave.errors import ShapeError

from .plans import _cpu

Array = np.ndarray[Any, np.dtype[Any]]
FREE, EVERY = 2**31, 2**32
#: Places on the line of positions: both ends of a sequence, and the first positions of batch elements.
PLACES = [0, FREE - 40, -FREE, 1 << 32, (1 << 32) - 20, 12345 << 32, (1 << 28) << 32, -(1 << 60)]


@dataclass(frozen=True)
class Group:
    q: tuple[int, int]
    runs: tuple[tuple[int, int], ...] = ((-FREE, FREE),)
    d: tuple[int, int] = (-EVERY, EVERY)
    phase: int = 0


@dataclass(frozen=True)
class Zones:
    groups: tuple[Group, ...]
    residue: tuple[int, int, int] | None = None

    def arrays(self) -> dict[str, Any]:
        """Return the arguments of the compiled class; ``ptr`` only if a group has another number of runs than one."""
        runs = [run for group in self.groups for run in group.runs]
        counts = [len(group.runs) for group in self.groups]
        columns = {
            "q0": [group.q[0] for group in self.groups],
            "q1": [group.q[1] for group in self.groups],
            "d0": [group.d[0] for group in self.groups],
            "d1": [group.d[1] for group in self.groups],
            "phase": [group.phase for group in self.groups],
            "k0": [run[0] for run in runs],
            "k1": [run[1] for run in runs],
            "ptr": None if set(counts) == {1} else [0, *itertools.accumulate(counts)],
        }
        arrays = {name: None if x is None else np.array(x, np.int64) for name, x in columns.items()}
        return arrays | {"residue": self.residue}

    def native(self) -> Any:
        return _cpu.Zones(**self.arrays())

    def dense(self, q: int, k: int, rows: int, keys: int) -> Array:
        """Whether each pair of the queries from q on and the keys from k on is allowed, by the definition."""
        i, j = np.arange(q, q + rows)[:, None], np.arange(k, k + keys)[None, :]
        out = np.zeros((rows, keys), np.bool_)
        for group in self.groups:
            inside = (i >= group.q[0]) & (i < group.q[1]) & (j - i >= group.d[0]) & (j - i < group.d[1])
            if self.residue is not None:
                axis, m, width = self.residue
                inside = inside & (((i, j, j - i)[axis] - group.phase) % m < width)
            for start, stop in group.runs:
                out |= inside & (j >= start) & (j < stop)
        return out


def painted(zones: Any, sides: Sequence[Sequence[int]], rows: int, words: int, threads: int = 1) -> Array:
    """Return the words that were painted over ones."""
    q_lo, q_hi, k_lo, k_hi = (np.array(x, np.int64) for x in sides)
    out = np.full((len(q_lo), rows, words), 2**32 - 1, np.uint32)
    zones.paint(q_lo, q_hi, k_lo, k_hi, out, threads)
    return out


def bits_of(words: Array) -> Array:
    """Return words (..., n) as bool (..., 32 n)."""
    bits = (words[..., None] >> np.arange(32, dtype=np.uint32) & 1).astype(np.bool_)
    return bits.reshape(*words.shape[:-1], 32 * words.shape[-1])


QUERIES, KEYS = (-2, 4), (-3, 33)  # the places of the exhaustive tiles

#: Lists of groups: one of all pairs; gaps, groups that touch, and empty ones; runs that touch, groups without runs.
LISTS = {
    "every pair": (Group((-FREE, FREE)),),
    "one run each": (
        Group((-2, 0), ((-3, 5),)), Group((0, 1), ((7, 33),)), Group((1, 1), ((0, 9),)), Group((2, 9), ((-9, 90),)),
    ),
    "several runs": (
        Group((-9, -1), ((-2, 0), (0, 3), (30, 31))),
        Group((0, 2), ()),
        Group((2, 4), ((1, 2), (4, 4), (5, 6), (9, 29), (31, 40))),
    ),
}  # fmt: skip
BANDS = [(-EVERY, EVERY), (-2, 3), (0, EVERY), (4, 4), (-40, 1)]
RESIDUES = [
    None,
    *((axis, m, width, phase) for axis in range(3) for m, width, phase in (
        (1, 1, 3), (2, 1, -7), (3, 2, 10**9), (7, 0, 0), (31, 30, 2**40 + 5), (32, 5, -(2**40)), (33, 32, 11), (64, 3, -30),
    )),
]  # fmt: skip


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("band", BANDS, ids=str)
def test_every_tile(name: str, band: tuple[int, int]) -> None:
    """Every tile of a few queries and 36 keys has the bits of its pairs, with each residue, and is 0 outside."""
    windows = [list(itertools.combinations(range(lo, hi + 1), 2)) for lo, hi in (QUERIES, KEYS)]
    sides = [[*x] for x in zip(*(q + k for q, k in itertools.product(*windows)), strict=True)]
    q_lo, q_hi, k_lo, k_hi = (np.array(x) for x in sides)
    rows = QUERIES[1] - QUERIES[0]
    inside = (1 << (k_hi - k_lo)[:, None]) - 1 << (k_lo - KEYS[0])[:, None]
    inside = np.where(np.arange(rows) < (q_hi - q_lo)[:, None], inside, 0)
    for residue in RESIDUES:
        # the phases and bands of groups differ
        groups = tuple(
            Group(group.q, group.runs, (band[0] - i, band[1] + i), residue[3] + i if residue else 0)
            for i, group in enumerate(LISTS[name])
        )
        zones = Zones(groups, residue[:3] if residue else None)
        dense = zones.dense(QUERIES[0], KEYS[0], 2 * rows, KEYS[1] - KEYS[0])
        of_queries = (dense.astype(np.int64) << np.arange(dense.shape[1])).sum(1)
        wanted = (of_queries[(q_lo - QUERIES[0])[:, None] + np.arange(rows)] & inside) >> (k_lo - KEYS[0])[:, None]
        got = painted(zones.native(), sides, rows, 2, threads=1 + len(groups) % 2).astype(np.int64)
        assert (got[..., 0] + (got[..., 1] << 32) == wanted).all(), zones


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("residue", [None, (1, 5, 2), (2, 3, 1), (2, 70, 41), (0, 2, 1)], ids=str)
def test_the_ends_of_words(place: int, residue: tuple[int, int, int] | None) -> None:
    """Tiles end at, before and after the end of a word, anywhere on the line of positions."""
    zones = Zones(
        (Group((place - 5, place + 50), ((place, place + 40), (place + 41, place + 130)), (-60, 120), place),), residue
    )
    for keys in (0, 1, 31, 32, 33, 63, 64, 65, 127, 128):
        for first in (place, place - 1, place + 31):
            words = -(-keys // 32)
            got = bits_of(painted(zones.native(), [[place], [place + 3], [first], [first + keys]], 4, words))
            wanted = np.zeros((1, 4, 32 * words), np.bool_)
            wanted[0, :3, :keys] = zones.dense(place, first, 3, keys)
            assert (got == wanted).all(), (keys, first)


def ranges(draw: st.DrawFn, at: int, most: int) -> list[tuple[int, int]]:
    """Draw ascending ranges that do not overlap; some touch and some are empty."""
    steps = draw(st.lists(st.sampled_from([0, 1, 1, 2, 5, 17, 31, 32, 33, 64]), max_size=2 * most))
    ends = [at, *itertools.accumulate(steps, initial=at)][1:]
    return list(zip(ends[0::2], ends[1::2], strict=False))


@st.composite
def drawn_zones(draw: st.DrawFn, place: int, key_place: int) -> Zones:
    residue = None
    if draw(st.booleans()):
        m = draw(st.sampled_from([1, 2, 3, 4, 7, 16, 24, 31, 32, 33, 60, 64, 65, 100, 2**33]))
        residue = draw(st.integers(0, 2)), m, draw(st.integers(0, min(m, 110)))
    edge = st.integers(-140, 140).map(lambda d: d + key_place - place)
    lists = ranges(draw, place + draw(st.integers(-40, 20)), 4)
    if draw(st.integers(0, 3)) == 0:
        lists = [(place - FREE, place + FREE)]
    one = draw(st.booleans())
    groups = []
    for q in lists:
        low, high = draw(edge), draw(edge)
        d = draw(st.sampled_from([(-EVERY, EVERY), (low, high), (-EVERY, high), (low, EVERY)]))
        runs = ranges(draw, key_place + draw(st.integers(-70, 90)), 5)
        if draw(st.booleans()):
            runs = [(key_place - FREE, key_place + FREE)]
        phase = draw(st.integers(-200, 200)) + draw(st.sampled_from([0, place, key_place, -(2**40)]))
        groups.append(Group(q, tuple(runs[:1] or [(0, 0)]) if one else tuple(runs), d, phase))
    return Zones(tuple(groups), residue)


@settings(max_examples=300)
@given(data=st.data())
def test_tiles_of_drawn_zones(data: st.DataObject) -> None:
    """Tiles of several sizes have the bits of their pairs wherever the zones are; threads change nothing."""
    place = data.draw(st.sampled_from(PLACES))
    key_place = data.draw(st.sampled_from([place, place, 0]))
    zones = data.draw(drawn_zones(place, key_place))
    rows, words = data.draw(st.integers(0, 40)), data.draw(st.integers(0, 7))
    tile = st.tuples(
        st.integers(-60, 90),
        st.integers(0, rows),
        st.integers(-160, 160),
        st.integers(max(0, 32 * words - 65), 32 * words),
    )
    tiles = data.draw(st.lists(tile, max_size=12)) * data.draw(st.sampled_from([1, 1, 30]))
    sides = [[q + place for q, *_ in tiles], [q + n + place for q, n, *_ in tiles]]
    sides += [[k + key_place for *_, k, _ in tiles], [k + n + key_place for *_, k, n in tiles]]
    native = zones.native()
    out = painted(native, sides, rows, words)
    got = bits_of(out)
    for i, (q, height, k, width) in enumerate(tiles[:12]):
        wanted = np.zeros((rows, 32 * words), np.bool_)
        wanted[:height, :width] = zones.dense(q + place, k + key_place, height, width)
        assert (got[i] == wanted).all(), (zones, tiles[i])
    assert (out == painted(native, sides, rows, words, threads=data.draw(st.integers(2, 4)))).all()


Tree = Any  # an index of a leaf, or (operator, *parts)


def trees() -> st.SearchStrategy[Tree]:
    def larger(parts: st.SearchStrategy[Tree]) -> st.SearchStrategy[Tree]:
        pair = st.tuples(st.sampled_from("&|"), parts, parts)
        return pair | st.tuples(st.just("~"), parts)

    return st.recursive(st.just("."), larger, max_leaves=7)


def postfix(tree: Tree) -> str:
    return "." if tree == "." else "".join(map(postfix, tree[1:])) + tree[0]


def evaluated(tree: Tree, leaves: Iterator[Array]) -> Array:
    if tree == ".":
        return next(leaves)
    parts = [evaluated(part, leaves) for part in tree[1:]]
    if tree[0] == "~":
        return ~parts[0]
    return parts[0] & parts[1] if tree[0] == "&" else parts[0] | parts[1]


def rows_of(
    leaves: Sequence[Any], tree: str, q: list[int], k: list[int], keys: int, tile: int, queries: int = 1
) -> tuple[Array, Array]:
    """Return the rows' bits and the states of their tiles; both arrays held ones before."""
    rows = np.full((1, queries, -(-keys // 32)), 2**32 - 1, np.uint32)
    states = np.full((1, -(-keys // tile)), 255, np.uint8)
    _cpu.Zones.rows(leaves, tree, np.array([q]), np.array([k]), keys, tile, rows, states)
    return bits_of(rows[0]), states[0]


@settings(max_examples=300)
@given(data=st.data())
def test_rows_of_drawn_trees(data: st.DataObject) -> None:
    """Rows have the bits of the tree's pairs and the states of their tiles; leaves may count from different places."""
    tree = data.draw(trees())
    places = data.draw(st.lists(st.sampled_from(PLACES), min_size=7, max_size=7))[: postfix(tree).count(".")]
    leaves = [data.draw(drawn_zones(place, place)) for place in places]
    q, k = data.draw(st.integers(-40, 100)), data.draw(st.integers(-50, 60))
    keys, tile = data.draw(st.integers(0, 300)), data.draw(st.sampled_from([16, 32, 48, 64, 128, 256, 1, 5, 33]))
    queries = data.draw(st.sampled_from([1, 1, 2, 5]))
    at = [q + place for place in places], [k + place for place in places]
    bits, states = rows_of([zones.native() for zones in leaves], postfix(tree), *at, keys, tile, queries)
    rows = (zones.dense(q + place, k + place, queries, keys) for zones, place in zip(leaves, places, strict=True))
    wanted = evaluated(tree, rows)
    assert (bits[:, :keys] == wanted).all()
    assert not bits[:, keys:].any()
    tiles = [wanted[:, i : i + tile] for i in range(0, keys, tile)]
    assert states.tolist() == [0 if not x.any() else 1 if x.all() else 2 for x in tiles]


def test_a_leaf_is_used_twice() -> None:
    window = Zones((Group((-FREE, FREE), d=(-3, 1)),)).native()
    bits, states = rows_of([window, window], "..|", [9, 4], [0, 0], 40, 16)
    assert np.flatnonzero(bits).tolist() == [1, 2, 3, 4, 6, 7, 8, 9]
    assert states.tolist() == [2, 0, 0]


def test_a_row_is_copied_from_its_own_leaf() -> None:
    """Equal rows of a leaf are copied from its first row, to which the other leaf of a union adds nothing before."""
    leaves = Zones((Group((-FREE, FREE), d=(-3, 1)),)), Zones((Group((-FREE, FREE), ((0, 3),)),))
    bits, _ = rows_of([zones.native() for zones in leaves], "..|", [9, 9], [0, 0], 40, 16, 4)
    window, sinks = (zones.dense(9, 0, 4, 40) for zones in leaves)
    assert (bits[:, :40] == window | sinks).all()


def test_no_groups_and_no_tiles() -> None:
    """Lists without groups, groups without runs, calls without tiles, and tiles without rows or words are calls like any other."""
    for zones in (Zones(()), Zones((Group((0, 9), ()),)), Zones((), (2, 3, 1))):
        native = zones.native()
        assert not painted(native, [[0], [3], [0], [40]], 3, 2).any()
        assert not rows_of([native], ".", [0], [0], 40, 16)[0].any()
        assert rows_of([native], ".~", [0], [0], 40, 16)[1].tolist() == [1, 1, 1]
    full = Zones(LISTS["every pair"]).native()
    assert painted(full, [[]] * 4, 3, 2).shape == (0, 3, 2)
    assert painted(full, [[5], [5], [0], [40]], 0, 2).shape == (1, 0, 2)
    assert painted(full, [[5], [8], [7], [7]], 3, 0).shape == (1, 3, 0)
    assert not painted(full, [[5], [5], [7], [7]], 3, 1).any()
    assert rows_of([full], ".", [0], [0], 0, 16)[1].shape == (0,)


def test_zones_do_not_change_with_their_arrays() -> None:
    """Arrays are copied, may be read-only, and may be tensors."""
    zones = Zones((Group((0, 4), ((2, 5), (7, 9))),))
    arrays = zones.arrays()
    native = _cpu.Zones(**{name: torch.from_numpy(x) if name == "k0" else x for name, x in arrays.items()})
    for name, x in arrays.items():
        if name != "residue":
            x.fill(-1)
            x.flags.writeable = False
    sides = [[0], [4], [0], [12]]
    assert (bits_of(painted(native, sides, 4, 1))[0, :, :12] == zones.dense(0, 0, 4, 12)).all()
    again = zones.arrays()
    for x in again.values():
        if x is not None:
            x.flags.writeable = False
    q_lo, q_hi, k_lo, k_hi = (torch.tensor(x) for x in sides)
    out = torch.full((1, 4, 1), -1, dtype=torch.int32).view(torch.uint32)
    _cpu.Zones(**again).paint(q_lo, q_hi, k_lo, k_hi, out, 1)
    assert (bits_of(out.numpy())[0, :, :12] == zones.dense(0, 0, 4, 12)).all()


GOOD = Zones((Group((0, 4), ((2, 5), (7, 9))), Group((4, 9), ((0, 3),))), (1, 3, 2))
MOST = 2**61

#: Arguments, and the name that the error begins with.
WRONG: list[tuple[str, dict[str, Any]]] = [
    ("q0", {"q0": np.zeros(2, np.int32)}),
    ("q0", {"q0": np.zeros((2, 1), np.int64)}),
    ("q0", {"q0": np.zeros(4, np.int64)[::2]}),
    ("q0", {"q0": [0, 4]}),
    ("q0", {"q0": None}),
    ("q1", {"q1": np.array([4])}),
    ("q1", {"q1": np.array([4, MOST + 1])}),
    ("q0, q1", {"q1": np.array([5, 9])}),
    ("q0, q1", {"q1": np.array([-1, 9])}),
    ("q0, q1", {"q0": np.array([4, 0]), "q1": np.array([9, 4])}),
    ("d0", {"d0": np.array([0, -MOST - 1])}),
    ("d1", {"d1": np.array([0])}),
    ("phase", {"phase": np.broadcast_to(np.int64(0), 2)}),
    ("phase", {"phase": np.array([0, MOST + 1])}),
    ("phase", {"phase": np.array([0, -(2**63)])}),
    ("k0", {"ptr": None}),
    ("k0", {"k0": np.array([2, 7, 0.0])}),
    ("k1", {"k1": np.array([5, 9])}),
    ("k0, k1", {"k1": np.array([8, 9, 3])}),
    ("k0, k1", {"k1": np.array([5, 6, 3])}),
    ("ptr", {"ptr": np.array([0, 3])}),
    ("ptr", {"ptr": np.array([0, 2, 4])}),
    ("ptr", {"ptr": np.array([0, 2, 2])}),
    ("ptr", {"ptr": np.array([1, 2, 3])}),
    ("ptr", {"ptr": np.array([0, 2**40, 3])}),
    ("ptr", {"ptr": np.array([0, -1, 3])}),
    ("residue", {"residue": (3, 3, 1)}),
    ("residue", {"residue": (-1, 3, 1)}),
    ("residue", {"residue": (1, 0, 0)}),
    ("residue", {"residue": (1, -3, 1)}),
    ("residue", {"residue": (1, 3, 4)}),
    ("residue", {"residue": (1, 3, -1)}),
    ("residue", {"residue": (1, MOST + 1, 1)}),
    ("residue", {"residue": (1, 3)}),
    ("each", {"each": True}),
]


@pytest.mark.parametrize(("name", "change"), WRONG)
def test_wrong_zones_are_refused(name: str, change: dict[str, Any]) -> None:
    with pytest.raises(ShapeError, match=f"^{name}: "):
        _cpu.Zones(**GOOD.arrays() | change)


def test_a_later_descent_of_ptr_is_refused() -> None:
    arrays = Zones(tuple(Group((i, i + 1), ((0, 1),)) for i in range(4))).arrays()
    with pytest.raises(ShapeError, match="^ptr: "):
        _cpu.Zones(**arrays | {"ptr": np.array([0, 3, 1, 2, 4])})


def int64(*numbers: int) -> Array:
    return np.array(numbers, np.int64)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("q_lo", {"q_lo": int64(0)}),
        ("q_lo", {"q_lo": int64(0, 4).astype(np.int32)}),
        ("q_hi", {"q_hi": int64(0, 4, 0, 8)[::2]}),
        ("k_lo", {"k_lo": int64(0, -MOST - 1)}),
        ("k_hi", {"k_hi": int64(0, 2**63 - 1)}),
        ("q_lo, q_hi", {"q_hi": int64(4, 9)}),
        ("q_lo, q_hi", {"q_hi": int64(4, 3)}),
        ("k_lo, k_hi", {"k_hi": int64(64, 65)}),
        ("k_lo, k_hi", {"k_hi": int64(-1, 64)}),
        ("out", {"out": np.zeros((2, 4, 2), np.int32)}),
        ("out", {"out": np.zeros((2, 8), np.uint32)}),
        ("out", {"out": np.zeros((2, 4, 4), np.uint32)[:, :, ::2]}),
        ("out", {"out": np.zeros((2, 2, 4), np.uint32).transpose(0, 2, 1)}),
        ("q_lo", {"out": np.zeros((3, 4, 2), np.uint32)}),
        ("threads", {"threads": 0}),
    ],
)
def test_wrong_tiles_are_refused(name: str, change: dict[str, Any]) -> None:
    """A call that is refused writes nothing."""
    out = np.full((2, 4, 2), 7, np.uint32)
    sides = {"q_lo": int64(0, 4), "q_hi": int64(4, 8), "k_lo": int64(0, 0), "k_hi": int64(64, 64)}
    good = sides | {"out": out, "threads": 1}
    native = GOOD.native()
    with pytest.raises(ShapeError, match=f"^{name}: "):
        native.paint(**good | change)
    assert (out == 7).all()
    native.paint(**good)
    with pytest.raises(TypeError):
        native.paint(**good | {"out": np.broadcast_to(np.uint32(0), (2, 4, 2))})
    with pytest.raises(TypeError):
        native.paint(**good | {"out": None})


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("q", {"q": np.array([[1]])}),
        ("k", {"k": np.array([[1, 2, 3]])}),
        ("k", {"k": np.array([[0, 0], [1, 1]])}),
        ("q", {"q": np.array([[0, MOST + 1]])}),
        ("k", {"k": np.array([[0, -MOST - 1]])}),
        *(("tree", {"tree": text}) for text in ("", ".", "..", ".|.", "...||", ".&", "~..|", "..|x", "..||", "|..")),
        ("keys", {"keys": -1}),
        ("keys", {"keys": 2**31}),
        ("tile", {"tile": 0}),
        ("rows", {"keys": 65}),
        ("rows", {"rows": np.zeros((1, 1, 2), np.int32)}),
        ("rows", {"rows": np.zeros((1, 2), np.uint32)}),
        ("rows", {"rows": np.zeros((1, 1, 4), np.uint32)[:, :, ::2]}),
        ("rows", {"rows": np.zeros((2, 1, 2), np.uint32)}),
        ("states", {"tile": 16}),
        ("states", {"states": np.zeros((1, 2), np.int8)}),
        ("leaves", {"leaves": [None, GOOD.native()]}),
    ],
)
def test_wrong_rows_are_refused(name: str, change: dict[str, Any]) -> None:
    rows, states = np.full((1, 1, 2), 7, np.uint32), np.full((1, 2), 7, np.uint8)
    leaves = [GOOD.native(), Zones(()).native()]
    good: dict[str, Any] = {"leaves": leaves, "tree": "..|", "keys": 60, "tile": 32}
    good |= {"q": np.array([[1, 2]]), "k": np.array([[0, 0]])}
    good |= {"rows": rows, "states": states}
    with pytest.raises(ShapeError, match=f"^{name}: "):
        _cpu.Zones.rows(**good | change)
    assert (rows == 7).all()
    assert (states == 7).all()
    _cpu.Zones.rows(**good)


def test_corrupt_zones() -> None:
    """Randomly damaged arrays are refused, or painted as the definition says."""
    generator = np.random.default_rng(1)
    sizes, refused = np.array([2, 8, 100, 2**31, 2**61, 2**62]), 0
    for _ in range(600):
        arrays = GOOD.arrays()
        for _ in range(generator.integers(1, 4)):
            x = arrays[generator.choice(["q0", "q1", "k0", "k1", "d0", "d1", "phase", "ptr"])]
            x[generator.integers(len(x))] = generator.choice(sizes) * generator.integers(-1, 2)
        try:
            native = _cpu.Zones(**arrays)
        except ShapeError:
            refused += 1
            continue
        q, d, ptr = (
            np.stack([arrays[a], arrays[b]], 1).tolist() for a, b in (("q0", "q1"), ("d0", "d1"), ("ptr", "ptr"))
        )
        runs = np.stack([arrays["k0"], arrays["k1"]], 1).tolist()
        groups = tuple(
            Group(tuple(q[g]), tuple(map(tuple, runs[ptr[g][0] : ptr[g + 1][0]])), tuple(d[g]), int(arrays["phase"][g]))
            for g in range(2)
        )
        got = bits_of(painted(native, [[-2], [12], [-3], [50]], 14, 2))
        assert (got[0, :, :53] == Zones(groups, GOOD.residue).dense(-2, -3, 14, 53)).all()
    assert 100 < refused < 550
