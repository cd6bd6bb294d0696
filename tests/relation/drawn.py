"""Random relations with their definitions: every pair is decided by a loop over zones."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray

from ringweave.relation.node import ELEMENT, FAR, And, Node, Not, Or, Places
from ringweave.relation.opaque import Opaque
from ringweave.relation.zones import Residue, Zones

#: Positions that a test looks at; zones may reach further.
LEAST, MOST = -6, 40
#: Whether a query and a key of a batch element are a pair; positions, and places in the call.
Definition = Callable[[int, int, int, int, int], bool]
Drawn = tuple[Node, Definition]


def _ranges(draw: st.DrawFn, most: int, base: int = 0) -> list[tuple[int, int]]:
    """Draw ascending disjoint ranges; some are adjacent, and some reach very far."""
    bounds = sorted(draw(st.lists(st.integers(LEAST, MOST), min_size=2, max_size=2 * most, unique=True)))
    found = [(a + base, b + base) for a, b in zip(bounds[::2], bounds[1::2], strict=False)]
    if draw(st.booleans()):
        found[0] = (base - FAR, found[0][1])
    if draw(st.booleans()):
        found[-1] = (found[-1][0], base + FAR)
    return found


@st.composite
def zones(draw: st.DrawFn) -> Drawn:
    """Draw a list of zones, of all batch elements or different in two of them."""
    each = draw(st.sampled_from([False, False, True]))
    groups: list[tuple[tuple[int, int], list[tuple[int, int]], tuple[int, int], int]] = []
    free = draw(st.booleans())
    for element in range(2 if each else 1):
        base = element * ELEMENT
        for q in [(base - FAR, base + FAR)] if free else _ranges(draw, 4, base):
            low = draw(st.integers(-12, 12))
            band = (low, low + draw(st.integers(0, 20))) if draw(st.booleans()) else (-ELEMENT, ELEMENT)
            runs = [(base - FAR, base + FAR)] if draw(st.booleans()) else _ranges(draw, 3, base)
            groups.append((q, runs[: draw(st.integers(0, 3))] if draw(st.booleans()) else runs, band, draw(PHASES)))
    residue = None
    if draw(st.booleans()):
        m = draw(st.sampled_from([1, 2, 3, 5, 16, 33, 100]))
        residue = Residue(draw(st.integers(0, 2)), m, draw(st.integers(0, min(m, 7))))
    counts = [len(runs) for _, runs, _, _ in groups]
    q0, q1 = np.array([q for q, _, _, _ in groups], np.int64).T
    k0, k1 = np.array([run for _, runs, _, _ in groups for run in runs], np.int64).reshape(-1, 2).T
    d0, d1 = np.array([band for _, _, band, _ in groups], np.int64).T
    phase = np.array([shift for _, _, _, shift in groups], np.int64)
    ptr = np.append(0, np.cumsum(counts))
    made = Zones((q0, q1), (k0, k1), (d0, d1), ptr=ptr, residue=residue, phase=phase, each=each)

    def holds(q: int, k: int, element: int, _q: int, _k: int) -> bool:
        if each:
            q, k = q + element * ELEMENT, k + element * ELEMENT
        for (begin, end), runs, (low, high), shift in groups:
            if not (begin <= q < end and low <= k - q < high and any(a <= k < b for a, b in runs)):
                continue
            if residue is None or ((q, k, k - q)[residue.axis] - shift) % residue.m < residue.width:
                return True
        return False

    return made, holds


PHASES = st.integers(-40, 40)


@st.composite
def functions(draw: st.DrawFn) -> Drawn:
    """Draw a relation that only a function gives."""
    a, b, m = draw(st.integers(0, 5)), draw(st.integers(0, 5)), draw(st.integers(2, 7))

    def evaluate(q: torch.Tensor, k: torch.Tensor, element: torch.Tensor) -> torch.Tensor:
        return (a * q + b * k + element) % m < 2

    return Opaque(evaluate), lambda q, k, element, _q, _k: (a * q + b * k + element) % m < 2


def _not(part: Drawn) -> Drawn:
    return Not(part[0]), lambda *at: not part[1](*at)


def _joined(parts: list[Drawn], join: type[And] | type[Or]) -> Drawn:
    decide = all if join is And else any
    return join([node for node, _ in parts]), lambda *at: decide(holds(*at) for _, holds in parts)


def _places(part: Drawn) -> Drawn:
    return Places(part[0]), lambda q, k, element, at_q, at_k: part[1](at_q, at_k, element, at_q, at_k)


def trees() -> st.SearchStrategy[Drawn]:
    """Draw trees of up to a dozen leaves."""
    leaves = st.one_of(zones(), zones(), zones(), functions())
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            inner.map(_not),
            inner.map(_places),
            st.builds(_joined, st.lists(inner, min_size=2, max_size=3), st.sampled_from([And, Or])),
        ),
        max_leaves=8,
    )


def dense(holds: Definition, q: range, k: range, element: int, q_first: int, k_first: int) -> NDArray[np.bool_]:
    """Evaluate a definition at all pairs of some positions; places count from the first positions."""
    rows = [[holds(i, j, element, i - q_first, j - k_first) for j in k] for i in q]
    return np.array(rows, np.bool_).reshape(len(q), len(k))
