"""Dense float64 attention: the definition that every other backend is tested against.

It uses multiplicities instead of masks, since a key may count several times under LongNet. Under any other pattern it
counts at most once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..call import Call, Operands
from ..plan import Branch
from ..precision import STORED
from ..terms import Pairs
from ..types import acc_dtype
from .attended import attended_product
from .backend import Backend, Upstream, by_formula, per_query_head


class _Dense(NamedTuple):
    """The dense intermediate values of a call."""

    scores: Tensor  # scaled, after the terms; -inf for pairs that are not allowed
    times: Tensor  # multiplicities
    keys: Tensor  # per query head
    at: Pairs | None  # None without terms and dropout
    states: list[Tensor]  # scores before the terms, and after each term
    weights: Tensor
    kept: Tensor  # factor of dropout for each weight: 0 if dropped, else 1 / (1 - p); 1 without dropout


def _dense(operands: Operands, branch: Branch) -> _Dense:
    q, k, _, scale, terms, *_ = operands
    batch, heads = q.shape[:2]
    count = branch.pattern.to_dense(q.shape[2], k.shape[2], heads, batch=batch, q_offset=branch.q_offset)
    count = count.to(q.device, torch.float64)
    keys = per_query_head(k.double(), heads)
    scores = scale * (q.double() @ keys.mT)
    # scores beyond the range of their type become inf or NaN; see overflow.py
    most = torch.finfo(acc_dtype(q.dtype)).max
    finite = q.isfinite().all(-1)[..., None] & keys.isfinite().all(-1)[..., None, :]
    scores = scores.masked_fill(scores > most, torch.inf).masked_fill((scores < -most) & finite, torch.nan)
    at, states, kept = None, [], torch.ones((), dtype=torch.float64, device=q.device)
    if terms is not None:
        # tables are read in the dtype of sums
        acc = acc_dtype(q.dtype)
        exact = tuple(term.over(*(table.to(acc) for table in term.tables)) for term in terms.terms)
        terms = terms._replace(terms=exact)
        sides = (*q.shape[:3], k.shape[2])
        index = [torch.arange(n, device=q.device).view(-1, *[1] * (3 - i)) for i, n in enumerate(sides)]
        at = terms.pairs(*index)
        states = terms.apply(scores, at, acc)
        scores = states[-1]
        states = [state.masked_fill(count == 0, 0.0) for state in states]
        if terms.dropout is not None:
            kept = terms.dropout.kept(at).double() * terms.dropout.factor
    scores = torch.where(count > 0, scores + count.log(), -torch.inf)
    # not exp(scores - lse): beside a score of 1e17, the logarithm of the sum is lost to rounding
    weights = torch.where(torch.isneginf(scores), 0.0, torch.softmax(scores, -1))
    return _Dense(scores, count, keys, at, states, weights, kept)


def forward(operands: Operands, branch: Branch, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Compute (out, lse) by the formula of the definition."""
    operands = _without_pages(operands.widened())
    dense = _dense(operands, branch)
    lse = torch.logsumexp(dense.scores, -1)
    values = per_query_head(operands.v.double(), operands.q.shape[1])
    out = attended_product(dense.weights * dense.kept, _attended(dense), values)
    # a row with scores of -inf only attends nothing
    out = out.masked_fill(torch.isneginf(lse)[..., None], 0.0)
    return out.to(dtype), lse.to(acc_dtype(operands.q.dtype))


def _without_pages(operands: Operands) -> Operands:
    """Gather paged keys and values into contiguous tensors."""
    pages = operands.pages
    if pages is None:
        return operands
    sides = len(pages.table), operands.k.shape[1]
    k, v = (
        torch.stack([pages.gathered(x, b, h) for b in range(sides[0]) for h in range(sides[1])]).unflatten(0, sides)
        for x in (operands.k, operands.v)
    )
    return operands._replace(k=k, v=v, pages=None)


def backward(
    upstream: Upstream, operands: Operands, branch: Branch, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute gradients by the formula, with weights recomputed in float64."""
    q, k, v, scale, terms, *_ = operands
    dense = _dense(operands, branch)
    heads = q.shape[1]
    # a row that attends nothing has zero gradients, whatever it contains
    dead = torch.isneginf(dense.scores).all(-1, keepdim=True)
    dout, queries = (x.double().masked_fill(dead, 0.0) for x in (upstream.dout, q))
    # A row that attends a key which is not finite has gradients of NaN already, or of 0 at a score of -inf. The key
    # must not make those of other rows NaN.
    keys = dense.keys.nan_to_num(0.0, 0.0, 0.0)
    of_weights = (dout @ per_query_head(v.double(), heads).mT) * dense.kept
    score_grads = dense.weights * (of_weights - upstream.delta.double()[..., None])
    score_grads = score_grads.masked_fill((dense.times == 0) | dead, 0.0)
    if terms is not None:
        assert dense.at is not None
        score_grads = terms.gradient(dense.states, score_grads, dense.at)
    dq = scale * (score_grads @ keys)
    attended = _attended(dense).mT
    dk = scale * attended_product(score_grads.mT, attended, queries)
    dv = attended_product((dense.weights * dense.kept).mT, attended, dout)
    dk, dv = (x.unflatten(1, (k.shape[1], -1)).sum(2).to(dtype) for x in (dk, dv))
    return dq.to(dtype), dk, dv


def _attended(dense: _Dense) -> Tensor:
    return (dense.times > 0).to(dense.weights.dtype)


def unsupported_reason(call: Call, branch: Branch) -> str | None:
    """Return None: the reference runs every call that fits into memory."""
    return None


def scratch(call: Call, branch: Branch) -> int:
    """Count N x N multiplicities, scores, weights and their gradients in float64."""
    return 4 * 8 * call.batch * call.heads * call.nq * call.nk


BACKEND = Backend(
    "reference",
    forward,
    backward,
    unsupported_reason,
    scratch,
    branched=False,
    planned=False,
    terms=by_formula,
    dropout=True,
    paged=True,
    kv_dtypes=tuple(STORED),
)
