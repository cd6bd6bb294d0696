"""Few large batched matrix products over gathered tiles: runs anywhere that PyTorch runs, with no compiler.

Query tiles with equally many key tiles are batched: their keys and values are gathered side by side, and scores,
softmax and outputs are one batched product each. Batches are cut to a budget of score bytes, so that the scores stay in
cache (CPU) or in bounded memory (GPU); a query tile with more key tiles than that is computed in pieces and merged.
Products are in float32 (float64 for float64 inputs) whatever the storage type.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..merge import merge_into
from ..plan import BlockPlan, Branch, unpack_masks
from ..types import acc_dtype
from .backend import Backend, Case, Inputs, Upstream
from .overflow import may_overflow, spoil

# Bytes of scores computed at a time. Measured: on a CPU the batch should stay in the second-level cache and yet be
# large enough to amortise some ten operator calls.
_BUDGET = {"cpu": 2**23}
_BUDGET_ELSEWHERE = 2**28
_BANK_BYTES = 2**26


@dataclass
class _Batch:
    """Some query tiles (lines) with equally many key tiles each, or a piece of them."""

    line: Tensor  # (R,) index into query tiles of all batches and heads
    key: Tensor  # (R, n) index into key tiles of all batches and key heads
    where: tuple[Tensor, Tensor]  # the partial tiles: (P,) rows and (P,) places of `key`
    mask: Tensor  # (P, q_tile, kv_tile) bool


class _Layout:
    """Tensors as tiles, and a plan's rows as batches over them."""

    def __init__(self, inputs: Inputs, plan: BlockPlan):
        q, k, v = inputs[:3]
        self.plan = plan
        self.batch, self.heads, self.nq, _ = q.shape
        self.kv_heads, self.nk = k.shape[1], k.shape[2]
        self.acc = acc_dtype(q.dtype)
        self.q_tiles, self.k_tiles, self.v_tiles = self.queries(q), self.keys(k), self.keys(v)
        sides = (plan.q_tile, plan.kv_tile)
        self.limit = max(1, _BUDGET.get(q.device.type, _BUDGET_ELSEWHERE) // (sides[0] * sides[1] * 4))
        tail = torch.arange(plan.kv_tile, device=q.device) < self.nk - (plan.kv_tiles - 1) * plan.kv_tile
        self.tail = tail.expand(1, *sides)
        self.ragged = self.nk % plan.kv_tile != 0
        fits = plan.masks.shape[0] * sides[0] * sides[1] <= _BANK_BYTES
        self.bank = torch.cat([unpack_masks(plan.masks, plan.kv_tile), self.tail]) if fits else None

    def queries(self, x: Tensor) -> Tensor:
        """(B, Hq, Nq, C) to (B * Hq * query tiles, q_tile, C), padded with zeros."""
        return _tiled(x, self.plan.q_tile, self.plan.q_tiles)

    def keys(self, x: Tensor) -> Tensor:
        """(B, Hkv, Nk, C) to (B * Hkv * key tiles, kv_tile, C), padded with zeros."""
        return _tiled(x, self.plan.kv_tile, self.plan.kv_tiles)

    def _mask(self, code: Tensor) -> Tensor:
        if self.bank is not None:
            return self.bank[code]
        masks = unpack_masks(self.plan.masks[code.clamp(max=self.plan.masks.shape[0] - 1)], self.plan.kv_tile)
        return torch.where((code == self.plan.masks.shape[0])[:, None, None], self.tail, masks)

    def batches(self) -> Iterator[_Batch]:
        """All tiles, each once; the pieces of one query tile come in ascending order of keys."""
        plan = self.plan
        device = plan.device
        line = torch.arange(self.batch * self.heads * plan.q_tiles, device=device)
        pair, tile = line // plan.q_tiles, line % plan.q_tiles
        plan_row = plan.group.reshape(-1).long()[pair] * plan.q_tiles + tile
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

    def _batch(self, line: Tensor, entry: Tensor, base: Tensor) -> _Batch:
        col, code = self.plan.col[entry].long(), self.plan.bits[entry].long()
        if self.ragged:
            last = (col == self.plan.kv_tiles - 1) & (code < 0)
            code = torch.where(last, self.plan.masks.shape[0], code)
        rows, places = (code >= 0).nonzero(as_tuple=True)
        return _Batch(line, base + col, (rows, places), self._mask(code[rows, places]))

    def gathered(self, tiles: Tensor, batch: _Batch, only_attended: bool) -> Tensor:
        """Key or value tiles side by side, (R, n * kv_tile, C); columns that no query of a tile may attend as zero."""
        found = tiles[batch.key].to(self.acc)
        if only_attended and batch.mask.shape[0]:
            dead = ~batch.mask.any(1)
            some = dead.any(1).nonzero()[:, 0]
            if some.numel():
                rows, places = batch.where[0][some], batch.where[1][some]
                found[rows, places] = found[rows, places].masked_fill(dead[some, :, None], 0.0)
        return found.flatten(1, 2)

    def scores(self, queries: Tensor, keys: Tensor, batch: _Batch) -> Tensor:
        """(R, q_tile, n * kv_tile), -inf where not allowed; selected, so a NaN in a masked key goes nowhere."""
        return self.masked(torch.bmm(queries, keys.mT), batch, -torch.inf)

    def masked(self, x: Tensor, batch: _Batch, value: float) -> Tensor:
        """(R, q_tile, n * kv_tile) with a value where nothing is allowed, in place."""
        if batch.mask.shape[0]:
            by_tile = x.unflatten(2, (-1, self.plan.kv_tile)).transpose(1, 2)
            by_tile[batch.where] = by_tile[batch.where].masked_fill(~batch.mask, value)
        return x


def forward(inputs: Inputs, branch: Branch, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Attention over a plan, batch by batch of equally long rows."""
    q, _, v, scale = inputs[:4]
    plan = branch.plan(q.device)
    layout = _Layout(inputs, plan)
    out = q.new_zeros(layout.q_tiles.shape[0], plan.q_tile, v.shape[3], dtype=layout.acc)
    lse = q.new_full(out.shape[:2], -torch.inf, dtype=layout.acc)
    pieced = int(plan.row_ptr.diff(dim=1).max()) > layout.limit
    for batch in layout.batches():
        queries = layout.q_tiles[batch.line].to(layout.acc).mul_(scale)
        scores = layout.scores(queries, layout.gathered(layout.k_tiles, batch, False), batch)
        top = scores.amax(-1, keepdim=True)
        top.masked_fill_(torch.isneginf(top), 0.0)
        weights = scores.sub_(top).exp_()
        total = weights.sum(-1, keepdim=True)
        part = torch.bmm(weights, layout.gathered(layout.v_tiles, batch, True))
        part.div_(total.masked_fill(total == 0, 1.0))
        part_lse = torch.where(torch.isposinf(top), top, top + total.log())[..., 0]
        if pieced:
            whole_out, whole_lse = out[batch.line], lse[batch.line]
            merge_into(whole_out, whole_lse, part, part_lse)
            part, part_lse = whole_out, whole_lse
        out[batch.line] = part
        lse[batch.line] = part_lse
    shape = (layout.batch, layout.heads, -1)
    out = out.view(*shape, v.shape[3])[:, :, : layout.nq].to(dtype).contiguous()
    lse = lse.view(shape)[:, :, : layout.nq].contiguous()
    if may_overflow(inputs):
        spoil(out, lse, inputs, branch)
    return out, lse


def backward(upstream: Upstream, inputs: Inputs, branch: Branch, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients over a plan: scores are recomputed, dK and dV are added per key tile."""
    dout, lse, delta, _ = upstream
    dead = torch.isneginf(lse)
    if bool(dead.any()):
        # what attends nothing gives nothing, whatever it holds
        q, dout = (x.masked_fill(dead[..., None], 0.0) for x in (inputs.q, dout))
        inputs, lse = inputs._replace(q=q), lse.masked_fill(dead, 0.0)
    device, scale = inputs.q.device, inputs.scale
    layout = _Layout(inputs, branch.plan(device))
    # a row of NaN: where it attends nothing, nothing of it
    broken = bool(lse.isnan().any())
    out_slopes = layout.queries(dout)
    row_lse, row_delta = (layout.queries(x[..., None].to(layout.acc)) for x in (lse, delta))
    dq = torch.zeros(layout.q_tiles.shape, dtype=layout.acc, device=device)
    dk = torch.zeros(layout.k_tiles.shape, dtype=layout.acc, device=device)
    dv = torch.zeros(layout.v_tiles.shape, dtype=layout.acc, device=device)
    for batch in layout.batches():
        queries = layout.q_tiles[batch.line].to(layout.acc).mul_(scale)
        slopes = out_slopes[batch.line].to(layout.acc)
        keys = layout.gathered(layout.k_tiles, batch, True)
        weights = layout.scores(queries, keys, batch).sub_(row_lse[batch.line]).exp_()
        if broken:
            layout.masked(weights, batch, 0.0)
        where = batch.key.reshape(-1)
        dv.index_add_(0, where, torch.bmm(weights.mT, slopes).view(-1, *dv.shape[1:]))
        score_slopes = torch.bmm(slopes, layout.gathered(layout.v_tiles, batch, True).mT)
        score_slopes.sub_(row_delta[batch.line]).mul_(weights)
        if broken:
            layout.masked(score_slopes, batch, 0.0)
        dq[batch.line] += torch.bmm(score_slopes, keys).mul_(scale)
        dk.index_add_(0, where, torch.bmm(score_slopes.mT, queries).view(-1, *dk.shape[1:]))

    def joined(tiles: Tensor, heads: int, length: int) -> Tensor:
        return tiles.view(layout.batch, heads, -1, tiles.shape[2])[:, :, :length].to(dtype).contiguous()

    return (
        joined(dq, layout.heads, layout.nq),
        joined(dk, layout.kv_heads, layout.nk),
        joined(dv, layout.kv_heads, layout.nk),
    )


def _tiled(x: Tensor, tile: int, tiles: int) -> Tensor:
    missing = tiles * tile - x.shape[2]
    if missing:
        x = torch.nn.functional.pad(x, (0, 0, 0, missing))
    return x.reshape(-1, tile, x.shape[3])


def refusal(case: Case, branch: Branch) -> str | None:
    """The gather backend runs every case."""
    return None


def scratch(case: Case, branch: Branch) -> int:
    """Scores of a batch, the keys and values gathered beside them, and the outputs as tiles."""
    plan = branch.plan()
    size = acc_dtype(case.dtype).itemsize
    tiles = max(1, _BUDGET.get(case.device, _BUDGET_ELSEWHERE) // (plan.q_tile * plan.kv_tile * 4))
    batch = tiles * plan.kv_tile * (plan.q_tile + case.head_dim + case.value_dim) * size
    lines = case.batch * branch.head_count * plan.q_tiles * plan.q_tile
    return batch + lines * (case.value_dim + 1) * size


BACKEND = Backend("gather", forward, backward, refusal, scratch, tiled=True)
