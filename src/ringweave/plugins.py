"""Find what other distributions add to ringweave, by their entry points, and say which package a module lacks."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Container
from importlib.metadata import entry_points, version
from typing import Any

from ringweave_command import ELSEWHERE, how_to_install

from .errors import RingweaveError, UnsupportedError

#: Attributes that distributions add to modules of ringweave, by their full names.
ATTRIBUTES = {
    "ringweave.audit": "ringweave-audit",
    "ringweave.bench": "ringweave-lab",
    "ringweave.parallel.simulate": "ringweave-lab",
    "ringweave.tune": "ringweave-lab",
}


#: Backends that distributions add.
BACKEND_OWNERS = dict.fromkeys(("attn_gym", "flash_attn_4", "triton"), "ringweave-gpu")


#: The class of programs for keys and values on the host, once an entry point or a process without them has named it.
HOST_PROGRAMS: list[Callable[[Any], Any]] = []


class AbsentError(RingweaveError, AttributeError):
    """A command or an attribute belongs to a distribution that is not installed."""

    def __init__(self, name: str, distribution: str) -> None:
        super().__init__(name, "an installation without it", distribution, how_to_install(distribution))


class AbsentPackageError(RingweaveError, ModuleNotFoundError):
    """A module of ringweave needs a package that is not installed, or a newer version of it."""

    def __init__(self, package: str, got: str, wanted: str, extra: str) -> None:
        super().__init__(package, got, wanted, f"Run pip install 'ringweave[{extra}]'.")
        # as Python's own error says it
        self.name = package


def require_package(package: str, major: int, extra: str) -> None:
    """Raise AbsentPackageError unless a package is installed.

    Args:
        package: Its name, also as a module.
        major: The lowest major version that will do.
        extra: The extra of ringweave that installs it.
    """
    wanted = f"version {major} or newer"
    if importlib.util.find_spec(package) is None:
        raise AbsentPackageError(package, "no such package", wanted, extra)
    found = version(package)
    if int(found.split(".")[0]) < major:
        raise AbsentPackageError(package, f"version {found}", wanted, extra)


def registrations() -> list[Callable[[Any], None]]:
    """Return the functions that installed distributions give to add their commands to the command line."""
    return [each.load() for each in entry_points(group="ringweave.commands")]


def backends() -> dict[str, Callable[[], Any]]:
    """Return the functions that load the backends of installed distributions, by name."""
    found = entry_points(group="ringweave.backends")
    return {each.name: each.load for each in sorted(found, key=lambda each: each.name)}


def host_program() -> Callable[[Any], Any]:
    """Return the class of programs for calls with keys and values on the host.

    Raises:
        UnsupportedError: Its distribution is not installed.
    """
    if not HOST_PROGRAMS:
        HOST_PROGRAMS.extend(each.load() for each in entry_points(group="ringweave.programs", name="host"))
    if not HOST_PROGRAMS:
        got, owner = "'stream' for keys and values on the host, without ringweave-gpu", "ringweave-gpu"
        raise UnsupportedError("on_oom", got, owner, how_to_install(owner))
    return HOST_PROGRAMS[0]


def absent_backends(known: Container[str]) -> dict[str, str]:
    """Return the backends of distributions that are not among the known ones, each with how to get it."""
    absent = {name: owner for name, owner in BACKEND_OWNERS.items() if name not in known}
    return {name: f"{owner} is not installed. {how_to_install(owner)}" for name, owner in absent.items()}


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


def require_backend(name: str) -> None:
    """Raise UnsupportedError for a backend of a distribution that is not installed."""
    if name in BACKEND_OWNERS:
        owner = BACKEND_OWNERS[name]
        raise UnsupportedError("backend", f"{name!r} without {owner}", owner, how_to_install(owner))
