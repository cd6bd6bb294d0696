"""Keys that identify patterns in caches."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from torch import Tensor

from ..torch_compat import digest, version

#: Bytes up to which a tensor is identified by its contents, so that every write to it is noticed.
SMALL = 2**20


class CacheKey(NamedTuple):
    """A pattern as a key of caches; it contains ``tables`` by address and version, and is valid while they live.

    Attributes:
        value: The hashable key.
        tables: Tensors that a cache must keep alive with the entry, so that their addresses are not reused.
        versions: Versions of the tensors that are identified by contents; they reveal a change that was undone.
    """

    value: Hashable
    tables: tuple[Tensor, ...]
    versions: tuple[Hashable, ...] = ()

    def same(self, other: CacheKey) -> bool:
        """Return whether nothing was changed between the two times at which the keys were made."""
        return self.value == other.value and self.versions == other.versions


def address_key(table: Tensor) -> Hashable:
    """Identify a tensor while it lives, by address, version and layout."""
    return table.data_ptr(), version(table), tuple(table.shape), table.stride(), table.dtype, str(table.device)


def content_key(table: Tensor) -> Hashable | None:
    """Identify a CPU tensor by its contents; None for a large one that only torch writes to, which has a version."""
    if table.device.type != "cpu" or (table.nbytes > SMALL and _ours(table)):
        return None
    return digest(table), tuple(table.shape), table.dtype


def _ours(table: Tensor) -> bool:
    # torch does not resize storages that numpy or another process may write to
    return not table.is_inference() and table.untyped_storage().resizable() and not table.is_shared()
