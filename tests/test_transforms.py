"""A call inside a transform or a trace has the result of the same call outside, for every pattern.

A pattern's own tensors are constants of the call. The host reads them while the transform is active, in which an operation
on any tensor returns a wrapper without memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import create_block_mask

import ringweave as rw
from ringweave.integrations.flex_attention import flex_attention
from tests.cases import MIXTURES, PATTERNS

N = 64
SAME = torch.arange(N) // 20

#: patterns with tensors in forms that the patterns of all tests do not have
WITH_TENSORS: dict[str, Callable[[int], rw.patterns.Pattern]] = {
    "stops": lambda n: rw.KeyPadding(torch.tensor([n, n // 2])) & rw.Causal(),
    "starts_and_stops": lambda n: rw.KeyPadding(torch.tensor([n, n // 2], dtype=torch.int32), torch.tensor([3])),
    "bounds_of_documents": lambda n: rw.Documents(cu_seqlens=torch.tensor([0, 20, n])),
    "ids_of_elements": lambda n: rw.Documents(ids=torch.stack([torch.arange(n) // 20, torch.arange(n) // 30])),
    "mask_of_globals": lambda n: rw.Global(torch.arange(n) % 5 == 0) | rw.SlidingWindow(3),
    "sinks_of_elements": lambda n: rw.Sinks(torch.stack([torch.arange(n) % 5 == 0, torch.arange(n) % 3 == 0])),
    "table_of_elements": lambda n: rw.BlockTable(torch.arange(2 * 16).view(2, 1, 4, 4) % 3 > 0, n // 4),
    "within_keys_of_elements": lambda n: rw.SlidingWindow(9).within(rw.KeyPadding(torch.tensor([n, n // 2]))),
    "captured_tensor": lambda n: rw.from_mask_mod(lambda b, h, q, k, same=SAME: same[q] == same[k]),
}
EVERY = PATTERNS | MIXTURES | WITH_TENSORS

Call = Callable[[Tensor], Tensor]


class Module(torch.nn.Module):
    """A module for torch.export."""

    def __init__(self, call: Call):
        super().__init__()
        self.call = call

    def forward(self, q: Tensor) -> Tensor:
        return self.call(q)


def gradient(call: Call, q: Tensor) -> Tensor:
    leaf = q.clone().requires_grad_()
    return torch.autograd.grad(call(leaf).square().sum(), leaf)[0]


def jacobian(call: Call, q: Tensor) -> Tensor:
    leaf = q.clone().requires_grad_()
    return torch.stack([torch.autograd.grad(y, leaf, retain_graph=True)[0] for y in call(leaf).sum((0, 2, 3))])


#: the transformed call, and a definition of its result without transforms
TRANSFORMS: dict[str, tuple[Callable[[Call, Tensor], Any], Callable[[Call, Tensor], Any]]] = {
    "grad": (lambda f, q: torch.func.grad(lambda x: f(x).square().sum())(q), gradient),
    "vjp": (lambda f, q: torch.func.vjp(lambda x: f(x).square().sum(), q)[1](torch.ones(()))[0], gradient),
    "jacrev": (lambda f, q: torch.func.jacrev(lambda x: f(x).sum((0, 2, 3)))(q), jacobian),
    "vmap": (lambda f, q: torch.vmap(f)(torch.stack([q, -q])), lambda f, q: torch.stack([f(q), f(-q)])),
    "vmap_of_grad": (
        lambda f, q: torch.vmap(torch.func.grad(lambda x: f(x).square().sum()))(torch.stack([q, -q])),
        lambda f, q: torch.stack([gradient(f, q), gradient(f, -q)]),
    ),
    "inference": (lambda f, q: torch.inference_mode()(f)(q).clone(), lambda f, q: f(q)),
    "trace": (lambda f, q: make_fx(f)(q)(q), lambda f, q: f(q)),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", EVERY)
def test_a_transformed_call_has_the_result_of_a_plain_one(name: str, transform: str) -> None:
    """The pattern is first read inside the transform, and its later plain call is not disturbed."""
    pattern, (transformed, plain) = EVERY[name](N), TRANSFORMS[transform]
    q, k, v = (torch.randn(2, 4, N, 8) for _ in range(3))

    def call(x: Tensor) -> Tensor:
        return rw.attention(x, k, v, pattern)

    rw.memory.trim()
    got = transformed(call, q)
    torch.testing.assert_close(got, plain(call, q))


@pytest.mark.parametrize("transform", [*(name for name in TRANSFORMS if name != "trace"), "twice", "forward"])
def test_transformed_weights_are_those_of_a_plain_call(transform: str) -> None:
    """The plan is first made inside the transform; derivatives of higher order and of forward mode exist."""
    q, k = torch.randn(2, 4, N, 8, dtype=torch.float64), torch.randn(2, 2, N, 8, dtype=torch.float64)
    pattern = rw.SlidingWindow(9)

    def call(x: Tensor) -> Tensor:
        return rw.attention_weights(x, k, pattern).to_dense()

    def loss(x: Tensor) -> Tensor:
        return call(x).square().sum()

    rw.memory.trim()
    if transform == "twice":
        got = torch.func.grad(lambda x: torch.func.grad(loss)(x).square().sum())(q)
        step = 1e-6 * q
        change = torch.func.grad(loss)(q + step).square().sum() - torch.func.grad(loss)(q - step).square().sum()
        torch.testing.assert_close(2 * (got * step).sum(), change, rtol=1e-5, atol=0)
    elif transform == "forward":
        got = torch.func.jvp(loss, (q,), (k.repeat_interleave(2, 1),))[1]
        torch.testing.assert_close(got, (gradient(call, q) * k.repeat_interleave(2, 1)).sum())
    else:
        transformed, plain = TRANSFORMS[transform]
        got = transformed(call, q)
        torch.testing.assert_close(got, plain(call, q))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.sampled(6)) for name in PATTERNS] + [*WITH_TENSORS]
)
def test_an_exported_call_has_the_result_of_a_plain_one(name: str) -> None:
    pattern = EVERY[name](N)
    q, k, v = (torch.randn(2, 4, N, 8) for _ in range(3))

    def call(x: Tensor) -> Tensor:
        return rw.attention(x, k, v, pattern)

    rw.memory.trim()
    exported = torch.export.export(Module(call), (q,)).module()
    assert torch.equal(exported(q), call(q))


# a mask function that torch.vmap evaluates cannot be planned inside make_fx: PatternError
@pytest.mark.parametrize("transform", [name for name in [*TRANSFORMS, "export"] if name != "trace"])
@pytest.mark.parametrize("captures", [False, True])
def test_a_block_mask_inside_a_transform(transform: str, captures: bool) -> None:
    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return SAME[i] == SAME[j] if captures else i >= j

    mask = create_block_mask(mask_mod, None, None, N, N, device="cpu")
    q, k, v = (torch.randn(2, 4, N, 8) for _ in range(3))

    def call(x: Tensor) -> Tensor:
        out: Tensor = flex_attention(x, k, v, block_mask=mask)
        return out

    if transform == "export":
        exported = torch.export.export(Module(call), (q,)).module()
        torch.testing.assert_close(exported(q), call(q))
        return
    transformed, plain = TRANSFORMS[transform]
    torch.testing.assert_close(transformed(call, q), plain(call, q))


def test_bounds_that_a_transform_maps_are_no_constants() -> None:
    """A pattern of mapped bounds is read in each element of vmap, by the operator."""
    q, k, v = (torch.randn(1, 4, N, 8) for _ in range(3))
    stops = torch.tensor([N, 9, 1])

    def call(stop: Tensor) -> Tensor:
        return rw.attention(q, k, v, rw.KeyPadding(stop[None]))

    torch.testing.assert_close(torch.vmap(call)(stops), torch.stack([call(stop) for stop in stops]))


def test_a_model_with_padding_differentiates_by_sample() -> None:
    """Gradients of each sample by torch.func are those of backward, for a padded and a packed call of a module."""
    torch.manual_seed(0)
    layer = rw.nn.MultiheadAttention(16, 2, pattern=rw.Full(), batch_first=True)
    parameters = dict(layer.named_parameters())
    x, hidden = torch.randn(2, 20, 16), torch.arange(20) >= torch.tensor([[20], [13]])

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        out: Tensor = torch.func.functional_call(layer, parameters, (x, x, x), {"key_padding_mask": hidden})[0]
        return out.square().sum()

    got = torch.func.grad(loss)(parameters)
    loss(parameters).backward()
    torch.testing.assert_close(got, {name: p.grad for name, p in layer.named_parameters()})
