"""Lists of keys that a model chose, gathered into batches for ``tile_attention.py`` and for kernels that take lists."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..call import Call, Operands
from ..chunks import chunks
from ..patterns.within import by_head
from ..plan import Branch
from ..plan.block_plan import Extent
from ..plan.from_lists import filters, listed_keys
from ..plan.subplan import CutBranch
from .tile_batches import Batch, Tiles


class ChosenKeys:
    """The keys that a branch's lists name for its queries.

    Attributes:
        table: Blocks of keys, (B or 1, Hkv or 1, L, Nq or 1, n); L is the number of lists of a key head.
        most: The most keys of a list.
        split: Lists of a key head, and query heads of a list.
    """

    def __init__(self, branch: Branch, kv_heads: int, device: torch.device):
        lists = branch.lists
        assert lists is not None
        table = lists.blocks.to(device).listed()
        table = table.view((1,) * (4 - table.ndim) + table.shape)
        group = branch.head_count // kv_heads
        if table.shape[1] > 1:
            of_head = table.repeat_interleave(branch.head_count // table.shape[1], 1)
            by_key_head = of_head.unflatten(1, (kv_heads, group))
            table = by_key_head[:, :, :1] if lists.serve(group) else by_key_head
        else:
            table = table[:, :, None]
        self.table, self.most = table, table.shape[4] * lists.block
        self.split = table.shape[2], group // table.shape[2]
        self._first, self._block, self._nk = branch.q_offset, lists.block, branch.nk
        # the relation is the same for all heads
        found, number = filters(lists, Extent(branch.nq, branch.nk, 1, branch.batch, branch.tile, branch.q_offset))
        self._filters = found if len(found) == 1 else [found[n] for n in number[:, 0]]

    def at(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Return the listed keys of some queries, (B or 1, Hkv or 1, L, R, n) int64, and whether each is attended."""
        at = torch.arange(rows.start, rows.stop, device=self.table.device) + self._first
        # a single row belongs to the only query, at any position
        blocks = self.table if self.table.shape[3] == 1 else self.table.index_select(3, at)
        if len(self._filters) == 1:
            return listed_keys(blocks, self._block, at, self._nk, self._filters[0])
        every = zip(blocks.expand(len(self._filters), *blocks.shape[1:]), self._filters, strict=True)
        found = [listed_keys(lists, self._block, at, self._nk, relation) for lists, relation in every]
        keys, allowed = map(torch.stack, zip(*found, strict=True))
        return keys, allowed


def unsupported_reason(call: Call, branch: Branch) -> str | None:
    """Return a reason unless a branch is lists of keys, filtered by a relation that is the same for all heads."""
    if branch.lists is None:
        return "it computes lists of keys, Selected alone or with & and a relation"
    if by_head(branch.lists.relation):
        return "the relation that filters the lists differs between heads"
    if isinstance(branch, CutBranch):
        return "lists name queries and keys of the whole call, and a rank computes a part of it"
    return None


@dataclass(eq=False, repr=False)
class ListBatch(Batch):
    """The listed keys of some queries.

    A tile of queries is the query heads that share a list, and a tile of keys is one key.

    Attributes:
        rows: The queries.
        allowed: Whether the query attends each key, (R, n).
    """

    rows: slice
    allowed: Tensor


class ListTiles(Tiles[ListBatch]):
    """The lists of a call, with L lists of a key head and G query heads of a list.

    Tensors of queries are views (B, Hkv, L, G, Nq, C).

    Args:
        operands: The operands.
        branch: The branch with the lists.
        pair: Bytes of a pair of a query and a key, besides the gathered keys and values.
    """

    shared = True

    def __init__(self, operands: Operands, branch: Branch, pair: int = 0):
        super().__init__(operands)
        self.pair = pair
        self.k_tiles, self.v_tiles = (x.flatten(0, 2) for x in operands[1:3])
        self.chosen = ChosenKeys(branch, self.kv_heads, self.device)

    def batches(self) -> Iterator[ListBatch]:
        lists, most = self.chosen.split[0], self.chosen.most
        token = (self.k_tiles.shape[1] + self.v_tiles.shape[1]) * 4 + self.pair * self.chosen.split[1]
        row = self.batch * self.kv_heads * lists * most * token
        head = torch.arange(self.batch * self.kv_heads, device=self.device) * self.nk
        for rows in chunks(self.nq, row, self.device):
            keys, allowed = self.chosen.at(rows)
            keys = head.view(self.batch, self.kv_heads, 1, 1, 1) + keys
            shape = self.batch, self.kv_heads, lists, *keys.shape[3:]
            yield ListBatch(keys.expand(shape).flatten(0, 3), rows, allowed.expand(shape).flatten(0, 3))

    def by_query(self, x: Tensor, padding: float = 0.0) -> Tensor:
        by_list: Tensor = x.unflatten(1, (self.kv_heads, *self.chosen.split))
        return by_list

    def blank(self, channels: int, value: float, dtype: torch.dtype) -> Tensor:
        shape = self.batch, self.heads, self.nq, channels
        return self.by_query(torch.full(shape, value, dtype=dtype, device=self.device))

    def whole(self, x: Tensor) -> Tensor:
        return x.flatten(1, 3)

    def taken(self, x: Tensor, batch: ListBatch) -> Tensor:
        return x[..., batch.rows, :].movedim(3, 4).to(self.acc).flatten(0, 3)

    def put(self, x: Tensor, batch: ListBatch, part: Tensor, add: bool = False) -> None:
        # each query is in one chunk
        into = x[..., batch.rows, :].movedim(3, 4)
        into.copy_(part.view(into.shape))

    def gathered(self, tiles: Tensor, batch: ListBatch, only_attended: bool) -> Tensor:
        found = tiles.index_select(0, batch.key.reshape(-1)).to(self.acc).view(*batch.key.shape, -1)
        return self.without_dead(found, batch) if only_attended else found

    def without_dead(self, x: Tensor, batch: ListBatch) -> Tensor:
        return x.masked_fill_(~batch.allowed[..., None], 0.0)

    def masked(self, x: Tensor, batch: ListBatch, value: float) -> Tensor:
        return x.masked_fill_(~batch.allowed[:, None], value)

    def indices(self, batch: ListBatch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        sides = self.batch, self.heads, batch.rows.stop - batch.rows.start
        b, head, row = torch.meshgrid(*[torch.arange(side, device=self.device) for side in sides], indexing="ij")
        of_batch, heads, rows = (
            self.by_query(x[..., None]).movedim(3, 4).flatten(0, 3) for x in (b, head, row + batch.rows.start)
        )
        return of_batch, heads, rows, (batch.key % self.nk)[:, None]
