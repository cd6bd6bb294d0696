"""Which tokens a rank sends to which, and where it puts what it receives: each needed key tile once.

A hop is one exchange among all ranks. One level of ranks needs one hop. Two levels (nodes of ranks) need two: a tile
crosses the network once per node, to the rank of the owner's place there, which relays it inside. Gradients go the same
way back.
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
from .local_attention import LocalAttention, Tokens

SHARD = -1


@dataclass(frozen=True, eq=False)
class Section:
    """Tokens of one branch and kind of key heads within a message.

    Attributes:
        branch: Which branch.
        kind: Which kind of its key heads.
        members: (batch elements, key heads) as two index tensors; None: all of them.
        count: Tokens.
        heads: Key heads times batch elements.
        source: Sender: the shard, or the peer that an earlier hop brought them from.
        tokens: Sender: which tokens of that source.
        used: Receiver: which of them this rank computes with.
        target: Receiver: where those lie in the branch's buffer.
        adjacent: Whether they lie side by side in the sender's shard.
    """

    branch: int
    kind: int
    members: tuple[Tensor, ...] | None
    count: int
    heads: int
    source: int
    tokens: Tokens | None = None
    used: Tokens | None = None
    target: Tokens | None = None
    adjacent: bool = False

    @property
    def rows(self) -> int:
        """How many rows of channels it has: tokens times heads."""
        return self.count * self.heads

    def of(self, x: Tensor) -> Tensor:
        """Take the section's heads of (B, heads, tokens, C): (B, heads, ...), or (members, ...)."""
        return x if self.members is None else x[self.members]

    def shape(self, batch: int, channels: int) -> tuple[int, ...]:
        """Say the shape of its rows."""
        if self.members is None:
            return batch, self.heads // batch, self.count, channels
        return self.heads, self.count, channels

    def fills(self, keys: int) -> bool:
        """Receiver: whether its rows are all keys of the branch's buffer, in their order."""
        whole = self.members is None and self.used is None
        return whole and self.target is not None and self.target.span == (0, keys, 1)

    def _each(self, x: Tensor) -> list[Tensor]:
        """The members' (tokens, C) of (B, heads, tokens, C), as views."""
        assert self.members is not None
        return [x[at] for at in zip(*(index.tolist() for index in self.members), strict=True)]

    def put(self, buffer: Tensor, rows: Tensor) -> None:
        """Receiver: put its rows into the branch's (B, heads, tokens, C) buffer."""
        if self.target is None or not self.target.count:
            return
        rows = rows if self.used is None else self.used.of(rows)
        if self.members is None:
            self.target.put(buffer, rows)
        else:
            for head, values in zip(self._each(buffer), rows, strict=True):
                self.target.put(head, values)

    def gradients(self, buffer: Tensor | None, like: Tensor, batch: int, channels: int) -> Tensor:
        """Receiver: take the gradients of its rows out of the branch's buffer; those that it only relayed are zero."""
        if buffer is None or self.target is None or not self.target.count:
            return like.new_zeros(self.shape(batch, channels))
        mine = self.of(self.target.of(buffer))
        if self.used is None:
            return mine
        rows = like.new_zeros(self.shape(batch, channels))
        self.used.put(rows, mine)
        return rows

    def add(self, total: Tensor, rows: Tensor) -> None:
        """Sender: add returned gradients to those of its source."""
        assert self.tokens is not None
        if self.members is None or total.ndim == rows.ndim:
            self.tokens.add(total, rows)
        else:
            for head, values in zip(self._each(total), rows, strict=True):
                self.tokens.add(head, values)


Message = tuple[Section, ...]


@dataclass(frozen=True, eq=False)
class Hop:
    """One exchange among all ranks: the messages to each and from each."""

    sends: tuple[Message, ...]
    receives: tuple[Message, ...]


def direct_hop(
    demands: list[Demand],
    parts: list[LocalAttention | None],
    rank: int,
    ranks: int,
    needs: list[tuple[Bools, ...]] | None = None,
) -> Hop:
    """Let every rank receive what it needs, by its demands or else by ``needs``, from the ranks that hold it.

    What a rank receives goes into the buffers of ``parts``, which it computes of each branch.
    """
    return _across(list(_kinds(demands, parts, needs)), rank, ranks, 1)


def node_hops(
    demands: list[Demand], parts: list[LocalAttention | None], rank: int, ranks: int, per_node: int
) -> tuple[Hop, Hop]:
    """Go across nodes, then inside: ranks [n * per_node, (n + 1) * per_node) are node n.

    A rank imports, from the rank of its own place on every other node, what any rank of its node needs from it; then
    the ranks of a node give each other what they hold or have imported.
    """
    kinds = list(_kinds(demands, parts))
    return _across(kinds, rank, ranks, per_node), _inside(kinds, rank, ranks, per_node)


def remote_queries(demands: list[Demand], moves: list[tuple[Moves, ...]], owner: int, rank: int) -> Message:
    """The query tiles of ``owner`` that ``rank`` computes for it, per branch: all of the branch's query heads."""
    sections = []
    for number, (demand, branch) in enumerate(zip(demands, moves, strict=True)):
        if len(branch) != 1:
            continue
        tiles = np.flatnonzero(branch[0].queries[rank])
        tiles = tiles[demand.owner[tiles] == owner]
        if len(tiles):
            places = demand.shard_places(tiles)
            heads = demand.branch.batch * demand.branch.head_count
            sections.append(Section(number, 0, None, len(places), heads, SHARD, tokens=Tokens.at(places)))
    return tuple(sections)


@dataclass(frozen=True, eq=False)
class _Keys:
    """The keys and values of one branch and kind of key heads, of which runs are sent and received.

    Attributes:
        section: What all sections of them have in common.
        demand: The branch's demand.
        part: What this rank computes of the branch.
        need: (ranks, key tiles) whether a rank needs a tile.
    """

    section: Section
    demand: Demand
    part: LocalAttention | None
    need: Bools

    @cached_property
    def needed(self) -> Bools:
        """(ranks, runs) whether a rank needs a run."""
        return self.need[:, np.arange(len(self.demand.owner)) // self.demand.runs_per_tile]

    def sent(self, runs: Int64) -> Section:
        """Send some runs of this rank's shard."""
        tokens = Tokens.at(self.demand.shard_places(runs))
        return replace(self.section, count=tokens.count, tokens=tokens, adjacent=tokens.adjacent)

    def received(self, runs: Int64, mine: Bools) -> Section:
        """Receive some runs of another rank's shard, of which this rank computes with those that are ``mine``."""
        lengths = self.demand.lengths[runs]
        adjacent = Tokens.at(self.demand.shard_places(runs)).adjacent
        section = replace(self.section, count=int(lengths.sum()), adjacent=adjacent)
        if self.part is None or not mine.any():
            return section
        used = None if mine.all() else Tokens.at(_inside_message(lengths, mine))
        target = Tokens.at(self.demand.buffer_places(runs[mine], self.part.tile_at))
        return replace(section, used=used, target=target)

    def relayed(self, runs: Int64, imported: Int64) -> Section:
        """Send on some of the runs that this rank has imported of one other rank."""
        tokens = Tokens.at(_inside_message(self.demand.lengths[imported], np.isin(imported, runs)))
        return replace(self.section, count=tokens.count, source=int(self.demand.owner[runs[0]]), tokens=tokens)


def _inside_message(lengths: Int64, chosen: Bools) -> Int64:
    """The places of chosen runs among those of a message."""
    first = np.cumsum(lengths) - lengths
    return run_places(first[chosen], lengths[chosen], 1)


def _kinds(
    demands: list[Demand], parts: list[LocalAttention | None], needs: Sequence[tuple[Bools, ...]] | None = None
) -> Iterator[_Keys]:
    for branch, (demand, part) in enumerate(zip(demands, parts, strict=True)):
        for kind, need in enumerate(demand.needs if needs is None else needs[branch]):
            members = demand.kinds[kind].members
            # of one kind are all heads
            index = None if len(demand.kinds) == 1 else tuple(torch.from_numpy(x.copy()) for x in members.T)
            yield _Keys(Section(branch, kind, index, 0, len(members), SHARD), demand, part, need)


def _across(kinds: list[_Keys], rank: int, ranks: int, per_node: int) -> Hop:
    """Exchange with the rank of the same place on every other node; of one rank each, where there is one level."""
    sends, receives = _empty(ranks), _empty(ranks)
    node, place = divmod(rank, per_node)
    for keys in kinds:
        owner = keys.demand.owner
        by_node = np.logical_or.reduceat(keys.needed, np.arange(0, ranks, per_node), axis=0)
        held = np.flatnonzero(owner == rank)
        asked = by_node[:, held]
        for other in np.flatnonzero(asked.any(1)):
            if other != node:
                sends[other * per_node + place].append(keys.sent(held[asked[other]]))
        wanted = np.flatnonzero(by_node[node] & (owner % per_node == place) & (owner != rank))
        for peer in np.unique(owner[wanted]):
            came = wanted[owner[wanted] == peer]
            receives[peer].append(keys.received(came, keys.needed[rank, came]))
    return _hop(sends, receives)


def _inside(kinds: list[_Keys], rank: int, ranks: int, per_node: int) -> Hop:
    """Exchange among the ranks of a node: the sender's own first, then what it imported; on both sides alike."""
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
    return _hop(sends, receives)


def _empty(ranks: int) -> list[list[Section]]:
    return [[] for _ in range(ranks)]


def _hop(sends: list[list[Section]], receives: list[list[Section]]) -> Hop:
    return Hop(tuple(map(tuple, sends)), tuple(map(tuple, receives)))
