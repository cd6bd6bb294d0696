"""The modelled time of a forward step under a placement: what each rank computes, and what it receives.

Operations are those of the non-empty tiles, two products each: 2 (D + Dv) for each pair of a tile, masked or not.
Bytes are those of the exchange: keys and values of the tiles that a rank needs and does not hold or, where a cover says
so, queries there and outputs back. Nothing else is counted: no launches but one per message, no memory traffic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..arguments import number
from .demand import Bools, Demand
from .movement import Moves, cover, edges, keys_only

Float64 = NDArray[np.float64]


@dataclass(frozen=True)
class Machine:
    """What the model knows of a rank.

    Attributes:
        flops: Operations per second that attention reaches.
        bandwidth: Bytes per second that a rank receives.
        latency: Seconds before a message's first byte, and for the launch that a stage of a ring costs.
    """

    flops: float = 500e12
    bandwidth: float = 50e9
    latency: float = 10e-6

    def __post_init__(self) -> None:
        number("flops", self.flops, 1)
        number("bandwidth", self.bandwidth, 1)
        number("latency", self.latency, 0)


@dataclass(frozen=True)
class Widths:
    """Channels of a head, and what a value takes.

    Attributes:
        key: Channels of q and k.
        value: Channels of v.
        itemsize: Bytes of a value of q, k and v.
    """

    key: int = 128
    value: int = 128
    itemsize: int = 2

    @property
    def bytes_of_key(self) -> int:
        """Of a key and its value."""
        return (self.key + self.value) * self.itemsize

    @property
    def bytes_of_query(self) -> int:
        """Of a query, and of its output and log-sum-exp, in float32, on the way back."""
        return self.key * self.itemsize + self.bytes_back

    @property
    def bytes_back(self) -> int:
        """Of an output and its log-sum-exp."""
        return 4 * (self.value + 1)

    @property
    def pair(self) -> int:
        """Operations for a query and a key."""
        return 2 * (self.key + self.value)


@dataclass(eq=False)
class Load:
    """What the ranks do for one call.

    Attributes:
        local: (ranks,) operations on keys that the rank holds.
        remote: (ranks,) operations that wait for others' keys or queries.
        received: (ranks,) bytes.
        peers: (ranks, ranks) whether a row's rank receives of a column's.
    """

    local: Float64
    remote: Float64
    received: Float64
    peers: Bools

    @staticmethod
    def of(demands: Sequence[Demand], widths: Widths, cap: float = 1.05, *, queries: bool = True) -> Load:
        """The load of the branches of one call, with covers where they save.

        Args:
            demands: The branches under one placement.
            widths: Channels.
            cap: As of :func:`~ringweave.parallel.planning.movement.cover`.
            queries: Whether queries may move; else keys alone, as in the gather schedule.
        """
        ranks = demands[0].placement.ranks
        load = Load(np.zeros(ranks), np.zeros(ranks), np.zeros(ranks), np.zeros((ranks, ranks), bool))
        for demand in demands:
            tile = demand.tile
            moves = keys_only(demand)
            if queries:
                moves = cover(demand, widths.bytes_of_key * tile, widths.bytes_of_query * tile, cap)
            load._work(demand, moves, widths.pair * tile * demand.plan.q_tile)
            receiver, sender, tokens = demand.receipts(tuple(move.keys for move in moves))
            load._receive(receiver, sender, tokens * widths.bytes_of_key)
            load._queries(demand, moves, widths)
        np.fill_diagonal(load.peers, False)
        return load

    def _receive(self, receiver: NDArray[np.int64], sender: NDArray[np.int64], size: NDArray[np.int64]) -> None:
        self.received += np.bincount(receiver, weights=size, minlength=len(self.received))
        self.peers[receiver, sender] = True

    def _queries(self, demand: Demand, moves: Sequence[Moves], widths: Widths) -> None:
        for kind, move in zip(demand.kinds, moves, strict=True):
            if not move.queries.any():
                continue
            helper, tile = np.nonzero(move.queries)
            tokens = demand.lengths[tile] * (kind.queries * len(kind.members))
            self._receive(helper, demand.owner[tile], tokens * (widths.key * widths.itemsize))
            self._receive(demand.owner[tile], helper, tokens * widths.bytes_back)

    def _work(self, demand: Demand, moves: Sequence[Moves], operations: int) -> None:
        total, local = demand.work(), demand.local_work()
        for kind, move in zip(demand.kinds, moves, strict=True):
            if not move.queries.any():
                continue
            row, col, work = edges(demand, kind)
            moved = np.flatnonzero(move.queries[demand.owner[col], row])
            asks, helps = demand.owner[row[moved]], demand.owner[col[moved]]
            total += np.bincount(helps, weights=work[moved], minlength=len(total))
            total -= np.bincount(asks, weights=work[moved], minlength=len(total))
        self.local += local * operations
        self.remote += (total - local) * operations


@dataclass(frozen=True)
class Estimate:
    """What one step costs under a placement, one batch element unless branches say otherwise; forward.

    Attributes:
        name: The placement's, or a system's.
        ranks: How many.
        bytes_worst: Received by the rank that receives most.
        bytes_total: Received by all.
        imbalance: Work of the busiest rank over the mean.
        messages: Received by the rank that receives most.
        stages: Distances between ranks over which something moves: stages of a ring.
        gather: Seconds where everything received is waited for at once, while local keys are computed.
        ring: Seconds where each stage is computed while the next one is on its way.
        ideal: Seconds of the mean work alone.
    """

    name: str
    ranks: int
    bytes_worst: float
    bytes_total: float
    imbalance: float
    messages: int
    stages: int
    gather: float
    ring: float
    ideal: float

    @property
    def seconds(self) -> float:
        """Of the better schedule."""
        return min(self.gather, self.ring)

    @property
    def efficiency(self) -> float:
        """The mean rank's computation over the step."""
        return self.ideal / self.seconds if self.seconds else 1.0


def estimate(name: str, loads: Sequence[Load], machine: Machine) -> Estimate:
    """The cost of calls one after the other, such as interleaved layers; each waits for its slowest rank.

    ``gather``: max(local, received) + remote; ``ring``: max(local + remote, received + the last of its stages).

    Args:
        name: Of what is estimated.
        loads: One for each call.
        machine: The ranks.
    Returns:
        Times and bytes of all calls together.
    """
    gather = ring = ideal = 0.0
    stages = 0
    ranks = len(loads[0].local)
    messages = np.zeros(ranks, np.int64)
    for load in loads:
        local, remote = load.local / machine.flops, load.remote / machine.flops
        of_rank = load.peers.sum(1)
        receive = load.received / machine.bandwidth + of_rank * machine.latency
        gather += float((np.maximum(local, receive) + remote).max())
        last = remote / np.maximum(of_rank, 1)
        ring += float((np.maximum(local + remote, receive + last) + of_rank * machine.latency).max())
        ideal += float((local + remote).mean())
        to, source = np.nonzero(load.peers)
        stages += len(np.unique((to - source) % ranks))
        messages += of_rank
    work = np.sum([load.local + load.remote for load in loads], axis=0)
    received = np.sum([load.received for load in loads], axis=0)
    return Estimate(
        name,
        ranks,
        float(received.max()),
        float(received.sum()),
        float(work.max() / work.mean()) if work.any() else 1.0,
        int(messages.max()),
        stages,
        gather,
        ring,
        ideal,
    )
