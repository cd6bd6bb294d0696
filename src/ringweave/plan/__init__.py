"""Which tiles to compute: plans, their cache, and the branches of a pattern."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch

from ..names import only
from ..patterns import Pattern
from ..patterns.base import provide
from ..patterns.validate import check_device, fitting
from .block_plan import BlockPlan, pack_masks, unpack_masks
from .branches import Branch, Sizes, branches, mixture, tile_sides
from .cache import CacheStatistics, PlanCache, pattern_of, plan_cache, step_plan
from .causality import Causality, causality

if TYPE_CHECKING:
    from .interop import from_block_mask

__all__ = [
    "BlockPlan",
    "Branch",
    "CacheStatistics",
    "Causality",
    "PlanCache",
    "Sizes",
    "branches",
    "causality",
    "density",
    "from_block_mask",
    "mixture",
    "pack_masks",
    "pattern_of",
    "plan",
    "plan_cache",
    "step_plan",
    "unpack_masks",
]
__dir__ = only(__all__)


# these load when asked for: importing ringweave stays quick
_ELSEWHERE = {"from_block_mask": "interop"}


def __getattr__(name: str) -> Any:
    if name in _ELSEWHERE:
        return getattr(importlib.import_module(f"{__name__}.{_ELSEWHERE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def plan(
    pattern: Pattern,
    nq: int,
    nk: int | None = None,
    *,
    heads: int = 1,
    batch: int = 1,
    q_offset: int = 0,
    tile: int | tuple[int, int] | None = None,
    device: str | torch.device = "cpu",
) -> BlockPlan:
    """Plan the tiles that a pattern leaves non-empty, by rows and columns, with the masks of partial ones; cached.

    Cost and memory grow with the non-empty tiles, never with N squared.

    Args:
        pattern: A relation.
        nq: Queries, at positions q_offset, q_offset + 1, ...
        nk: Keys; nq + q_offset by default.
        heads: Query heads.
        batch: Batch elements.
        q_offset: Position of the first query.
        tile: Side of a tile, or (queries, keys); multiples of 16. None: 128, less for short sequences,
            and a block table's own block size from 32 to 128.
        device: Where the plan's tensors live.
    Returns:
        The plan.
    Raises:
        PatternError: The pattern is made for other lengths, heads or batch, or is a LongNet.
        ShapeError: A size below 1, or a tile that is not a multiple of 16.
    Example:
        >>> rw.plan((rw.SlidingWindow(1024) | rw.Sinks(64)) & rw.Causal(), 16384)
        BlockPlan(16384 x 16384 tokens, tiles 128 x 128, 1235 non-empty, 1 group(s), 4 masks, density 0.0643, cpu)
    """
    pattern, nq, nk, heads, batch, q_offset = fitting(pattern, nq, nk, heads, batch, q_offset)
    sides = tile_sides(tile, pattern, nq, nk)
    device = check_device(device)
    return plan_cache.get(pattern, nq, nk, heads=heads, batch=batch, q_offset=q_offset, tile=sides, device=device)


def density(
    pattern: Pattern, nq: int, nk: int | None = None, *, heads: int = 1, batch: int = 1, q_offset: int = 0
) -> float:
    """Divide allowed pairs by all pairs, counted exactly; in a LongNet a pair counts once per branch that allows it."""
    pattern, nq, nk, heads, batch, q_offset = fitting(pattern, nq, nk, heads, batch, q_offset)
    program = branches(pattern, nq, nk, heads=heads, batch=batch, q_offset=q_offset)
    return sum(branch.pairs() for branch in program) / (batch * heads * nq * nk)


provide(plan=plan, density=density, causality=causality)
