"""Rows whose scores leave the range of the type that they are computed in.

The rule, for every backend: an allowed score that is NaN or +inf makes its row's out NaN, and lse NaN or +inf. One
that overflows to -inf from finite queries and keys, which a kernel would take for a key that is not there, makes both
NaN. An allowed score of -inf that an infinite input makes has no weight, as in PyTorch.

A kernel finds the first kind by itself. For the second the tiles are computed once more, by PyTorch, where that may
be: after a look at the largest elements, or at what the native kernel saw.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..plan import Branch, unpack_masks
from ..types import acc_dtype
from .backend import Inputs, tiled

# scores computed at a time
_AT_ONCE = 2**22


def may_overflow(inputs: Inputs) -> bool:
    """Tell whether a score may be out of range, by the largest elements; True where one is not finite."""
    q, k = inputs[:2]
    most = torch.finfo(acc_dtype(q.dtype)).max
    largest = (max(-float(low), float(high)) for low, high in (torch.aminmax(x) for x in (q, k)))
    bound = math.prod(largest) * max(abs(inputs.scale), 1.0) * q.shape[3]
    return not bound < most / 2


def spoil(out: Tensor, lse: Tensor, inputs: Inputs, branch: Branch) -> None:
    """Write what the rule says of rows whose largest score is NaN or infinite."""
    q, k = inputs[:2]
    plan = branch.plan(q.device)
    ratio = q.shape[1] // k.shape[1]
    acc = acc_dtype(q.dtype)
    line, col, bits = plan.listed()
    whole = torch.ones(1, plan.q_tile, plan.kv_tile, dtype=torch.bool, device=q.device)
    bank = torch.cat([unpack_masks(plan.masks, plan.kv_tile), whole])
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            queries, keys = tiled(q[b, h].to(acc), plan.q_tile), tiled(k[b, h // ratio].to(acc), plan.kv_tile)
            real = tiled(torch.ones(k.shape[2], 1, device=q.device), plan.kv_tile)[..., 0] > 0
            top = torch.full(queries.shape[:2], -torch.inf, dtype=acc, device=q.device)
            finite_q, finite_k = (x.isfinite().all(-1) for x in (queries, keys))
            mine = (line // plan.q_tiles == plan.group[b, h]).nonzero()[:, 0]
            for some in mine.split(max(1, _AT_ONCE // (plan.q_tile * plan.kv_tile))):
                row, column = line[some] % plan.q_tiles, col[some]
                scores = (queries[row] * inputs.scale) @ keys[column].mT
                allowed = bank[bits[some]] & real[column][:, None]
                finite = finite_q[row][..., None] & finite_k[column][:, None]
                scores = scores.masked_fill(scores.isneginf() & finite, torch.nan).masked_fill(~allowed, -torch.inf)
                top = top.scatter_reduce(0, row[:, None].expand(-1, plan.q_tile), scores.amax(-1), "amax")
            top = top.flatten()[: q.shape[2]]
            broken = top.isnan() | top.isposinf()
            out[b, h].masked_fill_(broken[:, None], torch.nan).masked_fill_(top.isneginf()[:, None], 0.0)
            lse[b, h] = torch.where(broken | top.isneginf(), top.to(lse.dtype), lse[b, h])
