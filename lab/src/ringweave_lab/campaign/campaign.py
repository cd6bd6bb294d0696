"""Measure a GPU in limited time: units of work, each in a separate process with a time limit.

A unit adds one line to ``units.jsonl``, synced before the next unit begins, and writes its output to a file beside it.
A killed campaign continues from its folder: units with a line are not run again, whatever their result, so that a
kernel that crashes the device costs one unit. Compiled kernels and tuning results are stored there too, since each
command may run on another machine.
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
from ringweave.errors import RingweaveError

from .units import UNITS

LINES = "units.jsonl"
#: Share of a unit's limit that must remain for the unit to begin.
_WORTH = 0.25


@dataclass(frozen=True)
class Unit:
    """A command with a name and a time limit.

    Attributes:
        name: Name of the unit.
        command: Program and arguments.
        seconds: Seconds after which it is killed with all its descendants.
    """

    name: str
    command: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class Ended:
    """The result of a unit.

    Attributes:
        unit: Name of the unit.
        result: ``"done"``, ``"failed"`` or ``"timed out"``.
        code: Exit status; the negative number of a signal.
        seconds: Seconds that it took.
        said: End of its output, if it failed.
    """

    unit: str
    result: str
    code: int
    seconds: float
    said: str


#: Seconds after which a unit is killed, by the first word of its name.
_LIMITS = {"tests": 240.0, "ahead": 180.0, "small": 180.0, "part": 180.0, "trial": 300.0}


def units(folder: Path, device: str = "cuda", checkout: Path | None = None, dry: bool = False) -> list[Unit]:
    """Return the units of a campaign, the most important first.

    Args:
        folder: Folder for figures.
        device: Device to measure.
        checkout: Working tree whose GPU tests are run too.
        dry: Whether to do everything except the device's work.
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
            # in addition to the plain run, since compute-sanitizer refuses the device of some machines
            checked = ("compute-sanitizer", "--error-exitcode", "9", *command)
            found.append(Unit("small, under compute-sanitizer", checked, limit))
    return found


def read(folder: Path) -> list[Ended]:
    """Return the lines of a folder, without incomplete ones."""
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
        todo: Units to run.
        folder: Folder for lines, figures and outputs.
        seconds: Time limit; a unit begins only if a quarter of its limit remains.
        resume: Whether to continue the folder's campaign.
        say: Function that receives progress messages.
        clock: Function that returns the time in seconds.
    Returns:
        Results of all units that have a line, including earlier ones.
    Raises:
        RingweaveError: The folder has lines, and ``resume`` is False.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ended = read(folder)
    if ended and not resume:
        raise RingweaveError("out", str(folder), "an empty folder", "Pass --resume to go on from it.")
    known, start = {each.unit for each in ended}, clock()
    for unit in todo:
        left = seconds - (clock() - start)
        if unit.name in known or left < _WORTH * unit.seconds:
            continue
        say(f"{unit.name}: up to {min(unit.seconds, left):.0f} s")
        came = _run(unit, folder, min(unit.seconds, left))
        if came.result == "timed out" and left < unit.seconds:
            # the unit had less time than its limit, so it gets no line and the next command runs it again
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
            # ends the unit and its descendants
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if result == "done" and code:
        result = "failed"
    said = "" if result == "done" else log.read_text(errors="replace")[-400:]
    return Ended(unit.name, result, code, round(time.monotonic() - start, 3), said)
