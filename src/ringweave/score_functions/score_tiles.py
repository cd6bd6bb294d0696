"""Attention with any score_mod, over computed tiles only.

Scores of a few tiles at a time are computed, given to the score_mod, and masked: see ``backends/tile_attention.py``.
Masked pairs get the score 0 before the score_mod, and their results and gradients are selected afterwards, so a NaN
there reaches nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..backends.backend import Upstream, delta_in_chunks
from ..backends.chosen_keys import why_no_lists
from ..backends.list_tiles import ListTiles
from ..backends.overflow import balanced
from ..backends.plan_tiles import PlanTiles
from ..backends.tile_attention import Scorer, Scores, backward, forward
from ..backends.tile_batches import AnyBatch, Tiles, budget
from ..call import Operands
from ..errors import PatternError, UnsupportedError
from ..patterns import Pattern
from ..patterns.fitting import fitting
from ..patterns.shifted import first_positions
from ..plan import BlockPlan, Branch, plan_cache
from ..plan.tile_size import tile_size_of
from ..terms.dropout import Dropout
from ..terms.term import Pairs, ScoreMod
from ..torch_compat import before_compiling, forward_mode, transforming, without_values
from ..torch_ops import Differentiable, refuse_twice
from ..trace.evaluate import Formula
from ..trace.graph import Graph, Node
from ..trace.vmapped import Vmapped
from ..types import acc_dtype

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


def _plan(
    query: Tensor, key: Tensor, pattern: Pattern, function: ScoreFunction, q_offset: int
) -> BlockPlan | Branch | None:
    """Return the plan of the pattern, the branch of lists of keys, or None for a call without pairs."""
    (batch, heads, nq, _), (_, kv_heads, nk, _) = query.shape, key.shape
    if 0 in (batch, heads, nq, nk):
        return None
    pattern = fitting(pattern._for_call(), nq, nk, heads, batch, q_offset, kv_heads)[0]
    if not pattern.combinable:
        raise PatternError("pattern", repr(pattern), "a relation", "Call longnet_attention for a mixture.")
    size = {"heads": heads, "batch": batch, "q_offset": q_offset}
    whole = Branch.whole(pattern, nq, nk, **size)
    if why_no_lists(whole.lists) is None:
        return whole
    q_tile, kv_tile = tile_size_of(None, pattern, nq, nk)
    while q_tile > _LEAST and q_tile * kv_tile * function.nbytes > 2 * budget(query.device):
        q_tile //= 2
    tile = max(q_tile - q_tile % _LEAST, _LEAST), kv_tile
    return plan_cache.get(pattern, nq, nk, **size, tile=tile, device=query.device)


class _Function(Scorer):
    """Scores of a function, in the units and at the positions of a call.

    Args:
        function: The evaluation.
        first: First positions of each batch element, (B, 2); None if they are 0.
        dropout: Dropout of the weights, or None.
    """

    chooses = threads = True

    def __init__(self, function: Pass, first: Tensor | None, dropout: Dropout | None):
        super().__init__()
        self.function, self.first, self.dropout = function, first, dropout

    def scores(self, tiles: Tiles[AnyBatch], batch: AnyBatch, products: Tensor, backward: bool) -> Scores:
        """Return the function of the scaled products, 0 where masked."""
        b, h, q, k = tiles.indices(batch)
        # tiles reach beyond the last tokens, where a captured tensor has no entries
        row, column = q.clamp(max=tiles.nq - 1), k.clamp(max=tiles.nk - 1)
        q, k = (row, column) if self.first is None else (row + self.first[b, 0], column + self.first[b, 1])
        kept = None
        if self.dropout is not None:
            kept = self.dropout.kept(Pairs(b, h, row, column, q, k)).to(tiles.acc).mul_(self.dropout.factor)
        products, at = tiles.masked(products, batch, 0.0), {"b": b, "h": h, "q": q, "k": k}
        if not backward:
            return Scores(self.function(products, at), kept)
        values, differentiated = self.function.differentiable(products, at)
        return Scores(values, kept, _Slopes(self.function, differentiated, (products, at)))

    def attended(self, tiles: Tiles[AnyBatch], batch: AnyBatch, x: Tensor, nothing: float) -> Tensor:
        """Return whether each pair is attended: a function masks pairs too."""
        return x != nothing


class _Slopes:
    """The derivative of a function at the pairs of a batch.

    Args:
        function: The evaluation.
        of: The function's result, which is differentiated once.
        given: Products and indices of the pairs.
    """

    def __init__(self, function: Pass, of: Differentiated, given: tuple[Tensor, dict[str, Tensor]]):
        self.function, self.of = function, of
        self._given: tuple[Tensor, dict[str, Tensor]] | None = given

    def __call__(self, grad: Tensor, attended: Tensor | None) -> Tensor | None:
        """Return the gradient of the products; None if the function does not use them."""
        assert self._given is not None
        assert attended is not None
        # the products are not kept while the gradients wait for those of other tiles
        (products, at), self._given = self._given, None
        found = self.of.backward(grad)
        if not self.of.finite():
            # a function may be infinite or NaN at masked pairs, and so may be 0 times its derivative
            at = {name: x.expand(attended.shape)[attended] for name, x in at.items()}
            self.of = self.function.differentiable(products[attended], at)[1]
            found = self.of.backward(grad[attended])
            if found is not None:
                found = torch.zeros_like(grad).masked_scatter_(attended, found)
        # the gradient may be expanded
        return None if found is None else found.contiguous().masked_fill_(~attended, 0.0)

    def add(self) -> None:
        """Add the gradients of captured tensors to their sums; the order of batches is that of the sums."""
        self.of.add()


@dataclass(eq=False)
class _Work:
    """Everything about a call except its tensors."""

    function: ScoreFunction
    plan: BlockPlan | Branch | None
    scale: float
    #: First positions of each batch element, (B, 2); None if they are 0.
    first: Tensor | None
    dropout: Dropout | None

    def tiles(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tiles[Any]:
        """Cut the tensors into tiles; a row that nearly fits the budget of a batch is not cut into pieces."""
        assert self.plan is not None
        pair = self.function.nbytes + 3 * acc_dtype(q.dtype).itemsize
        if isinstance(self.plan, Branch):
            return ListTiles(Operands(q, k, v, scale), self.plan, pair)
        most = max(1, budget(q.device) // (self.plan.q_tile * self.plan.kv_tile * pair))
        longest = int(self.plan.row_ptr.diff(dim=1).max())
        return PlanTiles(Operands(q, k, v, scale), self.plan, max(most, longest) if longest <= _LONG * most else most)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Attended, Tensor | None]:
        """Compute attention, and the output in the dtype of sums if rows are computed in pieces."""
        acc, result = acc_dtype(q.dtype), _in_order_of(q, v.shape[3])
        if self.plan is None:
            empty = torch.full(q.shape[:3], -torch.inf, dtype=acc, device=q.device)
            return Attended(result.zero_(), empty, empty.clone()), None
        with torch.autocast(q.device.type, enabled=False):
            tiles = self.tiles(q, k, v, self.scale)
            out, lse, largest = forward(tiles, _Function(self.function.begin(), self.first, self.dropout), acc)
        return Attended(result.copy_(out), lse, largest), out if tiles.pieced else None

    def backward(self, inputs: Sequence[Tensor], returned: _Returned, learns: list[bool]) -> tuple[Tensor, ...]:
        """Compute (dq, dk, dv, gradients of captured tensors that learn)."""
        q, k, v, *captured = inputs
        dout, dlse, lse, out = returned
        with torch.autocast(q.device.type, enabled=False):
            function = self.function.begin(captured, learns)
        if self.plan is None:
            return *map(torch.zeros_like, (q, k, v)), *function.gradients()
        if out is not None:
            delta = delta_in_chunks(dout, out, lse, dlse)
        else:
            delta = torch.zeros_like(lse) if dlse is None else -dlse.masked_fill(torch.isneginf(lse), 0.0)
        q, k, scale, of_q, of_k = balanced(q, k, self.scale)
        with torch.autocast(q.device.type, enabled=False):
            scorer = _Function(function, self.first, self.dropout)
            upstream = Upstream(dout, lse, delta)
            tiles = self.tiles(q, k, v, scale)
            dq, dk, dv = backward(tiles, scorer, upstream, q.dtype, whole_rows=out is None)
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
        ctx.save_for_backward(*inputs, found.lse, wide)
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
