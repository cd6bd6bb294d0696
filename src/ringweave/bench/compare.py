"""Peers side by side: checked against the oracle first, then timed in turn, then weighed. Every case goes this way.

A peer that fails its check is not timed: the speed of a wrong result is of no interest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Sequence
from dataclasses import dataclass

from ..errors import UnsupportedError, in_a_line
from ..patterns import Pattern
from .measure import Call, Peak, Timer, Timing, interleaved, peak_memory, ratio
from .oracle import Accuracy, Limit, Oracle, sample_rows
from .peers import Built, Peer, taking_part
from .problem import BOTH, DIRECTIONS, FORWARD, Inputs, Problem
from .record import Outcome, Say, silent

#: Of peers whose kernel, compiler or memory may fail: the others are measured all the same.
FAILURES: tuple[type[Exception], ...] = (UnsupportedError, RuntimeError)


@dataclass(frozen=True)
class Comparison:
    """What is measured in turn.

    Attributes:
        entries: Problems, each with who computes it: peers, or their names as in
            :func:`~ringweave.bench.peers.taking_part`. Ratios are over the first peer of all on the same problem, or
            where it does not take part in that, on the first one.
        directions: Which of ``"forward"``, ``"backward"`` (by itself) and ``"forward + backward"``.
        rounds: Timed rounds.
        budget: Seconds after which no further round of a direction starts.
        memory: Whether peak memory is measured too.
        ends: Whether the first and the last key head alone are checked.
        failures: Errors of a peer that are its reason, and do not end the run.
    """

    entries: Sequence[tuple[Problem, Sequence[str | Peer]]]
    directions: Sequence[str] = DIRECTIONS
    rounds: int = 5
    budget: float | None = None
    memory: bool = True
    ends: bool = False
    failures: tuple[type[Exception], ...] = (UnsupportedError,)


@dataclass
class Entry:
    """A peer on a problem in one direction.

    Attributes:
        problem: What is computed.
        peer: Who computes it.
        direction: ``"forward"``, ``"backward"`` or ``"forward + backward"``.
        computes: The function that the peer computes.
        how: The backend or kernel behind it.
        accuracy: Its errors.
        limit: What of them is correct.
        setup_seconds: Spent once.
        reason: Why it is not timed.
        call: What is timed; None where it could not be made ready, or is wrong.
        timing: Seconds, once it was timed.
        peak: Memory, once it was measured.
    """

    problem: Problem
    peer: Peer
    direction: str
    computes: Pattern
    how: str = ""
    accuracy: Accuracy | None = None
    limit: Limit | None = None
    setup_seconds: float | None = None
    reason: str | None = None
    call: Call | None = None
    timing: Timing | None = None
    peak: Peak | None = None

    def outcome(self, first: Timing | None = None, peak: float | None = None) -> Outcome:
        """What is filed of it.

        Args:
            first: What its time is compared with.
            peak: Operations per second that the device reaches.
        """
        problem, timing = self.problem, self.timing
        rate = None if timing is None else problem.flops(self.direction) / timing.median
        return Outcome(
            workload=problem.name,
            tokens=problem.tokens,
            heads=problem.heads,
            kv_heads=problem.key_heads,
            head_dim=problem.head_dim,
            dtype=str(problem.dtype).removeprefix("torch."),
            density=problem.density,
            direction=self.direction,
            peer=self.peer.name,
            computes=repr(self.computes),
            how=self.how,
            timing=timing,
            over_first=None if first is None or timing is None else ratio(timing, first),
            gflops=None if rate is None else rate / 1e9,
            peak=self.peak,
            accuracy=self.accuracy,
            limit=self.limit,
            setup_seconds=self.setup_seconds,
            peak_share=None if rate is None or peak is None else rate / peak,
            reason=self.reason,
        )


class Session:
    """Inputs of one shape: peers are built once for them, oracles evaluated once, and a function is checked once.

    Args:
        inputs: What all problems of the session are computed on.
        say: Told what happens next.
        rows: How many rows are checked.
        ends: Whether the first and the last key head alone are checked.
        failures: Errors of a peer that are its reason, and do not end the run.
    """

    def __init__(
        self,
        inputs: Inputs,
        say: Say = silent,
        *,
        rows: int = 48,
        ends: bool = False,
        failures: tuple[type[Exception], ...] = (UnsupportedError,),
    ):
        self.inputs, self.say, self.failures = inputs, say, failures
        self.rows = sample_rows(inputs.q.shape[2], rows)
        self.key_heads = sorted({0, inputs.k.shape[1] - 1}) if ends else None
        self._built: dict[tuple[str, Problem], Built] = {}
        self._oracles: dict[Pattern, Oracle] = {}
        self._checked: dict[tuple[str, Pattern, str], Entry] = {}

    def oracle(self, function: Pattern) -> Oracle:
        """The oracle of a function on the inputs."""
        if function not in self._oracles:
            self._oracles[function] = Oracle(function, self.inputs, self.rows, self.key_heads)
        return self._oracles[function]

    def check(self, problem: Problem, peer: Peer, direction: str) -> Entry:
        """A peer with what its check found; with a callable to be timed if it is right."""
        entry = Entry(problem, peer, direction, problem.pattern)
        entry.reason = peer.supports(problem, direction != FORWARD)
        if entry.reason is None:
            try:
                return self._check(entry)
            except self.failures as error:
                entry.reason = str(error) if isinstance(error, UnsupportedError) else in_a_line(error)
        return entry

    def _check(self, entry: Entry) -> Entry:
        problem, peer, direction = entry.problem, entry.peer, entry.direction
        if (peer.name, problem) not in self._built:
            self.say(f"{problem.name}: preparing {peer.name}")
            self._built[peer.name, problem] = peer.build(problem, self.inputs)
        built = self._built[peer.name, problem]
        known = peer.name, built.function, direction
        if known in self._checked:
            return dataclasses.replace(self._checked[known], problem=problem, timing=None, peak=None)
        self.say(f"{problem.name}: checking {peer.name}")
        oracle = self.oracle(built.function)
        entry.computes, entry.limit, entry.setup_seconds = built.function, oracle.limit, built.setup_seconds
        entry.how = built.how if peer.how is None else peer.how(problem, direction != FORWARD)
        if direction == FORWARD:
            entry.accuracy = oracle.check_out(built.forward(self.inputs)())
        else:
            entry.accuracy = oracle.check_gradients(*built.forward_backward(oracle.sliced)())
        excess = entry.accuracy.excess(oracle.limit)
        if excess is None:
            entry.call = built.call(self.inputs, direction)
        else:
            entry.reason = f"wrong: {excess}; not timed"
        self._checked[known] = entry
        return entry


def in_turn(entries: Sequence[Entry], *, rounds: int, budget: float | None = None, timer: Timer | None = None) -> None:
    """Time what is right, in turn; who is the same for several problems once. The check was the warm-up."""
    calls = {str(id(entry.call)): entry.call for entry in entries if entry.call is not None}
    if not calls:
        return
    device = entries[0].problem.device
    timings = interleaved(calls, rounds=rounds, warmup=0, device=device, budget=budget, timer=timer)
    for entry in entries:
        if entry.call is not None:
            entry.timing = timings[str(id(entry.call))]


def outcomes(
    comparison: Comparison, say: Say = silent, *, inputs: Inputs | None = None, peak: float | None = None
) -> Generator[Outcome, None, list[Outcome]]:
    """Check, time and weigh what is to be compared.

    Args:
        comparison: The problems, and who computes them.
        say: Told what happens next.
        inputs: The inputs of all problems; random ones by default.
        peak: Operations per second that the device reaches.
    Yields:
        An outcome for each direction, problem and peer, in that order, as soon as its direction is measured.
    Returns:
        All of them.
    """
    found: list[Outcome] = []
    sessions: dict[tuple[object, ...], Session] = {}
    for problem, _ in comparison.entries:
        if problem.shape not in sessions:
            given = problem.inputs() if inputs is None else inputs
            sessions[problem.shape] = Session(given, say, ends=comparison.ends, failures=comparison.failures)
    for direction in comparison.directions:
        entries = [
            sessions[problem.shape].check(problem, peer, direction)
            for problem, names in comparison.entries
            for peer in taking_part(problem, names, direction)
        ]
        said = f"{entries[0].problem.name}, {entries[0].problem.tokens:,} tokens, {direction}"
        say(f"{said}: timing {len(entries)} in turn")
        in_turn(entries, rounds=comparison.rounds, budget=comparison.budget)
        first = {entry.problem: entry.timing for entry in reversed(entries) if entry.peer.name == entries[0].peer.name}
        for entry in entries:
            if comparison.memory and entry.call is not None:
                say(f"{said}: memory of {entry.peer.name}")
                entry.peak = peak_memory(entry.call, device=entry.problem.device, warm=False)
            found.append(entry.outcome(first.get(entry.problem, entries[0].timing), peak))
            yield found[-1]
    return found


def compare(
    problem: Problem,
    peers: Sequence[Peer],
    *,
    inputs: Inputs | None = None,
    directions: Sequence[str] = (FORWARD, BOTH),
    rounds: int = 5,
    budget: float | None = None,
    memory: bool = True,
    say: Say = silent,
) -> list[Outcome]:
    """Check, time and weigh peers on one problem.

    Args:
        problem: What to compute.
        peers: Who computes it; ratios are against the first.
        inputs: Its inputs; random by default.
        directions: ``"forward"``, ``"backward"`` by itself, ``"forward + backward"``, or several.
        rounds: Timed rounds.
        budget: Seconds after which no further round of a direction starts.
        memory: Whether to measure peak memory too.
        say: Told what happens next.
    Returns:
        An outcome for each direction and peer, in that order.
    """
    comparison = Comparison([(problem, peers)], directions, rounds, budget, memory)
    return list(outcomes(comparison, say, inputs=inputs))
