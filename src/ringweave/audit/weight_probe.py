"""Which pairs an attention callable attends, by value and not by source.

With q = 0 all scores are equal, and with unit values the output is the row of weights: a pair is attended where its
weight is not 0. A weight may also be 0 because a bias or a finite mask took it there. So every key without a weight is
raised: its score grows by thousands, which brings it back from under a bias, and leaves it at 0 under a mask. A mask
that sets scores instead of adding to them is seen where all scores are thousands below it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import ShapeError, message, shown
from .drawn import Drawn

#: Attention as it is called: (q, k, v) to out, or to a tuple that begins with it.
Attention = Callable[[Tensor, Tensor, Tensor], Any]

# scores are raised or lowered by so much, at the default scale: more than a bias takes, far less than a mask
_LIFT = 2000.0


@dataclass(frozen=True, eq=False)
class Attended:
    """What a callable attends, on the CPU; N x N, made at the small sizes of an audit.

    Attributes:
        pairs: (B, Hq, Nq, Nk) bool: the pair can have a weight.
        weights: (B, Hq, Nq, Nk) float64: the weights where all scores are equal.
        drawn: A call on random numbers, with the scale and the precision that fit it.
        steady: Whether a second call gave the same; dropout does not.
    """

    pairs: Tensor
    weights: Tensor
    drawn: Drawn
    steady: bool

    @property
    def scale(self) -> float:
        """Factor of the scores that fits the random call; NaN where no row tells."""
        return self.drawn.scale

    @property
    def noise(self) -> float:
        """Weights differ by so much, relative to their row's largest, where only rounding makes them differ."""
        return 8 * torch.finfo(self.drawn.precision).eps

    @property
    def sums(self) -> Tensor:
        """Sums of the weights of each row, (B, Hq, Nq) float64."""
        return self.weights.sum(-1)

    @property
    def sinks(self) -> Tensor | None:
        """Learned logits that join the denominator, (Hq,) float64, -inf for none; None where nothing like that fits.

        A row of n equal weights w then has w = 1 / (n + exp(sink)), for every n.
        """
        count = self.pairs.sum(-1).double()
        missing = torch.where(count > 0, count * (1 / self.sums.clamp(min=1e-30) - 1), torch.nan)
        found = missing.transpose(0, 1).flatten(1)
        middle = found.nanmedian(1).values.nan_to_num(0.0)
        most = count.amax() + middle.clamp(min=0)
        # a kernel that holds the logarithm of a sum rounds that
        slack = (self.noise * most * (1 + most.log()))[:, None]
        if bool(((found - middle[:, None]).abs() > slack).any()) or bool((middle < -slack[:, 0]).any()):
            return None
        return torch.where(middle <= slack[:, 0], -torch.inf, middle.clamp(min=0).log())

    @property
    def counts(self) -> Tensor | None:
        """How often each pair counts, (B, Hq, Nq, Nk) int64; None where weights differ by more than repetition."""
        least = torch.where(self.pairs, self.weights, torch.inf).amin(-1, keepdim=True)
        # a large sink may leave a row no weight that its type can hold
        ratio = torch.where(self.pairs, torch.where(self.sums[..., None] > 0, self.weights / least, 1.0), 0.0)
        whole = ratio.round()
        if (
            bool(ratio.isinf().any())
            or bool(((ratio - whole).abs() > 4 * self.noise * whole).any())
            or bool((whole > 64).any())
        ):
            return None
        return whole.long()


@torch.no_grad()
def attended(fn: Attention, q: Tensor, k: Tensor, v: Tensor) -> Attended:
    """Find every pair that an attention callable attends.

    Calls it about 3 ceil(Nk / D) times and three times more; up to Nk times more where a bias hides keys. Memory is
    B * Hq * Nq * Nk numbers: take the sizes of an audit, some hundred tokens.

    Args:
        fn: ``fn(q, k, v)``, whatever mask it holds; gives out (B, Hq, Nq, Dv), or a tuple that begins with it.
        q: (B, Hq, Nq, D); only its shape, dtype and device count.
        k: (B, Hkv, Nk, D), as q.
        v: (B, Hkv, Nk, Dv), as q.
    Returns:
        An :class:`Attended`.
    Raises:
        ShapeError: What comes back has another shape.
    Example:
        >>> found = rw.audit.attended(lambda q, k, v: rw.attention(q, k, v, rw.Causal()), q, k, v)
        >>> bool((found.pairs == rw.Causal().to_dense(256)).all())
        True
    """
    probe = _Probe(fn, q, k, v)
    weights = probe.weights()
    lowered = probe.weights(_LIFT)
    none = (weights <= 1e-5 * weights.amax(-1, keepdim=True)) & (lowered <= 1e-5 * lowered.amax(-1, keepdim=True))
    drawn = Drawn.of(probe.out, (probe.q, probe.k, probe.v), weights)
    steady = torch.equal(drawn.out, probe.out(*(x.to(q.device) for x in (drawn.q, drawn.k, drawn.v))))
    return Attended(~none | probe.lifted(none), weights, drawn, steady)


class _Probe:
    """One callable, asked with values that tell."""

    def __init__(self, fn: Attention, q: Tensor, k: Tensor, v: Tensor):
        self.fn, self.q, self.k, self.v = fn, q.detach(), k.detach(), v.detach()
        self.shape = (*q.shape[:3], v.shape[3])

    def out(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Call it; rows without keys that come back as NaN are rows of zeros."""
        found = self.fn(q, k, v)
        found = found[0] if isinstance(found, tuple) else found
        if not isinstance(found, Tensor) or tuple(found.shape) != self.shape:
            raise ShapeError(
                message("fn", shown(found), f"out of {self.shape}", "Wrap it: fn(q, k, v) to (B, Hq, Nq, Dv).")
            )
        return found.detach().cpu().double().nan_to_num(0.0, 0.0, 0.0)

    def weights(self, lowered: float = 0.0) -> Tensor:
        """Read the rows of weights off unit values, as many keys at a time as a value has channels.

        Args:
            lowered: What scores are below 0, all by as much.
        """
        nk, width = self.v.shape[2:]
        q, k = torch.zeros_like(self.q), torch.zeros_like(self.k)
        q[..., 0], k[..., 0] = -self._side(lowered), self._side(lowered)
        parts = []
        for first in range(0, nk, width):
            last = min(first + width, nk)
            v = torch.zeros_like(self.v)
            v[:, :, first:last] = torch.eye(last - first, width, dtype=v.dtype, device=v.device)
            parts.append(self.out(q, k, v)[..., : last - first])
        return torch.cat(parts, -1)

    def _side(self, score: float) -> float:
        """The entry of q and of k that gives a score at the default scale."""
        return float((score * self.q.shape[-1] ** 0.5) ** 0.5)

    def lifted(self, none: Tensor) -> Tensor:
        """Raise the scores of keys without a weight, and find those that then get one.

        A row asks about the largest halves, quarters, ... of the keys that hold none but such keys, and about each key
        where a weight shows up. Each channel of q and k stands for one set of keys, so that a call asks about many.
        """
        nk, width = none.shape[-1], min(self.q.shape[-1], self.v.shape[-1])
        side = self._side(_LIFT)
        sets, parents = _halves(nk)
        size = sets.sum(1)
        whole = none.float() @ sets.float().mT == size
        todo = whole & ~whole[..., parents]
        todo[..., 0] = whole[..., 0]
        found = torch.zeros_like(none)
        while bool(todo.any()):
            some = todo.flatten(0, 2).sum(0).topk(min(width, len(sets))).indices
            asked = todo[..., some]
            asked = asked & (asked.cumsum(-1) == 1)
            q, k, v = (torch.zeros_like(x) for x in (self.q, self.k, self.v))
            q[..., : len(some)] = side * asked.to(q)
            k[..., : len(some)] = side * sets[some].mT.to(k)
            v[..., : len(some)] = sets[some].mT.to(v)
            hit = asked & (self.out(q, k, v)[..., : len(some)] > 1e-3)
            todo[..., some] &= ~asked
            one = hit & (size[some] == 1)
            found |= one.float() @ sets[some].float() > 0
            todo[..., -nk:] |= (hit & ~one).float() @ sets[some].float() > 0
        return found


def _halves(nk: int) -> tuple[Tensor, Tensor]:
    """All keys, halves, quarters, ... and at last single keys, (sets, Nk) bool; and the set that holds each."""
    places, side = torch.arange(nk, device="cpu"), 1 << (nk - 1).bit_length()
    rows: list[Tensor] = []
    parents = [0]
    while side:
        before = len(rows)
        rows += [places // side == n for n in range(-(-nk // side))]
        side //= 2
        parents += [before + n // 2 for n in range(-(-nk // side))] if side else []
    return torch.stack(rows), torch.tensor(parents, device="cpu")
