"""A pattern inside each document or row, and a pattern of a head on the positions of all batch elements."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from ..errors import PatternError, shown
from ..relation.arrays import Int64, combine_ids, distinct
from ..relation.node import ELEMENT, Node
from .algebra import Combined, Not, PerHead
from .base import Composite, Pattern, parts_of
from .batch_axis import Bounds, Enclosing, bounds_in
from .declared import declare
from .fitting import called, nest, refuse
from .shifted import Shifted
from .view import View


@declare(
    "Within(Sinks(64), Documents([160, 480, 96, 288]))",
    None,
    hostile="Within(Strided(2**30), Documents([n // 2] * 2))",
)
class Within(Composite):
    """A pattern applied inside every document or row, with positions counted from its first key.

    ``pattern.within(bounds)`` builds it. No pair crosses a bound. A query outside of its row, or of all documents,
    attends no key. If queries and keys are packed with different lengths, the last query of a document is at its last
    key: query i of n is at position i + keys - n. Queries before the first key have negative positions, at which a
    causal pattern allows no key. Planning time grows with the non-empty tiles.

    Args:
        pattern: A relation on positions from each document's first key.
        bounds: ``Documents``, ``KeyPadding`` for padded rows, or a ``Tree``, on which positions count along paths.
    Raises:
        PatternError: The pattern is not a relation or contains a block table, or the bounds are of another kind; at
            use, a document is in several pieces, has a length that does not fit the pattern, or has more queries than
            keys and the pattern looks positions up (a function, a grid, a table).
    Example:
        >>> rw.Sinks(1).within(rw.Documents([2, 2])).to_dense(4)[0, 0].int()
        tensor([[1, 0, 0, 0],
                [1, 0, 0, 0],
                [0, 0, 1, 0],
                [0, 0, 1, 0]], dtype=torch.int32)
        >>> (rw.Sinks(1) & rw.Causal()).within(rw.KeyPadding(4, start=2)).to_dense(4)[0, 0].int()
        tensor([[0, 0, 0, 0],
                [0, 0, 0, 0],
                [0, 0, 1, 0],
                [0, 0, 1, 0]], dtype=torch.int32)
    """

    counts_apart = True

    def __init__(self, pattern: Pattern, bounds: Pattern):
        if not isinstance(pattern, Pattern):
            refuse(pattern)
        # imported when a pattern is put inside of bounds
        from .table import BlockTable

        if not isinstance(bounds, Enclosing):
            got = repr(bounds) if isinstance(bounds, Pattern) else shown(bounds)
            remedy = called(bounds) or "Combine other patterns with &."
            raise PatternError("bounds", got, "Documents, Tree or KeyPadding", remedy)
        if not pattern.combinable:
            remedy = "A LongNet selects tokens by their place in the whole sequence: use Dilated or Segments."
            raise PatternError("pattern", repr(pattern), "a relation", remedy)
        if parts_of(pattern, BlockTable):
            remedy = "The blocks of a table count from the start of the whole sequence: combine it with & instead."
            raise PatternError("pattern", repr(pattern), "one without a block table", remedy)
        self.pattern, self.bounds = pattern, bounds
        nest(self, 1 + pattern.depth, pattern.leaves + 1)
        self.__post_init__()

    def _text(self) -> str:
        return f"Within({self.pattern.spec}, {self.bounds.spec})"

    def __repr__(self) -> str:
        return f"Within({self.pattern!r}, {self.bounds!r})"

    def parts_within(self) -> tuple[Pattern, ...]:
        return self.pattern, self.bounds

    @property
    def _packed_apart(self) -> bool:
        return self.bounds._packed_apart

    def _among_keys(self, place: Tensor) -> Tensor:
        return self.bounds._among_keys(place)

    def remade(self, parts: Sequence[Pattern]) -> Pattern:
        return Within(*parts)

    @property
    def tile_size(self) -> None:
        # blocks begin with each document, not with a tile
        return None

    def check(self, nq: int, nk: int, q_offset: int) -> None:
        self.bounds.check(nq, nk, q_offset)
        if self.bounds.readable():
            self.fits()

    def fits(self) -> None:
        """Raise PatternError if the pattern does not fit the documents' lengths."""
        queries, lengths = self.bounds.sizes()
        longer = np.flatnonzero(queries > lengths)
        if len(longer) and _looks_up(self.pattern):
            got = f"document {longer[0]} of {queries[longer[0]]} queries and {lengths[longer[0]]} keys"
            wanted = "no more queries than keys: the pattern looks positions up, and the first queries are before key 0"
            raise PatternError("documents", got, wanted, "Write the pattern by rules, such as Causal().")
        if lengths.any():
            # two lengths are enough: a pattern that is made for one length fits no second one
            for length in {int(lengths[lengths > 0].min()), int(lengths.max())}:
                self.pattern.check(length, length, 0)

    def zones(self, n: int | None) -> Node:
        return self.bounds.inside(self.pattern.zones(n))


def within(pattern: Pattern, bounds: Pattern) -> Pattern:
    """Apply a pattern inside each document or row; see :meth:`Pattern.within`."""
    # imported when a pattern with tensors is put inside of bounds
    from .documents import Documents

    if isinstance(pattern, Pattern) and pattern.tables and isinstance(bounds, Documents):
        from .selected import Selected, in_documents

        if isinstance(pattern, Selected):
            return in_documents(pattern, bounds)
        if parts_of(pattern, Selected):
            # each part inside the documents; the complement of a part is that of its pairs in a document
            if isinstance(pattern, Not):
                return bounds & ~within(pattern.part, bounds)
            if isinstance(pattern, (Combined, PerHead)):
                return pattern.remade([within(part, bounds) for part in pattern.parts_within()])
    return Within(pattern, bounds)


def _looks_up(pattern: Pattern) -> bool:
    """Return whether a pattern looks positions up in a table, a grid or a function, which have no negative ones."""
    looks = pattern.looks_up or bool(pattern.tables)
    return looks or any(map(_looks_up, pattern.parts_within()))


def batched(pattern: Pattern, head: int) -> Pattern | None:
    """Return the pattern of a head on the axis of all batch elements, with its bounds read; None if it has none."""
    if isinstance(pattern, Bounds) and pattern.tables:
        return pattern.read()
    if not bounds_in(pattern):
        one = pattern.select(0, head)
        # extents do not say whether a function uses the batch or head index
        apart = pattern.has_function and one.key().value != pattern.select(1, head).key().value
        return None if apart or pattern.extents()[0] is not None else one
    if isinstance(pattern, PerHead):
        return batched(pattern.patterns[head], head)
    parts = [batched(part, head) for part in pattern.parts_within()]
    found = [part for part in parts if part is not None]
    if len(found) < len(parts):
        return None
    if isinstance(pattern, Combined):
        return pattern._with(parts=tuple(found))
    if isinstance(pattern, Shifted):
        return pattern._with(pattern=found[0], offsets=found[1])
    if isinstance(pattern, View):
        return pattern._with(pattern=found[0])
    return Not(found[0]) if isinstance(pattern, Not) else Within(found[0], found[1])


def check_bounds(pattern: Pattern, nq: int, nk: int, q_offset: int) -> None:
    """Compute :meth:`Pattern.check` of a pattern with bounds that may be read."""
    if isinstance(pattern, Bounds):
        pattern.fits(nq, nk, q_offset)
    elif isinstance(pattern, Within):
        pattern.bounds.fits(nq, nk, q_offset)
        pattern.fits()
    elif isinstance(pattern, Shifted):
        pattern.offsets.fits(nq, nk, q_offset)
        check_bounds(pattern.pattern, *pattern.extent(nq, nk, q_offset))
    elif isinstance(pattern, View):
        pattern.check(nq, nk, q_offset)
    elif parts := pattern.parts_within():
        for part in parts:
            check_bounds(part, nq, nk, q_offset)
    else:
        pattern.check(nq, nk, q_offset)


def by_head(pattern: Pattern) -> bool:
    """Return whether the pattern may differ between heads."""
    if pattern.extents()[1] is not None:
        return True
    return pattern.has_function and pattern.select(0, 0).key().value != pattern.select(0, 1).key().value


def elements(pattern: Pattern, batch: int) -> tuple[Int64, Int64]:
    """Return the starts of distinct elements on the axis of all elements, and (B,) which of them each element equals.

    Args:
        pattern: A pattern from :func:`batched`.
        batch: Number of batch elements.
    """
    every = (bounds.bound_ids() for bounds in bounds_in(pattern) if bounds.extents()[0] is not None)
    numbers = [side for sides in every for side in sides]
    if not numbers:
        return np.zeros(1, np.int64), np.zeros(batch, np.int64)
    first, like = distinct(combine_ids(*numbers))
    return first * ELEMENT, like
