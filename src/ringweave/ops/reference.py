"""The definition, densely, in float64: what every other backend is tested against.

Multiplicities rather than masks: a LongNet lets a key count several times, a relation at most once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..plan import Branch
from ..types import acc_dtype
from .backend import Backend, Case, Inputs, Upstream


def _scores(inputs: Inputs, branch: Branch) -> tuple[Tensor, Tensor, Tensor]:
    """Scaled scores with -inf where nothing is allowed, multiplicities, and keys per query head."""
    q, k = inputs[:2]
    batch, heads = q.shape[:2]
    count = branch.pattern.to_dense(q.shape[2], k.shape[2], heads, batch=batch, q_offset=branch.q_offset)
    count = count.to(q.device, torch.float64)
    keys = k.double().repeat_interleave(heads // k.shape[1], 1)
    scores = inputs.scale * (q.double() @ keys.mT)
    # what the type of the scores cannot hold; see overflow.py
    most = torch.finfo(acc_dtype(q.dtype)).max
    finite = q.isfinite().all(-1)[..., None] & keys.isfinite().all(-1)[..., None, :]
    scores = scores.masked_fill(scores > most, torch.inf).masked_fill((scores < -most) & finite, torch.nan)
    return torch.where(count > 0, scores + count.log(), -torch.inf), count, keys


def _weights(scores: Tensor) -> Tensor:
    # not exp(scores - lse): scores of 1e17 take up the logarithm of a sum
    return torch.where(torch.isneginf(scores), 0.0, torch.softmax(scores, -1))


def forward(inputs: Inputs, branch: Branch, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Attention by the formula of its definition."""
    scores, count, _ = _scores(inputs, branch)
    lse = torch.logsumexp(scores, -1)
    weights = _weights(scores)
    values = _only_attended(inputs.v, count, inputs.q.shape[1])
    return (weights @ values).to(dtype), lse.to(acc_dtype(inputs.q.dtype))


def backward(upstream: Upstream, inputs: Inputs, branch: Branch, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by the formula; weights are recomputed in float64."""
    q, k, v, scale = inputs[:4]
    scores, count, keys = _scores(inputs, branch)
    weights = _weights(scores)
    heads = q.shape[1]
    dead = torch.isneginf(scores).all(-1, keepdim=True)
    grad_out, queries = (x.double().masked_fill(dead, 0.0) for x in (upstream.dout, q))
    values = _only_attended(v, count, heads)
    keys = keys.masked_fill((count.sum(-2) == 0)[..., None], 0.0)
    slope = weights * (grad_out @ values.mT - upstream.delta.double()[..., None])
    slope = slope.masked_fill(count == 0, 0.0)
    dq = scale * (slope @ keys)
    dk = scale * (slope.mT @ queries)
    dv = weights.mT @ grad_out

    def per_kv_head(x: Tensor) -> Tensor:
        grouped: Tensor = x.unflatten(1, (k.shape[1], heads // k.shape[1]))
        return grouped.sum(2)

    return dq.to(dtype), per_kv_head(dk).to(dtype), per_kv_head(dv).to(dtype)


def _only_attended(v: Tensor, count: Tensor, heads: int) -> Tensor:
    values = v.double().repeat_interleave(heads // v.shape[1], 1)
    return values.masked_fill((count.sum(-2) == 0)[..., None], 0.0)


def refusal(case: Case, branch: Branch) -> str | None:
    """The reference runs everything that fits into memory."""
    return None


def scratch(case: Case, branch: Branch) -> int:
    """Counts, scores, weights and their slopes, N x N in float64."""
    return 4 * 8 * case.batch * case.heads * case.nq * case.nk


BACKEND = Backend("reference", forward, backward, refusal, scratch, branched=False, planned=False)
