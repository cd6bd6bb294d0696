"""Modules of attention: over a pattern, with the parameters of torch's own module, on grids, and over chosen keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..names import only, suggest
from .hierarchical import HierarchicalAttention
from .longnet import LongNetAttention
from .moba import MixtureOfBlockAttention
from .multihead import MultiheadAttention
from .neighborhood import NeighborhoodAttention
from .nsa import NativeSparseAttention

__all__ = [
    "HierarchicalAttention", "LongNetAttention", "MixtureOfBlockAttention", "MultiheadAttention",
    "NativeSparseAttention", "NeighborhoodAttention",
]  # fmt: skip
__dir__ = only(__all__)
if not TYPE_CHECKING:
    __getattr__ = suggest(__name__, __all__)
