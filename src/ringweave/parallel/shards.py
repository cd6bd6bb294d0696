"""One rank's shards of tensors over a sequence."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..checks import whole
from ..errors import ShapeError
from .planning.placement import Placement


class Shards:
    """The shards of one rank under a placement; their tokens are in the order of ``positions``.

    Attributes:
        placement: The assignment of tokens to ranks.
        positions: (local,) int64, positions of the rank's tokens in the whole sequence, then of padding.
    """

    def __init__(self, placement: Placement, rank: int):
        self.placement = placement
        self.positions = torch.from_numpy(placement.positions(rank))
        self._tokens = placement.tokens_of(rank)

    def take(self, x: Tensor, dim: int) -> Tensor:
        """Return the shard of a whole tensor, differentiably; padding is zero."""
        dim, tokens = dimension(x, dim), self.placement.tokens
        if x.shape[dim] != tokens:
            raise ShapeError(f"x.shape[{dim}]", x.shape[dim], f"{tokens} tokens", "Pass the whole tensor, and its dim.")
        mine = x.index_select(dim, self.positions[: self._tokens].to(x.device))
        padding = self.placement.local - self._tokens
        if not padding:
            return mine
        shape = list(mine.shape)
        shape[dim] = padding
        return torch.cat([mine, mine.new_zeros(shape)], dim)

    def tokens_first(self, x: Tensor, dim: int) -> Tensor:
        """Return a shard, detached, with its token dimension first."""
        self.check("x", x, dim)
        return x.detach().movedim(dim, 0).contiguous()

    def join(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """Join the shards of all ranks, with tokens first, into the whole tensor with tokens in ``dim``."""
        first = parts[0]
        total = first.new_empty(self.placement.tokens, *first.shape[1:])
        for rank, part in enumerate(parts):
            count = self.placement.tokens_of(rank)
            total[torch.from_numpy(self.placement.positions(rank)[:count]).to(part.device)] = part[:count]
        return total.movedim(0, dim)

    def parts(self, x: Tensor, dim: int) -> list[Tensor]:
        """Cut a whole tensor into the tokens of each rank, without padding, with its token dimension first."""
        ranks = range(self.placement.ranks)
        places = [torch.from_numpy(self.placement.positions(r)[: self.placement.tokens_of(r)]) for r in ranks]
        return [x.movedim(dim, 0).index_select(0, place.to(x.device)) for place in places]

    def padded(self, part: Tensor, dim: int) -> Tensor:
        """Return a rank's tokens, with tokens first, as its shard with tokens in ``dim``; padding is zero."""
        shard = part.new_zeros(self.placement.local, *part.shape[1:])
        shard[: len(part)] = part
        return shard.movedim(0, dim)

    def check(self, name: str, x: Tensor, dim: int) -> None:
        """Raise ShapeError unless x has the tokens of a shard along ``dim``."""
        local = self.placement.local
        if x.shape[dim] != local:
            wanted = f"{local}, this rank's share of {self.placement.tokens}"
            raise ShapeError(f"{name}.shape[{dim}]", x.shape[dim], wanted, "Shard it: ctx.shard(x, dim).")


def dimension(x: Tensor, dim: int) -> int:
    """Return a dimension of a tensor as an index that is not negative."""
    if not isinstance(x, Tensor):
        raise ShapeError("x", type(x).__name__, "a tensor", "Pass a torch tensor.")
    dim = whole("dim", dim, -(2**31), error=ShapeError)
    if not -x.ndim <= dim < x.ndim:
        raise ShapeError("dim", dim, f"a dimension of x, which has {x.ndim}", "Pass the token dimension of x.")
    return dim % x.ndim
