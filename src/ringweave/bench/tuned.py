"""The case ``tune``: what ``ringweave tune`` gains on some usual shapes, over what auto takes where nothing is stored.

Shapes are tuned first, then the choice and the heuristic are checked and timed once more, in turn: the figures are not
those that the choice was made by. Nothing is stored.
"""

from __future__ import annotations

import torch

import ringweave as rw

from ..ops.dispatch import candidates
from .candidate import Candidate, whole
from .case import CaseResult, Options
from .choice import Choice
from .compare import Outcome, Say, compare
from .tune import DIRECTIONS, tune
from .workload import Workload


def run(options: Options, say: Say) -> CaseResult:
    """Tune, and compare with the heuristic."""
    tokens = options.tokens or (1024 if options.quick else 8192)
    heads, rounds = (2, 3) if options.quick else (8, 7)
    causal = rw.Causal()
    patterns = {
        "narrow window": rw.SlidingWindow(64),
        "window + sinks": rw.SlidingWindow(tokens // 8) & causal | rw.Sinks(64) & causal,
        "random 10%": rw.random_blocks(tokens, max(0.1, 1.25 / max(tokens // 128, 1))),
        "causal": causal,
    }
    records: list[Outcome] = []
    said: list[str] = []
    for name, pattern in patterns.items():
        dtype = options.dtype or (torch.float32 if options.device == "cpu" else torch.bfloat16)
        workload = Workload(name, pattern, tokens, options.heads or heads, 64, 1, dtype, options.device)
        before: Choice | None = None
        budget = 1.0 if options.quick else 15.0 if options.device == "cpu" else 60.0
        for choice in tune(workload, rounds=options.rounds or rounds, budget=budget, say=say):
            found = _compared(choice, before, options.rounds or rounds, say)
            records += found
            before = choice
            said.append(f"{name}, {choice.direction}: {_said(found)}.")
    return CaseResult("tune", tuple(records), " ".join(["Heuristic time over tuned time:", *said]))


def _said(found: list[Outcome]) -> str:
    ratio = found[1].over_first
    if ratio is None:
        return "not measured"
    same = found[0].how == found[1].how
    return "the heuristic stays" if same else f"{ratio.medians:.2f} x ({found[0].how})"


def _compared(choice: Choice, before: Choice | None, rounds: int, say: Say) -> list[Outcome]:
    """The choice and the heuristic in turn, each behind its own forward."""
    usual, chosen = _usual(choice, False), choice.chosen
    own = choice.direction == DIRECTIONS[0]
    tuned = (usual if chosen is None else chosen).peer(None if own or before is None else before.chosen, "tuned")
    heuristic = _usual(choice, not own).peer(None if own else usual, "heuristic")
    return compare(
        choice.workload, [tuned, heuristic], directions=[choice.direction], rounds=rounds, memory=False, say=say
    )


def _usual(choice: Choice, needs_grad: bool) -> Candidate:
    """What auto takes of a branch where nothing is stored."""
    usual = candidates(choice.workload.case(needs_grad), whole(choice.workload))
    return Candidate(next(backend.name for backend, reason in usual if reason is None))
