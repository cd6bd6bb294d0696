"""Time callables side by side in one run.

The speed of a machine drifts: another process starts, a core throttles. So callables are timed in turn (A B C A B C
...), and a ratio is computed both from medians and within rounds, where drift cancels.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from ringweave.errors import ShapeError

Runnable = Callable[[], object]
#: Function (call, times) that returns the mean seconds of this number of consecutive calls.
Timer = Callable[[Runnable, int], float]


@dataclass(frozen=True)
class Timing:
    """The seconds per call of one callable, one entry per round."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median of the rounds."""
        return statistics.median(self.seconds)

    @property
    def min(self) -> float:
        """Shortest round."""
        return min(self.seconds)

    @property
    def max(self) -> float:
        """Longest round."""
        return max(self.seconds)


@dataclass(frozen=True)
class Ratio:
    """The ratio of the times of two callables.

    Attributes:
        medians: Ratio of the two medians.
        paired: Median over rounds of the ratio within a round.
        low: Smallest ratio within a round.
        high: Largest ratio within a round.
    """

    medians: float
    paired: float
    low: float
    high: float


def ratio(numerator: Timing, denominator: Timing) -> Ratio:
    """Compare two timings of one interleaved run.

    Raises:
        ShapeError: They have different numbers of rounds.
    Example:
        >>> ratio(Timing((2.0, 4.0, 6.0)), Timing((1.0, 1.0, 2.0)))
        Ratio(medians=4.0, paired=3.0, low=2.0, high=4.0)
    """
    if len(numerator.seconds) != len(denominator.seconds):
        got = f"{len(numerator.seconds)} and {len(denominator.seconds)} rounds"
        raise ShapeError("timings", got, "timings of one interleaved run", "Time them together.")
    pairs = [a / b for a, b in zip(numerator.seconds, denominator.seconds, strict=True)]
    return Ratio(numerator.median / denominator.median, statistics.median(pairs), min(pairs), max(pairs))


def by_clock(call: Runnable, times: int = 1) -> float:
    """Return the wall-clock seconds per call."""
    return _passed(time.perf_counter, call, times)


def by_processor(call: Runnable, times: int = 1) -> float:
    """Return the CPU seconds of this process per call, which other processes disturb less than wall-clock time."""
    return _passed(time.process_time, call, times)


def on_one_thread(device: str) -> Timer | None:
    """Return :func:`by_processor` if calls on a CPU use one thread: their time, with less noise; None otherwise."""
    return by_processor if torch.device(device).type == "cpu" and torch.get_num_threads() == 1 else None


def by_events(call: Runnable, times: int = 1) -> float:
    """Return the seconds per call between two CUDA events on the current stream."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    for _ in range(times):
        call()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / times


def replayed(call: Runnable) -> Runnable:
    """Capture a call in a CUDA graph and return its replay; events around launches from Python would time the host.

    The call must have run before. It is captured on the current stream, which must not be the default stream: autograd
    launches a backward kernel on the stream of its forward.

    Raises:
        RuntimeError: The call does something that a graph cannot capture.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        call()
    return graph.replay


def _passed(clock: Callable[[], float], call: Runnable, times: int) -> float:
    result: object = None
    start = clock()
    for _ in range(times):
        result = call()
    seconds = clock() - start
    # free the result outside the timed region
    del result
    return seconds / times


def on_device(device: str) -> AbstractContextManager[object]:
    """Make a GPU the current device, to which events, streams and the allocator's figures refer."""
    return torch.cuda.device(device) if torch.device(device).type == "cuda" else nullcontext()


def _in_a_row(timer: Timer, call: Runnable, shortest: float) -> int:
    """Return the number of calls to time together; several for short calls on a GPU, to keep its queue filled."""
    if timer is by_events:
        return max(1, min(50, round(0.02 / max(timer(call, 2), 1e-6))))
    return max(1, round(shortest / max(timer(call, 1), 1e-7))) if shortest else 1


def interleaved(
    calls: Mapping[str, Runnable],
    *,
    rounds: int = 5,
    warmup: int = 1,
    device: str = "cpu",
    budget: float | None = None,
    timer: Timer | None = None,
    fewest: int = 1,
    shortest: float = 0.0,
) -> dict[str, Timing]:
    """Time callables in turn, round by round.

    Args:
        calls: Callables by name; each round calls them in this order.
        rounds: Number of timed rounds.
        warmup: Number of untimed rounds before.
        device: Device of the calls: ``"cuda"`` is timed by events on the current stream, others by the wall clock.
        budget: Time in seconds after which no further round starts.
        timer: Timer to use instead of the device's.
        fewest: Minimum number of rounds, regardless of the budget.
        shortest: Minimum length in seconds of a timed interval; shorter calls run several times in it.
    Returns:
        A timing for each name, all with the same number of rounds.
    Raises:
        ShapeError: There is less than one round, or warmup is negative.
    Example:
        >>> timings = interleaved({"a": lambda: sum(range(10)), "b": lambda: sum(range(1000))}, rounds=3)
        >>> [len(timing.seconds) for timing in timings.values()]
        [3, 3]
    """
    if rounds < 1 or warmup < 0:
        raise ShapeError("rounds, warmup", (rounds, warmup), "at least 1 and 0", "Time at least one round.")
    once = timer or (by_events if torch.device(device).type == "cuda" else by_clock)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    with on_device(device):
        for _ in range(warmup):
            for call in calls.values():
                call()
        times = {name: _in_a_row(once, call, shortest) for name, call in calls.items()}
        gc.collect()
        start = time.perf_counter()
        for done in range(rounds):
            if budget is not None and done >= fewest and time.perf_counter() - start > budget:
                break
            for name, call in calls.items():
                seconds[name].append(once(call, times[name]))
    return {name: Timing(tuple(values)) for name, values in seconds.items()}
