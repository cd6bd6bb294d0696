"""What ``ContextParallel.explain`` says."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ...units import nbytes, percent
from .cost import Load, Machine, Widths, estimate

if TYPE_CHECKING:
    from ..context import ContextParallel


def explanation(context: ContextParallel, widths: Widths) -> str:
    """The text; see :meth:`ContextParallel.explain`."""
    place, size = context.placement, context.size
    ranks = f"{size} rank" + ("s" if size > 1 else "")
    lines = [f"{context.seq_len:,} tokens on {ranks}: {place.name} placement, {place.local:,} tokens each"]
    loads = []
    machine = Machine()
    ring = context.heads[1] * (size - 1) * place.local * widths.bytes_of_key
    for pattern in context.patterns:
        demands = context.plans.demands(pattern, pattern.extents()[0] or 1)
        schedule = context.plans.schedule_of(pattern)
        load = Load.of(demands, widths, queries=schedule == "ring")
        loads.append(load)
        cost = estimate(place.name, [load], machine)
        lines += [
            f"{pattern!r}: {schedule}",
            f"  bytes      {nbytes(int(load.received.max()))} to the busiest rank, forward"
            + (f"; a full ring moves {nbytes(ring)}" if ring else ""),
            f"  balance    {cost.imbalance:.3f} (most work over mean)",
            f"  stages     {cost.stages}",
            f"  model      {percent(cost.efficiency)} of the time computing, "
            f"at {machine.flops / 1e12:.0f} TFLOP/s and {machine.bandwidth / 1e9:.0f} GB/s a rank",
        ]
    if len(loads) > 1:
        work = np.sum([load.local + load.remote for load in loads], axis=0)
        lines.append(f"together: balance {work.max() / work.mean():.3f}")
    return "\n".join(lines)
