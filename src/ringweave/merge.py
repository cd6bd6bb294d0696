"""Combine partial attention results exactly, by their log-sum-exp."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .errors import ShapeError, shown
from .types import AttentionOutput, acc_dtype


def merge(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> AttentionOutput:
    """Merge partial results over disjoint key sets, or over branches that may overlap, into the whole.

    ``lse = log sum_i exp(lse_i)``, ``out = sum_i exp(lse_i - lse) out_i``, in float32 (float64 for float64 parts). A
    row without keys in any part gives 0 and -inf. A part with an lse of -inf adds nothing, even if its out is NaN.
    Associative and commutative to rounding; differentiable in all inputs.

    Args:
        outs: Partial outputs, (..., Nq, Dv) each.
        lses: Log-sum-exp of the parts' scores, (..., Nq) each.
    Returns:
        The merged output, dtype of the first part, and lse.
    Raises:
        ShapeError: There are no parts, or their shapes, dtypes or devices differ.
    Example:
        >>> near = rw.attention_with_lse(q, k, v, rw.SlidingWindow(64))
        >>> rest = rw.attention_with_lse(q, k, v, rw.Causal() & ~rw.SlidingWindow(64))
        >>> whole = rw.merge([near.out, rest.out], [near.lse, rest.lse])
        >>> torch.testing.assert_close(whole.out, rw.attention(q, k, v, rw.Causal()))

    References:
        Milakov and Gimelshein (2018), Online normalizer calculation for softmax, section 3.
    """
    outs, lses = _tensors("outs", outs), _tensors("lses", lses)
    if not outs or len(outs) != len(lses):
        raise ShapeError(
            "outs, lses", f"{len(outs)} and {len(lses)} parts", "as many of both, at least one", "Pass pairs."
        )
    for out, lse in zip(outs, lses, strict=True):
        if out.ndim < 1 or out.shape != outs[0].shape or lse.shape != out.shape[:-1]:
            raise ShapeError(
                "outs, lses",
                f"out {tuple(out.shape)}, lse {tuple(lse.shape)}",
                f"out {tuple(outs[0].shape)} and lse {tuple(outs[0].shape[:-1])} in every part",
                "Give all parts the same queries.",
            )
        if (out.dtype, lse.dtype) != (outs[0].dtype, lses[0].dtype) or not (out.device == lse.device == outs[0].device):
            raise ShapeError(
                "outs, lses",
                f"out {out.dtype} on {out.device}, lse {lse.dtype} on {lse.device}",
                f"out {outs[0].dtype} and lse {lses[0].dtype} on {outs[0].device} in every part",
                "Convert the parts to one dtype and device.",
            )
    acc = acc_dtype(lses[0].dtype)
    stacked = torch.stack([lse.to(acc) for lse in lses])
    # not torch.logsumexp, since its gradient is NaN where every part is -inf
    top = stacked.detach().amax(0)
    top = torch.where(torch.isfinite(top), top, 0.0)
    weights = torch.exp(stacked - top)
    total = weights.sum(0)
    alive = total != 0
    safe = torch.where(alive, total, 1.0)
    joined = torch.zeros_like(outs[0], dtype=acc)
    for out, weight, empty in zip(outs, weights, stacked.isneginf(), strict=True):
        # other libraries may return NaN for a row that attends nothing
        joined = joined + (weight / safe)[..., None] * out.to(acc).masked_fill(empty[..., None], 0.0)
    lse = torch.where(alive, top + torch.log(safe), -torch.inf)
    return AttentionOutput(joined.to(outs[0].dtype), lse)


def with_sinks(out: Tensor, lse: Tensor, logits: Tensor) -> AttentionOutput:
    """Add one logit per head, (Hq,), without a value, to the softmax of (out, lse).

    ``lse' = logaddexp(lse, logit)``, ``out' = out exp(lse - lse')``. Differentiable in all three.
    """
    logits = logits.to(lse.dtype)[:, None]
    # Not torch.logaddexp: its gradient is NaN where both are -inf. Detached before maximum, which would otherwise save
    # logits made in inference mode and raise.
    top = torch.maximum(lse.detach(), logits.detach())
    top = torch.where(torch.isneginf(top), 0.0, top)
    own = torch.exp(lse - top)
    total = own + torch.exp(logits - top)
    alive = total != 0
    safe = torch.where(alive, total, 1.0)
    joined = (out * (own / safe)[..., None]).to(out.dtype)
    return AttentionOutput(joined, torch.where(alive, top + torch.log(safe), -torch.inf))


def _tensors(name: str, parts: Sequence[Tensor]) -> Sequence[Tensor]:
    """Check that the parts are a list of floating-point tensors, and return them."""
    if not isinstance(parts, (list, tuple)):
        raise ShapeError(name, shown(parts), "a list of tensors", "Pass the parts in a list.")
    for part in parts:
        if not isinstance(part, Tensor) or not part.is_floating_point():
            raise ShapeError(name, shown(part), "floating-point tensors", "Pass attention_with_lse's results.")
    return parts


def merge_into(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Merge a partial result into (out, lse) in place, without gradients; out and lse may be strided views."""
    top = torch.maximum(lse, part_lse)
    top = torch.where(torch.isfinite(top), top, 0.0)
    old, new = torch.exp(lse - top), torch.exp(part_lse - top)
    total = old + new
    safe = torch.where(total != 0, total, 1.0)
    out.mul_((old / safe)[..., None]).addcmul_(part_out.to(out.dtype), (new / safe)[..., None])
    lse.copy_(torch.where(total != 0, top + torch.log(safe), -torch.inf))
