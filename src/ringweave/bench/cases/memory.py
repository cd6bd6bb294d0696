"""The case ``memory``: peaks of a window at great lengths; scratch that is reused, beside plain allocation."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor

import ringweave as rw

from ...memory.workspace import scratch
from ..measure import interleaved, ratio
from ..record import Measuring, Options, Say, Target
from . import attention

_MIXED, _ALIVE = 10_000, 64
_KIB = 2**10
# scratch of calls of several kinds, in KiB: taken side by side, and given back together
_CALLS = ((8192, 3072, 3100), (6000, 2048, 2048), (8192, 5000, 5000, 9000), (1024, 333), (7000, 7000, 7000))

_Take = Callable[[int], Tensor]


def measure(options: Options, say: Say) -> Measuring:
    """Measure peaks; then, at the case's own sizes, loops of calls and random replacement of scratch, and gather's."""
    conclusion = yield from attention.memory(options, say)
    if options.tokens or options.heads or options.dtype or options.device != "cpu":
        return conclusion
    count = 1000 if options.quick else _MIXED
    say(f"memory: scratch of {count} calls and of {count} tensors replaced at random")
    size = f"{count} calls"
    for name, run in (("loops of calls", _loops), ("replaced at random", _replaced)):
        space = rw.memory.Workspace()
        unused: list[float] = []

        def take(nbytes: int, space: rw.memory.Workspace = space, unused: list[float] = unused) -> Tensor:
            taken = space.take((nbytes,), torch.uint8)
            now = space.statistics()
            unused.append(1 - now.asked / now.held)
            return taken

        run(take, count)
        now = space.statistics()
        yield Target(f"scratch reused, {name}", size, now.reused / now.taken, 0.95, True, "%")
        # all that a call takes is in use at its end alone
        bound = 0.25 if run is _replaced and not options.quick else None
        yield Target(f"held but unused, {name}", size, sum(unused) / len(unused), bound, False, "%")
    space = rw.memory.Workspace()
    calls: dict[str, Callable[[], object]] = {
        "workspace": lambda: _loops(lambda nbytes: space.take((nbytes,), torch.uint8).fill_(0), 10),
        "plain": lambda: _loops(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8).fill_(0), 10),
    }
    timings = interleaved(calls, rounds=options.rounds or 5, device="cpu")
    cost = ratio(timings["workspace"], timings["plain"]).medians
    yield Target("time of scratch that is written once, over plain allocation", "10 calls", cost, None, False)
    made = _made_by_gather(3 if options.quick else 20)
    yield Target("new buffers of gather after warm-up", "forward + backward", float(made), 0.0, False, "buffers")
    return f"{conclusion} Scratch takes {cost:.2f} x the time of plain allocation."


def _loops(take: _Take, count: int) -> None:
    for i in range(count):
        # held together, and given back together
        _ = [take(each * _KIB) for each in _CALLS[i % len(_CALLS)]]
        del _


def _replaced(take: _Take, count: int) -> None:
    draw = random.Random(0)
    alive: list[Tensor] = []
    for _ in range(count):
        if len(alive) == _ALIVE:
            alive.pop(draw.randrange(_ALIVE))
        alive.append(take(int(2 ** draw.uniform(10, 22))))


def _made_by_gather(steps: int) -> int:
    """Count the buffers that steps of training allocate after three of them."""
    q, k, v = (torch.randn(1, 2, 1000, 32, requires_grad=True) for _ in range(3))

    def step() -> None:
        for pattern in (rw.SlidingWindow(100), rw.LongNet([128, 512], [1, 4]), rw.Causal()):
            rw.attention(q, k, v, pattern, backend="gather").sum().backward()

    for _ in range(3):
        step()
    before = scratch.statistics()
    for _ in range(steps):
        step()
    now = scratch.statistics()
    return (now.taken - now.reused) - (before.taken - before.reused)
