"""Attention over lists of keys that a model chose, in a few PyTorch operations. Runs wherever PyTorch runs.

For a chunk of queries, the listed keys and values are gathered and the scores are one batched product. Memory grows
with the number of listed keys of a chunk, and no index is read back from a device. Products are computed in float32
(float64 for float64 inputs) whatever the storage type.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..call import Call, Operands
from ..plan import Branch
from ..types import acc_dtype
from .attended import broken
from .backend import Backend, Upstream
from .chosen_keys import ChosenKeys, unsupported_reason
from .overflow import may_overflow, nan_rows_out_of_range, sides, sums_in_range

# bytes of gathered keys and values in a chunk: fits a CPU's cache, and a bounded part of a GPU's memory
_CHUNK, _CHUNK_ELSEWHERE = 2**23, 2**28


class _Chunk(NamedTuple):
    """The listed keys of some queries.

    Attributes:
        rows: The queries.
        flat: (B, Hkv, L, R, n) int64, places of the listed keys among the keys of all batch elements and key heads; L
            is the number of lists of a key head.
        allowed: (B, Hkv, L, R, n) bool, whether the query attends the key.
    """

    rows: slice
    flat: Tensor
    allowed: Tensor

    def gathered(self, x: Tensor) -> Tensor:
        """Gather keys or values (B, Hkv, Nk, C) as (B, Hkv, L, R, n, C), 0 where the query does not attend the key."""
        taken = x.flatten(0, 2).index_select(0, self.flat.reshape(-1)).view(*self.flat.shape, -1)
        return taken.to(acc_dtype(x.dtype)).masked_fill_(~self.allowed[..., None], 0.0)

    def add_to(self, total: Tensor, x: Tensor) -> None:
        """Add (B, Hkv, L, R, n, C) to the sums (B * Hkv * Nk, C) of the keys."""
        total.index_add_(0, self.flat.reshape(-1), x.flatten(0, -2))


class _Layout:
    """The operands with the query heads of a list together, and the lists of each key head."""

    def __init__(self, operands: Operands, branch: Branch):
        self.scale = operands.scale
        q, self.k, self.v = operands[:3]
        self.batch, heads, self.nq, _ = q.shape
        self.kv_heads, self.nk = self.k.shape[1], self.k.shape[2]
        self.chosen = ChosenKeys(branch, self.batch, heads, self.kv_heads, q.device)
        #: Lists of a key head, and query heads of a list.
        self.split = self.chosen.split

    def by_list(self, x: Tensor, rows: slice) -> Tensor:
        """Return some queries of (B, Hq, Nq, ...) as (B, Hkv, L, Hq / (Hkv L), R, ...)."""
        split: Tensor = x[:, :, rows].unflatten(1, (self.kv_heads, *self.split))
        return split.to(acc_dtype(x.dtype))

    def chunks(self) -> Iterator[_Chunk]:
        """Yield the chunks of the queries."""
        device, most = self.k.device, self.chosen.table.shape[4] * self.chosen.size
        row = self.batch * self.kv_heads * self.split[0] * most * (self.k.shape[3] + self.v.shape[3]) * 4
        step = max(1, (_CHUNK if device.type == "cpu" else _CHUNK_ELSEWHERE) // row)
        base = (
            torch.arange(self.batch * self.kv_heads, device=device).view(self.batch, self.kv_heads, 1, 1, 1) * self.nk
        )
        for first in range(0, self.nq, step):
            rows = slice(first, min(first + step, self.nq))
            keys, allowed = self.chosen.at(rows, self.nk)
            shape = torch.broadcast_shapes(allowed.shape, base.shape)
            yield _Chunk(rows, (base + keys).expand(shape), allowed.expand(shape))

    def scores(self, queries: Tensor, keys: Tensor, chunk: _Chunk) -> Tensor:
        """Compute scores (B, Hkv, L, G, R, n) of queries (..., G, R, D); -inf where not allowed."""
        before, after = sides(self.scale)
        scores = torch.einsum("bhlgrd,bhlrnd->bhlgrn", queries * before, keys).mul_(after)
        return scores.masked_fill_(~chunk.allowed[:, :, :, None], -torch.inf)


def forward(operands: Operands, branch: Branch, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Compute (out, lse), a chunk of queries at a time."""
    q, _, v = operands[:3]
    layout = _Layout(operands, branch)
    out = torch.empty(*q.shape[:3], v.shape[3], dtype=dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=acc_dtype(q.dtype), device=q.device)
    for chunk in layout.chunks():
        scores = layout.scores(layout.by_list(q, chunk.rows), chunk.gathered(layout.k), chunk)
        top = scores.amax(-1, keepdim=True)
        top = top.masked_fill(torch.isneginf(top), 0.0)
        weights = scores.sub_(top).exp_()
        total = weights.sum(-1, keepdim=True)
        part = torch.einsum("bhlgrn,bhlrnd->bhlgrd", weights, chunk.gathered(v))
        part = part.div_(total.masked_fill(total == 0, 1.0))
        out[:, :, chunk.rows] = part.flatten(1, 3).to(dtype)
        lse[:, :, chunk.rows] = torch.where(torch.isposinf(top), top, top + total.log())[..., 0].flatten(1, 3)
    if may_overflow(operands, branch):
        nan_rows_out_of_range(out, lse, operands, branch)
    return out, lse


@sums_in_range
def backward(
    upstream: Upstream, operands: Operands, branch: Branch, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute (dq, dk, dv); the weights are computed again, and gradients of keys are added up in float32 or wider."""
    q, k, v = operands[:3]
    layout, acc = _Layout(operands, branch), acc_dtype(q.dtype)
    dq = torch.empty(q.shape, dtype=dtype, device=q.device)
    dk, dv = (torch.zeros(x.shape[0] * x.shape[1] * x.shape[2], x.shape[3], dtype=acc, device=q.device) for x in (k, v))
    # a gradient of out that is not finite gives nothing to keys that its row does not attend; no GPU is waited for
    selects = q.device.type != "cpu" or broken(upstream.delta)
    for chunk in layout.chunks():
        keys, values = chunk.gathered(k), chunk.gathered(v)
        queries, dout = layout.by_list(q, chunk.rows), layout.by_list(upstream.dout, chunk.rows)
        lse, delta = (layout.by_list(x, chunk.rows)[..., None] for x in (upstream.lse, upstream.delta))
        # a row that attends nothing has no weights, and neither it nor a row of NaN gives anything to other keys
        empty = torch.isneginf(lse)
        queries, dout = (x.masked_fill(empty | lse.isnan(), 0.0) for x in (queries, dout))
        weights = layout.scores(queries, keys, chunk).sub_(lse.masked_fill(empty, 0.0)).exp_()
        slopes = torch.einsum("bhlgrd,bhlrnd->bhlgrn", dout, values).sub_(delta).mul_(weights)
        for each in (weights, slopes):
            each.masked_fill_(~chunk.allowed[:, :, :, None], 0.0)
        # a key that is not finite has made the gradients of its rows NaN or 0 already
        part = torch.einsum("bhlgrn,bhlrnd->bhlgrd", slopes, keys.nan_to_num(0.0, 0.0, 0.0)).mul_(layout.scale)
        dq[:, :, chunk.rows] = part.flatten(1, 3).to(dtype)
        chunk.add_to(dk, torch.einsum("bhlgrn,bhlgrd->bhlrnd", slopes, queries).mul_(layout.scale))
        part = torch.einsum("bhlgrn,bhlgrd->bhlrnd", weights, dout)
        chunk.add_to(dv, part.masked_fill_(~chunk.allowed[..., None], 0.0) if selects else part)
    return dq, dk.view(k.shape).to(dtype), dv.view(v.shape).to(dtype)


def scratch(call: Call, branch: Branch) -> int:
    """Count a chunk's gathered keys and values, with gradients, and the sums of gradients of keys in float32."""
    chunk = _CHUNK if call.device == "cpu" else _CHUNK_ELSEWHERE
    sums = 4 * call.batch * call.kv_heads * call.nk * (call.head_dim + call.value_dim) if call.needs_grad else 0
    return 4 * chunk + sums


BACKEND = Backend("gather", forward, backward, unsupported_reason, scratch)
