"""Equal or similar calls that ranks make in different orders either raise on all ranks, or are right."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest
import torch
from torch import nn

import ringweave as rw
from ringweave.errors import RingError, UnsupportedError
from ringweave.parallel import ContextParallel, Transport
from ringweave.parallel.execution import header

from . import jobs_order
from .jobs_order import HEADS, TOKENS, WINDOW, data, follow
from .processes import Pool
from .threads import run

JOBS = "tests.parallel.jobs_order"


def in_order(results: list[Any], steps: int) -> None:
    for right, error in results:
        assert error is None
        assert right == [True] * steps


def in_another(results: list[Any]) -> None:
    """All ranks raise after equally many steps with right results, or all results are right."""
    assert len({len(right) for right, _ in results}) == 1
    assert len({error is None for _, error in results}) == 1
    assert all(all(right) for right, _ in results)


@pytest.mark.parametrize("named", [False, True], ids=["by_arguments", "by_tag"])
@pytest.mark.parametrize("schedule", ["allgather", "ring"])
def test_programs(schedule: str, named: bool) -> None:
    """Random programs are right in one order on all ranks; with another order on one rank, every wrong order raises."""
    raised = 0
    for seed in range(12):
        ranks = 2 + seed % 3
        in_order(run(ranks, follow, seed, None, schedule, named), 9)
        results = run(ranks, follow, seed, seed % ranks, schedule, named)
        in_another(results)
        raised += results[0][1] is not None
    # a random order may be the original one
    assert raised >= 10


def test_programs_of_processes(pool4: Pool) -> None:
    for results in zip(*pool4.run(f"{JOBS}:follow_all", [2, 3]), strict=True):
        in_another(list(results))


def test_equal_calls_in_another_order_are_told_apart_by_tags() -> None:
    """Calls that differ in data only are told apart by their tags, and the error names both."""

    def job(transport: Transport) -> str:
        ctx = ContextParallel(transport, WINDOW, TOKENS, heads=HEADS)
        # the second calls have equal tags, but raise too: the ranks may be any number of calls apart
        for number in (transport.rank, 2):
            with pytest.raises(RingError) as error:
                rw.attention(*(ctx.shard(x, 2) for x in data(number)), WINDOW, context=ctx.tagged(f"layer {number}"))
        assert sum(transport.counters.received) == 0
        return str(error.value)

    assert run(2, job) == [
        "rank 0, step 1: got tag layer 0 here and layer 1 on rank 1; wanted the same tag on all ranks. "
        "Nothing was moved. Make a new context, and the same calls in the same order on all ranks.",
        "rank 1, step 1: got tag layer 1 here and layer 0 on rank 0; wanted the same tag on all ranks. "
        "Nothing was moved. Make a new context, and the same calls in the same order on all ranks.",
    ]


@pytest.mark.parametrize(
    "how", ["plain", "compiled", "alike", "alike, compiled", "alike, again", "alike, compiled, again"]
)
def test_backward_in_another_order(pool2: Pool, how: str) -> None:
    for rank, (cause, right) in enumerate(pool2.run(f"{JOBS}:backward_in_another_order", how)):
        assert right
        assert cause == (None if "alike" in how else f"call {1 - rank} here and {rank} on rank {1 - rank}")


@pytest.mark.parametrize("made", [False, True], ids=["first_use", "made"])
def test_contexts_in_another_order(pool2: Pool, made: bool) -> None:
    numbers = [[1, 2], [2, 3]] if made else [[1, 2], [2, 1]]
    pool2.reopen()
    results = pool2.run(f"{JOBS}:contexts_in_another_order", made)
    for rank, causes in enumerate(results):
        for cause, mine, theirs in zip(causes, numbers[rank], numbers[1 - rank], strict=True):
            assert cause == f"context {mine} here and {theirs} on rank {1 - rank}"
    pool2.reopen()


@pytest.mark.parametrize("late", [False, True], ids=["at_once", "in_turn"])
def test_two_threads(pool2: Pool, late: bool) -> None:
    """Two threads get right results, or all ranks raise, long before the deadline."""
    for _ in range(3):
        results = pool2.run(f"{JOBS}:two_threads", 30, late, 20.0)
        assert all(result["causes"] for result in results)
        for result in results:
            assert all(result["right"])
            assert result["s"] < 15
            for cause in result["causes"]:
                assert "two threads of rank" in cause or cause.startswith("tag thread Thread (work)")
    texts = [text for result in results for text in result["texts"] if "two threads" in text]
    for text in texts:
        assert text.endswith(
            "in one context concurrently; wanted calls from one thread at a time. "
            "Give each thread a separate context, created and first used in the same order on all ranks."
        )


def test_one_thread_after_the_other(pool2: Pool) -> None:
    for right in pool2.run(f"{JOBS}:one_thread_after_the_other"):
        assert right == [True] * 4 * 5


def test_threads_of_a_process_that_is_alone_wait() -> None:
    ctx = ContextParallel(None, WINDOW, TOKENS, heads=HEADS)
    wanted = [rw.attention(*data(number), WINDOW) for number in (0, 1)]
    right: list[bool] = []

    def work(number: int) -> None:
        right.extend(torch.equal(rw.attention(*data(number), WINDOW, context=ctx), wanted[number]) for _ in range(20))

    threads = [threading.Thread(target=work, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * 40


def test_no_rank_computes_alone_where_ranks_differ() -> None:
    """A fallback for a lost rank is not used when ranks make different calls."""

    def job(transport: Transport) -> bool:
        ctx = ContextParallel(transport, WINDOW, TOKENS, heads=HEADS)
        pattern = jobs_order.CAUSAL if transport.rank else WINDOW
        error = jobs_order.told(lambda: ctx.replicated(*data(0), pattern, fallback="single"))
        return error is not None and error.cause.startswith("pattern ") and not error.lost

    assert run(2, job) == [True, True]


def test_what_ranks_tell_is_on_the_cpu() -> None:
    """Messages between ranks are on the CPU, whatever the default device is."""

    def job(transport: Transport) -> torch.Tensor:
        with torch.device("meta"):
            ctx = ContextParallel(transport, WINDOW, TOKENS, heads=HEADS).tagged("a")
            shards = [ctx.shard(x, 2).requires_grad_() for x in inputs]
            out = rw.attention(*shards, WINDOW, context=ctx)
            out.sum().backward()
            return ctx.unshard(out, 2)

    inputs = data(0)
    for out in run(2, job):
        assert torch.allclose(out, rw.attention(*inputs, WINDOW), atol=1e-5)


class Layer(nn.Module):
    def __init__(self, context: ContextParallel) -> None:
        super().__init__()
        self.context = context
        self.w = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.w(x)
        return rw.attention(y, y, y, WINDOW, context=self.context)


def test_a_graph_compiled_for_one_layer_serves_all() -> None:
    """Tags are no constants of a graph, so a graph compiled for one layer serves all."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    ctx = ContextParallel(None, WINDOW, 128, heads=(2, 2))
    layers = [Layer(ctx.tagged(f"layer {number}")) for number in range(12)]
    for layer in layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    x = torch.randn(1, 2, 128, 8)
    for layer in layers:
        layer(x.detach().requires_grad_()).sum().backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_tags() -> None:
    ctx = ContextParallel(None, WINDOW, TOKENS, heads=HEADS)
    named = ctx.tagged("a")
    assert named.positions is ctx.positions
    with pytest.raises(UnsupportedError, match="tag: got 3; wanted text. Name the call, such as 'layer 3'."):
        ctx.tagged(3)  # type: ignore[arg-type]
    del ctx
    # a handle keeps its context alive, and so does a handle of a handle
    for context in (named, named.tagged("b")):
        del named
        named = context
        assert rw.attention(*data(0), WINDOW, context=named).isfinite().all()


@pytest.mark.parametrize("text", ["", "layer 3", "ünïcode", "x" * 32, "é" * 16, "x" * 33, "a\0b", "\ud800"])
def test_text_as_words(text: str) -> None:
    """Texts of up to 32 bytes are sent as they are, longer ones as a digest."""
    words = header.text_words(text, 4)
    assert len(words) == 4
    assert words != header.text_words(text + "x", 4)
    again = header.words_text(words)
    assert again == text or (text in ("x" * 33, "a\0b") and again[0] == "#") or text == "\ud800"


def test_a_header_has_a_field_for_each_value() -> None:
    """A value that no field holds would not be compared."""
    words = header.encode({"scale": 0.5, "tag": "layer 3"})
    assert len(words) == header.HEADER_WORDS
    assert words != header.encode({"scale": 0.5})
    with pytest.raises(KeyError, match="scales"):
        header.encode({"scales": 0.5})


def test_long_tags_with_a_common_beginning() -> None:
    def job(transport: Transport) -> str | None:
        ctx = ContextParallel(transport, WINDOW, TOKENS, heads=HEADS)
        shards = [ctx.shard(x, 2).requires_grad_() for x in data(0)]
        names = [f"{'module.' * 10}{number}" for number in (0, 1)]
        outs = [rw.attention(*shards, WINDOW, context=ctx.tagged(name)) for name in names]
        for out in outs:
            out.sum().backward()
        error = jobs_order.told(lambda: ctx.tagged(names[transport.rank]).unshard(outs[0], 2))
        return error and error.cause

    first, second = run(2, job)
    assert first
    assert second
    found = re.fullmatch(r"tag (#\w{8}) here and (#\w{8}) on rank 1", first)
    assert found
    assert second == f"tag {found[2]} here and {found[1]} on rank 0"


def test_a_rank_that_fails_and_tries_again_is_told() -> None:
    """A rank that fails and repeats its call is told so: its repeated messages would be taken for the others' next call."""

    def job(transport: Transport) -> str | None:
        ctx = ContextParallel(transport, WINDOW, TOKENS, heads=HEADS)
        shards = [ctx.shard(x, 2) for x in data(0)]
        rw.attention(*shards, WINDOW, context=ctx)
        if transport.rank == 0:
            # as when memory runs out in a kernel
            ctx.call.counter.calls -= 1
        error = jobs_order.told(lambda: rw.attention(*shards, WINDOW, context=ctx))
        return error and error.cause

    assert run(2, job) == ["call 0 here and 1 on rank 1", "call 1 here and 0 on rank 0"]
