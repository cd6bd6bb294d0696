"""Run ranks as threads of one process, with exchanges that check every byte, for tests that need no separate processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ringweave.parallel.transport.protocol import Counters, Event


class Shared:
    """State that the threads of a group share."""

    def __init__(self, size: int):
        self.barrier = threading.Barrier(size, timeout=60)
        self.table: dict[int, Any] = {}
        # by sender, receiver and number of the message between them: waits may come in any order
        self.messages: dict[tuple[int, int, int], Tensor] = {}
        self.arrival = threading.Condition()


class NothingCameError(RuntimeError):
    pass


class Later:
    def __init__(self, finish: Callable[[], None]):
        self.wait = finish


class Threaded:
    """A communicator with a thread for each rank. A message's sender and receiver must agree on its bytes."""

    def __init__(self, shared: Shared, rank: int, size: int):
        self.shared, self.rank, self.size = shared, rank, size
        self.deadline, self.retries, self.call_count = 30.0, 0, 0
        self.counters = Counters(size)
        self.trace: list[Event] | None = None
        #: exchanges in the order of their start: name, bytes to each peer, bytes from each peer
        self.started: list[str] = []
        self.posted = {(side, peer): 0 for side in ("to", "from") for peer in range(size)}
        self.contexts = 0

    def open(self) -> str:
        self.contexts += 1
        return str(self.contexts)

    def using(self) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        pass

    def _next(self, side: str, peer: int) -> int:
        self.posted[side, peer] += 1
        return self.posted[side, peer]

    def agree(self, header: Tensor, *, what: str) -> Tensor:
        self.call_count += 1
        self.started.append(what)
        self.shared.table[self.rank] = header.clone()
        self.shared.barrier.wait()
        every = torch.stack([self.shared.table[rank] for rank in range(self.size)])
        self.shared.barrier.wait()
        self.counters.metadata += header.nbytes * (self.size - 1)
        return every

    def exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Tensor]],
        *,
        what: str,
        stage: int | None = None,
    ) -> Later:
        parts = [[f"{peer}: {x.nbytes}" for peer, x in part if x.numel()] for part in (sends, receives)]
        if any(parts):
            self.started.append(f"{what}, to {', '.join(parts[0]) or 'none'}, from {', '.join(parts[1]) or 'none'}")
        for peer, data in sends:
            assert peer != self.rank
            if data.numel():
                with self.shared.arrival:
                    self.shared.messages[self.rank, peer, self._next("to", peer)] = data.clone()
                    self.shared.arrival.notify_all()
                self.counters.sent[peer] += data.nbytes
                self.counters.messages += 1
        expected = [(peer, self._next("from", peer), buffer) for peer, buffer in receives if buffer.numel()]

        def finish() -> None:
            for peer, number, buffer in expected:
                key = (peer, self.rank, number)
                with self.shared.arrival:
                    if not self.shared.arrival.wait_for(lambda: key in self.shared.messages, timeout=60):  # noqa: B023
                        raise NothingCameError(f"message {number} of {peer} to {self.rank}")
                    data = self.shared.messages.pop(key)
                assert data.nbytes == buffer.nbytes, (
                    f"{peer} sends {data.nbytes} bytes, {self.rank} expects {buffer.nbytes}"
                )
                buffer.view(-1).view(torch.uint8).copy_(data.view(-1).view(torch.uint8))
                self.counters.received[peer] += data.nbytes
                if self.trace is not None:
                    self.trace.append(Event("receive", what, stage, 0.0, 0.0, data.nbytes))

        return Later(finish)


def run(size: int, job: Callable[..., Any], *args: Any) -> list[Any]:
    """Call ``job(transport, *args)`` on every rank, return the results by rank, and raise a thread's exception."""
    shared = Shared(size)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            results[rank] = job(Threaded(shared, rank, size), *args)
        except BaseException as error:  # noqa: BLE001  (raised below)
            errors.append(error)
            shared.barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,), name="rank") for rank in range(size)]
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # a setting of the process: threads that start later inherit it
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        torch.set_num_threads(before)
    consequences = (threading.BrokenBarrierError, NothingCameError)
    for error in sorted(errors, key=lambda error: isinstance(error, consequences)):
        raise error
    assert not shared.messages, "a message that nobody received"
    return results
