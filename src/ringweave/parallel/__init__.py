"""Context parallelism: one sequence around a ring of ranks, exact, moving only what the pattern needs.

    pattern, placement  --demand-->  key tiles per rank  --exchange-->  messages  --gather | ring-->  (out, lse)

``ContextParallel`` joins them; ``Transport`` carries the messages, over torch.distributed, and turns failures into
:class:`ringweave.RingError`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .context import ContextParallel
from .placement import Placement
from .tables import PendingTable
from .trace import Trace, plot
from .transport import Transport

if TYPE_CHECKING:
    from .survivors import regroup

__all__ = ["ContextParallel", "PendingTable", "Placement", "Trace", "Transport", "plot", "regroup"]


def __getattr__(name: str) -> object:
    # imports torch.distributed, which a group of one does without
    if name == "regroup":
        from .survivors import regroup

        return regroup
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
