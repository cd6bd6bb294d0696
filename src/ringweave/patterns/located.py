"""The relation of a pattern with the positions at which the places of a call begin."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from ..relation import node as relation
from ..relation.arrays import Int64
from ..relation.node import Frame, Node, Origin
from ..relation.tiles import strips
from ..relation.transforms import by_place, simplified
from .algebra import And, Combined, Not
from .base import Pattern, parts_of
from .shifted import Shifted


class Located(NamedTuple):
    """A relation of positions, and the position of place 0 in each of some batch elements.

    Attributes:
        node: The relation.
        elements: (n,) batch elements.
        q: (n,) positions of the query at place 0.
        k: (n,) positions of the key at place 0.
    """

    node: Node
    elements: Int64
    q: Int64
    k: Int64

    def strips(
        self,
        nq: int,
        nk: int,
        tile: tuple[int, int],
        *,
        q_offset: int = 0,
        part: slice | Int64 = slice(None),
    ) -> Frame:
        """Return the strips of the elements; see :func:`ringweave.relation.tiles.strips`."""
        first = self.elements, self.q, self.k
        return strips(nq, nk, tile, *first, q_offset=q_offset, part=part)

    def one(self, number: int) -> Located:
        """Return the relation in one of the elements."""
        return Located(self.node, *(side[number : number + 1] for side in (self.elements, self.q, self.k)))

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        """Evaluate pairs of places in the first of the elements: int64 that broadcast, on any device; bool."""
        first = Origin(int(self.elements[0]), int(self.q[0]), int(self.k[0]))
        return self.node.contains(q + first.q, k + first.k, first)


def located(pattern: Pattern, ends: tuple[int, int] | None, elements: Int64 | None = None) -> Located:
    """Return the relation of a pattern of one head.

    Args:
        pattern: A pattern that is the same for all batch elements, or from :func:`ringweave.patterns.within.batched`.
        ends: Ends of the places of queries and of keys; None if they are unknown, for pairs only.
        elements: (n,) batch elements; by default the first one.
    """
    elements = np.zeros(1, np.int64) if elements is None else elements
    moved = parts_of(pattern, Shifted)
    if not moved:
        zero = np.zeros_like(elements)
        return Located(simplified(pattern.zones(None if ends is None else max(ends))), elements, zero, zero)
    # the offsets of a call, which all shifted parts have
    q, k = moved[0].offsets._now
    n = None if ends is None else max(ends[0] + int(q.max()), ends[1] + int(k.max()))
    node = _by_position(pattern, n)
    q, k = (side[elements] if len(side) > 1 else np.broadcast_to(side, elements.shape) for side in (q, k))
    return Located(simplified(node), elements, q, k)


def allows(pattern: Pattern, q: Tensor, k: Tensor) -> Tensor:
    """Compute :meth:`Pattern.allows`; compiled code can trace it where every list of zones is a single zone."""
    if parts_of(pattern, Shifted):
        return located(pattern, None).allows(q, k)
    return pattern.zones(None).contains(q, k, Origin())


def _by_position(pattern: Pattern, n: int | None) -> Node:
    """Return the relation of positions; parts that are not shifted count by places."""
    if isinstance(pattern, Shifted):
        return pattern.zones(n)
    if isinstance(pattern, Combined):
        parts = [_by_position(part, n) for part in pattern.parts]
        return relation.And(parts) if isinstance(pattern, And) else relation.Or(parts)
    if isinstance(pattern, Not):
        return relation.Not(_by_position(pattern.part, n))
    return by_place(pattern.zones(n))
