"""Neighborhood attention equals NATTEN's definition in plain Python, and the module equals the function."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import ringweave as rw
from ringweave import nn
from ringweave.terms import Axis, Pairs, Term

from .oracle import attention
from .test_terms import of_a_test

B, H, KV, D = 2, 4, 2, 8


def neighbors(i: int, n: int, window: int, dilation: int, causal: bool) -> list[int]:
    """Return the keys that query i attends along an axis of n tokens."""
    group = [j for j in range(n) if j % dilation == i % dilation]
    place = group.index(i)
    if causal:
        return group[max(0, place - window + 1) : place + 1]
    first = min(max(place - window // 2, 0), len(group) - window)
    return group[first : first + window]


def allowed(shape: tuple[int, ...], window: Any, dilation: Any, causal: Any) -> Tensor:
    """Return the relation of all tokens in row-major order, (N, N)."""
    per_axis = [x if isinstance(x, tuple) else (x,) * len(shape) for x in (window, dilation, causal)]
    tokens = list(itertools.product(*map(range, shape)))
    number = {token: at for at, token in enumerate(tokens)}
    mask = torch.zeros(len(tokens), len(tokens), dtype=torch.bool)
    for token in tokens:
        along = [neighbors(i, n, *each) for i, n, *each in zip(token, shape, *per_axis, strict=True)]
        mask[number[token], [number[key] for key in itertools.product(*along)]] = True
    return mask


def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, bias: Tensor | float = 0.0) -> Tensor:
    """Compute attention of (B, H, *grid, D) tensors over a relation of their tokens in row-major order."""
    out, _ = attention(*(x.flatten(2, -2) for x in (q, k, v)), mask, scored=lambda t: t + bias)
    return out.reshape(*q.shape[:-1], v.shape[-1])


def inputs(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return q, k and v with heads beside the channels, as projections give them: their strides are not contiguous."""
    generator = torch.Generator().manual_seed(len(shape))
    made = [torch.randn(B, *shape, heads, D, generator=generator, dtype=dtype) for heads in (H, KV, KV)]
    return [x.movedim(-2, 1).requires_grad_() for x in made]


CASES: dict[str, tuple[tuple[int, ...], Any, Any, Any]] = {
    "tokens": ((97,), 7, 1, False),
    "dilated tokens": ((101,), 5, 3, False),
    "causal tokens": ((70,), 6, 4, True),
    "one key": ((9,), 1, 2, False),
    "all tokens": ((33,), 33, 1, False),
    "image": ((13, 10), 3, 1, False),
    "even, dilated, causal columns": ((13, 10), (4, 3), (2, 3), (False, True)),
    "whole image": ((6, 11), (6, 11), 1, False),
    "causal image": ((9, 8), (3, 4), (3, 2), True),
    "odd image": ((7, 19), (7, 2), (1, 9), (True, False)),
    "video": ((5, 7, 6), (3, 2, 5), (1, 2, 1), (True, False, False)),
    "dilated video": ((4, 6, 9), (2, 3, 3), (2, 2, 3), False),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_outputs_and_gradients_are_those_of_the_definition(name: str, dtype: torch.dtype) -> None:
    shape, window, dilation, causal = CASES[name]
    q, k, v = inputs(shape, dtype)
    out = rw.neighborhood_attention(q, k, v, window, dilation=dilation, is_causal=causal)
    wanted = dense(q, k, v, allowed(*CASES[name]))
    torch.testing.assert_close(out, wanted)
    dout = torch.randn_like(wanted)
    got, right = (torch.autograd.grad(each, (q, k, v), dout) for each in (out, wanted))
    torch.testing.assert_close(got, right, rtol=1e-4 if dtype == torch.float32 else 1e-7, atol=2e-5)


@pytest.mark.parametrize("backend", ["dense_batched", "reference"])
def test_backends_and_scale(backend: str) -> None:
    q, k, v = inputs((12, 9))
    out = rw.neighborhood_attention(q, k, v, (5, 3), scale=0.5, backend=backend)
    torch.testing.assert_close(out, dense(q * 0.5 * D**0.5, k, v, allowed((12, 9), (5, 3), 1, False)))


def test_a_bias_has_rows_and_columns_in_row_major_order() -> None:
    shape = (9, 10)
    q, k, v = inputs(shape)
    bias = torch.randn(1, H, 90, 90, dtype=torch.float64, requires_grad=True)
    out = rw.neighborhood_attention(q, k, v, 5, terms=rw.Bias(bias))
    wanted = dense(q, k, v, allowed(shape, 5, 1, False), bias)
    torch.testing.assert_close(out, wanted)
    got, right = (torch.autograd.grad(each.square().sum(), bias)[0] for each in (out, wanted))
    torch.testing.assert_close(got, right)


def test_distances_are_those_of_one_axis() -> None:
    q, k, v = inputs((60,))
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)
    out = rw.neighborhood_attention(q, k, v, 7, terms=rw.ALiBi(slopes))
    away = (torch.arange(60)[:, None] - torch.arange(60)).abs()
    torch.testing.assert_close(out, dense(q, k, v, allowed((60,), 7, 1, False), -slopes[:, None, None] * away))


def test_compiles_in_one_graph() -> None:
    torch._dynamo.reset()
    q, k, v = (x.detach() for x in inputs((12, 9), torch.float32))
    layer = nn.NeighborhoodAttention(16, 2, 3)
    step = torch.compile(
        lambda q, x: (rw.neighborhood_attention(q, k, v, (5, 3), is_causal=(True, False)), layer(x)),
        fullgraph=True,
        backend="eager",
    )
    x = torch.randn(1, 6, 7, 16)
    out, projected = step(q, x)
    torch.testing.assert_close(out, rw.neighborhood_attention(q, k, v, (5, 3), is_causal=(True, False)))
    torch.testing.assert_close(projected, layer(x))


def weighted() -> type[Term]:
    """Declare a kind with a number, a constant for each query, and a table of all pairs."""

    @dataclass(frozen=True, eq=False)
    class Weighted(Term):
        kernel: ClassVar[str] = "weighted"
        axes: ClassVar[dict[str, tuple[Axis, ...]]] = {
            "rows": (Axis("queries"),), "table": (Axis("queries"), Axis("keys")),
        }  # fmt: skip
        places: ClassVar[bool] = True

        by: float
        rows: Tensor
        table: Tensor

        @classmethod
        def example(cls, batch: int, heads: int, nq: int, nk: int, generator: torch.Generator) -> Term:
            return cls(2.0, torch.rand(nq, generator=generator), torch.rand(nq, nk, generator=generator))

        def apply(self, t: Tensor, at: Pairs) -> Tensor:
            i, j = at.row.clamp(max=len(self.rows) - 1), at.column.clamp(max=len(self.rows) - 1)
            return t + (self.by * self.rows[i] * self.table[i, j]).to(t.dtype)

    return Weighted


@pytest.fixture
def kind() -> Iterator[type[Term]]:
    yield from of_a_test(weighted)


def test_tables_of_queries_and_keys_follow_the_order_of_the_grid(kind: type[Term]) -> None:
    """Tables of any kind are in row-major order of the grid, as those of a Bias are."""
    q, k, v = inputs((12, 9))
    term = kind.example(B, H, 108, 108, torch.Generator().manual_seed(2))
    rows, table = term.tables
    bias = rw.Bias((2.0 * rows[:, None] * table)[None, None])
    got, wanted = (rw.neighborhood_attention(q, k, v, 5, terms=each) for each in (term, bias))
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("shape", [(40,), (9, 7), (3, 5, 4)])
@pytest.mark.parametrize("kv_heads", [None, 2])
def test_the_module_projects_before_and_after(shape: tuple[int, ...], kv_heads: int | None) -> None:
    layer = nn.NeighborhoodAttention(H * D, H, 3, is_causal=(True, *[False] * (len(shape) - 1)), num_kv_heads=kv_heads)
    x = torch.randn(B, *shape, H * D, requires_grad=True)
    out = layer(x)
    kept = (kv_heads or H) * D
    parts = layer.qkv(x).split([H * D, kept, kept], -1)
    q, k, v = (part.unflatten(-1, (-1, D)).movedim(-2, 1) for part in parts)
    inner = rw.neighborhood_attention(q, k, v, 3, is_causal=layer.is_causal)
    torch.testing.assert_close(out, layer.proj(inner.movedim(1, -2).flatten(-2)))
    assert all(each.isfinite().all() for each in torch.autograd.grad(out.sum(), [x, *layer.parameters()]))
    assert {"qkv.weight", "qkv.bias", "proj.weight", "proj.bias"} == set(layer.state_dict())
    assert f"{H * D}, {H}" in repr(layer)
