"""Test the check of a backend on the user's device: its cases, its verdicts, and the calls for which auto asks for it.

A stand-in for a device: PyTorch says that there is a GPU, and the check of a backend is replaced.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ringweave as rw
from ringweave import device_check, program
from ringweave.backends import BACKENDS, cpu, dense_batched, flex
from ringweave.backends.backend import Upstream
from ringweave.call import Call, Operands
from ringweave.plan import Branch, branches
from ringweave.precision import STORED
from ringweave.terms import KINDS

FORMS = ("full", "causal", "sparse", "selected")


def small(dtype: torch.dtype = torch.float32, needs_grad: bool = True, device: str = "cpu", heads: int = 2) -> Call:
    return Call(1, heads, heads // 2, 500, 500, 32, 16, dtype, device, needs_grad)


def case(needs_grad: bool = False, head_dim: int = 64, device: str = "cuda") -> Call:
    return Call(1, 4, 2, 256, 256, head_dim, 64, torch.bfloat16, device, needs_grad)


def first(pattern: rw.Pattern) -> Branch:
    return branches(pattern, 256, 256, heads=4)[0]


def chosen(of: Call, branch: Branch) -> str:
    return program.choose_backend("auto", of, branch).name


# ---- the cases


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("needs_grad", [False, True])
def test_a_right_kernel_passes(dtype: torch.dtype, form: str, needs_grad: bool) -> None:
    tried = [dense_batched.BACKEND] if cpu.module() is None else [dense_batched.BACKEND, cpu.BACKEND]
    for backend in [*tried, *[BACKENDS["gather"]] * (form == "selected")]:
        assert device_check.check(backend, small(dtype, needs_grad), form) is None


def test_the_cases_are_the_published_faults_of_kernels() -> None:
    """Each form has 64 channels, a length that is no multiple of 128, NaN after the last token, and keys that no query attends."""
    for form in FORMS:
        hostile = [each for each in device_check._cases(small(), form) if each.hostile]
        for each in hostile:
            assert each.call.head_dim == each.call.value_dim == 64
            assert each.call.nk % 128
            allowed = each.pattern.to_dense(each.call.nq, each.call.nk, heads=each.call.heads)
            assert (form == "full") == bool(allowed.any(2).all())
        assert hostile


@pytest.mark.parametrize("spoiled", ["past the length", "unattended keys", "unattended values", "empty queries"])
def test_a_kernel_that_reads_what_it_must_not_is_wrong(spoiled: str) -> None:
    """The check finds a kernel that multiplies masked numbers by zero, for each of its inputs."""

    def backward(upstream: Upstream, inputs: Operands, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = dense_batched.backward(upstream, inputs, *rest)
        q, k, v = inputs[:3]
        if spoiled == "past the length" and not k.is_contiguous():
            after = k.as_strided((*k.shape[:2], k.shape[2] + 1, k.shape[3]), k.stride(), k.storage_offset())
            dq = dq + 0.0 * after[:, :1, -1:]
        if spoiled == "unattended keys":
            dq = dq + 0.0 * k.sum()
        if spoiled == "unattended values":
            dk = dk + 0.0 * v.sum()
        if spoiled == "empty queries":
            dv = dv + 0.0 * q.sum()
        return dq, dk, dv

    wrong = dataclasses.replace(dense_batched.BACKEND, backward=backward)
    # the first of two key heads that are padded is no contiguous tensor
    assert "it is wrong" in str(device_check.check(wrong, small(heads=4), "sparse"))


def test_terms_and_dropout_are_tried_with_what_their_tables_get() -> None:
    about = dataclasses.replace(small(), features=frozenset({*KINDS, "dropout"}), learned=1)
    assert device_check.check(dense_batched.BACKEND, about, "sparse") is None

    def backward(upstream: Upstream, inputs: Operands, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        grads = dense_batched.backward(upstream, inputs, *rest)
        assert inputs.terms is not None
        next(total for total in inputs.terms.totals if total is not None).mul_(1.01)
        return grads

    wrong = dataclasses.replace(dense_batched.BACKEND, backward=backward)
    assert device_check.check(wrong, about, "sparse") == "tried on this GPU, it is wrong: table 0 by 0.01 of its size"


def test_tables_that_do_not_learn_are_tried_without_gradients() -> None:
    def backward(upstream: Upstream, inputs: Operands, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        assert inputs.terms is not None
        assert set(inputs.terms.totals) == {None}
        return dense_batched.backward(upstream, inputs, *rest)

    about = dataclasses.replace(small(), features=frozenset(KINDS))
    backend = dataclasses.replace(dense_batched.BACKEND, backward=backward)
    assert device_check.check(backend, about, "sparse") is None


@pytest.mark.parametrize("stored", list(STORED))
def test_keys_and_values_of_8_bits_are_tried_as_they_are_stored(stored: torch.dtype) -> None:
    about = dataclasses.replace(small(needs_grad=False), kv_dtype=stored)
    assert device_check.check(dense_batched.BACKEND, about, "sparse") is None

    def forward(inputs: Operands, *rest: Any) -> tuple[Tensor, Tensor]:
        assert inputs.k.dtype == stored
        assert inputs.scales is not None
        return dense_batched.forward(inputs._replace(scales=inputs.scales._replace(k=inputs.scales.v)), *rest)

    wrong = dataclasses.replace(dense_batched.BACKEND, forward=forward)
    assert "it is wrong: out by" in str(device_check.check(wrong, about, "sparse"))


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
    verdict = device_check.check(wrong, small(), "sparse")
    assert verdict is not None
    assert said in verdict
    assert "dq" not in verdict
    assert device_check.check(wrong, small(needs_grad=False), "sparse") is None


@pytest.mark.parametrize("error", [RuntimeError, AssertionError, ValueError, KeyError])
def test_an_error_of_a_kernel_is_quoted(error: type[Exception]) -> None:
    def forward(*arguments: object) -> tuple[Tensor, Tensor]:
        raise error("no kernel image\nand more")

    broken = dataclasses.replace(dense_batched.BACKEND, forward=forward)
    verdict = device_check.check(broken, small(needs_grad=False), "sparse")
    assert str(verdict).startswith(f"tried on this GPU, it raises {error.__name__}: ")
    assert "no kernel image" in str(verdict)


# ---- checks before the first use


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Call, str]]:
    """Record the checks on a machine with a GPU, where ``flash`` is wrong at D = 128."""
    made: list[tuple[str, Call, str]] = []

    def check(backend: Any, of: Call, form: str) -> str | None:
        made.append((backend.name, of, form))
        return "it is wrong" if of.head_dim == 128 else None

    monkeypatch.setattr(flex, "installed", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(device_check, "_checked", functools.cache(device_check._checked.__wrapped__))  # type: ignore[attr-defined]
    monkeypatch.setattr(device_check, "check", check)
    return made


def test_a_dense_kernel_is_checked_once_for_each_kind(
    checks: list[tuple[str, Call, str]], caplog: pytest.LogCaptureFixture
) -> None:
    wide, causal = dataclasses.replace(case(head_dim=128), value_dim=128), first(rw.Causal())
    with caplog.at_level(logging.WARNING, "ringweave"):
        for _ in range(2):
            assert chosen(case(), causal) == "flash"
            assert chosen(case(), first(rw.Full())) == "flash"
            assert chosen(wide, causal) == "flex"
    assert [(name, of.head_dim, form) for name, of, form in checks] == [
        ("flash", 64, "causal"), ("flash", 64, "full"), ("flash", 128, "causal"),
    ]  # fmt: skip
    assert {of.device for _, of, _ in checks} == {"cuda:0"}
    (record,) = caplog.records
    assert record.getMessage() == "auto leaves out the backend flash on cuda:0: it is wrong"
    assert program.choose_backend("flash", wide, causal).name == "flash"


def test_nothing_is_tried_while_a_graph_is_captured(
    checks: list[tuple[str, Call, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    causal = first(rw.Causal())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert chosen(case(), causal) == "flex"
    assert not checks
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert chosen(case(), causal) == "flash"
    # the result is remembered, so a capture can use it
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert chosen(case(), causal) == "flash"


def test_without_a_gpu_auto_answers_as_if_all_went_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, auto assumes that every check passes, so that plans for other machines can be explained."""
    assert not torch.cuda.is_available()
    monkeypatch.setattr(flex, "installed", lambda: True)
    assert chosen(case(), first(rw.SlidingWindow(9))) == "flex"
    assert chosen(case(), first(rw.Causal())) == "flash"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("needs_grad", [False, True])
def test_the_engines_of_torch_pass_on_the_device(dtype: torch.dtype, form: str, needs_grad: bool) -> None:
    of = dataclasses.replace(small(dtype, needs_grad, "cuda"), head_dim=64, value_dim=64)
    names = ["flex", *["flash"] * (form in ("full", "causal")), *["gather"] * (form == "selected")]
    assert {name: device_check.check(BACKENDS[name], of, form) for name in names} == dict.fromkeys(names)
