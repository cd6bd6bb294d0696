"""Measurements: named cases, peers side by side in one run, and the demonstration on real text.

Nothing here loads with ``import ringweave``; plotting and terminal libraries load when a command needs them.

    >>> from ringweave.bench import run_case, Options
    >>> result = run_case("planning", Options(quick=True))
"""

from .cases import CASES, run_case
from .compare import compare
from .demo import DemoResult, run_demo
from .peers import Peer, peers
from .problem import Problem
from .record import CaseResult, Options, Outcome, Target

__all__ = [
    "CASES", "CaseResult", "DemoResult", "Options", "Outcome", "Peer", "Problem", "Target", "compare", "peers",
    "run_case", "run_demo",
]  # fmt: skip
