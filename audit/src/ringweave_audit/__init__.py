"""Find which mask really ran: the pairs that an attention function, layer or model attends, against the expected ones.

Masks get lost silently: padding without a registered mask function, windows off by one, packing that a cache switches
off, a fused path that bypasses a module. The audit finds every attended pair from outputs, not from source code.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .counts import Counts
    from .layers import AttentionCall, AttentionLayer, ModelAudit, intercepted, model
    from .leakage import Reach, leaks
    from .verdict import Comparison, compare, named
    from .weight_probe import Attended, attended

__all__ = [
    "Attended",
    "AttentionCall",
    "AttentionLayer",
    "Comparison",
    "Counts",
    "ModelAudit",
    "Reach",
    "attended",
    "compare",
    "intercepted",
    "leaks",
    "model",
    "named",
]

#: The command that it adds to ``ringweave``, and its help.
COMMANDS = {
    "audit": "Find the pairs that each attention layer of a model attends, and compare them with its configuration.",
    "audit kernels": "Judge the attention kernels of installed libraries by the float64 definition.",
}

# imported when first used: the list of commands is printed without loading PyTorch
_MODULES = {
    "counts": ("Counts",),
    "layers": ("AttentionCall", "AttentionLayer", "ModelAudit", "intercepted", "model"),
    "leakage": ("Reach", "leaks"),
    "verdict": ("Comparison", "compare", "named"),
    "weight_probe": ("Attended", "attended"),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; its names are listed by dir({__name__})")


def __dir__() -> list[str]:
    return sorted(__all__)
