"""Compute attention at two scales: selected blocks of keys token by token, the others by their means."""

from __future__ import annotations

import math
import operator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .adaptive.pooling import block_means
from .adaptive.ranking import Scored, choose
from .adaptive.selection import products
from .api import attention, attention_with_lse
from .axes import Axes
from .call import Arguments
from .checks import flag, one_of, whole
from .errors import ShapeError, shown
from .merge import merge
from .patterns import BlockTable, Causal, Full, Not, Pattern, SlidingWindow
from .patterns.block_sets import ListedBlocks
from .terms import Bias
from .types import AttentionOutput
from .validate import autocast, checked

_GATES = Axes("gates: floating[B Hq Nq 3]")
COMBINATIONS = ("exact_cover", "gates")


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
    Nk / pool keys for each query. Memory holds the scores of a choice in pieces. On a GPU the plan of the means waits
    for the chosen blocks, because the host makes the plan of a table's complement.

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
        PatternError: ``causal`` is not a bool.
        UnsupportedError: ``combine`` is unknown, or the backend cannot run the case.
    Example:
        >>> out = rw.hierarchical_attention(q, k, v, pool=32, top_k=2, window=32, causal=True)
        >>> every = rw.hierarchical_attention(q, k, v, pool=32, top_k=8, window=32, causal=True)
        >>> torch.testing.assert_close(every, rw.attention(q, k, v, rw.Causal()))

    References:
        Yuan et al. (2025), Native sparse attention, section 3.3 (``"gates"``); Zhu and Soricut (2021), H-Transformer-1D
        (means that represent their tokens). The logarithm of the count and the exact merge are additions of ringweave.
    """
    causal = flag("causal", causal)
    q_offset = whole("q_offset", q_offset, 0, error=ShapeError, remedy="Pass Nk - Nq for a decode step.")
    q, k, v = autocast(q, k, v)
    scale = checked(Arguments(q, k, v, Full(), scale, q_offset, backend)).call.scale
    pool = whole("pool", pool, 1, error=ShapeError)
    top_k, window = (whole(name, x, 0, error=ShapeError) for name, x in (("top_k", top_k), ("window", window)))
    gated = one_of("combine", combine, COMBINATIONS) == "gates"
    _check_gates(gates, gated, q)
    # A trace unrolls the chunks of the choice, so lengths must be constants.
    nq, nk = operator.index(q.shape[2]), operator.index(k.shape[2])
    geometry = _Geometry(pool, nq, nk, q_offset, top_k, 0 if gated else -(-window // pool), causal)
    with torch.autocast(q.device.type, enabled=False):
        mean_k, mean_v = (block_means(x, pool) for x in (k, v))
        chosen = _choose(q, mean_k, geometry, scale)
        queries = q.to(mean_k.dtype)
        if gated:
            past = _attend_past(queries, mean_k, mean_v, geometry, scale)
        else:
            rest = _attend_rest(queries, mean_k, mean_v, chosen, geometry, scale)
    table = BlockTable.of(chosen, (pool, pool))
    fine = attention_with_lse(
        q, k, v, table & Causal() if causal else table, scale=scale, q_offset=q_offset, backend=backend
    )
    if gates is None:
        return merge([fine.out, rest.out.to(q.dtype)], [fine.lse, rest.lse]).out
    near = SlidingWindow(window, 0 if causal else window)
    # late queries may have no keys in their window; such rows give 0
    local = attention(q, k, v, near, scale=scale, q_offset=q_offset, backend=backend)
    parts = zip((past, fine.out, local), gates.to(past.dtype).unbind(-1), strict=True)
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

    @property
    def most_near(self) -> int:
        """Maximum number of blocks that a tile always attends."""
        return self.reach * (1 if self.causal else 2) + 1

    def tokens(self, means: Tensor) -> Tensor:
        """Return the number of tokens of each block, in the dtype of their means."""
        left = self.nk - torch.arange(self.blocks, device=means.device) * self.pool
        return left.clamp(max=self.pool).to(means.dtype)

    def rows(self, tile: int) -> int:
        """Return the number of queries before a tile."""
        return min(max(tile * self.pool - self.q_offset, 0), self.nq)

    def folds(self, first: int) -> tuple[int, int]:
        """Return how rows hold the queries of a block together: places before the first query, and places of a row.

        Args:
            first: Place of the first query, counted from the beginning of some block.
        """
        before = first % self.pool
        return (0, self.nq) if before + self.nq <= self.pool else (before, self.pool)

    def near(self, tile: Tensor) -> tuple[Tensor, Tensor]:
        """Return the first and last block that tiles always attend, clamped to the existing blocks."""
        low, high = tile - self.reach, tile if self.causal else tile + self.reach
        return low.clamp(0, self.blocks - 1), high.clamp(max=self.blocks - 1)


@torch.no_grad()
def _choose(q: Tensor, k: Tensor, geometry: _Geometry, scale: float) -> ListedBlocks:
    """Return the blocks that each tile attends token by token: near ones, and others of most weight by their means.

    A tile's list is a row, counted from position 0.
    """
    device, blocks, logs = q.device, geometry.blocks, geometry.tokens(k).log()

    def scored(tiles: range) -> Scored:
        begin, end = geometry.first + tiles.start, geometry.first + tiles.stop
        # no tile of these attends later blocks
        block = torch.arange(min(end, blocks) if geometry.causal else blocks, device=device)
        tile = torch.arange(begin, end, device=device)[:, None]
        low, high = geometry.near(tile)
        near = (low <= block) & (block <= high)
        allowed = block <= tile if geometry.causal else torch.ones_like(near)
        queries = slice(geometry.rows(begin), geometry.rows(end))
        row = torch.arange(queries.start, queries.stop, device=device)
        row = (row + geometry.q_offset) // geometry.pool - begin
        scores = products(q[:, :, queries].to(k.dtype) * scale, k[:, :, : len(block)]).add_(logs[: len(block)])
        # finite, since a row without far blocks would be NaN; weights of other blocks choose nothing
        weights = scores.masked_fill_((near | ~allowed)[row], torch.finfo(scores.dtype).min).softmax(-1)
        mass = weights.new_zeros(*q.shape[:2], len(tile), len(block)).index_add(2, row, weights)
        return Scored(mass, allowed, near, near.sum(-1) + geometry.top_k)

    scores = q.shape[0] * q.shape[1] * geometry.pool * blocks
    most = min(geometry.most_near + geometry.top_k, blocks)
    listed = choose(scored, most, rows=geometry.last + 1 - geometry.first, scores=scores, device=device)
    listed = pad(listed.masked_fill(listed < 0, blocks), (0, 0, geometry.first, 0), value=blocks)
    return ListedBlocks(listed, blocks)


def _attend_rest(
    q: Tensor, k: Tensor, v: Tensor, chosen: ListedBlocks, geometry: _Geometry, scale: float
) -> AttentionOutput:
    """Attend the means ``k`` and ``v`` of the blocks that were not chosen."""
    # the queries of a tile attend the same means
    folds = geometry.folds(geometry.q_offset)
    rest: Pattern = Not(BlockTable.of(chosen, (1, 1), folds[1]))
    rest = rest & Causal() if geometry.causal else rest
    terms, tiles = None, geometry.last + 1 - geometry.first
    if geometry.nk % geometry.pool:
        # the last block has fewer tokens than the others
        terms = Bias((geometry.tokens(k).log() - math.log(geometry.pool)).expand(1, 1, tiles, -1))
    out, lse = _attend_folded(q, k, v, rest, folds, scale=scale, q_offset=geometry.first, terms=terms)
    return AttentionOutput(out, lse + math.log(geometry.pool))


def _attend_past(q: Tensor, k: Tensor, v: Tensor, geometry: _Geometry, scale: float) -> Tensor:
    """Attend the means ``k`` and ``v`` of the blocks that end at or before each query, or of all if not causal."""
    pool, nk, causal = geometry.pool, geometry.nk, geometry.causal
    full, tail = divmod(nk, pool)
    parts: list[tuple[Tensor, Tensor]] = []
    if full:
        means, first = (k[:, :, :full], v[:, :, :full]), geometry.q_offset + 1
        if causal:
            # a query at position p attends the blocks before block (p + 1) // pool
            at: dict[str, Any] = {"q_offset": first // pool, "k_offset": 1}
            out, lse = _attend_folded(q, *means, Causal(), geometry.folds(first), scale=scale, **at)
        else:
            out, lse = attention_with_lse(q, *means, scale=scale)
        parts.append((out, lse + math.log(pool)))
    if tail:
        # the last block, which has fewer tokens than the others, is a key at its last token
        means, at = (k[:, :, full:], v[:, :, full:]), {"q_offset": geometry.q_offset, "k_offset": nk - 1}
        out, lse = attention_with_lse(q, *means, Causal() if causal else Full(), scale=scale, **at)
        parts.append((out, lse + math.log(tail)))
    outs, lses = zip(*parts, strict=True)
    return merge(outs, lses).out


def _attend_folded(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, folds: tuple[int, int], **options: Any
) -> AttentionOutput:
    """Attend with rows of several queries, which become heads: see :meth:`_Geometry.folds`."""
    heads, nq, (before, width) = *q.shape[1:3], folds
    rows = pad(q, (0, 0, before, -(before + nq) % width)).unflatten(2, (-1, width))
    found = attention_with_lse(rows.transpose(2, 3).flatten(1, 2), k, v, pattern, **options)
    out, lse = (x.unflatten(1, (heads, width)).transpose(2, 3).flatten(2, 3) for x in found)
    return AttentionOutput(out[:, :, before : before + nq], lse[:, :, before : before + nq])


def _check_gates(gates: Tensor | None, gated: bool, q: Tensor) -> None:
    if gated != (gates is not None):
        raise ShapeError("gates", shown(gates), "gates with combine='gates', None otherwise", "Pass both or neither.")
    if gated:
        batch, heads, nq = q.shape[:3]
        _GATES.fit(gates=gates, B=batch, Hq=heads, Nq=nq, device=q.device, remedy="Pass three numbers per query.")


__all__ = ["hierarchical_attention"]
