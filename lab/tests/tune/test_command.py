"""Test the command ``ringweave tune``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner, Result

from ringweave.backends.triton.launch_config import LaunchConfig
from ringweave.backends.tuning import KernelKey
from ringweave.cli.app import app
from ringweave.cli.doctor import diagnose
from ringweave_lab.tune.command import _blocks
from ringweave_lab.tune.descent import Descent, Tuned


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


def test_tune_has_a_line_for_each_choice_of_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    usual, best, broken = (
        LaunchConfig(128, 64, 8, 2),
        LaunchConfig(128, 32, 4, 3, described=True),
        LaunchConfig(64, 64, 8, 2),
    )
    kind = KernelKey("forward", "here", "bfloat16", (64, 64), (128, 128), False)
    descent = Descent(usual, best, {usual: 0.002, best: 0.001}, {broken: "OutOfResources: shared memory"})
    Console(width=140).print(_blocks(Tuned(kind, descent, 2.0, best)))
    title, head, first, second, third = (line.split() for line in capsys.readouterr().out.splitlines())
    assert " ".join(title) == "triton, forward, 128 x 128, full tiles"
    assert head == ["m", "n", "warps", "stages", "resident", "described", "time"]
    assert first == ["128", "32", "4", "3", "0", "yes", "chosen", "1", "ms"]
    assert second == ["128", "64", "8", "2", "0", "usual", "2", "ms"]
    assert " ".join(third) == "64 64 8 2 0 not timed: OutOfResources: shared memory"


def test_tune_needs_the_device_that_it_is_asked_for() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    result = run("tune", "Causal()", "-n", "256", "--device", "cuda")
    assert result.exit_code == 2
    assert "this torch finds no CUDA device" in result.output
