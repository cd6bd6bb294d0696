"""The native CPU kernel (csrc/); absent from wheels that were built without a compiler."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

Int64 = np.ndarray[Any, np.dtype[np.int64]] | Tensor
UInt32 = np.ndarray[Any, np.dtype[np.uint32]] | Tensor
UInt8 = np.ndarray[Any, np.dtype[np.uint8]] | Tensor

def variants() -> list[str]: ...
def term_kinds() -> list[str]: ...

# named arguments; csrc/module.cpp refuses a missing or unknown name
def forward(**arguments: Any) -> bool: ...
def tile_mass(**arguments: Any) -> None: ...
def choose(**arguments: Any) -> None: ...
def backward(**arguments: Any) -> None: ...

class Prepared:
    """A call that was checked; its tensors come as addresses and strides, and are not."""

    def __init__(self, **arguments: Any) -> None: ...
    def forward(self, *places: int | tuple[int, ...]) -> bool: ...
    def backward(self, *places: int | tuple[int, ...]) -> None: ...

class Zones:
    """Zones of a pattern, checked and copied; csrc/paint.h defines them, and their texts of trees.

    ``q0``, ``q1``, ``d0``, ``d1`` and ``phase`` have one int64 for each group, ``k0`` and ``k1`` for each run.
    ``ptr`` is None if each group has one run, and ``residue`` is (axis, m, width) or None.
    """

    def __init__(self, **arguments: Any) -> None: ...
    def paint(self, q_lo: Int64, q_hi: Int64, k_lo: Int64, k_hi: Int64, out: UInt32, threads: int) -> None: ...
    @staticmethod
    def row(
        leaves: Sequence[Zones],
        tree: str,
        q: Sequence[int],
        k: Sequence[int],
        keys: int,
        tile: int,
        row: UInt32,
        states: UInt8,
    ) -> int: ...

def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, threads: int, variant: str = "") -> None: ...
def delta(dout: Tensor, out: Tensor, dlse: Tensor | None, delta: Tensor, threads: int, variant: str = "") -> None: ...
