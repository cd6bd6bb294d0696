"""Which processors and GPUs lie near which memory. Binding is torch's: ``torchrun --numa-binding=node``.

A page lies near the processor that first writes to it, so what a bound process allocates, pinned buffers too, lies near
its GPU; there is nothing else to place.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import torch


class Node(NamedTuple):
    """One memory, and what lies near it.

    Attributes:
        number: The system's number.
        processors: Numbers of its processors.
        total: Its bytes.
    """

    number: int
    processors: tuple[int, ...]
    total: int


def nodes(root: Path | str = "/") -> tuple[Node, ...]:
    """List the machine's memories, by number; none where the system does not tell.

    Args:
        root: Where /sys is.
    Example:
        >>> all(node.total >= 0 for node in rw.memory.numa.nodes())
        True
    """
    found = []
    for folder in Path(root).glob("sys/devices/system/node/node[0-9]*"):
        if not folder.name[4:].isdecimal():
            continue
        kib = re.search(r"MemTotal:\s*([0-9]{1,18}) kB", _text(folder / "meminfo"))
        total = int(kib[1]) * 1024 if kib else 0
        found.append(Node(int(folder.name[4:]), _numbers(_text(folder / "cpulist")), total))
    return tuple(sorted(found))


def near(gpu: int, root: Path | str = "/") -> int | None:
    """Say near which node a GPU lies; None where the system does not tell.

    Args:
        gpu: Its index in torch.
        root: Where /sys is.
    """
    card: Any = torch.cuda.get_device_properties(gpu)
    place = f"{card.pci_domain_id:04x}:{card.pci_bus_id:02x}:{card.pci_device_id:02x}.0"
    text = _text(Path(root) / f"sys/bus/pci/devices/{place}/numa_node").strip()
    return int(text) if re.fullmatch("[0-9]{1,6}", text) else None


def described(root: Path | str = "/") -> str:
    """Say in a line what there is and what to do.

    Args:
        root: Where /sys is.
    """
    found = nodes(root)
    if len(found) < 2:
        return "one node: nothing to bind"
    counts = ", ".join(f"{node.number} ({len(node.processors)} processors)" for node in found)
    cards = [(gpu, near(gpu, root)) for gpu in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)]
    gpus = "".join(f"; cuda:{gpu} near {node}" for gpu, node in cards if node is not None)
    return f"{len(found)} nodes: {counts}{gpus}; bind workers by torchrun --numa-binding=node"


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", errors="replace")
    except OSError:
        return ""


def _numbers(ranges: str) -> tuple[int, ...]:
    """Read ``0-3,8``."""
    found: list[int] = []
    for first, last in re.findall(r"\b([0-9]{1,6})(?:-([0-9]{1,6}))?\b", ranges):
        found.extend(range(int(first), int(last or first) + 1))
    return tuple(found)
