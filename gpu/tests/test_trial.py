"""Trials of backends on a GPU: checks, processes that crash or hang, stored verdicts, and what auto then chooses.

A stand-in for a device: PyTorch says that there is a GPU, and the processes of the trials are replaced.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ringweave as rw
from ringweave import device_check, program
from ringweave.backends import BACKENDS, dense_batched, flex, tuning
from ringweave.call import Call, Operands
from ringweave.cli.doctor import diagnose
from ringweave.errors import WARNED, UnsupportedError
from ringweave.plan import Branch, branches
from ringweave_gpu import trial, triton
from ringweave_gpu.trial import Job, Outcome, Verdict
from tests.test_device_check import FORMS, case, first, small

BEGAN = "print('ringweave: began', flush=True);"


WINDOW = first(rw.SlidingWindow(9))


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tuning.VARIABLE, str(tmp_path))
    trial._stored.cache_clear()
    WARNED.clear()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a machine with a GPU."""
    monkeypatch.setattr(triton, "installed", lambda: True)
    monkeypatch.setattr(flex, "installed", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(trial, "_checked", functools.cache(trial._checked.__wrapped__))  # type: ignore[attr-defined]
    monkeypatch.setattr(device_check, "_checked", functools.cache(device_check._checked.__wrapped__))  # type: ignore[attr-defined]
    monkeypatch.setattr(device_check, "check", lambda backend, of, form: None)


def found(monkeypatch: pytest.MonkeyPatch, lasts: bool = True, **outcomes: Outcome) -> list[Job]:
    """Replace the processes of trials by given outcomes, and return the list of their jobs."""
    jobs: list[Job] = []

    def apart(job: Job) -> tuple[Outcome, bool]:
        jobs.append(job)
        return outcomes.get(job.backend, Outcome(None, 9.0)), lasts

    monkeypatch.setattr(trial, "_apart", apart)
    return jobs


def hold(of: Call | None = None, branch: Branch = WINDOW) -> Verdict:
    of = of or case()
    return trial.hold(of, branch, program.contenders(of, branch))


def chosen(of: Call | None = None, branch: Branch = WINDOW) -> str:
    return program.choose_backend("auto", of or case(), branch).name


# ---- processes


def instead(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    monkeypatch.setattr(trial, "_COMMAND", (sys.executable, "-c", code))


JOB = Job("dense_batched", small(needs_grad=False), "sparse", (case(device="cpu"), WINDOW))


def test_a_process_of_its_own_tries_and_times() -> None:
    outcome, lasts = trial._apart(JOB)
    assert lasts
    assert outcome.reason is None
    assert outcome.seconds is not None
    assert outcome.seconds > 0
    wrong, lasts = trial._apart(JOB._replace(backend="sdpa"))
    assert lasts
    assert wrong == Outcome("it can run no case of the trial")


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import ctypes; ctypes.string_at(0)", "it crashed its process (SIGSEGV)"),
        ("raise SystemExit(3)", "it crashed its process (exit status 3)"),
        ("import time; time.sleep(60)", "it did not finish in 1 s"),
        (r"print('a compiler\'s words\nringweave: found ' + '[\"it is wrong\", null]')", "it is wrong"),
    ],
    ids=["crash", "exit", "hang", "wrong"],
)
def test_a_process_that_dies_or_hangs_is_an_outcome(code: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    instead(monkeypatch, BEGAN + code)
    monkeypatch.setattr(trial, "LIMIT", 1.0)
    outcome, lasts = trial._apart(JOB)
    assert said in str(outcome.reason)
    assert lasts


@pytest.mark.parametrize(
    "code",
    [
        BEGAN + "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        BEGAN + r"print('ringweave: found [\"CUDA out of memory\", null]')",
        "raise RuntimeError('the device is busy')",
        "import time; time.sleep(60)",
    ],
    ids=["killed", "no memory", "no device", "never began"],
)
def test_a_want_of_memory_or_of_the_device_is_not_stored(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    instead(monkeypatch, code)
    monkeypatch.setattr(trial, "LIMIT", 1.0)
    outcome, lasts = trial._apart(JOB)
    assert outcome.reason is not None
    assert not lasts


def test_a_function_that_cannot_be_sent_to_a_process_is_an_outcome() -> None:
    # no graph records it: its result depends on values
    branch = first(rw.from_mask_mod(lambda b, h, q, k: q >= k if bool((q >= 0).all()) else q > k))
    outcome, lasts = trial._apart(JOB._replace(timed=(case(device="cpu"), branch)))
    assert str(outcome.reason).startswith("it was not tried: ")
    assert not lasts


def test_a_program_that_holds_python_is_not_begun_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial.subprocess, "run", None)
    for name in ("/usr/bin/blender", ""):
        monkeypatch.setattr(trial, "_COMMAND", (name,))
        assert trial._apart(JOB) == (Outcome("it was not tried, since no process of Python can be started"), False)


# ---- what auto chooses


def test_without_a_verdict_auto_takes_engines_of_pytorch(gpu: None) -> None:
    for needs_grad in (False, True):
        assert chosen(case(needs_grad)) == "flex"
        assert chosen(case(needs_grad), first(rw.Causal())) == "flash"
        assert chosen(case(needs_grad), first(rw.Selected(torch.zeros(256, 1, dtype=torch.int64)))) == "gather"
    assert chosen(dataclasses.replace(case(), dtype=torch.float64)) == "dense_batched"
    assert program.choose_backend("triton", case(), WINDOW).name == "triton"


@pytest.fixture
def hopper(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate the generation on which our kernels were measured."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))


@pytest.mark.parametrize("needs_grad", [False, True])
def test_on_hopper_auto_takes_the_measured_kinds(
    needs_grad: bool, hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was measured needs a check in a process, and no trial; everything else is as on other devices."""
    jobs = found(monkeypatch)
    of = case(needs_grad)
    assert chosen(of) == "triton"
    assert [(job.backend, job.form, job.timed) for job in jobs] == [("triton", "sparse", None)]
    assert chosen(of, first(rw.Causal())) == "flash"
    assert chosen(of, first(rw.Selected(torch.zeros(256, 1, dtype=torch.int64)))) == "gather"
    others = (
        {"head_dim": 256, "value_dim": 256}, {"head_dim": 32, "value_dim": 32}, {"dtype": torch.float32},
        {"features": frozenset({"ALiBi"})},
    )  # fmt: skip
    assert {chosen(dataclasses.replace(of, **other)) for other in others} == {"flex"}
    assert len(jobs) == 1


def test_on_hopper_a_failed_check_leaves_flex(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    found(monkeypatch, triton=Outcome("tried on this GPU, it crashed its process (SIGSEGV)"))
    assert chosen() == "flex"
    # a trial on this machine decides against the measurements too
    found(monkeypatch, triton=Outcome(None, 2.0), flex=Outcome(None, 1.0))
    assert hold().best == chosen() == "flex"


def test_steps_of_decoding_are_not_compiled_for_each_length(gpu: None) -> None:
    (branch,) = branches(rw.SlidingWindow(9), 16, 256, heads=4, q_offset=240)
    assert chosen(dataclasses.replace(case(), nq=16), branch) == "dense_batched"
    assert program.choose_backend("flex", dataclasses.replace(case(), nq=16), branch).name == "flex"


def test_a_right_and_faster_challenger_is_chosen(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = found(monkeypatch, triton=Outcome(None, 0.5), flex=Outcome(None, 1.0))
    verdict = hold()
    assert [job.backend for job in jobs] == list(verdict.outcomes) == ["flex", "dense_batched", "triton"]
    assert {job.timed for job in jobs} == {(case(), WINDOW)}
    assert chosen() == verdict.best == "triton"
    # other kinds of calls have no verdict
    assert chosen(case(needs_grad=True)) == "flex"
    assert chosen(case(head_dim=128)) == "flex"


@pytest.mark.parametrize(
    ("outcomes", "best"),
    [
        ({"triton": Outcome("tried on this GPU, it is wrong: out by 0.1 of its size", None)}, "flex"),
        ({"triton": Outcome("it is wrong", 0.1)}, "flex"),
        ({"triton": Outcome(None, 2.0)}, "flex"),
        ({"triton": Outcome(None, 0.96)}, "flex"),
        ({"triton": Outcome("tried on this GPU, it crashed its process (SIGSEGV)", None)}, "flex"),
        ({"triton": Outcome("tried on this GPU, it did not finish in 300 s", None)}, "flex"),
        ({"triton": Outcome("it is wrong", None), "flex": Outcome("it is wrong", None)}, "dense_batched"),
        (dict.fromkeys(("flex", "dense_batched", "triton"), Outcome("it is wrong", None)), "dense_batched"),
    ],
    ids=["wrong", "wrong and timed", "slow", "as fast", "crash", "hang", "flex wrong too", "all wrong"],
)
def test_a_wrong_or_slow_candidate_is_never_chosen(
    outcomes: dict[str, Outcome],
    best: str,
    gpu: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    found(monkeypatch, **({"flex": Outcome(None, 1.0)} | outcomes))
    with caplog.at_level(logging.WARNING, "ringweave"):
        for _ in range(2):
            assert hold().best == (None if "dense_batched" in outcomes else best)
            assert chosen() == best
    # each candidate that is left out is said once
    said = [record.getMessage() for record in caplog.records]
    assert sorted(said) == sorted(
        f"the trial of the backend {name} on this GPU failed, and auto uses another: {each.reason}"
        for name, each in outcomes.items() if each.reason
    )  # fmt: skip


def test_a_verdict_of_another_version_is_ignored(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    found(monkeypatch, triton=Outcome(None, 0.5))
    hold()
    kinds = {trial.kind(case(), WINDOW)}
    assert chosen() == "triton"
    for name, version in (("driver 1; kernels 1", None), (None, "a GPU; ringweave 0; torch 2; triton 3.6.0")):
        with monkeypatch.context() as patch:
            if name:
                patch.setattr(trial, "_made_of", lambda name=name: name)
            if version:
                patch.setattr("ringweave.backends.tuning_keys.where", lambda device, version=version: version)
            kinds.add(trial.kind(case(), WINDOW))
            assert chosen() == "flex"
    assert len(kinds) == 3
    assert chosen() == "triton"
    for part in ("a GPU", f"ringweave {rw.__version__}", f"torch {torch.__version__}", "triton ", "driver"):
        assert part in str(trial.kind(case(), WINDOW))


def test_a_kind_has_its_terms_and_form(gpu: None) -> None:
    calls = [
        case(), dataclasses.replace(case(), features=frozenset({"ALiBi"})),
        dataclasses.replace(case(), features=frozenset({"Bias"}), learned=3), dataclasses.replace(case(), kv_dtype=torch.int8),
    ]  # fmt: skip
    assert len({trial.kind(each, WINDOW) for each in calls}) == 4
    assert trial.kind(dataclasses.replace(case(), paged=True), WINDOW) is None
    assert trial.kind(case(device="cpu"), WINDOW) is None
    # the order of a set differs between processes
    spelled = {trial.kind(dataclasses.replace(case(), features=frozenset(of)), WINDOW) for of in ("abc", "cba")}
    assert len(spelled) == 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"of": 3, "date": "2026-01-01", "outcomes": {}}',
        '{"of": "x", "date": "never", "outcomes": {}}',
    ],
)
def test_a_damaged_file_is_no_verdict(text: str, gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    found(monkeypatch, triton=Outcome(None, 0.5))
    verdict = hold()
    file = trial._file(verdict.of)
    assert trial._read(file) == verdict
    line = json.loads(file.read_text())
    for damaged in (text, json.dumps(line | {"of": "another"}), json.dumps(line | {"outcomes": {"triton": [3, "x"]}})):
        file.write_text(damaged)
        trial._stored.cache_clear()
        assert chosen() == "flex"


def test_a_want_of_memory_leaves_no_verdict(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    found(monkeypatch, lasts=False, triton=Outcome("CUDA out of memory", None))
    hold()
    assert trial.known(case(), WINDOW) is None
    assert trial.stored() == []


def test_a_folder_that_cannot_be_made_leaves_flex(gpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(tuning.VARIABLE, str(tmp_path / "file"))
    found(monkeypatch, triton=Outcome(None, 0.5))
    assert hold().best == "triton"
    assert chosen() == "flex"


def test_trials_are_held_beside_first_calls_only_if_asked(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = found(monkeypatch, triton=Outcome(None, 0.5), flex=Outcome(None, 1.0))
    threads: list[Any] = []

    class Thread:
        def __init__(self, target: Callable[[], None], **how: object):
            threads.append(target)

        def start(self) -> None:
            pass

    monkeypatch.setattr(trial.threading, "Thread", Thread)
    assert chosen() == "flex"
    assert not threads
    monkeypatch.setenv(trial.VARIABLE, "background")
    assert [chosen(), chosen()] == ["flex", "flex"]
    (run,) = threads
    run()
    assert len(jobs) == 3
    assert chosen() == "triton"
    assert len(threads) == 1


def test_explain_and_doctor_show_the_verdict_with_its_age(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    call = {"heads": 4, "kv_heads": 2, "dtype": torch.bfloat16, "device": "cuda", "as_dict": True, "needs_grad": False}
    facts = functools.partial(rw.explain, rw.SlidingWindow(9), 256, **call)
    before = facts()["backend"]
    assert before["chosen"] == [{"backend": "flex", "branches": 1}]
    assert before["trials"] == []
    assert before["others"]["triton"] == [
        "used only when named, or where a trial finds it right and faster: ringweave tune --gpu"
    ]
    found(monkeypatch, triton=Outcome("it is wrong", None), flex=Outcome(None, 1e-3))
    verdict = hold()
    after = facts()["backend"]
    assert after["trials"] == ["flex 1 ms; dense_batched 9 s; triton: it is wrong (tried today)"]
    assert after["others"]["triton"] == ["it is wrong"]
    assert after["measured"] == 1
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    shown = diagnose()["trials"]
    assert list(shown.values()) == ["flex: flex 1 ms; dense_batched 9 s; triton: it is wrong (tried today)"]
    trial._keep(verdict._replace(of="another version", date="2020-01-01T00:00:00+00:00"))
    assert diagnose()["trials"]["ignored"] == "1 on other versions or devices"
    trial._keep(verdict._replace(date="2020-01-01T00:00:00+00:00"))
    assert "days ago" in facts()["backend"]["trials"][0]
    call["as_dict"] = False
    text = rw.explain(rw.SlidingWindow(9), 256, **call)  # type: ignore[call-overload]
    assert "chosen by a trial on this machine" in text
    assert "trial: flex 1 ms" in text


# ---- checks before the first use


def test_a_kernel_that_is_compiled_here_is_checked_in_a_process_and_the_verdict_is_stored(
    gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    sparse = dataclasses.replace(dense_batched.BACKEND, name="flash", checked=True)
    jobs = found(monkeypatch, flash=Outcome("it is wrong", None))
    for _ in range(2):
        assert trial.reason(sparse, case(), WINDOW) == "it is wrong"
        trial._checked.cache_clear()
    (job,) = jobs
    assert (job.backend, job.form, job.timed, job.small.device) == ("flash", "sparse", None, "cuda:0")


def test_on_a_cpu_explain_says_what_they_need() -> None:
    others = rw.explain(rw.SlidingWindow(9), 256, as_dict=True)["backend"]["others"]
    assert others["flash"] == ["it calls kernels for CUDA tensors, and these are on cpu"]
    assert others["flex"] == ["FlexAttention compiled for a CPU returns no lse and has no backward"]
    assert others["triton"] == ["on a CPU it is used only when named"]
    assert others["reference"] == ["used only when named"]


@pytest.mark.skipif(not triton.installed(), reason="triton is not installed (it has wheels for Linux only)")
def test_an_error_of_triton_is_one_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.errors import OutOfResources

    from ringweave_gpu.triton import launch

    def forward(*arguments: object) -> tuple[Tensor, Tensor]:
        raise OutOfResources(300, 227, "shared memory")

    monkeypatch.setattr(launch, "forward", forward)
    x = torch.randn(1, 1, 16, 16)
    with pytest.raises(UnsupportedError, match=r"got 'triton' \(OutOfResources: out of resource: shared memory"):
        triton.forward(Operands(x, x, x, 1.0), first(rw.Full()), torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("needs_grad", [False, True])
def test_the_kernels_pass_on_the_device(dtype: torch.dtype, form: str, needs_grad: bool) -> None:
    of = dataclasses.replace(small(dtype, needs_grad, "cuda"), head_dim=64, value_dim=64)
    assert trial.check(BACKENDS["triton"], of, form) is None
