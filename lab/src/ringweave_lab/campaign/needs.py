"""What the campaign needs on a machine: the packages, and which units are left out where one is missing.

This module imports no other package, so that a machine that lacks something says so at once.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable

#: Packages without which there is no campaign.
NEEDED = ("torch", "numpy", "filelock", "ringweave", "ringweave_gpu")
#: Packages by the units that are left out without them, as the first words of the units' names.
OPTIONAL = {
    "triton": ("ahead", "small", "own", "bits", "decode", "trial"),
    "pytest": ("tests",),
    "pytest_timeout": ("tests",),
    "typer": ("doctor",),
    "rich": ("doctor",),
}


def missing(names: Iterable[str]) -> list[str]:
    """Return the packages among some names that are not installed, without importing them."""
    return [name for name in names if importlib.util.find_spec(name) is None]


def left_out() -> set[str]:
    """Return the first words of the units that cannot run here."""
    return {word for name in missing(OPTIONAL) for word in OPTIONAL[name]}


def said() -> list[str]:
    """Name each missing package with the units that are left out without it, in a line."""
    optional = [f"{name} is missing: left out are {', '.join(OPTIONAL[name])}" for name in missing(OPTIONAL)]
    return [f"{name} is missing, and nothing runs without it" for name in missing(NEEDED)] + optional
