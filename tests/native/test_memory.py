"""Test the memory of forward and backward beyond inputs and results, as a share of the tensors of a call."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ringweave as rw
from ringweave.backends import cpu
from ringweave.backends.backend import Upstream
from ringweave.call import Call, Operands
from ringweave.plan import branches

from ..parallel.processes import forked

pytest.importorskip("ringweave._cpu", exc_type=ImportError)

PATTERNS: dict[str, Callable[[int], rw.Pattern]] = {
    "window": lambda n: rw.SlidingWindow(128),
    # the first query attends every key, so all columns are kept between windows
    "global": lambda n: rw.SlidingWindow(128) | rw.Global(1),
    "blocks": lambda n: rw.patterns.random_blocks(n, max(0.01, 128 / n), block_size=128),
}


def held(name: str) -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(name))


def peak_of(call: Callable[..., Any], *args: Any) -> tuple[Any, int]:
    """Return a call's result, and how many bytes the process's peak rose above its size before."""
    Path("/proc/self/clear_refs").write_text("5")
    before = held("VmRSS")
    result = call(*args)
    return result, held("VmHWM") - before


def measured(tokens: int, heads: int, kv_heads: int, dim: int, name: str) -> tuple[int, int, int, int, int]:
    """Return bytes: forward's scratch, the call's tensors, backward's scratch, the gradients, and the declared bound on scratch."""
    torch.set_num_threads(2)
    case = Call(1, heads, kv_heads, tokens, tokens, dim, dim, torch.bfloat16, "cpu", True)

    def ones(count: int, n: int) -> Tensor:
        return torch.ones(1, count, n, dim, dtype=torch.bfloat16)

    for n in (256, tokens):
        q, dout, k, v = ones(heads, n), ones(heads, n), ones(kv_heads, n), ones(kv_heads, n)
        (branch,) = branches(PATTERNS[name](n), n, n, heads=heads)
        branch.plan("cpu")
        inputs = Operands(q, k, v, 0.1)
        (out, lse), forward = peak_of(cpu.forward, inputs, branch, q.dtype)
        upstream = Upstream(dout, lse, torch.ones(1, heads, n), out)
        grads, backward = peak_of(cpu.backward, upstream, inputs, branch, q.dtype)
    size = sum(x.nbytes for x in grads)
    tensors = sum(x.nbytes for x in (q, k, v, out))
    return forward - out.nbytes - lse.nbytes, tensors, backward - size, size, cpu.scratch(case, branch)


MIB = 2**20


@pytest.mark.measures
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "dim", "name"),
    [(65536, 8, 2, 64, "window"), (98304, 8, 2, 64, "global"), (65536, 16, 4, 64, "blocks")],
)
def test_memory(tokens: int, heads: int, kv_heads: int, dim: int, name: str) -> None:
    forward, tensors, backward, gradients, promised = forked(measured, tokens, heads, kv_heads, dim, name)
    print(f"forward {forward / MIB:.1f} of {tensors / MIB:.0f} MiB,", end=" ")
    print(f"backward {backward / MIB:.1f} of {gradients / MIB:.0f}, promised {promised / MIB:.1f}")
    assert forward <= 0.05 * tensors + 4 * MIB
    assert backward <= 0.1 * gradients + 8 * MIB
    assert backward <= promised + 4 * MIB
