"""A few large batched matrix products over gathered tiles. Runs wherever PyTorch runs, without a compiler.

Query tiles with the same number of key tiles form a batch: their keys and values are gathered into one tensor, and
scores and outputs are one batched product each. Batches are cut to a budget of score bytes, so that the scores stay in
cache (CPU) or in bounded memory (GPU). A query tile with more key tiles than the budget allows is computed in pieces,
which are merged. Products are computed in float32 (float64 for float64 inputs) whatever the storage type.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..call import Call, Operands
from ..merge import merge_into
from ..plan import BlockPlan, Branch, unpack_masks
from ..precision import STORED
from ..terms import Pairs
from ..types import acc_dtype
from .attended import attended_product, broken, spread
from .backend import Backend, Upstream, by_formula, tiled
from .overflow import may_overflow, nan_rows_out_of_range, sides, sums_in_range

# Bytes of scores in a batch. Measured: on a CPU a batch should fit the second-level cache and still be large enough to
# amortise about ten operator calls.
_BUDGET = {"cpu": 2**23}
_BUDGET_ELSEWHERE = 2**28
_BANK_BYTES = 2**26


@dataclass(eq=False, repr=False)
class Batch:
    """A batch of R query tiles (lines) with n key tiles each, or a piece of such a batch."""

    line: Tensor  # (R,) index into the query tiles of all batch elements and heads
    entry: Tensor  # (R, n) index into the plan's lists
    key: Tensor  # (R, n) index into the key tiles of all batch elements and key heads
    where: tuple[Tensor, Tensor]  # the P partial tiles: (P,) rows and (P,) columns of `key`
    mask: Tensor  # (P, q_tile, kv_tile) bool


@dataclass(eq=False, repr=False)
class _Scored:
    """The scores of a batch, (R, q_tile, n * kv_tile), and the values that gradients of terms and dropout need."""

    scores: Tensor  # -inf where not allowed
    at: Pairs | None = None
    states: list[Tensor] = field(default_factory=list)  # scores before the terms and after each; 0 where not allowed
    kept: Tensor | None = None  # dropout's factor of each weight


class Layout:
    """The operands cut into tiles, and the plan's rows grouped into batches."""

    def __init__(self, operands: Operands, plan: BlockPlan, limit: int | None = None):
        # imported at first use, to keep `import ringweave` fast
        from ..memory.workspace import scratch

        self.space = scratch
        q, k, v = operands[:3]
        self.plan = plan
        self.batch, self.heads, self.nq, _ = q.shape
        self.kv_heads, self.nk, self.pages = k.shape[1], operands.nk, operands.pages
        self.acc, self.scale, self.terms = acc_dtype(q.dtype), operands.scale, operands.terms
        self.elsewhere = q.device.type != "cpu"
        self.q_tiles = self.queries(q)
        self.k_tiles, self.v_tiles = (k, v) if self.pages is not None else (self.keys(k), self.keys(v))
        tile = (plan.q_tile, plan.kv_tile)
        #: Most key tiles of a batch.
        self.limit = limit or max(1, _BUDGET.get(q.device.type, _BUDGET_ELSEWHERE) // (tile[0] * tile[1] * 4))
        tail = torch.arange(plan.kv_tile, device=q.device) < self.nk - (plan.kv_tiles - 1) * plan.kv_tile
        self.tail = tail.expand(1, *tile)
        self.ragged = self.nk % plan.kv_tile != 0
        fits = plan.mask_words.shape[0] * tile[0] * tile[1] <= _BANK_BYTES
        self.bank = torch.cat([unpack_masks(plan.mask_words, plan.kv_tile), self.tail]) if fits else None

    def queries(self, x: Tensor) -> Tensor:
        """Cut (B, Hq, Nq, C) into (B * Hq * query tiles, q_tile, C), padded with zeros."""
        return tiled(x, self.plan.q_tile).flatten(0, 2)

    def keys(self, x: Tensor) -> Tensor:
        """Cut (B, Hkv, Nk, C) into (B * Hkv * key tiles, kv_tile, C), padded with zeros."""
        return tiled(x, self.plan.kv_tile).flatten(0, 2)

    def _mask(self, code: Tensor) -> Tensor:
        if self.bank is not None:
            return self.bank[code]
        masks = unpack_masks(self.plan.mask_words[code.clamp(max=self.plan.mask_words.shape[0] - 1)], self.plan.kv_tile)
        return torch.where((code == self.plan.mask_words.shape[0])[:, None, None], self.tail, masks)

    def batches(self) -> Iterator[Batch]:
        """Yield batches that cover each tile once; pieces of one query tile come in ascending order of keys."""
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

    def _batch(self, line: Tensor, entry: Tensor, base: Tensor) -> Batch:
        col, code = self.plan.col[entry].long(), self.plan.mask_id[entry].long()
        if self.ragged:
            last = (col == self.plan.kv_tiles - 1) & (code < 0)
            code = torch.where(last, self.plan.mask_words.shape[0], code)
        rows, places = (code >= 0).nonzero(as_tuple=True)
        return Batch(line, entry, base + col, (rows, places), self._mask(code[rows, places]))

    def gathered(self, tiles: Tensor, batch: Batch, only_attended: bool) -> Tensor:
        """Gather key or value tiles, (R, n * kv_tile, C).

        With ``only_attended``, tokens that no query of a tile may attend are zero.
        """
        if self.pages is not None:
            gathered = self._of_pages(tiles, batch.key).to(self.acc)
        elif self.elsewhere:
            gathered = tiles[batch.key].to(self.acc)
        else:
            shape = batch.key.numel(), *tiles.shape[1:]
            taken = torch.index_select(tiles, 0, batch.key.view(-1), out=self.space.take(shape, tiles.dtype))
            wide = taken if tiles.dtype == self.acc else self.space.take(shape, self.acc).copy_(taken)
            gathered = wide.unflatten(0, batch.key.shape)
        if only_attended and batch.mask.shape[0]:
            dead = ~batch.mask.any(1)
            some = dead.any(1).nonzero()[:, 0]
            if some.numel():
                rows, places = batch.where[0][some], batch.where[1][some]
                gathered[rows, places] = gathered[rows, places].masked_fill(dead[some, :, None], 0.0)
        return gathered.flatten(1, 2)

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

    def taken(self, batch: Batch) -> Tensor:
        """Return the queries of a batch, (R, q_tile, D)."""
        return self.q_tiles[batch.line].to(self.acc)

    def scored(self, queries: Tensor, keys: Tensor, batch: Batch) -> _Scored:
        """Compute the scores of a batch; -inf is selected where not allowed, so that a NaN in a masked key is lost."""
        before, after = sides(self.scale)
        scores = self.product(queries * before, keys.mT)
        if after != 1:
            scores.mul_(after)
        if self.terms is None:
            return _Scored(self.masked(scores, batch, -torch.inf))
        at = self._pairs(batch)
        states = self.terms.apply(scores, at) if self.terms.terms else []
        scores = states[-1].clone() if states else scores
        for state in states:
            self.masked(state, batch, 0.0)
        dropout = self.terms.dropout
        kept = None if dropout is None else dropout.kept(at).to(self.acc).mul_(dropout.factor)
        return _Scored(self.masked(scores, batch, -torch.inf), at, states, kept)

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        """Multiply batches of matrices, on a CPU into scratch memory, elsewhere into memory of torch's allocator."""
        if self.elsewhere:
            return torch.bmm(a, b)
        return torch.bmm(a, b, out=self.space.take((*a.shape[:2], b.shape[2]), a.dtype))

    def _pairs(self, batch: Batch) -> Pairs:
        assert self.terms is not None
        return self.terms.pairs(*self.indices(batch))

    def indices(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the batch elements and query heads, (R, 1, 1), queries, (R, q_tile, 1), and keys, (R, 1, n * kv_tile).

        Tiles may reach beyond the last query and the last key.
        """
        plan, device = self.plan, self.plan.device
        pair, tile = batch.line // plan.q_tiles, batch.line % plan.q_tiles
        rows = tile[:, None] * plan.q_tile + torch.arange(plan.q_tile, device=device)
        columns = (batch.key % plan.kv_tiles)[..., None] * plan.kv_tile + torch.arange(plan.kv_tile, device=device)
        of_batch, head = (x[:, None, None] for x in (pair // self.heads, pair % self.heads))
        return of_batch, head, rows[:, :, None], columns.flatten(1)[:, None]

    def attended(self, batch: Batch) -> Tensor:
        """Return 1 for pairs that are allowed, else 0; (R, q_tile, n * kv_tile)."""
        shape = len(batch.line), self.plan.q_tile, batch.key.shape[1] * self.plan.kv_tile
        return self.masked(torch.ones(shape, dtype=self.acc, device=self.plan.device), batch, 0.0)

    def masked(self, x: Tensor, batch: Batch, value: float) -> Tensor:
        """Fill (R, q_tile, n * kv_tile) with ``value`` in place where pairs are not allowed."""
        if batch.mask.shape[0]:
            by_tile = x.unflatten(2, (-1, self.plan.kv_tile)).transpose(1, 2)
            by_tile[batch.where] = by_tile[batch.where].masked_fill(~batch.mask, value)
        return x


def forward(operands: Operands, branch: Branch, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Compute (out, lse) over a plan."""
    operands = operands.widened()
    out, lse = _forward(operands, branch, False)
    if spread(out, lse):
        out, lse = _forward(operands, branch, True)
    out = out.to(dtype)
    if may_overflow(operands, branch):
        nan_rows_out_of_range(out, lse, operands, branch)
    return out, lse


def _forward(operands: Operands, branch: Branch, selects: bool) -> tuple[Tensor, Tensor]:
    """Compute (out, lse), one batch of equally long rows at a time; ``selects``: values reach only attending rows."""
    q, _, v = operands[:3]
    plan = branch.plan(q.device)
    layout = Layout(operands, plan)
    out = q.new_zeros(layout.q_tiles.shape[0], plan.q_tile, v.shape[3], dtype=layout.acc)
    lse = q.new_full(out.shape[:2], -torch.inf, dtype=layout.acc)
    pieced = int(plan.row_ptr.diff(dim=1).max()) > layout.limit
    for batch in layout.batches():
        scored = layout.scored(layout.taken(batch), layout.gathered(layout.k_tiles, batch, False), batch)
        scores = scored.scores
        top = scores.amax(-1, keepdim=True)
        top.masked_fill_(torch.isneginf(top), 0.0)
        weights = scores.sub_(top).exp_()
        total = weights.sum(-1, keepdim=True)
        if scored.kept is not None:
            weights.mul_(scored.kept)
        values = layout.gathered(layout.v_tiles, batch, True)
        if selects:
            part = attended_product(weights, layout.attended(batch), values)
            # a row with scores of -inf only attends nothing
            part.masked_fill_(total == 0, 0.0)
        else:
            part = layout.product(weights, values)
        part.div_(total.masked_fill(total == 0, 1.0))
        part_lse = torch.where(torch.isposinf(top), top, top + total.log())[..., 0]
        if pieced:
            whole_out, whole_lse = out[batch.line], lse[batch.line]
            merge_into(whole_out, whole_lse, part, part_lse)
            part, part_lse = whole_out, whole_lse
        out[batch.line] = part
        lse[batch.line] = part_lse
    shape = (layout.batch, layout.heads, -1)
    out = out.view(*shape, v.shape[3])[:, :, : layout.nq].contiguous()
    return out, lse.view(shape)[:, :, : layout.nq].contiguous()


def tile_mass(operands: Operands, lse: Tensor, plan: BlockPlan, first: Tensor, per_row: bool) -> Tensor:
    """Sum the weights in each tile, (T,) or per row (T, q_tile); ``first`` is the index of each head's first tile."""
    layout = Layout(operands, plan)
    # a row that attends nothing has zero weights, whatever it contains
    lse = lse.masked_fill(torch.isneginf(lse), torch.inf)
    missing = layout.q_tiles.shape[0] // (layout.batch * layout.heads) * plan.q_tile - layout.nq
    rows = torch.nn.functional.pad(lse, (0, missing), value=torch.inf).reshape(-1, plan.q_tile)
    values = rows.new_zeros(plan.tiles, plan.q_tile)
    begins = first.reshape(-1) - plan.row_ptr[:, 0].long()[plan.row_set.reshape(-1).long()]
    for batch in layout.batches():
        scores = layout.scored(layout.taken(batch), layout.gathered(layout.k_tiles, batch, False), batch).scores
        weights = scores.sub_(rows[batch.line][..., None]).exp_()
        place = begins[batch.line // plan.q_tiles][:, None] + batch.entry
        values[place] = weights.unflatten(2, (-1, plan.kv_tile)).sum(3).transpose(1, 2)
    return values if per_row else values.sum(1)


@sums_in_range
def backward(
    upstream: Upstream, operands: Operands, branch: Branch, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute gradients over a plan: scores are recomputed, and dK and dV are summed per key tile."""
    dout, lse, delta, _ = upstream
    # a row that attends nothing has zero gradients, whatever it contains
    dead = torch.isneginf(lse)
    if bool(dead.any()):
        q, dout = (x.masked_fill(dead[..., None], 0.0) for x in (operands.q, dout))
        operands, lse = operands._replace(q=q), lse.masked_fill(dead, 0.0)
    # a row that is not finite gives nothing to keys that it does not attend
    selects = broken(delta)
    device, scale = operands.q.device, operands.scale
    layout = Layout(operands, branch.plan(device))
    finite_keys = bool(operands.k.isfinite().all())
    dout_tiles = layout.queries(dout)
    # rows of padding have zero weights, however large a term makes their scores
    lse = torch.nn.functional.pad(lse, (0, -layout.nq % layout.plan.q_tile), value=torch.inf)
    row_lse, row_delta = (layout.queries(x[..., None].to(layout.acc)) for x in (lse, delta))
    dq = torch.zeros(layout.q_tiles.shape, dtype=layout.acc, device=device)
    dk = torch.zeros(layout.k_tiles.shape, dtype=layout.acc, device=device)
    dv = torch.zeros(layout.v_tiles.shape, dtype=layout.acc, device=device)

    def of_keys(weights: Tensor, x: Tensor, batch: Batch) -> Tensor:
        if selects:
            return attended_product(weights.mT, layout.attended(batch).mT, x)
        return layout.product(weights.mT, x)

    for batch in layout.batches():
        queries = layout.taken(batch)
        row_dout = dout_tiles[batch.line].to(layout.acc)
        keys = layout.gathered(layout.k_tiles, batch, True)
        scored = layout.scored(queries, keys, batch)
        weights = scored.scores.sub_(row_lse[batch.line]).exp_()
        if selects:
            layout.masked(weights, batch, 0.0)
        where = batch.key.reshape(-1)
        kept = weights if scored.kept is None else weights * scored.kept
        dv.index_add_(0, where, of_keys(kept, row_dout, batch).view(-1, *dv.shape[1:]))
        score_grads = layout.product(row_dout, layout.gathered(layout.v_tiles, batch, True).mT)
        if scored.kept is not None:
            score_grads.mul_(scored.kept)
        score_grads.sub_(row_delta[batch.line]).mul_(weights)
        if selects:
            layout.masked(score_grads, batch, 0.0)
        if layout.terms is not None:
            assert scored.at is not None
            score_grads = layout.terms.gradient(scored.states, score_grads, scored.at)
        if not finite_keys:
            # A row that attends an infinite or NaN key has gradients of NaN, or of 0 at a score of -inf, already.
            # The key must not make the gradients of other rows NaN.
            keys = keys.nan_to_num(0.0, 0.0, 0.0)
        dq[batch.line] += layout.product(score_grads, keys).mul_(scale)
        dk.index_add_(0, where, of_keys(score_grads, queries, batch).view(-1, *dk.shape[1:]))

    def joined(tiles: Tensor, heads: int, length: int) -> Tensor:
        return tiles.view(layout.batch, heads, -1, tiles.shape[2])[:, :, :length].to(dtype).contiguous()

    dk.mul_(scale)
    return (
        joined(dq, layout.heads, layout.nq),
        joined(dk, layout.kv_heads, layout.nk),
        joined(dv, layout.kv_heads, layout.nk),
    )


def unsupported_reason(call: Call, branch: Branch) -> str | None:
    """Return None: this backend runs every call."""
    return None


def scratch(call: Call, branch: Branch) -> int:
    """Count a batch's scores and gathered keys and values, and the tiled outputs."""
    plan = branch.plan()
    size = acc_dtype(call.dtype).itemsize
    tiles = max(1, _BUDGET.get(call.device, _BUDGET_ELSEWHERE) // (plan.q_tile * plan.kv_tile * 4))
    batch = tiles * plan.kv_tile * (plan.q_tile + call.head_dim + call.value_dim) * size
    lines = call.batch * branch.head_count * plan.q_tiles * plan.q_tile
    return batch + lines * (call.value_dim + 1) * size


BACKEND = Backend(
    "dense_batched", forward, backward, unsupported_reason, scratch, tiled=True, terms=by_formula, dropout=True,
    paged=True, kv_dtypes=tuple(STORED),
)  # fmt: skip
