"""The view of a relation has its pairs at every rate-th position, and no others."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import ringweave as rw
from ringweave.relation.arrays import unpacked
from ringweave.relation.grid import Product
from ringweave.relation.node import ELEMENT, FAR, And, Node, Not, Or, Origin, Places
from ringweave.relation.opaque import Opaque
from ringweave.relation.placed import Documents, Placed
from ringweave.relation.shapes import neighborhood
from ringweave.relation.tiles import Masks, strips, tiling
from ringweave.relation.transforms import first_equal, view
from ringweave.relation.zones import D, K, Q, Residue, Zones

ELEMENTS, N = 2, 50


@st.composite
def bounds(draw: st.DrawFn, count: int) -> tuple[list[int], list[int]]:
    """Draw ascending disjoint ranges of positions."""
    cuts = sorted(draw(st.lists(st.integers(-20, N + 20), min_size=2 * count, max_size=2 * count, unique=True)))
    return cuts[::2], cuts[1::2]


@st.composite
def zones(draw: st.DrawFn, residues: bool = True) -> Zones:
    """Draw groups of runs with bands, on the axis of one or of all batch elements, with or without a residue."""
    each = draw(st.booleans())
    q0: list[int] = []
    q1: list[int] = []
    k0: list[int] = []
    k1: list[int] = []
    ptr = [0]
    for element in range(ELEMENTS if each else 1):
        base = element * ELEMENT
        count = draw(st.integers(0, 4))
        begin, end = draw(bounds(count)) if count and draw(st.booleans()) else ([-FAR], [FAR])
        q0 += [base + x for x in begin]
        q1 += [base + x for x in end]
        for _ in begin:
            runs = draw(st.integers(0, 4))
            first, stop = draw(bounds(runs)) if runs and draw(st.booleans()) else ([-FAR], [FAR])
            k0 += [base + x for x in first]
            k1 += [base + x for x in stop]
            ptr.append(len(k0))
    groups = len(q0)
    band = [sorted(draw(st.tuples(st.integers(-N, N), st.integers(-N, N)))) for _ in range(groups)]
    free = draw(st.booleans())
    d = (-ELEMENT, ELEMENT) if free else (np.array([x for x, _ in band]), np.array([x for _, x in band]))
    residue = None
    if residues and draw(st.booleans()):
        m = draw(st.integers(2, 12))
        residue = Residue(draw(st.sampled_from([Q, K, D])), m, draw(st.integers(1, m - 1)))
    one = ptr == list(range(groups + 1)) and draw(st.booleans())
    phase = draw(st.lists(st.integers(-9, 99), min_size=groups, max_size=groups))
    same = draw(st.booleans())
    return Zones(
        (q0, q1), (k0, k1), d,
        ptr=None if one else np.array(ptr), residue=residue, phase=phase[0] if same else phase, each=each,
    )  # fmt: skip


def odd(q: torch.Tensor, k: torch.Tensor, element: torch.Tensor) -> torch.Tensor:
    return (q * k + q + element) % 3 == 0


def trees() -> st.SearchStrategy[Node]:
    leaves = st.one_of(zones(), zones(), zones(residues=False), st.just(Opaque(odd)))
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            inner.map(Not), st.lists(inner, min_size=2, max_size=3).map(And), st.lists(inner, min_size=2, max_size=3).map(Or)
        ),
        max_leaves=4,
    )  # fmt: skip


def pairs(node: Node, at: NDArray[np.int64], element: int) -> NDArray[np.bool_]:
    """Evaluate all pairs of some positions."""
    position = torch.from_numpy(at)
    found: NDArray[np.bool_] = node.contains(position[:, None], position[None], Origin(element)).numpy()
    return found


def tiled(node: Node, n: int, element: int) -> NDArray[np.bool_]:
    """Write the pairs of a relation's tiles."""
    zero = np.zeros(1, np.int64)
    frame, masks = strips(n, n, (16, 32), np.array([element]), zero, zero), Masks((16, 32))
    place, mask = tiling(node, frame, masks)
    bits = unpacked(masks.bank().view(np.uint32), 32) if masks.index else np.zeros((0, 16, 32), np.bool_)
    out = np.zeros((len(frame.q.lo) * 16, frame.width * 32), np.bool_)
    for at, number in zip(place.tolist(), mask.tolist(), strict=True):
        i, j = divmod(at, frame.width)
        out[i * 16 : i * 16 + 16, j * 32 : j * 32 + 32] = True if number < 0 else bits[number]
    return out[:n, :n]


@given(trees(), st.integers(1, 13), st.data())
def test_a_view_has_the_pairs_at_every_rate_th_position(node: Node, rate: int, data: st.DataObject) -> None:
    offset = data.draw(st.integers(0, rate - 1))
    seen = view(node, rate, offset)
    if seen is None:
        # a wide residue that differs between views
        assert any(residue.width > 1 and rate % residue.m for residue in residues_of(node))
        return
    at = np.arange(offset, N, rate)
    for element in range(ELEMENTS):
        wanted = pairs(node, at, element)
        assert np.array_equal(pairs(seen, np.arange(len(at)), element), wanted)
        assert np.array_equal(tiled(seen, len(at), element), wanted)


def residues_of(node: Node) -> list[Residue]:
    if isinstance(node, Zones):
        return [] if node.residue is None else [node.residue]
    if isinstance(node, (And, Or)):
        return [residue for part in node.parts for residue in residues_of(part)]
    return residues_of(node.part) if isinstance(node, Not) else []


@given(trees(), st.integers(1, 13), st.data())
def test_views_from_the_first_equal_offset_on_are_equal(node: Node, rate: int, data: st.DataObject) -> None:
    offset = data.draw(st.integers(0, rate - 1))
    first = first_equal(node, rate, offset)
    assert 0 <= first <= offset
    views = [view(node, rate, each) for each in (first, offset)]
    if views[0] is None or views[1] is None:
        return
    at = np.arange(N // rate)
    for element in range(ELEMENTS):
        assert np.array_equal(*(pairs(each, at, element) for each in views if each is not None))


@pytest.mark.parametrize(("m", "rate", "left"), [(8, 8, None), (8, 4, 2), (4, 8, None), (6, 4, 3), (5, 7, 5)])
def test_a_view_keeps_the_part_of_a_residue_that_its_rate_leaves(m: int, rate: int, left: int | None) -> None:
    seen = view(Zones(residue=Residue(D, m, 1)), rate, 0)
    assert isinstance(seen, Zones)
    assert seen.residue == (None if left is None else Residue(D, left, 1))


def test_the_view_of_a_free_bound_is_free() -> None:
    causal = view(Zones(d=(-ELEMENT, 1)), 7, 3)
    assert isinstance(causal, Zones)
    assert [int(x[0]) for x in (causal.q0, causal.q1, causal.k0, causal.k1, causal.d0, causal.d1)] == [
        -FAR, FAR, -FAR, FAR, -ELEMENT, 1,
    ]  # fmt: skip


def test_grids_places_and_placed_leaves_have_no_view() -> None:
    leaf = Product(rw.Grid((4, 4)).order, [neighborhood(1, 1, 4)] * 2)
    zero = np.zeros(1, np.int64)
    documents = Documents(Zones((0, 9), (0, 9)), zero, zero)
    for node in (leaf, Places(Zones()), Placed(leaf, documents)):
        assert view(node, 2, 0) is None
        assert view(And([Zones(), Not(node)]), 2, 0) is None


def test_the_place_of_a_bound_falls_where_the_offset_reaches_its_residue() -> None:
    sinks = Zones(k=(0, 37))
    assert [first_equal(sinks, 16, offset) for offset in range(16)] == [0] * 5 + [5] * 11
    assert first_equal(Zones(d=(-37, 1), residue=Residue(D, 4, 1)), 16, 9) == 0
    assert first_equal(Zones(residue=Residue(K, 16, 3)), 16, 9) == 9
