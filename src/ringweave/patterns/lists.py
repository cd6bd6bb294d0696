"""The lists of keys in a pattern, and the relation that filters them, as planners and kernels read them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from ..errors import PatternError
from ..torch_compat import require, wrapped
from .algebra import And, join
from .base import Composite, Pattern

if TYPE_CHECKING:
    from .block_sets import ListedBlocks

#: The number of key blocks where none is given: more than there can be.
MANY = 2**31 - 1
# most keys in a tile of a plan by query, and the multiple that they are
_WIDEST, _UNIT = 128, 16


class Lists(NamedTuple):
    """Blocks of keys that a model chose for each query, filtered by a relation.

    Attributes:
        blocks: The listed blocks, (queries, n), (H, queries, n) or (B, H, queries, n).
        block: Number of keys in a block.
        group: Adjacent query heads for each head of the lists; None until the heads of the call are known.
        relation: The pattern that filters the lists; ``Full()`` keeps all listed keys.
    """

    blocks: ListedBlocks
    block: int
    group: int | None
    relation: Pattern

    def serve(self, group: int) -> bool:
        """Return whether each list serves whole groups of this many adjacent query heads."""
        return (1, *self.blocks.shape)[-3] == 1 or (self.group or 1) % group == 0

    @property
    def packed(self) -> bool:
        """Whether a plan by query packs the listed keys together, since no tile divides a block."""
        return self.block % _UNIT > 0

    @property
    def tile(self) -> int:
        """Keys in a tile of a plan by query: a block, a part of it, or packed keys."""
        return next((side for side in range(_WIDEST, 0, -_UNIT) if self.block % side == 0), _WIDEST)

    def check(self, nq: int, nk: int, q_offset: int) -> None:
        """Raise PatternError unless there is a row for each query, and each index is -1 or a block of the keys."""
        rows = self.blocks.shape[-2]
        # a piece of a call has its queries at their places in the whole call
        if q_offset + nq > rows and not rows == nq == 1:
            raise misfit(rows, q_offset + nq)
        number = -(-nk // self.block)
        if self.blocks.key_blocks not in (number, MANY):
            wanted = f"{number}, for {nk} keys in blocks of {self.block}"
            raise PatternError("key_blocks", self.blocks.key_blocks, wanted, "Leave it out.")
        table = self.blocks.table
        # the operator checks the values that a transform wraps
        if table.device.type == "meta" or wrapped(table):
            return
        if table.device.type != "cpu":
            require(((table >= -1) & (table < number)).all(), f"indices: one is not in -1..{number - 1}")
            return
        least, most = self.blocks.limits()
        if least < -1 or most >= number:
            of = "keys" if self.block == 1 else f"blocks of {self.block} keys"
            wanted = f"-1 or 0 to {number - 1}: the call has {number} {of}"
            raise PatternError("indices", f"{least} to {most}", wanted, "Correct the indices; -1 is no key.")


class Listed(ABC):
    """A pattern of lists of keys."""

    @property
    @abstractmethod
    def lists(self) -> Lists:
        """The lists, which no relation filters."""


def lists_of(pattern: Pattern) -> Lists | None:
    """Return the lists of keys that a pattern filters by a relation; None if it is another pattern."""
    if isinstance(pattern, Listed):
        return pattern.lists
    if isinstance(pattern, And) and pattern.tables:
        for at, part in enumerate(pattern.parts):
            if isinstance(part, Listed):
                others = *pattern.parts[:at], *pattern.parts[at + 1 :]
                return part.lists._replace(relation=others[0] if len(others) == 1 else join(And, *others))
    return None


def lists_in(pattern: Pattern) -> list[Pattern]:
    """Return the patterns of lists inside a pattern, itself included, in the order of the text."""
    found: list[Pattern] = []
    for part in pattern.parts_within():
        found += lists_in(part)
    return found or ([pattern] if isinstance(pattern, Listed) and pattern.tables else [])


def with_lists(pattern: Pattern, lists: Iterator[Pattern]) -> Pattern:
    """Replace the patterns of :func:`lists_in` by others."""
    if not pattern.tables:
        return pattern
    if isinstance(pattern, Composite):
        return pattern.with_parts([with_lists(part, lists) for part in pattern.parts_within()])
    return next(lists) if isinstance(pattern, Listed) else pattern


def check_rows(pattern: Pattern, nq: int) -> None:
    """Raise PatternError if lists in a pattern have rows for another number of queries than a call has.

    Their :meth:`Pattern.check` cannot tell, since a piece of a call has fewer queries than the call.
    """
    for each in lists_in(pattern):
        rows = each.tables[0].shape[-2]
        if rows != nq:
            raise misfit(rows, nq)


def misfit(rows: int, queries: int) -> PatternError:
    """Return the error of lists for another number of queries than a call has."""
    remedy = "Pass one row for each query of the call: a chunk or a decoding step passes its own rows."
    return PatternError("Selected", f"lists for {rows} queries", f"{queries}, one for each query", remedy)
