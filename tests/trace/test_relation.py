"""Relations of mask functions, compared with the functions at every pair."""

from __future__ import annotations

import pytest
import torch

from ringweave.trace.graph import UntraceableError
from ringweave.trace.relation import And, Distances, Open, Or, as_relation, joined, leaves, negated
from ringweave.trace.symbols import trace
from ringweave.types import Place

from .definitions import by_pair, dense
from .masks import masks

PLACES = (
    Place(2, 4, 61, 47),
    Place(1, 1, 190, 222, 30, 6, 3),
    Place(1, 1, 1100, 1301),
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
    # a chain of 300 operations, which takes seconds to evaluate at a place, is about their number
    for place in PLACES[:1] if "chain" in name else PLACES:
        found = as_relation(trace(function), place)
        if place == PLACES[0]:
            assert any(type(leaf) is Open for leaf in leaves(found)) == (state == "open")
        assert torch.equal(dense(found, place).expand(place[:4]), by_pair(function, place)), place


@pytest.mark.parametrize("name", ["window", "packed window", "padding"])
def test_compiled_code_reads_masks(name: str) -> None:
    """torch.compile traces the trace and the reader, without the values of tables."""
    function, place = masks()[f"transformers: {name}"].function, Place(2, 2, 40, 50)

    def pairs(x: torch.Tensor) -> torch.Tensor:
        return dense(as_relation(trace(function), place), place) & (x == 0)

    compiled = torch.compile(pairs, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.zeros(1)).expand(place[:4]), by_pair(function, place))


def test_sets_of_distances() -> None:
    """Unions, intersections and complements of intervals, ends and neighbours included."""
    inf, place = float("inf"), Place(1, 1, 12, 12)
    sets = [
        Distances(runs)
        for runs in (
            (),
            ((-inf, inf),),
            ((0, 0),),
            ((-inf, -3), (2, 4)),
            ((-2, 1), (5, inf)),
            ((-1, 1), (3, 3), (5, 5)),
        )
    ]
    for one in sets:
        assert torch.equal(dense(negated(one), place), ~dense(one, place))
        assert negated(negated(one)) == one
        for other in sets:
            for kind, expected in ((And, torch.logical_and), (Or, torch.logical_or)):
                found = joined(kind, [one, other])
                assert isinstance(found, Distances)
                assert torch.equal(dense(found, place), expected(dense(one, place), dense(other, place)))


def test_tables_that_are_too_short() -> None:
    """A value of one side, and an entry at both, is needed for all positions of the call."""
    short, place = torch.zeros(9, 9, dtype=torch.bool), Place(1, 1, 9, 10)
    for function in (lambda b, h, q, k: short[0, k], lambda b, h, q, k: short[q, k]):
        as_relation(trace(function), place._replace(nk=9))
        with pytest.raises(UntraceableError):
            as_relation(trace(function), place)


def test_conditions_on_the_query_beside_equal_values() -> None:
    """A condition on the compared value is one on the key; any other stays one on the query."""
    ids, place = torch.arange(200) // 7 % 5, PLACES[0]
    for other in (
        lambda b, q: ids[q] > 1, lambda b, q: q % 5 > 0, lambda b, q: (ids[q] > 1) | (q > 9),
        lambda b, q: ids[q + 1] > 1, lambda b, q: ids[q] > b,
    ):  # fmt: skip
        for function in (
            lambda b, h, q, k, other=other: (ids[q] == ids[k]) & other(b, q),
            lambda b, h, q, k, other=other: ~((ids[q] == ids[k]) & other(b, q)) | (q == k),
        ):
            found = as_relation(trace(function), place)
            assert torch.equal(dense(found, place).expand(place[:4]), by_pair(function, place))
