"""Test the estimate of the remaining time of a test run."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from . import progress
from .progress import KEY, QUICK, QUIET, Progress, Reporter

NODES = ["a.py::one", "a.py::two", "b.py::one[x::y]", "c.py::one"]


def begun(known: dict[str, float], workers: int = 1) -> Progress:
    made = Progress(known, workers)
    made.collected(NODES)
    return made


def run(running: Progress, node: str, seconds: float) -> None:
    running.started(node, 0.0)
    running.took(node, seconds)
    running.finished(node)


def test_nothing_known_is_not_guessed() -> None:
    running = begun({"gone.py": 3.0})
    run(running, NODES[0], 1.0)
    assert running.left(0.0) is None
    assert running.line(0.0) == "25 % of 4 tests"


def test_files_take_as_long_as_last_time() -> None:
    running = begun({"a.py": 100.0, "b.py": 40.0, "c.py": 60.0})
    assert running.line(0.0) == "0 % of 4 tests, about 5 min left"
    run(running, NODES[0], 100.0)
    assert running.left(0.0) == 200.0
    # a running test counts for its elapsed time, and a file that is late never counts negatively
    running.started(NODES[1], 1000.0)
    assert running.left(1050.0) == 150.0
    assert running.left(9999.0) == 100.0


def test_a_slow_machine_takes_longer_for_the_rest_too() -> None:
    running = begun({"a.py": 100.0, "b.py": 40.0, "c.py": 60.0})
    run(running, NODES[2], 80.0)
    assert running.left(0.0) == 2 * 260.0


def test_new_files_take_as_long_as_others() -> None:
    assert begun({"a.py": 10.0, "b.py": 40.0}).left(0.0) == 20.0 + 40.0 + 20.0


def test_processes_share_files_and_not_tests() -> None:
    known = {"a.py": 10.0, "b.py": 20.0, "c.py": 20.0}
    assert begun(known, 2).left(0.0) == 30.0
    assert begun(known | {"a.py": 100.0}, 2).left(0.0) == 200.0


def test_times_of_finished_files_are_stored() -> None:
    """The times of files that ran to their end are stored; others keep their earlier times."""
    running = begun({"a.py": 7.0, "gone.py": 1.0})
    run(running, NODES[0], 90.0)
    run(running, NODES[3], 2.0)
    assert running.learned() == {"a.py": 7.0, "gone.py": 1.0, "c.py": 2.0}


class Terminal:
    def __init__(self, isatty: bool):
        self.isatty, self.said = isatty, []  # type: ignore[var-annotated]

    def write_line(self, line: str, **markup: bool) -> None:
        self.said.append(line)

    def rewrite(self, line: str, **markup: bool) -> None:
        self.said.append("\r" + line)

    def write(self, text: str) -> None:
        if text:
            self.said[-1] += text


@pytest.fixture(autouse=True)
def nothing_usual(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No time is known but those of a test."""
    usual = tmp_path / "usual.json"
    usual.write_text("{}")
    monkeypatch.setattr(progress, "USUAL", usual)
    return usual


def test_the_first_run_in_a_clone_has_an_estimate(nothing_usual: Path) -> None:
    """It comes from another machine's times, which this machine's own replace."""
    nothing_usual.write_text('{"a.py": 100.0, "b.py": 40.0, "c.py": 60.0}')
    made, _, _ = reporter(False)
    assert made.progress.left(0.0) == 60.0 + 40.0 + 60.0


def test_the_usual_times_are_those_of_this_suite() -> None:
    """Times of files that are gone would make the estimate of others no worse, but would hide that nothing is known."""
    usual = json.loads(Path(progress.__file__).with_suffix(".json").read_text())
    root = Path(progress.__file__).parents[1]
    assert len(usual) > 200
    assert not [file for file in usual if not (root / file).exists()]


def reporter(isatty: bool) -> tuple[Reporter, Terminal, dict[str, Any]]:
    terminal, stored = Terminal(isatty), {KEY: {"a.py": 30.0}}
    config: Any = SimpleNamespace(
        cache=SimpleNamespace(get=stored.get, set=stored.__setitem__),
        getoption=lambda name, default=None: default,
        args=["tests"],
        pluginmanager=SimpleNamespace(get_plugin=lambda name: terminal),
    )
    made = Reporter(config)
    made.pytest_xdist_node_collection_finished(ids=NODES)
    return made, terminal, stored


def report(node: str, when: str, outcome: str = "passed") -> pytest.TestReport:
    return pytest.TestReport(node, ("", 0, ""), {}, outcome, None, when, duration=4.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("isatty", [False, True])
def test_lines_are_printed_from_time_to_time_and_failures_immediately(
    isatty: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, terminal, stored = reporter(isatty)
    period = QUICK if isatty else QUIET
    now = made.last + period / 2
    monkeypatch.setattr("time.monotonic", lambda: now)
    made.pytest_runtest_logreport(report(NODES[0], "call", "failed"))
    assert [line.strip() for line in terminal.said] == ["failed: a.py::one"]
    # with some slack: clocks are rounded
    now = made.last + period * 1.01
    for node in NODES[:2]:
        for when in ("call", "teardown"):
            made.pytest_runtest_logreport(report(node, when))
    line = "0 % of 4 tests, about 2 min left"
    assert terminal.said[1:] == ["\r" + line if isatty else line]
    now += period
    made.pytest_runtest_logreport(report(NODES[2], "setup"))
    assert terminal.said[-1].strip().startswith("50 % of 4 tests, about ")
    made.pytest_sessionfinish()
    assert stored[KEY] == {"a.py": 10.0}
    made.config.args = ["a.py::one"]
    made.progress.known = {}
    made.pytest_sessionfinish()
    assert stored[KEY] == {"a.py": 10.0}


def test_results_are_counted_as_pytest_counts_them() -> None:
    made, _, _ = reporter(False)
    found = [
        made.pytest_report_teststatus(report("a.py::one", when, outcome))
        for when, outcome in [
            ("setup", "passed"), ("call", "passed"), ("call", "failed"), ("setup", "failed"), ("setup", "skipped"),
        ]
    ]  # fmt: skip
    assert found == [
        ("", "", ""), ("passed", "", ""), ("failed", "", "FAILED"), ("error", "", "ERROR"), ("skipped", "", ""),
    ]  # fmt: skip
