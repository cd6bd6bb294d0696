"""Which mask really ran: what any attention callable, layer or model attends, against what was asked of it.

Masks are lost in silence: padding that no mask function was registered for, windows off by one, packing that a cache
switches off, a fused path that goes round a module. Here every pair is found by value, whatever the source says.
"""

from __future__ import annotations

from .layers import Layer, ModelAudit, intercepted, model
from .reach import Reach, leaks
from .support import Attended, attended
from .verdict import Comparison, compare, named

__all__ = [
    "Attended",
    "Comparison",
    "Layer",
    "ModelAudit",
    "Reach",
    "attended",
    "compare",
    "intercepted",
    "leaks",
    "model",
    "named",
]
