"""Data that the kernels need in addition to a plan's tensors: queues of tasks, transposed masks, live positions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ringweave.cache import derived_values
from ringweave.plan import BlockPlan, pack_masks, unpack_masks
from ringweave.plan.cuda_sync import record_stream, require_no_capture, wait_for_stream

_MASKS_AT_ONCE = 1024
# bytes of keys and values that should stay in the second-level cache while programs share them
_CACHE_BYTES = 2**25
# lists with fewer keys (or queries) are not split
LEAST = 2048


@dataclass(frozen=True, eq=False)
class KernelMasks:
    """A plan's masks, transposed for columns, and the positions that occur in any pair of a mask.

    Attributes:
        transposed: Masks by key, (M, kv_tile, words); query r is bit r % 32 of word r // 32.
        live_keys: Bits of the keys that some query of the tile attends, (M, words).
        live_queries: Bits of the queries that attend some key of the tile, (M, words).
        dead_keys: Whether a tile of the plan has a key, inside the length, that none of its queries attends. True for
            a plan with masks that the host has not counted, so that nothing is read from the device.
        dead_queries: Whether a tile has a query, inside the length, that attends none of its keys. True in the same
            case.
    """

    transposed: Tensor
    live_keys: Tensor
    live_queries: Tensor
    dead_keys: bool = False
    dead_queries: bool = False

    @staticmethod
    def of(plan: BlockPlan) -> KernelMasks:
        """Compute them from a plan's masks, in parts, since unpacked masks are large."""
        if not plan.mask_words.shape[0]:
            # kernels are compiled without masks and read none of these
            return KernelMasks(plan.mask_words, plan.mask_words, plan.mask_words)
        packed: list[tuple[Tensor, ...]] = []
        for part in plan.mask_words.split(_MASKS_AT_ONCE):
            dense = unpack_masks(part, plan.kv_tile)
            sides = (dense.mT, dense.any(1, keepdim=True), dense.any(2)[:, None])
            transposed, keys, queries = (pack_masks(side) for side in sides)
            living = (side[:, 0].int().cumprod(1).sum(1) for side in sides[1:])
            packed.append((transposed, keys[:, 0], queries[:, 0], *living))
        parts = [torch.cat(part).contiguous() for part in zip(*packed, strict=True)]
        if not plan.counted:
            return KernelMasks(parts[0], parts[1], parts[2], True, True)
        dead = (
            _dead(parts[3], plan.mask_id, plan.col, plan.nk, plan.kv_tile),
            _dead(parts[4], plan.mask_id_t, plan.row, plan.nq, plan.q_tile),
        )
        require_no_capture(plan.device)
        dead_keys, dead_queries = torch.stack(dead).tolist()
        return KernelMasks(parts[0], parts[1], parts[2], dead_keys, dead_queries)


def _dead(living: Tensor, code: Tensor, index: Tensor, length: int, side: int) -> Tensor:
    """Return whether any partial tile has fewer leading live positions than positions inside the length."""
    return ((code >= 0) & (living[code.clamp(min=0).long()] < (length - index * side).clamp(max=side))).any()


@dataclass(frozen=True, eq=False)
class Queue:
    """Work items in launch order: tasks, or shares of tasks with long lists.

    Attributes:
        records: Records of items, (items, lists, 6) int32: batch element, first head of the item, tile, begin and end
            of its part of the list, and its slot among the partial results, or -1. There is one list for all heads of
            an item, or one for each head.
        splits: Split tasks, (split tasks, 5) int32: batch element, head, tile, first slot and number of shares; None
            if no task is split.
        slots: Number of partial results.
    """

    # in the order in which the kernels' ``record_of`` reads them
    records: Tensor
    splits: Tensor | None = None
    slots: int = 0

    @property
    def items(self) -> int:
        """Number of items."""
        return self.records.shape[0]


def masks(plan: BlockPlan) -> KernelMasks:
    """Return the masks of a plan; made at first use and cached with the plan."""
    known = derived_values(plan)
    masks: KernelMasks | None = known.get("masks")
    if masks is None:
        masks = KernelMasks.of(plan)
        if record_stream(masks, plan.device):
            known["masks"] = masks
    else:
        wait_for_stream(masks, plan.device)
    return masks


def shared(plan: BlockPlan, ratio: int) -> bool:
    """Return whether the ``ratio`` query heads of every key head use one set of rows.

    This may synchronise with the device, once per plan. A plan that the host has not counted is not read: its heads
    are assumed to differ.
    """
    sets, heads = plan.row_ptr.shape[0], plan.row_set
    if ratio == 1 or sets == 1:
        return True
    if sets == heads.numel() or not plan.counted:
        return False
    known, key = derived_values(plan), ("shared", ratio)
    if key not in known:
        require_no_capture(plan.device)
        by_key_head = heads.unflatten(1, (-1, ratio))
        known[key] = bool((by_key_head == by_key_head[..., :1]).all())
    return bool(known[key])


def row_queue(plan: BlockPlan, ratio: int, packed: int, head_bytes: int, units: int) -> Queue:
    """Return the queue of a plan's rows, longest first within the heads that share the cache.

    Args:
        plan: Plan with the rows.
        ratio: Number of query heads per key head.
        packed: Number of query heads of a key head that a program processes; they use one set of rows.
        head_bytes: Bytes of a key head's keys and values.
        units: Number of multiprocessors.
    """

    def of() -> Queue:
        heads = _heads(plan, ratio)[..., ::packed].reshape(-1, 1)
        sets = plan.row_set.reshape(-1)[heads].long()
        rank = torch.empty(plan.launch_order.numel(), dtype=torch.int64, device=plan.device)
        rank[plan.launch_order.long()] = torch.arange(plan.launch_order.numel(), device=plan.device)
        together = _sharing(head_bytes) * -(-ratio // packed)
        order = _sorted(rank.view(-1, plan.q_tiles)[sets[:, 0]], together, plan.launch_order.numel())
        counts = plan.row_ptr.diff(dim=1)[sets[:, 0]]
        records = _records(heads[:, 0], plan.row_set.shape[1], plan.row_ptr, sets)
        return _cut(records, order, counts, plan, plan.kv_tiles, LEAST // plan.kv_tile, units)

    return _once(plan, ("rows", ratio, packed, _sharing(head_bytes), units, LEAST), of)


def column_queue(plan: BlockPlan, ratio: int, head_bytes: int, units: int) -> Queue:
    """Return the queue of key heads' columns, longest first; lengths are summed over a key head's query heads."""

    def of() -> Queue:
        heads = _heads(plan, ratio).flatten(0, 1)
        sets = plan.row_set.reshape(-1)[heads].long()
        counts = plan.col_ptr.diff(dim=1).long()[sets].sum(1)
        most = plan.q_tiles * ratio
        order = _sorted(most - counts, _sharing(head_bytes), most + 1)
        lists = sets[:, :1] if shared(plan, ratio) else sets
        records = _records(heads[:, 0] // ratio, plan.row_set.shape[1] // ratio, plan.col_ptr, lists)
        return _cut(records, order, counts, plan, most, LEAST // plan.q_tile, units)

    return _once(plan, ("columns", ratio, _sharing(head_bytes), units, LEAST), of)


def _heads(plan: BlockPlan, ratio: int) -> Tensor:
    """Return the indices of query heads over all batch elements, (B, key heads, ratio)."""
    batch, heads = plan.row_set.shape
    return torch.arange(batch * heads, device=plan.device).view(batch, heads // ratio, ratio)


def _records(head: Tensor, heads: int, ptr: Tensor, sets: Tensor) -> Tensor:
    """Return records of unsplit lists, (packs * tiles, lists, 6).

    A pack is the heads that an item processes: ``head`` is its first head, counted over all batch elements, and
    ``sets`` are its sets of lists.
    """
    bounds = torch.stack([ptr[:, :-1], ptr[:, 1:]], 2)[sets].transpose(1, 2)
    records = bounds.new_full((*bounds.shape[:3], 6), -1)
    records[..., 0] = (head // heads)[:, None, None]
    records[..., 1] = (head % heads)[:, None, None]
    records[..., 2] = torch.arange(bounds.shape[1], device=ptr.device)[:, None]
    records[..., 3:5] = bounds
    return records.flatten(0, 1)


def _once(plan: BlockPlan, key: tuple[object, ...], of: Callable[[], Queue]) -> Queue:
    queues, key = derived_values(plan), ("queue", *key)
    queue: Queue | None = queues.get(key)
    if queue is None:
        queue = of()
        if record_stream(queue, plan.device):
            queues[key] = queue
    else:
        wait_for_stream(queue, plan.device)
    return queue


def _sharing(head_bytes: int) -> int:
    return max(1, _CACHE_BYTES // max(1, head_bytes))


def _sorted(rank: Tensor, sharing: int, ranks: int) -> Tensor:
    """Return the order of (packs, tiles) by ascending rank within each section of ``sharing`` packs."""
    section = torch.arange(rank.shape[0], device=rank.device) // sharing
    return (section[:, None] * ranks + rank).reshape(-1).argsort(stable=True)


def _cut(records: Tensor, order: Tensor, counts: Tensor, plan: BlockPlan, most: int, least: int, units: int) -> Queue:
    """Return the queue of tasks in ``order``, with long tasks split.

    A task longer than a unit's even share of all work is split into shares of at most half an even share, and in a
    decoding step of at most half the shortest list that is split: its work is to read memory, and more programs keep
    more reads in flight. Often the sizes alone exclude such tasks; otherwise lengths are read from the device, once per
    plan. A plan that the host has not counted is not read, and its tasks are not split.
    """
    records = records[order]
    if not plan.counted:
        return Queue(records)
    # every set of rows is used at least once, and a single set by all packs
    total = plan.nnz * (counts.shape[0] if plan.row_ptr.shape[0] == 1 else 1)
    if most <= max(1, least, total // units):
        return Queue(records)
    require_no_capture(plan.device)
    counts = counts.reshape(-1)[order].long()
    even = (counts.sum() // units).clamp(min=max(1, least))
    half = (even // 2).clamp(min=1)
    if plan.q_tiles == 1:
        half = half.clamp(max=max(1, least // 2))
    shares = torch.where(counts > even, -(-counts // half), 1)
    split = shares > 1
    items, cut = torch.stack([shares.sum(), split.sum()]).tolist()
    if not cut:
        return Queue(records)
    slots = shares * split
    owner = torch.arange(len(order), device=order.device).repeat_interleave(shares, output_size=items)
    share = torch.arange(items, device=order.device) - (shares.cumsum(0) - shares)[owner]
    first = slots.cumsum(0) - slots
    tasks, records, of = records[split, 0, :3], records[owner], shares[owner, None]
    begin, length = records[..., 3], records[..., 4].long() - records[..., 3]
    ends = [begin + length * (share[:, None] + more) // of for more in (0, 1)]
    records[..., 3:5] = torch.stack(ends, 2)
    records[..., 5] = torch.where(split[owner], first[owner] + share, -1)[:, None]
    splits = torch.cat([tasks, torch.stack([first, shares], 1)[split]], 1).int()
    return Queue(records, splits, items - len(order) + cut)
