"""Test profiles: parts add up to the whole, marks are removed afterwards, and a ring's profile has its messages."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner

from ringweave.backends import BACKENDS, cpu
from ringweave.cli.app import app
from ringweave.errors import UnsupportedError
from ringweave.plan import PlanCache
from ringweave_lab.bench import Options
from ringweave_lab.profile.profile import PARTS, _marked, _parts, profiled


def event(name: str, start: int, end: int) -> Any:
    return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end))


def test_a_part_inside_another_counts_once() -> None:
    events = [
        event("ringweave: call", 0, 100), event("ringweave: kernel", 10, 60), event("ringweave: plan", 20, 30),
        event("ringweave: plan", 22, 24), event("ringweave: merge", 70, 75), event("aten::add", 0, 90),
        event("ringweave: call", 200, 210), event("ringweave: plan", 150, 160),
    ]  # fmt: skip
    first, second = ({part: round(1e6 * seconds) for part, seconds in each.items()} for each in _parts(events))
    assert first == {"plan": 10, "kernel": 40, "merge": 5, "exchange": 0, "Python": 45}
    assert second == {"plan": 0, "kernel": 0, "merge": 0, "exchange": 0, "Python": 10}


def test_marks_are_gone_afterwards() -> None:
    before = dict(BACKENDS), PlanCache.get, cpu.merge_into
    with _marked("cpu"):
        assert PlanCache.get is not before[1]
        assert BACKENDS["dense_batched"] != before[0]["dense_batched"]
    assert (dict(BACKENDS), PlanCache.get, cpu.merge_into) == before
    with pytest.raises(ZeroDivisionError), _marked("cpu"):
        raise ZeroDivisionError
    assert (dict(BACKENDS), PlanCache.get, cpu.merge_into) == before


def test_a_profile_of_branches(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    found = profiled("longnet", Options(tokens=2048, heads=2), path)
    for each in (found.first, found.later):
        assert list(each) == list(PARTS)
        assert each["kernel"] > 0
        assert each["merge"] > 0
        assert each["exchange"] == 0
    assert found.first["plan"] > found.later["plan"]
    names = {each.get("name") for each in json.loads(path.read_text())["traceEvents"]}
    assert {"ringweave: plan", "ringweave: kernel", "ringweave: merge", "ringweave: call"} <= names


def test_a_ring_has_messages(tmp_path: Path) -> None:
    pytest.importorskip("psutil")
    found = CliRunner().invoke(
        app, ["profile", "ring", "--tokens", "2048", "--heads", "2", "--out", str(tmp_path / "t.json")]
    )
    assert found.exit_code == 0, found.output
    exchange = next(line.split() for line in found.output.splitlines() if line.strip().startswith("exchange"))
    assert float(exchange[1]) > 0


@pytest.mark.parametrize(
    ("case", "options", "path", "said"),
    [
        ("speed", Options(), "trace.json", "case: got 'speed'; wanted one of window"),
        ("window", Options(), "none/trace.json", "a file that can be written"),
        ("ring", Options(device="meta"), "trace.json", "cpu for a ring"),
    ],
)
def test_what_cannot_be_profiled(tmp_path: Path, case: str, options: Options, path: str, said: str) -> None:
    with pytest.raises(UnsupportedError, match=said):
        profiled(case, options, tmp_path / path)
