"""The search for the fastest way to compute a branch: backends, tiles, blocks, each checked, timed in turn.

A candidate is a backend, the sides of its tiles and its kernels' blocks, called without the operators. One for backward
is timed behind the forward that auto would take, so that the two choices do not mix.
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

from ..backends import BACKENDS
from ..backends.backend import Backend, Upstream
from ..backends.triton.launch_config import Asked, LaunchConfig, overriding
from ..backends.tuning import KernelKey
from ..call import Call, Operands
from ..plan import Branch
from ..plan.from_pattern import default_tile, estimate_tiles
from ..program import PREFERENCE, unsupported_reason
from .descent import Tuned, descend
from .measure import Timing, ratio
from .problem import FORWARD, Problem, Sample
from .session import Built, Entry, Peer, Session, in_turn

#: What auto would take anyway stays the choice where it is at most this much slower than the fastest.
CLOSE = 1.05
#: Backends up to this much slower than the fastest are tried on other tiles.
NEAR = 1.5
# parts of the seconds, after which nothing more is checked, and after which no further round starts
_BACKENDS = (0.0, 0.2)
_TILES = (0.7, 1.0)
# where blocks follow
_FEW_TILES = (0.35, 0.5)
_BLOCKS = (0.85, 1.0)
#: Sides of tiles that are tried.
SIDES = ((32, 32), (64, 64), (64, 128), (128, 64), (128, 128), (256, 128))
# beyond as many tiles a plan is not made to be tried
_MOST_TILES = 2**22


@dataclass(frozen=True)
class Candidate:
    """One way to compute a branch.

    Attributes:
        backend: The backend's name.
        tile: Sides of the tiles; None for those that the branch has by itself, or a backend without.
        blocks: What kernels take where it is not the table's.
    """

    backend: str
    tile: tuple[int, int] | None = None
    blocks: tuple[tuple[KernelKey, LaunchConfig], ...] = ()

    def __str__(self) -> str:
        sides = "" if self.tile is None else f", tiles of {self.tile[0]} x {self.tile[1]}"
        return self.backend + sides + (", measured blocks" if self.blocks else "")

    @property
    def usual(self) -> bool:
        """Whether it is a backend as it is."""
        return self.tile is None and not self.blocks

    def step(self, branch: Branch) -> tuple[Backend, Branch]:
        """The backend, and the branch with its sides."""
        return BACKENDS[self.backend], dataclasses.replace(branch, sides=self.tile)

    def unsupported_reason(self, case: Call, branch: Branch) -> str | None:
        """Why it cannot run a case; None where it can."""
        backend, own = self.step(branch)
        return unsupported_reason(backend, case, own)

    def peer(self, first: Candidate | None, name: str = "") -> Peer:
        """The candidate as one that a comparison times, on the problem of one branch.

        Args:
            first: Who computes forward where gradients are asked for; itself where None.
            name: What tables call it; the candidate's own by default.
        """
        spelled = f"{self}, {self.blocks}" if self.blocks else f"{self}"
        behind = "" if first is None or first == self else f" behind {first}"
        return Peer(
            name or spelled + behind, f"{self}",
            lambda problem, backward: self.unsupported_reason(problem.case(backward), whole(problem)),
            lambda problem, inputs: Direct.of(self, first or self, problem),
        )  # fmt: skip


@dataclass(frozen=True)
class Direct(Built):
    """A candidate made ready: the backend's own functions, without operators or autograd."""

    gradients: Callable[[Sample], tuple[Tensor, ...]] | None = None

    @staticmethod
    def of(candidate: Candidate, first: Candidate, problem: Problem) -> Direct:
        """A candidate on a problem's only branch."""
        branch = whole(problem)
        attend = functools.partial(_forward, candidate, branch)
        gradients = functools.partial(_forward_backward, candidate, first, branch)
        return Direct(lambda q, k, v: attend(q, k, v)[0], problem.pattern, str(candidate), None, gradients)

    def forward_backward(self, inputs: Sample) -> Callable[[], tuple[Tensor, ...]]:
        """A callable that gives (out, dq, dk, dv)."""
        assert self.gradients is not None
        return functools.partial(self.gradients, Sample(*(x.detach() for x in inputs)))


def whole(problem: Problem) -> Branch:
    """A problem as one branch in token order."""
    n = problem.tokens
    return Branch.whole(problem.pattern, n, n, heads=problem.heads, batch=problem.batch)


def _forward(candidate: Candidate, branch: Branch, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    backend, own = candidate.step(branch)
    with torch.no_grad(), overriding(dict(candidate.blocks)):
        return backend.forward(Operands(q, k, v, 1 / math.sqrt(q.shape[3])), own, q.dtype)


def _forward_backward(candidate: Candidate, first: Candidate, branch: Branch, inputs: Sample) -> tuple[Tensor, ...]:
    q, k, v, dout = inputs
    out, lse = _forward(first, branch, q, k, v)
    backend, own = candidate.step(branch)
    assert backend.backward is not None
    with torch.no_grad(), overriding(dict(candidate.blocks)):
        upstream = Upstream(dout, lse, backend.delta(dout, out, lse, None), out)
        return (out, *backend.backward(upstream, Operands(q, k, v, 1 / math.sqrt(q.shape[3])), own, q.dtype))


def sides(branch: Branch, device: str) -> list[tuple[int, int]]:
    """List sides to try beside a branch's own: none much longer than its sequences, none that make too large a plan.

    A block table on a GPU keeps its grid: a plan of other tiles would have to wait for the table.
    """
    if device != "cpu" and branch.pattern.tables and branch.pattern.block_side is not None:
        return []
    most = [max(16, 1 << (n - 1).bit_length()) for n in (branch.nq, branch.nk)]
    tiles = estimate_tiles(branch.pattern, branch.nq, branch.nk, heads=branch.head_count, q_offset=branch.q_offset)
    area = tiles * default_tile(branch.nq) * default_tile(branch.nk)
    return [
        each
        for each in SIDES
        if each != branch.tile and each[0] <= most[0] and each[1] <= most[1] and area <= _MOST_TILES * each[0] * each[1]
    ]


def fastest(seconds: Mapping[str, float]) -> str | None:
    """The name with the least seconds, or the one that auto prefers within a few per cent of it.

    Example:
        >>> fastest({"dense_batched": 1.02, "flex": 1.0}), fastest({"dense_batched": 1.2, "flex": 1.0}), fastest({})
        ('dense_batched', 'flex', None)
    """
    if not seconds:
        return None
    close = CLOSE * min(seconds.values())
    ordered = [*PREFERENCE, *(name for name in seconds if name not in PREFERENCE)]
    return next(name for name in ordered if name in seconds and seconds[name] <= close)


def pick(timings: Mapping[Candidate, Timing]) -> Candidate | None:
    """Pick a backend as it is, unless other tiles or blocks are more than a few per cent faster.

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


class Search:
    """What is tried for one branch and direction, and what came of it.

    Args:
        problem: The branch as a problem of its own.
        session: Its inputs, and what was checked on them; failures of candidates are their reasons.
        direction: ``"forward"`` or ``"forward + backward"``.
        first: Who computes forward before a candidate's backward; None for the candidate itself.
        rounds: Timed rounds.
        budget: Seconds from when the backends have been checked; None for no end. They are timed once in any case.
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
        self.kernels: list[Tuned] = []

    def run(self) -> None:
        """Try backends, then tiles of those near the fastest, then blocks of GPU kernels."""
        known = [name for name, backend in BACKENDS.items() if backend.branched and not backend.experimental]
        backends = [Candidate(name) for name in known]
        calls = self.check(backends, until=None)
        # some of them were compiled for longer than there are seconds
        self.began = time.monotonic()
        self.timings = self.time(calls, _BACKENDS[1])
        if not self.timings:
            return
        least = min(timing.median for timing in self.timings.values())
        near = [each for each, timing in self.timings.items() if timing.median <= NEAR * least]
        tiles = sides(self.branch, torch.device(self.problem.device).type)
        others = [Candidate(each.backend, tile) for each in near if BACKENDS[each.backend].tiled for tile in tiles]
        blocks = Candidate("triton") in near
        if others:
            self.compete([*near, *others], *(_FEW_TILES if blocks else _TILES))
        if blocks:
            own = [each for each in self.timings if each.backend == "triton"]
            self.tune_blocks(min(own, key=lambda each: self.timings[each].median))

    def compete(self, candidates: Sequence[Candidate], until: float | None, part: float) -> None:
        """Check candidates until a part of the seconds is gone, and time them in turn until another one is.

        Those that were timed before are timed once more.
        """
        calls = self.check(candidates, until)
        if len(calls) > 1:
            self.timings |= self.time(calls, part)

    def spent(self) -> float:
        """Which part of the seconds is gone."""
        return 0.0 if self.budget is None else (time.monotonic() - self.began) / max(self.budget, 1e-9)

    def check(self, candidates: Sequence[Candidate], until: float | None) -> dict[Candidate, Entry]:
        """Find out which are right, ready to be timed, and note why the others are not.

        Args:
            candidates: What to check.
            until: The part of the seconds after which no further one is; None for all.
        """
        ready: dict[Candidate, Entry] = {}
        for each in candidates:
            reason: str | None = "not tried: the seconds were used up"
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
        """Time in turn, until a part of the seconds is gone; at least once."""
        self.session.say(f"{self.problem.name}: timing {len(entries)} candidates in turn")
        budget = None if self.budget is None else max(0.0, part - self.spent()) * self.budget
        in_turn([*entries.values()], rounds=self.rounds, budget=budget)
        return {each: entry.timing for each, entry in entries.items() if entry.timing is not None}

    def tune_blocks(self, start: Candidate) -> None:
        """Search the blocks of the kernels behind a candidate of the Triton backend, one kernel after the other."""
        best = start
        for asked in self.asked(start):
            measure = functools.partial(self.measure, best, asked)
            descent = descend(asked.usual, asked, measure, lambda: self.spent() < _BLOCKS[0])
            gain, chosen = 1.0, asked.usual
            if descent.best != asked.usual:
                last = measure((asked.usual, descent.best))
                slow, fast = last[asked.usual], last[descent.best]
                if not isinstance(slow, str) and not isinstance(fast, str):
                    gain = slow / fast
                    chosen = descent.best if gain > CLOSE else asked.usual
            self.kernels.append(Tuned(asked.key, descent, gain, chosen))
            if chosen != asked.usual:
                best = dataclasses.replace(best, blocks=(*best.blocks, (asked.key, chosen)))
        usual = pick(self.timings)
        if best != start and usual is not None:
            self.compete([*dict.fromkeys((Candidate(usual.backend), usual, start, best))], None, _BLOCKS[1])

    def measure(
        self, candidate: Candidate, asked: Asked, blocks: Sequence[LaunchConfig]
    ) -> dict[LaunchConfig, float | str]:
        """Seconds of a candidate with other blocks for one kernel, or why there are none."""
        tried = {dataclasses.replace(candidate, blocks=(*candidate.blocks, (asked.key, each))): each for each in blocks}
        timings = self.time(self.check(list(tried), until=None), _BLOCKS[1])
        found: dict[LaunchConfig, float | str] = {tried[each]: timing.median for each, timing in timings.items()}
        for each in tried:
            # they are the kernel's business
            reason = self.reasons.pop(each, None)
            if reason is not None:
                found[tried[each]] = reason
        return found

    def asked(self, candidate: Candidate) -> list[Asked]:
        """What the kernels of a direction ask for: forward's, or the two of backward."""
        _, branch = candidate.step(self.branch)
        inputs = self.session.inputs
        if self.direction == FORWARD:
            return [_of_rows("forward", inputs, branch)]
        gradients = candidate.peer(None).build(self.problem, inputs).forward_backward(inputs)
        with overriding({}) as given:
            gradients()
        of_columns = next(each for each in given.asked if each.key.kernel == "backward_kv")
        return [_of_rows("backward_q", inputs, branch), of_columns]


def _of_rows(kernel: str, inputs: Sample, branch: Branch) -> Asked:
    """What a kernel by rows of tiles asks for: it asks twice, for one row and for two side by side, and takes one."""
    from ..backends.triton import launch

    q, k, v, _ = inputs
    with overriding({}) as given:
        two = launch.cut(kernel, q, k, v, branch.plan(q.device)).lists.tiles > 1
    return given.asked[-1 if two else 0]
