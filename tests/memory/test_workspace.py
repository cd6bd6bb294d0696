"""Scratch memory: never handed out twice, reused, with bounded waste, safe in threads and after a fork."""

from __future__ import annotations

import os
import random

import pytest
import torch
from torch import Tensor

from ringweave.errors import ShapeError
from ringweave.memory import Workspace, workspace

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
def test_a_buffer_in_use_in_any_form_is_not_given_out(kind: str) -> None:
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


def test_a_size_class_wastes_a_fifth_at_most() -> None:
    """A class is the smallest quarter step of a power of two that holds the bytes."""
    for nbytes in (*range(256, 5000), *(2**n + d for n in range(10, 40) for d in (-1, 0, 1))):
        size = workspace.size_class(nbytes)
        assert workspace.size_class(size) == size
        assert nbytes <= size <= (1.25 if nbytes <= 2**20 else 1 + 1 / 16) * nbytes
        assert workspace.size_class(nbytes + 1) >= size


def test_a_tensor_takes_an_idle_buffer_up_to_twice_its_size() -> None:
    """An idle buffer of the tensor's class comes first, then larger ones up to twice its size."""
    space = Workspace()
    sizes = {n: space.take((n * 2**20,), torch.uint8) for n in (8, 10, 16, 17)}
    places = {n: x.data_ptr() for n, x in sizes.items()}
    sizes.clear()
    taken = [space.take((8 * 2**20 - 100,), torch.uint8) for _ in range(3)]
    assert [x.data_ptr() for x in taken] == [places[8], places[10], places[16]]
    taken.append(space.take((8 * 2**20,), torch.uint8))
    # 17 MiB is more than twice the size
    assert space.statistics().reused == 3


def test_no_two_tensors_share_a_byte_whatever_comes_back_in_which_order() -> None:
    """Compare with a list of the tensors in use; at the end, every buffer is idle."""
    draw, space = random.Random(1), Workspace()
    live: list[Tensor] = []
    for i in range(2000):
        x = space.take((int(2 ** draw.uniform(0, 20)),), torch.uint8)
        first, end = x.data_ptr(), x.data_ptr() + x.nbytes
        assert all(end <= y.data_ptr() or y.data_ptr() + y.nbytes <= first for y in live), i
        assert first % 64 == 0
        live.append(x)
        del x
        while len(live) > draw.choice((3, 40, 40, 41)):
            live.pop(draw.randrange(len(live)))
        now = space.statistics()
        assert now.asked == sum(y.nbytes for y in live) <= now.held - now.idle
    live.clear()
    now = space.statistics()
    assert (now.asked, now.idle) == (0, now.held)
    assert now.buffers == sum(map(len, space._idle.values()))
    assert space.trim() == now.held


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


def test_under_a_transform_memory_is_allocated_anew() -> None:
    space = Workspace()

    def add(x: torch.Tensor) -> torch.Tensor:
        return x.sum() + space.take((3,), torch.float32).fill_(1.0).sum()

    assert torch.func.jvp(add, (torch.zeros(2),), (torch.ones(2),)) == (3.0, 2.0)
    assert torch.equal(torch.func.grad(add)(torch.zeros(2)), torch.ones(2))
    assert space.statistics().buffers == 0


def test_under_a_mode_tensors_are_of_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    space = Workspace()
    monkeypatch.setattr(workspace, "dispatched", lambda: True)
    assert space.take((8,), torch.float32).shape == (8,)
    assert space.statistics().taken == 0


@pytest.mark.usefixtures("poisoned")
def test_contents_are_poisoned_as_those_of_empty() -> None:
    assert Workspace().take((8,), torch.float32).isnan().all()
    for dtype in (torch.bool, torch.complex64, torch.uint8):
        torch.testing.assert_close(Workspace().take((4,), dtype), torch.empty(4, dtype=dtype), equal_nan=True)


def test_a_size_below_0_counts_nothing() -> None:
    space = Workspace()
    with pytest.raises(ShapeError, match="shape: got"):
        space.take((-5, 3), torch.float32)
    assert space.statistics().asked == space.statistics().taken == 0


def test_idle_buffers_go_by_age_and_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    space, now = Workspace(idle_seconds=10.0), [1000.0]
    space._aged = 1000.0
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
    # the failed allocation must not raise the bound of idle buffers either
    for size in (2, 4, 8, 16):
        space.take((size * 2**20,), torch.uint8)
    assert space.statistics().held <= 32 * 2**20


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
    assert now.held <= 2 * 27192 * 1024


@pytest.mark.parametrize("seed", range(6))
def test_any_loop_of_calls_comes_to_rest(seed: int) -> None:
    """For any sizes, held together or in turn, freeing a buffer that is needed again raises the allowed idle memory."""
    draw, space = random.Random(seed), Workspace()
    calls = [[int(2 ** draw.uniform(8, 23)) for _ in range(draw.randrange(1, 9))] for _ in range(draw.randrange(1, 7))]

    peak = 0

    def step() -> None:
        nonlocal peak
        for sizes in calls:
            held: list[Tensor] = []
            for size in sizes:
                held.append(space.take((size,), torch.uint8))
                peak = max(peak, sum(workspace.size_class(each.nbytes) for each in held))
                del held[: -(1 + seed % 3) if seed % 3 else 0]
            held.clear()

    for _ in range(12):
        step()
    made = space.statistics()
    for _ in range(20):
        step()
    now = space.statistics()
    assert now.reused - made.reused == now.taken - made.taken
    # idle buffers take at most twice the peak of bytes in use
    assert now.held <= 3 * peak + 2**17


@pytest.mark.parametrize("count", [64, 256])
def test_mixed_allocations_are_bounded(count: int) -> None:
    """With tensors of any sizes, replaced one at a time, the unused share of the allocated memory has a bound."""
    draw, space = random.Random(0), Workspace()
    live: list[Tensor] = []
    unused = []
    for _ in range(3000):
        if len(live) == count:
            live.pop(draw.randrange(count))
        live.append(space.take((int(2 ** draw.uniform(10, 20)),), torch.uint8))
        now = space.statistics()
        unused.append(1 - now.asked / now.held)
    # few tensors of sizes from 1 KiB to 1 MiB leave more buffers of other classes idle: 0.56 and 0.32 were measured
    assert sum(unused) / len(unused) <= (0.35 if count == 256 else 0.6)
    # the first ones find nothing idle
    assert now.reused > 0.94 * (now.taken - count)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_begins_without_idle_buffers_and_works() -> None:
    space = Workspace()
    kept = space.take((5000,), torch.float32).fill_(2.0)
    gone = space.take((5000,), torch.float32)
    del gone
    # as if another thread held it
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
