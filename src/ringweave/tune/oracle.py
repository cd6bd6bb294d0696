"""The float64 oracle: what attention gives on some rows, by the definition, and how far a result may be from it.

A pattern is evaluated by token for a few queries against all keys: O(rows * N), so that any length can be checked. For
gradients dout is zero outside those rows; then they alone make dK and dV.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..patterns import LongNet, Pattern
from .problem import Sample


def sample_rows(tokens: int, count: int = 48, seed: int = 0) -> Tensor:
    """Choose query positions to check: both ends, tile edges, and random ones between; ascending, distinct."""
    ends = [0, 1, tokens // 2 - 1, tokens // 2, tokens - 2, tokens - 1, 127, 128]
    random = torch.randint(0, tokens, (max(count - len(ends), 0),), generator=torch.Generator().manual_seed(seed))
    return torch.tensor(sorted({p for p in ends + random.tolist() if 0 <= p < tokens}))


class Slice(NamedTuple):
    """Attention on some rows: out and dQ of those rows, dK and dV of all keys for a dout on those rows alone."""

    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


class Error(NamedTuple):
    """A difference to the exact result: its root mean square, and its largest element."""

    rms: float
    largest: float


@dataclass(frozen=True)
class Limit:
    """The largest root mean square error of output and gradients that is taken as correct."""

    out: float
    dq: float
    dk: float
    dv: float


@dataclass(frozen=True)
class Accuracy:
    """Errors against the float64 oracle on the checked rows.

    Attributes:
        out: The output's; ``dq``, ``dk``, ``dv`` are the gradients', None where they were not checked.
    """

    out: Error
    dq: Error | None = None
    dk: Error | None = None
    dv: Error | None = None

    def excess(self, limit: Limit) -> str | None:
        """Say which error is above its limit; None where all are within. NaN is not."""
        for name in ("out", "dq", "dk", "dv"):
            error, most = getattr(self, name), getattr(limit, name)
            if error is not None and not error.rms <= most:
                return f"root mean square error of {name} {error.rms:.1e}, at most {most:.1e} is right"
        return None


class Oracle:
    """The float64 result on some rows, and the error that torch's own attention makes there.

    Args:
        pattern: What may attend; a LongNet's keys count as often as branches see them.
        inputs: Tensors of any dtype; promoted, so that only arithmetic errors are seen.
        rows: Query positions to check.
        key_heads: Key heads whose query heads are checked; None for all.
    Attributes:
        sliced: The inputs with a dout that is zero outside the rows.
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
        """Count how often each key counts, and take the log: 0, -inf, or more in a LongNet."""
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
        """What is taken as correct: twice torch's own error on these rows, or two units of rounding if that is more.

        Of root mean squares: the largest element is a matter of luck, and differs by a factor of 5 between seeds for
        torch itself. An element that is wrong, and not rounded, shows in the root mean square as well.
        """
        rounding = 2 * torch.finfo(self.inputs.q.dtype).eps
        bounds = (
            max(2 * self._error(torchs, index).rms, rounding * float(self.exact[index].square().mean().sqrt()))
            for index, torchs in enumerate(self.torch)
        )
        return Limit(*bounds)

    def check_out(self, out: Tensor) -> Accuracy:
        """Measure the error of a whole output, (B, H, N, Dv), on the rows; a NaN anywhere in it counts."""
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
    """Compute one head's rows: by the formula in float64, by torch in any other dtype; empty rows give 0."""
    empty = torch.isneginf(bias).all(1, keepdim=True)
    bias = bias.masked_fill(empty, 0.0)
    if q.dtype == torch.float64:
        scores = q @ k.mT / math.sqrt(q.shape[1]) + bias
        out = torch.softmax(scores, -1) @ v
    else:
        mask = bias.to(q.dtype)[None, None]
        out = torch.nn.functional.scaled_dot_product_attention(q[None, None], k[None, None], v[None, None], mask)[0, 0]
    return out.masked_fill(empty, 0.0)
