"""The case ``decode``: one query per head over a long cache, next to the speed at which this machine reads memory.

A decoding step reads all keys and values once and does little else. Its share of the speed of memory is its bytes per
second over those of a loop that adds up an array, timed in turn with it on as many threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

import ringweave as rw
from ringweave.backends import cpu
from ringweave.call import Call
from ringweave.errors import UnsupportedError
from ringweave.precision import STORED, dequantize_rows, quantize_rows
from ringweave.torch_ops import attend

from ...tune.measure import interleaved, ratio
from ...tune.session import Say
from ..record import Measuring, Options, Target
from .kernels import reading

_PAGE = 64
# (query heads, key heads, D), tokens
_SHAPES = (((32, 8, 128), 32768), ((32, 8, 128), 131072), ((8, 8, 128), 32768), ((32, 8, 64), 32768))
_QUICK = (((4, 1, 128), 1024),)
_SHARES = {"float32": 0.8, "bfloat16": 0.75, "int8": 0.6}
_OVER_SDPA = 15.0  # bound where four query heads share keys, which SDPA reads once per query head
_TYPES = (torch.float32, torch.bfloat16, torch.float16, *STORED)


def measure(options: Options, say: Say) -> Measuring:
    """Time each type of cache in turn with reading and with SDPA, and measure the errors of each policy."""
    if cpu.module() is None:
        raise UnsupportedError("decode", "no native kernel", "one", "Install ringweave with a C++ compiler.")
    said = []
    for (heads, kv_heads, dim), usual in _QUICK if options.quick else _SHAPES:
        tokens = (options.tokens or usual) // _PAGE * _PAGE
        size = f"{heads} over {kv_heads} heads of {dim}, {tokens} tokens"
        say(f"decode: {size}")
        kept = {name: shares for name, *shares in _shares(heads, kv_heads, dim, tokens, options)}
        for name, (share, best) in kept.items():
            if name == "sdpa":
                bound = _OVER_SDPA if (heads, kv_heads, dim) == (32, 8, 128) and not options.sized else None
                yield Target("bfloat16: SDPA's time over ringweave's", size, share, bound, True)
                continue
            asked = None if options.sized else _SHARES.get(name)
            yield Target(f"{name}: share of the speed of memory, medians", size, share, asked, True, "%")
            yield Target(f"{name}: share of the speed of memory, best rounds", size, best, None, True, "%")
        said.append(f"{kept['bfloat16'][0]:.0%} ({size})")
    yield from _errors(2048 if options.quick else 32768)
    return f"Decoding in bfloat16 runs at these shares of the speed of memory: {', '.join(said)}."


def _shares(heads: int, kv_heads: int, dim: int, tokens: int, options: Options) -> Iterator[tuple[str, float, float]]:
    """Yield (cache, share by medians, share by best rounds) of every type, paged too, and ("sdpa", ratio, ratio)."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, h, n, dim, generator=generator) for h, n in ((heads, 1), (kv_heads, tokens), (kv_heads, tokens))
    )
    calls: dict[str, Callable[[], object]] = {}
    read: dict[str, int] = {}
    calls["memory"], read["memory"] = reading(options.quick)
    for dtype in _TYPES:
        name = str(dtype).removeprefix("torch.")
        queries, caches = q.to(dtype) if dtype not in STORED else q.bfloat16(), _caches(k, v, dtype)
        for kind, (call, nbytes) in zip((name, f"{name} in pages"), caches, strict=True):
            calls[kind] = partial(call, queries)
            read[kind] = nbytes
    dense, grouped = [x.bfloat16() for x in (q, k, v)], heads != kv_heads
    sdpa: Callable[..., object] = torch.nn.functional.scaled_dot_product_attention
    calls["sdpa"] = partial(sdpa, *dense, enable_gqa=grouped)
    timings = interleaved(calls, rounds=options.rounds or (3 if options.quick else 9), device="cpu")
    for name in read:
        if name != "memory":
            of_bytes = read[name] / read["memory"]
            best = timings["memory"].min / timings[name].min
            yield name, of_bytes * ratio(timings["memory"], timings[name]).medians, of_bytes * best
    over = ratio(timings["sdpa"], timings["bfloat16"]).medians
    yield "sdpa", over, over


def _caches(k: Tensor, v: Tensor, dtype: torch.dtype) -> list[tuple[Callable[[Tensor], object], int]]:
    """Return (call, bytes that it reads) of contiguous keys and values, and of pages in random order."""
    tokens, dim = k.shape[2:]
    scales: tuple[Tensor, ...] = ()
    if dtype in STORED:
        (k, of_k), (v, of_v) = quantize_rows(k, dtype), quantize_rows(v, dtype)
        scales = (of_k, of_v)
    else:
        k, v = k.to(dtype), v.to(dtype)
    nbytes = sum(x.nbytes for x in (k, v, *scales))
    order = torch.randperm(tokens // _PAGE, generator=torch.Generator().manual_seed(0))

    def in_pages(x: Tensor) -> Tensor:
        split = x[0].view(torch.uint8) if dtype in STORED and x.ndim == 4 else x[0]
        split = split.unflatten(1, (-1, _PAGE)).transpose(0, 1)
        pages = torch.empty_like(split)
        pages[order] = split
        return pages.view(dtype) if x.ndim == 4 else pages

    lengths = torch.tensor([tokens], dtype=torch.int32)
    paged = tuple(map(in_pages, scales)) if scales else None
    cache = rw.PagedCache(in_pages(k), in_pages(v), order[None].int().contiguous(), lengths, scales=paged)  # type: ignore[arg-type]
    last = tokens - 1

    def alone(q: Tensor) -> object:
        if not scales:
            return rw.attention(q, k, v, rw.Causal(), q_offset=last, backend="cpu")
        call = Call.of(q, k, v, rw.Causal(), scale=dim**-0.5, q_offset=last, backend="cpu")
        return attend(call, q, k, v, scales)

    return [(alone, nbytes), (lambda q: rw.paged_attention(q, cache, backend="cpu"), nbytes)]


def _errors(tokens: int) -> Iterator[Target]:
    """Yield the errors of each policy's output in the Euclidean norm, on the original and on the stored values."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 8, n, 128, generator=generator) for n in (16, tokens, tokens))
    policies = {
        "float32": rw.Precision(), "compute=bfloat16": rw.Precision(compute=torch.bfloat16),
        "compute=float16": rw.Precision(compute=torch.float16), "kv=int8": rw.Precision(kv=torch.int8),
        "kv=float8_e4m3fn": rw.Precision(kv=torch.float8_e4m3fn),
    }  # fmt: skip
    whole = rw.attention(q.double(), k.double(), v.double())
    for name, policy in policies.items():
        out = rw.attention(q, k, v, precision=policy).double()
        made = [q, k, v] if policy.compute is None else [x.to(policy.compute) for x in (q, k, v)]
        if policy.kv is not None:
            made[1:] = [dequantize_rows(*quantize_rows(x, policy.kv)) for x in (k, v)]
        rounded = rw.attention(made[0].double(), made[1].double(), made[2].double())
        for of, want in (("what was given", whole), ("what it was rounded to", rounded)):
            lost = float((out - want).norm() / want.norm())
            yield Target(f"{name}: error against {of}", f"{tokens} keys", lost * 1e6, None, False, "ppm")
    for dim in (128, 64):
        x = torch.randn(1, 8, 64, dim, generator=generator)
        small = sum(each.nbytes for each in quantize_rows(x, torch.int8)) / x.bfloat16().nbytes
        yield Target("bytes read of int8 over those of bfloat16", f"D = {dim}", small, 0.55, False)
