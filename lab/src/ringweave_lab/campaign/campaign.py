"""A borrowed GPU turned into figures: units of work, each in a process of its own with a limit of its own.

A unit leaves one line in ``units.jsonl``, synced before the next begins, and what it said in a file beside it. A
campaign that is killed goes on from its folder: units with a line are not run again, whatever came of them, so that a
kernel which takes the device down costs one line. What is compiled and tuned is kept there as well: each command may
find another machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ringweave import files
from ringweave.backends import tuning
from ringweave.errors import RingweaveError, message

from .units import UNITS

LINES = "units.jsonl"
#: Share of a unit's limit that has to be left for it to begin.
_WORTH = 0.25


@dataclass(frozen=True)
class Unit:
    """Something to run.

    Attributes:
        name: What people call it.
        command: Program and arguments.
        seconds: After which it is ended, with all that it began.
    """

    name: str
    command: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class Ended:
    """What came of a unit.

    Attributes:
        unit: Its name.
        result: ``"done"``, ``"failed"`` or ``"timed out"``.
        code: Its exit status; of a signal, the negative number.
        seconds: How long it took.
        said: The end of what it said, where it failed.
    """

    unit: str
    result: str
    code: int
    seconds: float
    said: str


#: Seconds after which a unit is ended, by the first word of its name.
_LIMITS = {"tests": 240.0, "ahead": 180.0, "small": 180.0, "part": 180.0, "tune": 180.0, "tuned": 120.0}


def units(folder: Path, device: str = "cuda", checkout: Path | None = None, dry: bool = False) -> list[Unit]:
    """List what a campaign runs, what matters most first.

    Args:
        folder: Where figures go.
        device: What is measured.
        checkout: A working tree, whose tests for GPUs are run too.
        dry: Whether everything but the device's work is done.
    """
    own = (sys.executable, "-m", "ringweave")
    options = ("--folder", str(folder), "--device", device, *(["--dry"] if dry else []))
    found = [Unit("doctor", (*own, "doctor"), 60.0)]
    for name in UNITS:
        command: tuple[str, ...] = (sys.executable, "-m", "ringweave_lab.campaign.units", name, *options)
        if name == "tests":
            if checkout is None or not (checkout / "tests").is_dir():
                continue
            command += ("--checkout", str(checkout))
        limit = _LIMITS.get(name.split()[0], 60.0)
        found.append(Unit(name, command, limit))
        if name == "small" and shutil.which("compute-sanitizer"):
            # beside it: there are machines whose device this tool refuses
            checked = ("compute-sanitizer", "--error-exitcode", "9", *command)
            found.append(Unit("small, under compute-sanitizer", checked, limit))
    return found


def read(folder: Path) -> list[Ended]:
    """Read the lines of a folder; one that was cut short is none."""
    file = folder / LINES
    found = []
    for line in files.json_lines(file) if file.exists() else ():
        with contextlib.suppress(TypeError):
            found.append(Ended(**line))
    return found


def run(
    todo: Sequence[Unit],
    folder: Path,
    *,
    seconds: float,
    resume: bool = False,
    say: Callable[[str], object] = lambda text: None,
    clock: Callable[[], float] = time.monotonic,
) -> list[Ended]:
    """Run units in order until the time is used up.

    Args:
        todo: What.
        folder: Where lines, figures and what units say go.
        seconds: In which all ends: no unit begins without a quarter of its limit left.
        resume: Go on where the folder stands.
        say: Told what happens next.
        clock: Tells the time.
    Returns:
        What came of every unit that has a line, earlier ones included.
    Raises:
        RingweaveError: The folder has lines, and ``resume`` is not set.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ended = read(folder)
    if ended and not resume:
        raise RingweaveError(message("out", str(folder), "an empty folder", "Pass --resume to go on from it."))
    known, start = {each.unit for each in ended}, clock()
    for unit in todo:
        left = seconds - (clock() - start)
        if unit.name in known or left < _WORTH * unit.seconds:
            continue
        say(f"{unit.name}: up to {min(unit.seconds, left):.0f} s")
        came = _run(unit, folder, min(unit.seconds, left))
        if came.result == "timed out" and left < unit.seconds:
            # it had less than its time: another command gives it that
            say(f"{unit.name}: begins anew next time")
            continue
        with (folder / LINES).open("a") as file:
            file.write(json.dumps(asdict(came)) + "\n")
            file.flush()
            os.fsync(file.fileno())
        ended.append(came)
        say(f"{unit.name}: {came.result} in {came.seconds:.0f} s")
    return ended


def _run(unit: Unit, folder: Path, limit: float) -> Ended:
    log = folder / ("".join(c if c.isalnum() else "-" for c in unit.name) + ".log")
    start, result = time.monotonic(), "done"
    with log.open("wb") as file:
        kept = {"TRITON_CACHE_DIR": str(folder / "triton"), tuning.VARIABLE: str(folder / "cache")}
        process = subprocess.Popen(
            unit.command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            env=os.environ | kept,
        )  # fmt: skip
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            result, code = "timed out", -signal.SIGKILL
        finally:
            # it, and what it began
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if result == "done" and code:
        result = "failed"
    said = "" if result == "done" else log.read_text(errors="replace")[-400:]
    return Ended(unit.name, result, code, round(time.monotonic() - start, 3), said)
