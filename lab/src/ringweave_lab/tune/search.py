"""Search the fastest way to compute a branch: backends and tiles, each checked and then timed in turn.

A candidate is a backend with tile sizes, called without torch's operators. Candidates for backward
are timed after the forward that auto would choose, so that the two choices are independent.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ringweave.backends import BACKENDS
from ringweave.backends.backend import Backend, Upstream
from ringweave.call import Call, Operands
from ringweave.plan import Branch
from ringweave.plan.from_pattern import estimate_tiles
from ringweave.plan.tile_size import default_tile_size
from ringweave.program import PREFERENCE, unsupported_reason

from .measure import Timing, ratio
from .problem import Problem, Sample
from .session import Built, Entry, Peer, Session, in_turn

#: The default choice of auto stays if it takes at most this many times the fastest candidate's time.
CLOSE = 1.05
#: Backends that take up to this many times the fastest one's time are also tried with other tiles.
NEAR = 1.5
# For each stage: the share of the budget after which no candidate is checked, and after which no round starts.
_BACKENDS = (0.0, 0.2)
_TILES = (0.7, 1.0)
#: Tile sizes that are tried.
TILE_SIZES = ((32, 32), (64, 64), (64, 128), (128, 64), (128, 128), (256, 128))
# largest plan that is made for a trial, in tiles
_MOST_TILES = 2**22


@dataclass(frozen=True)
class Candidate:
    """One way to compute a branch.

    Attributes:
        backend: Name of the backend.
        tile: Sides of the tiles; None for the branch's default, or a backend without tiles.
    """

    backend: str
    tile: tuple[int, int] | None = None

    def __str__(self) -> str:
        tiles = "" if self.tile is None else f", tiles of {self.tile[0]} x {self.tile[1]}"
        return self.backend + tiles

    @property
    def usual(self) -> bool:
        """Whether this is a backend with default tiles."""
        return self.tile is None

    def step(self, branch: Branch) -> tuple[Backend, Branch]:
        """Return the backend, and the branch with this candidate's tile sizes."""
        return BACKENDS[self.backend], dataclasses.replace(branch, tile_size=self.tile)

    def unsupported_reason(self, case: Call, branch: Branch) -> str | None:
        """Return why the candidate cannot run a case, or None if it can."""
        backend, own = self.step(branch)
        return unsupported_reason(backend, case, own)

    def peer(self, first: Candidate | None, name: str = "") -> Peer:
        """Return the candidate as a peer, for problems of one branch.

        Args:
            first: Candidate that runs forward before this one's backward; None for this candidate.
            name: Name in tables; a description of the candidate by default.
        """
        behind = "" if first is None or first == self else f" behind {first}"
        return Peer(
            name or f"{self}{behind}", f"{self}",
            lambda problem, backward: self.unsupported_reason(problem.case(backward), whole(problem)),
            lambda problem, inputs: Direct.of(self, first or self, problem),
        )  # fmt: skip


@dataclass(frozen=True)
class Direct(Built):
    """A candidate prepared for a problem: the backend's functions, without operators or autograd."""

    gradients: Callable[[Sample], tuple[Tensor, ...]] | None = None

    @staticmethod
    def of(candidate: Candidate, first: Candidate, problem: Problem) -> Direct:
        """Prepare a candidate for a problem of one branch."""
        branch = whole(problem)
        attend = functools.partial(_forward, candidate, branch)
        gradients = functools.partial(_forward_backward, candidate, first, branch)
        return Direct(lambda q, k, v: attend(q, k, v)[0], problem.pattern, str(candidate), None, gradients)

    def forward_backward(self, inputs: Sample) -> Callable[[], tuple[Tensor, ...]]:
        """Return a callable that computes (out, dq, dk, dv)."""
        assert self.gradients is not None
        return functools.partial(self.gradients, Sample(*(x.detach() for x in inputs)))


def whole(problem: Problem) -> Branch:
    """Return a problem as one branch in token order."""
    n = problem.tokens
    return Branch.whole(problem.pattern, n, n, heads=problem.heads, batch=problem.batch)


def _forward(candidate: Candidate, branch: Branch, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    backend, own = candidate.step(branch)
    with torch.no_grad():
        return backend.forward(Operands(q, k, v, 1 / math.sqrt(q.shape[3])), own, q.dtype)


def _forward_backward(candidate: Candidate, first: Candidate, branch: Branch, inputs: Sample) -> tuple[Tensor, ...]:
    q, k, v, dout = inputs
    out, lse = _forward(first, branch, q, k, v)
    backend, own = candidate.step(branch)
    assert backend.backward is not None
    with torch.no_grad():
        upstream = Upstream(dout, lse, backend.delta(dout, out, lse, None), out)
        return (out, *backend.backward(upstream, Operands(q, k, v, 1 / math.sqrt(q.shape[3])), own, q.dtype))


def tile_sizes(branch: Branch, device: str) -> list[tuple[int, int]]:
    """List tile sizes to try besides the default: not much longer than the sequences, and without too large a plan.

    A block table on a GPU keeps its grid, because a plan with other tiles would have to read the table back.
    """
    if device != "cpu" and branch.pattern.tables and branch.pattern.tile_size is not None:
        return []
    most = [max(16, 1 << (n - 1).bit_length()) for n in (branch.nq, branch.nk)]
    tiles = estimate_tiles(branch.pattern, branch.nq, branch.nk, heads=branch.head_count, q_offset=branch.q_offset)
    area = tiles * default_tile_size(branch.nq) * default_tile_size(branch.nk)
    return [
        each
        for each in TILE_SIZES
        if each != branch.tile and each[0] <= most[0] and each[1] <= most[1] and area <= _MOST_TILES * each[0] * each[1]
    ]


def fastest(seconds: Mapping[str, float]) -> str | None:
    """Return the fastest backend, or one that auto prefers if it is within a few per cent of the fastest.

    Example:
        >>> fastest({"cpu": 1.02, "sdpa": 1.0}), fastest({"cpu": 1.2, "sdpa": 1.0}), fastest({})
        ('cpu', 'sdpa', None)
    """
    if not seconds:
        return None
    close = CLOSE * min(seconds.values())
    ordered = [*PREFERENCE, *(name for name in seconds if name not in PREFERENCE)]
    return next(name for name in ordered if name in seconds and seconds[name] <= close)


def pick(timings: Mapping[Candidate, Timing]) -> Candidate | None:
    """Pick a backend with default tiles, unless others are more than a few per cent faster.

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
    """Return slow / fast: the ratio of medians.

    If both were timed in the same rounds, the median ratio within a round counts if it is smaller.
    """
    medians = slow.median / fast.median
    return min(medians, ratio(slow, fast).paired) if len(slow.seconds) == len(fast.seconds) else medians


class Search:
    """The search for one branch and direction, with its results.

    Args:
        problem: The branch as a separate problem.
        session: Session with the inputs and the results of checks.
        direction: ``"forward"`` or ``"forward + backward"``.
        first: Candidate that runs forward before a candidate's backward; None for the candidate itself.
        rounds: Number of timed rounds.
        budget: Time limit in seconds, counted from the end of the backends' checks; None for no limit. Backends are
            timed at least once.
    """

    def __init__(
        self, problem: Problem, session: Session, direction: str, first: Candidate | None = None, rounds: int = 7,
        budget: float | None = None,
    ):  # fmt: skip
        self.problem, self.session, self.direction, self.first = problem, session, direction, first
        self.rounds, self.budget = rounds, budget
        self.branch = whole(problem)
        self.began = time.monotonic()
        self.timings: dict[Candidate, Timing] = {}
        self.reasons: dict[Candidate, str] = {}

    def run(self) -> None:
        """Try all backends, then other tiles for those near the fastest."""
        known = [name for name, backend in BACKENDS.items() if backend.branched and not backend.experimental]
        backends = [Candidate(name) for name in known]
        calls = self.check(backends, until=None)
        # start the budget here: compiling the backends alone can take longer than the budget
        self.began = time.monotonic()
        self.timings = self.time(calls, _BACKENDS[1])
        if not self.timings:
            return
        least = min(timing.median for timing in self.timings.values())
        near = [each for each, timing in self.timings.items() if timing.median <= NEAR * least]
        tiles = tile_sizes(self.branch, torch.device(self.problem.device).type)
        others = [Candidate(each.backend, tile) for each in near if BACKENDS[each.backend].tiled for tile in tiles]
        if others:
            self.compete([*near, *others], *_TILES)

    def compete(self, candidates: Sequence[Candidate], until: float | None, part: float) -> None:
        """Check candidates until a share ``until`` of the budget is spent, and time them in turn until ``part`` is.

        Candidates that were timed before are timed again.
        """
        calls = self.check(candidates, until)
        if len(calls) > 1:
            self.timings |= self.time(calls, part)

    def spent(self) -> float:
        """Return the share of the budget that is spent."""
        return 0.0 if self.budget is None else (time.monotonic() - self.began) / max(self.budget, 1e-9)

    def check(self, candidates: Sequence[Candidate], until: float | None) -> dict[Candidate, Entry]:
        """Return the correct candidates, ready to be timed, and record why the others are not.

        Args:
            candidates: Candidates to check.
            until: Share of the budget after which no further candidate is checked; None to check all.
        """
        ready: dict[Candidate, Entry] = {}
        for each in candidates:
            reason: str | None = "the time limit was reached"
            if until is None or each in self.timings or self.spent() <= until:
                entry = self.session.check(self.problem, each.peer(self.first), self.direction)
                reason = entry.reason
                if reason is None:
                    ready[each] = entry
                    continue
            self.reasons[each] = str(reason)
            self.timings.pop(each, None)
        return ready

    def time(self, entries: dict[Candidate, Entry], part: float) -> dict[Candidate, Timing]:
        """Time candidates in turn until a share of the budget is spent, at least once."""
        self.session.say(f"{self.problem.name}: timing {len(entries)} candidates in turn")
        budget = None if self.budget is None else max(0.0, part - self.spent()) * self.budget
        in_turn([*entries.values()], rounds=self.rounds, budget=budget)
        return {each: entry.timing for each, entry in entries.items() if entry.timing is not None}
