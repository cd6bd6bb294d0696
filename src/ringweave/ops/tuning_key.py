"""What calls are alike, and have one key: those for which one measurement of ``ringweave tune`` stands.

The key names the device, the versions of ringweave, torch and triton, the type, the head dimensions, the lengths and
the density by powers of two, how the pattern is structured, and the direction.
"""

from __future__ import annotations

import functools
import importlib.metadata
import math
import platform
import sys
from pathlib import Path
from typing import NamedTuple, TypeGuard

import torch

from ..patterns import BlockTable, Full, Pattern
from ..patterns.algebra import leaves, replace
from ..patterns.function import holders
from ..plan import Branch
from ..plan.from_pattern import default_tile, estimate_tiles
from ..recent import Recent
from .backend import Case


class KernelKey(NamedTuple):
    """A GPU kernel on one kind of tiles.

    Attributes:
        kernel: Its name.
        where: Device and versions, as :func:`where` says them.
        dtype: Of the inputs, such as ``"bfloat16"``.
        dims: D and Dv, padded.
        tile: Queries and keys of what is cut into blocks.
        masked: Whether some tiles are partial.
    """

    kernel: str
    where: str
    dtype: str
    dims: tuple[int, int]
    tile: tuple[int, int]
    masked: bool


def call_key(case: Case, branch: Branch) -> str | None:
    """Spell the key of a call, but for its density; None where its device is not here."""
    here = where(case.device)
    if here is None:
        return None
    grid = branch.pattern.block_side() if branch.structure == "sparse" else None
    structure = branch.structure if grid is None else f"{branch.structure} on a grid of {grid}"
    dtype = str(case.dtype).removeprefix("torch.")
    lengths = f"2^{branch.nq.bit_length() - 1} x 2^{branch.nk.bit_length() - 1} tokens"
    direction = "backward" if case.needs_grad else "forward"
    return f"{here}; {dtype}; D {case.head_dim}, Dv {case.value_dim}; {lengths}; {structure}; {direction}"


def where(device: str) -> str | None:
    """Name a device and the versions; None where it is not here."""
    if device == "cpu":
        return _named(f"{processor()}, {torch.get_num_threads()} threads")
    if device.startswith("cuda") and torch.cuda.is_available():
        return _named(torch.cuda.get_device_name(device))
    return None


@functools.cache
def _named(device: str) -> str:
    try:
        triton = f"triton {importlib.metadata.version('triton')}"
    except importlib.metadata.PackageNotFoundError:
        triton = "no triton"
    # the package imports this on its way to its own version
    own = sys.modules[__package__.partition(".")[0]].__version__
    return f"{device}; ringweave {own}; torch {torch.__version__}; {triton}"


@functools.cache
def processor() -> str:
    """Name the processor's model; its numbers too: what rents it out may hide the rest of its name."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = (line.partition(":") for line in info.read_text().split("\n\n")[0].splitlines())
        said = {name.strip(): value.strip() for name, _, value in lines}
        if "model name" in said:
            numbers = (f"{name} {said[name]}" for name in ("cpu family", "model") if name in said)
            return ", ".join((said["model name"], *numbers))
    return platform.processor() or platform.machine()


_densities: Recent[int] = Recent(16 * 2**20, 1024)
_DENSITY_BYTES = 1024


def density(branch: Branch) -> int:
    """Estimate the share of tiles as a power of 1/2: 0 all, 1 a half, and so on; from a sample, and kept.

    Of block tables on a GPU nothing is read: the share that they may have at most.
    """
    if branch.structure != "sparse":
        return 0
    pattern = branch.pattern
    value, tables, _ = pattern.key()
    key = (value, branch.nq, branch.nk, branch.head_count, branch.q_offset)
    power = _densities.get(key)
    if power is None:
        power = _power(_share(branch))
        _densities.put(key, power, _DENSITY_BYTES, tables, holders(pattern.spec))
    return power


def _share(branch: Branch) -> float:
    tables = [leaf for leaf in leaves(branch.pattern) if _on_gpu(leaf)]
    most = sum(table.blocks.most / table.blocks.key_blocks for table in tables)
    # and what there is without them
    pattern = replace(branch.pattern, lambda leaf: ~Full() if _on_gpu(leaf) else leaf) if tables else branch.pattern
    tiles = estimate_tiles(pattern, branch.nq, branch.nk, heads=branch.head_count, q_offset=branch.q_offset)
    rows, columns = (-(-n // default_tile(n)) for n in (branch.nq, branch.nk))
    return min(1.0, most + tiles / (branch.head_count * rows * columns))


def _on_gpu(leaf: Pattern) -> TypeGuard[BlockTable]:
    return isinstance(leaf, BlockTable) and leaf.tables[0].device.type != "cpu"


def _power(share: float) -> int:
    return 99 if share <= 0 else max(0, round(-math.log2(share)))
