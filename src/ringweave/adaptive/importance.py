"""Which blocks matter, followed while training: what active ones hold is measured, what others would is estimated."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import ShapeError, message, shown
from ..patterns import BlockTable, Causal, Pattern
from ..patterns.block_sets import ListedBlocks, MaskBlocks
from ..patterns.numbers import flag, number, whole
from .mass import tile_mass
from .pooling import block_means
from .shards import stretches

if TYPE_CHECKING:
    from ..parallel import ContextParallel, PendingTable

# estimates of rows against all blocks that exist at a time
_AT_ONCE = 2**20
_SIDES = (32, 128)


class ImportanceTracker:
    """A table of blocks that follows attention: an update exchanges a few of the least attended blocks for better ones.

    A block that is active has the mean of :func:`tile_mass` over the updates, weighed by ``decay`` a step. What an
    inactive one would hold is estimated from the means of its queries and keys, on the scale of the active ones of its
    row: ``exp(<mean q, mean k>)`` over the sum of that over the active blocks. Where the best inactive one is above the
    least active one by ``hysteresis``, they change places, at most ``turnover`` of a row in an update: density stays as
    it is. Memory is that of the active blocks.

    Args:
        tokens: Length of the sequences.
        heads: Query heads; each has a table.
        density: Share of the blocks that a row may attend, rounded up.
        block_size: Tokens of a block's side: a multiple of 16 from 32 to 128.
        causal: Whether keys after a query are left out.
        local: Blocks that are always active: a row's own, and local - 1 before it (not causal: also after).
        sinks: First blocks, which are always active.
        decay: Weight of what was measured before, from 0 to below 1.
        turnover: Share of a row's active blocks that an update may exchange; at least one.
        hysteresis: By which share an inactive block has to look better than the active one it replaces.
        context: Ranks that share the sequence: ``update`` takes shards, each rank measures its own rows, and all have
            one table. It travels while the present step is computed, and is waited for where ``pattern`` is next read.
    Attributes:
        version: Number of updates behind the present table.
    Raises:
        ShapeError: Sizes that are none, or tensors of other sizes.
        PatternError: Shares out of range.
        RingError: With a context: ranks at different versions.
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
            raise ShapeError(message("block_size", block_size, "a multiple of 16", "Pass 32, 64 or 128."))
        self.causal = flag("causal", causal)
        self.local, self.sinks = whole("local", local, 0), whole("sinks", sinks, 0)
        self.density, self.decay = number("density", density, 1e-9, 1.0), number("decay", decay, 0.0, 1.0 - 1e-6)
        self.turnover, self.hysteresis = number("turnover", turnover, 0.0, 1.0), number("hysteresis", hysteresis, 0.0)
        self.context = context
        if context is not None and (context.seq_len, context.heads[0]) != (self.tokens, self.heads):
            got = f"{context.seq_len} tokens, {context.heads[0]} heads"
            raise ShapeError(message("context", got, f"{self.tokens} and {self.heads}, as here", "Make it alike."))
        self.version = 0
        self._pending: PendingTable | None = None
        self._indices = self._nearest()
        # NaN where nothing is measured yet
        self._mass = torch.full(self._indices.shape, torch.nan, device="cpu")
        self._pattern: Pattern | None = None

    @property
    def pattern(self) -> Pattern:
        """Give the present table, and causality with it; with a context this waits for what travels."""
        if self._pending is not None:
            blocks = self._pending.result().blocks
            assert isinstance(blocks, MaskBlocks)
            self._indices = blocks.listed().sort(-1).values[..., : self._indices.shape[-1]].contiguous()
            self._pending, self._pattern = None, None
        if self._pattern is None:
            table = self._table(self._rows)
            self._pattern = table & Causal() if self.causal else table
        return self._pattern

    @torch.no_grad()
    def update(self, q: Tensor, k: Tensor, lse: Tensor, *, scale: float | None = None) -> None:
        """Measure what the active blocks hold, and exchange a few.

        Args:
            q: Queries, (B, heads, tokens, D), or with a context this rank's shard.
            k: Keys, (B, Hkv, tokens, D), or this rank's shard: here all ranks then get all keys, once.
            lse: (B, heads, tokens), of attention with ``pattern``.
            scale: Factor of the scores; 1 / sqrt(D) by default.
        Raises:
            ShapeError: Tensors of other sizes.
        """
        pattern = self.pattern
        local = self.tokens if self.context is None else self.context.local
        if q.ndim != 4 or tuple(q.shape[1:3]) != (self.heads, local) or k.shape[2] != local:
            wanted = f"(B, {self.heads}, {local}, D) and keys of as many tokens"
            raise ShapeError(
                message("q, k", f"{tuple(q.shape)}, {tuple(k.shape)}", wanted, "Pass what it was made for.")
            )
        scale = q.shape[3] ** -0.5 if scale is None else scale
        whole_k = k if self.context is None else self.context.unshard(k, 2)
        # made on the host: a table is a few numbers
        rows, means = [], []
        for stretch in stretches(self.context, self.tokens):
            mine = q[:, :, stretch.begin : stretch.end], lse[:, :, stretch.begin : stretch.end]
            rows.append(self._measure(*mine, whole_k, pattern, stretch.position, scale))
            means.append(block_means(mine[0], self.block_size))
        # the present table is its pattern's, which a backward pass may still need
        self._indices = self._indices.clone()
        if rows:
            own, queries = torch.cat(rows), torch.cat(means, 2)
            self._exchange(own, queries * scale, block_means(whole_k, self.block_size))
        self.version += 1
        self._pattern = None
        if self.context is not None:
            self._share(own if rows else None)

    def state_dict(self) -> dict[str, Any]:
        """Give table, masses and version; with a context the masses are those of this rank's rows."""
        pattern = self.pattern
        assert pattern is not None
        return {"indices": self._indices.clone(), "mass": self._mass.clone(), "version": self.version}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a :meth:`state_dict`.

        Raises:
            ShapeError: The state of a tracker of other sizes.
        """
        if set(state) != {"indices", "mass", "version"}:
            raise ShapeError(message("state", sorted(state), "indices, mass and version", "Pass what state_dict gave."))
        for name, mine in (("indices", self._indices), ("mass", self._mass)):
            if state[name].shape != mine.shape or state[name].dtype != mine.dtype:
                raise ShapeError(message(name, shown(state[name]), shown(mine), "Make the tracker as that one was."))
        self._indices, self._mass = state["indices"].clone(), state["mass"].clone()
        self.version = whole("version", state["version"], 0)
        self._pending, self._pattern = None, None

    # ---- rows of blocks ----------------------------------------------------------------------------------------------

    @property
    def _rows(self) -> int:
        return -(-self.tokens // self.block_size)

    def _may(self, row: Tensor) -> Tensor:
        """Count the blocks that rows may attend: from the first on."""
        return row + 1 if self.causal else torch.full_like(row, self._rows)

    def _forced(self, row: Tensor, block: Tensor) -> Tensor:
        after = 0 if self.causal else self.local - 1
        near = (block > row - self.local) & (block <= row + after) if self.local else block < 0
        return near | (block < self.sinks)

    def _sizes(self) -> tuple[Tensor, Tensor]:
        """Count of each row the sinks, and all active blocks, (rows,) each."""
        row = torch.arange(self._rows, device="cpu")
        may = self._may(row)
        sinks = may.clamp(max=self.sinks)
        last = torch.minimum(row + (0 if self.causal else self.local - 1), may - 1)
        near = last - torch.maximum(row - self.local + 1, sinks) + 1 if self.local else torch.zeros_like(row)
        return sinks, torch.maximum((may * self.density - 1e-9).ceil().long(), sinks + near.clamp(min=0))

    def _nearest(self) -> Tensor:
        """List for each row its sinks and the nearest blocks, int32 (heads, rows, places)."""
        sinks, counts = (x[:, None] for x in self._sizes())
        row, place = torch.arange(self._rows, device="cpu")[:, None], torch.arange(int(counts.max()), device="cpu")
        width = counts - sinks
        begin = row - (width - 1 if self.causal else width // 2)
        begin = torch.minimum(torch.maximum(begin, sinks), self._rows - width)
        listed = torch.where(place < sinks, place, begin + place - sinks)
        listed = torch.where(place < counts, listed, self._rows)
        return listed.int().expand(self.heads, -1, -1).contiguous()

    def _table(self, rows: int) -> BlockTable:
        """Make the table of the first rows."""
        listed = self._indices[:, :rows].contiguous()
        return BlockTable.of(ListedBlocks(listed, self._rows), (self.block_size, self.block_size))

    # ---- masses ------------------------------------------------------------------------------------------------------

    def _measure(self, q: Tensor, lse: Tensor, k: Tensor, pattern: Pattern, position: int, scale: float) -> Tensor:
        """Blend in what the active blocks of some rows hold, of a query on average; the rows' numbers."""
        first, rows = position // self.block_size, -(-q.shape[2] // self.block_size)
        if position + q.shape[2] < self.tokens:
            table = self._table(first + rows)
            pattern = table & Causal() if self.causal else table
        found = tile_mass(q, k, lse, pattern, scale=scale, q_offset=position)
        pair, row, block = (x.cpu() for x in found.tiles())
        row = row + first
        # where a block is in its row's list, which ascends
        listed = self._indices.long() + torch.arange(self.heads * self._rows, device="cpu").view(self.heads, -1, 1) * (
            self._rows + 1
        )
        number = (pair % self.heads * self._rows + row) * (self._rows + 1) + block
        place = torch.searchsorted(listed.reshape(-1), number)
        total = torch.zeros(listed.numel(), dtype=torch.float64, device="cpu").index_add_(
            0, place, found.values.cpu().double()
        )
        mine = torch.arange(first, first + rows, device="cpu")
        queries = (self.tokens - mine * self.block_size).clamp(max=self.block_size)
        new = (total.view(listed.shape)[:, mine] / (len(q) * queries[:, None])).float()
        old = self._mass[:, mine]
        self._mass[:, mine] = torch.where(old.isnan(), new, self.decay * old + (1 - self.decay) * new)
        return mine

    def _exchange(self, rows: Tensor, q: Tensor, k: Tensor) -> None:
        """Let rows of these numbers exchange blocks: by means of their queries, (B, heads, rows, D), and of keys."""
        tokens = (
            (self.tokens - torch.arange(self._rows, device="cpu") * self.block_size).clamp(max=self.block_size).to(q)
        )
        k = k.repeat_interleave(self.heads // k.shape[1], 1)
        step = max(1, _AT_ONCE // (len(q) * self.heads * self._rows))
        _, counts = self._sizes()
        for begin in range(0, len(rows), step):
            part = rows[begin : begin + step]
            scores = (q[:, :, begin : begin + step] @ k.mT + tokens.log()).float().cpu()
            self._exchange_some(part, scores, counts[part])

    def _exchange_some(self, rows: Tensor, scores: Tensor, counts: Tensor) -> None:
        listed, mass = self._indices[:, rows].long(), self._mass[:, rows]
        real = listed < self._rows
        # the place past the last block takes what is none
        within = torch.nn.functional.pad(scores, (0, 1), value=-torch.inf)
        active = within.gather(-1, listed.expand(len(scores), -1, -1, -1)).logsumexp(-1, keepdim=True)
        held = torch.where(real, mass, 0.0).sum(-1, keepdim=True)
        estimate = held * torch.exp(scores - active).mean(0)
        block = torch.arange(self._rows, device="cpu")
        taken = torch.zeros(*listed.shape[:-1], self._rows + 1, dtype=torch.bool, device="cpu").scatter_(
            -1, listed, True
        )[..., :-1]
        open_ = ~taken & (block < self._may(rows)[:, None])
        fixed = self._forced(rows[:, None], listed) | ~real
        most = max(1, math.ceil(self.turnover * listed.shape[-1])) if self.turnover else 0
        most = min(most, listed.shape[-1], self._rows)
        best = torch.where(open_, estimate, -1.0).topk(most, -1)
        worst = torch.where(fixed, torch.inf, mass).topk(most, -1, largest=False)
        allowed = torch.arange(most, device="cpu") < (counts * self.turnover - 1e-9).ceil().clamp(min=1)[:, None]
        swap = allowed & (best.values > (1 + self.hysteresis) * worst.values)
        listed.scatter_(-1, worst.indices, torch.where(swap, best.indices, listed.gather(-1, worst.indices)))
        # what comes in is measured before it can go
        mass.scatter_(-1, worst.indices, torch.where(swap, torch.nan, mass.gather(-1, worst.indices)))
        order = listed.argsort(-1)
        self._indices[:, rows] = listed.gather(-1, order).int()
        self._mass[:, rows] = mass.gather(-1, order)

    def _share(self, rows: Tensor | None) -> None:
        """Send this rank's rows to all others."""
        assert self.context is not None
        blocks = self.context.local // self.block_size
        mine = torch.zeros(self.heads, blocks, self._rows + 1, dtype=torch.bool, device="cpu")
        if rows is not None:
            mine[:, : len(rows)].scatter_(-1, self._indices[:, rows].long(), True)
        self._pending = self.context.share_table(mine[..., :-1].contiguous(), self.block_size, self.version)
