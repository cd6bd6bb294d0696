"""Test plans of decoding steps: how far patterns look back, and plans derived from those of earlier steps."""

from __future__ import annotations

import random
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import ringweave as rw
from ringweave.cache import PATTERNS as KEPT
from ringweave.cache import PROGRAMS
from ringweave.patterns.shifted import with_offsets
from ringweave.plan import cached_plans, decode_plans, from_pattern, plan_cache
from ringweave.plan.from_pattern import build

from ..cases import PATTERNS as CASES
from ..operators import by_operators

CAUSAL = rw.Causal()
#: Patterns that depend on distances, and on some first keys.
PATTERNS: dict[str, rw.Pattern] = {
    "window": rw.SlidingWindow(90) & CAUSAL,
    "around": rw.SlidingWindow(70, 20),
    "sinks": (rw.Sinks(4) | rw.SlidingWindow(64)) & CAUSAL,
    "global": rw.Global([0, 3, 140]) | rw.SlidingWindow(40) & CAUSAL,
    "dilated": rw.Dilated(20, 4) & CAUSAL,
    "both": (rw.SlidingWindow(16) | rw.Dilated(9, 8) | rw.Sinks(1)) & CAUSAL,
    "holes": rw.SlidingWindow(100) & ~rw.SlidingWindow(30) & ~rw.Sinks(9) & CAUSAL,
    "ahead": rw.Sinks(140) | rw.SlidingWindow(9, 200),
    "heads": rw.PerHead([rw.SlidingWindow(50), (rw.Sinks([2, 130]) | rw.SlidingWindow(20)) & CAUSAL] * 2),
}

RAGGED = {**PATTERNS, "causal": CAUSAL, "full": rw.Full(), "mixed": rw.PerHead([CAUSAL, PATTERNS["sinks"]] * 2)}


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the query offset of every plan that is built, not derived."""
    made: list[int] = []

    def counted(*args: Any, **sizes: Any) -> rw.BlockPlan:
        made.append(sizes.get("q_offset", 0))
        return build(*args, **sizes)

    def counted_rows(*args: Any) -> Any:
        made.append(0)
        return from_pattern.rows_of_elements(*args)

    monkeypatch.setattr(from_pattern, "build", counted)
    monkeypatch.setattr(decode_plans, "rows_of_elements", counted_rows)
    plan_cache.clear()
    PROGRAMS.clear()
    return made


def planned_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_plans, "_of_rows", lambda *_: None)
    plan_cache.clear()


def same(got: rw.BlockPlan, want: rw.BlockPlan) -> None:
    """Two plans have equal lists for each batch element and head; sharing of lists and the order of masks may differ."""
    assert (got.nq, got.nk, got.q_offset, got.row_set.shape) == (want.nq, want.nk, want.q_offset, want.row_set.shape)
    assert got.nnz <= want.nnz

    def lists(plan: rw.BlockPlan, g: int) -> list[object]:
        masks = torch.cat(
            [plan.mask_words, torch.full_like(plan.mask_words[:1], -1) if len(plan.mask_words) else plan.mask_words]
        )
        found: list[object] = []
        for ptr, of, bits in ((plan.row_ptr, plan.col, plan.mask_id), (plan.col_ptr, plan.row, plan.mask_id_t)):
            begin, end = int(ptr[g, 0]), int(ptr[g, -1])
            full = bits[begin:end] < 0
            held = masks[bits[begin:end].long()] if len(masks) else torch.zeros(0)
            found += [ptr[g] - begin, of[begin:end], full, held[~full] if len(held) else held]
        return found

    for ours, theirs in {*zip(got.row_set.flatten().tolist(), want.row_set.flatten().tolist(), strict=True)}:
        for i, (a, b) in enumerate(zip(lists(got, ours), lists(want, theirs), strict=True)):
            assert torch.equal(a, b) or (a.numel() == b.numel() == 0), i  # type: ignore[attr-defined, arg-type]
    assert torch.equal(got.launch_order.sort().values, torch.arange(got.launch_order.numel(), dtype=torch.int32))
    lengths = got.row_ptr.diff(dim=1).flatten()[got.launch_order.long()].clamp(min=1).log2().mul(2).floor()
    assert (lengths.diff() <= 0).all()


@pytest.mark.parametrize("name", [*PATTERNS, *CASES])
def test_reach_is_what_the_pattern_allows(name: str) -> None:
    n = 300
    pattern = PATTERNS[name] if name in PATTERNS else CASES[name](n)
    look = pattern.distance_profile()
    assert (look is not None) or name not in PATTERNS
    if look is None:
        return
    q, k = torch.arange(n)[:, None], torch.arange(n)[None]
    for allowed in pattern.to_dense(n, heads=4)[0]:
        assert allowed[(q >= k) & (q - k <= look.every)].all()
        assert (allowed[(q >= look.first) & (k >= look.first) & (q - k > look.back)] == look.far).all()
        assert not allowed[(q >= look.first) & (k >= look.first) & (k - q > look.ahead)].any()
        for distance in range(1 - n, n):
            along = allowed.diagonal(-distance)
            later = along[max(look.first - min(distance, 0), look.first) :] if distance <= 0 else along[look.first :]
            assert later.unique().numel() <= 1
        for first in range(min(look.first, n)):
            assert allowed[max(look.first, first + look.back + 1) :, first].unique().numel() <= 1


@pytest.mark.parametrize("tile", [(16, 128), (32, 32), (16, 48)], ids=str)
@pytest.mark.parametrize("name", list(PATTERNS))
def test_a_plan_is_that_of_an_earlier_step(name: str, tile: tuple[int, int], built: list[int]) -> None:
    """A plan trimmed from an earlier step's equals a new plan, also for several queries, and costs nothing after the first tile of steps."""
    pattern = PATTERNS[name]
    for nq, extra in ((1, 0), (5, 0), (3, 40)):
        # forward through a tile's steps, and back again
        for first in (*range(600, 600 + tile[1]), *range(600 + tile[1], 1100, 7), 700, 1500, 640):
            sizes: dict[str, Any] = {"heads": 4, "batch": 2, "q_offset": first, "tile": tile}
            before = len(built)
            got = plan_cache.get(pattern, nq, first + nq + extra, **sizes)
            # one plan for each relation among heads
            assert len(built) - before <= (1 + (name == "heads")) * (first < 600 + tile[1])
            if first % 37 == 0 or first > 1000:
                want = build(pattern, nq, first + nq + extra, **sizes)
                same(got, want)
                assert (got.nq, got.nk, got.q_offset, got.nnz) == (want.nq, want.nk, want.q_offset, want.nnz)


@pytest.mark.parametrize("name", [*PATTERNS, "causal"])
def test_500_steps_plan_nothing(name: str, built: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """500 steps over a growing or trimmed cache build no plan after the first ones, and have the bits of fresh plans."""
    pytest.importorskip("ringweave._cpu", exc_type=ImportError)
    pattern, last = PATTERNS.get(name, CAUSAL), 1300
    q, k, v = torch.randn(1, 4, last, 16), torch.randn(1, 2, last, 16), torch.randn(1, 2, last, 16)

    def step(n: int, first: int) -> tuple[tuple[Tensor, Tensor, Tensor], int]:
        return (q[:, :, n - 1 : n], k[:, :, first:n], v[:, :, first:n]), n - 1 - first

    def taken(n: int, first: int = 0) -> rw.AttentionOutput:
        inputs, q_offset = step(n, first)
        return rw.attention_with_lse(*inputs, pattern, q_offset=q_offset)

    # the offsets visit every place in a tile, also in strided views
    for n in range(260, 800):
        taken(n)
    built.clear()
    found = {(n, 0): taken(n) for n in range(800, last)}
    assert not built
    found |= {(n, 100): taken(n, 100) for n in range(950, last, 9)}
    assert not built
    planned_anew(monkeypatch)
    for (n, first), got in [*found.items()][::7]:
        inputs, q_offset = step(n, first)
        assert all(map(torch.equal, got, by_operators(*inputs, pattern, q_offset=q_offset)))
    assert len(built) > 70


def attended(relation: rw.Pattern, p: decode_plans.Placement, nq: int) -> Tensor:
    """Return which of 800 key indices each query attends, (elements, queries, keys)."""
    q, k, start, stop = (torch.from_numpy(x)[:, None, None] for x in (p.q, p.k, p.start, p.stop))
    index = torch.arange(800)
    return relation.allows(q + torch.arange(nq)[:, None], k + index) & (start <= index) & (index < stop)


@settings(max_examples=300)
@given(data=st.data(), nq=st.sampled_from([1, 1, 2, 5, 16]), side=st.sampled_from([16, 48, 128]))
@pytest.mark.parametrize("name", [name for name in PATTERNS if name != "heads"] + ["causal", "full"])
def test_canonical_placements_attend_the_same_keys(name: str, nq: int, side: int, data: st.DataObject) -> None:
    """Each of the four steps leaves the attended indices of keys as they are, except for the skipped tiles."""
    relation = RAGGED[name]
    profile = relation.distance_profile()
    assert profile is not None

    def placement() -> tuple[int, int, int, int]:
        start, stop = sorted(data.draw(st.tuples(st.just(0) | st.integers(0, 700), st.integers(0, 700))))
        k = data.draw(st.just(0) | st.integers(0, 900))
        return data.draw(st.just(max(k + stop - nq, 0)) | st.integers(0, 1700)), k, start, stop

    before = decode_plans.Placement(*np.array([placement() for _ in range(4)]).T)
    allowed = attended(relation, before, nq)
    listed, reach = decode_plans.attend_all(before, profile, nq)
    moved = decode_plans.drop_common(listed, reach)
    near = decode_plans.drop_unreachable(moved, reach, nq)
    for each in (listed, moved, near):
        assert torch.equal(attended(relation, each, nq), allowed)
    after, skip = decode_plans.canonical(before, profile, nq, side)
    found = attended(relation, after, nq)
    for i, (at, tiles, full) in enumerate(zip(*skip, strict=True)):
        inserted = torch.full((nq, tiles * side), bool(full))
        assert torch.equal(
            torch.cat([found[i, :, : at * side], inserted, found[i, :, at * side :]], 1)[:, :800], allowed[i]
        )


@pytest.mark.parametrize("name", list(PATTERNS))
def test_steps_in_pages(name: str) -> None:
    """Steps over pages have the bits of steps over contiguous keys, with plans derived from those of earlier steps."""
    pytest.importorskip("ringweave._cpu", exc_type=ImportError)
    pattern = PATTERNS[name]
    q, k, v = torch.randn(1, 4, 1000, 16), torch.randn(1, 2, 1000, 16), torch.randn(1, 2, 1000, 16)
    pages = rw.PagedCache.empty(1, 1024, 2, 16, page=16)
    pages.append(k[:, :, :700], v[:, :, :700])
    for n in range(701, 1000, 13):
        pages.append(k[:, :, int(pages.lengths[0]) : n], v[:, :, int(pages.lengths[0]) : n])
        here = q[:, :, n - 1 : n]
        side_by_side = rw.attention(here, k[:, :, :n], v[:, :, :n], pattern, q_offset=n - 1)
        if name in ("dilated", "both"):  # contiguous keys are computed in strided views
            torch.testing.assert_close(rw.paged_attention(here, pages, pattern), side_by_side)
        else:
            assert torch.equal(rw.paged_attention(here, pages, pattern), side_by_side)


@pytest.mark.parametrize("name", list(RAGGED))
def test_ragged_plans_are_those_planned_anew(name: str) -> None:
    """Derived plans equal new ones for all kinds of offsets, lengths, dropped keys and padding, and raise equal errors."""
    draw, gathered = random.Random(name), cached_plans.PlanCache()

    def some(low: int, high: int) -> Tensor:
        return torch.tensor([draw.choice([low, draw.randint(low, high)]) for _ in range(batch)])

    for _ in range(60):
        batch, nq, nk = draw.choice([1, 2, 5]), draw.choice([1, 1, 2, 5, 16]), draw.choice([256, 500, 1024])
        tile, pattern, q_offset = draw.choice([(16, 128), (16, 32), (32, 48)]), RAGGED[name], 0
        lengths = some(0, nk)
        last = (lengths - nq).clamp(min=0)
        kind = draw.choice(["pages", "offsets", "trimmed", "lengths", "padding", "both", "wrong"])
        if kind == "pages":
            pattern = with_offsets(pattern, last, 0, batch)[0] & rw.KeyPadding(lengths)
        elif kind == "offsets":
            pattern, q_offset = with_offsets(pattern, last + 90, 0, batch)
        elif kind == "trimmed":
            dropped = some(0, 900)
            pattern, q_offset = with_offsets(pattern, nk - nq + dropped - draw.choice([0, 0, 70]), dropped, batch)
            pattern &= rw.KeyPadding(lengths)
        elif kind == "lengths":
            pattern, q_offset = pattern & rw.KeyPadding(lengths), draw.choice([nk - nq, nk + 100])
        elif kind == "padding":
            pattern, q_offset = pattern & rw.KeyPadding(nk, some(0, nk)), nk - nq
        elif kind == "both":
            inside = pattern & rw.KeyPadding(nk + 50, some(0, nk // 2))
            pattern, q_offset = with_offsets(inside, last + 50, 50, batch)
        else:
            pattern = with_offsets(pattern, last, 0, batch)[0] & rw.KeyPadding(
                nk + draw.choice([0, 1]), some(0, nk + 1)
            )
        sizes: dict[str, Any] = {"heads": 4, "batch": batch, "q_offset": q_offset, "tile": tile}
        try:
            want = build(pattern, nq, nk, **sizes)
        except rw.RingweaveError as error:
            with pytest.raises(type(error), match=re.escape(str(error))):
                gathered.get(pattern, nq, nk, **sizes)
        else:
            same(gathered.get(pattern, nq, nk, **sizes), want)


@pytest.mark.parametrize(
    ("name", "queries"), [*((name, 1) for name in RAGGED), ("sinks", 5), ("mixed", 5), ("causal", 16)]
)
def test_ragged_steps_plan_nothing(name: str, queries: int, built: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """500 steps of a batch of different lengths, over pages or with offsets, build no plan, and have the bits of fresh plans."""
    pattern, first = RAGGED[name], torch.tensor([411, 300, 650])
    q, k, v = torch.randn(3, 4, 1312, 16), torch.randn(3, 2, 1312, 16), torch.randn(3, 2, 1312, 16)
    pages = rw.PagedCache.empty(3, 1312, 2, 16, page=16)
    pages.append(k, v)

    def planned(n: int) -> None:
        held = with_offsets(pattern, first + n - queries, 0, 3)[0] & rw.KeyPadding(first + n)
        plan_cache.get(held, queries, 1312, heads=4, batch=3, tile=(16, 128))

    def step(n: int) -> tuple[Tensor, Tensor]:
        lengths = first + n
        pages.lengths.copy_(lengths)
        here = torch.stack([each[:, at - queries : at] for each, at in zip(q, lengths.tolist(), strict=True)])
        side_by_side = rw.attention(here, k, v, pattern & rw.KeyPadding(lengths), q_offset=lengths - queries)
        return rw.paged_attention(here, pages, pattern), side_by_side

    for n in range(160):
        planned(n)
    warm = len(built)
    assert warm < 160
    for n in range(160, 660):
        planned(n)
    found = {n: step(n) for n in range(160, 660, 97)}
    assert len(built) == warm
    planned_anew(monkeypatch)
    for n, got in found.items():
        assert all(map(torch.equal, got, step(n)))
    assert len(built) > warm


def test_lengths_that_shrink_and_sequences_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """After writes to lengths, forks and frees of pages, also shared ones, no step uses another step's plan."""
    pattern = PATTERNS["sinks"]
    q, k, v = torch.randn(3, 4, 1, 16), torch.randn(3, 2, 600, 16), torch.randn(3, 2, 600, 16)
    pages = rw.PagedCache.empty(3, 1024, 2, 16, page=16)
    draw = random.Random(0)
    found = []
    for again in (False, True):
        pages.free()
        draw.seed(0)
        if again:
            planned_anew(monkeypatch)
        for n in range(40):
            row = draw.randrange(3)
            if n % 5 == 4:
                pages.fork(row, (row + 1) % 3, draw.randint(0, int(pages.lengths[row])))
            elif int(pages.lengths[row]) > 500 or n % 7 == 6:
                pages.free([row])
            else:
                tokens = draw.randint(1, 200)
                pages.append(k[row : row + 1, :, :tokens], v[row : row + 1, :, :tokens], [row])
            found.append(rw.paged_attention(q, pages, pattern))
    assert all(map(torch.equal, found[:40], found[40:]))


def test_offsets_written_in_place() -> None:
    q, k = torch.randn(2, 4, 1, 16), torch.randn(2, 4, 500, 16)
    offset, stop = torch.tensor([300, 400]), torch.tensor([301, 401])
    pattern = CAUSAL & rw.KeyPadding(stop)
    before = rw.attention(q, k, k, pattern, q_offset=offset)
    offset.copy_(torch.tensor([40, 30]))
    stop.copy_(torch.tensor([41, 31]))
    after = rw.attention(q, k, k, pattern, q_offset=offset)
    assert not torch.equal(before, after)
    for b, n in enumerate((41, 31)):
        assert torch.equal(after[b : b + 1], rw.attention(q[b : b + 1], k[b : b + 1, :, :n], k[b : b + 1, :, :n]))


def test_rows_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cached rows are bounded in number and bytes; further rows are planned without the cache."""
    monkeypatch.setattr(decode_plans, "_MOST_ROWS", 20)
    KEPT.clear()
    pattern, gathered = PATTERNS["sinks"], cached_plans.PlanCache(max_bytes=2**20)
    for n in range(300, 900, 11):
        lengths = torch.arange(n, n + 30)
        held = with_offsets(pattern, lengths - 1, 0, 30)[0] & rw.KeyPadding(lengths)
        same(gathered.get(held, 1, 1024, batch=30, tile=(16, 128)), build(held, 1, 1024, batch=30, tile=(16, 128)))
    rows = KEPT.get(("rows", pattern.spec, 1, 16, 128))
    assert rows is None or len(rows.planned.known) <= 30
    assert gathered.statistics().nbytes <= 2**20


@pytest.mark.parametrize("name", ["causal", "sinks"])
def test_the_next_steps_of_a_batch_are_planned_ahead(name: str, built: list[int]) -> None:
    """A growing batch is planned once at its first step and once for its next 16; elements that enter a new tile are few."""
    pattern, gathered, lengths = PATTERNS.get(name, CAUSAL), cached_plans.PlanCache(), torch.arange(300, 1000, 23)
    for _ in range(17):
        batch = len(lengths)
        held = with_offsets(pattern, lengths - 1, 0, batch)[0] & rw.KeyPadding(lengths)
        same(
            gathered.get(held, 1, 1100, batch=batch, tile=(16, 128)), build(held, 1, 1100, batch=batch, tile=(16, 128))
        )
        lengths = lengths + 1
    assert len(built) <= 4


def test_rows_after_interrupted_planning(monkeypatch: pytest.MonkeyPatch) -> None:
    gathered, pattern = cached_plans.PlanCache(), PATTERNS["sinks"]
    KEPT.clear()

    def interrupted(*_: object) -> int:
        raise MemoryError

    for n in range(400, 800, 37):
        held, sizes = pattern & rw.KeyPadding(n), {"q_offset": n - 1, "tile": (16, 128)}
        with monkeypatch.context() as patch:
            patch.setattr(decode_plans.RowCache, "_leading", interrupted)
            with pytest.raises(MemoryError):
                gathered.get(held, 1, 1024, **sizes)  # type: ignore[arg-type]
        same(gathered.get(held, 1, 1024, **sizes), build(held, 1, 1024, **sizes))  # type: ignore[arg-type]


def test_threads_plan_steps_together() -> None:
    gathered, pattern = cached_plans.PlanCache(), PATTERNS["sinks"]
    want = {n: build(pattern & rw.KeyPadding(n), 1, 1024, q_offset=n - 1, tile=(16, 128)) for n in range(400, 440)}

    def work(seed: int) -> None:
        for n in random.Random(seed).choices(list(want), k=60):
            same(gathered.get(pattern & rw.KeyPadding(n), 1, 1024, q_offset=n - 1, tile=(16, 128)), want[n])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
