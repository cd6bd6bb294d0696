"""Ranks find each other at a store: each leaves a word, and reads what the others left, within bounded time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import torch.distributed as dist

T = TypeVar("T")


class AbsentError(RuntimeError):
    """Some ranks did not come in time."""

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__(ranks)
        self.ranks = list(ranks)


def meet(
    store: dist.Store, word: str, rank: int, size: int, seconds: float, meanwhile: Callable[[], None]
) -> list[str]:
    """Read every rank's word, once all `size` ranks have come.

    Args:
        store: Shared store, scoped to this meeting.
        word: What the others read of this rank.
        rank: This rank.
        size: Number of ranks.
        seconds: How long to wait for the others.
        meanwhile: Called between two looks for them.

    Returns:
        `size` words, by rank.

    Raises:
        AbsentError: A rank did not come in time.
        RuntimeError: The store is lost.
    """
    store.set(str(rank), word)
    until = time.monotonic() + seconds
    missing = list(range(size))
    pause = 0.002
    while True:
        # checked one after another: the absent are few, and known by name
        while missing and store.check([str(missing[0])]):
            missing.pop(0)
        if not missing:
            return [store.get(str(other)).decode() for other in range(size)]
        if time.monotonic() > until:
            raise AbsentError([other for other in missing if not store.check([str(other)])])
        meanwhile()
        time.sleep(pause)
        pause = min(2 * pause, 0.05)


def bounded(function: Callable[[], T], seconds: float, given_up: Callable[[], bool]) -> T:
    """Run a function that may block (a store, a rendezvous) on a thread of its own, for so long at most.

    Raises:
        TimeoutError: It did not return in time, or `given_up()` became true. The thread is left to its own timeouts.
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
    until = time.monotonic() + seconds
    while not done.wait(0.05):
        if given_up() or time.monotonic() > until:
            raise TimeoutError(f"no answer in {seconds:.1f} s")
    if errors:
        raise errors[0]
    return results[0]
