"""Read the fastest backend and tile size measured on this machine for each kind of call on a CPU.

``ringweave tune``, of the distribution ringweave-lab, writes them by the kind of a call (``tuning_keys``) into one
JSON file in the user's cache folder. GPUs have trials instead (``trial.py``). The file is read when auto first chooses
a backend, never at import, and again after it has changed; otherwise a choice costs one dict lookup.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from .. import files
from ..cache import process_cache
from ..call import Call
from ..environment import setting
from ..plan import Branch

#: Environment variable with the folder of the file; the default is a folder in the user's cache folder.
VARIABLE = "RINGWEAVE_CACHE"
FORMAT = 3
#: Largest tile size that every backend supports.
MOST_TILE_SIZE = 256
_CHECKED_EVERY = 1.0  # seconds between two checks of the file's modification time
_log = logging.getLogger("ringweave")


def tuning_file() -> Path:
    """Return the file of the answers, which may not exist."""
    return _file(setting(VARIABLE))


@process_cache
def _file(named: str) -> Path:
    # as torch and transformers do, on every system
    usual = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111  (also without a home)
    return (Path(named) if named else Path(usual) / "ringweave") / "tuning.json"


class Answer(NamedTuple):
    """The fastest backend for a kind of call.

    Attributes:
        backend: Name of the backend.
        tile: Tile size (queries, keys); None if the branch's default was fastest.
    """

    backend: str
    tile: tuple[int, int] | None = None


@dataclass(eq=False, repr=False)
class _Read:
    """The content of the file as last read.

    Attributes:
        named: Value of the environment variable at that time.
        path: File that was read.
        state: Modification time and size of the file, None if it is missing.
        checked: Time of the last check of ``state``, in seconds.
        answers: Answers by ``call_key``, then by density.
    """

    named: str = ""
    path: Path | None = None
    state: tuple[int, int] | None = None
    checked: float = -math.inf
    answers: dict[str, dict[int, Answer]] = field(default_factory=dict)


_read = _Read()


def refresh() -> None:
    """Make the next choice check the file, however recently it was checked."""
    _read.checked = -math.inf


def answers() -> Mapping[str, Mapping[int, Answer]]:
    """Return answers by key and density; at most a second older than the file."""
    return current().answers


def current() -> _Read:
    """Return the current content of the file, a new object whenever the file has been read again."""
    global _read
    named, now = setting(VARIABLE), time.monotonic()
    if named == _read.named and now - _read.checked < _CHECKED_EVERY:
        return _read
    path = tuning_file()
    state = _state(path)
    if path != _read.path or state != _read.state:
        made = _Read(named, path, state, now)
        for entry in load(path).values():
            tile = entry["tile"]
            made.answers.setdefault(entry["kind"], {})[entry["density"]] = Answer(
                entry["backend"], None if tile is None else (tile[0], tile[1])
            )
        _read = made
    _read.named, _read.checked = named, now
    return _read


def _state(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def load(path: Path) -> dict[str, dict[str, Any]]:
    """Read the entries of a file; empty, with a warning in the log, if its format is not this one."""
    try:
        content = files.parse(files.read(path))
        _check(content)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        _log.warning("the tuning store %s is ignored: %s", path, error)
        return {}
    entries: dict[str, dict[str, Any]] = content["entries"]
    return entries


_TYPES = {"kind": str, "density": int, "backend": str}


def _check(content: object) -> None:
    """Raise ValueError if a file's content is not a store of this format."""
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"its format is not {FORMAT}")
    entries = content.get("entries")
    if not isinstance(entries, dict):
        raise ValueError("it has no entries")
    for entry in entries.values():
        if (
            not isinstance(entry, dict)
            or any(type(entry.get(name)) is not of for name, of in _TYPES.items())
            or not _is_tile(entry.get("tile", ()))
        ):
            raise ValueError("one of its entries does not have this format")


def _is_tile(tile: object) -> bool:
    if tile is None:
        return True
    sides = isinstance(tile, list) and [type(each) for each in tile] == [int, int]
    return sides and all(0 < size <= MOST_TILE_SIZE and size % 16 == 0 for size in tile)  # type: ignore[attr-defined]


def lookup(call: Call, branch: Branch) -> Answer | None:
    """Return the fastest measured backend and tile for this kind of call; None if none was measured."""
    known = answers()
    if not known:
        return None
    # imported with the first answer
    from .tuning_keys import call_key, density

    key = call_key(call, branch)
    by_density = None if key is None else known.get(key)
    return None if by_density is None else by_density.get(density(branch))
