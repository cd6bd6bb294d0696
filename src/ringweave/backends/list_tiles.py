"""Lists of keys that a model chose, gathered into batches for ``tile_attention.py``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..call import Operands
from ..plan import Branch
from .chosen_keys import ChosenKeys
from .tile_batches import Batch, Tiles, budget


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
        self.chosen = ChosenKeys(branch, self.batch, self.heads, self.kv_heads, self.device)

    def batches(self) -> Iterator[ListBatch]:
        lists, most = self.chosen.split[0], self.chosen.table.shape[4] * self.chosen.size
        token = (self.k_tiles.shape[1] + self.v_tiles.shape[1]) * 4 + self.pair * self.chosen.split[1]
        row = self.batch * self.kv_heads * lists * most * token
        step = max(1, budget(self.device) // row)
        head = torch.arange(self.batch * self.kv_heads, device=self.device) * self.nk
        for first in range(0, self.nq, step):
            rows = slice(first, min(first + step, self.nq))
            keys, allowed = self.chosen.at(rows, self.nk)
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
