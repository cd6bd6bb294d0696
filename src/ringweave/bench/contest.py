"""Candidates for one branch in one direction, checked and timed in turn, for some seconds: backends, tiles, blocks."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence

from ..errors import in_a_line
from ..ops.backend import Case
from ..ops.dispatch import BACKENDS
from ..ops.triton.blocks import Asked, Blocks, overriding
from ..plan import Branch
from .blocks import Tuned, descend
from .candidate import Candidate, sides, whole
from .choice import CLOSE, pick
from .compare import Session
from .measure import Timing, interleaved
from .workload import Inputs

#: Backends up to this much slower than the fastest are tried on other tiles.
NEAR = 1.5
# parts of the seconds, after which nothing more is checked, and after which no further round starts
_BACKENDS = (0.0, 0.2)
_TILES = (0.7, 1.0)
# where blocks follow
_FEW_TILES = (0.35, 0.5)
_BLOCKS = (0.85, 1.0)


class Contest:
    """What is tried for one branch and direction, and what came of it.

    Args:
        session: The branch as a workload.
        case: Its case.
        first: Who computes forward before a candidate's backward; None for the candidate itself.
        rounds: Timed rounds.
        budget: Seconds from when the backends have been checked; None for no end. They are timed once in any case.
    """

    def __init__(self, session: Session, case: Case, first: Candidate | None, rounds: int, budget: float | None):
        self.session, self.case, self.first, self.rounds, self.budget = session, case, first, rounds, budget
        self.branch = whole(session.workload)
        self.began = time.monotonic()
        self.timings: dict[Candidate, Timing] = {}
        self.reasons: dict[Candidate, str] = {}
        self.kernels: list[Tuned] = []

    def run(self) -> None:
        """Backends, then tiles of those near the fastest, then blocks of GPU kernels."""
        backends = [Candidate(name) for name, backend in BACKENDS.items() if backend.branched]
        calls = self.check(backends, until=None)
        # some of them were compiled for longer than there are seconds
        self.began = time.monotonic()
        self.timings = self.time(calls, _BACKENDS[1])
        if not self.timings:
            return
        least = min(timing.median for timing in self.timings.values())
        near = [each for each, timing in self.timings.items() if timing.median <= NEAR * least]
        tiles = sides(self.branch, self.case.device)
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

    def check(self, candidates: Sequence[Candidate], until: float | None) -> dict[Candidate, Callable[[], object]]:
        """Those that are right, ready to be timed; of the others, why not.

        Args:
            candidates: What to check.
            until: The part of the seconds after which no further one is; None for all.
        """
        calls: dict[Candidate, Callable[[], object]] = {}
        for each in candidates:
            reason = each.refusal(self.case, self.branch)
            if until is not None and each not in self.timings and self.spent() > until:
                reason = "not tried: the seconds were used up"
            if reason is None:
                try:
                    fields, call = self.session.check(each.peer(self.first), self.case.needs_grad)
                except RuntimeError as error:
                    # a compiler that fails, or memory that is not there: the others may still do
                    reason = in_a_line(error)
                else:
                    if call is not None:
                        calls[each] = call
                        continue
                    reason = str(fields["reason"])
            self.reasons[each] = reason
            self.timings.pop(each, None)
        return calls

    def time(self, calls: dict[Candidate, Callable[[], object]], part: float) -> dict[Candidate, Timing]:
        """Time in turn, until a part of the seconds is gone; at least once.

        The check was the warm-up: it ran everything on the same sizes.
        """
        if not calls:
            return {}
        self.session.say(f"{self.session.workload.name}: timing {len(calls)} candidates in turn")
        named = {str(number): call for number, call in enumerate(calls.values())}
        budget = None if self.budget is None else max(0.0, part - self.spent()) * self.budget
        device = self.session.workload.device
        timings = interleaved(named, rounds=self.rounds, warmup=0, device=device, budget=budget)
        return dict(zip(calls, timings.values(), strict=True))

    def tune_blocks(self, start: Candidate) -> None:
        """The blocks of the kernels behind a candidate of the Triton backend, one kernel after the other."""
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
            self.kernels.append(Tuned(asked.kind, descent, gain, chosen))
            if chosen != asked.usual:
                best = dataclasses.replace(best, blocks=(*best.blocks, (asked.kind, chosen)))
        usual = pick(self.timings)
        if best != start and usual is not None:
            self.compete([*dict.fromkeys((Candidate(usual.backend), usual, start, best))], None, _BLOCKS[1])

    def measure(self, candidate: Candidate, asked: Asked, blocks: Sequence[Blocks]) -> dict[Blocks, float | str]:
        """Seconds of a candidate with other blocks for one kernel, or why there are none."""
        tried = {
            dataclasses.replace(candidate, blocks=(*candidate.blocks, (asked.kind, each))): each for each in blocks
        }
        timings = self.time(self.check(list(tried), until=None), _BLOCKS[1])
        found: dict[Blocks, float | str] = {tried[each]: timing.median for each, timing in timings.items()}
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
        if not self.case.needs_grad:
            return [_of_rows("forward", inputs, branch)]
        gradients = candidate.peer(None).build(self.session.workload, inputs).forward_backward(inputs)
        with overriding({}) as given:
            gradients()
        of_columns = next(each for each in given.asked if each.kind.kernel == "backward_kv")
        return [_of_rows("backward_q", inputs, branch), of_columns]


def _of_rows(kernel: str, inputs: Inputs, branch: Branch) -> Asked:
    """What a kernel by rows of tiles asks for: it asks twice, for one row and for two side by side, and takes one."""
    from ..ops.triton import launch

    q, k, v, _ = inputs
    with overriding({}) as given:
        two = launch.cut(kernel, q, k, v, branch.plan(q.device)).lists.tiles > 1
    return given.asked[-1 if two else 0]
