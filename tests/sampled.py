"""Choose the cases of a short run; ``pytest --long`` and `make test-all` run all."""

from __future__ import annotations

import os
import zlib

import pytest

#: set in a long run, also for tests that run tests
LONG = "RINGWEAVE_LONG_TESTS"


def is_long() -> bool:
    """Return whether to run every case of every test."""
    return LONG in os.environ


def is_left_out(item: pytest.Item) -> bool:
    """Return whether a short run skips a test: by its mark, or because the test has many cases and the run samples one in n."""
    mark = item.get_closest_marker("sampled")
    if item.get_closest_marker("long") is not None:
        return True
    if mark is None or not hasattr(item, "callspec"):
        return False
    # chosen by name, so each run has the same sample; cases that differ in `whole` alone share an oracle
    places = {name: place for name, place in places_of(item).items() if name != mark.kwargs.get("whole")}
    return zlib.crc32(f"{item.name.partition('[')[0]} {sorted(places.items())}".encode()) % mark.args[0] != 0


def places_of(item: pytest.Item) -> dict[str, int]:
    """Return the index of each argument of a case among its values; pytest's own indices count whole cases."""
    places: dict[str, int] = {}
    params = item.callspec.params  # type: ignore[attr-defined]
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].replace(",", " ").split() if isinstance(mark.args[0], str) else list(mark.args[0])
        for place, given in enumerate(mark.args[1]):
            values = given.values if hasattr(given, "marks") else given if len(names) > 1 else (given,)
            if all(params[name] is value for name, value in zip(names, values, strict=True)):
                places |= dict.fromkeys(names, place)
                break
    return places
