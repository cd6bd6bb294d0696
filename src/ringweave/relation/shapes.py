"""Zones that several patterns have in common."""

from __future__ import annotations

import numpy as np

from .node import ELEMENT
from .zones import D, Residue, Zones

#: More zones than this are not listed: the relation is evaluated by token instead.
MOST_ZONES = 2**22


def neighborhood(
    window: int, dilation: int, n: int, causal: bool = False, queries: tuple[int, int] | None = None
) -> Zones:
    """Return the zones of a sequence of n tokens, or of an axis of a grid, where a query attends its neighbours.

    A query attends ``window`` keys at distances that are multiples of the dilation. The window is centred on the query,
    an even one with one more key before than after it, and shifted inwards at the borders. A causal window ends at the
    query and is not shifted. Queries are those of the sequence, or in a given range: those before its first key attend
    the first window.
    """
    begin, end = (0, n) if queries is None else queries
    before, after = window // 2 * dilation, (window - 1 - window // 2) * dilation
    reach = window * dilation
    # residues of one period would leave every pair
    residue = Residue(D, dilation, 1) if dilation > 1 else None
    if causal:
        return Zones((begin, end), (0, n), (dilation - reach, 1), residue=residue)
    if reach >= n:
        return Zones((begin, end), (0, n), residue=residue)
    # The last keys of every residue class, as many as the window has, are among the last ``reach`` keys.
    q = np.array([begin, before, n - after, end])
    k0, k1 = np.array([0, 0, n - reach]), np.array([reach, n, n])
    d0, d1 = np.array([-ELEMENT, -before, -ELEMENT]), np.array([ELEMENT, after + 1, ELEMENT])
    some = q[:-1] < q[1:]
    return Zones((q[:-1][some], q[1:][some]), (k0[some], k1[some]), (d0[some], d1[some]), residue=residue)


def segments(length: int, n: int, start: int = 0) -> Zones:
    """Return the zones of consecutive segments of n tokens; the first whole segment begins at ``start``."""
    bounds = np.append(np.append(0, np.arange(start or length, n, length)), n)
    return Zones((bounds[:-1], bounds[1:]), (bounds[:-1], bounds[1:]))
