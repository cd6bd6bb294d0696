"""List the NUMA nodes with their processors and GPUs. To bind processes, use ``torchrun --numa-binding=node``.

The system places a page on the node of the processor that first writes to it. All memory of a bound process, including
pinned buffers, is therefore near its GPU, and ringweave does not place memory explicitly.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import torch


class Node(NamedTuple):
    """A NUMA node.

    Attributes:
        number: Number of the node in the system.
        processors: Numbers of the node's processors.
        total: Size of the node's memory in bytes.
    """

    number: int
    processors: tuple[int, ...]
    total: int


def nodes(root: Path | str = "/") -> tuple[Node, ...]:
    """List the machine's NUMA nodes by number; empty if the system does not report them.

    Args:
        root: Folder that contains /sys.
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
    """Return the number of the node that a GPU is attached to, or None if the system does not report it.

    Args:
        gpu: Index of the GPU in torch.
        root: Folder that contains /sys.
    """
    card: Any = torch.cuda.get_device_properties(gpu)
    place = f"{card.pci_domain_id:04x}:{card.pci_bus_id:02x}:{card.pci_device_id:02x}.0"
    text = _text(Path(root) / f"sys/bus/pci/devices/{place}/numa_node").strip()
    return int(text) if re.fullmatch("[0-9]{1,6}", text) else None


def described(root: Path | str = "/") -> str:
    """Describe the nodes, and how to bind processes to them, in one line.

    Args:
        root: Folder that contains /sys.
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
    """Parse a list of numbers such as ``0-3,8``."""
    found: list[int] = []
    for first, last in re.findall(r"\b([0-9]{1,6})(?:-([0-9]{1,6}))?\b", ranges):
        found.extend(range(int(first), int(last or first) + 1))
    return tuple(found)
