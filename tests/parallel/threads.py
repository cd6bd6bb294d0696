"""Ranks as threads of one process: an exchange without sockets, for what needs no process of its own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ringweave.parallel.transport import Transport


class Group:
    def __init__(self, size: int):
        self.size = size
        self.barrier = threading.Barrier(size, timeout=60)
        self.table: dict[Any, Any] = {}
        self.queues = {(a, b): queue.Queue() for a in range(size) for b in range(size)}


class Done:
    def wait(self) -> None: ...


class Threaded(Transport):
    def __init__(self, group: Group, rank: int):
        super().__init__(None)
        self.shared, self.rank, self.size = group, rank, group.size

    def _swap(self, mine: Any) -> list[Any]:
        self.shared.table[self.rank] = mine
        self.shared.barrier.wait()
        every = [self.shared.table[rank] for rank in range(self.size)]
        self.shared.barrier.wait()
        return every

    def agree(self, header: Tensor, *, what: str) -> Tensor:
        self.step += 1
        return torch.stack(self._swap(header))

    def all_to_all(
        self, received: Tensor, received_splits: Sequence[int], sent: Tensor, sent_splits: Sequence[int], *, what: str
    ) -> Done:
        every = self._swap((sent.clone(), list(sent_splits)))
        at = 0
        for peer, (data, splits) in enumerate(every):
            first = sum(splits[: self.rank])
            size = splits[self.rank]
            assert received_splits[peer] == size, (
                f"rank {self.rank} expects {received_splits[peer]} bytes of {peer}, which sends {size}"
            )
            received[at : at + size] = data[first : first + size]
            at += size
        return Done()

    def exchange(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], *, stage: int, what: str
    ) -> Any:
        mine: dict[int, list[Tensor]] = {}
        for peer, data in sends:
            mine.setdefault(peer, []).append(data.clone())
        for peer, messages in mine.items():
            for m in messages:
                if m.numel():
                    self.shared.queues[self.rank, peer].put(m)
        outer = self

        class Later:
            def wait(self) -> None:
                for peer, buffer in receives:
                    if buffer.numel():
                        data = outer.shared.queues[peer, outer.rank].get(timeout=60)
                        assert data.numel() == buffer.numel(), (data.numel(), buffer.numel())
                        buffer.copy_(data)

        return Later()


def run(size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    group = Group(size)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            results[rank] = function(Threaded(group, rank), *args)
        except BaseException as error:  # noqa: BLE001  (raised below)
            errors.append(error)
            group.barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    real = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)] or errors
    if real:
        raise real[0]
    return results
