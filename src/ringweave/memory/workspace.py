"""Scratch that is kept from call to call. torch's caching allocator stays the owner of ordinary tensors."""

from __future__ import annotations

import math
import threading
import time
import weakref
from bisect import bisect_left, insort
from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..cache import enlist, interrupted
from ..errors import ShapeError, message, shown
from ..patterns.validate import named_device
from ..torch_compat import dispatched, transforming
from .pressure import pressure

# blocks begin at multiples of that many bytes
_ALIGN = 256
# smaller tensors have segments of their own: one that is kept for long holds no large segment
_SMALL = 2**16
# a tensor from here on gets a segment of its size, smaller ones share what they are cut from
_LARGE, _SHARED = 2**20, 2**22
# what may lie idle, beside as much as was in use at once: an eighth of it, or this
_SLACK, _FLOOR = 8, 2**17
# tensors that are given out between two looks back at how much was in use
_TURN = 96
# seconds between two looks at the system's memory
_LOOK = 1.0
# less free memory than that share of all is pressure
_TIGHT = 0.05


class WorkspaceStatistics(NamedTuple):
    """Counters of a workspace since it was made.

    Attributes:
        taken: Tensors that were given out.
        reused: Those of them over memory that was there.
        buffers: Buffers that are held: allocations, each for one tensor or several.
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


# device, stream, whether page-locked, whether for small tensors
_Place = tuple[str, int | None, bool, bool]


class _Buffer:
    """One allocation, which is cut into blocks."""

    __slots__ = ("array", "bytes", "place", "size", "used")

    def __init__(self, place: _Place, size: int, device: torch.device):
        # of no mode of the caller's: it outlives the call
        with torch.inference_mode(False):
            self.bytes = torch.empty(size, dtype=torch.uint8, device=device, pin_memory=place[2])
        self.array = self.bytes.numpy() if device.type == "cpu" else None
        self.place, self.size, self.used = place, size, 0.0


class _Block:
    """A stretch of a buffer, in use or idle, and its neighbours there."""

    __slots__ = ("after", "before", "buffer", "idle", "size", "start")

    def __init__(self, buffer: _Buffer, start: int, size: int, before: _Block | None, after: _Block | None):
        self.buffer, self.start, self.size = buffer, start, size
        self.before, self.after, self.idle = before, after, False

    def lend(self, nbytes: int) -> tuple[Any, Tensor]:
        """Make a storage of its own over the first bytes, and what dies with that storage."""
        part = slice(self.start, self.start + nbytes)
        if self.buffer.array is not None:
            array = self.buffer.array[part]
            return array, torch.from_numpy(array)
        lease = self.buffer.bytes[part]
        return lease, torch.from_dlpack(lease)


def _size(block: _Block) -> int:
    return block.size


class Workspace:
    """Buffers by device and stream, cut to the sizes that are asked for; safe to share between threads.

    A tensor is its own handle: its bytes come back when the last tensor over its storage is gone (views, detached
    ones and numpy's arrays count), and never before. It is cut from the smallest idle block that holds it, and joins
    its idle neighbours again. What is held stays near the most that was in use at once of late: in the last minute or
    two where calls come and go, among the last few hundred tensors where most stay while some are replaced. Buffers
    that nobody has used for a while go, and all idle ones do when memory is short.

    Args:
        idle_seconds: After which an idle buffer goes, at the next use.
    Example:
        >>> space = rw.memory.Workspace()
        >>> x = space.take((2048, 64), torch.float32)
        >>> del x
        >>> y, z = space.take((1024, 64), torch.float32), space.take((1024, 64), torch.float32)
        >>> space.statistics().taken, space.statistics().reused
        (3, 2)
    """

    def __init__(self, idle_seconds: float = 60.0):
        self.idle_seconds = idle_seconds
        self._back: deque[tuple[_Block, int]] = deque()
        self._taken = self._reused = 0
        # the most bytes in use at once, in this period and in the one before
        self._peaks, self._since, self._looked = (0, 0), time.monotonic(), -math.inf
        # and the least, in this turn and in the one before
        self._turns = [(0, 0), (0, 0)]
        # what may lie idle beside the peak, as a part of it, and the largest buffer that was too much
        self._slack, self._missed = _SLACK, 0
        self.renew()
        enlist(self)

    def renew(self) -> None:
        """Begin anew in a forked process: another thread may have been at work in here."""
        self._lock = threading.RLock()
        self._buffers: set[_Buffer] = set()
        # by size
        self._idle: dict[_Place, list[_Block]] = {}
        self._held = self._asked = self._busy = 0

    def take(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu", *, pinned: bool = False
    ) -> Tensor:
        """Give out a contiguous tensor, its contents undefined as those of ``torch.empty``.

        Args:
            shape: Its sizes.
            dtype: Of any kind: buffers are bytes.
            device: Where; on a GPU for the current stream, and only there.
            pinned: Whether host memory is page-locked.
        Raises:
            ShapeError: A size below 0.
        """
        count = math.prod(shape)
        nbytes = count * dtype.itemsize
        if min(shape, default=0) < 0:
            raise ShapeError(message("shape", shown(tuple(shape)), "sizes of at least 0", "Correct it."))
        if nbytes == 0 or dispatched() or transforming() or interrupted(self._lock):
            # a mode or a transform makes tensors of its own kind, such as those without data
            return torch.empty(shape, dtype=dtype, device=device, pin_memory=pinned)
        device = named_device(device)
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        where = (str(device), None) if stream is None else (str(stream.device), stream.stream_id)
        size = -(-nbytes // _ALIGN) * _ALIGN
        place = (*where, pinned, size < _SMALL)
        with self._lock:
            self._settle()
            self._begin(size, nbytes)
            block = self._found(place, size)
            room = 0 if block is not None else self._room(place, size, device)
        try:
            if block is None:
                block = _Block(_Buffer(place, room, device), 0, room, None, None)
            lease, tensor = block.lend(nbytes)
        except BaseException:
            with self._lock:
                self._taken -= 1
                self._busy -= size
                self._asked -= nbytes
                if block is not None and not room:
                    self._join(block)
            raise
        with self._lock:
            if room:
                self._buffers.add(block.buffer)
                self._held += room
                self._cut(block, size)
            else:
                self._reused += 1
            # only now: what memory did not hold is no measure of what is needed
            self._peaks = max(self._peaks[0], self._busy), self._peaks[1]
            most, least = self._turns[0]
            self._turns[0] = max(most, self._busy), least
        weakref.finalize(lease, self._return, block, nbytes).atexit = False
        del lease
        tensor = tensor.view(dtype).view(shape)
        if torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory:  # type: ignore[attr-defined]
            # as torch.empty does
            number = dtype.is_floating_point or dtype.is_complex
            tensor.fill_(torch.nan if number else 1 if dtype == torch.bool else torch.iinfo(dtype).max)
        return tensor

    def trim(self, idle_seconds: float = 0.0) -> int:
        """Give idle buffers back to their allocator; the bytes of those.

        Args:
            idle_seconds: How long they have been idle at least.
        """
        if interrupted(self._lock):
            return 0
        with self._lock:
            self._settle()
            return self._trim(idle_seconds)

    def statistics(self) -> WorkspaceStatistics:
        """Count what was given out, and what is held now."""
        if not interrupted(self._lock):
            with self._lock:
                self._settle()
        idle = self._held - self._busy
        return WorkspaceStatistics(self._taken, self._reused, len(self._buffers), self._held, self._asked, idle)

    def _return(self, block: _Block, nbytes: int) -> None:
        # a collector may run this anywhere
        self._back.append((block, nbytes))
        lock = self._lock
        if not interrupted(lock) and lock.acquire(blocking=False):
            try:
                self._settle()
            finally:
                lock.release()

    def _settle(self) -> None:
        """Join what has come back to what is idle, and let go of what is too much or too old."""
        now = time.monotonic()
        while self._back:
            block, nbytes = self._back.popleft()
            # what a forked process has from before it only keeps alive
            if block.buffer in self._buffers:
                block.buffer.used = now
                self._busy -= block.size
                self._asked -= nbytes
                self._join(block)
        most, least = self._turns[0]
        self._turns[0] = most, min(least, self._busy)
        if now - self._since > self.idle_seconds:
            self._trim(self.idle_seconds)
            self._peaks, self._since = (self._busy, self._peaks[0]), now
        self._trim_to(self._most())

    def _begin(self, size: int, nbytes: int) -> None:
        """Count a tensor."""
        if self._taken % _TURN == 0:
            self._turns = [(self._busy, self._busy), self._turns[0]]
        self._taken += 1
        self._busy += size
        self._asked += nbytes

    def _found(self, place: _Place, size: int) -> _Block | None:
        """Take the smallest idle block that is large enough, cut to the size."""
        idle = self._idle.get(place, [])
        at = bisect_left(idle, size, key=_size)
        if at == len(idle):
            return None
        block = idle.pop(at)
        block.idle = False
        self._cut(block, size)
        return block

    def _cut(self, block: _Block, size: int) -> None:
        """Leave a block that size; the rest is idle."""
        if block.size == size:
            return
        rest = _Block(block.buffer, block.start + size, block.size - size, block, block.after)
        if rest.after is not None:
            rest.after.before = rest
        block.after, block.size = rest, size
        self._lay_down(rest)

    def _join(self, block: _Block) -> None:
        """Make a block idle, one with its idle neighbours."""
        for low, high in ((block, block.after), (block.before, block)):
            other = high if low is block else low
            if low is None or high is None or other is None or not other.idle:
                continue
            self._pick_up(other)
            low.size += high.size
            low.after = high.after
            if low.after is not None:
                low.after.before = low
            block = low
        self._lay_down(block)

    def _lay_down(self, block: _Block) -> None:
        block.idle = True
        insort(self._idle.setdefault(block.buffer.place, []), block, key=_size)

    def _pick_up(self, block: _Block) -> None:
        idle = self._idle[block.buffer.place]
        # the first of its size, or one of those behind it
        del idle[idle.index(block, bisect_left(idle, block.size, key=_size))]
        block.idle = False

    def _room(self, place: _Place, size: int, device: torch.device) -> int:
        """Say how large a buffer for a tensor shall be, once there is room for it."""
        now = time.monotonic()
        if now - self._looked > _LOOK and any(self._idle.values()):
            self._looked = now
            if pressure(device).free_share < _TIGHT:
                self._trim(0.0)
        if self._missed >= size:
            # one that was let go of would have served
            self._slack, self._missed = max(1, self._slack // 2), 0
        shared = min(_LARGE if place[3] else _SHARED, self._held // 8 // _ALIGN * _ALIGN)
        room = size if size >= _LARGE else max(size, shared)
        # before there is more of it
        self._trim_to(self._most() - room)
        return room

    def _most(self) -> int:
        """What may be held in all."""
        if self._stays():
            peak, slack = max(self._busy, *(most for most, _ in self._turns)), _SLACK
        else:
            peak, slack = max(self._busy, *self._peaks), self._slack
        return peak + max(peak // slack, _FLOOR)

    def _stays(self) -> bool:
        """Tell whether most of what is in use stays: no call ends, after which the next one needs as much again."""
        return 4 * min(least for _, least in self._turns) > max(most for most, _ in self._turns)

    def _trim_to(self, most: int) -> None:
        """Let the oldest idle buffers go until no more is held than that."""
        while self._held > most and (whole := self._whole()):
            gone = self._drop(min(whole, key=lambda each: each.buffer.used))
            self._missed = self._missed if self._stays() else max(self._missed, gone)

    def _trim(self, idle_seconds: float) -> int:
        until = time.monotonic() - idle_seconds
        return sum(self._drop(each) for each in self._whole() if each.buffer.used <= until)

    def _whole(self) -> list[_Block]:
        """Buffers of which nothing is in use."""
        return [each for idle in self._idle.values() for each in idle if each.size == each.buffer.size]

    def _drop(self, block: _Block) -> int:
        self._pick_up(block)
        self._buffers.remove(block.buffer)
        self._held -= block.size
        return block.size


#: What the backends take their scratch from.
scratch = Workspace()
