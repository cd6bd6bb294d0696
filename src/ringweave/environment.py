"""Read environment variables quickly enough for every call."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path

from .cache import process_cache

#: Selects a lower instruction set of the native kernel than the machine's best, for tests and comparisons.
CPU_VARIANT = "RINGWEAVE_CPU_VARIANT"
# For a variable that is not set, os.environ.get raises and catches two exceptions, which takes a microsecond.
_values = os.environ._data  # type: ignore[attr-defined]
_key = process_cache(os.environ.encodekey)


def setting(name: str) -> str:
    """Return a variable's value, or "" if it is not set.

    Example:
        >>> setting("RINGWEAVE_NO_SUCH_VARIABLE")
        ''
    """
    found = _values.get(_key(name))
    return "" if found is None else os.environ.decodevalue(found)


def driver() -> str | None:
    """Return the version of the GPU's driver, if the system reports it."""
    for module in ("nvidia", "amdgpu"):
        with contextlib.suppress(OSError):
            return Path(f"/sys/module/{module}/version").read_text("utf-8").strip()
    return None


def commit() -> str | None:
    """Return the short commit of the sources, with ``+`` for local changes; None if they are in no repository."""
    here = Path(__file__).resolve().parent

    def git(*words: str) -> str:
        found = subprocess.run(["git", "-C", str(here), *words], capture_output=True, text=True, timeout=5, check=True)
        return found.stdout.strip()

    try:
        # an installed copy may be inside another repository, so the commit counts only if the file is tracked
        git("ls-files", "--error-unmatch", "__init__.py")
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.SubprocessError):
        return None
