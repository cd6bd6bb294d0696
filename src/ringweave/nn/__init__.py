"""Modules of multi-head attention: over a pattern, with the parameters of torch's own module, and on grids."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..names import only, suggest
from .hierarchical import HierarchicalAttention
from .longnet import LongNetAttention
from .multihead import MultiheadAttention
from .neighborhood import NeighborhoodAttention

__all__ = ["HierarchicalAttention", "LongNetAttention", "MultiheadAttention", "NeighborhoodAttention"]
__dir__ = only(__all__)
if not TYPE_CHECKING:
    __getattr__ = suggest(__name__, __all__)
