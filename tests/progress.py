"""The progress of a test run in place of its dots: ``62 % of 5,860 tests, about 3 min left``, and failures as they come.

The time of each file is remembered in pytest's cache; before the first run, it is that of another machine, and the
tests that ran tell how much slower this one is. A terminal has one line that is rewritten; elsewhere, as in a
log, a line is written at most every 20 s. A run with ``-v``, or one of a few seconds, is as without this.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

KEY = "ringweave/seconds"
# for the first run in a clone: seconds of a test of each file on two free cores, from ``python -m tests.progress``
USUAL = Path(__file__).with_suffix(".json")
# seconds between two lines of a log, and between two states of a terminal's line
QUIET, QUICK = 20.0, 0.3


class Progress:
    """The progress of a run, and the usual time of each file.

    Args:
        known: Seconds of a test of each file in earlier runs, on average.
        workers: Processes that share the tests, whole files each.
    """

    def __init__(self, known: dict[str, float], workers: int = 1):
        self.known, self.workers = known, max(1, workers)
        self.total: dict[str, int] = {}
        self.done: dict[str, int] = {}
        self.spent: dict[str, float] = {}
        self.running: dict[str, float] = {}

    def collected(self, nodes: list[str]) -> None:
        """Record the tests of the run."""
        self.total = {}
        for node in nodes:
            self.total[_file(node)] = self.total.get(_file(node), 0) + 1

    def started(self, node: str, now: float) -> None:
        """Record that a test starts."""
        self.running[_file(node)] = now

    def took(self, node: str, seconds: float) -> None:
        """Record the time of a test's setup, call or teardown."""
        file = _file(node)
        self.spent[file] = self.spent.get(file, 0.0) + seconds

    def finished(self, node: str) -> None:
        """Record that a test ended."""
        file = _file(node)
        self.done[file] = self.done.get(file, 0) + 1
        self.running.pop(file, None)

    def left(self, now: float) -> float | None:
        """Return the remaining seconds, or None if no file with remaining tests is known.

        A file is expected to take its last time, scaled by how much longer than expected the finished tests took.
        """
        usual = {file: self.known[file] * count for file, count in self.total.items() if file in self.known}
        if not usual:
            return None
        begun = [file for file in usual if self.done.get(file)]
        expected = sum(usual[file] * self.done[file] / self.total[file] for file in begun)
        slower = sum(self.spent[file] for file in begun) / expected if expected > 1.0 else 1.0
        # tests of a new file are expected to take the average time of a known test
        each = sum(usual.values()) / sum(self.total[file] for file in usual)
        left = []
        for file, count in self.total.items():
            if self.done.get(file, 0) < count:
                gone = self.spent.get(file, 0.0) + (now - self.running[file] if file in self.running else 0.0)
                left.append(max(0.0, slower * usual.get(file, each * count) - gone))
        # a file runs in one process
        return max([sum(left) / self.workers, *left])

    def line(self, now: float) -> str:
        """Return the line that describes the progress."""
        total, left = sum(self.total.values()), self.left(now)
        # rounded down: the last tests may take a minute
        text = f"{100 * sum(self.done.values()) // max(1, total)} % of {total:,} tests"
        if left is None:
            return text
        return f"{text}, about {f'{left / 60:.0f} min' if left >= 60 else f'{5 * round(left / 5):.0f} s'} left"

    def learned(self) -> dict[str, float]:
        """Return the seconds of a test by file, updated for files that ran to their end."""
        over = (file for file, count in self.total.items() if self.done.get(file, 0) >= count)
        return self.known | {file: round(self.spent[file] / self.total[file], 4) for file in over}


def _file(node: str) -> str:
    return node.partition("::")[0]


class Reporter:
    """Show the progress of a session in place of pytest's dots."""

    def __init__(self, config: pytest.Config):
        self.config = config
        self.cache: pytest.Cache | None = getattr(config, "cache", None)
        known = {} if self.cache is None else self.cache.get(KEY, {})
        self.progress = Progress(json.loads(USUAL.read_text()) | known, config.getoption("numprocesses", None) or 1)
        self.last = time.monotonic()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Count this process's tests; a process with xdist workers has none."""
        if session.items:
            self.progress.collected([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """Count the tests that a worker collected; all workers collect the same."""
        self.progress.collected(ids)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Record that a test starts."""
        self.progress.started(nodeid, time.monotonic())

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: Any) -> tuple[str, str, str] | None:
        """Count a result as pytest does, and print nothing for it."""
        if not isinstance(report, pytest.TestReport) or hasattr(report, "wasxfail"):
            return None
        if report.failed:
            # pytest's summary has the word too
            name = "failed" if report.when == "call" else "error"
            return name, "", name.upper()
        return ("" if report.passed and report.when != "call" else report.outcome), "", ""

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Report a failure immediately, and the progress of the run from time to time."""
        now = time.monotonic()
        self.progress.took(report.nodeid, report.duration)
        if report.when == "teardown":
            self.progress.finished(report.nodeid)
        if report.failed:
            self.write(f"{report.outcome}: {report.nodeid}", stays=True)
        if now >= self.last + (QUICK if self.terminal.isatty else QUIET):
            self.write(self.progress.line(now))
            self.last = now

    def pytest_sessionfinish(self) -> None:
        """Store the times of files, and keep the last line."""
        if self.terminal.isatty:
            self.terminal.rewrite("", erase=True)
        # a part of a file's tests says little about the rest
        chosen = self.config.getoption("keyword") or any("::" in each for each in self.config.args)
        if self.cache is not None and self.progress.total and not chosen:
            self.cache.set(KEY, self.progress.learned())

    @property
    def terminal(self) -> Any:
        """Return pytest's terminal."""
        return self.config.pluginmanager.get_plugin("terminalreporter")

    def write(self, line: str, stays: bool = False) -> None:
        """Write a line, over the last one on a terminal."""
        if self.terminal.isatty:
            self.terminal.rewrite(line, erase=True)
            self.terminal.write("\n" * stays)
        else:
            self.terminal.write_line(line, flush=True)


def register(config: pytest.Config) -> None:
    """Register the reporter in the process that prints."""
    prints = not hasattr(config, "workerinput") and config.pluginmanager.hasplugin("terminal")
    if prints and config.option.verbose <= 0:
        config.pluginmanager.register(Reporter(config))


if __name__ == "__main__":
    # after `make test`
    (last,) = Path(__file__).parents[1].glob(f".pytest_cache/v/{KEY}")
    USUAL.write_text(json.dumps(json.loads(last.read_text()), indent=0, sort_keys=True) + "\n")
