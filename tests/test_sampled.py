"""A short run samples cases, and keeps together those that differ in one named argument."""

from __future__ import annotations

import pytest

from .sampled import places_of


@pytest.mark.parametrize("backend", ["one", "other"])
@pytest.mark.parametrize(("tokens", "heads"), [(1, 4), pytest.param(63, 4, id="odd"), (63, 2)])
def test_a_place_is_that_of_the_argument_alone(
    tokens: int, heads: int, backend: str, request: pytest.FixtureRequest
) -> None:
    place = [(1, 4), (63, 4), (63, 2)].index((tokens, heads))
    want = {"backend": ["one", "other"].index(backend), "tokens": place, "heads": place}
    assert places_of(request.node) == want
