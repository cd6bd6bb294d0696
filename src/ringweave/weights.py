"""Compute attention weights on request: the probabilities of the non-empty tiles, never a dense matrix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .backends.backend import tiled
from .backends.overflow import balanced, is_small
from .call import Arguments, Call
from .errors import PatternError
from .patterns import LongNet, Pattern
from .plan import BlockPlan, plan, unpack_masks
from .torch_compat import no_interception
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
    batch, heads, scale = call.batch, call.heads, call.scale
    p = plan(call.pattern, call.nq, call.nk, heads=heads, batch=batch, q_offset=call.q_offset, device=q.device)
    acc = acc_dtype(q.dtype)
    rows = p.tile_rows()
    whole = torch.ones(1, p.q_tile, p.kv_tile, dtype=torch.bool, device=q.device)
    bank = torch.cat([unpack_masks(p.mask_words, p.kv_tile), whole])
    bound = torch.arange(p.kv_tiles * p.kv_tile, device=q.device).view(p.kv_tiles, 1, p.kv_tile) < p.nk
    q, k = q.to(acc), k.to(acc)
    if is_small(scale) and no_interception():
        # the largest elements are read, which no trace or transform can do
        q, k, scale, *_ = balanced(q, k, scale)
    q_tiles, k_tiles = tiled(q * scale, p.q_tile), tiled(k, p.kv_tile)
    values: list[Tensor] = []
    for b in range(batch):
        for h in range(heads):
            group = p.row_ptr[int(p.row_set[b, h])]
            entries = torch.arange(int(group[0]), int(group[-1]), device=p.device)
            row, col = rows[entries], p.col[entries].long()
            scores = torch.bmm(q_tiles[b, h, row], k_tiles[b, h * k.shape[1] // heads, col].mT)
            scores = torch.where(bank[p.mask_id[entries].long()] & bound[col], scores, -torch.inf)
            # softmax over each row, across its tiles
            top = scores.detach().new_full((p.q_tiles, p.q_tile), -torch.inf)
            top = top.scatter_reduce(0, row[:, None].expand(-1, p.q_tile), scores.detach().amax(-1), "amax")
            top = torch.where(torch.isfinite(top), top, 0.0)
            unscaled = torch.exp(scores - top[row][..., None])
            total = torch.zeros_like(top).index_add(0, row, unscaled.sum(-1))
            values.append(unscaled / torch.where(total > 0, total, 1.0)[row][..., None])
    return BlockWeights(p, torch.cat(values), p.first_tiles())
