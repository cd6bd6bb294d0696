"""Attention over lists of keys that a model chose, in a few PyTorch operations. Runs wherever PyTorch runs.

For a chunk of queries, the listed keys and values are gathered. Memory grows with the number of listed keys of a chunk,
and no index is read back from a device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..call import Call, Operands
from ..chunks import budget
from ..plan import Branch
from . import tile_attention
from .backend import Backend, Upstream, by_formula
from .function_scorer import scorer_of, threads_of
from .list_tiles import ListTiles, unsupported_reason
from .overflow import may_overflow, nan_rows_out_of_range, sums_in_range


def forward(operands: Operands, branch: Branch, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Compute (out, lse), a chunk of queries at a time."""
    scorer = scorer_of(operands)
    out, lse, _ = tile_attention.forward(ListTiles(operands, branch, scorer.pair), scorer, dtype)
    # a function may give any score to a product out of range
    if not scorer.chooses and may_overflow(operands, branch):
        nan_rows_out_of_range(out, lse, operands, branch)
    return out, lse


@sums_in_range
def backward(
    upstream: Upstream, operands: Operands, branch: Branch, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute (dq, dk, dv); the weights are computed again, and gradients of keys are added up in float32 or wider."""
    scorer = scorer_of(operands)
    return tile_attention.backward(ListTiles(operands, branch, scorer.pair), scorer, upstream, dtype)


def scratch(call: Call, branch: Branch) -> int:
    """Count a chunk's gathered keys and values, with gradients, and the sums of gradients of keys in float32."""
    sums = 4 * call.batch * call.kv_heads * call.nk * (call.head_dim + call.value_dim) if call.needs_grad else 0
    return 4 * budget(call.device) * threads_of(call) + sums


BACKEND = Backend(
    "gather", forward, backward, unsupported_reason, scratch, terms=by_formula, dropout=True, functions=True
)
