"""Peak memory of the process: the CUDA allocator's peak, or the high-water mark of the resident set on Linux."""

from __future__ import annotations

import os
from pathlib import Path

import torch

_CLEAR, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


def is_known(device: torch.device) -> bool:
    """Whether the peak can be measured: on CUDA, and on Linux if the process may reset the high-water mark."""
    return device.type == "cuda" or os.access(_CLEAR, os.W_OK)


def begin(device: torch.device) -> None:
    """Reset the peak to the current use."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif is_known(device):
        _CLEAR.write_text("5", "ascii")


def in_use(device: torch.device) -> int:
    """Return the bytes in use now, or 0 if unknown."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return resident("VmRSS") if is_known(device) else 0


def highest(device: torch.device) -> int:
    """Return the peak use in bytes since :func:`begin`, or 0 if unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resident("VmHWM") if is_known(device) else 0


def resident(field: str = "VmRSS") -> int:
    """Return the resident bytes of the process; with ``"VmHWM"``, their peak since the last reset. Linux only."""
    lines = _STATUS.read_text("ascii", errors="replace").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
