"""The straightforward block-sparse attention that others are measured against: gather, multiply, scatter.

All pairs of a query tile and a key tile are gathered at once, scored in one batched product, normalised over rows by
scatter_reduce and index_add, and the outputs are scattered back. It holds every score of the pattern in memory.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..plan import BlockPlan, unpack_masks


def gather_scatter(q: Tensor, k: Tensor, v: Tensor, plan: BlockPlan) -> Tensor:
    """Compute attention over a plan's tiles, differentiable by autograd.

    ``out[i] = sum_t exp(s[i, t] - max_i) v[t] / sum_t exp(s[i, t] - max_i)`` over the tiles t of row i.

    Args:
        q: Queries, (B, H, Nq, D).
        k: Keys, (B, Hkv, Nk, D); repeated for the query heads that share them.
        v: Values, (B, Hkv, Nk, Dv).
        plan: The tiles.
    Returns:
        Output, (B, H, Nq, Dv), dtype of q; rows that attend nothing give 0.
    """
    batch, heads, nq, dim = q.shape
    k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    row, col, bits = _pairs(plan)
    q_tiles, k_tiles, v_tiles = (
        _tiled(x.float(), tiles, side)
        for x, tiles, side in (
            (q, plan.q_tiles, plan.q_tile),
            (k, plan.kv_tiles, plan.kv_tile),
            (v, plan.kv_tiles, plan.kv_tile),
        )
    )
    scores = torch.bmm(q_tiles[row], k_tiles[col].mT) / math.sqrt(dim)
    scores = _masked(scores, plan, col, bits)
    top = torch.full(q_tiles.shape[:2], -torch.inf, device=q.device)
    index = row[:, None].expand(-1, plan.q_tile)
    top = top.scatter_reduce(0, index, scores.detach().amax(-1), "amax")
    top = top.masked_fill(torch.isneginf(top), 0.0)
    weights = torch.exp(scores - top[row][..., None])
    total = torch.zeros_like(top).index_add(0, row, weights.sum(-1))
    parts = torch.bmm(weights, v_tiles[col])
    out = torch.zeros(*q_tiles.shape[:2], v.shape[3], device=q.device).index_add(0, row, parts)
    out = out / total.masked_fill(total == 0, 1.0)[..., None]
    return out.view(batch, heads, -1, v.shape[3])[:, :, :nq].to(q.dtype)


def _pairs(plan: BlockPlan) -> tuple[Tensor, Tensor, Tensor]:
    """List query tile, key tile (of all batches and heads) and mask of each pair to compute."""
    rows = plan.tile_rows()
    found = []
    for number, group in enumerate(plan.group.reshape(-1).tolist()):
        tiles = slice(int(plan.row_ptr[group, 0]), int(plan.row_ptr[group, -1]))
        found.append(
            (number * plan.q_tiles + rows[tiles], number * plan.kv_tiles + plan.col[tiles].long(), plan.bits[tiles])
        )
    row, col, bits = (torch.cat(parts) for parts in zip(*found, strict=True))
    return row, col, bits.long()


def _masked(scores: Tensor, plan: BlockPlan, col: Tensor, bits: Tensor) -> Tensor:
    partial = (bits >= 0).nonzero()[:, 0]
    if len(partial):
        refused = ~unpack_masks(plan.masks, plan.kv_tile)[bits[partial]]
        scores = scores.index_copy(0, partial, scores[partial].masked_fill(refused, -torch.inf))
    if plan.nk % plan.kv_tile:
        key = torch.arange(plan.kv_tile, device=scores.device)
        outside = (col % plan.kv_tiles)[:, None] * plan.kv_tile + key >= plan.nk
        scores = scores.masked_fill(outside[:, None, :], -torch.inf)
    return scores


def _tiled(x: Tensor, tiles: int, side: int) -> Tensor:
    x = torch.nn.functional.pad(x, (0, 0, 0, tiles * side - x.shape[2]))
    return x.reshape(-1, side, x.shape[3])
