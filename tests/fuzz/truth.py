"""Compute a call's results by the definition in float64, and how exact a kernel can be."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..dropped import kept
from ..oracle import NAMES, Inputs, torch_errors
from .calls import Call
from .score_terms import STEPS, Term


@dataclass
class Truth:
    """The definition's results for a call; its tensors of terms and sinks by name, and the seed of dropout."""

    call: Call
    x: Inputs
    counts: Tensor  # (branches, B, Hq, nq, nk)
    tensors: dict[str, Tensor]
    seed: int

    @cached_property
    def leaves(self) -> dict[str, Tensor]:
        """Return all tensors that gradients may be requested for."""
        return {"q": self.x.q, "k": self.x.k, "v": self.x.v, **self.tensors}

    @cached_property
    def scale(self) -> float:
        return self.call.dim**-0.5 if self.call.scale is None else self.call.scale

    @cached_property
    def wide(self) -> list[Tensor]:
        """Return q, k, v and dout in float64, with a key head for each query head."""
        ratio = self.call.sizes.heads // self.call.kv_heads
        k, v = (t.double().repeat_interleave(ratio, 1) for t in (self.x.k, self.x.v))
        return [self.x.q.double(), k, v, self.x.dout.double()]

    @cached_property
    def positions(self) -> tuple[Tensor, Tensor]:
        """Return the positions of queries and keys, (B, nq) and (B, nk)."""
        s, first = self.call.sizes, self.call.first
        first_q, first_k = ([s.q_offset] * s.batch, [0] * s.batch) if first is None else (first.q, first.k)
        q, k = (torch.tensor(side)[:, None] for side in (first_q, first_k))
        return q + torch.arange(s.nq), k + torch.arange(self.call.nk)

    def after(self, t: Tensor, tensors: dict[str, Tensor]) -> list[Tensor]:
        """Return the scores after none, one, ... all of the terms."""
        states = [t]
        for i, term in enumerate(self.call.score_terms.terms):
            states.append(term.formula(states[-1], tensors.get(f"table{i}", t), *self.positions))
        return states

    @cached_property
    def states(self) -> list[Tensor]:
        q, k, _, _ = self.wide
        return self.after(q @ k.mT * self.scale, {name: x.double() for name, x in self.tensors.items()})

    @property
    def scores(self) -> Tensor:
        return self.states[-1]

    @cached_property
    def sinks(self) -> Tensor:
        """Return the sink logit of each row, (Hq, 1), or -inf without sinks."""
        heads = self.call.sizes.heads
        return self.tensors.get("sinks", torch.full((heads,), -torch.inf)).double()[:, None]

    @cached_property
    def kept(self) -> Tensor:
        """Return dropout's factors of weights, (B, Hq, nq, nk)."""
        s, dropped = self.call.sizes, self.call.score_terms.dropped
        if not dropped:
            return torch.ones(())
        rows = zip(*(side.tolist() for side in self.positions), strict=True)
        return torch.cat([kept(self.seed, dropped / STEPS, 1, s.heads, q, k, b) for b, (q, k) in enumerate(rows)])

    @cached_property
    def products(self) -> Tensor:
        """Return, for every score, the sum of the absolute products in it."""
        q, k, _, _ = self.wide
        return q.abs() @ k.abs().mT * abs(self.scale)

    def units(self, most: float = 1.0) -> list[Tensor]:
        """Return the possible error of each score in units, after none, one, ... all terms: of the summands and of the sum."""
        found = [self.products * most]
        pairs = zip(self.call.score_terms.terms, self.states, self.states[1:], strict=False)
        for term, before, after in pairs:
            off = found[-1]
            size = after.abs().masked_fill(after.isinf(), 0.0)
            if term.alone:
                # the steepest slope within the error
                off = off * term.slopes(*_around(before, 2 * off * self.exponent_unit))[1]
            else:
                off = off + (after - before).nan_to_num(0.0, 0.0, 0.0).abs()
            found.append(off + size)
        return found

    @cached_property
    def size(self) -> float:
        """Return the most units by which a score may be off."""
        return float(self.units()[-1].max())

    @cached_property
    def unit(self) -> float:
        """Return the unit of rounding in this call's sums."""
        return float(torch.finfo(torch.float32 if self.call.dtype == "float32" else self.x.q.dtype).eps)

    @cached_property
    def exponent_unit(self) -> float:
        """Return the unit of rounding in scores, which no kernel keeps in 16 bits."""
        return min(self.unit, float(torch.finfo(torch.float32).eps))

    @cached_property
    def alive(self) -> Tensor:
        """Return lse, with 0 for empty rows."""
        lse = self.results["lse"]
        return torch.where(lse.isinf(), 0.0, lse)

    @cached_property
    def weights(self) -> Tensor:
        """Return the weights over all branches together."""
        counts = self.counts.sum(0)
        scores = torch.where(counts > 0, self.scores - self.alive[..., None], -torch.inf)
        return counts * torch.exp(scores)

    @cached_property
    def slope_size(self) -> float:
        """Return the largest possible size of parts of a gradient that cancel."""
        q, k, v, dout = (float(t.abs().max()) for t in self.wide)
        terms = self.counts[0, 0, 0].numel() * self.counts.shape[2] * self.call.value_dim
        largest = terms * (dout * v + float(self.x.dlse.abs().max())) * (1 + abs(self.scale) * (q + k))
        return largest * float(self.kept.max())

    @cached_property
    def results(self) -> dict[str, Tensor]:
        q, k, v, dout = self.wide
        branches = [self._softmax(counts) for counts in self.counts]
        parts = [lse for _, lse in branches]
        lse = torch.stack([*parts, self.sinks.expand_as(parts[0])]).logsumexp(0)
        alive = torch.where(lse.isinf(), 0.0, lse)
        shares = [torch.exp(part - alive) for part in parts]
        out = sum(share[..., None] * ((p * self.kept) @ v) for share, (p, _) in zip(shares, branches, strict=True))
        if not self.call.grads:
            return {"out": out, "lse": lse}
        ds, dv = torch.zeros_like(self.scores), torch.zeros_like(v)
        for share, (p, _) in zip(shares, branches, strict=True):
            of = p @ v if self.call.detach_weights else out
            slope = self.x.dlse.double() - (dout * of).sum(-1)
            if self.call.detach_weights:
                slope = -(dout * of).sum(-1)
            weights = p * share[..., None]
            ds += weights * (dout @ v.mT * self.kept + slope[..., None])
            dv += (weights * self.kept).mT @ dout
        ds, tables = self.chained(ds)
        ds = ds * self.scale
        groups = (len(q), self.call.kv_heads, -1)
        dk, dv = (t.view(*groups, *t.shape[2:]).sum(2) for t in (ds.mT @ q, dv))
        if "sinks" in self.tensors:
            slope = self.x.dlse.double() - (dout * out).sum(-1)
            tables["dsinks"] = (torch.exp(self.sinks - alive) * slope).sum((0, 2))
        return {**dict(zip(NAMES, (out, lse, ds @ k, dk, dv), strict=True)), **tables}

    def chained(self, ds: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the gradient of the scaled scores from that of the last scores, and those of tables by name."""
        tables = {}
        for i, term in reversed(list(enumerate(self.call.score_terms.terms))):
            if f"table{i}" in self.tensors:
                tables[f"dtable{i}"] = self.of_table(i, term, ds)
            if term.alone:
                ds = ds * term.slopes(self.states[i], self.states[i])[0]
        return ds, tables

    def of_table(self, i: int, term: Term, ds: Tensor) -> Tensor:
        """Sum the gradients of pairs into the entries of a table."""
        table = self.tensors[f"table{i}"].double().requires_grad_()
        after = term.formula(torch.zeros_like(ds), table, *self.positions)
        return torch.autograd.grad(after, table, ds)[0]

    def _softmax(self, counts: Tensor) -> tuple[Tensor, Tensor]:
        allowed = counts > 0
        scores = torch.where(allowed, self.scores, -torch.inf)
        top = scores.amax(-1, keepdim=True)
        top = torch.where(top.isinf(), 0.0, top)
        weights = torch.where(allowed, torch.exp(scores - top), 0.0)
        total = weights.sum(-1, keepdim=True)
        lse = torch.where(total > 0, top + total.log(), -torch.inf)[..., 0]
        return weights / torch.where(total > 0, total, 1.0), lse


def _around(t: Tensor, off: Tensor) -> tuple[Tensor, Tensor]:
    off = off.masked_fill(t.isinf(), 0.0)
    return t - off, t + off


def rounding(truth: Truth) -> dict[str, float]:
    """Return the error that rounding alone may cause in each result, relative to its size: a unit of every summed product.

    As the tests' oracle has it, but for sums that cancel: an exponent is off by units of all its products, lse by
    units of 1, the logarithm of a rounded sum; and kernels of a 16-bit type round weights and their slopes to it.
    """
    call, want = truth.call, truth.results
    unit = truth.unit
    q, k, v, dout = (t.abs() for t in truth.wide)
    scale, finer = abs(truth.scale), truth.exponent_unit / unit
    # equal channels are rounded in the same direction one after the other, so errors add up
    units, long = truth.units(1 + call.dim / 16), 1 + call.value_dim / 16
    logits = truth.sinks.abs().masked_fill(truth.sinks.isinf(), 0.0)
    exponents = 1 + (units[-1] + truth.alive.abs()[..., None] + logits[..., None]) * finer
    weights = truth.weights * exponents
    out = (weights * truth.kept) @ v
    sizes = {"out": out, "lse": exponents.amax(-1)[want["lse"].isfinite()]}
    # so are equal tokens
    keys = 1 + (_alike(k) or _alike(v)) * k.shape[2] / 16
    for name in ("out", "lse"):
        sizes[name] *= keys
    if call.grads:
        row = (dout * ((truth.weights * truth.kept) @ v)).sum(-1, keepdim=True)
        share = (dout @ v.mT * truth.kept + row) * long
        share += truth.x.dlse.double().abs()[..., None]
        slopes = weights * share
        groups = (len(q), call.kv_heads, -1)
        for i, term in reversed(list(enumerate(call.score_terms.terms))):
            if f"table{i}" in truth.tensors:
                sizes[f"dtable{i}"] = truth.of_table(i, term, slopes)
            if term.alone:
                before = truth.states[i]
                slope, _ = term.slopes(before, before)
                least, steepest = term.slopes(*_around(before, units[i] * truth.exponent_unit))
                # a slope's error: units of 1, units of the number subtracted from 1, and the error of the score
                off = (2 + 2 * (1 - slope)) * finer + torch.maximum(steepest - slope, slope - least) / unit
                slopes = slopes * slope + truth.weights * share * off
        sizes["dq"] = scale * (slopes @ k)
        sizes["dk"] = scale * (slopes.mT @ q)
        sizes["dv"] = (weights * truth.kept).mT @ dout
        for name in ("dk", "dv"):
            sizes[name] = sizes[name].view(*groups, *sizes[name].shape[2:]).sum(2)
            sizes[name] *= 1 + (_alike(q) or _alike(dout)) * q.shape[2] / 16
        sizes["dq"] *= keys
        if "sinks" in truth.tensors:
            shares = torch.exp(truth.sinks - truth.alive) * exponents.amax(-1)
            sizes["dsinks"] = (shares * (row[..., 0] * long + truth.x.dlse.double().abs())).sum((0, 2))
    found = {name: unit * float(x.norm()) for name, x in sizes.items()}
    for name, x in truth.tensors.items():
        if f"d{name}" in found:
            # each tensor is rounded to its dtype, and each part of a merge is rounded separately
            parts = sizes[f"d{name}"] if call.how == "merge" else want[f"d{name}"]
            found[f"d{name}"] += float(torch.finfo(x.dtype).eps * parts.norm())
    return found


def _alike(x: Tensor) -> bool:
    return bool((x == x[:, :, :1]).all())


def torch_own(truth: Truth) -> dict[str, float]:
    if truth.call.detach_weights:
        return dict.fromkeys(NAMES, 0.0)
    try:
        if truth.call.score_terms:
            return _formulas_own(truth)
        return torch_errors(truth.x, truth.counts.sum(0), truth.results, truth.scale)
    except AssertionError:
        # torch itself gives NaN, or treats empty rows differently
        return dict.fromkeys(NAMES, 0.0)


def _formulas_own(truth: Truth) -> dict[str, float]:
    """Return the formula's errors in torch, with float32 scores and sums, and weights in the inputs' dtype."""
    x, acc = truth.x, torch.float64 if truth.call.dtype == "float64" else torch.float32
    leaves = {name: t.clone().requires_grad_() for name, t in truth.leaves.items()}
    q, k, v = (leaves[name].to(acc) for name in "qkv")
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = truth.after(q @ k.mT * truth.scale, leaves)[-1]
    counts = truth.counts.sum(0)
    scores = torch.where(counts > 0, scores + counts.clamp(min=1).log(), -torch.inf)
    sinks = leaves["sinks"].to(acc) if "sinks" in leaves else truth.sinks[:, 0].to(acc)
    rest = sinks[:, None, None].expand(*scores.shape[:3], 1)
    empty = torch.isneginf(truth.results["lse"])
    lse = torch.cat([torch.where(empty[..., None], 0.0, scores), rest], -1).logsumexp(-1)
    weights = torch.where(counts > 0, torch.exp(scores - lse[..., None]), 0.0).masked_fill(empty[..., None], 0.0)
    out = ((weights * truth.kept.to(acc)).to(x.q.dtype).to(acc) @ v).to(x.q.dtype)
    lse = lse.masked_fill(empty, -torch.inf)
    found = {"out": out.detach(), "lse": lse.detach()}
    if truth.call.grads:
        loss = (out * x.dout).sum(dtype=acc) + (lse.masked_fill(empty, 0.0) * x.dlse).sum()
        grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        found |= {f"d{name}": g for name, g in zip(leaves, grads, strict=True) if g is not None}
    return {name: _error(t, truth.results[name]) for name, t in found.items()}


def _error(got: Tensor, want: Tensor) -> float:
    finite = want.isfinite()
    size = float(want[finite].norm())
    off = float((got.double() - want)[finite].norm())
    return 0.0 if off != off or not size else off / size
