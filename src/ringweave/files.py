"""Read files as data: nothing in them is executed, and whatever they hold raises OSError or ValueError alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: Bytes of a file that is read whole; no file that the library writes as JSON comes near.
MOST = 2**26


def read(path: Path) -> bytes:
    """Read a file.

    Raises:
        OSError: It cannot be read.
        ValueError: It is too large.
    """
    with path.open("rb") as file:
        data = file.read(MOST + 1)
    if len(data) > MOST:
        raise ValueError(f"it has more than {MOST} bytes")
    return data


def parse(data: bytes | str) -> Any:
    """Parse JSON.

    Raises:
        ValueError: It is not JSON, or nested too deep.
    """
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Give the JSON objects of a file of lines, without lines that are not: a run that is killed leaves one.

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
