"""Which pairs an attention callable attends, by value and not by source.

With q = 0 all scores are equal, and with unit values the output is the row of weights: a pair is attended exactly where
its weight is not 0. A bias only scales weights; one so strong that a weight rounds to 0 is told from a mask by lifting
the key: a score that is raised by thousands comes back from under a bias, and stays at 0 under a mask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import ShapeError, message, shown

#: Attention as it is called: (q, k, v) to out, or to a tuple that begins with it.
Attention = Callable[[Tensor, Tensor, Tensor], Any]

# what a lifted key's score is raised by, at the default scale: more than a bias takes, far less than a mask
_LIFT = 2000.0


@dataclass(frozen=True, eq=False)
class Attended:
    """What a callable attends; N x N, made at the small sizes of an audit.

    Attributes:
        pairs: (B, Hq, Nq, Nk) bool: the weight is not 0.
        weights: (B, Hq, Nq, Nk) float64: the weights where all scores are equal.
        noise: Weights differ by so much, relative to their row's largest, where only rounding makes them differ.
        kv_head: (Hq,) int64: the key head that a query head reads; -1 where that is none, or several.
        element: (B,) int64: the batch element whose values an element reads; -1 where those are several.
        scale: Factor of the scores, found from small ones; NaN where no row tells.
        steady: Whether a second call gave the same; dropout does not.
    """

    pairs: Tensor
    weights: Tensor
    noise: float
    kv_head: Tensor
    element: Tensor
    scale: float
    steady: bool

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
        slack = self.noise * (count.amax() + middle.clamp(min=0))[:, None]
        if bool(((found - middle[:, None]).abs() > slack).any()) or bool((middle < -slack[:, 0]).any()):
            return None
        return torch.where(middle <= slack[:, 0], -torch.inf, middle.clamp(min=0).log())

    @property
    def counts(self) -> Tensor | None:
        """How often each pair counts, (B, Hq, Nq, Nk) int64; None where weights differ by more than repetition."""
        least = torch.where(self.pairs, self.weights, torch.inf).amin(-1, keepdim=True)
        ratio = torch.where(self.pairs, self.weights / least, 0.0)
        whole = ratio.round()
        if bool(((ratio - whole).abs() > 4 * self.noise * whole).any()) or bool((whole > 64).any()):
            return None
        return whole.long()


@torch.no_grad()
def attended(fn: Attention, q: Tensor, k: Tensor, v: Tensor) -> Attended:
    """Find every pair that an attention callable attends.

    Calls it ceil(Nk / Dv) times, and a few times more; once for each key whose weight leaves room for doubt. Memory is
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
    nothing, plain = torch.zeros_like(q), torch.zeros_like(k)
    weights = probe.weights(nothing, plain)
    steady = torch.equal(weights, probe.weights(nothing, plain))
    noise = 8 * torch.finfo(probe.dtype).eps
    pairs, doubt = weights > 0, probe.doubt(weights)
    if bool(doubt.any()):
        pairs = pairs & ~doubt | probe.lifted(doubt)
    kv_head, element = probe.sources()
    return Attended(pairs, weights, noise, kv_head, element, probe.scale(weights, pairs), steady)


class _Probe:
    """One callable, asked with values that tell."""

    def __init__(self, fn: Attention, q: Tensor, k: Tensor, v: Tensor):
        self.fn, self.q, self.k, self.v = fn, q.detach(), k.detach(), v.detach()
        self.shape = (*q.shape[:3], v.shape[3])
        self.dtype = q.dtype

    def out(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Call it; rows without keys that come back as NaN are rows of zeros."""
        found = self.fn(q, k, v)
        found = found[0] if isinstance(found, tuple) else found
        if not isinstance(found, Tensor) or tuple(found.shape) != self.shape:
            raise ShapeError(
                message("fn", shown(found), f"out of {self.shape}", "Wrap it: fn(q, k, v) to (B, Hq, Nq, Dv).")
            )
        self.dtype = found.dtype if found.dtype.is_floating_point else self.dtype
        return found.detach().double().nan_to_num(0.0, 0.0, 0.0)

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        """Read the rows of weights off unit values, as many keys at a time as a value has channels."""
        nk, width = self.v.shape[2:]
        parts = []
        for first in range(0, nk, width):
            last = min(first + width, nk)
            v = torch.zeros_like(self.v)
            v[:, :, first:last] = torch.eye(last - first, width, dtype=v.dtype, device=v.device)
            parts.append(self.out(q, k, v)[..., : last - first])
        return torch.cat(parts, -1)

    def doubt(self, weights: Tensor) -> Tensor:
        """Say where a weight may be a mask's or a bias's doing, (B, Hq, Nq, Nk).

        Where a row's weights are as good as equal, zeros are a mask's. Where they are not, a bias is at work, which
        may take a weight to 0, and what is left of one may be noise.
        """
        most = weights.amax(-1, keepdim=True)
        tiny = weights < 1e-5 * most
        biased = (tiny & (weights != 0)).any(-1, keepdim=True) | self._fading(weights, most)
        return tiny & (biased.any() & (most > 0))

    def _fading(self, weights: Tensor, most: Tensor) -> Tensor:
        least = torch.where(weights > 0, weights, torch.inf).amin(-1, keepdim=True)
        return (most > 0) & (least < 0.01 * most)

    def lifted(self, doubt: Tensor) -> Tensor:
        """Raise one key's score at a time, and see whether it then gets a weight."""
        dim = self.q.shape[-1]
        found = torch.zeros_like(doubt)
        side = (_LIFT * dim**-0.5) ** 0.5
        q = torch.full_like(self.q, side)
        ones = torch.ones_like(self.v)
        for key in doubt.flatten(0, 2).any(0).nonzero().flatten().tolist():
            k, v = torch.zeros_like(self.k), torch.zeros_like(self.v)
            k[:, :, key], v[:, :, key] = side, ones[:, :, key]
            found[..., key] = self.out(q, k, v)[..., 0] > 1e-3
        return found & doubt

    def sources(self) -> tuple[Tensor, Tensor]:
        """Find whose values are read: values that are the number of their key head, then of their batch element.

        A digit to the base 8 at a time: 16 bits hold no larger numbers well.
        """
        q, k = torch.zeros_like(self.q), torch.zeros_like(self.k)
        sums = self.out(q, k, torch.ones_like(self.v))[..., 0]
        batch, kv_heads = self.v.shape[:2]

        def numbers(count: int, shape: tuple[int, ...], dims: tuple[int, ...]) -> Tensor:
            found: Any = 0
            known: Any = True
            power = 1
            while power == 1 or power < count:
                values = (torch.arange(count, device=self.v.device) // power % 8).view(shape).to(self.v)
                out = self.out(q, k, values.expand_as(self.v).contiguous())[..., 0] / sums
                low, high = (torch.where(sums > 0, out, limit) for limit in (torch.inf, -torch.inf))
                low, high = low.amin(dims).cpu(), high.amax(dims).cpu()
                known = known & (high - low < 0.25) & ((low - low.round()).abs() < 0.25) & low.isfinite()
                found, power = found + power * low.nan_to_num(0.0, 0.0, 0.0).round().long(), 8 * power
            return torch.where(known, found.clamp(0, count - 1), -1)

        return numbers(kv_heads, (1, -1, 1, 1), (0, 2)), numbers(batch, (-1, 1, 1, 1), (1, 2))

    def scale(self, weights: Tensor, pairs: Tensor) -> float:
        """Find the factor of the scores: how the logarithms of weights follow small products."""
        generator = torch.Generator("cpu").manual_seed(0)
        dim = self.q.shape[-1]
        q = torch.randn(self.q.shape, generator=generator, device="cpu").to(self.q)
        k = (0.3 * torch.randn(self.k.shape, generator=generator, device="cpu")).to(self.k)
        product = q.double() @ k.double().repeat_interleave(q.shape[1] // k.shape[1], 1).mT / dim**0.5
        moved = self.weights(q, k)
        seen = pairs & (moved > 0) & (weights > 0) & (pairs.sum(-1, keepdim=True) > 1)
        count = seen.sum(-1, keepdim=True).clamp(min=1)
        change = torch.where(seen, moved.clamp(min=1e-300).log() - weights.clamp(min=1e-300).log(), 0.0)
        product = torch.where(seen, product, 0.0)
        # what a row has in common is its denominator's
        change = torch.where(seen, change - change.sum(-1, keepdim=True) / count, 0.0)
        product = torch.where(seen, product - product.sum(-1, keepdim=True) / count, 0.0)
        power = float((product**2).sum())
        return float((change * product).sum()) / power / dim**0.5 if power > 0 else float("nan")
