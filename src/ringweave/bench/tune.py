"""Which backend, tiles and blocks are fastest for a kind of call here: what ``ringweave tune`` measures and stores.

Every candidate is checked against the float64 oracle on sampled rows, and those that are right are timed in turn: first
every backend that can run a branch, then other sides of tiles for those that came near the fastest, then, where that is
the Triton backend on a GPU, the blocks of its kernels. What auto would take anyway stays unless another is clearly
faster.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ..ops import kinds, tuning
from ..plan import Branch, branches
from .candidate import Candidate
from .choice import Choice, now
from .compare import Say, Session, silent
from .contest import Contest
from .workload import Workload

DIRECTIONS = ("forward", "forward + backward")


def tune(
    workload: Workload,
    *,
    directions: Sequence[str] = DIRECTIONS,
    rounds: int = 7,
    budget: float | None = 20.0,
    say: Say = silent,
) -> list[Choice]:
    """Measure the candidates on each kind of branch of a workload; nothing is stored.

    Args:
        workload: What to compute.
        directions: Which of :data:`DIRECTIONS`.
        rounds: Timed rounds.
        budget: Seconds for a branch and direction once its backends are checked, after which no further candidate is
            prepared and no further round starts; every backend is timed once in any case.
        say: Told what happens next.
    Returns:
        A choice for each kind of branch and direction.
    """
    found: dict[tuple[str, int], Choice] = {}
    size = {"heads": workload.heads, "batch": workload.batch}
    for branch in branches(workload.pattern, workload.tokens, workload.tokens, **size):
        alone = _alone(workload, branch)
        if alone is None:
            continue
        session: Session | None = None
        first: Candidate | None = None
        for direction in directions:
            case = alone.case(direction != "forward")
            kind, density = kinds.kind(case, branch), kinds.density(branch)
            if kind is None:
                continue
            if (kind, density) not in found:
                session = session or Session(alone, alone.inputs(), say)
                contest = Contest(session, case, first, rounds, budget)
                contest.run()
                results = contest.timings, contest.reasons, tuple(contest.kernels)
                found[kind, density] = Choice(alone, branch, direction, first, kind, density, *results)
            if direction == "forward":
                first = found[kind, density].chosen
    return list(found.values())


def _alone(workload: Workload, branch: Branch) -> Workload | None:
    """A branch as a workload: its pattern over its view's tokens; None where queries and keys differ."""
    if branch.nq != branch.nk or branch.q_offset:
        return None
    heads = branch.head_count
    same = heads == workload.heads
    return dataclasses.replace(
        workload,
        pattern=branch.pattern,
        tokens=branch.nq,
        heads=heads,
        # a share of the heads attends over as many key heads
        kv_heads=workload.kv_heads if same else None,
    )


def store(choices: Sequence[Choice]) -> str | None:
    """Store what was found; the file, or None where no backend could be timed."""
    entries = [choice.entry() for choice in choices if choice.backend is not None]
    kernels = [(choice, each) for choice in choices for each in choice.kernels if each.descent.seconds]
    # the table's blocks too where nothing was faster, in place of others that were stored before
    blocks = [each.entry(choice.of, now()) for choice, each in kernels]
    return str(tuning.record(entries, blocks)) if entries else None
