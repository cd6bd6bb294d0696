"""Rows as the kernels process them: the plan's rows, or pairs of neighbouring rows over the union of their lists.

With tiles of 64 queries, a kernel does half as much arithmetic per key that it reads as with tiles of 128. So two
neighbouring query tiles with similar lists become one program of 128 rows. Each entry of the union has one mask number
per tile; a mask of zeros represents a tile that is not in the plan.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from ringweave.cache import derived_values
from ringweave.plan import BlockPlan
from ringweave.plan.cuda_sync import record_stream, require_no_capture, wait_for_stream

from . import queues

# pairing pays, by halving the reads of keys, up to this ratio of computed tiles to tiles of the plan
_WASTE = 1.25


@dataclass(frozen=True, eq=False)
class Rows:
    """Lists of key tiles, one for each row of ``tiles`` query tiles.

    Attributes:
        plan: The plan, or a copy with paired rows, in which ``mask_id`` is (nnz, 2) and ``row_ptr`` counts pairs.
        live: Bits of the keys that some query of a mask attends, (M, words).
        tiles: Number of query tiles in a row, 1 or 2.
    """

    plan: BlockPlan
    live: Tensor
    tiles: int


def single(plan: BlockPlan) -> Rows:
    """Return a plan's rows, unpaired."""
    return Rows(plan, queues.masks(plan).live_keys, 1)


def paired(plan: BlockPlan) -> Rows | None:
    """Return paired rows, or None if they would compute too many additional tiles.

    The result is cached with the plan, since the decision synchronises with the device.
    """
    known = derived_values(plan)
    if "pairs" not in known:
        # a plan that the host has not counted must not be read, and pairing has to read the size of the union
        rows: Rows | None = _paired(plan) if plan.counted else None
        for thing in () if rows is None else (rows, rows.plan):
            record_stream(thing, plan.device)
        known["pairs"] = rows
    rows = known["pairs"]
    for thing in () if rows is None else (rows, rows.plan):
        wait_for_stream(thing, plan.device)
    return rows


def _paired(plan: BlockPlan) -> Rows | None:
    require_no_capture(plan.device)
    sets, tiles = plan.row_ptr.shape[0], plan.q_tiles
    counts = plan.row_ptr.diff(dim=1).reshape(-1).long()
    row = torch.arange(sets * tiles, device=plan.device).repeat_interleave(counts, output_size=plan.nnz)
    # ascending, since the lists are
    place = row * plan.kv_tiles + plan.col
    first = row % tiles % 2 == 0
    second = torch.searchsorted(place, place + plan.kv_tiles).clamp(max=max(plan.nnz - 1, 0))
    both = first & (row % tiles + 1 < tiles) & (place[second] == place + plan.kv_tiles)
    union = plan.nnz - int(both.sum())
    if 2 * union > _WASTE * plan.nnz:
        return None
    pairs = -(-tiles // 2)
    pair = row // tiles * pairs + row % tiles // 2
    entries, entry = torch.unique(pair * plan.kv_tiles + plan.col, return_inverse=True)
    absent = plan.mask_words.shape[0]
    bits = torch.full((union, 2), absent, dtype=torch.int32, device=plan.device)
    bits[entry, row % tiles % 2] = plan.mask_id
    bounds = torch.arange(sets * pairs + 1, device=plan.device) * plan.kv_tiles
    ends = torch.searchsorted(entries, bounds)
    ptr = torch.arange(sets, device=plan.device)[:, None] * pairs + torch.arange(pairs + 1, device=plan.device)
    # without masks, the first word of the empty masks has the right shape for no live keys
    live = queues.masks(plan).live_keys if absent else plan.mask_words[:, 0]
    masks = plan.mask_words
    if absent or 2 * union > plan.nnz:
        masks, live = (torch.cat([x, x.new_zeros(1, *x.shape[1:])]) for x in (masks, live))
    rank = (2 * ends.diff().clamp(min=1).log2()).floor()
    plan_of_pairs = dataclasses.replace(
        plan,
        row_ptr=ends[ptr].int(),
        col=(entries % plan.kv_tiles).int(),
        mask_id=bits,
        mask_words=masks,
        launch_order=torch.argsort(-rank, stable=True).int(),
    )
    return Rows(plan_of_pairs, live, 2)
