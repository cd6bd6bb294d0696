"""Rows with scores beyond the range of the type that they are computed in.

The rule for every backend: an allowed score of NaN or +inf makes its row's out NaN, and its lse NaN or +inf. An allowed
score that overflows to -inf from finite queries and keys makes both NaN, since a kernel would otherwise treat the key
as absent. An allowed score of -inf caused by an infinite input has no weight, as in PyTorch.

A score is in range if the sum of its absolute products, times the scale, is in range. A backend applies the scale on
the side (queries or products) where no product leaves the range first. Kernels handle NaN and +inf themselves. To find
overflows to -inf, PyTorch computes the tiles once more, but only if an overflow is possible: according to the largest
elements, or to a flag that the native kernel returns.

Backward multiplies sums of keys (for dq) and of queries (for dk) by the scale last. Where a small scale meets large
keys or queries, powers of two are moved between them first, so that a sum is in range if the gradient is.

Processors take products of bfloat16 below 1.2e-38 as 0. A large scale makes them visible, so backends that multiply
bfloat16 without widening it to float32 first do widen it for such a scale.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from ..call import Operands
from ..chunks import at_once
from ..plan import Branch, unpack_masks
from ..precision import STORED, dequantize_rows
from ..types import Pages, acc_dtype
from .backend import Backward, Upstream, readable, tiled

# With a scale of at least this, a sum leaves the range before the gradient only if the gradient is within this factor
# of the end of the range. Scales of models are larger: 1 / sqrt(D), or 1 / D.
_SMALL = 2.0**-10


def sides(scale: float) -> tuple[float, float]:
    """Split a scale into (factor of the queries, factor of their products with the keys)."""
    return (scale, 1.0) if abs(scale) <= 1 else (1.0, scale)


def is_small(scale: float) -> bool:
    """Return whether backward has to look for large queries and keys, since the scale may bring them into range."""
    return 0 < abs(scale) < _SMALL


def is_large(scale: float) -> bool:
    """Return whether products of bfloat16 that processors take as 0 count, since the scale may make them large."""
    return abs(scale) > 1 / _SMALL


def balanced(q: Tensor, k: Tensor, scale: float) -> tuple[Tensor, Tensor, float, float, float]:
    """Move powers of two from large queries and keys to a small scale.

    Scores keep their bits, except for parts of queries and keys that are smaller than the largest by all of the range.

    Returns:
        (queries, keys, scale, factor, factor): the gradients of q and k are those of the returned queries and keys
        times the factors.
    """
    # products of float16 numbers are always in range, and small ones would be rounded
    if not is_small(scale) or q.dtype == torch.float16:
        return q, k, scale, 1.0, 1.0
    # a scale of at least 1 would be applied on the other side, where scores are rounded differently
    most = -math.frexp(scale)[1]
    of_q, of_k = (_exponent(x) for x in (q, k))
    of_k = min(of_k, max(0, (most + of_k - of_q) // 2), most)
    of_q = min(of_q, most - of_k)
    return (
        q * 2.0**-of_q if of_q else q,
        k * 2.0**-of_k if of_k else k,
        scale * 2.0 ** (of_q + of_k),
        2.0**-of_q,
        2.0**-of_k,
    )


def _exponent(x: Tensor) -> int:
    """Return the exponent of the power of two above the largest finite element; 0 if no element exceeds 1."""
    finite = x.detach().nan_to_num(0.0, 0.0, 0.0)
    return max(0, math.frexp(_largest([finite]) if x.numel() else 0.0)[1])


def sums_in_range(backward: Backward) -> Backward:
    """Decorate a backend's backward, which multiplies sums by the scale last, so that it moves powers of two first."""

    @functools.wraps(backward)
    def of_balanced(
        upstream: Upstream, operands: Operands, branch: Branch, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        if not is_small(operands.scale):
            return backward(upstream, operands, branch, dtype)
        q, k, scale, of_q, of_k = balanced(*operands[:2], operands.scale)
        # products of an overlapping view may have channels that are not adjacent
        of_products = operands._replace(q=readable(q), k=readable(k), scale=scale)
        dq, dk, dv = backward(upstream, of_products, branch, dtype)
        return dq * of_q, dk * of_k, dv

    return of_balanced


def may_overflow(operands: Operands, branch: Branch) -> bool:
    """Return whether a score may be out of range, judged by the largest elements; True if an element is not finite."""
    q, k = operands[:2]
    most = torch.finfo(acc_dtype(q.dtype)).max
    factor = 1.0
    if operands.scales is not None:
        # a row's scale is its largest element divided by the largest code
        k, factor = operands.scales.k, STORED[k.dtype]
    there = [k] if operands.pages is None else _touched(k, operands.pages, branch)
    bound = _largest([q]) * _largest(there) * factor * abs(operands.scale) * q.shape[3]
    return not bound < most / 2


def _largest(parts: Iterable[Tensor]) -> float:
    sides = [torch.linalg.vector_norm(part, torch.inf) for part in parts]
    return float(sides[0] if len(sides) == 1 else torch.stack(sides).max()) if sides else 0.0


def _touched(k: Tensor, pages: Pages, branch: Branch) -> Iterator[Tensor]:
    """Yield the pages that tiles of the plan read, a few at a time."""
    plan = branch.plan(k.device)
    line, col, _ = plan.listed()
    tiles = torch.zeros(plan.row_ptr.shape[0], plan.kv_tiles, dtype=torch.bool, device=k.device)
    tiles[line // plan.q_tiles, col] = True
    parts, columns = max(1, pages.size // plan.kv_tile), pages.table.shape[1]
    touched = tiles[plan.row_set.long()].any(1).repeat_interleave(max(1, plan.kv_tile // pages.size), 1)
    touched = tiled(touched[..., None], parts).any(2)[:, :columns, 0]
    used = touched & (torch.arange(columns, device=k.device) * pages.size < pages.lengths[:, None])
    for some in pages.table[used].long().unique().split(at_once(k[:1].nbytes, k.device)):
        # splitting an empty tensor gives one empty part
        if len(some):
            yield k[some]


def nan_rows_out_of_range(out: Tensor, lse: Tensor, operands: Operands, branch: Branch) -> None:
    """Overwrite out and lse of rows with a largest score of NaN or +-inf, as the rule above says."""
    for b, h, top in _largest_scores(operands, branch):
        broken, empty = top.isnan() | top.isposinf(), top.isneginf()
        out[b, h].masked_fill_(broken[:, None], torch.nan).masked_fill_(empty[:, None], 0.0)
        lse[b, h] = torch.where(broken | empty, top.to(lse.dtype), lse[b, h])


def _largest_scores(operands: Operands, branch: Branch) -> Iterator[tuple[int, int, Tensor]]:
    """Yield (batch element, head, largest allowed score of each query, or NaN where one overflows to -inf)."""
    q, k, pages = operands.q, operands.k, operands.pages
    stored = (k,) if operands.scales is None else (k, operands.scales.k)
    plan = branch.plan(q.device)
    ratio, acc = q.shape[1] // k.shape[1], acc_dtype(q.dtype)
    line, col, mask_id = plan.listed()
    whole = torch.ones(1, plan.q_tile, plan.kv_tile, dtype=torch.bool, device=q.device)
    # a full tile has the mask -1, the last one
    masks = torch.cat([unpack_masks(plan.mask_words, plan.kv_tile), whole])
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            own, *scale = (x[b, h // ratio] if pages is None else pages.gathered(x, b, h // ratio) for x in stored)
            own = dequantize_rows(own, scale[0]) if scale else own
            queries, keys = tiled(q[b, h].to(acc), plan.q_tile), tiled(own.to(acc), plan.kv_tile)
            real = tiled(torch.ones(len(own), 1, device=q.device), plan.kv_tile)[..., 0] > 0
            top = torch.full(queries.shape[:2], -torch.inf, dtype=acc, device=q.device)
            mine = (line // plan.q_tiles == plan.row_set[b, h]).nonzero()[:, 0]
            # a score and the sum of its absolute products
            for some in mine.split(at_once(2 * acc.itemsize * plan.q_tile * plan.kv_tile, q.device)):
                row, column = line[some] % plan.q_tiles, col[some]
                allowed = masks[mask_id[some]] & real[column][:, None]
                scores = _scores(queries[row], keys[column], operands.scale).masked_fill(~allowed, -torch.inf)
                top = top.scatter_reduce(0, row[:, None].expand(-1, plan.q_tile), scores.amax(-1), "amax")
            yield b, h, top.flatten()[: q.shape[2]]


def _scores(queries: Tensor, keys: Tensor, scale: float) -> Tensor:
    """Return the scores of tiles, with NaN where finite queries and keys give a score out of range."""
    before, after = sides(scale)
    finite = queries.isfinite().all(-1)[..., None] & keys.isfinite().all(-1)[:, None]
    queries, keys = queries * before, keys.mT
    # the sum of absolute values bounds every partial sum, whatever the order of the addition
    sizes = queries.abs() @ keys.abs() * abs(after)
    return (queries @ keys * after).masked_fill(finite & sizes.isinf(), torch.nan)
