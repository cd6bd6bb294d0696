"""Plans of the tiles to compute, their cache, and the branches of a pattern."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from ..checks import check_device
from ..names import on_demand, only, suggest
from ..patterns import Pattern
from ..patterns.alignment import first_of_sizes
from ..patterns.fitting import fitting
from ..patterns.shifted import with_offsets
from .block_plan import BlockPlan, pack_masks, unpack_masks
from .branches import Branch, Sizes, Spacing, branches, branches_of_step, mixture, summands, view_of_step
from .cached_plans import CacheStatistics, PlanCache, pattern_of, plan_cache
from .tile_size import tile_size_of

if TYPE_CHECKING:
    from .interop import from_block_mask

__all__ = [
    "BlockPlan",
    "Branch",
    "CacheStatistics",
    "PlanCache",
    "Sizes",
    "Spacing",
    "branches",
    "branches_of_step",
    "density",
    "from_block_mask",
    "mixture",
    "pack_masks",
    "pattern_of",
    "plan",
    "plan_cache",
    "summands",
    "unpack_masks",
    "view_of_step",
]
__dir__ = only(__all__)


if not TYPE_CHECKING:
    __getattr__ = on_demand(__name__, {"from_block_mask": "interop"}, suggest(__name__, __all__))


def plan(
    pattern: Pattern,
    nq: int,
    nk: int | None = None,
    *,
    heads: int = 1,
    batch: int = 1,
    q_offset: int | Literal["end"] = 0,
    tile: int | tuple[int, int] | None = None,
    device: str | int | torch.device = "cpu",
) -> BlockPlan:
    """Plan the non-empty tiles of a pattern, by rows and by columns, with the masks of partial tiles; cached.

    Time and memory grow with the non-empty tiles, never with N squared.

    Args:
        pattern: A relation.
        nq: Number of queries, at positions q_offset, q_offset + 1, ...
        nk: Number of keys; nq + q_offset by default.
        heads: Number of query heads.
        batch: Number of batch elements.
        q_offset: Position of the first query; ``"end"`` for that of the last tokens, as in :func:`ringweave.attention`.
        tile: Tile size, a number or (queries, keys); multiples of 16. None chooses 128, less for short sequences, and
            the block size of a block table if it is 32 to 128.
        device: Device of the plan's tensors.
    Returns:
        The plan.
    Raises:
        PatternError: The pattern is made for other lengths, heads or batch, or is a LongNet.
        ShapeError: A size is below 1, or a tile is not a multiple of 16.
    Example:
        >>> rw.plan((rw.SlidingWindow(1024) | rw.Sinks(64)) & rw.Causal(), 16384)
        BlockPlan(16384 x 16384 tokens, tiles 128 x 128, 1235 non-empty, 1 group(s), 4 masks, density 0.0643, cpu)
    """
    if isinstance(q_offset, str):
        first = first_of_sizes(pattern, q_offset, 0, batch=batch, nq=nq, nk=nk)
        pattern, q_offset = with_offsets(pattern, first, 0, batch)
    pattern, nq, nk, heads, batch, q_offset = fitting(pattern, nq, nk, heads, batch, q_offset)
    size = tile_size_of(tile, pattern, nq, nk)
    device = check_device(device)
    return plan_cache.get(pattern, nq, nk, heads=heads, batch=batch, q_offset=q_offset, tile=size, device=device)


def density(
    pattern: Pattern, nq: int, nk: int | None = None, *, heads: int = 1, batch: int = 1, q_offset: int = 0
) -> float:
    """Return the share of allowed pairs, counted exactly; a LongNet counts a pair once per branch that allows it."""
    pattern, nq, nk, heads, batch, q_offset = fitting(pattern, nq, nk, heads, batch, q_offset)
    program = branches(pattern, nq, nk, heads=heads, batch=batch, q_offset=q_offset)
    return sum(branch.pairs() for branch in program) / (batch * heads * nq * nk)
