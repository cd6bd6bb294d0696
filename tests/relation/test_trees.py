"""Trees of zones against their definitions: tiles, classes, masks, pairs, and transforms."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ringweave import native
from ringweave.relation.arrays import unpacked
from ringweave.relation.lines import Line, by_strip, complement, meet, union
from ringweave.relation.node import FULL, Node, Origin
from ringweave.relation.placed import Documents
from ringweave.relation.tiles import FULL_TILE, Masks, estimated, strips, tiling
from ringweave.relation.transforms import placed, simplified
from ringweave.relation.zones import Zones

from .drawn import Definition, dense, trees, zones


@pytest.fixture(autouse=True, params=[0, 64], ids=["every short cut", "as it is"], scope="module")
def _few_tiles(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tiles are looked up by their distance if they are many; here also if they are few."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("ringweave.relation.zones._FEW_TILES", request.param)
        yield


SIDES = st.sampled_from([(16, 16), (4, 32), (32, 4), (5, 7), (1, 16)])
FIRST = st.integers(-3, 12)


def planned(node: Node, nq: int, nk: int, tile: tuple[int, int], firsts: list[tuple[int, int]]) -> NDArray[np.bool_]:
    """Plan a relation in two batch elements, and unpack the plan: (elements, nq, nk)."""
    elements = np.arange(len(firsts))
    q_first, k_first = np.array(firsts, np.int64).T
    frame, masks = strips(nq, nk, tile, elements, q_first, k_first), Masks(tile)
    tiles = tiling(node, frame, masks)
    assert (np.diff(tiles.place) > 0).all()
    assert estimated(node, frame) >= len(tiles.place)
    rows, bank = -(-nq // tile[0]), unpacked(masks.bank().view(np.uint32), tile[1])
    out = np.zeros((len(firsts), rows * tile[0], frame.width * tile[1]), np.bool_)
    for place, number in zip(tiles.place.tolist(), tiles.mask.tolist(), strict=True):
        strip, column = divmod(place, frame.width)
        element, row = divmod(strip, rows)
        here = out[element, row * tile[0] :, column * tile[1] :][: tile[0], : tile[1]]
        here[:] = True if number == FULL_TILE else bank[number]
        # full and empty tiles have no mask, whatever their size is
        inside = here[: nq - row * tile[0], : nk - column * tile[1]]
        assert inside.any()
        assert inside.all() == (number == FULL_TILE)
        if number != FULL_TILE:
            assert here.sum() == inside.sum(), "a bit past the end"
    return out[:, :nq, :nk]


def wanted(holds: Definition, nq: int, nk: int, firsts: list[tuple[int, int]]) -> NDArray[np.bool_]:
    every = [dense(holds, range(q, q + nq), range(k, k + nk), element, q, k) for element, (q, k) in enumerate(firsts)]
    return np.stack(every)


@settings(max_examples=100)
@given(
    trees(), SIDES, st.integers(1, 37), st.integers(1, 37), st.lists(st.tuples(FIRST, FIRST), min_size=1, max_size=2)
)
def test_plans(
    drawn: tuple[Node, Definition], tile: tuple[int, int], nq: int, nk: int, firsts: list[tuple[int, int]]
) -> None:
    """A plan has exactly the pairs of the relation, and so has that of its simpler form."""
    node, holds = drawn
    right = wanted(holds, nq, nk, firsts)
    assert np.array_equal(planned(node, nq, nk, tile, firsts), right)
    assert np.array_equal(planned(simplified(node), nq, nk, tile, firsts), right)


@given(trees(), FIRST, FIRST, st.integers(0, 1))
def test_pairs(drawn: tuple[Node, Definition], q_first: int, k_first: int, element: int) -> None:
    node, holds = drawn
    q, k = torch.arange(q_first, q_first + 9)[:, None], torch.arange(k_first, k_first + 30)
    found = node.contains(q, k, Origin(element, q_first, k_first)).expand(9, 30).numpy()
    right = dense(holds, range(q_first, q_first + 9), range(k_first, k_first + 30), element, q_first, k_first)
    assert np.array_equal(found, right)


@given(trees(), st.data())
def test_classes(drawn: tuple[Node, Definition], data: st.DataObject) -> None:
    """Tiles of one class and size have equal masks, however many tiles are classified together."""
    node, holds = drawn
    nq, nk, side = 60, 60, data.draw(st.sampled_from([3, 4, 7]))
    frame = strips(nq, nk, (side, side))
    every = frame.tiles(np.arange(frame.length))
    some = frame.tiles(np.array(data.draw(st.lists(st.integers(0, frame.length - 1), min_size=1, max_size=9))))
    right = dense(holds, range(nq), range(nk), 0, 0, 0)
    for tiles in (every, some):
        codes, known = node.classes(tiles), dict[tuple[int, int, int], bytes]()
        for code, i, j in zip(codes.tolist(), tiles.qi.tolist(), tiles.ki.tolist(), strict=True):
            here = right[tiles.q.lo[i] : tiles.q.hi[i], tiles.k.lo[j] : tiles.k.hi[j]]
            if code <= FULL:
                assert here.all() if code == FULL else not here.any()
            else:
                assert known.setdefault((code, *here.shape), here.tobytes()) == here.tobytes()


@pytest.mark.skipif(native.module() is None, reason="there was no compiler")
@settings(max_examples=100)
@given(zones(), SIDES)
def test_numpy_paints_as_compiled_code(drawn: tuple[Zones, Definition], tile: tuple[int, int]) -> None:
    node, _ = drawn
    frame = strips(37, 45, tile, np.array([0, 1]), np.array([0, 5]), np.array([3, 0]))
    tiles = frame.tiles(np.arange(frame.length))
    assert np.array_equal(unpacked(node.words(tiles, tile), tile[1]), node._bits(*node.sides(tiles), tile))


@given(trees(), st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=5), SIDES)
def test_documents(drawn: tuple[Node, Definition], sizes: list[tuple[int, int]], tile: tuple[int, int]) -> None:
    """Inside documents, positions count from the first key, and the last query is at the last key."""
    node, holds = drawn
    q_ends, k_ends = (np.cumsum([0, *side]) for side in zip(*sizes, strict=True))
    nq, nk = int(q_ends[-1]), int(k_ends[-1])
    if not nq or not nk:
        return
    used = (np.diff(q_ends) > 0) & (np.diff(k_ends) > 0)
    bounds = Zones((q_ends[:-1][used], q_ends[1:][used]), (k_ends[:-1][used], k_ends[1:][used]))
    documents = Documents(bounds, (q_ends[1:] - np.diff(k_ends))[used], bounds.k0)
    right = np.zeros((nq, nk), np.bool_)
    for i, (queries, keys) in enumerate(sizes):
        first = keys - queries
        # places are those of a document, too
        right[q_ends[i] : q_ends[i + 1], k_ends[i] : k_ends[i + 1]] = dense(
            holds, range(first, keys), range(keys), 0, 0, 0
        )
    inside = placed(node, documents)
    assert np.array_equal(planned(inside, nq, nk, tile, [(0, 0)])[0], right)
    q, k = torch.arange(nq)[:, None], torch.arange(nk)
    assert np.array_equal(inside.contains(q, k, Origin()).numpy(), right)


# ---- lines -----------------------------------------------------------------------------------------------------------


def line(places: set[int]) -> Line:
    ordered = np.array(sorted(places), np.int64)
    return union(Line(ordered, ordered + 1))


PLACES = st.sets(st.integers(0, 29))


@given(PLACES, PLACES, st.integers(1, 7))
def test_lines_are_sets(a: set[int], b: set[int], width: int) -> None:
    one, two = line(a), line(b)
    assert {*union(one, two).places().tolist()} == a | b
    assert {*meet(one, two).places().tolist()} == a & b
    assert {*complement(one, 30).places().tolist()} == set(range(30)) - a
    found = {
        strip * width + column
        for strip, first, end in zip(*(x.tolist() for x in by_strip(one, width)), strict=True)
        for column in range(first, end)
    }
    assert found == a
    number = -(-30 // width)
    begin, end = one.within(np.arange(number), width)
    for strip in range(number):
        here = [place - strip * width for place in a if place // width == strip]
        assert (begin[strip], end[strip]) == ((min(here), max(here) + 1) if here else (0, 0))
