"""Which tokens a rank sends to which, and where it puts what it receives: each needed key tile once.

A hop is one exchange among all ranks. One level of ranks needs one hop. Two levels (nodes of ranks) need two: a tile
crosses the network once per node, to the rank of the owner's place there, which relays it inside. Gradients go the same
way back.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..execution.local_attention import LocalAttention
from ..execution.places import Tokens
from .demand import Bools, Demand, Kind, run_places
from .movement import Moves
from .placement import Int64

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
    members: tuple[Tensor, Tensor] | None
    count: int
    heads: int
    source: int
    tokens: Tokens | None = None
    used: Tokens | None = None
    target: Tokens | None = None
    adjacent: bool = False

    @property
    def rows(self) -> int:
        """Rows of channels: tokens times heads."""
        return self.count * self.heads

    def of(self, x: Tensor) -> Tensor:
        """The section's heads of (B, heads, tokens, C): (B, heads, ...), or (members, ...)."""
        return x if self.members is None else x[self.members]

    def shape(self, batch: int, channels: int) -> tuple[int, ...]:
        """Of its rows."""
        if self.members is None:
            return batch, self.heads // batch, self.count, channels
        return self.heads, self.count, channels

    def fills(self, keys: int) -> bool:
        """Receiver: whether its rows are all keys of the branch's buffer, in their order."""
        whole = self.members is None and self.used is None
        return whole and self.target is not None and self.target.span == (0, keys, 1)

    def put(self, buffer: Tensor, rows: Tensor) -> None:
        """Receiver: its rows into the branch's (B, heads, tokens, C) buffer."""
        if self.target is None or not self.target.count:
            return
        rows = rows if self.used is None else self.used.of(rows)
        if self.members is None:
            self.target.put(buffer, rows)
            return
        for at, (b, h) in enumerate(zip(*(index.tolist() for index in self.members), strict=True)):
            self.target.put(buffer[b, h], rows[at])

    def gradients(self, buffer: Tensor | None, like: Tensor, batch: int, channels: int) -> Tensor:
        """Receiver: the gradients of its rows out of the branch's buffer; those that it only relayed are zero."""
        if buffer is None or self.target is None or not self.target.count:
            return like.new_zeros(self.shape(batch, channels))
        mine = self.of(self.target.of(buffer))
        if self.used is None:
            return mine
        rows = like.new_zeros(self.shape(batch, channels))
        self.used.put(rows, mine)
        return rows

    def add(self, total: Tensor, rows: Tensor) -> None:
        """Sender: returned gradients to those of its source."""
        assert self.tokens is not None
        if self.members is None or total.ndim == rows.ndim:
            self.tokens.add(total, rows)
            return
        for at, (b, h) in enumerate(zip(*(index.tolist() for index in self.members), strict=True)):
            self.tokens.add(total[b, h], rows[at])


Message = tuple[Section, ...]


@dataclass(frozen=True, eq=False)
class Hop:
    """One exchange among all ranks: a message to and from each."""

    sends: tuple[Message, ...]
    receives: tuple[Message, ...]


def direct_hop(
    demands: list[Demand],
    parts: list[LocalAttention | None],
    rank: int,
    ranks: int,
    needs: list[tuple[Bools, ...]] | None = None,
) -> Hop:
    """Every rank receives what it needs from the ranks that hold it.

    Args:
        demands: The branches.
        parts: What this rank computes of each, into whose buffers received tokens go.
        rank: This rank.
        ranks: How many.
        needs: Instead of the demands' own needs, per branch.
    """
    sends: list[list[Section]] = [[] for _ in range(ranks)]
    receives: list[list[Section]] = [[] for _ in range(ranks)]
    for number, demand in enumerate(demands):
        run_tile = np.arange(len(demand.owner)) // demand.runs_per_tile
        for kind, need in enumerate((needs or [d.needs for d in demands])[number]):
            mine = np.flatnonzero(demand.owner == rank)
            asked = need[:, run_tile[mine]]
            for peer in np.flatnonzero(asked.any(1)):
                if peer != rank:
                    sends[peer].append(_sent(demand, number, kind, mine[asked[peer]]))
            wanted = np.flatnonzero(need[rank, run_tile] & (demand.owner != rank))
            for peer in np.unique(demand.owner[wanted]):
                runs = wanted[demand.owner[wanted] == peer]
                receives[peer].append(_received(demand, number, kind, runs, parts[number]))
    return Hop(tuple(map(tuple, sends)), tuple(map(tuple, receives)))


def guest_sections(demands: list[Demand], moves: list[tuple[Moves, ...]], owner: int, host: int) -> Message:
    """The query tiles of ``owner`` that ``host`` computes for it, per branch: all of the branch's query heads."""
    found = []
    for number, (demand, branch) in enumerate(zip(demands, moves, strict=True)):
        if len(branch) != 1:
            continue
        tiles = np.flatnonzero(branch[0].queries[host])
        tiles = tiles[demand.owner[tiles] == owner]
        if len(tiles):
            places = demand.shard_places(tiles)
            heads = demand.branch.batch * demand.branch.head_count
            found.append(Section(number, 0, None, len(places), heads, SHARD, tokens=Tokens.at(places)))
    return tuple(found)


def node_hops(
    demands: list[Demand], parts: list[LocalAttention | None], rank: int, ranks: int, per_node: int
) -> tuple[Hop, Hop]:
    """Across nodes, then inside: ranks [n * per_node, (n + 1) * per_node) are node n.

    A rank imports, from the rank of its own place on every other node, what any rank of its node needs from it; then
    the ranks of a node give each other what they hold or have imported.
    """
    node, place = divmod(rank, per_node)
    others = [other for other in range(ranks // per_node) if other != node]
    neighbours = [node * per_node + other for other in range(per_node) if other != place]
    across = _empty(ranks), _empty(ranks)
    inside = _empty(ranks), _empty(ranks)
    for number, demand in enumerate(demands):
        run_tile = np.arange(len(demand.owner)) // demand.runs_per_tile
        for kind, need in enumerate(demand.needs):
            needed = need[:, run_tile]
            by_node: Bools = np.asarray(needed.reshape(-1, per_node, needed.shape[1]).any(axis=1))
            for peer in (other * per_node + place for other in others):
                sent = np.flatnonzero((demand.owner == rank) & by_node[peer // per_node])
                if len(sent):
                    across[0][peer].append(_sent(demand, number, kind, sent))
                came = np.flatnonzero((demand.owner == peer) & by_node[node])
                if len(came):
                    across[1][peer].append(_received(demand, number, kind, came, parts[number], needed[rank]))
            for other in neighbours:
                # the sender's own first, then what it imported; on both sides alike
                for origin in (node, *others):
                    runs = np.flatnonzero((demand.owner == origin * per_node + place) & needed[other])
                    if len(runs):
                        inside[0][other].append(_relayed(demand, number, kind, runs, origin, node, by_node[node]))
                    runs = np.flatnonzero((demand.owner == origin * per_node + other % per_node) & needed[rank])
                    if len(runs):
                        inside[1][other].append(_received(demand, number, kind, runs, parts[number]))
    return (
        Hop(tuple(map(tuple, across[0])), tuple(map(tuple, across[1]))),
        Hop(tuple(map(tuple, inside[0])), tuple(map(tuple, inside[1]))),
    )


def _empty(ranks: int) -> list[list[Section]]:
    return [[] for _ in range(ranks)]


def _members(demand: Demand, kind: Kind) -> tuple[tuple[Tensor, Tensor] | None, int]:
    if len(demand.kinds) == 1:
        return None, len(kind.members)
    return (torch.from_numpy(kind.members[:, 0].copy()), torch.from_numpy(kind.members[:, 1].copy())), len(kind.members)


def _sent(demand: Demand, number: int, kind: int, runs: Int64) -> Section:
    members, heads = _members(demand, demand.kinds[kind])
    places = demand.shard_places(runs)
    tokens = Tokens.at(places)
    return Section(number, kind, members, len(places), heads, SHARD, tokens=tokens, adjacent=tokens.adjacent)


def _received(
    demand: Demand,
    number: int,
    kind: int,
    runs: Int64,
    part: LocalAttention | None,
    needed: NDArray[np.bool_] | None = None,
) -> Section:
    members, heads = _members(demand, demand.kinds[kind])
    lengths = demand.lengths[runs]
    count = int(lengths.sum())
    adjacent = Tokens.at(demand.shard_places(runs)).adjacent
    mine = np.ones(len(runs), bool) if needed is None else needed[runs]
    if part is None or not mine.any():
        return Section(number, kind, members, count, heads, SHARD, adjacent=adjacent)
    used = None
    if not mine.all():
        first = np.cumsum(lengths) - lengths
        used = Tokens.at(run_places(first[mine], lengths[mine], 1))
    target = Tokens.at(demand.buffer_places(runs[mine], part.tile_at))
    return Section(number, kind, members, count, heads, SHARD, used=used, target=target, adjacent=adjacent)


def _relayed(
    demand: Demand, number: int, kind: int, runs: Int64, origin: int, node: int, imported: NDArray[np.bool_]
) -> Section:
    if origin == node:
        return _sent(demand, number, kind, runs)
    members, heads = _members(demand, demand.kinds[kind])
    owner = int(demand.owner[runs[0]])
    came = np.flatnonzero((demand.owner == owner) & imported)
    lengths = demand.lengths[came]
    first = np.cumsum(lengths) - lengths
    chosen = np.isin(came, runs)
    places = run_places(first[chosen], lengths[chosen], 1)
    return Section(number, kind, members, len(places), heads, owner, tokens=Tokens.at(places))
