"""Functions without a graph are mapped over pairs; a graph is compared with its function before it is trusted."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ringweave.errors import UnsupportedError
from ringweave.trace.opaque import Opaque, agrees, codes
from ringweave.trace.symbols import trace

from .test_evaluate import CPU, FUNCTIONS, Captured, by_vmap, captured, pairs

# torch has no rule to map some operations in place, and maps them one by one
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")

Function = Callable[..., Any]
LENGTHS = {
    "score": torch.tensor([0.5, -3.0, 40.0]),
    **{name: torch.arange(n) for name, n in zip("bhqk", (2, 2, 15, 21), strict=True)},
}


def opaque(function: Function, dtype: torch.dtype = torch.float32) -> Opaque:
    return Opaque(function, dtype, CPU)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_gradients_are_torchs(name: str) -> None:
    """In tiles, against one torch.vmap over all pairs; tensors that are not used get zeros."""
    tensors = {each: x.requires_grad_() for each, x in captured(torch.float64).items()}
    make = FUNCTIONS[name][0]
    if name in ("linear", "half"):
        pytest.skip("they convert to a narrower dtype, in which sums differ")
    function = make(Captured(tensors))
    scores, at = pairs(torch.float64)
    this = opaque(function, torch.float64)
    assert torch.equal(this.begin()(scores, at), by_vmap(function, scores, at).double())
    of_pass = this.begin(learns=[x.requires_grad for x in this.captured])
    grads = []
    for row in range(len(scores)):
        tile = {each: x[row : row + 1] for each, x in at.items()}
        _, found = of_pass.differentiable(scores[row : row + 1], tile)
        part = found.backward(scores[row : row + 1])
        grads.append(torch.zeros_like(scores[:1]) if part is None else part)
        assert found.finite()
        found.add()
    got = dict(zip(map(id, [x for x in this.captured if x.requires_grad]), of_pass.gradients(), strict=True))
    leaf = scores.clone().requires_grad_()
    wanted = [leaf, *tensors.values()]
    out = by_vmap(function, leaf, at)
    of_scores, *want = torch.autograd.grad(out, wanted, scores.to(out.dtype), allow_unused=True)
    torch.testing.assert_close(torch.cat(grads), torch.zeros_like(scores) if of_scores is None else of_scores)
    for x, each in zip(tensors.values(), want, strict=True):
        torch.testing.assert_close(got.get(id(x), torch.zeros_like(x)), torch.zeros_like(x) if each is None else each)


def test_a_gradient_that_code_hides_has_the_graph_of_all_tiles() -> None:
    """A tensor that was computed before the call is found by its leaf, in every tile."""
    weight = torch.ones(1, requires_grad=True, device=CPU)
    hidden = weight.exp()

    class Hides(torch.autograd.Function):
        """Reads a tensor in code without function modes."""

        generate_vmap_rule = True

        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            """Save nothing."""

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 2

    def function(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            s = s * hidden[0]
        return Hides.apply(s)  # type: ignore[no-any-return]

    scores, at = pairs()
    this = opaque(function)
    assert [x is weight for x in this.captured] == [True]
    of_pass = this.begin(learns=[True])
    for row in range(len(scores)):
        _, found = of_pass.differentiable(scores[row : row + 1], {each: x[row : row + 1] for each, x in at.items()})
        found.backward(torch.ones_like(scores[:1]))
        found.add()
    torch.testing.assert_close(of_pass.gradients()[0], 2 * torch.e * scores.sum()[None])


def test_changes_between_evaluations_raise() -> None:
    """Other operations, other numbers and other tensors, between forward and backward and between pairs."""
    state: dict[str, Any] = {"n": 2.0, "table": torch.ones(21, device=CPU), "deep": 1}

    def function(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        for _ in range(state["deep"]):
            s = s.sin()
        return s * state["n"] + state["table"][k]

    scores, at = pairs()
    for name, value in (("n", 3.0), ("table", torch.zeros(21, device=CPU)), ("deep", 2)):
        this, before = opaque(function), state[name]
        this.begin(learns=[False])
        state[name] = value
        with pytest.raises(UnsupportedError, match="other values in backward"):
            this.begin(learns=[False])
        with pytest.raises(UnsupportedError, match="other operations at another pair"):
            this.begin()(scores, at)
        state[name] = before
    # an equal tensor, such as one of an array, is the same
    state["array"] = np.ones(21, np.float32)
    made = opaque(lambda s, b, h, q, k: s + torch.from_numpy(state["array"])[k])
    state["array"] = np.ones(21, np.float32)
    made.begin(learns=[False])(scores, at)
    state["array"] = np.zeros(21, np.float32)
    with pytest.raises(UnsupportedError, match="other values in backward"):
        made.begin(learns=[False])


def test_results_that_change_raise() -> None:
    draw = random.Random(1)
    with pytest.raises(UnsupportedError, match="another result"):
        opaque(lambda s, b, h, q, k: s * draw.random())


def test_arguments_may_be_written_to() -> None:
    """A write to an argument changes neither the scores nor the indices of a tile."""
    scores, at = pairs()
    before = [scores.clone(), *[x.clone() for x in at.values()]]

    def function(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        q += 3
        s *= 2
        return s + q

    got = opaque(function).begin()(scores, at)
    assert torch.equal(got, 2 * scores + (at["q"] + 3))
    assert all(map(torch.equal, before, [scores, *at.values()]))


# ---- functions and their graphs --------------------------------------------------------------------------------------


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
