"""A pattern in a strided view has the pairs of the whole at the view's positions, as a pattern with text and tensors."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ringweave as rw
from ringweave.patterns import Pattern, rebuild
from ringweave.patterns.base import parts_of
from ringweave.patterns.view import View, in_view
from ringweave.plan import branches

from ..cases import PATTERNS

N = 96


def even(b: object, h: object, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return (q + k) % 2 == 0


def ids(rows: int) -> torch.Tensor:
    place = torch.arange(N)
    return torch.stack([(place * 5 + 17 * row) // 90 % 4 - (row % 2) for row in range(rows)])


#: Leaves, each with a view at rates of 4, and some at every rate.
LEAVES: dict[str, Pattern] = {
    "full": rw.Full(),
    "causal": rw.Causal(),
    "window": rw.SlidingWindow(13, 6),
    "strided": rw.Strided(6),
    "dilated": rw.Dilated(3, 4),
    "segments": rw.Segments(12),
    "segments that begin at any place": rw.Segments(50),
    "periodic": rw.patterns.Periodic(8, 0, 4),
    "sinks": rw.Sinks(7),
    "listed": rw.Sinks([0, 3, 4, 5, 50, 54]),
    "marked": rw.Sinks(torch.arange(2 * N).view(2, N) % 7 < 3),
    "global": rw.Global([0, 9, 10, 11, 70]),
    "prefix": rw.PrefixLM(9),
    "documents": rw.Documents([1, 2, 30, 3, 60]),
    "ids": rw.Documents(ids=ids(2)),
    "ids in pieces": rw.Documents(ids=ids(1)[0]),
    "documents of two lengths": rw.Documents(cu_seqlens_q=[0, 20, N], cu_seqlens_k=[0, 40, N]),
    "padding": rw.KeyPadding(N - 9, 6),
    "paddings": rw.KeyPadding(torch.tensor([N, 41]), torch.tensor([3, 0])),
    "neighborhood": rw.patterns.Neighborhood(7, 4, tokens=N),
    "neighborhood of another rate": rw.patterns.Neighborhood(7, 3, tokens=N),
    "on a grid": rw.GridNeighborhood(rw.Grid(N), 6, 4),
    "on a grid of another rate": rw.GridNeighborhood(rw.Grid(N), 7),
    "windows on a grid": rw.GridWindows(rw.Grid(N), 8),
    "table": rw.BlockTable(torch.arange(24 * 12).view(2, 12, 12) % 5 < 2, 8),
}  # fmt: skip


def patterns() -> st.SearchStrategy[Pattern]:
    return st.recursive(
        st.sampled_from(list(LEAVES.values())),
        lambda inner: st.one_of(
            inner.map(lambda x: ~x), st.tuples(inner, inner).map(lambda x: x[0] & x[1]), st.tuples(inner, inner).map(lambda x: x[0] | x[1])
        ),
        max_leaves=4,
    )  # fmt: skip


def same_pairs(pattern: Pattern, rate: int, offset: int) -> Pattern | None:
    """Compare a view with the whole, by pairs and by tiles."""
    heads = 2 if parts_of(pattern, rw.BlockTable) else 1
    seen = in_view(pattern, rate, offset, N)
    if seen is None:
        return None
    wanted = pattern.to_dense(N, heads=heads, batch=2)[:, :, offset::rate, offset::rate]
    n = wanted.shape[-1]
    assert torch.equal(seen.to_dense(n, heads=heads, batch=2), wanted)
    assert torch.equal(seen.plan(n, heads=heads, batch=2, tile=16).to_dense(), wanted)
    assert torch.equal(seen.plan(3, n, heads=heads, batch=2, tile=16, q_offset=n - 3).to_dense(), wanted[:, :, -3:])
    return seen


@pytest.mark.parametrize("name", list(LEAVES))
def test_views_of_each_kind(name: str) -> None:
    for offset in range(4):
        assert same_pairs(LEAVES[name], 4, offset) is not None


@given(patterns(), st.sampled_from([2, 3, 4, 5, 12]), st.data())
def test_views_of_expressions(pattern: Pattern, rate: int, data: st.DataObject) -> None:
    seen = same_pairs(pattern, rate, data.draw(st.integers(0, rate - 1)))
    if seen is None:
        assert rate != 4
        return
    again = rebuild(seen.spec, seen.tables)
    assert again == seen
    assert again.spec == seen.spec
    assert pickle.loads(pickle.dumps(seen)) == seen
    assert all(not part.parts_within()[0].parts_within() for part in parts_of(seen, View))


@pytest.mark.parametrize("name", list(PATTERNS))
def test_views_of_the_cases(name: str) -> None:
    pattern = PATTERNS[name](N)
    if parts_of(pattern, rw.TokenMask):
        assert in_view(pattern, 2, 1, N) is None
        return
    for rate, offset in ((2, 1), (3, 0), (16, 5)):
        seen = in_view(pattern, rate, offset, N)
        if seen is not None:
            wanted = pattern.to_dense(N, heads=4)[:, :, offset::rate, offset::rate]
            assert torch.equal(seen.to_dense(wanted.shape[-1], heads=4), wanted)


@pytest.mark.parametrize(
    "pattern",
    [
        rw.GridNeighborhood(rw.Grid((12, 8)), 2, 4),
        rw.from_mask_mod(even),
        rw.Selected(torch.zeros(N, 1, dtype=torch.int32)),
        rw.BlockTable(torch.ones(16, 16, dtype=torch.bool), 6),
        rw.SlidingWindow(9).within(rw.KeyPadding(N)),
    ],
    ids=repr,
)
def test_relations_without_views(pattern: Pattern) -> None:
    assert in_view(pattern, 4, 1, N) is None
    assert in_view(pattern & rw.Strided(4), 4, 1, N) is None


@pytest.mark.parametrize(
    ("pattern", "kind"),
    [
        (rw.Strided(8), rw.Full),
        (rw.Strided(8) & rw.Strided(4), rw.Full),
        (rw.Strided(8) & rw.Causal(), rw.Causal),
        (rw.Strided(8) & (rw.Causal() | ~rw.Strided(8)), rw.Causal),
        (rw.Strided(8) & (rw.Causal() | rw.Strided(4)), None),
        (rw.Strided(8) & rw.SlidingWindow(2**30), None),
        (rw.Strided(8) & rw.SlidingWindow(0), None),
        (rw.Strided(8) & rw.Sinks(2**30), None),
        (rw.Strided(8) & rw.Strided(3) & rw.Causal(), None),
        (rw.Strided(8) & rw.KeyPadding(2**30), None),
        (rw.PerHead([rw.Strided(8), rw.Strided(8)]), None),
    ],
    ids=repr,
)
def test_views_that_a_dense_kernel_computes(pattern: Pattern, kind: type[Pattern] | None) -> None:
    for offset in range(8):
        seen = in_view(pattern, 8, offset, N)
        assert seen is not None
        assert isinstance(seen, (rw.Full, rw.Causal)) == (kind is not None)
        assert kind is None or isinstance(seen, kind)


def test_equal_views_have_one_text_and_one_plan() -> None:
    def texts(pattern: Pattern, rate: int) -> int:
        views = [in_view(pattern, rate, offset, N) for offset in range(rate)]
        return len({seen.spec for seen in views if seen is not None})

    assert texts(rw.Dilated(64, 16), 16) == 1
    assert texts(rw.Segments(64) & rw.Strided(24), 16) == 1
    assert texts(rw.patterns.Neighborhood(7, 16, tokens=1600), 16) == 1
    assert texts(rw.patterns.Neighborhood(7, 16, tokens=1605), 16) == 2
    assert texts(rw.Sinks(33), 16) == 2
    views = branches(rw.Dilated(64, 16), 16384, 16384)
    assert len(views) == 16
    assert len({id(view.plan()) for view in views}) == 1


def test_views_of_bounds_do_not_follow_later_writes() -> None:
    """Views are cached by the contents of bounds, so another tensor with these contents finds them."""
    n = 16384
    first, second = torch.tensor([9000]), torch.tensor([9000])
    assert len(branches(rw.Dilated(64, 16) & rw.KeyPadding(first), n, n)) == 16
    first[0] = 100
    pattern = rw.Dilated(64, 16) & rw.KeyPadding(second)
    views = branches(pattern, n, n)
    assert len(views) == 16
    assert sum(view.pairs() for view in views) == pattern.plan(n).pairs()


def test_a_misfit_is_reported_with_the_lengths_of_the_whole() -> None:
    for part in (rw.Documents([8192]), rw.patterns.Neighborhood(7, 16, tokens=8192)):
        (whole,) = branches(rw.Dilated(64, 16) & part, 16384, 16384)
        assert whole.rate == 1
        with pytest.raises(rw.PatternError, match="16384"):
            whole.plan()
