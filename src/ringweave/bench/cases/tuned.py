"""The case ``tune``: what ``ringweave tune`` gains on some usual shapes, over what auto takes where nothing is stored.

Shapes are tuned first, then the choice and the heuristic are checked and timed once more, in turn: the figures are not
those that the choice was made by. Nothing is stored.
"""

from __future__ import annotations

import torch

import ringweave as rw

from ...ops.dispatch import candidates
from ..compare import Comparison, outcomes
from ..problem import FORWARD, Drawn, Problem
from ..record import Measuring, Options, Outcome, Say
from ..search import Candidate, whole
from ..tune import Finding, tune
from .attention import window_with_sinks


def measure(options: Options, say: Say) -> Measuring:
    """Tune, and compare with the heuristic."""
    tokens = options.tokens or (1024 if options.quick else 8192)
    heads, rounds = (2, 3) if options.quick else (8, 7)
    cpu = options.device == "cpu"
    budget = 1.0 if options.quick else 15.0 if cpu else 60.0
    said = ["Heuristic time over tuned time:"]
    for name, relation in (
        ("narrow window", rw.SlidingWindow(64)),
        ("window + sinks", window_with_sinks(tokens // 8, 64)),
        ("random 10%", Drawn(0.1)),
        ("causal", rw.Causal()),
    ):
        problem = options.of(Problem(name, relation, tokens, heads, dtype=torch.float32 if cpu else torch.bfloat16))
        before: Finding | None = None
        for choice in tune(problem, rounds=options.rounds or rounds, budget=budget, say=say):
            found = yield from outcomes(_again(choice, before, options.rounds or rounds), say)
            said.append(f"{name}, {choice.direction}: {_said(found)}.")
            before = choice
    return " ".join(said)


def _said(found: list[Outcome]) -> str:
    ratio = found[1].over_first
    if ratio is None:
        return "not measured"
    same = found[0].how == found[1].how
    return "the heuristic stays" if same else f"{ratio.medians:.2f} x ({found[0].how})"


def _again(choice: Finding, before: Finding | None, rounds: int) -> Comparison:
    """Compare the choice with the heuristic, each behind its own forward."""
    usual, chosen = _usual(choice, False), choice.chosen
    own = choice.direction == FORWARD
    tuned = (usual if chosen is None else chosen).peer(None if own or before is None else before.chosen, "tuned")
    heuristic = _usual(choice, not own).peer(None if own else usual, "heuristic")
    return Comparison([(choice.problem, [tuned, heuristic])], [choice.direction], rounds, memory=False)


def _usual(choice: Finding, needs_grad: bool) -> Candidate:
    """Find what auto takes of a branch where nothing is stored."""
    usual = candidates(choice.problem.case(needs_grad), whole(choice.problem))
    return Candidate(next(backend.name for backend, reason in usual if reason is None))
