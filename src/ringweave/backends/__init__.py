"""Backends. Each computes branches of a call from tensors and a plan."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, MutableMapping

from torch import Tensor

from ..cache import PROGRAMS
from .backend import Backend

# modules of this package; each has a ``BACKEND`` of its own name
_NAMES = ("reference", "dense_batched", "gather", "sdpa", "cpu", "triton", "flex", "flash", "attn_gym", "torch_sparse")


class Backends(MutableMapping[str, Backend]):
    """All backends by name; the module of a backend is imported when the backend is first looked up.

    A change drops all programs, which hold the backends that they were compiled for.
    """

    def __init__(self) -> None:
        self._loaded: dict[str, Backend | None] = dict.fromkeys(_NAMES)

    def __getitem__(self, name: str) -> Backend:
        found = self._loaded[name]
        if found is None:
            found = self._loaded[name] = importlib.import_module(f".{name}", __name__).BACKEND
        return found

    def __setitem__(self, name: str, backend: Backend) -> None:
        self._loaded[name] = backend
        PROGRAMS.trim()

    def __delitem__(self, name: str) -> None:
        del self._loaded[name]
        PROGRAMS.trim()

    def __contains__(self, name: object) -> bool:
        return name in self._loaded

    def __iter__(self) -> Iterator[str]:
        return iter(self._loaded)

    def __len__(self) -> int:
        return len(self._loaded)


BACKENDS = Backends()


def merge_into(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Merge a partial result into (out, lse) in place: by the native kernel on a CPU, else by PyTorch."""
    from .cpu import merge_into as merge

    merge(out, lse, part_out, part_lse)
