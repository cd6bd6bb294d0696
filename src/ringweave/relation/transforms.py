"""Transforms of relations: inside documents, in a strided view, and with fewer leaves."""

from __future__ import annotations

import numpy as np

from .arrays import Int64, listed
from .node import ELEMENT, FAR, And, Node, Not, Or, Places
from .placed import Documents, Placed
from .zones import Zones


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
