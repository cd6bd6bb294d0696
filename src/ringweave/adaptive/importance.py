"""Track during training which blocks matter: measure the mass of active blocks and of a few candidates."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..axes import Axes
from ..checks import check_context, flag, number, whole
from ..chunks import chunks
from ..errors import ShapeError, shown
from ..patterns import BlockTable, Causal, Pattern
from ..patterns.block_sets import ListedBlocks, MaskBlocks
from .mass import tile_mass
from .pooling import block_means, token_runs
from .ranking import Scored, best

_INPUTS = Axes("q: [B Hq N D]; k: [B Hkv N D]; lse: [B Hq N]")
if TYPE_CHECKING:
    from ..parallel import ContextParallel, PendingTable

_SIDES = (32, 128)
_STATE = ("indices", "mass", "trials", "tried", "weight")


class ImportanceTracker:
    """A table of active blocks that follows attention: each update exchanges a few weak blocks for better ones.

    The tracker keeps an exponential moving average of each active block's :func:`tile_mass`, with factor ``decay``.
    Further blocks, ``turnover`` of a row's active ones, are on trial: the tracker also measures the mass that each
    would hold if it were active. A trial block replaces the weakest active block when ``mean * (1 - decay^updates)``
    exceeds that block's mean by ``hysteresis``; the factor keeps one lucky update from deciding. A trial ends when the
    trial block's mean does not exceed this threshold. New trial blocks are drawn from an even mixture of two
    distributions: proportional to ``exp(<mean q, mean k>)``, and uniform. The density stays constant. Memory is
    proportional to the number of active blocks.

    Args:
        tokens: Length of the sequences.
        heads: Number of query heads; each has a separate table.
        density: Share of the blocks that a row may attend, rounded up.
        block_size: Tokens per block: a multiple of 16 from 32 to 128.
        causal: Whether to mask keys after a query.
        local: Number of nearest blocks that are always active: the row's block and local - 1 before it (and after it,
            if not causal).
        sinks: Number of blocks at the beginning that are always active.
        decay: Weight of earlier measurements, from 0 to below 1.
        turnover: Share of a row's active blocks that is on trial and may be exchanged, at least one block. 0 disables
            the exchange.
        hysteresis: Relative margin by which a trial block must exceed the active block that it replaces.
        context: Ranks that share the sequence. ``update`` then takes shards, each rank measures its rows, and all ranks
            share one table. The exchange overlaps with the computation of the current step; reading ``pattern`` waits
            for it.
    Attributes:
        version: Number of updates that the current table includes.
    Raises:
        ShapeError: A size is invalid, tensors have other sizes, or the context's placement cuts through blocks.
        PatternError: A share is out of range.
        UnsupportedError: ``context`` is not a context.
        RingError: With a context: ranks are at different versions.
    Example:
        >>> tracker = rw.adaptive.ImportanceTracker(256, heads=4, density=0.4, block_size=32)
        >>> for _ in range(3):
        ...     out, lse = rw.attention_with_lse(q, k, v, tracker.pattern)
        ...     tracker.update(q, k, lse)
        >>> tracker.version, round(tracker.pattern.density(256, heads=4), 2)
        (3, 0.24)
    """

    def __init__(
        self,
        tokens: int,
        *,
        heads: int,
        density: float,
        block_size: int = 128,
        causal: bool = True,
        local: int = 1,
        sinks: int = 1,
        decay: float = 0.9,
        turnover: float = 0.1,
        hysteresis: float = 0.2,
        context: ContextParallel | None = None,
    ):
        self.tokens, self.heads = (
            whole(name, x, 1, error=ShapeError) for name, x in (("tokens", tokens), ("heads", heads))
        )
        self.block_size = whole("block_size", block_size, _SIDES[0], _SIDES[1], error=ShapeError)
        if self.block_size % 16:
            raise ShapeError("block_size", block_size, "a multiple of 16", "Pass 32, 64 or 128.")
        self.causal = flag("causal", causal)
        self.local, self.sinks = whole("local", local, 0), whole("sinks", sinks, 0)
        self.density, self.decay = number("density", density, 1e-9, 1.0), number("decay", decay, 0.0, 1.0 - 1e-6)
        self.turnover, self.hysteresis = number("turnover", turnover, 0.0, 1.0), number("hysteresis", hysteresis, 0.0)
        check_context(context)
        self.context = context
        if context is not None and (context.seq_len, context.heads[0]) != (self.tokens, self.heads):
            got = f"{context.seq_len} tokens, {context.heads[0]} heads"
            raise ShapeError("context", got, f"{self.tokens} tokens, {self.heads} heads", "Use the context's sizes.")
        if context is not None:
            # an update would find a block that the placement cuts only after it has changed its tables
            context.placement.block_numbers(context.rank, self.block_size)
        self.version = 0
        self._pending: PendingTable | None = None
        self._indices = self._nearest()
        # NaN marks blocks without a measurement
        self._mass = torch.full(self._indices.shape, torch.nan, device="cpu")
        # blocks on trial (ascending), their weighted sums of masses, and their sums of weights, 1 - decay^updates
        places = self._indices.shape[-1]
        places = min(max(1, math.ceil(self.turnover * places)) if self.turnover else 0, places)
        self._trials = torch.full((heads, self._rows, places), self._rows, dtype=torch.int32, device="cpu")
        self._tried, self._weight = (torch.zeros(self._trials.shape, device="cpu") for _ in range(2))
        self._pattern: Pattern | None = None

    @property
    def pattern(self) -> Pattern:
        """Current table, combined with ``Causal()`` if causal; with a context this waits for a pending exchange."""
        if self._pending is not None:
            blocks = self._pending.result().blocks
            assert isinstance(blocks, MaskBlocks)
            self._indices = blocks.listed().sort(-1).values[..., : self._indices.shape[-1]].contiguous()
            self._pending, self._pattern = None, None
        if self._pattern is None:
            self._pattern = self._pattern_of(self._indices)
        return self._pattern

    @torch.no_grad()
    def update(self, q: Tensor, k: Tensor, lse: Tensor, *, scale: float | None = None) -> None:
        """Measure the masses of active and trial blocks, and exchange a few blocks.

        Args:
            q: Queries, (B, heads, tokens, D), or with a context this rank's shard.
            k: Keys, (B, Hkv, tokens, D), or with a context this rank's shard; every rank then receives all keys once.
            lse: Log-sum-exp of attention with ``pattern``, (B, heads, tokens).
            scale: Factor of the scores; 1 / sqrt(D) by default.
        Raises:
            ShapeError: The tensors have other sizes.
        """
        self.pattern  # noqa: B018  (waits for the table)
        local = self.tokens if self.context is None else self.context.local
        _INPUTS.fit(q=q, k=k, lse=lse, Hq=self.heads, N=local, remedy="Use the tracker's sizes.")
        scale = q.shape[3] ** -0.5 if scale is None else scale
        whole_k = k if self.context is None else self.context.unshard(k, 2)
        # tables are small, so they are computed on the host
        rows, means = [], []
        for run in token_runs(self.context, self.tokens):
            mine = q[:, :, run.begin : run.end], lse[:, :, run.begin : run.end]
            rows.append(self._measure(*mine, whole_k, run.position, scale))
            means.append(block_means(mine[0], self.block_size))
        # copy the tables: the current pattern shares their memory, and a backward pass may still need it
        self._indices, self._trials = self._indices.clone(), self._trials.clone()
        if rows:
            own, queries = torch.cat(rows), torch.cat(means, 2)
            self._exchange(own)
            self._try_others(own, queries * scale, block_means(whole_k, self.block_size))
        self.version += 1
        self._pattern = None
        if self.context is not None:
            self._share(own if rows else None)

    def state_dict(self) -> dict[str, Any]:
        """Return tables, masses and version; with a context, masses and trials are valid for this rank's rows only."""
        self.pattern  # noqa: B018  (waits for the table)
        return {name: getattr(self, f"_{name}").clone() for name in _STATE} | {"version": self.version}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a :meth:`state_dict`.

        Raises:
            ShapeError: The state is from a tracker with other sizes.
        """
        if set(state) != {*_STATE, "version"}:
            wanted = f"{', '.join(_STATE)} and version"
            raise ShapeError("state", sorted(state), wanted, "Pass what state_dict gave.")
        for name in _STATE:
            mine = getattr(self, f"_{name}")
            if state[name].shape != mine.shape or state[name].dtype != mine.dtype:
                raise ShapeError(name, shown(state[name]), shown(mine), "Make a tracker with these sizes.")
        for name in _STATE:
            setattr(self, f"_{name}", state[name].clone())
        self.version = whole("version", state["version"], 0)
        self._pending, self._pattern = None, None

    # ---- rows of blocks ----------------------------------------------------------------------------------------------

    @property
    def _rows(self) -> int:
        return -(-self.tokens // self.block_size)

    def _may(self, row: Tensor) -> Tensor:
        """Return the number of leading blocks that each row may attend."""
        return row + 1 if self.causal else torch.full_like(row, self._rows)

    def _forced(self, row: Tensor, block: Tensor) -> Tensor:
        after = 0 if self.causal else self.local - 1
        near = (block > row - self.local) & (block <= row + after) if self.local else block < 0
        return near | (block < self.sinks)

    def _sizes(self) -> tuple[Tensor, Tensor]:
        """Return the number of sinks and of all active blocks of each row, (rows,) each."""
        row = torch.arange(self._rows, device="cpu")
        may = self._may(row)
        sinks = may.clamp(max=self.sinks)
        last = torch.minimum(row + (0 if self.causal else self.local - 1), may - 1)
        near = last - torch.maximum(row - self.local + 1, sinks) + 1 if self.local else torch.zeros_like(row)
        return sinks, torch.maximum((may * self.density - 1e-9).ceil().long(), sinks + near.clamp(min=0))

    def _nearest(self) -> Tensor:
        """Return the initial lists: each row's sinks and nearest blocks, int32 (heads, rows, places)."""
        sinks, counts = (x[:, None] for x in self._sizes())
        row, place = torch.arange(self._rows, device="cpu")[:, None], torch.arange(int(counts.max()), device="cpu")
        width = counts - sinks
        begin = row - (width - 1 if self.causal else width // 2)
        begin = torch.minimum(torch.maximum(begin, sinks), self._rows - width)
        listed = torch.where(place < sinks, place, begin + place - sinks)
        listed = torch.where(place < counts, listed, self._rows)
        return listed.int().expand(self.heads, -1, -1).contiguous()

    def _pattern_of(self, listed: Tensor) -> Pattern:
        """Return the pattern of these block lists, which cover the first rows."""
        table = BlockTable.of(ListedBlocks(listed.contiguous(), self._rows), (self.block_size, self.block_size))
        return table & Causal() if self.causal else table

    # ---- masses ------------------------------------------------------------------------------------------------------

    def _measure(self, q: Tensor, lse: Tensor, k: Tensor, position: int, scale: float) -> Tensor:
        """Update the averages of active and trial blocks of the rows of q; return the row numbers."""
        first = position // self.block_size
        mine = torch.arange(first, first - (-q.shape[2] // self.block_size), device="cpu")
        new, old = self._mass_of(q, lse, k, mine, self._indices, scale), self._mass[:, mine]
        # keep the old average if this step gave NaN
        new = torch.where(new.isnan(), old, new)
        self._mass[:, mine] = torch.where(old.isnan(), new, self.decay * old + (1 - self.decay) * new)
        some = self._trials[:, mine] < self._rows
        if some.any():
            new = self._mass_of(q, lse, k, mine, self._trials, scale, added=True)
            for each, now in ((self._tried, new), (self._weight, some.float())):
                before = each[:, mine]
                each[:, mine] = torch.where(new.isnan(), before, self.decay * before + (1 - self.decay) * now)
        return mine

    def _mass_of(
        self, q: Tensor, lse: Tensor, k: Tensor, mine: Tensor, every: Tensor, scale: float, added: bool = False
    ) -> Tensor:
        """Measure the mass per query of the listed blocks in these rows, (heads, rows, places).

        With ``added``, the mass that each block would hold if it were added to the blocks that lse covers.
        """
        first, last = int(mine[0]), int(mine[-1]) + 1
        pattern = self._pattern_of(every[:, :last])
        per = "row" if added else "tile"
        found = tile_mass(q, k, lse, pattern, scale=scale, q_offset=first * self.block_size, per=per)
        # a weight x relative to the softmax of the others is x / (1 + x) once it is part of the softmax
        values = (1 / (1 + 1 / found.values)).sum(1) if added else found.values
        pair, row, block = (x.cpu() for x in found.tiles())
        # find each block's place in its row's list; the lists are ascending
        listed = every[:, mine].long()
        numbers = listed + torch.arange(self.heads * len(mine), device="cpu").view(self.heads, -1, 1) * (self._rows + 1)
        number = (pair % self.heads * len(mine) + row) * (self._rows + 1) + block
        place = torch.searchsorted(numbers.reshape(-1), number)
        total = torch.zeros(listed.numel(), dtype=torch.float64, device="cpu").index_add_(
            0, place, values.cpu().double()
        )
        queries = (self.tokens - mine * self.block_size).clamp(max=self.block_size)
        return (total.view(listed.shape) / (len(q) * queries[:, None])).float()

    def _exchange(self, rows: Tensor) -> None:
        """Replace weak active blocks of these rows by better trial blocks, and end the trials that failed.

        All compete for the places of the row, the active blocks with 1 + hysteresis times their mass.
        """
        listed, mass = self._indices[:, rows].long(), self._mass[:, rows]
        trials, tried, weight = self._trials[:, rows].long(), self._tried[:, rows], self._weight[:, rows]
        margin, places = 1 + self.hysteresis, listed.shape[-1]
        # active blocks without a measurement stay, and places of the list without a block
        forced = pad(self._fixed(rows, listed) | mass.isnan(), (0, trials.shape[-1]))
        allowed = pad(trials < self._rows, (places, 0), value=True)
        chosen = best(Scored(torch.cat([margin * mass, tried], -1), allowed, forced), places).long()
        listed = torch.cat([listed, trials], -1).gather(-1, chosen)
        mass = torch.cat([mass, tried / weight], -1).gather(-1, chosen)
        order = listed.argsort(-1)
        self._indices[:, rows] = listed.gather(-1, order).int()
        self._mass[:, rows] = mass.gather(-1, order)
        least = torch.where(self._fixed(rows, listed), torch.inf, mass).amin(-1, keepdim=True)
        active = torch.zeros_like(allowed).scatter_(-1, chosen, True)[..., places:]
        over = (tried <= margin * least * weight) | active
        self._trials[:, rows] = torch.where(over, self._rows, trials).int()
        self._tried[:, rows], self._weight[:, rows] = (x.masked_fill(over, 0.0) for x in (tried, weight))

    def _fixed(self, rows: Tensor, listed: Tensor) -> Tensor:
        return self._forced(rows[:, None], listed) | (listed == self._rows)

    def _try_others(self, rows: Tensor, q: Tensor, k: Tensor) -> None:
        """Put further blocks on trial where rows have room, by mean queries, (B, heads, rows, D), and mean keys."""
        tokens = (
            (self.tokens - torch.arange(self._rows, device="cpu") * self.block_size).clamp(max=self.block_size).to(q)
        )
        k = k.repeat_interleave(self.heads // k.shape[1], 1)
        # draw for all rows, so that the result does not depend on which rank holds them
        drawn = torch.rand(self._trials.shape, generator=torch.Generator("cpu").manual_seed(self.version), device="cpu")
        # an estimate, and its cumulative sum
        for part in chunks(len(rows), 8 * len(q) * self.heads * self._rows):
            scores = (q[:, :, part] @ k.mT + tokens.log()).float().cpu()
            self._draw(rows[part], scores, drawn[:, rows[part]])

    def _draw(self, rows: Tensor, scores: Tensor, drawn: Tensor) -> None:
        listed, trials = self._indices[:, rows].long(), self._trials[:, rows].long()
        taken = torch.zeros(*listed.shape[:-1], self._rows + 1, dtype=torch.bool, device="cpu")
        taken = taken.scatter_(-1, torch.cat([listed, trials], -1), True)[..., :-1]
        open_ = ~taken & (torch.arange(self._rows, device="cpu") < self._may(rows)[:, None])
        foreseen = scores.masked_fill(~open_, torch.finfo(scores.dtype).min).softmax(-1).mean(0)
        even = open_ / open_.sum(-1, keepdim=True).clamp(min=1)
        reached = ((foreseen + even) * open_).cumsum(-1)
        block = torch.searchsorted(reached, drawn * reached[..., -1:], right=True).clamp(max=self._rows - 1)
        active = listed < self._rows
        free = (active & ~self._fixed(rows, listed)).sum(-1, keepdim=True)
        most = torch.minimum((active.sum(-1, keepdim=True) * self.turnover - 1e-9).ceil(), free)
        place = torch.arange(trials.shape[-1], device="cpu")
        new = (trials == self._rows) & open_.gather(-1, block) & (place < most)
        order = torch.where(new, block, trials).sort(-1)
        block, (tried, weight) = (
            order.values,
            (x[:, rows].gather(-1, order.indices) for x in (self._tried, self._weight)),
        )
        # drop blocks that were drawn twice
        block[..., 1:][block[..., 1:] == block[..., :-1]] = self._rows
        order = block.sort(-1)
        self._trials[:, rows] = order.values.int()
        self._tried[:, rows], self._weight[:, rows] = (x.gather(-1, order.indices) for x in (tried, weight))

    def _share(self, rows: Tensor | None) -> None:
        """Start to send this rank's rows to all other ranks."""
        assert self.context is not None
        blocks = self.context.local // self.block_size
        mine = torch.zeros(self.heads, blocks, self._rows + 1, dtype=torch.bool, device="cpu")
        if rows is not None:
            mine[:, : len(rows)].scatter_(-1, self._indices[:, rows].long(), True)
        self._pending = self.context.share_table(mine[..., :-1].contiguous(), self.block_size, self.version)
