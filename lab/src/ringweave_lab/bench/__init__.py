"""Measurements: named cases, and peers side by side in one run.

>>> from ringweave_lab.bench import run_case, Options
>>> result = run_case("planning", Options(quick=True, rounds=1))
"""

from ..tune.problem import Problem
from ..tune.session import Peer
from .cases import CASES, run_case
from .compare import compare
from .peers import peers
from .record import CaseResult, Options, Outcome, Target

__all__ = [
    "CASES", "CaseResult", "Options", "Outcome", "Peer", "Problem", "Target", "compare", "peers", "run_case",
]  # fmt: skip
