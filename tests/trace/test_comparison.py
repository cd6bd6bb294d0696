"""Functions agree with their graphs, unless they know that their arguments are symbols."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ringweave.trace.comparison import agrees, codes
from ringweave.trace.symbols import trace

from .test_evaluate import FUNCTIONS, Captured, captured

# torch has no rule to map some operations in place, and maps them one by one
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")

Function = Callable[..., Any]
LENGTHS = {
    "score": torch.tensor([0.5, -3.0, 40.0]),
    **{name: torch.arange(n) for name, n in zip("bhqk", (2, 2, 15, 21), strict=True)},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_agree_with_their_graphs(name: str, dtype: torch.dtype) -> None:
    if name == "linear" and dtype != torch.float32:
        pytest.skip("a product of matrices takes one dtype")
    function = FUNCTIONS[name][0](Captured(captured(dtype)))
    assert agrees(function, trace(function, torch.float32), LENGTHS)


COUNT = [0]


def _counts(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    COUNT[0] += 1
    return s * COUNT[0]


@pytest.mark.parametrize(
    "function",
    [
        lambda s, b, h, q, k: s if isinstance(q, Tensor) else s * 2,
        lambda s, b, h, q, k: s * 2 if type(q) is Tensor else s,
        lambda s, b, h, q, k: s + (q if torch.is_tensor(k) else k),
        lambda s, b, h, q, k: s.tanh() if "Symbol" in repr(s) else s,
        lambda s, b, h, q, k: s if hasattr(s, "node") else s + 0.001,
        lambda s, b, h, q, k: s.double() if isinstance(s, Tensor) else s,
        _counts,
    ],
)
def test_functions_that_know_symbols_disagree(function: Function) -> None:
    assert not agrees(function, trace(function, torch.float32), LENGTHS)


def test_masks_agree() -> None:
    lengths = {name: x for name, x in LENGTHS.items() if name != "score"}
    good: Function = lambda b, h, q, k: (q - k < 3) & (q >= k)  # noqa: E731
    assert agrees(good, trace(good), lengths)
    bad: Function = lambda b, h, q, k: (q - k < 3) & (q >= k if isinstance(q, Tensor) else q > k)  # noqa: E731
    assert not agrees(bad, trace(bad), lengths)
    fails: Function = lambda b, h, q, k: q >= k if type(q) is not Tensor else q / "2"  # noqa: E731
    assert not agrees(fails, trace(fails), lengths)


def test_corners_are_compared() -> None:
    """The last pair of the last head of the last batch element is one of those that are compared."""
    lengths = {name: torch.arange(n) for name, n in zip("bhqk", (5, 7, 9001, 8009), strict=True)}

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        last = (b == 4) & (h == 6) & (q == 9000) & (k == 8008)
        return last if isinstance(q, Tensor) else last & (q < 0)

    assert not agrees(mask, trace(mask), lengths)


def test_codes_are_those_of_inner_functions() -> None:
    def inner(x: Any) -> Any:
        return x

    def outer(b: Any, h: Any, q: Any, k: Any) -> Any:
        return inner(q)

    class Method:
        def mask(self, b: Any, h: Any, q: Any, k: Any) -> Any:
            return q

    assert codes(outer) == (outer.__code__, inner.__code__)
    assert codes(functools.partial(Method().mask, 1)) == (Method.mask.__code__,)
    assert codes(Method()) == (Method,)
