"""The progress of a test run in place of its dots: ``62 % of 5,860 tests, about 3 min left``, and failures as they come.

What each file took last is remembered in pytest's cache. A terminal has one line that is rewritten; elsewhere, as in a
log, a line is written at most every 20 s. A run with ``-v``, or one of a few seconds, is as without this.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

KEY = "ringweave/seconds"
# seconds between two lines of a log, and between two states of a terminal's line
QUIET, QUICK = 20.0, 0.3


class Progress:
    """How far a run is, and how long its files take.

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
        """Learn which tests there are."""
        self.total = {}
        for node in nodes:
            self.total[_file(node)] = self.total.get(_file(node), 0) + 1

    def started(self, node: str, now: float) -> None:
        """A test begins."""
        self.running[_file(node)] = now

    def took(self, node: str, seconds: float) -> None:
        """A part of a test is over: setup, call or teardown."""
        file = _file(node)
        self.spent[file] = self.spent.get(file, 0.0) + seconds

    def finished(self, node: str) -> None:
        """A test is over."""
        file = _file(node)
        self.done[file] = self.done.get(file, 0) + 1
        self.running.pop(file, None)

    def left(self, now: float) -> float | None:
        """Tell the seconds that are left; None where nothing is known of the tests that are left.

        A file takes as long as it took last, times what tests that are over took of what was expected of them.
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
        # a file is not shared
        return max([sum(left) / self.workers, *left])

    def line(self, now: float) -> str:
        """Say it."""
        total, left = sum(self.total.values()), self.left(now)
        text = f"{sum(self.done.values()) / max(1, total):.0%} of {total:,} tests".replace("%", " %")
        if left is None:
            return text
        return f"{text}, about {f'{left / 60:.0f} min' if left >= 60 else f'{5 * round(left / 5):.0f} s'} left"

    def learned(self) -> dict[str, float]:
        """Give the seconds of a test, by file: those of files that were run to their end are new."""
        over = (file for file, count in self.total.items() if self.done.get(file, 0) >= count)
        return self.known | {file: round(self.spent[file] / self.total[file], 4) for file in over}


def _file(node: str) -> str:
    return node.partition("::")[0]


class Reporter:
    """Shows the progress of a session where pytest would print dots."""

    def __init__(self, config: pytest.Config):
        self.config = config
        self.cache: pytest.Cache | None = getattr(config, "cache", None)
        known = {} if self.cache is None else self.cache.get(KEY, {})
        self.progress = Progress(known, config.getoption("numprocesses", None) or 1)
        self.last = time.monotonic()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Count the tests of this process; one that gives them to others has none."""
        if session.items:
            self.progress.collected([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """Count the tests that another process has found; all find the same."""
        self.progress.collected(ids)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test begins."""
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
        """Remember what files took, and leave the line."""
        if self.terminal.isatty:
            self.terminal.rewrite("", erase=True)
        # some tests of a file say little about the others
        chosen = self.config.getoption("keyword") or any("::" in each for each in self.config.args)
        if self.cache is not None and self.progress.total and not chosen:
            self.cache.set(KEY, self.progress.learned())

    @property
    def terminal(self) -> Any:
        """What pytest writes to."""
        return self.config.pluginmanager.get_plugin("terminalreporter")

    def write(self, line: str, stays: bool = False) -> None:
        """Write a line, over the last one where it is a terminal's."""
        if self.terminal.isatty:
            self.terminal.rewrite(line, erase=True)
            self.terminal.write("\n" * stays)
        else:
            self.terminal.write_line(line, flush=True)


def register(config: pytest.Config) -> None:
    """Show the progress of a run, in the process that prints."""
    prints = not hasattr(config, "workerinput") and config.pluginmanager.hasplugin("terminal")
    if prints and config.option.verbose <= 0:
        config.pluginmanager.register(Reporter(config))
