"""Backends. Each computes branches of a call from tensors and a plan."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, MutableMapping

from torch import Tensor

from ..cache import PROGRAMS
from .backend import Backend

# modules of this package; each has a ``BACKEND`` of its own name
_NAMES = ("reference", "dense_batched", "gather", "sdpa", "cpu", "flex", "flash", "torch_sparse")


def _own(name: str) -> Backend:
    record: Backend = importlib.import_module(f".{name}", __name__).BACKEND
    return record


class Backends(MutableMapping[str, Backend]):
    """All backends by name; the module of a backend is imported when the backend is first looked up.

    Other distributions add theirs by entry points ``ringweave.backends``, which are read when a name is not one of this
    package, or all names are listed. A change drops all programs, which hold the backends that they were compiled for.
    """

    def __init__(self) -> None:
        #: Records, and functions that load those not yet looked up.
        self._known: dict[str, Backend | Callable[[], Backend]] = {
            name: functools.partial(_own, name) for name in _NAMES
        }
        self._complete = False

    def _all(self) -> dict[str, Backend | Callable[[], Backend]]:
        """Return the backends of all distributions; a name of this package stays its own."""
        if not self._complete:
            # imported where a name is not one of this package
            from ..plugins import backends

            self._complete = True
            for name, load in backends().items():
                self._known.setdefault(name, load)
        return self._known

    def __getitem__(self, name: str) -> Backend:
        found = self._known[name] if name in self._known else self._all()[name]
        if not isinstance(found, Backend):
            found = self._known[name] = found()
        return found

    def __setitem__(self, name: str, backend: Backend) -> None:
        self._known[name] = backend
        PROGRAMS.trim()

    def __delitem__(self, name: str) -> None:
        del self._known[name]
        PROGRAMS.trim()

    def __contains__(self, name: object) -> bool:
        return name in self._known or name in self._all()

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())


BACKENDS = Backends()


def merge_into(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Merge a partial result into (out, lse) in place: by the native kernel on a CPU, else by PyTorch."""
    from .cpu import merge_into as merge

    merge(out, lse, part_out, part_lse)
