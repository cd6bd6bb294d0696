"""Data-dependent sparsity: selection of blocks and keys, measured attention mass, and a learned block indexer.

>>> table = rw.adaptive.select(q, k, top_k=3, block_size=32)
>>> out, lse = rw.attention_with_lse(q, k, v, table & rw.Causal())
>>> rw.adaptive.tile_mass(q, k, lse, table & rw.Causal()).values.sum().round()
tensor(1024.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..names import only, suggest
from .importance import ImportanceTracker
from .indexer import BlockIndexer
from .lightning import lightning_indexer, lightning_scores
from .mass import TileMass, tile_mass
from .pooling import KeyBounds, block_means
from .selection import select
from .sparsity import SparsitySchedule

__all__ = [
    "BlockIndexer",
    "ImportanceTracker",
    "KeyBounds",
    "SparsitySchedule",
    "TileMass",
    "block_means",
    "lightning_indexer",
    "lightning_scores",
    "select",
    "tile_mass",
]
__dir__ = only(__all__)
if not TYPE_CHECKING:
    __getattr__ = suggest(__name__, __all__)
