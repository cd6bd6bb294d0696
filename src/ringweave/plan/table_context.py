"""A pattern with one block table in it, apart from what the table holds: known before it, and kept on the device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..patterns import BlockTable, Full, Pattern
from ..patterns.algebra import leaves, replace
from ..patterns.block_sets import BlockSet
from ..patterns.tiles import Int64

EMPTY = -2
#: Ascending places of tiles among all of a head, and their codes.
Listed = tuple[Int64, NDArray[np.int32]]
#: Where runs of tiles with one code begin and end, and their codes.
Runs = tuple[Int64, Int64, NDArray[np.int32]]


def split(pattern: Pattern, tile: tuple[int, int]) -> tuple[BlockTable, Pattern, Pattern] | None:
    """Split a pattern into its one table on the tile grid, itself with every block of that set, and with none."""
    tables = [leaf for leaf in leaves(pattern) if leaf.tables]
    if not tables or not all(_same(tables[0], leaf) for leaf in tables):
        return None
    table = tables[0]
    if not isinstance(table, BlockTable) or table.block_size != tile:
        return None
    every = replace(pattern, lambda leaf: Full() if leaf.tables else leaf)
    return table, every, replace(pattern, lambda leaf: ~Full() if leaf.tables else leaf)


def of_sets(lead: tuple[int, ...], group: int, batch: int, heads: int, device: str | torch.device) -> Tensor:
    """Number the row sets of a table of leading sides (), (H,) or (B, H) for batch elements and heads: (B, Hq) int64.

    Each of the table's heads is that of ``group`` query heads.
    """
    sets = torch.arange(math.prod(lead), device=device).view(lead)
    if lead and group > 1:
        sets = sets[..., None].expand(*lead, group).flatten(-2)
    return sets.expand(batch, heads).contiguous()


def _same(a: Pattern, b: Pattern) -> bool:
    """Tell whether two patterns are the same table; without a look at what it holds."""
    return a.spec == b.spec and all(
        one.data_ptr() == two.data_ptr() for one, two in zip(a.tables, b.tables, strict=True)
    )


@dataclass(frozen=True, eq=False, repr=False)
class TableContext:
    """The tiles of a pattern that has one table in it, where that is set and where it is not; all on one device.

    A combination of a table and of patterns without one is, at a tile, one of two: what it would be with every block
    set, or with none. Both are known before the table. Of the first, tiles side by side with one code are a run: a
    causal pattern has three in a row of tiles, whatever the length. Of the second, all that are not empty are listed.

    Attributes:
        starts: (S,) int64, ascending, the first 0: where a run begins in a flat array (P, query tiles, key tiles).
            Of equal ones the last counts.
        codes: (S,) int32: EMPTY, -1 full, else an index into ``masks``.
        outside: (E,) int64, ascending: tiles where the table is not set, in a flat array (G, query tiles, key tiles).
        outside_codes: (E,) int32.
        masks: As a plan's.
        of_table: (G,) int64, which row set of the table each of the joint ones uses.
        of_codes: (G,) int64, which of the P.
        group: (B, Hq) int32, which of the G a batch element and head uses.
    """

    starts: Tensor
    codes: Tensor
    outside: Tensor
    outside_codes: Tensor
    masks: Tensor
    of_table: Tensor
    of_codes: Tensor
    group: Tensor

    @staticmethod
    def of(
        inside: tuple[Sequence[Sequence[Runs]], Tensor],
        outside: tuple[Sequence[Sequence[Listed]], Tensor],
        masks: Tensor,
        table: Tensor,
        area: int,
        device: str | torch.device,
    ) -> TableContext:
        """Describe it by the tiles with every block set and with none, and by which sets of the table are whose.

        Args:
            inside: With every block set, the runs of each distinct pattern, in parts, and (B, Hq) int32 which pattern
                each uses.
            outside: The same with no block set, and all its tiles listed.
            masks: As a plan's.
            table: (B, Hq), which row set of the table each uses.
            area: Tiles of a head.
            device: Where it goes.
        """
        runs = [(n * area + begin, n * area + end, code) for n, of in enumerate(inside[0]) for begin, end, code in of]
        begin, end, code = (np.concatenate(part) for part in zip(*runs, strict=True))
        # what comes after a run is empty, unless another run begins there
        starts = np.concatenate([np.zeros(1, np.int64), end, begin])
        codes = np.concatenate([np.full(1 + len(end), EMPTY, np.int32), code])
        order = np.argsort(starts, kind="stable")
        number = (table * len(inside[0]) + inside[1]) * len(outside[0]) + outside[1]
        joint, group = number.unique(return_inverse=True)
        joint, of_outside = joint // len(outside[0]), (joint % len(outside[0])).tolist()
        tiles = [(n * area + place, code) for n, of in enumerate(of_outside) for place, code in outside[0][of]]
        place, code = (np.concatenate(part) for part in zip(*tiles, strict=True))
        of_inside = joint % len(inside[0])
        known = map(torch.from_numpy, (starts[order], codes[order], place, code))
        moved = (*known, masks, joint // len(inside[0]), of_inside, group.int())
        return TableContext(*(x.to(device) for x in moved))

    def at(self, set_number: Tensor, place: Tensor, area: int) -> Tensor:
        """Look up codes of tiles with a set block, by joint row set and place in its ``area``; int32, of int64."""
        number = (self.of_codes[set_number] * area + place).reshape(-1)
        return self.codes[torch.searchsorted(self.starts, number, right=True) - 1]

    def free(self, blocks: BlockSet) -> Tensor:
        """Tell whether the table is not set at the tiles outside of it, (E,)."""
        rows, width = blocks.shape[-2:]
        line = self.outside // width
        return ~blocks.held(self.of_table[line // rows] * rows + line % rows, self.outside % width)


def runs_of(place: Int64, code: NDArray[np.int32]) -> Runs:
    """Join tiles at ascending places, each with a code, to runs (begin, end, code) of neighbours with one code."""
    ends = np.ones(len(place) + 1, np.bool_)
    ends[1:-1] = (place[1:] != place[:-1] + 1) | (code[1:] != code[:-1])
    first, last = np.flatnonzero(ends[:-1]), np.flatnonzero(ends[1:])
    return place[first], place[last] + 1, code[first]
