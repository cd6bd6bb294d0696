"""Free memory, trimming, and the largest batch that fits."""

from __future__ import annotations

import gc
import resource
import sys
import weakref
from pathlib import Path

import pytest
import torch

import ringweave as rw
from ringweave.errors import RingweaveError, UnsupportedError
from ringweave.memory import batch_size, numa, peak

from ..parallel.processes import forked

GIB = 2**30


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MACHINE = {"proc/meminfo": f"MemTotal: {16 * 2**20} kB\nMemFree: 5 kB\nMemAvailable: {8 * 2**20} kB\n"}
V2 = {
    "proc/self/cgroup": "0::/jobs/mine\n",
    "sys/fs/cgroup/jobs/memory.max": str(4 * GIB),
    "sys/fs/cgroup/jobs/memory.current": str(3 * GIB),
    "sys/fs/cgroup/jobs/memory.stat": f"anon 5\ninactive_file {GIB // 2}\n",
    "sys/fs/cgroup/jobs/mine/memory.max": "max\n",
    "sys/fs/cgroup/jobs/mine/memory.current": "1",
}
V1 = {
    "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/not/in/this/container\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2 * GIB),
    "sys/fs/cgroup/memory/memory.usage_in_bytes": str(GIB),
    "sys/fs/cgroup/memory/memory.stat": f"total_inactive_file {GIB // 4}\n",
}
# the limit above which the kernel throttles allocations
HIGH = V2 | {"sys/fs/cgroup/jobs/memory.high": str(13 * GIB // 4)}
NO_LIMIT = V1 | {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712"}
BROKEN = {"proc/self/cgroup": "nonsense\n\n1:memory\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": "\n"}


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ({}, (8 * GIB, 16 * GIB, "machine")),
        (V2, (3 * GIB // 2, 4 * GIB, "cgroup")),
        (HIGH, (3 * GIB // 4, 13 * GIB // 4, "cgroup")),
        (V2 | {"sys/fs/cgroup/jobs/memory.high": "max"}, (3 * GIB // 2, 4 * GIB, "cgroup")),
        (V1, (5 * GIB // 4, 2 * GIB, "cgroup")),
        (NO_LIMIT, (8 * GIB, 16 * GIB, "machine")),
        (BROKEN, (8 * GIB, 16 * GIB, "machine")),
    ],
    ids=["machine", "v2", "v2 high", "v2 no high", "v1", "no limit", "broken"],
)
def test_the_tightest_limit(tmp_path: Path, files: dict[str, str], wanted: tuple[int, int, str]) -> None:
    left = rw.memory.pressure(root=tree(tmp_path, MACHINE | files))
    assert left == wanted
    assert left.free_share == wanted[0] / wanted[1]


def _limited() -> tuple[int, int, str]:
    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, most))
    return rw.memory.pressure()


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")
def test_a_limit_of_the_address_space() -> None:
    free, _, limit = forked(_limited)
    assert limit == "address space"
    assert 2**25 < free <= 2**26


def test_the_machine_without_proc(tmp_path: Path) -> None:
    pytest.importorskip("psutil")
    left = rw.memory.pressure(root=tmp_path)
    assert left.limit == "machine"
    assert 0 < left.free < left.total


class Holder:
    def __init__(self) -> None:
        self.kept = [1] * 10

    def forget(self) -> int:
        count, self.kept = len(self.kept), []
        return count


def test_trim_calls_those_that_are_still_there() -> None:
    holder = Holder()
    rw.memory.on_trim(holder.forget)
    assert rw.memory.trim() >= 10
    assert holder.kept == []
    gone = weakref.ref(holder)
    del holder
    gc.collect()
    assert gone() is None
    rw.memory.trim()


def test_trim_gives_plans_and_scratch_back_and_attention_goes_on() -> None:
    q, k, v = (torch.randn(1, 2, 300, 16) for _ in range(3))
    pattern = rw.SlidingWindow(33) | rw.Dilated(8, 16)
    want = rw.attention(q, k, v, pattern, backend="dense_batched")
    assert rw.memory.plan_statistics().plans > 0
    hits = rw.memory.plan_statistics().hits
    assert rw.memory.trim() > 0
    assert rw.memory.plan_statistics().plans == 0
    assert rw.memory.plan_statistics().hits == hits
    assert torch.equal(rw.attention(q, k, v, pattern, backend="dense_batched"), want)


def test_gather_takes_no_new_scratch_once_it_has_run() -> None:
    from ringweave.memory.workspace import scratch

    q, k, v = (torch.randn(1, 2, 1000, 32, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))

    def step() -> None:
        for pattern in (rw.SlidingWindow(100), rw.LongNet([128, 512], [1, 4]), rw.Causal()):
            rw.attention(q, k, v, pattern, backend="dense_batched").float().sum().backward()

    for _ in range(3):
        step()
    before = scratch.statistics()
    for _ in range(20):
        step()
    now = scratch.statistics()
    assert now.taken > before.taken
    assert now.taken - before.taken == now.reused - before.reused
    assert now.asked == 0


MIB = 2**20


def _found_within(free: int, most: int) -> tuple[int, int, list[int]]:
    """Return the batches found for a step of 16 MiB plus 16 MiB per sample, from 1 to 1,000 and 1 to 5, and the trials."""
    torch.set_num_threads(1)
    batch_size.pressure = lambda device: rw.memory.Pressure(free, free, "cgroup")
    tried: list[int] = []

    def step(batch: int) -> None:
        tried.append(batch)
        torch.ones((batch + 1) * 16 * MIB, dtype=torch.uint8)

    found = rw.memory.fit_batch(step, 1, 1000)
    return found, rw.memory.fit_batch(step, 1, 5), tried


@pytest.mark.measures
@pytest.mark.skipif(not peak.is_known(torch.device("cpu")), reason="measures resident memory")
@pytest.mark.parametrize("most", [1, 7, 40])
def test_the_largest_batch_within_a_limit(most: int) -> None:
    """10 % stay free, and no step runs out of memory. Runs in a separate process, so that no other test uses memory."""
    found, few, tried = forked(_found_within, int((most + 1.5) * 16 * MIB / 0.9), most)
    assert 0.9 * most <= found <= most
    assert max(tried) <= most + 1
    assert few == min(5, most)


def test_a_limit_that_raises() -> None:
    def step(batch: int) -> None:
        if batch > 100:
            raise torch.OutOfMemoryError("CUDA out of memory")

    assert rw.memory.fit_batch(step, 1, 1000) == 90
    assert rw.memory.fit_batch(step, 1, 1000, headroom=0) == 100
    assert rw.memory.fit_batch(step, 3, 50) == 50
    with pytest.raises(UnsupportedError, match="low: got 101.*wanted a batch that fits"):
        rw.memory.fit_batch(step, 101, 1000)


def _fits_under_a_limit() -> tuple[int, int]:
    """Return the batch found in a process with a small address space, and the largest one that fits there."""
    torch.set_num_threads(1)

    def step(batch: int) -> None:
        x = torch.randn(batch, 2, 1024, 64, requires_grad=True)
        rw.attention(x, x, x, rw.Causal() & rw.SlidingWindow(64), on_oom="raise").sum().backward()

    step(1)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 150 * MIB, resource.RLIM_INFINITY))
    found = rw.memory.fit_batch(step, 1, 1000)
    best = found
    try:
        while best < 1000:
            step(best + 1)
            best += 1
    except (MemoryError, RuntimeError):
        pass
    return found, best


@pytest.mark.measures
@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")
def test_a_real_step_under_a_real_limit() -> None:
    found, best = forked(_fits_under_a_limit)
    print(f"found {found}, the most is {best}")
    assert 0.75 * best <= found <= best


def test_other_errors_of_a_step_pass() -> None:
    def step(batch: int) -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="mat1"):
        rw.memory.fit_batch(step, 1, 2)


@pytest.mark.parametrize(("low", "high", "headroom"), [(0, 4, 0.1), (4, 3, 0.1), (1.5, 3, 0.1), (1, 3, 1), (1, 3, "x")])
def test_invalid_bounds(low: int, high: int, headroom: float) -> None:
    with pytest.raises(RingweaveError, match="wanted"):
        rw.memory.fit_batch(lambda batch: None, low, high, headroom=headroom)


def test_nodes_of_a_machine_with_two(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "sys/devices/system/node/node0/cpulist": "0-3,8\n",
            "sys/devices/system/node/node0/meminfo": "Node 0 MemTotal:  2048 kB\nNode 0 MemFree: 1 kB\n",
            "sys/devices/system/node/node1/cpulist": "4-7\n",
            "sys/devices/system/node/online": "0-1\n",
        },
    )
    first, second = numa.nodes(root)
    assert first == (0, (0, 1, 2, 3, 8), 2**21)
    assert second == (1, (4, 5, 6, 7), 0)
    said = numa.described(root)
    assert said.startswith("2 nodes: 0 (5 processors), 1 (4 processors)")
    assert said.endswith("torchrun --numa-binding=node")


def test_gpus_near_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Card:
        pci_domain_id, pci_bus_id, pci_device_id = 0, 0x3B, 0

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda gpu: Card)
    root = tree(tmp_path, {"sys/bus/pci/devices/0000:3b:00.0/numa_node": "1\n"})
    assert numa.near(0, root) == 1
    assert numa.near(0, tmp_path / "nothing") is None


def test_one_node_has_nothing_to_bind(tmp_path: Path) -> None:
    assert numa.nodes(tmp_path) == ()
    assert numa.described(tmp_path) == "one node: nothing to bind"
