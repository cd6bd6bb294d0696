"""One kernel call of a rank: attention of some queries of a branch over keys that the rank holds or has received."""

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
from ...program import choose_backend
from ...terms import TermOperands
from ..planning.demand import Bools, Demand
from ..planning.placement import Int64


@dataclass(frozen=True, eq=False)
class SubBranch:
    """The positions of a kernel's queries and keys in the whole sequence.

    Attributes:
        view: The branch over the whole sequence, from which the kernel's branch is cut.
        tile: Side of its tiles in tokens.
        rows: Query tiles of the kernel.
        columns: Key tiles of the kernel.
    """

    view: Branch
    tile: int
    rows: Int64
    columns: Int64

    def of(self, scoring: TermOperands | None) -> TermOperands | None:
        """Return the terms and dropout with the heads and positions of the kernel's queries and keys."""
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
    """The queries and keys of one kernel call, as places in shards and buffers.

    Attributes:
        heads: Heads of the call.
        queries: Places of the queries in the shard or, for remote queries, in the received tensor.
        among: Places of these queries among the kernel's queries; None if they are all of them, in order.
        branch: The branch that the kernel computes.
        cut: Positions of that branch's tokens in the whole sequence.
        own: Places of the used keys in the shard.
        own_at: Places of these keys among the kernel's keys; None if they are all of them, read without a copy.
        tile_at: (key tiles of the whole sequence,) index of each tile among the kernel's key tiles, or -1.
        holes: Whether some places of the kernel's keys stay empty; the plan masks them.
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
        """Build the attention of a rank's queries over the ``available`` key runs.

        Args:
            demand: The demand of a branch under a placement.
            rank: The rank.
            ratio: Query heads per key head.
            needs: Key tiles that each rank computes with; None for those of ``demand``.
            available: (runs,) mask of the available key runs; None for all. A mask without runs of the rank's shard
                means that all keys come from received messages.
            edges: Mask of the plan's entries to compute, per row set; None for all.
        Returns:
            The attention, or None if the rank has nothing to compute.
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
        """Build the attention of another rank's query tiles over this rank's keys, for the entries in ``edges``.

        The received queries are whole tiles in ascending order.
        """
        if edges is None or not any(each.any() for each in edges):
            return None
        pairs = [(row[each], col[each]) for (row, col), each in zip(demand.entries, edges, strict=True)]
        rows, columns = (np.unique(np.concatenate(side)) for side in zip(*pairs, strict=True))
        keys = _keys(demand, demand.owner == rank, rows, columns, None, edges)
        return LocalAttention(Heads(demand.branch, ratio, remote=True), Tokens.at(np.arange(keys[0].nq)), None, *keys)

    def buffers(self, inputs: Operands, space: Workspace) -> Operands:
        """Return the inputs with buffers of the kernel's keys and values, (B, distinct key heads, keys, C) each.

        The buffers contain the shard's keys and values; the caller writes the received ones.
        """
        return inputs._replace(k=self._buffer(inputs.k, space), v=self._buffer(inputs.v, space))

    def forward(self, inputs: Operands, dtype: torch.dtype, backend: str) -> tuple[Tensor, Tensor]:
        """Compute (out, lse) of the queries; q is indexed by ``queries``, and k and v are complete buffers."""
        inputs = self._taken(inputs)
        out, lse = self.chosen(inputs, backend).forward(inputs, self.branch, dtype)
        return self._given(out), self._given(lse[..., None])[..., 0]

    def backward(self, inputs: Operands, upstream: Upstream, backend: str) -> tuple[Tensor, Tensor, Tensor]:
        """Compute dq of the queries, and dk and dv of the buffers, in lse's dtype."""
        inputs = self._taken(inputs)
        chosen = self.chosen(inputs, backend, needs_grad=True)
        assert chosen.backward is not None
        lse, delta = self._take(upstream.lse[..., None], -torch.inf), self._take(upstream.delta[..., None])
        upstream = Upstream(self._take(upstream.dout), lse[..., 0], delta[..., 0])
        dq, dk, dv = chosen.backward(upstream, inputs, self.branch, lse.dtype)
        return self._given(dq), self.heads.from_kernel(dk), self.heads.from_kernel(dv)

    def chosen(self, inputs: Operands, backend: str, needs_grad: bool = False) -> Backend:
        """Choose the backend."""
        return choose_backend(backend, inputs.call(needs_grad), self.branch)

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
        """Convert queries and buffers to the kernel's inputs."""
        k, v = self.heads.for_kernel(inputs.k), self.heads.for_kernel(inputs.v)
        return inputs._replace(q=self._take(inputs.q), k=k, v=v, terms=self.cut.of(inputs.terms))

    def _take(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """Return the kernel's queries from x, (B, Hq, tokens, C); places of other ranks' queries hold ``fill``."""
        mine = self.queries.of(x[:, self.heads.queries])
        if self.among is None:
            return mine
        whole = x.new_full((*mine.shape[:2], self.branch.nq, x.shape[3]), fill)
        self.among.put(whole, mine)
        return whole

    def _given(self, x: Tensor) -> Tensor:
        """Return the rows of this call's queries from a kernel result."""
        return x if self.among is None else self.among.of(x)


def _keys(
    demand: Demand, own: Bools, rows: Int64, columns: Int64, available: Bools | None, edges: list[Bools] | None
) -> tuple[Branch, SubBranch, Tokens, Tokens | None, Int64, bool]:
    """Cut out a kernel's branch and locate its keys: the fields of :class:`LocalAttention` from ``branch`` on."""
    tiles = np.unique(_run_tile(demand)[own])
    shard = Tokens.at(demand.shard_places(own))
    # If all needed tiles are whole in the shard and its tokens evenly spaced, the kernel reads them without a copy.
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
    """Return the query tiles of ``rows`` that attend any key tile of ``columns``."""
    used = np.zeros(demand.plan.q_tiles, bool)
    there = np.zeros(demand.plan.kv_tiles, bool)
    there[columns] = True
    for group, (row, col) in enumerate(demand.entries):
        taken = there[col] if edges is None else there[col] & edges[group]
        used[row[taken]] = True
    return rows[used[rows]]


def _hold_whole(demand: Demand, runs: Bools, tiles: Int64) -> bool:
    """Return whether ``runs`` contains all runs of the tiles."""
    ends = np.minimum((tiles + 1) * demand.runs_per_tile, len(runs))
    before = np.concatenate([[0], np.cumsum(runs)])
    first = tiles * demand.runs_per_tile
    return bool((before[ends] - before[first] == ends - first).all())


def _present(demand: Demand, available: Bools, columns: Int64) -> Bools:
    """Mark the available tokens of the key tiles, (columns, tile); tokens past the end count as available."""
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
    sizes = tiles.nq, tiles.nk, 0, branch.batch, tiles
    return CutBranch(branch.pattern, branch.heads, 1, 0, 0, *sizes, spacing=branch.spacing), cut


@dataclass(frozen=True, eq=False)
class Tokens:
    """Ascending places on an axis of tokens.

    Attributes:
        count: Number of places.
        span: (start, stop, step) if they are evenly spaced, else None.
        index: int64 (count,) if they are not evenly spaced, else None.
    """

    count: int
    span: tuple[int, int, int] | None
    index: Tensor | None

    @staticmethod
    def at(places: Int64) -> Tokens:
        """Create the object from an array of places."""
        if len(places) == 0:
            return Tokens(0, (0, 0, 1), None)
        step = int(places[1] - places[0]) if len(places) > 1 else 1
        first, last = int(places[0]), int(places[-1])
        if step > 0 and bool((np.diff(places) == step).all()):
            return Tokens(len(places), (first, last + 1, step), None)
        return Tokens(len(places), None, torch.from_numpy(np.ascontiguousarray(places)))

    @property
    def adjacent(self) -> bool:
        """Whether the places are consecutive."""
        return self.span is not None and self.span[2] == 1

    def of(self, x: Tensor) -> Tensor:
        """Return these tokens of x, (..., tokens, channels), as a view if they are evenly spaced, else as a copy."""
        if self.span is not None:
            return x[..., slice(*self.span), :]
        assert self.index is not None
        return x.index_select(-2, self.index.to(x.device))

    def put(self, x: Tensor, values: Tensor) -> None:
        """Write values to these places of x."""
        if self.span is not None:
            x[..., slice(*self.span), :] = values
        else:
            assert self.index is not None
            x.index_copy_(x.ndim - 2, self.index.to(x.device), values.to(x.dtype))

    def add(self, x: Tensor, values: Tensor) -> None:
        """Add values to these places of x; places are distinct, so the order of additions is the order of calls."""
        if self.span is not None:
            x[..., slice(*self.span), :] += values
        else:
            self.put(x, self.of(x) + values)
