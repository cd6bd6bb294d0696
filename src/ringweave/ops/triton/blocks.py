"""How a kernel cuts a plan's tiles into blocks, and with how many warps and stages: from sizes alone, nothing is timed."""

from __future__ import annotations

from dataclasses import dataclass

#: Shared memory of a block of threads, in bytes, where the device does not say.
SHARED = {"cuda": 99 * 1024, "hip": 64 * 1024}


@dataclass(frozen=True)
class Blocks:
    """What one program computes at a time: ``m`` queries, ``n`` keys."""

    m: int
    n: int
    warps: int
    stages: int


def padded(dim: int) -> int:
    """The power of two, at least 16, that holds a head dimension."""
    return max(16, 1 << (dim - 1).bit_length())


def choose(kernel: str, dim: int, value_dim: int, itemsize: int, tile: tuple[int, int], shared: int, hip: bool) -> Blocks:
    """The blocks of ``forward``, ``backward_q`` or ``backward_kv`` for tiles and shared memory of some size.

    A program holds one side and streams the other. Its sums stay in registers, so the held side shrinks as channels
    and bytes grow; what it streams, twice where that fits, must fit in shared memory beside what it holds.
    """
    channels = padded(dim) + padded(value_dim)
    wide = channels * itemsize
    held = 128 if wide <= 512 else 64 if wide <= 1024 else 32
    if kernel == "backward_kv" and wide > 256:
        held = min(held, 64)
    sides = (tile[1], tile[0]) if kernel == "backward_kv" else tile
    held = min(held, sides[0])
    rows = channels if kernel != "forward" else padded(dim)
    stages = 1 if hip else 2
    streamed = min(64 if itemsize == 2 else 32, sides[1])
    if kernel == "forward" and itemsize == 2 and held == 128 and shared >= 160 * 1024:
        streamed = min(128, sides[1])
    while stages > 1 and (held * rows + stages * streamed * channels) * itemsize > shared * 9 // 10:
        stages -= 1
    while streamed > 32 and (held * rows + streamed * channels) * itemsize > shared * 9 // 10:
        streamed //= 2
    warps = 8 if held == 128 and channels >= 128 else 4
    if held * streamed <= 32 * 32:
        warps = min(warps, 2)
    m, n = (streamed, held) if kernel == "backward_kv" else (held, streamed)
    return Blocks(m, n, warps, stages)
