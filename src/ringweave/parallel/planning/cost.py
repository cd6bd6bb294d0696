"""The modelled time of a forward step under a placement: what each rank computes, and what it receives.

Operations are those of the non-empty tiles, two products each: 2 (D + Dv) for each pair of a tile, masked or not.
Bytes are those of the exchange: keys and values of the tiles that a rank needs and does not hold or, where that is
cheaper, queries there and outputs back. Nothing else is counted: no launches but one per message, no memory traffic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...errors import ShapeError
from ...patterns.validate import number
from .demand import Bools, Demand
from .movement import Float64, Moves, edges, keys_only, movement
from .placement import Int64, Placement
from .workload import Widths, Workload


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
        for name, least in (("flops", 1), ("bandwidth", 1), ("latency", 0)):
            number(name, getattr(self, name), least, error=ShapeError)


@dataclass(eq=False)
class Load:
    """What the ranks do for one call.

    Attributes:
        local: (ranks,) operations on keys that the rank holds.
        remote: (ranks,) operations that wait for others' keys or queries.
        received: (ranks,) bytes.
        senders: (ranks, ranks) whether a row's rank receives of a column's.
    """

    local: Float64
    remote: Float64
    received: Float64
    senders: Bools

    @staticmethod
    def of(demands: Sequence[Demand], widths: Widths, cap: float = 1.05, *, queries: bool = True) -> Load:
        """Find the load of the branches of one call under one placement.

        Queries may move where that saves, unless keys alone do, as in the allgather schedule; ``cap`` is as of
        :func:`~ringweave.parallel.planning.movement.movement`.
        """
        ranks = demands[0].placement.ranks
        load = Load(np.zeros(ranks), np.zeros(ranks), np.zeros(ranks), np.zeros((ranks, ranks), bool))
        for demand in demands:
            tile = demand.tile
            moves = keys_only(demand)
            if queries:
                moves = movement(demand, widths.bytes_of_key * tile, widths.bytes_of_query * tile, cap)
            total, local = demand.work(), demand.local_work()
            receiver, sender, tokens = demand.receipts(tuple(move.keys for move in moves))
            load._receive(receiver, sender, tokens * widths.bytes_of_key)
            if any(move.queries.any() for move in moves):
                total += load._queries(demand, moves, widths)
            operations = widths.pair * tile * demand.plan.q_tile
            load.local += local * operations
            load.remote += (total - local) * operations
        np.fill_diagonal(load.senders, False)
        return load

    def _receive(self, receiver: Int64, sender: Int64, size: Int64) -> None:
        self.received += np.bincount(receiver, weights=size, minlength=len(self.received))
        self.senders[receiver, sender] = True

    def _queries(self, demand: Demand, moves: Sequence[Moves], widths: Widths) -> Float64:
        """Count the queries that move, and their outputs back; (ranks,) the work that moves with them."""
        owner, moved = demand.owner, np.zeros(len(self.received))
        for kind, move in zip(demand.kinds, moves, strict=True):
            helper, tile = np.nonzero(move.queries)
            tokens = demand.lengths[tile] * (kind.queries * len(kind.members))
            self._receive(helper, owner[tile], tokens * (widths.key * widths.itemsize))
            self._receive(owner[tile], helper, tokens * widths.bytes_back)
            row, col, work = edges(demand, kind)
            sent = np.flatnonzero(move.queries[owner[col], row])
            moved += np.bincount(owner[col[sent]], weights=work[sent], minlength=len(moved))
            moved -= np.bincount(owner[row[sent]], weights=work[sent], minlength=len(moved))
        return moved


@dataclass(frozen=True)
class Estimate:
    """What one forward step costs under a placement, for one batch element unless branches say otherwise.

    Attributes:
        name: The placement's, or a system's.
        ranks: How many.
        bytes_worst: Received by the rank that receives most.
        bytes_total: Received by all.
        imbalance: Work of the busiest rank over the mean.
        messages: Received by the rank that receives most.
        stages: Distances between ranks over which something moves: stages of a ring.
        allgather: Seconds where everything received is waited for at once, while local keys are computed.
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
    allgather: float
    ring: float
    ideal: float

    @property
    def seconds(self) -> float:
        """How long the better schedule takes."""
        return min(self.allgather, self.ring)

    @property
    def efficiency(self) -> float:
        """How much of the step the mean rank computes."""
        return self.ideal / self.seconds if self.seconds else 1.0


def estimate(name: str, loads: Sequence[Load], machine: Machine) -> Estimate:
    """Estimate calls one after the other, such as interleaved layers; each waits for its slowest rank.

    ``allgather``: max(local, received) + remote; ``ring``: max(local + remote, received + the last of its stages).
    """
    allgather = ring = ideal = 0.0
    stages = 0
    ranks = len(loads[0].local)
    messages = np.zeros(ranks, np.int64)
    for load in loads:
        local, remote = load.local / machine.flops, load.remote / machine.flops
        of_rank = load.senders.sum(1)
        receive = load.received / machine.bandwidth + of_rank * machine.latency
        allgather += float((np.maximum(local, receive) + remote).max())
        last = remote / np.maximum(of_rank, 1)
        ring += float((np.maximum(local + remote, receive + last) + of_rank * machine.latency).max())
        ideal += float((local + remote).mean())
        to, source = np.nonzero(load.senders)
        stages += len(np.unique((to - source) % ranks))
        messages += of_rank
    work = np.sum([load.local + load.remote for load in loads], axis=0)
    received = np.sum([load.received for load in loads], axis=0)
    imbalance = float(work.max() / work.mean()) if work.any() else 1.0
    size = float(received.max()), float(received.sum())
    return Estimate(name, ranks, *size, imbalance, int(messages.max()), stages, allgather, ring, ideal)


def cost_of(workload: Workload, placement: Placement, machine: Machine) -> Estimate:
    """Estimate all calls of a workload under one placement."""
    ratio, widths = workload.ratio, workload.widths
    loads = [Load.of([Demand.of(branch, placement, ratio) for branch in call], widths) for call in workload.calls]
    return estimate(placement.name, loads, machine)
