"""Free memory under every limit that applies to the process, and the functions that release cached memory."""

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

if sys.platform != "win32":
    import resource

from .. import cache
from ..checks import named_device

_UNLIMITED = 2**60


class Pressure(NamedTuple):
    """Free memory under the tightest limit.

    Attributes:
        free: Bytes that can still be allocated.
        total: Bytes that the limit allows in total.
        limit: Name of the limit: ``"machine"``, ``"cgroup"``, ``"address space"`` or ``"device"``.
    """

    free: int
    total: int
    limit: str

    @property
    def free_share(self) -> float:
        """Free bytes divided by total bytes."""
        return self.free / max(1, self.total)


def pressure(device: torch.device | str | int = "cpu", *, root: Path | str = "/") -> Pressure:
    """Return the free memory under the tightest limit.

    On a CPU the limits are the machine's memory, the process's control groups with all their parents (v1 and v2; in v2
    both memory.max, which kills, and memory.high, which throttles), and the address space (RLIMIT_AS). File pages of a
    control group that the kernel can drop count as free.

    Args:
        device: Device of the memory; a GPU reports its free memory.
        root: Folder that contains /proc and /sys.
    Returns:
        The limit with the fewest free bytes.
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
    """Return the free memory of the process's control group and of each of its parents."""
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
        # in a container, the process's group is mounted at the top, so the path in /proc may not exist there
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


# an unsigned 64-bit number in ASCII digits (int() would also accept others)
_DECIMAL = re.compile("[0-9]{1,20}")


def _number(path: Path) -> int | None:
    text = "".join(_lines(path)[:1]).strip()
    return int(text) if _DECIMAL.fullmatch(text) else None


def _fields(path: Path) -> dict[str, int]:
    """Read a system file with one name and number per line."""
    found = {}
    for line in _lines(path):
        name, *rest = line.replace(":", " ").split()[:2] or [""]
        if rest and _DECIMAL.fullmatch(rest[0]):
            found[name] = int(rest[0])
    return found


_callbacks: list[weakref.ref[Callable[[], int]]] = []


def on_trim(callback: Callable[[], int]) -> Callable[[], int]:
    """Register a function that :func:`trim` calls to release memory.

    Args:
        callback: Function without arguments that releases what it can and returns the number of released bytes. It is
            held by a weak reference, so a method does not keep its object alive.
    Returns:
        The function, so that this can be used as a decorator.
    Example:
        >>> kept = {"tables": torch.zeros(1000)}
        >>> @rw.memory.on_trim
        ... def forget() -> int:
        ...     return sum(table.nbytes for table in (kept.popitem()[1] for _ in range(len(kept))))
        >>> rw.memory.trim() >= 4000, kept
        (True, {})
    """
    kind: Any = weakref.WeakMethod if inspect.ismethod(callback) else weakref.ref
    # append and remove are atomic, so threads cannot corrupt the list
    _callbacks.append(kind(callback, _callbacks.remove))
    return callback


def trim() -> int:
    """Release idle scratch, cached plans and schedules, and the memory of functions registered with :func:`on_trim`.

    The caches are filled again on demand. On a GPU, torch's allocator cache is emptied too. On Linux, the C library
    returns freed memory to the system.

    Returns:
        Number of released bytes, without those of torch's and the C library's caches.
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
    """Return freed memory to the system on glibc, which otherwise keeps it for later allocations."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if malloc_trim is not None:
        malloc_trim(ctypes.c_size_t(0))
