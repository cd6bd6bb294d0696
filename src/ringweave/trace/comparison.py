"""Compare a function with its graph, and with other functions that it was recognised as."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .evaluate import Arguments, evaluated
from .graph import Graph
from .vmapped import ScalarIndices

_PAIRS, _ROUNDINGS = 64, 32
# share of a value that rounding to 16 bits may change; another distance or entry changes more
_MOST_ROUNDED = 2.0**-7


def agrees(
    function: Callable[..., Any],
    graph: Graph,
    lengths: Mapping[str, Tensor],
    *recognised: Callable[[Arguments], Tensor],
) -> bool:
    """Whether a function and its graph compute the same at the corners of a call, and at some further pairs.

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
            got = evaluated(graph, at)
            others = [compute(at) for compute in recognised]
        # with gradients, as in the trace, since the function may keep tables that it makes
        with torch.enable_grad(), ScalarIndices():
            want = torch.vmap(function)(*[x.clone() for x in at.values()])
    except Exception:  # noqa: BLE001
        # whatever a user's function raises; its caller calls it again in another way
        return False
    if not isinstance(want, Tensor) or got.dtype != want.dtype:
        return False
    want, got, *others = (each.detach().to(want.dtype).expand(want.shape) for each in (want, got, *others))
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
