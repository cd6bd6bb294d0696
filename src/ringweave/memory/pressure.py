"""How much memory is left, by every limit that counts, and who gives some back."""

from __future__ import annotations

import ctypes
import inspect
import re
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .. import cache
from ..patterns.validate import named_device

_UNLIMITED = 2**60


class Pressure(NamedTuple):
    """What is left of memory under its tightest limit.

    Attributes:
        free: Bytes that can still be taken.
        total: Bytes that the limit allows in all.
        limit: Which one it is: ``"machine"``, ``"cgroup"``, ``"address space"`` or ``"device"``.
    """

    free: int
    total: int
    limit: str

    @property
    def free_share(self) -> float:
        """Divide what is free by the total."""
        return self.free / max(1, self.total)


def pressure(device: torch.device | str = "cpu", *, root: Path | str = "/") -> Pressure:
    """Ask how much memory is left.

    On a CPU of all limits the one that leaves least: the machine's memory, those of the process's control groups (v1
    and v2, with all that are above it; the one that slows down as well as the one that kills; file pages that can be
    dropped are free) and of its address space (RLIMIT_AS).

    Args:
        device: Whose memory; a GPU's own tells what it has.
        root: Where /proc and /sys are.
    Returns:
        The tightest limit.
    Example:
        >>> left = rw.memory.pressure()
        >>> 0 <= left.free <= left.total, 0 <= left.free_share <= 1
        (True, True)
    """
    device = named_device(device)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return Pressure(free, total, "device")
    root = Path(root)
    found = [_machine(root), *_cgroups(root), *_address_space(root)]
    return min(found)


def _machine(root: Path) -> Pressure:
    fields = _fields(root / "proc/meminfo")
    if {"MemAvailable", "MemTotal"} <= fields.keys():
        return Pressure(fields["MemAvailable"] * 1024, fields["MemTotal"] * 1024, "machine")
    try:
        import psutil
    except ImportError:
        return Pressure(_UNLIMITED, _UNLIMITED, "machine")
    memory = psutil.virtual_memory()
    return Pressure(memory.available, memory.total, "machine")


def _cgroups(root: Path) -> list[Pressure]:
    """What the process's groups leave, from its own upwards."""
    found = []
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers not in ("", "memory"):
            continue
        new = controllers == ""
        top = root / ("sys/fs/cgroup" if new else "sys/fs/cgroup/memory")
        limits, used, cache = (
            (("memory.max", "memory.high"), "memory.current", "inactive_file")
            if new
            else (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
        )
        # in a container its own group is mounted at the top, under another name than /proc knows
        folder = top / path.strip("/")
        for each in {top, *(p for p in (folder, *folder.parents) if p.is_relative_to(top))}:
            most = min((most for limit in limits if (most := _number(each / limit)) is not None), default=None)
            now = _number(each / used)
            if most is not None and now is not None and most < _UNLIMITED:
                now -= min(now, _fields(each / "memory.stat").get(cache, 0))
                found.append(Pressure(max(0, most - now), most, "cgroup"))
    return found


def _address_space(root: Path) -> list[Pressure]:
    if sys.platform == "win32":
        return []
    import resource

    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    used = _fields(root / "proc/self/status").get("VmSize")
    if most == resource.RLIM_INFINITY or used is None:
        return []
    return [Pressure(max(0, most - used * 1024), most, "address space")]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return []


# of 64 bits, in ASCII
_DECIMAL = re.compile("[0-9]{1,20}")


def _number(path: Path) -> int | None:
    text = "".join(_lines(path)[:1]).strip()
    return int(text) if _DECIMAL.fullmatch(text) else None


def _fields(path: Path) -> dict[str, int]:
    """Numbers by name, one a line, of a file of the system."""
    found = {}
    for line in _lines(path):
        name, *rest = line.replace(":", " ").split()[:2] or [""]
        if rest and _DECIMAL.fullmatch(rest[0]):
            found[name] = int(rest[0])
    return found


_callbacks: list[weakref.ref[Callable[[], int]]] = []


def on_trim(callback: Callable[[], int]) -> Callable[[], int]:
    """Have a function called by :func:`trim`: it gives back what it can, and says how many bytes that was.

    Args:
        callback: Takes nothing. It is held weakly: a function goes with its module, a method with its object.
    Returns:
        The function, so that this can be a decorator.
    Example:
        >>> kept = {"tables": torch.zeros(1000)}
        >>> @rw.memory.on_trim
        ... def forget() -> int:
        ...     return sum(table.nbytes for table in (kept.popitem()[1] for _ in range(len(kept))))
        >>> rw.memory.trim() >= 4000, kept
        (True, {})
    """
    kind: Any = weakref.WeakMethod if inspect.ismethod(callback) else weakref.ref
    # in one step each, which no thread and no signal handler comes between
    _callbacks.append(kind(callback, _callbacks.remove))
    return callback


def trim() -> int:
    """Give back what is held for later: idle scratch, cached plans and schedules, and what :func:`on_trim` was told of.

    All of it is made again when it is needed. On a GPU torch's own cache goes too, and the C library's
    freed memory to the system.

    Returns:
        Bytes that were given back, as far as they are counted.
    Example:
        >>> _ = rw.plan(rw.Causal(), 4096)
        >>> rw.memory.trim() > 0
        True
    """
    callbacks = [callback for each in list(_callbacks) if (callback := each()) is not None]
    total = cache.trim_all() + sum(callback() for callback in callbacks)
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    to_system()
    return total


def to_system() -> None:
    """Have the C library give back what was freed, where it is glibc, which keeps it."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if malloc_trim is not None:
        malloc_trim(ctypes.c_size_t(0))
