"""A failure at each line of a call, one after another: what a call changes, it changes when nothing can fail any more.

A test makes a fresh state for each line, lets the call fail there, compares the state with that before the call, and
repeats the call::

    for number in range(1, len(executed(lambda: step(fresh()))) + 1):
        state = fresh()
        if fails(lambda: step(state), number):
            assert same(state, fresh())
            assert torch.equal(step(state), wanted)

A call that finds a plan in a cache has fewer lines than the first one, so the last numbers may not fail.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

#: Endings of the names of files that a test traces; by default all files of the package.
Files = tuple[str, ...] | None


class Stop(KeyboardInterrupt):
    """The failure: like Ctrl-C no Exception, so that no handler takes it for an error that it knows."""


def executed(call: Callable[[], object], files: Files = None) -> list[tuple[str, int]]:
    """Return (file, line) of each line of the package that a call executes, in order, repeated ones too."""
    seen: list[tuple[str, int]] = []
    _traced(call, files, lambda frame: seen.append((frame.f_code.co_filename, frame.f_lineno)))
    return seen


def fails(call: Callable[[], object], number: int, files: Files = None) -> bool:
    """Raise Stop before line ``number`` that a call executes, counted from 1; return whether the call ended with it."""
    left = number

    def count(frame: FrameType) -> None:
        nonlocal left
        left -= 1
        if not left:
            raise Stop(f"{frame.f_code.co_filename}:{frame.f_lineno}")

    try:
        _traced(call, files, count)
    except Stop:
        return True
    return False


def _traced(call: Callable[[], object], files: Files, line: Callable[[FrameType], None]) -> None:
    def starts(frame: FrameType, *_: Any) -> Any:
        name = frame.f_code.co_filename
        if not (name.endswith(files) if files else "/ringweave/" in name):
            return None
        entered = set[int]()

        def local(frame: FrameType, event: str, _: Any) -> Any:
            if event == "line" and not _finalizing(frame):
                if not linecache.getline(name, frame.f_lineno).lstrip().startswith("with "):
                    line(frame)
                elif frame.f_lineno not in entered:
                    # Python traces this line again before it leaves the block, where no signal is handled
                    entered.add(frame.f_lineno)
                    line(frame)
            return local

        return local

    before = sys.gettrace()
    sys.settrace(starts)
    try:
        call()
    finally:
        sys.settrace(before)


def _finalizing(frame: FrameType | None) -> bool:
    """Return whether a finalizer runs: Python prints its exceptions, and no call ends with them."""
    while frame is not None:
        if frame.f_code.co_name in ("_return", "_on_owner_gone"):
            return True
        frame = frame.f_back
    return False
