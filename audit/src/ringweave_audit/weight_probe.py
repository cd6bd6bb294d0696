"""Find the pairs that an attention function attends, from its outputs instead of its source.

With q = 0 all scores are equal, and with unit vectors as values the output is the row of weights. A pair is attended if
its weight is not 0. A strong bias can also round a weight to 0. So the scores of all keys with weight 0 are raised by
thousands: this outweighs a bias, but not a mask. A function that sets masked scores to a finite value instead of adding
one is detected by lowering all other scores thousands below that value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ringweave.errors import ShapeError, shown

from .random_probe import RandomCall

#: An attention function: (q, k, v) to out, or to a tuple that begins with out.
Attention = Callable[[Tensor, Tensor, Tensor], Any]

# change of the scores at the default scale: larger than a bias, and far smaller than a mask
_LIFT = 2000.0


@dataclass(frozen=True, eq=False)
class Attended:
    """The pairs that a function attends, as dense tensors on the CPU; for the small sizes of an audit.

    Attributes:
        pairs: Attended pairs, (B, Hq, Nq, Nk) bool.
        weights: Weights for equal scores, (B, Hq, Nq, Nk) float64.
        random_call: A call on random inputs, with the fitted scale and precision.
        steady: Whether a second call gave the same output; False with dropout.
    """

    pairs: Tensor
    weights: Tensor
    random_call: RandomCall
    steady: bool

    @property
    def scale(self) -> float:
        """Factor of the scores that fits the random call; NaN if no row has two keys."""
        return self.random_call.scale

    @property
    def noise(self) -> float:
        """Largest difference between weights, relative to the largest of the row, that rounding explains."""
        return 8 * torch.finfo(self.random_call.precision).eps

    @property
    def sums(self) -> Tensor:
        """Sum of the weights of each row, (B, Hq, Nq) float64."""
        return self.weights.sum(-1)

    @property
    def sinks(self) -> Tensor | None:
        """Learned sink logits, (Hq,) float64, with -inf for heads without a sink; None if no sinks fit the weights.

        With a sink, a row of n equal weights w has w = 1 / (n + exp(sink)), for every n.
        """
        count = self.pairs.sum(-1).double()
        missing = torch.where(count > 0, count * (1 / self.sums.clamp(min=1e-30) - 1), torch.nan)
        found = missing.transpose(0, 1).flatten(1)
        middle = found.nanmedian(1).values.nan_to_num(0.0)
        most = count.amax() + middle.clamp(min=0)
        # allow for kernels that store and round the logarithm of the sum
        slack = (self.noise * most * (1 + most.log()))[:, None]
        if bool(((found - middle[:, None]).abs() > slack).any()) or bool((middle < -slack[:, 0]).any()):
            return None
        return torch.where(middle <= slack[:, 0], -torch.inf, middle.clamp(min=0).log())

    @property
    def counts(self) -> Tensor | None:
        """Multiplicity of each pair, (B, Hq, Nq, Nk) int64; None if repetition does not explain the weights."""
        least = torch.where(self.pairs, self.weights, torch.inf).amin(-1, keepdim=True)
        # beside a large sink, all weights of a row may underflow to 0
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
    """Find every pair that an attention function attends.

    Calls the function about 3 ceil(Nk / D) + 3 times, and up to Nk times more if a bias hides keys. Memory is
    B * Hq * Nq * Nk numbers, so use small sizes, up to a few hundred tokens.

    Args:
        fn: Attention function ``fn(q, k, v)`` with any mask; returns out (B, Hq, Nq, Dv), or a tuple that begins with
            out.
        q: Queries, (B, Hq, Nq, D); only shape, dtype and device are used.
        k: Keys, (B, Hkv, Nk, D); only shape, dtype and device are used.
        v: Values, (B, Hkv, Nk, Dv); only shape, dtype and device are used.
    Returns:
        An :class:`Attended`.
    Raises:
        ShapeError: The output has another shape.
    Example:
        >>> found = rw.audit.attended(lambda q, k, v: rw.attention(q, k, v, rw.Causal()), q, k, v)
        >>> bool((found.pairs == rw.Causal().to_dense(256)).all())
        True
    """
    probe = _Probe(fn, q, k, v)
    weights = probe.weights()
    lowered = probe.weights(_LIFT)
    none = (weights <= 1e-5 * weights.amax(-1, keepdim=True)) & (lowered <= 1e-5 * lowered.amax(-1, keepdim=True))
    random_call = RandomCall.of(probe.out, (probe.q, probe.k, probe.v), weights)
    steady = torch.equal(
        random_call.out, probe.out(*(x.to(q.device) for x in (random_call.q, random_call.k, random_call.v)))
    )
    return Attended(~none | probe.lifted(none), weights, random_call, steady)


class _Probe:
    """A function under audit, with calls on inputs that reveal its weights."""

    def __init__(self, fn: Attention, q: Tensor, k: Tensor, v: Tensor):
        self.fn, self.q, self.k, self.v = fn, q.detach(), k.detach(), v.detach()
        self.shape = (*q.shape[:3], v.shape[3])

    def out(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Call the function; NaN, which some functions return for rows without keys, becomes 0."""
        found = self.fn(q, k, v)
        found = found[0] if isinstance(found, tuple) else found
        if not isinstance(found, Tensor) or tuple(found.shape) != self.shape:
            raise ShapeError("fn", shown(found), f"out of {self.shape}", "Wrap it: fn(q, k, v) to (B, Hq, Nq, Dv).")
        return found.detach().cpu().double().nan_to_num(0.0, 0.0, 0.0)

    def weights(self, lowered: float = 0.0) -> Tensor:
        """Return the rows of weights, read with unit vectors as values; one call covers Dv keys.

        Args:
            lowered: Amount by which all scores are below 0.
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
        """Return the entry of q and k that gives a score at the default scale."""
        return float((score * self.q.shape[-1] ** 0.5) ** 0.5)

    def lifted(self, none: Tensor) -> Tensor:
        """Raise the scores of keys without a weight, and return the keys that then get one.

        Each row tests the largest sets (halves, quarters, ...) that consist of such keys only, and the single keys of
        a set that gets a weight. Each channel of q and k represents one set of keys, so that one call tests many sets.
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
    """Return the sets of all keys, halves, quarters, ..., single keys, (sets, Nk) bool, and the parent of each set."""
    places, side = torch.arange(nk, device="cpu"), 1 << (nk - 1).bit_length()
    rows: list[Tensor] = []
    parents = [0]
    while side:
        before = len(rows)
        rows += [places // side == n for n in range(-(-nk // side))]
        side //= 2
        parents += [before + n // 2 for n in range(-(-nk // side))] if side else []
    return torch.stack(rows), torch.tensor(parents, device="cpu")
