"""Transforms of relations: inside documents, in a strided view, and with fewer leaves."""

from __future__ import annotations

import math

import numpy as np

from .arrays import Bool, Int64, listed
from .node import ELEMENT, FAR, And, Node, Not, Or, Places
from .opaque import Opaque
from .placed import Documents, Placed
from .zones import D, Residue, Zones


def placed(node: Node, documents: Documents) -> Node:
    """Return a relation inside each document, on the document's positions."""
    if isinstance(node, Not):
        return And((documents.zones, Not(placed(node.part, documents))))
    if isinstance(node, (And, Or)):
        return type(node)([placed(part, documents) for part in node.parts])
    if isinstance(node, Zones):
        return _in_documents(node, documents)
    inside = Placed(node, documents)
    # which cuts tiles at queries and keys, but not at distances
    return And((documents.zones, inside)) if documents.zones.banded else inside


def _in_documents(zones: Zones, documents: Documents) -> Node:
    if zones.each:
        documents = _of_each(documents, 1 + int(_element(zones.q0).max(initial=0)))
    bounds, origin, first_key = documents
    # positions of the first query and of the end of the queries, as the zones count them
    base = _element(bounds.k0) * ELEMENT if zones.each else np.zeros(bounds.groups, np.int64)
    begin, end = bounds.q0 - origin + base, bounds.q1 - origin + base
    first = np.searchsorted(zones.q1, begin, "right")
    document, group = listed(first, np.searchsorted(zones.q0, end, "left") - first)
    if zones.ptr is None:
        of, run = np.arange(len(document)), group
    else:
        of, run = listed(zones.ptr[:-1][group], np.diff(zones.ptr)[group])
    # what positions of queries, of keys, and distances grow by
    moved = q_moved, k_moved, d_moved = origin - base, first_key - base, first_key - origin
    d0 = np.maximum(zones.d0[group] + d_moved[document], bounds.d0[document])
    d1 = np.minimum(zones.d1[group] + d_moved[document], bounds.d1[document])
    at = document[of]
    low = np.maximum(zones.k0[run] + k_moved[at], bounds.k0[at])
    high = np.minimum(zones.k1[run] + k_moved[at], bounds.k1[at])
    used = (low < high) & (d0 < d1)[of]
    count = np.bincount(of[used], minlength=len(document))
    kept = np.flatnonzero(count)
    document, group, count = document[kept], group[kept], count[kept]
    phase = zones.phase[group]
    if zones.residue is not None:
        phase = phase + moved[zones.residue.axis][document]
    return Zones(
        (
            np.maximum(zones.q0[group] + q_moved[document], bounds.q0[document]),
            np.minimum(zones.q1[group] + q_moved[document], bounds.q1[document]),
        ),
        (low[used], high[used]),
        (d0[kept], d1[kept]),
        ptr=None if (count == 1).all() else np.append(0, np.cumsum(count)),
        residue=zones.residue,
        phase=phase,
        each=bounds.each,
    )


def _element(position: Int64) -> Int64:
    """Return the batch elements of positions on the axis of all elements; some are before the element's first key."""
    return (position + FAR) >> 32


def _of_each(documents: Documents, elements: int) -> Documents:
    """Repeat documents that are the same for all batch elements for each of them."""
    bounds, origin, first = documents
    if bounds.each:
        return documents
    base = (np.arange(elements) * ELEMENT)[:, None]
    sides = bounds.q0, bounds.q1, bounds.k0, bounds.k1, origin, first
    q0, q1, k0, k1, origin, first = ((base + side).reshape(-1) for side in sides)
    band = np.tile(bounds.d0, elements), np.tile(bounds.d1, elements)
    return Documents(Zones((q0, q1), (k0, k1), band, each=True), origin, first)


def view(node: Node, rate: int, offset: int) -> Node | None:
    """Return a relation on positions offset, offset + rate, ..., renumbered from 0; None if it has no such view."""
    if isinstance(node, Not):
        part = view(node.part, rate, offset)
        return None if part is None else Not(part)
    if isinstance(node, (And, Or)):
        parts = [view(part, rate, offset) for part in node.parts]
        found = [part for part in parts if part is not None]
        return type(node)(found) if len(found) == len(parts) else None
    if isinstance(node, Opaque):
        evaluate = node.evaluate
        return Opaque(lambda q, k, element: evaluate(q * rate + offset, k * rate + offset, element))
    return _zones_in_view(node, rate, offset) if isinstance(node, Zones) else None


def _zones_in_view(zones: Zones, rate: int, offset: int) -> Zones | None:
    residue, phase, kept = zones.residue, zones.phase, np.ones(zones.groups, np.bool_)
    if residue is not None:
        # a phase counts from the first position of the group's batch element, and that of a distance from 0
        first = np.zeros(zones.groups, np.int64)
        if zones.each and residue.axis != D:
            first = _element(zones.q0) * ELEMENT
        begin = first if residue.axis == D else first + offset
        found = _residue_in_view(residue, zones.phase - begin, rate)
        if found is None:
            return None
        residue, phase, kept = found
        phase = phase + first

    def place(position: Int64) -> Int64:
        """Return the first place at or after a position; bounds that leave a side free stay."""
        base = _element(position) * ELEMENT if zones.each else np.zeros_like(position)
        here = position - base
        return np.where(np.abs(here) >= FAR, position, base - (offset - here) // rate)

    q0, q1, k0, k1 = map(place, (zones.q0, zones.q1, zones.k0, zones.k1))
    d0, d1 = (np.where(np.abs(d) >= ELEMENT, d, -(-d // rate)) for d in (zones.d0, zones.d1))
    runs = np.ones(zones.groups, np.int64) if zones.ptr is None else np.diff(zones.ptr)
    group = np.repeat(np.arange(zones.groups), runs)
    used = (k0 < k1) & (kept & (q0 < q1) & (d0 < d1))[group]
    count = np.bincount(group[used], minlength=zones.groups)
    some = count > 0
    return Zones(
        (q0[some], q1[some]),
        (k0[used], k1[used]),
        (d0[some], d1[some]),
        ptr=None if zones.ptr is None else np.append(0, np.cumsum(count[some])),
        residue=residue,
        phase=phase[some],
        each=zones.each,
    )


def _residue_in_view(residue: Residue, phase: Int64, rate: int) -> tuple[Residue | None, Int64, Bool] | None:
    """Return the residue of ``x`` with ``rate * x`` in a residue, its phases, and which groups have it; None if none.

    Groups differ in phase only, so the result has one residue for all of them.
    """
    axis, m, width = residue
    if rate % m == 0:
        # the residue is the same in the whole view
        return None, np.zeros_like(phase), -phase % m < width
    if width == 1:
        common = math.gcd(m, rate)
        period = m // common
        step = pow(rate // common, -1, period)
        return Residue(axis, period, 1), phase // common % period * step % period, phase % common == 0
    if m % rate:
        return None
    first, end = -(-phase // rate), -(-(phase + width) // rate)
    widths = end - first
    if len(widths) and (widths != widths[0]).any():
        return None
    return Residue(axis, m // rate, max(1, int(widths.max(initial=0)))), first, widths > 0


def first_equal(node: Node, rate: int, offset: int) -> int:
    """Return the first offset from which on, up to ``offset``, a relation has the same view."""
    if isinstance(node, Not):
        return first_equal(node.part, rate, offset)
    if isinstance(node, (And, Or)):
        return max(first_equal(part, rate, offset) for part in node.parts)
    if not isinstance(node, Zones) or node.each or (node.residue is not None and node.residue.axis != D):
        return offset
    # the place of a bound falls by one where the offset reaches the bound's own residue
    bounds = np.concatenate([node.q0, node.q1, node.k0, node.k1])
    turns = bounds[np.abs(bounds) < FAR] % rate
    return int(turns[turns <= offset].max(initial=0))


def by_place(node: Node) -> Node:
    """Return a relation that counts by places in the call."""
    return node if isinstance(node, Places) else Places(node)


def simplified(node: Node) -> Node:
    """Join single zones under ``&``, and narrow other lists of zones by their bands; the result has the same pairs."""
    if isinstance(node, Not):
        return Not(simplified(node.part))
    if isinstance(node, Or):
        return Or([simplified(part) for part in node.parts])
    if not isinstance(node, And):
        return node
    joined: list[Node] = []
    for part in map(simplified, node.parts):
        for place, other in enumerate(joined):
            both = _both(other, part)
            if both is not None:
                joined[place] = both
                break
        else:
            joined.append(part)
    return joined[0] if len(joined) == 1 else And(joined)


def _both(a: Node, b: Node) -> Node | None:
    """Return ``a & b`` as one list of zones, or as a union of lists; None if it is no such thing."""
    for band, other in ((b, a), (a, b)):
        if isinstance(band, Zones) and band.is_band:
            narrowed = _narrowed(other, band)
            if narrowed is not None:
                return narrowed
    return None


def _narrowed(node: Node, band: Zones) -> Node | None:
    """Return the pairs of a relation with distances in a band; None if the relation has a part without zones."""
    if isinstance(node, Or):
        parts = [_narrowed(part, band) for part in node.parts]
        found = [part for part in parts if part is not None]
        return Or(found) if len(found) == len(parts) else None
    if not isinstance(node, Zones):
        return None
    if node.single is not None and band.single is not None:
        q0, q1, k0, k1, d0, d1, phase = node.single
        near = max(d0, band.single[4]), min(d1, band.single[5])
        return Zones((q0, q1), (k0, k1), near, residue=node.residue, phase=phase, each=node.each)
    d = np.maximum(node.d0, band.d0), np.minimum(node.d1, band.d1)
    return Zones(
        (node.q0, node.q1),
        (node.k0, node.k1),
        d,
        ptr=node.ptr,
        residue=node.residue,
        phase=node.phase,
        each=node.each,
    )
