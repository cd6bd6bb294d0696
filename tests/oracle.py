"""Compute attention by its definition, dense in float64, and the error of torch's own attention against it.

Written apart from the library's reference backend, so that the two can disagree.
"""

from __future__ import annotations

from dataclasses import dataclass

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


def attention(q: Tensor, k: Tensor, v: Tensor, counts: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """(out, lse) where key j counts ``counts[i, j]`` times for query i; plain autograd, safe for empty rows."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    ratio = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(ratio, 1), v.repeat_interleave(ratio, 1)
    allowed = counts > 0
    empty = ~allowed.any(-1, keepdim=True)
    scores = torch.where(allowed, q @ k.mT * scale + counts.to(q.dtype).clamp(min=1).log(), -torch.inf)
    lse = torch.logsumexp(torch.where(empty, 0.0, scores), -1)
    weights = torch.where(allowed, torch.exp(scores - lse[..., None]), 0.0)
    return weights @ v, torch.where(empty[..., 0], -torch.inf, lse)


def gradients(out: Tensor, lse: Tensor, leaves: list[Tensor], x: Inputs) -> list[Tensor]:
    """Gradients of <out, dout> + <lse, dlse>, empty rows left out of the second."""
    alive = torch.where(torch.isneginf(lse), 0.0, lse)
    loss = (out * x.dout.to(out.dtype)).sum() + (alive * x.dlse.to(lse.dtype)).sum()
    return list(torch.autograd.grad(loss, leaves))


def exact(x: Inputs, counts: Tensor, scale: float | None = None) -> dict[str, Tensor]:
    """Return all five results in float64."""
    leaves = x.leaves(torch.float64)
    out, lse = attention(*leaves, counts, scale)
    return dict(zip(NAMES, [out.detach(), lse.detach(), *gradients(out, lse, leaves, x)], strict=True))


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
        result[name] = torch.finfo(stored).eps + arithmetic * float(sizes[name].norm()) / (size or 1.0)
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
    got = [out.detach(), lse.detach(), *gradients(out, lse, leaves, x)]
    return errors(dict(zip(NAMES, got, strict=True)), want)


def errors(got: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, float]:
    """Relative error of each result in the Euclidean norm; infinite rows must agree exactly."""
    result = {}
    for name, expected in want.items():
        finite = torch.isfinite(expected)
        assert torch.equal(torch.isneginf(got[name]), torch.isneginf(expected)), f"{name}: empty rows differ"
        found = got[name].double()[finite]
        assert not found.isnan().any(), f"{name}: NaN"
        size = float(expected[finite].norm())
        result[name] = float((found - expected[finite]).norm()) / size if size else float(found.norm())
    return result
