"""Find the tensors that an operation of torch writes to, before it is called."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F

_OPERATORS = "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift"
#: Names of Python's methods for ``+=`` and its like.
IN_PLACE = tuple(f"__i{name}__" for name in _OPERATORS)
_WRITES = frozenset(["__setitem__", "__set__", *IN_PLACE])


def written(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the argument that an operation writes to, a tensor or a collection of tensors; None if there is none."""
    # an overload has the name of its operator in front: add_.Tensor
    name = getattr(func, "__name__", "").partition(".")[0]
    in_place = (name.endswith("_") and not name.endswith("__")) or name in _WRITES or bool(kwargs.get("inplace"))
    # activation functions take ``inplace`` by position, too
    in_place = in_place or (getattr(func, "__module__", "") == F.__name__ and any(x is True for x in args))
    if in_place:
        return args[0] if args else next(iter(kwargs.values()), None)
    return kwargs.get("out")
