"""Count the package's Python calls."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ringweave as rw


def calls(function: Callable[[], object], *within: str) -> int:
    """Count the Python calls of a function inside the package, or in parts of it."""
    root = Path(rw.__file__).parent
    roots, count = tuple(str(root / part) for part in within or ("",)), 0

    def hook(frame: Any, event: str, arg: object) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(roots)

    sys.setprofile(hook)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count
