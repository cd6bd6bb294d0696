"""What ``ringweave tune`` measured on this machine: which backend is fastest for a kind of call.

A kind is the device by name, the versions of ringweave, torch and triton, the type, the head dimensions, the lengths
and the density by powers of two, how the pattern is structured, and the direction. The answers lie in one JSON file
under the user's cache folder. It is read at the first choice that auto makes, never at import, and again when it has
changed; a choice costs a look into a dict. Writing needs filelock, finding the folder platformdirs: the extra ``tune``.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import logging
import math
import os
import platform
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..errors import UnsupportedError, message
from ..patterns import BlockTable
from ..plan import Branch
from ..plan.build import default_tile, estimate_tiles
from ..plan.cache import table_keys
from .backend import Case

#: Names the folder of the store; by default the user's cache folder, as platformdirs knows it.
VARIABLE = "RINGWEAVE_CACHE"
FORMAT = 1
_CHECKED_EVERY = 1.0  # seconds between two looks at the file's time
_DENSITIES = 4096
_log = logging.getLogger("ringweave")


def store() -> Path | None:
    """The file; None where there is no folder for it: platformdirs is not installed, and no variable names one."""
    return _file(os.environ.get(VARIABLE, ""))


@functools.cache
def _file(named: str) -> Path | None:
    if named:
        return Path(named) / "tuning.json"
    try:
        import platformdirs
    except ImportError:
        return None
    return Path(platformdirs.user_cache_dir("ringweave", appauthor=False)) / "tuning.json"


@dataclass
class _Read:
    """What was read: answers by kind without density, then by density; when, and of which state of the file."""

    path: Path | None = None
    state: tuple[int, int] | None = None
    checked: float = -math.inf
    answers: dict[str, dict[int, str]] = field(default_factory=dict)


_read = _Read()


def refresh() -> None:
    """Look at the file at the next choice, however recently it was looked at."""
    _read.checked = -math.inf


def answers() -> Mapping[str, Mapping[int, str]]:
    """Backends by kind and density, from the file as it was at most a second ago."""
    global _read
    path, now = store(), time.monotonic()
    if path == _read.path and now - _read.checked < _CHECKED_EVERY:
        return _read.answers
    state = _state(path)
    if path != _read.path or state != _read.state:
        made: dict[str, dict[int, str]] = {}
        for entry in ({} if path is None or state is None else load(path)).values():
            made.setdefault(entry["kind"], {})[entry["density"]] = entry["backend"]
        _read = _Read(path, state, now, made)
    _read.checked = now
    return _read.answers


def _state(path: Path | None) -> tuple[int, int] | None:
    if path is None:
        return None
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def load(path: Path) -> dict[str, dict[str, Any]]:
    """The file's entries; none, and a warning in the log, where it is not what this version writes."""
    try:
        found = json.loads(path.read_text("utf-8"))
        _check(found)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        _log.warning("the tuning store %s is ignored: %s", path, error)
        return {}
    entries: dict[str, dict[str, Any]] = found["entries"]
    return entries


def _check(found: object) -> None:
    """Raises ValueError where a file's content is not a store of this format."""
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ValueError(f"it is not of format {FORMAT}")
    entries = found.get("entries")
    if not isinstance(entries, dict):
        raise ValueError("it holds no entries")
    for entry in entries.values():
        if not isinstance(entry, dict) or [type(entry.get(name)) for name in ("kind", "density", "backend")] != [
            str, int, str,
        ]:  # fmt: skip
            raise ValueError("an entry is not one of this format")


def record(found: list[dict[str, Any]]) -> Path:
    """Add entries to the store, each with kind, density and backend, in place of older ones of the same kind.

    Safe under concurrent processes: one at a time reads, adds and replaces the file, and readers see either the old
    one or the new one.

    Returns:
        The file.
    Raises:
        UnsupportedError: No folder is known, or filelock is not installed.
    """
    path = store()
    try:
        import filelock
    except ImportError:
        path = None
    if path is None:
        raise UnsupportedError(
            message("tuning store", "no place for it", "platformdirs and filelock", "pip install 'ringweave[tune]'")
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(path.with_suffix(".lock")):
        entries = load(path) | {f"{entry['kind']}; density 2^-{entry['density']}": entry for entry in found}
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix="tuning-", suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump({"format": FORMAT, "entries": entries}, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).replace(path)
        finally:
            # gone where it has replaced the store
            Path(temporary).unlink(missing_ok=True)
    refresh()
    return path


def lookup(case: Case, branch: Branch) -> str | None:
    """The name of the backend that was fastest for this kind of call; None where none was measured."""
    known = answers()
    if not known:
        return None
    name = kind(case, branch)
    found = None if name is None else known.get(name)
    return None if found is None else found.get(density(branch))


def kind(case: Case, branch: Branch) -> str | None:
    """The kind of a call, but for its density; None where its device is not here."""
    where = _where(case.device)
    if where is None:
        return None
    grid = branch.pattern.grid() if branch.structure == "sparse" else None
    structure = branch.structure if grid is None else f"{branch.structure} on a grid of {grid}"
    dtype = str(case.dtype).removeprefix("torch.")
    lengths = f"2^{branch.nq.bit_length() - 1} x 2^{branch.nk.bit_length() - 1} tokens"
    direction = "backward" if case.needs_grad else "forward"
    return f"{where}; {dtype}; D {case.head_dim}, Dv {case.value_dim}; {lengths}; {structure}; {direction}"


def _where(device: str) -> str | None:
    """A device by name, and the versions."""
    if device == "cpu":
        return _named(f"{processor()}, {torch.get_num_threads()} threads")
    if device == "cuda" and torch.cuda.is_available():
        return _named(torch.cuda.get_device_name())
    return None


@functools.cache
def _named(device: str) -> str:
    try:
        triton = f"triton {importlib.metadata.version('triton')}"
    except importlib.metadata.PackageNotFoundError:
        triton = "no triton"
    # the package imports this on its way to its own version
    own = sys.modules[__package__.partition(".")[0]].__version__
    return f"{device}; ringweave {own}; torch {torch.__version__}; {triton}"


@functools.cache
def processor() -> str:
    """The processor's model."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


_densities: OrderedDict[Hashable, int] = OrderedDict()


def density(branch: Branch) -> int:
    """The share of tiles as the nearest power of 1/2: 0 all, 1 a half, and so on; from a sample, and kept.

    Of a block table on a GPU nothing is read: the share that it may have at most.
    """
    if branch.structure != "sparse":
        return 0
    pattern = branch.pattern
    key = (pattern.spec, table_keys(pattern.tables), branch.nq, branch.nk, branch.head_count, branch.q_offset)
    found = _densities.get(key)
    if found is None:
        found = _densities[key] = _power(_share(branch))
        if len(_densities) > _DENSITIES:
            _densities.popitem(last=False)
    return found


def _share(branch: Branch) -> float:
    pattern = branch.pattern
    if isinstance(pattern, BlockTable) and pattern.tables[0].device.type != "cpu":
        return pattern.most / pattern.blocks.key_blocks
    tiles = estimate_tiles(pattern, branch.nq, branch.nk, heads=branch.head_count, q_offset=branch.q_offset)
    rows, columns = (-(-n // default_tile(n)) for n in (branch.nq, branch.nk))
    return tiles / (branch.head_count * rows * columns)


def _power(share: float) -> int:
    return 99 if share <= 0 else max(0, round(-math.log2(share)))
