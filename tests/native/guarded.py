"""Make calls on tensors that border on a protected page; test_guarded.py runs this in its own process.

Inputs, the plan's arrays and the library's allocations for the native kernel border on a page, so that one byte read or
written beyond them ends the process; each call is named before it runs. Memory of keys that no query attends is protected
too. ``python -m tests.native.guarded cpu|torch|dead|beyond``.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import mmap
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import ringweave as rw
from ringweave.backends import cpu
from ringweave.environment import CPU_VARIANT
from ringweave.plan import Branch

PAGE = mmap.PAGESIZE
_mprotect = ctypes.CDLL(None, use_errno=True).mprotect
_mprotect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
#: whether tensors end at a page, or begin after one
SIDES = ("end", "begin")


def guarded(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, side: str, beyond: int = 0) -> Tensor:
    """Return a tensor of NaN (integers: -1) between two protected pages, at one of them, or ``beyond`` it."""
    elements = 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    size = (elements - beyond) * dtype.itemsize
    room = -(-size // PAGE) * PAGE
    memory = mmap.mmap(-1, room + 2 * PAGE)
    first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    memory[:] = b"\xff" * len(memory)
    for page in (first, first + PAGE + room):
        if _mprotect(page, PAGE, 0):
            raise OSError(ctypes.get_errno(), "mprotect")
    flat = torch.frombuffer(memory, dtype=dtype, count=elements, offset=PAGE + (room - size) * (side == "end"))
    return flat.as_strided(tuple(shape), tuple(strides))


def copied(x: Tensor, side: str, order: Sequence[int] | None = None, gap: int = 0) -> Tensor:
    """Copy a tensor to guarded memory, with dimensions in an order, innermost last, and its rows ``gap`` elements apart."""
    if not x.numel():
        return x
    strides, step = [0] * x.ndim, 1
    for place, dim in enumerate(reversed(order or range(x.ndim))):
        strides[dim] = step
        step = step * x.shape[dim] + (gap if place == 0 else 0)
    return guarded(x.shape, strides, x.dtype, side).copy_(x)


class Torch:
    """Replace torch in the native kernel's file, with an allocator of guarded memory."""

    side = "end"

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *sizes: Any, dtype: torch.dtype, device: object = None) -> Tensor:
        shape = tuple(sizes[0]) if isinstance(sizes[0], Sequence) else sizes
        return copied(torch.zeros(shape, dtype=dtype), self.side).view(torch.uint8).fill_(255).view(dtype)


def guard_library(to: Torch) -> None:
    """Allocate the library's own arrays in guarded memory."""
    cpu.torch = to  # type: ignore[assignment]
    plain = Branch.plan

    def plan(branch: Branch, *args: Any, **options: Any) -> Any:
        of = plain(branch, *args, **options)
        tensors = {field.name: getattr(of, field.name) for field in dataclasses.fields(of)}
        arrays = {name: copied(x, to.side) for name, x in tensors.items() if isinstance(x, Tensor)}
        return dataclasses.replace(of, **arrays)

    Branch.plan = plan  # type: ignore[method-assign]


LAYOUTS: dict[str, dict[str, Any]] = {
    "contiguous": {},
    "heads last": {"order": (0, 2, 1, 3)},
    "rows apart": {"gap": 3},
    "channels first": {"order": (0, 1, 3, 2)},
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: odd lengths, at and around tiles; few queries have their own kernel
LENGTHS = [(1, 1), (1, 129), (2, 40), (4, 257), (5, 33), (16, 63), (33, 7), (65, 127), (130, 131)]
DIMS = [(8, 8), (16, 24), (24, 16), (40, 72), (64, 64), (104, 8), (8, 136), (256, 256)]


def calls(backend: str) -> Iterator[tuple[str, rw.Pattern, tuple[int, int], tuple[int, int], torch.dtype, str]]:
    """Yield (layout, pattern, lengths, dims, dtype, side), each value with some of the others."""
    every_dim = DIMS if backend == "cpu" else [(1, 1), (7, 12), (24, 16), (33, 40), (64, 64)]
    for i, (lengths, dims) in enumerate(itertools.product(LENGTHS, every_dim)):
        if backend == "sdpa":
            dims = dims[0], dims[0]
        patterns = [rw.Full(), rw.Causal(), rw.SlidingWindow(20, 3) | rw.Sinks(2)][: 2 if backend == "sdpa" else 3]
        for j, side in enumerate(SIDES):
            layout = list(LAYOUTS)[(i + j) % 4]
            yield layout, patterns[(i // 2 + j) % len(patterns)], lengths, dims, DTYPES[(i + j) % 3], side


def run(backend: str, to: Torch) -> int:
    """Run all calls of a backend, and return their number."""
    number = 0
    for layout, pattern, (nq, nk), (dim, value_dim), dtype, side in calls(backend):
        print(
            backend, os.environ.get(CPU_VARIANT, ""), layout, pattern, nq, nk, dim, value_dim, dtype, side, flush=True
        )
        generator = torch.Generator().manual_seed(number)
        heads, kv_heads = [(2, 1), (1, 1), (3, 3)][number % 3]

        def draw(*shape: int, dtype: torch.dtype = dtype, generator: torch.Generator = generator) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        inputs = [draw(1, heads, nq, dim), draw(1, kv_heads, nk, dim), draw(1, kv_heads, nk, value_dim)]
        slopes = [draw(1, heads, nq, value_dim), draw(1, heads, nq, dtype=torch.float32)]

        def results(leaves: list[Tensor], slopes: list[Tensor]) -> list[Tensor]:
            leaves = [x.requires_grad_() for x in leaves]
            out = rw.attention_with_lse(*leaves, pattern, backend=backend)  # noqa: B023
            return [*out, *torch.autograd.grad(out, leaves, slopes)]

        torch.set_num_threads(2 if number % 16 == 0 and backend == "cpu" else 1)
        to.side = side
        found = results(
            [copied(x, side, **LAYOUTS[layout]) for x in inputs],
            [copied(slopes[0], side, **LAYOUTS[layout]), copied(slopes[1], side)],
        )
        for got, wanted in zip(found, results(inputs, slopes), strict=True):
            torch.testing.assert_close(got, wanted, equal_nan=False)
        number += 1
    return number


def run_with_dead_keys(queries: int) -> int:
    """Run forward where the pages of keys that no query attends, between attended ones, are protected."""
    number, tokens = 0, 16  # keys of a page
    page = torch.arange(512) // tokens
    alive = (page % 8 == 0) | (page % 8 == 3) | (page % 8 == 7)
    for dtype in DTYPES:
        print("dead keys", os.environ.get(CPU_VARIANT, ""), queries, dtype, flush=True)
        dim = PAGE // tokens // dtype.itemsize
        q, *plain = (torch.randn(1, 1, n, dim).to(dtype) for n in (queries, 512, 512))
        keys = [copied(x, "end") for x in plain]
        for x in keys:
            for dead in page[~alive].unique().tolist():
                if _mprotect(x.data_ptr() + dead * PAGE, PAGE, 0):
                    raise OSError(ctypes.get_errno(), "mprotect")
        pattern = rw.Sinks(alive)
        found, wanted = (rw.attention(q, *some, pattern, backend="cpu") for some in (keys, plain))
        assert torch.equal(found, wanted)
        number += 1
    return number


def main(what: str) -> None:
    if what == "beyond":
        # the tests rely on this: three elements can be read, and reading a fourth ends the process
        print(guarded((3,), (1,), torch.float32, "end").isnan().tolist(), flush=True)
        guarded((4,), (1,), torch.float32, "end", beyond=1).sum()
        return
    to = Torch()
    guard_library(to)
    total = 0
    native = cpu.module()
    if what == "cpu":
        assert native is not None
        for os.environ[CPU_VARIANT] in native.variants():
            total += run("cpu", to)
    elif what == "dead":
        assert native is not None
        for os.environ[CPU_VARIANT] in native.variants():
            total += sum(map(run_with_dead_keys, (1, 40)))
    else:
        total += run("dense_batched", to) + run("sdpa", to)
    print(f"{total} calls")


if __name__ == "__main__":
    main(sys.argv[1])
