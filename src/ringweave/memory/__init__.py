"""Staying alive: scratch that is reused, how much memory is left, the largest batch that fits, plans on disk."""

from __future__ import annotations

from pathlib import Path

from ..names import only
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


def keep_plans(folder: str | Path | None, *, seconds: float = 0.05) -> None:
    """Keep plans that take long to make in a folder, for other processes and later ones.

    By value: the pattern's text, the contents of its tables (on a CPU), the sizes, and the version of ringweave. Not
    those of functions and of decoding steps. Processes may share the folder, and it may be removed at any time.

    Args:
        folder: Where; None: nowhere any more.
        seconds: Plans that took longer to make are written.
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
    """Count what the cache of plans that attention uses has served, made and read.

    Small calls on a CPU that are alike hold their plan, and ask for it once.

    Example:
        >>> before = rw.memory.plan_statistics()
        >>> for _ in range(10):
        ...     _ = rw.plan(rw.SlidingWindow(99), 256)
        >>> now = rw.memory.plan_statistics()
        >>> now.hits - before.hits, now.misses - before.misses
        (9, 1)
    """
    return plan_cache.statistics()
