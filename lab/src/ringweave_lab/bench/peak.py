"""Peak memory of one run of a callable, and the stream that GPU figures are taken on."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ringweave.memory import peak
from ringweave.memory.pressure import to_system

from ..tune.measure import Runnable, on_device


@contextmanager
def aside(device: str) -> Iterator[None]:
    """Run the block on a separate stream of a GPU, as graphs are captured, and wait for its work at exit."""
    # a missing GPU raises a clear error later
    if torch.device(device).type != "cuda" or not torch.cuda.is_available():
        yield
        return
    with on_device(device), torch.cuda.stream(torch.cuda.Stream()):
        yield
        torch.cuda.synchronize()


@dataclass(frozen=True)
class Peak:
    """The peak memory of a callable above the memory before it, including its results.

    Attributes:
        nbytes: The rise in bytes.
        method: How it was measured: ``"cuda allocator"``, ``"peak resident set"`` or ``"sampled resident set"``.
    """

    nbytes: int
    method: str


def peak_memory(call: Runnable, *, device: str = "cpu", warm: bool = True) -> Peak:
    """Measure the peak memory of one run of a callable.

    On CUDA the allocator knows it. On Linux the kernel keeps the high-water mark of the resident set; the heap is
    trimmed and the mark reset before. Elsewhere a thread samples the resident set, which can miss short peaks.

    Args:
        call: Callable to measure; its result counts.
        device: Device on which it allocates.
        warm: Whether to run it once before, so that caches and thread pools do not count.
    """
    where = torch.device(device)
    with on_device(device):
        if warm:
            call()
        gc.collect()
        if where.type == "cuda":
            torch.cuda.synchronize()
        else:
            # freed pages of the heap would hide new allocations
            to_system()
        if not peak.is_known(where):
            return _sampled_peak(call)
        peak.begin(where)
        before = peak.in_use(where)
        result = call()
        if where.type == "cuda":
            torch.cuda.synchronize()
        after = peak.highest(where)
        del result
    return Peak(max(after - before, 0), "cuda allocator" if where.type == "cuda" else "peak resident set")


def _sampled_peak(call: Runnable, interval: float = 0.001) -> Peak:
    # imported where the host's memory is measured: GPUs need no psutil
    import psutil

    process = psutil.Process()
    before = highest = int(process.memory_info().rss)
    stop = threading.Event()

    def sample() -> None:
        nonlocal highest
        while not stop.wait(interval):
            highest = max(highest, int(process.memory_info().rss))

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        result = call()
        highest = max(highest, int(process.memory_info().rss))
        del result
    finally:
        stop.set()
        thread.join()
    return Peak(highest - before, "sampled resident set")
