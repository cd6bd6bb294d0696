"""The kernel skips the empty parts of partial tiles: results keep their bits, and small tiles save little time."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import ringweave as rw
from ringweave.backends import cpu
from ringweave.call import Operands
from ringweave.environment import CPU_VARIANT
from ringweave.plan import Branch
from ringweave_lab.bench.cases.tile_sizes import documents
from ringweave_lab.tune.measure import by_processor, interleaved

from .plans import DTYPES, VARIANTS

PATTERNS = {
    "window 3": rw.SlidingWindow(3) & rw.Causal(),
    "window 64": rw.SlidingWindow(64) & rw.Causal(),
    "around": rw.SlidingWindow(21, 70),
    "documents": documents(30, 700) & rw.Causal(),
    "holes": (rw.Sinks([0, 77, 130]) | rw.SlidingWindow(9)) & rw.Causal(),
    "gaps": rw.SlidingWindow(250) & ~rw.SlidingWindow(180) & rw.Causal(),
}


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", list(PATTERNS))
def test_skipped_parts_of_tiles_change_no_bit(
    name: str, variant: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tile sizes change the rows of a tile, and the keys and halves of panels that are skipped, but no bit of a result."""
    monkeypatch.setenv(CPU_VARIANT, variant)
    q, k, v = (torch.randn(2, heads, 700, 24).to(DTYPES[dtype]) for heads in (4, 2, 2))
    branch = Branch.whole(PATTERNS[name], 700, 700, heads=4, batch=2)
    ways = [
        dataclasses.replace(branch, tile_size=size) for size in ((128, 128), (16, 128), (128, 64), (48, 256), (32, 64))
    ]
    first, *others = (cpu.forward(Operands(q, k, v, 0.2), way, q.dtype) for way in ways)
    for other in others:
        assert all(map(torch.equal, first, other))


@pytest.mark.measures
@pytest.mark.parametrize("name", ["window 64", "documents of 32", "causal"])
def test_small_tiles_save_little_time(name: str) -> None:
    """Narrow windows take little longer with tiles of 128 than of 32; when whole tiles were computed, they took 2 to 2.5 times as long."""
    n = 2048
    pattern = {
        "window 64": rw.SlidingWindow(64) & rw.Causal(),
        "documents of 32": documents(32, n) & rw.Causal(),
        "causal": rw.Causal(),
    }[name]
    inputs = Operands(*(torch.randn(1, 2, n, 64) for _ in range(3)), 0.125)
    branch = Branch.whole(pattern, n, n, heads=2)
    calls = {}
    for side in (128, 32):
        way = dataclasses.replace(branch, tile_size=(side, side))
        calls[str(side)] = lambda way=way: cpu.forward(inputs, way, torch.float32)
    timings = interleaved(calls, rounds=9, timer=by_processor)
    assert timings["128"].min < 1.5 * timings["32"].min
