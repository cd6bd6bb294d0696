"""Find what other distributions add to ringweave by their entry points, never by importing them by name."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from ringweave_command import ELSEWHERE, how_to_install

from .errors import RingweaveError

#: Attributes that distributions add to modules of ringweave, by their full names.
ATTRIBUTES = {
    "ringweave.audit": "ringweave-audit",
    "ringweave.bench": "ringweave-lab",
    "ringweave.parallel.simulate": "ringweave-lab",
    "ringweave.tune": "ringweave-lab",
}


class AbsentError(RingweaveError, AttributeError):
    """A command or an attribute belongs to a distribution that is not installed."""

    def __init__(self, name: str, distribution: str) -> None:
        super().__init__(name, "an installation without it", distribution, how_to_install(distribution))


def registrations() -> list[Callable[[Any], None]]:
    """Return the functions that installed distributions give to add their commands to the command line."""
    return [each.load() for each in entry_points(group="ringweave.commands")]


def attribute(module: str, name: str) -> Any:
    """Return the object that a distribution adds to a module under a name.

    Raises:
        AbsentError: The distribution is not installed.
    """
    full = f"{module}.{name}"
    found = entry_points(group="ringweave.attributes", name=full)
    if not found:
        raise AbsentError(full, ATTRIBUTES[full])
    return next(iter(found)).load()


def require_command(name: str) -> None:
    """Raise AbsentError for a command of a distribution that is not installed; the command line lacks the command."""
    if name in ELSEWHERE:
        raise AbsentError(f"command {name}", ELSEWHERE[name])
