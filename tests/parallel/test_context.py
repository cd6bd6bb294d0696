"""Test the context: shards, errors on all ranks, tables sent to other ranks, and its texts."""

from __future__ import annotations

import copy
import functools
import gc
import json
import math
import pickle
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ringweave as rw
from ringweave.errors import PatternError, RingError, ShapeError, UnsupportedError
from ringweave.parallel import ContextParallel, Trace, Transport, export_chrome_trace
from ringweave.parallel.planning.placement import NAMED
from ringweave.parallel.transport.protocol import Event

from ..cases import PATTERNS
from ..oracle import Inputs
from .processes import Pool
from .spread import alone
from .threads import run

WINDOW = rw.SlidingWindow(100)


@pytest.mark.parametrize("placement", ["auto", *NAMED])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_shards(ranks: int, placement: str) -> None:
    """Every token is on one rank, at its position, and unshard undoes shard along any dimension."""
    x = torch.randn(2, 301, 3)

    def job(transport: Transport) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ctx = ContextParallel(transport, WINDOW, 301, heads=(2, 2), placement=placement)
        local = ctx.shard(x)
        assert local.shape == (2, ctx.local, 3)
        assert ctx.positions.shape == (ctx.local,)
        assert (ctx.positions.diff() > 0).all()
        assert (local[:, ctx.positions >= 301] == 0).all()
        torch.testing.assert_close(ctx.unshard(ctx.shard(x.mT, 2), 2), x.mT)
        return ctx.positions, local, ctx.unshard(local)

    positions = []
    for where, local, whole in run(ranks, job):
        real = where < 301
        assert torch.equal(local[:, real], x[:, where[real]])
        assert torch.equal(whole, x)
        positions.append(where[real])
    assert torch.equal(torch.cat(positions).sort().values, torch.arange(301))


@pytest.mark.parametrize("placement", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gathered_shards_have_the_gradients_of_all_ranks(ranks: int, placement: str, dtype: torch.dtype) -> None:
    """A shard's gradient is the sum over the ranks, each of which uses the whole tensor in its own way."""
    x = torch.randn(2, 3, 301, 2).to(dtype)
    factor = torch.randint(-3, 4, (ranks, 2, 3, 301, 2)).to(dtype)

    def job(transport: Transport) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ctx = ContextParallel(transport, WINDOW, 301, heads=(2, 2), placement=placement)
        local = ctx.shard(x, 2).requires_grad_()
        whole = ctx.gather(local, 2)
        (whole * factor[ctx.rank]).sum().backward()
        assert local.grad is not None
        return ctx.positions, whole.detach(), local.grad

    for where, whole, grad in run(ranks, job):
        assert torch.equal(whole, x)
        real = where < 301
        assert torch.equal(grad[:, :, real], factor.sum(0)[:, :, where[real]])
        assert not grad[:, :, ~real].any()


def _of_blocks(size: int, stride: int, weight: torch.Tensor) -> Any:
    """Return a map of consecutive tokens to a row for each of their full blocks, with a parameter."""

    def reduce(x: torch.Tensor) -> torch.Tensor:
        if x.shape[2] < size:
            return x[:, :, :0] * weight
        return (x.unfold(2, size, stride) * weight[..., None]).square().sum(-1)

    return reduce


@pytest.mark.parametrize("placement", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(
    ("tokens", "size", "stride"), [(301, 8, 8), (301, 16, 8), (301, 12, 5), (96, 32, 32), (40, 39, 1), (7, 8, 2)]
)
def test_gathered_blocks_are_those_of_the_gathered_tokens(
    ranks: int, placement: str, tokens: int, size: int, stride: int
) -> None:
    """The gradients of the shards too, and of a parameter of the map, each rank's share of it."""
    x, parameter = torch.randn(2, 3, tokens, 2, dtype=torch.float64), torch.randn(2, dtype=torch.float64)
    count = max(0, (tokens - size) // stride + 1)
    factor = torch.randn(ranks, 2, 3, count, 2, dtype=torch.float64)

    def job(transport: Transport) -> list[list[torch.Tensor]]:
        ctx = ContextParallel(transport, WINDOW, tokens, heads=(2, 2), placement=placement)
        found = []
        for by_block in (True, False):
            local, weight = ctx.shard(x, 2).requires_grad_(), parameter.clone().requires_grad_()
            reduce = _of_blocks(size, stride, weight)
            rows = ctx.gather_blocks(local, reduce, size, stride) if by_block else reduce(ctx.gather(local, 2))
            gradients = torch.autograd.grad((rows * factor[ctx.rank]).sum(), [local, weight], materialize_grads=True)
            found.append([rows.detach(), *gradients])
        return found

    results = run(ranks, job)
    for by_block, by_token in results:
        assert torch.equal(by_block[0], by_token[0])
        torch.testing.assert_close(by_block[1], by_token[1])
    shares = [sum(ours[2] for ours in each) for each in zip(*results, strict=True)]
    torch.testing.assert_close(*shares)


@pytest.mark.parametrize(
    ("reduce", "tokens"), [(lambda x: x[:, :, 1::8][:, :, 1:], 64), (lambda x: x.sum(2), 64), (lambda x: x.sum(2), 7)]
)
def test_a_map_of_blocks_that_returns_other_rows_is_refused(reduce: Any, tokens: int) -> None:
    """Padding would take the place of missing rows."""
    ctx = ContextParallel(None, WINDOW, tokens, heads=(2, 2))
    local = ctx.shard(torch.randn(2, 3, tokens, 2), 2)
    with pytest.raises(ShapeError, match=r"reduce\(x\): got \(.*\) for \d+ tokens; wanted \d+ rows"):
        ctx.gather_blocks(local, reduce, 8)


def test_gathered_blocks_move_a_row_for_each() -> None:
    """Zigzag pieces of 128 tokens hold whole blocks of 32, so that no token moves; with a stride, those at their ends do."""

    def job(transport: Transport) -> list[int]:
        ctx = ContextParallel(transport, rw.Causal(), 1024, heads=(1, 1), placement="zigzag")
        local, moved = ctx.shard(torch.randn(1, 1, 1024, 4), 2), []
        for size, stride in ((32, 32), (32, 16)):
            before = sum(transport.counters.received)
            ctx.gather_blocks(local, _of_blocks(size, stride, torch.ones(4)), size, stride)
            moved.append((sum(transport.counters.received) - before) // (4 * 4))
        return moved

    # three other ranks, with 8 blocks each; with at most 15 each, where two pieces are one, and at most 4 ends of 16 tokens
    assert run(4, job) == [[3 * 8, 3 * 15 + 3 * 64]] * 4


def test_shard_is_differentiable() -> None:
    x = torch.randn(1, 130, 2, requires_grad=True)

    def job(transport: Transport) -> tuple[torch.Tensor, torch.Tensor]:
        ctx = ContextParallel(transport, WINDOW, 130, heads=(1, 1))
        return ctx.positions, torch.autograd.grad(ctx.shard(x).square().sum(), x)[0]

    for where, gradient in run(2, job):
        expected = torch.zeros_like(x)
        mine = where[where < 130]
        expected[:, mine] = 2 * x.detach()[:, mine]
        torch.testing.assert_close(gradient, expected)


def test_alone_it_is_plain_attention() -> None:
    """A context of one process without a group has the bits of plain attention, moves nothing, and needs no torch.distributed."""
    x = Inputs.random(300, heads=4, kv_heads=2, dim=8)
    for pattern in (WINDOW, rw.Causal(), rw.LongNet([64, 128], [1, 4])):
        ctx = rw.ContextParallel(None, pattern, 300, heads=(4, 2))
        q, k, v = (ctx.shard(t, 2) for t in (x.q, x.k, x.v))
        out = ctx.unshard(rw.attention(q, k, v, pattern, context=ctx), 2)
        assert torch.equal(out, alone(x, pattern)["out"])


def test_several_patterns_under_one_placement() -> None:
    """Window and causal layers share one placement, which suits their sum, and both are exact."""
    x = Inputs.random(1024, heads=2, dim=8)
    patterns = [WINDOW, rw.Causal()]

    def job(transport: Transport) -> list[tuple[torch.Tensor, torch.Tensor]]:
        ctx = ContextParallel(transport, patterns, 1024, heads=(2, 2))
        q, k, v = (ctx.shard(t, 2) for t in (x.q, x.k, x.v))
        return [
            (ctx.positions, rw.attention(q, k, v, pattern, context=ctx)) for pattern in (*patterns, rw.Segments(64))
        ]

    for result in run(4, job):
        for (where, out), pattern in zip(result, (*patterns, rw.Segments(64)), strict=True):
            torch.testing.assert_close(out, alone(x, pattern)["out"][:, :, where])


@settings(max_examples=30)
@given(
    st.sampled_from([name for name in PATTERNS if name not in ("far_strided",)]),
    st.sampled_from(list(NAMED)),
    st.sampled_from(["allgather", "ring"]),
    st.integers(1, 5),
    st.integers(1, 200),
)
def test_no_mask_changes(name: str, placement: str, schedule: str, ranks: int, tokens: int) -> None:
    """G12: with one-hot rows as V, each query's keys on every rank are those of the pattern."""
    pattern = PATTERNS[name](tokens)
    allowed = pattern.to_dense(tokens, heads=4)[0]
    values = torch.eye(tokens).expand(1, 4, -1, -1)
    # the native kernel computes channels in steps of 8
    values = torch.nn.functional.pad(values, (0, -tokens % 8))
    q = k = torch.zeros(1, 4, tokens, 8)

    def job(transport: Transport) -> tuple[torch.Tensor, torch.Tensor]:
        ctx = ContextParallel(transport, pattern, tokens, heads=(4, 4), placement=placement, schedule=schedule)
        out = rw.attention(*(ctx.shard(x, 2) for x in (q, k, values)), pattern, context=ctx)
        return ctx.positions, out

    for where, out in run(ranks, job):
        real = where < tokens
        assert torch.equal(out[0, :, real, :tokens] > 0, allowed[:, where[real]])


class Difference(NamedTuple):
    """An argument of the context or of a call that differs on the first rank, and the words of the error."""

    first: dict[str, Any]
    others: dict[str, Any]
    field: str
    shown: tuple[str, str]


DIFFERENT = {
    "pattern": Difference({"pattern": rw.Causal()}, {}, "pattern", ("Causal()", "SlidingWindow(100)")),
    "seq_len": Difference({"seq_len": 800}, {}, "seq_len", ("800", "700")),
    "heads": Difference({"heads": (2, 1)}, {}, "heads", ("(2, 1)", "(2, 2)")),
    "placement": Difference({"placement": "striped"}, {}, "placement", ("striped", "contiguous")),
    "schedule": Difference({"schedule": "ring"}, {}, "schedule", ("ring", "allgather")),
    "batch": Difference({"batch": 2}, {}, "batch", ("2", "1")),
    "dtypes of one size": Difference(
        {"dtype": torch.bfloat16}, {"dtype": torch.float16}, "dtype", ("bfloat16", "float16")
    ),
    "grads": Difference({"grads": True}, {}, "requires_grad", ("True", "False")),
    "scale": Difference({"scale": 0.3}, {}, "scale", ("0.3", repr(1 / math.sqrt(8)))),
    "scale, a bit": Difference({"scale": 0.3}, {"scale": 0.1 * 3}, "scale", ("0.3", "0.30000000000000004")),
    "wire": Difference({"wire": "int8"}, {}, "wire", ("int8", "native")),
    "tolerance": Difference({"tolerance": 0.25}, {}, "tolerance", ("0.25", "none")),
    "deadline": Difference({"deadline": 15.0}, {}, "deadline", ("15.0", "30.0")),
    "retries": Difference({"retries": 1}, {}, "retries", ("1", "0")),
}
# options of a transport, which threads do not need
OF_TRANSPORT = {"deadline", "retries"}


def differing(mesh: Any, name: str, schedule: str) -> tuple[str, tuple[Any, ...], int]:
    """Return the error text of a call in which the first rank differs, the error's fields, and the bytes that were moved."""
    first = (mesh.rank() if callable(mesh.rank) else mesh.rank) == 0
    case: dict[str, Any] = {
        "pattern": WINDOW, "batch": 1, "dtype": torch.float32, "seq_len": 700, "heads": (2, 2), "grads": False,
        "scale": None, "schedule": schedule, "placement": "contiguous",
    }  # fmt: skip
    case |= DIFFERENT[name].first if first else DIFFERENT[name].others
    pattern, batch, dtype, grads, scale = (case.pop(key) for key in ("pattern", "batch", "dtype", "grads", "scale"))
    ctx = ContextParallel(mesh, [WINDOW, rw.Causal()], **case)
    q, k, v = (torch.randn(batch, heads, ctx.local, 8, dtype=dtype) for heads in (2, ctx.heads[1], ctx.heads[1]))
    with pytest.raises(RingError) as error:
        rw.attention(q.requires_grad_(grads), k, v, pattern, context=ctx, scale=scale)
    moved = sum(ctx.transport.counters.received) + sum(ctx.transport.counters.sent)
    ctx.close()
    return str(error.value), (error.value.rank, error.value.peer, error.value.stage, error.value.step), moved


def told(rank: int, peer: int, name: str) -> str:
    """Return the beginning of a rank's error text."""
    different = DIFFERENT[name]
    mine, theirs = different.shown[rank > 0], different.shown[peer > 0]
    # a placement travels as a digest: a rank knows its own
    theirs = "another" if different.field == "placement" else theirs
    wanted = f"wanted the same {different.field} on all ranks. Nothing was moved. Make a new context, "
    return f"rank {rank}, step 1: got {different.field} {mine} here and {theirs} on rank {peer}; {wanted}"


@pytest.mark.parametrize("name", sorted(OF_TRANSPORT))
def test_given_connections_have_one_deadline(name: str) -> None:
    """A context over a transport, or over another context, cannot wait longer or repeat more often than it."""
    value: dict[str, Any] = DIFFERENT[name].first
    made = ContextParallel(None, WINDOW, 256, heads=(1, 1), **value)
    for mesh in (made, made.transport):
        for fits in ({}, value):
            assert ContextParallel(mesh, WINDOW, 128, heads=(1, 1), **fits).transport is made.transport
    other = ContextParallel(None, WINDOW, 256, heads=(1, 1))
    for mesh in (other, other.transport):
        with pytest.raises(
            rw.UnsupportedError, match=f"{name}: got {value[name]}; wanted {DIFFERENT[name].shown[1]}, that of"
        ):
            ContextParallel(mesh, WINDOW, 128, heads=(1, 1), **value)


def test_a_context_over_another_one_has_its_nodes() -> None:
    made = ContextParallel(None, WINDOW, 256, heads=(1, 1))
    made.schedules.per_node = 2
    assert ContextParallel(made, WINDOW, 128, heads=(1, 1)).schedules.per_node == 2
    with pytest.raises(rw.UnsupportedError, match="schedule: got 'ring' on a mesh of two dimensions"):
        ContextParallel(made, WINDOW, 128, heads=(1, 1), schedule="ring")


@pytest.mark.parametrize("schedule", ["allgather", "ring"])
@pytest.mark.parametrize("name", sorted(set(DIFFERENT) - OF_TRANSPORT))
def test_ranks_that_differ_raise_before_anything_moves(name: str, schedule: str) -> None:
    if (name, schedule) == ("schedule", "ring"):
        name = "pattern"
    for rank, (text, held, moved) in enumerate(run(3, differing, name, schedule)):
        peer = 0 if rank else 1
        assert text.startswith(told(rank, peer, name))
        assert held == (rank, peer, None, 1)
        assert moved == 0


def of_functions(mesh: Any, case: str) -> str:
    """Return the error text of a call with a function; the first rank has another one, or another tensor."""
    first, ids = (mesh.rank() if callable(mesh.rank) else mesh.rank) == 0, torch.arange(700) % 7
    functions = {
        "tensor": lambda b, h, q, k, ids=ids + first: (q * k * k + ids[q]) % 7 > 3,
        "function": (lambda b, h, q, k: (q * k * k) % 5 > h) if first else (lambda b, h, q, k: q * k % 11 > 4),
        "long": lambda b, h, q, k: functools.reduce(
            torch.bitwise_xor, [q * k % (70 + i) == 1 for i in range(30)] + [q == k + first]
        ),
        "recognised": (lambda b, h, q, k: q >= k) if first else (lambda b, h, q, k: (q >= k) & (q - k < 9)),
    }
    ctx = ContextParallel(mesh, rw.Causal(), 700, heads=(2, 2))
    q = torch.randn(1, 2, ctx.local, 8)
    with pytest.raises(RingError) as error:
        rw.attention(q, q, q, rw.from_mask_mod(functions[case]) & rw.Causal(), context=ctx)
    ctx.close()
    return str(error.value)


def test_ranks_with_other_functions_see_both_formulas() -> None:
    """Those of functions that are evaluated; another text of the same beginning, or the same text, is said to differ."""
    causal = "TokenMask(<lambda>) & Causal() with <lambda>: "
    for texts, case in [
        ((f"{causal}q * k * k % 5 > h", f"{causal}q * k % 11 > 4"), "function"),
        (("Causal()", "SlidingWindow(8) & Causal()"), "recognised"),
    ]:
        for rank, said in enumerate(run(2, of_functions, case)):
            assert f"got pattern {texts[rank]} here and {texts[1 - rank]} on rank {1 - rank}; wanted" in said
    for case, text in (("tensor", f"{causal}(q * k * k + t0[q]) % 7 > 3"), ("long", f"{causal}x0 = ")):
        for rank, said in enumerate(run(2, of_functions, case)):
            assert f"got pattern {text}" in said
            assert f" here and another {text}" in said
            assert len(said) < 700
            assert said.count("on rank") == 1, rank


def test_processes_that_differ_raise_too(pool2: Pool) -> None:
    for name in ("pattern", "scale, a bit", "dtypes of one size", *sorted(OF_TRANSPORT)):
        for rank, (text, _, moved) in enumerate(pool2.run("tests.parallel.jobs_ring:differing", name)):
            assert text.startswith(told(rank, 1 - rank, name))
            assert moved == 0


def test_replicated() -> None:
    x = Inputs.random(300, heads=2, dim=8)

    def job(transport: Transport) -> torch.Tensor:
        ctx = ContextParallel(transport, rw.Causal(), 300, heads=(2, 2))
        return ctx.replicated(x.q, x.k, x.v, rw.Causal())

    for out in run(3, job):
        assert torch.equal(out, alone(x, rw.Causal())["out"])


@pytest.mark.parametrize("lost", [False, True])
def test_replicated_under_autocast(lost: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks, and a rank alone after a loss, compute in the dtype in which one device computes."""
    x = Inputs.random(200, heads=2, dim=8)

    def dead(*_: object) -> None:
        raise RingError(0, 1, None, 1, "rank 1 is gone")

    def job(transport: Transport) -> list[torch.Tensor]:
        ctx = ContextParallel(transport, rw.Causal(), 200, heads=(2, 2))
        if lost:
            monkeypatch.setattr(ctx, "attend", dead)
        mixed = x.q.bfloat16(), x.k, x.v
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            want = rw.attention(*mixed, rw.Causal())
            return [want, ctx.replicated(*mixed, rw.Causal(), fallback="single")]

    for want, out in run(2, job):
        assert out.dtype == want.dtype == torch.bfloat16
        assert torch.equal(out, want)


@pytest.mark.parametrize("heads", [(), (4,), (2, 4)])
def test_shared_table(heads: tuple[int, ...]) -> None:
    """Rows that each rank found are joined to one table on all ranks, and attention over it is exact."""
    tokens, block = 1000, 64
    blocks = -(-tokens // block)
    table = torch.rand(*heads, blocks, blocks) < 0.5
    x = Inputs.random(tokens, heads=4, batch=2, dim=8)

    def job(transport: Transport) -> tuple[torch.Tensor, torch.Tensor]:
        ctx = ContextParallel(transport, rw.Causal(), tokens, heads=(4, 4), placement="zigzag")
        mine = ctx.positions[::block] // block
        rows = torch.zeros(*heads, len(mine), blocks, dtype=torch.bool)
        rows[..., mine < blocks, :] = table[..., mine[mine < blocks], :]
        pending = ctx.share_table(rows, block, version=3)
        q, k, v = (ctx.shard(t, 2) for t in (x.q, x.k, x.v))
        # computes while the table is exchanged
        rw.attention(q, k, v, rw.Causal(), context=ctx)
        pattern = pending.result()
        assert torch.equal(pattern.mask, table)
        return ctx.positions, rw.attention(q, k, v, pattern, context=ctx)

    want = alone(x, rw.BlockTable(table, block))["out"]
    for where, out in run(4, job):
        real = where < tokens
        torch.testing.assert_close(out[:, :, real], want[:, :, where[real]])


def test_tables_of_different_versions_are_not_mixed() -> None:
    def job(transport: Transport) -> None:
        ctx = ContextParallel(transport, rw.Causal(), 512, heads=(1, 1), placement="contiguous")
        rows = torch.ones(ctx.local // 128, 4, dtype=torch.bool)
        wanted = (
            f"got version {transport.rank} here and {1 - transport.rank} on rank {1 - transport.rank}; wanted the same"
        )
        with pytest.raises(RingError, match=wanted):
            ctx.share_table(rows, 128, version=transport.rank)

    run(2, job)


def test_a_table_of_one_shard_names_share_table() -> None:
    """A table of a rank's own selection, over its keys or all, is refused, and the error names the call that gathers all rows."""
    x = Inputs.random(512, heads=2, dim=8)

    def job(transport: Transport) -> None:
        ctx = ContextParallel(transport, rw.Causal(), 512, heads=(2, 2), placement="contiguous")
        q, k, v = (ctx.shard(t, 2) for t in (x.q, x.k, x.v))
        own = rw.adaptive.select(q, k, top_k=2, block_size=64)
        of_all_keys = rw.BlockTable(torch.ones(4, 8, dtype=torch.bool), 64)
        for table, shape in ((own, "(4, 4)"), (own & rw.Causal(), "(4, 4)"), (of_all_keys, "(4, 8)")):
            wanted = (
                f"BlockTable: got a table of {shape} blocks of (64, 64), made for one shard of 256 tokens; wanted "
                "(8, 8) blocks for the whole sequence of 512 tokens. "
                "Gather the rows of all ranks with context.share_table(rows, block_size, version)."
            )
            with pytest.raises(PatternError, match=f"^{re.escape(wanted)}$"):
                rw.attention(q, k, v, table, context=ctx)
        # a table of another length is no shard's table
        with pytest.raises(PatternError, match=r"Build the table for these lengths"):
            rw.attention(q, k, v, rw.BlockTable(torch.ones(3, 3, dtype=torch.bool), 64), context=ctx)

    run(2, job)


def test_explain() -> None:
    def job(transport: Transport) -> str:
        ctx = ContextParallel(transport, [WINDOW, rw.Causal()], 4096, heads=(8, 2))
        assert "4096 tokens" in repr(ctx)
        return ctx.explain(head_dim=64)

    texts = run(4, job)
    assert len(set(texts)) == 1
    assert texts[0].startswith(
        "4,096 tokens on 4 ranks: zigzag placement, 1,024 tokens each\nSlidingWindow(100): allgather"
    )
    # three other shards of 1,024 tokens, 2 key heads, K and V of 64 channels, 2 bytes
    assert "a full ring moves 1.5 MiB" in texts[0]
    assert "together: balance 1.00" in texts[0]


def test_trace(tmp_path: Path) -> None:
    def job(transport: Transport) -> Any:
        ctx = ContextParallel(transport, WINDOW, 1024, heads=(1, 1), schedule="ring", placement="contiguous")
        x = torch.randn(1, 1, ctx.local, 8)
        with ctx.trace() as found:
            rw.attention(x, x, x, WINDOW, context=ctx)
            with ctx.trace() as inside:
                rw.attention(x, x, x, WINDOW, context=ctx)
            rw.attention(x, x, x, WINDOW, context=ctx)
        with ctx.trace() as again:
            pass
        assert not again.events
        assert (len(inside.events), 2 * len(inside.events)) == (len(found.events) // 2, len(found.events))
        del found.events[len(inside.events) :]
        return found

    traces = run(2, job)
    assert [event.stage for event in traces[1].events if event.kind == "compute"] == [0, 1]
    assert [event.kind for event in traces[0].events] == ["compute"]
    with pytest.raises(UnsupportedError, match="trace: got no events"):
        Trace(0).export_chrome_trace(tmp_path / "none.json")


def test_traces_are_written_for_the_viewers_of_the_profiler(tmp_path: Path) -> None:
    """Traces have Chrome's format: a process for each rank, microseconds, and no overlapping slices in a row."""
    messages = [
        Event("receive", "keys", stage, start, start + 2.0, 64) for stage, start in ((1, 1.0), (2, 1.5), (3, 3.25))
    ]
    traces = [Trace(0, [Event("compute", "branch 0", 0, 1.0, 2.0, 0), *reversed(messages)]), Trace(1, messages[:1])]
    path = export_chrome_trace(traces, tmp_path / "new" / "step.json")
    lines = json.loads(path.read_text("utf-8"))["traceEvents"]
    names = {(line["pid"], line["tid"]): line["args"]["name"] for line in lines if line["name"] == "thread_name"}
    slices = [line for line in lines if line["ph"] == "X"]
    assert len(slices) == 5
    by_row: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for each in slices:
        row = each["pid"], each["tid"]
        assert names[row] == each["cat"]
        by_row.setdefault(row, []).append((each["ts"], each["ts"] + each["dur"]))
    assert sorted(map(sorted, by_row.values())) == [
        [(1e6, 2e6)], [(1e6, 3e6)], [(1e6, 3e6), (3.25e6, 5.25e6)], [(1.5e6, 3.5e6)],
    ]  # fmt: skip
    (first,) = [each for each in slices if each["pid"] == 1]
    assert (first["name"], first["args"]) == ("keys, stage 1", {"stage": 1, "bytes": 64})


def test_caches() -> None:
    """A pattern is planned once, and a new table is planned anew."""
    ctx = ContextParallel(None, WINDOW, 512, heads=(1, 1))
    assert ctx.schedules.of(WINDOW) is ctx.schedules.of(rw.SlidingWindow(100))
    first, second = (rw.patterns.random_blocks(512, 0.5, seed=seed) for seed in (0, 1))
    assert ctx.schedules.of(first) is ctx.schedules.of(first)
    assert ctx.schedules.of(first) is not ctx.schedules.of(second)


def test_a_handle_that_is_rebuilt_keeps_its_tag() -> None:
    handle = ContextParallel(None, WINDOW, 256, heads=(1, 1)).tagged("layer 3")
    assert torch.equal(handle.rebuild(None)._tag, handle._tag)
    assert handle._tag.any()


def test_transforms_of_functions_are_refused() -> None:
    """torch.func cannot map or differentiate an exchange with other ranks; the library's error says so before torch's own."""
    ctx = ContextParallel(None, WINDOW, 256, heads=(1, 1))
    x = torch.randn(2, 1, 1, 256, 8)

    def call(x: torch.Tensor) -> torch.Tensor:
        return rw.attention(x, x, x, WINDOW, context=ctx)

    wanted = "context: got a torch.func transform; wanted a call without one."
    with pytest.raises(UnsupportedError, match=wanted):
        torch.vmap(call)(x)
    with pytest.raises(UnsupportedError, match=wanted):
        torch.func.grad(lambda x: call(x).sum())(x[0])
    with pytest.raises(UnsupportedError, match="forward-mode"):
        torch.func.jvp(call, (x[0],), (x[1],))


def test_a_context_that_is_gone() -> None:
    ctx = ContextParallel(None, WINDOW, 256, heads=(1, 1))
    x = torch.randn(1, 1, 256, 8, requires_grad=True)
    out = rw.attention(x, x, x, WINDOW, context=ctx)
    del ctx
    # its results keep it alive
    assert torch.autograd.grad(out.sum(), x)[0].isfinite().all()


def test_copies_are_handles() -> None:
    """Copies of a module (a weight average, a stack of layers) share its context; pickling it raises an explanation."""
    ctx = ContextParallel(None, WINDOW, 64, heads=(2, 2))
    layer = rw.nn.MultiheadAttention(16, 2, pattern=WINDOW, context=ctx, batch_first=True)
    again = copy.deepcopy(layer)
    assert again.context is ctx
    x = torch.randn(1, 64, 16)
    assert torch.equal(again(x, x, x)[0], layer(x, x, x)[0])
    handle = copy.copy(ContextParallel(None, WINDOW, 64, heads=(2, 2)))
    gc.collect()
    q = torch.randn(1, 2, 64, 8)
    assert torch.equal(rw.attention(q, q, q, WINDOW, context=handle), rw.attention(q, q, q, WINDOW, context=ctx))
    for thing in (ctx, layer):
        with pytest.raises(UnsupportedError, match="context: got a pickle of it; wanted the process that made it"):
            pickle.dumps(thing)


def test_patterns_and_terms_of_inference_mode() -> None:
    """Patterns and terms made in inference mode serve calls outside of it, as without a context."""
    ctx = ContextParallel(None, WINDOW, 64, heads=(2, 2))
    with torch.inference_mode():
        pattern, term = rw.BlockTable(torch.ones(2, 1, 1, dtype=torch.bool), 64), rw.ALiBi.of_heads(2)
    grads = []
    for context in (ctx, None):
        q = torch.arange(1024.0).sin().reshape(1, 2, 64, 8).requires_grad_()
        rw.attention(q, q, q, pattern, terms=term, context=context).square().sum().backward()
        grads.append(q.grad)
    torch.testing.assert_close(*grads)


def test_whole_tensors_under_tables_of_key_heads() -> None:
    q, k = torch.randn(1, 4, 64, 8), torch.randn(1, 2, 64, 8)
    pattern = rw.BlockTable(
        torch.tensor([[[True, False], [True, True]], [[True, True], [False, True]]]), 32, heads="kv"
    )
    ctx = ContextParallel(None, pattern, 64, heads=(4, 2))
    torch.testing.assert_close(ctx.replicated(q, k, k, pattern), rw.attention(q, k, k, pattern))


def test_contexts_of_other_lengths_share_connections() -> None:
    """Ranks may create contexts of other lengths in any order, as a loader's workers do, but must call them in one order."""
    tokens = (200, 331)
    x = torch.randn(1, 2, max(tokens), 16)

    def job(transport: Transport, calls: tuple[tuple[int, ...], ...]) -> list[torch.Tensor]:
        first = ContextParallel(transport, rw.Causal(), 1, heads=(2, 2))
        made = tokens if transport.rank else tokens[::-1]
        contexts = {n: ContextParallel(first, rw.Causal(), n, heads=(2, 2)) for n in made}
        found = []
        for n in calls[transport.rank]:
            mine = contexts[n].shard(x[:, :, :n], 2)
            found.append(contexts[n].unshard(rw.attention(mine, mine, mine, rw.Causal(), context=contexts[n]), 2))
        return found

    for found in run(2, job, (tokens, tokens)):
        for n, out in zip(tokens, found, strict=True):
            torch.testing.assert_close(out, rw.attention(*[x[:, :, :n]] * 3, rw.Causal()), atol=1e-5, rtol=0)
    with pytest.raises(rw.RingError, match="seq_len"):
        run(2, job, (tokens, tokens[::-1]))
