"""Patterns of allowed (query, key) pairs, their set algebra, presets, and their parser.

A module is imported when one of its names is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..names import on_demand, only, suggest

if TYPE_CHECKING:
    from .algebra import And as And
    from .algebra import Not as Not
    from .algebra import Or as Or
    from .algebra import PerHead as PerHead
    from .base import Full as Full
    from .base import Pattern as Pattern
    from .boxes import Grid as Grid
    from .dilated import Dilated as Dilated
    from .dilated import LongNet as LongNet
    from .dilated import Strided as Strided
    from .dilated import StridedView as StridedView
    from .documents import Documents as Documents
    from .fitting import check_extents as check_extents
    from .function import MaskMod as MaskMod
    from .function import TokenMask as TokenMask
    from .function import from_mask_mod as from_mask_mod
    from .global_tokens import Global as Global
    from .global_tokens import Periodic as Periodic
    from .global_tokens import Sinks as Sinks
    from .grids import GridNeighborhood as GridNeighborhood
    from .grids import GridWindows as GridWindows
    from .key_padding import KeyPadding as KeyPadding
    from .local import Causal as Causal
    from .local import Neighborhood as Neighborhood
    from .local import PrefixLM as PrefixLM
    from .local import Segments as Segments
    from .local import SlidingWindow as SlidingWindow
    from .presets import bigbird as bigbird
    from .presets import dilated_blocks as dilated_blocks
    from .presets import local_global as local_global
    from .presets import longformer as longformer
    from .presets import natten_1d as natten_1d
    from .presets import random_blocks as random_blocks
    from .presets import sparse_transformer_fixed as sparse_transformer_fixed
    from .presets import variable as variable
    from .reader import parse as parse
    from .reader import rebuild as rebuild
    from .selected import Selected as Selected
    from .table import BlockTable as BlockTable
    from .tree import Tree as Tree
    from .within import Within as Within

#: Public names by module.
MODULES = {
    "algebra": ("And", "Not", "Or", "PerHead"),
    "base": ("Full", "Pattern"),
    "boxes": ("Grid",),
    "dilated": ("Dilated", "LongNet", "Strided", "StridedView"),
    "documents": ("Documents",),
    "fitting": ("check_extents",),
    "function": ("MaskMod", "TokenMask", "from_mask_mod"),
    "global_tokens": ("Global", "Periodic", "Sinks"),
    "grids": ("GridNeighborhood", "GridWindows"),
    "key_padding": ("KeyPadding",),
    "local": ("Causal", "Neighborhood", "PrefixLM", "Segments", "SlidingWindow"),
    "reader": ("parse", "rebuild"),
    "presets": (
        "bigbird",
        "dilated_blocks",
        "local_global",
        "longformer",
        "natten_1d",
        "random_blocks",
        "sparse_transformer_fixed",
        "variable",
    ),
    "selected": ("Selected",),
    "table": ("BlockTable",),
    "tree": ("Tree",),
    "within": ("Within",),
}
_WHERE = {name: module for module, names in MODULES.items() for name in names}
__all__ = sorted(_WHERE)
__dir__ = only(__all__)
if not TYPE_CHECKING:
    __getattr__ = on_demand(__name__, _WHERE, suggest(__name__, __all__))
