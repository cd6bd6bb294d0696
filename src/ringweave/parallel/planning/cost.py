"""The modelled time of a forward step under a placement, from the operations and received bytes of each rank.

Operations: two matrix products per non-empty tile, 2 (D + Dv) for each pair of the tile, masked or not. Bytes: keys and
values of the needed tiles that a rank does not hold or, if that is cheaper, queries sent and outputs returned. The
model counts one launch per message. It ignores other launches and memory traffic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...checks import number
from ...errors import ShapeError
from .demand import Bools, Demand
from .movement import Float64, Moves, edges, keys_only, movement
from .placement import Int64, Placement
from .workload import Widths, Workload


@dataclass(frozen=True)
class Machine:
    """The model's parameters of a rank.

    Attributes:
        flops: Operations per second of attention.
        bandwidth: Bytes per second that a rank receives.
        latency: Seconds before a message's first byte, and seconds of the launch of a ring stage.
    """

    flops: float = 500e12
    bandwidth: float = 50e9
    latency: float = 10e-6

    def __post_init__(self) -> None:
        for name, least in (("flops", 1), ("bandwidth", 1), ("latency", 0)):
            number(name, getattr(self, name), least, error=ShapeError)


@dataclass(eq=False)
class Load:
    """The work and received bytes of all ranks for one call."""

    local: Float64  # (ranks,) operations on keys that the rank holds
    remote: Float64  # (ranks,) operations that wait for keys or queries of other ranks
    received: Float64
    senders: Bools  # (ranks, ranks) whether the row's rank receives from the column's rank

    @staticmethod
    def of(demands: Sequence[Demand], widths: Widths, cap: float = 1.05, *, queries: bool = True) -> Load:
        """Return the load of the branches of one call under one placement.

        Args:
            demands: Demand of each branch.
            widths: Channels and bytes of a head.
            cap: Bound on a rank's work, as in :func:`~ringweave.parallel.planning.movement.movement`.
            queries: Whether queries may move where that saves bytes; False for the allgather schedule.
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
        """Add the bytes of moved queries and returned outputs; return the change of each rank's work, (ranks,)."""
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
    """The modelled cost of one forward step under a placement, for one batch element unless the pattern has a batch.

    Attributes:
        name: Name of the placement or system.
        ranks: Number of ranks.
        bytes_worst: Bytes received by the rank that receives most.
        bytes_total: Bytes received by all ranks.
        imbalance: Work of the busiest rank over the mean work.
        messages: Messages received by the rank that receives most of them.
        stages: Number of ring stages with messages: distinct distances between senders and receivers.
        allgather: Seconds of the allgather schedule, which computes local keys while everything else is received.
        ring: Seconds of the ring schedule, which computes each stage while it receives the next one.
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
        """Modelled seconds of the faster schedule."""
        return min(self.allgather, self.ring)

    @property
    def efficiency(self) -> float:
        """Fraction of the step's time that the mean rank spends computing."""
        return self.ideal / self.seconds if self.seconds else 1.0


def estimate(name: str, loads: Sequence[Load], machine: Machine) -> Estimate:
    """Estimate successive calls, such as interleaved layers; each call waits for its slowest rank.

    ``allgather`` takes max(local, receive) + remote. ``ring`` takes max(local + remote, receive + the last stage) plus
    one latency per message.
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
