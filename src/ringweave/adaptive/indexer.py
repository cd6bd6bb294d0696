"""A learned block selector: narrow heads that score blocks, trained to predict the attention mass of each tile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..checks import one_of, whole
from ..errors import ShapeError
from ..patterns import BlockTable
from ..types import acc_dtype
from ..validate import check_tensors
from .mass import TileMass
from .pooling import by_block, in_cache, largest, least, token_runs
from .ranking import rows_at_once
from .selection import HEADS, BlockGrid, Score, amount_of, grid_of, products, top_blocks

if TYPE_CHECKING:
    from ..parallel import ContextParallel, PendingTable

# largest bucket of the distance between pools, log2(distance + 1); the bias has 2 * 16 + 1 entries, for both directions
_FAR = 16


class BlockIndexer(nn.Module):
    """A module that scores blocks with a few narrow heads, chooses the best, and learns from measured attention.

    A block consists of pools of tokens. A pool is represented by the mean, the minimum and the maximum of each channel.
    For query pool i and key pool j of a head, the score is

        s[i, j] = gain scale <mean q[i], mean k[j]> + sum_m w_m(q[i]) ReLU(<q_m[i], k'[j]>) + bias[distance]

    with narrow learned projections q_m and k', as in a lightning indexer, which scores tokens. A block's score is the
    logarithm of the sum of exp s over its pools. All terms but the first are initially 0. Queries and keys are
    detached, so no gradient reaches the model that they come from.

    Train it on ``loss(q, k, mass)``: first with the mass of dense attention, then with the mass of the chosen tiles.

    Args:
        head_dim: Channels of queries and keys.
        heads: Number of query heads.
        kv_heads: Number of key heads; ``heads`` by default.
        index_heads: Narrow heads per query head.
        index_dim: Channels of a narrow head.
        block_size: Tokens per block.
        pool: Tokens per pool; must divide ``block_size``.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
    Example:
        >>> indexer = rw.adaptive.BlockIndexer(32, heads=4, block_size=32, pool=16)
        >>> lse = rw.attention_with_lse(q, k, v, rw.Causal()).lse
        >>> mass = rw.adaptive.tile_mass(q, k, lse, rw.Causal(), tile=32)
        >>> indexer.loss(q, k, mass).backward()
        >>> rw.attention(q, k, v, indexer(q, k, top_k=3) & rw.Causal()).shape
        torch.Size([1, 4, 256, 32])

    References:
        DeepSeek-AI (2025), DeepSeek-V3.2, section 2.1 (which scores tokens; this module scores blocks, for each head).
    """

    def __init__(
        self,
        head_dim: int,
        heads: int,
        kv_heads: int | None = None,
        *,
        index_heads: int = 4,
        index_dim: int = 16,
        block_size: int = 128,
        pool: int = 32,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.head_dim = whole("head_dim", head_dim, 1, error=ShapeError)
        self.heads = whole("heads", heads, 1, error=ShapeError)
        self.kv_heads = self.heads if kv_heads is None else whole("kv_heads", kv_heads, 1, error=ShapeError)
        self.index_heads = whole("index_heads", index_heads, 1, error=ShapeError)
        self.index_dim = whole("index_dim", index_dim, 1, error=ShapeError)
        self.block_size = whole("block_size", block_size, 1, error=ShapeError)
        self.pool = whole("pool", pool, 1, error=ShapeError)
        if self.heads % self.kv_heads:
            wanted = f"a divisor of the {self.heads} query heads"
            raise ShapeError("kv_heads", self.kv_heads, wanted, "Change one of the two numbers.")
        if self.block_size % self.pool:
            raise ShapeError("pool", self.pool, f"a divisor of block_size={self.block_size}", "Lower pool.")

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        wide, narrow = 3 * self.head_dim, self.index_heads * self.index_dim
        self.query = parameter(self.heads, wide, narrow)
        self.key = parameter(self.kv_heads, wide, self.index_dim)
        self.weight = parameter(self.heads, wide + 1, self.index_heads)
        self.gain = parameter(self.heads)
        self.distance = parameter(self.heads, 2 * _FAR + 1)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the projections at random, and set the weights that scale their terms to 0."""
        for projection in (self.query, self.key):
            nn.init.normal_(projection, std=projection.shape[1] ** -0.5)
        for zero in (self.weight, self.distance):
            nn.init.zeros_(zero)
        nn.init.ones_(self.gain)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        *,
        top_k: int | None = None,
        mass: float | None = None,
        density: float | None = None,
        causal: bool = True,
        local: int = 1,
        sinks: int = 1,
        heads: str = "query",
        q_offset: int = 0,
    ) -> BlockTable:
        """Choose blocks; takes the arguments of :func:`ringweave.adaptive.select`. No gradient.

        Args:
            q: Queries, (B, Hq, Nq, D).
            k: Keys, (B, Hkv, Nk, D).
            top_k: Number of blocks in a row.
            mass: Share of the predicted attention that the blocks of a row must hold.
            density: Share of the blocks that a row may attend.
            causal: Whether to leave out blocks that lie wholly in a row's future.
            local: Number of nearest blocks that are always chosen.
            sinks: Number of blocks at the beginning that are always chosen.
            heads: ``"query"``, ``"kv"`` or ``"shared"``.
            q_offset: Position of the first query; a multiple of ``block_size`` unless the queries fit in one block.
        """
        one_of("heads", heads, HEADS)
        grid = self._grid(q, k, q_offset, causal, local, sinks)
        amount = amount_of("mean", top_k, mass, density, grid)
        with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
            score = self._scorer(q, k, grid)
            groups = {"query": 0, "kv": self.kv_heads, "shared": 1}[heads]
            return top_blocks(score, grid, amount, self._width(grid), groups, q, False)

    def share(self, context: ContextParallel, q: Tensor, k: Tensor, *, version: int, **options: Any) -> PendingTable:
        """Choose blocks for this rank's queries, and start to combine all ranks' choices into one common table.

        The exchange overlaps with the computation of the current step; ``result()`` of the returned table waits for it.
        The parameters must be equal on all ranks, as DDP keeps them.

        Args:
            context: Ranks that share the sequence. Its placement must split the sequence at block boundaries, as
                ``"contiguous"`` and ``"zigzag"`` do.
            q: This rank's queries, (B, Hq, local, D).
            k: This rank's keys, (B, Hkv, local, D). Every rank receives all keys once.
            version: Version of the table; must increase with each call.
            options: Keyword arguments of a call of the indexer, except q_offset.
        Returns:
            The pending table.
        Raises:
            ShapeError: The placement splits a block.
            RingError: Ranks share different versions or shapes.
        """
        side = self.block_size
        context.placement.block_numbers(context.rank, side)
        every = context.unshard(k, 2)
        sizes = len(q), self.heads, context.local // side, -(-context.seq_len // side) + 1
        rows = torch.zeros(sizes, dtype=torch.bool, device="cpu")
        for begin, end, position in token_runs(context, context.seq_len):
            listed = self(q[:, :, begin:end], every, q_offset=position, **options).blocks.listed()
            count = -(-(end - begin) // side)
            listed = listed[:, :, -count:].cpu().long().repeat_interleave(self.heads // listed.shape[1], 1)
            rows[:, :, begin // side : begin // side + count].scatter_(-1, listed, True)
        return context.share_table(rows[..., :-1].contiguous(), side, version)

    def loss(self, q: Tensor, k: Tensor, mass: TileMass, *, causal: bool = True, q_offset: int = 0) -> Tensor:
        """Compute the KL divergence between the measured and the predicted shares of attention of a plan's tiles.

        Block rows are processed in chunks, which backward recomputes, so memory holds one chunk of scores.

        Args:
            q: Queries, (B, Hq, Nq, D).
            k: Keys, (B, Hkv, Nk, D).
            mass: Result of :func:`ringweave.adaptive.tile_mass`, per tile or per row, with tiles of ``block_size``: of
                all tiles during warm-up, later of the chosen tiles. The masses of a block row are normalised to sum to
                1; rows without mass are left out.
            causal: Whether the tables will be causal.
            q_offset: Position of the first query.
        Returns:
            The mean over block rows in nats; differentiable with respect to the indexer's parameters only.
        Raises:
            ShapeError: The tiles have another size, or belong to tensors of other sizes.
        """
        grid = self._grid(q, k, q_offset, causal, 0, 0)
        p = mass.plan
        sizes = (p.q_tile, p.kv_tile, p.nq, p.nk, *p.row_set.shape)
        wanted = (self.block_size, self.block_size, grid.nq, grid.nk, q.shape[0], self.heads)
        if sizes != wanted:
            names = "(q_tile, kv_tile, nq, nk, batch, heads)"
            remedy = "Pass tile= to tile_mass."
            raise ShapeError("mass.plan", f"{names} = {sizes}", f"{wanted}", remedy)
        pair, row, column = mass.tiles()
        values = mass.by_tile().detach()
        # sort the tiles of all heads by block row, so that a chunk of rows is a slice
        order = row.argsort(stable=True)
        step = rows_at_once(len(q) * self.heads * self._width(grid), q.device)
        begins = range(0, grid.rows, step)
        edges = torch.tensor([*begins, grid.rows], device=row.device)
        ends = torch.searchsorted(row[order], edges).tolist()

        def part(begin: int, first: int, last: int) -> tuple[Tensor, Tensor]:
            rows = range(begin, min(begin + step, grid.rows))
            chosen = order[first:last]
            columns = int(column[chosen].max()) + 1 if last > first else 1
            scores = score(rows, columns).flatten(0, 1)
            place = pair[chosen], row[chosen] - begin, column[chosen]
            mass_of = torch.zeros_like(scores).index_put(place, values[chosen].to(scores.dtype))
            listed = torch.zeros_like(scores, dtype=torch.bool).index_put(place, torch.ones_like(chosen).bool())
            all_of_row = mass_of.sum(-1, keepdim=True)
            some = all_of_row[..., 0] > 0
            foreseen = scores.masked_fill(~listed, torch.finfo(scores.dtype).min).log_softmax(-1)
            share = mass_of / all_of_row.clamp(min=torch.finfo(scores.dtype).tiny)
            divergence = torch.special.xlogy(share, share) - share * foreseen
            return (divergence.sum(-1) * some).sum(), some.sum()

        # the scores that it learns are those that choose
        with torch.autocast(q.device.type, enabled=False):
            score = self._scorer(q, k, grid)
            sums = [
                checkpoint(part, *each, use_reentrant=False) if len(begins) > 1 else part(*each)
                for each in zip(begins, ends[:-1], ends[1:], strict=True)
            ]
        total, count = (torch.stack(each).sum() for each in zip(*sums, strict=True))
        return total / count.clamp(min=1)

    def extra_repr(self) -> str:
        """Return the sizes for the module's repr."""
        names = ("head_dim", "heads", "kv_heads", "index_heads", "index_dim", "block_size", "pool")
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)

    def _grid(self, q: Tensor, k: Tensor, q_offset: int, causal: bool, local: int, sinks: int) -> BlockGrid:
        check_tensors(q, k, k)
        if (q.shape[1], k.shape[1], q.shape[3]) != (self.heads, self.kv_heads, self.head_dim):
            got = f"{q.shape[1]} and {k.shape[1]} heads of {q.shape[3]}"
            wanted = f"{self.heads} and {self.kv_heads} heads of {self.head_dim}"
            raise ShapeError("q, k", got, wanted, "Construct an indexer with these sizes.")
        grid = grid_of(q, k, self.block_size, q_offset, causal, local, sinks)
        if not grid.one_row and q_offset % self.block_size:
            wanted = f"a multiple of block_size={self.block_size}, or queries that fit in one block"
            raise ShapeError("q_offset", q_offset, wanted, "Begin chunks at block boundaries.")
        return grid

    def _width(self, grid: BlockGrid) -> int:
        # two products of each pair of pools
        pools = self.block_size // self.pool
        return 2 * pools * pools * grid.columns

    def _scorer(self, q: Tensor, k: Tensor, grid: BlockGrid) -> Score:
        """Return the function that scores block rows: (B, Hq, rows, columns)."""
        q, k = q.detach(), k.detach()
        pools, acc, dim = self.block_size // self.pool, acc_dtype(self.query.dtype), self.head_dim
        q_parts, k_parts = (_parts(x, self.pool, acc) for x in (q, k))
        plain = q_parts[..., :dim] * (self.gain.to(acc) * dim**-0.5)[:, None, None]
        queries = (q_parts @ self.query.to(acc)).unflatten(-1, (-1, self.index_dim))
        own = self.weight.to(acc)
        weight = q_parts @ own[:, :-1] + own[:, -1:]
        # Order pools by their place within a block, so that the final sum over a block's pools adds whole rows of the
        # matrix instead of adjacent elements.
        lacking = -k_parts.shape[2] % pools
        means, keys = (
            nn.functional.pad(x, (0, 0, 0, lacking)).unflatten(2, (-1, pools)).transpose(2, 3).contiguous()
            for x in (k_parts[..., :dim], (k_parts @ self.key.to(acc)) * self.index_dim**-0.5)
        )
        shift = grid.q_offset // self.pool
        # Masked scores are finite, so that a tile with only masked scores has gradient 0 instead of NaN.
        nothing = torch.finfo(acc).min / 2

        def score(rows: range, columns: int) -> Tensor:
            mine = slice(rows.start * pools, rows.stop * pools)
            some_means, some_keys = (x[:, :, :, :columns].flatten(2, 3) for x in (means, keys))
            s = products(plain[:, :, mine], some_means)
            for head in range(self.index_heads):
                relu = products(queries[:, :, mine, head], some_keys).relu_()
                s.addcmul_(relu, weight[:, :, mine, head, None])
            # compute the bias once per distance, and expand it to all pairs as a strided view
            count = s.shape[2]
            apart = torch.arange(mine.start + count - 1, mine.start - columns * pools, -1, device=s.device) + shift
            bucket = (apart.abs() + 1).log2().floor().long().clamp(max=_FAR) * apart.sign()
            bias = self.distance.to(acc)[:, bucket + _FAR]
            if grid.causal:
                bias = bias.masked_fill(apart < 0, nothing)
            sizes = self.heads, count, pools, columns
            s = s.unflatten(3, (pools, columns)).add_(bias.as_strided(sizes, (len(apart), 1, 1, pools)).flip(1))
            # the last block has fewer pools; mask the padding
            if lacking and columns == grid.columns:
                s[..., pools - lacking :, -1] = nothing
            s = nn.functional.pad(s, (0, 0, 0, 0, 0, -count % pools), value=nothing)
            by_tile: Tensor = s.unflatten(2, (-1, pools)).logsumexp((3, 4))
            return by_tile

        return score


def _parts(x: Tensor, pool: int, acc: torch.dtype) -> Tensor:
    """Return the mean, minimum and maximum of each pool's channels: (..., N, D) to (..., pools, 3 D)."""
    reduce = in_cache(
        lambda part: torch.cat([part.mean(-2, dtype=acc), least(part).to(acc), largest(part).to(acc)], -1)
    )
    return by_block(x, pool, reduce)
