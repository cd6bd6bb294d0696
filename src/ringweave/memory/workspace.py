"""Scratch memory that is reused between calls. Ordinary tensors still come from torch's allocator."""

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

from ..cache import enlist
from ..checks import named_device
from ..errors import ShapeError, shown
from ..torch_compat import dispatched, transforming
from .pressure import pressure

# alignment of blocks in bytes
_ALIGN = 256
# Tensors below this size use separate buffers, so that a small long-lived tensor does not keep a large buffer alive.
_SMALL = 2**16
# Tensors of at least _LARGE bytes get a buffer of their size; smaller ones share buffers of at most _SHARED bytes.
_LARGE, _SHARED = 2**20, 2**22
# Idle memory allowed on top of the recent peak: the peak divided by _SLACK, but at least _FLOOR bytes.
_SLACK, _FLOOR = 8, 2**17
# number of tensors in one turn; the least and most bytes in use are recorded per turn
_TURN = 96
# seconds between two queries of the system's free memory
_LOOK = 1.0
# share of free memory below which idle buffers are released
_TIGHT = 0.05


class WorkspaceStatistics(NamedTuple):
    """Counters of a workspace since its creation.

    Attributes:
        taken: Number of tensors handed out.
        reused: Number of tensors handed out from memory that was already allocated.
        buffers: Number of allocated buffers; a buffer can hold several tensors.
        held: Bytes of all buffers.
        asked: Bytes of the tensors in use, as requested (before alignment).
        idle: Allocated bytes that are not in use.
    """

    taken: int
    reused: int
    buffers: int
    held: int
    asked: int
    idle: int


# device, stream, whether the memory is page-locked, whether the buffer is for small tensors
_Place = tuple[str, int | None, bool, bool]


class _Buffer:
    """One allocation, divided into blocks."""

    __slots__ = ("array", "bytes", "place", "size", "used")

    def __init__(self, place: _Place, size: int, device: torch.device):
        # ignore the caller's inference mode: the buffer outlives the call
        with torch.inference_mode(False):
            self.bytes = torch.empty(size, dtype=torch.uint8, device=device, pin_memory=place[2])
        self.array = self.bytes.numpy() if device.type == "cpu" else None
        self.place, self.size, self.used = place, size, 0.0


class _Block:
    """A part of a buffer, in use or idle, linked to its neighbours."""

    __slots__ = ("after", "before", "buffer", "idle", "size", "start")

    def __init__(self, buffer: _Buffer, start: int, size: int, before: _Block | None, after: _Block | None):
        self.buffer, self.start, self.size = buffer, start, size
        self.before, self.after, self.idle = before, after, False

    def lend(self, nbytes: int) -> tuple[Any, Tensor]:
        """Return a lease, which is freed together with the tensor's storage, and a tensor over the first bytes."""
        part = slice(self.start, self.start + nbytes)
        if self.buffer.array is not None:
            array = self.buffer.array[part]
            return array, torch.from_numpy(array)
        lease = self.buffer.bytes[part]
        return lease, torch.from_dlpack(lease)


def _size(block: _Block) -> int:
    return block.size


class Workspace:
    """A pool of reusable buffers per device and stream; safe to share between threads.

    A tensor's memory returns to the pool when the last reference to its storage is gone, including views, detached
    tensors and numpy arrays. A tensor is cut from the smallest idle block that holds it; on return, the block is merged
    with its idle neighbours. The allocated bytes stay near the recent peak of bytes in use: the peak of the last one or
    two minutes if calls come and go, or of the last few hundred tensors if most of the memory stays in use. Buffers
    that have been idle for ``idle_seconds`` are freed, and all idle buffers are freed when memory is short.

    Args:
        idle_seconds: Seconds after which an idle buffer is freed, at the next use of the workspace.
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
        # peak of the bytes in use, in the current and in the previous period of idle_seconds
        self._peaks, self._since, self._looked = (0, 0), time.monotonic(), -math.inf
        # (most, least) bytes in use, in the current and in the previous turn
        self._turns = [(0, 0), (0, 0)]
        # divisor of the peak that gives the allowed idle bytes, and the largest buffer freed to stay within them
        self._slack, self._missed = _SLACK, 0
        self.renew()
        enlist(self)

    def renew(self) -> None:
        """Reset the workspace in a forked process, where another thread may have left it half updated."""
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        """Hold no buffers any more; those in use are freed when they are returned."""
        self._buffers: set[_Buffer] = set()
        # sorted by size
        self._idle: dict[_Place, list[_Block]] = {}
        self._held = self._asked = self._busy = 0

    def take(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu", *, pinned: bool = False
    ) -> Tensor:
        """Return a contiguous tensor with undefined contents, like ``torch.empty``.

        Args:
            shape: Shape of the tensor.
            dtype: Dtype of the tensor.
            device: Device of the tensor. On a GPU, the tensor may only be used on the current stream.
            pinned: Whether to page-lock host memory.
        Raises:
            ShapeError: A size is negative.
        """
        count = math.prod(shape)
        nbytes = count * dtype.itemsize
        if min(shape, default=0) < 0:
            raise ShapeError("shape", shown(tuple(shape)), "sizes of at least 0", "Correct it.")
        if nbytes == 0 or dispatched() or transforming():
            # a dispatch mode or transform may need other tensors, such as fake ones
            return torch.empty(shape, dtype=dtype, device=device, pin_memory=pinned)
        device = named_device(device)
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        where = (str(device), None) if stream is None else (str(stream.device), stream.stream_id)
        size = -(-nbytes // _ALIGN) * _ALIGN
        place = (*where, pinned, size < _SMALL)
        try:
            tensor = self._taken_from(place, size, nbytes, device)
        except KeyboardInterrupt:
            # it may have left a change half done
            with self._lock:
                self._forget()
            raise
        tensor = tensor.view(dtype).view(shape)
        if torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory:  # type: ignore[attr-defined]
            # torch.empty fills memory in this mode too
            number = dtype.is_floating_point or dtype.is_complex
            tensor.fill_(torch.nan if number else 1 if dtype == torch.bool else torch.iinfo(dtype).max)
        return tensor

    def _taken_from(self, place: _Place, size: int, nbytes: int, device: torch.device) -> Tensor:
        """Return ``nbytes`` bytes of a block of the size."""
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
            # update the peak only after the allocation succeeded
            self._peaks = max(self._peaks[0], self._busy), self._peaks[1]
            most, least = self._turns[0]
            self._turns[0] = max(most, self._busy), least
        weakref.finalize(lease, self._return, block, nbytes).atexit = False
        del lease
        return tensor

    def trim(self, idle_seconds: float = 0.0) -> int:
        """Free idle buffers, and return their size in bytes.

        Args:
            idle_seconds: Minimum idle time in seconds of a buffer to free.
        """
        with self._lock:
            self._settle()
            return self._trim(idle_seconds)

    def statistics(self) -> WorkspaceStatistics:
        """Return the counters of the workspace."""
        with self._lock:
            self._settle()
        idle = self._held - self._busy
        return WorkspaceStatistics(self._taken, self._reused, len(self._buffers), self._held, self._asked, idle)

    def _return(self, block: _Block, nbytes: int) -> None:
        # The garbage collector may call this at any point, even while this thread holds the lock, so only queue the
        # block and process the queue if the lock is free.
        self._back.append((block, nbytes))
        lock = self._lock
        if lock.acquire(blocking=False):
            try:
                self._settle()
            finally:
                lock.release()

    def _settle(self) -> None:
        """Make returned blocks idle, and free buffers that exceed the limit or have been idle too long."""
        try:
            self._settle_all()
        except KeyboardInterrupt:
            self._forget()
            raise

    def _settle_all(self) -> None:
        now = time.monotonic()
        while self._back:
            block, nbytes = self._back.popleft()
            # skip blocks from before a fork: their buffers no longer belong to this workspace
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
        """Update the counters for a new tensor."""
        if self._taken % _TURN == 0:
            self._turns = [(self._busy, self._busy), self._turns[0]]
        self._taken += 1
        self._busy += size
        self._asked += nbytes

    def _found(self, place: _Place, size: int) -> _Block | None:
        """Take the smallest idle block that is large enough, and cut it to the size; None if there is none."""
        idle = self._idle.get(place, [])
        at = bisect_left(idle, size, key=_size)
        if at == len(idle):
            return None
        block = idle.pop(at)
        block.idle = False
        self._cut(block, size)
        return block

    def _cut(self, block: _Block, size: int) -> None:
        """Shrink a block to the size, and make the rest an idle block."""
        if block.size == size:
            return
        rest = _Block(block.buffer, block.start + size, block.size - size, block, block.after)
        if rest.after is not None:
            rest.after.before = rest
        block.after, block.size = rest, size
        self._lay_down(rest)

    def _join(self, block: _Block) -> None:
        """Make a block idle, and merge it with its idle neighbours."""
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
        # several idle blocks can have this size; search from the first of them
        del idle[idle.index(block, bisect_left(idle, block.size, key=_size))]
        block.idle = False

    def _room(self, place: _Place, size: int, device: torch.device) -> int:
        """Return the size of the new buffer for a tensor, after freeing idle buffers to make room for it."""
        now = time.monotonic()
        if now - self._looked > _LOOK and any(self._idle.values()):
            self._looked = now
            if pressure(device).free_share < _TIGHT:
                self._trim(0.0)
        if self._missed >= size:
            # a buffer that was freed would have served: allow more idle memory
            self._slack, self._missed = max(1, self._slack // 2), 0
        shared = min(_LARGE if place[3] else _SHARED, self._held // 8 // _ALIGN * _ALIGN)
        room = size if size >= _LARGE else max(size, shared)
        # free before allocating, so that the total stays within the limit
        self._trim_to(self._most() - room)
        return room

    def _most(self) -> int:
        """Return the limit of the allocated bytes."""
        if self._stays():
            peak, slack = max(self._busy, *(most for most, _ in self._turns)), _SLACK
        else:
            peak, slack = max(self._busy, *self._peaks), self._slack
        return peak + max(peak // slack, _FLOOR)

    def _stays(self) -> bool:
        """Whether most of the memory stays in use, so that use does not fall and rise again from call to call."""
        return 4 * min(least for _, least in self._turns) > max(most for most, _ in self._turns)

    def _trim_to(self, most: int) -> None:
        """Free idle buffers, the least recently used first, until at most ``most`` bytes are allocated."""
        while self._held > most and (whole := self._whole()):
            gone = self._drop(min(whole, key=lambda each: each.buffer.used))
            self._missed = self._missed if self._stays() else max(self._missed, gone)

    def _trim(self, idle_seconds: float) -> int:
        until = time.monotonic() - idle_seconds
        return sum(self._drop(each) for each in self._whole() if each.buffer.used <= until)

    def _whole(self) -> list[_Block]:
        """Return the idle blocks that cover a whole buffer."""
        return [each for idle in self._idle.values() for each in idle if each.size == each.buffer.size]

    def _drop(self, block: _Block) -> int:
        self._pick_up(block)
        self._buffers.remove(block.buffer)
        self._held -= block.size
        return block.size


#: Workspace that the backends take their scratch from.
scratch = Workspace()
