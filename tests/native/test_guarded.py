"""Nothing reads or writes beyond a tensor: this runs guarded.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ringweave.backends import cpu
from ringweave.environment import CPU_VARIANT

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="protects pages with mprotect")


def run(what: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.native.guarded", what]
    environment = {name: value for name, value in os.environ.items() if name != CPU_VARIANT}
    root = Path(__file__).parents[2]
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=240)


native = pytest.mark.skipif(not cpu.module(), reason="no kernel")


@pytest.mark.parametrize("what", ["torch", pytest.param("cpu", marks=native)])
def test_nothing_beyond_a_tensor(what: str) -> None:
    assert calls_of(what) > 100


@native
def test_no_dead_key_between_live_ones_is_read() -> None:
    """Forward skips keys that no query of a tile attends, wherever they are in the tile, and does not read them."""
    assert calls_of("dead") >= 6


def calls_of(what: str) -> int:
    """Run the calls in another process, and return their number."""
    done = run(what)
    if done.returncode:
        *_, last = done.stdout.splitlines() or ["nothing"]
        ended = f"died of {signal.Signals(-done.returncode).name}" if done.returncode < 0 else "failed"
        pytest.fail(f"{ended} at: {last}\n{done.stderr[-3000:]}")
    return int(done.stdout.splitlines()[-1].split()[0])


def test_a_protected_page_ends_the_process() -> None:
    done = run("beyond")
    assert done.stdout == "[True, True, True]\n"
    assert done.returncode == -signal.SIGSEGV
