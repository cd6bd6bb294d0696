"""Copy a function with the values that its names have at present.

A loop over layers may bind a name again that the functions of all layers read. FlexAttention reads a name at the call,
and so must the gradient, which is computed when the loop has ended.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])

# a copy would keep these writes from the variables that they are for
_WRITES = tuple(dis.opmap[name] for name in ("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_DEREF", "DELETE_DEREF"))
# names through which code can read variables that it does not name
_BACK_DOORS = frozenset({"globals", "vars", "eval", "exec"})
_OF_MODULE = ("__name__", "__builtins__", "__package__", "__spec__")


def frozen(function: F) -> F:
    """Return a function that computes what this one computes now, also after a name that it reads was bound again.

    Variables, globals and defaults of functions, partials and methods are bound as they are now. Other objects are the
    same, so a write to one is seen, and tensors have their gradients. A function that writes variables is not copied.
    """
    return cast(F, _value(function, {}))


def _value(x: Any, known: dict[int, Any]) -> Any:
    kind = type(x)
    if kind is types.FunctionType:
        return known[id(x)] if id(x) in known else _function(x, known)
    if kind is types.MethodType:
        return types.MethodType(_value(x.__func__, known), x.__self__)
    if kind is tuple:
        return tuple([_value(each, known) for each in x])
    if kind is functools.partial:
        named = {name: _value(each, known) for name, each in x.keywords.items()}
        return functools.partial(_value(x.func, known), *_value(x.args, known), **named)
    return x


def _function(fn: types.FunctionType, known: dict[int, Any]) -> types.FunctionType:
    codes = list(_nested(fn.__code__))
    names = {name for code in codes for name in code.co_names}
    if names & _BACK_DOORS or any(write in code.co_code[::2] for code in codes for write in _WRITES):
        return fn
    variables = {name: fn.__globals__[name] for name in (*names, *_OF_MODULE) if name in fn.__globals__}
    cells = tuple([types.CellType() for _ in fn.__closure__ or ()])
    copy = types.FunctionType(fn.__code__, variables, fn.__name__, None, cells or None)
    # before its variables, since one of them may be the function itself
    known[id(fn)] = copy
    for cell, other in zip(cells, fn.__closure__ or (), strict=True):
        try:
            cell.cell_contents = _value(other.cell_contents, known)
        except ValueError:
            # nothing is bound yet
            return fn
    for name in names & variables.keys():
        variables[name] = _value(variables[name], known)
    copy.__defaults__ = _value(fn.__defaults__, known)
    copy.__kwdefaults__ = fn.__kwdefaults__ and {k: _value(v, known) for k, v in fn.__kwdefaults__.items()}
    copy.__qualname__ = fn.__qualname__
    copy.__dict__.update(vars(fn))
    return copy


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)
