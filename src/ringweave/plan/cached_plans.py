"""A cache of plans by the pattern's value, bounded in bytes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..cache import DECODE_PLANS, PATTERNS, PLANS, LRUCache
from ..checks import check_sizes, named_device, whole
from ..patterns import Pattern
from ..patterns.cache_key import CacheKey
from ..patterns.fitting import refuse
from ..patterns.lists import Lists
from ..types import Place
from .block_plan import BlockPlan, Extent
from .cuda_sync import record_stream, wait_for_stream
from .tile_size import check_tile_size

# bytes of a plan besides its elements, for nine tensors in one piece and the cache entry; measured
_PLAN_BYTES = 8 * 2**10


class CacheStatistics(NamedTuple):
    """Counters of a plan cache since it was made or cleared.

    Attributes:
        hits: Number of requests for plans in the cache.
        misses: Number of plans that were made.
        evictions: Number of plans that were evicted.
        plans: Number of plans in the cache.
        nbytes: Bytes of these plans and their tables.
    """

    hits: int
    misses: int
    evictions: int
    plans: int
    nbytes: int


class PlanCache:
    """A least-recently-used cache of plans, bounded in bytes and number; safe to share between threads.

    The key is the pattern's value: its text, and its tables by storage and version. A key keeps these storages alive,
    and a table that is written in place has another version. The key also contains the values
    that a function reads, and the function's plans are dropped when no pattern has the function.

    Args:
        max_bytes: Bound on the bytes of plans and tables; a plan that is larger is built and not cached.
    Example:
        >>> cache = rw.PlanCache()
        >>> a, b = (cache.get(rw.Causal(), 256, 256, tile=(128, 128)) for _ in range(2))
        >>> a is b, cache.statistics().hits
        (True, 1)
    """

    def __init__(self, max_bytes: int = 512 * 2**20):
        self.max_bytes = whole("max_bytes", max_bytes, 0, 2**63 - 1)
        # a cache of its own for decoding steps: each makes a plan of one row of tiles, which is quick to make again
        self._plans: LRUCache[BlockPlan] = PLANS.with_bounds(max_bytes - max_bytes // 8)
        self._decode_plans: LRUCache[BlockPlan] = DECODE_PLANS.with_bounds(max_bytes // 16)

    def get(
        self,
        pattern: Pattern,
        nq: int,
        nk: int | None = None,
        *,
        heads: int = 1,
        batch: int = 1,
        q_offset: int = 0,
        tile: tuple[int, int],
        device: str | int | torch.device = "cpu",
    ) -> BlockPlan:
        """Return the plan of a pattern, from the cache if possible; arguments as in :func:`ringweave.plan`."""
        if not isinstance(pattern, Pattern):
            refuse(pattern)
        nq, nk, heads, batch, q_offset = check_sizes(nq, nk, heads, batch, q_offset)
        pattern = pattern.bound(heads)._for_call()
        if pattern.has_function:
            pattern = pattern._recognised(Place(batch, heads, nq, nk, q_offset))
        made_of, device, tile = pattern.key(), _place(device), check_tile_size(tile)
        cache, sizes = self._decode_plans if nq <= tile[0] else self._plans, (nq, nk, heads, batch, q_offset, *tile)

        def make() -> BlockPlan:
            # imported with the first plan
            from .from_pattern import build

            return build(pattern, nq, nk, heads=heads, batch=batch, q_offset=q_offset, tile=tile, device=device)

        return self._found(cache, pattern, made_of, (*sizes, str(device)), device, make)

    def _by_query(self, pattern: Pattern, lists: Lists, extent: Extent, group: int) -> BlockPlan:
        """Return the plan of lists in tiles of one query; see :func:`~ringweave.plan.from_lists.by_query`.

        Args:
            pattern: The pattern that was split into the lists.
            lists: The lists.
            extent: The extent of the call; its tile is (1, keys).
            group: Number of query heads that share each list.
        """

        def make() -> BlockPlan:
            # imported with the first list of keys
            from .from_lists import by_query

            return by_query(lists, extent, group)

        cache = self._decode_plans if extent.nq == 1 else self._plans
        return self._found(cache, pattern, pattern.key(), (extent, group), torch.device("cpu"), make)

    def _found(
        self,
        cache: LRUCache[BlockPlan],
        pattern: Pattern,
        made_of: CacheKey,
        sizes: tuple[Hashable, ...],
        device: torch.device,
        make: Callable[[], BlockPlan],
    ) -> BlockPlan:
        key = (made_of.value, *sizes)
        plan = cache.get(key)
        if plan is not None:
            wait_for_stream(plan, device)
            return plan
        # one thread builds a plan; other threads with the same key wait for it
        with cache.making(key):
            plan = cache.get(key)
            if plan is not None:
                wait_for_stream(plan, device)
                return plan
            plan = make()
            made_of.check(pattern)
            if record_stream(plan, device):
                cache.put(key, plan, plan.nbytes + _PLAN_BYTES + made_of.nbytes, pattern._owners())
        return plan

    def statistics(self) -> CacheStatistics:
        """Return the counters, and the number and bytes of cached plans."""
        every = self._plans, self._decode_plans
        plans = sum(map(len, every))
        hits, misses, evictions, held = (
            sum(getattr(cache, name) for cache in every) for name in ("hits", "misses", "evictions", "nbytes")
        )
        return CacheStatistics(hits, misses, evictions, plans, held)

    def clear(self) -> None:
        """Drop all plans and counters."""
        self._plans.clear()
        self._decode_plans.clear()


def _place(device: str | int | torch.device) -> torch.device:
    """Add the current index to the device "cuda", as the devices of tensors have it."""
    device = named_device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


# approximate size of a parsed pattern, as a multiple of its text
_PARSED = 10


def pattern_of(spec: str, tables: Sequence[Tensor]) -> Pattern:
    """Read the pattern of a spec; patterns without tables and functions are cached."""
    pattern: Pattern | None = None if tables else PATTERNS.get(("pattern", spec))
    if pattern is None:
        from ..patterns.reader import rebuild

        pattern = rebuild(spec, tables)
        if pattern.fixed:
            PATTERNS.put(("pattern", spec), pattern, 2048 + _PARSED * len(spec))
    return pattern


#: The cache that attention calls use.
plan_cache = PlanCache()
plan_cache._plans, plan_cache._decode_plans = PLANS, DECODE_PLANS
