"""Ctrl-C at any line of the modules that hold locks: no lock stays held, and caches and scratch stay sound."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import ringweave as rw
from ringweave.cache import DECODE_PLANS, PATTERNS, PLANS, PROGRAMS
from ringweave.memory.workspace import scratch

from ..failing import executed, fails

FILES = tuple(
    f"ringweave/{name}" for name in ("cache.py", "plan/cached_plans.py", "program_cache.py", "memory/workspace.py")
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
    seen = executed(call, FILES)
    # each line once: when it is executed first
    for number in sorted({at: number for number, at in reversed([*enumerate(seen, 1)])}.values()):
        at = seen[number - 1]
        fresh()
        ended += fails(call, number, FILES)
        assert torch.equal(call(), want), at
        for cache in (PROGRAMS, PLANS, DECODE_PLANS, PATTERNS):
            assert not cache._lock.locked(), at
            assert cache.nbytes == sum(each.nbytes for each in cache._entries.values()), at
        assert not scratch._lock._is_owned(), at  # an RLock has no locked() before Python 3.14
        assert scratch.statistics().asked == 0, at
    assert ended > 5
