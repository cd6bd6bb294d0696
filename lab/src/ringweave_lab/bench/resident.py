"""Measure the memory of a process that trains, decodes, or attends more keys than fit into memory.

Each measurement runs in a separate process:

    python -c "from ringweave_lab.bench.resident import main; main('joined', 5000)"

writes a JSON object. The measure is resident memory after the C library has returned freed pages.
"""

from __future__ import annotations

import json
import mmap
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import ringweave as rw
from ringweave.errors import RingweaveError
from ringweave.memory.peak import resident
from ringweave.memory.pressure import to_system

from .launched import run

#: Number of parts of a run, and of the first parts that do not count.
PARTS, SETTLED = 20, 4
HEADS, DIM = 4, 64
# queries of a piece of the mapped tensors
_PIECE = 2**18
# time limit of a process in seconds
_PATIENCE = 3600.0


def growth(kind: str, steps: int) -> float:
    """Return the largest relative growth of a process's resident memory after its first steps.

    Args:
        kind: ``"training"``, ``"pages"`` or ``"joined"``, a cache that is copied to grow, without its own bytes.
        steps: Number of steps.
    """
    held: list[int] = _measured(kind, steps)["held"]
    return max(held[SETTLED:]) / held[SETTLED - 1] - 1


def peak(kind: str, tokens: int) -> float:
    """Return the peak resident memory, in GiB, of a process that attends some tokens.

    Args:
        kind: ``"mapped"``: forward, keys and values in files; ``"long"``: forward and backward.
        tokens: Number of tokens.
    """
    most: int = _measured(kind, tokens)["peak"]
    return most / 2**30


def _measured(kind: str, size: int) -> Any:
    words = [sys.executable, "-c", f"from ringweave_lab.bench.resident import main; main({kind!r}, {size})"]
    printed = run(words, threads=torch.get_num_threads(), until=time.monotonic() + _PATIENCE)
    return json.loads(printed.splitlines()[-1])


def _parts(steps: int, step: Callable[[], int]) -> Iterator[int]:
    """Run a step, which returns the bytes of its cache, many times; yield the other resident bytes after each part."""
    for _ in range(PARTS):
        for _ in range(steps // PARTS):
            kept = step()
        to_system()
        yield resident() - kept


def _training() -> Callable[[], int]:
    torch.manual_seed(0)
    model = torch.nn.ModuleList([rw.nn.MultiheadAttention(128, 4, pattern=_pattern(128)) for _ in range(2)])
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> int:
        # many lengths, so that plans and scratch are replaced
        x = torch.randn(2, int(torch.randint(16, 48, ())) * 16, 128)
        for layer in model:
            x = x + layer(x, x, x)[0]
        x.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return 0

    return step


def _pages(steps: int) -> Callable[[], int]:
    cache = rw.PagedCache.empty(2, steps, HEADS, DIM, dtype=torch.bfloat16)

    def step() -> int:
        q, k, v = (torch.randn(2, HEADS, 1, DIM, dtype=torch.bfloat16) for _ in range(3))
        cache.append(k, v)
        rw.paged_attention(q, cache, _pattern(256))
        # the room for the cache is allocated at the beginning
        return 0

    return step


def _joined() -> Callable[[], int]:
    kept = [torch.empty(2, HEADS, 0, DIM, dtype=torch.bfloat16) for _ in range(2)]

    def step() -> int:
        q, k, v = (torch.randn(2, HEADS, 1, DIM, dtype=torch.bfloat16) for _ in range(3))
        kept[:] = [torch.cat([old, new], 2) for old, new in zip(kept, (k, v), strict=True)]
        rw.attention(q, kept[0], kept[1], _pattern(256), q_offset=kept[0].shape[2] - 1)
        return sum(x.nbytes for x in kept)

    return step


def _pattern(window: int) -> rw.Pattern:
    return (rw.SlidingWindow(window) | rw.Sinks(4)) & rw.Causal()


def _mapped(tokens: int) -> None:
    """Attend keys and values in mapped files, some queries at a time, and release the pages after reading them."""
    generator = torch.Generator().manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        maps, tensors = list[Any](), list[Tensor]()
        for name in ("keys", "values"):
            array = np.memmap(Path(folder) / name, np.uint16, "w+", shape=(HEADS, tokens, DIM))
            for first in range(0, tokens, _PIECE):
                part = torch.randn(HEADS, min(_PIECE, tokens - first), DIM, generator=generator).bfloat16()
                array[:, first : first + _PIECE] = part.view(torch.uint16).numpy()
                array.flush()
                _let_go(array)
            maps.append(array)
            tensors.append(torch.from_numpy(array).view(torch.bfloat16)[None])
        (k, v), q = tensors, torch.empty(1, HEADS, tokens, DIM, dtype=torch.bfloat16).normal_(generator=generator)
        out = torch.empty_like(q)
        with torch.no_grad():
            for first in range(0, tokens, _PIECE):
                some = slice(first, first + _PIECE)
                out[:, :, some] = rw.attention(q[:, :, some], k, v, _pattern(512), q_offset=first)
                for array in maps:
                    _let_go(array)
        _check(q, k, v, out)


def _check(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
    """Raise RingweaveError if one of some rows differs from the float64 result by more than two units of bfloat16."""
    tokens = q.shape[2]
    for row in (0, tokens // 2, tokens - 1):
        keys = _pattern(512).to_dense(1, tokens, q_offset=row).view(-1).nonzero()[:, 0]
        some_k, some_v = (x[:, :, keys].double() for x in (k, v))
        mine = slice(row, row + 1)
        want = (q[:, :, mine].double() @ some_k.mT * DIM**-0.5).softmax(-1) @ some_v
        lost = float((out[:, :, mine].double() - want).norm() / want.norm())
        if not lost <= 2**-7:
            raise RingweaveError("out", f"row {row}, off by {lost:.1%}", "what float64 gives", "Report it.")


def _let_go(array: Any) -> None:
    """Release the pages of a numpy map, which remain in the file."""
    array._mmap.madvise(mmap.MADV_DONTNEED)


def _long(tokens: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.empty(1, HEADS, tokens, DIM, dtype=torch.bfloat16) for _ in range(3))
    for x in (q, k, v):
        x.normal_(generator=generator).requires_grad_()
    out = rw.attention(q, k, v, _pattern(512))
    out.backward(torch.ones_like(q))
    _check(q.detach(), k.detach(), v.detach(), out.detach())


def main(kind: str, size: int) -> None:
    """Run one kind of process, and print its memory as JSON."""
    if kind in ("mapped", "long"):
        (_mapped if kind == "mapped" else _long)(size)
        sys.stdout.write(json.dumps({"peak": resident("VmHWM")}) + "\n")
        return
    step = {"training": _training, "pages": lambda: _pages(size), "joined": _joined}[kind]()
    sys.stdout.write(json.dumps({"held": list(_parts(size, step))}) + "\n")
