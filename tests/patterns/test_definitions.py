"""Every pattern allows the pairs of its definition, written here as a formula of one head, query and key.

Other tests compare plans and backends with ``to_dense``, which comes from the same zones as they do.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

import ringweave as rw
from ringweave import patterns
from ringweave.patterns.declared import DECLARED

N, HEADS = 37, 2
LENGTHS = [9, 1, 20, 7]
DOCUMENT = [number for number, length in enumerate(LENGTHS) for _ in range(length)]
KEPT = torch.rand(HEADS, 5, 5, generator=torch.Generator().manual_seed(3)) < 0.4
CHOSEN = torch.randint(-1, N, (N, 4), generator=torch.Generator().manual_seed(4))

Allows = Callable[[int, int, int], bool]


def around(q: int, k: int, window: int, dilation: int) -> bool:
    """The ``window`` keys around a query among those at its distance modulo ``dilation``, shifted inwards at borders."""
    members = list(range(q % dilation, N, dilation))
    begin = min(max(members.index(q) - window // 2, 0), len(members) - window)
    return k in members[begin : begin + window]


DEFINITIONS: dict[str, list[tuple[rw.Pattern, Allows]]] = {
    "Full": [(rw.Full(), lambda h, q, k: True)],
    "Causal": [(rw.Causal(), lambda h, q, k: k <= q)],
    "SlidingWindow": [
        (rw.SlidingWindow(6), lambda h, q, k: q - 6 <= k <= q),
        (rw.SlidingWindow(3, 5), lambda h, q, k: q - 3 <= k <= q + 5),
        (rw.SlidingWindow(0, 1), lambda h, q, k: q <= k <= q + 1),
    ],
    "Segments": [(rw.Segments(8), lambda h, q, k: q // 8 == k // 8)],
    "Documents": [(rw.Documents(LENGTHS), lambda h, q, k: DOCUMENT[q] == DOCUMENT[k])],
    "KeyPadding": [(rw.KeyPadding(torch.tensor([30]), torch.tensor([4])), lambda h, q, k: 4 <= k < 30)],
    "PrefixLM": [(rw.PrefixLM(7), lambda h, q, k: k < 7 or k <= q)],
    "Neighborhood": [
        (patterns.Neighborhood(5, 1, tokens=N), lambda h, q, k: around(q, k, 5, 1)),
        (patterns.Neighborhood(3, 4, tokens=N), lambda h, q, k: around(q, k, 3, 4)),
    ],
    "Sinks": [
        (rw.Sinks(3), lambda h, q, k: k < 3),
        (rw.Sinks([2, 30]), lambda h, q, k: k in (2, 30)),
    ],
    "Global": [
        (rw.Global(2), lambda h, q, k: k < 2 or q < 2),
        (rw.Global([5, 11]), lambda h, q, k: k in (5, 11) or q in (5, 11)),
    ],
    "Periodic": [(patterns.Periodic(9, 2, 6), lambda h, q, k: 2 <= k % 9 < 6)],
    "Strided": [(rw.Strided(5), lambda h, q, k: (q - k) % 5 == 0)],
    "Dilated": [(rw.Dilated(3, 4), lambda h, q, k: abs(q - k) <= 3 * 4 and (q - k) % 4 == 0)],
    "BlockTable": [(rw.BlockTable(KEPT, (8, 8)), lambda h, q, k: bool(KEPT[h, q // 8, k // 8]))],
    "Selected": [
        (rw.Selected(CHOSEN), lambda h, q, k: k in CHOSEN[q].tolist()),
        (rw.Selected(CHOSEN[:, :2] // 8, 8), lambda h, q, k: k // 8 in [c // 8 for c in CHOSEN[q, :2].tolist()]),
    ],
    "TokenMask": [(rw.TokenMask(lambda b, h, q, k: (q + h) % 3 >= k % 2), lambda h, q, k: (q + h) % 3 >= k % 2)],
    "Within": [
        (
            rw.SlidingWindow(2).within(rw.Documents(LENGTHS)),
            lambda h, q, k: DOCUMENT[q] == DOCUMENT[k] and q - 2 <= k <= q,
        ),
        (
            rw.Sinks(2).within(rw.Documents(LENGTHS)),
            lambda h, q, k: DOCUMENT[q] == DOCUMENT[k] and k - DOCUMENT.index(DOCUMENT[k]) < 2,
        ),
    ],
    "PerHead": [
        (rw.PerHead([rw.SlidingWindow(2), rw.Strided(3)]), lambda h, q, k: (q - k) % 3 == 0 if h else q - 2 <= k <= q)
    ],
}
#: Patterns with a definition in another file of tests, or in pairs that are counted more than once.
ELSEWHERE = {"GridNeighborhood": "test_grids.py", "GridWindows": "test_grids.py", "Tree": "test_tree.py", "LongNet": ""}


def test_every_pattern_has_a_definition() -> None:
    named = {name for name, known in DECLARED.items() if isinstance(known.make, type)}
    assert named - set(ELSEWHERE) == set(DEFINITIONS)


@pytest.mark.parametrize(
    ("pattern", "allows"),
    [pytest.param(*each, id=repr(each[0])[:60]) for cases in DEFINITIONS.values() for each in cases],
)
def test_a_pattern_allows_the_pairs_of_its_definition(pattern: rw.Pattern, allows: Allows) -> None:
    wanted = torch.tensor([
        [[allows(h, q, k) for k in range(N)] for q in range(N)] for h in range(HEADS)
    ])  # fmt: skip
    found = pattern.to_dense(N, heads=HEADS)[0]
    assert torch.equal(found.expand(HEADS, N, N), wanted)
    planned = pattern.plan(N, heads=HEADS, tile=16).to_dense()[0]
    assert torch.equal(planned.expand(HEADS, N, N), wanted)
    if pattern.by_place:
        # lists belong to the queries of a call, wherever these are
        return
    first = 21
    some = pattern.to_dense(N - first, N, heads=HEADS, q_offset=first)[0]
    assert torch.equal(some.expand(HEADS, N - first, N), wanted[:, first:])


def test_algebra_is_that_of_sets() -> None:
    """Both, either and not, of each two patterns."""
    every = [(pattern, pattern.to_dense(N, heads=HEADS)) for cases in DEFINITIONS.values() for pattern, _ in cases[:1]]
    for (a, x), (b, y) in itertools.pairwise([*every, every[0]]):
        assert torch.equal(*torch.broadcast_tensors((a & b).to_dense(N, heads=HEADS), x & y))
        assert torch.equal(*torch.broadcast_tensors((a | b).to_dense(N, heads=HEADS), x | y))
        assert torch.equal(*torch.broadcast_tensors((~a).to_dense(N, heads=HEADS), ~x))
