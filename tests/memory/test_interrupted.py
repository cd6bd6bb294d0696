"""Ctrl-C at any line of the modules that hold locks: no lock stays held, and caches and scratch stay sound."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

import ringweave as rw
from ringweave.cache import DECODE_PLANS, PATTERNS, PLANS, PROGRAMS
from ringweave.memory.workspace import scratch

FILES = tuple(
    f"ringweave/{name}"
    for name in ("cache.py", "plan/cached_plans.py", "plan/decode_plans.py", "program_cache.py", "memory/workspace.py")
)


def calls() -> dict[str, Callable[[], Tensor]]:
    """Return calls that plan, decode with a cache, and take scratch."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 150, 16).unbind()
    step, steps = q[:, :, :1], rw.SlidingWindow(40) & rw.Causal()
    return {
        "scratch": lambda: rw.attention(q, k, v, rw.SlidingWindow(9), backend="dense_batched"),
        "step": lambda: rw.attention(step, k, v, steps, q_offset=149),
        "bounds": lambda: rw.attention(step, k, v, rw.Causal(), q_offset=torch.tensor([149])),
        "function": lambda: rw.attention(q, k, v, rw.TokenMask(lambda b, h, i, j: i >= j)),
    }


CALLS = calls()


def lines(call: Callable[[], Tensor]) -> list[tuple[str, int]]:
    """Return the lines of the modules that a call runs, each once."""
    seen: dict[tuple[str, int], None] = {}

    def local(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            seen[frame.f_code.co_filename, frame.f_lineno] = None
        return local

    with tracing(local):
        call()
    return list(seen)


def interrupted(call: Callable[[], Tensor], at: tuple[str, int]) -> bool:
    """Raise KeyboardInterrupt at a line during a call; return whether the call ended with it."""

    def local(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line" and (frame.f_code.co_filename, frame.f_lineno) == at and not finalizing(frame):
            raise KeyboardInterrupt
        return local

    try:
        with tracing(local):
            call()
    except KeyboardInterrupt:
        return True
    return False


def finalizing(frame: FrameType | None) -> bool:
    """Return whether a finalizer runs: Python prints its exceptions, and no call ends with them."""
    while frame is not None:
        if frame.f_code.co_name in ("_return", "_on_owner_gone"):
            return True
        frame = frame.f_back
    return False


class tracing:  # noqa: N801
    """Trace the lines of the modules in a block."""

    def __init__(self, local: Callable[[FrameType, str, Any], Any]):
        self.local, self.before = local, sys.gettrace()

    def __enter__(self) -> None:
        sys.settrace(lambda frame, *_: self.local if frame.f_code.co_filename.endswith(FILES) else None)

    def __exit__(self, *_: object) -> None:
        sys.settrace(self.before)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("known", [False, True], ids=["first", "again"])
def test_an_interrupted_call_leaves_all_as_it_should_be(name: str, known: bool) -> None:
    call = CALLS[name]

    def fresh() -> None:
        rw.memory.trim()
        if known:
            call()

    fresh()
    want, ended = call(), 0
    fresh()
    for at in lines(call):
        fresh()
        ended += interrupted(call, at)
        assert torch.equal(call(), want), at
        for cache in (PROGRAMS, PLANS, DECODE_PLANS, PATTERNS):
            assert not cache._lock.locked(), at
            assert cache.nbytes == sum(each.nbytes for each in cache._entries.values()), at
        assert not scratch._lock._is_owned(), at  # an RLock has no locked() before Python 3.14
        assert scratch.statistics().asked == 0, at
    assert ended > 5
