"""Test configurations under trial: requests, overrides, and the search in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringweave.backends import tuning
from ringweave.backends.triton.launch_config import LaunchConfig
from ringweave_lab.tune.answers import write_entries
from ringweave_lab.tune.overrides import overriding
from tests.backends.test_launch_config import HERE, HOPPER, SMALL, USUAL, asked, entry
from tests.backends.test_triton import in_a_process, needs_triton


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tuning.VARIABLE, str(tmp_path))


def test_an_override_hides_the_store_and_records_requests() -> None:
    write_entries([], [entry(SMALL)])
    with overriding({}) as given:
        assert asked() == USUAL
    (heard,) = given.requests
    kind = tuning.KernelKey("forward", HERE, "bfloat16", (64, 64), (128, 128), True)
    assert (heard.key, heard.usual, heard.device) == (kind, USUAL, HOPPER)
    other = LaunchConfig(128, 32, 4, 1)
    with overriding({kind: SMALL}) as outer, overriding({kind: other}):
        assert asked() == other
        assert asked(masked=False) == USUAL
    assert [each.key.masked for each in outer.requests] == [True, False]
    assert asked() == SMALL


@needs_triton
def test_in_the_interpreter(tmp_path: Path) -> None:
    """A call runs with the overriding configuration, its results are right, and the search finds the best blocks."""
    command = [
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "tests.backends.patched_once",
        "--show-capture=all",
    ]
    command += ["lab/tests/tune/interpreted_configs.py"]
    in_a_process(command, tmp_path, TRITON_INTERPRET="1")
