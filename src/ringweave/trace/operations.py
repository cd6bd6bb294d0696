"""Name the operations of torch and Python that a graph knows, in all their spellings."""

from __future__ import annotations

import operator
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Function = Callable[..., Any]

_REVERSED = "add", "sub", "mul", "div", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift", "matmul"
# names of Python's methods and of its module where they differ from a graph's
_SPECIAL = {"div": "truediv"}
_OPERATOR = {"and": "and_", "or": "or_"}


def special(name: str) -> str:
    """Return the name inside of Python's methods for an operator, such as truediv in ``__rtruediv__``."""
    return _SPECIAL.get(name, name)


#: Operators of Python by name, and whether Python tries them with exchanged operands, too.
OPERATORS: dict[str, tuple[Function, bool]] = {
    name: (getattr(operator, _OPERATOR.get(name, special(name))), name in _REVERSED)
    for name in ("lt", "le", "gt", "ge", "eq", "ne", "neg", "pos", "abs", "invert", *_REVERSED)
}
OPERATORS["index"] = operator.getitem, False
UNARY = frozenset({"neg", "pos", "abs", "invert"})

# names of torch's functions for operators; logical functions agree with bitwise ones for bool only, so they differ
_ALIASES = {
    "lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal", "ne": "not_equal",
    "neg": "negative", "pos": "positive", "abs": "absolute", "invert": "bitwise_not",
    "sub": "subtract", "mul": "multiply", "div": "divide true_divide", "floordiv": "floor_divide", "mod": "remainder",
    "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor",
    "lshift": "bitwise_left_shift", "rshift": "bitwise_right_shift",
}  # fmt: skip
#: Methods that convert to a dtype; a graph has ``to`` with the dtype in their place.
CASTS = {
    "float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16,
    "int": torch.int32, "long": torch.int64, "short": torch.int16, "char": torch.int8, "byte": torch.uint8,
    "bool": torch.bool,
}  # fmt: skip
#: Operations that compute each element from the same elements of their operands.
ELEMENTWISE = frozenset(OPERATORS.keys() - {"matmul", "index"}) | frozenset(
    word
    for line in (
        "acos acosh addcdiv addcmul arccos arccosh arcsin arcsinh arctan arctan2 arctanh asin asinh atan atan2 atanh",
        "ceil celu clamp clamp_max clamp_min clip clone contiguous copysign cos cosh deg2rad detach elu erf erfc",
        "erfinv exp exp2 expm1 fix float_power floor fmax fmin fmod frac gelu hardsigmoid hardswish",
        "hardtanh heaviside hypot isfinite isinf isnan leaky_relu lerp lgamma log log10 log1p log2 logaddexp",
        "logaddexp2 logical_and logical_not logical_or logical_xor logit logsigmoid masked_fill maximum minimum mish",
        "nan_to_num ones_like rad2deg reciprocal relu relu6 round rsqrt selu sgn sigmoid sign signbit silu sin sinc",
        "sinh softplus softsign sqrt square tan tanh tanhshrink to trunc where xlogy zeros_like",
    )
    for word in line.split()
)
#: Operations with results that share no memory with their operands. A ``to`` is one that changes the dtype.
FRESH = ELEMENTWISE - {"detach", "contiguous", "pos"}

#: Where torch's functions are, by the names that texts have for them.
SPACES = {"torch": torch, "Tensor": Tensor, "F": F}
_UNDETERMINED = (
    "rand", "bernoulli", "dropout", "multinomial", "normal", "poisson", "exponential", "uniform", "empty", "rrelu",
    "gumbel_softmax", "fractional_max", "scaled_dot_product_attention", "multi_head_attention_forward", "as_strided",
)  # fmt: skip
#: Names of functions with results that their arguments do not determine: random numbers, and other memory.
UNDETERMINED = frozenset(
    name for space in SPACES.values() for name in dir(space) if any(word in name for word in _UNDETERMINED)
) - {
    "normalize",
    "poisson_nll_loss",
    "__rand__",
}
#: Names of functions that write to a tensor, besides those with names that end in an underscore.
WRITES = frozenset(["__setitem__", "__set__", "__delete__", *(f"__i{special(name)}__" for name in _REVERSED)])


def filled(x: Tensor, mask: Tensor, value: Any) -> Tensor:
    """Return ``x.masked_fill(mask, value)``, in which torch neither broadcasts nor maps a value in a tensor."""
    return torch.where(mask, value.to(x.dtype) if isinstance(value, Tensor) else torch.full_like(x, value), x)


def _spellings() -> dict[Function, tuple[str, Function, bool]]:
    found: dict[Function, tuple[str, Function, bool]] = {}
    for name in ELEMENTWISE - OPERATORS.keys():
        spelled = [getattr(space, name) for space in SPACES.values() if hasattr(space, name)]
        # one function for all spellings, since a graph knows them by one name
        found |= dict.fromkeys(spelled, (name, spelled[0], False))
    # x.where(condition, y) is torch.where(condition, x, y)
    found[Tensor.where] = "where", torch.where, True
    for name, (function, reverses) in OPERATORS.items():
        method = special(name)
        names = (name, *_ALIASES.get(name, "").split()) if name != "index" else ()
        spelled = [getattr(Tensor, f"__{method}__", None)] if names else [Tensor.__getitem__]
        spelled += [getattr(space, each, None) for space in (torch, Tensor) for each in names]
        for each in spelled:
            if each is not None:
                found[each] = name, function, False
        found[function] = name, function, False
        if reverses and hasattr(Tensor, f"__r{method}__"):
            found[getattr(Tensor, f"__r{method}__")] = name, function, True
    found[torch.rsub] = "sub", operator.sub, True
    found[torch.masked_fill] = found[Tensor.masked_fill] = "masked_fill", filled, False
    return found


#: Name and function of each spelling of a known operation, and whether its first two operands are exchanged.
SPELLINGS = _spellings()
#: The function of each name.
FUNCTIONS = {name: function for name, function, _ in SPELLINGS.values()}
# torch.compile knows no name of a function that it traces
_NAMES = {
    getattr(space, name): name
    for space in reversed(SPACES.values())
    for name in dir(space)
    if callable(getattr(space, name)) and getattr(space, name).__hash__ is not None
}


def name_of(function: Any) -> str:
    """Return the name of a function of torch; that of an overload is its operator's."""
    name = _NAMES.get(function)
    if name is None:
        name = getattr(function, "__name__", "")
        # an overload is named add_.Tensor
        name = name.partition(".")[0]
    return name


def spelled(function: Any) -> tuple[str, str]:
    """Return where a function of torch is, and its name there.

    Raises:
        LookupError: It has no name, or is no operation on tensors.
    """
    name = _NAMES[function]
    if type(function) not in _NATIVE and function.__module__ not in _OF_TENSORS:
        raise LookupError(name)
    return next(place for place, space in SPACES.items() if getattr(space, name, None) is function), name


def is_torchs(function: Any) -> bool:
    """Whether a function is one of torch, which reads its arguments alone; TorchScript may read other tensors."""
    if _NAMES.get(function) is not None or type(function) in _NATIVE:
        return True
    if type(function) is types.FunctionType:
        return function.__module__.partition(".")[0] == "torch"
    return getattr(function, "namespace", "") == "aten" or str(function).startswith("aten.")


# functions of torch in Python that are operations on tensors
_OF_TENSORS = frozenset(function.__module__ for function in (Tensor.__rsub__, torch.split, F.softmax))
_NATIVE = frozenset({types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType})


def writes(function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of a function with a name writes to a tensor."""
    if (name.endswith("_") and not name.endswith("__")) or name in WRITES:
        return True
    if kwargs and (kwargs.get("out") is not None or kwargs.get("inplace")):
        return True
    return function in _ACTIVATIONS and any(x is True for x in args)


# functions that take ``inplace``, by position too
_ACTIVATIONS = frozenset(
    function
    for function in vars(F).values()
    if "inplace" in getattr(getattr(function, "__code__", None), "co_varnames", ())
)
