"""The definition's results for a call's tensors, in float64 and by hand, and how exact a kernel can be."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..oracle import NAMES, Inputs, torch_errors
from .calls import Call


@dataclass
class Truth:
    """The definition's results for a call's tensors."""

    call: Call
    x: Inputs
    counts: Tensor  # (branches, B, Hq, nq, nk)

    @cached_property
    def scale(self) -> float:
        return self.call.dim**-0.5 if self.call.scale is None else self.call.scale

    @cached_property
    def wide(self) -> list[Tensor]:
        """q, k, v and dout in float64, each query head with keys of its own."""
        ratio = self.call.sizes.heads // self.call.kv_heads
        k, v = (t.double().repeat_interleave(ratio, 1) for t in (self.x.k, self.x.v))
        return [self.x.q.double(), k, v, self.x.dout.double()]

    @cached_property
    def scores(self) -> Tensor:
        q, k, _, _ = self.wide
        return q @ k.mT * self.scale

    @cached_property
    def size(self) -> float:
        """The largest sum of absolute products that is a score."""
        q, k, _, _ = self.wide
        return float((q.abs() @ k.abs().mT).max()) * abs(self.scale)

    @cached_property
    def unit(self) -> float:
        """Of rounding, in the sums of this call's type."""
        return float(torch.finfo(torch.float32 if self.call.dtype == "float32" else self.x.q.dtype).eps)

    @cached_property
    def exponent_unit(self) -> float:
        """Of rounding, in scores: no kernel has them in 16 bits."""
        return min(self.unit, float(torch.finfo(torch.float32).eps))

    @cached_property
    def alive(self) -> Tensor:
        """lse, 0 where a row attends nothing."""
        lse = self.results["lse"]
        return torch.where(lse.isinf(), 0.0, lse)

    @cached_property
    def weights(self) -> Tensor:
        """Of all branches together."""
        counts = self.counts.sum(0)
        scores = torch.where(counts > 0, self.scores - self.alive[..., None], -torch.inf)
        return counts * torch.exp(scores)

    @cached_property
    def slope_size(self) -> float:
        """As large may the parts of a gradient be that cancel."""
        q, k, v, dout = (float(t.abs().max()) for t in self.wide)
        terms = self.counts[0, 0, 0].numel() * self.counts.shape[2] * self.call.value_dim
        return terms * (dout * v + float(self.x.dlse.abs().max())) * (1 + abs(self.scale) * (q + k))

    @cached_property
    def results(self) -> dict[str, Tensor]:
        q, k, v, dout = self.wide
        branches = [self._softmax(counts) for counts in self.counts]
        total = torch.stack([lse for _, lse in branches]).logsumexp(0)
        lse = torch.where(self.counts.sum((0, -1)) > 0, total, -torch.inf)
        shares = [torch.exp(part - torch.where(lse.isinf(), 0.0, lse)) for _, part in branches]
        out = sum(share[..., None] * (p @ v) for share, (p, _) in zip(shares, branches, strict=True))
        if not self.call.grads:
            return {"out": out, "lse": lse}
        dq, dk, dv = (torch.zeros_like(t) for t in (q, k, v))
        for share, (p, _) in zip(shares, branches, strict=True):
            of = p @ v if self.call.detach_weights else out
            slope = self.x.dlse.double() - (dout * of).sum(-1)
            if self.call.detach_weights:
                slope = -(dout * of).sum(-1)
            weights = p * share[..., None]
            ds = weights * (dout @ v.mT + slope[..., None]) * self.scale
            dq += ds @ k
            dk += ds.mT @ q
            dv += weights.mT @ dout
        groups = (len(dq), self.call.kv_heads, -1)
        dk, dv = (t.view(*groups, *t.shape[2:]).sum(2) for t in (dk, dv))
        return dict(zip(NAMES, (out, lse, dq, dk, dv), strict=True))

    def _softmax(self, counts: Tensor) -> tuple[Tensor, Tensor]:
        allowed = counts > 0
        scores = torch.where(allowed, self.scores, -torch.inf)
        top = scores.amax(-1, keepdim=True)
        top = torch.where(top.isinf(), 0.0, top)
        weights = torch.where(allowed, torch.exp(scores - top), 0.0)
        total = weights.sum(-1, keepdim=True)
        lse = torch.where(total > 0, top + total.log(), -torch.inf)[..., 0]
        return weights / torch.where(total > 0, total, 1.0), lse


def rounding(truth: Truth) -> dict[str, float]:
    """What rounding alone may cost each result, relative to its size: a unit of every product that is summed.

    As the tests' oracle has it, but for sums that cancel: an exponent is off by units of all its products, lse by
    units of 1, the logarithm of a rounded sum; and kernels of a 16-bit type round weights and their slopes to it.
    """
    call, want = truth.call, truth.results
    unit = truth.unit
    q, k, v, dout = (t.abs() for t in truth.wide)
    scale = abs(truth.scale)
    # channels that are all alike are rounded alike, one after the other
    products, long = q @ k.mT * (scale * (1 + call.dim / 16)), 1 + call.value_dim / 16
    exponents = 1 + (products + truth.alive.abs()[..., None]) * (truth.exponent_unit / unit)
    weights = truth.weights * exponents
    out = weights @ v
    sizes = {"out": out, "lse": exponents.amax(-1)[want["lse"].isfinite()]}
    # tokens that are all alike are rounded alike too
    keys = 1 + (_alike(k) or _alike(v)) * k.shape[2] / 16
    for name in ("out", "lse"):
        sizes[name] *= keys
    if call.grads:
        share = (dout @ v.mT + (dout * (truth.weights @ v)).sum(-1, keepdim=True)) * long
        share += truth.x.dlse.double().abs()[..., None]
        slopes = weights * share
        groups = (len(q), call.kv_heads, -1)
        sizes["dq"] = scale * (slopes @ k)
        sizes["dk"] = scale * (slopes.mT @ q)
        sizes["dv"] = weights.mT @ dout
        for name in ("dk", "dv"):
            sizes[name] = sizes[name].view(*groups, *sizes[name].shape[2:]).sum(2)
            sizes[name] *= 1 + (_alike(q) or _alike(dout)) * q.shape[2] / 16
        sizes["dq"] *= keys
    return {name: unit * float(x.norm()) for name, x in sizes.items()}


def _alike(x: Tensor) -> bool:
    return bool((x == x[:, :, :1]).all())


def torch_own(truth: Truth) -> dict[str, float]:
    if truth.call.detach_weights:
        return dict.fromkeys(NAMES, 0.0)
    try:
        return torch_errors(truth.x, truth.counts.sum(0), truth.results, truth.scale)
    except AssertionError:
        # torch itself gives NaN or other empty rows
        return dict.fromkeys(NAMES, 0.0)
