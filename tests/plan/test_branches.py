"""A pattern is compiled to disjoint, complete residue views where they compute fewer tiles."""

from __future__ import annotations

import gc
import importlib
import weakref

import pytest
import torch

import ringweave as rw
from ringweave.cache import LRUCache
from ringweave.plan import Sizes, branches, summands
from ringweave.plan.branches import _offsets

from ..cases import MIXTURES, PATTERNS

module = importlib.import_module("ringweave.plan.branches")


@pytest.mark.parametrize("sizes", [(257, 257, 0), (1000, 1000, 0), (40, 300, 260)])
@pytest.mark.parametrize("name", list(PATTERNS | MIXTURES))
def test_branches_add_up_to_the_pattern(name: str, sizes: tuple[int, int, int]) -> None:
    nq, nk, q_offset = sizes
    pattern = (PATTERNS | MIXTURES)[name](nk)
    if q_offset and any(kind in pattern.spec for kind in ("BlockTable", "Selected")):
        nq, q_offset = nk, 0
    total = torch.zeros(1, 4, nq, nk, dtype=torch.int32)
    for branch in branches(pattern, nq, nk, heads=4, q_offset=q_offset):
        part = branch.plan().to_dense().int()
        total[:, slice(*branch.heads), branch.q_first :: branch.rate, branch.k_first :: branch.rate] += part
    assert torch.equal(total, pattern.to_dense(nq, nk, 4, q_offset=q_offset).int())


def test_dilated_runs_in_strided_views() -> None:
    n = 16384
    pattern = rw.SlidingWindow(512) | rw.Dilated(64, 16)
    split = branches(pattern, n, n)
    assert [branch.rate for branch in split] == [1] + [16] * 16
    computed = sum(branch.plan().tiles for branch in split)
    assert computed < 0.5 * pattern.plan(n).tiles


def test_a_split_that_does_not_pay_is_not_made() -> None:
    assert len(branches(rw.SlidingWindow(512) | rw.Dilated(2, 4), 4096, 4096)) == 1
    assert len(branches(rw.Dilated(3, 500), 600, 600)) == 1


def test_the_pattern_alone_decides_whether_a_union_is_split() -> None:
    """The pattern alone decides whether a union is split, not sizes, bounds or offsets: otherwise a row's bits would depend on its call."""
    union = rw.SlidingWindow(70) | rw.Dilated(64, 16)
    new = rw.Dilated(64, 16) & ~rw.SlidingWindow(70)
    assert summands(union) == (rw.SlidingWindow(70), new)
    keys = rw.KeyPadding([70, 9])
    assert summands(union & rw.Causal() & keys) == (
        rw.SlidingWindow(70) & rw.Causal() & keys,
        new & rw.Causal() & keys,
    )
    for sizes in [(1, 3000, 2999), (7, 40, 0), (3000, 3000, 0)]:
        nq, nk, q_offset = sizes
        found = branches(union, nq, nk, q_offset=q_offset)
        assert found[0].pattern == rw.SlidingWindow(70)
        assert {branch.spacing is None for branch in found[1:]} == {False}
    assert summands(rw.SlidingWindow(512) | rw.Dilated(2, 4)) == (rw.SlidingWindow(512) | rw.Dilated(2, 4),)


def test_views_begin_at_tiles_of_the_whole_or_are_not_made() -> None:
    (whole,) = branches(rw.Dilated(64, 4) & rw.BlockTable(torch.ones(64, 64, dtype=torch.bool), 96), 6144, 6144)
    assert whole.rate == 1
    views = branches(rw.Dilated(64, 3), 6144, 6144)
    assert [view.spacing for view in views] == [(0, 3, 128), (1, 3, 128), (2, 3, 128)]


def test_dense_kind() -> None:
    assert branches(rw.Full(), 64, 64)[0].dense_kind == "full"
    assert branches(rw.Causal(), 64, 64)[0].dense_kind == "causal"
    assert branches(rw.Causal(), 4, 64, q_offset=60)[0].dense_kind == "sparse"
    assert branches(rw.SlidingWindow(5), 64, 64)[0].dense_kind == "sparse"


def test_tables_are_held_by_no_branches() -> None:
    """Branches hold no tables: every call looks for branches first, in dynamic attention with a new table."""
    gone = []
    for _ in range(3):
        pattern = rw.BlockTable(torch.zeros(64, 64, dtype=torch.bool), 128)
        branches(pattern, 8192, 8192)
        branches(pattern | rw.Causal(), 8192, 8192)
        gone.append(weakref.ref(pattern.tables[0]))
    del pattern
    gc.collect()
    assert [table() for table in gone] == [None] * 3


def test_programs_are_bounded_by_the_bytes_of_their_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    n = 16384
    monkeypatch.setattr(module, "PROGRAMS", LRUCache(300 * 2**10, 1024))
    for _ in range(20):
        # 64 KiB each, with strided views to look for
        table = rw.BlockTable(torch.ones(256, 256, dtype=torch.bool), 64)
        branches(rw.Dilated(64, 16) & table, n, n)
    assert 0 < module.PROGRAMS.nbytes <= 300 * 2**10
    assert len(module.PROGRAMS) <= 4


def test_the_address_of_a_table_is_not_reused_while_its_branches_live() -> None:
    """The cache holds the original table, since its address is in the key: views of a table hold copies only."""
    n = 16384
    pattern = rw.Dilated(64, 16) & rw.BlockTable(torch.ones(128, 128, dtype=torch.bool).tril(), 128)
    assert len(branches(pattern, n, n)) == 16
    table = weakref.ref(pattern.tables[0])
    del pattern
    gc.collect()
    assert table() is not None


@pytest.mark.parametrize(
    ("nq", "nk", "q_offset"), [(1, 4096, 4095), (3, 4096, 4093), (70, 500, 430), (5, 40, 0), (9, 4096, 57)]
)
@pytest.mark.parametrize("rate", [7, 64, 2**30])
def test_offsets_without_queries_are_no_views(rate: int, nq: int, nk: int, q_offset: int) -> None:
    """A decode step of a strided pattern is one view of its keys; a huge rate is no loop over its offsets."""
    size = Sizes(nq, nk, 1, 1, q_offset)
    wanted = sorted({(q_offset + i) % rate for i in range(nq)} & set(range(nk)))
    assert list(_offsets(rate, size)) == wanted
    split = branches(rw.Strided(rate), nq, nk, q_offset=q_offset)
    assert sum(branch.pairs() for branch in split) == int(rw.Strided(rate).to_dense(nq, nk, q_offset=q_offset).sum())


@pytest.mark.parametrize(("nq", "nk", "q_offset", "split"), [(1, 80, 38, True), (1, 65, 38, False), (65, 65, 0, False)])
def test_a_table_with_a_last_block_outside_of_some_views(nq: int, nk: int, q_offset: int, split: bool) -> None:
    table = torch.ones(-(-(q_offset + nq) // 16), 5, dtype=torch.bool)
    pattern = rw.Dilated(1, 4) & rw.BlockTable(table, 16)
    found = branches(pattern, nq, nk, q_offset=q_offset)
    assert (found[0].rate == 4) == split
    total = torch.zeros(1, 1, nq, nk, dtype=torch.bool)
    for branch in found:
        total[:, :, branch.q_first :: branch.rate, branch.k_first :: branch.rate] |= branch.plan().to_dense()
    assert torch.equal(total, pattern.to_dense(nq, nk, q_offset=q_offset))


def test_no_view_has_a_query_and_a_key() -> None:
    q = torch.randn(1, 1, 1, 4)
    for pattern in (rw.Strided(40), rw.Strided(40) & rw.Causal(), rw.Dilated(3, 7)):
        assert [branch.rate for branch in branches(pattern, 1, 1, q_offset=1)] == [1]
        assert not rw.attention(q, q, q, pattern, q_offset=1).any()
