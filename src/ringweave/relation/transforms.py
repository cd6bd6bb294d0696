"""Transforms of relations: inside documents, in a strided view, and with fewer leaves."""

from __future__ import annotations

import numpy as np

from .arrays import Int64, listed
from .node import ELEMENT, FAR, And, Node, Not, Or, Places
from .placed import Documents, Placed
from .zones import Zones


def placed(node: Node, documents: Documents) -> Node:
    """Return a relation inside each document, with positions counted from its first key."""
    if isinstance(node, Not):
        return And((documents.zones, Not(placed(node.part, documents))))
    if isinstance(node, (And, Or)):
        return type(node)([placed(part, documents) for part in node.parts])
    return _in_documents(node, documents) if isinstance(node, Zones) else Placed(node, documents)


def _in_documents(zones: Zones, documents: Documents) -> Node:
    bounds, origin = documents
    if zones.each:
        bounds, origin = _of_each(bounds, origin, 1 + int(_element(zones.q0).max(initial=0)))
    # positions of the first query and key, and of the end of the queries, as the zones count them
    base = _element(bounds.k0) * ELEMENT if zones.each else np.zeros(bounds.groups, np.int64)
    begin, end = bounds.q0 - origin + base, bounds.q1 - origin + base
    first = np.searchsorted(zones.q1, begin, "right")
    document, group = listed(first, np.searchsorted(zones.q0, end, "left") - first)
    if zones.ptr is None:
        of, run = np.arange(len(document)), group
    else:
        of, run = listed(zones.ptr[:-1][group], np.diff(zones.ptr)[group])
    at = document[of]
    low = np.maximum(zones.k0[run] + (bounds.k0 - base)[at], bounds.k0[at])
    high = np.minimum(zones.k1[run] + (bounds.k0 - base)[at], bounds.k1[at])
    used = low < high
    count = np.bincount(of[used], minlength=len(document))
    kept = np.flatnonzero(count)
    document, group, count = document[kept], group[kept], count[kept]
    # what positions of queries, of keys, and distances grow by
    moved = origin - base, bounds.k0 - base, bounds.k0 - origin
    phase = zones.phase[group]
    if zones.residue is not None:
        phase = phase + moved[zones.residue.axis][document]
    q_moved, _, d_moved = moved
    return Zones(
        (
            np.maximum(zones.q0[group] + q_moved[document], bounds.q0[document]),
            np.minimum(zones.q1[group] + q_moved[document], bounds.q1[document]),
        ),
        (low[used], high[used]),
        (zones.d0[group] + d_moved[document], zones.d1[group] + d_moved[document]),
        ptr=None if (count == 1).all() else np.append(0, np.cumsum(count)),
        residue=zones.residue,
        phase=phase,
        each=bounds.each,
    )


def _element(position: Int64) -> Int64:
    """Return the batch elements of positions on the axis of all elements; some are before the element's first key."""
    return (position + FAR) >> 32


def _of_each(bounds: Zones, origin: Int64, elements: int) -> Documents:
    """Repeat documents that are the same for all batch elements for each of them."""
    if bounds.each:
        return Documents(bounds, origin)
    base = (np.arange(elements) * ELEMENT)[:, None]
    q0, q1, k0, k1, first = ((base + side).reshape(-1) for side in (bounds.q0, bounds.q1, bounds.k0, bounds.k1, origin))
    return Documents(Zones((q0, q1), (k0, k1), each=True), first)


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
