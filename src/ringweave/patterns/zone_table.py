"""Zones that were computed for a call: the pairs of a comparison of tables."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from ..errors import PatternError
from ..relation.arrays import Int64, number_rows, padded
from ..relation.node import ELEMENT, Node
from ..relation.zones import Zones
from .base import Pattern
from .batch_axis import Bounds, rows_of
from .cache_key import CacheKey


class ZoneTable(Bounds):
    """The pairs in a list of zones: a query and a key in two ranges, and their distance in a band.

    A mask function that was traced has one where no other pattern has its pairs. It is made for the lengths of a call.

    Args:
        table: (B, zones, 6), or (1, zones, 6) for all batch elements, int64: first query and end of each zone, first
            key and end, and least distance k - q and end. Zones ascend by queries, then by keys; zones with equal
            queries have equal bands, and queries are equal or apart. A zone without queries fills a row. The table is
            not copied, and nothing writes to it.
        queries: First position of the queries, and end.
        keys: Number of keys.
    """

    private: ClassVar[bool] = True

    def __init__(self, table: Tensor, queries: tuple[int, int], keys: int):
        self.table, self.queries, self.keys = table, queries, keys
        self.__post_init__()

    def __post_init__(self) -> None:
        self.write(self._text(), follows=False, function=False)

    def key(self) -> CacheKey:
        # nothing writes to the table, so its contents are not hashed at each call
        return Pattern.key(self)

    @classmethod
    def of(cls, zones: Int64, element: Int64, batch: int, queries: tuple[int, int], keys: int) -> ZoneTable:
        """Return the pattern of zones (zones, 6) of some batch elements, which ascend."""
        rows = np.stack([padded(element, column, batch) for column in zones.T], -1)
        return cls(torch.from_numpy(rows), queries, keys).read()

    def _text(self) -> str:
        return f"ZoneTable(_, {self.queries}, {self.keys})"

    def __repr__(self) -> str:
        return f"ZoneTable(<{' x '.join(map(str, self.table.shape[:2]))} zones>)"

    @property
    def tables(self) -> tuple[Tensor, ...]:
        return (self.table,)

    def extents(self) -> tuple[int | None, int | None]:
        return (len(self.table) if len(self.table) > 1 else None), None

    def select(self, b: int, h: int) -> Pattern:
        return self if len(self.table) == 1 else ZoneTable(self.table[b : b + 1], self.queries, self.keys)

    def _make(self) -> Int64:
        return rows_of(self.table, 3)

    def bound_ids(self) -> tuple[Int64, ...]:
        return (number_rows(self._now.reshape(len(self._now), -1)),)

    def fits(self, nq: int, nk: int, q_offset: int) -> None:
        first, stop = self.queries
        if nk == self.keys and first <= q_offset and q_offset + nq <= stop:
            return
        raise PatternError(
            "pattern",
            f"{nk} keys and queries {q_offset} to {q_offset + nq - 1}",
            f"{self.keys} keys and queries in {first} to {stop - 1}: a mask function was read for these",
            "Read the function for each call.",
        )

    def zones(self, n: int | None) -> Node:
        rows: Int64 = self._now
        element, number = np.nonzero(rows[:, :, 0] < rows[:, :, 1])
        q0, q1, k0, k1, d0, d1 = rows[element, number].T
        base = element * ELEMENT
        group = np.flatnonzero(np.append(True, np.diff(q0 + base) != 0)[: len(q0)])
        return Zones(
            (q0[group] + base[group], q1[group] + base[group]),
            (k0 + base, k1 + base),
            (d0[group], d1[group]),
            ptr=np.append(group, len(q0)),
            each=len(rows) > 1,
        )
