"""Jobs of test_failure: ranks that wait while the test kills or stops one of them."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import ringweave as rw
from ringweave import RingError
from ringweave.parallel import ContextParallel
from ringweave.parallel.transport.connection import Connection
from ringweave.parallel.transport.rendezvous import regroup
from ringweave.parallel.transport.transport import Transport

from .jobs_transport import exchange_parts, numbers
from .processes import rendezvous, ring_error

READY = "ready"
HEADER = torch.zeros(1, dtype=torch.int64)


class Seen(NamedTuple):
    """A RingError, the time.time() at which it was raised, and the transport's threads that were left after it."""

    error: RingError
    at: float
    threads: list[str]


def seen(carrier: Transport, call: Callable[[], Any]) -> Seen:
    """Return the error of a call, and close the transport."""
    error, at = ring_error(call), time.time()
    carrier.close()
    return Seen(error, at, [thread.name for thread in threading.enumerate()])


def communicate(carrier: Transport, how: str, peers: list[int]) -> None:
    """Communicate once in the named way among the given ranks, and check the messages."""
    rank, size = carrier.rank, carrier.size
    peers = [peer for peer in peers if peer != rank]
    if how == "agree":
        assert carrier.agree(HEADER + rank, what="plan").flatten().tolist() == list(range(size))
    elif how == "exchange":
        received = [(peer, torch.zeros(1000, dtype=torch.uint8)) for peer in peers]
        carrier.exchange([(p, numbers(rank, p, 1000)) for p in peers], received, stage=3, what="kv").wait()
        assert all(torch.equal(tensor, numbers(peer, rank, 1000)) for peer, tensor in received)
    else:
        splits = [1000 if peer in peers else 0 for peer in range(size)]
        received, sent = torch.zeros(sum(splits), dtype=torch.uint8), torch.zeros(sum(splits), dtype=torch.uint8)
        exchange_parts(carrier, received, splits, sent, splits, "tiles").wait()


def wait_for_the_dead(how: str, victim: int, deadline: float, chain: bool = False) -> Seen | None:
    """All ranks communicate once; then all but the victim do so again, and it waits to be killed.

    how: "exchange", "all_to_all", "agree"; or "compute": long work between two exchanges.
    chain: only rank 0 waits for the victim, the others wait for rank 0.
    """
    carrier = Transport(dist.group.WORLD, deadline=deadline)
    ranks = list(range(carrier.size))
    carrier.agree(HEADER, what="plan")
    rendezvous().add(READY, 1)
    if carrier.rank == victim:
        time.sleep(60)

    def wait() -> None:
        if how == "compute":
            until = time.monotonic() + 0.2
            while time.monotonic() < until:
                torch.ones(100, 100) @ torch.ones(100, 100)
            communicate(carrier, "exchange", [rank for rank in ranks if rank != victim])
            assert not chain
            communicate(carrier, "agree", ranks)
        else:
            peers = ranks if not chain else [0, victim] if carrier.rank == 0 else [0]
            communicate(carrier, how, peers)

    return seen(carrier, wait)


def before_the_first_call(how: str, size: int, victim: int, deadline: float) -> Seen | bool | None:
    """Some ranks make a context, and one of them fails before they are connected.

    how: for "kill" and "stop" the test does it: while the others call, before they call ("kill, early"), or when the victim
    has called and the others have not ("kill, called"); the victim may have a child ("kill, forked").
    "error": the victim raises in its call. "late": it is only late. "version": it has another version.
    """
    group = dist.group.WORLD if size == dist.get_world_size() else dist.new_group(range(size))
    rank, awaited = dist.get_rank(), "kill" in how or how == "stop"
    if rank >= size:
        rendezvous().add(READY, int(awaited))
        return None
    ctx = ContextParallel(group, rw.Causal(), 256, heads=(1, 1), deadline=deadline)
    x = torch.ones(1, 1, ctx.local, 8)
    if rank == victim:
        if "forked" in how and os.fork() == 0:
            time.sleep(3)
            os._exit(0)
        if how == "version":
            rw.__version__ = "0.0.0"
        if how == "error":
            ctx.schedules.of = _without_memory  # type: ignore[method-assign]
    rendezvous().add(READY, int(awaited))
    if rank == victim and awaited and "called" not in how:
        time.sleep(60)
    if (how == "kill, early") or ("called" in how and rank != victim):
        rendezvous().wait(["go"])
    if how in ("late", "error") and rank == victim:
        time.sleep(1.0)
    try:
        out = rw.attention(x, x, x, rw.Causal(), context=ctx)
        return torch.allclose(out, x)
    except (RingError, MemoryError) as error:
        return Seen(error, time.time(), [])  # type: ignore[arg-type]
    finally:
        ctx.close()
        rw.__version__ = _VERSION


_VERSION = rw.__version__


def _without_memory(*_: Any) -> Any:
    raise MemoryError("here")


def wait_for_the_busy(seconds: float) -> Seen:
    """Rank 2 waits for rank 3, which waits to be killed; rank 1 waits for rank 0, which computes for some seconds."""
    carrier = Transport(dist.group.WORLD, deadline=30.0)
    carrier.agree(HEADER, what="plan")
    communicate(carrier, "exchange", list(range(carrier.size)))
    rendezvous().add(READY, 1)
    time.sleep({0: seconds, 3: 60.0}.get(carrier.rank, 0.0))
    return seen(carrier, lambda: communicate(carrier, "exchange", {0: [1], 1: [0], 2: [3]}[carrier.rank]))


def again_after_an_error(victim: int) -> list[str]:
    """After a failure every further call raises, and quickly."""
    carrier = Transport(dist.group.WORLD, deadline=0.5)
    carrier.agree(HEADER, what="plan")
    if carrier.rank == victim:
        time.sleep(2.5)
    texts = []
    for _ in range(3):
        start = time.monotonic()
        try:
            carrier.agree(HEADER, what="plan")
        except RingError as error:
            texts.append(f"{error.peer} {error.step} {time.monotonic() - start < 2}")
    carrier.close()
    return texts


def repeat(how: str, silent: int, retries: int, repetitions: int) -> dict[str, Any]:
    """Lose a rank's messages in the second of three steps: all repeat it, and the received numbers are right."""
    carrier = Transport(dist.group.WORLD, deadline=1.0, retries=retries)
    rank, size = carrier.rank, carrier.size
    ranks = list(range(size))
    post = Connection.post
    lost = [repetitions if rank == silent else 0]

    def lossy(self: Connection, sends: Any, receives: Any, **options: Any) -> Any:
        if lost[0] and carrier.call_count >= 2:
            lost[0] -= 1
            # rank 0 misses the message; the others have theirs and continue
            sends = [(peer, tensor) for peer, tensor in sends if peer != 0]
        return post(self, sends, receives, **options)

    Connection.post = lossy
    error, values = None, []
    try:
        for step in range(4):
            header = torch.tensor([rank, step])
            assert carrier.agree(header, what="plan").tolist() == [[other, step] for other in ranks]
            buffers = []
            for stage in range(1, size):
                to, source = (rank + stage) % size, (rank - stage) % size
                sent, received = torch.full((500,), float(10 * step + rank)), torch.zeros(500)
                buffers.append(
                    (carrier.exchange([(to, sent)], [(source, received)], stage=stage, what=how), sent, received)
                )
            for pending, sent, received in buffers:
                pending.wait()
                values.append(received.clone())
                # like a persistent buffer: overwritten as soon as the wait is over
                sent.fill_(-1.0)
                received.fill_(-2.0)
    except RingError as caught:
        error = caught
    finally:
        Connection.post = post
    wanted = [
        torch.full((500,), float(10 * step + (rank - stage) % size)) for step in range(4) for stage in range(1, size)
    ]
    carrier.close()
    right = all(torch.equal(value, want) for value, want in zip(values, wanted, strict=False))
    return {"error": error, "steps": len(values), "right": right, "generation": carrier._generation}


def survive(victim: int, name_the_lost: bool) -> dict[str, Any]:
    """The victim dies; the others regroup and exchange messages by transport and by torch.distributed."""
    carrier = Transport(dist.group.WORLD, deadline=20.0)
    rank, size = carrier.rank, carrier.size
    carrier.agree(HEADER, what="plan")
    rendezvous().add(READY, 1)
    if rank == victim:
        time.sleep(60)
    error = ring_error(lambda: carrier.agree(HEADER, what="plan"))
    lost = [] if error.peer is None or not name_the_lost else [error.peer]
    carrier.close()
    # survivors that do not know the lost rank wait for it; a busy machine needs some of the time
    within = 60.0 if lost else 8.0
    start = time.monotonic()
    ranks, group = regroup(None, rank, size, within=within, lost=lost)
    waited = time.monotonic() - start >= within
    carrier = Transport(group, deadline=10.0)
    for how in ("agree", "exchange", "all_to_all"):
        communicate(carrier, how, list(range(carrier.size)))
    total = torch.tensor([rank])
    dist.all_reduce(total)
    carrier.close()
    return {"ranks": ranks, "rank": carrier.rank, "size": dist.get_world_size(), "waited": waited, "sum": int(total)}


def lose_the_store(port: int) -> Seen:
    """Lose the group's rendezvous store, in a process that the test kills while the ranks wait for rank 0."""
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    carrier = Transport(dist.group.WORLD, deadline=20.0)
    carrier.agree(HEADER, what="plan")
    rendezvous().add(READY, 1)
    # rank 0 computes until long after the store is lost
    time.sleep(2.0 * (rank == 0))
    return seen(carrier, lambda: carrier.agree(HEADER, what="plan"))


def host_a_store(pipe: Any) -> None:
    """A process that only hosts a store."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    time.sleep(60)


def come_late(absent: int) -> RingError | None:
    """One rank never makes its transport."""
    if dist.get_rank() == absent:
        return None
    return ring_error(lambda: Transport(dist.group.WORLD, opening=1.0).agree(HEADER, what="plan"))


def unequal() -> tuple[int | None, str]:
    """Rank 0 sends more than rank 1 has room for."""
    carrier = Transport(dist.group.WORLD, deadline=0.5)
    peer = 1 - carrier.rank
    sends, receives = [(peer, torch.zeros(100))], [(peer, torch.zeros(100 - carrier.rank))]
    error = ring_error(lambda: carrier.exchange(sends, receives, stage=0, what="kv").wait())
    carrier.close()
    return error.peer, error.cause


def forget() -> tuple[int, list[str]]:
    """A transport without close() ends when its last reference does."""
    carrier = Transport(dist.group.WORLD)
    carrier.agree(HEADER, what="plan")
    alive = threading.active_count()
    del carrier
    gc.collect()
    time.sleep(0.1)
    return alive, [thread.name for thread in threading.enumerate()]


def fork_safety() -> tuple[int, int]:
    """Return the fork server's number of threads, and the default number in this process, after parallel regions here."""
    import psutil

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    a = torch.randn(256, 256)
    torch.testing.assert_close(a @ a, (a.double() @ a.double()).float(), atol=1e-3, rtol=1e-3)
    q = torch.randn(1, 4, 512, 32)
    assert rw.attention(q, q, q, rw.SlidingWindow(64)).isfinite().all()
    torch.set_num_threads(before)
    return psutil.Process(os.getppid()).num_threads(), before


def leave_open(rank: int, port: int) -> None:
    """Run a process that ends with its transport open and its watch running."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    carrier = Transport(dist.group.WORLD)
    carrier.agree(HEADER, what="plan")
    globals()["_KEPT"] = carrier


def regroup_late(late: int) -> list[int] | str:
    """One rank regroups after the others have continued."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank == late:
        time.sleep(2.0)
    try:
        return regroup(None, rank, size, within=2.0).ranks
    except RingError as error:
        return error.cause


def regroup_twice() -> list[int]:
    """All regroup, then all but the last: the second time in the first group's store."""
    rank, size = dist.get_rank(), dist.get_world_size()
    # the ranks wait until all have come, which takes long on a busy machine
    again = regroup(None, rank, size, within=60.0)
    assert again.ranks == list(range(size))
    if rank == size - 1:
        return []
    ranks, group = regroup(None, again.group.rank(), size, within=60.0, lost=[size - 1])
    communicate(Transport(group), "exchange", list(range(size - 1)))
    return ranks
