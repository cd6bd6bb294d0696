"""Patterns of allowed (query, key) pairs, their set algebra, presets, and their parser."""

from typing import TYPE_CHECKING

from ..names import only, suggest
from .algebra import And, Not, Or, PerHead
from .base import Full, Pattern
from .boxes import Grid
from .dilated import Dilated, LongNet, Strided, StridedView
from .documents import Documents
from .fitting import check_extents
from .function import MaskMod, TokenMask, from_mask_mod
from .global_tokens import Global, Periodic, Sinks
from .grids import GridNeighborhood, GridWindows
from .key_padding import KeyPadding
from .local import Causal, Neighborhood, PrefixLM, Segments, SlidingWindow
from .parse import parse, rebuild
from .presets import (
    bigbird,
    dilated_blocks,
    local_global,
    longformer,
    natten_1d,
    random_blocks,
    sparse_transformer_fixed,
    variable,
)
from .table import BlockTable
from .within import Within

__all__ = [
    "And",
    "BlockTable",
    "Causal",
    "Dilated",
    "Documents",
    "Full",
    "Global",
    "Grid",
    "GridNeighborhood",
    "GridWindows",
    "KeyPadding",
    "LongNet",
    "MaskMod",
    "Neighborhood",
    "Not",
    "Or",
    "Pattern",
    "PerHead",
    "Periodic",
    "PrefixLM",
    "Segments",
    "Sinks",
    "SlidingWindow",
    "Strided",
    "StridedView",
    "TokenMask",
    "Within",
    "bigbird",
    "check_extents",
    "dilated_blocks",
    "from_mask_mod",
    "local_global",
    "longformer",
    "natten_1d",
    "parse",
    "random_blocks",
    "rebuild",
    "sparse_transformer_fixed",
    "variable",
]
__dir__ = only(__all__)
if not TYPE_CHECKING:
    __getattr__ = suggest(__name__, __all__)
