"""A few large batched matrix products over gathered tiles. Runs wherever PyTorch runs, without a compiler."""

from __future__ import annotations

import torch
from torch import Tensor

from ..call import Call, Operands
from ..plan import BlockPlan, Branch
from ..precision import STORED
from ..types import acc_dtype
from . import tile_attention
from .backend import Backend, Upstream, by_formula
from .function_scorer import bytes_of_function, scorer_of, threads_of
from .overflow import may_overflow, nan_rows_out_of_range, sums_in_range
from .plan_tiles import PlanTiles, most_tiles
from .tile_attention import Scorer


def forward(operands: Operands, branch: Branch, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Compute (out, lse) over a plan."""
    operands = operands.widened()
    scorer = scorer_of(operands)
    layout = PlanTiles(operands, branch.plan(operands.q.device), scorer.pair)
    out, lse, _ = tile_attention.forward(layout, scorer, dtype)
    out = out.to(dtype)
    # a function may give any score to a product out of range
    if not scorer.chooses and may_overflow(operands, branch):
        nan_rows_out_of_range(out, lse, operands, branch)
    return out, lse


@sums_in_range
def backward(
    upstream: Upstream, operands: Operands, branch: Branch, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute gradients over a plan."""
    scorer = scorer_of(operands)
    layout = PlanTiles(operands, branch.plan(operands.q.device), scorer.pair)
    return tile_attention.backward(layout, scorer, upstream, dtype)


def tile_mass(operands: Operands, lse: Tensor, plan: BlockPlan, per_row: bool) -> Tensor:
    """Sum the weights in each tile, (T,) or per row (T, q_tile)."""
    layout = PlanTiles(operands, plan)
    values = lse.new_zeros(plan.tiles, plan.q_tile)
    for batch, weights in tile_attention.weights(layout, Scorer(operands.terms), lse):
        values[layout.places(batch)] = weights.unflatten(2, (-1, plan.kv_tile)).sum(3).transpose(1, 2)
    return values if per_row else values.sum(1)


def unsupported_reason(call: Call, branch: Branch) -> str | None:
    """Return None: this backend runs every call."""
    return None


def scratch(call: Call, branch: Branch) -> int:
    """Count a batch's scores and gathered keys and values, and the tiled outputs."""
    plan = branch.plan()
    size = acc_dtype(call.dtype).itemsize
    lines = call.batch * branch.head_count * plan.q_tiles * plan.q_tile
    pair, tokens = bytes_of_function(call), (call.head_dim + call.value_dim) * size
    batch = most_tiles(plan, call.device, pair) * plan.kv_tile * (plan.q_tile * (pair or size) + tokens)
    return batch * threads_of(call) + lines * (call.value_dim + 1) * size


BACKEND = Backend(
    "dense_batched", forward, backward, unsupported_reason, scratch, tiled=True, terms=by_formula, dropout=True,
    functions=True, paged=True, kv_dtypes=tuple(STORED), mass=tile_mass,
)  # fmt: skip
