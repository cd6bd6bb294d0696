"""What a mask function computes: its graph, or the function itself where no graph records it.

The text of a pattern names a function by a number, since graphs cannot cross ``torch.library`` operators. A number is
never reused.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import PatternError, in_a_line
from ..torch_compat import dispatched, transforming, vmap_enabled, wrapped
from ..trace.comparison import asks_for_types, codes, disagreement
from ..trace.evaluate import Formula
from ..trace.graph import Graph, Node
from ..trace.symbols import trace
from ..trace.text import text_of
from ..trace.vmapped import over_indices
from ..types import Place
from .cache_key import changed

#: Numbers of functions, and of patterns of functions in compiled code.
NUMBERS = itertools.count()
# most characters of a formula in a report
_LINE = 100
#: Exceptions of a function called with index tensors: a wrong arity, an ``if`` on many values, a wrong index.
_RAISED = (TypeError, ValueError, RuntimeError, LookupError, AttributeError, NameError, ArithmeticError, AssertionError)


class MaskFunction:
    """What a mask function computes, with a number.

    Attributes:
        number: Number in the text of patterns.
        name: Name of the function, for messages.
        graph: Its graph without the values of tensors; None if no graph records it.
        why: The reason for that.
    """

    def __init__(
        self, fn: Callable[..., Any], graph: Graph | None, why: str = "", *, pairs: bool = False, vouched: bool = False
    ):
        self.number = next(NUMBERS)
        self.name = called(fn)
        self.graph, self.why = graph, why
        #: Whether it is called, and was made for one call.
        self.single = graph is None and not vouched
        #: Whether its call has reached the backward pass, in which no new mask may appear.
        self.complete = False
        #: Whether each of its tensors requires a gradient; such a tensor is identified by its contents.
        self.learns: tuple[bool, ...] = ()
        self._formula = None if graph is None else Formula(graph)
        self._fn = fn if graph is None else None
        # whether the function is one of 0-dim tensors
        self._pairs = pairs
        #: Tensors that its caller named, for their ids.
        self.kept: tuple[Tensor, ...] = ()
        # functions that compute this graph, by their code
        self._compared: set[Hashable] = set()
        # digests of masks by the digests of their indices
        self._masks: dict[bytes, bytes] = {}

    @functools.cached_property
    def text(self) -> str | None:
        """The text of its graph; None without one."""
        return None if self.graph is None else text_of(self.graph)

    @property
    def formula(self) -> str:
        """The beginning of its text in a line."""
        text = self.text or self.why or "operations that have no text"
        return text if len(text) <= _LINE else text[: _LINE - 3] + "..."

    def constants(self, tables: Sequence[Tensor]) -> list[Tensor]:
        """Return what the graph reads of its tensors, such as their sums."""
        return [] if self._formula is None else self._formula.captured_from(tables)

    def at(self, constants: Sequence[Tensor], b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Evaluate the mask at indices of four dimensions, which broadcast.

        Raises:
            PatternError: The function fails, does not return bool of its arguments' shape, or has changed between a
                call and its gradient.
        """
        try:
            if self._formula is not None:
                device = next((x.device for x in constants), q.device)
                at = {name: x.to(device) for name, x in zip("bhqk", (b, h, q, k), strict=True)}
                with torch.no_grad(), vmap_enabled():
                    found = self._formula.at(constants, at)
                # a tensor of one element stands for it
                return found.reshape(found.shape[:4])
            assert self._fn is not None
            with vmap_enabled():
                result: Any = (over_indices if self._pairs else _called)(self._fn, b, h, q, k)
        except PatternError:
            raise
        except _RAISED as error:
            raise _failed(error) from error
        if isinstance(result, bool):
            result = torch.tensor(result, device=q.device)
        _check_kind(result, result.dtype if isinstance(result, Tensor) else None)
        if wrapped(result):
            raise PatternError(
                "mask_mod",
                "a function that reads a tensor of a transform of torch.func",
                "tensors with values",
                "Call attention for each of them, or pass the masks as a table.",
            )
        indices = torch.broadcast_shapes(*(x.shape for x in (b, h, q, k)))
        sides = zip(reversed(result.shape), reversed(indices), strict=False)
        if result.ndim > 4 or any(side not in (1, most) for side, most in sides):
            raise _misshapen(result.shape, indices)
        if not self.single:
            return result  # type: ignore[no-any-return]
        place, content = _digest(b, h, q, k), _digest(result)
        known = self._masks.get(place) if self.complete else self._masks.setdefault(place, content)
        if known != content:
            raise changed("values that cannot be followed until its gradients are computed")
        return result  # type: ignore[no-any-return]

    def disagreement(self, fn: Callable[..., Any], graph: Graph, place: Place) -> str:
        """Return how a function differs from its graph, which is this one; known code is not called again.

        A function that asks for the type of its arguments may compute other pairs for symbols than for tensors.
        """
        known = codes(fn)
        if known in self._compared:
            return ""
        if transforming() or dispatched() or 0 in place[:4] or not isinstance(graph.result, Node):
            # tensors may have no values to compare, and there may be no pair; a constant depends on no argument
            return ""
        # a function that counts its calls has another graph in each
        with vmap_enabled():
            how = disagreement(fn, graph, place.lengths())
            if how and trace(fn).key == graph.key:
                return how
        if not asks_for_types(known):
            self._compared.add(known)
        return ""


def called(fn: Callable[..., Any]) -> str:
    """Return the name of a function, for messages."""
    return str(getattr(fn, "__name__", type(fn).__name__))


def _called(fn: Callable[..., Any], *indices: Tensor) -> Any:
    return fn(*indices)


def check_result(result: Any) -> None:
    """Raise PatternError unless the result of a graph is a bool of one pair."""
    if isinstance(result, Node):
        _check_kind(result, result.dtype)
        if any(side != 1 for side in result.shape):
            raise _misshapen(result.shape, ())
    elif not isinstance(result, bool):
        _check_kind(result, None)


def _check_kind(result: object, dtype: torch.dtype | None) -> None:
    if dtype != torch.bool:
        kind = type(result)
        got = f"{kind.__module__}.{kind.__qualname__}" if dtype is None else dtype
        raise PatternError(
            "mask_mod", f"a function that returns {got}", "one that returns bool", "Compare in it, as in q >= k."
        )


def _misshapen(shape: Sequence[int], indices: Sequence[int]) -> PatternError:
    return PatternError(
        "mask_mod",
        f"a function that returns shape {tuple(shape)} for indices {tuple(indices)}",
        "a shape that broadcasts to that of its arguments",
        "Compute element by element.",
    )


def _failed(error: Exception) -> PatternError:
    """Return the error of a function that raised another."""
    said = f"a function that raises {in_a_line(error)}"
    wanted = "one of four index tensors (b, h, q, k)"
    remedy = "Use tensor operations, such as & and torch.where, in place of `and` and `if`."
    if out_of_bounds(error):
        wanted = "tables with an entry for each position of the call"
        remedy = "Queries are at positions from q_offset on, and keys from 0 on: subtract, clamp, or enlarge."
    return PatternError("mask_mod", said, wanted, remedy)


def out_of_bounds(error: BaseException | None) -> bool:
    """Return whether a function failed because a position is not in its tables."""
    said = str(error).lower()
    return isinstance(error, LookupError) or (isinstance(error, RuntimeError) and "out of " in said)


def _digest(*tensors: Tensor) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for x in tensors:
        digest.update(repr(tuple(x.shape)).encode())
        digest.update(x.detach().cpu().contiguous().numpy().data)
    return digest.digest()
