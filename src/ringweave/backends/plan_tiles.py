"""The tiles of a plan, gathered into batches for ``tile_attention.py``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..call import Operands
from ..chunks import at_once
from ..plan import BlockPlan, unpack_masks
from .backend import tiled
from .tile_batches import Batch, Tiles


@dataclass(eq=False, repr=False)
class PlanBatch(Batch):
    """Query tiles with equally many key tiles, or a piece of such a batch.

    Attributes:
        line: Indices into the query tiles of all batch elements and heads, (R,).
        entry: Indices into the plan's lists, (R, n).
        where: Rows and columns of ``key`` of the P partial tiles, (P,) each.
        mask: Their masks, (P, q_tile, kv_tile) bool.
    """

    line: Tensor
    entry: Tensor
    where: tuple[Tensor, Tensor]
    mask: Tensor


# most bytes of the masks of a plan that are unpacked once
_BANK_BYTES = 2**26
# times that a row may exceed the budget before it is computed in pieces, if a score function has values
_LONG = 4


class PlanTiles(Tiles[PlanBatch]):
    """The tiles of a plan. Query tiles with the same number of key tiles form a batch.

    A query tile with more key tiles than the budget allows is computed in pieces, which are merged.

    Args:
        operands: The operands.
        plan: The plan.
        pair: Bytes of the values that a score function computes for a pair.
        recorded: Whether autograd and transforms of torch.func follow the operations. Rows are then whole: the results
            of all tiles are kept anyway.
    """

    def __init__(self, operands: Operands, plan: BlockPlan, pair: int = 0, recorded: bool = False):
        super().__init__(operands)
        _, k, v = operands[:3]
        self.plan, self.pages = plan, operands.pages
        self.k_tiles, self.v_tiles = (k, v) if self.pages is not None else (self._keys(k), self._keys(v))
        longest = int(plan.row_ptr.diff(dim=1).max())
        self.limit = most_tiles(plan, self.device, pair)
        if recorded:
            self.limit, self.space = max(self.limit, longest), None
        self.pieced = longest > self.limit
        tile = plan.q_tile, plan.kv_tile
        tail = torch.arange(plan.kv_tile, device=self.device) < self.nk - (plan.kv_tiles - 1) * plan.kv_tile
        self.tail = tail.expand(1, *tile)
        self.ragged = self.nk % plan.kv_tile != 0
        fits = plan.mask_words.shape[0] * tile[0] * tile[1] <= _BANK_BYTES
        self.bank = torch.cat([unpack_masks(plan.mask_words, plan.kv_tile), self.tail]) if fits else None

    def by_query(self, x: Tensor, padding: float = 0.0) -> Tensor:
        """Cut (B, Hq, Nq, C) into (B * Hq * query tiles, q_tile, C)."""
        missing = -x.shape[2] % self.plan.q_tile
        if padding and missing:
            x = torch.nn.functional.pad(x, (0, 0, 0, missing), value=padding)
        return tiled(x, self.plan.q_tile).flatten(0, 2)

    def _keys(self, x: Tensor) -> Tensor:
        return tiled(x, self.plan.kv_tile).flatten(0, 2)

    def blank(self, channels: int, value: float, dtype: torch.dtype) -> Tensor:
        shape = self.batch * self.heads * self.plan.q_tiles, self.plan.q_tile, channels
        return torch.full(shape, value, dtype=self.acc, device=self.device)

    def whole(self, x: Tensor) -> Tensor:
        return x.view(self.batch, self.heads, -1, x.shape[2])[:, :, : self.nq].contiguous()

    def taken(self, x: Tensor, batch: PlanBatch) -> Tensor:
        return x[batch.line].to(self.acc)

    def put(self, x: Tensor, batch: PlanBatch, part: Tensor, add: bool = False) -> None:
        if add:
            x[batch.line] += part
        else:
            x[batch.line] = part

    def _mask(self, code: Tensor) -> Tensor:
        if self.bank is not None:
            return self.bank[code]
        masks = unpack_masks(self.plan.mask_words[code.clamp(max=self.plan.mask_words.shape[0] - 1)], self.plan.kv_tile)
        return torch.where((code == self.plan.mask_words.shape[0])[:, None, None], self.tail, masks)

    def batches(self) -> Iterator[PlanBatch]:
        plan = self.plan
        device = plan.device
        line = torch.arange(self.batch * self.heads * plan.q_tiles, device=device)
        pair, tile = line // plan.q_tiles, line % plan.q_tiles
        plan_row = plan.row_set.reshape(-1).long()[pair] * plan.q_tiles + tile
        first = plan.row_ptr[:, :-1].reshape(-1).long()[plan_row]
        count = plan.row_ptr.diff(dim=1).reshape(-1).long()[plan_row]
        kv_head = pair % self.heads // (self.heads // self.kv_heads)
        base = (pair // self.heads * self.kv_heads + kv_head) * plan.kv_tiles
        count, order = count.sort(stable=True)
        sizes, lines = count.unique_consecutive(return_counts=True)
        begin = 0
        for size, number in zip(sizes.tolist(), lines.tolist(), strict=True):
            members = order[begin : begin + number]
            begin += number
            step = max(1, self.limit // max(size, 1))
            for chosen in members.split(step):
                for piece in range(0, size, self.limit):
                    places = torch.arange(piece, min(piece + self.limit, size), device=device)
                    yield self._batch(chosen, first[chosen, None] + places, base[chosen, None])

    def _batch(self, line: Tensor, entry: Tensor, base: Tensor) -> PlanBatch:
        col, code = self.plan.col[entry].long(), self.plan.mask_id[entry].long()
        if self.ragged:
            last = (col == self.plan.kv_tiles - 1) & (code < 0)
            code = torch.where(last, self.plan.mask_words.shape[0], code)
        rows, places = (code >= 0).nonzero(as_tuple=True)
        return PlanBatch(base + col, line, entry, (rows, places), self._mask(code[rows, places]))

    @cached_property
    def _begins(self) -> Tensor:
        plan = self.plan
        return plan.first_tiles().reshape(-1) - plan.row_ptr[:, 0].long()[plan.row_set.reshape(-1).long()]

    def places(self, batch: PlanBatch) -> Tensor:
        """Return the index of each tile of a batch, (R, n), by batch element, head, and the plan's row order."""
        return self._begins[batch.line // self.plan.q_tiles][:, None] + batch.entry

    def gathered(self, tiles: Tensor, batch: PlanBatch, only_attended: bool) -> Tensor:
        if self.pages is not None:
            gathered = self._of_pages(tiles, batch.key).to(self.acc)
        elif self.space is None:
            gathered = tiles[batch.key].to(self.acc)
        else:
            shape = batch.key.numel(), *tiles.shape[1:]
            taken = torch.index_select(tiles, 0, batch.key.view(-1), out=self.space.take(shape, tiles.dtype))
            wide = taken if tiles.dtype == self.acc else self.space.take(shape, self.acc).copy_(taken)
            gathered = wide.unflatten(0, batch.key.shape)
        found = gathered.flatten(1, 2)
        return self.without_dead(found, batch) if only_attended else found

    def without_dead(self, x: Tensor, batch: PlanBatch) -> Tensor:
        if batch.mask.shape[0]:
            dead = ~batch.mask.any(1)
            some = dead.any(1).nonzero()[:, 0]
            if some.numel():
                rows, places = batch.where[0][some], batch.where[1][some]
                by_tile = x.unflatten(1, (-1, self.plan.kv_tile))
                by_tile[rows, places] = by_tile[rows, places].masked_fill(dead[some, :, None], 0.0)
        return x

    def _of_pages(self, x: Tensor, key: Tensor) -> Tensor:
        """Gather tiles (R, n, kv_tile, C) with indices ``key`` from keys or values in pages (pages, Hkv, size, C)."""
        assert self.pages is not None
        table, lengths, size = self.pages
        head, tile = key // self.plan.kv_tiles, key % self.plan.kv_tiles
        of_batch, head = (head // self.kv_heads)[..., None], (head % self.kv_heads)[..., None]
        # There is no page after the last token. The last token is read instead; masks exclude it there.
        token = tile[..., None] * self.plan.kv_tile + torch.arange(self.plan.kv_tile, device=x.device)
        token = torch.minimum(token, lengths.long()[of_batch] - 1).clamp_(min=0)
        return x[table[of_batch, token // size].long(), head, token % size]

    def indices(self, batch: PlanBatch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        plan, device = self.plan, self.plan.device
        pair, tile = batch.line // plan.q_tiles, batch.line % plan.q_tiles
        rows = tile[:, None] * plan.q_tile + torch.arange(plan.q_tile, device=device)
        columns = (batch.key % plan.kv_tiles)[..., None] * plan.kv_tile + torch.arange(plan.kv_tile, device=device)
        of_batch, head = (x[:, None, None] for x in (pair // self.heads, pair % self.heads))
        return of_batch, head, rows[:, :, None], columns.flatten(1)[:, None]

    def masked(self, x: Tensor, batch: PlanBatch, value: float) -> Tensor:
        if batch.mask.shape[0]:
            by_tile = x.unflatten(2, (-1, self.plan.kv_tile)).transpose(1, 2)
            by_tile[batch.where] = by_tile[batch.where].masked_fill(~batch.mask, value)
        return x


def most_tiles(plan: BlockPlan, device: torch.device | str, pair: int = 0) -> int:
    """Return the most key tiles of a batch, by the bytes of its scores.

    With ``pair`` bytes of a score function's values, a row that nearly fits the budget is not cut into pieces.
    """
    most = at_once(plan.q_tile * plan.kv_tile * (pair or 4), device)
    longest = int(plan.row_ptr.diff(dim=1).max()) if pair else 0
    return max(most, longest) if longest <= _LONG * most else most
