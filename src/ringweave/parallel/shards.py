"""One rank's shards of tensors over a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..checks import whole
from ..errors import ShapeError
from .planning.placement import Placement


class Rows:
    """Rows of a tensor that are split over ranks, each rank with the same number of them and its padding last.

    Attributes:
        places: Indices of each rank's rows in the whole tensor, without padding.
        total: Number of rows of the whole tensor.
        local: Number of rows of a rank, with padding.
    """

    def __init__(self, places: Sequence[Tensor], total: int, local: int | None = None):
        self.places, self.total = places, total
        self.local = max(map(len, places)) if local is None else local

    def join(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """Join the rows of all ranks, which come first in each part, into the whole tensor with its rows in ``dim``."""
        first = parts[0]
        total = first.new_empty(self.total, *first.shape[1:])
        for places, part in zip(self.places, parts, strict=True):
            total[places.to(part.device)] = part[: len(places)]
        return total.movedim(0, dim)

    def parts(self, x: Tensor, dim: int) -> list[Tensor]:
        """Cut a whole tensor into the rows of each rank, without padding; rows come first."""
        return [x.movedim(dim, 0).index_select(0, places.to(x.device)) for places in self.places]

    def padded(self, x: Tensor, dim: int) -> Tensor:
        """Return a rank's rows with padding of zeros, differentiably."""
        padding = self.local - x.shape[dim]
        if not padding:
            return x
        return torch.cat([x, x.new_zeros(*x.shape[:dim], padding, *x.shape[dim + 1 :])], dim)


class Shards(Rows):
    """The shards of one rank under a placement; their tokens are in the order of ``positions``.

    Attributes:
        placement: The assignment of tokens to ranks.
        positions: (local,) int64, positions of the rank's tokens in the whole sequence, then of padding.
    """

    def __init__(self, placement: Placement, rank: int):
        ranks = range(placement.ranks)
        places = [torch.from_numpy(placement.positions(r)[: placement.tokens_of(r)]) for r in ranks]
        super().__init__(places, placement.tokens, placement.local)
        self.placement, self.rank = placement, rank
        self._blocks: dict[tuple[int, int], Blocks] = {}
        self.positions = torch.from_numpy(placement.positions(rank))

    def take(self, x: Tensor, dim: int) -> Tensor:
        """Return the shard of a whole tensor, differentiably; padding is zero."""
        dim = dimension(x, dim)
        if x.shape[dim] != self.total:
            raise ShapeError(
                f"x.shape[{dim}]", x.shape[dim], f"{self.total} tokens", "Pass the whole tensor, and its dim."
            )
        return self.padded(x.index_select(dim, self.places[self.rank].to(x.device)), dim)

    def check(self, name: str, x: Tensor, dim: int) -> None:
        """Raise ShapeError unless x has the tokens of a shard along ``dim``."""
        if x.shape[dim] != self.local:
            wanted = f"{self.local}, this rank's share of {self.total}"
            raise ShapeError(f"{name}.shape[{dim}]", x.shape[dim], wanted, "Shard it: ctx.shard(x, dim).")

    def blocks(self, size: int, stride: int) -> Blocks:
        """Split the blocks of the whole sequence into those that lie on one rank and those that do not.

        Args:
            size: Tokens of a block.
            stride: Tokens from the beginning of a block to that of the next, at most ``size``.
        """
        if (size, stride) not in self._blocks:
            self._blocks[size, stride] = self._split(size, stride)
        return self._blocks[size, stride]

    def _split(self, size: int, stride: int) -> Blocks:
        owner = torch.empty(self.total, dtype=torch.int64, device="cpu")
        for rank, places in enumerate(self.places):
            owner[places] = rank
        begin = torch.arange(0, self.total - size + 1, stride, device="cpu")
        changes = pad((owner[1:] != owner[:-1]).cumsum(0), (1, 0))
        inside = changes[begin] == changes[begin + size - 1]
        rank_of = torch.where(inside, owner[begin], -1)
        inner = Rows([torch.nonzero(rank_of == rank)[:, 0] for rank in range(len(self.places))], len(begin))
        crossing = torch.nonzero(~inside)[:, 0]
        needed = torch.zeros(self.total, dtype=torch.bool, device="cpu")
        for first, last in _runs(crossing):
            needed[first * stride : last * stride + size] = True
        number, mine = needed.cumsum(0) - 1, self.places[self.rank]
        tokens = Rows([number[places[needed[places]]] for places in self.places], int(needed.sum()))
        return Blocks(
            inner,
            _tokens(inner.places[self.rank], torch.searchsorted(mine, begin), size, stride),
            crossing,
            tokens,
            torch.nonzero(needed[mine])[:, 0],
            _tokens(crossing, number[begin], size, stride),
        )


class Blocks(NamedTuple):
    """The blocks of a sequence that is split over ranks, for one rank.

    Attributes:
        inner: Each rank's blocks of which it has all tokens, of all blocks.
        inner_tokens: Bounds of the tokens, in this rank's shard, of each run of its inner blocks.
        crossing: Indices of the other blocks.
        tokens: Each rank's tokens in crossing blocks, of all such tokens.
        shared: Places of this rank's among them in its shard.
        crossing_tokens: Bounds of the tokens, of all in crossing blocks, of each run of these blocks.
    """

    inner: Rows
    inner_tokens: list[tuple[int, int]]
    crossing: Tensor
    tokens: Rows
    shared: Tensor
    crossing_tokens: list[tuple[int, int]]


def _runs(index: Tensor) -> list[tuple[int, int]]:
    """Return the first and last of each run of consecutive numbers."""
    if not len(index):
        return []
    cuts = torch.nonzero(index.diff() != 1)[:, 0]
    first, last = pad(cuts + 1, (1, 0)), pad(cuts, (0, 1), value=len(index) - 1)
    return list(zip(index[first].tolist(), index[last].tolist(), strict=True))


def _tokens(blocks: Tensor, place: Tensor, size: int, stride: int) -> list[tuple[int, int]]:
    """Return the bounds of the tokens of each run of blocks; ``place`` is that of the first token of every block."""
    return [(int(place[a]), int(place[a]) + (b - a) * stride + size) for a, b in _runs(blocks)]


def dimension(x: Tensor, dim: int) -> int:
    """Return a dimension of a tensor as an index that is not negative."""
    if not isinstance(x, Tensor):
        raise ShapeError("x", type(x).__name__, "a tensor", "Pass a torch tensor.")
    dim = whole("dim", dim, -(2**31), error=ShapeError)
    if not -x.ndim <= dim < x.ndim:
        raise ShapeError("dim", dim, f"a dimension of x, which has {x.ndim}", "Pass the token dimension of x.")
    return dim % x.ndim
