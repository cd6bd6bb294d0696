"""Launch configurations: the blocks that a kernel cuts tiles into, its warps and its pipeline stages.

A configuration is looked up by sizes in a table, unless ``ringweave tune`` measured a faster one on this machine. A
call never measures. A program holds one side of the tiles, with its sums in registers, and streams the other side
through shared memory. The table has the largest blocks that compile without spilling (lab/notes/kernel-resources.md);
their speed on a GPU is still unmeasured.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ...cache import process_cache
from ...call import Call
from .. import tuning
from ..tuning import KernelKey, where

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
    clear, terms, describable = traits
    channels = max(padded(dim), padded(value_dim))
    table = _SINGLE[kernel] if itemsize == 4 else _HALF[kernel, device.generation]
    held, streamed, warps, stages = (
        _WIDEST[itemsize][kernel] if channels > 256 else table[0 if channels <= 64 else 1 if channels == 128 else 2]
    )
    of_columns = kernel == "backward_kv"
    described = describable and itemsize == 2 and device.generation in ("hopper", "blackwell")
    if kernel == "forward" and device.generation == "hopper" and not described and channels == 128 and itemsize == 2:
        # without descriptors, addresses occupy the registers that the branch past the masks needs with 128 keys
        streamed = 64
    if terms and itemsize == 2:
        # terms and dropout need registers for each pair
        streamed = min(streamed, 32 if kernel == "forward" else 16)
        if held > 64 and (kernel == "backward_q" or (kernel == "backward_kv" and channels >= 128)):
            held, warps = 64, 8 if channels >= 128 else 4
    sides = (tile[1], tile[0]) if of_columns else tile
    if sides[0] < held:
        held, warps = sides[0], min(warps, 8 if of_columns and (sides[0] == 64 or channels > 128) else 4)
        if kernel == "forward" and held < 64 and itemsize == 2 and device.generation != "cdna":
            # a few queries are bound by memory latency: more and smaller loads in flight, each with fewer registers
            streamed, stages = min(streamed, 64), 3
    # on hopper, products of 32 columns are bound by shared memory; without masks there are registers for 64 columns
    spacious = clear and of_columns and device.generation == "hopper" and channels == 128 and itemsize == 2
    streamed = min(64 if spacious else streamed, sides[1])
    if clear and of_columns and device.generation == "hopper" and 128 < channels <= 256 and itemsize == 2:
        # with one stage the compiler emits products of half the columns, and spills
        stages = 2
    if kernel == "forward" and device.generation == "blackwell" and channels <= 64 and streamed <= 64:
        # with 8 warps the compiler targets two programs per multiprocessor with half the registers each, and spills
        warps = 4
    while _shared(kernel, held, streamed, stages, dim, value_dim, itemsize, device) > _usable(device):
        if stages > 1:
            stages -= 1
        elif streamed > 16:
            streamed //= 2
        elif held > 16:
            held //= 2
        else:
            break
    m, n = (streamed, held) if of_columns else (held, streamed)
    return LaunchConfig(m, n, warps, stages, described=described)


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
