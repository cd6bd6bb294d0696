"""Scratch: never given out twice, reused, bounded in waste, safe between threads and after a fork."""

from __future__ import annotations

import os
import random
import threading

import pytest
import torch
from torch import Tensor

from ringweave.memory import Workspace, workspace
from ringweave.memory.workspace import size_class

KINDS = {
    "view": lambda x: x[1:],
    "detached": lambda x: x.detach(),
    "data": lambda x: x.data,
    "another type": lambda x: x.view(torch.int32),
    "array": lambda x: x.numpy(),
    "storage": lambda x: x.untyped_storage(),
    "graph": lambda x: torch.ones(4, requires_grad=True) * x,
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_in_use_in_any_form_is_not_given_out(kind: str) -> None:
    space = Workspace()
    kept = KINDS[kind](space.take((4,), torch.float32).fill_(7.0))
    other = space.take((4,), torch.float32)
    assert space.statistics().reused == 0
    other.fill_(3.0)
    del other, kept
    assert space.statistics().asked == 0
    again = [space.take((4,), torch.float32) for _ in range(2)]
    assert again[0].data_ptr() != again[1].data_ptr()
    assert space.statistics().reused == 2


def test_classes_waste_at_most_a_quarter() -> None:
    for n in [*range(256, 5000), *(2**k + d for k in range(13, 40) for d in (-1, 0, 1))]:
        assert n <= size_class(n) <= 1.25 * n, n
        assert size_class(size_class(n)) == size_class(n)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64])
def test_tensors_are_as_torch_makes_them(dtype: torch.dtype) -> None:
    x = Workspace().take((3, 0, 5), dtype)
    assert x.shape == (3, 0, 5)
    for shape in [(), (7,), (3, 5, 2)]:
        x = Workspace().take(shape, dtype)
        assert (x.shape, x.dtype, x.is_contiguous(), x.requires_grad) == (shape, dtype, True, False)
        assert x.data_ptr() % 64 == 0


def test_buffers_of_inference_mode_serve_everywhere() -> None:
    space = Workspace()
    with torch.inference_mode():
        space.take((8,), torch.float32).zero_()
    x = space.take((8,), torch.float32)
    assert space.statistics().reused == 1
    assert not x.is_inference()
    (torch.ones(8, requires_grad=True) * x.zero_()).sum().backward()


def test_under_a_mode_tensors_are_of_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    space = Workspace()
    monkeypatch.setattr(workspace, "_get_current_dispatch_mode", object)
    assert space.take((8,), torch.float32).shape == (8,)
    assert space.statistics().taken == 0


@pytest.mark.usefixtures("poisoned")
def test_contents_are_poisoned_as_those_of_empty() -> None:
    assert Workspace().take((8,), torch.float32).isnan().all()


def test_idle_buffers_go_by_age_and_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    space, now = Workspace(idle_seconds=10.0), [1000.0]
    space._since = 1000.0
    monkeypatch.setattr(workspace.time, "monotonic", lambda: now[0])
    x = space.take((2**20,), torch.uint8)
    y = space.take((2**20,), torch.uint8)
    del x
    assert space.statistics().idle == 2**20
    now[0] += 11
    del y
    assert space.statistics().idle == 2**20
    assert space.trim() == 2**20
    assert space.statistics()[2:] == (0, 0, 0, 0)


def test_idle_buffers_go_when_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    from ringweave.memory import Pressure

    space = Workspace()
    space.take((1000,), torch.uint8)
    assert space.statistics().idle == 1024
    monkeypatch.setattr(workspace, "pressure", lambda device: Pressure(1, 100, "cgroup"))
    space._looked = 0.0
    x = space.take((5000,), torch.uint8)
    assert space.statistics().held == 5120
    del x


def test_a_failed_allocation_counts_nothing() -> None:
    space = Workspace()
    with pytest.raises(RuntimeError):
        space.take((2**60,), torch.uint8)
    assert space.statistics() == (0, 0, 0, 0, 0, 0)


def test_a_loop_of_calls_with_scratch_of_many_sizes_reuses_it() -> None:
    kinds = [(8000, 3000, 3001), (6000, 2000, 2000), (8000, 5000, 5000, 9000), (1000, 333), (7000,) * 3]
    space = Workspace()

    def calls(count: int) -> None:
        for _ in range(count):
            for kind in kinds:
                assert len({x.data_ptr() for x in [space.take((1024, n), torch.uint8) for n in kind]}) == len(kind)

    calls(4)
    made = space.statistics()
    calls(100)
    now = space.statistics()
    assert now.reused - made.reused == now.taken - made.taken
    assert now.held <= 1.25 * 9 / 8 * 27000 * 1024 + 2**20


def test_mixed_allocations_are_bounded() -> None:
    """Live tensors of any sizes, one replaced at a time: worse than loops of calls, and still bounded."""
    draw, space = random.Random(0), Workspace()
    live: list[Tensor] = []
    most = 0
    for _ in range(3000):
        if len(live) == 256:
            live.pop(draw.randrange(256))
        live.append(space.take((int(2 ** draw.uniform(10, 20)),), torch.uint8))
        now = space.statistics()
        most = max(most, now.held - now.idle)
        assert now.held <= 9 / 8 * most + 2**20
    assert now.reused > 0.9 * (now.taken - 256)


def hammer(seconds: float, threads: int) -> None:
    """Threads that write their own number and find it again."""
    import time

    space, wrong, until = Workspace(), [], time.monotonic() + seconds

    def work(number: int) -> None:
        draw = random.Random(number)
        held: list[Tensor] = []
        while time.monotonic() < until:
            held.append(space.take((draw.choice((100, 1000, 3000)),), torch.int32).fill_(number))
            if len(held) > 4 and not bool((held.pop(draw.randrange(5)) == number).all()):
                wrong.append(number)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(threads)]
    for each in workers:
        each.start()
    for each in workers:
        each.join()
    assert not wrong
    now = space.statistics()
    assert now.asked == 0
    assert now.idle == now.held
    assert now.reused > 0.9 * now.taken


def test_threads() -> None:
    hammer(1.0, 16)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_begins_without_idle_buffers_and_works() -> None:
    space = Workspace()
    kept = space.take((5000,), torch.float32).fill_(2.0)
    gone = space.take((5000,), torch.float32)
    del gone
    # as another thread might hold it
    with space._lock:
        child = os.fork()
        if child == 0:
            idle = space.statistics().idle
            x = space.take((1000,), torch.float32)
            del x
            x = space.take((1000,), torch.float32)
            os._exit(0 if idle == 0 and space.statistics().reused == 1 and kept[0] == 2 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert space.statistics().idle > 0
