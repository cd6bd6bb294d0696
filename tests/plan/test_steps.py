"""Steps of decoding: how far patterns look back, and plans that are those of earlier steps, moved."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ringweave as rw
from ringweave.ops import prepared
from ringweave.ops.backend import Inputs
from ringweave.ops.registered import attend
from ringweave.plan import cache, plan_cache
from ringweave.plan.from_pattern import build

from ..cases import PATTERNS as CASES

CAUSAL = rw.Causal()
#: Patterns that ask for distances, and for some first keys.
PATTERNS: dict[str, rw.Pattern] = {
    "window": rw.SlidingWindow(90) & CAUSAL,
    "around": rw.SlidingWindow(70, 20),
    "sinks": (rw.Sinks(4) | rw.SlidingWindow(64)) & CAUSAL,
    "global": rw.Global([0, 3, 140]) | rw.SlidingWindow(40) & CAUSAL,
    "dilated": rw.Dilated(20, 4) & CAUSAL,
    "both": (rw.SlidingWindow(16) | rw.Dilated(9, 8) | rw.Sinks(1)) & CAUSAL,
    "holes": rw.SlidingWindow(100) & ~rw.SlidingWindow(30) & ~rw.Sinks(9) & CAUSAL,
    "heads": rw.PerHead([rw.SlidingWindow(50), (rw.Sinks([2, 130]) | rw.SlidingWindow(20)) & CAUSAL] * 2),
}


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Positions of what is planned anew."""
    made: list[int] = []

    def counted(*args: Any, **sizes: Any) -> rw.BlockPlan:
        made.append(sizes["q_offset"])
        return build(*args, **sizes)

    monkeypatch.setattr(cache, "build", counted)
    for store in (plan_cache, prepared._steps, prepared._passing, prepared._calls):
        store.clear()
    return made


@pytest.mark.parametrize("name", [*PATTERNS, *CASES])
def test_reach_is_what_the_pattern_allows(name: str) -> None:
    n = 300
    pattern = PATTERNS.get(name) or CASES[name](n)
    look = pattern.lookback()
    assert (look is not None) or name not in PATTERNS
    if look is None:
        return
    q, k = torch.arange(n)[:, None], torch.arange(n)[None]
    for allowed in pattern.to_dense(n, heads=4)[0]:
        assert allowed[(q >= k) & (q - k <= look.every)].all()
        assert (allowed[(q >= look.first) & (k >= look.first) & (q - k > look.back)] == look.far).all()
        for distance in range(1 - n, n):
            along = allowed.diagonal(-distance)
            later = along[max(look.first - min(distance, 0), look.first) :] if distance <= 0 else along[look.first :]
            assert later.unique().numel() <= 1
        for first in range(min(look.first, n)):
            assert allowed[max(look.first, first + look.back + 1) :, first].unique().numel() <= 1


@pytest.mark.parametrize("tile", [(16, 128), (32, 32), (16, 48)], ids=str)
@pytest.mark.parametrize("name", list(PATTERNS))
def test_a_plan_is_that_of_an_earlier_step(name: str, tile: tuple[int, int], built: list[int]) -> None:
    """Trimmed, and of several queries: field by field what is planned anew, after a tile's worth of steps for nothing."""
    pattern = PATTERNS[name]
    for nq, extra in ((1, 0), (5, 0), (3, 40)):
        # after a tile's steps, and back again
        for first in (*range(600, 600 + tile[1]), *range(600 + tile[1], 1100, 7), 700, 1500, 640):
            sizes: dict[str, Any] = {"heads": 4, "batch": 2, "q_offset": first, "tile": tile}
            before = len(built)
            got = plan_cache.get(pattern, nq, first + nq + extra, **sizes)
            assert len(built) - before <= (first < 600 + tile[1])
            if first % 37 == 0 or first > 1000:
                want = build(pattern, nq, first + nq + extra, **sizes)
                for field in ("row_ptr", "col", "bits", "col_ptr", "row", "bits_t", "masks", "group", "order"):
                    assert torch.equal(getattr(got, field), getattr(want, field)), field
                assert (got.nq, got.nk, got.q_offset, got.nnz) == (want.nq, want.nk, want.q_offset, want.nnz)


@pytest.mark.parametrize("name", [*PATTERNS, "causal"])
def test_500_steps_plan_nothing(name: str, built: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor those over a cache that was trimmed; each has the bits of a call with a plan of its own."""
    pytest.importorskip("ringweave._cpu", exc_type=ImportError)
    pattern, last = PATTERNS.get(name, CAUSAL), 1300
    q, k, v = torch.randn(1, 4, last, 16), torch.randn(1, 2, last, 16), torch.randn(1, 2, last, 16)

    def step(n: int, first: int) -> tuple[Inputs, int]:
        return Inputs(q[:, :, n - 1 : n], k[:, :, first:n], v[:, :, first:n], 0.25), n - 1 - first

    def taken(n: int, first: int = 0) -> rw.AttentionOutput:
        inputs, q_offset = step(n, first)
        return rw.attention_with_lse(*inputs[:3], pattern, q_offset=q_offset)

    # every place of a tile, in strided views too
    for n in range(260, 800):
        taken(n)
    built.clear()
    found = {(n, 0): taken(n) for n in range(800, last)}
    # what attends all keys needs a plan for each number of tiles
    assert len(built) == (4 if name == "causal" else 0)
    found |= {(n, 100): taken(n, 100) for n in range(950, last, 9)}
    assert len(built) == (4 if name == "causal" else 0)
    monkeypatch.setattr(cache.PlanCache, "_alike", lambda *_: None)
    plan_cache.clear()
    for (n, first), got in [*found.items()][::7]:
        inputs, q_offset = step(n, first)
        assert all(map(torch.equal, got, attend(inputs, pattern, q_offset, "auto")))
    assert len(built) > 70


@pytest.mark.parametrize("name", list(PATTERNS))
def test_steps_in_pages(name: str) -> None:
    """Pages have the bits of keys side by side, whose plans are those of earlier steps."""
    pytest.importorskip("ringweave._cpu", exc_type=ImportError)
    pattern = PATTERNS[name]
    q, k, v = torch.randn(1, 4, 1000, 16), torch.randn(1, 2, 1000, 16), torch.randn(1, 2, 1000, 16)
    pages = rw.PagedCache.empty(1, 1024, 2, 16, page=16)
    pages.append(k[:, :, :700], v[:, :, :700])
    for n in range(701, 1000, 13):
        pages.append(k[:, :, int(pages.lengths[0]) : n], v[:, :, int(pages.lengths[0]) : n])
        here = q[:, :, n - 1 : n]
        side_by_side = rw.attention(here, k[:, :, :n], v[:, :, :n], pattern, q_offset=n - 1)
        if name in ("dilated", "both"):  # side by side in strided views
            torch.testing.assert_close(rw.paged_attention(here, pages, pattern), side_by_side)
        else:
            assert torch.equal(rw.paged_attention(here, pages, pattern), side_by_side)
