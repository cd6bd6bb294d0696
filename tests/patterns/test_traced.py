"""Patterns of mask functions, compared with the functions at every pair."""

from __future__ import annotations

import pytest
import torch

from ringweave.patterns.traced import of_graph
from ringweave.trace.relation import Place
from ringweave.trace.symbols import trace

from ..trace.definitions import by_pair
from ..trace.masks import masks

PLACES = (
    Place(2, 4, 61, 64),
    Place(1, 1, 190, 222, 30, 6, 3),
    Place(1, 2, 1100, 1301),
    Place(2, 4, 5, 1400, 1395, 0),
    Place(2, 1, 70, 40, 3),
)


@pytest.mark.parametrize("name", [name for name, mask in masks().items() if mask.state != "refused"])
def test_the_corpus(name: str) -> None:
    """Each pattern has the pairs of its function."""
    function = masks()[name].function
    for place in PLACES:
        pattern = of_graph(trace(function), place)
        if pattern is not None:
            got = pattern.to_dense(place.nq, place.nk, place.heads, batch=place.batch, q_offset=place.q0 - place.k0)
            assert torch.equal(got, by_pair(function, place)), (pattern, place)
