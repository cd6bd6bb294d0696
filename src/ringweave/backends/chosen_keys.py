"""The keys that a branch's lists name for its queries, filtered by a relation; for backends that gather them."""

from __future__ import annotations

import torch
from torch import Tensor

from ..call import Call
from ..patterns import Pattern
from ..patterns.lists import Lists
from ..patterns.located import located
from ..patterns.within import by_head
from ..plan import Branch
from ..plan.subplan import CutBranch


class ChosenKeys:
    """The lists of a branch ``Selected`` or ``Selected & relation``.

    Attributes:
        table: Blocks of keys, (B or 1, Hkv or 1, L, Nq or 1, n); L is the number of lists of a key head.
        size: Keys in a block.
        split: Lists of a key head, and query heads of a list.
    """

    def __init__(self, branch: Branch, batch: int, heads: int, kv_heads: int, device: torch.device):
        lists = branch.lists
        assert lists is not None
        self.branch, self.batch, self.size, self.relation = branch, batch, lists.block, lists.relation
        table = lists.blocks.to(device).listed()
        table = table.view((1,) * (4 - table.ndim) + table.shape)
        group = heads // kv_heads
        if table.shape[1] > 1:
            by_key_head = table.repeat_interleave(heads // table.shape[1], 1).unflatten(1, (kv_heads, group))
            table = by_key_head[:, :, :1] if lists.serve(group) else by_key_head
        else:
            table = table[:, :, None]
        self.table = table
        self.split = table.shape[2], group // table.shape[2]

    def at(self, rows: slice, nk: int) -> tuple[Tensor, Tensor]:
        """Return the listed keys of some queries, (B or 1, Hkv or 1, L, R, n) int64, and whether each is attended."""
        at = torch.arange(rows.start, rows.stop, device=self.table.device) + self.branch.q_offset
        # a single row belongs to the only query, at any position
        keys = (self.table if self.table.shape[3] == 1 else self.table.index_select(3, at)).long()
        if self.size > 1:
            keys = (keys[..., None] * self.size + torch.arange(self.size, device=keys.device)).flatten(-2)
        allowed = keys < nk
        keys = torch.where(allowed, keys, 0)
        return keys, allowed & self._related(at[:, None], keys)

    def _related(self, at: Tensor, keys: Tensor) -> Tensor:
        """Evaluate the relation at listed keys (B or 1, Hkv or 1, L, R, n)."""
        # the relation is the same for all heads, and a function may read the batch element
        if self.relation.select(0, 0) is self.relation:
            return self._allowed(self.relation, at, keys)
        each = [
            self._allowed(self.relation.select(b, 0), at, keys[b if len(keys) > 1 else 0]) for b in range(self.batch)
        ]
        return torch.stack(each)

    def _allowed(self, relation: Pattern, at: Tensor, keys: Tensor) -> Tensor:
        """Evaluate a relation at listed keys (..., R, n), with one side for all leading ones: a function takes four."""
        branch, flat = self.branch, keys.flatten(0, -3)
        here = located(relation, (branch.q_offset + branch.nq, branch.nk))
        return here.allows(at, flat).expand(flat.shape).reshape(keys.shape)


def why_no_lists(lists: Lists | None) -> str | None:
    """Return a reason unless a pattern is lists of keys, filtered by a relation that is the same for all heads."""
    if lists is None:
        return "it computes lists of keys, Selected alone or with & and a relation"
    if by_head(lists.relation):
        return "the relation that filters the lists differs between heads"
    return None


def unsupported_reason(call: Call, branch: Branch) -> str | None:
    """Return a reason unless a branch is such lists, and the whole call."""
    reason = why_no_lists(branch.lists)
    if reason is not None:
        return reason
    if isinstance(branch, CutBranch):
        return "lists name queries and keys of the whole call, and a rank computes a part of it"
    return None
