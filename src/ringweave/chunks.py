"""The memory that a loop over chunks takes: one budget of bytes for all loops."""

from __future__ import annotations

from collections.abc import Iterator

import torch

# Bytes of a chunk. Measured: on a CPU a chunk should fit its caches and still be large enough to amortise about ten
# operator calls. Elsewhere it is a bounded part of the memory.
_BUDGET, _BUDGET_ELSEWHERE = 2**23, 2**28


def budget(device: torch.device | str) -> int:
    """Return the bytes of a chunk on a device."""
    return _BUDGET if torch.device(device).type == "cpu" else _BUDGET_ELSEWHERE


def at_once(nbytes: int, device: torch.device | str = "cpu") -> int:
    """Return the number of items of a chunk, at least 1, if each item takes ``nbytes`` bytes."""
    return max(1, budget(device) // max(1, nbytes))


def chunks(length: int, nbytes: int, device: torch.device | str = "cpu") -> Iterator[slice]:
    """Cut ``length`` items of ``nbytes`` bytes each into ranges, each of a chunk.

    Example:
        >>> from ringweave.chunks import chunks
        >>> list(chunks(5, 2**22))
        [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    step = at_once(nbytes, device)
    return (slice(first, min(first + step, length)) for first in range(0, length, step))
