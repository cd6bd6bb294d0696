"""PyTorch's sparse matrices with one entry per allowed pair: an experiment to measure their cost, run only by name.

Scores are ``torch.sparse.sampled_addmm`` over a CSR matrix, the softmax runs over each row's entries, and results are
products of that matrix, or of its transpose, with V, K, Q or the gradient of out. No product is computed by tiles, and
each entry needs an index beside its value. Each call lists the entries again, for a few query tiles at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..call import Call, Operands
from ..plan import BlockPlan, Branch, unpack_masks
from ..types import acc_dtype
from .backend import Backend, Upstream
from .overflow import may_overflow, nan_rows_out_of_range, sides, sums_in_range

# Number of (query, key) pairs in the tiles that are listed together; one query tile may exceed it. Not the budget of
# chunks, since gradients of keys are added up strip by strip, and their bits depend on it.
_PAIRS = 2**20
_BYTES = 32  # per entry: index, value and intermediate results


@dataclass(eq=False, repr=False)
class _Strip:
    """The allowed pairs of a few neighbouring query tiles of one head.

    Attributes:
        rows: Queries of these tiles.
        keys: Range from the first to the last attended key.
        first: Index of each query's first entry, (rows + 1,) int32.
        key: Key of each entry, counted from the start of ``keys``, ascending within a row, (entries,) int32.
    """

    rows: slice
    keys: slice
    first: Tensor
    key: Tensor

    def matrix(self, values: Tensor) -> Tensor:
        """Return the sparse matrix of ``values``, (queries, keys)."""
        size = self.first.numel() - 1, self.keys.stop - self.keys.start
        return torch.sparse_csr_tensor(self.first, self.key, values, size, check_invariants=False)

    def transposed(self, values: Tensor) -> Tensor:
        """Return the transposed sparse matrix of ``values``, (keys, queries)."""
        size = self.keys.stop - self.keys.start, self.first.numel() - 1
        return torch.sparse_csc_tensor(self.first, self.key, values, size, check_invariants=False)

    def products(self, a: Tensor, b: Tensor, scale: float) -> Tensor:
        """Compute ``scale`` times the product of a row of a (Nq, C) and of b (Nk, C) for each entry, (entries,)."""
        zero = self.matrix(a.new_zeros(self.key.numel()))
        sampled: Tensor = torch.sparse.sampled_addmm(zero, a[self.rows], b[self.keys].mT, beta=0.0, alpha=scale)
        return sampled.values()

    def spread(self, x: Tensor) -> Tensor:
        """Repeat a row's value for each of its entries: (rows,) to (entries,)."""
        return x.repeat_interleave(self.first.diff(), output_size=self.key.numel())

    def reduced(self, values: Tensor, how: str) -> Tensor:
        """Reduce the entries of each row, (rows,); the maximum of an empty row is -inf."""
        return torch.segment_reduce(values, how, offsets=self.first)


def _strips(plan: BlockPlan) -> Iterator[tuple[_Strip, int, int]]:
    """Yield (strip, batch element, head) for every strip with entries."""
    whole = torch.full((1, *plan.mask_words.shape[1:]), -1, dtype=torch.int32, device=plan.device)
    bank = torch.cat([plan.mask_words, whole])  # a full tile has mask_id -1, which indexes the last mask
    most = max(1, _PAIRS // (plan.q_tile * plan.kv_tile))
    for group, begins in enumerate(plan.row_ptr.tolist()):
        heads = (plan.row_set == group).nonzero().tolist()
        first = 0
        while first < plan.q_tiles:
            last = first + 1
            while last < plan.q_tiles and begins[last + 1] - begins[first] <= most:
                last += 1
            strip = _strip(plan, bank, begins, first, last) if begins[last] > begins[first] else None
            first = last
            if strip is not None:
                yield from ((strip, *pair) for pair in heads)


def _strip(plan: BlockPlan, bank: Tensor, begins: list[int], first: int, last: int) -> _Strip | None:
    inside = torch.arange(plan.kv_tile, dtype=torch.int32, device=plan.device)
    keys, counts = [], []
    for tile in range(first, last):
        some = slice(begins[tile], begins[tile + 1])
        rows = min(plan.q_tile, plan.nq - tile * plan.q_tile)
        key = (plan.col[some, None] * plan.kv_tile + inside).flatten()
        allowed = unpack_masks(bank[plan.mask_id[some].long()], plan.kv_tile)[:, :rows].transpose(0, 1).flatten(1)
        allowed = allowed & (key < plan.nk)
        keys.append(key.expand_as(allowed)[allowed])
        counts.append(allowed.sum(1))
    key, begin = torch.cat(keys), torch.cat(counts).cumsum(0)
    if not key.numel():
        return None
    low, high = (int(end) for end in key.aminmax())
    queries = slice(first * plan.q_tile, min(last * plan.q_tile, plan.nq))
    return _Strip(queries, slice(low, high + 1), torch.nn.functional.pad(begin, (1, 0)).int(), key - low)


def forward(operands: Operands, branch: Branch, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Compute (out, lse), strip by strip."""
    acc = acc_dtype(operands.q.dtype)
    q, k, v, scale = operands.map(lambda x: x.to(acc))[:4]
    before, after = sides(scale)
    q = q * before
    ratio = q.shape[1] // k.shape[1]
    out = q.new_zeros(*q.shape[:3], v.shape[3])
    lse = q.new_full(q.shape[:3], -torch.inf)
    for strip, b, h in _strips(branch.plan(q.device)):
        scores = strip.products(q[b, h], k[b, h // ratio], after)
        top = strip.reduced(scores, "max")
        top.masked_fill_(torch.isneginf(top), 0.0)
        weights = scores.sub_(strip.spread(top)).exp_()
        total = strip.reduced(weights, "sum")
        part = strip.matrix(weights) @ v[b, h // ratio, strip.keys]
        out[b, h, strip.rows] = part.div_(total.masked_fill(total == 0, 1.0)[:, None])
        lse[b, h, strip.rows] = torch.where(torch.isposinf(top), top, top + total.log())
    out = out.to(dtype)
    if may_overflow(operands, branch):
        nan_rows_out_of_range(out, lse, operands, branch)
    return out, lse


@sums_in_range
def backward(
    upstream: Upstream, operands: Operands, branch: Branch, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute gradients with weights recomputed from lse; dK and dV are products of the transposed matrix."""
    acc = acc_dtype(operands.q.dtype)
    q, k, v, scale = operands.map(lambda x: x.to(acc))[:4]
    before, after = sides(scale)
    multiplied, usable = q * before, k.nan_to_num(0.0, 0.0, 0.0)
    ratio = q.shape[1] // k.shape[1]
    dead = torch.isneginf(upstream.lse)
    # rows that attend nothing, or only scores of -inf, have zero gradients, whatever they contain
    lse = upstream.lse.masked_fill(dead, torch.inf)
    queries, dout = (x.masked_fill(dead[..., None], 0.0) for x in (q, upstream.dout.to(acc)))
    dq, dk, dv = (torch.zeros(x.shape, dtype=acc, device=x.device) for x in (q, k, v))
    for strip, b, h in _strips(branch.plan(q.device)):
        rows, keys, of_keys = (b, h, strip.rows), (b, h // ratio, strip.keys), (b, h // ratio)
        weights = strip.products(multiplied[b, h], k[of_keys], after).sub_(strip.spread(lse[rows])).exp_()
        dv[keys] += strip.transposed(weights) @ dout[rows]
        grads = strip.products(dout[b, h], v[of_keys], 1.0).sub_(strip.spread(upstream.delta[rows])).mul_(weights)
        grads = grads.masked_fill_(strip.spread(dead[rows]), 0.0)
        dq[rows] = strip.matrix(grads) @ usable[keys] * scale
        dk[keys] += strip.transposed(grads) @ queries[rows]
    return dq.to(dtype), dk.mul_(scale).to(dtype), dv.to(dtype)


def unsupported_reason(call: Call, branch: Branch) -> str | None:
    """Return a reason for tensors that are not on a CPU."""
    return None if call.device == "cpu" else f"it was tested only on CPU tensors, and these are on {call.device}"


def scratch(call: Call, branch: Branch) -> int:
    """Count the entries of a strip, the widened copies, and the results before rounding."""
    plan = branch.plan()
    longest = int(plan.row_ptr.diff(dim=1).max())
    pairs = max(_PAIRS, longest * plan.q_tile * plan.kv_tile)
    size = acc_dtype(call.dtype).itemsize
    keys = call.batch * call.kv_heads * branch.nk * (call.head_dim + call.value_dim)
    rows = call.batch * branch.head_count * branch.nq * (call.head_dim + call.value_dim)
    return pairs * _BYTES + (keys + rows) * size * (2 if call.needs_grad else 1)


BACKEND = Backend("torch_sparse", forward, backward, unsupported_reason, scratch, experimental=True)
