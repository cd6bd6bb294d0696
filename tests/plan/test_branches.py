"""Compiling a pattern: residue views where they compute fewer tiles, disjoint and complete."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import ringweave as rw
from ringweave.plan import branches

from ..cases import MIXTURES, PATTERNS


@pytest.mark.parametrize("sizes", [(257, 257, 0), (1000, 1000, 0), (40, 300, 260)])
@pytest.mark.parametrize("name", list(PATTERNS | MIXTURES))
def test_branches_add_up_to_the_pattern(name: str, sizes: tuple[int, int, int]) -> None:
    nq, nk, q_offset = sizes
    pattern = (PATTERNS | MIXTURES)[name](nk)
    if q_offset and any(kind in pattern.spec for kind in ("BlockTable",)):
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


def test_structure() -> None:
    assert branches(rw.Full(), 64, 64)[0].structure == "full"
    assert branches(rw.Causal(), 64, 64)[0].structure == "causal"
    assert branches(rw.Causal(), 4, 64, q_offset=60)[0].structure == "sparse"
    assert branches(rw.SlidingWindow(5), 64, 64)[0].structure == "sparse"


def test_the_address_of_a_table_is_not_reused_while_its_branches_live() -> None:
    """Restrided patterns hold tables of their own: the cache must hold the original, whose address is in the key."""
    n = 16384
    pattern = rw.Dilated(64, 16) & rw.Documents([5000, n - 5000])
    assert len(branches(pattern, n, n)) == 16
    table = weakref.ref(pattern.tables[0])
    del pattern
    gc.collect()
    assert table() is not None


@pytest.mark.parametrize(("nq", "nk", "q_offset", "split"), [(1, 80, 38, True), (1, 65, 38, False), (65, 65, 0, False)])
def test_a_table_whose_last_block_some_view_does_not_reach(nq: int, nk: int, q_offset: int, split: bool) -> None:
    table = torch.ones(-(-(q_offset + nq) // 16), 5, dtype=torch.bool)
    pattern = rw.Dilated(1, 4) & rw.BlockTable(table, 16)
    found = branches(pattern, nq, nk, q_offset=q_offset)
    assert (found[0].rate == 4) == split
    total = torch.zeros(1, 1, nq, nk, dtype=torch.bool)
    for branch in found:
        total[:, :, branch.q_first :: branch.rate, branch.k_first :: branch.rate] |= branch.plan().to_dense()
    assert torch.equal(total, pattern.to_dense(nq, nk, q_offset=q_offset))
