"""Trace a score function by symbols: record the operations that it applies to its five arguments.

A function is traced at each call, so it is never out of date. Tensors that it captures are used as they are, and what
it computes from them alone is computed once, in the trace.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...torch_compat import dispatched, wrapped
from .writes import IN_PLACE, written

#: Names of a score function's arguments.
SCORE, BATCH, HEAD, QUERY, KEY = ARGUMENTS = ("score", "b", "h", "q", "k")


class UntraceableError(Exception):
    """A score function does something that symbols cannot record; the text says what."""


class Trace(TorchFunctionMode):
    """A trace of a score function.

    Attributes:
        refusal: The first thing that could not be recorded. The function may have caught the error.
        steps: The recorded operations. They are equal for functions with one formula of equal numbers.
        tensors: Tensors in the formula, with repetitions.
        active: Whether the function runs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.refusal: str | None = None
        self.steps: list[tuple[Hashable, ...]] = []
        self.tensors: list[Tensor] = []
        self.active = True

    def refuse(self, why: str) -> NoReturn:
        """Raise UntraceableError, and note why."""
        self.refusal = self.refusal or why
        raise UntraceableError(why)

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Record or call a function of torch; refuse writes, before they happen, and random numbers."""
        kwargs = kwargs or {}
        if written(func, args, kwargs) is not None:
            self.refuse("it writes to a tensor")
        name = getattr(func, "__name__", "")
        if any(True for _ in symbols_in((args, kwargs))):
            if name == "__get__":
                self.refuse("it reads an attribute of a score or an index")
            return self.record(func, args, kwargs)
        if any(word in name for word in ("rand", "bernoulli", "dropout", "multinomial")):
            self.refuse("it draws random numbers")
        return func(*args, **kwargs)

    def record(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
    ) -> Symbol:
        """Return the symbol of the result of an operation that writes to nothing."""
        if not torch.is_grad_enabled():
            # inside an autograd.Function too: a recorded formula would lose its backward
            self.refuse("it computes without gradients: no_grad or an autograd.Function")
        return Symbol(self, function, tuple(args), kwargs)

    def read(self, values: Iterable[Any], step: list[Hashable]) -> list[frozenset[str]]:
        """Add what identifies the arguments of an operation to ``step``, and return the names that they depend on."""
        uses = list[frozenset[str]]()
        for value in values:
            kind: Any = type(value)
            if kind is Symbol:
                if value.trace is not self:
                    self.refuse("it uses a value of an earlier call")
                uses.append(value.uses)
                step.append(value.number)
            elif isinstance(value, Tensor):
                self.tensors.append(value)
                # a number is part of the formula, and other tensors are tables
                readable = not value.ndim and value.device.type == "cpu" and not wrapped(value) and not dispatched()
                step.append((kind, value.shape, value.dtype, value.requires_grad, value.item() if readable else None))
            elif isinstance(value, (tuple, list)):
                step.append((kind, len(value)))
                uses += self.read(value, step)
            elif kind is slice:
                step.append(kind)
                uses += self.read((value.start, value.stop, value.step), step)
            elif isinstance(value, dict):
                step.append((kind, len(value)))
                uses += self.read(value.items(), step)
            else:
                step.append((kind, value))
        return uses


class Symbol:
    """The result of an operation in a trace, or an argument of the traced function.

    Attributes:
        trace: The trace.
        number: Number of the result in the trace; arguments have negative ones.
        function: The operation; None for an argument.
        args: Its positional arguments; for an argument of the function, its name.
        kwargs: Its named arguments.
        uses: Names of the arguments that the result depends on.
    """

    trace: Trace
    number: int
    function: Callable[..., Any] | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    uses: frozenset[str]
    _dtype: torch.dtype | None

    def __init__(
        self,
        trace: Trace,
        function: Callable[..., Any] | None,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None = None,
        dtype: torch.dtype | None = None,
    ):
        if function is None:
            uses, number = frozenset(args), ARGUMENTS.index(args[0]) - len(ARGUMENTS)
        else:
            step: list[Hashable] = [function]
            uses = frozenset[str]().union(*trace.read((*args, *kwargs.items()) if kwargs else args, step))
            number = len(trace.steps)
            trace.steps.append(tuple(step))
        # not by assignment, which is refused
        vars(self).update(
            {"trace": trace, "number": number, "function": function, "args": args, "kwargs": kwargs or {},
             "uses": uses, "_dtype": dtype}
        )  # fmt: skip

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Symbol:
        """Record a function of torch."""
        symbol: Symbol = next(symbols_in((args, kwargs))).trace.__torch_function__(func, types, args, kwargs)
        return symbol

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of an argument of the function."""
        if self._dtype is None:
            self.trace.refuse("it asks for the dtype of a result")
        return self._dtype

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    @property
    def ndim(self) -> int:
        """The rank of every value, 0."""
        return 0

    @property
    def shape(self) -> torch.Size:
        """The shape of every value."""
        return torch.Size()

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The type; a function that asks for it, as ``isinstance`` does, would learn that it is no Tensor."""
        if self.trace.active:
            self.trace.refuse(
                "it asks for the type of a score or an index, as isinstance() and an autograd.Function do"
            )
        return Symbol

    def __getattr__(self, name: str) -> Any:
        method = getattr(Tensor, name, None)
        if name.startswith("__") or not callable(method) or name.endswith("_") or name in _READS:
            self.trace.refuse(f"it uses .{name} of a score or an index")
        return lambda *args, **kwargs: self.trace.__torch_function__(method, (), (self, *args), kwargs)

    def __setattr__(self, name: str, value: object) -> None:
        self.trace.refuse(f"it sets .{name} of a score or an index")

    # a comparison is recorded, so symbols are told apart by identity
    __hash__ = object.__hash__

    def __getitem__(self, index: Any) -> Symbol:
        return self.trace.record(operator.getitem, (self, index))

    def _number(self, *_: object) -> NoReturn:
        self.trace.refuse("it needs the value of a score or an index as a number, as `if` and int() do")

    __bool__ = __int__ = __float__ = __index__ = __complex__ = __len__ = __iter__ = __contains__ = __round__ = _number

    def _write(self, *_: object) -> NoReturn:
        self.trace.refuse("it writes to a score or an index in place")

    __setitem__ = __delitem__ = _write


# methods that return numbers
_READS = frozenset({"item", "tolist", "numpy", "size", "stride", "dim", "numel", "backward", "register_hook"})

# operators that Python also tries with exchanged operands
_REVERSED = (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "matmul",
    "and_",
    "or_",
    "xor",
    "lshift",
    "rshift",
)


def _operators() -> Iterator[tuple[str, Callable[..., Any]]]:
    for name in ("lt", "le", "gt", "ge", "eq", "ne", "neg", "pos", "invert", "abs", *_REVERSED):
        function = getattr(operator, name)
        special = name.strip("_")
        yield f"__{special}__", lambda self, *args, _f=function: self.trace.record(_f, (self, *args))
        if name in _REVERSED:
            yield f"__r{special}__", lambda self, other, _f=function: self.trace.record(_f, (other, self))
    for name in IN_PLACE:
        # Python would take ``x += y`` as ``x = x + y``, which other names of x do not see
        yield name, Symbol._write


for _name, _function in _operators():
    setattr(Symbol, _name, _function)


def symbols_in(value: Any) -> Iterator[Symbol]:
    """Return the symbols in nested tuples, lists and dicts."""
    if isinstance(value, Symbol):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from symbols_in(each)
    elif isinstance(value, dict):
        yield from symbols_in(list(value.values()))
    elif isinstance(value, slice):
        yield from symbols_in((value.start, value.stop, value.step))


def traced(score_mod: Callable[..., Any], dtype: torch.dtype) -> tuple[Any, Trace]:
    """Return the result of a score function for symbols, and the trace.

    Raises:
        UntraceableError: The function cannot be recorded.
    """
    trace = Trace()
    arguments = [Symbol(trace, None, (name,), dtype=dtype if name == SCORE else torch.int64) for name in ARGUMENTS]
    try:
        with torch.enable_grad(), trace:
            result = score_mod(*arguments)
    except UntraceableError:
        raise
    except Exception as error:
        # whatever a user's function raises for symbols; the general path calls it again with tensors
        raise UntraceableError(f"it raises {type(error).__name__} when it is traced") from error
    finally:
        trace.active = False
    if trace.refusal:
        raise UntraceableError(trace.refusal)
    return result, trace


def computed(value: Any, arguments: Mapping[str, Tensor]) -> Any:
    """Compute a traced value from its arguments."""
    return _computed(value, arguments, {})


def _computed(value: Any, arguments: Mapping[str, Tensor], known: dict[int, Any]) -> Any:
    if isinstance(value, Symbol):
        if id(value) not in known:
            if value.function is None:
                known[id(value)] = arguments[value.args[0]]
            else:
                args, kwargs = (_computed(each, arguments, known) for each in (value.args, value.kwargs))
                known[id(value)] = value.function(*args, **kwargs)
        return known[id(value)]
    if isinstance(value, (tuple, list)):
        return type(value)(_all(value, arguments, known)) if type(value) in (tuple, list) else value
    if isinstance(value, dict):
        return {key: _computed(each, arguments, known) for key, each in value.items()}
    return value


def _all(values: Iterable[Any], arguments: Mapping[str, Tensor], known: dict[int, Any]) -> list[Any]:
    return [_computed(each, arguments, known) for each in values]
