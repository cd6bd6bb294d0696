"""The compiled module: the kernel of the processor, and the painter of masks."""

from __future__ import annotations

import hashlib
import importlib
import sys
from pathlib import Path
from types import ModuleType

from .cache import process_cache
from .errors import warn_once

# the sources of the kernel, if the package runs from a clone
_SOURCES = Path(__file__).parents[2] / "csrc"
REINSTALL = "Install ringweave again; in a clone, pip install . or make."


@process_cache
def module() -> ModuleType | None:
    """Return the extension module, or None if the package was built without a compiler."""
    try:
        found = importlib.import_module("ringweave._cpu")
    except ImportError:
        return None
    other = other_build(found)
    if other is not None:
        warn_once("native build", "ringweave._cpu", *other, REINSTALL)
    return found


def other_build(found: ModuleType) -> tuple[str, str] | None:
    """Return the build of an extension module and the build of this package, if they differ."""
    version, own = getattr(found, "version", "an earlier version"), sys.modules["ringweave"].__version__
    if version != own:
        return f"a build of {version}", f"one of {own}, as the package"
    if _SOURCES.is_dir() and found.sources != digest(_SOURCES):
        return "a build of other sources", "one of those in csrc"
    return None


def digest(folder: Path) -> str:
    """Return the digest of the kernel's sources, as CMakeLists.txt makes it."""
    files = sorted([*folder.glob("*.cpp"), *folder.glob("*.h")])
    each = "".join(hashlib.sha256(file.read_bytes()).hexdigest() for file in files)
    return hashlib.sha256(each.encode()).hexdigest()
