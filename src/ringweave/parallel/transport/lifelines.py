"""Detection of ended processes of a group before the ranks are connected to each other.

Each process listens on a socket and never reads from it. The kernel accepts connections even while the process computes
or is stopped, and resets them when the process ends. This distinguishes a dead rank from a late one. A heartbeat thread
could not, because a late rank may be in a long call during which no other thread of the process runs.
"""

from __future__ import annotations

import errno
import os
import socket
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

import torch.distributed as dist

from ...cache import process_cache

# largest number of pending connections: one for each process that ever waited for this one
_BACKLOG = 4096
# one call of look() reads the addresses of at most this number of ranks from the store
_PER_LOOK = 4
_KEY = "ringweave/lifelines"
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


class Lifelines:
    """The lifelines of one process to the other processes of its group.

    Attributes:
        address: Address at which this process listens; empty before :meth:`publish`.
    """

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self.address = ""
        self._store, self._rank = store, rank
        self._unknown = deque(other for other in range(size) if other != rank)
        self._known: dict[int, str] = {}

    def publish(self) -> None:
        """Write this process's address to the group's store."""
        self.address = _listener(_host_of(self._store))[1]
        self._store.set(f"{_KEY}/{self._rank}", self.address)

    def look(self) -> None:
        """Read the addresses of a few ranks from the store, first those that were looked for least recently."""
        for _ in range(min(_PER_LOOK, len(self._unknown))):
            other = self._unknown.popleft()
            if self._store.check([f"{_KEY}/{other}"]):
                self._known[other] = self._store.get(f"{_KEY}/{other}").decode()
            else:
                self._unknown.append(other)

    def learn(self, addresses: Sequence[str]) -> None:
        """Set the addresses of all ranks, by rank."""
        self._unknown.clear()
        self._known = {rank: address for rank, address in enumerate(addresses) if address and rank != self._rank}

    def ended(self) -> int | None:
        """Return a rank with an ended process, or None; does not use the store, which may not answer."""
        return next((rank for rank, address in list(self._known.items()) if _line(address).ended()), None)


class _Line:
    """A connection to another process.

    All transports of this process share it, because each connection stays in the other side's backlog forever.
    """

    def __init__(self, address: str) -> None:
        network, host, port, _ = address.split()
        self._near, self._ended = network == _loopback(), False
        self._socket: socket.socket | None = None
        if ip_address(host).is_loopback and not self._near:
            # a loopback address of another machine cannot be reached
            return
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        _sockets.add(self._socket)
        self._socket.setblocking(False)
        # The connection is in progress or refused; ended() finds out which.
        with suppress(OSError):
            self._socket.connect((host, int(port)))

    def ended(self) -> bool:
        """Return whether the network shows that the process has ended."""
        if self._socket is None:
            return self._ended
        try:
            self._ended = not self._socket.recv(1)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.ENOTCONN):
                return False
            # A refusal between machines may come from a firewall, so it counts only on this machine. Errors that are
            # not about the connection may come from anywhere and do not count.
            refused = isinstance(error, ConnectionRefusedError)
            self._ended = self._near if refused else isinstance(error, ConnectionError)
        self._socket.close()
        self._socket = None
        return self._ended


_line = process_cache(_Line)


@process_cache
def _listener(store_host: str) -> tuple[socket.socket, str]:
    """Listen at the address from which this machine reaches the store; return the socket and its address as text."""
    family, _, _, _, target = socket.getaddrinfo(store_host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as route:
        # connecting a datagram socket sends nothing, but selects the local address
        route.connect(target)
        host = route.getsockname()[0]
    listener = socket.socket(family)
    _sockets.add(listener)
    listener.bind((host, 0))
    listener.listen(_BACKLOG)
    # a random suffix, since another process may get the same port later
    return listener, f"{_loopback()} {host} {listener.getsockname()[1]} {os.urandom(8).hex()}"


def _forget() -> None:
    """Close a forked process's copies of the parent's sockets, which would keep them open after the parent ends."""
    for each in list(_sockets):
        each.close()
    _listener.cache_clear()
    _line.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def _host_of(store: dist.Store) -> str:
    """Return the host of a store's server, or ``"localhost"`` if it has none."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return str(getattr(store, "host", "localhost"))


@process_cache
def _loopback() -> str:
    """Return a name of this process's loopback network: of the machine, or of the container on it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/net').stat().st_ino}"
    except OSError:
        return socket.gethostname()
