"""Keys that identify patterns in caches."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Parameter

from ..errors import PatternError
from ..torch_compat import digest, version

#: Bytes up to which a tensor is identified by its contents, so that every write to it is noticed.
SMALL = 2**20


class TableId:
    """The identity of a tensor that its owner may write to: its storage, and its version and layout when made.

    It keeps the storage alive. No other storage can therefore get an address that a key of a cache contains, even after
    the tensor was given another storage by ``set_`` or an assignment to ``data``.

    Args:
        table: The tensor.
    Example:
        >>> from ringweave.patterns.cache_key import TableId
        >>> table = torch.zeros(2)
        >>> before = TableId(table)
        >>> before == TableId(table), before == TableId(table.add_(1))
        (True, False)
    """

    __slots__ = ("_state", "storage")

    def __init__(self, table: Tensor):
        #: The memory of the tensor.
        self.storage = table.untyped_storage()
        # the address changes if the storage is resized in place
        place = self.storage.data_ptr(), table.storage_offset(), tuple(table.shape), table.stride()
        self._state = *place, table.dtype, table.device, version(table)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TableId) and self.storage is other.storage and self._state == other._state

    def __hash__(self) -> int:
        return hash(self._state)


class CacheKey(NamedTuple):
    """A pattern as a key of caches.

    Attributes:
        value: The hashable key.
        nbytes: Bytes of the tensors that the key keeps alive.
        versions: Versions of the tensors before and after their contents were read. They reveal a change that was
            undone, and a write in between, which torch counts after it has written.
    """

    value: Hashable
    nbytes: int = 0
    versions: tuple[Hashable, ...] = ()

    def same(self, other: CacheKey) -> bool:
        """Return whether nothing was changed between the two times at which the keys were made."""
        return self.value == other.value and self.versions == other.versions

    def check(self, pattern: Any) -> None:
        """Raise PatternError if the key of a pattern has changed: a result from in between belongs to neither key."""
        if self.versions and not self.same(pattern.key()):
            raise changed("values that another thread changed", "TokenMask" if pattern.has_function else "pattern")

    @classmethod
    def following(cls, text: str, tables: tuple[Tensor, ...]) -> CacheKey:
        """Make the key of a text and of tensors that others may write to: small ones are identified by contents."""
        before = tuple(map(version, tables))
        contents = tuple(map(content_key, tables))
        large = [table for table, known in zip(tables, contents, strict=True) if known is None]
        versions = (before, *map(TableId, tables)) if tables else ()
        return cls((text, *contents, *map(TableId, large)), sum([table.nbytes for table in large]), versions)


def changed(what: str, name: str = "TokenMask") -> PatternError:
    """Return the error of a pattern that reads or contains other values than at its last inspection."""
    return PatternError(
        name,
        f"a function that reads {what}" if name == "TokenMask" else what,
        "the same values as when the call or the compiled code was made",
        "Change it after backward; with torch.compile wrap the function again, or change a tensor in place.",
    )


def content_key(table: Tensor) -> Hashable | None:
    """Identify a CPU tensor by its contents; None for a large one if torch counts its writes."""
    if table.device.type != "cpu" or (table.nbytes > SMALL and _counted(table)):
        return None
    return digest(table), tuple(table.shape), table.dtype


def _counted(table: Tensor) -> bool:
    # fused optimizers write to parameters and count no version
    if table.is_inference() or table.requires_grad or isinstance(table, Parameter):
        return False
    # torch does not resize storages that numpy or another process may write to
    return table.untyped_storage().resizable() and not table.is_shared()
