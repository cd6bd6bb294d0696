"""Test which backend computes a branch, and that the choice changes speed, never results."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import ringweave as rw
from ringweave import program
from ringweave.backends import BACKENDS, Backends, cpu, flex
from ringweave.backends.backend import delta_in_chunks
from ringweave.call import Call
from ringweave.environment import CPU_VARIANT
from ringweave.errors import UnsupportedError
from ringweave.plan import Branch, branches

from .cases import MIXTURES, PATTERNS


def case(n: int = 256, device: str = "cpu", dtype: torch.dtype = torch.float32, dim: int = 64) -> Call:
    return Call(1, 4, 2, n, n, dim, dim, dtype, device)


def first(pattern: rw.Pattern, n: int = 256) -> Branch:
    return branches(pattern, n, n, heads=4)[0]


def chosen(pattern: rw.Pattern, about: Call) -> str:
    return program.choose_backend("auto", about, first(pattern, about.nq)).name


@pytest.mark.skipif(cpu.module() is None, reason="the native kernel is absent: there was no compiler")
def test_auto_takes_the_native_kernel_where_it_can() -> None:
    assert chosen(rw.SlidingWindow(9), case()) == "cpu"
    assert chosen(rw.Causal(), case()) == "cpu"
    assert chosen(rw.SlidingWindow(9), case(dtype=torch.float64)) == "dense_batched"
    assert chosen(rw.Causal(), case(dtype=torch.float64)) == "sdpa"
    assert chosen(rw.SlidingWindow(9), case(dim=20)) == "dense_batched"


def test_auto_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "installed", lambda: True)
    for pattern, name in ((rw.Causal(), "flash"), (rw.Full(), "flash"), (rw.SlidingWindow(9), "flex")):
        assert chosen(pattern, case(device="cuda")) == name
    # PyTorch's fused kernels need Dv == D
    assert chosen(rw.Causal(), dataclasses.replace(case(device="cuda"), value_dim=16)) == "flex"
    assert chosen(rw.Causal(), case(dtype=torch.float64, device="cuda")) == "dense_batched"
    monkeypatch.setattr(flex, "installed", lambda: False)
    assert chosen(rw.SlidingWindow(9), case(device="cuda")) == "dense_batched"


def test_a_dense_branch_with_a_huge_plan_uses_a_kernel_without_plans() -> None:
    n = 2**20
    assert chosen(rw.Causal(), case(n)) == "sdpa"
    assert rw.explain(rw.Causal(), n, heads=4, as_dict=True)["backend"]["chosen"] == [
        {"backend": "sdpa", "branches": 1}
    ]


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "module", lambda: None)
    assert chosen(rw.SlidingWindow(9), case()) == "dense_batched"
    assert chosen(rw.Causal(), case()) == "sdpa"
    q = torch.randn(1, 2, 64, 8)
    with pytest.raises(UnsupportedError, match="installed without a C.. compiler"):
        rw.attention(q, q, q, backend="cpu")
    torch.testing.assert_close(
        rw.attention(q, q, q, rw.Causal()), rw.attention(q, q, q, rw.Causal(), backend="dense_batched")
    )
    with pytest.raises(UnsupportedError, match="one of none: no native kernel"):
        cpu.variant()


@pytest.mark.parametrize("name", list(PATTERNS | MIXTURES))
def test_auto_never_changes_meaning(name: str) -> None:
    pattern = (PATTERNS | MIXTURES)[name](200)
    q, k, v = torch.randn(1, 4, 200, 16), torch.randn(1, 2, 200, 16), torch.randn(1, 2, 200, 16)
    exact = rw.attention(q, k, v, pattern, backend="reference")
    for backend in program.PREFERENCE:
        if backend not in ("cpu", "dense_batched") or (backend == "cpu" and cpu.module() is None):
            continue  # backends for dense branches or GPUs only
        torch.testing.assert_close(rw.attention(q, k, v, pattern, backend=backend), exact)
    torch.testing.assert_close(rw.attention(q, k, v, pattern), exact)


def test_an_unknown_backend() -> None:
    with pytest.raises(
        UnsupportedError,
        match="backend: got 'warp'; wanted one of auto, reference, dense_batched, gather, sdpa, cpu, flex, flash",
    ):
        program.choose_backend("warp", case(), first(rw.Full()))


@pytest.mark.parametrize("shape", [(2, 3, 5, 8), (1, 1, 4000, 600)])
def test_delta(shape: tuple[int, ...]) -> None:
    dout, out, dlse = torch.randn(shape).bfloat16(), torch.randn(shape).bfloat16(), torch.randn(shape[:3])
    lse = torch.randn(shape[:3])
    dead = torch.rand(shape[:3]) < 0.2
    lse[dead], dout[dead] = -torch.inf, torch.nan
    products = (dout.double() * out.double()).sum(-1)
    # a row without keys has gradient 0, whatever its upstream gradient contains
    want, sloped = (x.float().masked_fill(dead, 0.0) for x in (products, products - dlse))
    torch.testing.assert_close(delta_in_chunks(dout, out, lse, dlse), sloped)
    if cpu.module() is not None and shape[3] <= 256:
        torch.testing.assert_close(cpu.delta(dout, out, lse, dlse), sloped)
        torch.testing.assert_close(cpu.delta(dout, out, lse, None), want)


def test_calls_from_several_threads() -> None:
    from concurrent.futures import ThreadPoolExecutor

    q = torch.randn(1, 4, 300, 16)
    want = rw.attention(q, q, q, PATTERNS["sinks"](300))
    with ThreadPoolExecutor(8) as pool:
        for got in pool.map(lambda _: rw.attention(q, q, q, PATTERNS["sinks"](300)), range(32)):
            assert torch.equal(got, want)


@pytest.mark.skipif(cpu.module() is None, reason="the native kernel is absent: there was no compiler")
def test_the_variant_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    native = cpu.module()
    assert native is not None
    assert cpu.variant() == native.variants()[0]
    last = native.variants()[-1]
    monkeypatch.setenv(CPU_VARIANT, last)
    assert cpu.variant() == last
    monkeypatch.setenv(CPU_VARIANT, "avx9")
    with pytest.raises(UnsupportedError, match=f"RINGWEAVE_CPU_VARIANT: got 'avx9'; wanted one of .*{last}"):
        cpu.variant()


def test_no_pass_over_out_where_the_kernel_sums_it_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delta is computed for a gradient of lse alone; without one, PyTorch's kernel has out."""
    passes = []

    def noting(*given: Any) -> Tensor:
        passes.append(given)
        return delta_in_chunks(*given)

    monkeypatch.setitem(BACKENDS, "sdpa", dataclasses.replace(BACKENDS["sdpa"], delta=noting))
    q, k, v = (torch.randn(1, 2, 40, 16, requires_grad=True) for _ in range(3))
    got = torch.autograd.grad(rw.attention(q, k, v, rw.Causal(), backend="sdpa").sum(), (q, k, v))
    assert not passes
    want = torch.autograd.grad(rw.attention(q, k, v, rw.Causal(), backend="reference").sum(), (q, k, v))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
    out, lse = rw.attention_with_lse(q, k, v, rw.Causal(), backend="sdpa")
    torch.autograd.grad(out.sum() + lse.sum(), (q, k, v))
    assert len(passes) == 1


@pytest.mark.parametrize("name", ["reference", "dense_batched", "cpu"])
def test_whole_graphs_name_a_backend_that_was_never_looked_up(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace needs to know that the backend exists, and does not import it."""
    monkeypatch.setattr(program, "BACKENDS", Backends())
    x = torch.randn(1, 2, 33, 8)

    @functools.partial(torch.compile, fullgraph=True, backend="eager")
    def called(x: torch.Tensor) -> torch.Tensor:
        return rw.attention(x, x, x, rw.Causal(), backend=name)

    assert torch.equal(called(x), rw.attention(x, x, x, rw.Causal(), backend=name))
