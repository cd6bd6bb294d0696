"""The definition, densely, in float64: what every other backend is tested against.

Multiplicities rather than masks: a LongNet lets a key count several times, a relation at most once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..plan import Branch
from ..types import acc_dtype
from .backend import Backend, Case, Inputs, Upstream, per_query_head


def _scores(inputs: Inputs, branch: Branch) -> tuple[Tensor, Tensor, Tensor]:
    """Compute scaled scores with -inf where nothing is allowed, multiplicities, and keys per query head."""
    q, k = inputs[:2]
    batch, heads = q.shape[:2]
    count = branch.pattern.to_dense(q.shape[2], k.shape[2], heads, batch=batch, q_offset=branch.q_offset)
    count = count.to(q.device, torch.float64)
    keys = per_query_head(k.double(), heads)
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
    """Compute attention by the formula of its definition."""
    scores, count, _ = _scores(inputs, branch)
    lse = torch.logsumexp(scores, -1)
    weights = _weights(scores)
    values = _only_attended(inputs.v, count, inputs.q.shape[1])
    return (weights @ values).to(dtype), lse.to(acc_dtype(inputs.q.dtype))


def backward(upstream: Upstream, inputs: Inputs, branch: Branch, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Compute gradients by the formula; weights are recomputed in float64."""
    q, k, v, scale = inputs[:4]
    scores, count, keys = _scores(inputs, branch)
    weights = _weights(scores)
    heads = q.shape[1]
    dead = torch.isneginf(scores).all(-1, keepdim=True)
    dout, queries = (x.double().masked_fill(dead, 0.0) for x in (upstream.dout, q))
    values = _only_attended(v, count, heads)
    keys = keys.masked_fill((count.sum(-2) == 0)[..., None], 0.0)
    score_grads = weights * (dout @ values.mT - upstream.delta.double()[..., None])
    score_grads = score_grads.masked_fill(count == 0, 0.0)
    dq = scale * (score_grads @ keys)
    dk = scale * (score_grads.mT @ queries)
    dv = weights.mT @ dout

    dk, dv = (x.unflatten(1, (k.shape[1], -1)).sum(2).to(dtype) for x in (dk, dv))
    return dq.to(dtype), dk, dv


def _only_attended(v: Tensor, count: Tensor, heads: int) -> Tensor:
    values = per_query_head(v.double(), heads)
    return values.masked_fill((count.sum(-2) == 0)[..., None], 0.0)


def refusal(case: Case, branch: Branch) -> str | None:
    """The reference runs everything that fits into memory."""
    return None


def scratch(case: Case, branch: Branch) -> int:
    """Count multiplicities, scores, weights and their gradients, N x N in float64."""
    return 4 * 8 * case.batch * case.heads * case.nq * case.nk


BACKEND = Backend("reference", forward, backward, refusal, scratch, branched=False, planned=False)
