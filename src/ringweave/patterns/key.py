"""What identifies a pattern in a cache."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from torch import Tensor

from ..torch_compat import version


class Key(NamedTuple):
    """A pattern as a key of caches, for as long as ``tables`` live: they are in it by address and version.

    Attributes:
        value: What to compare.
        tables: What a cache holds beside it, so that an address cannot come to mean another tensor.
        versions: Of tensors that are known by what they hold: they tell of a change that was undone.
    """

    value: Hashable
    tables: tuple[Tensor, ...]
    versions: tuple[Hashable, ...] = ()

    def same(self, other: Key) -> bool:
        """Tell whether nothing was changed between two looks at a pattern."""
        return self.value == other.value and self.versions == other.versions


def address_key(table: Tensor) -> Hashable:
    """Identify a tensor while it lives: address, version, layout."""
    return table.data_ptr(), version(table), tuple(table.shape), table.stride(), table.dtype, str(table.device)
