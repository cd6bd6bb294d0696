"""Which rank holds which tokens.

A placement cuts the sequence into blocks and gives each rank equally many; a rank keeps its blocks in ascending order.
Padding fills the last blocks: positions at and after the sequence's length, which nobody attends, and which so come
last on the ranks that hold them. The residue placement gives each rank the positions congruent to it instead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import ShapeError, message

Int64 = NDArray[np.int64]
Int32 = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Placement:
    """Tokens of one sequence on ranks.

    Attributes:
        name: What kind it is.
        tokens: Length of the sequence, without padding.
        ranks: How many ranks.
        block: Tokens that stay together, but for a residue placement.
        owner: (blocks,) the rank of each block; every rank has equally many.
        residue: Whether rank r holds the positions congruent to r modulo ``ranks``; ``owner`` then only counts.
    """

    name: str
    tokens: int
    ranks: int
    block: int
    owner: Int32
    residue: bool = False

    @property
    def local(self) -> int:
        """Tokens of each rank, padding included."""
        return len(self.owner) // self.ranks * self.block

    def positions(self, rank: int) -> Int64:
        """(local,) global positions of a rank's tokens, ascending; padding is at and after ``tokens``."""
        if self.residue:
            return np.arange(self.local, dtype=np.int64) * self.ranks + rank
        blocks = np.flatnonzero(self.owner == rank)
        return (blocks[:, None] * self.block + np.arange(self.block)).reshape(-1)

    def held(self, rank: int) -> int:
        """Tokens of a rank that are no padding: the first ones of its shard."""
        return int(np.searchsorted(self.positions(rank), self.tokens))

    def owners(self, positions: Int64) -> Int64:
        """The rank of each position."""
        if self.residue:
            return positions % self.ranks
        return self.owner[positions // self.block].astype(np.int64)

    def slots(self, positions: Int64) -> Int64:
        """Where each position lies in its rank's shard."""
        if self.residue:
            return positions // self.ranks
        return self._first_slot()[positions // self.block] + positions % self.block

    def _first_slot(self) -> Int64:
        order = np.argsort(self.owner, kind="stable")
        first = np.empty(len(self.owner), np.int64)
        first[order] = np.arange(len(order)) % (len(order) // self.ranks) * self.block
        return first

    def runs(self, rate: int) -> tuple[int, int]:
        """How many neighbours of a strided view stay together at least, aligned, and their distance in the shard."""
        if self.residue:
            return (2**30, rate // self.ranks) if rate % self.ranks == 0 else (1, 1)
        return (self.block // rate, rate) if self.block % rate == 0 else (1, 1)

    def digest_text(self) -> str:
        """What two ranks compare; see :meth:`ContextParallel.digest`."""
        return f"{self.name}/{self.tokens}/{self.ranks}/{self.block}/{self.residue}/{self.owner.tobytes().hex()}"


def block_for(tokens: int, ranks: int, tile: int) -> int:
    """Tokens in a block: a plan's tile where every rank gets two of them, else the next smaller power of two of 16 on.

    Args:
        tokens: Length of the sequence.
        ranks: Ranks.
        tile: Side of the plan's tiles.
    """
    block = tile
    while block % 32 == 0 and -(-tokens // block) < 2 * ranks:
        block //= 2
    return block


def _blocks(tokens: int, ranks: int, block: int) -> int:
    if tokens < 1 or ranks < 1:
        raise ShapeError(
            message("tokens, ranks", f"{tokens}, {ranks}", "at least 1 each", "Pass a sequence and ranks.")
        )
    return -(-tokens // (block * ranks)) * ranks


def contiguous(tokens: int, ranks: int, block: int) -> Placement:
    """Each rank a stretch of the sequence."""
    count = _blocks(tokens, ranks, block)
    owner = np.arange(count, dtype=np.int32) // (count // ranks)
    return Placement("contiguous", tokens, ranks, block, owner)


def zigzag(tokens: int, ranks: int, block: int) -> Placement:
    """Each rank a stretch from the front and its mirror from the back: causal work is equal."""
    count = _blocks(tokens, 2 * ranks, block)
    part = np.arange(count, dtype=np.int32) // (count // (2 * ranks))
    return Placement("zigzag", tokens, ranks, block, np.minimum(part, 2 * ranks - 1 - part).astype(np.int32))


def striped(tokens: int, ranks: int, block: int) -> Placement:
    """Blocks dealt in turn."""
    owner = np.arange(_blocks(tokens, ranks, block), dtype=np.int32) % ranks
    return Placement("striped", tokens, ranks, block, owner)


def residues(tokens: int, ranks: int, block: int) -> Placement:
    """Tokens dealt in turn: a dilation whose rate the ranks divide stays on its rank."""
    owner = np.arange(_blocks(tokens, ranks, block), dtype=np.int32) % ranks
    return Placement("residue", tokens, ranks, block, owner, residue=True)


def portfolio(tokens: int, ranks: int, block: int, rates: tuple[int, ...]) -> list[Placement]:
    """The placements that are always worth a look.

    Args:
        tokens: Length of the sequence.
        ranks: Ranks.
        block: Tokens in a block.
        rates: Dilation rates of the branches.
    """
    if ranks == 1:
        return [contiguous(tokens, 1, block)]
    found = [contiguous(tokens, ranks, block), zigzag(tokens, ranks, block), striped(tokens, ranks, block)]
    if any(rate > 1 and rate % ranks == 0 for rate in rates) or math.gcd(*rates) % ranks == 0:
        found.append(residues(tokens, ranks, block))
    return found
