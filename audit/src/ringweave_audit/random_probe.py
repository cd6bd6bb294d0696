"""Check a call on random queries, keys and values against the definition, over the pairs that were found.

Calls with equal scores reveal the pairs and their weights W, but not which keys the scores come from. A call on random
inputs must give P = W exp(f(q k^T)) / (1 - sum W + sum W exp(f(q k^T))), out = P v, which covers biases, repetition and
sinks. f multiplies by a scale and may cap the result; both are fitted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

_TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, eq=False)
class RandomCall:
    """One call on random inputs.

    Attributes:
        q: Queries passed to the function, (B, Hq, Nq, D).
        k: Keys, (B, Hkv, Nk, D).
        v: Values, (B, Hkv, Nk, Dv).
        out: Output of the function, (B, Hq, Nq, Dv) float64.
        weights: Weights for equal scores, (B, Hq, Nq, Nk) float64.
        scale: Fitted factor of the scores; NaN if no row has two keys.
        softcap: Fitted cap of the scores; 0 for no cap.
        precision: Dtype with rounding errors of the size found.
        allowed: Largest error of a row that rounding explains.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    weights: Tensor
    scale: float
    softcap: float
    precision: torch.dtype
    allowed: float

    @staticmethod
    def of(
        call: Callable[[Tensor, Tensor, Tensor], Tensor], like: tuple[Tensor, Tensor, Tensor], weights: Tensor
    ) -> RandomCall:
        """Call a function with small scores for a first estimate of the scale, then with scores of usual size.

        Args:
            call: Function that returns its output in float64.
            like: q, k and v with the shapes, dtypes and devices to use.
            weights: Weights for equal scores.
        """
        dim = like[0].shape[-1]
        usual = dim**-0.5
        small = _random(call, like, weights, 2 * usual, usual)
        scale, _ = small._fit()
        if scale != scale:
            return small._rounded(scale, 0.0)
        found = _random(call, like, weights, 1.5 * usual / min(max(abs(scale), 0.5 / dim), 3.0), scale)
        found = found._rounded(*found._fit())
        if found.precision == found.q.dtype and not bool(found.off(found.scale, 0.0).any()):
            return found
        capped = found._rounded(*found._fit(cap=True))
        better = (
            torch.finfo(capped.precision).eps < torch.finfo(found.precision).eps or found.off(found.scale, 0.0).any()
        )
        return capped if better and not bool(capped.off(capped.scale, capped.softcap).any()) else found

    def off(self, scale: float, softcap: float) -> Tensor:
        """Return which rows (B, Hq, Nq) differ from the definition."""
        return self.errors(scale, softcap) > self.allowed

    def errors(self, scale: float, softcap: float) -> Tensor:
        """Return the error of each row relative to the norm of its weights, (B, Hq, Nq)."""
        key = (scale, softcap)
        if key not in self._known:
            want, size = self._want(_number(scale), _number(softcap))
            self._known[key] = (self.out - want).square().mean(-1).sqrt() / size
        return self._known[key]

    def source(self, b: int, h: int, rows: Tensor, scale: float, softcap: float) -> str:
        """Describe which key head or batch element a head reads by mistake; "" if that does not explain the error."""
        own = h // (self.q.shape[1] // self.k.shape[1])
        for x in range(self.k.shape[0]):
            for y in range(self.k.shape[1]):
                for what, keys, values in (("keys and values", 1, 1), ("keys", 1, 0), ("values", 0, 1)):
                    other, mine = (slice(x, x + 1), slice(y, y + 1)), (slice(b, b + 1), slice(own, own + 1))
                    one = dataclasses.replace(
                        self, q=self.q[b : b + 1, h : h + 1], k=self.k[other if keys else mine],
                        v=self.v[other if values else mine], out=self.out[b : b + 1, h : h + 1],
                        weights=self.weights[b : b + 1, h : h + 1],
                    )  # fmt: skip
                    if not bool((one.off(scale, softcap)[0, 0] & rows).any()):
                        read = f"row {x}" if x != b else f"key head {y}"
                        return f"head {h} of row {b} reads {what} of {read}, not {b if x != b else own}"
        return ""

    @cached_property
    def _known(self) -> dict[tuple[float, float], Tensor]:
        return {}

    @cached_property
    def _logs(self) -> Tensor:
        """Logarithms of the weights, and in the last column of the sinks' share, (B, Hq, Nq, Nk + 1)."""
        sums = self.weights.sum(-1, keepdim=True)
        rest = torch.where(sums > 0, (1 - sums).clamp(min=0), 1.0)
        return torch.cat((self.weights.clamp(min=0), rest), -1).log()

    def _want(self, scale: Tensor, softcap: Tensor, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
        """Compute the definition, with inputs, scores and weights rounded to a dtype, and the norm of each weights row.

        Args:
            scale: Factor of the scores, (Hq,) or one number.
            softcap: Cap of the scores, (Hq,) or one number; 0 for no cap.
            dtype: Dtype to round to.
        """
        ratio = self.q.shape[1] // self.k.shape[1]
        q, k = self.q.to(dtype), self.k.to(dtype).repeat_interleave(ratio, 1)
        v = self.v.to(dtype).repeat_interleave(self.q.shape[1] // self.v.shape[1], 1)
        scale, softcap = (x.double().nan_to_num(0.0).view(-1, 1, 1) for x in (scale, softcap))
        scores = ((q @ k.mT).double() * scale).to(dtype).double()
        if bool((softcap > 0).any()):
            cap = softcap.clamp(min=1e-6)
            scores = torch.where(softcap > 0, cap * (scores / cap).tanh(), scores)
        logs = self._logs
        share = torch.cat((scores + logs[..., :-1], logs[..., -1:]), -1).softmax(-1)[..., :-1]
        norm = share.norm(dim=-1)
        return (share.to(dtype) @ v).double(), torch.where(norm > 0, norm, 1.0)

    def _fit(self, cap: bool = False) -> tuple[float, float]:
        """Fit the scale, and optionally a cap, to each head by least squares; return the medians over heads."""
        heads, count = self.q.shape[1], 1 + cap
        eye = torch.eye(2, dtype=torch.float64, device="cpu")[:count]
        # columns: scale, and 1 / cap^2, which is 0 for no cap
        found = torch.tensor([self.scale, 0.0], dtype=torch.float64, device="cpu").repeat(heads, 1)
        steps = (1e-4 * self.q.shape[-1] ** -0.5, 1e-6)[:count]

        def rest(found: Tensor) -> Tensor:
            softcap = torch.where(found[:, 1] > 0, found[:, 1].clamp(min=1e-12).rsqrt(), 0.0)
            want, size = self._want(found[:, 0], softcap)
            return ((want - self.out) / size[..., None]).transpose(0, 1).flatten(1)

        for _ in range(12):
            error = rest(found)
            slopes = torch.stack(
                [(rest(found + step * one) - error) / step for step, one in zip(steps, eye, strict=True)], -1
            )
            tells = slopes[..., 0].norm(dim=1) > 1e-9
            move = (torch.linalg.pinv(slopes) @ error[..., None])[..., 0] @ eye
            found = (found - move).clamp(_number([-16.0, 0.0]), _number([16.0, 1e4]))
            if bool((move.abs() <= 1e-4 * found.abs() + 1e-9).all()):
                break
        if not bool(tells.any()):
            return float("nan"), 0.0
        scale, inverse = found[tells].median(0).values.tolist()
        return scale, inverse**-0.5 if inverse > 1e-6 else 0.0

    def _rounded(self, scale: float, softcap: float) -> RandomCall:
        """Find the dtype that explains the rounding errors: the inputs' dtype, or a coarser one."""
        mine = dataclasses.replace(self, scale=scale, softcap=softcap)
        args = _number(scale), _number(softcap)
        want, size = mine._want(*args)
        errors = mine.errors(scale, softcap)
        # A kernel that stores the logarithm of a row's sum rounds it. The logarithm is large with a large sink or bias.
        sums, most = self.weights.sum(-1), self.weights.amax(-1, keepdim=True)
        logs = float(torch.where(sums > 0, sums, 1.0).log().abs().max())
        logs += 16.0 * bool(((self.weights > 0) & (self.weights < 0.9 * most)).any())

        def bound(dtype: torch.dtype) -> float:
            eps = torch.finfo(dtype).eps
            own = (mine._want(*args, dtype)[0] - want).square().mean(-1).sqrt() / size
            return min(4 * float(own.max()) + 4 * eps, 16 * eps) + eps * logs

        usual = bound(self.q.dtype)
        if float(errors.median()) > usual:
            for dtype in _TYPES:
                coarse = torch.finfo(dtype).eps > torch.finfo(self.q.dtype).eps
                if coarse and float(errors.max()) <= (allowed := bound(dtype)):
                    return dataclasses.replace(mine, precision=dtype, allowed=allowed)
        return dataclasses.replace(mine, precision=self.q.dtype, allowed=usual)


def _number(value: float | list[float]) -> Tensor:
    return torch.tensor(value, device="cpu")


def _random(
    call: Callable[[Tensor, Tensor, Tensor], Tensor],
    like: tuple[Tensor, Tensor, Tensor],
    weights: Tensor,
    size: float,
    scale: float,
) -> RandomCall:
    generator = torch.Generator("cpu").manual_seed(0)
    q, k, v = (torch.randn(x.shape, generator=generator, device="cpu") for x in like)
    q, k, v = (x.to(y.dtype) for x, y in zip((q, k * size, v), like, strict=True))
    out = call(*(x.to(y.device) for x, y in zip((q, k, v), like, strict=True)))
    return RandomCall(q, k, v, out, weights, scale, 0.0, q.dtype, 0.0)
