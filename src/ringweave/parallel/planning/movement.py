"""Whether keys move to queries or queries to keys: a minimum weighted vertex cover of each pair of ranks.

A query tile of rank a and a key tile of rank b that it attends are an edge; at least one of the two has to cross. A
global row that attends everything is one query tile on one side and many key tiles on the other: sending it, and
its output and log-sum-exp back, is cheaper than receiving all keys. A minimum cover is a minimum cut (König).
Most pairs are proven to move keys only, and most others solved, by rules over all pairs at once; the rest is a flow.
"""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .demand import Bools, Demand, Kind
from .placement import Int64

# edges that a flow is asked to solve; beyond that keys move
_MAX_FLOW_EDGES = 2**20
_MAX_FLOW = 2**29
_BALANCING = 4


@dataclass(frozen=True, eq=False)
class Moves:
    """What crosses for one kind of key heads.

    The edge of query tile i, owned by rank a, and key tile j, owned by b, is computed at b where ``queries[b, i]``,
    else at a, and then ``keys[a, j]`` holds.

    Attributes:
        keys: (ranks, key tiles), whether the rank has the tile: its own or a received one.
        queries: (ranks, query tiles), whether the rank computes for a query tile of another rank.
    """

    keys: Bools
    queries: Bools


@dataclass
class _Edges:
    """Edges of a graph whose components are pairs of ranks.

    ``query`` numbers the query tiles by pair, ``key`` the key tiles by pair; both from 0 without gaps.
    """

    query: Int64
    key: Int64
    queries: int
    keys: int


def cover(demand: Demand, bytes_of_key: int, bytes_of_query: int, cap: float = 1.05) -> tuple[Moves, ...]:
    """What moves, per kind: the fewest bytes for each pair of ranks, under a bound on what a rank computes.

    Where tiles are cut between ranks, or key heads are of several kinds, only keys move, and likewise for pairs that
    need a flow where scipy is missing.

    Args:
        demand: One branch under one placement.
        bytes_of_key: Of a tile of keys and values of one key head.
        bytes_of_query: Of a tile of queries of one query head, and of its output and log-sum-exp on the way back.
        cap: A rank takes others' queries while its work is at most this many times the mean.
    Returns:
        One for each of ``demand.kinds``.
    """
    moves = keys_only(demand)
    # a host computes for all query heads of its guest
    if demand.runs_per_tile > 1 or len(demand.kinds) > 1:
        return moves
    ranks = demand.placement.ranks
    tiles = np.arange(demand.plan.kv_tiles)
    room: NDArray[np.float64] | None = None
    for number, kind in enumerate(demand.kinds):
        keys, queries = moves[number].keys, moves[number].queries
        keys[demand.owner, tiles] = True
        weights = bytes_of_key, bytes_of_query * kind.queries
        # so few keys on a rank that no query tile outweighs them
        if ranks == 1 or np.bincount(demand.owner).max() * weights[0] <= weights[1]:
            continue
        row, col, work = edges(demand, kind)
        remote = np.flatnonzero(demand.owner[row] != demand.owner[col])
        found = _by_pair(demand, row[remote], col[remote], *weights)
        if found is None:
            continue
        if room is None:
            room = cap * demand.work().mean() - demand.work()
        kept, graph = found
        taken = _solve(graph, *weights)
        row, col, work = row[remote[kept]], col[remote[kept]], work[remote[kept]]
        taken = _within(room, demand.owner[row], demand.owner[col], graph, taken, work, weights)
        sent = taken[graph.query]
        keys[demand.owner[row], col] = False
        keys[demand.owner[row[~sent]], col[~sent]] = True
        queries[demand.owner[col[sent]], row[sent]] = True
        room -= np.bincount(demand.owner[col[sent]], weights=work[sent], minlength=ranks)
        room += np.bincount(demand.owner[row[sent]], weights=work[sent], minlength=ranks)
    return moves


def keys_only(demand: Demand) -> tuple[Moves, ...]:
    """Every rank receives what its own queries need."""
    return tuple(Moves(need.copy(), np.zeros_like(need)) for need in demand.needs)


def edges(demand: Demand, kind: Kind) -> tuple[Int64, Int64, NDArray[np.float64]]:
    """(query tile, key tile, work) of a kind's non-empty tiles: work in tiles, over its query heads and members."""
    if len(kind.groups) == 1:
        row, col = demand.entries[kind.groups[0]]
        return row, col, np.full(len(row), float(kind.queries * len(kind.members)))
    tiles = demand.plan.kv_tiles
    parts = [row * tiles + col for row, col in (demand.entries[group] for group in kind.groups)]
    work = np.concatenate([np.full(len(part), use) for part, use in zip(parts, kind.uses, strict=True)])
    both, inverse = np.unique(np.concatenate(parts), return_inverse=True)
    total = np.bincount(inverse, weights=work).astype(np.float64)
    return both // tiles, both % tiles, total * len(kind.members)


def _by_pair(
    demand: Demand, row: Int64, col: Int64, of_key: int, of_query: int
) -> tuple[NDArray[np.int64], _Edges] | None:
    """The edges of the pairs for which moving keys only is not proven to be best, and their graph.

    Keys only is a minimum where keys' weights can be shared out to the queries that need them without any query
    getting more than its own weight: a flow as large as the cover.
    """
    ranks = demand.placement.ranks
    kept = np.arange(len(row))
    a, b = demand.owner[row], demand.owner[col]
    graph = _number(row * ranks + b, a * demand.plan.kv_tiles + col)
    share = np.ones(len(row))
    for _ in range(_BALANCING):
        share /= np.bincount(graph.key, weights=share)[graph.key]
        load = np.bincount(graph.query, weights=share) * of_key
        over = load > of_query * (1 + 1e-9)
        if not over.any():
            return None
        open_pairs = np.zeros(ranks * ranks, bool)
        pair = a[kept] * ranks + b[kept]
        open_pairs[pair[over[graph.query]]] = True
        # the busy give to the idle
        share /= load[graph.query]
        inside = open_pairs[pair]
        if not inside.all():
            kept, share = kept[inside], share[inside]
            graph = _number(graph.query[inside], graph.key[inside])
    return kept, graph


def _number(query: Int64, key: Int64) -> _Edges:
    queries, query = _compact(query)
    keys, key = _compact(key)
    return _Edges(query, key, queries, keys)


def _compact(label: Int64) -> tuple[int, Int64]:
    top = int(label.max(initial=0)) + 1
    # a table of all labels where it is not much larger than the labels
    if top <= 16 * len(label) + 2**16:
        used = np.zeros(top, bool)
        used[label] = True
        numbers = np.cumsum(used) - 1
        return int(numbers[-1]) + 1 if len(label) else 0, numbers[label]
    distinct, inverse = np.unique(label, return_inverse=True)
    return len(distinct), inverse.reshape(-1).astype(np.int64)


def _solve(graph: _Edges, of_key: int, of_query: int) -> Bools:
    """(queries,) whether a query is in a minimum cover; the keys in it are those of the edges that are left."""
    query_in = np.zeros(graph.queries, bool)
    key_in = np.zeros(graph.keys, bool)
    left = np.arange(len(graph.query))

    def degrees() -> tuple[Int64, Int64]:
        return (
            np.bincount(graph.query[left], minlength=graph.queries),
            np.bincount(graph.key[left], minlength=graph.keys),
        )

    while len(left):
        before = len(left)
        # all neighbours of a query weigh no more than it does: some minimum has them and not it
        of_q, _ = degrees()
        key_in[graph.key[left[of_q[graph.query[left]] * of_key <= of_query]]] = True
        left = left[~key_in[graph.key[left]]]
        _, of_k = degrees()
        query_in[graph.query[left[of_k[graph.key[left]] * of_query <= of_key]]] = True
        left = left[~query_in[graph.query[left]]]
        # neighbours that have no other edge weigh as much as a query: a minimum has it in their stead
        _, of_k = degrees()
        own = np.bincount(graph.query[left[of_k[graph.key[left]] == 1]], minlength=graph.queries)
        query_in |= (own * of_key >= of_query) & (own > 0)
        left = left[~query_in[graph.query[left]]]
        of_q, _ = degrees()
        own = np.bincount(graph.key[left[of_q[graph.query[left]] == 1]], minlength=graph.keys)
        key_in |= (own * of_query >= of_key) & (own > 0)
        left = left[~key_in[graph.key[left]]]
        if len(left) == before:
            break
    if len(left) and len(left) <= _MAX_FLOW_EDGES and importlib.util.find_spec("scipy") is not None:
        rest = _number(graph.query[left], graph.key[left])
        query_in[graph.query[left]] = _cut(rest, of_key, of_query)[rest.query]
    return query_in


def _cut(graph: _Edges, of_key: int, of_query: int) -> Bools:
    """(queries,) whether a query is in the minimum cover that a maximum flow finds."""
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import breadth_first_order, connected_components, maximum_flow

    divisor = math.gcd(of_key, of_query)
    of_key, of_query = of_key // divisor, of_query // divisor
    key = graph.key + graph.queries
    nodes = graph.queries + graph.keys
    links = csr_array((np.ones(len(key), np.int8), (graph.query, key)), shape=(nodes, nodes))
    count, component = connected_components(links, directed=False)
    # the flow's numbers are of 32 bits: components are solved together as long as they fit
    most = np.bincount(component[graph.queries :], minlength=count) * of_key
    batch = np.where(most < _MAX_FLOW, np.cumsum(most) // _MAX_FLOW, -1)
    taken = np.zeros(graph.queries, bool)
    for number in np.unique(batch[batch >= 0]) if of_query < _MAX_FLOW else ():
        inside = batch[component] == number
        name = np.cumsum(inside) - 1
        size = int(inside.sum())
        source, sink = size, size + 1
        query_of, key_of = np.flatnonzero(inside[: graph.queries]), np.flatnonzero(inside[graph.queries :])
        within = inside[graph.query]
        start = np.concatenate(
            [np.full(len(query_of), source), name[graph.query[within]], name[key_of + graph.queries]]
        )
        stop = np.concatenate([name[query_of], name[key[within]], np.full(len(key_of), sink)])
        # a middle edge is never cut: it takes more than its query may send
        widths = (of_query, of_query + 1, of_key)
        counts = (len(query_of), int(within.sum()), len(key_of))
        capacity = csr_array((np.repeat(np.array(widths, np.int32), counts), (start, stop)), shape=(size + 2, size + 2))
        residual = csr_array(capacity - maximum_flow(capacity, source, sink).flow)
        residual.eliminate_zeros()
        reached = np.zeros(size + 2, bool)
        reached[breadth_first_order(residual, source, return_predecessors=False)] = True
        taken[query_of] = ~reached[name[query_of]]
    return taken


def _within(
    room: NDArray[np.float64],
    asker: Int64,
    helper: Int64,
    graph: _Edges,
    taken: Bools,
    work: NDArray[np.float64],
    weights: tuple[int, int],
) -> Bools:
    """``taken`` without the queries whose work would not fit the rank that they move to; best savings first."""

    home = np.zeros(graph.keys, bool)
    home[graph.key[~taken[graph.query]]] = True
    spared = np.bincount(graph.query[~home[graph.key]], minlength=graph.queries)
    chosen = np.flatnonzero(taken)
    asked = np.bincount(graph.query, weights=work, minlength=graph.queries)
    at = np.zeros(graph.queries, np.int64)
    at[graph.query] = helper
    saving = (spared[chosen] * weights[0] - weights[1]) / asked[chosen]
    order = chosen[np.lexsort((-saving, at[chosen]))]
    total = np.cumsum(asked[order])
    first = np.searchsorted(at[order], at[order])
    before = np.where(first > 0, total[first - 1], 0.0)
    fits = np.zeros_like(taken)
    fits[order[total - before <= room[at[order]]]] = True
    # keys that come for those that do not fit may leave a pair less than its other queries cost
    pair = at * len(room)
    pair[graph.query] += asker
    saved = np.bincount(pair[fits], minlength=len(room) ** 2) * -float(weights[1])
    away = np.ones(graph.keys, bool)
    away[graph.key[~fits[graph.query]]] = False
    pair_of_key = np.zeros(graph.keys, np.int64)
    pair_of_key[graph.key] = pair[graph.query]
    saved += np.bincount(pair_of_key[away], minlength=len(room) ** 2) * float(weights[0])
    return fits & (saved[pair] >= 0)
