"""A table of blocks, in which content-based and other dynamic patterns are expressed."""

from __future__ import annotations

from typing import Self

import numpy as np
import torch
from torch import Tensor

from ..axes import Axes
from ..checks import block_sides, one_of, whole
from ..errors import PatternError
from ..relation.node import FAR, Node
from ..relation.transforms import by_place
from ..relation.zones import Zones
from ..torch_compat import outside_transforms, require
from .base import Pattern
from .block_sets import BlockSet, ListedBlocks, MaskBlocks, ascending
from .declared import declare
from .fitting import made_again, made_by

_MASK = Axes("mask: bool[B? H? q k]")
_INDICES = Axes("indices: whole[B? H? q n]; counts: whole[B? H? q]")
_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@declare(
    "BlockTable(torch.eye(8).bool() | (torch.arange(8) == 2), block_size=128)",
    "By table, function or head",
    text=False,
    hostile="BlockTable(torch.eye(n // 64).bool(), block_size=64)",
)
class BlockTable(Pattern):
    """A query attends the key blocks that a table sets for its query block; per batch and per head if the table is.

    A table with a single row of blocks is for a decode step, with at most one block of queries at any position. The
    table is copied, so a pattern never changes: a new table is a new pattern, and a stale plan is never used. A table
    made of indices stores them in ascending order, four bytes each, and its plan takes time and memory that grow with
    their number: for 8,192 x 8,192 blocks (a million tokens), 82 blocks in each row take 2.7 MB, and a mask takes 67
    MB. Two patterns with the same blocks are equal if both were made of a mask, or both of the same number of indices.

    Args:
        mask: Bool, (blocks of queries, blocks of keys), (Hq, ., .) or (B, Hq, ., .), where 1 broadcasts over heads or
            batch elements; or None with ``indices``.
        block_size: Tokens in a block's side, or (query side, key side).
        indices: Integer tensor (..., blocks of queries, n), leading sides as in ``mask``: key blocks of each query
            block, in any order, with or without repeats; requires ``counts``.
        counts: Integer tensor (..., blocks of queries): how many of the first ``indices`` of each row are used.
        key_blocks: Number of key blocks, required with ``indices``.
        heads: ``"query"`` for a table per query head, or ``"kv"`` for a table per key head, which all query heads of
            the key head share.
    Attributes:
        blocks: The set blocks.
    Raises:
        PatternError: The mask is not bool or has another rank, or an index is out of range; at use, the length is
            another one. On a GPU indices are not read back: one out of range stops the device with an assertion.
    Example:
        >>> table = rw.BlockTable(torch.tensor([[True, False], [True, True]]), block_size=2)
        >>> table.to_dense(4)[0, 0].int()
        tensor([[1, 1, 0, 0],
                [1, 1, 0, 0],
                [1, 1, 1, 1],
                [1, 1, 1, 1]], dtype=torch.int32)
    """

    def __init__(
        self,
        mask: Tensor | None = None,
        block_size: int | tuple[int, int] = 128,
        *,
        indices: Tensor | None = None,
        counts: Tensor | None = None,
        key_blocks: int | None = None,
        heads: str = "query",
    ):
        if (mask is None) == (indices is None):
            raise PatternError("mask, indices", "neither or both", "exactly one", "Pass mask= or indices=.")
        if mask is not None and (counts is not None or key_blocks is not None):
            raise PatternError("counts, key_blocks", "a mask beside them", "indices", "Leave them out.")
        self.block_size = block_sides(block_size)
        self.blocks: BlockSet = _of_indices(indices, counts, key_blocks) if mask is None else _of_mask(mask)
        # query heads for each head of the table; None until the number of heads of the call is known
        several = one_of("heads", heads, ("query", "kv")) == "kv" and (1, *self.blocks.shape)[-3] > 1
        self.group = None if several else 1
        self.__post_init__()

    @classmethod
    def of(cls, blocks: BlockSet, block_size: tuple[int, int], group: int | None = 1) -> Self:
        """Build the pattern around blocks without copying them (a slice of another pattern's, or an op's argument)."""
        pattern = cls.__new__(cls)
        pattern.block_size, pattern.blocks, pattern.group = block_size, blocks, group
        pattern.__post_init__()
        return pattern

    @classmethod
    def own(
        cls, table: Tensor, block_size: int | tuple[int, int], key_blocks: int | None = None, group: int | None = 1
    ) -> BlockTable:
        """Build the pattern that a text describes, around a table that is not copied."""
        sides = (block_size, block_size) if isinstance(block_size, int) else block_size
        blocks = MaskBlocks(table, table.shape[-1]) if key_blocks is None else ListedBlocks(table, key_blocks)
        return cls.of(blocks, sides, group or None)

    def _text(self) -> str:
        side = self.block_size
        listed = f", key_blocks={self.blocks.key_blocks}" if isinstance(self.blocks, ListedBlocks) else ""
        group = "" if self.group == 1 else f", group={self.group or 0}"
        return f"BlockTable(_, {side[0] if side[0] == side[1] else side}{listed}{group})"

    @property
    def tables(self) -> tuple[Tensor, ...]:
        return (self.blocks.table,)

    @property
    def mask(self) -> Tensor:
        """The table as a new bool tensor (..., blocks of queries, blocks of keys)."""
        return self.blocks.mask()

    def __repr__(self) -> str:
        shape = "x".join(str(n) for n in self.blocks.shape)
        side = self.block_size
        most = f", at most {self.blocks.most} a row" if isinstance(self.blocks, ListedBlocks) else ""
        return f"BlockTable(<{shape} blocks{most}>, {side[0] if side[0] == side[1] else side})"

    def extents(self) -> tuple[int | None, int | None]:
        # an axis of length 1 broadcasts
        batch, heads = (1, 1, *self.blocks.shape)[-4:-2]
        return (batch if batch > 1 else None), (heads * (self.group or 1) if heads > 1 else None)

    def bound(self, heads: int | None, kv_heads: int | None = None, rank: int = 0, ranks: int = 1) -> Pattern:
        if ranks > 1:
            return self._share(rank, ranks)
        if self.group is not None or heads is None:
            return self
        made = self.blocks.shape[-3]
        if heads % made or made != (kv_heads or made):
            of_keys = "" if kv_heads is None else f" over {kv_heads} key heads"
            wanted = "a table for each key head, and query heads that are a multiple of them"
            got = f"tables of {made} key heads for {heads} query heads{of_keys}"
            raise PatternError(type(self).__name__, got, wanted, "Make it for the call.")
        return type(self).of(self.blocks, self.block_size, heads // made)

    def select(self, b: int, h: int) -> Pattern:
        if self.group is None:
            raise PatternError(type(self).__name__, "tables per key head", "a call's heads", "Call bound(heads) first.")
        one = self.blocks.one(b, h // self.group)
        return self if one is self.blocks else type(self).of(one, self.block_size)

    def _share(self, rank: int, ranks: int) -> Pattern:
        if self.extents()[1] is None:
            return self
        count, rest = divmod(self.blocks.shape[-3], ranks)
        if rest:
            wanted = f"a multiple of {ranks}, so that each rank has whole tables"
            raise PatternError(type(self).__name__, f"tables of {self.blocks.shape[-3]} heads", wanted, "Repeat them.")
        some = self.blocks.some(slice(rank * count, (rank + 1) * count))
        # a single table is for all heads of the rank
        return type(self).of(some, self.block_size, self.group if count > 1 else 1)

    def check(self, nq: int, nk: int, q_offset: int) -> None:
        wanted = (-(-(q_offset + nq) // self.block_size[0]), -(-nk // self.block_size[1]))
        step = nq <= self.block_size[0] and self.blocks.shape[-2:] == (1, wanted[1])
        if self.blocks.shape[-2:] != wanted and not step:
            remedy = "Build the table for these lengths, ceil(tokens / block_size) a side."
            if nq != nk and all(side >= reached for side, reached in zip(self.blocks.shape[-2:], wanted, strict=True)):
                # a table of the whole sequence, for a chunk of its queries or keys
                cut = f"mask[..., :{wanted[0]}, :{wanted[1]}]"
                remedy = f"Pass the blocks that the call reaches, counted from position 0: {cut}."
            raise PatternError(
                "BlockTable",
                f"a table of {self.blocks.shape[-2:]} blocks of {self.block_size}{made_by(self)}",
                f"{wanted} blocks for queries up to position {q_offset + nq} and {nk} keys",
                made_again(self, nk) or remedy,
            )

    @property
    def tile_size(self) -> int | None:
        return self.block_size[0] if self.block_size[0] == self.block_size[1] else None

    def zones(self, n: int | None) -> Node:
        with outside_transforms(self.blocks.table):
            number, block = [side.cpu().numpy() for side in self.blocks.lines()]
        row = np.repeat(np.arange(len(number)), number)
        new = np.flatnonzero((np.diff(row, prepend=-1) != 0) | (np.diff(block, prepend=-2) != 1))
        last = np.append(new, len(row))[1:] - 1
        used, counts = np.unique(row[new], return_counts=True)
        high, wide = self.block_size
        q = (used * high, (used + 1) * high)
        if self.blocks.shape[-2] == 1:
            # a single row is that of all queries
            q = np.full(len(used), -FAR), np.full(len(used), FAR)
        k = block[new].astype(np.int64) * wide, (block[last].astype(np.int64) + 1) * wide
        zones = Zones(q, k, ptr=np.append(0, np.cumsum(counts)))
        return by_place(zones) if self.by_place else zones


def _of_mask(mask: Tensor) -> BlockSet:
    _MASK.fit(mask=mask, error=PatternError, remedy="Pass a bool tensor: convert it with .bool().")
    return MaskBlocks(mask.detach().clone(memory_format=torch.contiguous_format), mask.shape[-1])


def _of_indices(indices: Tensor | None, counts: Tensor | None, key_blocks: int | None) -> BlockSet:
    remedy = "List the key blocks of each query block, with the number of them as counts."
    _INDICES.fit(indices=indices, counts=counts, whole=_WHOLE, empty=("n",), error=PatternError, remedy=remedy)
    assert indices is not None
    assert counts is not None
    key_blocks, device = whole("key_blocks", key_blocks, 1), indices.device
    # a narrower type may not be able to hold the number of blocks
    indices = indices if indices.dtype == torch.int64 else indices.int()
    listed = torch.arange(indices.shape[-1], device=device) < counts[..., None]
    wrong = listed & ((indices < 0) | (indices >= key_blocks))
    uncounted = (counts < 0) | (counts > indices.shape[-1])
    if device.type != "cpu":
        require(~wrong.any(), f"indices: one that counts is not in 0..{key_blocks - 1}")
        require(~uncounted.any(), f"counts: one is not in 0..{indices.shape[-1]}")
    elif uncounted.any():
        got = f"{int(counts.min())}..{int(counts.max())}"
        raise PatternError("counts", got, f"0..{indices.shape[-1]}", "Correct the counts.")
    elif wrong.any():
        used = indices[listed]
        raise PatternError(
            "indices", f"{int(used.min())}..{int(used.max())}", f"0..{key_blocks - 1}", "Correct the indices."
        )
    return ListedBlocks(ascending(indices, counts, key_blocks), key_blocks)
