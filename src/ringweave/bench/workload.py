"""One attention to be measured, its inputs, and the float64 oracle on some of its rows.

The oracle evaluates a pattern by token for a few queries against all keys: O(rows * N), so that any length can be
checked. For gradients dout is zero outside those rows; then they alone make dK and dV.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..ops.backend import Case
from ..patterns import Causal, Full, LongNet, Pattern


class Inputs(NamedTuple):
    """What attention takes, and the gradient of what it gives: (B, H, N, D) each, k and v with the key heads."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


@dataclass(frozen=True)
class Workload:
    """An attention: a pattern at one size.

    Attributes:
        name: For people.
        pattern: What may attend.
        tokens: Queries and keys.
        heads: Query heads.
        kv_heads: Key heads; as many as query heads where not given.
        head_dim: Of queries, keys and values.
        batch: Batch elements.
        dtype: Of the inputs.
        device: Of the inputs.
    """

    name: str
    pattern: Pattern
    tokens: int
    heads: int = 8
    head_dim: int = 64
    batch: int = 1
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    kv_heads: int | None = None

    @property
    def key_heads(self) -> int:
        """Key heads as a number."""
        return self.kv_heads or self.heads

    def case(self, needs_grad: bool) -> Case:
        """As backends are asked about it."""
        n, dim, kind = self.tokens, self.head_dim, torch.device(self.device).type
        return Case(self.batch, self.heads, self.key_heads, n, n, dim, dim, self.dtype, kind, needs_grad)

    def inputs(self, seed: int = 0) -> Inputs:
        """Random normal inputs; never zeros, on which kernels are faster."""
        generator = torch.Generator().manual_seed(seed)
        q, kv = ((self.batch, heads, self.tokens, self.head_dim) for heads in (self.heads, self.key_heads))
        made = (torch.randn(shape, generator=generator).to(self.device, self.dtype) for shape in (q, kv, kv, q))
        return Inputs(*made)

    @property
    def density(self) -> float:
        """Allowed pairs over all pairs."""
        return self.pattern.density(self.tokens, heads=self.heads, batch=self.batch)

    def flops(self, *, backward: bool) -> float:
        """Floating-point operations on the allowed pairs: two products forward, five more backward."""
        pairs = self.density * self.batch * self.heads * self.tokens**2
        return pairs * self.head_dim * (14 if backward else 4)

    @property
    def dense_pattern(self) -> Pattern:
        """The dense pattern that holds this one: causal where no query attends a later key, else full."""
        if isinstance(self.pattern, LongNet):
            return Causal() if self.pattern.causal else Full()
        later = self.pattern & ~Causal()
        return Full() if later.plan(self.tokens, heads=self.heads, batch=self.batch).nnz else Causal()


def sample_rows(tokens: int, count: int = 48, seed: int = 0) -> Tensor:
    """Query positions to check: both ends, tile edges, and random ones between; ascending, distinct."""
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
        out: Of the output; ``dq``, ``dk``, ``dv`` of the gradients, None where they were not checked.
    """

    out: Error
    dq: Error | None = None
    dk: Error | None = None
    dv: Error | None = None

    def excess(self, limit: Limit) -> str | None:
        """Which error is above its limit, in words; None where all are within. NaN is not."""
        for name in ("out", "dq", "dk", "dv"):
            error, most = getattr(self, name), getattr(limit, name)
            if error is not None and not error.rms <= most:
                return f"root mean square error of {name} {error.rms:.1e}, at most {most:.1e} is right"
        return None


class Oracle:
    """The float64 result on some rows, and the error that torch's own attention makes there.

    Args:
        pattern: What may attend; a LongNet's keys count as often as branches see them.
        inputs: Of any dtype; promoted, so that only arithmetic errors are seen.
        rows: Query positions to check.
    """

    def __init__(self, pattern: Pattern, inputs: Inputs, rows: Tensor):
        self.pattern, self.inputs, self.rows = pattern, inputs, rows.to(inputs.q.device)
        dout = torch.zeros_like(inputs.dout)
        dout[:, :, self.rows] = inputs.dout[:, :, self.rows]
        self.sliced = inputs._replace(dout=dout)
        self.exact = self._slice(torch.float64)
        self.torch = self._slice(inputs.q.dtype)

    def _slice(self, dtype: torch.dtype) -> Slice:
        q, k, v, dout = self.inputs
        batch, heads = q.shape[:2]
        ratio = heads // k.shape[1]
        out = torch.zeros(batch, heads, len(self.rows), v.shape[3], dtype=dtype, device=q.device)
        dq = torch.zeros(batch, heads, len(self.rows), q.shape[3], dtype=dtype, device=q.device)
        dk, dv = torch.zeros_like(k, dtype=dtype), torch.zeros_like(v, dtype=dtype)
        for b in range(batch):
            for h in range(heads):
                rows, keys, values = (
                    x.to(dtype, copy=True).requires_grad_()
                    for x in (q[b, h, self.rows], k[b, h // ratio], v[b, h // ratio])
                )
                part = _attend(rows, keys, values, self._bias(b, h))
                out[b, h] = part.detach()
                grads = torch.autograd.grad(part, (rows, keys, values), dout[b, h, self.rows].to(dtype))
                dq[b, h] = grads[0]
                dk[b, h // ratio] += grads[1]
                dv[b, h // ratio] += grads[2]
        return Slice(out, dq, dk, dv)

    def _bias(self, b: int, h: int) -> Tensor:
        """log of how often each key counts: 0, -inf, or more in a LongNet."""
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
        """The error of a whole output, (B, H, N, Dv), on the rows."""
        return Accuracy(self._error(out[:, :, self.rows], 0))

    def check_gradients(self, out: Tensor, dq: Tensor, dk: Tensor, dv: Tensor) -> Accuracy:
        """The errors of output and gradients for ``sliced.dout``."""
        got = (out[:, :, self.rows], dq[:, :, self.rows], dk, dv)
        return Accuracy(*(self._error(part, index) for index, part in enumerate(got)))


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """One head's rows: by the formula in float64, by torch's attention in any other dtype; empty rows give 0."""
    empty = torch.isneginf(bias).all(1, keepdim=True)
    bias = bias.masked_fill(empty, 0.0)
    if q.dtype == torch.float64:
        scores = q @ k.mT / math.sqrt(q.shape[1]) + bias
        out = torch.softmax(scores, -1) @ v
    else:
        mask = bias.to(q.dtype)[None, None]
        out = torch.nn.functional.scaled_dot_product_attention(q[None, None], k[None, None], v[None, None], mask)[0, 0]
    return out.masked_fill(empty, 0.0)
