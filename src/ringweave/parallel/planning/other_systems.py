"""What other ways to spread attention over ranks cost, in closed form and at their best.

Each computes the pattern's tiles alone, as ringweave does, and the ring is as balanced as the best of the plain
placements: what differs is what moves, and what is waited for.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ...plan import Branch
from .cost import Estimate, Machine, Widths
from .demand import Demand
from .placement import portfolio

NAMES = ("full ring", "all-gather", "Ulysses")


def peers(
    calls: Sequence[Sequence[Branch]],
    tokens: int,
    ranks: int,
    block: int,
    heads: tuple[int, int],
    machine: Machine,
    widths: Widths,
) -> dict[str, Estimate | None]:
    """Estimates by name; None for what cannot run: Ulysses where the ranks do not divide the key heads.

    Args:
        calls: The branches of each call; one batch element.
        tokens: Length of the sequence.
        ranks: Ranks.
        block: Tokens in a block of the plain placements.
        heads: Query heads and key heads.
        machine: The ranks.
        widths: Channels and bytes.
    """
    ratio = heads[0] // heads[1]
    # the plain ones: a ring's work is in token order
    placements = [each for each in portfolio(tokens, ranks, block, _rates(calls)) if each.views == 1]
    works = [
        np.sum([_seconds(Demand.of(branch, each, ratio), machine, widths) for call in calls for branch in call], axis=0)
        for each in placements
    ]
    work = min(works, key=lambda each: float(each.max()))
    busiest, ideal = float(work.max()), float(work.mean())
    imbalance = busiest / ideal if ideal else 1.0
    # every key to every rank
    size = len(calls) * tokens * (ranks - 1) / ranks * heads[1] * widths.bytes_of_key
    waits = len(calls) * (ranks - 1)
    receive = size / machine.bandwidth + waits * machine.latency
    stage = max(busiest / ranks, receive / (ranks - 1)) if ranks > 1 else 0.0
    ring = (ranks - 1) * stage + busiest / ranks
    found: dict[str, Estimate | None] = {}
    for name, seconds in zip(NAMES, (ring, receive + busiest), strict=False):
        found[name] = Estimate(name, ranks, size, size * ranks, imbalance, waits, waits, seconds, seconds, ideal)
    found[NAMES[2]] = None if heads[1] % ranks else _ulysses(calls, tokens, ranks, heads, machine, widths)
    return found


def _rates(calls: Sequence[Sequence[Branch]]) -> tuple[int, ...]:
    return tuple(branch.rate for call in calls for branch in call)


def _seconds(demand: Demand, machine: Machine, widths: Widths) -> NDArray[np.float64]:
    return demand.work() * (widths.pair * demand.tile * demand.plan.q_tile / machine.flops)


def _ulysses(
    calls: Sequence[Sequence[Branch]],
    tokens: int,
    ranks: int,
    heads: tuple[int, int],
    machine: Machine,
    widths: Widths,
) -> Estimate:
    """Two exchanges of everything, tokens for heads and back, with all computation between them."""
    of_head = np.zeros(heads[0])
    for branch in (branch for call in calls for branch in call):
        plan = branch.plan("cpu")
        tiles = np.diff(plan.row_ptr.numpy()[:, [0, -1]].astype(np.int64), axis=1)[:, 0]
        area = widths.pair * plan.q_tile * plan.kv_tile / machine.flops
        of_head[np.arange(*branch.heads)] += tiles[plan.group.numpy()].sum(0) * area
    work = of_head.reshape(ranks, -1).sum(1)
    values = heads[0] * (widths.key + widths.value) + heads[1] * (widths.key + widths.value)
    size = len(calls) * tokens / ranks * (ranks - 1) / ranks * values * widths.itemsize
    waits = 2 * len(calls) * (ranks - 1)
    seconds = size / machine.bandwidth + waits * machine.latency + float(work.max())
    ideal = float(work.mean())
    imbalance = float(work.max()) / ideal if ideal else 1.0
    return Estimate(NAMES[2], ranks, size, size * ranks, imbalance, waits, 2 * len(calls), seconds, seconds, ideal)
