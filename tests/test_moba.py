"""Mixture of block attention equals its definition in plain torch, in steps, in documents, and on several ranks."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import ringweave as rw
from ringweave import nn

from .parallel.threads import Threaded, run

E, H, B = 32, 4, 2


def turned(x: Tensor, base: float | None) -> Tensor:
    """Rotate (B, heads, N, D) by positions from 0, as complex numbers."""
    if base is None:
        return x
    n, half = x.shape[2], x.shape[3] // 2
    angle = torch.arange(n)[:, None] * base ** (-torch.arange(half, dtype=x.dtype) / half)
    z = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([z.real, z.imag], -1)


def inputs_of(layer: nn.MixtureOfBlockAttention, x: Tensor) -> list[Tensor]:
    """Return queries, keys and values, each for all query heads."""
    bias = layer.in_proj_bias
    parts = F.linear(x, layer.in_proj_weight, bias).split([E, *[layer.num_kv_heads * layer.head_dim] * 2], -1)
    q, k, v = (part.unflatten(-1, (-1, layer.head_dim)).transpose(1, 2) for part in parts)
    if layer.q_norm is not None:
        q, k = (F.rms_norm(y, y.shape[-1:], norm.weight) for y, norm in ((q, layer.q_norm), (k, layer.k_norm)))
    q, k = turned(q, layer.rotary_base), turned(k, layer.rotary_base)
    return [q, *(y.repeat_interleave(H // layer.num_kv_heads, 1) for y in (k, v))]


def blocks_of(q: Tensor, k: Tensor, side: int, top_k: int) -> Tensor:
    """Return which pairs the definition allows, (B, H, N, N), by loops over queries and blocks."""
    batch, heads, n, _ = q.shape
    mask = torch.zeros(batch, heads, n, n, dtype=torch.bool)
    for b, h, t in ((b, h, t) for b in range(batch) for h in range(heads) for t in range(n)):
        own = t // side
        scores = [(-float(q[b, h, t] @ k[b, h, j * side : (j + 1) * side].mean(0)), j) for j in range(own)]
        for j in [own, *(j for _, j in sorted(scores)[: top_k - 1])]:
            mask[b, h, t, j * side : (j + 1) * side] = True
    return mask & torch.ones(n, n).tril().bool()


def definition(layer: nn.MixtureOfBlockAttention, x: Tensor) -> Tensor:
    """Compute the module by its definition, dense."""
    q, k, v = inputs_of(layer, x)
    mask = blocks_of(q.detach(), k.detach(), layer.block_size, layer.top_k)
    weights = (q @ k.mT / layer.head_dim**0.5).masked_fill(~mask, -torch.inf).softmax(-1)
    return layer.out_proj((weights @ v).transpose(1, 2).flatten(2))


def made(dtype: torch.dtype = torch.float64, **options: Any) -> nn.MixtureOfBlockAttention:
    torch.manual_seed(0)
    layer = nn.MixtureOfBlockAttention(E, H, **{"block_size": 8, "top_k": 3, **options})
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return layer.to(dtype)


def drawn(n: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(B, n, E, generator=torch.Generator().manual_seed(n)).to(dtype).requires_grad_()


def gradients(out: Tensor, x: Tensor, layer: torch.nn.Module, upstream: Tensor) -> list[Tensor]:
    """Return the gradients of the input and of all parameters; few tokens need not reach each."""
    leaves = [x, *layer.parameters()]
    found = torch.autograd.grad(out, leaves, upstream.to(out.dtype), allow_unused=True)
    return [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, found, strict=True)]


def agree(layer: torch.nn.Module, x: Tensor, define: Callable[..., Tensor], tolerance: float) -> None:
    """The output and the gradients of the input and of all parameters equal those of a definition in float64."""
    exact, y = copy.deepcopy(layer).double(), x.detach().double().requires_grad_()
    got = layer(x)
    want = define(exact, y)
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)
    upstream = torch.randn_like(want)
    pairs = zip(gradients(got, x, layer, upstream), gradients(want, y, exact, upstream), strict=True)
    for one, other in pairs:
        scale = float(other.abs().max())
        torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=tolerance * max(1.0, scale))


def alone_in_documents(layer: torch.nn.Module, x: Tensor, lengths: list[int]) -> None:
    """The output and the gradients of packed documents equal those of each document alone."""
    out = layer(x, documents=rw.Documents(lengths))
    alone = torch.cat([layer(part) for part in x.split(lengths, 1)], 1)
    torch.testing.assert_close(out, alone, rtol=1e-9, atol=1e-9)
    one, other = (torch.autograd.grad(y.square().sum(), [x, *layer.parameters()]) for y in (out, alone))
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def as_one_process(
    ranks: int, alone: torch.nn.Module, make: Callable[[rw.ContextParallel], torch.nn.Module], x: Tensor, placement: str
) -> None:
    """Ranks with two key heads have the output of one process.

    Also gradients: those of the inputs are of the shard, and those of the parameters are a rank's share.
    """
    n, want = x.shape[1], alone(x)
    wanted = torch.autograd.grad(want.square().sum(), [x, *alone.parameters()])

    def job(transport: Threaded) -> tuple[Tensor, ...]:
        ctx = rw.ContextParallel(transport, rw.Causal(), n, heads=(4, 2), placement=placement)
        layer = make(ctx).double()
        layer.load_state_dict(alone.state_dict())
        local = ctx.shard(x.detach()).requires_grad_()
        out = layer(local)
        real = (ctx.positions < n)[None, :, None]
        grads = torch.autograd.grad((out * real).square().sum(), [local, *layer.parameters()])
        return ctx.unshard(out), ctx.unshard(grads[0]), *grads[1:]

    found = run(ranks, job)
    for out, dx, *_ in found:
        torch.testing.assert_close(out, want, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(dx, wanted[0], rtol=1e-9, atol=1e-9)
    for at, grad in enumerate(wanted[1:], 2):
        torch.testing.assert_close(sum(each[at] for each in found), grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize(
    ("n", "side", "top_k"), [(61, 8, 3), (64, 16, 2), (50, 7, 4), (5, 8, 3), (33, 8, 1), (40, 8, 99), (1, 4, 2)]
)
def test_the_definition(kv_heads: int, n: int, side: int, top_k: int) -> None:
    agree(made(num_kv_heads=kv_heads, block_size=side, top_k=top_k), drawn(n), definition, 1e-9)


@pytest.mark.parametrize(
    "options", [{"rotary_base": 100.0}, {"qk_norm": True}, {"bias": False}], ids=lambda x: next(iter(x))
)
def test_the_definition_with_options(options: dict[str, Any]) -> None:
    agree(made(**options), drawn(50), definition, 1e-9)


@pytest.mark.parametrize("side", [8, 16, 32])
def test_the_definition_in_float32(side: int) -> None:
    agree(made(torch.float32, block_size=side), drawn(130, torch.float32), definition, 2e-5)


def test_the_definition_in_bfloat16() -> None:
    """The choice is that of the rounded queries and keys, with means and scores in float32."""
    layer = made(torch.bfloat16, bias=False)
    with torch.no_grad():
        # projections that copy channels are exact
        layer.in_proj_weight.copy_(torch.eye(E)[torch.randint(E, (3 * E,))])
        layer.out_proj.weight.copy_(torch.eye(E))
    x = drawn(70, torch.bfloat16)
    torch.testing.assert_close(
        layer(x).double(), definition(copy.deepcopy(layer).double(), x.double()), rtol=1e-2, atol=1e-2
    )


def test_equal_blocks_prefer_the_earlier() -> None:
    """With queries of 0 all blocks are equal: a query attends the first ones and its own."""
    layer, x = made(block_size=4), drawn(26)
    with torch.no_grad():
        layer.in_proj_weight[:E] = 0
        layer.in_proj_bias[:E] = 0
    pattern = (rw.Segments(4) | rw.Sinks(8)) & rw.Causal()
    want = layer.out_proj(rw.attention(*inputs_of(layer, x), pattern).transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x), want, rtol=1e-9, atol=1e-9)


def test_no_row_depends_on_later_tokens() -> None:
    layer, x = made(), drawn(60).detach()
    out = layer(x)
    for cut in (1, 8, 23, 40):
        later = x.clone()
        later[:, cut:] += 3
        assert torch.equal(layer(later)[:, :cut], out[:, :cut])


def test_chunks_do_not_change_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = made(num_kv_heads=2), drawn(60)
    out = layer(x)
    monkeypatch.setattr("ringweave.chunks._BUDGET", 800)
    torch.testing.assert_close(layer(x), out, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("steps", [[1] * 45, [20, 1, 1, 23], [8, 8, 8, 21], [3, 42]], ids=str)
@pytest.mark.parametrize("base", [None, 100.0])
def test_steps_over_a_cache(steps: list[int], base: float | None) -> None:
    layer, x = made(rotary_base=base, num_kv_heads=2), drawn(45).detach()
    cache = layer.empty_cache()
    with torch.no_grad():
        outs = [layer(part, cache=cache) for part in x.split(steps, 1)]
        torch.testing.assert_close(torch.cat(outs, 1), layer(x), rtol=1e-9, atol=1e-9)
    assert cache.length == 45
    assert repr(cache) == "KeyCache(<45 tokens; keys: 45 rows, values: 45 rows, means: 5 rows>)"


@pytest.mark.parametrize("base", [None, 100.0])
def test_documents_are_as_alone(base: float | None) -> None:
    alone_in_documents(made(rotary_base=base), drawn(60), [13, 40, 7])


def test_batch_elements_have_documents_of_their_own() -> None:
    layer, x = made(rotary_base=100.0), drawn(60)
    ids = torch.tensor([[0] * 20 + [1] * 40, [-1] * 5 + [7] * 30 + [2] * 20 + [-1] * 5])
    out = layer(x, documents=rw.Documents(ids=ids))
    for b, begin, end in ((0, 0, 20), (0, 20, 60), (1, 5, 35), (1, 35, 55)):
        alone = layer(x[b : b + 1, begin:end])[0]
        torch.testing.assert_close(out[b, begin:end], alone, rtol=1e-9, atol=1e-9)
    assert torch.equal(out[1, :5], layer.out_proj.bias.expand(5, -1))


@pytest.mark.parametrize(
    ("ranks", "n", "placement"), [(1, 60, "contiguous"), (2, 128, "zigzag"), (3, 301, "striped"), (2, 200, "auto")]
)
def test_ranks_compute_what_one_process_computes(ranks: int, n: int, placement: str) -> None:
    options = {"num_kv_heads": 2, "rotary_base": 100.0, "top_k": 2, "block_size": 16}
    make = functools.partial(nn.MixtureOfBlockAttention, E, H, **options)
    as_one_process(ranks, made(**options), lambda ctx: make(context=ctx), drawn(n), placement)


def test_the_state_of_dense_attention_loads() -> None:
    dense = nn.MultiheadAttention(E, H, batch_first=True, pattern=rw.Causal())
    layer = nn.MixtureOfBlockAttention(E, H, block_size=8, top_k=99)
    layer.load_state_dict(dense.state_dict())
    dense.load_state_dict(layer.state_dict())
    x = drawn(40, torch.float32)
    torch.testing.assert_close(layer(x), dense(x, x, x)[0])
    assert repr(layer).splitlines()[1].strip() == f"{E}, {H}, block_size=8, top_k=99"


def test_a_cache_holds_no_gradients_and_one_batch() -> None:
    layer, x = made(), drawn(5).detach()
    with pytest.raises(
        rw.UnsupportedError, match=r"cache: got a call with gradients; wanted a call under torch.no_grad"
    ):
        layer(x, cache=layer.empty_cache())
    cache = layer.empty_cache()
    with torch.no_grad():
        layer(x, cache=cache)
        with pytest.raises(rw.ShapeError, match="those of the cache"):
            layer(x[:1], cache=cache)
