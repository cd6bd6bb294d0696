"""The program of a call with a score function.

A function cannot cross an operator, so the program runs without one, and it holds its plan from forward to backward.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..backends import tile_attention
from ..backends.function_scorer import FunctionScorer
from ..backends.list_tiles import ListTiles
from ..backends.plan_tiles import PlanTiles
from ..call import ByField, Call, Operands, term_operands
from ..errors import PatternError, UnsupportedError
from ..program import Program, Returned, Step, with_plan
from ..terms.function import FUNCTION, ScoreFunction
from ..terms.term import ScoreMod
from ..torch_compat import before_compiling, forward_mode, transforming, without_values
from ..torch_ops import run
from ..trace.evaluate import Formula
from ..trace.graph import Graph, Node
from ..trace.vmapped import Vmapped
from ..types import acc_dtype


def function_of(score_mod: ScoreMod, graph: Graph | None, dtype: torch.dtype, device: torch.device) -> ScoreFunction:
    """Return a score_mod as the formula of its graph; as a function if it has no graph, or no number for each pair.

    Args:
        score_mod: The function; a score of -inf masks a pair.
        graph: Its graph, which agrees with it; None without a graph.
        dtype: Dtype of the queries.
        device: Device of the queries.
    Raises:
        ShapeError: The function does not return a 0-dim floating tensor.
        UnsupportedError: The function has effects, or returns different results for the same arguments.
    """
    with torch.autocast(device.type, enabled=False):
        if graph is not None and _is_number(graph):
            return Formula(graph)
        return Vmapped(before_compiling(score_mod), acc_dtype(dtype), device)


def _is_number(graph: Graph) -> bool:
    x = graph.typed().result
    return type(x) is Node and not x.shape and x.dtype.is_floating_point


def with_function(call: Call, function: ScoreFunction) -> Call:
    """Return a call with a score function in place of its terms.

    Raises:
        PatternError: The pattern is a mixture.
    """
    if not call.pattern.combinable:
        raise PatternError("pattern", repr(call.pattern), "a relation", "Call longnet_attention for a mixture.")
    learned = sum(x.numel() for x in function.captured if call.needs_grad and x.requires_grad)
    features = call.features & {"dropout"} | {FUNCTION}
    return replace(call, terms="", features=features, learned=learned, pair_bytes=function.nbytes)


def scored_call(
    call: Call, score_mod: ScoreMod, graph: Graph | None, q: Tensor, k: Tensor
) -> tuple[Call, ScoreFunction]:
    """Return a call on these tensors with a function in place of its terms, and the function.

    Raises:
        ShapeError: As in :func:`function_of`.
        UnsupportedError: As in :func:`function_of`; or a transform, forward-mode differentiation or a trace is active.
        PatternError: The pattern is a mixture.
    """
    _check_values(q, k)
    function = function_of(score_mod, graph, q.dtype, q.device)
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in function.captured)
    return with_function(replace(call, needs_grad=call.needs_grad or learns), function), function


class ScoredProgram(Program):
    """A call with a score function and the step that computes it.

    Args:
        call: A call with a function.
        function: The function.
        seed: The seed of the dropout, or none.
    """

    direct = True

    def __init__(self, call: Call, function: ScoreFunction, seed: Sequence[Tensor] = ()):
        super().__init__(call, constant=True)
        self.function, self.seed = function, seed

    def for_call(self, call: Call) -> ScoredProgram:
        """Return the program of a piece of the call."""
        return ScoredProgram(call, self.function, self.seed)

    @staticmethod
    def of(call: Call, score_mod: ScoreMod, graph: Graph | None, q: Tensor, k: Tensor) -> ScoredProgram:
        """Return the program of a :func:`scored_call` without dropout."""
        return ScoredProgram(*scored_call(call, score_mod, graph, q, k))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Compute (out, lse), differentiable in q, k, v and each tensor that the function captures."""
        return run(self, q, k, v, self.function.captured)

    @functools.cached_property
    def steps(self) -> tuple[Step, ...]:
        """The step, with its plan; none for a call without pairs."""
        call = self.call
        if 0 in (call.batch, call.heads, call.nq, call.nk):
            return ()
        return tuple(with_plan(each) if each.backend.tiled else each for each in self._compile(call))

    @property
    def backward_steps(self) -> tuple[Step, ...]:
        """The same step, since a table of the pattern may have been written to meanwhile."""
        return self.steps

    def operands(
        self, q: Tensor, k: Tensor, v: Tensor, tensors: Sequence[Tensor], learns: Sequence[bool] | None = None
    ) -> Operands:
        """Build the operands; ``tensors`` are the captured ones."""
        call, others = self.call, ByField[Tensor]((), (), self.seed, (), ())
        with _without_autocast(call):
            function = self.function.begin(None if learns is None else tensors, learns)
        terms = term_operands(call, (call.nq, call.nk), q.device, others, function=function)
        return Operands(q, k, v, call.scale, terms)

    def forward(self, operands: Operands) -> tuple[Tensor, Tensor]:
        """Compute (out, lse)."""
        with _without_autocast(self.call):
            return super().forward(operands)

    def backward(
        self, operands: Operands, returned: Returned, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute (dq, dk, dv), and the sums of the gradients of captured tensors in the operands."""
        if not self.steps:
            return operands.map(torch.zeros_like)[:3]
        with _without_autocast(self.call):
            return super().backward(operands, returned, dtype)

    def largest(self, q: Tensor, k: Tensor) -> Tensor:
        """Return the largest score of each row, (B, Hq, Nq), without gradient; -inf where a row attends nothing."""
        acc = acc_dtype(q.dtype)
        if not self.steps:
            return torch.full(q.shape[:3], -torch.inf, dtype=acc, device=q.device)
        ((branch, backend),) = self.steps
        # the values do not matter
        operands = self.operands(q.detach(), k.detach(), k.detach()[..., :1], ())
        assert operands.terms is not None
        assert operands.terms.function is not None
        scorer = FunctionScorer(operands.terms, operands.terms.function, acc)
        with torch.no_grad(), _without_autocast(self.call):
            if backend.tiled:
                tiles = PlanTiles(operands, branch.plan(q.device), scorer.pair)
                return tile_attention.forward(tiles, scorer, acc).largest
            return tile_attention.forward(ListTiles(operands, branch, scorer.pair), scorer, acc).largest


def _without_autocast(call: Call) -> torch.autocast:
    """Disable the caller's autocast, which does not last until backward."""
    return torch.autocast(call.device, enabled=False)


def _check_values(*tensors: Tensor) -> None:
    """Raise UnsupportedError where a function cannot be evaluated: in a transform, a trace, and with fake tensors."""
    remedy = "Express it by terms, as in Softcap."
    if forward_mode() or transforming(*tensors):
        wanted = "reverse-mode derivatives of first order, by torch.autograd"
        raise UnsupportedError("score_mod", "a transform of torch.func", wanted, remedy)
    if without_values():
        wanted = "tensors with values: the function is evaluated in the call"
        raise UnsupportedError("score_mod", "a trace, or fake tensors", wanted, remedy)
