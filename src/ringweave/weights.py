"""Compute attention weights on request: the probabilities of the non-empty tiles, never a dense matrix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .backends import tile_attention
from .backends.overflow import balanced, is_small
from .backends.plan_tiles import PlanTiles
from .backends.tile_attention import Scorer
from .call import Arguments, Call, Operands
from .errors import PatternError
from .patterns import LongNet, Pattern
from .plan import BlockPlan, plan
from .torch_compat import no_interception, outside_transforms, uncompiled
from .types import acc_dtype
from .validate import autocast, checked


@dataclass(frozen=True, eq=False, repr=False)
class BlockWeights:
    """The attention probabilities of a plan's tiles.

    Attributes:
        plan: Plan of the tiles.
        values: (T, q_tile, kv_tile), one matrix per tile in float32 (float64 for float64 queries), ordered by batch
            element, head, and the plan's row order.
        first: (B, Hq) int64, index of the first tile of each batch element and head.
    """

    plan: BlockPlan
    values: Tensor
    first: Tensor

    def __repr__(self) -> str:
        tiles, q_tile, kv_tile = self.values.shape
        batch, heads = self.first.shape
        shape = batch, heads, self.plan.nq, self.plan.nk
        return f"BlockWeights({tiles} tiles of {q_tile} x {kv_tile}, of {shape})"

    def to_dense(self) -> Tensor:
        """Return the weights as a dense matrix (B, Hq, Nq, Nk), for small sizes."""
        dense = in_places(self.values, self.plan, self.first).transpose(3, 4).flatten(4).flatten(2, 3)
        return dense[:, :, : self.plan.nq, : self.plan.nk]


def places(p: BlockPlan, first: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return b * Hq + h, query tile and key tile of each tile ordered by these and row; int64 (T,) each."""
    group, counts = p.row_set.reshape(-1).long(), (p.row_ptr[:, -1] - p.row_ptr[:, 0]).long()
    pair = torch.arange(group.numel(), device=p.device).repeat_interleave(counts[group])
    place = torch.arange(pair.numel(), device=p.device) - first.reshape(-1)[pair]
    entry = place + p.row_ptr[:, 0].long()[group[pair]]
    return pair, p.tile_rows()[entry], p.col[entry].long()


def in_places(values: Tensor, p: BlockPlan, first: Tensor) -> Tensor:
    """Return the values of tiles, (T, ...), as a dense tensor (B, Hq, query tiles, key tiles, ...)."""
    dense = values.new_zeros(p.row_set.numel(), p.q_tiles, p.kv_tiles, *values.shape[1:])
    dense[places(p, first)] = values
    return dense.view(*p.row_set.shape, *dense.shape[1:])


#: Columns of weights that one call of :func:`by_columns` gives.
COLUMNS = 256


def by_columns(attend: Callable[[Tensor], Tensor], index: Tensor, keys: int, dtype: torch.dtype) -> Tensor:
    """Return the weights of any call of attention, (..., keys).

    A column of weights is the output for values that are 1 at its key and 0 at others.

    Args:
        attend: Function that returns the output for values; these have the shape of ``index``, and then channels.
        index: Number of each key in its sequence.
        keys: Number of keys of the longest sequence.
        dtype: Dtype of the values.
    """
    parts = []
    # a call without keys has a matrix without columns
    for first in range(0, max(keys, 1), COLUMNS):
        # kernels take widths that are multiples of 8
        width = min(COLUMNS, -(-(keys - first) // 8) * 8)
        columns = torch.arange(first, first + width, device=index.device)
        parts.append(attend((index[..., None] == columns).to(dtype)))
    return torch.cat(parts, -1)[..., :keys]


@uncompiled("Call it outside of code that is compiled with fullgraph=True; other compiled code breaks its graph here.")
def attention_weights(
    q: Tensor,
    k: Tensor,
    pattern: Pattern,
    *,
    scale: float | None = None,
    q_offset: int | Tensor | str = 0,
    k_offset: int | Tensor = 0,
) -> BlockWeights:
    """Compute the probabilities of each tile, for inspection; they take 4 bytes per pair of a tile.

    ``weights[i, j] = exp(scale * <q[i], k[j]> - lse[i])`` over the allowed pairs, 0 elsewhere. Differentiable.

    Args:
        q: Queries, (B, Hq, Nq, D).
        k: Keys, (B, Hkv, Nk, D).
        pattern: A relation, not a LongNet.
        scale: Factor of the scores; 1 / sqrt(D) by default.
        q_offset: Position of the first query: an int, an integer tensor () or (B,), or ``"end"``, as in
            :func:`ringweave.attention`.
        k_offset: Position of the first key: an int, or an integer tensor () or (B,).
    Returns:
        The weights of the non-empty tiles.
    Raises:
        ShapeError: Shapes, dtypes or devices do not fit.
        PatternError: The pattern does not fit the call, or is a LongNet.
    Example:
        >>> weights = rw.attention_weights(q, k, rw.Causal())
        >>> torch.testing.assert_close(weights.to_dense().sum(-1), torch.ones(1, 4, 256))
    """
    q, k = autocast(q, k)
    call = checked(Arguments(q, k, k, pattern, scale, q_offset, "dense_batched", k_offset)).call
    if isinstance(call.pattern, LongNet):
        raise PatternError("pattern", repr(call.pattern), "a relation", "Ask for the weights of one branch's relation.")
    with torch.autocast(q.device.type, enabled=False):
        return _weights(q, k, call)


def _weights(q: Tensor, k: Tensor, call: Call) -> BlockWeights:
    pattern, sizes = call.pattern, {"heads": call.heads, "batch": call.batch}
    with outside_transforms(*pattern.tables):
        p = plan(pattern, call.nq, call.nk, **sizes, q_offset=call.q_offset, device=q.device)
    acc, scale = acc_dtype(q.dtype), call.scale
    q, k = q.to(acc), k.to(acc)
    if is_small(scale) and no_interception():
        # the largest elements are read, which no trace or transform can do
        q, k, scale, *_ = balanced(q, k, scale)
    tiles = PlanTiles(Operands(q, k, k, scale), p, recorded=True)
    # a part without tiles, so that the values depend on q and k even if no tile does
    parts = [tiles.by_query(q)[:0] @ tiles.k_tiles[:0].mT]
    places = [tiles.plan.col[:0].long()]
    for batch, weights in tile_attention.weights(tiles, Scorer()):
        parts.append(weights.unflatten(2, (-1, p.kv_tile)).transpose(1, 2).flatten(0, 1))
        places.append(tiles.places(batch).flatten())
    values = torch.cat(parts)
    del parts
    return BlockWeights(p, values[torch.cat(places).argsort()], p.first_tiles())
