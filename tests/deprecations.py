"""Make deprecations that transformers logs errors in tests, like those that it warns of."""

from __future__ import annotations

import logging
import sys
from typing import Any

# words of a message about its assisted generation, which passes both arguments to its own generate
_THEIRS = "Passing `generation_config` together", "'min_new_tokens'"


def refuse() -> None:
    """Once transformers is imported, make it raise where it would log that one of our calls is deprecated.

    Warnings are errors by pytest's options. Messages that are logged once in a process reach no handler in tests that
    silence transformers, so the method itself is replaced.
    """
    before = getattr(logging.Logger, "warning_once", None)
    if "transformers" not in sys.modules or before is None or hasattr(before, "refuses"):
        return

    def warning_once(self: logging.Logger, *args: Any, **kwargs: Any) -> None:
        said = str(args[0])
        if self.name.startswith("transformers") and "deprecated" in said and not all(word in said for word in _THEIRS):
            raise DeprecationWarning(args[0])
        before(self, *args, **kwargs)

    warning_once.refuses = True  # type: ignore[attr-defined]
    logging.Logger.warning_once = warning_once  # type: ignore[attr-defined]
