"""The zones of comparisons in a traced mask function, such as ``first[k] <= first[q]``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..relation.arrays import distinct, number_rows
from ..relation.comparisons import AtMost, Comparison, Listed, Rectangles, Runs
from ..relation.shapes import MOST_ZONES
from ..trace.relation import Equal, Lookup, Member, Not, Order, Relation, Side
from ..types import Place
from .zone_table import ZoneTable

Compared = Order | Equal | Lookup | Member | Side | Not

# With fewer pairs for each zone, evaluating the function takes less time: a comparison of two look-ups takes 3 ns a
# pair, and a zone up to 1.5 us. Fewer zones than this take few milliseconds.
_PAIRS, _FEW_ZONES = 256, 2**13
# rectangles on the way to zones take less time than these, and entries of a table still less
_CUT, _ENTRIES = 4, 16


def is_compared(x: Relation) -> TypeGuard[Compared]:
    """Return whether a leaf is a comparison with known values: its pairs are zones, if they are few."""
    if torch.compiler.is_compiling():
        return False
    if isinstance(x, Not):
        return isinstance(x.part, Order)
    return isinstance(x, (Order, Equal, Lookup, Member)) or (isinstance(x, Side) and x.table.shape[2] > 1)


def most_zones(place: Place, batch: int) -> int:
    """Return the number of zones above which evaluating a function takes less time, for so many batch elements."""
    return min(MOST_ZONES, batch * place.nq * place.nk // _PAIRS + _FEW_ZONES)


def zones_of(leaves: Sequence[Compared], place: Place) -> ZoneTable | None:
    """Return the pairs that all of some comparisons allow; None where they differ between heads, or are many zones.

    Each comparison cuts the pairs that the ones before it leave, so together they may be far fewer zones than apart.
    """
    tables = [table for leaf in leaves for table in _tables(leaf)]
    if any(table.shape[1] > 1 for table in tables):
        return None
    batch = max(len(table) for table in tables)
    most = most_zones(place, batch)
    compared: list[Comparison] = []
    for leaf in leaves:
        one = _entries(leaf, place, batch, most) if isinstance(leaf, Lookup) else _comparison(leaf, place, batch)
        if one is None:
            return None
        compared.append(one)
    first = place.q0 - place.k0
    pairs = Rectangles.whole(batch, first, place.nq, place.nk)
    for each in sorted(compared, key=lambda one: one.size):
        left = each.cut(pairs, _CUT * most)
        if left is None:
            return None
        pairs = left
    zones, element = pairs.zones()
    return None if len(zones) > most else ZoneTable.of(zones, element, batch, (first, first + place.nq), place.nk)


def _tables(x: Compared) -> tuple[Tensor, ...]:
    """Return the tables of a comparison, with dimensions for batch elements, heads, queries and keys."""
    if isinstance(x, Not):
        assert isinstance(x.part, Order)
        return _tables(x.part)
    if isinstance(x, Lookup):
        return x.at
    return (x.table,) if isinstance(x, Side) else (x[0], x[1])


def _comparison(x: Compared, place: Place, batch: int) -> Comparison:
    """Return a leaf as a comparison of runs of queries with runs of keys."""

    def of_queries(table: Tensor) -> Runs:
        values = table[:, 0, :, 0].expand(batch, place.nq, *table.shape[4:])
        return Runs.of(_values(values), place.q0 - place.k0)

    def of_keys(table: Tensor) -> Runs:
        return Runs.of(_values(table[:, 0, 0].expand(batch, place.nk)))

    if isinstance(x, Not):
        assert isinstance(x.part, Order)
        return AtMost(of_queries(x.part.u), of_keys(x.part.v), no=True)
    if isinstance(x, Order):
        return AtMost(of_queries(x.u), of_keys(x.v))
    if isinstance(x, Side):
        q, k = of_queries(x.table), Runs.of(np.ones((batch, place.nk), np.int64))
    else:
        assert isinstance(x, (Equal, Member))
        q, k = of_queries(x[0]), of_keys(x.v)
    # each run of queries has a list of its own
    number, lists = np.arange(len(q.start)), q.value.reshape(len(q.start), -1)
    return Listed(q._replace(value=number), np.repeat(number, lists.shape[1]), lists.ravel(), k)


def _entries(x: Lookup, place: Place, batch: int, most: int) -> Listed | None:
    """Return the entries of a table as lists of keys; None if they are many.

    Queries with equal indices have one list, and keys with equal indices are one entry.
    """

    def indexed(of_keys: bool) -> tuple[Runs, NDArray[Any]]:
        """Return runs of tokens with equal indices, which are numbered, and the indices of each number."""
        n, first = (place.nk, 0) if of_keys else (place.nq, place.q0 - place.k0)
        columns = [_values(at.flatten(1).expand(batch, n)) for at in x.at if (at.shape[3] > 1) == of_keys]
        runs = Runs.of(np.stack(columns, -1) if columns else np.zeros((batch, n, 0), np.int64), first)
        number = number_rows(runs.value)
        return runs._replace(value=number), runs.value[distinct(number)[0]].T

    (q, of_q), (k, of_k) = indexed(False), indexed(True)
    shape = of_q.shape[1], of_k.shape[1]
    if shape[0] * shape[1] > _ENTRIES * most:
        return None
    rows, columns = iter(of_q[:, :, None]), iter(of_k)
    at = tuple(torch.from_numpy(next(columns if index.shape[3] > 1 else rows)) for index in x.at)
    # numpy access to the memory of the table itself would forbid its owner to resize it
    number, entry = np.nonzero(x.table.cpu()[at].expand(shape).numpy())
    return None if len(number) > _CUT * most else Listed(q, number, entry, k)


def _values(table: Tensor) -> NDArray[Any]:
    """Return values as whole numbers or as float64, which have every value of the other dtypes."""
    dtype = torch.float64 if table.is_floating_point() else torch.int64
    values: NDArray[Any] = table.to("cpu", dtype, copy=True).numpy()
    return values
