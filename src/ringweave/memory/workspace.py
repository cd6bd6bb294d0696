"""Scratch that is kept from call to call. torch's caching allocator stays the owner of ordinary tensors."""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ..patterns.numbers import named_device
from ..recent import enlist
from .pressure import pressure

_SMALLEST = 64
# what may lie idle, beside as much as was in use at once: an eighth of it, and this
_SLACK, _FLOOR = 8, 2**20
# seconds between two looks at the system's memory
_LOOK = 1.0
# less free memory than that share of all is pressure
_TIGHT = 0.05


class WorkspaceStatistics(NamedTuple):
    """Counters of a workspace since it was made.

    Attributes:
        taken: Tensors that were given out.
        reused: Those of them over a buffer that was there.
        buffers: Buffers that are held.
        held: Their bytes.
        asked: Bytes that are in use, as they were asked for.
        idle: Bytes of buffers that nobody uses.
    """

    taken: int
    reused: int
    buffers: int
    held: int
    asked: int
    idle: int


# device, stream, whether page-locked
_Place = tuple[str, int | None, bool]


class _Buffer:
    """Bytes of one size class."""

    __slots__ = ("array", "bytes", "place", "size", "used")

    def __init__(self, place: _Place, nbytes: int, device: torch.device, pinned: bool):
        # of no mode of the caller's: it outlives the call
        with torch.inference_mode(False):
            self.bytes = torch.empty(nbytes, dtype=torch.uint8, device=device, pin_memory=pinned)
        self.array = self.bytes.numpy() if device.type == "cpu" else None
        self.place, self.size, self.used = place, nbytes, 0.0

    def lend(self, nbytes: int) -> tuple[Any, Tensor]:
        """Make a storage of its own over the first bytes, and what dies with that storage."""
        if self.array is not None:
            part = self.array[:nbytes]
            return part, torch.from_numpy(part)
        lease = self.bytes[:nbytes]
        return lease, torch.from_dlpack(lease)


class Workspace:
    """Buffers by size class, device and stream; safe to share between threads.

    A tensor is its own handle: its buffer comes back when the last tensor over its storage is gone (views, detached
    ones and numpy's arrays count), and never before. Sizes are rounded up to powers of two in quarter steps: a buffer
    that is made for a tensor is at most a quarter larger. What is held stays near the most that was in use at once of
    late (where another buffer would be too much, a larger one serves). Buffers that nobody has used for a while go, and
    all idle ones do when memory is short.

    Args:
        idle_seconds: After which an idle buffer goes, at the next use.
    Example:
        >>> space = rw.memory.Workspace()
        >>> x = space.take((256, 64), torch.float32)
        >>> del x
        >>> y = space.take((128, 100), torch.bfloat16)
        >>> space.statistics().taken, space.statistics().reused
        (2, 0)
        >>> del y
        >>> z = space.take((64, 256), torch.float32)
        >>> space.statistics().reused
        1
    """

    def __init__(self, idle_seconds: float = 60.0):
        self.idle_seconds = idle_seconds
        self._idle: dict[_Place, list[_Buffer]] = {}  # oldest first
        self._back: deque[tuple[_Buffer, int]] = deque()
        self._lock = threading.Lock()
        self._taken = self._reused = self._buffers = self._held = self._asked = self._busy = 0
        # the most bytes in use at once, in this period and in the one before
        self._peaks, self._since, self._looked = (0, 0), time.monotonic(), -math.inf
        enlist(self)

    def take(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu", *, pinned: bool = False
    ) -> Tensor:
        """Give out a contiguous tensor, its contents undefined as those of ``torch.empty``.

        Args:
            shape: Its sizes.
            dtype: Of any kind: buffers are bytes.
            device: Where; on a GPU for the current stream, and only there.
            pinned: Whether host memory is page-locked.
        """
        count = math.prod(shape)
        nbytes = count * dtype.itemsize
        if nbytes == 0 or _get_current_dispatch_mode() is not None:
            # a mode makes tensors of its own kind, such as those without data
            return torch.empty(shape, dtype=dtype, device=device, pin_memory=pinned)
        device = named_device(device)
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        size = size_class(nbytes)
        place = (str(device if stream is None else stream.device), None if stream is None else stream.stream_id, pinned)
        with self._lock:
            self._settle()
            self._taken += 1
            self._asked += nbytes
            buffer = self._found(place, size, device)
            self._busy += size if buffer is None else buffer.size
            self._peaks = max(self._peaks[0], self._busy), self._peaks[1]
            new = buffer is None
        try:
            if buffer is None:
                buffer = _Buffer(place, size, device, pinned)
            lease, tensor = buffer.lend(nbytes)
        except BaseException:
            with self._lock:
                self._taken -= 1
                self._asked -= nbytes
                self._busy -= size if buffer is None else buffer.size
            raise
        with self._lock:
            if new:
                self._held += size
                self._buffers += 1
            else:
                self._reused += 1
        weakref.finalize(lease, self._return, buffer, nbytes).atexit = False
        del lease
        tensor = tensor.view(dtype).view(shape)
        if torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory:  # type: ignore[attr-defined]
            # as torch.empty does
            tensor.fill_(torch.nan if dtype.is_floating_point else torch.iinfo(dtype).max)
        return tensor

    def trim(self, idle_seconds: float = 0.0) -> int:
        """Give idle buffers back to their allocator; the bytes of those.

        Args:
            idle_seconds: How long they have been idle at least.
        """
        with self._lock:
            self._settle()
            return self._trim(idle_seconds)

    def statistics(self) -> WorkspaceStatistics:
        """Count what was given out, and what is held now."""
        with self._lock:
            self._settle()
            return WorkspaceStatistics(
                self._taken, self._reused, self._buffers, self._held, self._asked, self._held - self._busy
            )

    def renew(self) -> None:
        """Begin anew in a forked process: another thread may have been at work in here."""
        self._buffers -= sum(map(len, self._idle.values()))
        self._lock, self._idle, self._held = threading.Lock(), {}, self._busy

    def _return(self, buffer: _Buffer, nbytes: int) -> None:
        # a collector may run this anywhere, with the lock held by this very thread
        self._back.append((buffer, nbytes))
        if self._lock.acquire(blocking=False):
            try:
                self._settle()
            finally:
                self._lock.release()

    def _settle(self) -> None:
        """Put what has come back among the idle, and let go of what is too much or too old."""
        now = time.monotonic()
        while self._back:
            buffer, nbytes = self._back.popleft()
            buffer.used = now
            self._busy -= buffer.size
            self._asked -= nbytes
            self._idle.setdefault(buffer.place, []).append(buffer)
        if now - self._since > self.idle_seconds:
            self._trim(self.idle_seconds)
            self._peaks, self._since = (self._busy, self._peaks[0]), now
        self._trim_to(self._most(self._busy))

    def _found(self, place: _Place, size: int, device: torch.device) -> _Buffer | None:
        """Look for an idle buffer: of the size, and else, where another would be too much, the least larger one."""
        idle = self._idle.get(place, [])
        fitting = [each for each in idle if each.size == size][-1:]
        if not fitting and self._held + size > self._most(self._busy + size):
            fitting = sorted((each for each in idle if each.size > size), key=lambda each: each.size)[:1]
        if fitting:
            idle.remove(fitting[0])
            return fitting[0]
        now = time.monotonic()
        if now - self._looked > _LOOK and any(self._idle.values()):
            self._looked = now
            if pressure(device).free_share < _TIGHT:
                self._trim(0.0)
        # before there is more of it
        self._trim_to(self._most(self._busy + size) - size)
        return None

    def _most(self, busy: int) -> int:
        """What may be held in all, where so much is in use."""
        most = max(busy, *self._peaks)
        return most + max(most // _SLACK, _FLOOR)

    def _trim_to(self, most: int) -> None:
        """Let the oldest idle buffers go until no more is held than that."""
        while self._held > most and (idle := [each for each in self._idle.values() if each]):
            self._drop(min(idle, key=lambda each: each[0].used))

    def _trim(self, idle_seconds: float) -> int:
        before, until = self._held, time.monotonic() - idle_seconds
        for each in self._idle.values():
            while each and each[0].used <= until:
                self._drop(each)
        return before - self._held

    def _drop(self, idle: list[_Buffer]) -> None:
        self._held -= idle.pop(0).size
        self._buffers -= 1


def size_class(nbytes: int) -> int:
    """Round up to a power of two in quarter steps.

    Example:
        >>> from ringweave.memory.workspace import size_class
        >>> [size_class(n) for n in (1, 512, 1025, 1300, 2**20 + 1)]
        [64, 512, 1280, 1536, 1310720]
    """
    step = max(_SMALLEST, 1 << max(0, (nbytes - 1).bit_length() - 3))
    return -(-nbytes // step) * step


#: What the backends take their scratch from.
scratch = Workspace()
