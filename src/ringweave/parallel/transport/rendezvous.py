"""Regrouping of the survivors of a failure at a rendezvous store, in limited time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import NamedTuple, TypeVar

import torch.distributed as dist

from ...checks import seconds, whole
from ...errors import RingError, ShapeError, UnsupportedError, first_line

T = TypeVar("T")


def bounded(function: Callable[[], T], seconds: float) -> T:
    """Run a function that may block (on a store or a rendezvous) on a separate thread, for at most ``seconds``.

    Raises:
        TimeoutError: The function did not return in time. Its thread keeps running until the function returns.
    """
    done = threading.Event()
    results: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(function())
        except (RuntimeError, OSError) as error:
            errors.append(error)
        finally:
            done.set()

    threading.Thread(target=run, name="ringweave-bounded", daemon=True).start()
    if not done.wait(seconds):
        raise TimeoutError(f"no answer in {seconds:.1f} s")
    if errors:
        raise errors[0]
    return results[0]


# fractions of the allowed time: for ranks that may still come, then for connecting
_COMING, _CONNECTING = 0.5, 0.3
_HERE, _MEMBERS = "here", "members"


class Regrouped(NamedTuple):
    """The survivors of a failure.

    Attributes:
        ranks: Old ranks of the survivors; a survivor's new rank is its index in this list.
        group: The survivors' group, which is torch.distributed's new default group.
    """

    ranks: list[int]
    group: dist.ProcessGroup


def regroup(
    store: dist.Store | None, rank: int, size: int, *, within: float = 3.0, lost: Collection[int] = ()
) -> Regrouped:
    """Create a new default group of torch.distributed from the ranks that still answer.

    Every survivor calls this function after its RingError. As soon as all ranks but the lost ones have come, or after
    half of the time, the first rank to notice writes the list of members. A rank that is not in the list raises. The
    old default group, all its subgroups and every mesh over them are destroyed, so contexts must be created again.

    Args:
        store: Rendezvous store of the failed group; None for the store of the default group. Its host (the launcher's
            agent or a surviving rank) must be alive.
        rank: This process's rank in the failed group.
        size: Size of the failed group.
        within: Longest duration of the whole regrouping, in seconds.
        lost: Ranks known to be lost, such as RingError.peer; the survivors do not wait for them.

    Raises:
        ShapeError: A rank is not in the failed group, or ``within`` is not a positive number.
        UnsupportedError: No store is given and there is no default group.
        RingError: The store is lost, this rank came too late, or another survivor was lost meanwhile.
    """
    size, within = whole("size", size, 1, error=ShapeError), seconds("within", within)
    rank = whole("rank", rank, 0, size - 1, error=ShapeError)
    gone = {whole("lost", other, 0, size - 1, error=ShapeError) for other in lost}
    begun = time.monotonic()

    def left() -> float:
        return begun + within - time.monotonic()

    def failed(cause: str) -> RingError:
        return RingError(rank, None, None, 0, f"{cause}, while regrouping")

    if store is None:
        if not dist.is_initialized():
            raise UnsupportedError("store", None, "the store of the failed group", "Pass this store.")
        store = _world().get_group_store()
    shared = store

    def agree() -> tuple[dist.Store, list[int]]:
        # scoped by the number of this rank's regroupings, which is the same on all survivors
        own = dist.PrefixStore(f"ringweave/regroup/{shared.add(f'ringweave/regroups/{rank}', 1)}", shared)
        return own, _members(own, rank, size, begun + _COMING * within, gone - {rank})

    try:
        scope, members = bounded(agree, left())
    except (RuntimeError, OSError) as error:
        raise failed(f"the rendezvous store does not answer ({first_line(error)})") from error
    if rank not in members:
        raise failed(f"rank {rank} came after the others had regrouped as {members}")
    backend = dist.get_backend_config(dist.group.WORLD) if dist.is_initialized() else "gloo"
    spare = max(left(), _CONNECTING * within)

    def connect() -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        # This timeout is for connecting; afterwards the group's operations get torch's default timeout.
        timeout, place = timedelta(seconds=spare), members.index(rank)
        dist.init_process_group(backend, store=scope, rank=place, world_size=len(members), timeout=timeout)
        _world().set_timeout(dist.default_pg_timeout)

    try:
        bounded(connect, spare)
    except (RuntimeError, OSError) as error:
        raise failed(f"{members} could not connect ({first_line(error)})") from error
    return Regrouped(members, _world())


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _members(store: dist.Store, rank: int, size: int, until: float, lost: set[int]) -> list[int]:
    store.set(f"{_HERE}/{rank}", "")
    pause = 0.005
    while not store.check([_MEMBERS]):
        here = [other for other in range(size) if other == rank or store.check([f"{_HERE}/{other}"])]
        if len(here) + len(lost - set(here)) == size or time.monotonic() > until:
            # if several ranks write a list, the first list counts
            store.compare_set(_MEMBERS, "", ",".join(map(str, here)))
            break
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    return [int(word) for word in store.get(_MEMBERS).decode().split(",")]
