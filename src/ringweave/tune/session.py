"""Checks each way to compute an attention against the oracle, then times the correct ones in turn.

A peer that fails its check is not timed: the speed of a wrong result is of no interest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..errors import ShapeError, UnsupportedError, in_a_line, message
from ..patterns import Pattern
from ..torch_compat import version
from .measure import Call, Timer, Timing, interleaved, on_device, replayed
from .oracle import Accuracy, Limit, Oracle, sample_rows
from .problem import BACKWARD, BOTH, FORWARD, Attend, Problem, Sample

#: Called with a line of text about the next step.
Say: TypeAlias = Callable[[str], None]
#: Of peers whose kernel, compiler or memory may fail: the others are measured all the same. Compilers raise whatever
#: they stumble over; ValueError is not among them, since a peer that writes to others' inputs raises one.
FAILURES: tuple[type[Exception], ...] = (
    UnsupportedError, RuntimeError, AssertionError, TypeError, AttributeError, LookupError, ImportError,
)  # fmt: skip


def silent(text: str) -> None:
    """Say nothing."""


@dataclass(frozen=True)
class Built:
    """A peer made ready for one problem.

    Attributes:
        attend: (q, k, v) to out.
        function: The pattern that it computes.
        how: The backend or kernel behind it.
        setup_seconds: Seconds spent once, before the first result: planning or compilation.
    """

    attend: Attend
    function: Pattern
    how: str
    setup_seconds: float | None = None

    def forward(self, inputs: Sample) -> Callable[[], Tensor]:
        """Make a callable without gradients."""
        q, k, v = (x.detach() for x in inputs[:3])

        def call() -> Tensor:
            with torch.no_grad():
                return self.attend(q, k, v)

        return call

    def forward_backward(self, inputs: Sample) -> Callable[[], tuple[Tensor, ...]]:
        """Make a callable that gives (out, dq, dk, dv)."""
        q, k, v = (x.detach().requires_grad_() for x in inputs[:3])

        def call() -> tuple[Tensor, ...]:
            out = self.attend(q, k, v)
            return (out.detach(), *torch.autograd.grad(out, (q, k, v), inputs.dout))

        return call

    def backward(self, inputs: Sample) -> Callable[[], tuple[Tensor, ...]]:
        """Make a callable that gives (dq, dk, dv) of a graph that is kept."""
        q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
        out = self.attend(q, k, v)
        return lambda: torch.autograd.grad(out, (q, k, v), inputs.dout, retain_graph=True)

    def call(self, inputs: Sample, direction: str) -> Callable[[], object]:
        """Make the callable of a direction."""
        made = {FORWARD: self.forward, BACKWARD: self.backward, BOTH: self.forward_backward}
        return made[direction](inputs)


@dataclass(frozen=True)
class Peer:
    """One way to compute attention.

    Attributes:
        name: What tables and ``--list`` call it.
        summary: One line for people.
        supports: Why it cannot run a problem (with gradients or without); None where it can.
        build: Makes it ready.
        how: What is behind it with gradients or without, where that may differ.
    """

    name: str
    summary: str
    supports: Callable[[Problem, bool], str | None]
    build: Callable[[Problem, Sample], Built]
    how: Callable[[Problem, bool], str] | None = None


@dataclass
class Entry:
    """A peer on a problem in one direction, and the results of its check and its timing.

    Attributes:
        problem: The attention to compute.
        peer: The peer's name.
        direction: ``"forward"``, ``"backward"`` or ``"forward + backward"``.
        computes: The function that the peer computes, as a pattern.
        how: The backend or kernel behind it.
        accuracy: Errors on the checked rows, against the oracle of the function that it computes.
        limit: The largest errors that count as correct.
        setup_seconds: Seconds spent once, on planning or compilation.
        timing: Seconds; None before it is timed, and where ``reason`` says why it is not.
        reason: Why it is not timed.
        call: The callable to time; None where the peer could not be built or is wrong.
    """

    problem: Problem
    peer: str
    direction: str
    computes: str = ""
    how: str = ""
    accuracy: Accuracy | None = None
    limit: Limit | None = None
    setup_seconds: float | None = None
    timing: Timing | None = None
    reason: str | None = None
    call: Call | None = None

    def __post_init__(self) -> None:
        self.computes = self.computes or repr(self.problem.pattern)

    def learn(self, **known: Any) -> None:
        """Set attributes."""
        for name, value in known.items():
            setattr(self, name, value)


class Session:
    """Sample of one shape: peers are built once for them, oracles evaluated once, and a function is checked once.

    Args:
        inputs: What all problems of the session are computed on.
        say: Told what happens next.
        rows: How many rows are checked.
        ends: Whether the first and the last key head alone are checked.
        failures: Errors of a peer that are its reason, and do not end the run.
    """

    def __init__(
        self,
        inputs: Sample,
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
        entry = Entry(problem, peer.name, direction, reason=reason)
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
        problem, direction = entry.problem, entry.direction
        if (peer.name, problem) not in self._built:
            self.say(f"{problem.name}: preparing {peer.name}")
            self._built[peer.name, problem] = peer.build(problem, self.inputs)
        built = self._built[peer.name, problem]
        same = peer.name, built.function, direction
        if same not in self._checked:
            self.say(f"{problem.name}: checking {peer.name}")
            oracle = self.oracle(built.function)
            versions = [version(x) for x in self.inputs]
            if direction == FORWARD:
                accuracy = oracle.check_out(built.forward(self.inputs)())
            else:
                accuracy = oracle.check_gradients(*built.forward_backward(oracle.sliced)())
            if versions != [version(x) for x in self.inputs]:
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
                entry.learn(how=f"{entry.how}; timed with its launches, not as a graph: {refused[name]}")
    return made
