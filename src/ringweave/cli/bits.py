"""``ringweave doctor --bits``: in what ways of computing a row this machine gives the same bits.

Not a tolerance: outputs are equal or they are not. A case is a type, a grouping of heads and a length.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..functional import attention
from ..pages import PagedCache, paged_attention
from ..patterns import Causal, Keys

_TILE = 128
_DIM = 64
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_HEADS = ((4, 4), (4, 1), (8, 2))
_LENGTHS = (300, 1500, 3000)


class Bits(NamedTuple):
    """What one way of computing gave.

    Attributes:
        way: In which it differs from one causal call.
        equal: Cases with the same bits.
        cases: All of them.
    """

    way: str
    equal: int
    cases: int


class _Whole(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor


def _one_thread(x: _Whole) -> bool:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        return torch.equal(attention(x.q, x.k, x.v, Causal()), x.out)
    finally:
        torch.set_num_threads(threads)


def _alone(x: _Whole) -> bool:
    return torch.equal(attention(x.q[:1], x.k[:1], x.v[:1], Causal()), x.out[:1])


def _chunks(side: int) -> Callable[[_Whole], bool]:
    def run(x: _Whole) -> bool:
        n = x.q.shape[2]
        # the first, some in between, the last
        starts = {*range(0, n, side)[:2], *range(0, n, side)[-2:], n // side // 2 * side}
        return all(_part(x, at, min(at + side, n)) for at in sorted(starts))

    return run


def _steps(x: _Whole) -> bool:
    return all(_part(x, at, at + 1) for at in (5, 130, x.q.shape[2] - 1))


def _part(x: _Whole, first: int, last: int) -> bool:
    got = attention(x.q[:, :, first:last], x.k[:, :, :last], x.v[:, :, :last], Causal(), q_offset=first)
    return torch.equal(got, x.out[:, :, first:last])


def _pages(x: _Whole) -> bool:
    batch, heads, n, _ = x.k.shape
    cache = PagedCache.empty(batch, n, heads, _DIM, page=16, dtype=x.k.dtype)
    cache.append(x.k, x.v)
    return torch.equal(paged_attention(x.q[:, :, n // 2 :], cache, Causal()), x.out[:, :, n // 2 :])


def _padded_right(x: _Whole) -> bool:
    n = x.k.shape[2]
    k, v = (torch.cat([t, torch.full_like(t[:, :, :77], 3.0)], 2) for t in (x.k, x.v))
    return torch.equal(attention(x.q, k, v, Causal() & Keys([n] * len(k))), x.out)


def _padded_left(x: _Whole) -> bool:
    q, k, v = (torch.cat([torch.full_like(t[:, :, :_TILE], 3.0), t], 2) for t in (x.q, x.k, x.v))
    return torch.equal(attention(q, k, v, Causal() & Keys(k.shape[2], start=_TILE))[:, :, _TILE:], x.out)


#: By what differs.
WAYS: dict[str, Callable[[_Whole], bool]] = {
    "one thread": _one_thread,
    "a batch element alone": _alone,
    f"chunks of {_TILE} queries, a tile": _chunks(_TILE),
    "chunks of 100 queries": _chunks(100),
    "steps of one query": _steps,
    "pages of 16 tokens": _pages,
    "padding on the right": _padded_right,
    "padding on the left, of a tile": _padded_left,
}


def compared(lengths: tuple[int, ...] = _LENGTHS) -> Iterator[Bits]:
    """Compare each way with one call of everything, by ``torch.equal``, on this machine's threads."""
    draw = torch.Generator("cpu").manual_seed(0)
    cases = []
    for dtype, (heads, kv_heads), n in itertools.product(_DTYPES, _HEADS, lengths):
        q, k, v = (
            torch.randn(2, h, n, _DIM, generator=draw, device="cpu").to(dtype) for h in (heads, kv_heads, kv_heads)
        )
        cases.append(_Whole(q, k, v, attention(q, k, v, Causal())))
    for way, same in WAYS.items():
        yield Bits(way, sum(map(same, cases)), len(cases))
