"""Declare every cache of the library, with its contents, key and bounds.

    cache         holds                                                       key                        bound
    PROGRAMS      compiled calls; the branches of a pattern                   arguments; pattern, sizes  168 MiB, 4224
    PLANS         plans                                                       pattern, sizes, device     448 MiB, 1024
    DECODE_PLANS  plans of decoding steps, which have one row of tiles        as PLANS                   32 MiB, 256
    PATTERNS      parsed text, boxes of grids, rows of relations, densities,  kind, and text or value    192 MiB, 8192
                  tiles around tables, masks of models and BlockMasks, score
                  functions that were compared with their graphs, their terms,
                  lengths of sequences in pages
    PLACEMENTS    placements of tokens around a ring, and the work of a rank  patterns, sizes, ranks     512 MiB, 320
    COMPILED      functions that FlexAttention compiled                       shapes, types, terms       64
    derived       a backend's lists, queues and masks for a plan              plan, and a name           the plan's life
    scratch       idle scratch memory (``memory/workspace.py``)               device, size               the last peak

:func:`ringweave.memory.trim` clears all of them; values derived from a plan also go with the plan. A forked process
starts with empty caches. A ``PlanCache`` that a user makes, a mask function, and a ``ModelContext`` have separate
caches with separate bounds; trim clears these too. A value that never changes while a process lives, such as whether a
package is installed, is in a :func:`process_cache`.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, cast

P = ParamSpec("P")
V = TypeVar("V")
R = TypeVar("R", covariant=True)


class _OwnerRef(weakref.ref[object]):
    """A weak reference with the key of the entry to drop when its object is gone."""

    __slots__ = ("key",)
    key: Hashable


class _Entry(Generic[V]):
    __slots__ = ("nbytes", "owners", "value")

    def __init__(self, value: V, nbytes: int, owners: tuple[_OwnerRef, ...]):
        self.value, self.nbytes, self.owners = value, nbytes, owners


class LRUCache(Generic[V]):
    """A cache that evicts the least recently used entry; safe to use from several threads.

    Args:
        max_bytes: Bound on the bytes of values and of the tables that their keys keep alive.
        most: Bound on the number of entries.
    """

    def __init__(self, max_bytes: int, most: int):
        self.max_bytes, self.most = max_bytes, most
        self._entries: OrderedDict[Hashable, _Entry[V]] = OrderedDict()
        # references to owners that are gone; their entries are still to be dropped
        self._gone: deque[_OwnerRef] = deque()
        # the lock of a value that is being made lives as long as a thread refers to it
        self._making: weakref.WeakValueDictionary[Hashable, threading.Lock] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()
        self.hits = self.misses = self.evictions = self.nbytes = 0
        #: Values by identity, to be tried before the keys. The user of the cache fills and bounds it; trim empties it.
        self.front: dict[int, Any] = {}
        register_store(self)

    def with_bounds(self, max_bytes: int) -> LRUCache[V]:
        """Make an empty cache for the same kind and number of values with another bound on their bytes."""
        return LRUCache(max_bytes, self.most)

    def get(self, key: Hashable) -> V | None:
        """Return the value of a key, or None if there is none."""
        with self._lock:
            if self._gone:
                self._drop_gone()
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
            self.hits += 1
            return entry.value

    @contextmanager
    def making(self, key: Hashable) -> Iterator[None]:
        """Enter as the one thread that makes the value of a key, while other threads wait."""
        with self._lock:
            making = self._making.setdefault(key, threading.Lock())
        with making:
            yield

    def put(self, key: Hashable, value: V, nbytes: int, owners: Sequence[object] = ()) -> None:
        """Store a value, unless it is larger than the bound.

        Args:
            nbytes: Bytes of the value, and of tensors that the key keeps alive.
            owners: Objects that the entry must not outlive; the value must not refer to them.
        """
        refs = tuple([_OwnerRef(each, self._on_owner_gone) for each in owners]) if owners else ()
        for ref in refs:
            ref.key = key
        with self._lock:
            self.misses += 1
            with self._counted():
                self._drop(key)
                if nbytes > self.max_bytes:
                    return
                self._entries[key] = _Entry(value, nbytes, refs)
                self.nbytes += nbytes
                while self.nbytes > self.max_bytes or len(self._entries) > self.most:
                    self._drop(next(iter(self._entries)))
                    self.evictions += 1

    def clear(self) -> None:
        """Drop all entries and reset the counts."""
        self.trim()
        self.hits = self.misses = self.evictions = 0

    def trim(self) -> int:
        """Drop all entries, keep the counts, and return the number of bytes dropped."""
        with self._lock:
            dropped, entries = self.nbytes, self._entries
            self._entries, self.nbytes = OrderedDict(), 0
        self.front.clear()
        # outside of the lock, since a finalizer of a value may enter this cache
        entries.clear()
        return dropped

    def __len__(self) -> int:
        with self._lock:
            self._drop_gone()
            return len(self._entries)

    def renew(self) -> None:
        """Replace lock and entries in a forked process: another thread may have held the lock during the fork."""
        self._lock, self._making = threading.Lock(), weakref.WeakValueDictionary()
        self._entries, self.nbytes = OrderedDict(), 0
        self.front.clear()

    def _on_owner_gone(self, ref: _OwnerRef) -> None:
        self._gone.append(ref)
        # The garbage collector may call this at any point, even while this thread holds the lock: immediately if it is
        # free, otherwise at the next use.
        lock = self._lock
        if lock.acquire(blocking=False):
            try:
                self._drop_gone()
            finally:
                lock.release()

    def _drop_gone(self) -> None:
        with self._counted():
            while self._gone:
                self._drop(self._gone.popleft().key)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Count the bytes anew if Ctrl-C interrupts a change between an entry and its bytes."""
        try:
            yield
        except BaseException:
            self.nbytes = sum(each.nbytes for each in self._entries.values())
            raise

    def _drop(self, key: Hashable) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.nbytes -= entry.nbytes


# objects with trim() and renew()
_every: weakref.WeakSet[Any] = weakref.WeakSet()


def register_store(store: Any) -> None:
    """Register a store, weakly, to be trimmed by :func:`trim_all` and renewed in forked processes."""
    _every.add(store)


def trim_all() -> int:
    """Drop everything that stores hold and no call uses, and return its bytes; it is made again when needed."""
    return sum(each.trim() for each in list(_every))


def _renew_all() -> None:
    for each in list(_every):
        each.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_all)


# ---- the caches of the table above; their bounds are bytes and number of entries -------------------------------------

PROGRAMS: LRUCache[Any] = LRUCache(168 * 2**20, 4224)
PLANS: LRUCache[Any] = LRUCache(448 * 2**20, 1024)
DECODE_PLANS: LRUCache[Any] = LRUCache(32 * 2**20, 256)
PATTERNS: LRUCache[Any] = LRUCache(192 * 2**20, 8192)
PLACEMENTS: LRUCache[Any] = LRUCache(512 * 2**20, 320)
# each entry counts one byte, so that the number bounds them
COMPILED: LRUCache[Any] = LRUCache(64, 64)
_derived: weakref.WeakKeyDictionary[Any, dict[Hashable, Any]] = weakref.WeakKeyDictionary()


def derived_values(owner: object) -> dict[Hashable, Any]:
    """Return the dict of values derived from an object, such as a plan; it is dropped with the object."""
    found = _derived.get(owner)
    return _derived.setdefault(owner, {}) if found is None else found


# ---- values that never change in a process ---------------------------------------------------------------------------


class ProcessCache(Protocol[P, R]):
    """A function that caches its results for the life of the process."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Return the cached result, computing it first if needed."""
        ...

    def cache_clear(self) -> None:
        """Forget all results, for tests that simulate another machine."""
        ...


#: Every function with a process cache, by its module and name.
PROCESS_CACHES: dict[str, ProcessCache[..., Any]] = {}


def process_cache(find: Callable[P, R]) -> ProcessCache[P, R]:
    """Cache a function's result for each argument, without bounds; it must never change while the process lives.

    Examples are whether a package is installed, or the capabilities of a device. Results that depend on a call belong
    to a cache with bounds.

    Example:
        >>> from ringweave.cache import process_cache
        >>> @process_cache
        ... def threads() -> int:
        ...     print("looked up")
        ...     return 4
        >>> threads() + threads()
        looked up
        8
    """
    made = cast(ProcessCache[P, R], functools.cache(find))
    PROCESS_CACHES[f"{find.__module__}.{find.__qualname__}"] = made
    return made
