"""The set blocks of a table, stored as a mask or as a list for every row.

Both classes have one interface. Lists take time and memory that grow with their places; a mask takes time and memory
that grow with its size, and is read once, in pieces. Only :meth:`BlockSet.mask` converts lists to a mask.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from typing import Any, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..chunks import chunks
from ..torch_compat import outside_transforms, version, wrapped

T = TypeVar("T")
# Places of a mask that are listed together, as int64: less than the budget of a chunk, because page faults of larger
# arrays take half of the time of a first plan.
_PLACES = 2**14


class BlockSet(ABC):
    """The set blocks of one table, or of a table for each head or batch element; never written.

    Attributes:
        table: The mask or the lists, (..., blocks of queries, n).
        key_blocks: Number of key blocks.
    """

    def __init__(self, table: Tensor, key_blocks: int):
        self.table, self.key_blocks = table, key_blocks
        # values derived from the table, with its version, which guards against a write that should not happen
        self._made: dict[str, tuple[Hashable, Any]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_made": {}}

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the table as a mask, (..., blocks of queries, blocks of keys)."""
        return (*self.table.shape[:-1], self.key_blocks)

    @property
    def most(self) -> int:
        """Upper bound on the number of set blocks in a row, known without reading the table."""
        return self.table.shape[-1]

    def of(self, table: Tensor) -> Self:
        """Return blocks of the same kind with another table, such as a part of this one."""
        return self if table is self.table else type(self)(table, self.key_blocks)

    def to(self, device: torch.device | str) -> Self:
        """Move the table to a device."""
        return self.of(self.table.to(device))

    def one(self, b: int, h: int) -> Self:
        """Return the table of a batch element and head; an axis of length 1, or a missing one, broadcasts."""
        table = self.table
        if table.ndim == 2:
            return self
        if table.ndim == 4:
            table = table[b if table.shape[0] > 1 else 0]
        return self.of(table[h if table.shape[0] > 1 else 0])

    def some(self, heads: slice) -> Self:
        """Return the tables of some heads; requires an axis of heads."""
        return self.of(self.table[..., heads, :, :].contiguous())

    @abstractmethod
    def mask(self) -> Tensor:
        """Return the mask as a new bool tensor of ``shape``."""

    @abstractmethod
    def listed(self) -> Tensor:
        """List the set blocks of each row, int32 (..., blocks of queries, ``most``), with ``key_blocks`` as filler.

        The set blocks of a row ascend; fillers may stand between them. No value is read back from a device.
        """

    @abstractmethod
    def lines(self) -> tuple[Tensor, Tensor]:
        """Return the number of set blocks of each row of all tables, int64, and the set blocks, int32, row by row.

        The set blocks of a row ascend; on a GPU this waits for it.
        """

    @abstractmethod
    def held(self, row: Tensor, col: Tensor) -> Tensor:
        """Look up each block without reading values back; rows are numbered through all tables."""

    def _once(self, make: Callable[[], T]) -> T:
        # recomputed if the table's version has changed
        now, made = version(self.table), self._made.get(make.__name__)
        if made is None or made[0] != now:
            with outside_transforms(self.table):
                made = self._made[make.__name__] = now, make()
        found: T = made[1]
        return found


class MaskBlocks(BlockSet):
    """Set blocks as a contiguous bool mask."""

    def mask(self) -> Tensor:
        return self.table.clone()

    def listed(self) -> Tensor:
        number = torch.arange(self.key_blocks, dtype=torch.int32, device=self.table.device)
        return torch.where(self.table, number, self.key_blocks)

    def lines(self) -> tuple[Tensor, Tensor]:
        flat = self.table.reshape(-1, self.key_blocks)
        if flat.device.type != "cpu":
            return flat.sum(1), flat.nonzero()[:, 1].int()
        # numpy takes a fraction of torch's time, and a tenth of it on one axis
        mask, step = flat.numpy(), max(1, _PLACES // self.key_blocks)
        counts = mask.sum(1)
        ends = [0, *np.cumsum(counts)[step - 1 :: step].tolist(), int(counts.sum())]
        col = np.empty(ends[-1], np.int32)
        for begin, lo, hi in zip(range(0, len(mask), step), ends, ends[1:], strict=False):
            part = counts[begin : begin + step]
            first = np.repeat(np.arange(len(part)) * self.key_blocks, part)
            np.subtract(np.flatnonzero(mask[begin : begin + step]), first, out=col[lo:hi], casting="unsafe")
        return torch.from_numpy(counts), torch.from_numpy(col)

    def held(self, row: Tensor, col: Tensor) -> Tensor:
        here = self.table.device != row.device and row.device.type == "cpu"
        table = self._once(self._host) if here else self.table.to(row.device)
        return table.reshape(-1, self.key_blocks)[row, col]

    def _host(self) -> Tensor:
        return self.table.cpu()


class ListedBlocks(BlockSet):
    """Set blocks as an int32 list for every row.

    Lists that a model chose may be in any order, with or without repeats, and -1 is no block. They are sorted once,
    when they are first read, so that they can be passed around in compiled code.

    Args:
        table: The lists, (..., blocks of queries, n).
        key_blocks: Number of key blocks.
        sorted: Whether each list has each of its blocks once, ascending, and then ``key_blocks`` as filler.
    """

    def __init__(self, table: Tensor, key_blocks: int, *, sorted: bool = True):
        super().__init__(table, key_blocks)
        self.sorted = sorted

    def of(self, table: Tensor) -> Self:
        return self if table is self.table else type(self)(table, self.key_blocks, sorted=self.sorted)

    def mask(self) -> Tensor:
        # the fillers are written to an additional column, which is cut off
        mask = torch.zeros(*self.shape[:-1], self.key_blocks + 1, dtype=torch.bool, device=self.table.device)
        return mask.scatter_(-1, self.listed().long(), True)[..., :-1].contiguous()

    def listed(self) -> Tensor:
        return self.table if self.sorted else self._once(self._sort)

    def lines(self) -> tuple[Tensor, Tensor]:
        listed = self.listed().flatten(0, -2)
        if listed.device.type != "cpu":
            used = listed < self.key_blocks
            return used.sum(1), listed[used]
        array = listed.numpy()
        real = array < self.key_blocks
        return torch.from_numpy(real.sum(1)), torch.from_numpy(array[real])

    def held(self, row: Tensor, col: Tensor) -> Tensor:
        ordered = self._once(self._numbered).to(row.device)
        if not ordered.numel():
            return torch.zeros(torch.broadcast_shapes(row.shape, col.shape), dtype=torch.bool, device=row.device)
        wanted = row * (self.key_blocks + 1) + col
        place = torch.searchsorted(ordered, wanted.contiguous()).clamp(max=ordered.numel() - 1)
        return ordered[place] == wanted

    def limits(self) -> tuple[int, int]:
        """Return the least and the largest number of a table on a CPU, or (-1, -1) without any."""
        return self._once(self._limits)

    def _sort(self) -> Tensor:
        counts = torch.full(self.table.shape[:-1], self.table.shape[-1], device=self.table.device)
        return ascending(self.table, counts, self.key_blocks)

    def _limits(self) -> tuple[int, int]:
        return (int(self.table.min()), int(self.table.max())) if self.table.numel() else (-1, -1)

    def _numbered(self) -> Tensor:
        """Combine row and block to one ascending number per place; a filler has the number after its row's last."""
        listed = self.listed().reshape(math.prod(self.table.shape[:-1]), -1)
        row = torch.arange(len(listed), device=listed.device)[:, None]
        return (row * (self.key_blocks + 1) + listed).reshape(-1)


def ascending(indices: Tensor, counts: Tensor, key_blocks: int) -> Tensor:
    """Convert indices to the lists of :class:`ListedBlocks`, without those out of range; nothing is read back.

    Args:
        indices: Integers (..., n), in any order, with or without repeats.
        counts: Integers (...), how many of the first ``indices`` of each row are used.
        key_blocks: Number of key blocks.
    """
    places = indices.shape[-1]
    counting = torch.arange(places, device=indices.device) < counts[..., None]
    real = counting & (indices >= 0) & (indices < key_blocks)
    listed = torch.where(real, indices, key_blocks).int()
    traced = torch.compiler.is_compiling() or wrapped(listed)
    if type(listed) is Tensor and listed.device.type == "cpu" and not traced:
        # numpy takes a fifth of torch's time
        array = listed.numpy()
        array.sort(-1)
        repeated = (array[..., 1:] == array[..., :-1]) & (array[..., 1:] < key_blocks)
        if repeated.any():
            array[..., 1:][repeated] = key_blocks
            array.sort(-1)
        return listed[..., : min(places, key_blocks)].contiguous()
    listed = listed.sort(-1).values
    new = torch.ones_like(listed, dtype=torch.bool)
    new[..., 1:] = listed[..., 1:] != listed[..., :-1]
    # repeats are written to an additional place, which is cut off
    place = torch.where(new, new.cumsum(-1) - 1, places)
    result = torch.full((*listed.shape[:-1], places + 1), key_blocks, dtype=torch.int32, device=indices.device)
    return result.scatter(-1, place, listed)[..., : min(places, key_blocks)].contiguous()


# from this density on a number is drawn for every block of the table: at most eight numbers per set block
_DENSE = 1 / 8


def draw(lead: tuple[int, ...], side: int, total: int, *, seed: int, diagonal: bool) -> BlockSet:
    """Draw ``total`` random blocks of ``side`` x ``side``; the numbers of blocks in the rows differ by at most one.

    All choices of the same number of blocks in a row are equally likely. The result is lists if the blocks are few,
    else a mask.

    Args:
        lead: Leading sides: (), (heads,) or (batch, heads). Each table is drawn separately; a row has the same number
            of blocks in all of them.
        side: Blocks in a row and in a column.
        total: Number of set blocks; with ``diagonal`` at least ``side``.
        seed: Seed of the generator.
        diagonal: Whether the diagonal is set.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    if total >= _DENSE * side * side:
        return MaskBlocks(_masked(lead, side, total, generator, diagonal), side)
    return ListedBlocks(_listed(lead, side, total, generator, diagonal), side)


def _longer(side: int, total: int, generator: torch.Generator) -> Tensor:
    """Draw the rows that get one block more than others."""
    return torch.randperm(side, generator=generator, device="cpu")[: total % side]


def _masked(lead: tuple[int, ...], side: int, total: int, generator: torch.Generator, diagonal: bool) -> Tensor:
    # the blocks with the highest random numbers of each row are set
    mask = torch.zeros(*lead, side, side, dtype=torch.bool, device="cpu")
    flat, least = mask.view(-1, side), total // side
    following = torch.empty(len(flat), dtype=torch.int64, device="cpu")
    # the order of a row's numbers, as int64
    for rows in chunks(len(flat), 8 * side):
        part = flat[rows]
        score = torch.rand(part.shape, generator=generator, device="cpu")
        if diagonal:
            score.scatter_(1, torch.arange(rows.start, rows.stop, device="cpu")[:, None] % side, 2.0)
        order = score.argsort(-1, descending=True)
        part.scatter_(1, order[:, :least], True)
        following[rows] = order[:, least % side]
    longer = _longer(side, total, generator) + torch.arange(math.prod(lead), device="cpu")[:, None] * side
    flat[longer, following[longer]] = True
    return mask


def _listed(lead: tuple[int, ...], side: int, total: int, generator: torch.Generator, diagonal: bool) -> Tensor:
    # numbers that occur twice in a row are drawn again until all are distinct
    counts = np.full(side, total // side - diagonal)
    counts[_longer(side, total, generator).numpy()] += 1
    row = np.arange(math.prod(lead) * side) % side
    shape = len(row), max(int(counts.max()), 1 - diagonal)
    others = side - diagonal
    listed = torch.randint(others, shape, generator=generator, dtype=torch.int32, device="cpu").numpy()
    listed[np.arange(shape[1]) >= counts[row, None]] = side
    left = np.arange(len(row))
    while len(left):
        part = np.sort(listed[left], axis=1)
        twice = (part[:, 1:] == part[:, :-1]) & (part[:, 1:] < side)
        part[:, 1:][twice] = torch.randint(
            others, (int(twice.sum()),), generator=generator, dtype=torch.int32, device="cpu"
        ).numpy()
        listed[left] = part
        left = left[twice.any(1)]
    if diagonal:
        # the numbers were drawn without the diagonal block: shift those at or after it, and add it
        listed += (listed >= row[:, None]) & (listed < side)
        listed = np.sort(np.concatenate([listed, row[:, None].astype(np.int32)], 1), axis=1)
    return torch.from_numpy(listed).view(*lead, side, -1)
