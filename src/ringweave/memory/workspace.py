"""Scratch memory that is reused between calls. Ordinary tensors still come from torch's allocator."""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..cache import register_store
from ..checks import named_device
from ..errors import ShapeError, shown
from ..torch_compat import dispatched, transforming
from .pressure import pressure

# bytes of the smallest buffer
_LEAST = 256
# steps of sizes between two powers of two, for buffers of up to _LARGE bytes and for larger ones
_STEPS, _STEPS_OF_LARGE, _LARGE = 4, 16, 2**20
# idle bytes that are always allowed; beyond them a share of the recent peak of bytes in use, which doubles where freed
# buffers are missed
_FLOOR, _MOST_SHARE = 2**17, 2.0
# seconds between two queries of the system's free memory
_LOOK = 1.0
# share of free memory below which idle buffers are released
_TIGHT = 0.05


class WorkspaceStatistics(NamedTuple):
    """Counters of a workspace since its creation.

    Attributes:
        taken: Number of tensors handed out.
        reused: Number of tensors handed out from memory that was already allocated.
        buffers: Number of allocated buffers.
        held: Bytes of all buffers.
        asked: Bytes of the tensors in use, as requested.
        idle: Bytes of buffers that are not in use.
    """

    taken: int
    reused: int
    buffers: int
    held: int
    asked: int
    idle: int


class _Place(NamedTuple):
    device: str
    stream: int | None
    pinned: bool


class _Buffer:
    """One allocation of a size class, in use by one tensor or idle."""

    __slots__ = ("array", "asked", "bytes", "place", "size", "used")

    def __init__(self, place: _Place, size: int, device: torch.device):
        # ignore the caller's inference mode: the buffer outlives the call
        with torch.inference_mode(False):
            self.bytes = torch.empty(size, dtype=torch.uint8, device=device, pin_memory=place.pinned)
        self.array = self.bytes.numpy() if device.type == "cpu" else None
        # bytes of the tensor in use, and the time at which the buffer became idle
        self.place, self.size, self.asked, self.used = place, size, 0, 0.0

    def hand_out(self, nbytes: int) -> tuple[Any, Tensor]:
        """Return a lease, which is freed together with the tensor's storage, and a tensor over the first bytes."""
        if self.array is not None:
            array = self.array[:nbytes]
            return array, torch.from_numpy(array)
        lease = self.bytes[:nbytes]
        return lease, torch.from_dlpack(lease)


def size_class(nbytes: int) -> int:
    """Return the smallest size of a buffer that holds ``nbytes``: a power of two, or a step between two powers.

    Example:
        >>> [size_class(nbytes) for nbytes in (1, 256, 300, 1000, 1025)]
        [256, 256, 320, 1024, 1280]
    """
    if nbytes <= _LEAST:
        return _LEAST
    step = (1 << (nbytes - 1).bit_length() - 1) // (_STEPS if nbytes <= _LARGE else _STEPS_OF_LARGE)
    return -(-nbytes // step) * step


class Workspace:
    """A pool of reusable buffers per device and stream; safe to share between threads.

    A tensor's memory returns to the pool when the last reference to its storage is gone, including views, detached
    tensors and numpy arrays. Buffers have the sizes of classes: powers of two, with three sizes between two powers, and
    15 above 1 MiB. A tensor takes an idle buffer of its class, or of a class up to twice its size. Idle buffers are
    freed after ``idle_seconds``; the oldest ones if idle buffers exceed an eighth of the recent peak of bytes in use,
    or up to twice the peak if freed buffers are missed; and all of them when memory is short.

    Args:
        idle_seconds: Seconds after which an idle buffer is freed, at the next use of the workspace.
    Example:
        >>> space = rw.memory.Workspace()
        >>> x = space.take((2048, 64), torch.float32)
        >>> del x
        >>> y, z = space.take((2048, 64), torch.float32), space.take((2048, 64), torch.float32)
        >>> space.statistics().taken, space.statistics().reused
        (3, 1)
    """

    def __init__(self, idle_seconds: float = 60.0):
        self.idle_seconds = idle_seconds
        self._taken = self._reused = 0
        self.renew()
        register_store(self)

    def renew(self) -> None:
        """Reset the workspace in a forked process, where another thread may have left it half updated."""
        # Each change is one step, so that a thread that is interrupted anywhere, and enters again, finds a sound state.
        self._lock = threading.RLock()
        self._busy: set[_Buffer] = set()
        # idle buffers by place and size
        self._idle: dict[tuple[_Place, int], list[_Buffer]] = {}
        # buffers on their way back
        self._back: deque[_Buffer] = deque()
        self._peak, self._looked, self._aged = 0, -math.inf, time.monotonic()
        # idle bytes allowed, as a share of the peak, and the sizes of buffers that were freed to stay within them
        self._share, self._freed = 1 / 8, set[int]()

    def take(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device | str | int = "cpu",
        *,
        pinned: bool = False,
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
        nbytes = math.prod(shape) * dtype.itemsize
        if min(shape, default=0) < 0:
            raise ShapeError("shape", shown(tuple(shape)), "sizes of at least 0", "Correct it.")
        # a dispatch mode or transform may need other tensors, such as fake ones
        if nbytes == 0 or dispatched() or transforming():
            return torch.empty(shape, dtype=dtype, device=device, pin_memory=pinned)
        device = named_device(device)
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        on, number = (str(device), None) if stream is None else (str(stream.device), stream.stream_id)
        place, size = _Place(on, number, pinned), size_class(nbytes)
        with self._lock:
            self._settle()
            buffer = self._found(place, size)
            if buffer is None:
                self._make_room(size, device)
        reused = buffer is not None
        buffer = buffer or _Buffer(place, size, device)
        lease, tensor = buffer.hand_out(nbytes)
        buffer.asked = nbytes
        weakref.finalize(lease, self._return, buffer).atexit = False
        with self._lock:
            self._busy.add(buffer)
            self._taken, self._reused = self._taken + 1, self._reused + reused
            if not reused:
                self._peak = max(self._peak, self._in_use())
        del lease
        tensor = tensor.view(dtype).view(shape)
        if torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory:  # type: ignore[attr-defined]
            # torch.empty fills memory in this mode too
            real = dtype.is_floating_point or dtype.is_complex
            tensor.fill_(torch.nan if real else 1 if dtype == torch.bool else torch.iinfo(dtype).max)
        return tensor

    def trim(self, idle_seconds: float = 0.0) -> int:
        """Free idle buffers, and return their size in bytes.

        Args:
            idle_seconds: Minimum idle time in seconds of a buffer to free.
        """
        with self._lock:
            self._settle()
            return self._free(until=time.monotonic() - idle_seconds)

    def statistics(self) -> WorkspaceStatistics:
        """Return the counters of the workspace."""
        with self._lock:
            self._settle()
            busy, idle = self._busy.copy(), self._every_idle()
        asked, free = sum(x.asked for x in busy), sum(x.size for x in idle)
        held = free + sum(x.size for x in busy)
        return WorkspaceStatistics(self._taken, self._reused, len(busy) + len(idle), held, asked, free)

    def _return(self, buffer: _Buffer) -> None:
        # the garbage collector calls this at any point, and must not wait for another thread
        self._back.append(buffer)
        if self._lock.acquire(blocking=False):
            try:
                self._settle()
            finally:
                self._lock.release()

    def _settle(self) -> None:
        """Make returned buffers idle, and free buffers that have been idle too long."""
        now = time.monotonic()
        while self._back:
            buffer = self._back.popleft()
            # a buffer from before a fork does not belong to this workspace
            if buffer in self._busy:
                self._busy.discard(buffer)
                buffer.used = now
                self._idle.setdefault((buffer.place, buffer.size), []).append(buffer)
        if now - self._aged > self.idle_seconds:
            self._aged, self._peak = now, 0
            self._free(until=now - self.idle_seconds)

    def _found(self, place: _Place, size: int) -> _Buffer | None:
        """Take an idle buffer of the smallest class that has one, up to twice the size."""
        each = size
        while each <= 2 * size:
            if idle := self._idle.get((place, each)):
                return idle.pop()
            each = size_class(each + 1)
        return None

    def _make_room(self, size: int, device: torch.device) -> None:
        """Free idle buffers before a new allocation: all if memory is short, else the oldest beyond the bound."""
        now = time.monotonic()
        if now - self._looked > _LOOK and self._every_idle():
            self._looked = now
            if pressure(device).free_share < _TIGHT:
                self._free(until=now)
        if any(size <= each <= 2 * size for each in self._freed):
            # a buffer that was freed would have served
            self._share, self._freed = min(2 * self._share, _MOST_SHARE), set()
        self._free(most=max(_FLOOR, int(self._share * max(self._peak, self._in_use()))))

    def _in_use(self) -> int:
        return sum(buffer.size for buffer in self._busy.copy())

    def _every_idle(self) -> list[_Buffer]:
        return [buffer for idle in self._idle.copy().values() for buffer in idle]

    def _free(self, until: float = -math.inf, most: float = math.inf) -> int:
        """Free the buffers that became idle before ``until``, then the oldest beyond ``most`` bytes; return bytes."""
        every = sorted(self._every_idle(), key=lambda buffer: buffer.used)
        total, freed = sum(buffer.size for buffer in every), 0
        for buffer in every:
            if buffer.used > until and total - freed <= most:
                break
            idle = self._idle[buffer.place, buffer.size]
            if buffer in idle:
                idle.remove(buffer)
                freed += buffer.size
                if most < math.inf:
                    self._freed.add(buffer.size)
        return freed


#: Workspace that the backends take their scratch from.
scratch = Workspace()
