"""One kernel call of a rank: some of its queries of a branch, against the keys that it holds or has received."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...merge import merge_into
from ...ops.backend import Backend, Case, Inputs, Upstream
from ...ops.dispatch import choose
from ...ops.head_views import Heads
from ...plan import BlockPlan, Branch, subplan
from ..planning.demand import Demand
from ..planning.placement import Int64
from .places import Tokens
from .workspace import Workspace


@dataclass(frozen=True, eq=False)
class Share(Branch):
    """Some rows and columns of a branch, under a plan of their own."""

    tiles: BlockPlan
    _on: dict[str, BlockPlan] = field(default_factory=dict)

    @property
    def structure(self) -> str:
        """Rows and columns are cut out: no dense kernel knows them."""
        return "sparse"

    @property
    def tile(self) -> tuple[int, int]:
        """That of the whole's plan."""
        return self.tiles.q_tile, self.tiles.kv_tile

    def plan(self, device: str | torch.device = "cpu", tile: int | tuple[int, int] | None = None) -> BlockPlan:
        """The plan of the cut."""
        name = str(torch.device(device))
        if name not in self._on:
            self._on[name] = self.tiles.to(device)
        return self._on[name]


@dataclass(frozen=True, eq=False)
class Part:
    """Queries and keys of one kernel call, as places in shards and buffers.

    Attributes:
        branch: What the kernel computes.
        heads: Its heads.
        queries: Its queries in the shard.
        among: Where they lie among the kernel's queries; None: they are these, one after the other.
        direct: Its keys in the shard, where the kernel reads them there; None: they are put together in a buffer.
        kept: Of the shard's keys, those that go into the buffer, and their places in it.
        tile_at: (key tiles of the whole,) where each lies in the buffer, -1 for none.
        holes: Whether the buffer has keys that nobody fills, under a mask.
    """

    branch: Branch
    heads: Heads
    queries: Tokens
    among: Tokens | None
    direct: Tokens | None
    kept: tuple[Tokens, Tokens]
    tile_at: Int64
    holes: bool = False

    @staticmethod
    def of(
        demand: Demand,
        rank: int,
        ratio: int,
        *,
        needs: tuple[NDArray[np.bool_], ...] | None = None,
        available: NDArray[np.bool_] | None = None,
        own_keys: bool = True,
        wanted: list[NDArray[np.bool_]] | None = None,
    ) -> Part | None:
        """The queries of a rank against the key runs that are ``available``: all that they need by default.

        Returns:
            None where the rank has nothing to compute.
        """
        here = demand.owner == rank
        need = np.logical_or.reduce([each[rank] for each in (demand.needs if needs is None else needs)])
        run_tile = np.arange(len(here)) // demand.runs_per_tile
        usable = need[run_tile] if available is None else need[run_tile] & available
        columns = np.unique(run_tile[usable])
        rows = np.unique(run_tile[here])
        rows = _attending(demand, rows, columns, wanted)
        if not len(rows) or not len(columns):
            return None
        mine = here & np.isin(run_tile, rows)
        queries, among = _queries(demand, rows, mine)
        if own_keys:
            direct = _direct(demand, here, columns)
            if direct is not None:
                columns, keys = direct
                cut = _cut(demand, rows, columns, None, wanted)
                empty = Tokens.at(np.zeros(0, np.int64))
                numbers = _places_of(columns, demand.plan.kv_tiles)
                return Part(cut, Heads(demand.branch, ratio), queries, among, keys, (empty, empty), numbers)
        tile_at = _places_of(columns, demand.plan.kv_tiles)
        present = None
        if available is not None:
            present = _present(demand, available, columns)
        stay = here & (tile_at[run_tile] >= 0) if own_keys else np.zeros_like(here)
        kept = (Tokens.at(demand.shard_places(stay)), Tokens.at(demand.buffer_places(stay, tile_at)))
        cut = _cut(demand, rows, columns, present, wanted)
        holes = present is not None and not present.all()
        return Part(cut, Heads(demand.branch, ratio), queries, among, None, kept, tile_at, holes)

    @staticmethod
    def guest(demand: Demand, rank: int, ratio: int, wanted: list[NDArray[np.bool_]] | None) -> Part | None:
        """Another rank's query tiles against this rank's keys: the entries that are ``wanted``, of whole tiles.

        The guest's queries come one tile after the other, in their order.
        """
        if wanted is None or not any(each.any() for each in wanted):
            return None
        pairs = [(row[each], col[each]) for (row, col), each in zip(demand.entries, wanted, strict=True)]
        rows = np.unique(np.concatenate([row for row, _ in pairs]))
        columns = np.unique(np.concatenate([col for _, col in pairs]))
        here = demand.owner == rank
        found = _direct(demand, here, columns)
        keys = None if found is None else found[1]
        columns = columns if found is None else found[0]
        cut = _cut(demand, rows, columns, None, wanted)
        queries = Tokens.at(np.arange(cut.nq))
        tile_at = _places_of(columns, demand.plan.kv_tiles)
        stay = here & (tile_at[np.arange(len(here))] >= 0)
        kept = (Tokens.at(demand.shard_places(stay)), Tokens.at(demand.buffer_places(stay, tile_at)))
        return Part(cut, Heads(demand.branch, ratio, guests=True), queries, None, keys, kept, tile_at)

    def own(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """Of (B, Hq, shard, C), what the kernel takes; places that are no query of this rank hold ``fill``."""
        mine = self.queries.of(x[:, self.heads.queries])
        if self.among is None:
            return mine
        whole = x.new_full((*mine.shape[:2], self.branch.nq, x.shape[3]), fill)
        self.among.put(whole, mine)
        return whole

    def result(self, x: Tensor) -> Tensor:
        """The inverse: of the kernel's (B, Hq, queries, C), those of this rank."""
        return x if self.among is None else self.among.of(x)

    def buffer(self, x: Tensor, space: Workspace, name: str) -> Tensor:
        """(B, distinct key heads, keys, C) with the shard's own keys in place; the others are still to be put."""
        held = self.heads.of_keys(x)
        if self.direct is not None:
            return self.direct.of(held)
        whole = space.take(name, (*held.shape[:2], self.branch.nk, x.shape[3]), x.dtype, x.device)
        if self.holes:
            whole.zero_()
        self.kept[1].put(whole, self.kept[0].of(held))
        return whole

    def inputs(self, of: Inputs) -> Inputs:
        """What the kernel takes, from the shard of q and full buffers."""
        return of._replace(q=self.own(of.q), k=self.heads.for_kernel(of.k), v=self.heads.for_kernel(of.v))

    def backend(self, name: str, inputs: Inputs, needs_grad: bool = False) -> Backend:
        """Who computes it."""
        return choose(name, Case.of(inputs, needs_grad), self.branch)

    def forward(self, inputs: Inputs, dtype: torch.dtype, backend: str) -> tuple[Tensor, Tensor]:
        """(out, lse) of this rank's queries, from the shard of q and full buffers."""
        inputs = self.inputs(inputs)
        out, lse = self.backend(backend, inputs).forward(inputs, self.branch, dtype)
        return self.result(out), self.result(lse[..., None])[..., 0]

    def merge(self, out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
        """Merge a result of this part into the shard's."""
        merge_at(self.queries, out[:, self.heads.queries], lse[:, self.heads.queries], part_out, part_lse)

    def backward(self, upstream: Upstream, inputs: Inputs, backend: str) -> tuple[Tensor, Tensor, Tensor]:
        """(dq of this rank's queries, dk and dv of the buffers), in lse's dtype."""
        distinct = inputs.k.shape[1]
        inputs = self.inputs(inputs)
        chosen = self.backend(backend, inputs, needs_grad=True)
        assert chosen.backward is not None
        lse, delta = upstream.lse[..., None], upstream.delta[..., None]
        mine = Upstream(self.own(upstream.dout), self.own(lse, -torch.inf)[..., 0], self.own(delta)[..., 0])
        dq, dk, dv = chosen.backward(mine, inputs, self.branch, lse.dtype)
        return self.result(dq), self.heads.from_kernel(dk, distinct), self.heads.from_kernel(dv, distinct)

    def add_own(self, total: Tensor, part: Tensor) -> None:
        """Add to the shard's (B, Hkv, shard, C) the part of a buffer's gradients that is its own."""
        if self.direct is not None:
            self.heads.update(total, self.direct.add, part)
        else:
            self.heads.update(total, self.kept[0].add, self.kept[1].of(part))


def merge_at(places: Tokens, out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Merge a partial result into some tokens of running (out, lse), in place."""
    column = lse[..., None]
    some_out, some_lse = places.of(out), places.of(column)[..., 0]
    merge_into(some_out, some_lse, part_out, part_lse)
    if places.span is None:
        # copies were merged
        places.put(out, some_out)
        places.put(column, some_lse[..., None])


def _places_of(chosen: Int64, count: int) -> Int64:
    places = np.full(count, -1, np.int64)
    places[chosen] = np.arange(len(chosen))
    return places


def _attending(demand: Demand, rows: Int64, columns: Int64, wanted: list[NDArray[np.bool_]] | None) -> Int64:
    """Of some query tiles, those that attend one of some key tiles."""
    used = np.zeros(demand.plan.q_tiles, bool)
    there = np.zeros(demand.plan.kv_tiles, bool)
    there[columns] = True
    for group, (row, col) in enumerate(demand.entries):
        taken = there[col] if wanted is None else there[col] & wanted[group]
        used[row[taken]] = True
    return rows[used[rows]]


def _whole(demand: Demand, runs: NDArray[np.bool_], tiles: Int64) -> bool:
    """Whether all runs of some tiles are among some runs."""
    ends = np.minimum((tiles + 1) * demand.runs_per_tile, len(runs))
    before = np.concatenate([[0], np.cumsum(runs)])
    first = tiles * demand.runs_per_tile
    return bool((before[ends] - before[first] == ends - first).all())


def _queries(demand: Demand, rows: Int64, mine: NDArray[np.bool_]) -> tuple[Tokens, Tokens | None]:
    queries = Tokens.at(demand.shard_places(mine))
    if _whole(demand, mine, rows):
        return queries, None
    return queries, Tokens.at(demand.buffer_places(mine, _places_of(rows, demand.plan.q_tiles)))


def _direct(demand: Demand, here: NDArray[np.bool_], columns: Int64) -> tuple[Int64, Tokens] | None:
    """The rank's own key tiles as evenly spaced places of its shard, where they are all that is needed."""
    tiles = np.unique(np.flatnonzero(here) // demand.runs_per_tile)
    if not np.isin(columns, tiles).all() or not _whole(demand, here, tiles):
        return None
    places = Tokens.at(demand.shard_places(here))
    return None if places.span is None else (tiles, places)


def _present(demand: Demand, available: NDArray[np.bool_], columns: Int64) -> NDArray[np.bool_]:
    """(columns, tile) which tokens of the key tiles are available; those past the end count as there."""
    tokens = np.ones(demand.plan.kv_tiles * demand.tile, bool)
    tokens[: len(available) * demand.run] = np.repeat(available, demand.run)
    tokens[demand.branch.nk :] = True
    found: NDArray[np.bool_] = tokens.reshape(-1, demand.tile)[columns]
    return found


def _cut(
    demand: Demand,
    rows: Int64,
    columns: Int64,
    present: NDArray[np.bool_] | None,
    wanted: list[NDArray[np.bool_]] | None,
) -> Branch:
    branch, plan = demand.branch, demand.plan
    whole = len(rows) == plan.q_tiles and len(columns) == plan.kv_tiles
    if whole and wanted is None and (present is None or present.all()):
        return branch
    tiles = subplan(plan, rows, columns, present=present, wanted=wanted)
    return Share(
        branch.pattern, branch.heads, 1, 0, 0, tiles.nq, tiles.nk, 0, branch.batch, tiles,
    )  # fmt: skip
