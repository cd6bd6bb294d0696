"""Jobs of test_transport, which run on every rank."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ringweave import ShapeError, UnsupportedError
from ringweave.parallel.transport.protocol import Event, Pending
from ringweave.parallel.transport.transport import Transport

from .delayed import Delayed


def transport(**options: Any) -> Transport:
    return Transport(dist.group.WORLD, **options)


def numbers(source: int, target: int, nbytes: int) -> torch.Tensor:
    """Return bytes that identify their sender and receiver."""
    return ((torch.arange(nbytes) * 7 + source * 31 + target * 3) % 251).to(torch.uint8)


def part(source: int, target: int) -> int:
    """Return bytes for each pair of ranks: uneven, and empty for every third pair."""
    return 0 if (source + 2 * target) % 3 == 0 else 100 * source + 7 * target + 1


def exchange_parts(
    carrier: Transport, received: torch.Tensor, splits: list[int], sent: torch.Tensor, sent_splits: list[int], what: str
) -> Pending:
    """Send one message to each peer and receive one, all as parts of two tensors."""
    parts = [list(enumerate(x.split(sizes))) for x, sizes in ((sent, sent_splits), (received, splits))]
    sends, receives = ([each for each in part if each[0] != carrier.rank] for part in parts)
    return carrier.exchange(sends, receives, what=what)


def all_to_all(rounds: int) -> dict[str, Any]:
    carrier = transport()
    rank, size = carrier.rank, carrier.size
    carrier.trace = []
    sent_splits = [part(rank, peer) for peer in range(size)]
    splits = [part(peer, rank) for peer in range(size)]
    for _ in range(rounds):
        received = torch.full((sum(splits),), 255, dtype=torch.uint8)
        sent = torch.cat([numbers(rank, peer, count) for peer, count in enumerate(sent_splits)])
        exchange_parts(carrier, received, splits, sent, sent_splits, "tiles").wait()
        for peer, piece in enumerate(received.split(splits)):
            wanted = numbers(peer, rank, splits[peer]) if peer != rank else torch.full_like(piece, 255)
            assert torch.equal(piece, wanted)
    counters = carrier.counters
    carrier.close()
    return {
        "sent": counters.sent, "received": counters.received, "messages": counters.messages,
        "metadata": counters.metadata, "trace": carrier.trace,
    }  # fmt: skip


def exchange() -> dict[str, Any]:
    """Start two exchanges with several messages to one peer each, and wait for them in the opposite order."""
    carrier = transport()
    rank, size = carrier.rank, carrier.size
    carrier.trace = []
    stages = []
    for stage in (1, 2):
        to, source = (rank + stage) % size, (rank - stage) % size
        if to == rank:
            continue
        lengths = [1, 40_000 * stage, 0, 17]
        sends = [(to, numbers(rank, to, n)) for n in lengths]
        receives = [(source, torch.zeros(n, dtype=torch.uint8)) for n in lengths]
        stages.append((source, receives, carrier.exchange(sends, receives, stage=stage, what="kv")))
    for source, receives, pending in reversed(stages):
        pending.wait()
        pending.wait()
        for _, tensor in receives:
            assert torch.equal(tensor, numbers(source, rank, tensor.numel()))
    counters = carrier.counters
    carrier.counters.reset()
    assert (carrier.counters.sent, carrier.counters.messages) == ([0] * size, 0)
    carrier.close()
    return {"trace": carrier.trace, "rank": rank, "counters": counters}


def floats() -> None:
    """Exchange other dtypes than bytes, and a matrix."""
    carrier = transport()
    peer = 1 - carrier.rank
    received = torch.zeros(3, 5)
    carrier.exchange([(peer, torch.full((3, 5), 1.5 + carrier.rank))], [(peer, received)], stage=0, what="kv").wait()
    assert torch.equal(received, torch.full((3, 5), 1.5 + peer))
    carrier.close()


def agree() -> tuple[list[list[list[int]]], int, int, int]:
    carrier = transport()
    tables = [
        carrier.agree(torch.tensor([carrier.rank, 10 * step, -(2**62)]), what="plan").tolist() for step in range(3)
    ]
    carrier.close()
    return tables, carrier.call_count, carrier.counters.metadata, sum(carrier.counters.received)


def random_traffic(rounds: int) -> None:
    """Make many exchanges of random sizes among all ranks, several at a time; every byte arrives where it belongs."""
    carrier = transport()
    rank, size = carrier.rank, carrier.size
    generator = torch.Generator().manual_seed(5)
    for _ in range(rounds):
        lengths = torch.randint(0, 3000, (2, size, size), generator=generator).tolist()
        under_way = []
        for number in (0, 1):
            splits = [lengths[number][peer][rank] for peer in range(size)]
            sent_splits = lengths[number][rank]
            received = torch.zeros(sum(splits), dtype=torch.uint8)
            sent = torch.cat([numbers(rank, peer, n) for peer, n in enumerate(sent_splits)])
            pending = exchange_parts(carrier, received, splits, sent, sent_splits, f"round {number}")
            under_way.append((pending, received, splits))
        for pending, received, splits in under_way:
            pending.wait()
            for peer, piece in enumerate(received.split(splits)):
                assert peer == rank or torch.equal(piece, numbers(peer, rank, splits[peer]))
    carrier.close()


def refusals() -> list[str]:
    carrier = transport()
    a = torch.zeros(6, dtype=torch.uint8)
    calls = [
        lambda: carrier.exchange([(carrier.rank, a)], [], stage=0, what="x"),
        lambda: carrier.exchange([(1 - carrier.rank, a[::2])], [], stage=0, what="x"),
        lambda: carrier.agree(torch.zeros(3), what="x"),
    ]
    texts = []
    for call in calls:
        with pytest.raises(ShapeError) as caught:
            call()
        texts.append(str(caught.value))
    carrier.close()
    with pytest.raises(RuntimeError, match="after close"):
        carrier.agree(torch.zeros(1, dtype=torch.int64), what="x")
    return texts


def threads() -> tuple[list[str], int, int]:
    """Return the threads left by many transports after close, and the numbers of open files before and after."""
    import psutil

    process = psutil.Process()
    # the thread of a library's progress bars stays
    there = set(threading.enumerate())
    transport_once()
    before = process.num_fds()
    for _ in range(5):
        transport_once()
    gc.collect()
    return [thread.name for thread in threading.enumerate() if thread not in there], before, process.num_fds()


def kept() -> list[bool]:
    """After an exchange without a wait, return for each of two later ones whether the sent tensor is still held."""
    carrier = transport()
    peer = 1 - carrier.rank
    carrier.exchange([(peer, torch.zeros(8))], [(peer, torch.zeros(8))], what="nobody waits")
    found = []
    for _ in range(2):
        sent = torch.ones(8)
        alive = weakref.ref(sent)
        pending = carrier.exchange([(peer, sent)], [(peer, torch.zeros(8))], what="waits")
        pending.wait()
        del sent, pending
        found.append(alive() is not None)
    carrier.close()
    return found


def forked() -> tuple[int, int]:
    """Return a forked child's exit code, 7 for the typed error of a connected transport, and the parent's next agreement."""
    carrier = transport()
    header = torch.tensor([carrier.rank])
    carrier.agree(header, what="before")
    child = os.fork()
    if not child:
        try:
            with carrier.using():
                carrier.agree(header, what="inside")
        except UnsupportedError:
            os._exit(7)
        os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    total = int(carrier.agree(header + 1, what="after").sum())
    carrier.close()
    return code, total


def transport_once() -> None:
    carrier = transport()
    carrier.agree(torch.zeros(1, dtype=torch.int64), what="x")
    carrier.agree(torch.zeros(1, dtype=torch.int64), what="x")
    carrier.close()


def overlap() -> tuple[list[Any], float]:
    """Overlap a message of 0.2 s with 0.3 s of computing."""
    carrier = Delayed(Transport(dist.group.WORLD), latency=0.1, bandwidth=1e4)
    peer = 1 - carrier.rank
    carrier.agree(torch.zeros(1, dtype=torch.int64), what="plan")
    carrier.trace = []
    payload = torch.full((1000,), carrier.rank, dtype=torch.uint8)
    received = torch.zeros_like(payload)
    pending = carrier.exchange([(peer, payload)], [(peer, received)], stage=1, what="kv")
    start = time.perf_counter()
    time.sleep(0.3)
    carrier.trace.append(Event("compute", "local", 0, start, time.perf_counter(), 0))
    pending.wait()
    second = carrier.exchange([(peer, payload)], [(peer, received)], stage=2, what="kv")
    posted = time.perf_counter()
    second.wait()
    waited = time.perf_counter() - posted
    assert received.eq(peer).all()
    carrier.close()
    return carrier.trace, waited
