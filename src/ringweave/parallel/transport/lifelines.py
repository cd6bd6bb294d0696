"""Which processes of a group have ended, told before the ranks are connected to each other.

Each process listens on a socket and never reads from it. The kernel accepts connections for a process that computes or
is stopped, and resets them when the process ends. So a dead rank and a late one look different, which a heartbeat of
the process itself could not achieve: a late rank may be in a long call that lets no other thread run.
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
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist

from ...cache import fact

# of connections: one for each process that ever waited for this one
_BACKLOG = 4096
# ranks that one look at the store asks for
_ASKED = 4
_KEY = "ringweave/lifelines"
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


class Lifelines:
    """The processes of a group, seen from one of them.

    Attributes:
        said: Where this process listens, for the others; empty before :meth:`publish`.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.said = rank, ""
        self._unknown = deque(other for other in range(size) if other != rank)
        self._known: dict[int, str] = {}

    def publish(self, store: dist.Store) -> None:
        """Say in the group's store where this process listens."""
        self.said = _listener(_host_of(store))[1]
        store.set(f"{_KEY}/{self.rank}", self.said)

    def look(self, store: dist.Store) -> None:
        """Read where some others listen, of those that have not been asked for the longest."""
        for _ in range(min(_ASKED, len(self._unknown))):
            other = self._unknown.popleft()
            if store.check([f"{_KEY}/{other}"]):
                self._known[other] = store.get(f"{_KEY}/{other}").decode()
            else:
                self._unknown.append(other)

    def learn(self, every: Sequence[str]) -> None:
        """Take what all ranks have said, by rank."""
        self._unknown.clear()
        self._known = {other: said for other, said in enumerate(every) if said and other != self.rank}

    def ended(self) -> int | None:
        """Find a rank whose process has ended; without the store, which may not answer."""
        return next((rank for rank, said in list(self._known.items()) if _line(said).ended()), None)


class _Line:
    """A connection to another process; shared by all transports, since the other side never takes one off its list."""

    def __init__(self, said: str) -> None:
        here, host, port, _ = said.split()
        self._near, self._ended = here == _here(), False
        self._socket: socket.socket | None = None
        if ip_address(host).is_loopback and not self._near:
            # which is another machine's
            return
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        _sockets.add(self._socket)
        self._socket.setblocking(False)
        # under way, or refused, which the first look tells
        with suppress(OSError):
            self._socket.connect((host, int(port)))

    def ended(self) -> bool:
        """Tell whether the process has ended, as far as the network says so."""
        if self._socket is None:
            return self._ended
        try:
            self._ended = not self._socket.recv(1)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.ENOTCONN):
                return False
            # a refusal may come from a firewall between machines, and what else is no connection from anywhere
            refused = isinstance(error, ConnectionRefusedError)
            self._ended = self._near if refused else isinstance(error, ConnectionError)
        self._socket.close()
        self._socket = None
        return self._ended


_line = fact(_Line)


@fact
def _listener(store_host: str) -> tuple[socket.socket, str]:
    """Listen at the address by which this machine reaches the store's: the socket, and what others need to find it."""
    family, _, _, _, target = socket.getaddrinfo(store_host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as route:
        # which sends nothing
        route.connect(target)
        host = route.getsockname()[0]
    listener = socket.socket(family)
    _sockets.add(listener)
    listener.bind((host, 0))
    listener.listen(_BACKLOG)
    # a port may come to be another process's
    return listener, f"{_here()} {host} {listener.getsockname()[1]} {os.urandom(8).hex()}"


def _forget() -> None:
    """Close a forked process's copies of its parent's sockets, which would outlive the parent in them."""
    for each in list(_sockets):
        each.close()
    _listener.cache_clear()
    _line.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def _host_of(store: dist.Store) -> str:
    """Name the machine of a store's server, where it has one."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return str(getattr(store, "host", "localhost"))


@fact
def _here() -> str:
    """Name what has this process's loopback addresses: a machine, or a container on it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/net').stat().st_ino}"
    except OSError:
        return socket.gethostname()
