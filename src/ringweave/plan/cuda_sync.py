"""What is kept on a GPU: it is used from other streams than its own, and by CUDA graphs, which hold addresses alone."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedError, message

# until what made a thing has run, the streams that use it have to wait; by the thing
_made: weakref.WeakKeyDictionary[Any, tuple[Any, Any, set[Any]]] = weakref.WeakKeyDictionary()
# what graphs read, as long as the process lives: nobody says when one is replayed for the last time
_in_graphs: set[object] = set()


def capturing(device: torch.device | str) -> bool:
    """Tell whether the current stream is captured in a CUDA graph: what is made then has no values before a replay."""
    return torch.device(device).type == "cuda" and torch.cuda.is_current_stream_capturing()


def waits(device: torch.device | str) -> None:
    """Raise, while a graph is captured, where the host is about to copy to a device or to read from it.

    Raises:
        UnsupportedError: That would end the capture.
    """
    if capturing(device):
        wanted = "a call that was made once before: what the host makes of a pattern is no part of a graph"
        raise UnsupportedError(message("plan", "none yet, while a CUDA graph is captured", wanted, "Call it before."))


def made(thing: object, device: torch.device) -> bool:
    """Note what was just made on the current stream; False: it must not be kept, being part of a graph's capture.

    Args:
        thing: A dataclass of tensors, which can be weakly referred to.
        device: Where they are.
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


def used(thing: object, device: torch.device) -> None:
    """Have the current stream wait for what was made on another one, and keep what a captured graph will read."""
    if device.type != "cuda":
        return
    if capturing(device):
        # it was made, and waited for, before the capture began
        _in_graphs.add(thing)
        return
    stream = torch.cuda.current_stream(device)
    known = _made.get(thing)
    if known is None or known[0] == stream or stream in known[2]:
        return
    stream.wait_event(known[1])
    # its memory is not given away while this stream still reads it
    for tensor in _tensors(thing):
        tensor.record_stream(stream)
    known[2].add(stream)


def _tensors(thing: object) -> Iterator[Tensor]:
    for value in vars(thing).values():
        if isinstance(value, Tensor):
            yield value
