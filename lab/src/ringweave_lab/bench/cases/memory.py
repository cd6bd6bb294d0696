"""The case ``memory``: peaks of long sequences, reuse of scratch, and memory of long runs."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

import ringweave as rw
from ringweave.memory.workspace import scratch

from ...tune.measure import interleaved, ratio
from ...tune.session import Say
from .. import resident
from ..launched import LaunchError
from ..record import Measuring, Options, Target
from . import attention

_MIXED = 10_000
# numbers of live tensors; with few, their sum varies by a fifth, and the held memory follows it late
_ALIVE = (64, 256)
# largest unused share of the held memory
_UNUSED = {"64 replaced at random": 0.6, "256 replaced at random": 0.35}
_KIB = 2**10
# kind of a separate process, steps, and steps of a quick run
_STEADY = (("training", 500, 0), ("pages", 5000, 0), ("joined", 5000, 100))
# kind, tokens, and the bound on resident GiB
_LONG = (("mapped", 2**22, 8.0), ("long", 2**20, 6.0))
_WORDS = {
    "training": "steps of training", "pages": "steps of decoding in pages",
    "joined": "steps of decoding over a tensor that grows, without it", "mapped": "forward, keys and values in files",
    "long": "forward + backward",
}  # fmt: skip
# scratch of several kinds of calls in KiB, taken together and returned together
_CALLS = ((8192, 3072, 3100), (6000, 2048, 2048), (8192, 5000, 5000, 9000), (1024, 333), (7000, 7000, 7000))

_Take = Callable[[int], Tensor]


def measure(options: Options, say: Say) -> Measuring:
    """Measure peaks and, at the case's sizes, loops of calls and random replacement of scratch."""
    conclusion = yield from attention.memory(options, say)
    if options.tokens or options.heads or options.dtype or options.device != "cpu":
        return conclusion
    count = 1000 if options.quick else _MIXED
    say(f"memory: scratch of {count} calls and of {count} tensors replaced at random")
    size = f"{count} calls"
    kinds: list[tuple[str, Callable[[_Take, int], None]]] = [("loops of calls", _loops)]
    kinds += [(f"{alive} replaced at random", partial(_replaced, alive=alive)) for alive in _ALIVE]
    for name, run in kinds:
        space = rw.memory.Workspace()
        unused: list[float] = []

        def take(nbytes: int, space: rw.memory.Workspace = space, unused: list[float] = unused) -> Tensor:
            taken = space.take((nbytes,), torch.uint8)
            now = space.statistics()
            unused.append(1 - now.asked / now.held)
            return taken

        run(take, count)
        now = space.statistics()
        # the first buffers are new, which are many among few calls
        least = 0.95 if run is _loops or not options.quick else None
        yield Target(f"scratch reused, {name}", size, now.reused / now.taken, least, True, "%")
        # a call uses all its scratch only at its end; few tensors of random sizes leave buffers of other classes idle
        bound = None if options.quick else _UNUSED.get(name)
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
    yield Target("new buffers of dense_batched after warm-up", "forward + backward", float(made), 0.0, False, "buffers")
    yield from _processes(options, say)
    return f"{conclusion} Scratch takes {cost:.2f} x the time of plain allocation."


def _loops(take: _Take, count: int) -> None:
    for i in range(count):
        # held together and returned together
        _ = [take(each * _KIB) for each in _CALLS[i % len(_CALLS)]]
        del _


def _replaced(take: _Take, count: int, alive: int) -> None:
    draw = random.Random(0)
    kept: list[Tensor] = []
    for _ in range(count):
        if len(kept) == alive:
            kept.pop(draw.randrange(alive))
        kept.append(take(int(2 ** draw.uniform(10, 22))))


def _processes(options: Options, say: Say) -> Iterator[Target]:
    """Return the growth and the peak of separate processes' resident memory."""
    for kind, steps, few in _STEADY:
        count = few if options.quick else steps
        if not count:
            continue
        say(f"memory: {count} {_WORDS[kind]}")
        figure, reason = _tried(partial(resident.growth, kind, count))
        bound = None if options.quick else 0.01
        size = f"{count} {_WORDS[kind]}"
        yield Target("resident memory grows by", size, figure, bound, False, "%", reason)
    for kind, tokens, most in () if options.quick else _LONG:
        say(f"memory: {tokens:,} tokens, {_WORDS[kind]}")
        figure, reason = _tried(partial(resident.peak, kind, tokens))
        size = f"{tokens:,} tokens, {_WORDS[kind]}"
        yield Target("most that is resident", size, figure, most, False, "GiB", reason)


def _tried(measure: Callable[[], float]) -> tuple[float | None, str | None]:
    if sys.platform != "linux":
        return None, "the system does not tell what is resident"
    try:
        return measure(), None
    except LaunchError as error:
        return None, str(error)


def _made_by_gather(steps: int) -> int:
    """Return the number of buffers that training allocates after its first three steps."""
    q, k, v = (torch.randn(1, 2, 1000, 32, requires_grad=True) for _ in range(3))

    def step() -> None:
        for pattern in (rw.SlidingWindow(100), rw.LongNet([128, 512], [1, 4]), rw.Causal()):
            rw.attention(q, k, v, pattern, backend="dense_batched").sum().backward()

    for _ in range(3):
        step()
    before = scratch.statistics()
    for _ in range(steps):
        step()
    now = scratch.statistics()
    return (now.taken - now.reused) - (before.taken - before.reused)
