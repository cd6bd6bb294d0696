"""The float64 oracle: the exact attention of some rows by the definition, and the largest error of a correct result.

A pattern is evaluated by token for a few queries against all keys, in O(rows * N), so that any length can be checked.
For gradients, dout is zero outside these rows, so that only they contribute to dK and dV.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ringweave.patterns import LongNet, Pattern

from .problem import Sample


def sample_rows(tokens: int, count: int = 48, seed: int = 0) -> Tensor:
    """Choose query positions to check: both ends, tile edges, and random ones between; ascending, distinct."""
    ends = [0, 1, tokens // 2 - 1, tokens // 2, tokens - 2, tokens - 1, 127, 128]
    random = torch.randint(0, tokens, (max(count - len(ends), 0),), generator=torch.Generator().manual_seed(seed))
    return torch.tensor(sorted({p for p in ends + random.tolist() if 0 <= p < tokens}))


class Slice(NamedTuple):
    """Attention on some rows: out and dQ of these rows, and dK and dV of all keys for a dout on these rows only."""

    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


class Error(NamedTuple):
    """The error of a result: root mean square and largest element of the difference to the exact result."""

    rms: float
    largest: float


@dataclass(frozen=True)
class Limit:
    """The largest root mean square errors of output and gradients that count as correct."""

    out: float
    dq: float
    dk: float
    dv: float

    def doubled(self) -> Limit:
        """Return twice the limits, which other libraries may reach and are still timed."""
        return Limit(2 * self.out, 2 * self.dq, 2 * self.dk, 2 * self.dv)


@dataclass(frozen=True)
class Accuracy:
    """Errors against the float64 oracle on the checked rows.

    Attributes:
        out: Error of the output.
        dq: Error of the gradient of q; None if not checked.
        dk: Error of the gradient of k; None if not checked.
        dv: Error of the gradient of v; None if not checked.
    """

    out: Error
    dq: Error | None = None
    dk: Error | None = None
    dv: Error | None = None

    def excess(self, limit: Limit) -> str | None:
        """Describe the first error above its limit, or NaN; None if all errors are within their limits."""
        for name in ("out", "dq", "dk", "dv"):
            error, most = getattr(self, name), getattr(limit, name)
            if error is not None and not error.rms <= most:
                return f"root mean square error of {name} is {error.rms:.1e}, the limit is {most:.1e}"
        return None


class Oracle:
    """The float64 result on some rows, and the error of torch's attention there.

    Args:
        pattern: The pattern; each key of a LongNet counts once per branch that sees it.
        inputs: Tensors of any dtype. They are promoted to float64, so that only arithmetic errors count.
        rows: Query positions to check.
        key_heads: Key heads to check, with their query heads; None for all.
    Attributes:
        sliced: The inputs, with dout set to zero outside the rows.
    """

    def __init__(self, pattern: Pattern, inputs: Sample, rows: Tensor, key_heads: Sequence[int] | None = None):
        self.pattern, self.inputs, self.rows = pattern, inputs, rows.to(inputs.q.device)
        self.ratio = inputs.q.shape[1] // inputs.k.shape[1]
        self.key_heads = list(range(inputs.k.shape[1]) if key_heads is None else key_heads)
        self.heads = [self.ratio * key + i for key in self.key_heads for i in range(self.ratio)]
        dout = torch.zeros_like(inputs.dout)
        dout[:, :, self.rows] = inputs.dout[:, :, self.rows]
        self.sliced = inputs._replace(dout=dout)
        self.exact = self._slice(torch.float64)
        self.torch = self._slice(inputs.q.dtype)

    def _slice(self, dtype: torch.dtype) -> Slice:
        q, k, v, dout = self.inputs
        batch = len(q)
        out = torch.zeros(batch, len(self.heads), len(self.rows), v.shape[3], dtype=dtype, device=q.device)
        dq = torch.zeros(batch, len(self.heads), len(self.rows), q.shape[3], dtype=dtype, device=q.device)
        dk, dv = (torch.zeros(batch, len(self.key_heads), *x.shape[2:], dtype=dtype, device=q.device) for x in (k, v))
        for b in range(batch):
            for place, h in enumerate(self.heads):
                key = h // self.ratio
                rows, keys, values = (
                    x.to(dtype, copy=True).requires_grad_() for x in (q[b, h, self.rows], k[b, key], v[b, key])
                )
                part = _attend(rows, keys, values, self._bias(b, h))
                out[b, place] = part.detach()
                grads = torch.autograd.grad(part, (rows, keys, values), dout[b, h, self.rows].to(dtype))
                dq[b, place] = grads[0]
                dk[b, place // self.ratio] += grads[1]
                dv[b, place // self.ratio] += grads[2]
        return Slice(out, dq, dk, dv)

    def _bias(self, b: int, h: int) -> Tensor:
        """Return the log of each key's multiplicity: 0 or -inf, or more in a LongNet."""
        q, k = self.rows[:, None], torch.arange(self.inputs.k.shape[2], device=self.rows.device)[None, :]
        if not isinstance(self.pattern, LongNet):
            allowed = self.pattern.select(b, h).allows(q, k).expand(len(self.rows), k.shape[1])
            return torch.zeros(allowed.shape, dtype=torch.float64, device=q.device).masked_fill(~allowed, -torch.inf)
        count = torch.zeros(len(self.rows), k.shape[1], dtype=torch.float64, device=q.device)
        for (owned, rate, offset), inside in self.pattern.views(self.inputs.q.shape[1]):
            if h in range(*owned):
                kept = (q % rate == offset) & (k % rate == offset)
                count += kept & inside.allows(q // rate, k // rate)
        return count.log()

    def _error(self, got: Tensor, index: int) -> Error:
        difference = got.detach().double() - self.exact[index]
        return Error(float(difference.square().mean().sqrt()), float(difference.abs().max()))

    @property
    def limit(self) -> Limit:
        """Largest correct errors: twice torch's error on these rows, or two units of rounding if that is larger.

        The limits apply to root mean squares, because the largest element varies by a factor of 5 between seeds even
        for torch. An element that is wrong rather than rounded shows in the root mean square too.
        """
        rounding = 2 * torch.finfo(self.inputs.q.dtype).eps
        bounds = (
            max(2 * self._error(torchs, index).rms, rounding * float(self.exact[index].square().mean().sqrt()))
            for index, torchs in enumerate(self.torch)
        )
        return Limit(*bounds)

    def check_out(self, out: Tensor) -> Accuracy:
        """Measure the error of a whole output, (B, H, N, Dv), on the rows; NaN anywhere in it makes the error NaN."""
        if torch.isnan(out).any():
            return Accuracy(Error(math.nan, math.nan))
        return Accuracy(self._error(self._picked(out), 0))

    def check_gradients(self, out: Tensor, dq: Tensor, dk: Tensor, dv: Tensor) -> Accuracy:
        """Measure the errors of whole results for ``sliced.dout``."""
        keys = (x if len(self.key_heads) == x.shape[1] else x[:, self.key_heads] for x in (dk, dv))
        got = (self._picked(out), self._picked(dq), *keys)
        return Accuracy(*(self._error(part, index) for index, part in enumerate(got)))

    def _picked(self, x: Tensor) -> Tensor:
        return x[:, :, self.rows][:, self.heads]


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Compute rows of one head, by the formula in float64 and by torch in other dtypes; empty rows are 0."""
    empty = torch.isneginf(bias).all(1, keepdim=True)
    bias = bias.masked_fill(empty, 0.0)
    if q.dtype == torch.float64:
        scores = q @ k.mT / math.sqrt(q.shape[1]) + bias
        out = torch.softmax(scores, -1) @ v
    else:
        mask = bias.to(q.dtype)[None, None]
        out = torch.nn.functional.scaled_dot_product_attention(q[None, None], k[None, None], v[None, None], mask)[0, 0]
    return out.masked_fill(empty, 0.0)
