"""Memory management: reusable scratch, free memory, and the largest batch that fits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..names import only, suggest
from ..plan.cached_plans import CacheStatistics, plan_cache
from . import numa
from .batch_size import fit_batch
from .pressure import Pressure, on_trim, pressure, trim
from .workspace import Workspace, WorkspaceStatistics

__all__ = [
    "Pressure",
    "Workspace",
    "WorkspaceStatistics",
    "fit_batch",
    "numa",
    "on_trim",
    "plan_statistics",
    "pressure",
    "trim",
]
__dir__ = only(__all__)
if not TYPE_CHECKING:
    __getattr__ = suggest(__name__, __all__)


def plan_statistics() -> CacheStatistics:
    """Return the counters of the plan cache that attention uses: hits and misses.

    Repeated small calls on a CPU keep their plan, so only the first one counts.

    Example:
        >>> before = rw.memory.plan_statistics()
        >>> for _ in range(10):
        ...     _ = rw.plan(rw.SlidingWindow(99), 256)
        >>> now = rw.memory.plan_statistics()
        >>> now.hits - before.hits, now.misses - before.misses
        (9, 1)
    """
    return plan_cache.statistics()
