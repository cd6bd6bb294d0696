"""A call without tokens or sequences, a rank with padding only and a short document are calls like any other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import ringweave as rw
from ringweave import nn

from .parallel.threads import Threaded, run

E, H = 32, 4
OPTIONS: dict[str, tuple[type[torch.nn.Module], dict[str, Any]]] = {
    "dense": (nn.MultiheadAttention, {"pattern": rw.Causal()}),
    "every option": (nn.MultiheadAttention, {"sink_logits": True, "qk_norm": True, "rotary_base": 1e4}),
    "longnet": (nn.LongNetAttention, {"segments": [8, 32], "rates": [1, 4], "causal": True}),
    "detached": (nn.LongNetAttention, {"segments": [8, 32], "rates": [1, 4], "detach_weights": True}),
    "two scales": (nn.HierarchicalAttention, {"pool": 8, "top_k": 2, "window": 8, "causal": True}),
    "gates": (nn.HierarchicalAttention, {"pool": 8, "top_k": 2, "window": 8, "causal": True, "combine": "gates"}),
    "neighborhood": (nn.NeighborhoodAttention, {"window": 1}),
    "moba": (nn.MixtureOfBlockAttention, {"block_size": 8, "top_k": 3, "qk_norm": True, "rotary_base": 1e4}),
    "nsa": (nn.NativeSparseAttention, {"compress_block": 8, "compress_stride": 4, "block_size": 8, "top_k": 4, "window": 8, "qk_norm": True}),
    "nsa, shared keys": (nn.NativeSparseAttention, {"compress_block": 8, "compress_stride": 4, "block_size": 8, "top_k": 4, "separate_kv": False, "num_kv_heads": 1}),
}  # fmt: skip
CHOOSING = [name for name, (kind, _) in OPTIONS.items() if name.startswith(("moba", "nsa"))]


def made(name: str, **more: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    kind, options = OPTIONS[name]
    first = {"batch_first": True} if issubclass(kind, nn.MultiheadAttention) else {}
    return kind(E, H, **first, **options, **more)


def called(layer: torch.nn.Module, x: Tensor, **options: Any) -> Tensor:
    if isinstance(layer, nn.MultiheadAttention):
        out, weights = layer(x, x, x, **options)
        assert weights is None
        return out
    return layer(x, **options)


def gradients(layer: torch.nn.Module, x: Tensor, out: Tensor) -> dict[str, Tensor]:
    """Return the gradients of x and of all parameters, each of which has one."""
    leaves = {"x": x, **dict(layer.named_parameters())}
    return dict(zip(leaves, torch.autograd.grad(out.square().sum(), list(leaves.values())), strict=True))


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("shape", [(2, 0, E), (0, 5, E), (0, 0, E)], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_no_tokens_or_no_sequences(name: str, shape: tuple[int, ...]) -> None:
    """The result is empty, and the gradients are zeros, also where a parameter holds NaN."""
    layer, x = made(name), torch.zeros(shape, requires_grad=True)
    with torch.no_grad():
        next(layer.parameters()).fill_(torch.nan)
    out = called(layer, x)
    assert out.shape == shape
    assert out.dtype == torch.float32
    assert not any(grad.any() for grad in gradients(layer, x, out).values())
    with torch.autocast("cpu"):
        assert called(layer, x).dtype == torch.bfloat16


@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 9])
@pytest.mark.parametrize("name", OPTIONS)
def test_few_tokens_give_every_parameter_a_gradient(name: str, tokens: int) -> None:
    layer, x = made(name), torch.randn(2, tokens, E, requires_grad=True)
    gradients(layer, x, called(layer, x))


@pytest.mark.parametrize("sizes", [(2, 0, 5), (2, 5, 0), (0, 3, 4)], ids=str)
@pytest.mark.parametrize("name", ["dense", "every option"])
def test_no_keys(name: str, sizes: tuple[int, int, int]) -> None:
    """A query that may attend nothing gives the bias of the output projection; masks are checked as ever."""
    layer, (batch, nq, nk) = made(name), sizes
    torch.nn.init.normal_(layer.out_proj.bias)
    q, k = torch.randn(batch, nq, E), torch.randn(batch, nk, E)
    masks = {"attn_mask": torch.zeros(nq, nk), "key_padding_mask": torch.zeros(batch, nk, dtype=torch.bool)}
    out, _ = layer(q, k, k, **masks)
    assert torch.equal(out, layer.out_proj.bias.expand(batch, nq, E))
    with pytest.raises(rw.ShapeError, match="attn_mask"):
        layer(q, k, k, attn_mask=torch.zeros(nq + 1, nk))
    with pytest.raises(rw.ShapeError, match="query, key, value: got"):
        layer(q, k, torch.randn(batch, nk + 1, E))
    with pytest.raises(rw.ShapeError, match="query, key, value: got"):
        layer(q, torch.randn(batch + 1, nk, E), torch.randn(batch + 1, nk, E))
    with pytest.raises(rw.RingweaveError, match=r"Skip the call|need_weights"):
        layer(q, k, k, need_weights=True)


@pytest.mark.parametrize("name", CHOOSING)
def test_documents_shorter_than_a_block(name: str) -> None:
    layer, x = made(name), torch.randn(2, 18, E, requires_grad=True)
    out = called(layer, x, documents=rw.Documents([1, 7, 3, 7]))
    alone = torch.cat([called(layer, part) for part in x.split([1, 7, 3, 7], 1)], 1)
    torch.testing.assert_close(out, alone)
    torch.testing.assert_close(gradients(layer, x, out), gradients(layer, x, alone))


@pytest.mark.parametrize("name", CHOOSING)
def test_no_token_belongs_to_a_document(name: str) -> None:
    layer, x = made(name), torch.randn(2, 9, E, requires_grad=True)
    torch.nn.init.normal_(layer.out_proj.bias)
    for documents in (rw.Documents(ids=torch.full((2, 9), -1)), rw.Documents(ids=torch.full((9,), -1))):
        out = called(layer, x, documents=documents)
        assert torch.equal(out, layer.out_proj.bias.expand(2, 9, E))
        grads = gradients(layer, x, out)
        assert {name for name, grad in grads.items() if grad.any()} == {"out_proj.bias"}


@pytest.mark.parametrize("name", CHOOSING)
def test_steps_without_tokens_or_sequences(name: str) -> None:
    """A step of no tokens changes nothing, and a batch of no sequences has a cache with a length."""
    layer, x = made(name), torch.randn(2, 20, E)
    cache, empty = layer.empty_cache(), layer.empty_cache()
    with torch.no_grad():
        outs = [called(layer, part, cache=cache) for part in x.split([0, 12, 0, 1, 7, 0], 1)]
        torch.testing.assert_close(torch.cat(outs, 1), called(layer, x))
        for part in x[:0].split([12, 1, 7], 1):
            assert called(layer, part, cache=empty).shape == part.shape
        assert cache.length == empty.length == 20
        for other in (x[:1], x[:0, :0]):
            with pytest.raises(rw.ShapeError, match="batch: got"):
                called(layer, other, cache=cache)
        with pytest.raises(rw.ShapeError, match="batch: got 2; wanted 0"):
            called(layer, x[:, :1], cache=empty)


@pytest.mark.parametrize("n", [64, 5])
@pytest.mark.parametrize("name", ["every option", "longnet", *CHOOSING])
def test_a_rank_with_padding_only(name: str, n: int) -> None:
    """Three ranks of which at least one holds padding only compute what one process computes, with gradients."""
    alone, x = made(name), torch.randn(1, n, E, requires_grad=True)
    want = called(alone, x)
    wanted = gradients(alone, x, want)

    def job(transport: Threaded) -> tuple[int, Tensor, dict[str, Tensor]]:
        pattern = getattr(alone, "pattern", rw.Causal())
        heads = H, alone.num_kv_heads
        ctx = rw.ContextParallel(transport, pattern, n, heads=heads, placement="contiguous")
        layer = made(name, context=ctx)
        layer.load_state_dict(alone.state_dict())
        local = ctx.shard(x.detach()).requires_grad_()
        out, real = called(layer, local), (ctx.positions < n)[None, :, None]
        grads = gradients(layer, local, out * real)
        return int(real.sum()), ctx.unshard(out), grads | {"x": ctx.unshard(grads["x"])}

    found = run(3, job)
    assert min(tokens for tokens, *_ in found) == 0
    for _, out, grads in found:
        torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(grads["x"], wanted["x"], rtol=1e-4, atol=1e-4)
    for each in {*wanted} - {"x"}:
        total = sum(grads[each] for *_, grads in found)
        torch.testing.assert_close(total, wanted[each], rtol=1e-4, atol=1e-4)
