"""Memory management: reusable scratch, free memory, the largest batch that fits, and plans stored on disk."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..names import only, suggest
from ..plan.cache import CacheStatistics, plan_cache
from . import numa
from .batch_size import fit_batch
from .pressure import Pressure, on_trim, pressure, trim
from .workspace import Workspace, WorkspaceStatistics

__all__ = [
    "Pressure",
    "Workspace",
    "WorkspaceStatistics",
    "fit_batch",
    "keep_plans",
    "numa",
    "on_trim",
    "plan_statistics",
    "pressure",
    "trim",
]
__dir__ = only(__all__)
if not TYPE_CHECKING:
    __getattr__ = suggest(__name__, __all__)


def keep_plans(folder: str | Path | None, *, seconds: float = 0.05) -> None:
    """Store plans that take long to compute in a folder, for other and later processes.

    A stored plan is identified by the pattern's text, the contents of its tables (on a CPU), the sizes, and the version
    of ringweave. Plans of mask functions and of decoding steps are not stored. Several processes may share the folder,
    and it may be removed at any time.

    Args:
        folder: Folder for the plans, created if missing; None stops storing plans.
        seconds: Minimum time, in seconds, that a plan must have taken to be stored.
    Example:
        >>> import tempfile
        >>> rw.memory.keep_plans(tempfile.mkdtemp(), seconds=0)
        >>> _ = rw.plan(rw.Causal() & rw.Segments(1000), 4096)
        >>> _ = rw.memory.trim()
        >>> _ = rw.plan(rw.Causal() & rw.Segments(1000), 4096)
        >>> rw.memory.plan_statistics().loaded
        1
        >>> rw.memory.keep_plans(None)
    """
    from ..plan.store import PlanStore

    plan_cache.store = None if folder is None else PlanStore(folder, seconds)


def plan_statistics() -> CacheStatistics:
    """Return the counters of the plan cache that attention uses: hits, misses, and plans loaded from disk.

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
