"""What forward and backward hold beyond inputs and results, in shares of what a process must hold."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("ringweave._cpu", exc_type=ImportError)

SCRIPT = '''
import sys, torch
from ringweave.ops import cpu
from ringweave.ops.backend import Case, Upstream
from ringweave.plan import branches
import ringweave as rw

def held(name):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(name))

def peak_of(call, *args):
    """Its result, and the bytes by which the peak lies above what is held before."""
    with open("/proc/self/clear_refs", "w") as reset:
        reset.write("5")
    before = held("VmRSS")
    result = call(*args)
    return result, held("VmHWM") - before

tokens, heads, kv_heads, dim = map(int, sys.argv[1:5])
torch.set_num_threads(2)
case = Case(1, heads, kv_heads, tokens, tokens, dim, dim, torch.bfloat16, "cpu", True)
for n in (256, tokens):
    q, dout = (torch.ones(1, heads, n, dim, dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.ones(1, kv_heads, n, dim, dtype=torch.bfloat16) for _ in range(2))
    (branch,) = branches(eval(sys.argv[5]), n, n, heads=heads)
    branch.plan("cpu")
    delta = torch.ones(1, heads, n)
    (out, lse), forward = peak_of(cpu.forward, q, k, v, branch, 0.1, q.dtype)
    upstream = Upstream(dout, lse, delta, out)
    grads, backward = peak_of(cpu.backward, upstream, q, k, v, branch, 0.1, q.dtype)
size = sum(x.nbytes for x in grads)
tensors = sum(x.nbytes for x in (q, k, v, out))
promised = cpu.scratch(case, branch)
print(forward - out.nbytes - lse.nbytes, tensors, backward - size, size, promised)
'''
MIB = 2**20


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "dim", "pattern"),
    [
        (65536, 8, 2, 64, "rw.SlidingWindow(128)"),
        # the first query attends every key: all columns are kept between windows
        (98304, 8, 2, 64, "rw.SlidingWindow(128) | rw.Global(1)"),
        (65536, 16, 4, 64, "rw.random_blocks(n, max(0.01, 128 / n), block_size=128)"),
    ],
)
def test_memory(tokens: int, heads: int, kv_heads: int, dim: int, pattern: str) -> None:
    command = [sys.executable, "-c", SCRIPT, *map(str, (tokens, heads, kv_heads, dim)), pattern]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240)
    forward, tensors, backward, gradients, promised = map(int, done.stdout.split())
    print(f"forward {forward / MIB:.1f} of {tensors / MIB:.0f} MiB,", end=" ")
    print(f"backward {backward / MIB:.1f} of {gradients / MIB:.0f}, promised {promised / MIB:.1f}")
    assert forward <= 0.05 * tensors + 4 * MIB
    assert backward <= 0.1 * gradients + 8 * MIB
    assert backward <= promised + 4 * MIB
