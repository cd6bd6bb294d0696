"""Graphs on many pairs have the values and the gradients of their functions, pair by pair."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ringweave.trace.evaluate import Formula, evaluated
from ringweave.trace.graph import UntraceableError
from ringweave.trace.symbols import trace
from ringweave.trace.vmapped import ScalarIndices, over_pairs

from .. import oracle

# torch has no rule to map some operations in place, and maps them one by one
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")

CPU = torch.device("cpu")
R, NQ, NK = 3, 5, 7
Function = Callable[..., Tensor]


def pairs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, dict[str, Tensor]]:
    """Return scores of three rows of tiles, (R, queries, keys), and their indices."""
    generator = torch.Generator(CPU).manual_seed(1)
    scores = torch.randn(R, NQ, NK, generator=generator, dtype=dtype, device=CPU)
    b, h = torch.tensor([0, 1, 1], device=CPU), torch.tensor([1, 0, 1], device=CPU)
    q, k = torch.arange(R * NQ, device=CPU).view(R, NQ, 1), torch.arange(R * NK, device=CPU).flip(0).view(R, 1, NK)
    return scores, {"b": b[:, None, None], "h": h[:, None, None], "q": q, "k": k}


def captured(dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator(CPU).manual_seed(2)
    shapes: dict[str, tuple[int, ...]] = {"slopes": (2,), "table": (2, 15, 21), "rows": (21, 4), "one": ()}
    return {name: torch.randn(shape, generator=generator, device=CPU).to(dtype) for name, shape in shapes.items()}


class Captured:
    """Tensors that functions read."""

    slopes: Tensor
    table: Tensor
    rows: Tensor
    one: Tensor

    def __init__(self, tensors: dict[str, Tensor]):
        vars(self).update(tensors)


# functions of the captured tensors, and whether sums of products are computed in another order than by vmap
FUNCTIONS: dict[str, tuple[Callable[[Captured], Function], bool]] = {
    "square": (lambda c: lambda s, b, h, q, k: s + c.slopes[h] * s * s, False),
    "table": (lambda c: lambda s, b, h, q, k: s * torch.sigmoid(c.table[h, q, k]), False),
    "rows of rows": (lambda c: lambda s, b, h, q, k: s + c.table[h][q][k] * c.table[b][..., k][q], False),
    "columns": (lambda c: lambda s, b, h, q, k: s + c.table[:, 1, k][b] - c.table[..., k][h, -1], False),
    "slices": (lambda c: lambda s, b, h, q, k: s + c.table[b, 1:, k][q - 1] + c.table[h, ::2, k][q // 2], False),
    "negative": (lambda c: lambda s, b, h, q, k: s + c.rows[q - k, 0] + c.rows[-1, 1], False),
    "new dimension": (lambda c: lambda s, b, h, q, k: s + c.table[h][None][0, q, k] + c.rows[k, None, 2][0], False),
    "products": (lambda c: lambda s, b, h, q, k: s + (c.rows[q] * c.rows[k]).sum(), True),
    "dot": (lambda c: lambda s, b, h, q, k: s + torch.dot(c.rows[k], c.rows[q]) + c.rows[q].dot(c.rows[q]), True),
    "one side": (lambda c: lambda s, b, h, q, k: s + (c.rows[q] * c.rows[q - 1]).sum(), True),
    "two uses": (lambda c: lambda s, b, h, q, k: s + (p := c.rows[q] * c.rows[k]).sum() + p.abs().max(), True),
    "matmul": (lambda c: lambda s, b, h, q, k: s + c.rows[q] @ c.rows[k], True),
    "stack": (lambda c: lambda s, b, h, q, k: torch.stack([s, c.rows[q, 0], c.rows[k, 1]]).logsumexp(0), True),
    "linear": (lambda c: lambda s, b, h, q, k: F.linear(torch.stack([s, s * q, s, s]), c.rows[:1])[0], True),
    "embedding": (lambda c: lambda s, b, h, q, k: s + F.embedding(k, c.rows)[3], False),
    "select": (lambda c: lambda s, b, h, q, k: s + c.rows.index_select(0, k[None])[0, 2], False),
    "computed": (lambda c: lambda s, b, h, q, k: s + c.table.float().softmax(2)[h, q, k] * (c.rows * 2)[k, 0], False),
    "whole": (lambda c: lambda s, b, h, q, k: s * c.one + c.rows.float().sum() * 0.01, False),
    "whole and entries": (lambda c: lambda s, b, h, q, k: s * c.slopes.float().prod() + c.slopes[h], False),
    "constant": (lambda c: lambda s, b, h, q, k: c.one.float(), False),
    "no score": (lambda c: lambda s, b, h, q, k: c.rows[k, 0].float() + 0.5, False),
    "where": (lambda c: lambda s, b, h, q, k: torch.where((q + k) % 3 == 0, 5 * torch.tanh(s / 5), c.slopes[h] - k), False),
    "fill": (lambda c: lambda s, b, h, q, k: s.masked_fill(q > k, c.rows[0, 0]).masked_fill(q == k, c.rows[q, 1]), False),
    "in place": (lambda c: lambda s, b, h, q, k: s.mul_(2).add_(c.rows[k, 0]).clamp_(min=-3), False),
    "floor": (lambda c: lambda s, b, h, q, k: s - (k - q) // 3 + (k - q) % 4 - torch.div(q, 3, rounding_mode="trunc"), False),
    "bytes": (lambda c: lambda s, b, h, q, k: s + 0.01 * ((k % 256).to(torch.uint8) - 3), False),
    "half": (lambda c: lambda s, b, h, q, k: (s.half() * c.one + k.bfloat16()).float(), False),
    "largest": (lambda c: lambda s, b, h, q, k: s.max(c.slopes[h].to(s.dtype)), False),
    "converted": (lambda c: lambda s, b, h, q, k: s * c.slopes.to(s)[h] + c.rows.type_as(s)[k, 0], False),
    "detached": (lambda c: lambda s, b, h, q, k: s.detach() * c.slopes[h] + s * c.slopes.detach()[b], False),
}  # fmt: skip


def by_vmap(function: Function, scores: Tensor, at: dict[str, Tensor]) -> Tensor:
    with ScalarIndices():
        return over_pairs(lambda *pair: function(*[x.clone() for x in pair]), scores, at)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_are_those_of_each_pair(name: str, dtype: torch.dtype) -> None:
    """Bits are equal, except for sums of products, which err at most twice as much."""
    make, sums = FUNCTIONS[name]
    function = make(Captured(captured(dtype)))
    if name == "linear" and dtype != torch.float32:
        pytest.skip("a product of matrices takes one dtype")
    scores, at = pairs()
    want = by_vmap(function, scores, at)
    formula = Formula(trace(function, torch.float32))
    given = scores.clone()
    got = formula.begin()(given, at)
    assert got.shape == scores.shape
    assert got.dtype == torch.float32
    assert got.is_contiguous()
    # the gradient's evaluation, and one of single pairs
    again = formula.begin(learns=[False] * len(formula.captured)).differentiable(scores, at)[0]
    flat = {each: x.expand(scores.shape).flatten() for each, x in at.items()}
    of_pairs = formula.begin()(scores.flatten(), flat).view(scores.shape)
    if sums:
        tensors = {each: x.double() for each, x in captured(dtype).items()}
        exact = {"out": by_vmap(make(Captured(tensors)), scores.double(), at)}
        theirs = oracle.errors({"out": want}, exact)
        for each in (got, again, of_pairs):
            oracle.check_errors({"out": each}, exact, [theirs], 4 * torch.finfo(got.dtype).eps)
    else:
        assert all(torch.equal(each, want.float()) for each in (got, again, of_pairs))


def gradients(
    function: Function, tensors: list[Tensor], grad: Tensor, scores: Tensor, at: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return the gradients of the scores and the captured tensors, a tile at a time."""
    formula = Formula(trace(function, scores.dtype))
    of_pass = formula.begin(learns=[x.requires_grad for x in formula.captured])
    parts = []
    for row in range(len(scores)):
        tile = slice(row, row + 1)
        _, found = of_pass.differentiable(scores[tile], {name: x[tile] for name, x in at.items()})
        part = found.backward(grad[tile])
        parts.append(torch.zeros_like(scores[tile]) if part is None else part)
        assert found.finite()
        found.add()
    learned = [x for x in formula.captured if x.requires_grad]
    found_grads: list[Any] = [None] * len(tensors)
    if learned:
        found_grads = list(torch.autograd.grad(learned, tensors, of_pass.gradients(), allow_unused=True))
    return named(torch.cat(parts), found_grads, tensors)


def named(scores: Tensor, grads: list[Any], tensors: list[Tensor]) -> dict[str, Tensor]:
    filled = [torch.zeros_like(x) if grad is None else grad for x, grad in zip(tensors, grads, strict=True)]
    return {"scores": scores, **{str(n): x for n, x in enumerate(filled)}}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_are_those_of_float64(name: str, dtype: torch.dtype) -> None:
    """Each error against float64 is at most twice that of torch's gradient of the mapped function."""
    if (name == "linear" and dtype != torch.float32) or name == "half":
        pytest.skip("a product of matrices takes one dtype, and casts to half have no float64")
    make, _ = FUNCTIONS[name]
    scores, at = pairs()
    grad = torch.randn(scores.shape, generator=torch.Generator(CPU).manual_seed(3), device=CPU)

    def mapped(wide: torch.dtype, of_scores: torch.dtype, order: Tensor) -> dict[str, Tensor]:
        tensors = {each: x.to(wide).requires_grad_() for each, x in captured(dtype).items()}
        leaf = scores.to(of_scores).requires_grad_()
        flat = {each: x.expand(scores.shape).flatten()[order] for each, x in at.items()}
        out = by_vmap(make(Captured(tensors)), leaf.flatten()[order], flat)
        want = grad.to(out.dtype).flatten()[order]
        found = torch.autograd.grad(out, [leaf, *tensors.values()], want, allow_unused=True)
        of_leaf = torch.zeros_like(leaf) if found[0] is None else found[0]
        return named(of_leaf, list(found[1:]), list(tensors.values()))

    orders = [torch.arange(scores.numel(), device=CPU), torch.arange(scores.numel(), device=CPU).flip(0)]
    orders += [torch.randperm(scores.numel(), generator=torch.Generator(CPU).manual_seed(n)) for n in range(3)]
    tensors = {each: x.requires_grad_() for each, x in captured(dtype).items()}
    got = gradients(make(Captured(tensors)), list(tensors.values()), grad, scores, at)
    want = mapped(torch.float64, torch.float64, orders[0])
    floor = {each: 4 * torch.finfo(torch.float32 if each == "scores" else dtype).eps for each in got}
    theirs = (oracle.errors(mapped(dtype, torch.float32, order), want) for order in orders)
    oracle.check_errors(got, want, theirs, floor)
    assert all(got[str(n)].dtype == dtype for n in range(len(tensors)))


DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tables_of_every_dtype(dtype: torch.dtype) -> None:
    """Values, strided and offset views, and gradients, also of products with indices, which round as one pair does."""
    scores, at = pairs()
    whole = (torch.randn(44, 31, device=CPU) * 50).abs().to(dtype)
    for table in (whole[:21, :15], whole.t()[:21, 5:20], whole[::2][:21, 1:16], whole[:1].expand(21, 31)):
        function = lambda s, b, h, q, k, t=table: s + t[k, q] * (q - k) + t[q][k % 15]  # noqa: E731
        got = Formula(trace(function, torch.float32)).begin()(scores, at)
        assert torch.equal(got, by_vmap(function, scores, at).float())


def test_a_result_has_memory_of_its_own() -> None:
    """Tiles are written to in place; no captured tensor, constant or index is."""
    one, row, scores = torch.ones((), device=CPU), torch.ones(1, 1, 1, device=CPU), torch.ones(1, 1, 1, device=CPU)
    at = {name: torch.zeros(1, 1, 1, dtype=torch.int64, device=CPU) for name in "bhqk"}
    double = torch.zeros(1, 1, 1, dtype=torch.float64, device=CPU)
    functions: list[Function] = [
        lambda s, b, h, q, k: one,
        lambda s, b, h, q, k: row[0, 0, 0],
        lambda s, b, h, q, k: one.view(1)[0],
        lambda s, b, h, q, k: +one + 0 * s,
        lambda s, b, h, q, k: one[None][q],
        lambda s, b, h, q, k: q.double().detach(),
        lambda s, b, h, q, k: (s + one).view(1)[0],
    ]
    for function in functions:
        got = Formula(trace(function, torch.float32)).begin()(scores, at)
        got.fill_(9)
        assert one == row == 1
        assert not any(x.any() for x in at.values())
    assert not double.any()


def test_torch_differentiates_values() -> None:
    table, number = torch.rand(2, 21, requires_grad=True, device=CPU), torch.tensor(2.0, requires_grad=True, device=CPU)
    graph = trace(lambda b, h, q, k: table[h, k] * number.exp() + (table * 2)[b, q])
    _, at = pairs()
    want = table[at["h"], at["k"]] * number.exp() + 2 * table[at["b"], at["q"]]
    got = evaluated(graph, at)
    assert torch.equal(got, want)
    grads = [torch.autograd.grad(x.sum(), [table, number], retain_graph=True) for x in (got, want)]
    torch.testing.assert_close(*grads)
    with torch.no_grad():
        assert not evaluated(graph, at).requires_grad
    four = {name: x[None] for name, x in at.items()}
    assert torch.equal(evaluated(graph, four)[0], want)


def test_numbers_and_masks_are_results() -> None:
    _, at = pairs()
    assert evaluated(trace(lambda b, h, q, k: True), at).item() is True
    mask = evaluated(trace(lambda b, h, q, k: (q - k < 2) & (h == 1)), at)
    assert torch.equal(mask, (at["q"] - at["k"] < 2) & (at["h"] == 1))


class Sizes(TorchDispatchMode):
    """Counts the largest result, and the most results of a size that are alive together."""

    def __init__(self, size: int):
        super().__init__()
        self.size, self.largest, self.most = size, 0, 0
        self.alive: list[weakref.ref[Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)}
        if isinstance(out, Tensor) and out.untyped_storage().data_ptr() not in given:
            self.largest = max(self.largest, out.untyped_storage().nbytes() // out.itemsize)
            if out.numel() == self.size:
                self.alive.append(weakref.ref(out))
            self.alive = [each for each in self.alive if each() is not None]
            self.most = max(self.most, len(self.alive))
        return out


def test_values_are_dropped_after_their_last_use() -> None:
    def function(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        for _ in range(20):
            s = s.sin() + 1
        return s

    scores, at = pairs()
    formula = Formula(trace(function, torch.float32))
    with Sizes(scores.numel()) as seen:
        formula.begin()(scores, at)
    assert 1 <= seen.most <= 3


def test_no_gradient_of_a_tile_is_as_large_as_a_table() -> None:
    """Look-ups in a large table give gradients of the entries that are read."""
    table = torch.zeros(64, 64, 64, requires_grad=True, device=CPU)
    scores, at = pairs()
    formula = Formula(trace(lambda s, b, h, q, k: s * table[h, q, k] + table[b][k][q], torch.float32))
    of_pass = formula.begin(learns=[True])
    _, first = of_pass.differentiable(scores, at)
    first.backward(scores)
    first.add()
    with Sizes(0) as seen:
        _, found = of_pass.differentiable(scores, at)
        found.backward(scores)
    assert 0 < seen.largest < 1000
    found.add()
    (grad,) = of_pass.gradients()
    assert grad.count_nonzero() > 0


def test_rows_of_large_tables_are_never_made() -> None:
    """A chain of indices reads single entries, in the evaluation and in the comparison with the function."""
    table = torch.zeros(4, 512, 512, device=CPU)
    scores, at = pairs()
    for function in (lambda s, b, h, q, k: s + table[h][q][k], lambda s, b, h, q, k: s + table[h][..., q, k]):
        with Sizes(0) as seen:
            Formula(trace(function, torch.float32)).begin()(scores, at)
        assert seen.largest < 1000
    with Sizes(0) as seen:
        by_vmap(lambda s, b, h, q, k: s + table[h, q, k], scores, at)
    assert seen.largest < 1000


def test_bytes_of_a_pair() -> None:
    rows = torch.zeros(9, 64, device=CPU)
    assert Formula(trace(lambda s, b, h, q, k: s + 1, torch.float32)).nbytes == 4
    assert Formula(trace(lambda s, b, h, q, k: s + (rows[q] * rows[k]).sum(), torch.float32)).nbytes == 8
    assert Formula(trace(lambda s, b, h, q, k: s + (rows[q] * rows[k]).amax(), torch.float32)).nbytes == 4 * 66


def test_what_one_pair_refuses_is_untraceable() -> None:
    table = torch.zeros(3, device=CPU)
    for function in (
        lambda s, b, h, q, k: s + table[q, k],
        lambda s, b, h, q, k: torch.tensor([s, s]).sum(),
        lambda s, b, h, q, k: torch.full((), s) + s,
        lambda s, b, h, q, k: s.nonzero().sum() + s,
        lambda s, b, h, q, k: torch.full_like(s, q),
        lambda s, b, h, q, k: s + table.masked_select(s > table).sum(),
    ):
        with pytest.raises(UntraceableError):
            Formula(trace(function, torch.float32))


def test_empty_rows_and_long_chains() -> None:
    at = {name: torch.zeros(0, 1, 1, dtype=torch.int64, device=CPU) for name in "bhqk"}
    rows = torch.zeros(9, 0, device=CPU)
    function = lambda s, b, h, q, k: s + (rows[q] * rows[k]).sum() + rows[q].sum()  # noqa: E731
    got = Formula(trace(function, torch.float32)).begin()(torch.zeros(0, 4, 4), at)
    assert got.shape == (0, 4, 4)
    scores, at = pairs()

    def long(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        for n in range(2000):
            s = s + n
        return s

    got = Formula(trace(long, torch.float32)).begin()(scores, at)
    torch.testing.assert_close(got, scores + math.fsum(range(2000)))
