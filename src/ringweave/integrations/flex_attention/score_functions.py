"""Evaluate a score_mod on many pairs at once, with gradients of the tensors that it captures.

FlexAttention defines a score_mod for one pair: it gets 0-dim tensors and returns one. ``torch.vmap`` evaluates any such
function on many pairs. A function of elementwise operations and of tables that are read at a pair's indices has the
same result on tensors that broadcast, which is faster. A probe at one pair records the operations, and decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...errors import RingweaveError, ShapeError, UnsupportedError, first_line, shown
from ...torch_compat import before_compiling
from ...types import acc_dtype
from .score_probe import ITEM, SUMS, Probe, Reading, called, entries_of, impure, leaves_of, mapped, places_of

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class Pairs(NamedTuple):
    """Indices of pairs as a score_mod takes them, shaped to broadcast to the scores.

    Scores are (R, queries, keys), the first two (R, 1, 1), the third (R, queries, 1) and the last (R, 1, keys), or all
    are (P,).
    """

    b: Tensor
    h: Tensor
    q: Tensor
    k: Tensor


class ScoreFunction:
    """A score_mod that was probed.

    Args:
        fn: The score_mod.
        dtype: Dtype of the scores.
        device: Device of the scores.
    Attributes:
        reading: Record of its operations, and its properties.
    """

    def __init__(self, fn: ScoreMod, dtype: torch.dtype, device: torch.device):
        self.fn: ScoreMod = before_compiling(fn)
        self.dtype, self.device = dtype, device
        #: Autocast of the caller, which does not last until backward.
        self.autocast = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
        before, (self.reading, result) = self._probe(), self._probe()
        if not _same(before, (self.reading, result)) and not _same(self._probe(), (self.reading, result)):
            # the first of three may differ, since a function may make its tables when it is first called
            raise impure("a function that returns another result for the same arguments")

    def check(self) -> None:
        """Raise UnsupportedError if the function reads other values than in the forward pass."""
        # a function that disables gradients restores the caller's mode, which is part of the record
        with torch.enable_grad():
            now = self._probe()[0]
        if not self.reading.same(now):
            raise impure("a function that reads other values in backward than in forward")

    def _probe(self) -> tuple[Reading, Tensor]:
        """Evaluate the function at the first pair."""
        found: list[Reading] = []

        def recorded(*arguments: Tensor) -> Tensor:
            with (probe := Probe(arguments)):
                result = self.fn(*arguments)
            found.append(probe.reading(_checked(result)))
            return result

        # with gradients if the caller enables them, since the function may make tables and keep them
        try:
            result = self.at_first_pair(recorded)
        except RuntimeError as error:
            if isinstance(error, RingweaveError) or not any(word in str(error) for word in ("vmap", "Batching rule")):
                raise
            raise _unmapped(error) from error
        return found[0], result.detach()

    def at_first_pair(self, fn: ScoreMod) -> Tensor:
        """Map a function over the first pair only."""
        zero = torch.zeros(1, dtype=torch.int64, device=self.device)
        score = torch.full((1, 1, 1), 0.5, dtype=self.dtype, device=self.device)
        return self.over_grid(fn, score, Pairs(zero, zero.clone(), zero[:, None], zero[:, None]))

    def evaluated(self, fn: ScoreMod, scores: Tensor, at: Pairs) -> Tensor:
        """Evaluate a function on pairs."""
        if self.reading.broadcasts:
            with self._cast():
                result = fn(scores, *at)
        elif scores.ndim == 1:
            with self._cast():
                result = torch.vmap(fn)(scores, *at)
        else:
            result = self.over_grid(fn, scores, Pairs(at.b[:, 0, 0], at.h[:, 0, 0], at.q[:, :, 0], at.k[:, 0]))
        return result.to(scores.dtype).expand(scores.shape)

    def over_grid(self, fn: ScoreMod, scores: Tensor, at: Pairs) -> Tensor:
        """Map a function over scores (R, queries, keys) with indices (R,), (R,), (R, queries) and (R, keys)."""
        over_keys = torch.vmap(fn, (0, None, None, None, 0))
        over_queries = torch.vmap(over_keys, (0, None, None, 0, None))
        with self._cast():
            result: Tensor = torch.vmap(over_queries)(scores, *at)
        return result

    def _cast(self) -> torch.autocast:
        enabled, dtype = self.autocast
        return torch.autocast(self.device.type, dtype=dtype, enabled=enabled, cache_enabled=False)


def _same(one: tuple[Reading, Tensor], other: tuple[Reading, Tensor]) -> bool:
    """Whether two probes saw equal operations and had equal results."""
    return one[0].same(other[0]) and torch.equal(one[1].nan_to_num(), other[1].nan_to_num())


def _checked(result: object) -> Tensor:
    if not isinstance(result, Tensor) or result.ndim != 0 or not result.is_floating_point():
        got = f"a function that returns {shown(result)}"
        raise ShapeError("score_mod", got, "one that returns a 0-dim floating tensor", "Return the changed score.")
    return result


def _unmapped(error: RuntimeError) -> UnsupportedError:
    """Return the error of a function that torch.vmap cannot map."""
    said = first_line(error)
    if "random" in said:
        return impure("a function that draws random numbers")
    if "data-dependent" in said or ".item()" in said:
        got = "a function that needs the value of a score or an index as a number, as `if` and int() do"
        return UnsupportedError("score_mod", got, "operations of tensors", "Use torch.where in place of `if`.")
    got = f"a function that torch.vmap cannot map: {said}"
    return UnsupportedError("score_mod", got, "operations that torch.vmap maps", "Compute it with other operations.")


class _Table:
    """A captured tensor, or one computed from captured tensors for all pairs, and the sum of its gradient.

    Attributes:
        source: The tensor.
        leaf: The tensor apart from its graph.
        total: Sum of the gradient, in float32 or wider.
        widens: Whether entries of 16 bits are converted to float32, in which their many gradients are not rounded.
    """

    def __init__(self, source: Tensor, widens: bool):
        self.source, self.widens = source, widens
        self.leaf = source.detach().requires_grad_()
        self.total = torch.zeros(source.shape, dtype=acc_dtype(source.dtype), device=source.device)

    def add(self, indices: Sequence[Tensor], grad: Tensor) -> None:
        """Add the gradient of entries at indices of the first dimensions."""
        flat, place = 1, None
        for size, index in zip(self.total.shape, indices, strict=False):
            index = torch.where(index < 0, index + size, index)
            place = index if place is None else place * size + index
            flat *= size
        assert place is not None
        by_entry = self.total.view(flat, *self.total.shape[len(indices) :])
        by_entry.index_add_(0, place.reshape(-1), grad.reshape(-1, *by_entry.shape[1:]).to(self.total.dtype))


class _Entries:
    """The reads of a table's entries in one evaluation. The gradient of an index would be as large as the table."""

    def __init__(self, table: _Table, reads: list[tuple[_Table, tuple[Tensor, ...], Tensor]]):
        self.table, self.reads = table, reads


class _Read(torch.autograd.Function):
    """Entries of a table; their gradient is added to the reads. ``token`` makes autograd call backward."""

    @staticmethod
    def forward(token: Tensor, entries: _Entries, *indices: Tensor) -> Tensor:
        found: Tensor = torch.ops.aten.index(entries.table.leaf.detach(), indices)
        return found.to(acc_dtype(found.dtype)) if entries.table.widens else found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.entries, *indices = inputs
        ctx.save_for_backward(*indices)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        ctx.entries.reads.append((ctx.entries.table, ctx.saved_tensors, grad))
        return (None,) * (2 + len(ctx.saved_tensors))

    @staticmethod
    def vmap(info: Any, in_dims: Any, token: Tensor, entries: _Entries, *indices: Tensor) -> tuple[Tensor, int]:
        dims = in_dims[2:]
        rank = max(index.ndim - (dim is not None) for index, dim in zip(indices, dims, strict=True))
        moved = []
        for index, dim in zip(indices, dims, strict=True):
            if dim is not None:
                index = index.movedim(dim, 0)
                index = index.reshape(index.shape[0], *(1,) * (rank + 1 - index.ndim), *index.shape[1:])
            moved.append(index)
        return _Read.apply(token, entries, *moved), 0  # type: ignore[no-untyped-call]


class Pass:
    """An evaluation of a score_mod on all pairs, some at a time; values that depend on no pair are computed once.

    Args:
        function: The score_mod.
        learns: Whether the gradient of each captured tensor is needed; None for a pass without gradients.
    """

    def __init__(self, function: ScoreFunction, learns: Sequence[bool] | None = None):
        self.function = function
        self.token = None
        self.learned: list[_Table] = []
        if learns is not None:
            self.token = torch.zeros((), dtype=function.dtype, device=function.device, requires_grad=True)
            for x, learn in zip(function.reading.captured, learns, strict=True):
                if learn:
                    self.learned.append(_Table(x, function.reading.broadcasts))
        #: Tables of captured tensors, and of tensors that were computed from them for all pairs, by id.
        self.tables = {id(table.source): table for table in self.learned}
        #: Results that are the same for all pairs, by the position of the operation.
        self.once: dict[int, Any] = {}
        if learns is not None:
            # inside vmap no tensor can become a leaf
            with torch.enable_grad():
                self._check_leaves(function.at_first_pair(_Evaluation(self).function))
            made = [x for result in self.once.values() for x in leaves_of(result) if isinstance(x, Tensor)]
            for x in made:
                if x.requires_grad and id(x) not in self.tables:
                    self.tables[id(x)] = _Table(x, function.reading.broadcasts)

    def __call__(self, scores: Tensor, at: Pairs) -> Tensor:
        """Return the function of scores, without gradients, in memory that nothing else uses but the scores."""
        with torch.no_grad():
            result = self.function.evaluated(_Evaluation(self).function, scores, at)
        # a result that is the same for several pairs is expanded, and a function may enable gradients
        return result.detach().contiguous()

    def differentiable(self, scores: Tensor, at: Pairs) -> tuple[Tensor, Differentiated]:
        """Return the function of scores, and an object that computes gradients."""
        with torch.enable_grad():
            leaf = scores.detach().requires_grad_()
            evaluation = _Evaluation(self)
            result = self.function.evaluated(evaluation.function, leaf, at)
        return result.detach(), Differentiated(self, result, leaf, evaluation.reads)

    def _check_leaves(self, result: Tensor) -> None:
        """Raise UnsupportedError if a result depends on a tensor with a gradient that the probe did not see."""
        leaves, seen = {id(table.leaf) for table in self.learned} | {id(self.token)}, set[object]()
        ahead = [result.grad_fn]
        while ahead:
            node = ahead.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if hasattr(node, "variable") and id(node.variable) not in leaves:
                raise impure("a function that captures a tensor with a gradient where no function mode sees it")
            ahead += [each for each, _ in node.next_functions]

    def gradients(self) -> list[Tensor]:
        """Return the gradients of the captured tensors that learn, in their dtypes."""
        learned = {id(table) for table in self.learned}
        further = [table for table in self.tables.values() if id(table) not in learned]
        if further:
            grads = torch.autograd.grad(
                [table.source for table in further],
                [table.leaf for table in self.learned],
                [table.total.to(table.source.dtype) for table in further],
                allow_unused=True,
            )
            for table, grad in zip(self.learned, grads, strict=True):
                if grad is not None:
                    table.total.add_(grad)
        return [table.total.to(table.source.dtype) for table in self.learned]


class _Evaluation(TorchFunctionMode):
    """An evaluation on some pairs, in which captured tensors are read from their tables."""

    def __init__(self, of: Pass):
        super().__init__()
        self.of, self.reading = of, of.function.reading
        self.reads: list[tuple[_Table, tuple[Tensor, ...], Tensor]] = []
        self.position = 0
        #: Rows of tensors, the tensors, and the indices, by id. An empty tensor stands for a row.
        self.rows: dict[int, tuple[Tensor, Tensor, list[Tensor]]] = {}
        #: Products of vectors, as rows, and the vectors: their sum is a product of matrices on many pairs.
        self.products: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        #: Tensors with gradients that were made inside, by id.
        self.made: set[int] = set()
        #: The first refusal, which the function may have caught.
        self.refusal: UnsupportedError | None = None

    def function(self, *arguments: Tensor) -> Tensor:
        """Evaluate the function."""
        if self.reading.writes:
            arguments = tuple(x.clone() for x in arguments)
        self.made.update(map(id, arguments))
        with self:
            result = self.of.function.fn(*arguments)
        result = self.own(result)
        if self.refusal:
            raise self.refusal
        return result

    def refuse(self, got: str) -> NoReturn:
        """Raise UnsupportedError, and note it."""
        self.refusal = self.refusal or impure(got)
        raise self.refusal

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        position, kwargs = self.position, kwargs or {}
        self.position += 1
        if position >= len(self.reading.once):
            self.refuse("a function with other operations at another pair")
        if self.reading.once[position]:
            if position not in self.of.once:
                self.of.once[position] = self.computed_once(func, args, kwargs)
            result = self.of.once[position]
        elif func is ITEM and (places := places_of(args[0], args[1], self.reading.broadcasts)) is not None:
            result = self.entries(position, args[0], *places)
        elif position in self.reading.deferred and not self.of.function.autocast[0]:
            a, b = map(self.own, args)
            result = a.new_empty(()).expand(a.shape)
            self.products[id(result)] = result, a, b
        elif func in SUMS and id(args[0]) in self.products:
            result = torch.dot(*self.products[id(args[0])][1:])
        else:
            result = called(func, mapped(args, self.own), mapped(kwargs, self.own))
        if self.of.token is not None:
            self.made.update(id(x) for x in leaves_of(result) if isinstance(x, Tensor) and x.requires_grad)
        return result

    def computed_once(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Compute a value that is the same for all pairs, from the leaves of captured tensors."""

        def leaf(x: Tensor) -> Tensor:
            table = self.of.tables.get(id(x))
            return x if table is None else table.leaf

        args, kwargs = mapped(args, leaf), mapped(kwargs, leaf)
        places = places_of(args[0], args[1]) if func is ITEM else None
        return called(func, args, kwargs) if places is None else entries_of(args[0], *places)

    def entries(self, position: int, x: Tensor, indices: list[Tensor | None], rest: tuple[Any, ...]) -> Tensor:
        """Return entries of a tensor at the indices of pairs."""
        if id(x) in self.rows:
            _, x, before = self.rows[id(x)]
            indices = [*before, *indices]
        if position in self.reading.deferred:
            row = x.new_empty(()).expand(x.shape[len(indices) :])
            self.rows[id(row)] = row, x, [index for index in indices if index is not None]
            return row
        table = self.of.tables.get(id(x))
        if table is None or any(index is None for index in indices):
            return entries_of(self.own(x), [None if index is None else self.own(index) for index in indices], rest)
        found: Tensor = _Read.apply(self.of.token, _Entries(table, self.reads), *indices)  # type: ignore[no-untyped-call]
        return found[rest] if rest else found

    def own(self, x: Tensor) -> Tensor:
        """Return the leaf of a tensor's table; a tensor without a table as it is."""
        if id(x) in self.rows or id(x) in self.products:
            # a tensor that stands for a row or a product has no values
            self.refuse("a function with other operations at another pair")
        table = self.of.tables.get(id(x))
        if table is not None:
            return table.leaf
        if self.of.token is not None and x.requires_grad and id(x) not in self.made:
            self.refuse("a function that captures another tensor with a gradient at another pair")
        return x


class Differentiated:
    """A score_mod's result on some pairs, with its graph.

    Args:
        of: The pass.
        result: The result.
        scores: The scores, a leaf.
        reads: Gradients of entries of tables, to which autograd adds.
    """

    def __init__(
        self, of: Pass, result: Tensor, scores: Tensor, reads: list[tuple[_Table, tuple[Tensor, ...], Tensor]]
    ):
        self.graph: tuple[Tensor, Tensor] | None = (result, scores)
        self.token, self.reads = of.token, reads
        self.tables, self.whole = list(of.tables.values()), list[Tensor | None]()

    def backward(self, grad: Tensor) -> Tensor | None:
        """Return the gradient of the scores for that of the result, once; None if the function does not use them."""
        assert self.graph is not None
        # results of all pairs are not kept while the gradients wait for those of other chunks
        (result, scores), self.graph = self.graph, None
        if not result.requires_grad:
            return None
        assert self.token is not None
        inputs = [scores, self.token, *(table.leaf for table in self.tables)]
        of_scores, _, *whole = torch.autograd.grad(result, inputs, grad, allow_unused=True)
        self.whole = list(whole)
        return of_scores

    def finite(self) -> bool:
        """Whether all gradients of captured tensors are finite."""
        grads = [grad for grad in self.whole if grad is not None] + [grad for _, _, grad in self.reads]
        return all(bool(grad.sum().isfinite()) for grad in grads)

    def add(self) -> None:
        """Add the gradients of captured tensors to their sums."""
        for table, indices, grad in self.reads:
            table.add(indices, grad)
        for table, whole in zip(self.tables, self.whole, strict=False):
            if whole is not None:
                table.total.add_(whole)
