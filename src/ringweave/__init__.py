"""ringweave: exact block-sparse and dilated attention for PyTorch.

    >>> import ringweave as rw
    >>> out = rw.attention(q, k, v, (rw.SlidingWindow(64) | rw.Sinks(4)) & rw.Causal())

A pattern says which pairs may attend. A plan lists the tiles that contain them, a backend computes these tiles, and
merge combines partial results.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import patterns
from .api import (
    attention,
    attention_with_lse,
    longnet_attention,
    neighborhood_attention,
    paged_attention,
    varlen_attention,
)
from .errors import PageError as PageError
from .errors import PatternError as PatternError
from .errors import RingError as RingError
from .errors import RingweaveError
from .errors import ShapeError as ShapeError
from .errors import UnsupportedError as UnsupportedError
from .merge import merge
from .names import on_demand, only, suggest
from .plan import BlockPlan as BlockPlan
from .plan import PlanCache as PlanCache
from .plan import plan
from .precision import Precision
from .types import AttentionOutput as AttentionOutput

if TYPE_CHECKING:
    from . import adaptive, integrations, memory, nn, parallel, trees
    from .hierarchical import hierarchical_attention
    from .kv_cache import PagedCache
    from .parallel import ContextParallel
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
        KeyPadding,
        LongNet,
        PerHead,
        PrefixLM,
        Segments,
        Selected,
        Sinks,
        SlidingWindow,
        Strided,
        TokenMask,
        Tree,
        from_mask_mod,
    )
    from .patterns import Pattern as Pattern
    from .plan import from_block_mask as from_block_mask
    from .reports.explanation import explain
    from .terms import ALiBi, Bias, DistanceBias, Softcap
    from .weights import BlockWeights as BlockWeights
    from .weights import attention_weights

__version__ = "1.0.0"


__all__ = [
    "ALiBi",
    "Bias",
    "BlockTable",
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
    "KeyPadding",
    "LongNet",
    "PagedCache",
    "PerHead",
    "Precision",
    "PrefixLM",
    "RingweaveError",
    "Segments",
    "Selected",
    "Sinks",
    "SlidingWindow",
    "Softcap",
    "Strided",
    "TokenMask",
    "Tree",
    "adaptive",
    "attention",
    "attention_weights",
    "attention_with_lse",
    "explain",
    "from_mask_mod",
    "hierarchical_attention",
    "integrations",
    "longnet_attention",
    "memory",
    "merge",
    "neighborhood_attention",
    "nn",
    "paged_attention",
    "parallel",
    "patterns",
    "plan",
    "trees",
    "varlen_attention",
]
# public names that dir() does not list, because users rarely write them: results, errors, and plans
_UNLISTED = (
    "AttentionOutput",
    "BlockPlan",
    "BlockWeights",
    "PageError",
    "Pattern",
    "PatternError",
    "PlanCache",
    "RingError",
    "ShapeError",
    "UnsupportedError",
    "from_block_mask",
)


# imported when first used, so that importing ringweave stays quick
_SUBMODULES = ("adaptive", "integrations", "memory", "nn", "parallel", "trees")
# modules of the distributions ringweave-audit and ringweave-lab
_ADDED = ("audit", "bench", "tune")
_ELSEWHERE = {
    "ALiBi": "terms",
    "Bias": "terms",
    "BlockWeights": "weights",
    "ContextParallel": "parallel",
    "DistanceBias": "terms",
    "PagedCache": "kv_cache",
    "Softcap": "terms",
    "attention_weights": "weights",
    "explain": "reports.explanation",
    "from_block_mask": "plan.interop",
    "hierarchical_attention": "hierarchical",
} | {name: "patterns" for name in patterns.__all__ if name in (*__all__, *_UNLISTED)}


def _others(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"ringweave.{name}")
    if name not in _ADDED:
        return _unknown(name)
    from .plugins import attribute

    return attribute("ringweave", name)


_unknown = suggest("ringweave", [*(f"patterns.{each}" for each in patterns.__all__), *_UNLISTED, *__all__])
if not TYPE_CHECKING:
    __getattr__ = on_demand(__name__, _ELSEWHERE, _others)
__dir__ = only(__all__)
