"""Evaluate a score function that no graph records.

FlexAttention defines a score function for one pair: it gets 0-dim tensors and returns one. ``torch.vmap`` evaluates any
such function on many pairs, in forward and again in backward. The function is therefore refused if it has effects, or
if it computes other operations or reads other values in another evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..errors import RingweaveError, ShapeError, UnsupportedError, first_line, shown
from ..torch_compat import version, wrapped
from .evaluate import Arguments, looked_up, wide
from .graph import SCORE, K, Q
from .operations import filled, name_of, writes

ScoreFunction = Callable[..., Tensor]


class Vmapped:
    """A score function that is called for every tile.

    Args:
        fn: The function of (score, b, h, q, k).
        dtype: Dtype of the scores.
        device: Device of the scores.
    Attributes:
        captured: Captured tensors, in the order of their first use, and those with a gradient that no function mode
            sees.
        nbytes: Bytes of the tensors that the function computes for a pair.
    Raises:
        ShapeError: The function does not return a 0-dim floating tensor.
        UnsupportedError: The function has effects, or another result for the same arguments, or torch cannot map it.
    """

    def __init__(self, fn: ScoreFunction, dtype: torch.dtype, device: torch.device):
        self.fn, self.dtype, self.device = fn, dtype, device
        before, (self._seen, result) = self._probe(), self._probe()
        if not _equal(before, (self._seen, result)) and not _equal(self._probe(), (self._seen, result)):
            # the first of three may differ, since a function may make its tables when it is first called
            raise _impure("a function that returns another result for the same arguments")
        self.nbytes = self._seen.nbytes
        learns = [x.requires_grad for x in self._seen.captured]
        leaves = _leaves(self._seen.captured, learns)
        with torch.enable_grad():
            result = self.at_first_pair(lambda *pair: self.evaluated(pair, leaves)[0])
        #: Leaves that TorchScript and other code reads where no function mode looks.
        self.hidden = list(_variables(result, {id(leaf) for _, leaf in leaves.values()}))
        self.captured = [*self._seen.captured, *self.hidden]

    def begin(self, tensors: Sequence[Tensor] | None = None, learns: Sequence[bool] | None = None) -> Pass:
        """Begin to evaluate the function on all pairs, some at a time.

        Args:
            tensors: The captured tensors, as autograd has saved them; the function reads its own.
            learns: Whether each of them needs a gradient; None for a pass without gradients.
        Raises:
            UnsupportedError: The function reads other values than before.
        """
        if learns is not None:
            with torch.enable_grad():
                seen = self._probe()[0]
            if not self._seen.same(seen):
                raise _impure("a function that reads other values in backward than in forward")
        return Pass(self, learns)

    def _probe(self) -> tuple[_Seen, Tensor]:
        """Evaluate the function at the first pair; return the record and the result."""
        found: list[_Seen] = []

        def recorded(*arguments: Tensor) -> Tensor:
            result, seen = self.evaluated(arguments, {})
            found.append(seen)
            return result

        # with gradients if the caller enables them, since the function may make tables and keep them
        try:
            result = self.at_first_pair(recorded)
        except RuntimeError as error:
            if isinstance(error, RingweaveError) or not any(word in str(error) for word in ("vmap", "Batching rule")):
                raise
            raise _unmapped(error) from error
        return found[0], result.detach()

    def at_first_pair(self, fn: ScoreFunction) -> Tensor:
        """Map a function over the first pair only."""
        zero = [torch.zeros(shape, dtype=torch.int64, device=self.device) for shape in ((1, 1, 1),) * 4]
        score = torch.full((1, 1, 1), 0.5, dtype=self.dtype, device=self.device)
        return over_pairs(fn, score, dict(zip("bhqk", zero, strict=True)))

    def evaluated(self, arguments: Sequence[Tensor], leaves: _Leaves) -> tuple[Tensor, _Seen]:
        """Evaluate the function at one pair, with leaves in place of captured tensors, and record it."""
        # a function may write to its arguments
        copies = [x.clone() for x in arguments]
        mode = _Recorder(copies, leaves)
        with mode:
            result = self.fn(*copies)
        return mode.finished(result)

    def again(self, arguments: Sequence[Tensor], leaves: _Leaves) -> Tensor:
        """Evaluate the function at another pair.

        Raises:
            UnsupportedError: It computed other operations, or read other tensors.
        """
        result, seen = self.evaluated(arguments, leaves)
        if not self._seen.same(seen):
            raise _impure("a function with other operations at another pair")
        return result


def over_indices(fn: Callable[..., Any], b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Map a function of 0-dim indices over the pairs of indices that broadcast."""
    shape = torch.broadcast_shapes(b.shape, h.shape, q.shape, k.shape)
    with ScalarIndices():
        found: Tensor = torch.vmap(fn)(*[x.expand(shape).reshape(-1) for x in (b, h, q, k)])
    return found.reshape(shape)


def over_pairs(fn: ScoreFunction, scores: Tensor, at: Arguments) -> Tensor:
    """Map a function over scores (R, queries, keys), with indices that broadcast, or over scores (P,)."""
    b, h, q, k = (at[name] for name in "bhqk")
    if scores.ndim == 1:
        return torch.vmap(fn)(scores, b, h, q, k)
    over_keys = torch.vmap(fn, (0, None, None, None, 0))
    # the rows of a tile may be query heads
    of_rows = [x[:, :, 0] if x.shape[1] > 1 else x[:, 0, 0] for x in (b, h)]
    over_queries = torch.vmap(over_keys, (0, *[0 if x.ndim > 1 else None for x in of_rows], 0, None))
    result: Tensor = torch.vmap(over_queries)(scores, *of_rows, q[:, :, 0], k[:, 0])
    return result


_Leaves = dict[int, tuple[Tensor, Tensor]]


def _leaves(tensors: Sequence[Tensor], learns: Sequence[bool]) -> _Leaves:
    """Return leaves for the tensors that learn, by their ids, with the tensors."""
    pairs = zip(tensors, learns, strict=True)
    return {id(x): (x, x.detach().requires_grad_()) for x, learn in pairs if learn}


def _variables(result: Tensor, known: set[int]) -> Iterator[Tensor]:
    """Yield the leaves that a result depends on, except those that are known."""
    seen, ahead = set[object](), [result.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) not in known:
            yield variable
        ahead += [each for each, _ in node.next_functions]


class Pass:
    """An evaluation of a function on all pairs, some at a time.

    Args:
        of: The function.
        learns: Whether the gradient of each captured tensor is needed; None for a pass without gradients.
    """

    def __init__(self, of: Vmapped, learns: Sequence[bool] | None = None):
        self.of = of
        wanted = [False] * len(of.captured) if learns is None else list(learns)
        count = len(of.captured) - len(of.hidden)
        self.leaves = _leaves(of.captured[:count], wanted[:count])
        hidden = [x for x, learn in zip(of.hidden, wanted[count:], strict=True) if learn]
        #: Tensors for which gradients are computed, and the sums of these.
        self.inputs = [leaf for _, leaf in self.leaves.values()] + hidden
        self.totals = [torch.zeros(x.shape, dtype=wide(x.dtype), device=x.device) for x in self.inputs]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that the function computes for a pair."""
        return self.of.nbytes

    def __call__(self, scores: Tensor, at: Arguments) -> Tensor:
        """Return the function of scores, without gradients, in memory that nothing else uses."""
        with torch.no_grad():
            result = self._evaluated(scores, at)
        # a result that is the same for several pairs is expanded, and a function may enable gradients
        return result.detach().clone(memory_format=torch.contiguous_format)

    def differentiable(self, scores: Tensor, at: Arguments) -> tuple[Tensor, Differentiated]:
        """Return the function of scores, and an object that computes gradients."""
        with torch.enable_grad():
            leaf = scores.detach().requires_grad_()
            result = self._evaluated(leaf, at)
        return result.detach(), Differentiated(self, result, leaf)

    def _evaluated(self, scores: Tensor, at: Arguments) -> Tensor:
        result = over_pairs(lambda *pair: self.of.again(pair, self.leaves), scores, at)
        return result.to(scores.dtype).expand(scores.shape)

    def gradients(self) -> list[Tensor]:
        """Return the gradients of the captured tensors that learn, in their dtypes."""
        return [total.to(x.dtype) for x, total in zip(self.inputs, self.totals, strict=True)]

    def restart(self) -> None:
        """Discard the sums of gradients so far."""
        for total in self.totals:
            total.zero_()


class Differentiated:
    """A function's result on some pairs with its graph, and then its gradients.

    Args:
        of: The pass.
        result: The result.
        scores: The scores, a leaf.
    """

    def __init__(self, of: Pass, result: Tensor, scores: Tensor):
        self._of = of
        self._graph: tuple[Tensor, Tensor] | None = (result, scores)
        self._found: list[Tensor | None] = []

    def backward(self, grad: Tensor) -> Tensor | None:
        """Return the gradient of the scores for that of the result, once; None if the function does not use them."""
        assert self._graph is not None
        # results of all pairs are not kept while the gradients wait for those of other tiles
        (result, scores), self._graph = self._graph, None
        if not result.requires_grad:
            return None
        inputs, hidden = [scores, *self._of.inputs], bool(self._of.of.hidden)
        # a graph that was made before the call serves all tiles
        of_scores, *found = torch.autograd.grad(result, inputs, grad, retain_graph=hidden, allow_unused=True)
        self._found = list(found)
        return of_scores

    def finite(self) -> bool:
        """Whether all gradients of captured tensors are finite."""
        return all(bool(grad.sum().isfinite()) for grad in self._found if grad is not None)

    def add(self) -> None:
        """Add the gradients of captured tensors to their sums."""
        for total, grad in zip(self._of.totals, self._found, strict=False):
            if grad is not None:
                total.add_(grad)


class _Seen:
    """The record of an evaluation: operations with their arguments, captured tensors, bytes for a pair."""

    def __init__(self, log: list[Hashable], captured: list[Tensor], nbytes: int):
        self.log, self.captured, self.nbytes = log, captured, nbytes

    def same(self, other: _Seen) -> bool:
        """Whether two evaluations saw equal operations on equal values and the same captured tensors."""
        if self.log != other.log or len(self.captured) != len(other.captured):
            return False
        return all(a is b or _same_constant(a, b) for a, b in zip(self.captured, other.captured, strict=True))


def _same_constant(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors without gradients are equal, such as those of one array."""
    if a.requires_grad or b.requires_grad or (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
        return False
    return torch.equal(a, b)


def _equal(one: tuple[_Seen, Tensor], other: tuple[_Seen, Tensor]) -> bool:
    return one[0].same(other[0]) and torch.equal(one[1].nan_to_num(), other[1].nan_to_num())


class ScalarIndices(TorchFunctionMode):
    """Lets a function under ``torch.vmap`` read tensors at 0-dim indices, which torch would read as numbers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operation as vmap takes it: it reads no number from a tensor, and maps no value to fill in."""
        if func is Tensor.__getitem__ and not kwargs:
            parts = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(map(_is_place, parts)) and all(map(_is_part, parts)):
                return looked_up(*args)
        if func in _FILLS and not kwargs:
            return filled(*args)
        return func(*args, **(kwargs or {}))


_FILLS = frozenset([torch.masked_fill, Tensor.masked_fill])


def _is_place(part: Any) -> bool:
    """Whether a part of an index is a whole number in a 0-dim tensor."""
    return isinstance(part, Tensor) and not part.ndim and not part.is_floating_point() and part.dtype != torch.bool


def _is_part(part: Any) -> bool:
    return part is None or part is Ellipsis or type(part) in (int, slice) or _is_place(part)


class _Recorder(ScalarIndices):
    """Records one evaluation of a function, and refuses writes to tensors that the function did not make."""

    def __init__(self, arguments: Sequence[Tensor], leaves: _Leaves):
        super().__init__()
        self.leaves = leaves
        #: Names of tensors by id; the tensors are kept, so that no id is used again.
        self.names: dict[int, Hashable] = {id(x): ("argument", n) for n, x in enumerate(arguments)}
        #: Bits of the arguments that a tensor was computed from, by id.
        self.deps = {id(x): 1 << n for n, x in enumerate(arguments)}
        self.kept: list[Tensor] = list(arguments)
        self.captured: list[Tensor] = []
        self.versions: list[Hashable] = []
        self.log: list[Hashable] = []
        #: Tensors that attributes of others hold, such as gradients.
        self.held: list[Tensor] = []
        #: The first refusal, which the function may have caught.
        self.refusal: UnsupportedError | None = None
        self.nbytes = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = list(_leaves_of((args, kwargs)))
        # the mode that no_grad restores is the caller's
        restores = name_of(func) == "_set_grad_enabled"
        self.log.append((func, *map(self._key, [] if restores else given)))
        self._refuse_write(func, args, kwargs)
        deps = 0
        for x in given:
            deps |= self.deps.get(id(x), 0)
        if self.leaves:
            args, kwargs = _replaced(args, self.leaves), _replaced(kwargs, self.leaves)
        result = super().__torch_function__(func, types, args, kwargs)
        for x in _leaves_of(result):
            if isinstance(x, Tensor) and id(x) not in self.names:
                self.names[id(x)] = "made", len(self.kept)
                self.kept.append(x)
                self.deps[id(x)] = deps
                if name_of(func) == "__get__":
                    self.held.append(x)
                if deps & SCORE or (deps & Q and deps & K):
                    # tensors of queries alone or of keys alone are small
                    self.nbytes += x.numel() * x.element_size()
        return result

    def finished(self, result: Any) -> tuple[Tensor, _Seen]:
        """Return the result of the function, and the record."""
        if not isinstance(result, Tensor) or result.ndim != 0 or not result.is_floating_point():
            got = f"a function that returns {shown(result)}"
            raise ShapeError("score_mod", got, "one that returns a 0-dim floating tensor", "Return the changed score.")
        self.log.append(self._key(result))
        if self.refusal:
            raise self.refusal
        if self.versions != [version(x) for x in self.captured]:
            raise _impure("a function that writes to a captured tensor")
        return self.leaves.get(id(result), (result, result))[1], _Seen(self.log, self.captured, self.nbytes)

    def _key(self, x: object) -> Hashable:
        """Return a value that is equal for equal arguments of two evaluations."""
        if isinstance(x, Tensor):
            if id(x) not in self.names and wrapped(x):
                # made by code that no mode sees, such as TorchScript
                self.names[id(x)] = "made", len(self.kept)
                self.kept.append(x)
                self.deps[id(x)] = SCORE
            elif id(x) not in self.names:
                # its leaf may be the result of an operation, such as a conversion to its own dtype
                leaf = self.leaves.get(id(x), (x, x))[1]
                self.names[id(x)] = self.names[id(leaf)] = "captured", len(self.captured)
                self.captured.append(x)
                self.versions.append(version(x))
            return self.names[id(x)]
        values = bool, int, float, complex, str, bytes, range, np.generic, torch.dtype, torch.device
        # other objects may be new in each evaluation
        return type(x), repr(x) if isinstance(x, values) else ""

    def _refuse_write(self, func: Any, args: Any, kwargs: Any) -> None:
        """Raise UnsupportedError for a write to a tensor that the function did not make, before it happens."""
        name = name_of(func)
        if not writes(func, name, args, kwargs):
            return
        out = kwargs.get("out")
        targets = out if out is not None else args[0] if args else next(iter(kwargs.values()), None)
        for x in _leaves_of(targets):
            if isinstance(x, Tensor) and (self._key(x)[0] == "captured" or self._shares(x)):  # type: ignore[index]
                how = "out=" if out is not None else name
                self.refusal = self.refusal or _impure(f"a function that writes to a captured tensor with {how}")
                raise self.refusal

    def _shares(self, x: Tensor) -> bool:
        """Whether a tensor that was made in the function shares memory with one that was not."""
        if wrapped(x):
            return False
        storage = x.untyped_storage()
        # an array's memory cannot be resized by torch
        return not storage.resizable() or any(
            not wrapped(other) and other.untyped_storage().data_ptr() == storage.data_ptr()
            for other in (*self.captured, *self.held)
        )


def _leaves_of(value: Any) -> Iterator[Any]:
    """Yield the tensors and other objects in arguments of an operation."""
    if isinstance(value, (tuple, list)):
        for each in value:
            yield from _leaves_of(each)
    elif type(value) is dict:
        for key, each in value.items():
            yield key
            yield from _leaves_of(each)
    elif type(value) is slice:
        yield from _leaves_of((value.start, value.stop, value.step))
    else:
        yield value


def _replaced(value: Any, leaves: _Leaves) -> Any:
    """Return arguments with leaves in place of their tensors."""
    kind = type(value)
    if isinstance(value, Tensor):
        return leaves.get(id(value), (value, value))[1]
    if kind is tuple or kind is list:
        return kind([_replaced(each, leaves) for each in value])
    if kind is dict:
        return {key: _replaced(each, leaves) for key, each in value.items()}
    return value


def _impure(got: str) -> UnsupportedError:
    """Return the error of a function with effects, or with results that depend on more than its arguments."""
    wanted = "one that computes the same from the same arguments, without other effects"
    return UnsupportedError("score_mod", got, wanted, "Compute what changes before the call, as a tensor to capture.")


def _unmapped(error: RuntimeError) -> UnsupportedError:
    """Return the error of a function that torch.vmap cannot map."""
    said = first_line(error)
    if "random" in said:
        return _impure("a function that draws random numbers")
    if "data-dependent" in said or ".item()" in said:
        got = "a function that needs the value of a score or an index as a number, as `if` and int() do"
        return UnsupportedError("score_mod", got, "operations of tensors", "Use torch.where in place of `if`.")
    got = f"a function that torch.vmap cannot map: {said}"
    return UnsupportedError("score_mod", got, "operations that torch.vmap maps", "Compute it with other operations.")
