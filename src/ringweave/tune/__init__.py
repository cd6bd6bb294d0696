"""Which backend, tiles and blocks are fastest for a kind of call here: what ``ringweave tune`` measures and stores.

Every candidate is checked against the float64 oracle on sampled rows, and those that are right are timed in turn: first
every backend that can run a branch, then other sides of tiles for those that came near the fastest, then, where that is
the Triton backend on a GPU, the blocks of its kernels. What auto would take anyway stays unless another is clearly
faster.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..backends import tuning
from ..names import only
from ..plan import Branch, branches
from .descent import Tuned
from .measure import Timing
from .problem import BOTH, DIRECTIONS, FORWARD, Problem
from .search import Candidate, Search, pick
from .session import FAILURES, Say, Session, silent

__all__ = ["Finding", "Problem", "Session", "store", "tune"]
__dir__ = only(__all__)


@dataclass(frozen=True)
class Finding:
    """What was measured of one branch in one direction.

    Attributes:
        problem: The branch as a problem of its own.
        branch: What was measured.
        direction: ``"forward"`` or ``"forward + backward"``.
        first: Who computed forward before the candidates' backward; None for the candidates themselves.
        kind: The kind of the call, but for its density.
        density: The share of tiles as a power of 1/2.
        timings: Seconds of the candidates that are right.
        reasons: Why the others were not timed.
        kernels: What was found of the blocks of GPU kernels.
    """

    problem: Problem
    branch: Branch
    direction: str
    first: Candidate | None
    kind: str
    density: int
    timings: Mapping[Candidate, Timing]
    reasons: Mapping[Candidate, str]
    kernels: tuple[Tuned, ...] = ()

    @property
    def chosen(self) -> Candidate | None:
        """The fastest, or what auto would take where that is about as fast; None where nothing could be timed."""
        return pick(self.timings)

    @property
    def backend(self) -> str | None:
        """The chosen one's name."""
        return None if self.chosen is None else self.chosen.backend

    def entry(self) -> dict[str, Any]:
        """Write it as it is stored."""
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
        """Say what was measured."""
        problem = self.problem
        return f"{problem.pattern!r}, {problem.tokens} tokens, {problem.heads}/{problem.key_heads} heads"


def now() -> str:
    """Tell the time, UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def tune(
    problem: Problem,
    *,
    directions: Sequence[str] = DIRECTIONS,
    rounds: int = 7,
    budget: float | None = 20.0,
    say: Say = silent,
) -> list[Finding]:
    """Measure the candidates on each kind of branch of a problem; nothing is stored.

    Args:
        problem: What to compute.
        directions: Which of ``"forward"`` and ``"forward + backward"``.
        rounds: Timed rounds.
        budget: Seconds for a branch and direction once its backends are checked, after which no further candidate is
            prepared and no further round starts; every backend is timed once in any case.
        say: Told what happens next.
    Returns:
        A choice for each kind of branch and direction.
    """
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
            kind, density = tuning.call_key(case, branch), tuning.density(branch)
            if kind is None:
                continue
            if (kind, density) not in found:
                session = session or Session(alone.inputs(), say, failures=FAILURES)
                search = Search(alone, session, direction, first, rounds, budget)
                search.run()
                results = search.timings, search.reasons, tuple(search.kernels)
                found[kind, density] = Finding(alone, branch, direction, first, kind, density, *results)
            if direction == FORWARD:
                first = found[kind, density].chosen
    return list(found.values())


def _alone(problem: Problem, branch: Branch) -> Problem | None:
    """Make a problem of a branch: its pattern over its view's tokens; None where queries and keys differ."""
    if branch.nq != branch.nk or branch.q_offset:
        return None
    heads = branch.head_count
    same = heads == problem.heads
    return dataclasses.replace(
        problem,
        relation=branch.pattern,
        tokens=branch.nq,
        heads=heads,
        # a share of the heads attends over as many key heads
        kv_heads=problem.kv_heads if same else None,
    )


def store(choices: Sequence[Finding]) -> str | None:
    """Store what was found, and give the file; None where no backend could be timed."""
    entries = [choice.entry() for choice in choices if choice.backend is not None]
    kernels = [(choice, each) for choice in choices for each in choice.kernels if each.descent.seconds]
    # the table's blocks too where nothing was faster, in place of others that were stored before
    blocks = [each.entry(choice.of, now()) for choice, each in kernels]
    return str(tuning.record(entries, blocks)) if entries else None
