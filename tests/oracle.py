"""Compute attention by its definition, dense in float64, and the error of torch's own attention against it.

Written apart from the library's reference backend, so that the two can disagree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

NAMES = ("out", "lse", "dq", "dk", "dv")


@dataclass
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor

    @staticmethod
    def random(
        nq: int,
        nk: int | None = None,
        *,
        batch: int = 1,
        heads: int = 2,
        kv_heads: int | None = None,
        dim: int = 16,
        value_dim: int | None = None,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> Inputs:
        nk = nq if nk is None else nk
        kv_heads = heads if kv_heads is None else kv_heads
        value_dim = dim if value_dim is None else value_dim
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            # quantised first, so that the oracle and the backends get equal numbers
            return torch.randn(shape, generator=generator).to(dtype)

        return Inputs(
            draw(batch, heads, nq, dim),
            draw(batch, kv_heads, nk, dim),
            draw(batch, kv_heads, nk, value_dim),
            draw(batch, heads, nq, value_dim),
            torch.randn((batch, heads, nq), generator=generator),
        )

    def to(self, device: str) -> Inputs:
        """Return equal inputs on a device."""
        return Inputs(*(x.to(device) for x in (self.q, self.k, self.v, self.dout, self.dlse)))

    def leaves(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        return [x.detach().to(dtype or x.dtype).clone().requires_grad_() for x in (self.q, self.k, self.v)]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    counts: Tensor,
    scale: float | None = None,
    *,
    scored: Callable[[Tensor], Tensor] = lambda t: t,
    sinks: Tensor | None = None,
    weigh: Callable[[Tensor, Tensor], Tensor] = torch.div,
) -> tuple[Tensor, Tensor]:
    """(out, lse) where key j counts ``counts[i, j]`` times for query i; plain autograd, safe for empty rows.

    ``scored`` applies score terms, ``sinks`` holds a logit per head, and ``weigh`` makes weights from exponentials and
    their sums (..., 1). Exponentials are of 32 bits at least.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    ratio = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(ratio, 1), v.repeat_interleave(ratio, 1)
    scores = scored(q @ k.mT * scale)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    scores = torch.where(counts > 0, scores + counts.to(scores.dtype).clamp(min=1).log(), -torch.inf)
    rest = [] if sinks is None else [sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)]
    logits = torch.cat([scores, *rest], -1)
    top = logits.detach().amax(-1, keepdim=True)
    exponentials = torch.exp(logits - torch.where(torch.isneginf(top), 0.0, top))
    total = exponentials.sum(-1, keepdim=True)
    total = torch.where(torch.isneginf(top), 1.0, total)
    weights = weigh(exponentials[..., : k.shape[2]], total)
    return weights.to(v.dtype) @ v, (top + total.log())[..., 0]


def results(out: Tensor, lse: Tensor, x: Inputs, leaves: Sequence[Tensor], **learned: Tensor) -> dict[str, Tensor]:
    """Return out, lse and the gradients of <out, dout> + <lse, dlse>, empty rows left out of the second.

    ``leaves`` are q, k and v; gradients of further tensors keep their names.
    """
    alive = lse.masked_fill(torch.isneginf(lse), 0.0)
    loss = (out * x.dout.to(out.dtype)).sum() + (alive * x.dlse.to(lse.dtype)).sum()
    grads = torch.autograd.grad(loss, [*leaves, *learned.values()])
    return dict(zip([*NAMES, *learned], [out.detach(), lse.detach(), *grads], strict=True))


def exact(x: Inputs, counts: Tensor, scale: float | None = None) -> dict[str, Tensor]:
    """Return all five results in float64."""
    leaves = x.leaves(torch.float64)
    return results(*attention(*leaves, counts, scale), x, leaves)


def rounding(x: Inputs, counts: Tensor, want: dict[str, Tensor], scale: float | None = None) -> dict[str, float]:
    """Return the error that rounding alone may cause: a unit of the products that each result sums, relative to the result.

    Where terms cancel (one key: dP - delta leaves only dlse) the result is small beside them, and no order of
    float32 operations can do better.
    """
    arithmetic = torch.finfo(torch.float64 if x.q.dtype == torch.float64 else torch.float32).eps
    scale = x.q.shape[-1] ** -0.5 if scale is None else scale
    ratio = x.q.shape[1] // x.k.shape[1]
    q, k, v, dout = (t.double().abs() for t in (x.q, x.k, x.v, x.dout))
    k, v = k.repeat_interleave(ratio, 1), v.repeat_interleave(ratio, 1)
    alive = torch.where(torch.isneginf(want["lse"]), 0.0, want["lse"])[..., None]
    signed = x.q.double() @ x.k.double().repeat_interleave(ratio, 1).mT * scale
    # an error of one unit in an exponent causes as many units in its exponential as the exponent is large
    weights = torch.where(counts > 0, counts * torch.exp(signed - alive) * (1 + signed.abs() + alive.abs()), 0.0)
    out = weights @ v
    slopes = weights * (dout @ v.mT + (dout * out).sum(-1, keepdim=True) + x.dlse.double().abs()[..., None])
    per_kv = (len(x.q), x.k.shape[1], ratio)
    sizes = {
        "out": out,
        "lse": (q @ k.mT).amax(-1) * scale,
        "dq": scale * (slopes @ k),
        "dk": scale * (slopes.mT @ q).reshape(*per_kv, *x.k.shape[2:]).sum(2),
        "dv": (weights.mT @ dout).reshape(*per_kv, *x.v.shape[2:]).sum(2),
    }
    result = {}
    for name, expected in want.items():
        finite = torch.isfinite(expected)
        size = float(expected[finite].norm())
        stored = torch.float32 if name == "lse" and x.q.dtype != torch.float64 else x.q.dtype
        result[name] = torch.finfo(stored).eps + arithmetic * float(sizes[name].norm()) / (size or 1e-30)
    return result


def torch_errors(x: Inputs, counts: Tensor, want: dict[str, Tensor], scale: float | None = None) -> dict[str, float]:
    """Return the errors of torch's own attention for equal inputs, in their dtype, against float64."""
    leaves = x.leaves()
    mask = torch.where(counts > 0, counts.float().clamp(min=1).log(), -torch.inf).to(x.q.dtype)
    empty = (counts == 0).all(-1)
    mask = mask.masked_fill(empty[..., None], 0.0)
    grouped = x.q.shape[1] != x.k.shape[1]
    out = F.scaled_dot_product_attention(*leaves, attn_mask=mask, scale=scale, enable_gqa=grouped)
    out = out.masked_fill(empty[..., None], 0.0)
    k = leaves[1].repeat_interleave(x.q.shape[1] // x.k.shape[1], 1)
    scores = leaves[0] @ k.mT * (x.q.shape[-1] ** -0.5 if scale is None else scale) + mask
    lse = torch.logsumexp(scores.float() if x.q.dtype != torch.float64 else scores, -1)
    lse = lse.masked_fill(empty, -torch.inf)
    # a call without gradients has fewer results
    got = results(out, lse, x, leaves)
    return errors({name: got[name] for name in want}, want)


def errors(got: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, float]:
    """Relative error of each result in the Euclidean norm; NaN if elements are infinite or NaN that should not be."""
    found = {}
    for name in got:
        result, expected = got[name].detach().double(), want[name].detach().double()
        same = (result == expected) | (result.isnan() & expected.isnan())
        size = float(expected[expected.isfinite()].norm())
        off = float(torch.where(same, 0.0, result - expected).norm()) / (size or 1e-30)
        found[name] = off if math.isfinite(off) else math.nan
    return found


def check_errors(
    got: dict[str, Tensor], want: dict[str, Tensor], theirs: Iterable[dict[str, float]], floor: dict[str, float] | float
) -> None:
    """Check that each error is at most twice another computation's, or the floor, which is the error of rounding.

    ``theirs`` gives that computation's errors in several orders of its sums, since an error is partly chance: the
    largest counts, and no more orders are computed than are needed.
    """
    found = errors(got, want)
    allowed = floor if isinstance(floor, dict) else dict.fromkeys(found, floor)
    for each in theirs:
        allowed = {name: max(allowed[name], 2 * each[name]) for name in found}
        if all(error <= allowed[name] for name, error in found.items()):
            return
    far = [f"{name}: error {error:.2e}, allowed {allowed[name]:.2e}" for name, error in found.items()]
    raise AssertionError("; ".join(far))


class Expected(NamedTuple):
    """Results in float64, the errors of torch's own attention, and those of rounding."""

    results: dict[str, Tensor]
    theirs: dict[str, float]
    floor: dict[str, float]

    @staticmethod
    def of(x: Inputs, counts: Tensor, scale: float | None = None) -> Expected:
        want = exact(x, counts, scale)
        return Expected(want, torch_errors(x, counts, want, scale), rounding(x, counts, want, scale))

    def check(self, got: dict[str, Tensor]) -> None:
        """Check that errors are at most twice those of torch's own attention, or those of rounding."""
        check_errors(got, self.results, [self.theirs], self.floor)
