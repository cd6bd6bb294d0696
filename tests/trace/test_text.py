"""A graph's text reads back as the graph: the same key, and the same pairs."""

from __future__ import annotations

import math
import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ringweave import PatternError
from ringweave.trace.graph import UntraceableError
from ringweave.trace.operations import ELEMENTWISE, FUNCTIONS, OPERATORS
from ringweave.trace.symbols import trace
from ringweave.trace.text import TextFunction, text_of
from ringweave.types import Place

from ..fuzz.strategies import outcomes
from ..sampled import is_long
from .definitions import by_pair
from .masks import drawn, masks
from .test_relation_fuzz import MASKS, defined

TABLE = torch.arange(60).view(3, 4, 5)
ROW = torch.arange(60)
PLACE = Place(2, 3, 14, 17)


def read_back(function: Callable[..., Any], dtype: torch.dtype | None = None) -> TextFunction:
    """Return the function of a function's text, which has the same graph."""
    graph = trace(function, dtype)
    text = text_of(graph)
    assert text is not None
    assert text == text_of(graph.without_values())  # calls keep graphs without values
    again = TextFunction(text, graph.tensors)
    assert trace(again, dtype).key == graph.key, text
    return again


def text(function: Callable[..., Any]) -> str:
    return read_back(function).text


# each chain of 300 operations takes seconds; that of "or" stays
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.long] * (name == "hostile: chain of and"))
        for name, mask in masks().items()
        if mask.state != "refused"
    ],
)
def test_the_corpus(name: str) -> None:
    function = masks()[name].function
    again = read_back(function)
    assert torch.equal(by_pair(pickle.loads(pickle.dumps(again)), PLACE), by_pair(function, PLACE))


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda b, h, q, k: q >= k, "q >= k"),
        (lambda b, h, q, k: (ROW[q] == ROW[k]) & (q >= k), "(t0[q] == t0[k]) & (q >= k)"),
        (lambda b, h, q, k: 5 - (q - (k - 2)) * -3 < 2**q, "5 - (q - (k - 2)) * -3 < 2 ** q"),
        (lambda b, h, q, k: (-1) ** q == (-q) ** 2, "(-1) ** q == (-q) ** 2"),
        # one operation in two expressions has brackets of its own in each
        (lambda b, h, q, k: q - k + 1 - (q - k) > 0, "q - k + 1 - (q - k) > 0"),
        (lambda b, h, q, k: ~(q < k) ^ ((q == k) == (b == h)), "~(q < k) ^ ((q == k) == (b == h))"),
        (lambda b, h, q, k: TABLE[b][h][q % 5] > 0, "t0[b][h][q % 5] > 0"),
        (lambda b, h, q, k: TABLE[b, 1:, ..., None].sum() > k, "t0[b, 1:, :, None].sum() > k"),
        (lambda b, h, q, k: (ROW[::2][q] > 0) & (ROW[-1] >= k), "(t0[::2][q] > 0) & (t0[-1] >= k)"),
        (lambda b, h, q, k: torch.div(q, 3, rounding_mode="floor") < k, "torch.div(q, 3, rounding_mode='floor') < k"),
        (lambda b, h, q, k: q.float().to(torch.float16) < k, "q.to(torch.float32).to(torch.float16) < k"),
        (lambda b, h, q, k: q.contiguous().masked_fill(q > k, 3) > k, "masked_fill(q.contiguous(), q > k, 3) > k"),
        (lambda b, h, q, k: F.gelu(q / 2) < q.clamp(max=3), "gelu(q / 2) < q.clamp(max=3)"),
        (lambda b, h, q, k: q.new_ones((), dtype=torch.bool) & (q > k), "one(torch.bool) & (q > k)"),
        (lambda b, h, q, k: q.new_zeros((), dtype=torch.int32) > k, "zero(torch.int32) > k"),
        (lambda b, h, q, k: torch.stack([q, k]).amax(0) > 3, "torch.stack([q, k]).amax(0) > 3"),
        (lambda b, h, q, k: ROW.view(torch.Size([60]))[q] > k, "t0.view(Size((60,)))[q] > k"),
        (
            lambda b, h, q, k: ROW.to("cpu", torch.int32, copy=True)[q] > k,
            "t0.to('cpu', torch.int32, copy=True)[q] > k",
        ),
        (lambda b, h, q, k: ROW.to(torch.device("cpu"))[q] > k, "x0 = t0.to(device('cpu')); t0[q] > k"),
        (lambda b, h, q, k: TABLE.max(1).values[b, q % 5] > k, "x0 = t0.max(1); x0[0][b, q % 5] > k"),
        (lambda b, h, q, k: TABLE[b, q % 4][..., 0] == k, "t0[b, q % 4][0] == k"),
        (
            lambda b, h, q, k: torch.einsum("i,i->", TABLE[b, h], TABLE[b, 0]) > k,
            "torch.einsum('i,i->', t0[b, h], t0[b, 0]) > k",
        ),
        (
            lambda b, h, q, k: ROW.clone(memory_format=torch.contiguous_format)[q] > k,
            "t0.clone(memory_format=torch.contiguous_format)[q] > k",
        ),
        (lambda b, h, q, k: F.pad(ROW, (1, 0))[q] > k, "F.pad(t0, (1, 0), mode='constant', value=None)[q] > k"),
        (
            lambda b, h, q, k: torch.arange(20)[q] + torch.zeros((), dtype=torch.int64, device="cpu") > k,
            "torch.arange(20)[q] + torch.zeros((), dtype=torch.int64, device='cpu') > k",
        ),
        (lambda b, h, q, k: True, "True"),
    ],
)
def test_notation(function: Callable[..., Any], expected: str) -> None:
    assert text(function) == expected
    assert torch.equal(by_pair(read_back(function), PLACE), by_pair(function, PLACE))


def test_operations_stay_in_order() -> None:
    """A value that is computed before its place in an expression has a name."""

    def mask(b, h, q, k):  # type: ignore[no-untyped-def]
        near = (q - k).abs() <= 3
        unused = q + 77  # noqa: F841
        first = k < 2
        return first | near

    assert text(mask) == "x0 = abs(q - k) <= 3; x1 = q + 77; (k < 2) | x0"


def test_the_order_of_tensors_is_that_of_their_first_use() -> None:
    low, high = torch.zeros(20), torch.ones(20)

    def mask(b, h, q, k):  # type: ignore[no-untyped-def]
        later = high[q] > 0
        return (low[q] == 0) & later & (high[k] > 0)

    assert text(mask) == "x0 = t0[q] > 0; (t1[q] == 0) & x0 & (t0[k] > 0)"


CONSTANTS = [
    0, 1, -1, True, 1.0, 0.0, -0.0, math.inf, -math.inf, math.nan, 1e-300, 0.1, 2**63 - 1, -(2**63), np.float32(0.1), np.int64(3),
    np.bool_(True), 1 / 3, 5e-324,
]  # fmt: skip


def test_constants_stay_what_they_are() -> None:
    """Numbers of equal value, or of equal text, are different constants."""
    graphs = {}
    for x in CONSTANTS:
        again = read_back(lambda b, h, q, k, x=x: torch.where(q > k, x, q / 2) > 0)
        graphs[again.text] = trace(again).key
    # np.bool_(True) is True, and no other two are one
    assert len(graphs) == len(set(graphs.values())) == len(CONSTANTS) - 1


def test_shared_values_have_one_place() -> None:
    """A value that is used twice in each of 60 steps has a text as long as its steps."""

    def doubled(b, h, q, k):  # type: ignore[no-untyped-def]
        x = q - k
        for _ in range(60):
            x = (x + 1) * x // 3
        return x > 0

    assert len(text(doubled)) < 60 * 40


def test_long_formulas() -> None:
    """Thousands of operations, in a chain or nested in brackets."""

    def chain(b, h, q, k):  # type: ignore[no-untyped-def]
        found = q == k
        for step in range(2000):
            found = found | (q - k == step)
        return found

    def nested(b, h, q, k):  # type: ignore[no-untyped-def]
        x = q
        for step in range(2000):
            x = step - x
        return x > k

    for function in (chain, nested):
        assert len(text(function)) < 2000 * 40


def program(seed: int) -> Callable[..., Any]:
    """Return a random function that computes values in any order, and uses them once, several times, or never."""
    r = random.Random(seed)
    tensors = [torch.randint(0, 9, (40,), generator=drawn(i)) for i in range(3)]
    steps = [(r.randrange(8), r.random(), r.random(), r.randint(-9, 9)) for _ in range(r.randint(3, 40))]

    def function(b, h, q, k):  # type: ignore[no-untyped-def]
        values = [b, h, q, k]
        found = [q >= k]
        for kind, i, j, number in steps:
            x, y = values[int(i * len(values))], values[int(j * len(values))]
            match kind:
                case 0:
                    values.append(x + y * number)
                case 1:
                    values.append(x - y)
                case 2:
                    values.append(tensors[number % 3][y % 40])
                case 3:
                    values.append(torch.where(found[int(i * len(found))], x, number))
                case 4:
                    values.append(torch.div(x, abs(number) + 1, rounding_mode="floor"))
                case 5:
                    found.append(x <= y)
                case 6:
                    found.append(found[int(i * len(found))] ^ ~found[int(j * len(found))])
                case 7:
                    values.append(tensors[number % 3][:20].flip(0).cumsum(0)[x % 20])
        return found[-1] | (values[-1] == number)

    return function


@pytest.mark.parametrize("part", range(4 if is_long() else 2))
def test_random_programs(part: int) -> None:
    for seed in range(part * 30, (part + 1) * 30):
        function = program(seed)
        assert torch.equal(by_pair(read_back(function), PLACE), by_pair(function, PLACE)), seed


def is_read_back(mask: tuple[str, Place]) -> None:
    text, place = mask
    function, want = defined((text, place._replace(nq=9, nk=11)))
    try:
        trace(function)
    except UntraceableError:
        return
    again = read_back(function)
    assert want is None or torch.equal(by_pair(again, place._replace(nq=9, nk=11)), want)


def test_random_masks() -> None:
    outcomes(is_read_back, MASKS, 150 if is_long() else 60)


def test_score_functions_have_texts() -> None:
    bias = torch.randn(4, requires_grad=True)
    again = read_back(
        lambda s, b, h, q, k: torch.where(q >= k, 30 * (s / 30).tanh() + bias[h], -math.inf), torch.float32
    )
    assert again.text == "where(q >= k, 30 * tanh(score / 30) + t0[h], -inf)"


def test_every_operation_that_graphs_know() -> None:
    """Of 1 to 3 numbers, each is written and read by its name."""
    found = set()
    for name, function in FUNCTIONS.items():
        for count in (1, 2, 3):

            def mask(b, h, q, k, function=function, count=count):  # type: ignore[no-untyped-def]
                numbers = (q / 40, k / 40 + 0.1, 0.5 + 0 * q)[:count]
                return function(*numbers) > 0

            try:
                graph = trace(mask)
                graph.typed()
            except UntraceableError:
                continue
            assert name in read_back(mask).text or name in OPERATORS
            found.add(name)
    # the others need whole numbers, bool, or a symbol with its methods
    assert ELEMENTWISE - found <= {
        "and", "or", "xor", "invert", "lshift", "rshift", "to", "where", "logit", "masked_fill", "fmod", "clamp_max", "clamp_min", "contiguous",
    }  # fmt: skip


def test_tensors_are_not_part_of_the_text() -> None:
    """Functions of one text and other dtypes or shapes of tensors are other graphs."""
    tables = [ROW, ROW.int(), ROW[:40], ROW.float().requires_grad_()]
    graphs = [trace(lambda b, h, q, k, x=x: x[q] == x[k]) for x in tables]
    assert len({text_of(graph) for graph in graphs}) == 1
    assert len({graph.key for graph in graphs}) == len(tables)
    for graph in graphs:
        assert trace(TextFunction(str(text_of(graph)), graph.tensors)).key == graph.key


def test_functions_without_a_text() -> None:
    """Overloads of operators have no name that Python's code would have."""
    assert text_of(trace(lambda b, h, q, k: torch.ops.aten.sub.Tensor(q, k) > 0)) is None
    assert text_of(trace(lambda b, h, q, k: torch.ops.aten.sub(q, k) > 0)) is None


@pytest.mark.parametrize(
    "text",
    [
        "", "q >", "q >= k >= b", "q and k", "q if k else b", "lambda: q", "[x for x in q]", "q.__class__ > k", "q.data > k",
        "__import__('os')", "eval('q')", "torch.load('x')", "torch.hub.load('x')", "torch.serialization.load('x')", "torch.ops > k",
        "F.os", "Tensor.add(q, k)._backward_hooks", "x0 += q; x0", "import os; q > k", "f'{q}' > k", "q.numpy.x()", "(y := q) > k",
        "x0, x1 = q, k; x0 > x1", "clamp(*q)", "q.clamp(**k)", "q[lambda: k]", "unknown(q)", "q.unknown(k)", "(" * 300 + "q" + ")" * 300,
        "-" * 30000 + "q", "(lambda: q)(k)", "torch.set_num_threads",
    ],
)  # fmt: skip
def test_only_texts_of_graphs_are_read(text: str) -> None:
    with pytest.raises(PatternError, match="the text of a function: got"):
        TextFunction(text, ())


def test_other_tensors() -> None:
    """The text of a function computes with tensors of its own."""
    other = torch.zeros_like(ROW)
    again: Callable[..., Tensor] = TextFunction(text(lambda b, h, q, k: ROW[q] == ROW[k]), [other])
    assert by_pair(again, PLACE).all()
