"""Keys that a model chooses for each query."""

from __future__ import annotations

import torch
from torch import Tensor

from ..axes import Axes
from ..checks import one_of, whole
from ..errors import PatternError
from ..torch_compat import wrapped
from .base import Full, Pattern
from .block_sets import ListedBlocks
from .declared import declare
from .documents import Documents, keys_of
from .lists import MANY, Listed, Lists, misfit
from .table import BlockTable

_INDICES = Axes("indices: index[B? H? Nq n]")


@declare(
    "Selected((torch.arange(1024)[:, None] // 32 - torch.tensor([0, 1, 5, 12])).clamp(min=-1), block_size=32)",
    "By table, function or head",
    text=False,
    hostile="Selected((torch.arange(n)[:, None] - torch.tensor([0, n // 2])).clamp(min=-1))",
)
class Selected(BlockTable, Listed):
    """A query attends the keys, or blocks of keys, that a list names for it: what an indexer chose, query by query.

    Row i belongs to query i of the call and names keys of the call, whatever ``q_offset`` and ``k_offset`` are: a chunk
    or a decoding step passes its own rows. The order of a list does not matter, and a key that it repeats counts once.
    Combine it with other patterns: ``Selected(indices) & Causal()`` filters the lists, and
    ``Selected(indices) | SlidingWindow(128, 0)`` adds a window. The indices are copied, so a pattern never changes.
    ``Selected(indices).within(Documents(...))`` counts keys, or blocks, from the first key of the query's document.

    Plans and kernels take time and memory that grow with the number of listed keys where all query heads of a key head
    share a list. Where each head has keys of its own, a tile of queries computes the union of its lists.

    Args:
        indices: int32 or int64, (Nq, n), (H, Nq, n) or (B, H, Nq, n); H is 1, the number of query heads, or with
            ``heads="kv"`` that of key heads. -1 is no key, and may stand anywhere in a row.
        block_size: Number of keys that one index stands for; the last block may be shorter.
        key_blocks: Number of key blocks, to check the indices against; None checks them against the keys of the call.
        heads: ``"query"`` for a list per query head, or ``"kv"`` for a list per key head, which all its query heads
            share.
    Raises:
        PatternError: The indices are no integers or have another rank; at use, there is not one row for each query, or
            an index is below -1 or past the last block. On a GPU indices are not read back: one that is out of range
            stops the device with an assertion.
    Example:
        >>> chosen = rw.Selected(torch.tensor([[0, -1], [1, 0], [0, 2]]))
        >>> chosen.to_dense(3)[0, 0].int()
        tensor([[1, 0, 0],
                [1, 1, 0],
                [1, 0, 1]], dtype=torch.int32)

    References:
        DeepSeek-AI (2025), DeepSeek-V3.2, section 2.1 (tokens chosen by a lightning indexer).
        Yuan et al. (2025), Native Sparse Attention, section 3.3 (blocks chosen per key head).
    """

    by_place = True
    blocks: ListedBlocks

    def __init__(self, indices: Tensor, block_size: int = 1, *, key_blocks: int | None = None, heads: str = "query"):
        remedy = "List the keys of each query; -1 is no key."
        _INDICES.fit(indices=indices, empty=("n",), error=PatternError, remedy=remedy)
        number = MANY if key_blocks is None else whole("key_blocks", key_blocks, 1, MANY)
        # numbers that int32 cannot hold stay out of range
        chosen = indices.detach().clamp(-2, MANY).to(torch.int32, copy=True, memory_format=torch.contiguous_format)
        if not chosen.shape[-1]:
            chosen = torch.full((*chosen.shape[:-1], 1), -1, dtype=torch.int32, device=chosen.device)
        self.block_size = 1, whole("block_size", block_size, 1)
        self.blocks = ListedBlocks(chosen, number, sorted=False)
        several = one_of("heads", heads, ("query", "kv")) == "kv" and (1, *chosen.shape)[-3] > 1
        self.group = None if several else 1
        self.__post_init__()

    @classmethod
    def own(
        cls, table: Tensor, block_size: int | tuple[int, int], key_blocks: int | None = None, group: int | None = 1
    ) -> Selected:
        """Build the pattern that a text describes, around indices that are not copied."""
        assert isinstance(block_size, int)
        return cls.of(ListedBlocks(table, key_blocks or MANY, sorted=False), (1, block_size), group or None)

    def _text(self) -> str:
        number = "" if self.blocks.key_blocks == MANY else f", key_blocks={self.blocks.key_blocks}"
        group = "" if self.group == 1 else f", group={self.group or 0}"
        return f"Selected(_, {self.block_size[1]}{number}{group})"

    def __repr__(self) -> str:
        *lead, queries, most = self.blocks.table.shape
        size = self.block_size[1]
        what = "keys" if size == 1 else f"blocks of {size} keys"
        of = "".join(f"{n}x" for n in lead)
        return f"Selected(<{of}{queries} queries, at most {most} {what} each>)"

    @property
    def lists(self) -> Lists:
        return Lists(self.blocks, self.block_size[1], self.group, Full())

    def check(self, nq: int, nk: int, q_offset: int) -> None:
        self.lists.check(nq, nk, q_offset)

    @property
    def tile_size(self) -> None:
        return None


def in_documents(lists: Selected, documents: Documents) -> Pattern:
    """Convert lists that count from the first key of each query's document to lists of keys of the whole sequence.

    Raises:
        PatternError: The lists have rows for another number of queries, an index is past its document, or a document
            is in several pieces.
    """
    table, size = lists.blocks.table.long(), lists.block_size[1]
    # in compiled code no value is known, and the call checks the indices
    readable = not torch.compiler.is_compiling() and documents.readable()
    readable = readable and table.device.type == "cpu" and not wrapped(table)
    if readable:
        documents.spans()  # raises if a document is in several pieces
    first, stop = keys_of(documents, table.shape[-2])
    if first.shape[-1] != table.shape[-2]:
        raise misfit(table.shape[-2], first.shape[-1])
    first, stop = (
        side[:, None, :, None].to(table.device) if side.ndim == 2 else side[:, None].to(table.device)
        for side in (first, stop)
    )
    past = table * size >= stop - first
    if readable and bool(past.any()):
        got = f"{int(table.expand(past.shape)[past].max())}, past the end of the query's document"
        remedy = "Count keys, or blocks of keys, from the first key of the document; -1 is no key."
        raise PatternError("indices", got, "an index of a key in the document", remedy)
    if size > 1 and readable and not bool((first % size).any()):
        # all documents begin with a block: the documents cut their last one
        chosen = torch.where(table < 0, table, table + first // size)
    else:
        key = table[..., None] * size + torch.arange(size, device=table.device)
        inside = (table >= 0)[..., None] & (key < (stop - first)[..., None])
        chosen = torch.where(inside, key + first[..., None], table.clamp(max=-1)[..., None])
        # an index that is past its document stays out of range
        chosen, size = chosen.masked_fill(past[..., None], MANY).flatten(-2), 1
    blocks = ListedBlocks(chosen.to(torch.int32).contiguous(), MANY, sorted=False)
    return Selected.of(blocks, (1, size), lists.group) & documents
