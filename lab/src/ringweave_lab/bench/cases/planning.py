"""The case ``planning``: plans that no cache has, over lengths and over many patterns."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

import ringweave as rw
from ringweave import cache
from ringweave.plan import BlockPlan
from ringweave.plan.from_pattern import build
from ringweave.reports.cells import picture

from ...tune.measure import Timing, interleaved, on_one_thread
from ...tune.problem import Problem, RandomBlocks
from ...tune.session import Say
from ..record import Measuring, Options, PlanCost, Target
from .attention import window_with_sinks

_TILE = 128
_SECONDS = 10.0  # of a plan, after which no round starts
#: Bounds in milliseconds on one thread, by workload and tokens.
_GOALS = {
    ("1,000 documents", 2**16): 6.0,
    ("10,000 documents", 2**16): 8.0,
    ("(window 512 | 10,000 documents) & ~(1,000 documents)", 2**16): 12.0,
    ("500 random sinks & window 2,048", 2**20): 10.0,
}
#: Patterns that are also planned at 1M tokens by default.
_LONG = ("(window 1,024 | 64 sinks) & causal", "500 random sinks & window 2,048")


@dataclass(frozen=True)
class _Cold:
    """A plan to time.

    Attributes:
        name: Name of the workload.
        make: Function that returns the pattern; an equal one each time, since a pattern keeps values that it computed.
        tokens: Number of keys, and of queries of a square plan.
        batch: Number of batch elements.
        tile: Number of queries and of keys in a tile.
        step: Whether the plan has the last query only, as in a decoding step.
    """

    name: str
    make: Callable[[], rw.Pattern]
    tokens: int
    batch: int = 1
    tile: tuple[int, int] = (_TILE, _TILE)
    step: bool = False

    def cost(self, options: Options, say: Say) -> PlanCost:
        """Time plans of a pattern that was made anew, without any cache."""
        say(f"planning {self.name}, {self.tokens:,} tokens")
        queries, offset = (1, self.tokens - 1) if self.step else (self.tokens, 0)
        made: list[rw.Pattern] = []
        built: list[BlockPlan] = []

        def new() -> None:
            cache.trim_all()
            built.clear()
            made[:] = [self.make()]

        def plan() -> None:
            sizes: dict[str, Any] = {"batch": self.batch, "q_offset": offset, "tile": self.tile}
            built[:] = [build(made[0], queries, self.tokens, **sizes, device=options.device)]

        # in turn: each plan follows its pattern, which is made before the clock starts
        timings = interleaved(
            {"new": new, "plan": plan}, rounds=options.rounds or 5, device=options.device, budget=_SECONDS,
            timer=on_one_thread(options.device),
        )  # fmt: skip
        return PlanCost(self.name, repr(made[0]), self.tokens, built[0].nnz, timings["plan"], built[0].nbytes)


def documents(tokens: int, count: int, seed: int = 0) -> list[int]:
    """Return the lengths of documents that are cut at random tokens."""
    cuts = np.sort(np.random.default_rng(seed).choice(tokens - 1, count - 1, replace=False)) + 1
    return [int(length) for length in np.diff(cuts, prepend=0, append=tokens)]


def _flat(n: int) -> Iterator[_Cold]:
    """Return plans of n tokens; below 64K tokens with fewer documents and chosen tokens."""
    few, many, some = min(1000, n // 64), min(10_000, n // 6), min(500, n // 128)

    def docs(count: int, seed: int = 0) -> rw.Documents:
        return rw.Documents(documents(n, count, seed))

    def chosen() -> list[int]:
        return sorted(random.Random(0).sample(range(n), some))

    window, presets = rw.SlidingWindow, rw.patterns
    made: dict[str, Callable[[], rw.Pattern]] = {
        "(window 1,024 | 64 sinks) & causal": lambda: (window(1024) | rw.Sinks(64)) & rw.Causal(),
        "segments of 4,100": lambda: rw.Segments(4100),
        "segments of 16": lambda: rw.Segments(16),
        f"{few:,} documents": lambda: docs(few),
        f"{many:,} documents": lambda: docs(many),
        f"{many:,} documents & window 512": lambda: docs(many) & window(512),
        f"(window | 4 global) within {few:,} documents": lambda: (window(64, 64) | rw.Global(4)).within(docs(few)),
        f"(window 512 | {many:,} documents) & ~({few:,} documents)":
            lambda: (window(512) | docs(many)) & ~docs(few, 1),
        f"window 4,096 & ~({many:,} documents)": lambda: window(4096) & ~docs(many),
        f"{some} random sinks & window 2,048": lambda: rw.Sinks(chosen()) & window(2048),
        f"{some} random global | window 256": lambda: window(256, 256) | rw.Global(chosen()),
        "dilated 64, rate 16": lambda: rw.Dilated(64, 16),
        "stride 4,096 & window 65,536": lambda: rw.Strided(4096) & window(65536),
        "~(stride 4,096) & window 2,048": lambda: ~rw.Strided(4096) & window(2048),
        "stride 61 & window 16,384": lambda: rw.Strided(61) & window(16384),
        "neighborhood 255, dilation 8": lambda: presets.Neighborhood(min(255, n // 16), 8, tokens=n),
        "sparse transformer & window 16,384": lambda: presets.sparse_transformer_fixed(128, 32) & window(16384),
        "bigbird": lambda: presets.bigbird(n, window=192, global_tokens=64, random=3, block_size=64),
        "random blocks of 96": lambda: presets.random_blocks(n, max(1 / 256, 120 / n), block_size=96),
    }  # fmt: skip
    for name, make in made.items():
        yield _Cold(name, make, n)


def _grids() -> Iterator[_Cold]:
    made: tuple[tuple[str, tuple[int, ...], Callable[[rw.Grid], rw.Pattern]], ...] = (
        ("7", (64, 64), lambda grid: rw.GridNeighborhood(grid, 7)),
        ("13, dilation 2", (64, 64), lambda grid: rw.GridNeighborhood(grid, 13, 2)),
        ("windows of 8, shift 4", (64, 64), lambda grid: rw.GridWindows(grid, 8, shift=4)),
        ("31", (256, 256), lambda grid: rw.GridNeighborhood(grid, 31)),
        ("8 x 7 x 7", (16, 32, 32), lambda grid: rw.GridNeighborhood(grid, (8, 7, 7))),
        ("7 x 9 x 9", (30, 45, 80), lambda grid: rw.GridNeighborhood(grid, (7, 9, 9))),
    )
    for name, shape, make in made:
        grid = rw.Grid(shape)
        side = make(grid).tile_size or _TILE
        name = f"grid of {' x '.join(map(str, shape))}: {name}"
        yield _Cold(name, partial(make, grid), grid.tokens, tile=(side, side))


def _batches(batch: int, n: int = 8192) -> Iterator[_Cold]:
    def lengths() -> rw.KeyPadding:
        return rw.KeyPadding(torch.tensor([n - 37 * i for i in range(batch)]))

    def ids(count: int, tokens: int = n, seed: int = 0) -> torch.Tensor:
        return torch.repeat_interleave(torch.arange(count), torch.tensor(documents(tokens, count, seed)))

    window = rw.SlidingWindow(512)
    packed = [
        ("causal & lengths", lambda: rw.Causal() & lengths()),
        ("50 documents by ids & window 512",
         lambda: rw.Documents(ids=torch.stack([ids(50, seed=i) for i in range(batch)])) & window),
        ("(window 512 | 4 global) within lengths", lambda: (window | rw.Global(4)).within(lengths())),
    ]  # fmt: skip
    for name, make in packed:
        yield _Cold(f"{name}, batch {batch}", make, n, batch)
    pieces = torch.cat([ids(40, n // 2), ids(40, n // 2, 1)])
    yield _Cold("40 documents by ids, in two pieces each", lambda: rw.Documents(ids=pieces), n)


def _small(n: int = 4096) -> Iterator[_Cold]:
    yield _Cold("causal", lambda: rw.Causal(), n)
    yield _Cold("8 documents & causal", lambda: rw.Documents(documents(n, 8)) & rw.Causal(), n)
    yield _Cold("bigbird", lambda: rw.patterns.bigbird(n, window=192, global_tokens=64, random=3, block_size=64), n)


def _rows(n: int = 2**17) -> Iterator[_Cold]:
    sinks = sorted(random.Random(0).sample(range(n), 500))
    window = rw.SlidingWindow(1024)
    for name, make in (
        ("(window 4,096 | 64 sinks) & causal", lambda: (rw.SlidingWindow(4096) | rw.Sinks(64)) & rw.Causal()),
        ("sparse transformer", lambda: rw.patterns.sparse_transformer_fixed(128, 32)),
        ("500 random sinks | window 1,024", lambda: rw.Sinks(sinks) | window),
        ("1,000 documents & window 1,024", lambda: rw.Documents(documents(n, 1000)) & window),
    ):
        yield _Cold(f"a step: {name}", make, n, tile=(16, _TILE), step=True)


def measure(options: Options, say: Say) -> Measuring:
    """Time plans that no cache has: a window at many lengths, a random table, and many patterns."""
    lengths = (
        [options.tokens] if options.tokens else [2**n for n in (range(12, 15) if options.quick else range(14, 21))]
    )
    table = options.tokens or (4096 if options.quick else 65536)
    linear: list[PlanCost] = []
    for n in lengths:
        cost = _Cold("window + sinks", lambda: window_with_sinks(4096, 64), n).cost(options, say)
        linear.append(cost)
        yield cost
        if n == 2**20:
            yield _target("window + sinks", n, cost.timing, 50.0)
    drawn = Problem("random 10%", RandomBlocks(0.1), table)
    yield _Cold(drawn.name, lambda: RandomBlocks(0.1).pattern(table), table).cost(options, say)
    for cold in _many(options):
        cost = cold.cost(options, say)
        yield cost
        goal = _GOALS.get((cold.name, cold.tokens))
        if goal is not None:
            # goals of one thread
            yield _target(cold.name, cold.tokens, cost.timing, goal if torch.get_num_threads() == 1 else None)
    if not options.sized:
        yield from _pictures(options, say)
    first, last = linear[0], linear[-1]
    return (
        f"From {first.tokens:,} to {last.tokens:,} tokens: {last.tiles / first.tiles:.1f} x the tiles, "
        f"{last.timing.median / first.timing.median:.1f} x the time, {last.nbytes / first.nbytes:.1f} x the bytes; "
        f"N squared would be {(last.tokens / first.tokens) ** 2:.0f} x."
    )


def _many(options: Options) -> Iterator[_Cold]:
    """Return the plans of many patterns: at one length, some or with ``full`` all at 1M tokens, others at their own."""
    yield from _flat(options.tokens or (4096 if options.quick else 2**16))
    if not options.sized:
        for cold in _flat(2**20):
            if options.full or cold.name in _LONG:
                yield cold
    if not options.tokens:
        yield from _grids()
        yield from _batches(4 if options.quick else 64)
        yield from _small()
        yield from _rows()


def _target(name: str, tokens: int, timing: Timing, bound: float | None) -> Target:
    return Target(f"cold plan of {name}", f"{tokens:,} tokens", timing.median * 1e3, bound, False, "ms")


def _pictures(options: Options, say: Say) -> Iterator[Target]:
    n = 2**20
    for name, pattern in (
        ("(window 1,024 | 64 sinks) & causal", (rw.SlidingWindow(1024) | rw.Sinks(64)) & rw.Causal()),
        ("~(stride 8) & causal", ~rw.Strided(8) & rw.Causal()),
    ):
        say(f"planning: picture of {name}")

        def draw(pattern: rw.Pattern = pattern) -> object:
            cache.trim_all()
            return picture(pattern, n)

        timing = interleaved({"picture": draw}, rounds=options.rounds or 5, timer=on_one_thread("cpu"))["picture"]
        yield Target(f"picture of {name}", f"{n:,} tokens", timing.median * 1e3, None, False, "ms")
