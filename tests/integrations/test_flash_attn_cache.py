"""flash_attn_with_kvcache and packed queries over pages, against each sequence's dense attention in float64."""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from ringweave.errors import PageError, ShapeError, UnsupportedError
from ringweave.integrations import flash_attn
from ringweave.integrations.flash_attn import caches

from ..sampled import covering, is_long
from .flash import Options, dense
from .test_flash_attn import bounds, drawn, written

HEADS, GROUPS, DIM = 4, 2, 32


def turned(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """Rotate tokens (N, H, D) as complex numbers."""
    half = cos.shape[1]
    head = x[..., : 2 * half]
    real, imaginary = (head[..., 0::2], head[..., 1::2]) if interleaved else (head[..., :half], head[..., half:])
    angle = torch.complex(cos[positions].double(), sin[positions].double())[:, None]
    product = torch.complex(real.double(), imaginary.double()) * angle
    pair = product.real, product.imag
    head = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([head.to(x.dtype), x[..., 2 * half :]], -1)


class Stored(NamedTuple):
    """A cache of the caller: tensors, and the tensors (sequences, capacity, Hkv, D) that they hold."""

    k: Tensor
    v: Tensor
    table: Tensor | None
    rows: Tensor | None

    def sequences(self) -> tuple[Tensor, Tensor]:
        if self.table is not None:
            return self.k[self.table.long()].flatten(1, 2), self.v[self.table.long()].flatten(1, 2)
        return (self.k, self.v) if self.rows is None else (self.k[self.rows.long()], self.v[self.rows.long()])


def stored(kind: str, batch: int, capacity: int, dtype: torch.dtype = torch.float32) -> Stored:
    """Return a cache in rows, in chosen rows, or in pages of a number of tokens."""
    generator = torch.Generator().manual_seed(5)
    if kind.endswith(("rows", "chosen", "sliced")):
        # rows that kernels read as pages, or not
        capacity, more = (-(-capacity // 64) * 64, 64) if "even" in kind else (capacity, 3)
        shape = 2 * batch, capacity + more, GROUPS, DIM
        k, v = (torch.randn(shape, generator=generator).to(dtype)[:, :capacity] for _ in range(2))
        if kind == "sliced":
            # heads before tokens, and a last dimension that is not contiguous
            k, v = (x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2) for x in (k, v))
        rows = torch.randperm(2 * batch, generator=generator)[:batch].int() if kind.endswith("chosen") else None
        return Stored(k, v, None, rows) if rows is not None else Stored(k[:batch], v[:batch], None, None)
    page = int(kind.partition(" ")[0])
    columns = -(-capacity // page) + 1
    pages = batch * columns + 2
    if "pairs" in kind:
        # keys and values side by side in each page
        k, v = torch.randn(pages, 2, page, GROUPS, DIM, generator=generator).to(dtype).unbind(1)
    elif "odd" in kind:
        k, v = torch.randn(2, pages, page + 3, GROUPS, DIM, generator=generator).to(dtype)[:, :, 1 : page + 1].unbind(0)
    else:
        k, v = torch.randn(2, pages, page, GROUPS, DIM, generator=generator).to(dtype).unbind(0)
    table = torch.randperm(pages, generator=generator)[: batch * columns].view(batch, columns).int()
    return Stored(k, v, table, None)


KINDS = [
    "rows",
    "chosen",
    "sliced",
    "even rows",
    "even chosen",
    "16",
    "48",
    "256",
    "512",
    "7",
    "512 pairs",
    "512 odd",
    "256 pairs",
]


def check_cache(
    kind: str,
    lengths: list[int],
    nq: int,
    new: int = 0,
    options: Options = Options(True),
    first: list[int] | None = None,
    rotary: bool | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Check output, lse and the written cache; nothing else may change."""
    batch, capacity = len(lengths), 700
    cache = stored(kind, batch, capacity, dtype)
    q, k, v = drawn((batch, nq, HEADS, DIM), *[(batch, new, GROUPS, DIM)] * 2, dtype=dtype, seed=nq + new)
    stop, pad = (
        torch.tensor(lengths, dtype=torch.int32),
        None if first is None else torch.tensor(first, dtype=torch.int32),
    )
    angles = torch.rand(capacity + 40, 8, generator=torch.Generator().manual_seed(1)) * 2 * math.pi
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    wanted_k, wanted_v = (x.clone() for x in cache.sequences())
    asked = q.clone()
    room = cache.sequences()[0].shape[1]
    # a window as long as the cache has no limit
    local = options.causal or any(0 <= side < room for side in options.window)
    for b, length in enumerate(lengths):
        places = torch.arange(length, length + max(new, nq))
        keys = k[b] if rotary is None else turned(k[b], cos, sin, places[:new], rotary)
        wanted_k[b, length : length + new], wanted_v[b, length : length + new] = keys, v[b]
        if rotary is not None:
            asked[b] = turned(q[b], cos, sin, places[:nq] if local else places[:1].expand(nq), rotary)
    given = [x.clone() for x in (q, k, v, stop)]
    untouched = None if cache.table is None else [page for page in range(len(cache.k)) if page not in cache.table]
    before = None if untouched is None else cache.k[untouched].clone()
    fresh = (k, v) if new else (None, None)
    got = flash_attn.flash_attn_with_kvcache(
        q, cache.k, cache.v, *fresh, *((None, None) if rotary is None else (cos, sin)), stop, cache.rows, pad,
        cache.table, rotary_interleaved=bool(rotary), return_softmax_lse=True, **options.keywords(),
    )  # fmt: skip
    assert all(map(torch.equal, (q, k, v, stop), given))
    assert before is None or torch.equal(cache.k[untouched], before)
    close: dict[str, Any] = {"rtol": 1e-5, "atol": 2e-6} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(cache.sequences()[0], wanted_k, **close)
    assert torch.equal(cache.sequences()[1], wanted_v)
    for b, length in enumerate(lengths):
        inside = slice(0 if first is None else first[b], length + new)
        part = (x[b : b + 1].double() for x in (asked, wanted_k[:, inside], wanted_v[:, inside]))
        one = options
        if options.slopes is not None and options.slopes.ndim == 2:
            one = options._replace(slopes=options.slopes[b])
        for x, wanted in zip(got, dense(*part, one, room), strict=True):
            torch.testing.assert_close(x[b : b + 1].double(), wanted, **close)
            assert torch.equal(x[b : b + 1].isinf(), wanted.isinf())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nq", [1, 5])
def test_new_keys_are_written_in_place(kind: str, nq: int) -> None:
    """Equal and different lengths, causal, windows and full, with new keys and without."""
    lengths = [300, 300], [0, 255, 600], [256]
    options = Options(True), Options(), Options(False, (20, 3)), Options(False, (-1, 2), softcap=2.0)
    sides = (range(len(lengths)), range(len(options)), range(3))
    cases = list(itertools.product(*sides))
    # each two of them meet for every kind of cache
    for place in range(len(cases)) if is_long() else sorted(covering(cases, 2)):
        at, of, new = cases[place]
        check_cache(kind, lengths[at], nq, new * nq, options[of])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(HEADS,), (3, HEADS)], ids=str)
def test_alibi_is_aligned_to_the_last_key(kind: str, shape: tuple[int, ...]) -> None:
    slopes = drawn(shape)[0].abs() / 8
    for options in (
        Options(True, slopes=slopes),
        Options(slopes=slopes, scale=0.2),
        Options(False, (9, 9), slopes=slopes),
    ):
        check_cache(kind, [40, 0, 300], 3, 3, options)


@pytest.mark.parametrize("kind", KINDS)
def test_more_queries_than_keys(kind: str) -> None:
    """A query before the first key gives 0 and inf, or sees the keys that its window reaches."""
    for lengths in ([3, 20, 0], [2, 2]):
        for options in (Options(True), Options(), Options(False, (3, 8)), Options(True, (2, 0))):
            check_cache(kind, lengths, 17, 4, options)
            check_cache(kind, lengths, 17, 0, options)


@pytest.mark.parametrize("kind", ["rows", "chosen", "sliced"])
def test_padding_on_the_left(kind: str) -> None:
    """Keys before the padding's end are never attended; the rotary positions include it."""
    for rotary in (None, True, False):
        for options in (Options(True), Options(), Options(False, (6, 0))):
            check_cache(kind, [40, 300, 12], 4, 4, options, [3, 299, 0], rotary)
    check_cache(kind, [40, 40], 4, 0, Options(True), [7, 7])
    check_cache(kind, [40, 30], 4, 0, Options(True), [40, 30])


@pytest.mark.parametrize("kind", ["rows", "512", "7"])
@pytest.mark.parametrize("interleaved", [True, False])
def test_rotary_positions(kind: str, interleaved: bool) -> None:
    """Queries rotate step by step where the mask depends on positions, and all at the cache's length where not."""
    for options in (Options(True), Options(), Options(False, (5, 5)), Options(False, (2000, 3000))):
        for nq, new in ((1, 1), (6, 6), (6, 2)):
            check_cache(kind, [0, 100, 257], nq, new, options, rotary=interleaved)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["rows", "256", "512"])
def test_dtypes(kind: str, dtype: torch.dtype) -> None:
    check_cache(kind, [40, 300], 3, 3, Options(True), rotary=True, dtype=dtype)


def test_lengths_may_be_an_int_or_the_whole_cache() -> None:
    q, k, v = drawn((2, 3, HEADS, DIM), (2, 50, GROUPS, DIM), (2, 50, GROUPS, DIM))
    call = flash_attn.flash_attn_with_kvcache
    assert torch.equal(call(q, k, v, causal=True), flash_attn.flash_attn_func(q, k, v, causal=True))
    lengths = torch.tensor([20, 20], dtype=torch.int32)
    assert torch.equal(call(q, k, v, cache_seqlens=20), call(q, k, v, cache_seqlens=lengths))
    assert torch.equal(call(q, k, v, cache_seqlens=20), flash_attn.flash_attn_func(q, k[:, :20], v[:, :20]))
    # a cache may have more rows than the call has sequences
    torch.testing.assert_close(call(q[:1], k, v), call(q, k, v)[:1])


def test_the_cache_has_no_backward() -> None:
    """As in flash-attn, the output has no graph, and leaves may be written."""
    q, k, v, new = drawn((1, 2, 4, 16), (1, 8, 4, 16), (1, 8, 4, 16), (1, 2, 4, 16))
    for x in (q, k, v, new):
        x.requires_grad_()
    out = flash_attn.flash_attn_with_kvcache(q, k, v, new, new, cache_seqlens=3)
    assert not out.requires_grad
    assert torch.equal(k[:, 3:5], new)


def test_new_keys_that_are_a_part_of_the_cache() -> None:
    k, v, q = drawn((1, 20, 2, 16), (1, 20, 2, 16), (1, 4, 2, 16))
    wanted_k, wanted_v = k.clone(), v.clone()
    wanted = flash_attn.flash_attn_with_kvcache(
        q, wanted_k, wanted_v, k[:, 2:6].clone(), v[:, 2:6].clone(), cache_seqlens=4
    )
    got = flash_attn.flash_attn_with_kvcache(q, k, v, k[:, 2:6], v[:, 2:6], cache_seqlens=4)
    assert torch.equal(got, wanted)
    assert torch.equal(k, wanted_k)
    assert torch.equal(v, wanted_v)


def test_signature() -> None:
    assert written(flash_attn.flash_attn_with_kvcache) == (
        "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, "
        "cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, "
        "window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0, "
        "return_softmax_lse=False"
    )


def refusals() -> list[tuple[str, type[Exception], dict[str, Any]]]:
    q, cache, new = torch.randn(2, 1, 4, 32), torch.randn(2, 64, 2, 32), torch.randn(2, 1, 2, 32)
    pages, table = torch.randn(5, 16, 2, 32), torch.zeros(2, 3, dtype=torch.int32)
    two, angles = torch.tensor([1, 2], dtype=torch.int32), torch.randn(70, 8)
    usual = {"q": q, "k_cache": cache, "v_cache": cache.clone()}
    paged = {"q": q, "k_cache": pages, "v_cache": pages.clone(), "block_table": table}
    fresh = {"k": new, "v": new}
    return [
        ("block_table", PageError, paged | {"cache_seqlens": 49}),
        ("block_table", PageError, paged | fresh | {"cache_seqlens": torch.tensor([48, 2], dtype=torch.int32)}),
        ("block_table: got 5", ShapeError, paged | {"cache_seqlens": 10, "block_table": table + 5}),
        ("block_table: got -1", ShapeError, paged | {"cache_seqlens": 10, "block_table": table - 1}),
        ("block_table", ShapeError, paged | {"block_table": table[:1]}),
        ("block_table", ShapeError, paged | {"block_table": table.float()}),
        ("cache_batch_idx", UnsupportedError, paged | {"cache_batch_idx": two}),
        ("cache_leftpad", UnsupportedError, paged | {"cache_leftpad": two}),
        ("cache_seqlens", ShapeError, usual | fresh),
        ("cache_seqlens", ShapeError, usual | fresh | {"cache_seqlens": 64}),
        ("cache_seqlens", ShapeError, usual | {"cache_seqlens": 65}),
        ("cache_seqlens", ShapeError, usual | {"cache_seqlens": -1}),
        ("cache_seqlens", ShapeError, usual | {"cache_seqlens": two[:1]}),
        ("cache_seqlens", ShapeError, usual | {"cache_seqlens": two.float()}),
        ("cache_seqlens", ShapeError, usual | {"cache_seqlens": 1, "cache_leftpad": two}),
        ("cache_batch_idx", ShapeError, usual | {"cache_batch_idx": two}),
        ("k, v", ShapeError, usual | {"k": new, "cache_seqlens": 1}),
        ("v: got", ShapeError, usual | {"k": new, "v": new[:, :, :1], "cache_seqlens": 1}),
        ("v: got", ShapeError, usual | {"k": new, "v": new.expand(2, 2, 2, 32), "cache_seqlens": 1}),
        ("k.dtype: got", ShapeError, usual | {"k": new.half(), "v": new, "cache_seqlens": 1}),
        ("rotary_cos", ShapeError, usual | {"rotary_cos": angles, "rotary_sin": angles}),
        ("rotary_cos", ShapeError, usual | fresh | {"rotary_sin": angles, "cache_seqlens": 1}),
        ("rotary_sin", ShapeError, usual | fresh | {"rotary_cos": angles, "rotary_sin": angles[1:], "cache_seqlens": 1}),
        ("rotary dim", ShapeError, usual | fresh | {"rotary_cos": angles[:, :7], "rotary_sin": angles[:, :7], "cache_seqlens": 1}),
        ("rotary_cos rows", ShapeError, usual | fresh | {"rotary_cos": angles[:5], "rotary_sin": angles[:5], "cache_seqlens": 9}),
        ("q: got", ShapeError, usual | {"q": q[0]}),
        ("k_cache", ShapeError, usual | {"k_cache": cache.half()}),
        ("k_cache rows", ShapeError, usual | {"k_cache": cache[:1], "v_cache": cache[:1]}),
        ("v_cache", ShapeError, usual | {"v_cache": cache[:, 1:]}),
        ("k_cache", ShapeError, usual | {"k_cache": cache[..., :16]}),
        ("window_size", ShapeError, usual | {"window_size": (1,)}),
        ("alibi_slopes", ShapeError, usual | {"alibi_slopes": torch.ones(3)}),
    ]  # fmt: skip


@pytest.mark.parametrize("number", range(len(refusals())))
def test_refusals_write_nothing(number: int) -> None:
    text, kind, arguments = refusals()[number]
    before = [arguments[name].clone() for name in ("k_cache", "v_cache")]
    with pytest.raises(kind, match=text):
        flash_attn.flash_attn_with_kvcache(**arguments)
    assert all(map(torch.equal, before, (arguments["k_cache"], arguments["v_cache"])))


@pytest.mark.parametrize("kind", ["16", "48", "256", "512", "7", "512 pairs", "512 odd"])
@pytest.mark.parametrize("queries", [[1, 1, 1], [5, 0, 90], [40, 3, 700]], ids=str)
def test_packed_queries_over_pages(kind: str, queries: list[int]) -> None:
    keys = [300, 0, 680]
    cache = stored(kind, 3, 700)
    (q,) = drawn((sum(queries) + 2, HEADS, DIM))
    k, v = cache.sequences()
    slopes = drawn((3, HEADS))[0].abs() / 8
    for options in (Options(True), Options(False, (30, 4), softcap=3.0), Options(slopes=slopes)):
        out, lse, weights = flash_attn.flash_attn_varlen_func(
            q, cache.k, cache.v, bounds(queries), bounds(keys), max(queries), max(keys), return_attn_probs=True,
            block_table=cache.table, **options.keywords(),
        )  # fmt: skip
        assert weights.numel() == 0
        assert not out[-2:].any()
        first = 0
        for b, (n, one) in enumerate(zip(queries, keys, strict=True)):
            rows, own = slice(first, first + n), options
            if options.slopes is not None:
                own = options._replace(slopes=options.slopes[b])
            wanted = dense(
                q[None, rows].double(), k[b : b + 1, :one].double(), v[b : b + 1, :one].double(), own, max(keys)
            )
            torch.testing.assert_close(out[None, rows].double(), wanted[0], rtol=1e-5, atol=2e-6)
            torch.testing.assert_close(lse[None, :, rows].double(), wanted[1], rtol=1e-5, atol=2e-6)
            first += n


def test_pages_have_no_backward_and_no_dropout() -> None:
    cache = stored("16", 1, 30)
    q, cu = torch.randn(3, HEADS, DIM, requires_grad=True), bounds([3])
    call = flash_attn.flash_attn_varlen_func
    out = call(q, cache.k, cache.v, cu, cu, 3, 3, block_table=cache.table)
    assert isinstance(out, Tensor)
    with pytest.raises(UnsupportedError, match=r"block_table.*backward"):
        out.sum().backward()
    with pytest.raises(UnsupportedError, match=r"block_table.*dropout"):
        call(q.detach(), cache.k, cache.v, cu, cu, 3, 3, 0.1, block_table=cache.table)
    with torch.no_grad():
        assert torch.equal(call(q, cache.k, cache.v, cu, cu, 3, 3, block_table=cache.table), out)  # type: ignore[arg-type]


def test_rows_of_several_lengths_are_read_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    attend = caches.attend_pages
    monkeypatch.setattr(caches, "attend_pages", lambda *args, **kw: calls.append(args) or attend(*args, **kw))
    for kind in ("even rows", "even chosen", "16"):
        check_cache(kind, [30, 0, 650, 77], 3, new=3)
    assert len(calls) == 3
