"""The messages of a call and the texts of its failures are fixed here as data, independent of the transport's implementation."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import pytest
import torch

import ringweave as rw
from ringweave.parallel import ContextParallel, Transport

from ..oracle import Inputs
from .processes import Pool
from .threads import run


class Case(NamedTuple):
    """A call on four ranks: tokens, query heads, key heads, channels; options of the context; ranks of a node."""

    pattern: rw.Pattern
    sizes: tuple[int, int, int, int]
    options: dict[str, Any]
    per_node: int | None = None
    dtype: torch.dtype = torch.float32


def allgather(**options: Any) -> dict[str, Any]:
    return {"schedule": "allgather", "placement": "contiguous", **options}


def ring(**options: Any) -> dict[str, Any]:
    return {"schedule": "ring", "placement": "contiguous", **options}


WINDOW, CAUSAL = rw.SlidingWindow(100), rw.Causal()
BY_HEAD = rw.PerHead([CAUSAL, WINDOW, CAUSAL, WINDOW])
SPARSE = rw.SlidingWindow(256) | rw.Global(128)
CASES = {
    "allgather, window": Case(WINDOW, (700, 2, 2, 8), allgather()),
    "allgather, causal, bf16": Case(CAUSAL, (700, 4, 2, 8), allgather(placement="zigzag", wire="bf16")),
    "allgather, heads differ": Case(BY_HEAD, (700, 4, 4, 8), allgather(placement="striped"), dtype=torch.bfloat16),
    "allgather, mixture": Case(rw.LongNet([128, 512], [1, 4]), (700, 4, 2, 8), allgather(placement="striped")),
    "nodes": Case(CAUSAL, (700, 2, 1, 8), allgather(placement="striped"), 2),
    "nodes, int8": Case(rw.Full(), (700, 2, 1, 8), allgather(wire="int8"), 2),
    "ring, causal": Case(CAUSAL, (700, 4, 2, 8), ring(placement="zigzag")),
    "ring, queries move": Case(SPARSE, (4096, 2, 2, 8), ring(), dtype=torch.bfloat16),
    "ring, head by head": Case(rw.SlidingWindow(600), (4096, 2, 2, 64), ring()),
    "ring, int8": Case(rw.Full(), (700, 2, 1, 8), ring(wire="int8")),
}
# by rank: forward bytes to each peer and messages; the same after backward; bytes of agreements
Carried = list[tuple[list[int], int, list[int], int, int]]
CARRIED: dict[str, Carried] = {
    "allgather, window": [
        ([0, 24576, 0, 0], 1, [0, 32768, 0, 0], 2, 2928),
        ([8192, 0, 16384, 0], 2, [32768, 0, 16384, 0], 3, 2928),
        ([0, 0, 0, 24576], 1, [0, 16384, 0, 32768], 3, 2928),
        ([0, 0, 8192, 0], 1, [0, 0, 32768, 0], 2, 2928),
    ],
    "allgather, causal, bf16": [
        ([0, 8192, 8192, 8192], 3, [0, 8192, 8192, 8192], 3, 2928),
        ([0, 0, 8192, 8192], 2, [16384, 0, 8192, 8192], 3, 2928),
        ([0, 0, 0, 8192], 1, [16384, 16384, 0, 40960], 4, 2928),
        ([0, 0, 16384, 0], 1, [16384, 16384, 32768, 0], 4, 2928),
    ],
    "allgather, heads differ": [
        ([0, 24576, 24576, 16384], 3, [0, 73728, 57344, 49152], 6, 2928),
        ([24576, 0, 24576, 16384], 3, [73728, 0, 57344, 49152], 6, 2928),
        ([16384, 16384, 0, 16384], 3, [65536, 65536, 0, 49152], 6, 2928),
        ([16384, 16384, 16384, 0], 3, [49152, 49152, 49152, 0], 6, 2928),
    ],
    "allgather, mixture": [
        ([0, 36864, 12288, 8192], 3, [0, 73728, 24320, 16384], 6, 2928),
        ([36864, 0, 12288, 8192], 3, [73728, 0, 24320, 16384], 6, 2928),
        ([12032, 12032, 0, 24576], 3, [24320, 24320, 0, 49152], 6, 2928),
        ([8192, 8192, 24576, 0], 3, [16384, 16384, 49152, 0], 6, 2928),
    ],
    "nodes": [
        ([0, 20480, 12288, 0], 2, [0, 40960, 20480, 0], 4, 2928),
        ([20480, 0, 0, 12288], 2, [40960, 0, 0, 20480], 4, 2928),
        ([8192, 0, 0, 16384], 2, [20480, 0, 0, 36864], 4, 2928),
        ([0, 8192, 20480, 0], 2, [0, 20480, 36864, 0], 4, 2928),
    ],
    "nodes, int8": [
        ([0, 9216, 4608, 0], 2, [0, 29440, 16896, 0], 4, 4392),
        ([7584, 0, 0, 4608], 2, [32160, 0, 0, 12544], 4, 4392),
        ([4608, 0, 0, 9216], 2, [16896, 0, 0, 29440], 4, 4392),
        ([0, 2976, 7584, 0], 2, [0, 15264, 32160, 0], 4, 4392),
    ],
    "ring, causal": [
        ([0, 16384, 16384, 16384], 3, [0, 32768, 32768, 32768], 6, 2928),
        ([0, 0, 16384, 16384], 2, [16384, 0, 32768, 32768], 5, 2928),
        ([0, 0, 0, 16384], 1, [16384, 16384, 0, 65536], 5, 2928),
        ([0, 0, 32768, 0], 1, [16384, 16384, 81920, 0], 5, 2928),
    ],
    "ring, queries move": [
        ([0, 28672, 12288, 12288], 6, [0, 63488, 30720, 30720], 15, 2928),
        ([9216, 0, 16384, 0], 2, [66560, 0, 32768, 0], 5, 2928),
        ([9216, 0, 0, 16384], 2, [33792, 32768, 0, 32768], 6, 2928),
        ([9216, 0, 0, 0], 1, [33792, 0, 32768, 0], 4, 2928),
    ],
    "ring, head by head": [
        ([0, 655360, 0, 0], 4, [0, 1310720, 0, 0], 8, 2928),
        ([0, 0, 655360, 0], 4, [655360, 0, 1310720, 0], 9, 2928),
        ([0, 0, 0, 655360], 4, [0, 655360, 0, 1310720], 9, 2928),
        ([0, 0, 0, 0], 0, [0, 0, 655360, 0], 1, 2928),
    ],
    "ring, int8": [
        ([0, 4608, 4608, 4608], 3, [0, 21504, 21504, 17152], 9, 2928),
        ([4608, 0, 4608, 4608], 3, [21504, 0, 21504, 17152], 9, 2928),
        ([4608, 4608, 0, 4608], 3, [21504, 21504, 0, 17152], 9, 2928),
        ([2976, 2976, 2976, 0], 3, [18240, 18240, 18240, 0], 9, 2928),
    ],
}  # fmt: skip


def carry(transport: Transport, case: Case) -> tuple[list[int], int, list[int], int, int]:
    tokens, heads, kv_heads, dim = case.sizes
    x = Inputs.random(tokens, heads=heads, kv_heads=kv_heads, dim=dim, dtype=case.dtype)
    ctx = ContextParallel(transport, case.pattern, tokens, heads=(heads, kv_heads), **case.options)
    ctx.schedules.per_node = case.per_node
    out = rw.attention(*(ctx.shard(t, 2).requires_grad_() for t in (x.q, x.k, x.v)), case.pattern, context=ctx)
    counters = transport.counters
    forward = list(counters.sent), counters.messages
    out.backward(ctx.shard(x.dout, 2))
    return *forward, list(counters.sent), counters.messages, counters.metadata


@pytest.mark.parametrize("name", list(CASES))
def test_the_messages_of_a_call(name: str) -> None:
    assert run(4, carry, CASES[name]) == CARRIED[name]


def order(transport: Transport, case: Case) -> list[str]:
    carry(transport, case)
    return transport.started  # type: ignore[attr-defined, no-any-return]


def test_the_order_of_a_ring() -> None:
    """Rank 1 of 4 posts the keys of a stage before it computes the stage before; results follow their stage."""
    assert run(4, order, CASES["ring, queries move"])[1] == [
        "agree",
        "keys, to 2: 16384, from 0: 24576, 0: 4096",
        "returns, to 0: 9216, from none",
        "agree",
        "keys, to 2: 16384, from 0: 24576, 0: 8192, 0: 2048",
        "returns, to 0: 49152, 0: 8192, from 2: 32768",
    ]


def test_the_order_of_two_hops() -> None:
    assert run(4, order, CASES["nodes, int8"])[1] == [
        "agree",
        "keys 0, to 3: 4608, from 3: 2976",
        "agree",
        "keys 1, to 0: 7584, from 0: 9216",
        "agree",
        "gradients 1, to 0: 24576, from 0: 20224",
        "gradients 0, to 3: 7936, from 3: 12288",
    ]


LOST = "The shard of rank 1 cannot be reached: regroup the survivors and shard again, or restart."
# a rank that falls silent in a kernel call has already sent the call's keys
SILENT = {
    ("allgather", "forward"): "agree",
    ("allgather", "backward"): "gradients 0",
    ("ring", "forward"): "(keys|returns)",
    ("ring", "backward"): "(keys|returns)",
}


@pytest.mark.parametrize(("schedule", "where"), list(SILENT))
def test_a_silent_rank(pool4: Pool, schedule: str, where: str) -> None:
    """If a rank sleeps in a kernel call, the others raise at the deadline of the next message from it, in these words."""
    # a deadline that ranks of a busy machine meet
    deadline = 4.0
    results = pool4.run("tests.parallel.jobs_ring:silent", schedule, where, 1, deadline)
    pool4.reopen()
    for rank in (0, 2, 3):
        text, seconds = results[rank]
        place = rf"rank {rank}, step \d" + r", stage [123]" * (schedule == "ring")
        cause = rf"no answer from rank 1 to rank \d in time \({SILENT[schedule, where]}, {deadline:g} s\)"
        assert re.fullmatch(rf"{place}: got {cause}; wanted an answer of every rank. {LOST}", text), text
        assert seconds > 0.9 * deadline
