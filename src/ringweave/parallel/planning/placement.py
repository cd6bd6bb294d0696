"""Placements: the assignment of tokens to ranks.

A placement cuts the sequence into blocks and gives each rank the same number of blocks, in ascending order. For dilated
attention the sequence is first laid out by residue, one strided view after another, and the blocks are cut from that
layout. Positions from the sequence's length on are padding: no query attends them, and they come last in a shard.
"""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ...checks import whole
from ...errors import ShapeError

Int64 = NDArray[np.int64]
Int32 = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Placement:
    """The assignment of one sequence's tokens to ranks.

    Attributes:
        name: Name of the placement.
        tokens: Length of the sequence, without padding.
        ranks: Number of ranks.
        block: Number of tokens of a block, which are adjacent in the sequence or in a strided view.
        owner: (blocks,) rank of each block; every rank has the same number of blocks.
        views: Number of strided views in the layout from which blocks are cut. It divides ``ranks``, and the blocks of
            a rank belong to one view. 1 is token order.
    Raises:
        ShapeError: The blocks do not fit the tokens, ranks or views.
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
            raise ShapeError("owner", f"{owner.dtype} {owner.shape}", "ints (blocks,)", "Name block owners.")
        # a read-only copy, so that later writes to the caller's array do not change the placement
        copied = owner.astype(np.int32)
        copied.setflags(write=False)
        object.__setattr__(self, "owner", copied)
        inside = len(owner) > 0 and bool((owner >= 0).all() and (owner < self.ranks).all())
        if not inside or len(np.unique(np.bincount(owner, minlength=self.ranks))) > 1:
            wanted = f"the same number of blocks for each of {self.ranks} ranks"
            raise ShapeError("owner", f"{len(owner)} blocks", wanted, "Name a rank for each block.")
        if len(owner) * self.block < self.tokens:
            got = f"{len(owner)} blocks of {self.block} tokens"
            raise ShapeError("owner", got, f"{self.tokens} tokens or more", "Add blocks: padding is at the end.")
        # the blocks of one view are consecutive in the layout
        by_view = owner.reshape(self.views, -1) if self.ranks % self.views == 0 else owner[None]
        if self.views > 1 and sum(len(np.unique(view)) for view in by_view) != len(by_view) * self.ranks // self.views:
            wanted = f"a divisor of {self.ranks} ranks, and each rank's blocks in one view"
            raise ShapeError("views", self.views, wanted, "Use views=1 for token order.")

    @property
    def local(self) -> int:
        """Number of tokens of each rank, including padding."""
        return len(self.owner) // self.ranks * self.block

    @property
    def _view(self) -> int:
        return self.local * self.ranks // self.views

    def positions(self, rank: int) -> Int64:
        """Return the positions of a rank's tokens, (local,), ascending; those from ``tokens`` on are padding."""
        blocks = np.flatnonzero(self.owner == rank)
        laid = (blocks[:, None] * self.block + np.arange(self.block)).reshape(-1)
        return laid % self._view * self.views + laid // self._view

    def tokens_of(self, rank: int) -> int:
        """Return the number of a rank's tokens without padding, which come first in its shard."""
        return int(np.searchsorted(self.positions(rank), self.tokens))

    def block_numbers(self, rank: int, block_size: int) -> Int64:
        """Return the numbers, in the sequence, of the blocks of ``block_size`` tokens in a rank's shard, in its order.

        Raises:
            ShapeError: The placement cuts through blocks.
        """
        if self.views > 1 or self.block % block_size:
            got = f"{block_size} with a {self.name} placement of {self.block} tokens"
            wanted = "a divisor of the placement's block, in token order"
            raise ShapeError("block_size", got, wanted, "Use placement='contiguous'.")
        return self.positions(rank)[::block_size] // block_size

    def _laid(self, positions: Int64) -> Int64:
        if self.views == 1:
            return positions
        return positions % self.views * self._view + positions // self.views

    def owners(self, positions: Int64) -> Int64:
        """Return the rank that holds each position."""
        return self.owner[self._laid(positions) // self.block].astype(np.int64)

    def slots(self, positions: Int64) -> Int64:
        """Return the place of each position in its rank's shard."""
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
        """Largest size of aligned token groups in the layout that are each on one rank; 0 if one rank has them all."""
        changes = np.flatnonzero(np.diff(self.owner)) + 1
        return int(np.gcd.reduce(changes)) * self.block

    def runs(self, rate: int) -> tuple[int, int]:
        """Return (together, stride) of a strided view: aligned groups of ``together`` neighbours are on one rank.

        ``stride`` is the distance of these neighbours in the shard. Aligned groups of any size that divides
        ``together`` are on one rank too. 0, which every size divides, means that the whole view is on one rank.
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
        """A 63-bit digest of the placement, which ranks compare."""
        text = f"{self.name}/{self.tokens}/{self.ranks}/{self.block}/{self.views}/{self.owner.tobytes().hex()}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def block_for(tokens: int, ranks: int, tile: int) -> int:
    """Return the size of a block: a tile's side, halved (but not below 16) until every rank gets two blocks or more."""
    block = tile
    while block % 32 == 0 and -(-tokens // block) < 2 * ranks:
        block //= 2
    return block


def blocks_for(tokens: int, ranks: int, block: int) -> int:
    """Return the number of blocks that covers a sequence, a multiple of ``ranks``; both numbers must be positive."""
    if tokens < 1 or ranks < 1:
        got = f"{tokens}, {ranks}"
        raise ShapeError("tokens, ranks", got, "at least 1 each", "Pass positive numbers.")
    return -(-tokens // (block * ranks)) * ranks


def contiguous(tokens: int, ranks: int, block: int) -> Placement:
    """Give each rank a contiguous part of the sequence."""
    count = blocks_for(tokens, ranks, block)
    owner = np.arange(count, dtype=np.int32) // (count // ranks)
    return Placement("contiguous", tokens, ranks, block, owner)


def zigzag(tokens: int, ranks: int, block: int) -> Placement:
    """Give each rank a part from the front and the mirrored part from the back, which balances causal work."""
    count = blocks_for(tokens, 2 * ranks, block)
    part = np.arange(count, dtype=np.int32) // (count // (2 * ranks))
    return Placement("zigzag", tokens, ranks, block, np.minimum(part, 2 * ranks - 1 - part).astype(np.int32))


def striped(tokens: int, ranks: int, block: int) -> Placement:
    """Deal blocks to the ranks in turn."""
    owner = np.arange(blocks_for(tokens, ranks, block), dtype=np.int32) % ranks
    return Placement("striped", tokens, ranks, block, owner)


def residues(tokens: int, ranks: int, block: int, views: int | None = None) -> Placement:
    """Deal tokens in turn to ``views`` groups of ranks, and give each rank a contiguous part of its group's view.

    By default there is one view per rank; a dilation with a rate that is a multiple of the number of ranks then needs
    no exchange. Raises ShapeError if ``views`` does not divide the number of ranks.
    """
    views = ranks if views is None else views
    if views < 1 or ranks % views:
        raise ShapeError("views", views, f"a divisor of {ranks} ranks", "Use gcd(rate, ranks).")
    return dataclasses.replace(contiguous(tokens, ranks, block), name="residue", views=views)


#: Placements by the names that ``ContextParallel`` accepts.
NAMED = {"contiguous": contiguous, "zigzag": zigzag, "striped": striped, "residue": residues}
