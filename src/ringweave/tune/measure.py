"""Time and memory of callables, side by side in one run.

Machines drift: another process starts, a core throttles. So callables are timed in turn (A B C A B C ...), and a ratio
is given both of medians and paired within rounds, where drift cancels.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from ..errors import ShapeError, message

Call = Callable[[], object]
#: Seconds of a call, the mean of as many in a row as the number says.
Timer = Callable[[Call, int], float]


@dataclass(frozen=True)
class Timing:
    """How many seconds one callable took, round by round."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median of the rounds."""
        return statistics.median(self.seconds)

    @property
    def min(self) -> float:
        """The shortest round."""
        return min(self.seconds)

    @property
    def max(self) -> float:
        """The longest round."""
        return max(self.seconds)


@dataclass(frozen=True)
class Ratio:
    """How many times longer one callable took than another.

    Attributes:
        medians: Ratio of the two medians.
        paired: Median over rounds of the ratio within a round.
        low: The smallest ratio within a round.
        high: The largest.
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
        raise ShapeError(message("timings", got, "timings of one interleaved run", "Time them together."))
    pairs = [a / b for a, b in zip(numerator.seconds, denominator.seconds, strict=True)]
    return Ratio(numerator.median / denominator.median, statistics.median(pairs), min(pairs), max(pairs))


def by_clock(call: Call, times: int = 1) -> float:
    """Time by the clock on the wall."""
    return _passed(time.perf_counter, call, times)


def by_processor(call: Call, times: int = 1) -> float:
    """Time by what this process works: others may use the machine."""
    return _passed(time.process_time, call, times)


def by_events(call: Call, times: int = 1) -> float:
    """Time between two CUDA events on the current stream."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    for _ in range(times):
        call()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / times


def replayed(call: Call) -> Call:
    """Capture a call in a CUDA graph and give its replay: events around a launch from Python would time the host.

    It has been called before. It is captured on the current stream, which is not the default one: there autograd
    launches what it launched forward.

    Raises:
        RuntimeError: It does what no graph can hold.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        call()
    return graph.replay


def _passed(clock: Callable[[], float], call: Call, times: int) -> float:
    result: object = None
    start = clock()
    for _ in range(times):
        result = call()
    seconds = clock() - start
    # what the callable returned is freed outside of the timed region
    del result
    return seconds / times


def on_device(device: str) -> AbstractContextManager[object]:
    """Make a GPU the current one: events, streams and the allocator's figures are of that."""
    return torch.cuda.device(device) if torch.device(device).type == "cuda" else nullcontext()


def _in_a_row(timer: Timer, call: Call) -> int:
    """How many calls to time at once: of short ones on a GPU several, so that its queue never runs dry."""
    return max(1, min(50, round(0.02 / max(timer(call, 2), 1e-6)))) if timer is by_events else 1


def interleaved(
    calls: Mapping[str, Call],
    *,
    rounds: int = 5,
    warmup: int = 1,
    device: str = "cpu",
    budget: float | None = None,
    timer: Timer | None = None,
) -> dict[str, Timing]:
    """Time callables in turn, round by round.

    Args:
        calls: What to time, by name; called in this order in every round.
        rounds: Timed rounds.
        warmup: Rounds before, not timed.
        device: ``"cuda"`` times by events on the current stream, anything else by the clock.
        budget: Seconds after which no further round starts; at least one is run.
        timer: Another timer than the device's.
    Returns:
        A timing for each name, all with the same number of rounds.
    Raises:
        ShapeError: Fewer than one round.
    Example:
        >>> timings = interleaved({"a": lambda: sum(range(10)), "b": lambda: sum(range(1000))}, rounds=3)
        >>> [len(timing.seconds) for timing in timings.values()]
        [3, 3]
    """
    if rounds < 1 or warmup < 0:
        raise ShapeError(message("rounds, warmup", (rounds, warmup), "at least 1 and 0", "Time at least one round."))
    once = timer or (by_events if torch.device(device).type == "cuda" else by_clock)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    with on_device(device):
        for _ in range(warmup):
            for call in calls.values():
                call()
        times = {name: _in_a_row(once, call) for name, call in calls.items()}
        gc.collect()
        start = time.perf_counter()
        for done in range(rounds):
            if budget is not None and done and time.perf_counter() - start > budget:
                break
            for name, call in calls.items():
                seconds[name].append(once(call, times[name]))
    return {name: Timing(tuple(values)) for name, values in seconds.items()}
