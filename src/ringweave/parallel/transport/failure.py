"""The failure that ends a connection, and the choice of the rank to name when several ranks wait for each other."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch.distributed as dist

from ...errors import RingError

_FLAG, _WAITS = "failed", "waits"


@dataclass(frozen=True)
class ConnectionFailure:
    """The reason why a connection ended."""

    rank: int  # rank that detected the failure
    peer: int | None  # rank that is lost or silent, or None
    cause: str
    transient: bool = False  # whether a retry may help
    wanted: str = ""  # expected behaviour, if no rank is lost or silent; else empty
    remedy: str = ""  # advice for the user, if no rank is lost or silent; else empty

    def error(self, rank: int, stage: int | None, step: int) -> RingError:
        """Return the error that a rank raises."""
        return RingError(rank, self.peer, stage, step, self.cause, self.wanted, self.remedy)

    @staticmethod
    def first(store: dist.Store, own: ConnectionFailure | None) -> ConnectionFailure | None:
        """Return the first failure that any rank has reported to a store, after reporting this rank's ``own``."""
        if own is not None:
            text = store.compare_set(_FLAG, "", json.dumps(asdict(own)))
        elif store.check([_FLAG]):
            text = store.get(_FLAG)
        else:
            return None
        return ConnectionFailure(**json.loads(text))


class FailedError(RuntimeError):
    """Raised when a connection has failed; ``failure`` is the reason."""

    def __init__(self, failure: ConnectionFailure) -> None:
        super().__init__(failure.cause)
        self.failure = failure


class Wait(NamedTuple):
    """A wait: the number of the awaited message, which is the same on all ranks, the waiting rank, and its peer."""

    number: int
    waiter: int
    peer: int

    def write(self, store: dist.Store) -> None:
        """Write the wait to a store, where other ranks read it."""
        store.set(f"{_WAITS}/{self.waiter}", f"{self.number} {self.peer}")

    @staticmethod
    def read(store: dist.Store, waiter: int) -> Wait | None:
        """Return the wait that a rank has written to a store, or None."""
        if not store.check([f"{_WAITS}/{waiter}"]):
            return None
        number, peer = map(int, store.get(f"{_WAITS}/{waiter}").split())
        return Wait(number, waiter, peer)

    @staticmethod
    def delete(store: dist.Store, waiter: int) -> None:
        """Delete the wait that a rank has written to a store."""
        store.delete_key(f"{_WAITS}/{waiter}")


def wait_to_blame(own: Wait, wait_of: Callable[[int], Wait | None]) -> Wait:
    """Return the wait that explains why ``own`` has no answer.

    A silent peer may itself wait for another rank. The last wait of this chain is for a rank that does not wait, and
    explains the others. If the chain is closed (after the loss of a message its sender waits too), the wait for the
    earliest message explains the others.

    Args:
        own: This rank's wait.
        wait_of: Returns the wait of a rank, or None if the rank does not wait.
    """
    chain = [own]
    while chain[-1].peer not in {wait.waiter for wait in chain}:
        following = wait_of(chain[-1].peer)
        if following is None:
            return chain[-1]
        chain.append(following)
    return min(chain)
