"""Find parts of the separate distribution ``ringweave-lab`` by its entry points, never by importing it by name."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

#: Commands that ``ringweave-lab`` adds to ``ringweave``.
COMMANDS = ("bench", "demo", "explore", "profile", "simulate")
REMEDY = "install it from a clone of the repository with pip install ./lab."


def registrations() -> list[Callable[[Any], None]]:
    """Return the functions that add commands to the command line; empty if ``ringweave-lab`` is not installed."""
    return [each.load() for each in entry_points(group="ringweave.commands")]


def attribute(module: str, name: str) -> Any:
    """Return the object that ``ringweave-lab`` adds to a module under a name.

    Raises:
        AttributeError: ``ringweave-lab`` is not installed.
    """
    found = entry_points(group="ringweave.attributes", name=f"{module}.{name}")
    if not found:
        raise AttributeError(f"{module}.{name} belongs to the distribution ringweave-lab: {REMEDY}")
    return next(iter(found)).load()
