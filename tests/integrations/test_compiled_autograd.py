"""Compiled autograd traces the backward pass of an eager forward as one operator, as every other trace does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import compiled_autograd

import ringweave as rw

# compiled autograd reads .grad of the saved tensors
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


def draw(nq: int, nk: int) -> list[Tensor]:
    return [torch.randn(1, 2, n, 8, requires_grad=True) for n in (nq, nk, nk)]


def grads(leaves: list[Tensor], backward: Callable[[], None]) -> list[Tensor]:
    for leaf in leaves:
        leaf.grad = None
    backward()
    found = [leaf.grad for leaf in leaves]
    assert all(grad is not None for grad in found)
    return [grad.clone() for grad in found if grad is not None]


def traced_by(backend: str, fullgraph: bool = False) -> Any:
    return compiled_autograd._enable(lambda graph: torch.compile(graph, backend=backend, fullgraph=fullgraph))


def same_when_traced(leaves: list[Tensor], loss: Callable[[], Tensor], fullgraph: bool = True) -> None:
    """Compare the gradients of eager autograd and of compiled autograd, bit for bit."""
    torch._dynamo.reset()
    want = grads(leaves, lambda: loss().backward())

    def traced() -> None:
        out = loss()
        with traced_by("aot_eager", fullgraph):
            out.backward()

    for _ in range(2):
        assert all(map(torch.equal, grads(leaves, traced), want))


@pytest.mark.parametrize("backend", ["cpu", "dense_batched"])
@pytest.mark.parametrize("terms", [(), rw.Softcap(2.0)], ids=["plain", "terms"])
@pytest.mark.parametrize("lengths", [(16, 16), (1, 40), (1, 41)], ids=str)
def test_an_eager_forward(lengths: tuple[int, int], terms: object, backend: str) -> None:
    """The backward pass of a checked call, of a known call and of a later decoding step is one operator in the trace."""
    leaves = draw(*lengths)
    same_when_traced(
        leaves,
        lambda: rw.attention(*leaves, rw.Causal(), q_offset="end", terms=terms, backend=backend).square().sum(),
    )


def test_bounds_and_tables_that_learn() -> None:
    """The check that bounds did not change runs between two graphs, and a table gets its gradient."""
    *leaves, table = *draw(16, 16), torch.randn(2, 9, requires_grad=True)
    stop = torch.tensor([11])

    def loss() -> Tensor:
        pattern = rw.Causal() & rw.KeyPadding(stop)
        out, lse = rw.attention_with_lse(*leaves, pattern, terms=rw.DistanceBias(table))
        return out.square().sum() + lse.sum()

    same_when_traced([*leaves, table], loss, fullgraph=False)
    out = loss()
    stop.data.fill_(7)  # torch itself notices a write that changes the version
    with pytest.raises(rw.PatternError, match="KeyPadding"), traced_by("eager"):
        out.backward()


def test_a_second_derivative_is_refused() -> None:
    """The operator refuses a second derivative in a trace, as the eager function does."""
    leaves = draw(16, 16)
    with traced_by("eager"):
        grad = torch.autograd.grad(rw.attention(*leaves, rw.Causal()).sum(), leaves[0], create_graph=True)
    with pytest.raises(rw.UnsupportedError, match="second derivative"):
        grad[0].sum().backward()
