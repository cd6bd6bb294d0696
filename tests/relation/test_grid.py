"""The relations of grids equal the definition of their patterns, pair by pair and tile by tile."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import ringweave as rw
from ringweave.patterns import Pattern
from ringweave.patterns.declared import DECLARED
from ringweave.patterns.grids import OnGrid
from ringweave.plan.from_pattern import build
from ringweave.relation.arrays import unpacked
from ringweave.relation.grid import Product
from ringweave.relation.node import EMPTY, FULL, Frame, Node, Not, Origin, Sides, Tiles
from ringweave.relation.shapes import neighborhood, segments
from ringweave.relation.tiles import Masks, Tiling, strips, tiling
from ringweave.relation.zones import Zones

from ..patterns.test_grids import cases, grids, in_window, neighbours

SIZES = [(16, 16), (32, 32), (64, 64), (128, 128), (16, 64), (128, 32)]


def tiled(node: Node, frame: Frame) -> tuple[Tiling, Masks]:
    masks = Masks(frame.tile)
    return tiling(node, frame, masks), masks


def frame_of(nq: int, nk: int, tile: tuple[int, int], q_offset: int = 0, k_offset: int = 0) -> Frame:
    return strips(nq, nk, tile, q_first=np.array([q_offset]), k_first=np.array([k_offset]))


def dense(
    node: Node, nq: int, nk: int, tile: tuple[int, int], q_offset: int = 0, k_offset: int = 0
) -> NDArray[np.bool_]:
    """Tile a relation, and write the pairs of its tiles."""
    frame = frame_of(nq, nk, tile, q_offset, k_offset)
    (place, mask), masks = tiled(node, frame)
    bits = unpacked(masks.bank().view(np.uint32), tile[1]) if len(masks.index) else np.zeros((0, *tile), np.bool_)
    assert not bits.all((1, 2)).any()
    assert bits.any((1, 2)).all()
    assert len(np.unique(bits, axis=0)) == len(bits)
    strip, col = np.divmod(place, frame.width)
    out = np.zeros((len(frame.q.lo) * tile[0], frame.width * tile[1]), np.bool_)
    for i, j, number in zip(strip.tolist(), col.tolist(), mask.tolist(), strict=True):
        out[i * tile[0] : (i + 1) * tile[0], j * tile[1] : (j + 1) * tile[1]] = True if number < 0 else bits[number]
    return out[:nq, :nk]


def same_plan(pattern: Pattern, n: int, tile: tuple[int, int], q_offset: int = 0) -> None:
    """Compare the tiles, full and partial, and their words with those of a plan; masks may have other numbers."""
    wanted = build(pattern, n - q_offset, n, tile=tile, q_offset=q_offset)
    frame = frame_of(n - q_offset, n, tile, q_offset)
    (place, mask), masks = tiled(pattern.zones(n), frame)  # type: ignore[attr-defined]
    row = np.repeat(np.arange(wanted.row_ptr.shape[1] - 1), np.diff(wanted.row_ptr[0].numpy()))
    assert np.array_equal(place, row * frame.width + wanted.col.numpy())
    theirs = wanted.mask_id.numpy()
    assert np.array_equal(mask < 0, theirs < 0)
    bank, words = masks.bank(), wanted.mask_words.numpy()
    assert len(bank) == len(words)
    mine, theirs = np.unique(np.stack([mask, theirs])[:, mask >= 0], axis=1)
    assert np.array_equal(bank[mine], words[theirs])


def contained(node: Node, at: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Evaluate all pairs of some positions."""
    position = torch.from_numpy(at)
    found: NDArray[np.bool_] = node.contains(position[:, None], position, Origin()).numpy()
    return found


@given(cases(), st.sampled_from(SIZES), st.data())
def test_definition(case: tuple[OnGrid, torch.Tensor], tile: tuple[int, int], data: st.DataObject) -> None:
    pattern, wanted = case[0], case[1].numpy()
    n = len(wanted)
    node = pattern.zones(n)
    at = np.arange(n)
    assert np.array_equal(contained(node, at), wanted)
    assert np.array_equal(dense(node, n, n, tile), wanted)
    begin = data.draw(st.integers(0, n - 1))
    assert np.array_equal(dense(node, n - begin, n, tile, begin), wanted[begin:])
    assert np.array_equal(dense(Not(node), n, n, tile), ~wanted)


@given(cases(), st.sampled_from(SIZES), st.data())
def test_plans(case: tuple[OnGrid, torch.Tensor], tile: tuple[int, int], data: st.DataObject) -> None:
    pattern, wanted = case
    same_plan(pattern, len(wanted), tile)
    same_plan(pattern, len(wanted), tile, data.draw(st.integers(0, len(wanted) - 1)))


@given(cases(), st.data())
def test_single_tiles(case: tuple[OnGrid, torch.Tensor], data: st.DataObject) -> None:
    """Tiles anywhere and of any size: their class is right, and equal classes and sizes have equal words."""
    pattern, wanted = case
    node, n = pattern.zones(len(wanted)), len(wanted)

    def sides(count: int) -> Sides:
        """Sides that may reach past both ends of the grid."""
        lo = np.array(data.draw(st.lists(st.integers(-20, n + 5), min_size=count, max_size=count)), np.int64)
        length = np.array(
            data.draw(st.lists(st.sampled_from([1, 5, 16, 32]), min_size=count, max_size=count)), np.int64
        )
        return Sides.of(lo, lo + length)

    q, k = sides(6), sides(5)
    qi, ki = (each.ravel() for each in np.meshgrid(np.arange(6), np.arange(5), indexing="ij"))
    tiles = Tiles(q, k, qi, ki)
    bits = unpacked(node.words(tiles, (32, 32)), 32)
    whole = np.zeros((n + 60, n + 60), np.bool_)
    whole[20 : 20 + n, 20 : 20 + n] = wanted.numpy()
    codes = node.classes(tiles)
    known: dict[tuple[int, int, int], bytes] = {}
    for i, (a, b) in enumerate(zip(qi.tolist(), ki.tolist(), strict=True)):
        right = whole[20 + q.lo[a] : 20 + q.hi[a], 20 + k.lo[b] : 20 + k.hi[b]]
        assert np.array_equal(bits[i, : right.shape[0], : right.shape[1]], right)
        if codes[i] <= FULL:
            assert right.all() if codes[i] == FULL else not right.any()
        else:
            assert known.setdefault((int(codes[i]), *right.shape), right.tobytes()) == right.tobytes()
    chosen = np.flatnonzero(codes != EMPTY)[::2]
    again = node.classes(tiles.some(chosen))
    assert np.array_equal(again == FULL, codes[chosen] == FULL)


@settings(max_examples=30, deadline=None)
@given(cases(), st.sampled_from(SIZES), st.integers(-40, 40), st.integers(-40, 40))
def test_positions_that_are_no_tokens(
    case: tuple[OnGrid, torch.Tensor], tile: tuple[int, int], q_first: int, k_first: int
) -> None:
    """Frames that begin before the grid, or end behind it, have the grid's pairs only."""
    pattern, wanted = case
    n = len(wanted)
    whole = np.zeros((n + 80, n + 80), np.bool_)
    whole[40 : 40 + n, 40 : 40 + n] = wanted.numpy()
    right = whole[40 + q_first : 40 + q_first + n, 40 + k_first : 40 + k_first + n]
    node = pattern.zones(n)
    assert np.array_equal(dense(node, n, n, tile, q_first, k_first), right)
    q, k = torch.arange(n)[:, None] + q_first, torch.arange(n) + k_first
    assert np.array_equal(node.contains(q, k, Origin(0, q_first, k_first)).numpy(), right)


def test_contains_broadcasts() -> None:
    pattern = rw.GridNeighborhood(rw.Grid((5, 7), 3), (3, 4))
    node, wanted = pattern.zones(35), pattern.to_dense(35)[0, 0].numpy()
    at = torch.arange(35)
    assert node.contains(torch.tensor(3), torch.tensor(4), Origin()).shape == ()
    assert np.array_equal(node.contains(at, at, Origin()).numpy(), wanted.diagonal())
    assert np.array_equal(node.contains(at[None, :, None], at[None, None], Origin())[0].numpy(), wanted)
    assert node.contains(at[:0, None], at, Origin()).shape == (0, 35)
    assert node.contains(at[:, None], at[:0], Origin()).shape == (35, 0)


def test_batch_elements() -> None:
    """Batch elements at other positions have the strips of the same grid."""
    pattern = rw.GridNeighborhood(rw.Grid((9, 10), (2, 3)), 3)
    first = np.array([0, 17, 40])
    frame = strips(50, 90, (16, 16), elements=np.arange(3), q_first=first, k_first=np.zeros(3, np.int64))
    (place, mask), masks = tiled(pattern.zones(90), frame)
    each = len(frame.q.lo) // 3 * frame.width
    for b, offset in enumerate(first.tolist()):
        here = place // each == b
        (alone, number), words = tiled(pattern.zones(90), frame_of(50, 90, (16, 16), offset))
        assert np.array_equal(place[here] - b * each, alone)
        assert np.array_equal(number < 0, mask[here] < 0)
        partial = number >= 0
        assert np.array_equal(words.bank()[number[partial]], masks.bank()[mask[here][partial]])


@pytest.mark.parametrize(
    "pattern",
    [
        rw.GridNeighborhood(rw.Grid((1024, 64)), 7, (4, 9)),
        rw.GridNeighborhood(rw.Grid((40, 30), 7), 9),
        rw.GridNeighborhood(rw.Grid((60, 40), (1, 40)), 9),
        rw.GridNeighborhood(rw.Grid((8, 15, 20)), (3, 5, 5), 1, (True, False, False)),
        rw.GridNeighborhood(rw.Grid((3000, 2), (2, 1)), (9, 2)),
        rw.GridNeighborhood(rw.Grid((40, 2, 8), (2, 2, 1)), (5, 1, 5)),
        rw.GridWindows(rw.Grid((64, 60)), (32, 3), (1, 2)),
        rw.GridWindows(rw.Grid((5, 5)), 9, 7),
    ],
)
def test_plans_of_shapes(pattern: OnGrid) -> None:
    for tile in (32, 128):
        same_plan(pattern, pattern.grid.tokens, (tile, tile))


def test_tiles_of_too_many_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile with many pairs of pieces is a class of its own; the plan is the same."""
    monkeypatch.setattr("ringweave.relation.grid._COMPARED", 16)
    pattern = rw.GridNeighborhood(rw.Grid((12, 10, 9), (2, 3, 4)), (3, 5, 4))
    frame = frame_of(1080, 1080, (64, 64))
    number = pattern.grid.order.pieces(frame.q).number
    assert number.max() ** 2 > 16 >= number.min() ** 2
    same_plan(pattern, 1080, (64, 64))


ON_GRIDS = [name for name, declared in DECLARED.items() if declared.section == "On a grid"]


@pytest.mark.parametrize("name", ON_GRIDS)
def test_gallery(name: str) -> None:
    """Every pattern of the gallery on a grid, and its hostile text at 65,536 tokens, in its own tile size."""
    declared = DECLARED[name]
    for text, n in ((declared.example, declared.tokens), (declared.hostile, 2**16)):
        pattern = eval(str(text), {"n": n, **vars(rw), **vars(rw.patterns)})
        assert isinstance(pattern, OnGrid)
        same_plan(pattern, n, (pattern.tile_size, pattern.tile_size))


# ---- pieces ----------------------------------------------------------------------------------------------------------


@given(grids(), st.data())
def test_pieces_are_intervals(grid: rw.Grid, data: st.DataObject) -> None:
    """Pieces of a run of tokens follow one another, each is an interval along every axis, and there are few."""
    order, n = grid.order, grid.tokens
    place = grid.positions.numpy()
    assert np.array_equal(np.stack(order.on_host(np.arange(n)), 1), place)
    lo = data.draw(st.integers(0, n - 1))
    hi = data.draw(st.integers(lo + 1, n))
    pieces = order.pieces(Sides.of(np.array([lo]), np.array([hi])))
    axes = len(grid.shape)
    assert pieces.covered.all()
    assert pieces.number.tolist() == [len(pieces.low)]
    assert len(pieces.low) <= 2**axes * (4 * axes - 1)
    for low, high in zip(pieces.low, pieces.high, strict=True):
        inside = place[lo : lo + math.prod((high - low).tolist())]
        assert set(map(tuple, inside.tolist())) == set(itertools.product(*map(range, low.tolist(), high.tolist())))
        lo += len(inside)
    assert lo == hi


# ---- the zones of an axis --------------------------------------------------------------------------------------------


def table(zones: Zones, n: int) -> NDArray[np.bool_]:
    at = np.arange(-3, n + 3)
    every = contained(zones, at)
    inside = every[3:-3, 3:-3]
    assert every.sum() == inside.sum(), "a position outside of the axis"
    return inside


@pytest.mark.parametrize("causal", [False, True])
def test_neighborhood(causal: bool) -> None:
    for n in (1, 2, 5, 12, 13):
        for window in range(1, n + 1):
            for dilation in range(1, n // window + 1):
                wanted = [neighbours(q, n, window, dilation, causal) for q in range(n)]
                right = np.array([[k in each for k in range(n)] for each in wanted])
                assert np.array_equal(table(neighborhood(window, dilation, n, causal), n), right), (n, window, dilation)


@pytest.mark.parametrize(("window", "dilation"), [(9, 1), (20, 1), (4, 3), (3, 40)])
def test_a_window_longer_than_the_sequence(window: int, dilation: int) -> None:
    wanted = rw.patterns.Neighborhood(window, dilation, tokens=8).to_dense(8)[0, 0].numpy()
    assert np.array_equal(table(neighborhood(window, dilation, 8), 8), wanted)


def test_segments() -> None:
    for n, length in itertools.product((1, 2, 7, 12), (1, 3, 4, 20)):
        for start in range(length):
            wanted = [in_window(q, n, length, start) for q in range(n)]
            right = np.array([[k in each for k in range(n)] for each in wanted])
            assert np.array_equal(table(segments(length, n, start), n), right)


def test_a_dense_neighborhood_has_filled_tiles() -> None:
    """Windows without dilation have no residue, so that whole tiles are known to be full."""
    node = rw.GridNeighborhood(rw.Grid(4096), 1024).zones(4096)
    assert not isinstance(node, Product)
    assert len(node.filled(frame_of(4096, 4096, (128, 128))).places())
