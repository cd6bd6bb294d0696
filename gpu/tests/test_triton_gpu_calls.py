"""Test calls of the Triton backend on a GPU: profiled launches, synchronisations, recompilations and CUDA graphs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ringweave as rw
from ringweave import api
from ringweave.errors import UnsupportedError
from ringweave_gpu import triton
from tests.on_gpu import DEVICE, EVERYTHING, captured
from tests.operators import by_operators
from tests.oracle import NAMES, Inputs
from tests.test_conformance import run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not triton.installed(), reason="triton is not installed")]


def launches(call: Callable[[], object], trace: Path) -> list[str]:
    """Return the kernels that a call launches, sorted by name, after earlier calls made plans and kernels."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        call()
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    return sorted(event["name"] for event in events if event.get("cat") == "kernel")


@pytest.mark.parametrize("name", ["full", "causal", "window", "sinks", "documents", "table_per_head"])
def test_launches(name: str, tmp_path: Path) -> None:
    """A call launches one kernel forward and three backward, after one that turns an infinite lse into NaN."""
    x = Inputs.random(2048, heads=4, dim=64, dtype=torch.bfloat16).to(DEVICE)
    pattern = EVERYTHING[name](2048)
    leaves = x.leaves()

    def forward() -> torch.Tensor:
        return rw.attention(*leaves, pattern, backend="triton")

    assert launches(forward, tmp_path / "forward.json") == ["forward"]
    out = forward()

    def backward() -> object:
        return torch.autograd.grad(out, leaves, x.dout, retain_graph=True)

    *own, cleaned = launches(backward, tmp_path / "backward.json")
    assert own == ["backward_kv", "backward_q", "delta"]
    assert "nan_to_num" in cleaned


def test_launches_of_a_decoding_step(tmp_path: Path) -> None:
    """A decoding step launches the shares of its long row, and their join."""
    nk = 50_000
    x = Inputs.random(1, nk, heads=8, kv_heads=1, dim=64, dtype=torch.bfloat16).to(DEVICE)

    def step() -> object:
        return rw.attention(x.q, x.k, x.v, rw.Causal(), q_offset=nk - 1, backend="triton")

    assert launches(step, tmp_path / "step.json") == ["forward", "join"]


@pytest.mark.parametrize("name", ["sinks", "global", "table_per_head"])
def test_forward_and_backward_in_a_graph(name: str) -> None:
    """Once plans, queues and kernels exist, a call reads nothing from the device, so it can be captured."""
    x = Inputs.random(3000, heads=4, kv_heads=2, dim=64, dtype=torch.bfloat16).to(DEVICE)
    pattern = EVERYTHING[name](3000)
    leaves = x.leaves()

    def both() -> tuple[torch.Tensor, ...]:
        out = rw.attention(*leaves, pattern, backend="triton")
        return out.detach(), *torch.autograd.grad(out, leaves, x.dout)

    want = both()
    graph, got = captured(both)
    for part in got:
        part.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    for found, wanted in zip(got, want, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("by_hand", [True, False])
@pytest.mark.parametrize("scored", [False, True])
def test_a_step_over_pages_in_a_graph(scored: bool, by_hand: bool) -> None:
    """A call after one with the same lengths copies nothing between host and device, so it can be captured."""
    generator = torch.Generator(DEVICE).manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16, generator=generator)

    cache = rw.PagedCache.empty(2, 3000, heads=2, dim=64, dtype=torch.bfloat16, device=DEVICE)
    cache.append(draw(2, 2, 2500, 64), draw(2, 2, 2500, 64))
    cache.append(draw(1, 2, 130, 64), draw(1, 2, 130, 64), rows=[1])
    if by_hand:
        cache = rw.PagedCache(cache.k, cache.v, cache.table, cache.lengths.clone())
    q = draw(2, 4, 1, 64)
    pattern = (rw.SlidingWindow(700) | rw.Sinks(4)) & rw.Causal()
    terms = rw.terms.ALiBi(torch.tensor([0.5, 0.1, 0.2, 0.3], device=DEVICE)) if scored else None

    def step() -> torch.Tensor:
        return rw.paged_attention(q, cache, pattern, terms=terms, backend="triton")

    step()
    torch.cuda.synchronize()
    if not by_hand:
        torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph, got = captured(step)
    q.copy_(draw(*q.shape))
    got.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(got, step())


def test_a_graph_of_a_step_over_pages_needs_an_earlier_call() -> None:
    cache = rw.PagedCache.empty(1, 1000, heads=2, dim=64, dtype=torch.bfloat16, device=DEVICE)
    cache.lengths.fill_(700)
    q = torch.randn(1, 2, 1, 64, device=DEVICE, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedError, match="Call it before"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        rw.paged_attention(q, cache, backend="triton")


@pytest.mark.parametrize("name", ["causal", "sinks", "table_per_head", "longnet"])
def test_a_second_call_does_not_wait(name: str) -> None:
    x = Inputs.random(1000, heads=4, kv_heads=2, dim=64, dtype=torch.bfloat16).to(DEVICE)
    pattern, leaves = EVERYTHING[name](1000), x.leaves()

    def both() -> None:
        torch.autograd.grad(rw.attention(*leaves, pattern, backend="triton"), leaves, x.dout)

    both()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        both()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_table_within_a_pattern_is_planned_and_computed_in_a_graph() -> None:
    """A table within a pattern is planned inside a graph without reading its masks; a replay uses another table."""
    x = Inputs.random(1024, heads=4, kv_heads=2, dim=64, dtype=torch.bfloat16).to(DEVICE)
    tables = torch.rand(2, 16, 16, generator=torch.Generator().manual_seed(1)) < 0.4
    mask, leaves = tables[0].to(DEVICE), x.leaves()

    def both() -> tuple[torch.Tensor, ...]:
        out = rw.attention(*leaves, rw.BlockTable(mask, 64) & rw.Causal(), backend="triton")
        return out.detach(), *torch.autograd.grad(out, leaves, x.dout)

    graph, got = captured(both)
    mask.copy_(tables[1])
    graph.replay()
    torch.cuda.synchronize()
    for found, wanted in zip(got, both(), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("name", ["causal", "sinks", "table_per_head", "longnet"])
def test_a_repeated_call_is_checked_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repeated call finds its program, has the bits of the operators, and is seen by whatever watches these."""
    x = Inputs.random(1000, heads=4, kv_heads=2, dim=64, dtype=torch.bfloat16).to(DEVICE)
    pattern, leaves = EVERYTHING[name](1000), x.leaves()

    def both() -> tuple[torch.Tensor, ...]:
        out = rw.attention(*leaves, pattern, backend="triton")
        return out.detach(), *torch.autograd.grad(out, leaves, x.dout)

    out = by_operators(*leaves, pattern, backend="triton")[0]
    wanted = out.detach(), *torch.autograd.grad(out, leaves, x.dout)
    for _ in range(2):
        both()
    with monkeypatch.context() as patched:
        patched.setattr(api, "checked", lambda given: pytest.fail("a known call is checked again"))
        for got, want in zip(both(), wanted, strict=True):
            assert torch.equal(got, want)
        for watching in (torch.autocast(DEVICE, torch.float16), torch.profiler.profile(), torch.device("cpu")):
            with watching, pytest.raises(pytest.fail.Exception):
                both()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_another_device_than_the_current_one() -> None:
    x = Inputs.random(300, heads=2, dim=64, dtype=torch.bfloat16)
    here, there = (run(x.to(f"cuda:{index}"), rw.Causal(), "triton") for index in range(2))
    assert torch.cuda.current_device() == 0
    for name in NAMES:
        assert torch.equal(here[name].cpu(), there[name].cpu()), name


def test_another_length_compiles_nothing() -> None:
    from ringweave_gpu.triton import kernels

    def compiled() -> int:
        names = ("forward", "join", "delta", "backward_q", "backward_kv")
        return sum(len(getattr(kernels, name).device_caches[torch.cuda.current_device()][0]) for name in names)

    made = []
    for tokens in (1024, 1040, 1025, 1151, 1152):
        x = Inputs.random(tokens, heads=4, dim=40, dtype=torch.float16).to(DEVICE)
        run(x, rw.SlidingWindow(100) & rw.Causal(), "triton")
        made.append(compiled())
    assert made == made[:1] * 5
