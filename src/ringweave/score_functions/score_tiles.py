"""Attention with any score_mod, over computed tiles only.

Scores of a few tiles at a time are computed, given to the score_mod, and masked. Backward computes them again. Masked
pairs get the score 0 before the score_mod, and their results and gradients are selected afterwards, so a NaN there
reaches nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..backends.attended import attended_product
from ..backends.backend import delta_in_chunks
from ..backends.chunk_threads import in_order
from ..backends.dense_batched import Batch, Layout
from ..backends.overflow import balanced, sides
from ..call import Operands
from ..errors import PatternError, UnsupportedError
from ..merge import merge_into
from ..patterns import Pattern
from ..patterns.fitting import fitting
from ..patterns.shifted import first_positions
from ..plan import BlockPlan, plan_cache
from ..plan.tile_size import tile_size_of
from ..terms.dropout import Dropout
from ..terms.term import Pairs, ScoreMod
from ..torch_compat import before_compiling, forward_mode, transforming, without_values
from ..torch_ops import Differentiable, refuse_twice
from ..trace.evaluate import Formula
from ..trace.graph import Graph, Node
from ..trace.vmapped import Vmapped
from ..types import acc_dtype

# Bytes of a chunk's scores and of the tensors that the score_mod computes from them: fits a CPU's cache, and a bounded
# part of a GPU's memory.
_BUDGET, _BUDGET_ELSEWHERE = 2**23, 2**28
# Times that a row may exceed the budget before it is computed in pieces.
_LONG = 4
# Sides of the smallest tile.
_LEAST = 16


class Differentiated(Protocol):
    """A score_mod's result on some pairs, which is differentiated once."""

    def backward(self, grad: Tensor) -> Tensor | None:
        """Return the gradient of the scores for that of the result; None if the function does not use them."""

    def finite(self) -> bool:
        """Whether all gradients of captured tensors are finite."""

    def add(self) -> None:
        """Add the gradients of captured tensors to their sums."""


class Pass(Protocol):
    """An evaluation of a score_mod on all pairs, some at a time."""

    def __call__(self, scores: Tensor, at: dict[str, Tensor]) -> Tensor:
        """Return the function of scores, without gradients, in memory that nothing else uses but the scores."""

    def differentiable(self, scores: Tensor, at: dict[str, Tensor]) -> tuple[Tensor, Differentiated]:
        """Return the function of scores, and an object that computes gradients."""

    def gradients(self) -> list[Tensor]:
        """Return the gradients of the captured tensors that learn, in their dtypes."""


class ScoreFunction(Protocol):
    """A score_mod, as a formula or as a function that is called for every tile.

    Attributes:
        captured: The tensors that it reads.
        nbytes: Bytes of the tensors that it computes for a pair.
    """

    captured: list[Tensor]
    nbytes: int

    def begin(self, tensors: Sequence[Tensor] | None = None, learns: Sequence[bool] | None = None) -> Pass:
        """Begin to evaluate it, with gradients of the captured tensors that learn."""


class Attended(NamedTuple):
    """The results of attention.

    Attributes:
        out: Output, (B, Hq, Nq, Dv), in the dtype and order of strides of the queries.
        lse: Log-sum-exp of each row's scores, (B, Hq, Nq), natural log; -inf where a row attends nothing.
        max_scores: Largest score of each row, (B, Hq, Nq), without gradient; -inf where a row attends nothing.
    """

    out: Tensor
    lse: Tensor
    max_scores: Tensor


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    score_mod: ScoreMod,
    *,
    scale: float,
    graph: Graph | None,
    q_offset: int = 0,
    dropout: Dropout | None = None,
) -> Attended:
    """Compute attention with a score_mod over the pairs that a pattern allows.

    The scores are ``score_mod(scale * <q, k>, b, h, q_idx, kv_idx)`` in float32 (float64 for float64 queries), where
    the function gets 0-dim tensors, and indices are positions. Differentiable in queries, keys, values and each tensor
    that the function captures.

    Args:
        query: Queries, (B, Hq, Nq, D).
        key: Keys, (B, Hkv, Nk, D); Hkv divides Hq.
        value: Values, (B, Hkv, Nk, Dv).
        pattern: A relation, which is applied after the function.
        score_mod: The function; a score of -inf masks a pair.
        scale: Factor of the scores.
        graph: The function's graph, which agrees with the function; None without a graph.
        q_offset: Position of the first query; the pattern has other first positions.
        dropout: Dropout of the weights, or None.
    Raises:
        PatternError: The pattern is made for other lengths, heads or batch, or is a LongNet.
        ShapeError: The function does not return a 0-dim floating tensor.
        UnsupportedError: The function has effects, or returns different results for the same arguments; or a transform
            of ``torch.func``, forward-mode differentiation or a trace is active.
    """
    if forward_mode() or transforming(query, key, value):
        wanted = "reverse-mode derivatives of first order, by torch.autograd"
        raise UnsupportedError("score_mod", "a transform of torch.func", wanted, "Express it by terms, as in Softcap.")
    if without_values():
        wanted = "tensors with values: the function is evaluated in the call"
        raise UnsupportedError("score_mod", "a trace, or fake tensors", wanted, "Express it by terms, as in Softcap.")
    # the caller's autocast does not last until backward, so the function computes without it
    with torch.autocast(query.device.type, enabled=False):
        function = _function(before_compiling(score_mod), graph, query)
    first = None
    if q_offset or pattern.tables:
        first = first_positions(pattern, q_offset, query.shape[0], query.device)
    work = _Work(function, _plan(query, key, pattern, function, q_offset), scale, first, dropout)
    inputs = query, key, value, *function.captured
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        return Attended(*_Attention.apply(work, *inputs))  # type: ignore[no-untyped-call]
    return work.forward(query.detach(), key.detach(), value.detach())[0]


def _function(score_mod: ScoreMod, graph: Graph | None, query: Tensor) -> ScoreFunction:
    """Return a score_mod as the formula of its graph; as a function if it has no graph, or no number for each pair."""
    if graph is not None and _is_number(graph):
        return Formula(graph)
    return Vmapped(score_mod, acc_dtype(query.dtype), query.device)


def _is_number(graph: Graph) -> bool:
    x = graph.typed().result
    return type(x) is Node and not x.shape and x.dtype.is_floating_point


def _plan(query: Tensor, key: Tensor, pattern: Pattern, function: ScoreFunction, q_offset: int) -> BlockPlan | None:
    """Return the plan of the pattern; None for a call without pairs."""
    (batch, heads, nq, _), (_, kv_heads, nk, _) = query.shape, key.shape
    if 0 in (batch, heads, nq, nk):
        return None
    pattern = fitting(pattern._for_call(), nq, nk, heads, batch, q_offset, kv_heads)[0]
    if not pattern.combinable:
        raise PatternError("pattern", repr(pattern), "a relation", "Call longnet_attention for a mixture.")
    q_tile, kv_tile = tile_size_of(None, pattern, nq, nk)
    while q_tile > _LEAST and q_tile * kv_tile * function.nbytes > 2 * _budget(query.device):
        q_tile //= 2
    tile = max(q_tile - q_tile % _LEAST, _LEAST), kv_tile
    size = {"heads": heads, "batch": batch, "q_offset": q_offset}
    return plan_cache.get(pattern, nq, nk, **size, tile=tile, device=query.device)


def _budget(device: torch.device) -> int:
    return _BUDGET if device.type == "cpu" else _BUDGET_ELSEWHERE


@dataclass(eq=False)
class _Chunk:
    """The scores of a batch of tiles, (R, q_tile, n * kv_tile), 0 where masked, and the indices of its pairs.

    Attributes:
        scores: The scores.
        at: Indices of the pairs.
        kept: Dropout's factor of each weight, or None.
    """

    scores: Tensor
    at: dict[str, Tensor]
    kept: Tensor | None


@dataclass(eq=False)
class _Work:
    """Everything about a call except its tensors."""

    function: ScoreFunction
    plan: BlockPlan | None
    scale: float
    #: First positions of each batch element, (B, 2); None if they are 0.
    first: Tensor | None
    dropout: Dropout | None

    def limit(self, q: Tensor) -> int:
        """Return the most key tiles of a batch: as many as fit the budget, or a long row that nearly fits."""
        assert self.plan is not None
        pair = self.function.nbytes + 3 * acc_dtype(q.dtype).itemsize
        most = max(1, _budget(q.device) // (self.plan.q_tile * self.plan.kv_tile * pair))
        longest = int(self.plan.row_ptr.diff(dim=1).max())
        return max(most, longest) if longest <= _LONG * most else most

    def pieced(self, q: Tensor) -> bool:
        """Whether a row may have more key tiles than a batch."""
        return self.plan is not None and int(self.plan.row_ptr.diff(dim=1).max()) > self.limit(q)

    def layout(self, q: Tensor, k: Tensor, v: Tensor) -> Layout:
        """Cut the tensors into tiles, and the tiles into batches that fit the budget."""
        assert self.plan is not None
        return Layout(Operands(q, k, v, self.scale), self.plan, self.limit(q))

    def chunk(self, layout: Layout, batch: Batch, queries: Tensor, keys: Tensor) -> _Chunk:
        """Compute the scores of a batch."""
        before, after = sides(self.scale)
        scores = layout.product(queries * before, keys.mT)
        if after != 1:
            scores.mul_(after)
        b, h, q, k = layout.indices(batch)
        # tiles reach beyond the last tokens, where a captured tensor has no entries
        row, column = q.clamp(max=layout.nq - 1), k.clamp(max=layout.nk - 1)
        q, k = (row, column) if self.first is None else (row + self.first[b, 0], column + self.first[b, 1])
        kept = None
        if self.dropout is not None:
            kept = self.dropout.kept(Pairs(b, h, row, column, q, k)).to(layout.acc).mul_(self.dropout.factor)
        return _Chunk(layout.masked(scores, batch, 0.0), {"b": b, "h": h, "q": q, "k": k}, kept)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Attended, Tensor]:
        """Compute attention, a batch of equally long rows at a time, and the output in the dtype of sums."""
        acc, shape = acc_dtype(q.dtype), q.shape[:3]
        result = _in_order_of(q, v.shape[3])
        if self.plan is None:
            empty = torch.full(shape, -torch.inf, dtype=acc, device=q.device)
            return Attended(result.zero_(), empty, empty.clone()), result
        with torch.autocast(q.device.type, enabled=False):
            layout, finite = self.layout(q, k, v), bool(v.isfinite().all())
            out = q.new_zeros(layout.q_tiles.shape[0], self.plan.q_tile, v.shape[3], dtype=acc)
            lse = q.new_full(out.shape[:2], -torch.inf, dtype=acc)
            largest, function = lse.clone(), self.function.begin()
            parts = in_order(lambda batch: self._part(function, layout, batch, finite), layout.batches(), q.device)
            for batch, (part, part_lse, top) in parts:
                whole, whole_lse = out[batch.line], lse[batch.line]
                merge_into(whole, whole_lse, part, part_lse)
                out[batch.line], lse[batch.line] = whole, whole_lse
                largest[batch.line] = torch.maximum(largest[batch.line], top)
        out = out.view(*shape[:2], -1, v.shape[3])[:, :, : layout.nq]
        lse, largest = (x.view(*shape[:2], -1)[:, :, : layout.nq].contiguous() for x in (lse, largest))
        return Attended(result.copy_(out), lse, largest), out

    def _part(self, function: Pass, layout: Layout, batch: Batch, finite: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Compute (out, lse, largest score) of a batch."""
        chunk = self.chunk(layout, batch, layout.taken(batch), layout.gathered(layout.k_tiles, batch, False))
        scores = layout.masked(function(chunk.scores, chunk.at), batch, -torch.inf)
        values = layout.gathered(layout.v_tiles, batch, True)
        attended = None if finite else (scores != -torch.inf).to(scores.dtype)
        top = scores.amax(-1, keepdim=True)
        shift = top.masked_fill(torch.isneginf(top), 0.0)
        weights = scores.sub_(shift).exp_()
        total = weights.sum(-1, keepdim=True)
        if chunk.kept is not None:
            weights.mul_(chunk.kept)
        part = layout.product(weights, values) if attended is None else attended_product(weights, attended, values)
        part.div_(total.masked_fill(total == 0, 1.0))
        part_lse = torch.where(torch.isposinf(shift), shift, shift + total.log())
        return part, part_lse[..., 0], top[..., 0]

    def backward(self, inputs: Sequence[Tensor], returned: _Returned, learns: list[bool]) -> tuple[Tensor, ...]:
        """Compute (dq, dk, dv, gradients of captured tensors that learn)."""
        q, k, v, *captured = inputs
        with torch.autocast(q.device.type, enabled=False):
            function = self.function.begin(captured, learns)
        if self.plan is None:
            return *map(torch.zeros_like, (q, k, v)), *function.gradients()
        q, k, scale, of_q, of_k = balanced(q, k, self.scale)
        with torch.autocast(q.device.type, enabled=False):
            grads = _Gradients(replace(self, scale=scale), function, (q, k, v), returned)
            for batch, shares in in_order(grads.shares, grads.layout.batches(), q.device):
                grads.add(batch, shares)
                del shares
            dq, dk, dv = grads.joined()
        if scale != self.scale:
            dq, dk = dq * of_q, dk * of_k
        return dq, dk, dv, *function.gradients()


class _Returned(NamedTuple):
    """The arguments of backward besides the tensors of the call.

    Attributes:
        dout: Gradient of the output.
        dlse: Gradient of lse, or None.
        lse: Log-sum-exp of the rows.
        out: Output in the dtype of sums, where a row may be in several batches; else None.
    """

    dout: Tensor
    dlse: Tensor | None
    lse: Tensor
    out: Tensor | None


class _Shares(NamedTuple):
    """A batch's shares of the gradients; without dq and dk where the function does not use the scores."""

    of_captured: Differentiated
    dv: Tensor
    dq: Tensor | None = None
    dk: Tensor | None = None


class _Gradients:
    """Sums of the gradients of queries, keys and values by tile."""

    def __init__(self, work: _Work, function: Pass, inputs: Sequence[Tensor], returned: _Returned):
        self.inputs, self.function = inputs, function
        (q, k, v), (dout, dlse, lse, out) = inputs, returned
        # A row that attends nothing has zero gradients, whatever it contains. A row of NaN has NaN weights where it
        # attends; elsewhere, 0 times its query or dout would still be NaN and reach keys that it does not attend.
        dead = torch.isneginf(lse)
        self.broken = bool(lse.isnan().any())
        if self.broken or bool(dead.any()):
            q, dout = (x.masked_fill((dead | lse.isnan())[..., None], 0.0) for x in (q, dout))
            lse = lse.masked_fill(dead, torch.inf)
            dlse = None if dlse is None else dlse.masked_fill(dead, 0.0)
        self.work, self.layout = work, work.layout(q, k, v)
        layout = self.layout
        self.finite_keys, self.finite_dout = (bool(x.isfinite().all()) for x in (k, dout))
        # whether a slope may not be finite, also where the weight is 0
        others = [v] if dlse is None else [v, dlse]
        self.selects = self.broken or not (self.finite_dout and all(bool(x.isfinite().all()) for x in others))
        self.dout, self.whole_rows = layout.queries(dout), out is None
        # The mean of the gradients of a row's weights, less the gradient of lse, is subtracted from them. Where a batch
        # contains whole rows it is computed from the weights, which is more accurate than from the output.
        if out is not None:
            delta = delta_in_chunks(dout, out, returned.lse, dlse)
        else:
            delta = torch.zeros_like(lse) if dlse is None else -dlse
        # rows of padding have zero weights
        lse = torch.nn.functional.pad(lse, (0, -layout.nq % layout.plan.q_tile), value=torch.inf)
        self.lse, self.delta = (layout.queries(x[..., None].to(layout.acc)) for x in (lse, delta))
        self.dq, self.dk, self.dv = (
            torch.zeros(x.shape, dtype=layout.acc, device=x.device)
            for x in (layout.q_tiles, layout.k_tiles, layout.v_tiles)
        )

    def shares(self, batch: Batch) -> _Shares:
        """Compute a batch's shares of the gradients."""
        layout, work = self.layout, self.work
        queries, dout = layout.taken(batch), self.dout[batch.line].to(layout.acc)
        keys, values = (layout.gathered(x, batch, True) for x in (layout.k_tiles, layout.v_tiles))
        chunk = work.chunk(layout, batch, queries, keys)
        scores, differentiated = self.function.differentiable(chunk.scores, chunk.at)
        # memory that is reused, where the allocator would return it to the system after each batch
        space = None if layout.elsewhere else layout.space.take(scores.shape, scores.dtype)
        weights = torch.sub(scores, self.lse[batch.line], out=space)
        layout.masked(weights.exp_(), batch, 0.0)
        if self.whole_rows:
            # lse is rounded as a large number is, and would change all weights of a row by one factor
            total = weights.sum(-1, keepdim=True)
            weights.div_(total.masked_fill_(~(total > 0), 1.0))
        unattended = weights == 0
        dropped = weights if chunk.kept is None else weights * chunk.kept
        if self.finite_dout:
            dv = layout.product(dropped.mT, dout)
        else:
            dv = attended_product(dropped.mT, (~unattended).to(weights.dtype).mT, dout)
        slopes, delta = layout.product(dout, values.mT), self.delta[batch.line]
        if chunk.kept is not None:
            slopes.mul_(chunk.kept)
        if self.selects:
            slopes.masked_fill_(unattended, 0.0)
        if self.whole_rows:
            delta = delta + (slopes * weights).sum(-1, keepdim=True)
        slopes.sub_(delta).mul_(weights)
        if self.selects:
            slopes.masked_fill_(unattended, 0.0)
        score_grads = differentiated.backward(slopes)
        if not differentiated.finite():
            # a function may be infinite or NaN at masked pairs, and so may be 0 times its derivative
            differentiated, score_grads = self._at_attended(chunk, ~unattended, slopes)
        if score_grads is None:
            return _Shares(differentiated, dv)
        # the gradient may be expanded
        score_grads = score_grads.contiguous().masked_fill_(unattended, 0.0)
        if not self.finite_keys:
            # A row that attends an infinite or NaN key has gradients of NaN, or of 0 at a score of -inf, already.
            # The key must not make the gradients of other rows NaN.
            keys = keys.nan_to_num(0.0, 0.0, 0.0)
        dq, dk = layout.product(score_grads, keys), layout.product(score_grads.mT, queries)
        return _Shares(differentiated, dv, dq, dk)

    def _at_attended(self, chunk: _Chunk, attended: Tensor, slopes: Tensor) -> tuple[Differentiated, Tensor | None]:
        """Compute the gradients of a chunk from evaluating the function at attended pairs only."""
        at = {name: x.expand(attended.shape)[attended] for name, x in chunk.at.items()}
        _, differentiated = self.function.differentiable(chunk.scores[attended], at)
        score_grads = differentiated.backward(slopes[attended])
        if score_grads is not None:
            score_grads = torch.zeros_like(slopes).masked_scatter_(attended, score_grads)
        return differentiated, score_grads

    def add(self, batch: Batch, shares: _Shares) -> None:
        """Add a batch's shares to the gradients; the order of batches is that of the sums."""
        where = batch.key.reshape(-1)
        shares.of_captured.add()
        self.dv.index_add_(0, where, shares.dv.view(-1, *self.dv.shape[1:]))
        if shares.dq is not None and shares.dk is not None:
            self.dq[batch.line] += shares.dq
            self.dk.index_add_(0, where, shares.dk.view(-1, *self.dk.shape[1:]))

    def joined(self) -> Iterator[Tensor]:
        """Yield the gradients of queries, keys and values in their shapes and dtypes."""
        for x, tiles, factor in zip(
            self.inputs, (self.dq, self.dk, self.dv), (self.work.scale,) * 2 + (1.0,), strict=True
        ):
            whole = tiles.mul_(factor).view(*x.shape[:2], -1, x.shape[3])
            yield whole[:, :, : x.shape[2]].to(x.dtype).contiguous()


def _in_order_of(q: Tensor, channels: int) -> Tensor:
    """Return an empty output with the order of strides of the queries, and adjacent channels."""
    order = [*sorted(range(3), key=q.stride, reverse=True), 3]
    shape = *q.shape[:3], channels
    inverse = [order.index(dim) for dim in range(4)]
    return torch.empty([shape[dim] for dim in order], dtype=q.dtype, device=q.device).permute(inverse)


class _Attention(torch.autograd.Function):
    """The differentiable call."""

    @staticmethod
    def forward(ctx: Any, work: _Work, *inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found, wide = work.forward(*inputs[:3])
        ctx.work = work
        ctx.save_for_backward(*inputs, found.lse, wide if work.pieced(inputs[0]) else None)
        ctx.mark_non_differentiable(found.max_scores)
        ctx.set_materialize_grads(False)
        return found.out, found.lse, found.max_scores

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        *inputs, lse, out = ctx.saved_tensors
        learns = [bool(needed) for needed in ctx.needs_input_grad[4:]]
        if dout is None:
            dout = inputs[0].new_zeros(*lse.shape, inputs[2].shape[3])
        found = _Backward.apply(ctx.work, learns, dout, dlse, lse, out, *inputs)  # type: ignore[no-untyped-call]
        grads, of_captured = found[:3], iter(found[3:])
        needed = (x if need else None for x, need in zip(grads, ctx.needs_input_grad[1:4], strict=True))
        return None, *needed, *(next(of_captured) if learn else None for learn in learns)


class _Backward(Differentiable):
    """The gradients, which have no derivative."""

    backward = staticmethod(refuse_twice)

    @staticmethod
    def forward(
        work: _Work,
        learns: list[bool],
        dout: Tensor,
        dlse: Tensor | None,
        lse: Tensor,
        out: Tensor | None,
        *inputs: Tensor,
    ) -> tuple[Tensor, ...]:
        return work.backward(inputs, _Returned(dout, dlse, lse, out), learns)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Save nothing, since there is no second derivative."""
