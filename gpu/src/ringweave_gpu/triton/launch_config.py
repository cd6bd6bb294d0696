"""Launch configurations: the blocks that a kernel cuts tiles into, its warps and its pipeline stages.

A configuration is looked up by sizes in a table. A program holds one side of the tiles, with its sums in registers,
and streams the other side through shared memory. For 64 and 128 channels on Hopper the table has the blocks that were
fastest on an H200 (gpu/notes/configurations.md), otherwise the largest that compile without spilling
(gpu/notes/kernel-resources.md).
"""

from __future__ import annotations

import bisect
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ringweave.cache import process_cache


@dataclass(frozen=True)
class Device:
    """The properties of a device that configurations depend on.

    Attributes:
        generation: ``"ampere"`` (also for other devices with its instructions), ``"hopper"``, ``"blackwell"`` or
            ``"cdna"``.
        shared: Bytes of shared memory per thread block.
        units: Number of multiprocessors.
    """

    generation: str
    shared: int
    units: int = 132

    @staticmethod
    def of_cuda(major: int, shared: int, units: int = 132) -> Device:
        """Return the description of a CUDA device; consumer Blackwell (12) has ampere's instructions."""
        return Device({9: "hopper", 10: "blackwell", 11: "blackwell"}.get(major, "ampere"), shared, units)


@dataclass(frozen=True)
class LaunchConfig:
    """The block that one program computes at a time.

    Attributes:
        m: Number of queries in a block.
        n: Number of keys in a block.
        warps: Number of warps of a program.
        stages: Number of pipeline stages.
        described: Whether tiles are loaded by tensor descriptors, if strides and masks permit it.
        registers: Upper bound of a thread's registers; 0 for the compiler's own choice.
    """

    m: int
    n: int
    warps: int
    stages: int
    described: bool = False
    registers: int = 0


@dataclass(frozen=True)
class Packing:
    """The rows of a program: ``rows`` rows of each of ``heads`` query heads; ``parts`` programs compute a task."""

    heads: int
    rows: int
    parts: int

    @staticmethod
    def of(held: int, height: int, members: int) -> Packing:
        """Return the packing of ``held`` rows for tiles of ``height``; up to ``members`` heads share keys and lists."""
        heads = min(members, max(1, held // height))
        rows = held // heads
        return Packing(heads, rows, max(1, height // rows))


class Blocks(NamedTuple):
    """A configuration before its sides are named: a kernel by rows holds queries, a kernel by columns holds keys."""

    held: int
    streamed: int
    warps: int
    stages: int
    registers: int = 0


# the tables' columns: up to this many channels
_WIDTHS = (64, 128, 256, 512)
# (kernel, generation) to (held, streamed, warps, stages), for up to 64, 128 and 256 channels of 16 bits
_HALF: dict[tuple[str, str], tuple[tuple[int, int, int, int], ...]] = {
    ("forward", "ampere"): ((128, 128, 8, 2), (64, 64, 4, 2), (64, 32, 8, 2)),
    ("forward", "hopper"): ((128, 128, 8, 2), (128, 128, 8, 2), (64, 64, 8, 2)),
    ("forward", "blackwell"): ((128, 128, 8, 2), (128, 128, 8, 2), (64, 64, 8, 2)),
    ("forward", "cdna"): ((128, 64, 8, 1), (128, 64, 8, 1), (64, 32, 4, 1)),
    ("backward_q", "ampere"): ((128, 32, 8, 2), (128, 32, 8, 2), (64, 32, 8, 1)),
    ("backward_q", "hopper"): ((128, 64, 8, 3), (128, 64, 8, 3), (64, 32, 8, 2)),
    ("backward_q", "blackwell"): ((128, 64, 8, 2), (128, 64, 8, 2), (32, 32, 4, 1)),
    ("backward_q", "cdna"): ((128, 64, 8, 1), (128, 32, 8, 1), (32, 32, 4, 1)),
    ("backward_kv", "ampere"): ((128, 32, 8, 2), (64, 64, 8, 2), (32, 32, 8, 1)),
    ("backward_kv", "hopper"): ((64, 128, 4, 2), (64, 64, 4, 2), (64, 32, 8, 1)),
    ("backward_kv", "blackwell"): ((128, 64, 8, 2), (64, 32, 8, 2), (32, 32, 8, 1)),
    ("backward_kv", "cdna"): ((128, 32, 8, 1), (64, 32, 4, 1), (32, 32, 4, 1)),
}
# one table for all devices, since float32 is multiplied without matrix instructions
_SINGLE: dict[str, tuple[tuple[int, int, int, int], ...]] = {
    "forward": ((64, 32, 8, 1), (32, 32, 8, 1), (32, 32, 8, 1)),
    "backward_q": ((64, 32, 8, 1), (32, 32, 8, 1), (16, 16, 4, 1)),
    "backward_kv": ((32, 32, 8, 1), (32, 32, 8, 1), (16, 16, 8, 1)),
}
# for up to 512 channels, by bytes of an element; one table for all devices
_WIDEST: dict[int, dict[str, tuple[int, int, int, int]]] = {
    2: {"forward": (64, 32, 8, 1), "backward_q": (16, 32, 4, 1), "backward_kv": (32, 16, 8, 1)},
    4: {"forward": (16, 16, 4, 1), "backward_q": (16, 16, 8, 1), "backward_kv": (16, 16, 8, 1)},
}


def padded(dim: int) -> int:
    """Return the smallest power of two that is at least 16 and at least the head dimension."""
    return max(16, 1 << (dim - 1).bit_length())


class Traits(NamedTuple):
    """Properties of a launch other than sizes.

    Attributes:
        clear: Whether descriptors can load all tiles, and no tile is masked or incomplete.
        terms: Whether the call has terms or dropout.
        describable: Whether descriptors can load the streamed tensors.
        long: Whether a program's list has many tiles on average, and some with masks.
    """

    clear: bool = False
    terms: bool = False
    describable: bool = True
    long: bool = False


_USUAL = Traits()


class Rule(NamedTuple):
    """Changes to the blocks of some launches.

    Attributes:
        why: The reason, which tests print.
        when: The values for which the rule applies, of facts about the launch and of the current blocks.
        set: New values of blocks.
        most: Upper bounds of blocks.
    """

    why: str
    when: Mapping[str, Container[object]]
    set: Mapping[str, int] = {}
    most: Mapping[str, int] = {}


# rules about the inputs, in order; they precede the fit to the tile's sides
_RULES = (
    Rule(
        "without descriptors, addresses occupy the registers that the branch past the masks needs with 128 keys",
        when={
            "kernel": ["forward"], "generation": ["hopper"], "channels": [128], "itemsize": [2], "described": [False],
        },
        most={"streamed": 64},
    ),
    Rule(
        "terms and dropout need registers for each pair",
        when={"terms": [True], "itemsize": [2], "kernel": ["forward"]},
        most={"streamed": 32},
    ),
    Rule(
        "terms and dropout need registers for each pair, and for its gradient",
        when={"terms": [True], "itemsize": [2], "kernel": ["backward_q", "backward_kv"]},
        most={"streamed": 16},
    ),
    Rule(
        "terms and dropout leave registers for 64 held queries",
        when={"terms": [True], "itemsize": [2], "kernel": ["backward_q"]},
        most={"held": 64},
    ),
    Rule(
        "4 warps suffice for 64 queries of 64 channels",
        when={"terms": [True], "itemsize": [2], "kernel": ["backward_q"], "channels": [64]},
        most={"warps": 4},
    ),
    Rule(
        "without descriptors, addresses occupy the registers of 4 warps: 8 warps hold twice as many keys",
        when={
            "kernel": ["backward_kv"], "generation": ["hopper"], "channels": [128], "itemsize": [2],
            "described": [False], "terms": [False],
        },
        set={"held": 128, "warps": 8},
    ),
    Rule(
        "terms and dropout need the registers of 8 warps",
        when={
            "terms": [True], "itemsize": [2], "kernel": ["backward_kv"], "generation": ["hopper"],
            "channels": [64, 128],
        },
        set={"warps": 8},
    ),
    Rule(
        "terms and dropout of 64 channels leave registers for 128 held keys",
        when={"terms": [True], "itemsize": [2], "kernel": ["backward_kv"], "generation": ["hopper"], "channels": [64]},
        set={"held": 128},
    ),
    Rule(
        "with one stage the compiler emits products of half the columns, and spills",
        when={
            "clear": [True], "kernel": ["backward_kv"], "generation": ["hopper"], "channels": [256], "itemsize": [2],
        },
        set={"stages": 2},
    ),
)  # fmt: skip
# rules about the blocks that fit the tile's sides; `short` says that the tile is shorter than the block was
_FITTED = (
    Rule(
        "4 warps suffice for fewer queries",
        when={"short": [True], "kernel": ["forward", "backward_q"]},
        most={"warps": 4},
    ),
    Rule(
        "with two stages there is room for two programs of 64 queries per multiprocessor",
        when={
            "short": [True], "kernel": ["backward_q"], "generation": ["hopper"], "channels": [128], "itemsize": [2],
        },
        most={"stages": 2},
    ),
    Rule(
        "4 warps suffice for fewer than 64 keys of up to 128 channels",
        when={"short": [True], "kernel": ["backward_kv"], "held": range(64), "channels": [64, 128]},
        most={"warps": 4},
    ),
    Rule(
        "4 warps with a few spilled registers are faster than 8 with half the work",
        when={
            "short": [True], "kernel": ["backward_kv"], "generation": ["hopper"], "held": [64], "channels": [128],
            "itemsize": [2], "terms": [False],
        },
        set={"warps": 4},
    ),
    Rule(
        "a few queries are bound by memory latency: more and smaller loads in flight, each with fewer registers",
        when={
            "short": [True], "kernel": ["forward"], "held": range(64), "itemsize": [2],
            "generation": ["ampere", "hopper", "blackwell"],
        },
        set={"stages": 3}, most={"streamed": 64},
    ),
    Rule(
        "of a few queries six stages keep enough of Hopper's memory busy",
        when={
            "short": [True], "kernel": ["forward"], "held": range(64), "itemsize": [2], "generation": ["hopper"],
        },
        set={"stages": 6},
    ),
    Rule(
        "in a short list two programs per multiprocessor hide the begin and the end of each other",
        when={
            "kernel": ["forward"], "generation": ["hopper"], "channels": [64, 128], "itemsize": [2], "held": [128],
            "described": [True], "terms": [False], "long": [False],
        },
        set={"registers": 128}, most={"streamed": 64},
    ),
    Rule(
        "a long list repays a third stage, which of 128 channels leaves room for one program per multiprocessor",
        when={
            "kernel": ["forward"], "generation": ["hopper"], "channels": [64, 128], "itemsize": [2], "held": [128],
            "described": [True], "terms": [False], "long": [True],
        },
        set={"stages": 3},
    ),
    Rule(
        "two programs of 64 channels per multiprocessor are faster than one, in a long list too",
        when={
            "kernel": ["forward"], "generation": ["hopper"], "channels": [64], "itemsize": [2], "held": [128],
            "described": [True], "terms": [False], "long": [True],
        },
        set={"registers": 128},
    ),
    Rule(
        "with 8 warps the compiler targets two programs per multiprocessor with half the registers each, and spills",
        when={"kernel": ["forward"], "generation": ["blackwell"], "channels": [64], "streamed": range(65)},
        set={"warps": 4},
    ),
)  # fmt: skip


def _fold(rules: Iterable[Rule], blocks: Blocks, facts: Mapping[str, object]) -> Blocks:
    """Apply the rules that hold for the facts and the current blocks, in order."""
    for rule in rules:
        known = {**facts, **blocks._asdict()}
        if all(known[name] in values for name, values in rule.when.items()):
            blocks = blocks._replace(**rule.set)
            blocks = blocks._replace(**{name: min(most, getattr(blocks, name)) for name, most in rule.most.items()})
    return blocks


@process_cache
def launch_config_for(
    kernel: str,
    dim: int,
    value_dim: int,
    itemsize: int,
    tile: tuple[int, int],
    device: Device,
    traits: Traits = _USUAL,
) -> LaunchConfig:
    """Return the table's configuration of ``forward``, ``backward_q`` or ``backward_kv`` for (queries, keys) tiles."""
    width = bisect.bisect_left(_WIDTHS[:-1], max(padded(dim), padded(value_dim)))
    narrow = _SINGLE[kernel] if itemsize == 4 else _HALF[kernel, device.generation]
    blocks = Blocks(*(*narrow, _WIDEST[itemsize][kernel])[width])
    facts = {
        "kernel": kernel, "generation": device.generation, "channels": _WIDTHS[width], "itemsize": itemsize,
        "described": traits.describable and itemsize == 2 and device.generation in ("hopper", "blackwell"),
        "clear": traits.clear, "terms": traits.terms, "long": traits.long,
    }  # fmt: skip
    blocks = _fold(_RULES, blocks, facts)
    held, streamed = tile[::-1] if kernel == "backward_kv" else tile
    facts["short"] = held < blocks.held
    blocks = blocks._replace(held=min(held, blocks.held), streamed=min(streamed, blocks.streamed))
    blocks = _fit_shared_memory(_fold(_FITTED, blocks, facts), kernel, dim, value_dim, itemsize, device)
    m, n = blocks[1::-1] if kernel == "backward_kv" else blocks[:2]
    return LaunchConfig(m, n, blocks.warps, blocks.stages, bool(facts["described"]), blocks.registers)


def _fit_shared_memory(blocks: Blocks, kernel: str, dim: int, value_dim: int, itemsize: int, device: Device) -> Blocks:
    """Reduce stages, then streamed rows, then held rows, until the tiles fit into shared memory."""
    while _shared(kernel, *blocks[:2], blocks.stages, dim, value_dim, itemsize, device) > _usable(device):
        if blocks.stages > 1:
            blocks = blocks._replace(stages=blocks.stages - 1)
        elif blocks.streamed > 16:
            blocks = blocks._replace(streamed=blocks.streamed // 2)
        elif blocks.held > 16:
            blocks = blocks._replace(held=blocks.held // 2)
        else:
            break
    return blocks


def goes_past_masks(
    kernel: str, config: LaunchConfig, channels: int, device: Device, described: bool, shared: bool = False
) -> bool:
    """Return whether a kernel's loop branches past the masks of full tiles.

    Nearly all tiles are full, so the branch pays wherever it does not make the compiler spill registers.

    Args:
        kernel: ``forward``, ``backward_q`` or ``backward_kv``.
        config: Configuration of the kernel.
        channels: The larger of D and Dv, padded.
        device: Device that the kernel is compiled for.
        described: Whether descriptors load the streamed tensors.
        shared: Whether the loop over a column covers several heads.
    """
    if channels > 256:
        return False
    if kernel == "forward":
        return config.m >= 64 and (described or config.m * config.n * channels <= 2**20)
    if device.generation == "cdna":
        return kernel == "backward_kv" or channels <= 64
    return not (shared and described and device.generation == "blackwell")


def _shared(
    kernel: str, held: int, streamed: int, stages: int, dim: int, value_dim: int, itemsize: int, device: Device
) -> int:
    """Return the bytes of shared memory that a program's tiles need."""
    both = (padded(dim) + padded(value_dim)) * itemsize
    # on cdna the held tiles are in registers
    of_held = 0 if device.generation == "cdna" else padded(dim) * itemsize if kernel == "forward" else both
    return held * of_held + stages * streamed * both


def _usable(device: Device) -> int:
    # the rest is for row sums, mask words and layout conversions; Hopper's products read shared memory as it was loaded
    return device.shared - 2048 if device.generation == "hopper" else device.shared * 7 // 8
