"""Plans by value: what was planned once is served again, within a budget of bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..patterns import Pattern, rebuild
from ..patterns.base import refuse
from ..patterns.checks import check_sizes, named_device, whole
from .block_plan import BlockPlan
from .build import build, check_tile


class CacheStatistics(NamedTuple):
    """Counters of a plan cache since it was made or cleared."""

    hits: int
    misses: int
    evictions: int
    plans: int
    nbytes: int


@dataclass
class _Entry:
    plan: BlockPlan
    # held so that an address in the key cannot be given to another table
    tables: tuple[Tensor, ...]
    nbytes: int


class PlanCache:
    """Least recently used plans, bounded in bytes; safe to share between threads.

    The key is the pattern's value: its text, and its tables by address and version. An entry holds its tables, so an
    address cannot come to mean another table, and a table written in place has another version.

    Args:
        max_bytes: Bound on the plans' and tables' bytes; a plan larger than that is built and not kept.
    Example:
        >>> cache = rw.PlanCache()
        >>> a, b = (cache.get(rw.Causal(), 256, 256, tile=(128, 128)) for _ in range(2))
        >>> a is b, cache.statistics().hits
        (True, 1)
    """

    def __init__(self, max_bytes: int = 512 * 2**20):
        self.max_bytes = whole("max_bytes", max_bytes, 0, 2**63 - 1)
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._lock = threading.Lock()
        self._building: dict[Hashable, threading.Lock] = {}
        self._hits = self._misses = self._evictions = self._nbytes = 0

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
        device: str | torch.device = "cpu",
    ) -> BlockPlan:
        """The plan of a pattern, from the cache or built; arguments as of :func:`ringweave.plan`."""
        if not isinstance(pattern, Pattern):
            refuse(pattern)
        nq, nk, heads, batch, q_offset = check_sizes(nq, nk, heads, batch, q_offset)
        tables, device, tile = pattern.tables, _place(device), check_tile(tile)
        key = (pattern.spec, table_keys(tables), nq, nk, heads, batch, q_offset, tile, str(device))
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                self._hits += 1
                self._entries.move_to_end(key)
                return entry.plan
            building = self._building.setdefault(key, threading.Lock())
        # one thread builds a plan, the others of the same key wait for it
        with building:
            with self._lock:
                entry = self._entries.get(key)
                if entry is not None:
                    self._hits += 1
                    return entry.plan
            try:
                plan = build(pattern, nq, nk, heads=heads, batch=batch, q_offset=q_offset, tile=tile, device=device)
                self._put(key, _Entry(plan, tables, plan.nbytes + sum(t.numel() * t.element_size() for t in tables)))
            finally:
                with self._lock:
                    self._building.pop(key, None)
        return plan

    def _put(self, key: Hashable, entry: _Entry) -> None:
        with self._lock:
            self._misses += 1
            if entry.nbytes > self.max_bytes:
                return
            self._entries[key] = entry
            self._nbytes += entry.nbytes
            while self._nbytes > self.max_bytes:
                _, old = self._entries.popitem(last=False)
                self._nbytes -= old.nbytes
                self._evictions += 1

    def statistics(self) -> CacheStatistics:
        """Hits, misses, evictions, and what is held now."""
        with self._lock:
            return CacheStatistics(self._hits, self._misses, self._evictions, len(self._entries), self._nbytes)

    def clear(self) -> None:
        """Drop all plans and counters."""
        with self._lock:
            self._entries.clear()
            self._hits = self._misses = self._evictions = self._nbytes = 0


def _place(device: str | torch.device) -> torch.device:
    """A device with its number: "cuda" is the current one, and tensors there say which that is."""
    device = named_device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def table_keys(tables: Sequence[Tensor]) -> tuple[Hashable, ...]:
    """What identifies tables while they are alive: address, version, layout."""
    return tuple(
        (t.data_ptr(), 0 if t.is_inference() else t._version, tuple(t.shape), t.stride(), t.dtype, str(t.device))
        for t in tables
    )


_MAX_PATTERNS = 4096
_patterns: OrderedDict[str, Pattern] = OrderedDict()
_patterns_lock = threading.Lock()


def pattern_of(spec: str, tables: Sequence[Tensor]) -> Pattern:
    """The pattern of a spec; those without tables are kept, being text alone."""
    if tables:
        return rebuild(spec, tables)
    with _patterns_lock:
        pattern = _patterns.get(spec)
    if pattern is None:
        pattern = rebuild(spec, ())
        with _patterns_lock:
            _patterns[spec] = pattern
            if len(_patterns) > _MAX_PATTERNS:
                _patterns.popitem(last=False)
    return pattern


#: The cache that attention uses.
plan_cache = PlanCache()
