"""Compute chunks of work in threads. Each thread computes alone.

torch divides an operation among OpenMP threads, which wait for each other by spinning. A chunk has many operations of
a millisecond or less. On a busy machine a thread waits long for a processor, and the others spin meanwhile: a call took
30 times its processor time. Here the operations are not divided, and each thread takes whole chunks.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from typing import TypeVar

import torch

from ..cache import process_cache
from ..torch_compat import no_interception

Chunk = TypeVar("Chunk")
Result = TypeVar("Result")

# Each thread has the memory of a chunk.
_MOST_THREADS = 16


def _function(library: str | None, name: str) -> Callable[[int], int] | None:
    """Return a function of a library that this process has loaded, or None."""
    try:
        found: Callable[[int], int] = getattr(ctypes.CDLL(library), name)
    except (AttributeError, OSError, TypeError):
        return None
    return found


@process_cache
def _setters() -> tuple[Callable[[int], int] | None, Callable[[int], int] | None]:
    """Return the functions of OpenMP and MKL that set the number of threads for operations of the calling thread.

    torch loads its OpenMP library globally, so its symbols are found in the process itself. MKL is a part of torch's
    own library, and follows OpenMP until ``torch.set_num_threads`` is called.
    """
    return _function(None, "omp_set_num_threads"), _function("libtorch_cpu.so", "MKL_Set_Num_Threads_Local")


@contextmanager
def undivided() -> Iterator[None]:
    """Divide no operation of this thread among others; other threads are not affected."""
    openmp, mkl = _setters()
    # torch sets the number itself when a thread first asks for it
    before = torch.get_num_threads()
    if openmp is None or before == 1:
        yield
        return
    openmp(1)
    local = None if mkl is None else mkl(1)
    try:
        yield
    finally:
        openmp(before)
        if mkl is not None and local is not None:
            mkl(local)


def threads(device: torch.device) -> int:
    """Return how many threads compute chunks on a device."""
    return min(torch.get_num_threads(), _MOST_THREADS) if device.type == "cpu" else 1


def in_order(
    compute: Callable[[Chunk], Result], chunks: Iterable[Chunk], device: torch.device
) -> Iterator[tuple[Chunk, Result]]:
    """Yield each chunk and its result, in order; as many chunks as torch has threads are computed together.

    The consumer's own operations are not divided either. This thread computes all chunks on another device than a CPU,
    and where a mode, transform or profiler watches its operations.
    """
    most = threads(device)
    with undivided():
        ahead = iter(chunks)
        first = list(islice(ahead, 2))
        if most == 1 or len(first) < 2 or _setters()[0] is None or not no_interception():
            for chunk in (*first, *ahead):
                yield chunk, compute(chunk)
            return
        inference, gradients = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

        def alone(chunk: Chunk) -> Result:
            with undivided(), torch.inference_mode(inference), torch.set_grad_enabled(gradients):
                return compute(chunk)

        waiting: deque[tuple[Chunk, Future[Result]]] = deque()

        def oldest() -> tuple[Chunk, Result]:
            # a function, since no variable may hold the result while the consumer waits for the next one
            chunk, future = waiting.popleft()
            return chunk, future.result()

        pool = ThreadPoolExecutor(most)
        try:
            for chunk in (*first, *ahead):
                if len(waiting) == most:
                    yield oldest()
                waiting.append((chunk, pool.submit(alone, chunk)))
            while waiting:
                yield oldest()
        finally:
            # also after an error, or when the consumer stops: no thread is left behind
            pool.shutdown(cancel_futures=True)
