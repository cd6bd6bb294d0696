"""The compiled module: the kernel of the processor, and the painter of masks."""

from __future__ import annotations

import importlib
from types import ModuleType

from .cache import process_cache


@process_cache
def module() -> ModuleType | None:
    """Return the extension module, or None if the package was built without a compiler."""
    try:
        return importlib.import_module("ringweave._cpu")
    except ImportError:
        return None
