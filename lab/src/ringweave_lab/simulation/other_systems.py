"""What other ways to spread attention over ranks cost, in closed form and at their best.

Each computes the pattern's tiles alone, as ringweave does, and the ring is as balanced as the best of the plain
placements: what differs is what moves, and what is waited for.
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
    """Estimate them by name; None for what cannot run: Ulysses where the ranks do not divide the key heads."""
    rates = [branch.rate for branch in workload.branches]
    # the plain ones: a ring's work is in token order
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
    # every key to every rank
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
    """Estimate two exchanges of everything, tokens for heads and back, with all computation between them."""
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
    """Estimate a system of (ranks,) seconds of work, all alike in bytes and in (messages, stages)."""
    ranks, ideal = len(work), float(work.mean())
    imbalance = float(work.max()) / ideal if ideal else 1.0
    return Estimate(name, ranks, size, size * ranks, imbalance, *counts, seconds, seconds, ideal)
