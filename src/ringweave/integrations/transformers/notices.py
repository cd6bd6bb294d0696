"""Warnings of the logger ``ringweave``, each logged once in a process."""

from __future__ import annotations

import logging

#: Keys of the warnings that were logged.
SAID: set[str] = set()
_log = logging.getLogger("ringweave")


def said(key: str) -> bool:
    """Return whether the warning with a key was logged.

    Args:
        key: Identifier of the warning.
    """
    return key in SAID


def warn_once(key: str, name: str, got: str, wanted: str, remedy: str) -> None:
    """Log a warning in the form of the error texts, unless the key was used before.

    Args:
        key: Identifier of the warning.
        name: See :func:`ringweave.errors.message`.
        got: See there.
        wanted: See there.
        remedy: See there.
    """
    if key not in SAID:
        SAID.add(key)
        _log.warning(name, got, wanted, remedy)
