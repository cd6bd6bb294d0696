"""Public names of modules, unknown names, and old names that still work for one release."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from .cache import fact


def warn_renamed(old: str, new: str, stacklevel: int = 3) -> None:
    """Warn that a public name has changed."""
    warnings.warn(f"{old} is now {new}; the next release drops the old name.", FutureWarning, stacklevel)


def renamed(owner: str, old: str, new: str) -> property:
    """Make a property for an old name that warns and returns the attribute of the new name."""

    def read(self: Any) -> Any:
        warn_renamed(f"{owner}.{old}", f"{owner}.{new}")
        return getattr(self, new)

    return property(read)


def renamed_value(option: str, given: Any, names: Mapping[str, str]) -> Any:
    """Return the new form of an option's old value, with a warning once per process; other values stay unchanged."""
    new = names.get(given) if type(given) is str else None
    if new is None:
        return given
    if not torch.compiler.is_compiling():
        _warn_value(option, given, new)
    return new


@fact
def _warn_value(option: str, old: str, new: str) -> None:
    # the stack level skips this file, the checks and the public function
    warnings.warn(f"{option} {old!r} is now {new!r}; the next release drops the old name.", FutureWarning, 6)


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
