"""Compare peers: check each one against the oracle, time them in turn, and record the outcomes.

A peer that fails its check is not timed, since the speed of a wrong result is of no interest.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

from ringweave.errors import ShapeError, UnsupportedError

from ..tune.measure import Timing, ratio
from ..tune.problem import BOTH, DIRECTIONS, FORWARD, Problem, Sample
from ..tune.session import Entry, Peer, Say, Session, in_turn, silent
from .peak import Peak, peak_memory
from .peers import taking_part
from .record import Outcome


@dataclass(frozen=True)
class Comparison:
    """Problems and peers that are measured in turn.

    Attributes:
        entries: Problems, each with its peers or their names, as in
            :func:`~ringweave_lab.bench.peers.taking_part`. Ratios are over the first entry's peer on the same problem,
            or on the first problem if that peer does not take part in the same one.
        directions: Some of ``"forward"``, ``"backward"`` (alone) and ``"forward + backward"``.
        rounds: Number of timed rounds.
        budget: Seconds after which no further round of a direction starts.
        memory: Whether peak memory is measured too.
        ends: Whether only the first and the last key head are checked.
        failures: Errors of a peer that become its reason and do not end the run.
    """

    entries: Sequence[tuple[Problem, Sequence[str | Peer]]]
    directions: Sequence[str] = DIRECTIONS
    rounds: int = 5
    budget: float | None = None
    memory: bool = True
    ends: bool = False
    failures: tuple[type[Exception], ...] = (UnsupportedError,)


def weighed(
    entry: Entry,
    first: Timing | None = None,
    held: Peak | None = None,
    *,
    peak: float | None = None,
    memory: float | None = None,
) -> Outcome:
    """Return the outcome of an entry, with its rates and ratios.

    Args:
        entry: A peer on a problem, checked and timed.
        first: Timing to compare it with.
        held: Peak memory of the peer.
        peak: Peak operations per second of the device.
        memory: Bytes per second that the device reads.
    """
    problem, rate, moved = entry.problem, None, None
    if entry.timing is not None:
        rate = problem.flops(entry.direction) / entry.timing.median
        moved = problem.nbytes(entry.direction) / entry.timing.median
    return Outcome(
        workload=problem.name,
        tokens=problem.tokens,
        heads=problem.heads,
        kv_heads=problem.key_heads,
        head_dim=problem.head_dim,
        dtype=str(problem.dtype).removeprefix("torch."),
        density=problem.density,
        direction=entry.direction,
        peer=entry.peer,
        computes=entry.computes,
        how=entry.how,
        timing=entry.timing,
        over_first=None if first is None or entry.timing is None else ratio(entry.timing, first),
        gflops=None if rate is None else rate / 1e9,
        peak=held,
        accuracy=entry.accuracy,
        limit=entry.limit,
        setup_seconds=entry.setup_seconds,
        peak_share=None if peak is None or rate is None else rate / peak,
        memory_share=None if memory is None or moved is None else moved / memory,
        reason=entry.reason,
    )


def outcomes(
    comparison: Comparison,
    say: Say = silent,
    *,
    inputs: Sample | None = None,
    peak: float | None = None,
    memory: float | None = None,
) -> Generator[Outcome, None, list[Outcome]]:
    """Check and time the peers of a comparison.

    Args:
        comparison: Problems and peers.
        say: Function that receives progress messages.
        inputs: Inputs of all problems; random by default.
        peak: Peak operations per second of the device.
        memory: Bytes per second that the device reads.
    Yields:
        An outcome for each direction, problem and peer, in that order, as soon as its direction is measured.
    Returns:
        All outcomes.
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
        leader = entries[0].peer
        first = {entry.problem: entry.timing for entry in reversed(entries) if entry.peer == leader}
        for entry in entries:
            held: Peak | None = None
            if comparison.memory and entry.call is not None:
                say(f"{said}: memory of {entry.peer}")
                held = peak_memory(entry.call, device=entry.problem.device, warm=False)
            against = first.get(entry.problem, entries[0].timing)
            found.append(weighed(entry, against, held, peak=peak, memory=memory))
            yield found[-1]
    return found


def _check_names(entries: Sequence[Entry]) -> None:
    """Raise ShapeError if two peers of a problem have the same name."""
    names = [(entry.problem, entry.peer) for entry in entries]
    if not names or len(set(names)) < len(names):
        got = ", ".join(name for _, name in names) or "none"
        raise ShapeError("peers", got, "one or more, of different names", "Give each its own name.")


def compare(
    problem: Problem,
    peers: Sequence[Peer],
    *,
    inputs: Sample | None = None,
    directions: Sequence[str] = (FORWARD, BOTH),
    rounds: int = 5,
    budget: float | None = None,
    memory: bool = True,
    say: Say = silent,
) -> list[Outcome]:
    """Check and time peers on one problem.

    Args:
        problem: Problem to compute.
        peers: Peers that compute it; ratios are over the first.
        inputs: Inputs of the problem; random by default.
        directions: Some of ``"forward"``, ``"backward"`` (alone) and ``"forward + backward"``.
        rounds: Number of timed rounds.
        budget: Seconds after which no further round of a direction starts.
        memory: Whether to measure peak memory too.
        say: Function that receives progress messages.
    Returns:
        An outcome for each direction and peer, in that order.
    """
    comparison = Comparison([(problem, peers)], directions, rounds, budget, memory)
    return list(outcomes(comparison, say, inputs=inputs))
