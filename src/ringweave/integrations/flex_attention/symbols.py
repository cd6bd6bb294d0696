"""Trace a score function by symbols: record the operations that it applies to its five arguments.

A function is traced at each call, so it is never out of date. Tensors that it captures are used as they are, and what
it computes from them alone is computed once, in the trace.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

#: Names of a score function's arguments.
SCORE, BATCH, HEAD, QUERY, KEY = ARGUMENTS = ("score", "b", "h", "q", "k")


class UntraceableError(Exception):
    """A score function does something that symbols cannot record; the text says what."""


class Symbol:
    """The result of an operation in a trace, or an argument of the traced function.

    Attributes:
        function: The operation; None for an argument.
        args: Its positional arguments; for an argument of the function, its name.
        kwargs: Its named arguments.
        uses: Names of the arguments that the result depends on.
    """

    def __init__(
        self,
        function: Callable[..., Any] | None,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None = None,
        dtype: torch.dtype | None = None,
    ):
        self.function, self.args, self.kwargs = function, args, dict(kwargs or {})
        self._dtype = dtype
        parts = symbols_in((args, self.kwargs))
        self.uses: frozenset[str] = frozenset(args if function is None else ()).union(*(x.uses for x in parts))

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Symbol:
        """Record a function of torch."""
        return _record(func, args, kwargs)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of an argument of the function."""
        if self._dtype is None:
            raise UntraceableError("it asks for the dtype of a result")
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

    def __getattr__(self, name: str) -> Any:
        method = getattr(Tensor, name, None)
        if name.startswith("__") or not callable(method) or name.endswith("_") or name in _READS:
            raise UntraceableError(f"it uses .{name} of a score or an index")
        return lambda *args, **kwargs: _record(method, (self, *args), kwargs)

    # a comparison is recorded, so symbols are told apart by identity
    __hash__ = object.__hash__

    def __getitem__(self, index: Any) -> Symbol:
        return _record(operator.getitem, (self, index))

    def _refuse(self, *_: object) -> NoReturn:
        raise UntraceableError("it needs the value of a score or an index as a number, as `if` and int() do")

    __bool__ = __int__ = __float__ = __index__ = __complex__ = __len__ = __iter__ = __setitem__ = _refuse
    __contains__ = __round__ = _refuse


# methods that return numbers
_READS = frozenset({"item", "tolist", "numpy", "size", "stride", "dim", "numel", "backward", "register_hook"})


def _record(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> Symbol:
    if not torch.is_grad_enabled():
        # inside an autograd.Function too, whose backward a recorded formula would not have
        raise UntraceableError("it computes without gradients: no_grad or an autograd.Function")
    if getattr(function, "__name__", "") in ("__get__", "__set__"):
        raise UntraceableError("it reads an attribute of a score or an index")
    if kwargs and kwargs.get("out") is not None:
        raise UntraceableError("it writes to a tensor")
    return Symbol(function, tuple(args), kwargs)


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
        yield f"__{special}__", lambda self, *args, _f=function: _record(_f, (self, *args))
        if name in _REVERSED:
            yield f"__r{special}__", lambda self, other, _f=function: _record(_f, (other, self))


for _name, _function in _operators():
    setattr(Symbol, _name, _function)


class _Trace(TorchFunctionMode):
    """Record a look-up of a tensor by symbols, and refuse random numbers."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Record or call a function of torch."""
        if any(True for _ in symbols_in((args, kwargs))):
            if func is Tensor.__setitem__:
                raise UntraceableError("it writes to a tensor")
            return _record(func, args, kwargs)
        if any(word in getattr(func, "__name__", "") for word in ("rand", "bernoulli", "dropout", "multinomial")):
            raise UntraceableError("it draws random numbers")
        return func(*args, **(kwargs or {}))


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


def traced(score_mod: Callable[..., Any], dtype: torch.dtype) -> Any:
    """Return the result of a score function for symbols.

    Raises:
        UntraceableError: The function cannot be recorded.
    """
    arguments = [Symbol(None, (name,), dtype=dtype if name == SCORE else torch.int64) for name in ARGUMENTS]
    try:
        with torch.enable_grad(), _Trace():
            return score_mod(*arguments)
    except UntraceableError:
        raise
    except Exception as error:
        # whatever a user's function raises for symbols; the general path calls it again with tensors
        raise UntraceableError(f"it raises {type(error).__name__} when it is traced") from error


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
