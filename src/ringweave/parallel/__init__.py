"""Context parallelism: exact attention of one sequence on several ranks, which exchange only the tiles in the pattern.

    pattern, placement  --demand-->  key tiles per rank  --exchange-->  messages  --allgather | ring-->  (out, lse)

``ContextParallel`` runs these steps. ``Transport`` carries the messages over torch.distributed and turns failures into
:class:`ringweave.RingError`.
"""

from __future__ import annotations

from ..names import only
from ..plugins import attribute
from .context import ContextParallel
from .execution.pending_table import PendingTable
from .planning.placement import Placement
from .trace import Trace, export_chrome_trace
from .transport.rendezvous import regroup
from .transport.transport import Transport

__all__ = [
    "ContextParallel", "PendingTable", "Placement", "Trace", "Transport", "export_chrome_trace", "regroup",
]  # fmt: skip
__dir__ = only(__all__)


def __getattr__(name: str) -> object:
    if name == "simulate":
        return attribute(__name__, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
