"""Deprecations that transformers logs: an error in the tests, as those that it warns of."""

from __future__ import annotations

import logging
import sys
from typing import Any


def refuse() -> None:
    """Let transformers, once it is imported, raise in place of logging that a call of ours is deprecated.

    Warnings are errors by pytest's options. Messages that are logged once in a process reach no handler in tests that
    silence transformers, so the method itself is replaced.
    """
    before = getattr(logging.Logger, "warning_once", None)
    if "transformers" not in sys.modules or before is None or hasattr(before, "refuses"):
        return

    def warning_once(self: logging.Logger, *args: Any, **kwargs: Any) -> None:
        if self.name.startswith("transformers") and "deprecated" in str(args[0]):
            raise DeprecationWarning(args[0])
        before(self, *args, **kwargs)

    warning_once.refuses = True  # type: ignore[attr-defined]
    logging.Logger.warning_once = warning_once  # type: ignore[attr-defined]
