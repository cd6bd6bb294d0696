"""Gradients of a batch, and Jacobians, equal those one by one; the module runs under vmap."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import ringweave as rw

Q, K, V = torch.randn(3, 1, 2, 20, 8, generator=torch.Generator().manual_seed(0)).unbind()
TABLE, SINKS = torch.linspace(-1, 1, 82).view(2, 41), torch.tensor([0.5, -1.0])
CALLS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "one tensor": (lambda x: rw.attention(x, x, x, rw.Causal()), (Q,)),
    "each": (lambda q, k, v: rw.attention(q, k, v, rw.SlidingWindow(3)), (Q, K, V)),
    "table": (lambda q, t: rw.attention(q, K, V, rw.Causal(), terms=rw.DistanceBias(t)), (Q, TABLE)),
    "sinks": (lambda q, s: rw.attention(q, K, V, rw.Causal(), sink_logits=s), (Q, SINKS)),
    "documents": (lambda q: rw.attention(q, K, V, rw.Causal() & rw.Documents([5, 15])), (Q,)),
    "padding": (lambda q: rw.attention(q, K, V, rw.Causal() & rw.KeyPadding(torch.tensor([13]))), (Q,)),
    "function": (lambda q: rw.attention(q, K, V, rw.TokenMask(lambda b, h, i, j: i >= j)), (Q,)),
    "lse": (lambda q: rw.attention_with_lse(q, K, V, rw.Causal()).lse, (Q,)),
    "output and lse": (lambda q: torch.cat([x.flatten() for x in rw.attention_with_lse(q, K, V, rw.Causal())]), (Q,)),
    "reference": (lambda q: rw.attention(q, K, V, rw.Causal(), backend="reference"), (Q,)),
    "longnet": (lambda q: rw.longnet_attention(q, K, V, segments=[4, 20], rates=[1, 4]), (Q,)),
    "in float64": (lambda q: rw.attention(q, K.double(), V.double(), rw.Causal()), (Q.double(),)),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_gradients_of_a_batch(name: str) -> None:
    call, inputs = CALLS[name]
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = call(*leaves)
    upstream = torch.randn(3, *out.shape, dtype=out.dtype)
    got = torch.autograd.grad(out, leaves, upstream, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(out, leaves, one, retain_graph=True) for one in upstream]
    for one, other in zip(got, zip(*each, strict=True), strict=True):
        assert torch.equal(one, torch.stack(other))


def test_jacobians() -> None:
    def call(x: Tensor) -> Tensor:
        return rw.attention(x, x, x, rw.Causal())

    x, jacobian = Q[:, :, :5, :4].contiguous(), torch.autograd.functional.jacobian
    assert torch.equal(jacobian(call, x, vectorize=True), jacobian(call, x))
    torch.testing.assert_close(jacobian(call, x, vectorize=True), torch.func.jacrev(call)(x))
    with pytest.raises(rw.UnsupportedError, match="forward-mode derivative"):
        jacobian(call, x, vectorize=True, strategy="forward-mode")


def test_a_module_with_a_mask_under_vmap() -> None:
    x, hidden = torch.randn(2, 20, 16), torch.arange(20) >= torch.tensor([[20], [15]])
    module = rw.nn.MultiheadAttention(16, 2, pattern=rw.Full(), batch_first=True)
    got = torch.vmap(lambda a, b: module(a[None], a[None], a[None], key_padding_mask=b[None])[0][0])(x, hidden)
    torch.testing.assert_close(got, module(x, x, x, key_padding_mask=hidden)[0])
