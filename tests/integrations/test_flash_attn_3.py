"""FlashAttention-3's functions against their conventions, written as a dense definition in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ringweave.integrations import flash_attn, flash_attn_interface

from .flash import Options, check, dense, packed
from .test_flash_attn import LENGTHS, RAGGED, WINDOWS, bounds, drawn, qkv, written
from .test_flash_attn_cache import KINDS, stored, turned

REFUSED = "qv=None, q_descale=None, k_descale=None, v_descale=None"
SIGNATURES = {
    "flash_attn_func": f"q, k, v, softmax_scale=None, causal=False, {REFUSED}, window_size=(-1, -1), attention_chunk=0, "
    "softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False",
    "flash_attn_qkvpacked_func": "qkv, softmax_scale=None, causal=False, q_descale=None, k_descale=None, v_descale=None, "
    "window_size=(-1, -1), attention_chunk=0, softcap=0.0, deterministic=False, num_heads_q=None, sm_margin=0, "
    "return_attn_probs=False",
    "flash_attn_varlen_func": "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, "
    f"seqused_k=None, softmax_scale=None, causal=False, {REFUSED}, window_size=(-1, -1), attention_chunk=0, softcap=0.0, "
    "num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False",
    "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, "
    "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, "
    "cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, "
    "softmax_scale=None, causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True, "
    "scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    assert written(getattr(flash_attn_interface, name)) == SIGNATURES[name]


def check_dense(inputs: list[Tensor], options: Options) -> None:
    def ours(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flash_attn_interface.flash_attn_func(q, k, v, return_attn_probs=True, **options.keywords_3())

    check(ours, lambda q, k, v: dense(q, k, v, options, version=3), inputs)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize(("nq", "nk"), LENGTHS)
def test_windows_are_aligned_to_the_last_key(nq: int, nk: int, window: tuple[int, int]) -> None:
    """Out, lse and gradients; a side of -1 has no limit for any query."""
    for causal in (False, True):
        check_dense(qkv(nq, nk), Options(causal, window, softcap=3.0))


@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
@pytest.mark.parametrize(("nq", "nk"), LENGTHS)
def test_chunks_count_from_the_first_key(nq: int, nk: int, chunk: int) -> None:
    for causal, window in ((False, (-1, -1)), (True, (-1, -1)), (False, (5, 2))):
        check_dense(qkv(nq, nk), Options(causal, window, chunk=chunk))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_dtypes_and_another_head_dim_of_values(dtype: torch.dtype) -> None:
    q, k, _ = qkv(33, 65, dtype=dtype)
    check_dense([q, k, drawn((2, 65, 2, 24), dtype=dtype)[0]], Options(True))


def test_an_output_is_returned_alone() -> None:
    q, k, v = qkv(5, 7)
    out = flash_attn_interface.flash_attn_func(q, k, v, causal=True)
    assert isinstance(out, Tensor)
    assert torch.equal(out, flash_attn.flash_attn_func(q, k, v, causal=True))  # type: ignore[arg-type]
    both = flash_attn_interface.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert isinstance(both, tuple)
    assert len(both) == 2
    assert torch.equal(both[0], out)


def test_heads_in_one_axis() -> None:
    (x,) = drawn((2, 9, 8, 16))
    call = flash_attn_interface.flash_attn_qkvpacked_func
    wanted = flash_attn_interface.flash_attn_func(*x.split([4, 2, 2], 2), causal=True)
    assert torch.equal(call(x, causal=True, num_heads_q=4), wanted)  # type: ignore[arg-type]
    (y,) = drawn((2, 9, 3, 4, 16))
    wanted = flash_attn_interface.flash_attn_func(*y.unbind(2), causal=True)
    assert torch.equal(call(y, causal=True), wanted)  # type: ignore[arg-type]


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("window", [(-1, -1), (7, 0), (3, 5), (-1, 4), (6, -1)], ids=str)
@pytest.mark.parametrize(("queries", "keys"), RAGGED)
def test_packed_sequences(queries: list[int], keys: list[int], window: tuple[int, int], used: bool) -> None:
    """Sequences of any lengths; with ``seqused``, their last tokens are not used, and get 0, -inf and no gradient."""
    more_q, more_k = ([2, 0, 1] * 2, [0, 3, 1] * 2) if used else ([0] * 6, [0] * 6)
    of_q = [n + more for n, more in zip(queries, more_q, strict=False)]
    of_k = [n + more for n, more in zip(keys, more_k, strict=False)]
    inputs = drawn((sum(of_q), 4, 16), (sum(of_k), 2, 16), (sum(of_k), 2, 16))
    given = {"seqused_q": torch.tensor(queries).int(), "seqused_k": torch.tensor(keys).int()} if used else {}

    def definition(options: Options, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        sizes = zip((q, k, v), (of_q, of_k, of_k), (queries, keys, keys), strict=True)
        own = [torch.cat([x[:n] for x, n in zip(every.split(all_), some, strict=True)]) for every, all_, some in sizes]
        out, lse = packed(own[0], own[1], own[2], queries, keys, options, 3)
        outs = zip(out.split(queries), more_q, strict=False)
        lses = zip(lse.split(queries, 1), more_q, strict=False)
        padded = [torch.cat([x, x.new_zeros(n, *x.shape[1:])]) for x, n in outs]
        return torch.cat(padded), torch.cat([torch.cat([x, x.new_full((4, n), -torch.inf)], 1) for x, n in lses], 1)

    for causal, chunk in ((False, 0), (True, 0), (True, 4)):
        options = Options(causal, window, chunk=chunk)

        def ours(q: Tensor, k: Tensor, v: Tensor, options: Options = options) -> Any:
            return flash_attn_interface.flash_attn_varlen_func(
                q, k, v, bounds(of_q), bounds(of_k), max(of_q), max(of_k), return_attn_probs=True, **given,
                **options.keywords_3(),
            )  # fmt: skip

        check(ours, lambda q, k, v, options=options: definition(options, q, k, v), inputs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("queries", [[2, 2, 2], [5, 0, 9]], ids=str)
@pytest.mark.parametrize("new", [None, [1, 4, 0]], ids=str)
def test_packed_queries_over_a_cache(kind: str, queries: list[int], new: list[int] | None) -> None:
    """Packed queries and new keys, padding, rotary positions and a table whose rows are chosen."""
    lengths, first = [300, 20, 4], [0, 19, 2]
    cache = stored(kind, 3, 320)
    rows = None if cache.table is None else torch.tensor([2, 0, 1], dtype=torch.int32)
    added = [0] * 3 if new is None else new
    q, k, v = drawn((sum(queries), 4, 32), (sum(added), 2, 32), (sum(added), 2, 32))
    angles = torch.rand(900, 8, generator=torch.Generator().manual_seed(1)) * 6
    starts = [500, 3, 0]
    for options in (Options(True), Options(), Options(False, (9, 2), chunk=16), Options(softcap=2.0)):
        keys, values = cache.sequences()
        if rows is not None:
            keys, values = keys[rows.long()], values[rows.long()]
        keys, values = keys.clone(), values.clone()
        asked = list(q.split(queries))
        if new is not None:
            parts = zip(k.split(new), v.split(new), strict=True)
            for b, (one_k, one_v) in enumerate(parts):
                places, inside = starts[b] + torch.arange(9), slice(lengths[b], lengths[b] + new[b])
                keys[b, inside] = turned(one_k, angles.cos(), angles.sin(), places[: new[b]], False)
                values[b, inside] = one_v
                local = options.causal or options.window != (-1, -1)
                own = places[: queries[b]] if local else places[:1].expand(queries[b])
                asked[b] = turned(asked[b], angles.cos(), angles.sin(), own, False)
        fresh: dict[str, Any] = {}
        if new is not None:
            fresh = {
                "k": k, "v": v, "cu_seqlens_k_new": bounds(new), "rotary_cos": angles.cos(), "rotary_sin": angles.sin(),
                "rotary_seqlens": torch.tensor(starts).int(), "rotary_interleaved": False,
            }  # fmt: skip
        out, lse = flash_attn_interface.flash_attn_with_kvcache(
            q, cache.k, cache.v, cache_seqlens=torch.tensor(lengths).int(), cache_leftpad=torch.tensor(first).int(),
            cache_batch_idx=cache.rows if rows is None else rows, page_table=cache.table, cu_seqlens_q=bounds(queries),
            max_seqlen_q=max(queries), return_softmax_lse=True, **fresh, **options.keywords_3(),
        )  # fmt: skip
        start = 0
        for b, one in enumerate(asked):
            inside = slice(first[b], lengths[b] + added[b])
            part = one[None].double(), keys[b : b + 1, inside].double(), values[b : b + 1, inside].double()
            wanted = dense(*part, options, version=3)
            own_rows = slice(start, start + len(one))
            torch.testing.assert_close(out[None, own_rows].double(), wanted[0], rtol=1e-5, atol=2e-6)
            torch.testing.assert_close(lse[None, :, own_rows].double(), wanted[1], rtol=1e-5, atol=2e-6)
            start += len(one)


def test_a_cache_in_batches_is_that_of_flash_attn_2() -> None:
    """Pages, rotary positions and new keys give the bits of version 2, apart from lse in empty rows."""
    q, new, angles = torch.randn(3, 4, 4, 32), torch.randn(3, 4, 2, 32), torch.rand(800, 8)
    lengths, options = torch.tensor([0, 30, 256], dtype=torch.int32), {"causal": True, "window_size": (50, 0)}
    for kind in ("rows", "256"):
        results = []
        for call, table in (
            (flash_attn.flash_attn_with_kvcache, "block_table"),
            (flash_attn_interface.flash_attn_with_kvcache, "page_table"),
        ):
            cache = stored(kind, 3, 700)
            out, lse = call(  # type: ignore[operator]
                q, cache.k, cache.v, new, new, cache_seqlens=lengths, rotary_cos=angles, rotary_sin=angles,
                return_softmax_lse=True, **{table: cache.table}, **options,
            )  # fmt: skip
            results.append((out, lse, cache.k, cache.v))
        assert all(map(torch.equal, *results))


def test_packed_queries_of_no_sequence_are_not_rotated() -> None:
    """Queries after the last bound belong to no sequence, so they have no position, and their output is 0."""
    q, new, angles = torch.randn(12, 4, 32), torch.randn(2, 1, 2, 32), torch.rand(800, 8)
    results = []
    for given in (q, q[:9]):
        cache = stored("rows", 2, 700)
        results.append(
            flash_attn_interface.flash_attn_with_kvcache(
                given, cache.k, cache.v, new, new, cache_seqlens=20, cu_seqlens_q=bounds([3, 6]), rotary_cos=angles,
                rotary_sin=angles, causal=True,
            )
        )  # fmt: skip
    more, exact = results
    assert torch.equal(more[:9], exact)  # type: ignore[arg-type, index]
    assert not more[9:].any()  # type: ignore[index, union-attr]
