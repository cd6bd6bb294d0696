"""The operands of a call in tiles, and batches of these, for ``tile_attention.py``.

A batch has rows of equal length: a row is a tile of queries with its tiles of keys, gathered into one tensor, so scores
and outputs are one batched product each. Products are computed in float32 (float64 for float64 inputs) whatever the
storage type.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import torch
from torch import Tensor

from ..call import Operands
from ..chunks import budget
from ..types import acc_dtype
from .overflow import sides

if TYPE_CHECKING:
    from ..memory import Workspace

# Sides of the smallest tile.
_LEAST = 16


def tile_within(tile: tuple[int, int], nbytes: int, device: torch.device | str) -> tuple[int, int]:
    """Return a tile with fewer queries if ``nbytes`` for each of its pairs exceed the budget of a chunk twice."""
    q_tile, kv_tile = tile
    while q_tile > _LEAST and q_tile * kv_tile * nbytes > 2 * budget(device):
        q_tile //= 2
    return max(q_tile - q_tile % _LEAST, _LEAST), kv_tile


@dataclass(eq=False, repr=False)
class Batch:
    """R rows, each of a tile of queries with n tiles of keys.

    Attributes:
        key: Indices into the tiles of keys of all batch elements and key heads, (R, n).
    """

    key: Tensor


AnyBatch = TypeVar("AnyBatch", bound=Batch)


class Tiles(ABC, Generic[AnyBatch]):
    """The operands of a call in tiles, and batches that cover its pairs.

    Attributes:
        k_tiles: Keys, (tiles, kv_tile, D), or pages.
        v_tiles: Values, (tiles, kv_tile, Dv), or pages.
        pieced: Whether a row may be in several batches.
        shared: Whether all queries of a tile may attend the same keys.
        space: Scratch memory; None where torch's allocator returns memory quickly, or autograd keeps the products.
    """

    k_tiles: Tensor
    v_tiles: Tensor
    pieced = False
    shared = False
    space: Workspace | None

    def __init__(self, operands: Operands):
        # imported at first use, to keep `import ringweave` fast
        from ..memory.workspace import scratch

        self.q, k, v = operands[:3]
        self.batch, self.heads, self.nq, _ = self.q.shape
        self.kv_heads, self.nk, self.channels = k.shape[1], operands.nk, v.shape[3]
        self.acc, self.scale, self.device = acc_dtype(self.q.dtype), operands.scale, self.q.device
        self.elsewhere = self.device.type != "cpu"
        self.space = None if self.elsewhere else scratch

    @abstractmethod
    def batches(self) -> Iterator[AnyBatch]:
        """Yield batches that cover each pair once; pieces of one row come in ascending order of keys."""

    # ---- tensors of the queries, (B, Hq, Nq, C) ----------------------------------------------------------------------

    @abstractmethod
    def by_query(self, x: Tensor, padding: float = 0.0) -> Tensor:
        """Return a tensor of the queries in the form of the next functions, which may share its memory.

        ``padding`` is the value of queries past the last one.
        """

    @abstractmethod
    def blank(self, channels: int, value: float, dtype: torch.dtype) -> Tensor:
        """Return a new tensor of the queries in this form, in the dtype of sums if parts of rows are merged in it."""

    @abstractmethod
    def whole(self, x: Tensor) -> Tensor:
        """Return a tensor in this form as (B, Hq, Nq, C), contiguous."""

    @abstractmethod
    def taken(self, x: Tensor, batch: AnyBatch) -> Tensor:
        """Return the queries of a batch, (R, q_tile, C), in the dtype of sums."""

    @abstractmethod
    def put(self, x: Tensor, batch: AnyBatch, part: Tensor, add: bool = False) -> None:
        """Write the queries of a batch, (R, q_tile, C), or add them."""

    # ---- tensors of the keys, (B, Hkv, Nk, C) ------------------------------------------------------------------------

    @abstractmethod
    def gathered(self, tiles: Tensor, batch: AnyBatch, only_attended: bool) -> Tensor:
        """Gather tiles of keys or values, (R, n * kv_tile, C), in the dtype of sums.

        With ``only_attended``, tokens that no query of a tile may attend are zero.
        """

    @abstractmethod
    def without_dead(self, x: Tensor, batch: AnyBatch) -> Tensor:
        """Fill in 0 in place, in (R, n * kv_tile, C), for keys that no query of a tile may attend."""

    def summed(self, total: Tensor, batch: AnyBatch, part: Tensor) -> None:
        """Add (R, n * kv_tile, C) to sums over the tiles of keys."""
        total.index_add_(0, batch.key.reshape(-1), part.reshape(-1, *total.shape[1:]))

    def by_key(self, total: Tensor, dtype: torch.dtype) -> Tensor:
        """Return sums over the tiles of keys as (B, Hkv, Nk, C)."""
        by_head = total.view(self.batch, self.kv_heads, -1, total.shape[-1])
        return by_head[:, :, : self.nk].to(dtype).contiguous()

    # ---- pairs of a batch, (R, q_tile, n * kv_tile) ------------------------------------------------------------------

    @abstractmethod
    def masked(self, x: Tensor, batch: AnyBatch, value: float) -> Tensor:
        """Fill in ``value`` in place where pairs are not allowed."""

    @abstractmethod
    def indices(self, batch: AnyBatch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return batch elements, query heads, queries and keys, which broadcast to the pairs.

        Tiles may reach beyond the last query and the last key.
        """

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        """Multiply batches of matrices, into scratch memory if there is some."""
        if self.space is None:
            return torch.bmm(a, b)
        return torch.bmm(a, b, out=self.space.take((*a.shape[:2], b.shape[2]), a.dtype))

    def products(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return the scaled products of the queries and keys of a batch."""
        before, after = sides(self.scale)
        found = self.product(queries * before, keys.mT)
        return found if after == 1 else found.mul_(after)
