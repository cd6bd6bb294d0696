"""Native sparse attention equals its definition in plain torch, in steps, in documents, and on several ranks."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import ringweave as rw
from ringweave import nn

from .parallel.threads import Threaded, run
from .test_moba import E, agree, alone_in_documents, as_one_process, drawn, turned

SIZES = {"compress_block": 8, "compress_stride": 4, "block_size": 16, "top_k": 4, "window": 10}


def compressed(phi: torch.nn.Module, x: Tensor, block: int, stride: int) -> Tensor:
    """Compress (B, Hkv, N, D) block by block."""
    rows = []
    for begin in range(0, x.shape[2] - block + 1, stride):
        placed = (x[:, :, begin : begin + block] + phi.position).flatten(2)
        rows.append(torch.einsum("bhi,hio->bho", F.gelu(torch.einsum("bhi,hio->bho", placed, phi.hidden)), phi.weight))
    return torch.stack(rows, 2) if rows else x[:, :, :0]


def weights_of(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    """Return softmax weights; a row without keys has weights of 0."""
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~mask, -torch.inf)
    return torch.where(mask.any(-1, keepdim=True), scores, 0.0).softmax(-1) * mask


def importance(p: list[float], j: int, a: int, b: int) -> float:
    """Equation 9 for block j, with indices from 1: a = l'/d, b = l/d."""
    places = [a * j - m - n for m in range(a) for n in range(b)]
    return sum(p[place - 1] for place in places if 1 <= place <= len(p))


def blocks_of(layer: nn.NativeSparseAttention, p: Tensor, lists: Tensor | None) -> Tensor:
    """Return the pairs (B, Hkv, N, N) of the selected branch for weights p, (B, Hkv, N, blocks), by loops.

    With ``lists``, a module's choice: its blocks are returned, after a check that no better blocks exist to rounding.
    """
    batch, heads, n, _ = p.shape
    side, fixed = layer.block_size, layer.initial_blocks + layer.local_blocks
    ratios = side // layer.compress_stride, layer.compress_block // layer.compress_stride
    mask = torch.zeros(batch, heads, n, n, dtype=torch.bool)
    for b, h, t in ((b, h, t) for b in range(batch) for h in range(heads) for t in range(n)):
        own, listed = t // side, p[b, h, t].tolist()
        always = {*range(layer.initial_blocks), *range(own - layer.local_blocks + 1, own + 1)} & {*range(own + 1)}
        rest = sorted((-importance(listed, j + 1, *ratios), j) for j in range(own + 1) if j not in always)
        chosen = always | {j for _, j in rest[: layer.top_k - fixed]}
        if lists is not None:
            found = {*lists[b, h, t].tolist()} - {-1}
            assert always <= found
            assert len(found) == len(chosen)
            worst = min((-score for score, j in rest if j in chosen), default=0.0)
            assert all(-score >= worst - 1e-6 for score, j in rest if j in found)
            chosen = found
        for j in chosen:
            mask[b, h, t, j * side : (j + 1) * side] = True
    return mask & torch.ones(n, n).tril().bool()


def definition(layer: nn.NativeSparseAttention, x: Tensor, lists: Tensor | None = None) -> Tensor:
    """Compute the module by its definition, dense; with ``lists`` for a choice that may differ where scores are close."""
    heads, n, d, stride = layer.num_heads, x.shape[1], layer.head_dim, layer.compress_stride
    split = F.linear(x, layer.in_proj_weight, layer.in_proj_bias).unflatten(-1, (-1, d)).transpose(1, 2)
    q, *kv = split.split([heads, *[layer.num_kv_heads] * (6 if layer.separate_kv else 2)], 1)
    if layer.q_norm is not None:
        q = F.rms_norm(q, (d,), layer.q_norm.weight)
        kv[::2] = [F.rms_norm(k, (d,), layer.k_norm.weight) for k in kv[::2]]
    kv = kv if layer.separate_kv else kv * 3
    every = [y.repeat_interleave(heads // layer.num_kv_heads, 1) for y in kv]
    ck, cv = (
        compressed(phi, y, layer.compress_block, stride).repeat_interleave(heads // layer.num_kv_heads, 1)
        for phi, y in ((layer.compress_keys, kv[0]), (layer.compress_values, kv[1]))
    )
    t = torch.arange(n)[:, None]
    p = weights_of(q, ck, torch.arange(ck.shape[2]) * stride + layer.compress_block - 1 <= t)
    of_heads = p.detach().unflatten(1, (layer.num_kv_heads, -1)).sum(2)
    chosen = blocks_of(layer, of_heads, lists).repeat_interleave(heads // layer.num_kv_heads, 1)
    near = (torch.arange(n) <= t) & (torch.arange(n) > t - layer.window)
    rq, sk, wk = (turned(y, layer.rotary_base) for y in (q, every[2], every[4]))
    outs = [p @ cv, weights_of(rq, sk, chosen) @ every[3], weights_of(rq, wk, near) @ every[5]]
    gates = layer.gate(x).sigmoid().unflatten(-1, (heads, 3)).permute(3, 0, 2, 1)[..., None]
    return layer.out_proj(sum(gate * out for gate, out in zip(gates, outs, strict=True)).transpose(1, 2).flatten(2))


def made(dtype: torch.dtype = torch.float64, heads: int = 4, **options: Any) -> nn.NativeSparseAttention:
    torch.manual_seed(0)
    layer = nn.NativeSparseAttention(E, heads, **SIZES | options)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return layer.to(dtype)


def compare(layer: nn.NativeSparseAttention, x: Tensor, tolerance: float) -> None:
    with listed_by(layer) as lists:
        agree(layer, x, lambda *of: definition(*of, lists[0] if x.dtype == torch.float32 else None), tolerance)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1), (16, 1), (16, 8)])
@pytest.mark.parametrize("n", [1, 5, 16, 101])
def test_the_definition(heads: int, kv_heads: int, n: int) -> None:
    compare(made(heads=heads, num_kv_heads=kv_heads), drawn(n), 1e-9)


OPTIONS: dict[str, dict[str, Any]] = {
    "compressed blocks apart": {"compress_block": 4, "compress_stride": 4},
    "one size": {"compress_block": 16, "compress_stride": 16},
    "long compressed blocks": {"compress_block": 24, "compress_stride": 4, "block_size": 8, "top_k": 5},
    "stride of 1": {"compress_block": 5, "compress_stride": 1, "block_size": 3, "top_k": 7},
    "fixed blocks only": {"top_k": 3},
    "other fixed blocks": {"initial_blocks": 0, "local_blocks": 1, "top_k": 3},
    "all blocks": {"top_k": 99},
    "window of 1": {"window": 1},
    "rotated": {"rotary_base": 100.0},
    "normalised": {"qk_norm": True},
    "no bias": {"bias": False},
    "shared keys": {"separate_kv": False, "rotary_base": 100.0, "qk_norm": True},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_the_definition_with_options(name: str) -> None:
    compare(made(num_kv_heads=2, **OPTIONS[name]), drawn(75), 1e-9)


@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize("side", [8, 16, 32])
def test_the_definition_in_float32(kv_heads: int, side: int) -> None:
    compare(made(torch.float32, num_kv_heads=kv_heads, block_size=side), drawn(161, torch.float32), 5e-5)


def test_the_definition_in_bfloat16() -> None:
    """Compared where all blocks are chosen, since rounded scores may choose others."""
    layer, x = made(torch.bfloat16, num_kv_heads=1, top_k=99), drawn(70, torch.bfloat16)
    want = definition(copy.deepcopy(layer).double(), x.double())
    torch.testing.assert_close(layer(x).double(), want, rtol=3e-2, atol=3e-2 * float(want.detach().abs().max()))


@pytest.mark.parametrize(("stride", "block", "side"), [(4, 8, 16), (16, 32, 64), (4, 24, 8), (1, 5, 3), (8, 8, 8)])
def test_importance_counts_shared_tokens(stride: int, block: int, side: int) -> None:
    """Equation 9, with indices from 1, weighs a compressed block by its tokens in the block over the stride."""
    number = 30
    for i in range(number):
        p = [float(i == other) for other in range(number)]
        for j in range(number * stride // side):
            common = {*range(i * stride, i * stride + block)} & {*range(j * side, (j + 1) * side)}
            assert importance(p, j + 1, side // stride, block // stride) == len(common) / stride


def test_equal_blocks_prefer_the_earlier() -> None:
    """With queries of 0 and compressed blocks apart, all full blocks have equal importance."""
    layer, x = made(compress_block=4, compress_stride=4, block_size=4, top_k=5), drawn(60)
    with torch.no_grad():
        layer.in_proj_weight[:E] = 0
        layer.in_proj_bias[:E] = 0
    with listed_by(layer) as lists:
        layer(x)
    for t in range(60):
        own = t // 4
        wanted = {0, max(own - 1, 0), own} | {j for j in (1, 2) if j < own}
        assert {*lists[0][0, 0, t].tolist()} - {-1} == wanted


@contextmanager
def listed_by(layer: nn.NativeSparseAttention) -> Iterator[list[Tensor]]:
    """Record the lists of blocks that a module chooses."""
    lists: list[Tensor] = []
    choose = layer._chosen

    def record(*given: Any) -> Tensor:
        lists.append(choose(*given))
        return lists[-1]

    layer._chosen = record  # type: ignore[method-assign]
    yield lists
    layer._chosen = choose  # type: ignore[method-assign]


def test_no_row_depends_on_later_tokens() -> None:
    """Neither an output nor a choice changes if later tokens do."""
    layer, x = made(), drawn(90).detach()
    with listed_by(layer) as lists:
        out = layer(x)
        for cut in (1, 16, 37, 64, 80):
            later = x.clone()
            later[:, cut:] += 3
            assert torch.equal(layer(later)[:, :cut], out[:, :cut])
            assert torch.equal(lists[-1][:, :, :cut], lists[0][:, :, :cut])


def test_chunks_do_not_change_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = made(num_kv_heads=2), drawn(90).detach()
    with listed_by(layer) as lists:
        layer(x)
        monkeypatch.setattr("ringweave.chunks._BUDGET", 8000)
        layer(x)
    assert torch.equal(*(each.sort(-1).values for each in lists))


@pytest.mark.parametrize("steps", [[1] * 85, [40, 1, 1, 43], [8, 16, 16, 45], [3, 82]], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"rotary_base": 100.0, "num_kv_heads": 1}, {"separate_kv": False, "window": 1}], ids=str
)
def test_steps_over_a_cache(steps: list[int], options: dict[str, Any]) -> None:
    layer, x = made(**options), drawn(85).detach()
    cache = layer.empty_cache()
    with torch.no_grad(), listed_by(layer) as lists:
        outs = [layer(part, cache=cache) for part in x.split(steps, 1)]
        torch.testing.assert_close(torch.cat(outs, 1), layer(x), rtol=1e-9, atol=1e-9)
    begin = 0
    for got in lists[:-1]:
        want = lists[-1][:, :, begin : begin + got.shape[2]]
        begin += got.shape[2]
        for one, other in zip(got.flatten(0, 2).tolist(), want.flatten(0, 2).tolist(), strict=True):
            assert {*one, -1} == {*other, -1}
    assert cache.length == 85
    near = cache.read("window keys")
    assert near is not None
    assert near.shape[2] == layer.window - 1


@pytest.mark.parametrize("base", [None, 100.0])
def test_documents_are_as_alone(base: float | None) -> None:
    alone_in_documents(made(rotary_base=base, num_kv_heads=2), drawn(90), [23, 62, 5])


@pytest.mark.parametrize(
    ("ranks", "n", "placement"),
    [(1, 90, "contiguous"), (2, 128, "zigzag"), (3, 301, "striped"), (2, 700, "contiguous"), (2, 200, "auto")],
)
def test_ranks_compute_what_one_process_computes(ranks: int, n: int, placement: str) -> None:
    options = {"num_kv_heads": 2, "rotary_base": 100.0}
    make = functools.partial(nn.NativeSparseAttention, E, 4, **SIZES | options)
    as_one_process(ranks, made(**options), lambda ctx: make(context=ctx), drawn(n), placement)


@pytest.mark.parametrize(("ranks", "n", "placement"), [(2, 128, "zigzag"), (3, 301, "striped"), (2, 700, "contiguous")])
@pytest.mark.parametrize("schedule", ["allgather", "ring"])
def test_ranks_of_the_native_kernel(ranks: int, n: int, placement: str, schedule: str) -> None:
    """A rank computes its rows of the lists, where query heads of a key head share lists."""
    options = {"num_kv_heads": 2, "rotary_base": 100.0}
    alone, x = made(torch.float32, **options), drawn(n, torch.float32).detach()

    def job(transport: Threaded) -> Tensor:
        ctx = rw.ContextParallel(transport, rw.Causal(), n, heads=(4, 2), placement=placement, schedule=schedule)
        layer = nn.NativeSparseAttention(E, 4, **SIZES | options, context=ctx)
        layer.load_state_dict(alone.state_dict())
        return ctx.unshard(layer(ctx.shard(x)))

    for out in run(ranks, job):
        torch.testing.assert_close(out, alone(x), rtol=1e-4, atol=1e-4)


def test_the_state_of_one_loads_into_another() -> None:
    one, other = made(), nn.NativeSparseAttention(E, 4, **SIZES).double()
    other.load_state_dict(one.state_dict())
    x = drawn(40)
    assert torch.equal(one(x), other(x))
    sizes = "compress_block=8, compress_stride=4, block_size=16, top_k=4, window=10"
    assert repr(one).splitlines()[1].strip() == f"{E}, 4, {sizes}"
    again = copy.deepcopy(one)
    again.reset_parameters()
    assert all(not torch.equal(a, b) for a, b in zip(again.parameters(), one.parameters(), strict=True))
