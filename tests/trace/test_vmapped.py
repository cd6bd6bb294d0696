"""Functions without a graph are mapped over pairs; a graph is compared with its function before it is trusted."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ringweave.errors import UnsupportedError
from ringweave.trace.vmapped import Vmapped

from .test_evaluate import CPU, FUNCTIONS, Captured, by_vmap, captured, pairs

# torch has no rule to map some operations in place, and maps them one by one
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")

Function = Callable[..., Any]
LENGTHS = {
    "score": torch.tensor([0.5, -3.0, 40.0]),
    **{name: torch.arange(n) for name, n in zip("bhqk", (2, 2, 15, 21), strict=True)},
}


def vmapped(function: Function, dtype: torch.dtype = torch.float32) -> Vmapped:
    return Vmapped(function, dtype, CPU)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_gradients_are_torchs(name: str) -> None:
    """In tiles, against one torch.vmap over all pairs; tensors that are not used get zeros."""
    tensors = {each: x.requires_grad_() for each, x in captured(torch.float64).items()}
    make = FUNCTIONS[name][0]
    if name in ("linear", "half"):
        pytest.skip("they convert to a narrower dtype, in which sums differ")
    function = make(Captured(tensors))
    scores, at = pairs(torch.float64)
    this = vmapped(function, torch.float64)
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
    this = vmapped(function)
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
        this, before = vmapped(function), state[name]
        this.begin(learns=[False])
        state[name] = value
        with pytest.raises(UnsupportedError, match="other values in backward"):
            this.begin(learns=[False])
        with pytest.raises(UnsupportedError, match="other operations at another pair"):
            this.begin()(scores, at)
        state[name] = before
    # an equal tensor, such as one of an array, is the same
    state["array"] = np.ones(21, np.float32)
    made = vmapped(lambda s, b, h, q, k: s + torch.from_numpy(state["array"])[k])
    state["array"] = np.ones(21, np.float32)
    made.begin(learns=[False])(scores, at)
    state["array"] = np.zeros(21, np.float32)
    with pytest.raises(UnsupportedError, match="other values in backward"):
        made.begin(learns=[False])


def test_results_that_change_raise() -> None:
    draw = random.Random(1)
    with pytest.raises(UnsupportedError, match="another result"):
        vmapped(lambda s, b, h, q, k: s * draw.random())


def test_arguments_may_be_written_to() -> None:
    """A write to an argument changes neither the scores nor the indices of a tile."""
    scores, at = pairs()
    before = [scores.clone(), *[x.clone() for x in at.values()]]

    def function(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        q += 3
        s *= 2
        return s + q

    got = vmapped(function).begin()(scores, at)
    assert torch.equal(got, 2 * scores + (at["q"] + 3))
    assert all(map(torch.equal, before, [scores, *at.values()]))
