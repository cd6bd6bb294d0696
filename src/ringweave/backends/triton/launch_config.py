"""Launch configurations: the blocks that a kernel cuts tiles into, its warps and its pipeline stages.

A configuration is looked up by sizes in a table, unless ``ringweave tune`` measured a faster one on this machine. A
call never measures. A program holds one side of the tiles, with its sums in registers, and streams the other side
through shared memory. The table has the largest blocks that compile without spilling (lab/notes/kernel-resources.md);
their speed on a GPU is still unmeasured.
"""

from __future__ import annotations

import bisect
import dataclasses
import logging
from collections.abc import Callable, Container, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ...cache import process_cache
from ...call import Call
from .. import tuning
from ..tuning import KernelKey
from ..tuning_keys import where

_log = logging.getLogger("ringweave")


@dataclass(frozen=True)
class Device:
    """The properties of a device that configurations depend on.

    Attributes:
        generation: ``"ampere"`` (also for other devices with its instructions), ``"hopper"``, ``"blackwell"`` or
            ``"cdna"``.
        shared: Bytes of shared memory per thread block.
        units: Number of multiprocessors.
        name: Name of the device and versions, the key of measured configurations; empty to use only the table.
    """

    generation: str
    shared: int
    units: int = 132
    name: str = ""

    @staticmethod
    def of_cuda(major: int, shared: int, units: int = 132) -> Device:
        """Return the description of a CUDA device; consumer Blackwell (12) has ampere's instructions."""
        return Device({9: "hopper", 10: "blackwell", 11: "blackwell"}.get(major, "ampere"), shared, units)


@dataclass(frozen=True)
class LaunchConfig:
    """The block that one program computes at a time, and the number of programs.

    Attributes:
        m: Number of queries in a block.
        n: Number of keys in a block.
        warps: Number of warps of a program.
        stages: Number of pipeline stages.
        resident: Number of persistent programs per multiprocessor, which take items of the queue in turn. 0 launches
            one program per item, in the order of the queue.
        described: Whether tiles are loaded by tensor descriptors, if strides and masks permit it.
    """

    m: int
    n: int
    warps: int
    stages: int
    resident: int = 0
    described: bool = False


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


# the tables' columns: up to this many channels
_WIDTHS = (64, 128, 256, 512)
# (kernel, generation) to (held, streamed, warps, stages), for up to 64, 128 and 256 channels of 16 bits
_HALF: dict[tuple[str, str], tuple[tuple[int, int, int, int], ...]] = {
    ("forward", "ampere"): ((128, 128, 8, 2), (64, 64, 4, 2), (64, 32, 8, 2)),
    ("forward", "hopper"): ((128, 128, 8, 2), (128, 128, 8, 2), (64, 64, 8, 2)),
    ("forward", "blackwell"): ((128, 128, 8, 2), (128, 128, 8, 2), (64, 64, 8, 2)),
    ("forward", "cdna"): ((128, 64, 8, 1), (128, 64, 8, 1), (64, 32, 4, 1)),
    ("backward_q", "ampere"): ((128, 32, 8, 2), (128, 32, 8, 2), (64, 32, 8, 1)),
    ("backward_q", "hopper"): ((128, 64, 8, 2), (128, 64, 8, 2), (64, 32, 8, 2)),
    ("backward_q", "blackwell"): ((128, 64, 8, 2), (128, 64, 8, 2), (32, 32, 4, 1)),
    ("backward_q", "cdna"): ((128, 64, 8, 1), (128, 32, 8, 1), (32, 32, 4, 1)),
    ("backward_kv", "ampere"): ((128, 32, 8, 2), (64, 64, 8, 2), (32, 32, 8, 1)),
    ("backward_kv", "hopper"): ((128, 64, 8, 2), (128, 32, 8, 2), (64, 32, 8, 1)),
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
    """

    clear: bool = False
    terms: bool = False
    describable: bool = True


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
        "terms and dropout leave registers for 64 held keys of 128 channels",
        when={"terms": [True], "itemsize": [2], "kernel": ["backward_kv"], "channels": [128, 256, 512]},
        most={"held": 64},
    ),
    Rule(
        "products of 32 columns are bound by shared memory; without masks there are registers for 64 columns",
        when={
            "clear": [True], "kernel": ["backward_kv"], "generation": ["hopper"], "channels": [128], "itemsize": [2],
        },
        set={"streamed": 64},
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
        "4 warps suffice for fewer than 64 keys of up to 128 channels",
        when={"short": [True], "kernel": ["backward_kv"], "held": range(64), "channels": [64, 128]},
        most={"warps": 4},
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
def usual(
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
        "clear": traits.clear, "terms": traits.terms,
    }  # fmt: skip
    blocks = _fold(_RULES, blocks, facts)
    held, streamed = tile[::-1] if kernel == "backward_kv" else tile
    facts["short"] = held < blocks.held
    blocks = blocks._replace(held=min(held, blocks.held), streamed=min(streamed, blocks.streamed))
    blocks = _fit_shared_memory(_fold(_FITTED, blocks, facts), kernel, dim, value_dim, itemsize, device)
    m, n = blocks[1::-1] if kernel == "backward_kv" else blocks[:2]
    return LaunchConfig(m, n, blocks.warps, blocks.stages, described=bool(facts["described"]))


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
    # one eighth is reserved for row sums, mask words and layout conversions
    return device.shared * 7 // 8


def misfit(
    config: LaunchConfig, kernel: str, dim: int, value_dim: int, itemsize: int, tile: tuple[int, int], device: Device
) -> str | None:
    """Return why a configuration does not suit a kernel, tiles or a device; None if it does."""
    for name, block, side in (("m", config.m, tile[0]), ("n", config.n, tile[1])):
        if block < 16 or block & (block - 1) or block > side:
            return f"{name} is {block}, which is not a power of two from 16 to the tile's {side}"
    for name, value, known in (
        ("warps", config.warps, (1, 2, 4, 8, 16)), ("stages", config.stages, range(1, 9)),
        ("resident", config.resident, range(33)),
    ):  # fmt: skip
        if value not in known:
            return f"{name} is {value}, which is not one of {', '.join(map(str, known))}"
    if config.described and (itemsize != 2 or device.generation not in ("hopper", "blackwell")):
        return "descriptors need a 16-bit type, on Hopper or Blackwell"
    held, streamed = (config.n, config.m) if kernel == "backward_kv" else (config.m, config.n)
    needed, usable = _shared(kernel, held, streamed, config.stages, dim, value_dim, itemsize, device), _usable(device)
    if needed > usable:
        return f"tiles need {needed} bytes of shared memory, and {usable} of {device.shared} are available"
    return None


class Request(NamedTuple):
    """A kernel's request for a configuration.

    Attributes:
        key: Kernel and tiles.
        itemsize: Bytes of an element.
        device: Device that the kernel is launched for.
        usual: The table's configuration.
    """

    key: KernelKey
    itemsize: int
    device: Device
    usual: LaunchConfig


#: Answers requests in place of the stored configurations, in this context; None from it means the table's. Tuning sets
#: it to measure other configurations.
chooser: ContextVar[Callable[[Request], LaunchConfig | None] | None] = ContextVar("chooser", default=None)


def launch_config_for(
    kernel: str,
    dim: int,
    value_dim: int,
    itemsize: int,
    tile: tuple[int, int],
    device: Device,
    about: tuple[torch.dtype, bool] | None = None,
    traits: Traits = _USUAL,
) -> LaunchConfig:
    """Return a kernel's configuration: measured on this machine by ``ringweave tune``, else the table's.

    Args:
        kernel: ``forward``, ``backward_q`` or ``backward_kv``.
        dim: D.
        value_dim: Dv.
        itemsize: Bytes of an element.
        tile: Size (queries, keys) of the tiles that are cut into blocks.
        device: Device that the kernel runs on.
        about: The inputs' dtype and whether some tiles are partial, which are part of the key of measured
            configurations. None to use only the table.
        traits: Other properties of the launch. Measured configurations apply only without terms.
    """
    said = usual(kernel, dim, value_dim, itemsize, tile, device, traits)
    answer = chooser.get()
    stored = tuning.configs() if answer is None and device.name else {}
    if about is None or traits.terms or (answer is None and not stored):
        return said
    name = str(about[0]).removeprefix("torch.")
    key = KernelKey(kernel, device.name, name, (padded(dim), padded(value_dim)), tile, about[1])
    if answer is not None:
        config = answer(Request(key, itemsize, device, said))
    else:
        fields = stored.get(key)
        config = None if fields is None else _of(fields, key, itemsize, device)
    return config or said


def measured(call: Call) -> list[str]:
    """Return readable descriptions of the configurations stored for a call's device, dtype and head dimensions."""
    dtype, dims = str(call.dtype).removeprefix("torch."), (padded(call.head_dim), padded(call.value_dim))
    here = where(call.device)
    said = []
    for key, fields in tuning.configs().items():
        if (key.where, key.dtype, key.dims) == (here, dtype, dims):
            tiles = f"{'partial' if key.masked else 'full'} tiles of {key.tile[0]} x {key.tile[1]}"
            said.append(f"{key.kernel} on {tiles}: {', '.join(f'{name} {value}' for name, value in fields)}")
    return said


@process_cache
def _of(fields: tuning.Fields, key: KernelKey, itemsize: int, device: Device) -> LaunchConfig | None:
    """Return a stored configuration; None, with one warning in the log, if it does not suit this device."""
    known = {each.name: each.type for each in dataclasses.fields(LaunchConfig)}
    if {name for name, _ in fields} != set(known):
        reason: str | None = f"their fields are not {', '.join(known)}"
    else:
        typed: dict[str, Any] = {name: bool(value) if known[name] == "bool" else int(value) for name, value in fields}
        config = LaunchConfig(**typed)
        reason = misfit(config, key.kernel, *key.dims, itemsize, key.tile, device)
        if reason is None:
            return config
    _log.warning("measured blocks of %s for tiles of %d x %d are ignored: %s", key.kernel, *key.tile, reason)
    return None
