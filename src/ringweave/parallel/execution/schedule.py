"""Schedules: the work of one rank for a pattern, stage by stage, as data.

*Allgather* has one stage: receive all needed tiles, then compute once, in the order of the key tiles of the whole
sequence. The forward result is therefore bitwise equal to one device's. Memory: the keys and values of the shard and
all received ones, which are kept for backward.

*Ring* has one stage per rank: stage s computes with the keys that rank - s holds, while the messages of stage s + 1
travel. Memory: the shard and the messages of two stages; backward receives keys and values again. If moving a query and
its result is cheaper than moving keys and values (see :mod:`~ringweave.parallel.planning.movement`), the rank that
holds the keys computes for the query's rank and returns (out, lse), or dq in backward. Partial results are merged in
float32, in the order of the stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ...backends.backend import Heads
from ..planning.demand import Bools, Demand
from ..planning.movement import Moves
from ..planning.placement import Placement
from .exchange import Exchange, Message, direct_exchange, node_exchanges, remote_queries
from .header import Value
from .local_attention import LocalAttention


@dataclass(frozen=True, eq=False)
class Stage:
    """One stage of one rank."""

    number: int  # number of the stage. Stage 0 uses the keys of this rank's shard.
    own: Mapping[int, LocalAttention]  # attention of this rank's queries over the stage's keys, by branch
    # successive exchanges that bring those keys and values; their gradients return along the same path
    exchanges: tuple[Exchange, ...] = ()
    # attention of other ranks' queries over this rank's keys, by branch
    remote: Mapping[int, LocalAttention] = field(default_factory=dict)
    # exchange that brings those queries together with the first exchange; their results return along it
    queries: Exchange | None = None


@dataclass(frozen=True, eq=False)
class Schedule:
    """The stages of one rank."""

    stages: tuple[Stage, ...]
    heads: tuple[Heads, ...]
    header: Mapping[str, Value]  # header values that the ranks compare: the pattern's contents and the schedule
    tokens: int  # number of tokens of the shard without padding
    keeps: bool  # whether backward reuses the messages that forward received; otherwise it receives them again
    single: bool = False  # whether one kernel call computes all queries of the shard, so that no results are merged

    def steps(self) -> Iterator[tuple[Stage, Stage | None]]:
        """Yield each stage with the following one; None follows the last stage."""
        return zip(self.stages, (*self.stages[1:], None), strict=True)


def allgather(
    demands: list[Demand],
    placement: Placement,
    rank: int,
    heads: tuple[int, int],
    header: Mapping[str, Value],
    per_node: int | None = None,
) -> Schedule:
    """Build the allgather schedule; ``per_node`` is the node size on a mesh of two dimensions."""
    ratio, tokens = heads[0] // heads[1], placement.tokens_of(rank)
    own = [LocalAttention.of(demand, rank, ratio) for demand in demands]
    exchanges: tuple[Exchange, ...] = (direct_exchange(demands, own, rank, placement.ranks),)
    if per_node is not None:
        exchanges = node_exchanges(demands, own, rank, placement.ranks, per_node)
    stage = Stage(0, _by_branch(own), exchanges)
    single = False
    if len(own) == 1 and own[0] is not None:
        covers = own[0].queries.shard_tokens.span == (0, tokens, 1)
        single = covers and own[0].branch.head_count == heads[0]
    return Schedule((stage,), _heads(demands, ratio), header, tokens, keeps=True, single=single)


def ring(
    demands: list[Demand],
    moves: list[tuple[Moves, ...]],
    placement: Placement,
    rank: int,
    heads: tuple[int, int],
    header: Mapping[str, Value],
) -> Schedule:
    """Build the ring schedule; ``moves`` lists for each branch the moved tiles of each kind of key heads."""
    ranks, ratio = placement.ranks, heads[0] // heads[1]
    needs = [tuple(move.keys for move in branch) for branch in moves]
    edges = [_own_edges(demand, branch) for demand, branch in zip(demands, moves, strict=True)]
    stages = []
    for number in range(ranks):
        source, target = (rank - number) % ranks, (rank + number) % ranks
        own = [
            LocalAttention.of(demand, rank, ratio, needs=need, available=demand.owner == source, edges=edge)
            for demand, need, edge in zip(demands, needs, edges, strict=True)
        ]
        if number == 0:
            stages.append(Stage(0, _by_branch(own)))
            continue
        exchange = direct_exchange(demands, own, rank, ranks, needs)
        sends, receives = exchange.sends[target], exchange.receives[source]
        exchange = Exchange(_only(sends, target, ranks), _only(receives, source, ranks))
        remote = [
            LocalAttention.of_remote(demand, rank, ratio, _remote_edges(demand, branch, source, rank))
            for demand, branch in zip(demands, moves, strict=True)
        ]
        queries = Exchange(
            _only(remote_queries(demands, moves, rank, target), target, ranks),
            _only(remote_queries(demands, moves, source, rank), source, ranks),
        )
        stages.append(Stage(number, _by_branch(own), (exchange,), _by_branch(remote), queries))
    return Schedule(tuple(stages), _heads(demands, ratio), header, placement.tokens_of(rank), keeps=False)


def _by_branch(attentions: Sequence[LocalAttention | None]) -> dict[int, LocalAttention]:
    return {number: attention for number, attention in enumerate(attentions) if attention is not None}


def _heads(demands: list[Demand], ratio: int) -> tuple[Heads, ...]:
    return tuple(Heads(demand.branch, ratio) for demand in demands)


def _only(message: Message, peer: int, ranks: int) -> tuple[Message, ...]:
    return tuple(message if other == peer else () for other in range(ranks))


def _own_edges(demand: Demand, moves: tuple[Moves, ...]) -> list[Bools] | None:
    """Mark the plan's entries, per row set, that are computed on the rank of their query; None for all."""
    if len(moves) != 1 or not moves[0].queries.any():
        return None
    owner = demand.owner
    return [(owner[row] == owner[col]) | ~moves[0].queries[owner[col], row] for row, col in demand.entries]


def _remote_edges(demand: Demand, moves: tuple[Moves, ...], source: int, rank: int) -> list[Bools] | None:
    """Mark the plan's entries, per row set, that ``rank`` computes for the queries of ``source``; None for no entry."""
    if len(moves) != 1 or not moves[0].queries[rank].any():
        return None
    owner, taken = demand.owner, moves[0].queries[rank]
    return [(owner[row] == source) & (owner[col] == rank) & taken[row] for row, col in demand.entries]
