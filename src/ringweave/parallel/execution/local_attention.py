"""One kernel call of a rank: attention of some queries of a branch over keys that the rank holds or has received.

The kernel computes a :class:`SubBranch`: some query tiles and key tiles of the branch, renumbered. A
:class:`QueryView` says which of its queries this call computes, and a :class:`KeyView` where its keys come from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...backends.backend import Backend, Heads, Upstream
from ...call import Operands
from ...memory.workspace import Workspace
from ...plan import Branch
from ...plan.subplan import CutBranch, numbers_of, subplan
from ...program import choose_backend
from ...terms.operands import TermOperands
from ..planning.demand import Bools, Demand
from ..planning.placement import Int64
from .tokens import Tokens


class QueryView(NamedTuple):
    """The queries of a kernel call."""

    shard_tokens: Tokens  # places of the queries in the shard or, for remote queries, in the received tensor
    # places of these queries among the kernel's queries; None if they are all of them, in order
    kernel_tokens: Tokens | None

    @staticmethod
    def of(demand: Demand, runs: Bools, rows: Int64) -> QueryView:
        """Build the view of the queries of some runs of the shard; the kernel computes the query tiles ``rows``."""
        shard_tokens = Tokens.at(demand.shard_places(runs))
        if _hold_whole(demand, runs, rows):
            return QueryView(shard_tokens, None)
        return QueryView(shard_tokens, Tokens.at(demand.buffer_places(runs, numbers_of(rows, demand.plan.q_tiles))))

    def of_kernel(self, x: Tensor) -> Tensor:
        """Return the rows of these queries from a kernel's result."""
        return x if self.kernel_tokens is None else self.kernel_tokens.of(x)


class KeyView(NamedTuple):
    """The keys of a kernel call: whole tiles in a buffer, which come from the shard and from received messages."""

    tiles: Int64  # key tiles of the whole sequence in the buffer, ascending
    tile_at: Int64  # (key tiles of the whole sequence,) index of each tile in the buffer, or -1
    shard_tokens: Tokens  # places of the used keys in the shard
    buffer_tokens: Tokens | None  # places of these keys in the buffer; None if they are all of it, read without a copy
    # (tiles, tokens of a tile) keys of the buffer that exist; the plan masks the others. None for all.
    present: Bools | None

    @staticmethod
    def of(demand: Demand, own: Bools, columns: Int64, available: Bools | None) -> KeyView:
        """Build the view of the key tiles ``columns``.

        Args:
            demand: The demand of a branch under a placement.
            own: (runs,) key runs that come from the shard.
            columns: Key tiles that the kernel computes with.
            available: (runs,) key runs that come from the shard or from messages; None for all.
        """
        tiles = np.unique(_run_tile(demand)[own])
        shard_tokens = Tokens.at(demand.shard_places(own))
        # If all needed tiles are whole in the shard and its tokens evenly spaced, the kernel reads them without a copy.
        if shard_tokens.span is not None and np.isin(columns, tiles).all() and _hold_whole(demand, own, tiles):
            return KeyView(tiles, numbers_of(tiles, demand.plan.kv_tiles), shard_tokens, None, None)
        tile_at = numbers_of(columns, demand.plan.kv_tiles)
        own = own & (tile_at[_run_tile(demand)] >= 0)
        present = None if available is None else _present(demand, available, columns)
        return KeyView(
            columns,
            tile_at,
            shard_tokens=Tokens.at(demand.shard_places(own)),
            buffer_tokens=Tokens.at(demand.buffer_places(own, tile_at)),
            present=None if present is None or present.all() else present,
        )

    def buffer(self, own: Tensor, tokens: int, space: Workspace) -> Tensor:
        """Return a buffer of ``tokens`` keys with those of the shard, ``own``: (B, heads, shard tokens, C)."""
        own = self.shard_tokens.of(own)
        if self.buffer_tokens is None:
            return own
        whole = space.take((*own.shape[:2], tokens, own.shape[3]), own.dtype, own.device)
        if self.present is not None:
            # some places stay empty
            whole.zero_()
        self.buffer_tokens.put(whole, own)
        return whole

    def of_kernel(self, x: Tensor) -> Tensor:
        """Return the rows of the shard's keys from the gradient of a buffer."""
        return x if self.buffer_tokens is None else self.buffer_tokens.of(x)


@dataclass(frozen=True, eq=False)
class SubBranch:
    """Some query tiles and key tiles of a branch, and the branch that a kernel computes for them."""

    whole: Branch  # the branch over the whole sequence
    tile: int  # side of its tiles in tokens
    rows: Int64  # query tiles of the kernel
    columns: Int64  # key tiles of the kernel
    branch: Branch  # the branch that the kernel computes

    @staticmethod
    def of(demand: Demand, rows: Int64, keys: KeyView, edges: list[Bools] | None) -> SubBranch:
        """Cut the query tiles ``rows`` and a view's key tiles out of a branch; ``edges`` as in `LocalAttention.of`."""
        whole, plan, columns = demand.branch, demand.plan, keys.tiles
        branch = whole
        selects = len(rows) < plan.q_tiles or len(columns) < plan.kv_tiles
        if selects or edges is not None or keys.present is not None:
            branch = CutBranch.of(whole, subplan(plan, rows, columns, present=keys.present, wanted=edges))
        return SubBranch(whole, demand.tile, rows, columns, branch)

    @property
    def query_positions(self) -> Int64:
        """Positions of the kernel's queries in the whole sequence."""
        return self._positions(self.rows, self.whole.q_first, self.whole.nq)

    @property
    def key_positions(self) -> Int64:
        """Positions of the kernel's keys in the whole sequence."""
        return self._positions(self.columns, self.whole.k_first, self.whole.nk)

    def terms(self, terms: TermOperands | None) -> TermOperands | None:
        """Return the terms and dropout with the heads and positions of the kernel's queries and keys."""
        if terms is None:
            return None
        heads, rows, columns = terms[2:5]
        queries, keys = (torch.from_numpy(x).to(heads.device) for x in (self.query_positions, self.key_positions))
        return terms._replace(heads=heads[slice(*self.whole.heads)], rows=rows[queries], columns=columns[keys])

    def _positions(self, tiles: Int64, first: int, length: int) -> Int64:
        inside = (tiles[:, None] * self.tile + np.arange(self.tile)).reshape(-1)
        positions: Int64 = first + self.whole.rate * inside[inside < length]
        return positions


@dataclass(frozen=True, eq=False)
class LocalAttention:
    """One kernel call of a rank."""

    heads: Heads
    queries: QueryView
    keys: KeyView
    cut: SubBranch  # the tiles that the kernel computes

    @property
    def branch(self) -> Branch:
        """The branch that the kernel computes."""
        return self.cut.branch

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
        queries = QueryView.of(demand, here & np.isin(run_tile, rows), rows)
        keys = KeyView.of(demand, own, columns, available)
        return LocalAttention(Heads(demand.branch, ratio), queries, keys, SubBranch.of(demand, rows, keys, edges))

    @staticmethod
    def of_remote(demand: Demand, rank: int, ratio: int, edges: list[Bools] | None) -> LocalAttention | None:
        """Build the attention of another rank's query tiles over this rank's keys, for the entries in ``edges``.

        The received queries are whole tiles in ascending order.
        """
        if edges is None or not any(each.any() for each in edges):
            return None
        pairs = [(row[each], col[each]) for (row, col), each in zip(demand.entries, edges, strict=True)]
        rows, columns = (np.unique(np.concatenate(side)) for side in zip(*pairs, strict=True))
        keys = KeyView.of(demand, demand.owner == rank, columns, None)
        cut = SubBranch.of(demand, rows, keys, edges)
        queries = QueryView(Tokens.at(np.arange(cut.branch.nq)), None)
        return LocalAttention(Heads(demand.branch, ratio, remote=True), queries, keys, cut)

    def buffers(self, inputs: Operands, space: Workspace) -> Operands:
        """Return the inputs with buffers of the kernel's keys and values, (B, distinct key heads, keys, C) each.

        The buffers contain the shard's keys and values; the caller writes the received ones.
        """
        k, v = (self.keys.buffer(self.heads.of_keys(x), self.branch.nk, space) for x in (inputs.k, inputs.v))
        return inputs._replace(k=k, v=v)

    def forward(self, inputs: Operands, dtype: torch.dtype, backend: str) -> tuple[Tensor, Tensor]:
        """Compute (out, lse) of the queries; q is indexed by ``queries``, and k and v are complete buffers."""
        inputs = self._kernel_inputs(inputs)
        out, lse = self.chosen(inputs, backend).forward(inputs, self.branch, dtype)
        return self.queries.of_kernel(out), self.queries.of_kernel(lse[..., None])[..., 0]

    def backward(self, inputs: Operands, upstream: Upstream, backend: str) -> tuple[Tensor, Tensor, Tensor]:
        """Compute dq of the queries, and dk and dv of the buffers, in lse's dtype."""
        inputs = self._kernel_inputs(inputs)
        chosen = self.chosen(inputs, backend, needs_grad=True)
        assert chosen.backward is not None
        dout, lse, delta = upstream[:3]
        lse, delta = self._kernel_rows(lse[..., None], -torch.inf), self._kernel_rows(delta[..., None])
        upstream = Upstream(self._kernel_rows(dout), lse[..., 0], delta[..., 0])
        dq, dk, dv = chosen.backward(upstream, inputs, self.branch, lse.dtype)
        return self.queries.of_kernel(dq), self.heads.from_kernel(dk), self.heads.from_kernel(dv)

    def chosen(self, inputs: Operands, backend: str, needs_grad: bool = False) -> Backend:
        """Choose the backend."""
        return choose_backend(backend, inputs.call(needs_grad), self.branch)

    def _kernel_inputs(self, inputs: Operands) -> Operands:
        """Convert queries and buffers to the kernel's inputs."""
        k, v = self.heads.for_kernel(inputs.k), self.heads.for_kernel(inputs.v)
        return inputs._replace(q=self._kernel_rows(inputs.q), k=k, v=v, terms=self.cut.terms(inputs.terms))

    def _kernel_rows(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """Return the kernel's queries from x, (B, Hq, tokens, C); places of other ranks' queries hold ``fill``."""
        mine = self.queries.shard_tokens.of(x[:, self.heads.queries])
        if self.queries.kernel_tokens is None:
            return mine
        whole = x.new_full((*mine.shape[:2], self.branch.nq, x.shape[3]), fill)
        self.queries.kernel_tokens.put(whole, mine)
        return whole


def _run_tile(demand: Demand) -> Int64:
    return np.arange(len(demand.owner)) // demand.runs_per_tile


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
