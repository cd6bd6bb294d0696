"""One kernel call of a rank: some of its queries of a branch, against the keys that it holds or has received."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...backends.backend import Backend, Heads, Upstream
from ...call import Operands
from ...memory.workspace import Workspace
from ...plan import Branch
from ...plan.subplan import CutBranch, subplan
from ...program import choose
from ...terms import TermOperands
from ..planning.demand import Bools, Demand
from ..planning.placement import Int64


@dataclass(frozen=True, eq=False)
class SubBranch:
    """Which tokens of the sequence a kernel's queries and keys are.

    Attributes:
        view: The branch that is cut, over the whole sequence.
        tile: Tokens of a side of its tiles.
        rows: Its query tiles that are the kernel's.
        columns: Its key tiles.
    """

    view: Branch
    tile: int
    rows: Int64
    columns: Int64

    def of(self, scoring: TermOperands | None) -> TermOperands | None:
        """Say to terms and dropout of a whole sequence where the kernel's heads, queries and keys stand in it."""
        if scoring is None:
            return None
        view, device = self.view, scoring.heads.device
        rows = self._places(self.rows, view.q_first, view.nq).to(device)
        columns = self._places(self.columns, view.k_first, view.nk).to(device)
        return scoring._replace(heads=scoring.heads[slice(*view.heads)], rows=rows, columns=columns)

    def _places(self, tiles: Int64, first: int, length: int) -> Tensor:
        inside = (tiles[:, None] * self.tile + np.arange(self.tile)).reshape(-1)
        return torch.from_numpy(first + self.view.rate * inside[inside < length])


@dataclass(frozen=True, eq=False)
class LocalAttention:
    """Queries and keys of one kernel call, as places in shards and buffers.

    Attributes:
        heads: Its heads.
        queries: Its queries in the shard; remote ones in what came of them.
        among: Where they lie among the kernel's queries; None: they are these, one after the other.
        branch: What the kernel computes.
        cut: Where that stands in the sequence.
        own: The shard's keys that it computes with.
        own_at: Their places in the kernel's keys; None: they are these, and are read where they lie.
        tile_at: (key tiles of the whole,) where each lies among the kernel's keys, -1 for none.
        holes: Whether the kernel's keys have places that nobody fills, under a mask.
    """

    heads: Heads
    queries: Tokens
    among: Tokens | None
    branch: Branch
    cut: SubBranch
    own: Tokens
    own_at: Tokens | None
    tile_at: Int64
    holes: bool

    @staticmethod
    def of(
        demand: Demand,
        rank: int,
        ratio: int,
        *,
        needs: tuple[Bools, ...] | None = None,
        available: Bools | None = None,
        edges: list[Bools] | None = None,
    ) -> LocalAttention | None:
        """Compute a rank's queries against the key runs that are ``available``: all that they need by default.

        Args:
            demand: The branch, under a placement.
            rank: The rank.
            ratio: Query heads of a key head.
            needs: The key tiles that each rank computes with, instead of the demand's.
            available: (runs,) which keys there are; where none is the rank's own, all are a received message's.
            edges: Per row set which entries of the plan are computed; None: all.
        Returns:
            None where the rank has nothing to compute.
        """
        here = demand.owner == rank
        run_tile = _run_tile(demand)
        usable = np.logical_or.reduce([need[rank] for need in needs or demand.needs])[run_tile]
        own = here
        if available is not None:
            usable, own = usable & available, here & available
        columns = np.unique(run_tile[usable])
        rows = _attending(demand, np.unique(run_tile[here]), columns, edges)
        if not len(rows) or not len(columns):
            return None
        mine = here & np.isin(run_tile, rows)
        queries, among = Tokens.at(demand.shard_places(mine)), None
        if not _hold_whole(demand, mine, rows):
            among = Tokens.at(demand.buffer_places(mine, _places_of(rows, demand.plan.q_tiles)))
        keys = _keys(demand, own, rows, columns, available, edges)
        return LocalAttention(Heads(demand.branch, ratio), queries, among, *keys)

    @staticmethod
    def of_remote(demand: Demand, rank: int, ratio: int, edges: list[Bools] | None) -> LocalAttention | None:
        """Compute another rank's query tiles against this rank's keys: the entries of ``edges``, of whole tiles.

        The queries come one tile after the other, in their order.
        """
        if edges is None or not any(each.any() for each in edges):
            return None
        pairs = [(row[each], col[each]) for (row, col), each in zip(demand.entries, edges, strict=True)]
        rows, columns = (np.unique(np.concatenate(side)) for side in zip(*pairs, strict=True))
        keys = _keys(demand, demand.owner == rank, rows, columns, None, edges)
        return LocalAttention(Heads(demand.branch, ratio, remote=True), Tokens.at(np.arange(keys[0].nq)), None, *keys)

    def buffers(self, inputs: Operands, space: Workspace) -> Operands:
        """Put the shard's own keys and values among the kernel's: (B, distinct key heads, keys, C) each.

        The others are still to be put.
        """
        return inputs._replace(k=self._buffer(inputs.k, space), v=self._buffer(inputs.v, space))

    def forward(self, inputs: Operands, dtype: torch.dtype, backend: str) -> tuple[Tensor, Tensor]:
        """Compute (out, lse) of its queries; q as ``queries`` knows it, k and v full buffers."""
        inputs = self._taken(inputs)
        out, lse = self.chosen(inputs, backend).forward(inputs, self.branch, dtype)
        return self._given(out), self._given(lse[..., None])[..., 0]

    def backward(self, inputs: Operands, upstream: Upstream, backend: str) -> tuple[Tensor, Tensor, Tensor]:
        """Compute dq of its queries, and dk and dv of the buffers, in lse's dtype."""
        inputs = self._taken(inputs)
        chosen = self.chosen(inputs, backend, needs_grad=True)
        assert chosen.backward is not None
        lse, delta = self._take(upstream.lse[..., None], -torch.inf), self._take(upstream.delta[..., None])
        upstream = Upstream(self._take(upstream.dout), lse[..., 0], delta[..., 0])
        dq, dk, dv = chosen.backward(upstream, inputs, self.branch, lse.dtype)
        return self._given(dq), self.heads.from_kernel(dk), self.heads.from_kernel(dv)

    def chosen(self, inputs: Operands, backend: str, needs_grad: bool = False) -> Backend:
        """Choose who computes it."""
        return choose(backend, inputs.call(needs_grad), self.branch)

    def _buffer(self, x: Tensor, space: Workspace) -> Tensor:
        own = self.own.of(self.heads.of_keys(x))
        if self.own_at is None:
            return own
        whole = space.take((*own.shape[:2], self.branch.nk, x.shape[3]), x.dtype, x.device)
        if self.holes:
            whole.zero_()
        self.own_at.put(whole, own)
        return whole

    def _taken(self, inputs: Operands) -> Operands:
        """Take (queries, buffers) as the kernel does."""
        k, v = self.heads.for_kernel(inputs.k), self.heads.for_kernel(inputs.v)
        return inputs._replace(q=self._take(inputs.q), k=k, v=v, terms=self.cut.of(inputs.terms))

    def _take(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """Take the kernel's queries of (B, Hq, tokens, C); places that are none of these hold ``fill``."""
        mine = self.queries.of(x[:, self.heads.queries])
        if self.among is None:
            return mine
        whole = x.new_full((*mine.shape[:2], self.branch.nq, x.shape[3]), fill)
        self.among.put(whole, mine)
        return whole

    def _given(self, x: Tensor) -> Tensor:
        """Give back these queries of the kernel's."""
        return x if self.among is None else self.among.of(x)


def _keys(
    demand: Demand, own: Bools, rows: Int64, columns: Int64, available: Bools | None, edges: list[Bools] | None
) -> tuple[Branch, SubBranch, Tokens, Tokens | None, Int64, bool]:
    """Cut a kernel's branch out, and say where its keys are: the fields from ``branch`` on."""
    tiles = np.unique(_run_tile(demand)[own])
    shard = Tokens.at(demand.shard_places(own))
    # the shard's own tiles, evenly spaced there, where they are all that is needed: the kernel reads them there
    if shard.span is not None and np.isin(columns, tiles).all() and _hold_whole(demand, own, tiles):
        tile_at = _places_of(tiles, demand.plan.kv_tiles)
        return *_cut(demand, rows, tiles, None, edges), shard, None, tile_at, False
    tile_at = _places_of(columns, demand.plan.kv_tiles)
    own = own & (tile_at[_run_tile(demand)] >= 0)
    shard, places = Tokens.at(demand.shard_places(own)), Tokens.at(demand.buffer_places(own, tile_at))
    present = None if available is None else _present(demand, available, columns)
    holes = present is not None and not present.all()
    return *_cut(demand, rows, columns, present if holes else None, edges), shard, places, tile_at, holes


def _run_tile(demand: Demand) -> Int64:
    return np.arange(len(demand.owner)) // demand.runs_per_tile


def _places_of(chosen: Int64, count: int) -> Int64:
    places = np.full(count, -1, np.int64)
    places[chosen] = np.arange(len(chosen))
    return places


def _attending(demand: Demand, rows: Int64, columns: Int64, edges: list[Bools] | None) -> Int64:
    """Choose, of some query tiles, those that attend one of some key tiles."""
    used = np.zeros(demand.plan.q_tiles, bool)
    there = np.zeros(demand.plan.kv_tiles, bool)
    there[columns] = True
    for group, (row, col) in enumerate(demand.entries):
        taken = there[col] if edges is None else there[col] & edges[group]
        used[row[taken]] = True
    return rows[used[rows]]


def _hold_whole(demand: Demand, runs: Bools, tiles: Int64) -> bool:
    """Tell whether all runs of some tiles are among some runs."""
    ends = np.minimum((tiles + 1) * demand.runs_per_tile, len(runs))
    before = np.concatenate([[0], np.cumsum(runs)])
    first = tiles * demand.runs_per_tile
    return bool((before[ends] - before[first] == ends - first).all())


def _present(demand: Demand, available: Bools, columns: Int64) -> Bools:
    """Mark which tokens of the key tiles are available, (columns, tile); those past the end count as there."""
    tokens = np.ones(demand.plan.kv_tiles * demand.tile, bool)
    tokens[: len(available) * demand.run] = np.repeat(available, demand.run)
    tokens[demand.branch.nk :] = True
    by_tile: Bools = tokens.reshape(-1, demand.tile)
    return by_tile[columns]


def _cut(
    demand: Demand, rows: Int64, columns: Int64, present: Bools | None, edges: list[Bools] | None
) -> tuple[Branch, SubBranch]:
    branch, plan = demand.branch, demand.plan
    cut = SubBranch(branch, demand.tile, rows, columns)
    if len(rows) == plan.q_tiles and len(columns) == plan.kv_tiles and edges is None and present is None:
        return branch, cut
    tiles = subplan(plan, rows, columns, present=present, wanted=edges)
    return CutBranch(branch.pattern, branch.heads, 1, 0, 0, tiles.nq, tiles.nk, 0, branch.batch, tiles), cut


@dataclass(frozen=True, eq=False)
class Tokens:
    """Some places of an axis of tokens, ascending.

    Attributes:
        count: How many.
        span: (start, stop, step), where they are evenly spaced.
        index: (count,) int64, where they are not.
    """

    count: int
    span: tuple[int, int, int] | None
    index: Tensor | None

    @staticmethod
    def at(places: Int64) -> Tokens:
        """Make them of an array of places."""
        if len(places) == 0:
            return Tokens(0, (0, 0, 1), None)
        step = int(places[1] - places[0]) if len(places) > 1 else 1
        first, last = int(places[0]), int(places[-1])
        if step > 0 and bool((np.diff(places) == step).all()):
            return Tokens(len(places), (first, last + 1, step), None)
        return Tokens(len(places), None, torch.from_numpy(np.ascontiguousarray(places)))

    @property
    def adjacent(self) -> bool:
        """Tell whether they lie side by side."""
        return self.span is not None and self.span[2] == 1

    def of(self, x: Tensor) -> Tensor:
        """Take these tokens of (..., tokens, channels): a view of an even spacing, else a copy."""
        if self.span is not None:
            return x[..., slice(*self.span), :]
        assert self.index is not None
        return x.index_select(-2, self.index.to(x.device))

    def put(self, x: Tensor, values: Tensor) -> None:
        """Write them."""
        if self.span is not None:
            x[..., slice(*self.span), :] = values
        else:
            assert self.index is not None
            x.index_copy_(x.ndim - 2, self.index.to(x.device), values.to(x.dtype))

    def add(self, x: Tensor, values: Tensor) -> None:
        """Add to them; every place is there once, so the order of additions is that of the calls."""
        if self.span is not None:
            x[..., slice(*self.span), :] += values
        else:
            self.put(x, self.of(x) + values)
