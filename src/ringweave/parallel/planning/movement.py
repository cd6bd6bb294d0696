"""The decision whether keys move to queries or queries to keys: a minimum weighted vertex cover per pair of ranks.

A query tile of rank a and a key tile of rank b that it attends form an edge, and at least one of the two has to move.
For example, a global row that attends everything is one query tile with edges to many key tiles: sending the query and
returning its output and log-sum-exp is cheaper than receiving all keys. A minimum cover is a minimum cut (König). Rules
that are vectorized over all pairs prove for most pairs that moving only keys is optimal, and solve most other pairs.
The remaining pairs are solved as flows.
"""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from .demand import Bools, Demand, HeadKind
from .placement import Int64

Float64 = NDArray[np.float64]

# Largest number of edges of a flow, and largest capacity in its 32-bit numbers. Beyond these limits only keys move.
_MAX_FLOW_EDGES = 2**20
_MAX_FLOW = 2**30
_BALANCING = 4


@dataclass(frozen=True, eq=False)
class Moves:
    """The tiles that move for one kind of key heads.

    The edge of query tile i of rank a and key tile j of rank b is computed on b if ``queries[b, i]``, else on a. In the
    second case ``keys[a, j]`` is set.
    """

    keys: Bools  # (ranks, key tiles) whether the rank holds or receives the tile
    queries: Bools  # (ranks, query tiles) whether the rank computes for a query tile of another rank


@dataclass(frozen=True, eq=False)
class _Graph:
    """Edges between query and key tiles of different ranks; different pairs of ranks have no nodes in common."""

    row: Int64  # (edges,) query tile
    col: Int64  # (edges,) key tile
    work: Float64  # (edges,) work of computing the edge, in tiles
    query: Int64  # (edges,) number of the query node, from 0 without gaps over all pairs of ranks
    key: Int64  # (edges,) number of the key node, from 0 without gaps over all pairs of ranks
    weights: tuple[int, int]  # bytes of a query tile and of a key tile

    @cached_property
    def sizes(self) -> tuple[int, int]:
        """Number of query nodes and of key nodes."""
        return int(self.query.max(initial=-1)) + 1, int(self.key.max(initial=-1)) + 1

    def some(self, edges: Bools | Int64) -> _Graph:
        """Return the graph of some edges, with renumbered nodes."""
        query, key = _compact(self.query[edges]), _compact(self.key[edges])
        return replace(self, row=self.row[edges], col=self.col[edges], work=self.work[edges], query=query, key=key)


def movement(demand: Demand, bytes_of_key: int, bytes_of_query: int, cap: float = 1.05) -> tuple[Moves, ...]:
    """Choose the tiles that move, with the fewest bytes for each pair of ranks under a bound on each rank's work.

    Only keys move if tiles are spread over ranks or if there are several kinds of key heads. Without scipy, only keys
    move between pairs of ranks that would need a flow.

    Args:
        demand: The demand of one branch under one placement.
        bytes_of_key: Bytes of a tile of keys and values of one key head.
        bytes_of_query: Bytes of a tile of queries of one query head, including its returned output and log-sum-exp.
        cap: Bound on the work of a rank that accepts remote queries, relative to the mean work.
    Returns:
        The moves of each kind in ``demand.kinds``.
    """
    moves = keys_only(demand)
    # A rank computes all query heads of a remote query, so all heads must need the same tiles, and tiles must be whole.
    if demand.runs_per_tile > 1 or len(demand.kinds) > 1:
        return moves
    (kind,), (move,), owner = demand.kinds, moves, demand.owner
    move.keys[owner, np.arange(len(owner))] = True
    weights = bytes_of_query * kind.queries, bytes_of_key
    # the keys of a whole shard weigh no more than one query tile, so moving queries cannot save bytes
    if demand.placement.ranks == 1 or np.bincount(owner).max() * weights[1] <= weights[0]:
        return moves
    graph = _unproven(demand, kind, weights)
    if graph is not None:
        sent = _within(demand, graph, _solve(graph), cap)[graph.query]
        here = ~sent
        move.keys[owner[graph.row], graph.col] = False
        move.keys[owner[graph.row[here]], graph.col[here]] = True
        move.queries[owner[graph.col[sent]], graph.row[sent]] = True
    return moves


def keys_only(demand: Demand) -> tuple[Moves, ...]:
    """Return the moves in which every rank receives all keys that its queries need, and no query moves."""
    return tuple(Moves(need.copy(), np.zeros_like(need)) for need in demand.needs)


def edges(demand: Demand, kind: HeadKind) -> tuple[Int64, Int64, Float64]:
    """Return (query tile, key tile, work) of a kind's non-empty tiles; work counts query heads and members."""
    if len(kind.groups) == 1:
        row, col = demand.entries[kind.groups[0]]
        return row, col, np.full(len(row), float(kind.queries * len(kind.members)))
    tiles = demand.plan.kv_tiles
    parts = [row * tiles + col for row, col in (demand.entries[group] for group in kind.groups)]
    work = np.concatenate([np.full(len(part), use) for part, use in zip(parts, kind.uses, strict=True)])
    both, inverse = np.unique(np.concatenate(parts), return_inverse=True)
    total = np.bincount(inverse, weights=work).astype(np.float64)
    return both // tiles, both % tiles, total * len(kind.members)


def _unproven(demand: Demand, kind: HeadKind, weights: tuple[int, int]) -> _Graph | None:
    """Return the graph of the pairs of ranks for which moving only keys is not proven optimal; None if there are none.

    Moving only keys is optimal if the weight of each key can be distributed to the queries that need it so that no
    query receives more than its weight. Such a distribution is a flow as large as the cover.
    """
    ranks, owner = demand.placement.ranks, demand.owner
    row, col, work = edges(demand, kind)
    remote = np.flatnonzero(owner[row] != owner[col])
    row, col, work = row[remote], col[remote], work[remote]
    pair = owner[row] * ranks + owner[col]
    query, key = _compact(row * ranks + owner[col]), _compact(owner[row] * demand.plan.kv_tiles + col)
    graph = _Graph(row, col, work, query, key, weights)
    share = np.ones(len(row))
    for _ in range(_BALANCING):
        share /= np.bincount(graph.key, weights=share)[graph.key]
        load = np.bincount(graph.query, weights=share) * weights[1]
        over = load > weights[0] * (1 + 1e-9)
        if not over.any():
            return None
        is_open = np.zeros(ranks * ranks, bool)
        is_open[pair[over[graph.query]]] = True
        # shift weight from overloaded queries to queries with less load
        share /= load[graph.query]
        inside = is_open[pair]
        if not inside.all():
            graph, pair, share = graph.some(inside), pair[inside], share[inside]
    return graph


def _compact(label: Int64) -> Int64:
    """Renumber labels from 0 without gaps, keeping their order."""
    top = int(label.max(initial=0)) + 1
    # use a table of all possible labels unless it is much larger than the list of labels
    if top <= 16 * len(label) + 2**16:
        used = np.zeros(top, bool)
        used[label] = True
        return np.asarray(np.cumsum(used) - 1)[label]
    return np.unique(label, return_inverse=True)[1].reshape(-1).astype(np.int64)


def _solve(graph: _Graph) -> Bools:
    """Return whether each query is in a minimum cover, (queries,); the keys of the other edges are the cover's keys."""
    ends, sizes, weights = (graph.query, graph.key), graph.sizes, graph.weights
    inside = [np.zeros(size, bool) for size in sizes]
    left, before = np.arange(len(graph.row)), -1
    while len(left) != before:
        before = len(left)
        # If a node's neighbours together weigh no more than the node, some minimum cover has them instead of the node.
        for side, other in ((0, 1), (1, 0)):
            degree = np.bincount(ends[side][left], minlength=sizes[side])
            light = left[degree[ends[side][left]] * weights[other] <= weights[side]]
            inside[other][ends[other][light]] = True
            left = left[~inside[other][ends[other][left]]]
        # If a node's neighbours without other edges weigh at least as much as it, some minimum cover has the node.
        for side, other in ((0, 1), (1, 0)):
            degree = np.bincount(ends[other][left], minlength=sizes[other])
            own = np.bincount(ends[side][left[degree[ends[other][left]] == 1]], minlength=sizes[side])
            inside[side] |= (own * weights[other] >= weights[side]) & (own > 0)
            left = left[~inside[side][ends[side][left]]]
    if 0 < len(left) <= _MAX_FLOW_EDGES and importlib.util.find_spec("scipy") is not None:
        rest = graph.some(left)
        inside[0][graph.query[left]] = _cut(rest)[rest.query]
    return inside[0]


def _cut(graph: _Graph) -> Bools:
    """Return whether each query is in a minimum cover, (queries,), found by a maximum flow."""
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow

    queries, keys = graph.sizes
    divisor = math.gcd(*graph.weights)
    of_query, of_key = (weight // divisor for weight in graph.weights)
    if max(of_query, keys * of_key) >= _MAX_FLOW:
        return np.zeros(queries, bool)
    source, sink = queries + keys, queries + keys + 1
    key = graph.key + queries
    start = np.concatenate([np.full(queries, source), graph.query, np.arange(queries, source)])
    stop = np.concatenate([np.arange(queries), key, np.full(keys, sink)])
    # The capacity of a middle edge exceeds its query's capacity, so it is never cut.
    widths = np.repeat(np.array([of_query, of_query + 1, of_key], np.int32), (queries, len(key), keys))
    capacity = csr_array((widths, (start, stop)), shape=(sink + 1, sink + 1))
    residual = csr_array(capacity - maximum_flow(capacity, source, sink).flow)
    residual.eliminate_zeros()
    reached = np.zeros(sink + 1, bool)
    reached[breadth_first_order(residual, source, return_predecessors=False)] = True
    return ~reached[:queries]


def _within(demand: Demand, graph: _Graph, taken: Bools, cap: float) -> Bools:
    """Return ``taken`` without queries that exceed the work bound of their helper; the best savings are kept first."""
    (queries, keys), (of_query, of_key) = graph.sizes, graph.weights
    ranks, work = demand.placement.ranks, demand.work()
    room = cap * work.mean() - work
    asker, helper = np.zeros(queries, np.int64), np.zeros(queries, np.int64)
    asker[graph.query], helper[graph.query] = demand.owner[graph.row], demand.owner[graph.col]
    came = np.zeros(keys, bool)
    came[graph.key[~taken[graph.query]]] = True
    spared = np.bincount(graph.query[~came[graph.key]], minlength=queries)
    work_of_query = np.bincount(graph.query, weights=graph.work, minlength=queries)
    chosen = np.flatnonzero(taken)
    saving = (spared[chosen] * of_key - of_query) / work_of_query[chosen]
    order = chosen[np.lexsort((-saving, helper[chosen]))]
    total = np.cumsum(work_of_query[order])
    first = np.searchsorted(helper[order], helper[order])
    before = np.where(first > 0, total[first - 1], 0.0)
    fits = np.zeros_like(taken)
    fits[order[total - before <= room[helper[order]]]] = True
    # Keys that now move for dropped queries no longer count as saved. If a pair of ranks then saves fewer bytes than
    # its remaining queries cost, drop these too.
    pair = helper * ranks + asker
    pair_of_key = np.zeros(keys, np.int64)
    pair_of_key[graph.key] = pair[graph.query]
    away = np.ones(keys, bool)
    away[graph.key[~fits[graph.query]]] = False
    saved = np.bincount(pair_of_key[away], minlength=ranks**2) * float(of_key)
    saved -= np.bincount(pair[fits], minlength=ranks**2) * float(of_query)
    return np.asarray(fits & (saved[pair] >= 0))
