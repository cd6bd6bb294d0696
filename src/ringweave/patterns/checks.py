"""Argument checks that patterns share."""

from __future__ import annotations

from ..errors import PatternError, message


def at_least(name: str, value: int, least: int) -> None:
    """Raise PatternError unless value is an integer of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise PatternError(message(name, repr(value), "an int", "Pass a whole number of tokens."))
    if value < least:
        raise PatternError(message(name, value, f"at least {least}", f"Raise {name} to {least} or more."))
