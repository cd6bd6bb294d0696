"""ringweave: exact block-sparse and dilated attention for PyTorch.

    >>> import ringweave as rw
    >>> out = rw.attention(q, k, v, (rw.SlidingWindow(64) | rw.Sinks(4)) & rw.Causal())

A pattern says what may attend, a plan which tiles that makes, a backend computes them, and merge joins partial results.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .errors import PageError, PatternError, RingError, RingweaveError, ShapeError, UnsupportedError
from .functional import attention, attention_with_lse, longnet_attention, varlen_attention
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
from .plan import BlockPlan, PlanCache, plan
from .precision import Precision
from .terms import ALiBi, Bias, DistanceBias, Softcap
from .types import AttentionOutput

if TYPE_CHECKING:
    from . import adaptive, audit, memory, nn, parallel
    from .explanation import explain
    from .hierarchical import hierarchical_attention
    from .pages import PagedCache, paged_attention
    from .parallel import ContextParallel
    from .plan import from_block_mask
    from .weights import BlockWeights, attention_weights

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
    "PageError",
    "PagedCache",
    "Pattern",
    "PatternError",
    "PerHead",
    "Periodic",
    "PlanCache",
    "Precision",
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
    "adaptive",
    "attention",
    "attention_weights",
    "attention_with_lse",
    "audit",
    "bigbird",
    "dilated_blocks",
    "explain",
    "from_block_mask",
    "from_mask_mod",
    "hierarchical_attention",
    "local_global",
    "longformer",
    "longnet_attention",
    "memory",
    "merge",
    "natten_1d",
    "nn",
    "paged_attention",
    "parallel",
    "plan",
    "random_blocks",
    "sparse_transformer_fixed",
    "variable",
    "varlen_attention",
]


# these load when asked for: importing ringweave stays quick
_SUBMODULES = ("adaptive", "audit", "integrations", "memory", "nn", "parallel", "tune")
_ELSEWHERE = {
    "BlockWeights": "weights",
    "ContextParallel": "parallel",
    "PagedCache": "pages",
    "attention_weights": "weights",
    "explain": "explanation",
    "from_block_mask": "plan.interop",
    "hierarchical_attention": "hierarchical",
    "paged_attention": "pages",
}


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"ringweave.{name}")
    if name in _ELSEWHERE:
        return getattr(importlib.import_module(f"ringweave.{_ELSEWHERE[name]}"), name)
    if name == "bench":
        from .laboratory import attribute

        return attribute("ringweave", name)
    raise AttributeError(f"module 'ringweave' has no attribute {name!r}; its names are listed by dir(ringweave)")


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
