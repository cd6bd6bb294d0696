"""Jobs of worker processes: attention with a context."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import ringweave as rw
from ringweave.bench.delayed import Delayed
from ringweave.parallel import ContextParallel
from ringweave.patterns import Pattern

from ..oracle import Inputs
from . import spread



def call(x: Inputs, pattern: Pattern, options: dict[str, Any]) -> spread.Share:
    """One call over the default group."""
    return spread.call(dist.group.WORLD, x, pattern, options)


def call_on_nodes(x: Inputs, pattern: Pattern, nodes: int) -> spread.Share:
    """One call over a mesh of nodes."""
    mesh = init_device_mesh("cpu", (nodes, dist.get_world_size() // nodes), mesh_dim_names=("node", "cp"))
    return spread.call(mesh, x, pattern, {})


def differing(name: str) -> tuple[str, int]:
    """A call in which rank 0 differs."""
    from .test_context import differing

    return differing(dist.group.WORLD, name, "gather")


def overlapped(latency: float) -> tuple[float, float, list[int], list[float]]:
    """Seconds that messages flew and were waited for, stages computed, when each was posted and computed."""
    transport = Delayed(dist.group.WORLD, latency=latency)
    ctx = ContextParallel(transport, rw.Full(), 16384, heads=(2, 2), schedule="ring")
    q, k, v = (torch.randn(1, 2, ctx.local, 64) for _ in range(3))
    with ctx.trace() as trace:
        rw.attention(q, k, v, rw.Full(), context=ctx)
    ctx.close()
    posted = {event.stage: event.start for event in trace.events if (event.kind, event.what) == ("receive", "keys")}
    computed = [event for event in trace.events if event.kind == "compute"]
    order = [time for stage in range(3) for time in (posted[stage + 1], computed[stage].end)]
    return transport.flown, transport.slept, [event.stage for event in computed], order
