"""Read files as data: nothing in them is executed, and bad contents raise only OSError or ValueError; replace them."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: Maximum size in bytes of a file that is read whole; JSON files that the library writes are far smaller.
MOST = 2**26


def read(path: Path) -> bytes:
    """Read a file.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is larger than ``MOST``.
    """
    with path.open("rb") as file:
        data = file.read(MOST + 1)
    if len(data) > MOST:
        raise ValueError(f"it has more than {MOST} bytes")
    return data


def replace(path: Path, text: str) -> None:
    """Write a file as a whole: readers, and a crash, see the old content or the new one.

    Raises:
        OSError: The file cannot be written.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def parse(data: bytes | str) -> Any:
    """Parse JSON.

    Raises:
        ValueError: The text is not JSON, or nested too deep.
    """
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a file, one per line; skip other lines, such as the last one of a killed run.

    Raises:
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        while line := file.readline(MOST):
            try:
                found = parse(line)
            except ValueError:
                continue
            if isinstance(found, dict):
                yield found
