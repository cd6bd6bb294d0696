"""The case ``selected``: keys that a model chooses for each query, next to plain causal attention.

The lists are drawn, so their choice costs nothing here; the indexer is timed next to PyTorch's operations in chunks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

import ringweave as rw
from ringweave.errors import UnsupportedError

from ...tune.measure import interleaved, ratio
from ...tune.session import Say
from ..peak import peak_memory
from ..record import Measuring, Options, Target

_CHECKED = 256  # tokens of the check
_CHUNK = 512  # queries of a chunk of PyTorch's indexer


def measure(options: Options, say: Say) -> Measuring:
    """Check and time blocks, single keys, decoding steps and the indexer, and measure the memory of training."""
    usual = not options.sized
    tokens = options.tokens or (512 if options.quick else 8192)
    say(f"selected: blocks, {tokens} tokens")
    yield from _blocks(tokens, options, usual)
    say("selected: single keys that neighbours share")
    yield from _single_keys(tokens, options, usual)
    say("selected: decoding steps")
    yield from _steps(1024 if options.quick else 65536, options, usual)
    say("selected: indexer")
    yield from _indexer(tokens, options, usual)
    for length in (512, 1024) if options.quick else (16384, 32768):
        say(f"selected: memory, {length} tokens")
        yield from _memory(length)
    return "Bounds are those of the notes on models that choose their keys."


def _blocks(tokens: int, options: Options, usual: bool) -> Iterator[Target]:
    """Time 16 random blocks of 64 keys for each query, shared by 16 query heads."""
    q, k, v, dout = _drawn(tokens, heads=16, kv_heads=1, dim=64)
    lists = [random_blocks(tokens, 64, 16, seed) for seed in range(2)]
    pattern = rw.Selected(lists[0], 64) & rw.Causal()
    _check("blocks", rw.Selected(lists[0][:_CHECKED], 64) & rw.Causal(), q, k, v)
    size = f"{tokens} tokens, 16 heads over 1 key head of 64"
    fresh = itertools.cycle(lists)
    calls: dict[str, Callable[[], object]] = {
        "causal": lambda: rw.attention(q, k, v, rw.Causal()),
        "blocks": lambda: rw.attention(q, k, v, pattern),
        "first": lambda: rw.attention(q, k, v, rw.Selected(next(fresh), 64) & rw.Causal()),
    }
    times = interleaved(calls, rounds=options.rounds or (3 if options.quick else 5), device="cpu")
    forward = ratio(times["blocks"], times["causal"]).medians
    yield Target("16 blocks of 64, forward over causal", size, forward, 0.30 if usual else None, False)
    first = ratio(times["first"], times["blocks"]).medians
    yield Target("first call of a table over a repeated one", size, first, 1.1 if usual else None, False)
    calls = {name: partial(_both, q, k, v, dout, each) for name, each in (("causal", rw.Causal()), ("blocks", pattern))}
    times = interleaved(calls, rounds=options.rounds or 3, device="cpu")
    trained = ratio(times["blocks"], times["causal"]).medians
    yield Target("16 blocks of 64, with gradients over causal", size, trained, 0.35 if usual else None, False)


def _single_keys(tokens: int, options: Options, usual: bool) -> Iterator[Target]:
    """Time single keys that 16 heads with keys of their own share, where neighbouring queries choose similar keys."""
    q, k, v, _ = _drawn(tokens, heads=16, kv_heads=16, dim=192, value_dim=128)
    lists = [smooth_choice(tokens, min(512, tokens // 4), seed) for seed in range(2)]
    _check("single keys", rw.Selected(lists[0][:_CHECKED]) & rw.Causal(), q, k, v)
    fresh = itertools.cycle(lists)
    calls: dict[str, Callable[[], object]] = {
        "causal": lambda: rw.attention(q, k, v, rw.Causal()),
        "chosen": lambda: rw.attention(q, k, v, rw.Selected(next(fresh)) & rw.Causal()),
    }
    times = interleaved(calls, rounds=options.rounds or 3, device="cpu")
    size = f"{tokens} tokens, 16 heads of 192 and 128, {lists[0].shape[1]} keys a query"
    figure = ratio(times["chosen"], times["causal"]).medians
    yield Target("keys of each head, a new table each time, over causal", size, figure, 0.5 if usual else None, False)


def _steps(tokens: int, options: Options, usual: bool) -> Iterator[Target]:
    """Time steps over latent keys that 16 heads share: values are the first channels of the keys."""
    q, k, _, _ = _drawn(tokens, heads=16, kv_heads=1, dim=576, queries=1)
    v, top = k[..., :512], min(2048, tokens // 4)
    generator = torch.Generator().manual_seed(0)
    lists = [torch.randperm(tokens, generator=generator)[None, :top].int() for _ in range(32)]
    fresh = itertools.cycle(lists)
    calls: dict[str, Callable[[], object]] = {
        "dense": lambda: rw.attention(q, k, v, rw.Causal(), q_offset="end"),
        "chosen": lambda: rw.attention(q, k, v, rw.Selected(next(fresh)) & rw.Causal(), q_offset="end"),
    }
    times = interleaved(calls, rounds=options.rounds or (3 if options.quick else 15), device="cpu")
    size = f"{tokens} keys, 16 heads over 1 key head of 576 and 512, {top} keys"
    figure = ratio(times["chosen"], times["dense"]).medians
    yield Target("a step, a new list each time, over the dense step", size, figure, 0.15 if usual else None, False)


def _indexer(tokens: int, options: Options, usual: bool) -> Iterator[Target]:
    """Time the indexer next to PyTorch's operations on chunks of queries, and measure its memory."""
    heads, dim, top = 16, 64, min(512, tokens // 4)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, tokens, heads, dim, generator=generator)
    k = torch.randn(1, tokens, dim, generator=generator)
    weights = torch.randn(1, tokens, heads, generator=generator)
    calls: dict[str, Callable[[], object]] = {
        "torch": partial(_chunked, q, k, weights, top),
        "ours": lambda: rw.adaptive.lightning_indexer(q, k, weights, top),
    }
    times = interleaved(calls, rounds=options.rounds or 3, device="cpu")
    size = f"{tokens} x {tokens}, {heads} heads of {dim}"
    figure = ratio(times["ours"], times["torch"]).medians
    yield Target("the indexer over PyTorch in chunks", size, figure, 0.7 if usual else None, False)
    rise = peak_memory(calls["ours"]).nbytes / 2**20
    yield Target("memory of the indexer", size, rise, 1024 if usual else None, False, "MiB")


def _chunked(q: Tensor, k: Tensor, weights: Tensor, top: int) -> Tensor:
    """Choose keys with PyTorch's operations, for a chunk of queries and the keys up to its end at a time."""
    chosen = []
    for first in range(0, q.shape[1], _CHUNK):
        rows = slice(first, first + _CHUNK)
        end = min(first + _CHUNK, q.shape[1])
        scores = torch.einsum("bqhd,bkd->bhqk", q[:, rows], k[:, :end]).mul_(q.shape[3] ** -0.5).relu_()
        total = torch.einsum("bhqk,bqh->bqk", scores, weights[:, rows])
        future = torch.arange(end) > torch.arange(first, end)[:, None]
        total.masked_fill_(future, -torch.inf)
        found = total.topk(min(top, end), dim=-1).indices
        chosen.append(torch.nn.functional.pad(found, (0, top - found.shape[-1]), value=-1))
    return torch.cat(chosen, 1)


def _memory(tokens: int) -> Iterator[Target]:
    """Measure the memory of training over blocks and over single keys: it grows with queries times chosen keys."""
    q, k, v, dout = _drawn(tokens, heads=16, kv_heads=1, dim=64)
    kinds = {
        "16 blocks of 64": rw.Selected(random_blocks(tokens, 64, 16, 0), 64),
        "512 keys": rw.Selected(smooth_choice(tokens, min(512, tokens // 4), 0)),
    }
    for name, pattern in kinds.items():
        rise = peak_memory(partial(_both, q, k, v, dout, pattern & rw.Causal()), warm=False).nbytes / 2**20
        yield Target(f"memory, {name}, with gradients", f"{tokens} tokens, 16 heads of 64", rise, None, False, "MiB")


def _drawn(
    tokens: int, *, heads: int, kv_heads: int, dim: int, value_dim: int | None = None, queries: int | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw q, k, v and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    queries, value_dim = queries or tokens, value_dim or dim
    shapes = (heads, queries, dim), (kv_heads, tokens, dim), (kv_heads, tokens, value_dim), (heads, queries, value_dim)
    q, k, v, dout = (torch.randn(1, *shape, generator=generator) for shape in shapes)
    return q, k, v, dout


def random_blocks(tokens: int, size: int, top: int, seed: int) -> Tensor:
    """Draw blocks that begin in the past of each query, or at it: int32 (tokens, top), -1 where there are fewer."""
    generator = torch.Generator().manual_seed(seed)
    blocks = -(-tokens // size)
    scores = torch.rand(tokens, blocks, generator=generator)
    future = torch.arange(blocks) > torch.arange(tokens)[:, None] // size
    best = scores.masked_fill_(future, -1).topk(min(top, blocks), dim=-1)
    return torch.where(best.values >= 0, best.indices, -1).int()


def smooth_choice(tokens: int, top: int, seed: int, length: int = 128) -> Tensor:
    """Choose keys by scores that change over ``length`` queries: int32 (tokens, top), with the last 64 keys in all."""
    generator = torch.Generator().manual_seed(seed)
    anchors = torch.randn(tokens // length + 2, tokens, generator=generator)
    chosen = []
    for first in range(0, tokens, length):
        query = torch.arange(first, min(first + length, tokens))[:, None]
        share = (query - first) / length
        scores = torch.lerp(anchors[first // length], anchors[first // length + 1], share)
        key = torch.arange(tokens)
        scores += 8 * (query - key < 64)
        best = scores.masked_fill_(key > query, -torch.inf).topk(top, dim=-1)
        chosen.append(torch.where(best.values > -torch.inf, best.indices, -1).int())
    return torch.cat(chosen)


def _both(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, pattern: rw.Pattern) -> tuple[Tensor, ...]:
    """Compute attention and its gradients."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    return torch.autograd.grad(rw.attention(q, k, v, pattern), (q, k, v), dout)


def _check(name: str, pattern: rw.Pattern, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise UnsupportedError unless the results of a short call equal the reference's."""
    q, k, v = (x[:, :, :_CHECKED] for x in (q, k, v))
    got, wanted = (rw.attention(q, k, v, pattern, backend=backend) for backend in ("auto", "reference"))
    error = float((got - wanted).norm() / wanted.norm())
    if not error <= 8 * torch.finfo(q.dtype).eps:
        raise UnsupportedError(name, f"an error of {error:.1e}", "the reference's result", "Report it.")
