"""The most memory that a process held: the CUDA allocator's figure, or the resident set's high-water mark on Linux."""

from __future__ import annotations

import os
from pathlib import Path

import torch

_CLEAR, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


def is_known(device: torch.device) -> bool:
    """Whether the highest use can be measured: on CUDA, and on Linux where the mark may be reset."""
    return device.type == "cuda" or os.access(_CLEAR, os.W_OK)


def begin(device: torch.device) -> None:
    """Reset the highest use to the use now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif is_known(device):
        _CLEAR.write_text("5", "ascii")


def held(device: torch.device) -> int:
    """Bytes in use now; 0 where they are not known."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return resident("VmRSS") if is_known(device) else 0


def highest(device: torch.device) -> int:
    """The most bytes in use since :func:`begin`; 0 where they are not known."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resident("VmHWM") if is_known(device) else 0


def resident(field: str = "VmRSS") -> int:
    """Bytes of the process that lie in memory; ``"VmHWM"``: the most since the mark was reset. Linux only."""
    lines = _STATUS.read_text("ascii", errors="replace").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
