"""The lists of keys in a pattern, and the relation that filters them, as planners and kernels read them."""

from __future__ import annotations

from typing import NamedTuple

from ..errors import PatternError
from ..torch_compat import require, wrapped
from .base import Pattern
from .block_sets import ListedBlocks

#: The number of key blocks where none is given: more than there can be.
MANY = 2**31 - 1
# most keys in a tile of a plan with blocks as tiles, and the multiple that they are
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
    def side(self) -> int | None:
        """Keys in a tile of a plan with blocks as tiles; None if no tile divides a block, so that keys are packed."""
        return next((side for side in range(_WIDEST, _UNIT - 1, -_UNIT) if self.block % side == 0), None)

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


def misfit(rows: int, queries: int) -> PatternError:
    """Return the error of lists for another number of queries than a call has."""
    remedy = "Pass one row for each query of the call: a chunk or a decoding step passes its own rows."
    return PatternError("Selected", f"lists for {rows} queries", f"{queries}, one for each query", remedy)
