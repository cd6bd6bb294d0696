"""A trace records what a function computes from symbols, knows every change of it, and refuses the rest."""

from __future__ import annotations

import contextlib
import copy
import functools
import operator
import threading
import types
import warnings
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ringweave.patterns.cache_key import CacheKey
from ringweave.trace.graph import SCORE, B, Graph, H, K, Node, Q, UntraceableError
from ringweave.trace.operations import FUNCTIONS, SPELLINGS, UNDETERMINED
from ringweave.trace.symbols import Symbol, graph_of, trace

Function = Callable[..., Any]
TABLE = torch.arange(12, device="cpu").view(3, 4)
WIDTH = 3


def identity(function: Function, dtype: torch.dtype | None = None) -> Hashable:
    """Return what identifies a function: its graph, and its tensors."""
    graph = trace(function, dtype)
    return CacheKey.following("", tuple(graph.tensors)).value, graph.key


def names(graph: Graph) -> list[str]:
    return [node.name for node in graph.nodes if node.deps and node.name != "argument"]


# ---- recording -------------------------------------------------------------------------------------------------------


def test_operations_are_nodes_once() -> None:
    graph = trace(lambda b, h, q, k: (q - k < 5) & (q - k >= 0))
    assert names(graph) == ["sub", "lt", "ge", "and"]
    result = graph.result
    assert isinstance(result, Node)
    assert result.deps == Q | K
    assert (result.dtype, result.shape) == (torch.bool, ())
    assert repr(result) == "and(lt(sub(q, k), 5), ge(sub(q, k), 0))"


def test_captured_tensors_are_constants_with_identity() -> None:
    """What a function computes from captured tensors alone has a node and a value."""
    graph = trace(
        lambda s, b, h, q, k: s + (TABLE * 2).float().softmax(1)[h, q] + TABLE.max(1).values[b], torch.float32
    )
    assert len(graph.tensors) == 1
    assert graph.tensors[0] is TABLE
    constants = [node for node in graph.nodes if not node.deps]
    assert [node.name for node in constants] == ["tensor", "call", "call", "call", "call", "part", "part"]
    assert torch.equal(constants[3].value, (TABLE * 2).float().softmax(1))
    assert torch.equal(constants[5].value, TABLE.max(1).values)
    (entry,) = (node for node in graph.nodes if node.name == "index" and node.deps == H | Q)
    assert entry.args[0] is constants[3]
    assert graph.typed().result.deps == SCORE | B | H | Q


def test_rows_are_never_read() -> None:
    """An index of a row is one of the table, also with ``...``."""
    table = torch.rand(2, 3, 4, 5, device="cpu")
    for function in (
        lambda b, h, q, k: table[b][h][q, k],
        lambda b, h, q, k: table[b, h][..., q, k],
        lambda b, h, q, k: table[b][h, ...][q][k],
    ):
        last = trace(function).typed().result
        assert last.args[0].value is table
        assert [part.args[0] for part in last.args[1]] == ["b", "h", "q", "k"]
    sliced = trace(lambda b, h, q, k: table[..., k][b]).typed().result
    assert sliced.shape == (2, 3, 4) or sliced.shape == (3, 4)


def test_every_spelling_of_an_operator_is_one_name() -> None:
    for function in (
        lambda b, h, q, k: q >= k,
        lambda b, h, q, k: torch.ge(q, k),
        lambda b, h, q, k: q.greater_equal(k),
        lambda b, h, q, k: operator.ge(q, k),
    ):
        assert trace(function).key == trace(lambda b, h, q, k: q >= k).key
    chosen = trace(lambda b, h, q, k: torch.where(q > k, q, k)).key
    assert trace(lambda b, h, q, k: q.where(q > k, k)).key == chosen
    both: list[Function] = [
        lambda b, h, q, k: torch.where(q > 1, k > 1, h > 1),
        lambda b, h, q, k: (q > 1).where(k > 1, h > 1),
    ]
    assert trace(both[0]).key != trace(both[1]).key
    for function in (lambda b, h, q, k: 7 - q, lambda b, h, q, k: torch.rsub(q, 7), lambda b, h, q, k: q.__rsub__(7)):
        assert trace(function).key == trace(lambda b, h, q, k: 7 - q).key
    for function in (
        lambda b, h, q, k: torch.where(q > k, other=k, input=q),
        lambda b, h, q, k: torch.where(input=q, other=k, condition=torch.gt(other=k, input=q)),
        lambda b, h, q, k: q.where(other=k, condition=q.gt(other=k)),
    ):
        assert trace(function).key == chosen
    casts: list[Function] = [lambda b, h, q, k: q.float(), lambda b, h, q, k: q.to(torch.float32)]
    casts += [lambda b, h, q, k: q.type(torch.float), lambda b, h, q, k: q.type_as(TABLE.float())]
    assert {names(trace(each))[-1] for each in casts} == {"to"}
    assert names(trace(lambda b, h, q, k: q.long() + q.to(q.dtype) + q.to("cpu"))) == ["add", "add"]


@pytest.mark.parametrize("name", sorted({name for name, _, _ in SPELLINGS.values()} - {"index", "matmul"}))
def test_a_name_has_the_meaning_of_each_spelling(name: str) -> None:
    """The function of a name computes what every spelling of it computes."""
    for spelling, (found, function, swap) in SPELLINGS.items():
        if found != name:
            continue
        assert function is FUNCTIONS[name]
        for x, y in (
            (torch.tensor([0.4, 0.7]), torch.tensor([0.2, 0.9])),
            (torch.tensor([5, 2]), torch.tensor([2, 1])),
        ):
            args: list[Any] = [[x], [x, y], [x, y, x / 2], [x, torch.float64], [x, x > y, y], [x > 1, x > y, y > x]]
            for given in args:
                if name in ("relu", "selu") and len(given) > 1:
                    # the second is whether to write in place
                    continue
                try:
                    want = spelling(*given)
                except (TypeError, RuntimeError, AttributeError):
                    continue
                if not isinstance(want, Tensor):
                    continue
                got = function(given[1], given[0], *given[2:]) if swap else function(*given)
                torch.testing.assert_close(got, want, equal_nan=True)


def test_kinds_are_torchs() -> None:
    """Dtypes and shapes of one pair: floor division, promotion by numbers, default dtype, rows."""
    row = torch.rand(5, 7, dtype=torch.float64, device="cpu")
    for function in (
        lambda s, b, h, q, k: q / 2,
        lambda s, b, h, q, k: q // 2.0,
        lambda s, b, h, q, k: (q > 2) + 1,
        lambda s, b, h, q, k: s.half() * 2.5 + q,
        lambda s, b, h, q, k: (q % 7).to(torch.uint8) - 300,
        lambda s, b, h, q, k: row[q] * s,
        lambda s, b, h, q, k: row[q, 1:4].sum() + s,
        lambda s, b, h, q, k: torch.stack([s, s * q]),
    ):
        one = [torch.zeros((), dtype=torch.float32), *torch.zeros(4, dtype=torch.int64).unbind()]
        want = function(*one)
        result = trace(function, torch.float32).typed().result
        assert (result.dtype, result.shape) == (want.dtype, tuple(want.shape))
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        assert trace(lambda b, h, q, k: q / 2).result.dtype == torch.float64
    finally:
        torch.set_default_dtype(before)


def test_writes_to_symbols_are_operations() -> None:
    """Other names of a symbol see a write, and a write keeps the dtype."""

    def function(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        r = s
        s += q
        r.mul_(2).clamp_(min=TABLE.double()[0, 1])
        k += 1
        return s + k

    graph = trace(function, torch.float32)
    assert names(graph) == ["add", "mul", "clamp", "to", "add", "add"]
    # s is r
    assert [each.name for each in graph.result.args] == ["to", "add"]
    assert graph.result.args[0].dtype == torch.float32


@pytest.mark.parametrize(
    "function",
    [
        lambda s, b, h, q, k: (s[None].add_(1).sum(), s)[1],
        lambda s, b, h, q, k: (v := s.view(1), s.add_(1), v.sum())[2],
        lambda s, b, h, q, k: (v := torch.unsqueeze(input=s, dim=0), s.add_(1), v.sum())[2],
        lambda s, b, h, q, k: (s.detach().add_(1), s)[1],
        lambda s, b, h, q, k: TABLE.float()[q].add_(1)[0] + s,
        lambda s, b, h, q, k: q.add_(0.5) + s,
        lambda s, b, h, q, k: s.add_(TABLE[0]),
        lambda s, b, h, q, k: operator.setitem(s, ..., 1),
        lambda s, b, h, q, k: torch.add(s, 1, out=s),
        lambda s, b, h, q, k: F.relu(s, True),
        lambda s, b, h, q, k: s.set_(TABLE),
    ],
)
def test_writes_that_a_view_may_share_are_refused(function: Function) -> None:
    with pytest.raises(UntraceableError, match="writes"):
        trace(function, torch.float32)


# ---- identity --------------------------------------------------------------------------------------------------------


class Window:
    """An object to call, with an attribute of its class and one of its own."""

    step = 1

    def __init__(self) -> None:
        self.reach = 3

    def __call__(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return self.near((q - k) // self.step)

    def near(self, distance: Any) -> Any:
        return distance.abs() <= self.reach


class Slotted:
    __slots__ = ("reach",)


class Looked(dict):  # type: ignore[type-arg]
    def __getattr__(self, name: str) -> Any:
        return self[name]


ARRAY = np.arange(9)


class Changes:
    """Functions that read a value of each kind, and changes of the values."""

    def __init__(self) -> None:
        box, held, table, array = [3], {"a": (1, [3]), "z": 0.0}, torch.arange(9, device="cpu"), np.arange(9)
        space, module = types.SimpleNamespace(reach=3, table=table.clone()), types.ModuleType("settings")
        module.__dict__["reach"] = 3
        net = torch.nn.Linear(1, 1, device="cpu")
        width = 3

        def rebind(to: int) -> None:
            nonlocal width
            width = to

        def default(b: Any, h: Any, q: Any, k: Any, w: int = 3) -> Any:
            return q - k < w

        def code(b: Any, h: Any, q: Any, k: Any) -> Any:
            return q >= k

        def keyword(b: Any, h: Any, q: Any, k: Any, *, w: int = 3) -> Any:
            return q - k < w

        def attribute(b: Any, h: Any, q: Any, k: Any) -> Any:
            return q - k < attribute.reach  # type: ignore[attr-defined]

        def helper(x: Any) -> Any:
            return x <= space.reach

        def imports(b: Any, h: Any, q: Any, k: Any) -> Any:
            from tests.trace.test_symbols import ARRAY

            return q - k < int(ARRAY[3])

        def imports_from(b: Any, h: Any, q: Any, k: Any) -> Any:
            from . import test_symbols

            return q - k < int(test_symbols.ARRAY[3])

        @functools.lru_cache
        def cached(nothing: int) -> int:
            return int(ARRAY[3])

        def count_on() -> None:
            operator.iadd(ARRAY, 1)
            cached.cache_clear()

        attribute.reach = 3  # type: ignore[attr-defined]
        Window.step = 1
        window, slotted, looked, view = Window(), Slotted(), Looked(reach=3), memoryview(bytearray([3]))
        slotted.reach = 3  # type: ignore[attr-defined]
        part = functools.partial(lambda b, h, q, k, w: q - k < w, w=3)
        learns = torch.ones(3, device="cpu")
        self.cases: dict[str, tuple[Function, Callable[[], object]]] = {
            "closure": (lambda b, h, q, k: q - k < width, lambda: rebind(5)),
            "global": (lambda b, h, q, k: q - k < WIDTH, lambda: globals().update(WIDTH=5)),
            "list": (lambda b, h, q, k: q - k < box[0], lambda: operator.setitem(box, 0, 5)),
            "nested": (lambda b, h, q, k: q - k < held["a"][1][0], lambda: operator.setitem(held["a"][1], 0, 5)),
            "object": (lambda b, h, q, k: q - k < space.reach, lambda: setattr(space, "reach", 5)),
            "module": (lambda b, h, q, k: q - k < getattr(module, "rea" + "ch"), lambda: setattr(module, "reach", 5)),
            "default": (default, lambda: setattr(default, "__defaults__", (5,))),
            "keyword": (keyword, lambda: operator.setitem(keyword.__kwdefaults__, "w", 5)),
            "partial": (part, lambda: part.keywords.update(w=5)),
            "partial of an object": (
                functools.partial(lambda own, b, h, q, k: q - k < own.reach, window),
                lambda: setattr(window, "reach", 5),
            ),
            "attribute of the function": (attribute, lambda: setattr(attribute, "reach", 5)),
            "inner function": (lambda b, h, q, k: (lambda x: x < width)(q - k), lambda: rebind(5)),
            "helper": (lambda b, h, q, k: helper(q - k), lambda: setattr(space, "reach", 5)),
            "globals()": (lambda b, h, q, k: q - k < globals()["WIDTH"], lambda: globals().update(WIDTH=5)),
            "import": (imports, lambda: operator.iadd(ARRAY, 1)),
            "relative import": (imports_from, lambda: operator.iadd(ARRAY, 1)),
            "cache": (lambda b, h, q, k: q - k < cached(0), count_on),
            "called": (window, lambda: setattr(window, "reach", 5)),
            "method": (window.__call__, lambda: setattr(window, "reach", 5)),
            "class": (window, lambda: setattr(Window, "step", 2)),
            "slots": (lambda b, h, q, k: q - k < slotted.reach, lambda: setattr(slotted, "reach", 5)),
            "looked up": (lambda b, h, q, k: q - k < looked.reach, lambda: looked.update(reach=5)),
            "memory": (lambda b, h, q, k: q - k < view[0], lambda: operator.setitem(view, 0, 5)),
            "in a list": (lambda b, h, q, k: q - k < [window][0].reach, lambda: setattr(window, "reach", 5)),
            "code": (code, lambda: setattr(code, "__code__", (lambda b, h, q, k: q > k).__code__)),
            "type of a number": (lambda b, h, q, k: q * box[0] >= k, lambda: operator.setitem(box, 0, float(box[0]))),
            "bool for a number": (lambda b, h, q, k: q * held["n"] >= k, lambda: held.update(n=True)),
            "sign of zero": (lambda b, h, q, k: q * held["z"] >= k, lambda: held.update(z=-0.0)),
            "tensor, in place": (lambda b, h, q, k: table[q] >= k, lambda: table.add_(1)),
            "tensor, .data": (lambda b, h, q, k: table[q] >= k, lambda: table.data.add_(1)),
            "tensor, numpy": (lambda b, h, q, k: table[q] >= k, lambda: operator.iadd(table.numpy(), 1)),
            "tensor of an object": (lambda b, h, q, k: space.table[q] >= k, lambda: setattr(space, "table", table + 1)),
            "array": (lambda b, h, q, k: torch.as_tensor(array)[q] >= k, lambda: operator.iadd(array, 1)),
            "array, seen by no mode": (
                lambda b, h, q, k: torch.from_numpy(array)[q] >= k,
                lambda: operator.iadd(array, 1),
            ),
            "entry of an array": (lambda b, h, q, k: q - k < int(array[3]), lambda: operator.iadd(array, 1)),
            "number of numpy": (lambda b, h, q, k: q - k < array[3], lambda: operator.iadd(array, 1)),
            "computed table": (lambda b, h, q, k: (table * 2 + 1).cumsum(0)[q] >= k, lambda: table.add_(1)),
            "parameter": (lambda b, h, q, k: q * net.weight[0, 0] >= k, lambda: net.weight.data.add_(1)),
            "item": (lambda b, h, q, k: q - k < table[2].item(), lambda: table.add_(1)),
            "branch": (lambda b, h, q, k: q >= k if bool(table[0] > 100) else q > k, lambda: table.add_(500)),
            "size": (lambda b, h, q, k: q - k < space.table.shape[0], lambda: setattr(space, "table", table[:5])),
            "gradient": (lambda b, h, q, k: learns[q] > k, lambda: learns.requires_grad_()),
            "default dtype": (lambda b, h, q, k: q / 3 > k, lambda: torch.set_default_dtype(torch.float64)),
        }
        held["n"] = 1


@pytest.mark.parametrize("name", Changes().cases)
def test_every_change_is_another_key(name: str) -> None:
    """Two traces have one key while nothing changes, and another one after any change."""
    function, change = Changes().cases[name]
    try:
        before, again = identity(function), identity(function)
        change()
        assert before == again
        assert hash(before) == hash(again)
        assert identity(function) != before
    finally:
        torch.set_default_dtype(torch.float32)
        globals().update(WIDTH=3)


def test_functions_of_one_text_have_one_key() -> None:
    functions = [lambda b, h, q, k: (q - k < 5) & (TABLE[0][q] == TABLE[0][k]) for _ in range(3)]
    assert len({identity(each) for each in functions}) == 1


def test_scores_of_another_dtype_have_another_key() -> None:
    """A function rounds in the dtype of its score, so its terms differ."""
    keys = [trace(lambda s, b, h, q, k: s - 0.1 * (q - k).abs(), dtype).key for dtype in (torch.float32, torch.float64)]
    assert keys[0] != keys[1]


def test_gradients_are_kept_apart() -> None:
    """A table that was computed without gradients is not the one with gradients."""
    weight = torch.ones(3, requires_grad=True, device="cpu")

    def function(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        with_gradient = weight * 2
        with torch.no_grad():
            without = weight * 2
        return s + with_gradient[q] + without[k]

    values = [node.value for node in trace(function, torch.float32).nodes if node.name == "call"]
    assert [x.requires_grad for x in values] == [True, False]


# ---- refusals --------------------------------------------------------------------------------------------------------


def _suppressed(b: Any, h: Any, q: Any, k: Any) -> Any:
    with contextlib.suppress(Exception):
        return q > k if q > 5 else q < k
    return q >= k


def _no_grad(b: Any, h: Any, q: Any, k: Any) -> Any:
    with torch.no_grad():
        return q > k


def _autocast(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return s[None] @ TABLE.float()[0, :1]


class Twice(torch.autograd.Function):
    """Twice its argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


REFUSED: dict[str, tuple[str, Function]] = {
    "if": ("number", lambda b, h, q, k: q if q > k else k),
    "caught": ("number", _suppressed),
    "chain": ("number", lambda b, h, q, k: 0 <= q - k < 5),
    "and": ("number", lambda b, h, q, k: q > k and q > 1),
    "int": ("number", lambda b, h, q, k: [1, 2][q]),
    "range": ("number", lambda b, h, q, k: sum(range(q)) > k),
    "item": ("item", lambda b, h, q, k: q.item() > k),
    "max": ("number", lambda b, h, q, k: max(q, k)),
    "in": ("number", lambda b, h, q, k: q in (1, 2)),
    "in symbol": ("number", lambda b, h, q, k: 1 in q),
    "numpy": ("number", lambda b, h, q, k: np.asarray(q) > 1),
    "array": ("ndarray", lambda b, h, q, k: q + np.arange(3)),
    "tolist": ("tolist", lambda b, h, q, k: q.tolist()),
    "copy": ("number", lambda b, h, q, k: copy.copy(q)),
    "T": (r"\.T", lambda b, h, q, k: q.T),
    "requires_grad": ("requires_grad", lambda b, h, q, k: q + q.requires_grad),
    "set": ("sets", lambda b, h, q, k: setattr(q, "requires_grad", True)),
    "rand": ("random", lambda b, h, q, k: q > torch.rand(())),
    "overload": ("random", lambda b, h, q, k: q > torch.ops.aten.rand.default([1])[0]),
    "dropout": ("random", lambda b, h, q, k: F.dropout(q.float())),
    "empty": ("memory", lambda b, h, q, k: q > torch.empty(())),
    "strides": ("memory", lambda b, h, q, k: TABLE[0].as_strided((3,), (4,))[q]),
    "strides of a row": ("memory", lambda b, h, q, k: torch.as_strided(TABLE[q], (2,), (3,))[0]),
    "gumbel": ("random", lambda b, h, q, k: F.gumbel_softmax(TABLE.float())[0, q]),
    "write": ("writes", lambda b, h, q, k: TABLE.add_(1)[q]),
    "write, overload": ("writes", lambda b, h, q, k: torch.ops.aten.add_.Scalar(TABLE, 1)[q]),
    "write, item": ("writes", lambda b, h, q, k: operator.setitem(TABLE, 0, 1)),
    "write of a symbol": ("writes", lambda b, h, q, k: operator.setitem(TABLE, 0, q)),
    "write, at a symbol": ("writes", lambda b, h, q, k: operator.setitem(TABLE, q, 0)),
    "write, grad": ("writes", lambda b, h, q, k: setattr(TABLE, "grad", None)),
    "write, data": ("writes", lambda b, h, q, k: TABLE.data.add_(1)[q]),
    "write, list": ("writes", lambda b, h, q, k: torch._foreach_add_([TABLE], 1)),
    "no_grad": ("without gradients", _no_grad),
    "Function": ("without gradients", lambda b, h, q, k: Twice.apply(q)),
    "vmap": ("ordinary", lambda b, h, q, k: torch.vmap(lambda x: x + 1)(TABLE)[0, q]),
    "sparse": ("ordinary", lambda b, h, q, k: q + TABLE.to_sparse()),
    "subclass": ("ordinary", lambda b, h, q, k: TABLE.as_subclass(Other)[0, 1] + q),
    "object": ("object", lambda b, h, q, k: q == object()),
    "moves": ("another device", lambda b, h, q, k: q.to("cuda")),
    "error": ("ZeroDivisionError", lambda b, h, q, k: q + 1 // 0),
}  # fmt: skip
SCRIPTED = torch.nn.Linear(1, 1, device="cpu")


def _scripted() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(SCRIPTED, torch.zeros(1, device="cpu"))


def test_code_that_may_read_other_tensors() -> None:
    """TorchScript is refused with symbols; what it makes of captured tensors is known by its contents."""
    layer, ones = _scripted(), torch.ones(1, device="cpu")
    with pytest.raises(UntraceableError, match="other tensors"):
        trace(lambda s, b, h, q, k: layer(s[None])[0], torch.float32)

    def function(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + layer(ones)[q]

    before = identity(function, torch.float32)
    assert before == identity(function, torch.float32)
    SCRIPTED.weight.data.add_(1)
    assert before != identity(function, torch.float32)


REFUSED_TYPES: dict[str, Function] = {
    "too many": lambda b, h, q, k: TABLE[b, h, q],
    "out of range": lambda b, h, q, k: TABLE[q, 4],
    "bool": lambda b, h, q, k: TABLE[q > k],
    "float": lambda b, h, q, k: TABLE[q / 2],
    "slice": lambda b, h, q, k: TABLE[0, q:],
    "shapes": lambda b, h, q, k: TABLE[q] + torch.ones(3),
    "pair": lambda b, h, q, k: TABLE[q].max(0)[0],
}


class Other(Tensor):
    """A subclass, which may do anything."""


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    """A function that a graph cannot record is refused, and has written to nothing."""
    said, function = REFUSED[name]
    before = TABLE.clone()
    with pytest.raises(UntraceableError, match=said):
        trace(function)
    assert torch.equal(TABLE, before)
    assert TABLE.grad is None


@pytest.mark.parametrize("name", REFUSED_TYPES)
def test_operations_that_fail_for_a_pair_are_refused(name: str) -> None:
    with pytest.raises(UntraceableError):
        trace(REFUSED_TYPES[name]).typed()


def test_autocast_inside_is_refused() -> None:
    with pytest.raises(UntraceableError, match="autocast"):
        trace(_autocast, torch.float32)


def test_a_captured_tensor_that_code_without_a_mode_writes() -> None:
    table = torch.zeros(3, device="cpu")
    with pytest.raises(UntraceableError, match="writes"):
        trace(lambda b, h, q, k: (table[q], torch._C.DisableTorchFunction, _hidden_write(table))[0])


def _hidden_write(x: Tensor) -> None:
    with torch._C.DisableTorchFunction():
        x.add_(1)


def test_a_symbol_of_another_trace_is_refused() -> None:
    kept: list[Any] = []
    trace(lambda b, h, q, k: kept.append(q) or q)
    for function in (lambda b, h, q, k: kept[0] + q, lambda b, h, q, k: q + kept[0], lambda b, h, q, k: kept[0]):
        with pytest.raises(UntraceableError, match="earlier call"):
            trace(function)
    with pytest.raises(UntraceableError, match="outlives"):
        torch.add(kept[0], 1)


class Watching(TorchFunctionMode):
    """A mode of a caller."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_modes_of_a_caller() -> None:
    """A mode of the caller would not see operations on scores; that of ``torch.device`` makes tensors somewhere else."""
    with Watching(), pytest.raises(UntraceableError, match="function mode"):
        trace(lambda score, b, h, q, k: score + q, torch.float32)
    with Watching():
        assert names(trace(lambda b, h, q, k: q >= k)) == ["ge"]
    with torch.device("cpu"):
        assert names(trace(lambda b, h, q, k: q >= k + torch.zeros(()))) == ["add", "ge"]


# ---- attributes ------------------------------------------------------------------------------------------------------


def test_symbols_have_every_attribute_of_tensors() -> None:
    """``hasattr`` never lies: what a tensor has is recorded, answered, or refuses the function."""
    missing = [name for name in dir(Tensor) if not name.startswith("__") and name not in Symbol.__dict__]
    assert missing == []
    for name in (
        "bool",
        "int",
        "float",
        "index",
        "len",
        "iter",
        "contains",
        "array",
        "format",
        "add",
        "rmatmul",
        "iadd",
    ):
        assert hasattr(Symbol, f"__{name}__")
    assert not hasattr(Symbol, "no_attribute_of_tensors")


def test_answers_are_those_of_a_number() -> None:
    seen: list[Any] = []

    def function(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        seen.extend([s.dtype, q.dtype, s.shape, s.ndim, s.dim(), s.size(), s.numel(), s.device, q.is_floating_point()])
        seen.extend(
            [(s > 1).dtype, (q / 2).dtype, TABLE[q].shape, TABLE[q].size(0), torch.numel(s), s.is_floating_point()]
        )
        return s

    trace(function, torch.bfloat16)
    none = torch.Size(())
    assert seen[:9] == [torch.bfloat16, torch.int64, none, 0, 0, none, 1, torch.device("cpu"), False]
    assert seen[9:] == [torch.bool, torch.float32, torch.Size([4]), 4, 1, True]


def test_random_names_are_random() -> None:
    assert {
        "rand",
        "randn_like",
        "bernoulli_",
        "dropout",
        "empty",
        "new_empty",
        "poisson",
        "rrelu",
        "randperm",
    } <= UNDETERMINED
    assert not {"normalize", "poisson_nll_loss", "layer_norm", "__rand__", "and", "round"} & UNDETERMINED


# ---- where it runs ---------------------------------------------------------------------------------------------------


def test_threads_trace_at_the_same_time() -> None:
    keys: list[Hashable] = []
    barrier = threading.Barrier(4)

    def act(width: int) -> None:
        barrier.wait()
        keys.extend(trace(lambda b, h, q, k: (q - k < width) & (TABLE[h, q % 4] > 0)).key for _ in range(50))

    threads = [threading.Thread(target=act, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(keys) == 200
    assert len(set(keys)) == 4


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_the_callers_mode_is_no_part_of_a_trace(context: Any) -> None:
    with context():
        graph = trace(lambda b, h, q, k: TABLE[0, q] >= k)
        assert names(graph) == ["index", "ge"]
    assert torch.is_grad_enabled()


def test_a_refused_function_leaves_the_callers_mode() -> None:
    """A function that switches gradients off, and does not reach the line that switches them on."""

    def function(b: Any, h: Any, q: Any, k: Any) -> Any:
        torch.set_grad_enabled(False)
        inside = q >= k
        torch.set_grad_enabled(True)
        return inside

    with pytest.raises(UntraceableError, match="without gradients"):
        trace(function)
    assert torch.is_grad_enabled()


def test_long_formulas() -> None:
    graph = trace(lambda b, h, q, k: functools.reduce(lambda x, n: x + n, range(3000), q)).typed()
    assert graph.result.dtype == torch.int64


def test_the_compiler_traces_a_trace() -> None:
    """Masks of models are read while torch.compile traces, without a break of the graph."""
    table = torch.arange(9, device="cpu")

    def build(x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
            inside = q.new_ones((), dtype=torch.bool) & (q - k < 5) & torch.le(k, q)
            return inside & (ids[b, q] == ids[b, k]) & (table[q] >= 0)

        graph = trace(mask)
        names = [node.name for node in graph.nodes]
        assert graph.typed().result.dtype == torch.bool
        return x + names.count("index"), graph.tensors[-2] + graph.tensors[-1].sum()

    torch._dynamo.reset()
    ids = torch.zeros(2, 9, dtype=torch.long, device="cpu")
    count, found = torch.compile(build, backend="eager", fullgraph=True)(torch.zeros(2), ids)
    assert count.tolist() == [3, 3]
    assert torch.equal(found, ids + table.sum())


@pytest.mark.parametrize(
    "mask",
    [
        lambda b, h, q, k: k <= q,
        lambda b, h, q, k: q.new_ones((), dtype=torch.bool) & (k > q - 5) & (k <= q),
        lambda b, h, q, k: (abs(q - k) <= 5) | ~((q + 3) // 4 == k % 7),
    ],
)
def test_a_graph_of_numbers_follows_from_its_key(mask: Any) -> None:
    graph = trace(mask)
    again = graph_of(graph.key)
    assert again is not None
    assert again.key == graph.key
    assert repr(again.result) == repr(graph.result)


def test_a_key_of_another_dtype_has_no_graph() -> None:
    *steps, _ = trace(lambda b, h, q, k: k <= q).key
    assert graph_of((*steps, torch.float64)) is None
