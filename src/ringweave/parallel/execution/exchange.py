"""The tokens that each rank sends to each other rank, and their places at the receiver; each needed tile moves once.

A mesh of one dimension needs one exchange among all ranks. A mesh of two dimensions (nodes, ranks of a node) needs two:
a tile crosses the network once per node, to the rank with the owner's index within its node, which relays it inside the
node. Gradients return along the same path.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ..planning.demand import Bools, Demand, run_places
from ..planning.movement import Moves
from ..planning.placement import Int64
from .local_attention import LocalAttention
from .tokens import Tokens

SHARD = -1


@dataclass(frozen=True, eq=False)
class TokenBlock:
    """The tokens of one branch and kind of key heads within a message."""

    branch: int  # number of the branch
    kind: int  # number of the kind of key heads
    members: tuple[Tensor, ...] | None  # (batch elements, key heads) as two index tensors; None for all
    count: int
    heads: int  # number of (batch element, key head) pairs
    source: int  # on the sender: ``SHARD``, or the peer from which an earlier exchange brought the tokens
    tokens: Tokens | None = None  # on the sender: places of the tokens in that source
    used: Tokens | None = None  # on the receiver: the block's tokens that this rank computes with; None for all
    target: Tokens | None = None  # on the receiver: places of the used tokens in the branch's buffer
    adjacent: bool = False  # whether the tokens are adjacent in the sender's shard

    @property
    def rows(self) -> int:
        """Number of rows of channels: tokens times heads."""
        return self.count * self.heads

    def of(self, x: Tensor) -> Tensor:
        """Return the block's heads of x, (B, heads, tokens, C), as (B, heads, ...) or (members, ...)."""
        return x if self.members is None else x[self.members]

    def shape(self, batch: int, channels: int) -> tuple[int, ...]:
        """Return the shape of the block's tensor."""
        if self.members is None:
            return batch, self.heads // batch, self.count, channels
        return self.heads, self.count, channels

    def fills(self, keys: int) -> bool:
        """Return whether, on the receiver, the rows are all ``keys`` keys of the branch's buffer, in order."""
        whole = self.members is None and self.used is None
        return whole and self.target is not None and self.target.span == (0, keys, 1)

    def _each(self, x: Tensor) -> list[Tensor]:
        """List the members' (tokens, C) of x, (B, heads, tokens, C), as views."""
        assert self.members is not None
        return [x[at] for at in zip(*(index.tolist() for index in self.members), strict=True)]

    def put(self, buffer: Tensor, rows: Tensor) -> None:
        """Write the received rows into the branch's buffer, (B, heads, tokens, C)."""
        if self.target is None or not self.target.count:
            return
        rows = rows if self.used is None else self.used.of(rows)
        if self.members is None:
            self.target.put(buffer, rows)
        else:
            for head, values in zip(self._each(buffer), rows, strict=True):
                self.target.put(head, values)

    def gradients(self, buffer: Tensor | None, like: Tensor, batch: int, channels: int) -> Tensor:
        """Return, on the receiver, the gradients of the block's rows from the branch's buffer.

        Rows that this rank only relays are zero.
        """
        if buffer is None or self.target is None or not self.target.count:
            return like.new_zeros(self.shape(batch, channels))
        mine = self.of(self.target.of(buffer))
        if self.used is None:
            return mine
        rows = like.new_zeros(self.shape(batch, channels))
        self.used.put(rows, mine)
        return rows

    def add(self, total: Tensor, rows: Tensor) -> None:
        """Add returned gradients, on the sender, to the gradients of the block's source."""
        assert self.tokens is not None
        if self.members is None or total.ndim == rows.ndim:
            self.tokens.add(total, rows)
        else:
            for head, values in zip(self._each(total), rows, strict=True):
                self.tokens.add(head, values)


Message = tuple[TokenBlock, ...]


@dataclass(frozen=True, eq=False)
class Exchange:
    """Messages among all ranks: those that one rank sends to each rank, and those that it receives from each."""

    sends: tuple[Message, ...]
    receives: tuple[Message, ...]


def direct_exchange(
    demands: list[Demand],
    parts: list[LocalAttention | None],
    rank: int,
    ranks: int,
    needs: list[tuple[Bools, ...]] | None = None,
) -> Exchange:
    """Build the exchange in which every rank receives its needed key tiles directly from the ranks that hold them.

    Args:
        demands: The demand of each branch.
        parts: This rank's attention of each branch; received tokens go into its buffers.
        rank: This rank.
        ranks: Number of ranks.
        needs: The needed tiles by branch and kind of key heads; None for those of ``demands``.
    """
    return _across(list(_kinds(demands, parts, needs)), rank, ranks, 1)


def node_exchanges(
    demands: list[Demand], parts: list[LocalAttention | None], rank: int, ranks: int, per_node: int
) -> tuple[Exchange, Exchange]:
    """Build the two exchanges across and inside nodes; node n has ranks [n * per_node, (n + 1) * per_node).

    In the first exchange a rank receives, from the rank with the same index on every other node, the tokens that any
    rank of its node needs from that rank. In the second one the ranks of a node exchange the tokens that they hold or
    imported.
    """
    kinds = list(_kinds(demands, parts))
    return _across(kinds, rank, ranks, per_node), _inside(kinds, rank, ranks, per_node)


def remote_queries(demands: list[Demand], moves: list[tuple[Moves, ...]], owner: int, rank: int) -> Message:
    """Build the message of query tiles of ``owner`` that ``rank`` computes, with all query heads of each branch."""
    blocks = []
    for number, (demand, branch) in enumerate(zip(demands, moves, strict=True)):
        if len(branch) != 1:
            continue
        tiles = np.flatnonzero(branch[0].queries[rank])
        tiles = tiles[demand.owner[tiles] == owner]
        if len(tiles):
            places = demand.shard_places(tiles)
            heads = demand.branch.batch * demand.branch.head_count
            blocks.append(TokenBlock(number, 0, None, len(places), heads, SHARD, tokens=Tokens.at(places)))
    return tuple(blocks)


@dataclass(frozen=True, eq=False)
class _Keys:
    """The keys and values of one branch and kind of key heads, exchanged in runs of tokens."""

    block: TokenBlock  # template of their blocks
    demand: Demand
    part: LocalAttention | None
    need: Bools  # (ranks, key tiles) whether a rank needs a tile

    @cached_property
    def needed(self) -> Bools:
        """Whether a rank needs a run, (ranks, runs)."""
        return self.need[:, np.arange(len(self.demand.owner)) // self.demand.runs_per_tile]

    def sent(self, runs: Int64) -> TokenBlock:
        """Return the block that sends some runs of this rank's shard."""
        tokens = Tokens.at(self.demand.shard_places(runs))
        return replace(self.block, count=tokens.count, tokens=tokens, adjacent=tokens.adjacent)

    def received(self, runs: Int64, mine: Bools) -> TokenBlock:
        """Return the block that receives runs of another rank's shard; this rank computes with those in ``mine``."""
        lengths = self.demand.lengths[runs]
        adjacent = Tokens.at(self.demand.shard_places(runs)).adjacent
        block = replace(self.block, count=int(lengths.sum()), adjacent=adjacent)
        if self.part is None or not mine.any():
            return block
        used = None if mine.all() else Tokens.at(_inside_message(lengths, mine))
        target = Tokens.at(self.demand.buffer_places(runs[mine], self.part.keys.tile_at))
        return replace(block, used=used, target=target)

    def relayed(self, runs: Int64, imported: Int64) -> TokenBlock:
        """Return the block that relays some of the runs that this rank imported from one other rank."""
        tokens = Tokens.at(_inside_message(self.demand.lengths[imported], np.isin(imported, runs)))
        return replace(self.block, count=tokens.count, source=int(self.demand.owner[runs[0]]), tokens=tokens)


def _inside_message(lengths: Int64, chosen: Bools) -> Int64:
    """Return the places of the chosen runs' tokens among the tokens of a message."""
    first = np.cumsum(lengths) - lengths
    return run_places(first[chosen], lengths[chosen], 1)


def _kinds(
    demands: list[Demand], parts: list[LocalAttention | None], needs: Sequence[tuple[Bools, ...]] | None = None
) -> Iterator[_Keys]:
    for branch, (demand, part) in enumerate(zip(demands, parts, strict=True)):
        for kind, need in enumerate(demand.needs if needs is None else needs[branch]):
            members = demand.kinds[kind].members
            # a single kind contains all heads, so no index is needed
            index = None if len(demand.kinds) == 1 else tuple(torch.from_numpy(x.copy()) for x in members.T)
            yield _Keys(TokenBlock(branch, kind, index, 0, len(members), SHARD), demand, part, need)


def _across(kinds: list[_Keys], rank: int, ranks: int, per_node: int) -> Exchange:
    """Build the exchange with the rank of the same index on every other node; without nodes ``per_node`` is 1."""
    sends, receives = _empty(ranks), _empty(ranks)
    node, place = divmod(rank, per_node)
    for keys in kinds:
        owner = keys.demand.owner
        by_node = np.logical_or.reduceat(keys.needed, np.arange(0, ranks, per_node), axis=0)
        runs = np.flatnonzero(owner == rank)
        needed_there = by_node[:, runs]
        for other in np.flatnonzero(needed_there.any(1)):
            if other != node:
                sends[other * per_node + place].append(keys.sent(runs[needed_there[other]]))
        wanted = np.flatnonzero(by_node[node] & (owner % per_node == place) & (owner != rank))
        for peer in np.unique(owner[wanted]):
            came = wanted[owner[wanted] == peer]
            receives[peer].append(keys.received(came, keys.needed[rank, came]))
    return _exchange(sends, receives)


def _inside(kinds: list[_Keys], rank: int, ranks: int, per_node: int) -> Exchange:
    """Build the exchange among the ranks of a node.

    Each message has the sender's own tokens first, then its imported ones; sender and receiver use this same order.
    """
    sends, receives = _empty(ranks), _empty(ranks)
    node, place = divmod(rank, per_node)
    origins = [node, *(other for other in range(ranks // per_node) if other != node)]
    for keys in kinds:
        owner, needed = keys.demand.owner, keys.needed
        by_node = needed[node * per_node : (node + 1) * per_node].any(0)
        for peer in range(node * per_node, (node + 1) * per_node):
            if peer == rank:
                continue
            for origin in origins:
                source = origin * per_node + place
                runs = np.flatnonzero((owner == source) & needed[peer])
                if len(runs):
                    imported = np.flatnonzero((owner == source) & by_node)
                    sends[peer].append(keys.sent(runs) if origin == node else keys.relayed(runs, imported))
                runs = np.flatnonzero((owner == origin * per_node + peer % per_node) & needed[rank])
                if len(runs):
                    receives[peer].append(keys.received(runs, np.ones(len(runs), bool)))
    return _exchange(sends, receives)


def _empty(ranks: int) -> list[list[TokenBlock]]:
    return [[] for _ in range(ranks)]


def _exchange(sends: list[list[TokenBlock]], receives: list[list[TokenBlock]]) -> Exchange:
    return Exchange(tuple(map(tuple, sends)), tuple(map(tuple, receives)))
