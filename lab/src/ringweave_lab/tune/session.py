"""Check each way to compute an attention problem against the oracle, and time the correct ones in turn.

A peer that fails its check is not timed, because the speed of a wrong result is irrelevant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ringweave.errors import ShapeError, UnsupportedError, in_a_line
from ringweave.patterns import Pattern
from ringweave.torch_compat import version

from .measure import Runnable, Timer, Timing, interleaved, on_device, replayed
from .oracle import Accuracy, Limit, Oracle, sample_rows
from .problem import BACKWARD, BOTH, FORWARD, Attend, Problem, Sample

#: Function that is called with a description of the next step.
Say: TypeAlias = Callable[[str], None]
#: Errors of a peer (kernel, compiler or memory) that do not stop the measurement of the others. Compilers raise many
#: types. ValueError is not included, because a peer that modifies the shared inputs raises one (ShapeError).
FAILURES: tuple[type[Exception], ...] = (
    UnsupportedError, RuntimeError, AssertionError, TypeError, AttributeError, LookupError, ImportError,
)  # fmt: skip


def silent(text: str) -> None:
    """Ignore the text."""


@dataclass(frozen=True)
class Built:
    """A peer prepared for one problem.

    Attributes:
        attend: Function from (q, k, v) to out.
        function: Pattern that the peer computes.
        how: Backend or kernel that the peer uses.
        setup_seconds: Seconds spent once before the first result, on planning or compilation.
    """

    attend: Attend
    function: Pattern
    how: str
    setup_seconds: float | None = None

    def forward(self, inputs: Sample) -> Callable[[], Tensor]:
        """Return a callable that computes out without gradients."""
        q, k, v = (x.detach() for x in inputs[:3])

        def call() -> Tensor:
            with torch.no_grad():
                return self.attend(q, k, v)

        return call

    def forward_backward(self, inputs: Sample) -> Callable[[], tuple[Tensor, ...]]:
        """Return a callable that computes (out, dq, dk, dv)."""
        q, k, v = (x.detach().requires_grad_() for x in inputs[:3])

        def call() -> tuple[Tensor, ...]:
            out = self.attend(q, k, v)
            return (out.detach(), *torch.autograd.grad(out, (q, k, v), inputs.dout))

        return call

    def backward(self, inputs: Sample) -> Callable[[], tuple[Tensor, ...]]:
        """Return a callable that computes (dq, dk, dv) from a retained graph."""
        q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
        out = self.attend(q, k, v)
        return lambda: torch.autograd.grad(out, (q, k, v), inputs.dout, retain_graph=True)

    def call(self, inputs: Sample, direction: str) -> Callable[[], object]:
        """Return the callable for a direction."""
        made = {FORWARD: self.forward, BACKWARD: self.backward, BOTH: self.forward_backward}
        return made[direction](inputs)


@dataclass(frozen=True)
class Peer:
    """One way to compute attention.

    Attributes:
        name: Name in tables and in ``--list``.
        summary: One-line description.
        supports: Function (problem, needs_grad) that returns why the peer cannot run a problem, or None.
        build: Function that prepares the peer for a problem.
        how: Function (problem, needs_grad) that names the backend or kernel, if it depends on the direction.
    """

    name: str
    summary: str
    supports: Callable[[Problem, bool], str | None]
    build: Callable[[Problem, Sample], Built]
    how: Callable[[Problem, bool], str] | None = None


def is_ours(peer: str) -> bool:
    """Return whether a peer of this name is ringweave, with any backend."""
    return peer.split(":")[0] == "ringweave"


@dataclass
class Entry:
    """A peer on a problem in one direction, and the results of its check and its timing.

    Attributes:
        problem: The problem.
        peer: Name of the peer.
        direction: ``"forward"``, ``"backward"`` or ``"forward + backward"``.
        computes: Pattern that the peer computes, as text.
        how: Backend or kernel that the peer uses.
        accuracy: Errors on the checked rows, against the oracle of this pattern.
        limit: Largest errors that count as correct.
        setup_seconds: Seconds spent once, on planning or compilation.
        timing: The timing; None before it, or if ``reason`` is set.
        reason: Why the peer is not timed, or None.
        call: The callable to time; None if the peer could not be built or is wrong.
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
    call: Runnable | None = None

    def __post_init__(self) -> None:
        self.computes = self.computes or repr(self.problem.pattern)

    def learn(self, **known: Any) -> None:
        """Set attributes."""
        for name, value in known.items():
            setattr(self, name, value)


class Session:
    """Inputs of one shape, with caches: peers are built once, oracles evaluated once, and each function checked once.

    Args:
        inputs: Inputs of all problems of the session.
        say: Function that is called with a description of the next step.
        rows: Number of rows to check.
        ends: Whether to check the first and the last key head only.
        failures: Errors of a peer that become its reason instead of ending the run.
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
        self._checked: dict[tuple[str, Pattern, str], tuple[dict[str, Any], Runnable | None]] = {}

    def oracle(self, function: Pattern) -> Oracle:
        """Return the oracle of a pattern on the inputs; it is evaluated once."""
        if function not in self._oracles:
            self._oracles[function] = Oracle(function, self.inputs, self.rows, self.key_heads)
        return self._oracles[function]

    def check(self, problem: Problem, peer: Peer, direction: str) -> Entry:
        """Check a peer; return an entry with the errors, and with a callable to time if the result is correct."""
        reason = self._broken.get((peer.name, problem)) or peer.supports(problem, direction != FORWARD)
        entry = Entry(problem, peer.name, direction, reason=reason)
        if reason is None:
            try:
                return self._check(entry, peer)
            except self.failures as error:
                reason = str(error) if isinstance(error, UnsupportedError) else in_a_line(error)
                entry.learn(reason=reason)
                if (peer.name, problem) not in self._built:
                    # remember the failure: preparing it again for the other direction would fail too
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
                # stop: later peers would be checked on the modified inputs
                got = "a peer that writes to its inputs"
                raise ShapeError(peer.name, got, "a peer that does not modify them", "Copy the inputs in it.")
            # Fused kernels compute weights again from lse, and so round more than torch's masked attention: PyTorch's
            # own has 2.0 times its error of dv on some processors. Its time is still that of a correct result.
            limit = oracle.limit if is_ours(peer.name) else oracle.limit.doubled()
            excess = accuracy.excess(limit)
            known = {
                "computes": repr(built.function),
                "how": built.how if peer.how is None else peer.how(problem, direction != FORWARD),
                "accuracy": accuracy,
                "limit": limit,
                "setup_seconds": built.setup_seconds,
                "reason": None if excess is None else f"wrong: {excess}; not timed",
            }
            self._checked[same] = known, built.call(self.inputs, direction) if excess is None else None
        known, entry.call = self._checked[same]
        entry.learn(**known)
        return entry


def in_turn(entries: Sequence[Entry], *, rounds: int, budget: float | None = None, timer: Timer | None = None) -> None:
    """Time the correct entries in turn, and entries with the same callable once. The checks served as warm-up.

    On a GPU, replays of CUDA graphs are timed. A call that cannot be captured is timed directly, and ``how`` says so.
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


def _graphs(entries: Sequence[Entry], device: str) -> dict[str, Runnable]:
    """Capture the calls of entries in CUDA graphs; return the replays by call."""
    made: dict[str, Runnable] = {}
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
