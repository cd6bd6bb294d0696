"""Memory-mapped keys and values: attention reads them in place and never copies them whole."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import ringweave as rw

from .. import oracle
from ..parallel.processes import forked

TOKENS, HEADS, DIM = 2**17, 4, 64
MIB = 2**20


def held(name: str) -> int:
    lines = Path("/proc/self/status").read_text("ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def mapped(folder: str, backend: str, private: int) -> int:
    """Attend to mapped keys and values with limited private memory; return their bytes."""
    torch.set_num_threads(1)
    count = HEADS * TOKENS * DIM
    k, v = (
        torch.from_file(f"{folder}/{name}", shared=True, size=count, dtype=torch.bfloat16).view(1, HEADS, -1, DIM)
        for name in "kv"
    )
    q = torch.ones(1, HEADS, 64, DIM, dtype=torch.bfloat16)
    some = [x[:, :, :1024] for x in (k, v)]
    pattern = rw.KeyPadding(TOKENS, TOKENS // 2) | rw.Sinks(128)
    rw.attention(q, *some, rw.Full(), backend=backend)
    rw.memory.trim()
    resource.setrlimit(resource.RLIMIT_DATA, (held("VmData") + private, resource.RLIM_INFINITY))
    out = rw.attention(q, k, v, pattern, backend=backend)
    # all scores are 0; the values of the second half of the keys are 1
    assert abs(float(out.float().mean()) - TOKENS // 2 / (TOKENS // 2 + 128)) < 1e-2
    return k.nbytes + v.nbytes


@pytest.mark.skipif(sys.platform != "linux", reason="limits private memory")
# dense_batched also holds batches of scores, keys and values
@pytest.mark.parametrize(("backend", "private"), [("auto", 16 * MIB), ("dense_batched", 64 * MIB)])
def test_keys_and_values_stay_in_their_file(tmp_path: Path, backend: str, private: int) -> None:
    for name in "kv":
        data = np.memmap(tmp_path / name, np.uint16, "w+", shape=(HEADS, TOKENS, DIM))
        if name == "v":
            data[:, TOKENS // 2 :] = 0x3F80  # 1.0 in bfloat16
        data.flush()
    assert forked(mapped, str(tmp_path), backend, private) == 128 * MIB


@pytest.mark.parametrize("mode", ["r+", "c"])
def test_an_array_of_numpy_in_a_file(tmp_path: Path, mode: str) -> None:
    x = oracle.Inputs.random(200, dtype=torch.float16)
    maps = []
    for name in "kv":
        getattr(x, name).numpy().tofile(tmp_path / name)
        maps.append(torch.from_numpy(np.memmap(tmp_path / name, np.float16, mode, shape=tuple(x.k.shape))))
    out = rw.attention(x.q, *maps, rw.Causal())
    assert torch.equal(out, rw.attention(x.q, x.k, x.v, rw.Causal()))
