"""What may attend: patterns, their set algebra, presets, and reading them from text."""

from .algebra import And, Not, Or
from .base import Full, Pattern, check_extents
from .dilated import Dilated, LongNet, Strided, View
from .function import MaskMod, TokenMask, from_mask_mod
from .heads import PerHead
from .local import Causal, Documents, Neighborhood, PrefixLM, Segments, SlidingWindow
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
from .tokens import Global, Periodic, Sinks

__all__ = [
    "And",
    "BlockTable",
    "Causal",
    "Dilated",
    "Documents",
    "Full",
    "Global",
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
