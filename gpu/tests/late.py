"""A simulated device on which copies happen as late as waits allow, with a race detector.

The target of a copy holds NaN until a wait, and the source is read only then. Each stream of work (host, copies,
computing) has a vector clock. Two accesses to one memory race if one is a write and neither happens before the other.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

HOST, COMPUTING, COPYING = range(3)


class RaceError(AssertionError):
    """Two streams of work use one memory without a wait between them."""


class Event(NamedTuple):
    clock: tuple[int, ...]
    copies: int


class Late(TorchDispatchMode):
    """Copies from host to host; used as a context, it also checks accesses to its memory.

    Args:
        forgotten: Kind and index (from 0) of a wait to leave out.
    """

    def __init__(self, forgotten: tuple[str, int] | None = None):
        super().__init__()
        self.forgotten = forgotten
        self.calls: Counter[str] = Counter()
        #: Number of copied bytes.
        self.sent = self.returned = 0
        self.closed = False
        self._clocks = [[0] * 3 for _ in range(3)]
        self._queue: list[tuple[int, StorageWeakRef, int, StorageWeakRef, int]] = []
        self._done = 0
        # memory by address, with its last accesses: (stream, tick, whether it wrote)
        self._lines: dict[int, int] = {}
        self._used: dict[int, list[tuple[int, int, bool]]] = {}
        self._held: list[Tensor] = []

    # ---- the interface of copies -------------------------------------------------------------------------------------

    def on_host(self, nbytes: int) -> Tensor:
        return self._memory(nbytes, HOST)

    def on_device(self, nbytes: int) -> Tensor:
        memory = self._memory(nbytes, COMPUTING)
        # earlier work on the computing stream may have used this memory
        self._access(COMPUTING, memory, wrote=True)
        return memory

    def copy(self, to: Tensor, of: Tensor) -> Event:
        assert to.dtype == of.dtype == torch.uint8
        assert to.is_contiguous()
        assert of.is_contiguous()
        assert to.numel() == of.numel()
        back = self._lines.get(_address(to)) == HOST
        if back:
            self.returned += to.numel()
            if _address(of) not in self._lines:
                # gradients were written by the latest work on the computing stream
                self._lines[_address(of)] = COMPUTING
                self._used[_address(of)] = [(COMPUTING, self._clocks[COMPUTING][COMPUTING], True)]
        else:
            self.sent += to.numel()
        self._given(COPYING)
        self._access(COPYING, of, wrote=False)
        self._access(COPYING, to, wrote=True)
        ctypes.memset(to.data_ptr(), 255, to.numel())
        sides = (StorageWeakRef(x.untyped_storage()) for x in (to, of))
        of_to, of_of = sides
        self._queue.append((to.data_ptr(), of_to, of.data_ptr(), of_of, to.numel()))
        return Event(tuple(self._clocks[COPYING]), len(self._queue))

    def computed(self) -> Event:
        self._given(COMPUTING)
        return Event(tuple(self._clocks[COMPUTING]), 0)

    def copy_after(self, event: Event) -> None:
        self._after("copy_after", COPYING, event)

    def compute_after(self, event: Event) -> None:
        self._after("compute_after", COMPUTING, event)

    def wait(self, event: Event) -> None:
        self._after("wait", HOST, event)

    def __enter__(self) -> Self:
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._finish(len(self._queue))
        self.closed = True

    # ---- who uses what -----------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        listed = [*zip(func._schema.arguments, args, strict=False)]
        listed += [(each, kwargs[each.name]) for each in func._schema.arguments if each.name in kwargs]
        for argument, value in listed:
            wrote = argument.alias_info is not None and argument.alias_info.is_write
            # taking a view is not an access
            if argument.alias_info is not None and not wrote:
                continue
            for x in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(x, Tensor) and _address(x) in self._lines:
                    self._access(self._lines[_address(x)], x, wrote)
        return func(*args, **kwargs)

    def _memory(self, nbytes: int, line: int) -> Tensor:
        memory = torch.full((nbytes,), 255, dtype=torch.uint8)
        self._lines[_address(memory)] = line
        # keep the memory, so that its address is not reused
        self._held.append(memory)
        return memory

    def _given(self, line: int) -> None:
        """Launch work on a stream: it happens after everything that the host has done."""
        self._join(line, self._clocks[HOST])

    def _join(self, line: int, clock: Any) -> None:
        self._clocks[line] = [max(pair) for pair in zip(self._clocks[line], clock, strict=True)]

    def _access(self, line: int, memory: Tensor, wrote: bool) -> None:
        self._given(line)
        self._clocks[line][line] += 1
        before = self._used.setdefault(_address(memory), [])
        for other, tick, written in before:
            if (wrote or written) and self._clocks[line][other] < tick:
                raise RaceError(f"line {line} {'writes' if wrote else 'reads'} what line {other} uses")
        before.append((line, self._clocks[line][line], wrote))

    def _after(self, kind: str, line: int, event: Event) -> None:
        self.calls[kind] += 1
        if self.forgotten == (kind, self.calls[kind] - 1):
            return
        self._given(line)
        self._join(line, event.clock)
        self._clocks[line][line] += 1
        if line != COPYING:
            self._finish(event.copies)

    def _finish(self, copies: int) -> None:
        for to, of_to, of, of_of, nbytes in self._queue[self._done : copies]:
            assert not of_to.expired(), "memory went while it was copied to"
            assert not of_of.expired(), "memory went while it was copied from"
            ctypes.memmove(to, of, nbytes)
        self._done = max(self._done, copies)


def _address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
