"""Patterns in strided views: on the positions offset, offset + rate, ..., renumbered from 0."""

from __future__ import annotations

from collections.abc import Sequence

from ..relation.node import ELEMENT, Node
from ..relation.transforms import first_equal, simplified, view
from ..relation.zones import Zones
from .algebra import Combined, Not, PerHead
from .base import Composite, Derived, Full, Pattern
from .key_padding import KeyPadding
from .local import Causal, SlidingWindow


class View(Composite):
    """A pattern without operators on positions offset, offset + rate, ..., renumbered from 0.

    The lengths of the whole are checked before views are taken, since those of a view do not tell them.

    Args:
        pattern: A relation of positions of the whole.
        rate: Distance in tokens between neighbours of the view.
        offset: The first position. Equal views have one offset where it is known, so that they share their plan.
    """

    def __init__(self, pattern: Pattern, rate: int, offset: int):
        self.pattern, self.rate, self.offset = pattern, rate, offset
        self.__post_init__()

    def _text(self) -> str:
        return f"View({self.pattern.spec}, {self.rate}, {self.offset})"

    def __repr__(self) -> str:
        return f"{self.pattern!r}[{self.offset}::{self.rate}]"

    def parts_within(self) -> tuple[Pattern, ...]:
        return (self.pattern,)

    def remade(self, parts: Sequence[Pattern]) -> Pattern:
        return View(parts[0], self.rate, self.offset)

    def check(self, nq: int, nk: int, q_offset: int) -> None:
        pass

    def zones(self, n: int | None) -> Node:
        node = view(self.pattern.zones(None if n is None else n * self.rate + self.offset), self.rate, self.offset)
        assert node is not None
        return node


def in_view(pattern: Pattern, rate: int, offset: int, n: int) -> Pattern | None:
    """Return a pattern on positions offset, offset + rate, ..., renumbered from 0; None if its zones have no such view.

    Args:
        pattern: A relation of positions of the whole.
        rate: Distance in tokens between neighbours of the view.
        offset: The first position.
        n: End of the positions of the whole.
    """
    if isinstance(pattern, Derived):
        return in_view(pattern.definition, rate, offset, n)
    if isinstance(pattern, (Combined, Not, PerHead)):
        parts = [in_view(part, rate, offset, n) for part in pattern.parts_within()]
        found = [part for part in parts if part is not None]
        return pattern.remade(found) if len(found) == len(parts) else None
    if isinstance(pattern, Composite) or pattern.has_function:
        return None
    return _with_tensors(pattern, rate, offset) if pattern.tables else _of_leaf(pattern, rate, offset, n)


def _of_leaf(pattern: Pattern, rate: int, offset: int, n: int) -> Pattern | None:
    whole = simplified(pattern.zones(n))
    offset = first_equal(whole, rate, offset)
    node = view(whole, rate, offset)
    if node is None:
        return None
    named = _named(node)
    return View(pattern, rate, offset) if named is None else named


def _named(node: Node) -> Pattern | None:
    """Return the pattern of a band of distances, for which backends have kernels; None for another relation."""
    if not isinstance(node, Zones) or not node.is_band or node.groups != 1:
        return None
    d0, d1 = int(node.d0[0]), int(node.d1[0])
    if d0 <= -ELEMENT:
        return Full() if d1 >= ELEMENT else Causal() if d1 == 1 else None
    return SlidingWindow(-d0, d1 - 1) if d0 <= 0 < d1 < ELEMENT else None


def _with_tensors(pattern: Pattern, rate: int, offset: int) -> Pattern | None:
    # imported with the first view of a pattern with tensors
    from .reader import rebuild
    from .selected import Selected
    from .table import BlockTable

    if isinstance(pattern, BlockTable):
        if isinstance(pattern, Selected) or any(side % rate for side in pattern.block_size):
            return None
        # blocks stay blocks, so that their plans are made of the table
        high, wide = pattern.block_size
        return BlockTable.of(pattern.blocks, (high // rate, wide // rate), pattern.group)
    if isinstance(pattern, KeyPadding):
        # views are cached by the contents of bounds, so they must not follow later writes to them
        pattern = rebuild(pattern.spec, [table.clone() for table in pattern.tables])
    return View(pattern, rate, offset)
