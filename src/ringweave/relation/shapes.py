"""Zones that several patterns have in common."""

from __future__ import annotations

import numpy as np

from .node import ELEMENT, FAR
from .zones import D, Residue, Zones

#: More zones than this are not listed: the relation is evaluated by token instead.
MOST_ZONES = 2**22


def segments(length: int, n: int, start: int = 0) -> Zones:
    """Return segments of adjacent positions of [0, n); the first one ends at ``start`` unless that is 0."""
    bounds = np.append(0, np.arange(start or length, n + length, length))
    return Zones((bounds[:-1], bounds[1:]), (bounds[:-1], bounds[1:]))


def neighborhood(window: int, dilation: int, n: int, causal: bool = False) -> Zones:
    """Return the window around each query of [0, n), which is shifted inwards at the two borders."""
    residue = Residue(D, dilation, 1)
    if causal:
        return Zones(d=(-(window - 1) * dilation, 1), residue=residue)
    before, after, reach = window // 2 * dilation, (window - 1 - window // 2) * dilation, window * dilation
    if reach >= n:
        return Zones(k=(0, n), residue=residue)
    # the last members of each residue class are among the last ``reach`` keys
    q, k = [-FAR, before, n - after, FAR], [(0, reach), (0, n), (n - reach, n)]
    d = [(-ELEMENT, ELEMENT), (-before, after + 1), (-ELEMENT, ELEMENT)]
    groups = [(q[i], q[i + 1], *k[i], *d[i]) for i in range(3) if q[i] < q[i + 1]]
    q0, q1, k0, k1, d0, d1 = np.array(groups, np.int64).T
    return Zones((q0, q1), (k0, k1), (d0, d1), residue=residue)
