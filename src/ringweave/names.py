"""Public names of modules, and errors for unknown ones."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn


def only(names: Sequence[str]) -> Callable[[], list[str]]:
    """Make a module's ``__dir__``, so that completion offers its public names but not its imports."""
    return lambda: sorted(names)


_NEAR = 64  # most characters of a name that is compared with known names


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Return the known name that a misspelt one resembles, in whatever case and with or without underscores."""
    # sliding_window is near SlidingWindow
    known = {each.lower().replace("_", "").rpartition(".")[2]: each for each in names}
    near = difflib.get_close_matches(name.lower().replace("_", ""), known, 1) if len(name) <= _NEAR else []
    return known[near[0]] if near else None


def suggest(module: str, names: Sequence[str]) -> Callable[[str], NoReturn]:
    """Make a module's ``__getattr__``: it raises AttributeError with the public name that an unknown one resembles."""

    def unknown(name: str) -> NoReturn:
        # copy, pickle and inspect ask for private names
        near = None if name.startswith("_") else nearest(name, names)
        remedy = f"its names are listed by dir({module})" if near is None else f"did you mean {near}?"
        raise AttributeError(f"module {module!r} has no attribute {name!r}; {remedy}")

    return unknown


def on_demand(package: str, where: Mapping[str, str], unknown: Callable[[str], Any]) -> Callable[[str], Any]:
    """Make a package's ``__getattr__``, which imports a name from its module when the name is first used.

    Args:
        package: Name of the package.
        where: Module of each name, below the package.
        unknown: Function for other names.
    """

    def find(name: str) -> Any:
        if name not in where:
            return unknown(name)
        found = getattr(importlib.import_module(f"{package}.{where[name]}"), name)
        # the next look-up finds it without this function
        setattr(sys.modules[package], name, found)
        return found

    return find
