"""Write measurements into the file that ``ringweave.backends.tuning`` reads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import filelock

from ringweave import files
from ringweave.backends import tuning
from ringweave.backends.tuning import FORMAT, VARIABLE
from ringweave.errors import UnsupportedError


def writable_file() -> Path:
    """Return the file after making its folder; measurements look first whether they can be stored.

    Raises:
        UnsupportedError: The folder cannot be made.
    """
    path = tuning.tuning_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        got = f"{path.parent}: {error.strerror or error}"
        raise UnsupportedError("tuning store", got, "a folder", f"Set {VARIABLE} to another folder.") from None
    return path


def write_entries(answers: Sequence[Mapping[str, Any]]) -> Path:
    """Add entries to the file, replacing those with the same keys.

    Concurrent processes may call it: a lock lets one process at a time read, extend and replace the file, and readers
    see either the old file or the new one.

    Args:
        answers: Entries with kind, density, backend and tile (sides, or None for the branch's default).

    Returns:
        Path of the file.

    Raises:
        UnsupportedError: As :func:`writable_file`.
    """
    path = writable_file()
    with filelock.FileLock(path.with_suffix(".lock")):
        stored = tuning.load(path)
        stored |= {f"{entry['kind']}; density 2^-{entry['density']}": dict(entry) for entry in answers}
        files.replace(path, json.dumps({"format": FORMAT, "entries": stored}, indent=1))
    tuning.refresh()
    return path
