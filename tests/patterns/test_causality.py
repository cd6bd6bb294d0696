"""Whether a pattern attends future keys is counted from tiles, and agrees with the dense relation to the pair."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ringweave as rw
from ringweave.patterns.fitting import fitting
from ringweave.patterns.shifted import places
from ringweave.plan.block_plan import set_bits, unpack_masks

from ..cases import MIXTURES, PATTERNS

HEADS = 4


def agrees(pattern: rw.Pattern, nq: int, nk: int, batch: int = 1, heads: int = HEADS, q_offset: int = 0) -> None:
    sizes = {"heads": heads, "batch": batch, "q_offset": q_offset}
    position = torch.arange(q_offset, q_offset + nq)[:, None]
    future = pattern.to_dense(nq, nk, **sizes).int() * (torch.arange(nk) > position)
    found = pattern.causality(nq, nk, **sizes)
    assert found.pairs == int(future.sum())
    assert found.is_causal == pattern.is_causal(nq, nk, **sizes) == (not future.any())
    if found.first is None:
        assert found.is_causal
        assert str(found) == "causal"
        return
    b, h, q, k = future.nonzero(as_tuple=True)
    assert found.first == min(zip((q + q_offset).tolist(), k.tolist(), b.tolist(), h.tolist(), strict=True))
    assert f"query {found.first.query}, key {found.first.key}" in str(found)


@pytest.mark.parametrize("name", list(PATTERNS | MIXTURES))
def test_every_pattern(name: str) -> None:
    make = (PATTERNS | MIXTURES)[name]
    for nq, nk, q_offset in ((1, 1, 0), (77, 77, 0), (300, 300, 0), (60, 300, 240), (100, 300, 17), (300, 90, 0)):
        pattern = make(nk)
        try:
            fitting(pattern, nq, nk, HEADS, 1, q_offset)
        except rw.PatternError:
            assert q_offset + nq != nk or (places(pattern) and nq != nk)
            continue
        agrees(pattern, nq, nk, q_offset=q_offset)
    agrees(make(130), 130, 130, batch=2)


@settings(max_examples=25)
@given(
    names=st.lists(st.sampled_from([name for name in PATTERNS if name not in ("documents", "causal_documents")]), min_size=1, max_size=3),
    sign=st.sampled_from([operator.and_, operator.or_]),
    nq=st.integers(1, 180),
    before=st.integers(0, 40),
    after=st.integers(0, 20),
)  # fmt: skip
def test_trees(names: list[str], sign: Callable[..., rw.Pattern], nq: int, before: int, after: int) -> None:
    nk = nq + before + after
    pattern = functools.reduce(lambda a, b: sign(a, ~b), [PATTERNS[name](nk) for name in names])
    try:
        fitting(pattern, nq, nk, HEADS, 1, before)
    except rw.PatternError:
        return
    agrees(pattern, nq, nk, q_offset=before)
    agrees(pattern & rw.Causal(), nq, nk, q_offset=before)
    assert (pattern & rw.Causal()).is_causal(nq, nk, heads=HEADS, q_offset=before)


def test_tables_per_batch_element_and_head() -> None:
    table = torch.eye(4, dtype=torch.bool).expand(2, 3, 4, 4).clone()
    table[1, 2, 0, 3] = True
    pattern = rw.BlockTable(table, 16) & rw.Causal() | rw.BlockTable(table, 16) & rw.Segments(64) & ~rw.Segments(16)
    agrees(pattern, 64, 64, batch=2, heads=3)
    found = pattern.causality(64, heads=3, batch=2)
    assert found.first == (0, 48, 1, 2)
    assert str(found) == "not causal: 256 pairs see the future, the first is query 0, key 48, batch element 1, head 2"


def test_the_first_example_of_old() -> None:
    leaking = rw.SlidingWindow(192) & rw.Causal() | rw.Sinks(32)
    assert str(leaking.causality(1024)) == "not causal: 496 pairs see the future, the first is query 0, key 1"
    assert ((rw.SlidingWindow(192) | rw.Sinks(32)) & rw.Causal()).is_causal(1024)
    assert rw.SlidingWindow(192).is_causal(1024)
    one = rw.from_mask_mod(lambda b, h, q, k: (q == 3) & (k == 5))
    assert str(one.causality(9)) == "not causal: 1 pair sees the future: query 3, key 5"


def test_a_million_tokens_cost_their_diagonal() -> None:
    n = 2**20
    assert rw.Causal().is_causal(n)
    assert (rw.Causal() & ~rw.Segments(256)).is_causal(n)
    assert rw.Full().causality(n).pairs == n * (n - 1) // 2
    assert rw.LongNet([2048, 2**16], [1, 32], causal=True).is_causal(n, heads=2)


@pytest.mark.parametrize("name", list(PATTERNS))
def test_density_is_one_number(name: str) -> None:
    """A pattern and its plan have one density: allowed pairs over all pairs, also with incomplete tiles."""
    for nq, nk, q_offset in ((300, 300, 0), (50, 307, 257), (300, 90, 0)):
        pattern = PATTERNS[name](nk)
        if (nq > nk and (pattern.tables or "Neighborhood" in pattern.spec)) or (nq != nk and places(pattern)):
            continue
        sizes = {"heads": HEADS, "batch": 2, "q_offset": q_offset}
        plan = pattern.plan(nq, nk, tile=(16, 48), **sizes)
        assert (
            plan.density
            == pattern.density(nq, nk, **sizes)
            == int(pattern.to_dense(nq, nk, **sizes).sum()) / (8 * nq * nk)
        )
        tiled = torch.zeros(plan.row_ptr.shape[0], plan.q_tiles, plan.kv_tiles, dtype=torch.bool)
        row, col, _ = plan.listed()
        tiled[row // plan.q_tiles, row % plan.q_tiles, col] = True
        inside = tiled.repeat_interleave(16, 1).repeat_interleave(48, 2)[:, :nq, :nk][plan.row_set.long()]
        assert plan.computed_density == int(inside.sum()) / (8 * nq * nk)


def test_bits_are_counted() -> None:
    masks = torch.randint(-(2**31), 2**31, (7, 16, 3), dtype=torch.int64).int()
    masks[0], masks[1], masks[2] = -1, 0, -(2**31)
    assert torch.equal(set_bits(masks), unpack_masks(masks, 96).sum((1, 2)))


def test_density_is_counted_once_and_never_to_print(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = rw.plan(rw.patterns.random_blocks(256, 0.5, block_size=16), 256, tile=16)
    counted = []
    pairs = rw.BlockPlan.pairs
    monkeypatch.setattr(rw.BlockPlan, "pairs", lambda self: counted.append(1) or pairs(self))
    assert plan.density == plan.density == 0.5
    assert len(counted) == 1
    # simulates a GPU: its values cannot be read
    elsewhere = rw.PlanCache().get(rw.Causal(), 256, tile=(16, 16), device="meta")
    assert repr(elsewhere) == "BlockPlan(256 x 256 tokens, tiles 16 x 16, 136 non-empty, 1 group(s), 1 masks, meta)"
