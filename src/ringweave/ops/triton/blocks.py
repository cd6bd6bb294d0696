"""How a kernel cuts a plan's tiles into blocks, and with how many warps and stages: looked up by sizes, never timed.

A program holds one side of the tiles, with its sums in registers, and streams the other through shared memory. The
figures are the largest blocks that compile without spilling (docs/benchmarks/kernel-resources.md): on a GPU they are
still unmeasured.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """What matters of a device.

    Attributes:
        generation: ampere (and all with its instructions), hopper, blackwell or cdna.
        shared: Shared memory of one block of threads, in bytes.
        units: Multiprocessors.
    """

    generation: str
    shared: int
    units: int = 132

    @staticmethod
    def of_cuda(major: int, shared: int, units: int = 132) -> Device:
        """By compute capability; consumer Blackwell (12) has the instructions of ampere."""
        return Device({9: "hopper", 10: "blackwell", 11: "blackwell"}.get(major, "ampere"), shared, units)


@dataclass(frozen=True)
class Blocks:
    """What one program computes at a time, and how many programs there are.

    Attributes:
        m: Queries.
        n: Keys.
        warps: Warps.
        stages: Stages of the pipeline.
        resident: Programs per multiprocessor, that take the queue in turn; 0: one program for each item of the queue,
            which the hardware hands out in order.
        described: Whether tiles are loaded by tensor descriptors, where strides and masks permit.
        specialised: Whether warps of their own load them; forward, where they are described and nothing is masked.
    """

    m: int
    n: int
    warps: int
    stages: int
    resident: int = 0
    described: bool = False
    specialised: bool = False


@dataclass(frozen=True)
class Packing:
    """The rows of a program: of ``heads`` query heads, ``rows`` each; ``parts`` programs make a task."""

    heads: int
    rows: int
    parts: int

    @staticmethod
    def of(held: int, height: int, members: int) -> Packing:
        """Of ``held`` rows, where a tile has ``height`` and up to ``members`` heads share keys and lists."""
        heads = min(members, max(1, held // height))
        rows = held // heads
        return Packing(heads, rows, max(1, height // rows))


# (kernel, generation) to (held, streamed, warps, stages) for up to 64, 128 and 256 channels of 16 bits
_HALF: dict[tuple[str, str], tuple[tuple[int, int, int, int], ...]] = {
    ("forward", "ampere"): ((128, 128, 8, 2), (64, 64, 4, 2), (64, 32, 8, 2)),
    ("forward", "hopper"): ((128, 128, 8, 2), (128, 128, 8, 2), (64, 64, 8, 2)),
    ("forward", "blackwell"): ((128, 128, 8, 2), (128, 128, 8, 2), (64, 64, 8, 2)),
    ("forward", "cdna"): ((128, 64, 8, 1), (128, 64, 8, 1), (64, 32, 4, 1)),
    ("backward_q", "ampere"): ((128, 32, 8, 2), (128, 32, 8, 2), (64, 32, 8, 1)),
    ("backward_q", "hopper"): ((128, 64, 8, 2), (128, 64, 8, 2), (32, 32, 4, 1)),
    ("backward_q", "blackwell"): ((128, 64, 8, 2), (128, 64, 8, 2), (32, 32, 4, 1)),
    ("backward_q", "cdna"): ((128, 64, 8, 1), (128, 32, 8, 1), (32, 32, 4, 1)),
    ("backward_kv", "ampere"): ((128, 32, 8, 2), (64, 64, 8, 2), (32, 32, 8, 1)),
    ("backward_kv", "hopper"): ((128, 32, 8, 2), (128, 32, 8, 2), (32, 32, 8, 1)),
    ("backward_kv", "blackwell"): ((128, 64, 8, 2), (64, 32, 8, 2), (32, 32, 8, 1)),
    ("backward_kv", "cdna"): ((128, 32, 8, 1), (64, 32, 4, 1), (32, 32, 4, 1)),
}
# float32 is multiplied without matrix instructions, on all devices alike
_SINGLE: dict[str, tuple[tuple[int, int, int, int], ...]] = {
    "forward": ((64, 32, 8, 1), (32, 32, 8, 1), (32, 32, 8, 1)),
    "backward_q": ((64, 32, 8, 1), (32, 32, 8, 1), (16, 16, 4, 1)),
    "backward_kv": ((32, 32, 8, 1), (32, 32, 8, 1), (16, 16, 8, 1)),
}


def padded(dim: int) -> int:
    """The power of two, at least 16, that holds a head dimension."""
    return max(16, 1 << (dim - 1).bit_length())


def choose(kernel: str, dim: int, value_dim: int, itemsize: int, tile: tuple[int, int], device: Device) -> Blocks:
    """The blocks of ``forward``, ``backward_q`` or ``backward_kv`` for tiles of (queries, keys)."""
    channels = max(padded(dim), padded(value_dim))
    table = _SINGLE[kernel] if itemsize == 4 else _HALF[kernel, device.generation]
    held, streamed, warps, stages = table[0 if channels <= 64 else 1 if channels == 128 else 2]
    of_columns = kernel == "backward_kv"
    sides = (tile[1], tile[0]) if of_columns else tile
    if sides[0] < held:
        held, warps = sides[0], min(warps, 8 if of_columns and sides[0] == 64 else 4)
        if kernel == "forward" and held < 64 and itemsize == 2 and device.generation != "cdna":
            # a few queries wait for memory: more loads under way, each of fewer registers
            streamed, stages = min(streamed, 64), 3
    streamed = min(streamed, sides[1])
    if kernel == "forward" and device.generation == "blackwell" and channels <= 64 and streamed <= 64:
        # of 8 warps the compiler makes two programs per multiprocessor, of half the registers each, and spills
        warps = 4
    both = (padded(dim) + padded(value_dim)) * itemsize
    # cdna keeps what a program holds in registers
    of_held = 0 if device.generation == "cdna" else padded(dim) * itemsize if kernel == "forward" else both
    # an eighth is left for row sums, mask words and conversions of layout
    while held * of_held + stages * streamed * both > device.shared * 7 // 8:
        if stages > 1:
            stages -= 1
        elif streamed > 16:
            streamed //= 2
        elif held > 16:
            held //= 2
        else:
            break
    m, n = (streamed, held) if of_columns else (held, streamed)
    described = itemsize == 2 and device.generation in ("hopper", "blackwell")
    # the one kernel that has a register too few for descriptors
    tight = of_columns and device.generation == "hopper" and held * channels > 64 * 128
    return Blocks(m, n, warps, stages, described=described and not tight)
