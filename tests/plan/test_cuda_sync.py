"""Test plans on a GPU, between streams and in CUDA graphs, with torch's functions for streams simulated."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

import ringweave as rw
from ringweave.plan import cached_plans, cuda_sync, from_pattern
from ringweave.plan.from_pattern import build

CUDA = torch.device("cuda", 0)


class Stream:
    def __init__(self) -> None:
        self.waited: list[object] = []

    def wait_event(self, event: object) -> None:
        self.waited.append(event)


class Event:
    def record(self, stream: Stream) -> None:
        self.stream = stream


class Gpu:
    """A simulated GPU that records its current stream, captures, and the tensors still in use by each stream."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.stream, self.capturing = Stream(), False
        self.read: list[tuple[torch.Tensor, Stream]] = []
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        patch.setattr(torch.cuda, "current_stream", lambda device: self.stream)
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.Tensor, "record_stream", lambda x, stream: self.read.append((x, stream)))
        patch.setattr(from_pattern, "build", self.build)
        patch.setattr(cuda_sync, "_in_graphs", set())

    def build(self, *args: Any, device: torch.device, **options: Any) -> rw.BlockPlan:
        """Build a plan as a table's is built on a device: without the host, and so also in a capture."""
        assert device == CUDA
        return build(*args, device="cpu", **options)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


def plan(of: cached_plans.PlanCache, n: int = 256) -> rw.BlockPlan:
    return of.get(rw.Causal(), n, n, tile=(64, 64), device=CUDA)


def test_a_plan_in_a_graph_lives_on_when_it_is_evicted(gpu: Gpu) -> None:
    kept = cached_plans.PlanCache()
    plan(kept)
    gpu.capturing = True
    in_graph = weakref.ref(plan(kept))
    gpu.capturing = False
    evicted = weakref.ref(plan(kept, 320))
    kept.clear()
    gc.collect()
    assert in_graph() is not None
    assert evicted() is None


def test_a_plan_built_in_a_capture_serves_its_graph_alone(gpu: Gpu) -> None:
    """A plan that is built during a capture is used in that graph only, since it has no values before a replay."""
    kept = cached_plans.PlanCache()
    gpu.capturing = True
    first = plan(kept)
    assert plan(kept) is not first
    alive = weakref.ref(first)
    del first
    gpu.capturing = False
    assert kept.statistics().plans == 0
    assert alive() is not None
    assert plan(kept) is plan(kept)


def test_the_host_makes_nothing_in_a_capture(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu.capturing = True
    monkeypatch.setattr(from_pattern, "check_device", lambda device: device)
    with pytest.raises(rw.UnsupportedError, match="while a CUDA graph is captured"):
        build(rw.Causal(), 256, 256, tile=(64, 64), device=CUDA)


def test_another_stream_waits_once_and_holds_the_memory(gpu: Gpu) -> None:
    kept = cached_plans.PlanCache()
    made = plan(kept)
    own, gpu.stream = gpu.stream, Stream()
    for _ in range(3):
        assert plan(kept) is made
    (event,) = gpu.stream.waited
    assert isinstance(event, Event)
    assert event.stream is own
    assert {id(x) for x, _ in gpu.read} == {id(x) for x in vars(made).values() if isinstance(x, torch.Tensor)}
    assert {stream for _, stream in gpu.read} == {gpu.stream}
    gpu.stream = own
    plan(kept)
    assert not own.waited


def test_nothing_of_it_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked() -> bool:
        raise AssertionError("a CPU has no streams")

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", asked)
    kept = cached_plans.PlanCache()
    made = kept.get(rw.Causal(), 256, 256, tile=(64, 64))
    assert kept.get(rw.Causal(), 256, 256, tile=(64, 64)) is made
