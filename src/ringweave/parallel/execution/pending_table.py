"""Block tables that are chosen during training: each rank chooses the rows of its shard, and all ranks get the table.

The rows travel while the current step computes. If the ranks' versions differ, all ranks raise.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ...axes import Axes
from ...checks import whole
from ...errors import ShapeError
from ...patterns import BlockTable
from ..planning.placement import Placement
from .collective import CollectiveCall

_ROWS = Axes("rows: bool[B? H? local_blocks key_blocks]")


class PendingTable:
    """A block table that is being gathered from all ranks; see :meth:`ContextParallel.share_table`.

    Attributes:
        version: Version number of the table.
    """

    def __init__(self, collective: CollectiveCall, placement: Placement, rows: Tensor, block_size: int, version: int):
        self.version, self.block_size = version, block_size
        self._placement = placement
        self._transport = collective.transport
        padded = torch.nn.functional.pad(rows, (0, -rows.shape[-1] % 8)).cpu()
        mine = torch.from_numpy(np.packbits(padded.numpy(), axis=-1)).reshape(-1)
        self._shape, self._device = rows.shape, rows.device
        self._data, self._pending = collective.all_gather(mine, "table")

    def result(self) -> BlockTable:
        """Wait for the rows of all ranks and return the table.

        Returns:
            The whole table, the same on every rank.
        Raises:
            RingError: A rank is lost, or another thread is in a call.
        """
        with self._transport.using():
            self._pending.wait()
        *lead, blocks, keys = self._shape
        placement = self._placement
        total = -(-placement.tokens // self.block_size)
        whole = torch.zeros(*lead, total, keys, dtype=torch.bool, device="cpu")
        for rank, data in enumerate(self._data):
            bits = np.unpackbits(data.numpy().reshape(-1, -(-keys // 8)), axis=1)[:, :keys]
            rows = torch.from_numpy(bits.reshape(*lead, blocks, keys).astype(bool))
            number = placement.block_numbers(rank, self.block_size)
            real = number < total
            whole[..., torch.from_numpy(number[real]), :] = rows[..., torch.from_numpy(np.flatnonzero(real)), :]
        return BlockTable(whole.to(self._device), self.block_size)


def rows_of(rows: Tensor, placement: Placement, rank: int, block_size: int) -> Tensor:
    """Check the rows that a rank shares; see :meth:`ContextParallel.share_table`."""
    blocks = len(placement.block_numbers(rank, whole("block_size", block_size, 1, error=ShapeError)))
    keys = -(-placement.tokens // block_size)
    empty, remedy = ("B", "H", "local_blocks"), "Pass one row per local block."
    _ROWS.fit(rows=rows, local_blocks=blocks, key_blocks=keys, empty=empty, remedy=remedy)
    return rows
