"""Test decoding steps: their rows are painted from zones, in a plan or in the kernel's call, for any lengths."""

from __future__ import annotations

import gc
import random
import re
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

import ringweave as rw
from ringweave.backends import decoding
from ringweave.backends.decoding import Steps, prepare_step
from ringweave.cache import PROGRAMS
from ringweave.patterns.shifted import with_offsets
from ringweave.plan import PlanCache, plan_cache
from ringweave.plan.from_pattern import build
from ringweave.relation import tiles

from ..cases import PATTERNS as CASES
from ..fuzz.strategies import outcomes
from ..operators import by_operators
from ..sampled import is_long

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

STEPS = {
    **PATTERNS,
    "causal": CAUSAL,
    "periodic": rw.patterns.sparse_transformer_fixed(32, 4),
    "segments": rw.Segments(100) & CAUSAL,
    "strided": (rw.SlidingWindow(5) | rw.Strided(6)) & CAUSAL,
}
RAGGED = {**PATTERNS, "causal": CAUSAL, "full": rw.Full(), "mixed": rw.PerHead([CAUSAL, PATTERNS["sinks"]] * 2)}


def by_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan rows by classes of tiles, as longer calls are planned."""
    monkeypatch.setattr(tiles, "painted", lambda *_: None)
    plan_cache.clear()
    PROGRAMS.clear()


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


@pytest.mark.parametrize("name", [*CASES, *PATTERNS])
def test_painted_plans_are_those_by_classes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pattern has the same plan of a few queries either way, at all places in a tile."""
    n = 300
    pattern = PATTERNS[name] if name in PATTERNS else CASES[name](n)
    places = [(nq, n - nq) for nq in (1, 2, 5, 16, 17)]
    calls = [(nq, at, tile) for nq, at in places for tile in ((16, 128), (32, 32), (16, 48))]
    plans = [build(pattern, nq, n, heads=4, q_offset=at, tile=tile) for nq, at, tile in calls]
    by_classes(monkeypatch)
    for (nq, at, tile), plan in zip(calls, plans, strict=True):
        same(plan, build(pattern, nq, n, heads=4, q_offset=at, tile=tile))


@pytest.mark.parametrize("name", [*PATTERNS, "causal", "periodic", "segments", "strided"])
def test_500_steps_prepare_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps over a growing or trimmed cache, from the first key on, prepare once and have the bits of the operators."""
    pytest.importorskip("ringweave._cpu", exc_type=ImportError)
    pattern, last = STEPS[name], 1300
    q, k, v = torch.randn(1, 4, last, 16), torch.randn(1, 2, last, 16), torch.randn(1, 2, last, 16)
    made: list[Steps] = []

    def counted(*args: Any) -> Any:
        found = prepare_step(*args)
        made.extend([] if found is None else [found])
        return found

    monkeypatch.setattr(decoding, "prepare_step", counted)
    PROGRAMS.clear()
    first = 150 if name in ("global", "ahead", "heads") else 1  # they list tokens up to 140
    for n in [*range(first, 300), *range(301, last, 21), 640, 150]:
        inputs = q[:, :, n - 1 : n], k[:, :, :n], v[:, :, :n]
        got = rw.attention_with_lse(*inputs, pattern, q_offset=n - 1)
        if n < 160 or n % 7 == 0:
            assert all(map(torch.equal, got, by_operators(*inputs, pattern, q_offset=n - 1))), n
    assert len(made) == 1


@pytest.mark.parametrize("name", list(PATTERNS))
def test_steps_in_pages(name: str) -> None:
    """Steps over pages have the bits of steps over contiguous keys, also where the sequences differ in length."""
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


@st.composite
def ragged(draw: st.DrawFn, pattern: rw.Pattern) -> tuple[rw.Pattern, int, int, dict[str, Any]]:
    """Draw a call of some queries in a batch: the pattern with its bounds, the lengths, and the plan's other arguments."""

    def one(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    def some(low: int, high: int) -> Tensor:
        return torch.tensor(draw(st.lists(st.just(low) | st.integers(low, high), min_size=batch, max_size=batch)))

    batch, nq, nk, q_offset = one(1, 2, 5), one(1, 1, 2, 5, 16), one(256, 500, 1024), 0
    lengths = some(0, nk)
    last = (lengths - nq).clamp(min=0)
    match one("pages", "offsets", "trimmed", "lengths", "padding", "both", "wrong"):
        case "pages":
            pattern = with_offsets(pattern, last, 0, batch)[0] & rw.KeyPadding(lengths)
        case "offsets":
            pattern, q_offset = with_offsets(pattern, last + 90, 0, batch)
        case "trimmed":
            dropped = some(0, 900)
            pattern, q_offset = with_offsets(pattern, nk - nq + dropped - one(0, 0, 70), dropped, batch)
            pattern &= rw.KeyPadding(lengths)
        case "lengths":
            pattern, q_offset = pattern & rw.KeyPadding(lengths), one(nk - nq, nk + 100)
        case "padding":
            pattern, q_offset = pattern & rw.KeyPadding(nk, some(0, nk)), nk - nq
        case "both":
            inside = pattern & rw.KeyPadding(nk + 50, some(0, nk // 2))
            pattern, q_offset = with_offsets(inside, last + 50, 50, batch)
        case "wrong":
            bounds = rw.KeyPadding(nk + one(0, 1), some(0, nk + 1))
            pattern = with_offsets(pattern, last, 0, batch)[0] & bounds
    sizes = {"heads": 4, "batch": batch, "q_offset": q_offset, "tile": one((16, 128), (16, 32), (32, 48))}
    return pattern, nq, nk, sizes


@pytest.mark.parametrize("name", list(RAGGED))
def test_ragged_plans_are_those_by_classes(name: str) -> None:
    """Plans are equal for all kinds of offsets, lengths, dropped keys and padding, and raise equal errors."""

    def check(call: tuple[rw.Pattern, int, int, dict[str, Any]]) -> None:
        *given, sizes = call
        with pytest.MonkeyPatch.context() as patch:
            by_classes(patch)
            try:
                want = build(*given, **sizes)
            except rw.RingweaveError as error:
                patch.undo()
                with pytest.raises(type(error), match=re.escape(str(error))):
                    build(*given, **sizes)
                return
        same(build(*given, **sizes), want)

    outcomes(check, ragged(RAGGED[name]), 600 if is_long() else 60)


@pytest.mark.parametrize(
    ("name", "queries"), [*((name, 1) for name in RAGGED), ("sinks", 5), ("mixed", 5), ("causal", 16)]
)
def test_ragged_steps(name: str, queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of a batch of different lengths, over pages or with offsets, have the bits of plans by classes."""
    pattern, first = RAGGED[name], torch.tensor([411, 300, 650])
    q, k, v = torch.randn(3, 4, 1312, 16), torch.randn(3, 2, 1312, 16), torch.randn(3, 2, 1312, 16)
    pages = rw.PagedCache.empty(3, 1312, 2, 16, page=16)
    pages.append(k, v)

    def step(n: int) -> tuple[Tensor, Tensor]:
        lengths = first + n
        pages.lengths.copy_(lengths)
        here = torch.stack([each[:, at - queries : at] for each, at in zip(q, lengths.tolist(), strict=True)])
        side_by_side = rw.attention(here, k, v, pattern & rw.KeyPadding(lengths), q_offset=lengths - queries)
        return rw.paged_attention(here, pages, pattern), side_by_side

    found = {n: step(n) for n in range(160, 660, 97)}
    by_classes(monkeypatch)
    for n, got in found.items():
        assert all(map(torch.equal, got, step(n)))


def test_lengths_that_shrink_and_sequences_replaced() -> None:
    """After writes to lengths, forks and frees of pages, also shared ones, no step uses another step's plan."""
    q, k, v = torch.randn(3, 4, 1, 16), torch.randn(3, 2, 600, 16), torch.randn(3, 2, 600, 16)
    pages = rw.PagedCache.empty(3, 1024, 2, 16, page=16)
    kinds = st.sampled_from(["append", "append", "append", "fork", "free"])

    def steps(writes: list[tuple[list[int], str, float]]) -> Iterator[Tensor]:
        pages.free()
        for (row, other, _), kind, share in writes:
            if kind == "fork":
                pages.fork(row, other, int(share * int(pages.lengths[row])))
            elif kind == "free" or int(pages.lengths[row]) > 500:
                pages.free([row])
            else:
                tokens = 1 + int(199 * share)
                pages.append(k[row : row + 1, :, :tokens], v[row : row + 1, :, :tokens], [row])
            yield rw.paged_attention(q, pages, PATTERNS["sinks"])

    def check(writes: list[tuple[list[int], str, float]]) -> None:
        plan_cache.clear()
        painted = list(steps(writes))
        with pytest.MonkeyPatch.context() as patch:
            by_classes(patch)
            assert all(map(torch.equal, painted, steps(writes)))

    writes = st.tuples(st.permutations(range(3)), kinds, st.floats(0, 1))
    outcomes(check, st.lists(writes, min_size=40, max_size=40), 20 if is_long() else 2)


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


def test_a_short_step_after_a_long_one_and_back() -> None:
    """Zones that end with the positions, such as those of segments, are made anew for longer sequences."""
    pattern, last = rw.Segments(96) & CAUSAL, 9000
    q, k = torch.randn(1, 2, 1, 16), torch.randn(1, 2, last, 16)
    for n in (700, 4095, 4096, 4097, 8193, 9000, 5, 8500):
        got = rw.attention(q, k[:, :, :n], k[:, :, :n], pattern, q_offset="end")
        begin = (n - 1) // 96 * 96
        torch.testing.assert_close(got, rw.attention(q, k[:, :, begin:n], k[:, :, begin:n]))


def test_threads_plan_steps_together() -> None:
    pattern = PATTERNS["sinks"]
    want = {n: build(pattern & rw.KeyPadding(n), 1, 1024, q_offset=n - 1, tile=(16, 128)) for n in range(400, 440)}
    planned = PlanCache()

    def work(seed: int) -> None:
        for n in random.Random(seed).choices(list(want), k=60):
            same(planned.get(pattern & rw.KeyPadding(n), 1, 1024, q_offset=n - 1, tile=(16, 128)), want[n])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


def test_threads_share_a_kind_of_steps() -> None:
    """Threads with sequences of unequal lengths use zones that reach their own positions."""
    pattern, keys = rw.Segments(10) & CAUSAL, torch.randn(1, 2, 20000, 16)
    q = torch.randn(1, 4, 1, 16)
    PROGRAMS.clear()

    def work(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(60):
            n = draw.choice([draw.randint(1, 500), draw.randint(4000, 9000), draw.randint(9000, 20000)])
            begin = (n - 1) // 10 * 10
            got = rw.attention(q, keys[:, :, :n], keys[:, :, :n], pattern, q_offset=n - 1)
            torch.testing.assert_close(got, rw.attention(q, keys[:, :, begin:n], keys[:, :, begin:n]))

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))


@pytest.mark.parametrize("pattern", [CAUSAL, (rw.SlidingWindow(9) | rw.Strided(4)) & CAUSAL], ids=repr)
def test_a_kind_of_steps_keeps_no_tensors(pattern: rw.Pattern) -> None:
    q, k, v = torch.randn(1, 4, 1, 16), torch.randn(1, 2, 500, 16), torch.randn(1, 2, 500, 16)
    pages = rw.PagedCache.empty(1, 256, 2, 16)
    pages.append(k[:, :, :40], v[:, :, :40])
    for _ in range(3):
        rw.attention(q, k, v, pattern, q_offset="end")
        rw.paged_attention(q, pages, pattern)
    held = [weakref.ref(x) for x in (q, k, v, pages.k, pages.table)]
    del q, k, v, pages
    gc.collect()
    assert not any(x() is not None for x in held)
