"""Attention over lists of keys that a model chose, in a few PyTorch operations. Runs wherever PyTorch runs.

For a chunk of queries, the listed keys and values are gathered. Memory grows with the number of listed keys of a chunk,
and no index is read back from a device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..call import Call, Operands
from ..plan import Branch
from . import tiles
from .backend import Backend, Upstream, by_formula
from .chosen_keys import ChosenKeys, unsupported_reason
from .overflow import may_overflow, nan_rows_out_of_range, sums_in_range
from .tiles import Batch, Scorer, Tiles, budget


@dataclass(eq=False, repr=False)
class _Chunk(Batch):
    """Some queries: a tile is the query heads that share a list, and each listed key is a tile of keys.

    Attributes:
        rows: The queries.
        allowed: Whether the query attends each key, (R, n).
    """

    rows: slice
    allowed: Tensor


class _Lists(Tiles[_Chunk]):
    """The lists of a call, with L lists of a key head and G query heads of a list.

    Tensors of queries are views (B, Hkv, L, G, Nq, C).
    """

    shared = True

    def __init__(self, operands: Operands, branch: Branch):
        super().__init__(operands)
        self.k_tiles, self.v_tiles = (x.flatten(0, 2) for x in operands[1:3])
        self.chosen = ChosenKeys(branch, self.batch, self.heads, self.kv_heads, self.device)

    def batches(self) -> Iterator[_Chunk]:
        lists, most = self.chosen.split[0], self.chosen.table.shape[4] * self.chosen.size
        row = self.batch * self.kv_heads * lists * most * (self.k_tiles.shape[1] + self.v_tiles.shape[1]) * 4
        step = max(1, budget(self.device) // row)
        head = torch.arange(self.batch * self.kv_heads, device=self.device) * self.nk
        for first in range(0, self.nq, step):
            rows = slice(first, min(first + step, self.nq))
            keys, allowed = self.chosen.at(rows, self.nk)
            keys = head.view(self.batch, self.kv_heads, 1, 1, 1) + keys
            shape = self.batch, self.kv_heads, lists, *keys.shape[3:]
            yield _Chunk(keys.expand(shape).flatten(0, 3), rows, allowed.expand(shape).flatten(0, 3))

    def by_query(self, x: Tensor, padding: float = 0.0) -> Tensor:
        by_list: Tensor = x.unflatten(1, (self.kv_heads, *self.chosen.split))
        return by_list

    def blank(self, channels: int, value: float, dtype: torch.dtype) -> Tensor:
        shape = self.batch, self.heads, self.nq, channels
        return self.by_query(torch.full(shape, value, dtype=dtype, device=self.device))

    def whole(self, x: Tensor) -> Tensor:
        return x.flatten(1, 3)

    def taken(self, x: Tensor, batch: _Chunk) -> Tensor:
        return x[..., batch.rows, :].movedim(3, 4).to(self.acc).flatten(0, 3)

    def put(self, x: Tensor, batch: _Chunk, part: Tensor, add: bool = False) -> None:
        # each query is in one chunk
        into = x[..., batch.rows, :].movedim(3, 4)
        into.copy_(part.view(into.shape))

    def gathered(self, tiles: Tensor, batch: _Chunk, only_attended: bool) -> Tensor:
        found = tiles.index_select(0, batch.key.reshape(-1)).to(self.acc).view(*batch.key.shape, -1)
        return found.masked_fill_(~batch.allowed[..., None], 0.0) if only_attended else found

    def masked(self, x: Tensor, batch: _Chunk, value: float) -> Tensor:
        return x.masked_fill_(~batch.allowed[:, None], value)

    def indices(self, batch: _Chunk) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        sides = self.batch, self.heads, batch.rows.stop - batch.rows.start
        b, head, row = torch.meshgrid(*[torch.arange(side, device=self.device) for side in sides], indexing="ij")
        of_batch, heads, rows = (
            self.by_query(x[..., None]).movedim(3, 4).flatten(0, 3) for x in (b, head, row + batch.rows.start)
        )
        return of_batch, heads, rows, (batch.key % self.nk)[:, None]

    def of_keys(self, weights: Tensor, x: Tensor, batch: _Chunk, attended: Tensor | None) -> Tensor:
        # all queries of a tile attend the same keys
        found = self.product(weights.mT, x)
        return found if attended is None else found.masked_fill_(~batch.allowed[..., None], 0.0)


def forward(operands: Operands, branch: Branch, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Compute (out, lse), a chunk of queries at a time."""
    out, lse, _ = tiles.forward(_Lists(operands, branch), Scorer(operands.terms), dtype)
    if may_overflow(operands, branch):
        nan_rows_out_of_range(out, lse, operands, branch)
    return out, lse


@sums_in_range
def backward(
    upstream: Upstream, operands: Operands, branch: Branch, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute (dq, dk, dv); the weights are computed again, and gradients of keys are added up in float32 or wider."""
    return tiles.backward(_Lists(operands, branch), Scorer(operands.terms), upstream, dtype)


def scratch(call: Call, branch: Branch) -> int:
    """Count a chunk's gathered keys and values, with gradients, and the sums of gradients of keys in float32."""
    sums = 4 * call.batch * call.kv_heads * call.nk * (call.head_dim + call.value_dim) if call.needs_grad else 0
    return 4 * budget(call.device) + sums


BACKEND = Backend("gather", forward, backward, unsupported_reason, scratch, terms=by_formula, dropout=True)
