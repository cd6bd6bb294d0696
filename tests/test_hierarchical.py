"""Attention at two scales equals its definition, written row by row, and is close to dense attention."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import ringweave as rw
from ringweave import hierarchical

CASES = [
    # causal, queries, keys, q_offset, pool, top_k, window
    (True, 37, 37, 0, 8, 1, 0),
    (True, 37, 53, 16, 8, 2, 20),
    (True, 21, 64, 43, 16, 1, 5),
    (True, 30, 20, 7, 8, 1, 8),
    (False, 37, 53, 0, 8, 1, 0),
    (False, 40, 61, 21, 16, 1, 20),
    (False, 50, 20, 0, 8, 0, 8),
    (True, 1, 61, 60, 8, 2, 8),
]


def tensors(nq: int, nk: int, dtype: torch.dtype = torch.float64, heads: int = 4) -> list[Tensor]:
    shapes = [(2, heads, nq, 8), (2, heads // 2, nk, 8), (2, heads // 2, nk, 6)]
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def spelled(
    q: Tensor, k: Tensor, v: Tensor, *, pool: int, top_k: int, window: int, causal: bool, q_offset: int
) -> Tensor:
    """Compute row by row: means of blocks, their weights summed over a tile, then one softmax over tokens and means."""
    nk, ratio = k.shape[2], q.shape[1] // k.shape[1]
    blocks = [list(range(start, min(start + pool, nk))) for start in range(0, nk, pool)]
    counts = torch.tensor([len(block) for block in blocks], dtype=q.dtype)
    reach, last = -(-window // pool), len(blocks) - 1
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype)
    for b, h in itertools.product(range(q.shape[0]), range(q.shape[1])):
        keys, values = k[b, h // ratio], v[b, h // ratio]
        mean_k, mean_v = (torch.stack([x[block].mean(0) for block in blocks]) for x in (keys, values))
        for tile, rows in itertools.groupby(range(q.shape[2]), lambda i: (i + q_offset) // pool):
            own = list(rows)
            near = {min(max(each, 0), last) for each in range(tile - reach, tile + (0 if causal else reach) + 1)}
            far = [j for j in range(last + 1) if j not in near and (not causal or j < tile)]
            scores = q[b, h, own] @ mean_k[far].T / q.shape[3] ** 0.5 + counts[far].log()
            best = scores.softmax(-1).sum(0).argsort(descending=True)[:top_k].tolist()
            chosen = {far[place] for place in best}
            rest = [j for j in far if j not in chosen]
            for i in own:
                single = [t for j in sorted(near | chosen) for t in blocks[j] if not causal or t <= i + q_offset]
                row = q[b, h, i] @ torch.cat([keys[single], mean_k[rest]]).T / q.shape[3] ** 0.5
                row = row + torch.cat([torch.zeros(len(single), dtype=q.dtype), counts[rest].log()])
                out[b, h, i] = row.softmax(-1) @ torch.cat([values[single], mean_v[rest]])
    return out


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("pieces", ["one piece", "many"])
def test_the_definition_and_its_gradients(case: tuple[Any, ...], pieces: str, monkeypatch: pytest.MonkeyPatch) -> None:
    causal, nq, nk, q_offset, pool, top_k, window = case
    if pieces == "many":
        monkeypatch.setattr("ringweave.chunks._BUDGET", 1)
    options: dict[str, Any] = {"pool": pool, "top_k": top_k, "window": window, "causal": causal, "q_offset": q_offset}
    leaves = [x.requires_grad_() for x in tensors(nq, nk)]
    got, want = rw.hierarchical_attention(*leaves, **options), spelled(*leaves, **options)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    upstream = torch.randn_like(got)
    for mine, exact in zip(
        torch.autograd.grad(got, leaves, upstream), torch.autograd.grad(want, leaves, upstream), strict=True
    ):
        torch.testing.assert_close(mine, exact, rtol=0, atol=1e-11)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("combine", hierarchical.COMBINATIONS)
def test_gradcheck(causal: bool, combine: str) -> None:
    leaves = [x[:1, :, :, :3].clone().requires_grad_() for x in tensors(11, 11, heads=2)]
    gated = combine == "gates"
    gates = torch.rand(1, 2, 11, 3, dtype=torch.float64, requires_grad=True) if gated else None

    def call(*args: Tensor) -> Tensor:
        given = args[3] if gated else None
        return rw.hierarchical_attention(
            *args[:3], pool=4, top_k=1, window=4, causal=causal, combine=combine, gates=given
        )

    # one random direction: checking them one by one takes minutes
    assert torch.autograd.gradcheck(call, [*leaves, *([gates] if gated else [])], fast_mode=True)


@pytest.mark.parametrize(("causal", "n", "q_offset"), [(True, 300, 0), (False, 300, 0), (True, 100, 200)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_chosen_is_dense_attention(causal: bool, n: int, q_offset: int, dtype: torch.dtype) -> None:
    leaves = [x.requires_grad_() for x in tensors(n, 300, dtype)]
    got = rw.hierarchical_attention(*leaves, pool=32, top_k=10, window=0, causal=causal, q_offset=q_offset)
    pattern = rw.Causal() if causal else rw.Full()
    want = rw.attention(*leaves, pattern, q_offset=q_offset)
    bound = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(got, want, rtol=bound, atol=bound)
    upstream = torch.randn_like(got)
    for mine, dense in zip(
        torch.autograd.grad(got, leaves, upstream), torch.autograd.grad(want, leaves, upstream), strict=True
    ):
        assert (mine - dense).norm() <= bound * dense.norm()


def test_the_error_falls_as_more_blocks_are_chosen() -> None:
    n, pool = 512, 16
    # keys that resemble their neighbours, and some queries similar to one of them
    topics = torch.randn(1, 2, n // 32, 16).repeat_interleave(32, 2)
    k, v = topics + 0.5 * torch.randn(1, 2, n, 16), torch.randn(1, 2, n, 16)
    q = 2 * topics[:, :, torch.randperm(n // 32).repeat_interleave(32) * 32] + torch.randn(1, 2, n, 16)
    for causal in (True, False):
        want = rw.attention(q, k, v, rw.Causal() if causal else rw.Full())
        errors = [
            float(
                (rw.hierarchical_attention(q, k, v, pool=pool, top_k=top_k, window=pool, causal=causal) - want).norm()
            )
            for top_k in (0, 1, 2, 4, 8, 16, 32)
        ]
        assert all(after < before for before, after in itertools.pairwise(errors[:-1])), errors
        assert errors[-1] < 1e-5 * float(want.norm())
        # and the block means improve on the window alone
        table = rw.hierarchical_attention(q, k, v, pool=pool, top_k=0, window=pool, causal=causal)
        window = rw.plan(rw.SlidingWindow(pool, 0 if causal else pool), n)
        assert window.density < 0.2
        alone = rw.attention(q, k, v, rw.SlidingWindow(pool, 0 if causal else pool))
        assert (table - want).norm() < 0.8 * (alone - want).norm()


def test_gates_of_one_scale_alone() -> None:
    """With gates, each of the three scales is right alone: means of the whole past, own and chosen blocks, and the window."""
    q, k, v = tensors(45, 45)
    options: dict[str, Any] = {"pool": 8, "top_k": 2, "window": 11, "causal": True, "combine": "gates"}
    one = torch.eye(3, dtype=q.dtype)[:, None, None, None].expand(3, 2, 4, 45, 3)
    means, chosen, window = (rw.hierarchical_attention(q, k, v, gates=gates, **options) for gates in one)
    torch.testing.assert_close(window, rw.attention(q, k, v, rw.SlidingWindow(11, 0)))
    mean_k, mean_v = (rw.adaptive.block_means(x, 8) for x in (k, v))
    ends = torch.tensor([7, 15, 23, 31, 39, 44])
    past = rw.from_mask_mod(lambda b, h, i, j: ends[j] <= i, tables=[ends])
    bias = rw.Bias(torch.tensor([8.0] * 5 + [5.0], dtype=q.dtype).log().expand(1, 1, 45, 6))
    torch.testing.assert_close(means, rw.attention(q, mean_k, mean_v, past, terms=bias))
    # the first tiles choose all of the few blocks before them
    torch.testing.assert_close(chosen[:, :, :24], rw.attention(q, k, v, rw.Causal())[:, :, :24])
    mixed = torch.rand(2, 4, 45, 3, dtype=q.dtype)
    want = sum(mixed[..., i, None] * part for i, part in enumerate((means, chosen, window)))
    torch.testing.assert_close(rw.hierarchical_attention(q, k, v, gates=mixed, **options), want)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_means_of_the_past_alone(case: tuple[Any, ...]) -> None:
    """With gates, a query attends the mean of each block that ends at or before it, weighted by the block's tokens."""
    causal, nq, nk, q_offset, pool, top_k, window = case
    leaves = [x.requires_grad_() for x in tensors(nq, nk)]
    gates = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64).expand(2, 4, nq, 3)
    got = rw.hierarchical_attention(
        *leaves, pool=pool, top_k=top_k, window=window, causal=causal, q_offset=q_offset, combine="gates", gates=gates
    )
    q, k, v = leaves[0], *(x.repeat_interleave(2, 1) for x in leaves[1:])
    blocks = [slice(begin, min(begin + pool, nk)) for begin in range(0, nk, pool)]
    mean_k, mean_v = (torch.stack([x[:, :, block].mean(2) for block in blocks], 2) for x in (k, v))
    counts = torch.tensor([block.stop - block.start for block in blocks], dtype=torch.float64)
    ends = torch.tensor([block.stop for block in blocks])
    allowed = (ends <= torch.arange(nq)[:, None] + q_offset + 1) | (not causal)
    weights = ((q @ mean_k.mT) / 8**0.5 + counts.log()).exp() * allowed
    want = weights / weights.sum(-1, keepdim=True).clamp(min=1e-300) @ mean_v
    torch.testing.assert_close(got, want)
    upstream = torch.randn_like(got)
    for mine, exact in zip(
        torch.autograd.grad(got, leaves, upstream), torch.autograd.grad(want, leaves, upstream), strict=True
    ):
        torch.testing.assert_close(mine, exact)


def test_decoding_gives_the_rows_of_the_whole() -> None:
    q, k, v = tensors(64, 64)
    options: dict[str, Any] = {"pool": 8, "top_k": 2, "window": 8, "causal": True}
    whole = rw.hierarchical_attention(q, k, v, **options)
    # a whole tile chooses blocks together: single rows may choose others, whole tiles may not
    part = rw.hierarchical_attention(q[:, :, 40:], k, v, q_offset=40, **options)
    torch.testing.assert_close(part, whole[:, :, 40:])
    step = rw.hierarchical_attention(q[:, :, 63:], k, v, q_offset=63, **options)
    torch.testing.assert_close(step, spelled(q[:, :, 63:], k, v, q_offset=63, **options))


def test_no_future_reaches_a_row() -> None:
    q, k, v = (x.requires_grad_() for x in tensors(40, 40))
    out = rw.hierarchical_attention(q, k, v, pool=8, top_k=1, window=0, causal=True)
    for x in torch.autograd.grad(out[:, :, 18].sum(), (k, v)):
        assert not x[:, :, 19:].any()
        assert x[:, :, :8].any()


@pytest.mark.parametrize("combine", hierarchical.COMBINATIONS)
@pytest.mark.parametrize("broken", ["key", "value"])
def test_a_broken_token_reaches_the_rows_that_attend_it(broken: str, combine: str) -> None:
    """Rows before it keep their bits, and their queries their gradients."""
    results = []
    for number in (0.5, torch.nan):
        torch.manual_seed(0)
        q, k, v = tensors(60, 60, torch.float32)
        (k if broken == "key" else v)[:, :, 29] = number
        leaves = [x.requires_grad_() for x in (q, k, v)]
        gates = torch.rand(2, 4, 60, 3) if combine == "gates" else None
        out = rw.hierarchical_attention(*leaves, pool=8, top_k=1, window=8, causal=True, combine=combine, gates=gates)
        results.append((out, torch.autograd.grad(out[:, :, :29].sum(), leaves[0])[0]))
    (sound, of_sound), (got, of_got) = results
    assert torch.equal(got[:, :, :29], sound[:, :, :29])
    assert got[:, :, 29:].isnan().all()
    assert torch.equal(of_got[:, :, :29], of_sound[:, :, :29])


def test_memory_does_not_grow_with_all_pairs() -> None:
    """Memory grows with N, not N^2: backward recomputes the scores piece by piece."""
    kept: dict[int, int] = {}
    for n in (1024, 4096):
        q, k, v = (torch.randn(1, 2, n, 8, requires_grad=True) for _ in range(3))
        size = 0

        def pack(x: Tensor) -> Tensor:
            nonlocal size
            size += x.nbytes
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            rw.hierarchical_attention(q, k, v, pool=16, top_k=2, window=16, causal=True)
        kept[n] = size
    # four times the tokens, with means of all blocks before a piece; scores of all pairs would take sixteen times
    assert kept[4096] < 6 * kept[1024]


def test_autocast_and_transforms() -> None:
    q, k, v = torch.randn(3, 2, 2, 40, 16).unbind(0)
    for options in ({}, {"combine": "gates", "gates": torch.rand(2, 2, 40, 3)}):

        def call(q: Tensor, options: dict[str, Any] = options) -> Tensor:
            return rw.hierarchical_attention(q, k, v, pool=8, top_k=1, window=8, causal=True, **options)

        with torch.autocast("cpu", torch.bfloat16):
            out = call(q)
        low = [x.bfloat16() for x in (q, k, v)]
        wanted = rw.hierarchical_attention(*low, pool=8, top_k=1, window=8, causal=True, **options)
        assert torch.equal(out, wanted)
        many = torch.stack([q, 2 * q])
        torch.testing.assert_close(torch.vmap(call)(many), torch.stack([call(q), call(2 * q)]))

        def with_keys(k: Tensor, options: dict[str, Any] = options) -> Tensor:
            return rw.hierarchical_attention(q, k, v, pool=8, top_k=1, window=8, causal=True, **options)

        many = torch.stack([k, 2 * k])
        torch.testing.assert_close(torch.vmap(with_keys)(many), torch.stack([with_keys(k), with_keys(2 * k)]))
        leaf = q.clone().requires_grad_()
        call(leaf).square().sum().backward()
        torch.testing.assert_close(torch.func.grad(lambda q: call(q).square().sum())(q), leaf.grad)


def test_compiled() -> None:
    q, k, v = tensors(64, 64, torch.float32)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return rw.hierarchical_attention(q, k, v, pool=16, top_k=1, window=16, causal=True)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v), call(q, k, v))


@pytest.mark.parametrize("combine", hierarchical.COMBINATIONS)
def test_the_module(combine: str) -> None:
    x = torch.randn(2, 70, 32)
    layer = rw.nn.HierarchicalAttention(
        32,
        4,
        pool=16,
        top_k=1,
        window=16,
        causal=True,
        combine=combine,
        num_kv_heads=2,
        rotary_base=1e4,
        batch_first=True,
    )
    out, weights = layer(x, x, x)
    assert (out.shape, weights) == (x.shape, None)
    out.square().mean().backward()
    assert all(p.grad is not None and p.grad.any() for p in layer.parameters())
    torch.testing.assert_close(layer(x, x, x)[0][:, :64], layer(x[:, :64], x[:, :64], x[:, :64])[0])
    # also in torch's order of dimensions
    layer.batch_first = False
    torch.testing.assert_close(layer(*[x.transpose(0, 1)] * 3)[0].transpose(0, 1), out)
    layer.batch_first = True
