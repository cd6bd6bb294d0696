"""Which rank holds which tokens.

A placement cuts the sequence into blocks and gives each rank equally many; a rank keeps its blocks in ascending order.
Where attention is dilated, the sequence is first laid out by residue, one strided view after the other, and blocks are
cut from that. Padding fills up: positions at and after the sequence's length, which nobody attends, and which come
last on the ranks that hold them.
"""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ...errors import ShapeError, message
from ...patterns.validate import whole

Int64 = NDArray[np.int64]
Int32 = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Placement:
    """Which rank holds which tokens of one sequence.

    Attributes:
        name: What kind it is.
        tokens: Length of the sequence, without padding.
        ranks: How many ranks.
        block: Tokens that stay together, in token order or in a view.
        owner: (blocks,) the rank of each block; every rank has equally many.
        views: How many strided views lie one after the other before blocks are cut; divides ``ranks``, and a rank's
            blocks are of one view. 1: token order.
    Raises:
        ShapeError: Blocks that do not fit tokens, ranks or views.
    """

    name: str
    tokens: int
    ranks: int
    block: int
    owner: Int32
    views: int = 1

    def __post_init__(self) -> None:
        for name in ("tokens", "ranks", "block", "views"):
            object.__setattr__(self, name, whole(name, getattr(self, name), 1, error=ShapeError))
        owner = np.asarray(self.owner)
        if owner.ndim != 1 or not np.issubdtype(owner.dtype, np.integer):
            raise ShapeError(message("owner", f"{owner.dtype} {owner.shape}", "ints (blocks,)", "A rank per block."))
        # a copy that cannot be written: nothing changes who holds what
        kept = owner.astype(np.int32)
        kept.setflags(write=False)
        object.__setattr__(self, "owner", kept)
        inside = len(owner) > 0 and bool((owner >= 0).all() and (owner < self.ranks).all())
        if not inside or len(np.unique(np.bincount(owner, minlength=self.ranks))) > 1:
            wanted = f"equally many blocks of each of {self.ranks} ranks"
            raise ShapeError(message("owner", f"{len(owner)} blocks", wanted, "Name a rank for each block."))
        if len(owner) * self.block < self.tokens:
            got = f"{len(owner)} blocks of {self.block} tokens"
            raise ShapeError(
                message("owner", got, f"{self.tokens} tokens or more", "Add blocks: padding is at the end.")
            )
        # a view's blocks lie together
        by_view = owner.reshape(self.views, -1) if self.ranks % self.views == 0 else owner[None]
        if self.views > 1 and sum(len(np.unique(view)) for view in by_view) != len(by_view) * self.ranks // self.views:
            wanted = f"a divisor of {self.ranks} ranks, and each rank's blocks in one view"
            raise ShapeError(message("views", self.views, wanted, "Use 1: token order."))

    @property
    def local(self) -> int:
        """How many tokens each rank has, padding included."""
        return len(self.owner) // self.ranks * self.block

    @property
    def _view(self) -> int:
        return self.local * self.ranks // self.views

    def positions(self, rank: int) -> Int64:
        """(local,) where a rank's tokens are in the sequence, ascending; padding is at and after ``tokens``."""
        blocks = np.flatnonzero(self.owner == rank)
        laid = (blocks[:, None] * self.block + np.arange(self.block)).reshape(-1)
        return laid % self._view * self.views + laid // self._view

    def held(self, rank: int) -> int:
        """How many tokens of a rank are no padding: the first ones of its shard."""
        return int(np.searchsorted(self.positions(rank), self.tokens))

    def _laid(self, positions: Int64) -> Int64:
        if self.views == 1:
            return positions
        return positions % self.views * self._view + positions // self.views

    def owners(self, positions: Int64) -> Int64:
        """Which rank holds each position."""
        return self.owner[self._laid(positions) // self.block].astype(np.int64)

    def slots(self, positions: Int64) -> Int64:
        """Where each position lies in its rank's shard."""
        laid = self._laid(positions)
        return self._first_slot[laid // self.block] + laid % self.block

    @cached_property
    def _first_slot(self) -> Int64:
        order = np.argsort(self.owner, kind="stable")
        first = np.empty(len(self.owner), np.int64)
        first[order] = np.arange(len(order)) % (len(order) // self.ranks) * self.block
        return first

    @cached_property
    def _stretch(self) -> int:
        """How many tokens lie side by side on one rank, aligned, as laid out."""
        changes = np.flatnonzero(np.diff(self.owner)) + 1
        return int(np.gcd.reduce(changes)) * self.block

    def runs(self, rate: int) -> tuple[int, int]:
        """How many neighbours of a strided view stay together, aligned, and their distance in the shard.

        Whatever divides the first number stays together too; 0, which everything divides: all that there are.
        """
        if rate % self.views:
            return 1, 1
        step = rate // self.views
        # a rank that holds a whole view holds every view inside it
        if self.views == self.ranks:
            return 0, step
        return (self._stretch // step, step) if self._stretch % step == 0 else (1, 1)

    @cached_property
    def digest(self) -> int:
        """63 bits, which two ranks compare."""
        text = f"{self.name}/{self.tokens}/{self.ranks}/{self.block}/{self.views}/{self.owner.tobytes().hex()}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def block_for(tokens: int, ranks: int, tile: int) -> int:
    """How many tokens a block has: a tile's where every rank gets two, else the next smaller power of two of 16 on."""
    block = tile
    while block % 32 == 0 and -(-tokens // block) < 2 * ranks:
        block //= 2
    return block


def blocks_for(tokens: int, ranks: int, block: int) -> int:
    """How many blocks cover a sequence and give every rank equally many; ShapeError without tokens or ranks."""
    if tokens < 1 or ranks < 1:
        got = f"{tokens}, {ranks}"
        raise ShapeError(message("tokens, ranks", got, "at least 1 each", "Pass a sequence and ranks."))
    return -(-tokens // (block * ranks)) * ranks


def contiguous(tokens: int, ranks: int, block: int) -> Placement:
    """Give each rank a stretch of the sequence."""
    count = blocks_for(tokens, ranks, block)
    owner = np.arange(count, dtype=np.int32) // (count // ranks)
    return Placement("contiguous", tokens, ranks, block, owner)


def zigzag(tokens: int, ranks: int, block: int) -> Placement:
    """Give each rank a stretch from the front and its mirror from the back: causal work is equal."""
    count = blocks_for(tokens, 2 * ranks, block)
    part = np.arange(count, dtype=np.int32) // (count // (2 * ranks))
    return Placement("zigzag", tokens, ranks, block, np.minimum(part, 2 * ranks - 1 - part).astype(np.int32))


def striped(tokens: int, ranks: int, block: int) -> Placement:
    """Deal blocks in turn."""
    owner = np.arange(blocks_for(tokens, ranks, block), dtype=np.int32) % ranks
    return Placement("striped", tokens, ranks, block, owner)


def residues(tokens: int, ranks: int, block: int, views: int | None = None) -> Placement:
    """Deal tokens in turn to ``views`` groups of ranks, and in a group a stretch of its view to each rank.

    With as many views as ranks, the default, a dilation whose rate the ranks divide stays on its rank. ShapeError where
    views do not divide the ranks.
    """
    views = ranks if views is None else views
    if views < 1 or ranks % views:
        raise ShapeError(message("views", views, f"a divisor of {ranks} ranks", "Use gcd(rate, ranks)."))
    return dataclasses.replace(contiguous(tokens, ranks, block), name="residue", views=views)


#: Placements by name, as ``ContextParallel`` takes them.
NAMED = {"contiguous": contiguous, "zigzag": zigzag, "striped": striped, "residue": residues}
