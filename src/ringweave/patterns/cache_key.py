"""What identifies a pattern in a cache."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from torch import Tensor

from ..torch_compat import digest, version

#: Bytes up to which a tensor is known by its contents, so that no write to it goes unseen.
SMALL = 2**20


class CacheKey(NamedTuple):
    """A pattern as a key of caches, for as long as ``tables`` live: they are in it by address and version.

    Attributes:
        value: What to compare.
        tables: What a cache holds beside it, so that an address cannot come to mean another tensor.
        versions: Of tensors that are known by what they hold: they tell of a change that was undone.
    """

    value: Hashable
    tables: tuple[Tensor, ...]
    versions: tuple[Hashable, ...] = ()

    def same(self, other: CacheKey) -> bool:
        """Tell whether nothing was changed between two looks at a pattern."""
        return self.value == other.value and self.versions == other.versions


def address_key(table: Tensor) -> Hashable:
    """Identify a tensor while it lives: address, version, layout."""
    return table.data_ptr(), version(table), tuple(table.shape), table.stride(), table.dtype, str(table.device)


def content_key(table: Tensor) -> Hashable | None:
    """Digest a tensor's contents; None of a large one that only torch writes to: its version tells."""
    if table.device.type != "cpu" or (table.nbytes > SMALL and _ours(table)):
        return None
    return digest(table), tuple(table.shape), table.dtype


def _ours(table: Tensor) -> bool:
    # a storage that numpy or another process may write to cannot be resized
    return not table.is_inference() and table.untyped_storage().resizable() and not table.is_shared()
