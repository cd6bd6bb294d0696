"""Peers side by side: checked against the oracle first, then timed in turn, then weighed. Every case goes this way.

A peer that fails its check is not timed: the speed of a wrong result is of no interest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import ShapeError, UnsupportedError, in_a_line, message
from ..patterns import Pattern
from .measure import Call, Timer, Timing, interleaved, on_device, peak_memory, ratio, replayed
from .oracle import Oracle, sample_rows
from .peers import Built, Peer, taking_part
from .problem import BOTH, DIRECTIONS, FORWARD, Operands, Problem
from .record import Outcome, Say, silent

#: Of peers whose kernel, compiler or memory may fail: the others are measured all the same. Compilers raise whatever
#: they stumble over; ValueError is not among them, since a peer that writes to others' inputs raises one.
FAILURES: tuple[type[Exception], ...] = (
    UnsupportedError, RuntimeError, AssertionError, TypeError, AttributeError, LookupError, ImportError,
)  # fmt: skip


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
        outcome: What is known of it: more after each step.
        call: What is timed; None where it could not be made ready, or is wrong, for the outcome's reason.
    """

    problem: Problem
    outcome: Outcome
    call: Call | None = None

    @staticmethod
    def of(problem: Problem, peer: str, direction: str, **known: Any) -> Entry:
        """Make an entry of which nothing is known but its sizes, and what is given."""
        outcome = Outcome(
            workload=problem.name, tokens=problem.tokens, heads=problem.heads, kv_heads=problem.key_heads,
            head_dim=problem.head_dim, dtype=str(problem.dtype).removeprefix("torch."), density=problem.density,
            direction=direction, peer=peer, computes=repr(problem.pattern),
        )  # fmt: skip
        return Entry(problem, dataclasses.replace(outcome, **known))

    def learn(self, **known: Any) -> None:
        """Add to the outcome."""
        self.outcome = dataclasses.replace(self.outcome, **known)

    @property
    def timing(self) -> Timing | None:
        """Seconds, once it was timed."""
        return self.outcome.timing

    @property
    def reason(self) -> str | None:
        """Why it is not timed."""
        return self.outcome.reason

    def weigh(self, first: Timing | None, peak: float | None = None, memory: float | None = None) -> Outcome:
        """Give the outcome, with what its time means.

        Args:
            first: What its time is compared with.
            peak: Operations per second that the device reaches.
            memory: Bytes per second that it reads.
        """
        if self.timing is not None:
            rate = self.problem.flops(self.outcome.direction) / self.timing.median
            moved = self.problem.nbytes(self.outcome.direction) / self.timing.median
            self.learn(
                over_first=None if first is None else ratio(self.timing, first),
                gflops=rate / 1e9,
                peak_share=None if peak is None else rate / peak,
                memory_share=None if memory is None else moved / memory,
            )
        return self.outcome


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
        inputs: Operands,
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
        self._broken: dict[tuple[str, Problem], str] = {}
        self._oracles: dict[Pattern, Oracle] = {}
        self._checked: dict[tuple[str, Pattern, str], tuple[dict[str, Any], Call | None]] = {}

    def oracle(self, function: Pattern) -> Oracle:
        """Evaluate the oracle of a function on the inputs, once."""
        if function not in self._oracles:
            self._oracles[function] = Oracle(function, self.inputs, self.rows, self.key_heads)
        return self._oracles[function]

    def check(self, problem: Problem, peer: Peer, direction: str) -> Entry:
        """Check a peer: the entry says what was found, and has a callable to be timed if that is right."""
        reason = self._broken.get((peer.name, problem)) or peer.supports(problem, direction != FORWARD)
        entry = Entry.of(problem, peer.name, direction, reason=reason)
        if reason is None:
            try:
                return self._check(entry, peer)
            except self.failures as error:
                reason = str(error) if isinstance(error, UnsupportedError) else in_a_line(error)
                entry.learn(reason=reason)
                if (peer.name, problem) not in self._built:
                    # to compile it for the other direction would fail again
                    self._broken[peer.name, problem] = reason
        return entry

    def _check(self, entry: Entry, peer: Peer) -> Entry:
        problem, direction = entry.problem, entry.outcome.direction
        if (peer.name, problem) not in self._built:
            self.say(f"{problem.name}: preparing {peer.name}")
            self._built[peer.name, problem] = peer.build(problem, self.inputs)
        built = self._built[peer.name, problem]
        same = peer.name, built.function, direction
        if same not in self._checked:
            self.say(f"{problem.name}: checking {peer.name}")
            oracle = self.oracle(built.function)
            versions = [x._version for x in self.inputs]
            if direction == FORWARD:
                accuracy = oracle.check_out(built.forward(self.inputs)())
            else:
                accuracy = oracle.check_gradients(*built.forward_backward(oracle.sliced)())
            if versions != [x._version for x in self.inputs]:
                # whatever came after it would be checked against what it left
                got = "a peer that writes to its inputs"
                raise ShapeError(message(peer.name, got, "one that leaves them as they are", "Let it copy them."))
            excess = accuracy.excess(oracle.limit)
            known = {
                "computes": repr(built.function),
                "how": built.how if peer.how is None else peer.how(problem, direction != FORWARD),
                "accuracy": accuracy,
                "limit": oracle.limit,
                "setup_seconds": built.setup_seconds,
                "reason": None if excess is None else f"wrong: {excess}; not timed",
            }
            self._checked[same] = known, built.call(self.inputs, direction) if excess is None else None
        known, entry.call = self._checked[same]
        entry.learn(**known)
        return entry


def in_turn(entries: Sequence[Entry], *, rounds: int, budget: float | None = None, timer: Timer | None = None) -> None:
    """Time what is right, in turn; who is the same for several problems once. The check was the warm-up.

    On a GPU replays of graphs are timed, and of what cannot be captured the calls themselves, which is said.
    """
    calls = {str(id(entry.call)): entry.call for entry in entries if entry.call is not None}
    if not calls:
        return
    device = entries[0].problem.device
    if timer is None and torch.device(device).type == "cuda":
        calls |= _graphs(entries, device)
    timings = interleaved(calls, rounds=rounds, warmup=0, device=device, budget=budget, timer=timer)
    for entry in entries:
        if entry.call is not None:
            entry.learn(timing=timings[str(id(entry.call))])


def _graphs(entries: Sequence[Entry], device: str) -> dict[str, Call]:
    """Capture what is to be timed: replays, by call."""
    made: dict[str, Call] = {}
    refused: dict[str, str] = {}
    with on_device(device):
        for entry in entries:
            name = str(id(entry.call))
            if entry.call is None:
                continue
            if name not in made and name not in refused:
                try:
                    made[name] = replayed(entry.call)
                except RuntimeError as error:
                    refused[name] = in_a_line(error)
            if name in refused:
                entry.learn(how=f"{entry.outcome.how}; timed with its launches, not as a graph: {refused[name]}")
    return made


def outcomes(
    comparison: Comparison,
    say: Say = silent,
    *,
    inputs: Operands | None = None,
    peak: float | None = None,
    memory: float | None = None,
) -> Generator[Outcome, None, list[Outcome]]:
    """Check, time and weigh what is to be compared.

    Args:
        comparison: The problems, and who computes them.
        say: Told what happens next.
        inputs: The inputs of all problems; random ones by default.
        peak: Operations per second that the device reaches.
        memory: Bytes per second that it reads.
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
        _check_names(entries)
        said = f"{entries[0].problem.name}, {entries[0].problem.tokens:,} tokens, {direction}"
        say(f"{said}: timing {len(entries)} in turn")
        in_turn(entries, rounds=comparison.rounds, budget=comparison.budget)
        leader = entries[0].outcome.peer
        first = {entry.problem: entry.timing for entry in reversed(entries) if entry.outcome.peer == leader}
        for entry in entries:
            if comparison.memory and entry.call is not None:
                say(f"{said}: memory of {entry.outcome.peer}")
                entry.learn(peak=peak_memory(entry.call, device=entry.problem.device, warm=False))
            found.append(entry.weigh(first.get(entry.problem, entries[0].timing), peak, memory))
            yield found[-1]
    return found


def _check_names(entries: Sequence[Entry]) -> None:
    """Check that what is filed by a peer's name is of one peer."""
    names = [(entry.problem, entry.outcome.peer) for entry in entries]
    if not names or len(set(names)) < len(names):
        got = ", ".join(name for _, name in names) or "none"
        raise ShapeError(message("peers", got, "one or more, of different names", "Give each its own name."))


def compare(
    problem: Problem,
    peers: Sequence[Peer],
    *,
    inputs: Operands | None = None,
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
