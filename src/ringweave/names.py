"""Public names of modules, and old names that still work for one release."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
