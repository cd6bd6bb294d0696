"""flash-attn's conventions as a definition: dense attention in float64, one sequence at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..oracle import attention, check_errors, errors

Window = tuple[int, int]
NAMES = ("out", "lse", "dq", "dk", "dv")


class Options(NamedTuple):
    """The options of a call that change its result."""

    causal: bool = False
    window: Window = (-1, -1)
    scale: float | None = None
    softcap: float = 0.0
    slopes: Tensor | None = None  # (H,) or (B, H)
    chunk: int = 0

    def keywords_3(self) -> dict[str, Any]:
        return {
            "causal": self.causal, "window_size": self.window, "softmax_scale": self.scale, "softcap": self.softcap,
            "attention_chunk": self.chunk,
        }  # fmt: skip

    def keywords(self) -> dict[str, Any]:
        return {
            "causal": self.causal, "window_size": self.window, "softmax_scale": self.scale, "softcap": self.softcap,
            "alibi_slopes": self.slopes,
        }  # fmt: skip


def allowed(nq: int, nk: int, options: Options, limit: int | None = None, version: int = 2) -> Tensor:
    """Return the attended pairs (nq, nk); ``limit`` is the longest sequence of keys, on which version 2 depends."""
    left, right = options.window
    limit = nk if limit is None else limit
    if version == 2:
        left, right = (-1 if side < 0 or side >= limit else side for side in (left, right))
    right = 0 if options.causal else right
    position, key = torch.arange(nq)[:, None] + nk - nq, torch.arange(nk)
    chunk = options.chunk
    inside = position // chunk == key // chunk if chunk else torch.ones(nq, nk, dtype=torch.bool)
    if left < 0 and right < 0:
        return inside
    far = limit if version == 2 else nq + nk
    left, right = (far if side < 0 else side for side in (left, right))
    return inside & (key >= position - left) & (key <= position + right)


def scored(nq: int, nk: int, options: Options, batch: int) -> Callable[[Tensor], Tensor]:
    """Return the function of scaled scores (B, H, nq, nk): the cap, then ALiBi."""
    distance = (torch.arange(nq)[:, None] + nk - nq - torch.arange(nk)).abs()

    def apply(t: Tensor) -> Tensor:
        if options.softcap > 0:
            t = options.softcap * torch.tanh(t / options.softcap)
        if options.slopes is not None:
            slopes = options.slopes.expand(batch, -1) if options.slopes.ndim == 1 else options.slopes
            t = t - (slopes.to(t.dtype)[:, :, None, None] * distance)
        return t

    return apply


def dense(
    q: Tensor, k: Tensor, v: Tensor, options: Options, limit: int | None = None, version: int = 2
) -> tuple[Tensor, Tensor]:
    """Compute (out (B, N, H, D), lse (B, H, N)) by the definition, in the dtype of the inputs."""
    nq, nk = q.shape[1], k.shape[1]
    if nk == 0:
        out = q.new_zeros(*q.shape[:3], v.shape[-1]) + 0 * (q.sum() + k.sum() + v.sum())
        lse = torch.full((len(q), q.shape[2], nq), -math.inf, dtype=q.dtype)
    else:
        mask = allowed(nq, nk, options, limit, version)
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        out, lse = attention(*heads_first, mask, options.scale, scored=scored(nq, nk, options, len(q)))
        out = out.transpose(1, 2)
    return out, lse.masked_fill(torch.isneginf(lse), math.inf if version == 2 else -math.inf)


def packed(
    q: Tensor, k: Tensor, v: Tensor, queries: Sequence[int], keys: Sequence[int], options: Options, version: int = 2
) -> tuple[Tensor, Tensor]:
    """Compute (out (tokens, H, D), lse (H, tokens)) of packed sequences by the definition."""
    outs, lses = [], []
    parts = zip(q.split(list(queries)), k.split(list(keys)), v.split(list(keys)), strict=True)
    for b, part in enumerate(parts):
        one = options
        if options.slopes is not None and options.slopes.ndim == 2:
            one = options._replace(slopes=options.slopes[b])
        out, lse = dense(*(x[None] for x in part), one, max(keys), version)
        outs.append(out[0])
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, 1)


def results(
    call: Callable[..., tuple[Tensor, Tensor]], inputs: Sequence[Tensor], dout: Tensor, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Return out, lse and the gradients of q, k and v."""
    leaves = [x.detach().to(dtype or x.dtype).clone().requires_grad_() for x in inputs]
    out, lse = call(*leaves)[:2]
    grads = torch.autograd.grad((out * dout.to(out.dtype)).sum(), leaves)
    return dict(zip(NAMES, [out.detach(), lse.detach(), *grads], strict=True))


def check(
    ours: Callable[..., tuple[Tensor, Tensor]],
    definition: Callable[..., tuple[Tensor, Tensor]],
    inputs: Sequence[Tensor],
    seed: int = 0,
) -> None:
    """Check that each error against float64 is at most twice that of the definition in the inputs' dtype."""
    generator = torch.Generator().manual_seed(seed)
    q, v = inputs[0], inputs[2]
    dout = torch.randn(*q.shape[:-1], v.shape[-1], generator=generator).to(q.dtype)
    want = results(definition, inputs, dout, torch.float64)
    got = results(ours, inputs, dout)
    for name, x in got.items():
        assert x.shape == want[name].shape, name
        assert x.dtype == (torch.float32 if name == "lse" and q.dtype != torch.float64 else q.dtype), name
        # rows without keys are exact
        infinite = want[name].isinf()
        assert torch.equal(x[infinite].double(), want[name][infinite]), name
        assert bool(x[~infinite].isfinite().all()), name
    theirs = errors(results(definition, inputs, dout), want)
    floor = {name: _rounding(x, want[name]) for name, x in got.items()}
    check_errors(got, want, [theirs], floor)


def _rounding(got: Tensor, want: Tensor) -> float:
    """Return the relative error that rounding may cause: inputs are of size 1, and terms of a gradient may cancel."""
    finite = want[want.isfinite()]
    size = float(finite.norm())
    return 4 * torch.finfo(got.dtype).eps * (size + finite.numel() ** 0.5) / (size or 1e-30)
