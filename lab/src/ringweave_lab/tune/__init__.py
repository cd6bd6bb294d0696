"""Measure and store the fastest backend and tiles for a kind of call on this machine's CPU (``ringweave tune``).

Every candidate is checked against the float64 oracle on sampled rows, and the correct ones are timed in turn: first
every backend that can run a branch; then other tile sizes for the backends near the fastest. The default choice of auto
stays unless another is clearly faster. On a GPU, ``ringweave tune --gpu`` holds trials (``ringweave_gpu.trial``).
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ringweave.backends import tuning_keys
from ringweave.errors import UnsupportedError
from ringweave.plan import Branch, branches
from ringweave.program import contenders
from ringweave_gpu import trial
from ringweave_gpu.trial import Verdict

from .answers import write_entries
from .measure import Timing
from .problem import BOTH, DIRECTIONS, FORWARD, Problem
from .search import Candidate, Search, pick
from .session import FAILURES, Say, Session, silent

__all__ = ["Finding", "Problem", "Session", "save_answers", "trials", "tune"]


def __dir__() -> list[str]:
    return sorted(__all__)


@dataclass(frozen=True)
class Finding:
    """The measurements of one branch in one direction.

    Attributes:
        problem: The branch as a separate problem.
        branch: The branch.
        direction: ``"forward"`` or ``"forward + backward"``.
        first: Candidate that ran forward before the backward of all candidates; None if each ran both.
        kind: Kind of the call, without its density.
        density: Density of tiles, as a power of 1/2.
        timings: Timings of the correct candidates.
        reasons: Reasons why the other candidates were not timed.
    """

    problem: Problem
    branch: Branch
    direction: str
    first: Candidate | None
    kind: str
    density: int
    timings: Mapping[Candidate, Timing]
    reasons: Mapping[Candidate, str]

    @property
    def chosen(self) -> Candidate | None:
        """The fastest candidate, or auto's default if it is about as fast; None if no candidate was timed."""
        return pick(self.timings)

    @property
    def backend(self) -> str | None:
        """Name of the chosen candidate's backend, or None."""
        return None if self.chosen is None else self.chosen.backend

    def entry(self) -> dict[str, Any]:
        """Return the entry for the file of answers."""
        chosen = self.chosen
        assert chosen is not None
        return {
            "kind": self.kind,
            "density": self.density,
            "backend": chosen.backend,
            "tile": None if chosen.tile is None else list(chosen.tile),
            "seconds": {str(candidate): timing.median for candidate, timing in self.timings.items()},
            "of": self.of,
            "date": now(),
        }

    @property
    def of(self) -> str:
        """Description of the problem."""
        problem = self.problem
        return f"{problem.pattern!r}, {problem.tokens} tokens, {problem.heads}/{problem.key_heads} heads"


def now() -> str:
    """Return the current time in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def tune(
    problem: Problem,
    *,
    directions: Sequence[str] = DIRECTIONS,
    rounds: int = 7,
    budget: float | None = 20.0,
    say: Say = silent,
) -> list[Finding]:
    """Measure the candidates for each kind of branch of a problem; nothing is stored.

    Args:
        problem: The problem to tune.
        directions: Directions to measure, ``"forward"`` and ``"forward + backward"``.
        rounds: Number of timed rounds.
        budget: Time limit in seconds per branch and direction, counted from the end of the backends' checks. Afterwards
            no further candidate is prepared and no further round starts; every backend is timed at least once.
        say: Function that is called with a description of the next step.
    Returns:
        A finding for each kind of branch and direction.
    Raises:
        UnsupportedError: The problem is on a GPU.
    """
    if torch.device(problem.device).type != "cpu":
        raise UnsupportedError("device", problem.device, "cpu", "Hold trials on a GPU: ringweave tune --gpu.")
    found: dict[tuple[str, int], Finding] = {}
    size = {"heads": problem.heads, "batch": problem.batch}
    for branch in branches(problem.pattern, problem.tokens, problem.tokens, **size):
        alone = _alone(problem, branch)
        if alone is None:
            continue
        session: Session | None = None
        first: Candidate | None = None
        for direction in directions:
            case = alone.case(direction == BOTH)
            kind, density = tuning_keys.call_key(case, branch), tuning_keys.density(branch)
            if kind is None:
                continue
            if (kind, density) not in found:
                session = session or Session(alone.inputs(), say, failures=FAILURES)
                search = Search(alone, session, direction, first, rounds, budget)
                search.run()
                results = search.timings, search.reasons
                found[kind, density] = Finding(alone, branch, direction, first, kind, density, *results)
            if direction == FORWARD:
                first = found[kind, density].chosen
    return list(found.values())


def trials(
    problem: Problem, *, directions: Sequence[str] = DIRECTIONS, store: bool = True, say: Say = silent
) -> list[Verdict]:
    """Hold the trials of a problem on a GPU, one for each kind of branch and direction.

    Args:
        problem: The problem.
        directions: Directions to try, ``"forward"`` and ``"forward + backward"``.
        store: Whether auto uses the verdicts from now on.
        say: Function that is called with a description of the next step.
    """
    found: dict[str, Verdict] = {}
    for branch in branches(problem.pattern, problem.tokens, problem.tokens, heads=problem.heads, batch=problem.batch):
        for direction in directions:
            case = problem.case(direction == BOTH)
            of = trial.kind(case, branch)
            if of is not None and of not in found:
                names = contenders(case, branch)
                found[of] = trial.hold(
                    case, branch, names, store=store, say=lambda text: say(f"{problem.name}: {text}")
                )
    return list(found.values())


def _alone(problem: Problem, branch: Branch) -> Problem | None:
    """Return a branch as a problem over the tokens of its view; None if its queries and keys have other positions."""
    if branch.nq != branch.nk or branch.q_offset:
        return None
    heads = branch.head_count
    same = heads == problem.heads
    return dataclasses.replace(
        problem,
        relation=branch.pattern,
        tokens=branch.nq,
        heads=heads,
        # a branch of some of the heads is measured with the same number of key heads
        kv_heads=problem.kv_heads if same else None,
    )


def save_answers(choices: Sequence[Finding]) -> str | None:
    """Store the findings and return the path of the file; None if no backend was timed."""
    entries = [choice.entry() for choice in choices if choice.backend is not None]
    return str(write_entries(entries)) if entries else None
