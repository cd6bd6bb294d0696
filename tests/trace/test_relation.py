"""Relations of mask functions, compared with the functions at every pair."""

from __future__ import annotations

import pytest
import torch

from ringweave.trace.graph import UntraceableError
from ringweave.trace.relation import Open, Place, as_relation, leaves
from ringweave.trace.symbols import trace

from .definitions import by_pair, dense
from .masks import masks

PLACES = (
    Place(2, 4, 61, 47),
    Place(1, 1, 190, 222, 30, 6, 3),
    Place(1, 2, 1100, 1301),
    Place(2, 4, 5, 1400, 1395, 0),
)


@pytest.mark.parametrize("name", masks())
def test_the_corpus(name: str) -> None:
    """Each function has its pairs everywhere, and as much of it is recognised as the corpus says."""
    function, state = masks()[name]
    if state == "refused":
        # a symbol that a call keeps is refused in the next
        calls = 2 if name == "hostile: kept symbol" else 1
        for _ in range(calls - 1):
            trace(function)
        with pytest.raises(UntraceableError):
            as_relation(trace(function), PLACES[0])
        return
    for place in PLACES:
        found = as_relation(trace(function), place)
        if place == PLACES[0]:
            assert any(type(leaf) is Open for leaf in leaves(found)) == (state == "open")
        assert torch.equal(dense(found, place).expand(place[:4]), by_pair(function, place)), place
