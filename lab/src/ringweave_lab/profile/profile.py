"""Split the time of a call, as torch.profiler measures it, into parts of ringweave.

The parts are planning, kernels, merging of partial results, and messages to other ranks; they are marked only while a
profile is taken. The remaining time is Python: checks, dispatch, autograd.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pickle
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

import ringweave as rw
from ringweave import api, program
from ringweave.backends import BACKENDS, cpu
from ringweave.errors import UnsupportedError
from ringweave.parallel import ContextParallel, Transport
from ringweave.parallel.transport import transport
from ringweave.plan import PlanCache, plan_cache

from ..bench.launched import run, torchrun
from ..bench.record import Options
from ..tune.problem import BOTH, Problem, RandomBlocks, Sample
from ..tune.session import Built, Say, silent

PARTS = ("plan", "kernel", "merge", "exchange", "Python")
_MARK = "ringweave: "
_CALL = f"{_MARK}call"
_LATER = 5  # calls after the first
_SECONDS = 240.0

_WINDOW = (rw.SlidingWindow(1024) | rw.Sinks(64)) & rw.Causal()
#: Problems that can be profiled, by name.
PROBLEMS = {
    "window": Problem("a causal window with sinks", _WINDOW, 8192),
    "random": Problem("a tenth of the tiles, at random", RandomBlocks(0.1), 4096),
    "longnet": Problem("LongNet", rw.LongNet([512, 2048], [1, 4]), 4096),
    "ring": Problem("a causal window around two processes", rw.SlidingWindow(1024) & rw.Causal(), 8192),
}


@dataclass(frozen=True)
class Profile:
    """The time of a call, forward and backward, by parts.

    Attributes:
        problem: The computed problem.
        first: Seconds of each part of ``PARTS`` in the first call, which plans.
        later: Median seconds of each part in later calls.
    """

    problem: Problem
    first: dict[str, float]
    later: dict[str, float]


def profiled(case: str, options: Options, path: Path, say: Say = silent) -> Profile:
    """Profile a case.

    Args:
        case: One of ``PROBLEMS``.
        options: Sizes.
        path: File for torch.profiler's trace, which Perfetto and chrome://tracing open; on a ring, rank 0's trace.
        say: Function that receives progress messages.
    Raises:
        UnsupportedError: The case is unknown, the device of a ring is not the CPU, or the file cannot be written.
    """
    if case not in PROBLEMS:
        raise UnsupportedError("case", repr(case), f"one of {', '.join(PROBLEMS)}", "Name one of them.")
    problem = options.of(PROBLEMS[case])
    if options.quick and options.tokens is None:
        problem = dataclasses.replace(problem, tokens=problem.tokens // 8)
    say(f"profile of {problem.name}, {problem.tokens:,} tokens")
    try:
        path.touch()
    except OSError as error:
        got = f"{path}: {error.strerror}"
        raise UnsupportedError("--out", got, "a file that can be written", "Name another.") from None
    if case != "ring":
        return _profile(problem, functools.partial(rw.attention, pattern=problem.pattern), path)
    if torch.device(problem.device).type != "cpu":
        raise UnsupportedError("--device", problem.device, "cpu for a ring", "Leave it out.")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "problem").write_bytes(pickle.dumps((problem, path.resolve())))
        words = torchrun(2, "-m", "ringweave_lab.profile.profile", folder)
        run(words, threads=1, until=time.monotonic() + _SECONDS)
        first, later = pickle.loads((Path(folder) / "seconds").read_bytes())
        return Profile(problem, first, later)


def _profile(
    problem: Problem, attend: Callable[..., torch.Tensor], path: Path | None, shard: Callable[[Any], Any] = lambda x: x
) -> Profile:
    inputs = Sample(*map(shard, problem.inputs()))
    call = Built(attend, problem.pattern, "").call(inputs, BOTH)
    plan_cache.clear()
    activities = [ProfilerActivity.CPU]
    if torch.device(problem.device).type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with _marked(problem.device), profile(activities=activities) as prof:
        for _ in range(1 + _LATER):
            with record_function(_CALL):
                call()
                _settle(problem.device)
    if path is not None:
        prof.export_chrome_trace(str(path))
    calls = _parts(prof.events() or [])
    later = {part: statistics.median(each[part] for each in calls[1:]) for part in PARTS}
    return Profile(problem, calls[0], later)


def _settle(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _marked(device: str) -> Iterator[None]:
    """Mark the parts of ringweave in profiles, and wait for GPU kernels so that their time is counted as theirs."""

    def mark(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def marked(*args: Any, **named: Any) -> Any:
            with record_function(_MARK + part):
                result = function(*args, **named)
                if part == "kernel":
                    _settle(device)
                return result

        return marked

    backends = {
        name: dataclasses.replace(
            each,
            prepare=None,
            forward=mark("kernel", each.forward),
            backward=None if each.backward is None else mark("kernel", each.backward),
        )
        for name, each in BACKENDS.items()
    }
    places: Sequence[tuple[str, Any, str]] = (
        ("plan", PlanCache, "get"), ("plan", program, "branches"), ("merge", cpu, "merge_into"),
        ("merge", api, "with_sinks"), ("exchange", Transport, "agree"),
        ("exchange", Transport, "exchange"), ("exchange", transport._Pending, "wait"),
    )  # fmt: skip
    with ExitStack() as stack:
        stack.enter_context(patch.dict(BACKENDS, backends))
        for part, owner, name in places:
            stack.enter_context(patch.object(owner, name, mark(part, getattr(owner, name))))
        yield


def _parts(events: Sequence[Any]) -> list[dict[str, float]]:
    """Return the seconds of each call by part; time in nested parts counts only for the innermost part."""
    marks = [(each.time_range.start, each.time_range.end, each.name.removeprefix(_MARK)) for each in events
             if each.name.startswith(_MARK)]  # fmt: skip
    calls: list[dict[str, float]] = []
    for begin, end, _ in sorted(mark for mark in marks if mark[2] == "call"):
        inside = [mark for mark in marks if begin <= mark[0] and mark[1] <= end and mark[2] != "call"]
        moments = sorted({begin, end, *(place for mark in inside for place in mark[:2])})
        found = dict.fromkeys(PARTS, 0.0)
        for a, b in itertools.pairwise(moments):
            over = [mark for mark in inside if mark[0] <= a and b <= mark[1]]
            # the innermost part is the one that began last
            part = max(over)[2] if over else "Python"
            found[part] += (b - a) / 1e6
        calls.append(found)
    return calls


def main() -> None:
    """Profile one of the ranks that torchrun started."""
    folder = Path(sys.argv[1])
    problem, path = pickle.loads((folder / "problem").read_bytes())
    dist.init_process_group("gloo", timeout=timedelta(seconds=_SECONDS))
    torch.set_num_threads(1)
    carrier = Transport(dist.group.WORLD, deadline=_SECONDS, opening=_SECONDS)
    ctx = ContextParallel(carrier, problem.pattern, problem.tokens, heads=(problem.heads, problem.key_heads))
    attend = functools.partial(rw.attention, pattern=problem.pattern, context=ctx)
    found = _profile(problem, attend, path if ctx.rank == 0 else None, lambda x: ctx.shard(x, 2))
    if ctx.rank == 0:
        (folder / "seconds").write_bytes(pickle.dumps((found.first, found.later)))
    carrier.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
