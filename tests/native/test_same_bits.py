"""A query row's bits are a function of the row: not of chunks, steps, padding, pages, batches or threads.

Ranks are held to one device's bits in ``parallel/test_schedules``.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import ringweave as rw
from ringweave.ops.cpu import VARIANT

from .plans import DTYPES, VARIANTS

TILE = 128
#: Rows of several blocks; of a window, those of one tile are in different places of their blocks; and of one.
PATTERNS = {
    "causal": (rw.Causal(), 2500),
    "window": (rw.SlidingWindow(2300) & rw.Causal(), 2900),
    "sinks": ((rw.Sinks(5) | rw.SlidingWindow(333)) & rw.Causal(), 1100),
    "around": (rw.SlidingWindow(200, 150), 700),
}
Ways = Iterator[tuple[str, rw.AttentionOutput, slice]]


def attend(q: Tensor, k: Tensor, v: Tensor, pattern: rw.Pattern, q_offset: int = 0) -> rw.AttentionOutput:
    return rw.attention_with_lse(q, k, v, pattern, q_offset=q_offset, backend="cpu")


def in_pages(x: Tensor, page: int) -> Tensor:
    count = -(-x.shape[2] // page)
    whole = torch.nn.functional.pad(x, (0, 0, 0, count * page - x.shape[2]), value=torch.nan)
    return whole.unflatten(2, (count, page)).transpose(1, 2).flatten(0, 1).contiguous()


def ways(q: Tensor, k: Tensor, v: Tensor, name: str, draw: random.Random) -> Ways:
    """Some rows computed otherwise: what was done, (out, lse), and which rows they are."""
    pattern, n = PATTERNS[name][0], q.shape[2]
    causal = name != "around"

    def part(first: int, last: int) -> rw.AttentionOutput:
        keys = last if causal else n
        return attend(q[:, :, first:last], k[:, :, :keys], v[:, :, :keys], pattern, first)

    for length in (1, 1, 2, draw.randrange(3, 40), draw.randrange(40, 300)):
        for first in (draw.randrange(n), draw.choice([0, n - length])):
            last = min(first + length, n)
            torch.set_num_threads(draw.randint(1, 4))
            yield f"queries {first} to {last}", part(first, last), slice(first, last)
    torch.set_num_threads(draw.randint(2, 4))
    yield "threads", attend(q, k, v, pattern), slice(0, n)
    filled = [torch.cat([torch.full_like(x[:, :, : 2 * TILE], 3.0), x], 2) for x in (q, k, v)]
    keys = rw.Keys([n + 2 * TILE] * len(k), start=[2 * TILE] * len(k))
    left = pattern.within(keys) if name == "sinks" else pattern & keys
    yield "padding on the left", rw.AttentionOutput(*(x[:, :, 2 * TILE :] for x in attend(*filled, left))), slice(0, n)
    filled = [torch.cat([x, torch.full_like(x[:, :, :77], 3.0)], 2) for x in (k, v)]
    yield "padding on the right", attend(q, *filled, pattern & rw.Keys([n] * len(k))), slice(0, n)
    page, count = draw.choice([16, 32, 128, 256]), draw.choice([1, 3, 200])
    table = torch.arange(-(-n // page) * len(k), dtype=torch.int32).view(len(k), -1)
    cache = rw.PagedCache(in_pages(k, page), in_pages(v, page), table, torch.full((len(k),), n, dtype=torch.int32))
    out = rw.paged_attention(q[:, :, n - count :], cache, pattern, backend="cpu")
    yield f"pages of {page}", rw.AttentionOutput(out, None), slice(n - count, n)  # type: ignore[arg-type]


@contextlib.contextmanager
def as_many_threads() -> Iterator[None]:
    """Leave the number of threads as it was."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


@as_many_threads()
def assert_same_bits(name: str, dtype: torch.dtype, heads: tuple[int, int], dim: int, value_dim: int) -> None:
    pattern, n = PATTERNS[name]
    draw = random.Random(f"{name}{dtype}{heads}{dim}")
    sizes = (heads[0], dim), (heads[1], dim), (heads[1], value_dim)
    q, k, v = (torch.randn(2, h, n, d).to(dtype) for h, d in sizes)
    torch.set_num_threads(1)
    whole = attend(q, k, v, pattern)
    for b in range(2):
        alone = [x[b : b + 1] for x in (q, k, v)]
        for way, got, rows in ways(*alone, name, draw):
            for of_row, result, want in zip(("out", "lse"), got, whole, strict=True):
                same = result is None or torch.equal(result, want[b : b + 1, :, rows])
                assert same, f"{of_row}: {way}, of batch element {b}"


@pytest.mark.parametrize("sizes", [(2, 2, 64, 64), (4, 1, 64, 24), (6, 2, 40, 16)], ids=str)
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("name", list(PATTERNS))
def test_same_bits(name: str, dtype: str, sizes: tuple[int, int, int, int]) -> None:
    heads, kv_heads, *dims = sizes
    assert_same_bits(name, DTYPES[dtype], (heads, kv_heads), *dims)


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("variant", VARIANTS)
def test_same_bits_on_every_variant(variant: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIANT, variant)
    assert_same_bits("window", DTYPES[dtype], (3, 1), 24, 24)
