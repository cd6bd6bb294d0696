from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ringweave as rw
from ringweave import program
from ringweave.backends import BACKENDS, cpu, dense_batched, gpu_check, triton, tuning
from ringweave.backends.backend import Backend, Upstream
from ringweave.call import Call, Operands
from ringweave.errors import UnsupportedError
from ringweave.plan import Branch, branches
from ringweave.precision import STORED
from ringweave.terms import KINDS

DENSE_KINDS = ("full", "causal", "sparse")


def small(dtype: torch.dtype = torch.float32, needs_grad: bool = True, device: str = "cpu") -> Call:
    return Call(1, 4, 2, 500, 500, 32, 16, dtype, device, needs_grad)


def case(needs_grad: bool = False, head_dim: int = 64) -> Call:
    return Call(1, 4, 2, 256, 256, head_dim, 64, torch.bfloat16, "cuda", needs_grad)


def first(pattern: rw.Pattern) -> Branch:
    return branches(pattern, 256, 256, heads=4)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dense_kind", DENSE_KINDS)
@pytest.mark.parametrize("needs_grad", [False, True])
def test_a_right_kernel_passes(dtype: torch.dtype, dense_kind: str, needs_grad: bool) -> None:
    tried = [dense_batched.BACKEND] if cpu.module() is None else [dense_batched.BACKEND, cpu.BACKEND]
    for backend in tried:
        assert gpu_check.check(backend, small(dtype, needs_grad), dense_kind) is None


def test_terms_and_dropout_are_tried_with_what_their_tables_get() -> None:
    about = dataclasses.replace(small(), features=frozenset({*KINDS, "dropout"}))
    assert gpu_check.check(dense_batched.BACKEND, about, "sparse") is None

    def backward(upstream: Upstream, inputs: Operands, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        grads = dense_batched.backward(upstream, inputs, *rest)
        assert inputs.terms is not None
        next(total for total in inputs.terms.totals if total is not None).mul_(1.01)
        return grads

    wrong = dataclasses.replace(dense_batched.BACKEND, backward=backward)
    assert gpu_check.check(wrong, about, "sparse") == "tried on this GPU, it is wrong: table 0 by 0.01 of its size"


@pytest.mark.parametrize("stored", list(STORED))
def test_keys_and_values_of_8_bits_are_tried_as_they_are_stored(stored: torch.dtype) -> None:
    about = dataclasses.replace(small(needs_grad=False), kv_dtype=stored)
    assert gpu_check.check(dense_batched.BACKEND, about, "sparse") is None

    def forward(inputs: Operands, *rest: Any) -> tuple[Tensor, Tensor]:
        assert inputs.k.dtype == stored
        assert inputs.scales is not None
        return dense_batched.forward(inputs._replace(scales=inputs.scales._replace(k=inputs.scales.v)), *rest)

    wrong = dataclasses.replace(dense_batched.BACKEND, forward=forward)
    assert "it is wrong: out by" in str(gpu_check.check(wrong, about, "sparse"))


def test_each_structure_is_tried() -> None:
    for dense_kind in DENSE_KINDS:
        seen: list[Branch] = []

        def forward(inputs: Operands, branch: Branch, dtype: torch.dtype, into: list[Branch] = seen) -> object:
            into.append(branch)
            raise RuntimeError

        backend = dataclasses.replace(dense_batched.BACKEND, forward=forward)  # type: ignore[arg-type]
        assert gpu_check.check(backend, small(needs_grad=False), dense_kind) is not None
        assert seen[0].dense_kind == dense_kind
    plan = seen[0].plan()
    assert {-1, 0} <= set(plan.mask_id.clamp(max=0).tolist())
    assert plan.row_ptr.diff().unique().numel() > 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda x: x * 1.001, "it is wrong: dk by 0.001"),
        (lambda x: x.fill_(torch.nan), "it is wrong: dk by nan"),
    ],
)
def test_a_wrong_result_is_named(change: Callable[[Tensor], Tensor], said: str) -> None:
    def backward(*arguments: object) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = dense_batched.backward(*arguments)  # type: ignore[arg-type]
        return dq, change(dk), dv

    wrong = dataclasses.replace(dense_batched.BACKEND, backward=backward)
    verdict = gpu_check.check(wrong, small(), "sparse")
    assert verdict is not None
    assert said in verdict
    assert "dq" not in verdict
    assert gpu_check.check(wrong, small(needs_grad=False), "sparse") is None


@pytest.mark.parametrize("error", [RuntimeError, AssertionError, ValueError, KeyError])
def test_what_raises_is_quoted(error: type[Exception]) -> None:
    def forward(*arguments: object) -> tuple[Tensor, Tensor]:
        raise error("no kernel image\nand more")

    broken = dataclasses.replace(dense_batched.BACKEND, forward=forward)
    verdict = gpu_check.check(broken, small(needs_grad=False), "sparse")
    assert str(verdict).startswith(f"tried on this GPU, it raises {error.__name__}: ")
    assert "no kernel image" in str(verdict)


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, Call, str]]:
    """Simulate a machine with a GPU where ``triton`` is wrong at D = 128, and record the checks."""
    made: list[tuple[str, Call, str]] = []

    def check(backend: Backend, of: Call, dense_kind: str) -> str | None:
        made.append((backend.name, of, dense_kind))
        return "it is wrong" if (backend.name, of.head_dim) == ("triton", 128) else None

    monkeypatch.setattr(gpu_check, "check", check)
    monkeypatch.setattr(gpu_check, "_verdict", functools.cache(gpu_check._verdict.__wrapped__))  # type: ignore[attr-defined]
    # no real process is started: it would find no GPU
    monkeypatch.setattr(gpu_check, "_COMMAND", ("/nonexistent",))
    monkeypatch.setenv(tuning.VARIABLE, str(tmp_path))
    monkeypatch.setattr(triton, "installed", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return made


def test_auto_tries_a_gpu_kernel_once_for_each_kind(
    checks: list[tuple[str, Call, str]], caplog: pytest.LogCaptureFixture
) -> None:
    window = first(rw.SlidingWindow(9))
    with caplog.at_level(logging.WARNING, "ringweave"):
        for _ in range(2):
            assert program.choose_backend("auto", case(), window).name == "triton"
            assert program.choose_backend("auto", case(), first(rw.Causal())).name == "flash"
            assert program.choose_backend("auto", case(head_dim=128), window).name == "dense_batched"
    names = [(name, of.head_dim, dense_kind) for name, of, dense_kind in checks]
    assert names == [("triton", 64, "sparse"), ("flash", 64, "causal"), ("triton", 128, "sparse")]
    assert {of.device for _, of, _ in checks} == {"cuda:0"}
    (record,) = caplog.records
    assert record.getMessage() == "auto leaves out the backend triton on cuda:0: it is wrong"
    # gradients have other kernels
    assert program.choose_backend("auto", case(needs_grad=True), window).name == "triton"
    assert len(checks) == 4


def test_a_named_backend_runs_without_a_check(checks: list[tuple[str, Call, str]]) -> None:
    assert program.choose_backend("triton", case(head_dim=128), first(rw.SlidingWindow(9))).name == "triton"
    assert not checks


def test_nothing_is_tried_while_a_graph_is_captured(
    checks: list[tuple[str, Call, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    window = first(rw.SlidingWindow(9))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert program.choose_backend("auto", case(), window).name == "dense_batched"
    assert not checks
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert program.choose_backend("auto", case(), window).name == "triton"
    # the result is remembered, so a capture can use it
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert program.choose_backend("auto", case(), window).name == "triton"


def test_explain_prints_the_verdict_of_a_check(checks: list[tuple[str, Call, str]]) -> None:
    call = {"dtype": torch.bfloat16, "device": "cuda", "as_dict": True, "needs_grad": False}
    facts = rw.explain(rw.SlidingWindow(9), 256, head_dim=128, **call)["backend"]  # type: ignore[call-overload]
    assert facts["chosen"] == [{"backend": "dense_batched", "branches": 1}]
    assert facts["others"]["triton"] == ["it is wrong"]
    assert facts["others"]["flash"] == ["auto gives it sparse patterns only where ringweave tune found it fastest"]


def test_on_a_cpu_explain_says_what_they_need() -> None:
    others = rw.explain(rw.SlidingWindow(9), 256, as_dict=True)["backend"]["others"]
    assert others["flash"] == ["it calls kernels for CUDA tensors, and these are on cpu"]
    assert others["flex"] == ["used only when named, or where measured to be fastest"]
    assert others["reference"] == ["used only when named"]


def test_without_a_gpu_auto_answers_as_if_all_went_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, auto assumes that every check passes, so that plans for other machines can be explained."""
    monkeypatch.setattr(triton, "installed", lambda: True)
    assert not torch.cuda.is_available()
    assert program.choose_backend("auto", case(), first(rw.SlidingWindow(9))).name == "triton"


@pytest.mark.skipif(not triton.installed(), reason="triton is not installed (it has wheels for Linux only)")
def test_what_triton_cannot_compile_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.errors import OutOfResources

    from ringweave.backends.triton import launch

    def forward(*arguments: object) -> tuple[Tensor, Tensor]:
        raise OutOfResources(300, 227, "shared memory")

    monkeypatch.setattr(launch, "forward", forward)
    x = torch.randn(1, 1, 16, 16)
    with pytest.raises(UnsupportedError, match=r"got 'triton' \(OutOfResources: out of resource: shared memory"):
        triton.forward(Operands(x, x, x, 1.0), first(rw.Full()), torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dense_kind", DENSE_KINDS)
@pytest.mark.parametrize("needs_grad", [False, True])
def test_the_gpu_kernels_pass_on_the_device(dtype: torch.dtype, dense_kind: str, needs_grad: bool) -> None:
    of = dataclasses.replace(small(dtype, needs_grad, "cuda"), head_dim=64, value_dim=64)
    tried = [triton.BACKEND] + [BACKENDS["flash"]] * (dense_kind != "sparse")
    assert [gpu_check.check(backend, of, dense_kind) for backend in tried] == [None] * len(tried)
