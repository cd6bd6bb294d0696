"""Closed-form costs of other systems that distribute attention over ranks, under favourable assumptions.

Each system computes only the pattern's tiles, as ringweave does, and the ring is as balanced as the best plain
placement. The systems differ only in the bytes that they move and in the messages that they wait for.
"""

from __future__ import annotations

import numpy as np

from ringweave.parallel.planning.choice import portfolio
from ringweave.parallel.planning.cost import Estimate, Machine
from ringweave.parallel.planning.demand import Demand
from ringweave.parallel.planning.movement import Float64
from ringweave.parallel.planning.workload import Workload

NAMES = ("full ring", "all-gather", "Ulysses")


def other_systems(workload: Workload, ranks: int, block: int, machine: Machine) -> dict[str, Estimate | None]:
    """Return estimates by name; Ulysses is None if the number of ranks does not divide the key heads."""
    rates = [branch.rate for branch in workload.branches]
    # only placements with one view, since a ring computes in token order
    placements = [each for each in portfolio(workload.tokens, ranks, block, rates) if each.views == 1]
    works = []
    for placement in placements:
        work = np.zeros(ranks)
        for branch in workload.branches:
            demand = Demand.of(branch, placement, workload.ratio)
            work += demand.work() * (workload.widths.pair * demand.tile * demand.plan.q_tile / machine.flops)
        works.append(work)
    work = min(works, key=lambda each: float(each.max()))
    busiest, calls = float(work.max()), len(workload.calls)
    # every rank receives every key
    size = calls * workload.tokens * (ranks - 1) / ranks * workload.heads[1] * workload.widths.bytes_of_key
    waits = calls * (ranks - 1)
    receive = size / machine.bandwidth + waits * machine.latency
    stage = max(busiest / ranks, receive / (ranks - 1)) if ranks > 1 else 0.0
    ring = (ranks - 1) * stage + busiest / ranks
    return {
        NAMES[0]: _estimate(NAMES[0], work, size, (waits, waits), ring),
        NAMES[1]: _estimate(NAMES[1], work, size, (waits, waits), receive + busiest),
        NAMES[2]: None if workload.heads[1] % ranks else _ulysses(workload, ranks, machine),
    }


def _ulysses(workload: Workload, ranks: int, machine: Machine) -> Estimate:
    """Estimate two all-to-all exchanges, from tokens to heads and back, with all computation between them."""
    (of_queries, of_keys), widths, calls = workload.heads, workload.widths, len(workload.calls)
    of_head = np.zeros(of_queries)
    for branch in workload.branches:
        plan = branch.plan("cpu")
        tiles = np.diff(plan.row_ptr.numpy()[:, [0, -1]].astype(np.int64), axis=1)[:, 0]
        area = widths.pair * plan.q_tile * plan.kv_tile / machine.flops
        of_head[np.arange(*branch.heads)] += tiles[plan.row_set.numpy()].sum(0) * area
    work = of_head.reshape(ranks, -1).sum(1)
    values = (of_queries + of_keys) * (widths.key + widths.value)
    size = calls * workload.tokens / ranks * (ranks - 1) / ranks * values * widths.itemsize
    waits = 2 * calls * (ranks - 1)
    seconds = size / machine.bandwidth + waits * machine.latency + float(work.max())
    return _estimate(NAMES[2], work, size, (waits, 2 * calls), seconds)


def _estimate(name: str, work: Float64, size: float, counts: tuple[int, int], seconds: float) -> Estimate:
    """Return the estimate of a system with (ranks,) seconds of work, and equal bytes and messages per rank."""
    ranks, ideal = len(work), float(work.mean())
    imbalance = float(work.max()) / ideal if ideal else 1.0
    return Estimate(name, ranks, size, size * ranks, imbalance, *counts, seconds, seconds, ideal)
