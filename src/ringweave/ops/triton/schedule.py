"""What the kernels need of a plan beyond its tensors: queues of tasks, masks packed the other way, live positions."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from ...plan import BlockPlan, pack_masks, unpack_masks

_MASKS_AT_ONCE = 1024
# keys and values that are meant to stay in the second-level cache while programs share them
_CACHE_BYTES = 2**25


@dataclass(frozen=True)
class Masks:
    """A plan's masks as columns need them, and which positions take part in any pair of a mask.

    Attributes:
        transposed: (M, kv_tile, words), query r of a key at bit r % 32 of word r // 32.
        live_keys: (M, words), keys that some query of the tile attends.
        live_queries: (M, words), queries that attend some key of the tile.
    """

    transposed: Tensor
    live_keys: Tensor
    live_queries: Tensor

    @staticmethod
    def of(plan: BlockPlan) -> Masks:
        """From a plan's masks, some at a time: unpacked ones are large."""
        found: list[tuple[Tensor, Tensor, Tensor]] = []
        for part in plan.masks.split(_MASKS_AT_ONCE):
            dense = unpack_masks(part, plan.kv_tile)
            sides = (dense.mT, dense.any(1, keepdim=True), dense.any(2)[:, None])
            transposed, keys, queries = (pack_masks(side) for side in sides)
            found.append((transposed, keys[:, 0], queries[:, 0]))
        return Masks(*(torch.cat(parts).contiguous() for parts in zip(*found, strict=True)))


_queues: weakref.WeakKeyDictionary[BlockPlan, dict[tuple[object, ...], Tensor]] = weakref.WeakKeyDictionary()
_masks: weakref.WeakKeyDictionary[BlockPlan, Masks] = weakref.WeakKeyDictionary()


def masks(plan: BlockPlan) -> Masks:
    """The masks of a plan, made at first use and kept as long as the plan."""
    found = _masks.get(plan)
    if found is None:
        found = _masks[plan] = Masks.of(plan)
    return found


def row_queue(plan: BlockPlan, ratio: int, head_bytes: int) -> Tensor:
    """Tasks (b * Hq + h) * query tiles + tile, int32, longest rows first within heads that share the cache.

    Args:
        plan: Whose rows.
        ratio: Query heads of a key head.
        head_bytes: Bytes of a key head's keys and values.
    """
    return _queue(plan, "rows", ratio, _sharing(head_bytes))


def column_queue(plan: BlockPlan, ratio: int, head_bytes: int) -> Tensor:
    """Tasks (b * Hkv + h) * key tiles + tile, int32, longest columns, over all query heads of a key head, first."""
    return _queue(plan, "columns", ratio, _sharing(head_bytes))


def _sharing(head_bytes: int) -> int:
    return max(1, _CACHE_BYTES // max(1, head_bytes))


def _queue(plan: BlockPlan, side: str, ratio: int, sharing: int) -> Tensor:
    queues = _queues.setdefault(plan, {})
    key = (side, ratio, sharing)
    if key not in queues:
        queues[key] = _rows(plan, ratio * sharing) if side == "rows" else _columns(plan, ratio, sharing)
    return queues[key]


def _rows(plan: BlockPlan, sharing: int) -> Tensor:
    rank = torch.empty(plan.order.numel(), dtype=torch.int64, device=plan.device)
    rank[plan.order.long()] = torch.arange(plan.order.numel(), device=plan.device)
    by_pair = rank.view(-1, plan.q_tiles)[plan.group.reshape(-1).long()]
    return _sorted(by_pair, sharing, plan.order.numel())


def _columns(plan: BlockPlan, ratio: int, sharing: int) -> Tensor:
    counts = plan.col_ptr.diff(dim=1).long()[plan.group.long()]
    work = counts.unflatten(1, (-1, ratio)).sum(2).flatten(0, 1)
    most = plan.q_tiles * ratio
    return _sorted(most - work, sharing, most + 1)


def _sorted(rank: Tensor, sharing: int, ranks: int) -> Tensor:
    """Places of (pairs, tiles) in ascending rank, ``sharing`` pairs after the other."""
    section = torch.arange(rank.shape[0], device=rank.device) // sharing
    return (section[:, None] * ranks + rank).reshape(-1).argsort(stable=True).int()
