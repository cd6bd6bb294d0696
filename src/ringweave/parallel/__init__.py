"""Context parallelism: one sequence around a ring of ranks, exact, moving only what the pattern needs.

    pattern, placement  --demand-->  key tiles per rank  --exchange-->  messages  --allgather | ring-->  (out, lse)

``ContextParallel`` joins them; ``Transport`` carries the messages, over torch.distributed, and turns failures into
:class:`ringweave.RingError`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..names import only
from .context import ContextParallel
from .execution.pending_table import PendingTable
from .planning.placement import Placement
from .trace import Trace, export_chrome_trace
from .transport.transport import Transport

if TYPE_CHECKING:
    from .transport.rendezvous import regroup

__all__ = [
    "ContextParallel", "PendingTable", "Placement", "Trace", "Transport", "export_chrome_trace", "regroup",
]  # fmt: skip
__dir__ = only(__all__)


def __getattr__(name: str) -> object:
    if name == "regroup":
        # imports torch.distributed, which a group of one does without
        from .transport.rendezvous import regroup

        return regroup
    if name == "simulate":
        from ..laboratory import attribute

        return attribute(__name__, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
