"""Find which mask really ran: the pairs that an attention function, layer or model attends, against the expected ones.

Masks get lost silently: padding without a registered mask function, windows off by one, packing that a cache switches
off, a fused path that bypasses a module. The audit finds every attended pair from outputs, not from source code.
"""

from __future__ import annotations

from typing import Any

from ..names import only, warn_renamed
from .counts import Counts
from .layers import Layer, ModelAudit, intercepted, model
from .leakage import Reach, leaks
from .verdict import Comparison, compare, named
from .weight_probe import Attended, attended

__all__ = [
    "Attended",
    "Comparison",
    "Counts",
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


def __getattr__(name: str) -> Any:
    if name == "kit":
        from . import conformance

        warn_renamed("ringweave.audit.kit", "ringweave.audit.conformance")
        return conformance
    raise AttributeError(f"module 'ringweave.audit' has no attribute {name!r}")


__dir__ = only(__all__)
