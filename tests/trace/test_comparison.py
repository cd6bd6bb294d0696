"""Functions agree with their graphs, unless they know that their arguments are symbols."""

from __future__ import annotations

import builtins
import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ringweave.trace.comparison import asks_for_types, codes, disagreement, reads
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
    assert not disagreement(function, trace(function, torch.float32), LENGTHS)


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
    assert disagreement(function, trace(function, torch.float32), LENGTHS)


def test_masks_agree() -> None:
    lengths = {name: x for name, x in LENGTHS.items() if name != "score"}
    good: Function = lambda b, h, q, k: (q - k < 3) & (q >= k)  # noqa: E731
    assert not disagreement(good, trace(good), lengths)
    bad: Function = lambda b, h, q, k: (q - k < 3) & (q >= k if isinstance(q, Tensor) else q > k)  # noqa: E731
    assert disagreement(bad, trace(bad), lengths)
    fails: Function = lambda b, h, q, k: q >= k if type(q) is not Tensor else q / "2"  # noqa: E731
    assert disagreement(fails, trace(fails), lengths).startswith("it raises TypeError: unsupported operand")


def test_a_function_that_raises_is_not_one_of_another_value() -> None:
    short = torch.ones(3)
    read: Function = lambda s, b, h, q, k: s + short[q]  # noqa: E731
    assert disagreement(read, trace(read, torch.float32), LENGTHS).startswith("it raises IndexError: index ")
    clamped: Function = lambda s, b, h, q, k: s + short[q.clamp(max=2) if isinstance(q, Tensor) else q]  # noqa: E731
    assert "another value than its formula" in disagreement(clamped, trace(clamped, torch.float32), LENGTHS)


def test_corners_are_compared() -> None:
    """The last pair of the last head of the last batch element is one of those that are compared."""
    lengths = {name: torch.arange(n) for name, n in zip("bhqk", (5, 7, 9001, 8009), strict=True)}

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        last = (b == 4) & (h == 6) & (q == 9000) & (k == 8008)
        return last if isinstance(q, Tensor) else last & (q < 0)

    assert disagreement(mask, trace(mask), lengths)


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


def test_functions_that_may_ask_for_types() -> None:
    """They may read values for tensors that no trace sees, so comparing them once does not suffice."""
    asking: list[Function] = [
        lambda b, h, q, k: q if isinstance(q, Tensor) else k,
        lambda b, h, q, k: q if torch.is_tensor(q) else k,
        lambda b, h, q, k: q if type(q) is Tensor else k,
        lambda b, h, q, k: q if q.__class__ is Tensor else k,
    ]
    assert all(asks_for_types(codes(function)) for function in asking)
    inner = asking[0]
    assert asks_for_types(codes(lambda b, h, q, k: inner(b, h, q, k)))
    assert not asks_for_types(codes(lambda b, h, q, k: q.dtype == k.dtype))


def window(width: Any) -> Function:
    return lambda b, h, q, k: (q >= k) & (k > q - width)


def both(*functions: Function) -> Function:
    """Return the pairs of all functions, as transformers does."""

    def joined(b: Any, h: Any, q: Any, k: Any) -> Any:
        result = q.new_ones((), dtype=torch.bool)
        for function in functions:
            result = result & function(b, h, q, k).to(result.device)
        return result

    return joined


def chunks(length: Any, pads: Tensor) -> Function:
    return lambda b, h, q, k: (k - pads[b]) // length == (q - pads[b]) // length


def near(width: Any) -> Function:
    return lambda b, h, q, k: abs(q - k) < width


def known(function: Function) -> Any:
    """Return the key of everything that a function reads, once its call was found to read nothing else."""
    found = reads(function)
    if found is not None:
        function(*torch.arange(4))
    return None if found is None or not found.kept(function) else found.key


def test_functions_that_read_the_same_have_one_key() -> None:
    for make in (
        lambda: window(5), lambda: both(window(5), near(3)), lambda: both(), lambda: both(both(near(2)), window(1)),
        lambda: chunks(4, torch.tensor([1, 2, 3])), lambda: window(None),
    ):  # fmt: skip
        assert reads(make()) is not None
        assert reads(make()) == reads(make())


def test_functions_that_may_differ_have_different_keys() -> None:
    pads = torch.tensor([0, 1, 2])
    a, b, c = window(1), near(1), near(2)
    functions = [
        a, b, c, window(2), window(True), window("1"), window(None), both(), both(a), both(a, b), both(b, a),
        both(a, b, c), both(both(a, b), c), both(a, both(b, c)), both(both(a), b, c), both(both(), a), both(a, both()),
        chunks(1, pads), chunks(2, pads), chunks(1, pads + 1), chunks(1, pads[:2]), chunks(1, pads.clone().add_(0)),
        chunks(1, torch.tensor([], dtype=torch.int64)), window(torch.bool), window(torch.int64),
    ]  # fmt: skip
    keys = [found.key for found in map(reads, functions) if found is not None]
    assert len(set(keys)) == len(functions)
    # the dtype of a quotient
    torch.set_default_dtype(torch.float64)
    try:
        assert reads(a).key != keys[0]  # type: ignore[union-attr]
    finally:
        torch.set_default_dtype(torch.float32)


class Whole(int):
    """A number with more than its value."""


LIMIT = 4
INSIDE = torch.arange(3)
INSIDE.device_of = 3  # type: ignore[attr-defined]


def _calls_itself(b: Any, h: Any, q: Any, k: Any) -> Any:
    return _calls_itself


def _with_default(b: Any, h: Any, q: Any, k: Any, width: int = 3) -> Any:
    return k > q - width


def _with_attribute(b: Any, h: Any, q: Any, k: Any) -> Any:
    return k > q


_with_attribute.to = 3  # type: ignore[attr-defined]


def _endless() -> Function:
    function = lambda b, h, q, k: again is None  # noqa: E731
    again = function
    return function


def _imports(b: Any, h: Any, q: Any, k: Any) -> Any:
    import torch as to

    return to


def _unbound() -> Function:
    def inner(b: Any, h: Any, q: Any, k: Any) -> Any:
        return width

    if LIMIT == 0:
        width = 1
    return inner


def _counting() -> Function:
    count = 0

    def inner(b: Any, h: Any, q: Any, k: Any) -> Any:
        nonlocal count
        count += 1
        return k > q - count

    return inner


MORE: dict[str, Function] = {
    "a subclass of a number": window(Whole(3)), "a float": window(3.0), "a list": window([1]), "a dict": window({}),
    "a tensor of pairs": window(torch.ones(2, 2)), "many numbers": chunks(2, torch.zeros(65, dtype=torch.int64)),
    "floats": chunks(2, torch.zeros(2)), "a tensor with attributes": chunks(2, INSIDE),
    "a parameter": window(torch.nn.Parameter(torch.zeros(1))), "a module": window(torch), "a class": window(Whole),
    "a builtin": window(max), "a partial function": functools.partial(window(1)), "a function inside": window(
        functools.partial(window(1))
    ), "a global number": lambda b, h, q, k: k > q - LIMIT, "itself": _calls_itself, "in its closure": _endless(),
    "a default": _with_default, "an attribute": _with_attribute, "an import": _imports, "an empty cell": _unbound(),
    "a count of its calls": _counting(), "other code inside": lambda b, h, q, k: (lambda: q >= LIMIT)(),
    "an attribute that is not known": lambda b, h, q, k: q.shape, "its globals": lambda b, h, q, k: k > globals()["LIMIT"],
    "other globals": types.FunctionType(both().__code__, {}, closure=both().__closure__),
}  # fmt: skip


@pytest.mark.parametrize("name", MORE)
def test_a_function_that_may_read_more_has_no_key(name: str) -> None:
    found = reads(MORE[name])
    if found is not None:
        # only a call shows that a function writes
        assert name in ("an import", "a count of its calls", "other code inside")
        if name == "a count of its calls":
            MORE[name](*torch.arange(4))
        assert not found.kept(MORE[name])


def test_names_that_are_others_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    function = both(near(2))
    key = known(function)
    assert key is not None
    for owner, name in ((builtins, "abs"), (builtins, "bool"), (torch, "bool"), (torch, "device")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, object())
            assert reads(function) is None
    for name, value in (("abs", lambda x: x), ("torch", types.ModuleType("torch")), ("to", 3), ("device", None)):
        with monkeypatch.context() as patch:
            patch.setitem(globals(), name, value)
            assert reads(function) is None
    assert known(function) == key


def test_keys_follow_changed_closures_and_codes() -> None:
    function, pads = both(window(2)), torch.tensor([1, 2])
    (cell,) = function.__closure__  # type: ignore[attr-defined]
    keys = [known(function)]
    for inner in ((window(3),), (near(2),), (), (near(2), near(2)), (chunks(2, pads),)):
        cell.cell_contents = inner
        keys.append(known(function))
    pads[1] = 7
    keys.append(known(function))
    cell.cell_contents[0].__code__ = chunks(2, pads).__code__.replace(co_firstlineno=1)
    keys.append(known(function))
    assert None not in keys
    assert len(set(keys)) == len(keys)


def test_tensors_of_transforms_have_no_key() -> None:
    found: list[object] = []

    def read(x: Tensor) -> Tensor:
        found.append(reads(chunks(2, x)))
        return x

    torch.vmap(read)(torch.zeros(3, 2, dtype=torch.int64))
    assert found == [None]
