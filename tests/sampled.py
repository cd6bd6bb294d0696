"""Choose the cases of a short run; ``pytest --long`` and `make test-all` run all.

Of a test with three parametrizations or more, a short run takes cases in which each two of their values meet: a fault of
one value, or of two together, fails one of them. Tests with fewer parametrizations run whole, unless they are marked
``sampled``: then each value occurs, or with a number n one of n cases.
"""

from __future__ import annotations

import itertools
import os
import zlib
from collections.abc import Iterable, Sequence

import pytest

#: set in a long run, also for tests that run tests
LONG = "RINGWEAVE_LONG_TESTS"

Case = tuple[int, ...]


def is_long() -> bool:
    """Return whether to run every case of every test."""
    return LONG in os.environ


def left_out(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Return the tests that a short run skips: those marked ``long``, and cases that others stand for."""
    skipped, grids = set(), dict[tuple[str, ...], dict[pytest.Item, Case]]()
    for item in items:
        if item.get_closest_marker("long") is not None:
            skipped.add(item)
        elif hasattr(item, "callspec"):
            places = places_of(item)
            # parameters of fixtures make grids of their own
            of_marks = {name for mark in item.iter_markers("parametrize") for name in _names(mark)}
            others = [str(value) for name, value in item.callspec.params.items() if name not in of_marks]
            names = [_names(mark)[0] for mark in item.iter_markers("parametrize")]
            # a value that each iteration makes anew has no place
            case = tuple(places.get(name, -1 - item.callspec.indices[name]) for name in names)
            grids.setdefault((item.nodeid.partition("[")[0], *others), {})[item] = case
    for grid in grids.values():
        axes = [axis for axis in zip(*grid.values(), strict=True) if len({*axis}) > 1]
        if len(axes) > 2:
            together = 2
        elif axes and any(mark.name == "sampled" and not mark.args for mark in next(iter(grid)).iter_markers()):
            together = 1
        else:
            skipped |= {item for item in grid if not _is_in_sample(item)}
            continue
        chosen = covering(list(zip(*axes, strict=True)), together)
        skipped |= {item for place, item in enumerate(grid) if place not in chosen}
    return skipped


def covering(cases: Sequence[Case], together: int) -> set[int]:
    """Return the indices of some cases, which have all combinations of values of any ``together`` axes that cases have."""
    # an order by chance that each run has, since neighbours in a product differ in one value only
    order = sorted(range(len(cases)), key=lambda place: zlib.crc32(repr(cases[place]).encode()))
    axes = list(itertools.combinations(range(len(cases[0])), together))
    met: set[tuple[Case, Case]] = set()
    chosen = set()
    # cases with many new combinations first
    for least in range(len(axes), 0, -1):
        for place in order:
            new = {(some, tuple(cases[place][axis] for axis in some)) for some in axes} - met
            if len(new) >= least:
                chosen.add(place)
                met |= new
    return chosen


def _is_in_sample(item: pytest.Item) -> bool:
    """Return whether the mark ``sampled`` leaves a case in, which it chooses by name, so that each run has the same."""
    mark = item.get_closest_marker("sampled")
    if mark is None or not mark.args:
        return True
    # cases that differ in `whole` alone share an oracle
    places = {name: place for name, place in places_of(item).items() if name != mark.kwargs.get("whole")}
    return zlib.crc32(f"{item.name.partition('[')[0]} {sorted(places.items())}".encode()) % mark.args[0] == 0


def places_of(item: pytest.Item) -> dict[str, int]:
    """Return the index of each argument of a case among its values; pytest's own indices count whole cases."""
    places: dict[str, int] = {}
    params = item.callspec.params  # type: ignore[attr-defined]
    for mark in item.iter_markers("parametrize"):
        names = _names(mark)
        for place, given in enumerate(mark.args[1]):
            values = given.values if hasattr(given, "marks") else given if len(names) > 1 else (given,)
            if all(params[name] is value for name, value in zip(names, values, strict=True)):
                places |= dict.fromkeys(names, place)
                break
    return places


def _names(mark: pytest.Mark) -> list[str]:
    return mark.args[0].replace(",", " ").split() if isinstance(mark.args[0], str) else list(mark.args[0])
