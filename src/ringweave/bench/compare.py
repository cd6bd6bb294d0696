"""Peers side by side on one workload: checked against the oracle first, then timed in turn, then weighed.

A peer that fails its check is not timed: the speed of a wrong result is of no interest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..errors import UnsupportedError
from ..patterns import Pattern
from .measure import Peak, Ratio, Timing, interleaved, peak_memory, ratio
from .peers import Built, Peer, chosen_backend
from .workload import Accuracy, Error, Inputs, Limit, Oracle, Workload, sample_rows

Say = Callable[[str], None]


def silent(text: str) -> None:
    """Say nothing."""


@dataclass(frozen=True)
class Outcome:
    """What came of one peer on one workload.

    Attributes:
        workload: Its name.
        tokens: Its length.
        heads: Its query heads.
        kv_heads: Its key heads.
        head_dim: Its head dimension.
        dtype: Its type.
        density: Allowed pairs over all pairs.
        direction: ``"forward"`` or ``"forward + backward"``.
        peer: Its name.
        computes: The function it computes, as a pattern; other than the workload's for dense peers.
        how: The backend or kernel behind it.
        timing: Seconds; None where it was not timed, and ``reason`` says why.
        over_first: How many times longer than the first peer it took; None for what was not timed.
        gflops: Operations on the *workload's* allowed pairs per second, in 10^9: the same count for every peer.
        peak: Memory.
        accuracy: Errors on the checked rows, against the oracle of the function it computes.
        limit: What was taken as correct.
        setup_seconds: Spent once, on planning or compilation.
        peak_share: ``gflops`` over the FMA peak of the same run, where that was measured.
        reason: Why there is no timing.
    """

    workload: str
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    density: float
    direction: str
    peer: str
    computes: str
    how: str = ""
    timing: Timing | None = None
    over_first: Ratio | None = None
    gflops: float | None = None
    peak: Peak | None = None
    accuracy: Accuracy | None = None
    limit: Limit | None = None
    setup_seconds: float | None = None
    peak_share: float | None = None
    reason: str | None = None

    @property
    def wrong(self) -> bool:
        """Whether the peer failed its check."""
        return self.accuracy is not None and self.limit is not None and self.accuracy.excess(self.limit) is not None


def compare(
    workload: Workload,
    peers: Sequence[Peer],
    *,
    inputs: Inputs | None = None,
    directions: Sequence[str] = ("forward", "forward + backward"),
    rounds: int = 5,
    budget: float | None = None,
    memory: bool = True,
    say: Say = silent,
) -> list[Outcome]:
    """Check, time and weigh peers on one workload.

    Args:
        workload: What to compute.
        peers: Who computes it; ratios are against the first.
        inputs: Its inputs; random by default.
        directions: ``"forward"``, ``"forward + backward"`` or both.
        rounds: Timed rounds.
        budget: Seconds after which no further round of a direction starts.
        memory: Whether to measure peak memory too.
        say: Told what happens next.
    Returns:
        An outcome for each direction and peer, in that order.
    """
    inputs = workload.inputs() if inputs is None else inputs
    session = Session(workload, inputs, say)
    outcomes: list[Outcome] = []
    for direction in directions:
        backward = direction != "forward"
        checked = {peer.name: session.check(peer, backward) for peer in peers}
        calls = {name: call for name, (_, call) in checked.items() if call is not None}
        say(f"{workload.name}: timing {direction}, {len(calls)} peers in turn")
        # the check was the warm-up: it ran every callable on the same sizes
        timings = interleaved(calls, rounds=rounds, warmup=0, device=workload.device, budget=budget)
        first = timings.get(peers[0].name)
        for name, (fields, call) in checked.items():
            if call is not None:
                timing = timings[name]
                fields |= {
                    "timing": timing,
                    "over_first": None if first is None else ratio(timing, first),
                    "gflops": workload.flops(backward=backward) / timing.median / 1e9,
                }
                if memory:
                    say(f"{workload.name}: memory of {name}, {direction}")
                    fields["peak"] = peak_memory(call, device=workload.device, warm=False)
            outcomes.append(outcome(workload, direction, name, fields))
    return outcomes


def outcome(workload: Workload, direction: str, peer: str, fields: dict[str, object]) -> Outcome:
    """An outcome from its workload and what is known of the peer."""
    common: dict[str, object] = {
        "workload": workload.name,
        "tokens": workload.tokens,
        "heads": workload.heads,
        "kv_heads": workload.key_heads,
        "head_dim": workload.head_dim,
        "dtype": str(workload.dtype).removeprefix("torch."),
        "density": workload.density,
        "direction": direction,
        "peer": peer,
        "computes": repr(workload.pattern),
    }
    return Outcome(**(common | fields))  # type: ignore[arg-type]


class Session:
    """Peers built once and oracles evaluated once for a workload."""

    def __init__(self, workload: Workload, inputs: Inputs, say: Say):
        self.workload, self.inputs, self.say = workload, inputs, say
        self.built: dict[str, Built | str] = {}
        self.oracles: dict[Pattern, Oracle] = {}

    def build(self, peer: Peer) -> Built | str:
        """The peer made ready, or why it could not be."""
        if peer.name not in self.built:
            self.say(f"{self.workload.name}: preparing {peer.name}")
            try:
                self.built[peer.name] = peer.build(self.workload, self.inputs)
            except UnsupportedError as error:
                self.built[peer.name] = str(error)
        return self.built[peer.name]

    def check(self, peer: Peer, backward: bool) -> tuple[dict[str, object], Callable[[], object] | None]:
        """What is known of a peer, and the callable to time if it is right."""
        reason = peer.supports(self.workload, backward)
        if reason is not None:
            return {"reason": reason}, None
        built = self.build(peer)
        if isinstance(built, str):
            return {"reason": built}, None
        self.say(f"{self.workload.name}: checking {peer.name}")
        oracle = self.oracles.get(built.function)
        if oracle is None:
            oracle = Oracle(built.function, self.inputs, sample_rows(self.workload.tokens))
            self.oracles[built.function] = oracle
        if backward:
            accuracy = oracle.check_gradients(*built.forward_backward(oracle.sliced)())
        else:
            out = built.forward(self.inputs)()
            accuracy = oracle.check_out(out)
            if torch.isnan(out).any():
                accuracy = Accuracy(Error(math.nan, math.nan))
        how = built.how
        if peer.name.startswith("ringweave"):
            name = peer.name.partition(":")[2] or "auto"
            how = chosen_backend(self.workload, backward=backward, name=name)
        fields: dict[str, object] = {
            "computes": repr(built.function),
            "how": how,
            "accuracy": accuracy,
            "limit": oracle.limit,
            "setup_seconds": built.setup_seconds,
        }
        excess = accuracy.excess(oracle.limit)
        if excess is not None:
            return fields | {"reason": f"wrong: {excess}; not timed"}, None
        return fields, built.forward_backward(self.inputs) if backward else built.forward(self.inputs)
