"""Measurements: named cases, peers side by side in one run, and the demonstration on real text.

Nothing here loads with ``import ringweave``; plotting and terminal libraries load when a command needs them.

    >>> from ringweave.bench import run_case, Options
    >>> result = run_case("planning", Options(quick=True))
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cases import CASES, run_case
    from .compare import compare
    from .demo import DemoResult, run_demo
    from .peers import Peer, peers
    from .problem import Problem
    from .record import CaseResult, Options, Outcome, Target

__all__ = [
    "CASES",
    "CaseResult",
    "DemoResult",
    "Options",
    "Outcome",
    "Peer",
    "Problem",
    "Target",
    "compare",
    "peers",
    "run_case",
    "run_demo",
]

_HOMES = {
    "CASES": "cases",
    "CaseResult": "record",
    "DemoResult": "demo",
    "Options": "record",
    "Outcome": "record",
    "Peer": "peers",
    "Problem": "problem",
    "Target": "record",
    "compare": "compare",
    "peers": "peers",
    "run_case": "cases",
    "run_demo": "demo",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ringweave.bench' has no attribute {name!r}")
    # a submodule of the same name would hide the function: bind what was asked for
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
