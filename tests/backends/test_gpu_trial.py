"""Test the trial of a kernel in its own process: crashes, hangs, a process that cannot start, and the stored results."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch

from ringweave.backends import gpu_check, tuning
from ringweave.backends.gpu_check import kept, known, tried
from ringweave.call import Call

CASE = Call(1, 4, 2, 500, 500, 32, 16, torch.float32, "cpu", False)
BEGAN = "print('ringweave: began', flush=True);"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tuning.VARIABLE, str(tmp_path))


def no() -> str | None:
    raise AssertionError("this process tries nothing")


def instead(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    monkeypatch.setattr(gpu_check, "_COMMAND", (sys.executable, "-c", code))


def test_a_process_of_its_own_tries_and_a_machine_tries_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert known(*kept("dense_batched", CASE, "sparse")) is None
    assert tried("dense_batched", CASE, "sparse", no) is None
    assert known(*kept("dense_batched", CASE, "sparse")) == (None,)
    # other cases have no result yet
    assert known(*kept("dense_batched", dataclasses.replace(CASE, needs_grad=True), "sparse")) is None
    assert known(*kept("dense_batched", CASE, "causal")) is None
    assert known(*kept("cpu", CASE, "sparse")) is None


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import ctypes; ctypes.string_at(0)", "it crashed its process (SIGSEGV)"),
        ("raise SystemExit(3)", "it crashed its process (exit status 3)"),
        ("import time; time.sleep(60)", "it did not finish in 1 s"),
        (r"print('a compiler\'s words\nringweave: found ' + '\"it is wrong\"')", "it is wrong"),
    ],
    ids=["crash", "exit", "hang", "wrong"],
)
def test_what_dies_or_hangs_is_left_out_and_that_is_kept(code: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    instead(monkeypatch, BEGAN + code)
    monkeypatch.setattr(gpu_check, "LIMIT", 1.0)
    file, of = kept("triton", CASE, "sparse")
    verdict = tried("triton", CASE, "sparse", no)
    assert said in str(verdict)
    (again,) = known(file, of) or ("",)
    assert said in str(again)


@pytest.mark.parametrize(
    "code",
    ["import os, signal; os.kill(os.getpid(), signal.SIGKILL)", r"print('ringweave: found \"CUDA out of memory\"')"],
    ids=["killed", "no memory"],
)
def test_want_of_memory_is_not_kept(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    instead(monkeypatch, BEGAN + code)
    assert tried("triton", CASE, "sparse", no) is not None
    assert known(*kept("triton", CASE, "sparse")) is None


@pytest.mark.parametrize("code", ["raise RuntimeError('the device is busy')", "import time; time.sleep(60)"])
def test_where_none_can_begin_this_process_tries(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    instead(monkeypatch, code)
    monkeypatch.setattr(gpu_check, "LIMIT", 0.5)
    assert tried("triton", CASE, "sparse", lambda: "it is wrong here") is not None
    assert known(*kept("triton", CASE, "sparse")) == ("it is wrong here",)


def test_a_program_that_holds_python_is_not_begun_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check.subprocess, "run", lambda *of, **how: no())
    for program in ("/usr/bin/blender", ""):
        monkeypatch.setattr(gpu_check, "_COMMAND", (program,))
        assert tried("triton", CASE, "sparse", lambda: None) is None


def test_the_key_of_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {kept("triton", CASE, "sparse")[0]}
    monkeypatch.setattr(gpu_check, "_driver", lambda: "580.1")
    names.add(kept("triton", CASE, "sparse")[0])
    for device in ("an H100; ringweave 0; torch 2; triton 3.6.0", "an H100; ringweave 0; torch 2; triton 3.7.1"):
        monkeypatch.setattr(gpu_check, "where", lambda device, named=device: named)
        names.add(kept("triton", CASE, "sparse")[0])
    monkeypatch.setattr(gpu_check, "_source", lambda: "another kernel")
    names.add(kept("triton", CASE, "sparse")[0])
    monkeypatch.setattr("ringweave.backends.triton.launch_config.measured", lambda case: ["described True"])
    names.add(kept("triton", CASE, "sparse")[0])
    assert len(names) == 6
    # the order of a set differs between processes
    spelled = {kept("triton", dataclasses.replace(CASE, features=frozenset(of)), "sparse")[1] for of in ("abc", "cba")}
    assert len(spelled) == 1


@pytest.mark.parametrize("text", ["", "{", "[]", '{"of": "another", "verdict": null}', '{"verdict": 3}'])
def test_a_file_that_is_no_verdict_is_as_good_as_none(text: str) -> None:
    file, of = kept("triton", CASE, "sparse")
    assert file is not None
    file.parent.mkdir()
    file.write_text(text)
    assert known(file, of) is None
    file.write_text(json.dumps({"of": of}))
    assert known(file, of) is None
