"""Compute attention at two scales: selected blocks of keys token by token, the others by their means."""

from __future__ import annotations

import operator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from .adaptive.pooling import block_means
from .api import attention, attention_with_lse
from .axes import Axes
from .call import Arguments
from .checks import flag, one_of, whole
from .errors import ShapeError, shown
from .merge import merge
from .patterns import BlockTable, Causal, Full, SlidingWindow
from .patterns.block_sets import ListedBlocks, ascending
from .torch_compat import transforming
from .types import AttentionOutput, acc_dtype
from .validate import autocast, checked

_GATES = Axes("gates: floating[B Hq Nq 3]")
COMBINATIONS = ("exact_cover", "gates")
# maximum number of scores of queries against pooled keys in memory together
_AT_ONCE = 2**21


def hierarchical_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    pool: int,
    top_k: int,
    window: int,
    causal: bool = False,
    combine: str = "exact_cover",
    gates: Tensor | None = None,
    scale: float | None = None,
    q_offset: int = 0,
    backend: str = "auto",
) -> Tensor:
    """Compute attention at two scales: near and chosen keys token by token, all others through the means of blocks.

    Keys and values are averaged in blocks of ``pool`` tokens. Each tile of ``pool`` queries attends some blocks token
    by token: its own, those in its window, and the ``top_k`` others to which its queries give the most weight by mean.

    With ``"exact_cover"`` the means represent all other blocks. The logarithm of a block's token count is added to the
    score of its mean, and :func:`ringweave.merge` joins both scales. The result is dense attention with the blocks that
    were not chosen replaced by their means; once all blocks are chosen it is dense attention itself. With ``"gates"``,
    three separately normalised attentions are summed with the given factors: over all means, over own and chosen
    blocks, and over the window.

    The queries of a tile choose together. Even with ``causal``, an early query's choice therefore depends on the later
    queries of its tile, which exist in teacher forcing but not in decoding. The time is that of the chosen tiles plus
    Nk / pool keys for each query. The scores against means are computed in pieces, and again in backward.

    Args:
        q: Queries, (B, Hq, Nq, D), float32, float16, bfloat16 or float64.
        k: Keys, (B, Hkv, Nk, D).
        v: Values, (B, Hkv, Nk, Dv).
        pool: Tokens in a block of keys and in a tile of queries.
        top_k: Number of blocks that each tile of queries chooses, besides those of the window.
        window: Number of tokens before a query, and after it unless causal, that it attends token by token; with
            ``"exact_cover"`` rounded up to blocks, for a whole tile.
        causal: Whether keys after the query are excluded; a mean is attended only if its whole block is in the past.
        combine: ``"exact_cover"`` or ``"gates"``.
        gates: (B, Hq, Nq, 3) with ``"gates"``: factors of means, chosen blocks and window.
        scale: Factor of the scores; 1 / sqrt(D) by default.
        q_offset: Position of the first query; Nk - Nq for a decode step.
        backend: Backend for the chosen tiles; see :func:`ringweave.explain`.
    Returns:
        Output, (B, Hq, Nq, Dv), dtype of q. Differentiable in q, k, v and gates; the choice has no gradient.
    Raises:
        ShapeError: Shapes, dtypes or devices do not fit, or only one of ``gates`` and ``combine="gates"`` is given.
        UnsupportedError: ``combine`` is unknown, or the backend cannot run the case.
    Example:
        >>> out = rw.hierarchical_attention(q, k, v, pool=32, top_k=2, window=32, causal=True)
        >>> every = rw.hierarchical_attention(q, k, v, pool=32, top_k=8, window=32, causal=True)
        >>> torch.testing.assert_close(every, rw.attention(q, k, v, rw.Causal()))

    References:
        Yuan et al. (2025), Native sparse attention, section 3.3 (``"gates"``); Zhu and Soricut (2021), H-Transformer-1D
        (means that represent their tokens). The logarithm of the count and the exact merge are additions of ringweave.
    """
    causal = flag("causal", causal, ShapeError)
    q_offset = whole("q_offset", q_offset, 0, error=ShapeError, remedy="Pass Nk - Nq for a decode step.")
    q, k, v = autocast(q, k, v)
    scale = checked(Arguments(q, k, v, Full(), scale, q_offset, backend)).call.scale
    pool = whole("pool", pool, 1, error=ShapeError)
    top_k, window = (whole(name, x, 0, error=ShapeError) for name, x in (("top_k", top_k), ("window", window)))
    gated = one_of("combine", combine, COMBINATIONS) == "gates"
    _check_gates(gates, gated, q)
    # A trace unrolls the tiles, so lengths must be constants: with symbolic lengths a trace takes minutes, and it would
    # not be valid for other lengths anyway.
    nq, nk = operator.index(q.shape[2]), operator.index(k.shape[2])
    geometry = _Geometry(pool, nq, nk, q_offset, top_k, 0 if gated else -(-window // pool), causal)
    with torch.autocast(q.device.type, enabled=False):
        coarse, table = _attend_means(q, k, v, geometry, scale, cover=not gated)
    fine = attention_with_lse(
        q, k, v, table & Causal() if causal else table, scale=scale, q_offset=q_offset, backend=backend
    )
    if gates is None:
        return merge([fine.out, coarse.out.to(q.dtype)], [fine.lse, coarse.lse]).out
    near = SlidingWindow(window, 0 if causal else window)
    # late queries may have no keys in their window; such rows give 0
    local = attention(q, k, v, near, scale=scale, q_offset=q_offset, backend=backend)
    parts = zip((coarse.out, fine.out, local), gates.to(coarse.out.dtype).unbind(-1), strict=True)
    return torch.stack([gate[..., None] * part for part, gate in parts]).sum(0).to(q.dtype)


class _Geometry(NamedTuple):
    """The geometry of query tiles and key blocks of ``pool`` tokens each; both are numbered from position 0."""

    pool: int
    nq: int
    nk: int
    q_offset: int
    top_k: int
    reach: int  # number of blocks before a tile's own, and after it unless causal, that the tile always attends
    causal: bool

    @property
    def blocks(self) -> int:
        """Number of key blocks."""
        return -(-self.nk // self.pool)

    @property
    def first(self) -> int:
        """Index of the first query's tile."""
        return self.q_offset // self.pool

    @property
    def last(self) -> int:
        """Index of the last query's tile."""
        return (self.q_offset + self.nq - 1) // self.pool

    def rows(self, tile: int) -> int:
        """Return the number of queries before a tile."""
        return min(max(tile * self.pool - self.q_offset, 0), self.nq)

    def near(self, tile: Tensor) -> tuple[Tensor, Tensor]:
        """Return the first and last block that tiles always attend, clamped to the existing blocks."""
        low, high = tile - self.reach, tile if self.causal else tile + self.reach
        return low.clamp(0, self.blocks - 1), high.clamp(max=self.blocks - 1)


def _attend_means(
    q: Tensor, k: Tensor, v: Tensor, geometry: _Geometry, scale: float, *, cover: bool
) -> tuple[AttentionOutput, BlockTable]:
    """Compute attention over the means, in the dtype of sums, and the table of blocks that its weights choose."""
    acc, (batch, heads, *_), device = acc_dtype(q.dtype), q.shape, q.device
    ratio = heads // k.shape[1]
    left = geometry.nk - torch.arange(geometry.blocks, device=device) * geometry.pool
    tokens = left.clamp(max=geometry.pool).to(acc)
    means = [block_means(x, geometry.pool).repeat_interleave(ratio, 1) for x in (k, v)]
    # The scores of all pieces together are N x N / pool numbers, so backward recomputes those of each piece. Transforms
    # of torch.func do not support the checkpoint.
    transformed = not torch.compiler.is_compiling() and transforming(q, k, v)
    step = max(1, _AT_ONCE // (batch * heads * geometry.pool * geometry.blocks))
    outs: list[Tensor] = []
    lses: list[Tensor] = []
    chosen: list[Tensor] = []
    for begin in range(geometry.first, geometry.last + 1, step):
        end = min(begin + step, geometry.last + 1)
        # no tile of this piece attends later blocks
        blocks = min(end, geometry.blocks) if geometry.causal else geometry.blocks
        part = q[:, :, geometry.rows(begin) : geometry.rows(end)].to(acc) * scale
        inputs = (part, means[0][:, :, :blocks], means[1][:, :, :blocks], tokens[:blocks].log())
        if torch.is_grad_enabled() and any(x.requires_grad for x in inputs) and not transformed:
            found = checkpoint(
                _attend_piece, *inputs, geometry, begin, end, cover, use_reentrant=False, preserve_rng_state=False
            )
        else:
            found = _attend_piece(*inputs, geometry, begin, end, cover)
        for each, total in zip(found, (outs, lses, chosen), strict=True):
            total.append(each)
    listed = torch.cat([pad(x, (0, max(x.shape[-1] for x in chosen) - x.shape[-1]), value=-1) for x in chosen], 2)
    tile = torch.arange(geometry.first, geometry.last + 1, device=device)
    low, high = geometry.near(tile)
    near = low[:, None] + torch.arange(2 * geometry.reach + 1, device=device)
    near = torch.minimum(near, high[:, None]).expand(batch, heads, -1, -1)
    listed = torch.cat([near, listed], -1)
    listed = ascending(listed, torch.full(listed.shape[:-1], listed.shape[-1], device=device), geometry.blocks)
    # a table's rows begin at position 0
    listed = pad(listed, (0, 0, geometry.first, 0), value=geometry.blocks)
    table = BlockTable.of(ListedBlocks(listed, geometry.blocks), (geometry.pool, geometry.pool))
    return AttentionOutput(torch.cat(outs, 2), torch.cat(lses, 2)), table


def _attend_piece(
    q: Tensor, k: Tensor, v: Tensor, logs: Tensor, geometry: _Geometry, begin: int, end: int, cover: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend means for the queries of tiles [begin, end).

    Returns:
        out, lse, and the chosen blocks, (B, Hq, tiles, n), with -1 for missing choices.
    """
    device = q.device
    position = torch.arange(geometry.rows(begin), geometry.rows(end), device=device) + geometry.q_offset
    block = torch.arange(k.shape[2], device=device)
    row = position // geometry.pool - begin
    tile = torch.arange(begin, end, device=device)
    low, high = geometry.near(tile)
    far = block < low[:, None]
    if not geometry.causal:
        far = far | (block > high[:, None])
    scores = q @ k.mT + logs
    with torch.no_grad():
        weights = torch.softmax(torch.where(far[row], scores, -torch.inf), -1)
        # a row without far blocks has no weights
        weights = torch.where(far[row], weights, 0.0)
        mass = weights.new_zeros(*q.shape[:2], len(tile), len(block)).index_add_(2, row, weights)
        best = torch.where(far, mass, -1.0).topk(min(geometry.top_k, len(block)), -1)
        chosen = torch.where(best.values < 0, -1, best.indices)
        if cover:
            # the extra last column takes the writes of missing choices
            free = pad(far, (0, 1)).expand(*q.shape[:2], -1, -1)
            free = free.scatter(-1, torch.where(chosen < 0, len(block), chosen), False)[..., :-1]
            allowed = free[:, :, row]
        else:
            ends = ((block + 1) * geometry.pool).clamp(max=geometry.nk)
            allowed = ends <= position[:, None] + 1 if geometry.causal else torch.ones_like(far[row])
    scores = torch.where(allowed, scores, -torch.inf)
    # not torch.logsumexp, since its gradient is NaN where every score is -inf
    top = scores.detach().amax(-1, keepdim=True)
    weights = torch.exp(scores - torch.where(torch.isneginf(top), 0.0, top))
    total = weights.sum(-1, keepdim=True)
    safe = torch.where(total == 0, 1.0, total)
    lse = torch.where(total == 0, -torch.inf, torch.where(torch.isneginf(top), 0.0, top) + safe.log())
    return (weights / safe) @ v, lse[..., 0], chosen


def _check_gates(gates: Tensor | None, gated: bool, q: Tensor) -> None:
    if gated != (gates is not None):
        raise ShapeError("gates", shown(gates), "gates with combine='gates', None otherwise", "Pass both or neither.")
    if gated:
        batch, heads, nq = q.shape[:3]
        _GATES.fit(gates=gates, B=batch, Hq=heads, Nq=nq, device=q.device, remedy="Pass three numbers per query.")


__all__ = ["hierarchical_attention"]
