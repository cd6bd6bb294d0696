"""The case ``pages``: figures that pages of the documentation state beside what they explain.

Tables of figures have cases of their own. ``lab/tests/bench/test_claims.py`` compares the pages with these lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import ringweave as rw
from ringweave.integrations.flex_attention import flex_attention

from ...tune.measure import Timing, interleaved, ratio
from ...tune.session import Say
from ..record import Measuring, Options, Target
from .planning import documents

Calls = dict[str, Callable[[], object]]


def measure(options: Options, say: Say) -> Measuring:
    """Time choices of blocks, plans of documents, what functions cost, and the fast order of sums."""
    for part in (_rows_of_one_query, _bounds, _documents, _functions, _contents, _fast_order):
        say(f"pages: {part.__name__.strip('_').replace('_', ' ')}")
        yield from part(options)
    return "Each figure is one that a page of the documentation states."


def _timed(calls: Calls, options: Options, rounds: int = 9) -> dict[str, Timing]:
    return interleaved(calls, rounds=options.rounds or (3 if options.quick else rounds), device="cpu")


def _drawn(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, *shape, generator=generator) for shape in shapes]


def _rows_of_one_query(options: Options) -> Iterator[Target]:
    """Compare a choice of blocks for each query with one for each block of 64 queries."""
    tokens = options.tokens or (512 if options.quick else 4096)
    q, k, v = _drawn(*[(4, tokens, 64)] * 3)

    def attend(rows: int) -> Tensor:
        return rw.attention(q, k, v, rw.adaptive.select(q, k, top_k=8, block_size=(rows, 64)) & rw.Causal())

    times = _timed({str(rows): partial(attend, rows) for rows in (1, 64)}, options, 5)
    what = "select and attend 8 blocks of 64 keys: rows of one query over rows of 64"
    yield Target(what, f"{tokens:,} tokens, 4 heads of 64", ratio(times["1"], times["64"]).medians, None, False)


def _bounds(options: Options) -> Iterator[Target]:
    """Compare decoding steps that choose blocks by their bounds with a step that attends all keys."""
    tokens = options.tokens or (1024 if options.quick else 65536)
    q, k, v = _drawn((32, 1, 128), (8, tokens, 128), (8, tokens, 128))
    bounds, last = rw.adaptive.KeyBounds(k, block_size=128, capacity=tokens), tokens - 1

    def step(heads: str) -> Tensor:
        table = rw.adaptive.select(
            q, k, method="bounds", bounds=bounds, density=0.05, block_size=128, q_offset=last, heads=heads
        )
        return rw.attention(q, k, v, table & rw.Causal(), q_offset=last)

    calls: Calls = {heads: partial(step, heads) for heads in ("kv", "query")}
    calls["all"] = lambda: rw.attention(q, k, v, rw.Causal(), q_offset=last)
    times = _timed(calls, options, 15)
    size = f"{tokens:,} keys in blocks of 128, 32 over 8 heads of 128"
    for heads, name in (("kv", "key head"), ("query", "query head")):
        what = f"a step over all keys, over one that chooses 5% by bounds for each {name}"
        yield Target(what, size, ratio(times["all"], times[heads]).medians, None, True)


def _documents(options: Options) -> Iterator[Target]:
    """Time plans of packed documents that no call has planned before."""
    tokens = options.tokens or (2048 if options.quick else 16384)
    for count in (3, 16, 64):
        drawn = iter(range(10**6))

        def plan(count: int = count, drawn: Iterator[int] = drawn) -> object:
            pattern = rw.SlidingWindow(64, 64) | rw.Global([0])
            return pattern.within(rw.Documents(documents(tokens, count, next(drawn)))).plan(tokens)

        time = _timed({"plan": plan}, options)["plan"].median
        yield Target(f"plan of {count} new documents", f"{tokens:,} tokens", time * 1e3, None, False, "ms")


def _functions(options: Options) -> Iterator[Target]:
    """Time what a score function adds to the call with its term: in its first call, and in others if a table learns."""
    q, k, v = _drawn(*[(4, 64, 64)] * 3)
    table = torch.randn(4, 257, requires_grad=True)
    caps = iter(range(1, 10**6))

    def new() -> Callable[..., Tensor]:
        cap = next(caps)
        return lambda score, b, h, i, j: cap * torch.tanh(score / cap)

    def distance(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + table[h, (i - j).clamp(-128, 128) + 128]

    calls: Calls = {
        "new": lambda: flex_attention(q, k, v, new()),
        "cap": lambda: rw.attention(q, k, v, rw.Full(), terms=rw.Softcap(float(next(caps)))),
        "table": lambda: flex_attention(q, k, v, distance),
        "bias": lambda: rw.attention(q, k, v, rw.Full(), terms=rw.DistanceBias(table)),
    }
    times = _timed(calls, options, 31)
    for name, function, term in (("a new formula", "new", "cap"), ("a table that learns", "table", "bias")):
        added = (times[function].median - times[term].median) * 1e3
        yield Target(f"a score function over its term: {name}", "4 heads of 64, 64 tokens", added, None, False, "ms")


def _contents(options: Options) -> Iterator[Target]:
    """Time what a large parameter that a mask function reads adds to a call."""
    mib, tokens = 1 if options.quick else 16, 64
    parameter = torch.nn.Parameter(torch.ones(mib * 2**18))
    q, k, v = _drawn(*[(1, tokens, 64)] * 3)

    def reading(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & (parameter[j] > 0)

    mask = create_block_mask(reading, None, None, tokens, tokens, device="cpu")
    calls: Calls = {
        "reading": lambda: flex_attention(q, k, v, block_mask=mask),
        "plain": lambda: rw.attention(q, k, v, rw.Causal()),
    }
    times = _timed(calls, options, 15)
    added = (times["reading"].median - times["plain"].median) * 1e3 / mib
    yield Target("a mask function that reads a parameter: each MiB", f"{mib} MiB", added, None, False, "ms")


def _fast_order(options: Options) -> Iterator[Target]:
    """Compare the two orders of sums of dilated patterns."""
    tokens = options.tokens or (2048 if options.quick else 16384)
    q, k, v = _drawn(*[(4, tokens, 64)] * 3)
    for rate in (16, 64):
        calls: Calls = {
            order: partial(rw.attention, q, k, v, rw.Dilated(64, rate), precision=rw.Precision(summation_order=order))
            for order in ("fixed", "fast")
        }
        times = _timed(calls, options)
        over = ratio(times["fast"], times["fixed"]).medians
        size = f"{tokens:,} tokens, 4 heads of 64, 64 keys at rate {rate}"
        yield Target("the fast order of sums over the fixed one, forward", size, over, None, False)
