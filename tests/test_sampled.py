"""A short run takes some cases of a test, in which each two values of its arguments meet."""

from __future__ import annotations

import itertools
import math

import pytest

from .sampled import covering, is_long, places_of


@pytest.mark.parametrize("backend", ["one", "other"])
@pytest.mark.parametrize(("tokens", "heads"), [(1, 4), pytest.param(63, 4, id="odd"), (63, 2)])
def test_a_place_is_that_of_the_argument_alone(
    tokens: int, heads: int, backend: str, request: pytest.FixtureRequest
) -> None:
    place = [(1, 4), (63, 4), (63, 2)].index((tokens, heads))
    want = {"backend": ["one", "other"].index(backend), "tokens": place, "heads": place}
    assert places_of(request.node) == want


@pytest.mark.parametrize("together", [1, 2])
@pytest.mark.parametrize("sizes", [(2, 3, 4), (5, 5, 5, 5), (1, 9, 2, 2), (7, 3)], ids=str)
def test_values_meet(sizes: tuple[int, ...], together: int) -> None:
    """Each combination of values in a grid with holes is in a chosen case, and few cases suffice."""
    cases = [case for case in itertools.product(*map(range, sizes)) if sum(case) % 5]
    chosen = [cases[place] for place in covering(cases, together)]

    def met(of: list[tuple[int, ...]]) -> set[object]:
        axes = itertools.combinations(range(len(sizes)), together)
        return {(some, tuple(case[axis] for axis in some)) for some in axes for case in of}

    assert met(chosen) == met(cases)
    assert len(chosen) <= 2.5 * math.prod(sorted(sizes)[-together:])


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("second", [0, 1])
@pytest.mark.parametrize("third", [0, 1])
def test_a_grid_of_three(first: int, second: int, third: int, request: pytest.FixtureRequest) -> None:
    """Of 8 cases a short run takes 4 to 6, and a long run all."""
    name = request.node.originalname
    run = sum(getattr(item, "originalname", "") == name for item in request.session.items)
    # fewer where a case was asked for by its name
    assert run == 8 if is_long() else run <= 6
