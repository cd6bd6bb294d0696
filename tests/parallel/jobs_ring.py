"""Jobs of worker processes: attention with a context."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

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
