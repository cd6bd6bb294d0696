"""No backend but the reference allocates N x N: a process that attends over 32,768 tokens, forward and backward, bounds its peak."""

from __future__ import annotations

import resource

import pytest
import torch

import ringweave as rw
from ringweave.backends import BACKENDS

from .parallel.processes import forked


def grown(backend: str, pattern: rw.Pattern) -> int:
    """Return the bytes by which a long sequence raises the process's peak over that of a short one."""
    n = 32768
    torch.set_num_threads(2)
    q, k, v = (torch.randn(1, 1, n, 32, requires_grad=True) for _ in range(3))
    small = [x[:, :, :512] for x in (q, k, v)]
    # gather computes lists only
    short = rw.Selected(torch.arange(512)[:, None]) if backend == "gather" else rw.Causal()
    rw.attention(*small, short, backend=backend).sum().backward()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    rw.attention(q, k, v, pattern, backend=backend).sum().backward()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before


@pytest.mark.measures
@pytest.mark.parametrize(
    ("backend", "pattern"),
    [
        ("dense_batched", rw.SlidingWindow(512) | rw.Sinks(16)),
        ("dense_batched", rw.SlidingWindow(512) | rw.Global(16)),
        ("cpu", rw.SlidingWindow(512) | rw.Global(16)),
        ("cpu", rw.LongNet([1024, 16384], [1, 16])),
        ("dense_batched", rw.Dilated(64, 16) | rw.SlidingWindow(128)),
        ("dense_batched", rw.LongNet([1024, 16384], [1, 16])),
        ("sdpa", rw.Causal()),
        ("gather", rw.Selected((torch.arange(32768)[:, None] - 512 * torch.arange(64)).clamp(min=-1))),
        ("torch_sparse", rw.SlidingWindow(512) | rw.Global(16)),
        ("auto", rw.SlidingWindow(512)),
    ],
    ids=str,
)
def test_peak_memory(backend: str, pattern: rw.Pattern) -> None:
    # the bound is 258 MB: a float a pair would take 4.3 GB, a bit a pair 134 MB; inputs, gradients and the budget of scores take less than half
    assert forked(grown, backend, pattern) < 0.06 * 4 * 32768**2


def test_every_backend_is_covered() -> None:
    # these backends need a GPU: see tests/backends and gpu/tests
    assert set(BACKENDS) - {"reference", "triton", "flex", "flash", "flash_attn_4", "attn_gym"} <= {
        "dense_batched",
        "gather",
        "sdpa",
        "cpu",
        "torch_sparse",
    }
