"""Extract rows and columns of a plan as a plan, for one rank or for one piece of the keys."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from .block_plan import BlockPlan, pack_masks, unpack_masks
from .branches import Branch
from .csr import RowSet, assemble
from .cuda_sync import record_stream, wait_for_stream


@dataclass(frozen=True, eq=False)
class CutBranch(Branch):
    """A branch restricted to some rows and columns, with the plan of these."""

    tiles: BlockPlan
    _on: dict[str, BlockPlan] = field(default_factory=dict)

    @staticmethod
    def of(branch: Branch, tiles: BlockPlan, heads: tuple[int, int, int] | None = None) -> CutBranch:
        """Return the branch of a plan that :func:`subplan` extracted from a branch's plan; it is in token order.

        Args:
            branch: The whole branch.
            tiles: The extracted plan.
            heads: Heads of the result; None for the whole branch's.
        """
        return CutBranch(
            branch.pattern,
            branch.heads if heads is None else heads,
            rate=1,
            q_first=0,
            k_first=0,
            nq=tiles.nq,
            nk=tiles.nk,
            q_offset=0,
            batch=branch.batch,
            tiles=tiles,
            spacing=branch.spacing,
        )

    @property
    def dense_kind(self) -> str:
        """Always ``"sparse"``, since no dense kernel computes a selection of rows and columns."""
        return "sparse"

    @property
    def tile(self) -> tuple[int, int]:
        """The tile size of the whole plan."""
        return self.tiles.q_tile, self.tiles.kv_tile

    def plan(self, device: str | torch.device = "cpu", tile: int | tuple[int, int] | None = None) -> BlockPlan:
        """Return the plan of the selected rows and columns on a device, cached per device."""
        device = torch.device(device)
        plan = self._on.get(str(device))
        if plan is None:
            plan = self.tiles.to(device)
            if not record_stream(plan, device):
                return plan
            self._on[str(device)] = plan
        wait_for_stream(plan, device)
        return plan


def subplan(
    plan: BlockPlan,
    rows: NDArray[np.int64],
    columns: NDArray[np.int64],
    *,
    present: NDArray[np.bool_] | None = None,
    wanted: list[NDArray[np.bool_]] | None = None,
) -> BlockPlan:
    """Extract rows and columns of a plan, renumbered in their order.

    A row's tiles keep their order, so a kernel sums them in the same order as in the whole plan.

    Args:
        plan: The whole plan, on the CPU.
        rows: Query tiles, ascending.
        columns: Key tiles, ascending.
        present: (columns, kv_tile), the keys of each tile that exist; others are masked. None for all.
        wanted: For each row set, a mask of the entries that may be extracted. None for all.
    Returns:
        A plan of ``rows`` by ``columns``; its lengths end inside a tile if the whole's last tile does and is extracted.
    """
    new_row, new_col = numbers_of(rows, plan.q_tiles), numbers_of(columns, plan.kv_tiles)
    pointers, all_columns, all_bits = plan.row_ptr.numpy(), plan.col.numpy(), plan.mask_id.numpy()
    sets = []
    for group, pointer in enumerate(pointers):
        entries = slice(pointer[0], pointer[-1])
        row = np.repeat(new_row, np.diff(pointer))
        col = new_col[all_columns[entries]]
        taken = (row >= 0) & (col >= 0)
        if wanted is not None:
            taken &= wanted[group]
        sets.append(RowSet(row[taken], col[taken], all_bits[entries][taken]))
    masks = plan.mask_words
    if present is not None and not present.all():
        masks = _masked(sets, plan, _ended(present, columns, plan))
    return assemble(
        sets,
        plan.row_set.numpy(),
        masks.numpy(),
        _tokens(rows, plan.q_tile, plan.nq),
        _tokens(columns, plan.kv_tile, plan.nk),
        0,
        (plan.q_tile, plan.kv_tile),
        "cpu",
    )


def numbers_of(chosen: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Return the place of each tile among the chosen ones, -1 for the others."""
    numbers = np.full(count, -1, np.int64)
    numbers[chosen] = np.arange(len(chosen))
    return numbers


def _tokens(tiles: NDArray[np.int64], side: int, length: int) -> int:
    return len(tiles) * side - max(0, int(tiles[-1] + 1) * side - length)


def _ended(present: NDArray[np.bool_], columns: NDArray[np.int64], plan: BlockPlan) -> NDArray[np.bool_]:
    """Mark keys past the end as absent if the last tile gets a mask, since mask bits past the end must be 0."""
    if columns[-1] != plan.kv_tiles - 1 or present[-1].all():
        return present
    present = present.copy()
    present[-1, plan.nk - int(columns[-1]) * plan.kv_tile :] = False
    return present


def _masked(sets: list[RowSet], plan: BlockPlan, present: NDArray[np.bool_]) -> torch.Tensor:
    """Apply the absence of keys to the sets' masks in place; return the masks of the new plan."""
    shapes, kind = np.unique(present, axis=0, return_inverse=True)
    kind = kind.reshape(-1)
    whole: NDArray[np.bool_] = np.asarray(shapes.all(axis=1))
    # distinct pairs (mask or full, set of present keys)
    occurring = [
        np.stack([rows.mask_id.astype(np.int64) + 1, kind[rows.col]], 1)[~whole[kind[rows.col]]] for rows in sets
    ]
    pairs = np.unique(np.concatenate(occurring), axis=0)
    if not len(pairs):
        return plan.mask_words
    base = torch.cat(
        [
            torch.ones(1, plan.q_tile, plan.kv_tile, dtype=torch.bool, device="cpu"),
            unpack_masks(plan.mask_words, plan.kv_tile),
        ]
    )
    fresh = base[torch.from_numpy(pairs[:, 0])] & torch.from_numpy(shapes)[pairs[:, 1]][:, None, :]
    first = plan.mask_words.shape[0]
    codes = {(int(mask), int(shape)): first + i for i, (mask, shape) in enumerate(pairs)}
    for rows in sets:
        touched = np.flatnonzero(~whole[kind[rows.col]])
        rows.mask_id[touched] = [codes[int(rows.mask_id[e]) + 1, int(kind[rows.col[e]])] for e in touched]
    return torch.cat([plan.mask_words, pack_masks(fresh)])
