"""What may attend: patterns, their set algebra, presets, and reading them from text."""

from .algebra import And, Not, Or, PerHead
from .base import Full, Pattern
from .boxes import Grid
from .chosen import Global, Periodic, Sinks
from .dilated import Dilated, LongNet, Strided, View
from .documents import Documents
from .fit import check_extents
from .function import MaskMod, TokenMask, from_mask_mod
from .grids import GridNeighborhood, GridWindows
from .keys import Keys
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
    "Keys",
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
    "TokenMask",
    "View",
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
