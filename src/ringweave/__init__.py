"""ringweave: exact block-sparse and dilated attention for PyTorch.

    >>> import ringweave as rw
    >>> out = rw.attention(q, k, v, (rw.SlidingWindow(64) | rw.Sinks(4)) & rw.Causal())

A pattern says what may attend, a plan which tiles that makes, a backend computes them, and merge joins partial results.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .errors import PatternError, RingError, RingweaveError, ShapeError, UnsupportedError
from .explain import explain
from .functional import attention, attention_with_lse, longnet_attention
from .merge import merge
from .patterns import (
    BlockTable,
    Causal,
    Dilated,
    Documents,
    Full,
    Global,
    Grid,
    GridNeighborhood,
    GridWindows,
    Keys,
    LongNet,
    Neighborhood,
    Pattern,
    PerHead,
    Periodic,
    PrefixLM,
    Segments,
    Sinks,
    SlidingWindow,
    Strided,
    TokenMask,
    bigbird,
    dilated_blocks,
    from_mask_mod,
    local_global,
    longformer,
    natten_1d,
    random_blocks,
    sparse_transformer_fixed,
    variable,
)
from .plan import BlockPlan, PlanCache, from_block_mask, plan
from .terms import ALiBi, Bias, DistanceBias, Softcap
from .types import AttentionOutput
from .weights import BlockWeights, attention_weights

if TYPE_CHECKING:
    from . import bench, nn, parallel
    from .parallel import ContextParallel

__version__ = "0.1.0"


__all__ = [
    "ALiBi",
    "AttentionOutput",
    "Bias",
    "BlockPlan",
    "BlockTable",
    "BlockWeights",
    "Causal",
    "ContextParallel",
    "Dilated",
    "DistanceBias",
    "Documents",
    "Full",
    "Global",
    "Grid",
    "GridNeighborhood",
    "GridWindows",
    "Keys",
    "LongNet",
    "Neighborhood",
    "Pattern",
    "PatternError",
    "PerHead",
    "Periodic",
    "PlanCache",
    "PrefixLM",
    "RingError",
    "RingweaveError",
    "Segments",
    "ShapeError",
    "Sinks",
    "SlidingWindow",
    "Softcap",
    "Strided",
    "TokenMask",
    "UnsupportedError",
    "attention",
    "attention_weights",
    "attention_with_lse",
    "bench",
    "bigbird",
    "dilated_blocks",
    "explain",
    "from_block_mask",
    "from_mask_mod",
    "local_global",
    "longformer",
    "longnet_attention",
    "merge",
    "natten_1d",
    "nn",
    "parallel",
    "plan",
    "random_blocks",
    "sparse_transformer_fixed",
    "variable",
]


def __getattr__(name: str) -> Any:
    # these load when asked for: importing ringweave stays quick
    if name in ("bench", "nn", "parallel"):
        return importlib.import_module(f"ringweave.{name}")
    if name == "ContextParallel":
        return importlib.import_module("ringweave.parallel").ContextParallel
    raise AttributeError(f"module 'ringweave' has no attribute {name!r}; its names are listed by dir(ringweave)")


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
