"""A kernel's check on a GPU in a process of its own: one that crashes or hangs there costs that process, and no other.

An illegal access ends a CUDA context for all that the process had in it. What was found is kept on disk, by device,
driver, versions, the kernels' source and their measured blocks, so that it is tried once a machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from .. import files
from ..errors import says_no_memory
from . import tuning
from .backend import Case
from .tuning_key import where

#: Seconds for a trial: compilers take a second or two for each of some ten kernels.
LIMIT = 180.0
_COMMAND = (sys.executable, "-P", "-m", __name__)
_BEGAN, _FOUND = "ringweave: began", "ringweave: found "
_log = logging.getLogger("ringweave")


def kept(name: str, case: Case, structure: str) -> tuple[Path | None, str]:
    """Name the file of a verdict on a kind of case (None where there is no folder), and spell what it is of."""
    from .triton import launch_config

    folder = tuning.store()
    # a set's members have another order in every process
    anywhere = dataclasses.replace(case, device=torch.device(case.device).type, extras=frozenset())
    about = name, anywhere, *sorted(case.extras), structure
    facts = where(case.device), _driver(), *about, _source(), *launch_config.measured(case)
    of = "; ".join(map(str, facts))
    digest = hashlib.sha256(of.encode()).hexdigest()[:24]
    return None if folder is None else folder.parent / "trials" / f"{digest}.json", of


def known(file: Path | None, of: str) -> tuple[str | None] | None:
    """Read a verdict that was kept; None where there is none, or it is not readable."""
    try:
        line = {} if file is None else files.parse(files.read(file))
    except (OSError, ValueError):
        return None
    if not isinstance(line, dict) or line.get("of") != of or not isinstance(line.get("verdict", 0), str | None):
        return None
    return (line["verdict"],)


def tried(name: str, case: Case, structure: str, here: Callable[[], str | None]) -> str | None:
    """Say why a backend should not be used for a kind of case; None where its trial goes well.

    Args:
        name: The backend.
        case: A small one, on the device.
        structure: Of its branch.
        here: The check in this process, where no other can be begun on the device.
    """
    file, of = kept(name, case, structure)
    verdict, lasts = _apart(name, case, structure, here)
    if lasts and file is not None and not says_no_memory(verdict or ""):
        _keep(file, {"of": of, "verdict": verdict})
    return verdict


def _apart(name: str, case: Case, structure: str, here: Callable[[], str | None]) -> tuple[str | None, bool]:
    """What a process of its own found, and whether it would find the same again."""
    if not Path(_COMMAND[0]).name.startswith(("python", "pypy")):
        # Python is part of another program, which would begin once more
        return here(), True
    paths = os.pathsep.join(path for path in sys.path if path)
    try:
        ended = subprocess.run(
            _COMMAND, input=pickle.dumps((name, case, structure)), capture_output=True, timeout=LIMIT,
            env=os.environ | {"PYTHONPATH": paths},
        )  # fmt: skip
    except subprocess.TimeoutExpired as expired:
        if _BEGAN not in _text(expired.stdout):
            return here(), True
        return f"tried on this GPU, it was not done in {LIMIT:.0f} s", True
    except OSError:
        return here(), True
    lines = _text(ended.stdout).splitlines()
    if _BEGAN not in lines:
        _log.info("no trial of the backend %s in a process of its own: %s", name, _text(ended.stderr)[-200:])
        return here(), True
    found = [line.removeprefix(_FOUND) for line in lines if line.startswith(_FOUND)]
    # what a process prints as it dies may be cut
    with contextlib.suppress(IndexError, ValueError):
        verdict: str | None = files.parse(found[0])
        return verdict, True
    code = ended.returncode
    how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
    # what ends processes for want of memory ends them so
    return f"tried on this GPU, it took its process down ({how})", code != -signal.SIGKILL


def _text(printed: bytes | None) -> str:
    return (printed or b"").decode(errors="replace")


def _keep(file: Path, line: dict[str, str | None]) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=file.parent, suffix=".tmp")
        with os.fdopen(handle, "w", encoding="utf-8") as into:
            json.dump(line, into)
        Path(temporary).replace(file)
    except OSError as error:
        _log.info("the trial's verdict is not kept: %s", error)


def _driver() -> str:
    """The version of the GPU's driver, where the system says it."""
    for module in ("nvidia", "amdgpu"):
        try:
            return Path(f"/sys/module/{module}/version").read_text("utf-8").strip()
        except OSError:
            continue
    return "no driver"


@functools.cache
def _source() -> str:
    """A digest of the kernels' and their launch code's source."""
    digest = hashlib.sha256()
    for file in sorted((Path(__file__).parent / "triton").rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def main() -> None:
    """Run a trial in this process, and print what it finds."""
    from . import gpu_check
    from .dispatch import BACKENDS

    name, case, structure = pickle.load(sys.stdin.buffer)
    # a device that gives this process nothing says nothing of the kernel
    torch.ones(1, device=case.device)
    _say(_BEGAN)
    _say(_FOUND + json.dumps(gpu_check.check(BACKENDS[name], case, structure)))


def _say(line: str) -> None:
    sys.stdout.write(f"\n{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
