"""Attention in a signal handler that interrupts attention at any point: it neither deadlocks nor corrupts state."""

from __future__ import annotations

import faulthandler
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

import ringweave as rw
from ringweave.memory.workspace import scratch
from ringweave.plan.cache import plan_cache

# modules that hold locks
FILES = ("recent.py", "plan/cache.py", "plan/decode_plans.py", "memory/workspace.py", "memory/pressure.py")


def calls() -> list[Callable[[], Tensor]]:
    """Return calls that plan, decode with a cache, and take scratch."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 150, 16).unbind()
    step = q[:, :, :1]
    return [
        lambda: rw.attention(q, k, v, rw.SlidingWindow(9), backend="dense_batched"),
        lambda: rw.attention(step, k, v, rw.SlidingWindow(40) & rw.Causal(), q_offset=149),
        lambda: rw.attention(step, k, v, rw.Causal(), q_offset=torch.tensor([149])),
        lambda: rw.attention(q, k, v, rw.TokenMask(lambda b, h, i, j: i >= j)),
    ]


def every_line() -> int:
    """Call a function twice at each line of modules with locks, as a handler would; return the number of calls."""
    every, lines, seen = calls(), 0, Counter[tuple[str, int]]()
    wanted = [call() for call in every]

    def handler(number: int) -> None:
        for at in (number % len(every), (number + 1) % len(every)):
            assert torch.equal(every[at](), wanted[at])
        assert plan_cache.statistics().plans >= 0
        assert scratch.statistics().taken > 0
        if number % 5 == 0:
            rw.memory.on_trim(lambda: 0)
            rw.memory.trim()

    def local(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        seen[frame.f_code.co_filename, frame.f_lineno] += event == "line"
        if event == "line" and seen[frame.f_code.co_filename, frame.f_lineno] <= 2:
            lines += 1
            handler(lines)
        return local

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        return local if frame.f_code.co_filename.endswith(FILES) else None

    for turn in range(2):
        rw.memory.trim()
        for at, call in enumerate(every):
            sys.settrace(trace)
            try:
                found = call()
                kept = scratch.take((3000,), torch.uint8)
                del kept
                if turn:
                    rw.memory.trim()
            finally:
                sys.settrace(None)
            assert torch.equal(found, wanted[at])
    now = scratch.statistics()
    assert now.asked == 0, now
    assert plan_cache._kept.nbytes == sum(each.nbytes for each in plan_cache._kept._entries.values())
    return lines


def timer(seconds: float) -> int:
    """Call a function in the handler of a timer signal while calls run; return the number of signals."""
    every, came, inside = calls(), 0, False
    wanted = [call() for call in every]

    def handler(*_: object) -> None:
        nonlocal came, inside
        if not inside:
            inside = True
            came += 1
            assert torch.equal(every[came % len(every)](), wanted[came % len(every)])
            inside = False

    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    until = time.monotonic() + seconds
    try:
        while time.monotonic() < until:
            rw.memory.trim()
            for call, want in zip(every, wanted, strict=True):
                assert torch.equal(call(), want)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return came


@pytest.mark.skipif(sys.platform == "win32", reason="no timers there")
@pytest.mark.parametrize("job", ["every_line()", "timer(2.0)"])
def test_attention_in_a_handler(job: str) -> None:
    code = f"from tests.memory import test_signals; print(test_signals.limited() or test_signals.{job})"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=360)
    assert found.returncode == 0, found.stderr
    assert int(found.stdout) > 20


def limited() -> None:
    """Make a hanging process print where it hangs, and end it."""
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(300, exit=True)
