from __future__ import annotations

import importlib
import subprocess
import sys
import textwrap
import threading
from typing import Any

import pytest
import torch

import ringweave as rw
from ringweave.errors import ShapeError
from ringweave.plan import plan_cache
from ringweave.plan.from_pattern import build

from ..cases import PATTERNS


def in_a_process(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=240, check=True
    )
    return done.stdout


def test_equal_patterns_share_a_plan() -> None:
    cache = rw.PlanCache()
    plans = [cache.get(rw.SlidingWindow(30) | rw.Sinks(2), 500, 500, tile=(64, 64)) for _ in range(10)]
    assert all(plan is plans[0] for plan in plans)
    assert cache.statistics()[:4] == (9, 1, 0, 1)
    assert cache.get(rw.SlidingWindow(31) | rw.Sinks(2), 500, 500, tile=(64, 64)) is not plans[0]


@pytest.mark.parametrize(
    "changed",
    [{"nq": 90}, {"nk": 300}, {"heads": 3}, {"batch": 2}, {"q_offset": 7}, {"tile": (32, 64)}, {"device": "meta"}],
    ids=lambda changed: next(iter(changed)),
)
def test_plans_of_other_sizes_are_other_plans(changed: dict[str, Any]) -> None:
    cache = rw.PlanCache()
    usual: dict[str, Any] = {"nq": 100, "nk": 200, "tile": (64, 64)}
    for _ in range(2):
        cache.get(rw.Causal(), **usual)
        cache.get(rw.Causal(), **(usual | changed))
    assert cache.statistics()[:4] == (2, 2, 0, 2)


def test_a_changed_table_is_another_pattern() -> None:
    mask = torch.eye(4, dtype=torch.bool)
    before = rw.BlockTable(mask, 16)
    old = before.plan(64, tile=16)
    mask[0, 3] = True
    # the pattern is a value: writing to the tensor that it was made from does not change it
    assert before.plan(64, tile=16).nnz == old.nnz == 4
    assert rw.BlockTable(mask, 16).plan(64, tile=16).nnz == 5


def test_a_table_written_in_place_is_not_served_a_stale_plan() -> None:
    table = rw.BlockTable(torch.eye(4, dtype=torch.bool), 16)
    assert table.plan(64, tile=32).nnz == 2
    # not allowed, but not stale either: the table's version is part of the key
    table.tables[0][0, 3] = True
    assert table.plan(64, tile=32).nnz == 3


def test_an_address_is_not_reused_while_its_plan_lives() -> None:
    cache = rw.PlanCache()
    for seed in range(50):
        mask = torch.rand(8, 8, generator=torch.Generator().manual_seed(seed)) < 0.5
        plan = cache.get(rw.BlockTable(mask, 16), 128, 128, tile=(16, 16))
        assert plan.nnz == int(mask.sum())


def test_bounded_by_bytes_least_recently_used_first() -> None:
    one = rw.PlanCache()
    one.get(rw.Causal(), 4096, 4096, tile=(128, 128))
    cache = rw.PlanCache(max_bytes=int(8 / 7 * 2.5 * one.statistics().nbytes))
    patterns = [rw.Causal() & rw.SlidingWindow(9999 + i) for i in range(3)]
    first, second, third = patterns
    for pattern in (first, second, first, third):
        cache.get(pattern, 4096, 4096, tile=(128, 128))
    assert cache.statistics().evictions == 1
    assert cache.statistics().nbytes <= cache.max_bytes
    hits = cache.statistics().hits
    cache.get(first, 4096, 4096, tile=(128, 128))
    assert cache.statistics().hits == hits + 1
    cache.get(second, 4096, 4096, tile=(128, 128))
    assert cache.statistics().hits == hits + 1
    cache.clear()
    assert cache.statistics() == (0, 0, 0, 0, 0)


def test_a_plan_larger_than_the_bound_is_not_kept() -> None:
    cache = rw.PlanCache(max_bytes=100)
    assert cache.get(rw.Causal(), 512, 512, tile=(128, 128)).nnz == 10
    assert cache.statistics().plans == 0


def test_many_threads_build_each_plan_once() -> None:
    cache = rw.PlanCache()
    found: list[rw.BlockPlan] = []
    start = threading.Barrier(32)

    def work(i: int) -> None:
        start.wait()
        for j in range(20):
            found.append(cache.get(rw.SlidingWindow(1 + (i + j) % 4), 2000, 2000, tile=(32, 32)))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 640
    assert len({id(plan) for plan in found}) == 4
    assert cache.statistics()[:2] == (636, 4)


def test_a_failed_build_leaves_nothing_behind() -> None:
    cache = rw.PlanCache()
    for _ in range(2):
        with pytest.raises(ShapeError):
            cache.get(rw.Causal(), 0, 5, tile=(16, 16))
    assert not cache._plans._making


@pytest.mark.parametrize("name", list(PATTERNS))
def test_hits_in_a_training_loop(name: str) -> None:
    q = torch.randn(1, 4, 300, 8, requires_grad=True)
    pattern = PATTERNS[name](300)
    rw.attention(q, q, q, pattern).sum().backward()
    before = plan_cache.statistics()
    for _ in range(50):
        rw.attention(q, q, q, pattern).sum().backward()
    after = plan_cache.statistics()
    hits, misses = after.hits - before.hits, after.misses - before.misses
    # small calls keep their programs, and request no plan
    assert misses <= 0.03 * (hits + misses)


def test_small_plans_are_bounded_in_number() -> None:
    """The cache bounds the number of small plans, which decoding adds one a step, not only their elements."""
    cache = rw.PlanCache()
    for step in range(600):
        cache.get(rw.Strided(3), 1, 500 + step, q_offset=499 + step, tile=(16, 128))
    assert cache.statistics().plans == 256
    assert cache.statistics().evictions == 600 - 256


def test_a_plan_is_one_piece_of_memory() -> None:
    plan = rw.Causal().plan(300)
    assert (
        len({x.untyped_storage().data_ptr() for x in (plan.row_ptr, plan.col, plan.mask_words, plan.launch_order)}) == 1
    )
    assert all(
        x.data_ptr() % 64 == 0 for x in (plan.row_ptr, plan.col, plan.mask_id, plan.mask_words, plan.launch_order)
    )


@pytest.mark.measures
def test_decoding_is_flat_in_memory() -> None:
    resident = in_a_process(
        """
        import gc, torch, ringweave as rw
        def resident():
            gc.collect()
            return int(open("/proc/self/statm").read().split()[1]) * 4096
        keys, q = torch.randn(2, 1, 2, 1500, 16), torch.randn(1, 2, 1, 16)
        pattern = rw.Causal() & rw.SlidingWindow(64) | rw.Sinks(4)
        for n in range(500, 1400):
            rw.attention(q, *keys[..., :n, :], pattern, q_offset=n - 1)
            if n == 800:
                before = resident()
        print(resident() - before)
        """
    )
    assert int(resident) < 2**20  # 600 steps; storing twice as many plans took 60 MiB


def test_tables_made_in_inference_mode() -> None:
    with torch.inference_mode():
        table = rw.patterns.random_blocks(200, 0.5, block_size=16)
        q = torch.randn(1, 2, 200, 8)
        out = rw.attention(q, q, q, table)
    torch.testing.assert_close(out.clone(), rw.attention(q.clone(), q.clone(), q.clone(), table, backend="reference"))


def test_the_current_gpu_is_one_place_with_and_without_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def on_cpu(*arguments: Any, device: torch.device, **rest: Any) -> rw.BlockPlan:
        made.append(str(device))
        return build(*arguments, **rest)

    module = importlib.import_module("ringweave.plan.cached_plans")
    monkeypatch.setattr(importlib.import_module("ringweave.plan.from_pattern"), "build", on_cpu)
    monkeypatch.setattr(module, "record_stream", lambda plan, device: True)
    monkeypatch.setattr(module, "wait_for_stream", lambda plan, device: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    cache = rw.PlanCache()
    plans = [
        cache.get(rw.Causal(), 256, 256, tile=(64, 64), device=device) for device in ("cuda", "cuda:0", "cuda:1", "cpu")
    ]
    assert plans[0] is plans[1]
    assert made == ["cuda:0", "cuda:1", "cpu"]
