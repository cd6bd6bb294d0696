"""Every cache of the library on one page: what each holds, its key, its bounds, and who clears it.

    cache       holds                                                         key                        bound
    PROGRAMS    compiled calls; the branches of a pattern                     arguments; pattern, sizes  168 MiB, 4224
    PLANS       plans                                                         pattern, sizes, device     448 MiB, 1024
    STEPS       plans of one row of tiles, which decoding makes               as PLANS                   32 MiB, 256
    PATTERNS    facts about patterns: parsed text, boxes of grids, rows of    kind, and text or value    192 MiB, 8192
                relations, densities, tiles around tables, masks of models
    PLACEMENTS  where tokens lie around a ring; what a rank does then         patterns, sizes, ranks     512 MiB, 320
    COMPILED    functions that FlexAttention compiled                         shapes, types, terms       64
    beside      what backends make of a plan: lists, queues, masks            plan, and a name           the plan's life
    scratch     idle scratch memory (``memory/workspace.py``)                 device, size               the last peak

:func:`ringweave.memory.trim` clears all of them; what is made of a plan goes with the plan. A forked process begins
with empty ones. A ``PlanCache`` that a user makes, a mask function, and a ``ModelContext`` have caches with bounds of
their own, which trim clears too. What never changes while a process lives, such as whether a package is installed, is
a :func:`fact`.
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

from torch import Tensor

P = ParamSpec("P")
V = TypeVar("V")
R = TypeVar("R", covariant=True)


class _Tie(weakref.ref[object]):
    """A weak reference that knows the key of what falls with its object."""

    __slots__ = ("key",)
    key: Hashable


class _Making:
    """A value that is being made; weakly referred to by those who wait."""

    def __init__(self) -> None:
        self.lock = threading.RLock()


# whether this thread is making something
_here = threading.local()


def interrupted(lock: threading.RLock) -> bool:
    """Whether this very thread holds a lock: a signal handler, or the collector, has interrupted who does.

    It would wait for itself, and what it would find is half done: it goes past.
    """
    return lock._is_owned()  # type: ignore[attr-defined, no-any-return]


class _Entry(Generic[V]):
    __slots__ = ("nbytes", "tables", "ties", "value")

    def __init__(self, value: V, tables: tuple[Tensor, ...], nbytes: int, ties: tuple[_Tie, ...]):
        self.value, self.nbytes, self.ties = value, nbytes, ties
        # held so that an address in the key cannot be given to another table
        self.tables = tables


class LRUCache(Generic[V]):
    """Values by key, the least recently used first to go; safe to share between threads, and with signal handlers.

    Args:
        max_bytes: Bound on the bytes of values and of the tables that their keys name.
        most: Bound on their number.
    """

    def __init__(self, max_bytes: int, most: int):
        self.max_bytes, self.most = max_bytes, most
        self._entries: OrderedDict[Hashable, _Entry[V]] = OrderedDict()
        # keys whose objects are gone
        self._fallen: deque[_Tie] = deque()
        self._making: weakref.WeakValueDictionary[Hashable, _Making] = weakref.WeakValueDictionary()
        self._lock = threading.RLock()
        self.hits = self.misses = self.evictions = self.nbytes = 0
        #: Values by identity in front of the keys, for whoever fills and bounds it; dropped with the entries.
        self.front: dict[int, Any] = {}
        enlist(self)

    def like(self, max_bytes: int, most: int | None = None) -> LRUCache[V]:
        """Make an empty cache with bounds of its own for what this one holds; its number is the same unless given."""
        return LRUCache(max_bytes, self.most if most is None else most)

    def get(self, key: Hashable) -> V | None:
        """Look up what was put under a key; None where it has gone."""
        # as :func:`interrupted`, without a call
        if self._lock._is_owned():  # type: ignore[attr-defined]
            return None
        with self._lock:
            if self._fallen:
                self._drop_fallen()
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
            self.hits += 1
            return entry.value

    @contextmanager
    def making(self, key: Hashable) -> Iterator[None]:
        """Enter as the one thread that makes what a key stands for, while others wait.

        A signal handler that has interrupted who makes something never waits: others may wait for what it interrupted.
        """
        making = _Making()
        if not interrupted(self._lock):
            with self._lock:
                making = self._making.setdefault(key, making)
        outer = getattr(_here, "making", False)
        taken = making.lock.acquire(blocking=not outer)
        _here.making = True
        try:
            yield
        finally:
            _here.making = outer
            if taken:
                making.lock.release()

    def put(
        self, key: Hashable, value: V, nbytes: int, tables: Sequence[Tensor] = (), ties: Sequence[object] = ()
    ) -> None:
        """Keep a value, unless it is larger than the bound.

        Args:
            key: Where.
            value: What.
            nbytes: Its size, all told but for the tables.
            tables: What the key names by address.
            ties: Objects with which it goes; the value must not hold them.
        """
        nbytes += sum([table.nbytes for table in tables]) if tables else 0
        tied = tuple([_Tie(each, self._fall) for each in ties]) if ties else ()
        for tie in tied:
            tie.key = key
        if interrupted(self._lock):
            return
        with self._lock:
            self.misses += 1
            self._drop(key)
            if nbytes > self.max_bytes:
                return
            self._entries[key] = _Entry(value, tuple(tables), nbytes, tied)
            self.nbytes += nbytes
            while self.nbytes > self.max_bytes or len(self._entries) > self.most:
                self._drop(next(iter(self._entries)))
                self.evictions += 1

    def clear(self) -> None:
        """Drop everything, and the counts."""
        self.trim()
        self.hits = self.misses = self.evictions = 0

    def trim(self) -> int:
        """Drop everything, and no counts; the bytes that were held."""
        if interrupted(self._lock):
            return 0
        with self._lock:
            dropped, entries = self.nbytes, self._entries
            self._entries, self.nbytes = OrderedDict(), 0
        self.front.clear()
        # outside of the lock: what falls with a value may come here again
        entries.clear()
        return dropped

    def __len__(self) -> int:
        if not interrupted(self._lock):
            with self._lock:
                self._drop_fallen()
        return len(self._entries)

    def renew(self) -> None:
        """Begin anew in a forked process: another thread may have been at work in here."""
        self._lock, self._making = threading.RLock(), weakref.WeakValueDictionary()
        self._entries, self.nbytes = OrderedDict(), 0
        self.front.clear()

    def _fall(self, tie: _Tie) -> None:
        self._fallen.append(tie)
        # at once, unless the lock is held: then at the next use
        lock = self._lock
        if not interrupted(lock) and lock.acquire(blocking=False):
            try:
                self._drop_fallen()
            finally:
                lock.release()

    def _drop_fallen(self) -> None:
        while self._fallen:
            self._drop(self._fallen.popleft().key)

    def _drop(self, key: Hashable) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.nbytes -= entry.nbytes


# with trim() and renew()
_every: weakref.WeakSet[Any] = weakref.WeakSet()


def enlist(store: Any) -> None:
    """Have a store, as long as it lives, trimmed by :func:`trim_all`, and renewed in forked processes."""
    _every.add(store)


def trim_all() -> int:
    """Drop what every store holds and no call uses; it is made again when it is asked for. The bytes that were held."""
    return sum(each.trim() for each in list(_every))


def _renew_all() -> None:
    for each in list(_every):
        each.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_all)


# ---- the caches of the table above; their bounds are in bytes and number ---------------------------------------------

PROGRAMS: LRUCache[Any] = LRUCache(168 * 2**20, 4224)
PLANS: LRUCache[Any] = LRUCache(448 * 2**20, 1024)
STEPS: LRUCache[Any] = LRUCache(32 * 2**20, 256)
PATTERNS: LRUCache[Any] = LRUCache(192 * 2**20, 8192)
PLACEMENTS: LRUCache[Any] = LRUCache(512 * 2**20, 320)
# one byte each: their number bounds them
COMPILED: LRUCache[Any] = LRUCache(64, 64)
_beside: weakref.WeakKeyDictionary[Any, dict[Hashable, Any]] = weakref.WeakKeyDictionary()


def beside(owner: object) -> dict[Hashable, Any]:
    """Give the place for what is made of an object, such as a plan, and goes with it; by names of those who make it."""
    found = _beside.get(owner)
    return _beside.setdefault(owner, {}) if found is None else found


# ---- facts -----------------------------------------------------------------------------------------------------------


class Fact(Protocol[P, R]):
    """A function that remembers what it found."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Find it, or give what was found."""
        ...

    def cache_clear(self) -> None:
        """Forget it: the machine is another one, or so it seems to a test."""
        ...


#: Every fact by its module and name.
FACTS: dict[str, Fact[..., Any]] = {}


def fact(find: Callable[P, R]) -> Fact[P, R]:
    """Have a function remember what it finds, for each argument: something that never changes while the process lives.

    Such as whether a package is installed, or what a device can do. What depends on a call belongs to a cache with
    bounds.

    Example:
        >>> from ringweave.cache import fact
        >>> @fact
        ... def threads() -> int:
        ...     print("looked up")
        ...     return 4
        >>> threads() + threads()
        looked up
        8
    """
    made = cast(Fact[P, R], functools.cache(find))
    FACTS[f"{find.__module__}.{find.__qualname__}"] = made
    return made
