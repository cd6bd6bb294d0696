"""Which backend is fastest for a kind of call on this machine: what ``ringweave tune`` measures and stores.

Every backend that can run a branch is checked against the float64 oracle on sampled rows, and those that are right are
timed in turn. What is chosen is a backend; tile sides and kernels' blocks are no choices yet.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..ops import tuning
from ..ops.backend import Case
from ..ops.dispatch import BACKENDS, PREFERENCE, refusal
from ..plan import Branch, branches
from .compare import Say, Session, silent
from .measure import Timing, interleaved
from .peers import PEERS
from .workload import Workload

#: A backend that auto would take anyway stays the choice where it is at most this much slower than the fastest.
CLOSE = 1.05
DIRECTIONS = ("forward", "forward + backward")


@dataclass(frozen=True)
class Choice:
    """What was measured of one branch in one direction.

    Attributes:
        workload: The branch as a workload of its own.
        branch: The branch.
        direction: ``"forward"`` or ``"forward + backward"``.
        kind: Of the call, but for its density.
        density: The share of tiles as a power of 1/2.
        timings: Of the backends that are right.
        reasons: Why the others were not timed.
    """

    workload: Workload
    branch: Branch
    direction: str
    kind: str
    density: int
    timings: Mapping[str, Timing]
    reasons: Mapping[str, str]

    @property
    def backend(self) -> str | None:
        """The fastest, or what auto prefers among those about as fast; None where none could be timed."""
        return fastest({name: timing.median for name, timing in self.timings.items()})

    def entry(self) -> dict[str, Any]:
        """As it is stored."""
        workload = self.workload
        return {
            "kind": self.kind,
            "density": self.density,
            "backend": self.backend,
            "seconds": {name: timing.median for name, timing in self.timings.items()},
            "of": f"{workload.pattern!r}, {workload.tokens} tokens, {workload.heads}/{workload.key_heads} heads",
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }


def fastest(seconds: Mapping[str, float]) -> str | None:
    """The name with the least seconds, or the one that auto prefers within a few per cent of it.

    Example:
        >>> fastest({"gather": 1.02, "flex": 1.0}), fastest({"gather": 1.2, "flex": 1.0}), fastest({})
        ('gather', 'flex', None)
    """
    if not seconds:
        return None
    close = CLOSE * min(seconds.values())
    ordered = [*PREFERENCE, *(name for name in seconds if name not in PREFERENCE)]
    return next(name for name in ordered if name in seconds and seconds[name] <= close)


def tune(
    workload: Workload,
    *,
    directions: Sequence[str] = DIRECTIONS,
    rounds: int = 7,
    budget: float | None = 20.0,
    say: Say = silent,
) -> list[Choice]:
    """Measure the backends on each kind of branch of a workload; nothing is stored.

    Args:
        workload: What to compute.
        directions: Which of :data:`DIRECTIONS`.
        rounds: Timed rounds.
        budget: Seconds after which no further round of a branch and direction starts.
        say: Told what happens next.
    Returns:
        A choice for each kind of branch and direction.
    """
    device = torch.device(workload.device).type
    found: dict[tuple[str, int], Choice] = {}
    size = {"heads": workload.heads, "batch": workload.batch}
    for branch in branches(workload.pattern, workload.tokens, workload.tokens, **size):
        alone = _alone(workload, branch)
        if alone is None:
            continue
        session: Session | None = None
        for direction in directions:
            case = Case(
                alone.batch, alone.heads, alone.key_heads, branch.nq, branch.nk, alone.head_dim, alone.head_dim,
                alone.dtype, device, direction != "forward",
            )  # fmt: skip
            kind, density = tuning.kind(case, branch), tuning.density(branch)
            if kind is None or (kind, density) in found:
                continue
            session = session or Session(alone, alone.inputs(), say)
            timings, reasons = _measure(session, case, branch, rounds, budget)
            found[kind, density] = Choice(alone, branch, direction, kind, density, timings, reasons)
    return list(found.values())


def _alone(workload: Workload, branch: Branch) -> Workload | None:
    """A branch as a workload: its pattern over its view's tokens; None where queries and keys differ."""
    if branch.nq != branch.nk or branch.q_offset:
        return None
    heads = branch.head_count
    whole = heads == workload.heads
    return dataclasses.replace(
        workload,
        pattern=branch.pattern,
        tokens=branch.nq,
        heads=heads,
        # a share of the heads attends over as many key heads
        kv_heads=workload.kv_heads if whole else None,
    )


def _measure(
    session: Session, case: Case, branch: Branch, rounds: int, budget: float | None
) -> tuple[dict[str, Timing], dict[str, str]]:
    calls: dict[str, Callable[[], object]] = {}
    reasons: dict[str, str] = {}
    for name, backend in BACKENDS.items():
        if not backend.branched:
            continue
        reason = refusal(backend, case, branch)
        if reason is not None:
            reasons[name] = reason
            continue
        try:
            fields, call = session.check(PEERS[f"ringweave:{name}"], case.needs_grad)
        except RuntimeError as error:
            # a compiler that fails, or memory that is not there: the others may still do
            reasons[name] = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:160]}"
            continue
        if call is None:
            reasons[name] = str(fields["reason"])
        else:
            calls[name] = call
    session.say(f"{session.workload.name}: timing {len(calls)} backends in turn")
    device = session.workload.device
    # the check was the warm-up: it ran every callable on the same sizes
    timings = interleaved(calls, rounds=rounds, warmup=0, device=device, budget=budget) if calls else {}
    return timings, reasons


def store(choices: Sequence[Choice]) -> str | None:
    """Store what was found; the file, or None where no backend could be timed."""
    entries = [choice.entry() for choice in choices if choice.backend is not None]
    return str(tuning.record(entries)) if entries else None
