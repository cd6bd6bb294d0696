"""Compute a graph on many pairs, with gradients of the scores and of the captured tensors.

Values have the dimensions of the pairs first, each of size 1 where a value does not depend on it, and then those of one
pair's value. Elementwise operations and look-ups broadcast; any other function is mapped over the pairs, one operation
at a time. Backward cuts the graph at look-ups: the gradient of the entries that some pairs read is added to one sum for
each table, so no gradient of a tile is as large as a table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .graph import SCORE, Graph, K, Node, Q, filled_in, nodes_in
from .operations import ELEMENTWISE, FRESH

Arguments = Mapping[str, Tensor]
_SUMS, _DOTS = frozenset([torch.sum, Tensor.sum]), frozenset([torch.dot, Tensor.dot])


def elementwise(node: Node) -> bool:
    """Whether an operation broadcasts: all operands are numbers for each pair, so no rule of promotion differs."""
    return node.name in ELEMENTWISE and not any(x.shape for x in nodes_in((node.args, node.kwargs)))


class Formula:
    """The operations that the result of a graph needs.

    Args:
        graph: The graph.
    Attributes:
        captured: Tensors that operations on pairs read: captured ones, and ones that the function made of these.
        nbytes: Bytes of the values of one pair.
    Raises:
        UntraceableError: An operation fails for one pair.
    """

    def __init__(self, graph: Graph):
        self.graph, self.result = graph.typed(), graph.result
        used: dict[Node, None] = {}
        ahead = nodes_in(self.result)
        while ahead:
            node = ahead.pop()
            if node not in used:
                used[node] = None
                if node.deps:
                    ahead += nodes_in(_product_of_rows(node) or (node.args, node.kwargs))
        found = sorted(used, key=lambda node: node.number)
        self.nodes = [node for node in found if node.deps and node.name != "argument"]
        self.constants = [node for node in found if not node.deps]
        self.captured: list[Tensor] = [node.value for node in self.constants]
        # tensors of queries alone or of keys alone are small
        per_pair = [node for node in self.nodes if node.deps & SCORE or (node.deps & Q and node.deps & K)]
        self.nbytes = sum(node.dtype.itemsize * torch.Size(node.shape).numel() for node in per_pair)
        #: Values that no later operation needs, after each operation.
        self.spent: list[list[Node]] = [[] for _ in self.nodes]
        last: dict[Node, int] = {}
        for place, node in enumerate(self.nodes):
            for each in nodes_in(_product_of_rows(node) or (node.args, node.kwargs)):
                if each.deps:
                    last[each] = place
        kept = set(nodes_in(self.result))
        for node, place in last.items():
            if node not in kept:
                self.spent[place].append(node)

    def begin(self, tensors: Sequence[Tensor] | None = None, learns: Sequence[bool] | None = None) -> Pass:
        """Begin to compute the result on all pairs, some at a time.

        Args:
            tensors: The captured tensors, as autograd has saved them.
            learns: Whether each of them needs a gradient; None for a pass without gradients.
        """
        return Pass(self, self.captured if tensors is None else tensors, learns)

    def at(self, captured: Sequence[Tensor], at: Arguments) -> Tensor:
        """Compute the result at some pairs.

        Args:
            captured: The captured tensors.
            at: The arguments by name, with equal numbers of dimensions, which broadcast.
        """
        return _Evaluation(Pass(self, captured), at).out

    def captured_from(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Compute the captured tensors of other tensors than those of the trace, in their order, without gradients."""
        values: dict[Node, Any] = {}
        left = iter(tensors)
        with torch.no_grad():
            for node in self.graph.nodes:
                if node.deps:
                    continue
                if node.name == "tensor":
                    values[node] = next(left)
                elif node.name == "part":
                    of, place = node.args
                    values[node] = values[of][place]
                else:
                    values[node] = node.function(*filled_in(node.args, values), **filled_in(node.kwargs, values))
        return [values[node] for node in self.constants]


def evaluated(graph: Graph, at: Arguments) -> Tensor:
    """Compute a graph at some pairs; torch differentiates the result by the captured tensors if gradients are enabled.

    Args:
        graph: The graph.
        at: The arguments by name, with equal numbers of dimensions, which broadcast.
    """
    formula = Formula(graph)
    return formula.at(formula.captured, at)


def _product_of_rows(node: Node) -> tuple[Node, Node] | None:
    """Return two rows if a node is the sum of their products."""
    if node.name != "call" or node.kwargs:
        return None
    rows = node.args
    if node.function in _SUMS and len(rows) == 1 and type(rows[0]) is Node and rows[0].name == "mul":
        rows = rows[0].args
    elif node.function not in _DOTS:
        return None
    if not all(type(x) is Node and len(x.shape) == 1 for x in rows) or rows[0].kind != rows[1].kind:
        return None
    return (rows[0], rows[1]) if rows[0].dtype.is_floating_point else None


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums of gradients: float32, or the dtype itself if it is wider or complex."""
    return torch.promote_types(dtype, torch.float32)


class Table:
    """A tensor that learns, and the sum of its gradient.

    Args:
        source: The tensor.
    """

    def __init__(self, source: Tensor):
        self.source, self.leaf = source, source.detach()
        #: Sums of the gradients of look-ups, by the order of their dimensions; entries are adjacent in each.
        self._sums: dict[tuple[Any, ...], Tensor] = {}

    def add(self, grad: Tensor) -> None:
        """Add the gradient of the whole tensor."""
        self._sum(_View((), tuple(range(self.source.ndim)))).add_(grad)

    def add_entries(self, view: _View, indices: Sequence[Tensor], grad: Tensor) -> None:
        """Add the gradient of entries at indices of the first dimensions of a view."""
        total = self._sum(view)
        flat, place = 1, None
        for size, index in zip(total.shape, indices, strict=False):
            index = torch.where(index < 0, index + size, index)
            place = index if place is None else place * size + index
            flat *= size
        assert place is not None
        # in the order of the pairs, so that two runs have equal bits
        by_entry = total.view(flat, *total.shape[len(indices) :])
        by_entry.index_add_(0, place.reshape(-1), grad.reshape(-1, *by_entry.shape[1:]).to(total.dtype))

    def gradient(self) -> Tensor:
        """Return the gradient, in the dtype of the tensor."""
        whole = torch.zeros(self.source.shape, dtype=wide(self.source.dtype), device=self.source.device)
        for (slices, order), total in self._sums.items():
            _View(slices, order).of(whole).add_(total)
        return whole.to(self.source.dtype)

    def restart(self) -> None:
        """Discard the sum so far."""
        self._sums.clear()

    def _sum(self, view: _View) -> Tensor:
        key = view.slices, view.order
        if key not in self._sums:
            shape = view.of(self.leaf).shape
            self._sums[key] = torch.zeros(shape, dtype=wide(self.source.dtype), device=self.source.device)
        return self._sums[key]


class _View:
    """A view of a table: slices, and then the order of the dimensions."""

    def __init__(self, slices: tuple[Any, ...], order: tuple[int, ...]):
        self.slices, self.order = slices, order

    def of(self, x: Tensor) -> Tensor:
        return x[tuple(slice(*part) for part in self.slices)].permute(self.order)


class Pass:
    """An evaluation of a formula on all pairs, some at a time.

    Args:
        formula: The formula.
        tensors: Its captured tensors; by default those of the trace.
        learns: Whether each of them needs a gradient; None for a pass without gradients.
    """

    def __init__(self, formula: Formula, tensors: Sequence[Tensor] | None = None, learns: Sequence[bool] | None = None):
        self.formula = formula
        given = formula.captured if tensors is None else tensors
        self.values: dict[Node, Tensor] = dict(zip(formula.constants, given, strict=True))
        wanted = [False] * len(given) if learns is None else learns
        #: Tables of the captured tensors that learn.
        self.tables = {node: Table(x) for (node, x), learn in zip(self.values.items(), wanted, strict=True) if learn}

    @property
    def nbytes(self) -> int:
        """Bytes of the values of one pair."""
        return self.formula.nbytes

    def __call__(self, scores: Tensor, at: Arguments) -> Tensor:
        """Return the result for scores, without gradients, in memory that nothing else uses but the scores."""
        with torch.no_grad():
            out = _Evaluation(self, {"score": scores, **at}).out
        out = out.to(scores.dtype).expand(scores.shape)
        result = self.formula.result
        if type(result) is Node and (result.name in FRESH or result.args == ("score",)):
            # only a result that is the same for several pairs has to be copied
            return out.contiguous()
        return out.clone(memory_format=torch.contiguous_format)

    def differentiable(self, scores: Tensor, at: Arguments) -> tuple[Tensor, Differentiated]:
        """Return the result for scores, and an object that computes gradients."""
        with torch.enable_grad():
            leaf = scores.detach().requires_grad_()
            found = _Evaluation(self, {"score": leaf, **at}, cut=True)
            out = found.out.to(scores.dtype).expand(scores.shape)
        return out.detach(), Differentiated(out, leaf, found)

    def gradients(self) -> list[Tensor]:
        """Return the gradients of the captured tensors that learn, in their dtypes."""
        return [table.gradient() for table in self.tables.values()]

    def restart(self) -> None:
        """Discard the sums of gradients so far."""
        for table in self.tables.values():
            table.restart()


class _Read:
    """The entries of a table that some pairs read, as a leaf."""

    def __init__(self, table: Table, view: _View, indices: Sequence[Tensor], entries: Tensor):
        self.table, self.view, self.indices, self.entries = table, view, indices, entries


class _Evaluation:
    """An evaluation of some pairs.

    Args:
        of: The pass.
        at: The arguments, with equal numbers of dimensions, which broadcast.
        cut: Whether entries of tables that learn are leaves.
    Attributes:
        out: The result, which broadcasts to the pairs.
        reads: Look-ups in tables that learn.
        wholes: Tables that learn and are used without a look-up, as leaves.
    """

    def __init__(self, of: Pass, at: Arguments, cut: bool = False):
        self.of, self._at, self._cut = of, at, cut
        one = next(iter(at.values()))
        self._lead, self._device = one.ndim, one.device
        self.reads: list[_Read] = []
        self.wholes: dict[Node, Tensor] = {}
        self._values: dict[Node, Any] = {}
        formula = of.formula
        for node, spent in zip(formula.nodes, formula.spent, strict=True):
            self._values[node] = self._computed(node)
            for each in spent:
                # arguments have no entry
                self._values.pop(each, None)
        result = formula.result
        if type(result) is Node:
            self.out = self._value(result)
        else:
            self.out = torch.full((1,) * self._lead, result, device=self._device)
        self._values.clear()

    def _value(self, node: Node) -> Tensor:
        if node.name == "argument":
            return self._at[node.args[0]]
        return self._values[node] if node.deps else self._constant(node)

    def _constant(self, node: Node) -> Tensor:
        """Return a tensor that is the same for all pairs, with dimensions for the pairs."""
        value = self.of.values[node]
        if self._cut and node in self.of.tables:
            if node not in self.wholes:
                self.wholes[node] = value.detach().requires_grad_()
            value = self.wholes[node]
        return self._near(value).reshape((1,) * self._lead + tuple(value.shape))

    def _near(self, value: Tensor) -> Tensor:
        """Return a tensor on the device of the pairs."""
        return value if value.device == self._device else value.to(self._device)

    def _computed(self, node: Node) -> Any:
        if node.name == "index" and not node.args[0].deps:
            found = self._entries(*node.args)
            if found is not None:
                return found
        rows = _product_of_rows(node)
        if rows is not None:
            return _dot(self._value(rows[0]), self._value(rows[1]), self._lead)
        if not elementwise(node):
            return self._mapped(node)
        given = {each: self._value(each) for each in nodes_in((node.args, node.kwargs))}
        return node.function(*filled_in(node.args, given), **filled_in(node.kwargs, given))

    def _entries(self, of: Node, at: tuple[Any, ...]) -> Tensor | None:
        """Return the entries of a table at places of pairs; None for an index of another form."""
        if not all(type(part) in (Node, int, slice) for part in at):
            return None
        value = self._near(self.of.values[of])
        dims = [dim for dim, part in enumerate(at) if type(part) is not slice]
        slices = tuple((x.start, x.stop, x.step) if type(x) is slice else (None, None, None) for x in at)
        order = (*dims, *[dim for dim in range(value.ndim) if dim not in dims])
        view = _View(slices, order)
        indices = [
            self._value(at[dim]).long()
            if type(at[dim]) is Node
            else torch.full((1,) * self._lead, at[dim], device=value.device)
            for dim in dims
        ]
        table = self.of.tables.get(of) if self._cut else None
        entries: Tensor = torch.ops.aten.index(view.of(value if table is None else table.leaf), indices)
        if table is not None:
            self.reads.append(_Read(table, view, indices, entries.requires_grad_()))
        return entries

    def _mapped(self, node: Node) -> Any:
        """Map one operation over the pairs."""
        operands = list(dict.fromkeys(nodes_in((node.args, node.kwargs))))

        def one(*values: Tensor) -> Any:
            given = dict(zip(operands, values, strict=True))
            args, kwargs = filled_in(node.args, given), filled_in(node.kwargs, given)
            return looked_up(*args) if node.name == "index" else node.function(*args, **kwargs)

        return _over(one, self._lead, [self._value(x) for x in operands])


class Differentiated:
    """A result on some pairs with its graph of autograd, and then the gradients of the tables.

    Args:
        out: The result.
        scores: The scores, a leaf.
        of: The evaluation.
    """

    def __init__(self, out: Tensor, scores: Tensor, of: _Evaluation):
        self._graph: tuple[Tensor, Tensor, _Evaluation] | None = (out, scores, of)
        self._entries: list[tuple[Table, _View, Sequence[Tensor], Tensor]] = []
        self._wholes: list[tuple[Table, Tensor]] = []

    def backward(self, grad: Tensor) -> Tensor | None:
        """Return the gradient of the scores for that of the result, once; None if the result does not use them."""
        assert self._graph is not None
        # results of all pairs are not kept while the gradients wait for those of other tiles
        (out, scores, of), self._graph = self._graph, None
        if not out.requires_grad:
            return None
        inputs = [scores, *[read.entries for read in of.reads], *of.wholes.values()]
        of_scores, *found = torch.autograd.grad(out, inputs, grad, allow_unused=True)
        count = len(of.reads)
        self._entries = [
            (read.table, read.view, read.indices, each)
            for read, each in zip(of.reads, found[:count], strict=True)
            if each is not None
        ]
        tables = [of.of.tables[node] for node in of.wholes]
        self._wholes = [(table, each) for table, each in zip(tables, found[count:], strict=True) if each is not None]
        return of_scores

    def finite(self) -> bool:
        """Whether all gradients of captured tensors are finite."""
        grads = [read[-1] for read in self._entries] + [grad for _, grad in self._wholes]
        return all(bool(grad.sum().isfinite()) for grad in grads)

    def add(self) -> None:
        """Add the gradients of captured tensors to their sums."""
        for table, view, indices, grad in self._entries:
            table.add_entries(view, indices, grad)
        for table, grad in self._wholes:
            table.add(grad)


def _over(function: Callable[..., Tensor], lead: int, values: Sequence[Tensor]) -> Tensor:
    """Map a function over the first dimensions; one of size 1 in all values is not mapped."""
    dims = [dim for dim in range(lead) if any(x.shape[dim] != 1 for x in values)]
    sides = [[dim for dim in dims if x.shape[dim] != 1] for x in values]
    given = [
        x.reshape([x.shape[dim] for dim in own] + list(x.shape[lead:])) for x, own in zip(values, sides, strict=True)
    ]
    for dim in reversed(dims):
        function = torch.vmap(function, tuple(0 if dim in own else None for own in sides))
    result = function(*given)
    for dim in range(lead):
        if dim not in dims:
            result = result.unsqueeze(dim)
    return result


def looked_up(base: Tensor, at: Any) -> Tensor:
    """Index by 0-dim tensors, which ``Tensor.__getitem__`` would read as numbers, and by slices; for torch.vmap."""
    parts = at if isinstance(at, tuple) else (at,)
    used = sum(part is not None and part is not Ellipsis for part in parts)
    if used > base.ndim:
        raise IndexError(f"too many indices for tensor of dimension {base.ndim}")
    # together, since the first of them alone would read whole rows
    indices: list[Tensor | None] = []
    for part in parts:
        if part is Ellipsis:
            indices += [None] * (base.ndim - used)
        elif part is not None:
            indices.append(part.long() if isinstance(part, Tensor) else None)
    found: Tensor = base if all(x is None for x in indices) else torch.ops.aten.index(base, indices)
    rest = tuple(part for part in parts if not isinstance(part, Tensor))
    return found[rest] if rest else found


def _dot(a: Tensor, b: Tensor, lead: int) -> Tensor:
    """Return the products of rows; of rows of queries by rows of keys, as a product of matrices."""
    if lead > 1:
        for x, y in ((a, b), (b, a)):
            if x.shape[lead - 1] == 1 and y.shape[lead - 2] == 1:
                return x.squeeze(lead - 1) @ y.squeeze(lead - 2).mT
    return (a * b).sum(-1)
