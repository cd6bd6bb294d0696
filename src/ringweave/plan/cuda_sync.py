"""Synchronise cached tensors on a GPU with other streams, and keep them alive for CUDA graphs that read them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedError

# for each object: the stream that made it, an event after its making, and the streams that have waited for the event
_made: weakref.WeakKeyDictionary[Any, tuple[Any, Any, set[Any]]] = weakref.WeakKeyDictionary()
# objects that captured graphs read, kept forever, since the last replay of a graph cannot be detected
_in_graphs: set[object] = set()


def capturing(device: torch.device | str) -> bool:
    """Return whether a CUDA graph is captured on the current stream; new tensors then have no values until a replay."""
    return torch.device(device).type == "cuda" and torch.cuda.is_current_stream_capturing()


def require_no_capture(device: torch.device | str) -> None:
    """Raise if a graph is being captured; call this before a copy between host and device.

    Raises:
        UnsupportedError: A graph is being captured, which the copy would end.
    """
    if capturing(device):
        wanted = "a plan from an earlier call, since the host cannot make one during the capture"
        raise UnsupportedError("plan", "none yet, while a CUDA graph is captured", wanted, "Call it before.")


def record_stream(thing: object, device: torch.device) -> bool:
    """Record that an object was made on the current stream; return False if a graph captured it: do not cache it then.

    Args:
        thing: A dataclass of tensors, and tuples of tensors, that supports weak references.
        device: Device of the tensors.
    """
    if device.type != "cuda":
        return True
    if capturing(device):
        _in_graphs.add(thing)
        return False
    stream = torch.cuda.current_stream(device)
    event = torch.cuda.Event()
    event.record(stream)
    _made[thing] = (stream, event, set())
    return True


def wait_for_stream(thing: object, device: torch.device) -> None:
    """Make the current stream wait for an object from another stream; keep the object if a graph is being captured."""
    if device.type != "cuda":
        return
    if capturing(device):
        # no wait is needed: the object was made, and waited for, before the capture began
        _in_graphs.add(thing)
        return
    stream = torch.cuda.current_stream(device)
    known = _made.get(thing)
    if known is None or known[0] == stream or stream in known[2]:
        return
    stream.wait_event(known[1])
    # the allocator must not reuse the memory while this stream may read it
    for tensor in _tensors(thing):
        tensor.record_stream(stream)
    known[2].add(stream)


def _tensors(thing: object) -> Iterator[Tensor]:
    for value in vars(thing).values():
        yield from (each for each in (value if isinstance(value, tuple) else (value,)) if isinstance(each, Tensor))
