"""The ranks that a measurement runs on: this process among them, and smaller groups of the first few."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ...parallel import Transport

T = TypeVar("T")


class Ranks:
    """All ranks that torchrun has started, of which this process is one.

    Attributes:
        rank: This one.
        size: How many.
        seconds: For which a wait may last: another rank may be busy with what only one computes.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._groups: dict[int, dist.ProcessGroup | None] = {1: None, self.size: dist.group.WORLD}
        self._carriers: dict[int, Transport] = {}

    def group(self, count: int) -> dist.ProcessGroup | None:
        """The group of the first ``count`` ranks, which are those that may ask once :meth:`on` has made it."""
        return self._groups[count]

    def on(self, count: int, job: Callable[[Transport], T]) -> list[T]:
        """Call a job on the first ``count`` ranks, each with its transport; the results by rank, on every rank."""
        if count not in self._groups:
            self._groups[count] = dist.new_group(list(range(count)))
        if self.rank < count and count not in self._carriers:
            self._carriers[count] = Transport(self._groups[count], deadline=self.seconds, opening=self.seconds)
        found: Any = job(self._carriers[count]) if self.rank < count else None
        return self.gathered(found)[:count]

    def gathered(self, value: T) -> list[T]:
        """Everybody's value, by rank."""
        every: list[Any] = [None] * self.size
        dist.all_gather_object(every, value)
        return every

    def nodes(self, count: int) -> DeviceMesh:
        """The ranks as a mesh (nodes, ranks of a node)."""
        return init_device_mesh("cpu", (count, self.size // count), mesh_dim_names=("node", "cp"))

    def hang_up(self) -> None:
        """End the connections of what has run so far."""
        for carrier in self._carriers.values():
            carrier.close()
        self._carriers.clear()

    def close(self) -> None:
        """End all connections, and the group."""
        self.hang_up()
        dist.destroy_process_group()
