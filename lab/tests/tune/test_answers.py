"""Test the file of answers that tuning writes."""

from __future__ import annotations

import contextlib
import io
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ringweave.backends import tuning
from ringweave_lab.tune.answers import write_entries
from tests.parallel.processes import forked


def write(folder: Path, number: int) -> str:
    """Write ten answers in a separate process, and read the file after each; return the text on stderr."""
    os.environ[tuning.VARIABLE] = str(folder)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        for step in range(10):
            write_entries([{"kind": f"{number}", "density": step, "backend": "dense_batched", "tile": None}])
            path = tuning.tuning_file()
            assert tuning.load(path), "a reader saw half a file"
    return said.getvalue()


@pytest.mark.timeout(600)
def test_eight_processes_write_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Eight processes that write together lose no answer, and every reader sees a complete file."""
    monkeypatch.setenv(tuning.VARIABLE, str(tmp_path))
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(forked, [write] * 8, [tmp_path] * 8, range(8))) == [""] * 8
    tuning.refresh()
    found = tuning.answers()
    assert {kind: sorted(each) for kind, each in found.items()} == {str(n): list(range(10)) for n in range(8)}
    assert not caplog.records
    assert sorted(path.name for path in tmp_path.iterdir()) in (["tuning.json"], ["tuning.json", "tuning.lock"])
