"""Measure a GPU in limited time: units of work, each in a separate process with a time limit.

A unit adds one line to ``units.jsonl``, synced before the next unit begins, and writes its output to a file beside it.
After each unit the table and the tarball of all figures are rewritten, so that whatever ends the campaign, the figures
so far are in one small file. A killed campaign continues from its folder: units with a line are not run again, whatever
their result, so that a kernel that crashes the device costs one unit. Compiled kernels are cached in another folder,
since they are large.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from ringweave import files
from ringweave.backends import tuning
from ringweave.errors import RingweaveError, UnsupportedError

from . import needs
from .archive import pack
from .table import table
from .units import FIGURES, UNITS

LINES, TABLE = "units.jsonl", "table.txt"
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


#: Seconds after which a unit is killed, by the first word of its name; all units together take 1,500 at most.
LIMITS = {
    "doctor": 20.0, "peaks": 30.0, "headline": 95.0, "ahead": 90.0, "small": 45.0, "own": 45.0, "tests": 150.0,
    "trial": 160.0, "bits": 45.0, "decode": 40.0, "sanitized": 45.0, "streamed": 35.0,
}  # fmt: skip


def units(folder: Path, device: str = "cuda", checkout: Path | None = None, dry: bool = False) -> list[Unit]:
    """Return the units of a campaign, the most important first.

    Args:
        folder: Folder for figures.
        device: Device to measure.
        checkout: Working tree whose GPU tests are run too.
        dry: Whether to compute small sizes on the CPU instead of the device's work.
    """
    options = ("--folder", str(folder), "--device", device, *(["--dry"] if dry else []))
    found, without = [], needs.left_out()
    for name in ("doctor", *UNITS):
        word = name.split()[0]
        command: tuple[str, ...] = (sys.executable, "-m", "ringweave_lab.campaign.units", name, *options)
        if name == "doctor":
            command = (sys.executable, "-m", "ringweave", "doctor")
        if name == "tests":
            if checkout is None or not (checkout / "tests").is_dir():
                continue
            command += ("--checkout", str(checkout))
        if word == "own" and dry:
            command = ("env", "TRITON_INTERPRET=1", *command)
        if word not in without:
            found.append(Unit(name, command, LIMITS[word]))
    checker = shutil.which("compute-sanitizer")
    small = [each for each in found if each.name == "small"]
    if checker is not None and small:
        # in addition to the plain run, since compute-sanitizer refuses the device of some machines
        checked = (checker, "--error-exitcode", "9", *small[0].command)
        found.append(Unit("sanitized small", checked, LIMITS["sanitized"]))
    return found


def conduct(
    folder: Path,
    *,
    device: str = "cuda",
    seconds: float = 540.0,
    tarball: Path | None = None,
    caches: Path | None = None,
    resume: bool = False,
    dry: bool = False,
    say: Callable[[str], object],
) -> None:
    """Run a campaign; print its table last.

    Args:
        folder: Folder for lines, figures and outputs.
        device: GPU to measure.
        seconds: Time limit.
        tarball: File that holds the figures after each unit; by default the folder's name with ``.tar.gz``.
        caches: Folder for compiled kernels; by default in the temporary folder.
        resume: Whether to continue the folder's campaign.
        dry: Whether to compute small sizes on the CPU instead of the device's work.
        say: Function that receives progress messages and the table.
    Raises:
        UnsupportedError: There is no GPU.
        RingweaveError: As :func:`run`.
    """
    if not dry and not torch.cuda.is_available():
        raise UnsupportedError("device", device, "a GPU that torch sees", "Pass --dry to try the campaign without one.")
    folder = folder.resolve()
    path = tarball or folder.with_name(f"{folder.name}.tar.gz")
    todo = units(folder, device, Path.cwd(), dry)
    say(f"{len(todo)} units, at most {sum(each.seconds for each in todo):,.0f} s; figures: {path}")

    def keep(ended: Sequence[Ended]) -> str:
        results = {each.name: "left" for each in todo} | {each.unit: each.result for each in ended}
        figures = folder / FIGURES
        text = table(files.json_lines(figures) if figures.is_file() else (), results)
        files.replace(folder / TABLE, text + "\n")
        pack(folder, path, (LINES, FIGURES, TABLE))
        return text

    ended = run(todo, folder, seconds=seconds, caches=caches, resume=resume, say=say, after=keep)
    text = keep(ended)
    left = len(todo) - len(ended)
    say(f"{left} units left: the same command with --resume runs them." if left else "All units ended.")
    say(text)


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
    caches: Path | None = None,
    resume: bool = False,
    say: Callable[[str], object] = lambda text: None,
    after: Callable[[Sequence[Ended]], object] = lambda ended: None,
    clock: Callable[[], float] = time.monotonic,
) -> list[Ended]:
    """Run units in order until the time is used up.

    Args:
        todo: Units to run.
        folder: Folder for lines, figures and outputs.
        seconds: Time limit; a unit begins only if a quarter of its limit remains.
        caches: Folder for compiled kernels; by default in the temporary folder.
        resume: Whether to continue the folder's campaign.
        say: Function that receives progress messages.
        after: Function that is called with all results after each unit.
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
        came = _run(unit, folder, caches or Path(tempfile.gettempdir()) / "ringweave-campaign", min(unit.seconds, left))
        if came.result == "timed out" and left < unit.seconds:
            # the unit had less time than its limit, so it gets no line and the next command runs it again
            say(f"{unit.name}: begins anew next time")
            after(ended)
            continue
        with (folder / LINES).open("a") as file:
            file.write(json.dumps(asdict(came)) + "\n")
            file.flush()
            os.fsync(file.fileno())
        ended.append(came)
        after(ended)
        say(f"{unit.name}: {came.result} in {came.seconds:.0f} s")
    return ended


def _run(unit: Unit, folder: Path, caches: Path, limit: float) -> Ended:
    log = folder / ("".join(c if c.isalnum() else "-" for c in unit.name) + ".log")
    start, result = time.monotonic(), "done"
    with log.open("wb") as file:
        kept = {
            "TRITON_CACHE_DIR": str(caches / "triton"), "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
            tuning.VARIABLE: str(caches / "tuning"), "TRITON_STORE_BINARY_ONLY": "1", "PYTHONUNBUFFERED": "1",
            # the parent's paths, so that the units run from the sources too
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }  # fmt: skip
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
