"""The kinds of calls, and of kernels' devices, for which the fastest backend and tile size are measured."""

from __future__ import annotations

import importlib.metadata
import math
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

import torch

from ..cache import PATTERNS, process_cache
from ..call import Call
from ..patterns import Full, Pattern
from ..patterns.algebra import leaves, replace
from ..plan import Branch
from ..plan.from_pattern import estimate_tiles
from ..plan.tile_size import default_tile_size

if TYPE_CHECKING:
    from ..patterns import BlockTable


def call_key(call: Call, branch: Branch) -> str | None:
    """Return the key of a call as text, without its density; None if its device is not available."""
    here = where(call.device)
    if here is None:
        return None
    grid = branch.pattern.tile_size if branch.dense_kind == "sparse" else None
    relation = branch.dense_kind if grid is None else f"{branch.dense_kind} on a grid of {grid}"
    dtype = str(call.dtype).removeprefix("torch.")
    lengths = f"2^{branch.nq.bit_length() - 1} x 2^{branch.nk.bit_length() - 1} tokens"
    direction = "backward" if call.needs_grad else "forward"
    return f"{here}; {dtype}; D {call.head_dim}, Dv {call.value_dim}; {lengths}; {relation}; {direction}"


def where(device: str) -> str | None:
    """Return a device's name and the versions of the software as text; None if the device is not available."""
    if device == "cpu":
        return _named(f"{processor()}, {torch.get_num_threads()} threads")
    if device.startswith("cuda") and torch.cuda.is_available():
        return _named(torch.cuda.get_device_name(device))
    return None


@process_cache
def _named(device: str) -> str:
    try:
        triton = f"triton {importlib.metadata.version('triton')}"
    except importlib.metadata.PackageNotFoundError:
        triton = "no triton"
    # the package imports this module before it defines its version
    own = sys.modules[__package__.partition(".")[0]].__version__
    return f"{device}; ringweave {own}; torch {torch.__version__}; {triton}"


@process_cache
def processor() -> str:
    """Return the processor's model name with family and model numbers, since cloud providers may shorten the name."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = (line.partition(":") for line in info.read_text().split("\n\n")[0].splitlines())
        said = {name.strip(): value.strip() for name, _, value in lines}
        if "model name" in said:
            numbers = (f"{name} {said[name]}" for name in ("cpu family", "model") if name in said)
            return ", ".join((said["model name"], *numbers))
    return platform.processor() or platform.machine()


_DENSITY_BYTES = 1024


def density(branch: Branch) -> int:
    """Return n such that about a share of 2^-n of the tiles is non-empty; estimated from a sample, and cached.

    Block tables on a GPU are not read, since that would synchronise: they count with the largest share they may have.
    """
    if branch.dense_kind != "sparse":
        return 0
    pattern = branch.pattern
    made_of = pattern.key()
    key = ("density", made_of.value, branch.nq, branch.nk, branch.head_count, branch.q_offset)
    power: int | None = PATTERNS.get(key)
    if power is None:
        power = _power(_share(branch))
        PATTERNS.put(key, power, _DENSITY_BYTES + made_of.nbytes, pattern._owners())
    return power


def _share(branch: Branch) -> float:
    tables = [leaf for leaf in leaves(branch.pattern) if _on_gpu(leaf)]
    most = sum(table.blocks.most / table.blocks.key_blocks for table in tables)
    # the rest of the pattern, without these tables
    pattern = replace(branch.pattern, lambda leaf: ~Full() if _on_gpu(leaf) else leaf) if tables else branch.pattern
    tiles = estimate_tiles(pattern, branch.nq, branch.nk, heads=branch.head_count, q_offset=branch.q_offset)
    rows, columns = (-(-n // default_tile_size(n)) for n in (branch.nq, branch.nk))
    return min(1.0, most + tiles / (branch.head_count * rows * columns))


def _on_gpu(leaf: Pattern) -> TypeGuard[BlockTable]:
    if all(table.device.type == "cpu" for table in leaf.tables):
        return False
    from ..patterns import BlockTable

    return isinstance(leaf, BlockTable)


def _power(share: float) -> int:
    return 99 if share <= 0 else max(0, round(-math.log2(share)))
