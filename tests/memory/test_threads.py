"""Concurrent use of scratch, plans and trim: no bytes are handed out twice, and no thread gets another's plan or result.

    python -m tests.memory.test_threads 60

is the longer run of ``make soak``.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor

import ringweave as rw
from ringweave.memory import Workspace
from ringweave.memory.workspace import scratch

THREADS = 32
WINDOWS = range(5, 200, 13)


class Hammer:
    """The actions that threads repeat; each returns whether its data was intact."""

    def __init__(self) -> None:
        self.space = Workspace()
        self.q, self.k, self.v = torch.randn(3, 1, 2, 200, 16).unbind()
        self.plans = {n: rw.plan(rw.SlidingWindow(n), 1000, tile=(32, 32)) for n in WINDOWS}
        self.outs = {n: self._attended(n) for n in WINDOWS}

    def _attended(self, window: int) -> Tensor:
        return rw.attention(self.q, self.k, self.v, rw.SlidingWindow(window), backend="dense_batched")

    def scratch(self, number: int, draw: random.Random, kept: list[Tensor]) -> bool:
        """Fill a scratch tensor with a number, and check it before releasing the tensor."""
        kept.append(self.space.take((draw.choice((100, 1000, 3000, 300_000)),), torch.int32).fill_(number))
        return len(kept) <= 4 or bool((kept.pop(draw.randrange(5)) == number).all())

    def plan(self, number: int, draw: random.Random, kept: list[Tensor]) -> bool:
        """Request plans, and compute attention with them and with the shared scratch."""
        n = draw.choice(WINDOWS)
        found, want = rw.plan(rw.SlidingWindow(n), 1000, tile=(32, 32)), self.plans[n]
        same = torch.equal(found.row_ptr, want.row_ptr) and torch.equal(found.col, want.col)
        return same and torch.equal(self._attended(n), self.outs[n])

    def trim(self, number: int, draw: random.Random, kept: list[Tensor]) -> bool:
        """Register a callback, and trim the workspace or everything."""
        calls: list[int] = []

        def callback() -> int:
            calls.append(number)
            return 7

        rw.memory.on_trim(callback)
        served = self.space.trim() >= 0 if draw.random() < 0.8 else rw.memory.trim() >= 7 and bool(calls)
        time.sleep(0.01)
        return served and set(calls) <= {number} and rw.memory.pressure().total > 0


def hammer(seconds: float) -> dict[str, int]:
    """Run all threads for a number of seconds; return how often each action ran."""
    state, until = Hammer(), time.monotonic() + seconds
    kinds: list[Callable[[int, random.Random, list[Tensor]], bool]] = [
        *(state.scratch,) * 20,
        *(state.plan,) * 8,
        *(state.trim,) * 4,
    ]
    done, wrong = dict.fromkeys(("scratch", "plan", "trim"), 0), list[str]()
    lock = threading.Lock()

    def work(number: int) -> None:
        kind, draw, kept, count = kinds[number], random.Random(number), list[Tensor](), 0
        try:
            while time.monotonic() < until or not count:
                count += 1
                if not kind(number, draw, kept):
                    wrong.append(f"{kind.__name__} of thread {number}, time {count}")
                    return
        except BaseException as error:
            wrong.append(f"{kind.__name__} of thread {number}: {error!r}")
            raise
        finally:
            with lock:
                done[kind.__name__] += count

    workers = [threading.Thread(target=work, args=(i,)) for i in range(THREADS)]
    for each in workers:
        each.start()
    for each in workers:
        each.join()
    assert not wrong, wrong
    now = state.space.statistics()
    assert now.taken == done["scratch"]
    assert now.asked == 0
    assert now.idle == now.held
    assert state.space.trim() == now.held
    # the shared scratch is not in use either
    assert scratch.statistics().asked == 0
    return done


def test_threads() -> None:
    assert min(hammer(3.0).values()) > 0


if __name__ == "__main__":
    print(hammer(float(sys.argv[1])))
