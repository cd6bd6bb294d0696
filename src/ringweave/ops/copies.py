"""Copies between the host and a GPU that go on while it computes, and what has to wait for what.

There are three lines of work: the host, which fills and empties page-locked memory; copies, one after the other, on a
stream of their own; computing, on the caller's stream. The host gives both others their work and goes on. Nothing waits
by itself: not a copy for what was computed, and not the host for a copy.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor

from ..errors import UnsupportedError, message
from ..plan.streams import capturing


class Copies:
    """Memory on both sides, and the order of work, by the streams and events of CUDA or ROCm.

    Args:
        device: Where to, and back from.
    Raises:
        UnsupportedError: While a CUDA graph is captured: the host is no part of it.
    """

    def __init__(self, device: torch.device):
        if capturing(device):
            wanted = f"tensors on {device} while a CUDA graph is captured"
            raise UnsupportedError(message("k, v", "tensors on the host", wanted, "Make this call outside of graphs."))
        self.device = device
        self._computing: Any = torch.cuda.current_stream(device)
        self._copying: Any = torch.cuda.Stream(device)

    def on_host(self, nbytes: int) -> Tensor:
        """Take page-locked bytes."""
        # loaded when it is needed
        from ..memory.workspace import scratch

        return scratch.take((nbytes,), torch.uint8, pinned=True)

    def on_device(self, nbytes: int) -> Tensor:
        """Take bytes of the device; what was computed before may still use them."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def copy(self, to: Tensor, of: Tensor) -> Any:
        """Copy bytes, after the copies before; the event of its end."""
        with torch.cuda.stream(self._copying):
            to.copy_(of, non_blocking=True)
            return self._copying.record_event()

    def computed(self) -> Any:
        """Give the event of the end of what is to be computed so far."""
        return self._computing.record_event()

    def copy_after(self, event: Any) -> None:
        """Let copies from now on wait."""
        self._copying.wait_event(event)

    def compute_after(self, event: Any) -> None:
        """Let what is computed from now on wait."""
        self._computing.wait_event(event)

    def wait(self, event: Any) -> None:
        """Let the host wait."""
        event.synchronize()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        # what copies read and write may go then
        self._copying.synchronize()
