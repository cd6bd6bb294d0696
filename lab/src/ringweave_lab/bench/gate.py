"""Find slowdowns: compare eight ratios of time with committed ones, and cliffs with bounds of their own.

Each ratio is ringweave's time over the time of a call that does not change with ringweave, such as torch's dense
attention. Both run on one thread, in turn, and are measured in this process's processor time, so that other processes
hardly matter; the median of the ratios within rounds counts. A ratio that is too large is measured again after all
others, up to three times and for longer, since the effect of another process passes and a slowdown stays. If the time
ends before that, the ratio is undecided and does not fail. Processor time does not show waiting, nor threads that wait
for each other.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import ringweave as rw
from ringweave import files
from ringweave.errors import UnsupportedError
from ringweave.plan.from_pattern import build

from ..tune.measure import Runnable, Timer, by_processor, interleaved, ratio
from ..tune.problem import BOTH, FORWARD, Problem, RandomBlocks
from ..tune.session import Say, Session, silent
from .peers import peers
from .record import environment

#: The slowdown that the gate must find.
CAUGHT = 1.3
# Bounds of a tolerance. The upper one is the geometric middle between 1 and CAUGHT: above it, missing a slowdown would
# be likelier than failing without one.
_LEAST, _MOST = 1.1, CAUGHT**0.5
_AGAIN = 3
_LONGER = 2  # factor on the rounds and seconds of each repetition
_WITHIN = 240.0  # seconds after which no ratio is measured again
_ROUNDS, _SECONDS = 61, 5.0
_REPEATS = 5  # runs of a new baseline
_FEWEST = 7  # minimum number of rounds, regardless of time
_WIDTH = 3  # a tolerance in deviations of a baseline's runs from their median, without the largest deviation
_PART = 0.006  # minimum seconds of a sample; shorter calls run several times


@dataclass(frozen=True)
class Headline:
    """One of the ratios.

    Attributes:
        name: Name in files.
        what: Description.
        pair: Function that returns ringweave's call, checked against the oracle if it computes attention, and the
            call to compare it with, which uses similar operations and as much memory, so that other processes slow
            both down equally.
        most: Bound of the ratio on every processor; None if a ratio stored for the processor bounds it.
    """

    name: str
    what: str
    pair: Callable[[Say], tuple[Runnable, Runnable]]
    most: float | None = None

    def held(self, stored: Mapping[str, Held]) -> Held | None:
        """Return the bound, or the stored ratio of this processor if there is one."""
        return stored.get(self.name) if self.most is None else Held(self.most, 1.0)


def _checked(problem: Problem, direction: str, name: str, say: Say) -> Runnable:
    """Return a peer's call after checking it against the oracle."""
    (peer,) = peers(name)
    entry = Session(problem.inputs(), say).check(problem, peer, direction)
    if entry.call is None:
        raise UnsupportedError(peer.name, entry.reason, "a right result", "Mend that first.")
    return entry.call


def _attention(
    problem: Problem, direction: str, ours: str = "ringweave", beside: torch.dtype | None = None
) -> Callable[[Say], tuple[Runnable, Runnable]]:
    """Return a function that makes a call and torch's dense attention, in another type if one is given."""
    other = replace(problem, dtype=beside or problem.dtype)

    def pair(say: Say) -> tuple[Runnable, Runnable]:
        return _checked(problem, direction, ours, say), _checked(other, direction, "sdpa", say)

    return pair


def _mixed(say: Say) -> tuple[Runnable, Runnable]:
    """Return a mixture's call, and torch's dense attention in each segment of its branches, joined without weights."""
    ours = _checked(Problem("LongNet", rw.LongNet([256, 1024], [1, 4]), 2048, 2), FORWARD, "ringweave", say)
    q = torch.randn(1, 2, 2048, 64)
    branches = [x.unflatten(2, (-1, 256)).transpose(1, 2).flatten(0, 1) for x in (q, q[:, :, ::4])]

    def other() -> object:
        with torch.no_grad():
            whole, some = (torch.nn.functional.scaled_dot_product_attention(x, x, x) for x in branches)
            whole[:2] += some
            return whole

    return ours, other


def _planned(say: Say) -> tuple[Runnable, Runnable]:
    """Return a call that plans without a cache, and as many small numpy and torch operations of the same kinds."""
    pattern, tokens = (rw.SlidingWindow(1024) | rw.Sinks(64)) & rw.Causal(), 65536
    rows, places = np.arange(512), torch.arange(128)
    tiles = np.random.default_rng(0).integers(512, size=2**13)

    def plan() -> object:
        return build(pattern, tokens, tokens, tile=(128, 128))

    def other() -> object:
        found: list[object] = []
        for _ in range(12):
            counts = np.minimum(rows + 1, 512) - np.maximum(rows - 9, 0)
            row = np.repeat(rows, counts)
            column = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
            kinds = np.unique(tiles[:1024], return_inverse=True)
            order = np.argsort(tiles.astype(np.uint16), kind="stable")
            joined = np.concatenate([row, tiles])
            distance = places[:, None] - places
            mask = np.packbits(((distance >= 0) & (distance < 100)).numpy(), axis=1)
            found[:] = column, kinds, order, joined[joined % 7 > 0], np.searchsorted(row, rows), mask
        return found

    return plan, other


def _called(say: Say) -> tuple[Runnable, Runnable]:
    """Return a call so small that its kernel takes hardly any time, and torch's calls of the same size."""
    ours = _checked(Problem("small", rw.Causal(), 16, 1, 16), FORWARD, "ringweave:cpu", say)
    q = torch.randn(1, 1, 16, 16)

    def other() -> object:
        found: list[Tensor] = []
        with torch.no_grad():
            for _ in range(8):
                out = torch.nn.functional.scaled_dot_product_attention(q, q, q)
                found[:] = [(out + q).view(16, 16).t()]
        return found

    return ours, other


_MASKED = (rw.SlidingWindow(512) | rw.Sinks(64)) & rw.Causal()
HEADLINES = (
    Headline("kernel", "float32, a tenth of the tiles: forward over dense SDPA's",
             _attention(Problem("random 10%", RandomBlocks(0.1), 2048, 2), FORWARD)),
    Headline("gradients", "float32, a tenth of the tiles: forward and backward over dense SDPA's",
             _attention(Problem("random 10%", RandomBlocks(0.1), 2048, 1), BOTH)),
    Headline("bfloat16", "bfloat16, a tenth of the tiles: forward over dense SDPA's in float32",
             _attention(Problem("random 10%", RandomBlocks(0.1), 2048, 2, dtype=torch.bfloat16), FORWARD,
                        beside=torch.float32)),
    Headline("dense", "float32, every pair: forward over SDPA's",
             _attention(Problem("full", rw.Full(), 1024, 2), FORWARD, "ringweave:cpu")),
    Headline("window", "float32, a causal window with sinks: forward over dense SDPA's",
             _attention(Problem("window + sinks", _MASKED, 2048, 2), FORWARD)),
    Headline("longnet", "float32, LongNet: forward over SDPA's in each of its segments", _mixed),
    Headline("plan", "a plan of 65,536 tokens that no cache has, over small steps of numpy and torch", _planned),
    Headline("call", "a call on 16 tokens, hardly more than Python, over eight of SDPA's", _called),
)  # fmt: skip


@dataclass(frozen=True)
class Held:
    """A stored ratio and its tolerance, which follows from the deviation of its runs."""

    ratio: float
    tolerance: float


@dataclass(frozen=True)
class Verdict:
    """The gate's result for one ratio.

    Attributes:
        headline: The ratio's definition.
        found: Smallest measured value.
        held: Stored ratio; None if none is stored for this processor.
        times: Number of measurements.
    """

    headline: Headline
    found: float
    held: Held | None
    times: int

    @property
    def slower(self) -> float | None:
        """Measured ratio over the stored one."""
        return None if self.held is None else self.found / self.held.ratio

    @property
    def within(self) -> bool:
        """Whether the ratio is within its tolerance."""
        return self.held is None or self.found <= self.held.ratio * self.held.tolerance

    @property
    def passed(self) -> bool:
        """Whether no slowdown is established; one slow measurement may have another cause, so it is not enough."""
        return self.within or self.times <= _AGAIN

    @property
    def stale(self) -> bool:
        """Whether the ratio is so much smaller than the stored one that a slowdown would no longer be found."""
        return (
            self.headline.most is None
            and self.held is not None
            and self.found * CAUGHT <= self.held.ratio * self.held.tolerance
        )


def kind() -> str:
    """Return a text of the processor, the kernel's instruction set and torch's version, on which ratios depend."""
    where = environment()
    return f"{where.cpu}, kernel {where.kernel or 'none'}, torch {where.torch.split('+')[0]}"


def slowed(call: Runnable, factor: float, timer: Timer = by_processor) -> Runnable:
    """Return a call that takes ``factor`` times as long, to test the gate."""

    def slow() -> object:
        result: list[object] = []
        spent = timer(lambda: result.append(call()), 1)
        until = time.process_time() + (factor - 1) * spent
        while time.process_time() < until:
            pass
        return result[0]

    return slow


def measured(
    pair: tuple[Runnable, Runnable], *, rounds: int = _ROUNDS, seconds: float = _SECONDS, timer: Timer = by_processor
) -> float:
    """Measure the ratio of two calls: the median over rounds in which they run in turn.

    Args:
        pair: The calls.
        rounds: Maximum number of rounds.
        seconds: Wall-clock seconds after which no further round starts.
        timer: Function that times a call.
    """
    timings = interleaved(
        {"ours": pair[0], "other": pair[1]}, rounds=rounds, budget=seconds, timer=timer, fewest=_FEWEST, shortest=_PART
    )
    return ratio(timings["ours"], timings["other"]).paired


def run(
    held: Mapping[str, Held],
    say: Say = silent,
    *,
    slow: Sequence[str] = (),
    headlines: Sequence[Headline] | None = None,
) -> list[Verdict]:
    """Measure the ratios, repeat those that are too large, and compare them with stored ones.

    Args:
        held: Stored ratios by name; a ratio that is missing here is measured and not compared.
        say: Function that receives progress messages.
        slow: Names of ratios to slow down by ``CAUGHT``, to test the gate.
        headlines: Ratios to measure; by default the eight that are stored.
    """
    verdicts, pairs, start = [], [], time.monotonic()
    with _one_thread():
        for headline in HEADLINES if headlines is None else headlines:
            say(f"gate: {headline.name}")
            ours, other = headline.pair(say)
            pairs.append(((slowed(ours, CAUGHT) if headline.name in slow else ours), other))
            verdicts.append(Verdict(headline, measured(pairs[-1]), headline.held(held), 1))
        for _ in range(_AGAIN):
            for place, verdict in enumerate(verdicts):
                if verdict.within or time.monotonic() - start > _WITHIN:
                    continue
                say(f"gate: {verdict.headline.name}, again")
                again = measured(pairs[place], rounds=_LONGER * _ROUNDS, seconds=_LONGER * _SECONDS)
                verdicts[place] = replace(verdict, found=min(verdict.found, again), times=verdict.times + 1)
    return verdicts


def prepared(headlines: Sequence[Headline] | None = None, say: Say = silent) -> list[Headline]:
    """Return headlines with calls that are made and checked once for several runs."""
    headlines = HEADLINES if headlines is None else headlines
    return [replace(each, pair=_made(each.pair(say))) for each in headlines]


def _made(pair: tuple[Runnable, Runnable]) -> Callable[[Say], tuple[Runnable, Runnable]]:
    return lambda say: pair


def update(path: Path, say: Say = silent, *, headlines: Sequence[Headline] | None = None) -> dict[str, Held]:
    """Measure the ratios on this processor and store them; the file's ratios of other processors stay.

    A tolerance is three times the second largest deviation of a run from the median, within bounds.

    Raises:
        UnsupportedError: The runs deviate so much that a slowdown would be missed.
    """
    runs = []
    headlines = HEADLINES if headlines is None else headlines
    for number in range(_REPEATS):
        say(f"gate: run {number + 1} of {_REPEATS}")
        # calls are made anew for each run, since the addresses of their tensors contribute to the deviation
        runs.append({each.headline.name: each.found for each in run({}, say, headlines=headlines)})
    held = {}
    for headline in headlines:
        found = [each[headline.name] for each in runs]
        middle = statistics.median(found)
        # without the largest deviation, since a busy machine often disturbs one run
        apart = sorted(abs(each / middle - 1) for each in found)[-2]
        if apart > 1 - _MOST / CAUGHT:
            got = f"runs from {min(found):.3g} to {max(found):.3g}"
            raise UnsupportedError(headline.name, got, "runs that agree", "Try again when others rest.")
        held[headline.name] = Held(round(middle, 4), round(min(max(1 + _WIDTH * apart, _LEAST), _MOST), 3))
    whole = _file(path)
    whole[kind()] = {name: asdict(each) for name, each in held.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(whole, indent=1) + "\n", "utf-8")
    return held


def baseline(path: Path) -> dict[str, Held]:
    """Return the stored ratios of this processor; empty if the file has none.

    Raises:
        UnsupportedError: The file is not a file of ratios.
    """
    try:
        return {name: Held(**each) for name, each in _file(path).get(kind(), {}).items()}
    except (TypeError, AttributeError):
        raise _no_baseline(path, "something else") from None


def _file(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        found = files.parse(files.read(path))
    except (OSError, ValueError) as error:
        raise _no_baseline(path, type(error).__name__) from None
    if not isinstance(found, dict):
        raise _no_baseline(path, type(found).__name__)
    return found


def _no_baseline(path: Path, got: str) -> UnsupportedError:
    return UnsupportedError(f"--gate {path}", got, "a file that --update wrote", "Write it again.")


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
