"""Test patterns as values: algebra, equality, hashing, pickling and text."""

from __future__ import annotations

import pickle

import pytest
import torch

import ringweave as rw
from ringweave.errors import PatternError
from ringweave.patterns.located import Located, located

from ..cases import MIXTURES, PATTERNS


@pytest.mark.parametrize("name", list(PATTERNS | MIXTURES))
def test_value_semantics(name: str) -> None:
    make = (PATTERNS | MIXTURES)[name]
    a, b = make(200), make(200)
    assert a == b
    assert hash(a) == hash(b)
    assert a != rw.SlidingWindow(12345)
    assert repr(a)
    if "TokenMask" not in a.spec:
        again = pickle.loads(pickle.dumps(a))
        assert again == a
        assert len(pickle.dumps(rw.SlidingWindow(5) | rw.Sinks(9))) < 500


def test_algebra() -> None:
    a, b = rw.SlidingWindow(9), rw.Segments(16)
    x, y = a.to_dense(64), b.to_dense(64)
    assert torch.equal((a & b).to_dense(64), x & y)
    assert torch.equal((a | b).to_dense(64), x | y)
    assert torch.equal((~a).to_dense(64), ~x)
    assert ~~a == a
    assert ~(a | b) == ~a & ~b
    assert ~(a & b) == ~a | ~b
    assert a & a == a
    assert a & rw.Full() == a
    assert a | ~rw.Full() == a
    assert repr((a | b) & rw.Causal()) == "(SlidingWindow(9) | Segments(16)) & Causal()"


def test_tables_of_equal_value_are_equal() -> None:
    mask = torch.eye(4, dtype=torch.bool)
    assert rw.BlockTable(mask, 16) == rw.BlockTable(mask.clone(), 16)
    assert rw.BlockTable(mask, 16) != rw.BlockTable(~mask, 16)
    assert rw.BlockTable(mask, 16) != rw.BlockTable(mask, 32)
    assert rw.Documents([1, 3]) != rw.Documents([2, 2])


@pytest.mark.parametrize("name", list(PATTERNS))
@pytest.mark.parametrize("tokens", [1, 77, 500])
def test_density_is_measured(name: str, tokens: int) -> None:
    pattern = PATTERNS[name](tokens)
    measured = pattern.to_dense(tokens, heads=4).double().mean().item()
    assert pattern.density(tokens, heads=4) == pytest.approx(measured, abs=1e-12)


@pytest.mark.parametrize("density", [0.05, 0.1, 0.25, 0.37, 0.9, 1.0])
@pytest.mark.parametrize("heads", [None, 3])
def test_requested_density_is_measured_density(density: float, heads: int | None) -> None:
    table = rw.patterns.random_blocks(4096, density, block_size=64, heads=heads)
    blocks = 64 * 64
    assert table.density(4096, heads=heads or 1) == pytest.approx(round(density * blocks) / blocks, abs=1e-12)
    per_row = table.mask.sum(-1)
    assert int(per_row.max() - per_row.min()) <= 1


@pytest.mark.parametrize("name", list(MIXTURES))
def test_mixtures_take_no_part_in_algebra(name: str) -> None:
    mixture = MIXTURES[name](100)
    for combine in (lambda p: p | rw.Causal(), lambda p: rw.Causal() & p, lambda p: ~p, lambda p: rw.PerHead([p])):
        with pytest.raises(PatternError, match="wanted a relation|wanted a list of relations"):
            combine(mixture)


def test_density_of_a_mixture_counts_branches() -> None:
    mixture = rw.LongNet([32, 128], [1, 4])
    assert mixture.density(256, heads=4) == pytest.approx(mixture.to_dense(256, heads=4).double().mean().item())


def test_table_from_indices() -> None:
    indices, counts = torch.tensor([[1, 0, 9], [2, 7, 7], [0, 1, 2]]), torch.tensor([2, 1, 3])
    table = rw.BlockTable(indices=indices, counts=counts, key_blocks=3, block_size=16)
    assert table.mask.int().tolist() == [[1, 1, 0], [0, 0, 1], [1, 1, 1]]


def test_longnet_definition() -> None:
    """LongNet allows the pairs of the paper's formula, computed pair by pair."""
    segments, rates, n, heads = (8, 16), (2, 4), 21, 4
    dense = rw.LongNet(segments, rates, causal=True).to_dense(n, heads=heads)
    for h in range(heads):
        for i in range(n):
            for j in range(n):
                count = sum(
                    i // w == j // w and i % r == h % r and j % r == h % r and j <= i
                    for w, r in zip(segments, rates, strict=True)
                )
                assert dense[0, h, i, j] == count


def test_partitioned_heads_leave_no_head_out() -> None:
    for heads in (3, 4, 5, 8):
        dense = rw.LongNet([8, 16, 32], [1, 2, 4], heads="partitioned").to_dense(64, heads=heads)
        assert (dense.flatten(2).sum(-1) > 0).all()
    views = rw.LongNet([8, 16, 32], [1, 1, 1], heads="partitioned").views(8)
    assert [len(range(*view.heads)) for view, _ in views] == [3, 3, 2]


@pytest.mark.parametrize(
    ("pattern", "times"),
    [
        (rw.Selected(torch.zeros(3, 1, 20, 2, dtype=torch.int64)) & rw.Causal(), 3),
        (rw.PerHead([rw.Causal(), rw.Full()]), 2),
        (rw.from_mask_mod(lambda b, h, q, k: (q - k) % 3 == 1) & rw.Causal(), 1),
        (rw.from_mask_mod(lambda b, h, q, k: (q - k) % 3 == h), 6),
    ],
    ids=["batch elements", "heads", "neither", "a function"],
)
def test_a_relation_is_evaluated_once_for_those_that_share_it(
    pattern: rw.Pattern, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[rw.Pattern] = []

    def noted(each: rw.Pattern, ends: tuple[int, int]) -> Located:
        seen.append(each)
        return located(each, ends)

    monkeypatch.setattr("ringweave.patterns.located.located", noted)
    pattern.to_dense(20, heads=2, batch=3)
    assert len(seen) == times
