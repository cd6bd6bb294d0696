"""Test the command ``ringweave tune``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from ringweave.cli.app import app
from ringweave.cli.doctor import diagnose
from ringweave_gpu import trial
from ringweave_gpu.trial import Outcome


def run(*arguments: str, columns: int = 100) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": str(columns), "NO_COLOR": "1"})


def test_tune_stores_what_explain_then_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGWEAVE_CACHE", str(tmp_path))
    options = ["Causal()", "-n", "256", "--heads", "2", "--head-dim", "32", "--rounds", "1"]
    dry = run("tune", *options, "--forward-only", "--dry-run")
    assert dry.exit_code == 0, dry.output
    assert "nothing stored" in dry.output
    assert not (tmp_path / "tuning.json").exists()
    assert diagnose()["tuning store"] == {"file": str(tmp_path / "tuning.json"), "answers": 0}
    result = run("tune", *options)
    assert result.exit_code == 0, result.output
    assert f"stored in {tmp_path / 'tuning.json'}" in result.output
    for word in ("Causal(), 256 tokens, forward", "chosen", "time", "not timed: it runs on CUDA"):
        assert word in result.output
    assert diagnose()["tuning store"]["answers"] == 2
    said = run("explain", "Causal()", "-n", "256", "--heads", "2", "--head-dim", "32")
    assert "chosen by what ringweave tune measured on this machine" in said.output


def test_tune_looks_for_a_place_before_it_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tune names a folder that cannot be made before it measures."""
    monkeypatch.setattr("ringweave_lab.tune.command.tune", None)
    monkeypatch.setenv("RINGWEAVE_CACHE", str(tmp_path / "file" / "below"))
    (tmp_path / "file").touch()
    result = run("tune", "Causal()", "-n", "256", columns=200)
    assert result.exit_code == 2
    assert "Set RINGWEAVE_CACHE to another folder." in result.stderr


def test_tune_needs_the_device_that_it_is_asked_for() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    result = run("tune", "Causal()", "-n", "256", "--gpu")
    assert result.exit_code == 2
    assert "this torch finds no CUDA device" in result.output


def test_tune_holds_trials_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial for each direction, with a line for each backend; explain then shows the verdict."""
    monkeypatch.setenv("RINGWEAVE_CACHE", str(tmp_path))
    trial._stored.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    outcomes = {"flex": Outcome(None, 0.002), "triton": Outcome(None, 0.001), "dense_batched": Outcome("it is wrong")}
    monkeypatch.setattr(trial, "_apart", lambda job: (outcomes[job.backend], True))
    options = ["SlidingWindow(9)", "-n", "256", "--gpu", "--dtype", "float16"]
    assert run("tune", *options, "--dry-run", "--forward-only").exit_code == 0
    assert trial.stored() == []
    result = run("tune", *options, columns=160)
    assert result.exit_code == 0, result.output
    for line in ("flex 2 ms", "dense_batched left out: it is wrong", "triton chosen 1 ms"):
        assert result.output.count(line) == 0
        assert [" ".join(each.split()) for each in result.output.splitlines()].count(line) == 2
    assert [each.best for each in trial.stored()] == ["triton", "triton"]
