"""Compare a function with its graph, with functions that it was recognised as, and with those traced before."""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ..errors import in_a_line
from ..torch_compat import dispatched, transforming, version
from .evaluate import Arguments, evaluated
from .graph import Graph
from .vmapped import ScalarIndices

_PAIRS, _ROUNDINGS = 64, 32
# share of a value that rounding to 16 bits may change; another distance or entry changes more
_MOST_ROUNDED = 2.0**-7


def disagreement(
    function: Callable[..., Any],
    graph: Graph,
    lengths: Mapping[str, Tensor],
    *recognised: Callable[[Arguments], Tensor],
) -> str:
    """Return how a function differs from its graph at the corners of a call or at some further pairs; empty if nowhere.

    A function that asks for the type of its arguments may behave in another way for symbols. So a graph that is seen
    for the first time of the code of a function is compared with the function itself.

    Args:
        function: The function.
        graph: Its graph.
        lengths: The values that each argument can have, by name, (n,).
        recognised: Functions that compute the graph at pairs in another way, in any dtype.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    at: dict[str, Tensor] = {}
    for bit, (name, values) in enumerate(lengths.items()):
        corners = (torch.arange(2 ** len(lengths), device="cpu") >> bit & 1) * (len(values) - 1)
        further = torch.randint(len(values), (max(0, _PAIRS - len(corners)),), generator=generator, device="cpu")
        at[name] = values[torch.cat([corners, further])]
    try:
        with torch.no_grad():
            computed = [evaluated(graph, at), *(compute(at) for compute in recognised)]
    except Exception:  # noqa: BLE001
        # an operation of the function may raise it, which then does
        computed = []
    try:
        # with gradients, as in the trace, since the function may keep tables that it makes; a checkpoint does not see
        # what the comparison saves, since a repeated call is not compared
        with torch.enable_grad(), ScalarIndices(), saved_tensors_hooks(_unchanged, _unchanged):
            want = torch.vmap(function)(*[x.clone() for x in at.values()])
    except Exception as error:  # noqa: BLE001
        # whatever a user's function raises; its caller calls it again in another way
        return f"it raises {in_a_line(error)}"
    return "" if computed and _equal(graph, at, want, *computed) else _OTHER


_OTHER = "it computes another value than its formula does when it is traced"


def _equal(graph: Graph, at: Arguments, want: object, got: Tensor, *recognised: Tensor) -> bool:
    """Whether a graph, and its recognised forms, have computed what the function has, up to rounding."""
    if not isinstance(want, Tensor) or got.dtype != want.dtype:
        return False
    want, got, *others = (each.detach().to(want.dtype).expand(want.shape) for each in (want, got, *recognised))
    if not want.is_floating_point():
        return all(torch.equal(each, want) for each in (got, *others))
    # sums of products are rounded in another order
    eps = max(torch.finfo(x.dtype).eps for x in graph.nodes if x.deps and x.dtype.is_floating_point)
    eps = min(_ROUNDINGS * eps, max(2 * eps, _MOST_ROUNDED))
    size = want.nan_to_num(0.0, 0.0, 0.0).abs()
    if not _near(got, want, eps * (size + size.max())):
        return False
    # terms have no sums that cancel, and an entry next to the right one may be as near as the largest value's rounding
    room = eps * (2 * size + at["score"].abs() if "score" in at else 2 * size)
    return all(_near(each, want, room) for each in others)


def _unchanged(x: Tensor) -> Tensor:
    return x


def _near(x: Tensor, want: Tensor, room: Tensor) -> bool:
    return bool((((x - want).abs() <= room) | (x == want) | (x.isnan() & want.isnan())).all())


def codes(fn: Any) -> tuple[object, ...]:
    """Return the code of a function, and that of the functions that it closes over."""
    found, ahead = list[object](), [fn]
    while ahead and len(found) < _MOST:
        fn = ahead.pop()
        while isinstance(fn, (functools.partial, types.MethodType)):
            fn = fn.func if isinstance(fn, functools.partial) else fn.__func__
        found.append(getattr(fn, "__code__", type(fn)))
        for cell in getattr(fn, "__closure__", None) or ():
            try:
                inside = cell.cell_contents
            except ValueError:
                # nothing is bound yet
                continue
            # torch's ``and_masks`` closes over a tuple of functions
            listed = inside if type(inside) in (tuple, list) else (inside,)
            ahead += [x for x in listed if isinstance(x, (types.FunctionType, types.MethodType, functools.partial))]
    return tuple(found)


# functions that are looked at, since one may close over itself
_MOST = 16


def asks_for_types(found: tuple[object, ...]) -> bool:
    """Whether a function with these codes may ask for types, and so read values that no graph of it has."""
    return any(type(code) is types.CodeType and not _OF_TYPES.isdisjoint(code.co_names) for code in found)


_OF_TYPES = frozenset(["isinstance", "is_tensor", "type", "__class__"])


# ---- functions that were traced before -------------------------------------------------------------------------------


class Reads(NamedTuple):
    """Everything that a function can read besides its arguments.

    Attributes:
        key: Equal for functions that compute the same. It has ids of codes, so it must be kept together with them.
        codes: The codes.
    """

    key: tuple[Hashable, ...]
    codes: tuple[types.CodeType, ...]

    def kept(self, function: Callable[..., Any]) -> bool:
        """Whether a function that was called since reads the same, and nothing else.

        So it has written nothing that it reads, and another function with this key need not be called.
        """
        if any(_IMPORT in code.co_code[::2] or types.CodeType in map(type, code.co_consts) for code in self.codes):
            return False
        now = reads(function)
        return now is not None and now.key == self.key


def reads(function: Any) -> Reads | None:
    """Return everything that a function can read; None if it is more than constants, functions and a few numbers.

    The values in its closure are read anew, with those of the functions there. The only names are those that masks of
    models need: attributes of indices, the types of torch, and builtins.
    """
    # a quotient has the default dtype
    seen: list[Any] = [torch.get_default_dtype()]
    inside: list[types.CodeType] = []
    # a code says how many values follow it, so equal keys have equal nesting
    left, named = [function], False
    while left:
        each = left.pop()
        kind = type(each)
        if kind is types.FunctionType:
            code = each.__code__
            if each.__defaults__ or each.__kwdefaults__ or each.__dict__:
                return None
            if code.co_names:
                scope, builtins, named = each.__globals__, each.__builtins__, True
                if type(scope) is not dict:
                    return None
                for name in code.co_names:
                    if name not in _NAMES or scope.get(name, builtins.get(name, _ABSENT)) is not _NAMES[name]:
                        return None
            seen.append(id(code))
            inside.append(code)
            for cell in each.__closure__ or ():
                try:
                    left.append(cell.cell_contents)
                except ValueError:
                    # nothing is bound yet
                    return None
        elif kind in _CONSTANTS:
            # with the type, since True == 1
            seen += (kind, each)
        elif kind is tuple:
            seen += (kind, len(each))
            left += each
        elif kind is Tensor:
            numbers = _numbers(each)
            if numbers is None:
                return None
            # the version reveals a change that was undone
            seen += (kind, version(each), numbers)
        else:
            return None
        if len(seen) > _MOST_SEEN:
            return None
    if named and (torch.abs, torch.bool, torch.device, torch.dtype) != _OF_TORCH:
        return None
    return Reads(tuple(seen), tuple(inside))


def _numbers(x: Tensor) -> tuple[int, ...] | None:
    """Return the entries of a vector that has a whole number for each batch element; None for another tensor."""
    plain = x.ndim == 1 and len(x) <= _MOST_NUMBERS and x.dtype == torch.int64 and x.layout == torch.strided
    if not plain or x.device.type != "cpu" or vars(x) or transforming() or dispatched():
        return None
    return tuple(x.tolist())


_IMPORT = dis.opmap["IMPORT_NAME"]
_CONSTANTS = frozenset([int, bool, str, type(None), torch.dtype])
_ABSENT = object()
# names that functions may use, with the values of the global ones
_NAMES = {
    "abs": abs, "bool": bool, "torch": torch,
    **dict.fromkeys(("device", "dtype", "new_ones", "new_zeros", "to"), _ABSENT),
}  # fmt: skip
_OF_TORCH = torch.abs, torch.bool, torch.device, torch.dtype
_MOST_SEEN, _MOST_NUMBERS = 64, 64
