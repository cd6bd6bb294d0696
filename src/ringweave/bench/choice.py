"""What ``ringweave tune`` found of one branch in one direction, and which of it is chosen."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..ops.dispatch import PREFERENCE
from ..plan import Branch
from .blocks import Tuned
from .candidate import Candidate
from .measure import Timing, ratio
from .workload import Workload

#: What auto would take anyway stays the choice where it is at most this much slower than the fastest.
CLOSE = 1.05


@dataclass(frozen=True)
class Choice:
    """What was measured of one branch in one direction.

    Attributes:
        workload: The branch as a workload of its own.
        branch: The branch.
        direction: ``"forward"`` or ``"forward + backward"``.
        first: Who computed forward before the candidates' backward; None for the candidates themselves.
        kind: Of the call, but for its density.
        density: The share of tiles as a power of 1/2.
        timings: Of the candidates that are right.
        reasons: Why the others were not timed.
        kernels: What was found of the blocks of GPU kernels.
    """

    workload: Workload
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
        """As it is stored."""
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
        """What was measured, for people."""
        workload = self.workload
        return f"{workload.pattern!r}, {workload.tokens} tokens, {workload.heads}/{workload.key_heads} heads"


def now() -> str:
    """The time, UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


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


def pick(timings: Mapping[Candidate, Timing]) -> Candidate | None:
    """A backend as it is, unless other tiles or blocks are more than a few per cent faster.

    Example:
        >>> own, other = Candidate("cpu"), Candidate("cpu", (32, 32))
        >>> [str(pick({own: Timing((1.0,)), other: Timing((seconds,))})) for seconds in (0.96, 0.9)]
        ['cpu', 'cpu, tiles of 32 x 32']
    """
    name = fastest({each.backend: timing.median for each, timing in timings.items() if each.usual})
    if name is None:
        return None
    usual = Candidate(name)
    best = min(timings, key=lambda each: timings[each].median)
    return best if gain(timings[usual], timings[best]) > CLOSE else usual


def gain(slow: Timing, fast: Timing) -> float:
    """How many times longer one took than the other: by medians and, of one run, within rounds; the lesser."""
    medians = slow.median / fast.median
    return min(medians, ratio(slow, fast).paired) if len(slow.seconds) == len(fast.seconds) else medians
