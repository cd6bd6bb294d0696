"""A row of attention over pages depends only on its own sequence, and each page belongs to the right sequences."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import ringweave as rw
from ringweave import kv_cache, torch_ops
from ringweave.backends import cpu
from ringweave.call import Call
from ringweave.errors import UnsupportedError
from ringweave.kv_cache import _note_lengths, host_lengths, last_tokens
from ringweave.patterns import Pattern
from ringweave.plan import cuda_sync
from ringweave.terms import Term

from .failing import executed, fails
from .oracle import Expected, Inputs

HEADS, KV_HEADS, DIM, VALUE_DIM = 4, 2, 24, 40
BACKENDS = ["reference", "dense_batched", *(["cpu"] if cpu.module() is not None else [])]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WINDOW = (rw.SlidingWindow(40) | rw.Sinks(3)) & rw.Causal()
PATTERNS: dict[str, Pattern] = {
    "causal": rw.Causal(),
    "full": rw.Full(),
    "window": WINDOW,
    "dilated": rw.Dilated(9, 5) & rw.Causal(),
    "per head": rw.PerHead([rw.Causal(), WINDOW, rw.Strided(7), rw.SlidingWindow(300)]),
    "function": rw.from_mask_mod(lambda b, h, q, k: (k <= q) & ((k + h) % 3 != 1)),
}
#: Lengths one less than a page, one more, zero, and more than a tile.
LENGTHS = [65, 0, 300, 256, 127]


def drawn(lengths: list[int], nq: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Inputs]:
    """Draw queries, keys and values for each sequence."""
    sizes = {"heads": HEADS, "kv_heads": KV_HEADS, "dim": DIM, "value_dim": VALUE_DIM, "dtype": dtype}
    return [Inputs.random(nq, n, seed=seed + i, **sizes) for i, n in enumerate(lengths)]


def cached(rows: list[Inputs], page: int = 64, length: int = 320) -> rw.PagedCache:
    """Return a cache with sequences written in turn and in pieces, so that their pages are interleaved."""
    cache = rw.PagedCache.empty(
        len(rows), length, KV_HEADS, DIM, value_dim=VALUE_DIM, page=page, dtype=rows[0].k.dtype,
        pages=len(rows) * -(-length // page) + 2,
    )  # fmt: skip
    for first in range(0, length, 100):
        for b, x in enumerate(rows):
            k, v = (side[:, :, first : first + 100] for side in (x.k, x.v))
            if k.shape[2]:
                cache.append(k, v, rows=[b])
    return cache


def queries(rows: list[Inputs]) -> Tensor:
    return torch.cat([x.q for x in rows])


def alone(x: Inputs, pattern: Pattern, backend: str, **options: Any) -> Tensor:
    """Return attention over one sequence alone."""
    nq, nk = x.q.shape[2], x.k.shape[2]
    if nk == 0:
        return torch.zeros(*x.q.shape[:3], VALUE_DIM, dtype=x.q.dtype)
    return rw.attention(x.q, x.k, x.v, pattern, q_offset=nk - nq, backend=backend, **options)


@pytest.mark.parametrize("backend", BACKENDS[1:])
@pytest.mark.parametrize("name", list(PATTERNS))
def test_a_row_is_its_sequence_alone(name: str, backend: str) -> None:
    """A row has the result of its sequence alone, in any batch and for any page size; on a CPU to the bit."""
    sizes = [(1, 16, "fp32"), (40, 128, "fp16"), (3, 64, "bf16"), (1, 256, "bf16"), (16, 32, "fp32")]
    for nq, page, dtype in sizes if backend == "cpu" else sizes[:2]:
        rows = drawn(LENGTHS, nq, DTYPES[dtype])
        cache = cached(rows, page)
        got = rw.paged_attention(queries(rows), cache, PATTERNS[name], backend=backend)
        for b, x in enumerate(rows):
            want = alone(x, PATTERNS[name], backend)[0]
            # a dilated pattern reads contiguous keys by residue but pages whole, so bits may differ
            if backend == "cpu" and name != "dilated":
                assert torch.equal(got[b], want), (nq, page, dtype, b)
            elif backend != "cpu" or dtype != "bf16":  # it rounds weights, see below
                torch.testing.assert_close(got[b], want)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_within_twice_the_error_of_torch(dtype: str, backend: str) -> None:
    for nq, pattern in [(1, WINDOW), (5, rw.Causal()), (3, PATTERNS["dilated"])]:
        rows = [x for x in drawn(LENGTHS, nq, DTYPES[dtype]) if x.k.shape[2]]
        got = rw.paged_attention(queries(rows), cached(rows, 32), pattern, scale=0.3, backend=backend)
        for b, x in enumerate(rows):
            nk = x.k.shape[2]
            counts = pattern.to_dense(nq, nk, HEADS, q_offset=nk - nq).double()
            Expected.of(x, counts, 0.3).check({"out": got[b : b + 1]})


@pytest.mark.parametrize("backend", BACKENDS)
def test_pages_in_which_nothing_is_allowed_are_not_touched(backend: str) -> None:
    """NaN in other sequences' pages, page numbers past the end, and reused pages of the past change nothing."""
    rows = drawn([300, 200, 0], 1)
    cache = cached(rows, 16)
    want = rw.paged_attention(queries(rows), cache, WINDOW, backend=backend)
    used = torch.zeros(len(cache.k), dtype=torch.bool)
    for b, n in enumerate([300, 200]):
        for first in range(0, n, 16):
            # a whole tile is read
            if first < 128 or first >= (n - 41) // 128 * 128:
                used[cache.table[b, first // 16]] = True
    assert 0 < int(used.sum()) < len(used)
    cache.k[~used] = cache.v[~used] = torch.nan
    for b, n in enumerate([300, 200, 0]):
        if n % 16:
            last = cache.table[b, n // 16]
            cache.k[last, :, n % 16 :] = cache.v[last, :, n % 16 :] = torch.nan
    table = cache.table.clone()
    for b, n in enumerate([300, 200, 0]):
        table[b, -(-n // 16) :] = torch.tensor([-1, 2**31 - 1])[b % 2]
    poisoned = rw.PagedCache(cache.k, cache.v, table, cache.lengths)
    got = rw.paged_attention(queries(rows), poisoned, WINDOW, backend=backend)
    assert torch.equal(got, want)


@pytest.mark.parametrize("backend", ["auto", "dense_batched", "reference"])
def test_a_call_that_touches_no_page(backend: str) -> None:
    cache = rw.PagedCache.empty(2, 32, 1, 8, page=16)
    cache.append(torch.randn(1, 1, 1, 8), torch.randn(1, 1, 1, 8), rows=[0])
    out = rw.paged_attention(torch.randn(2, 1, 1, 8), cache, ~rw.SlidingWindow(4) & rw.Causal(), backend=backend)
    assert torch.equal(out, torch.zeros(2, 1, 1, 8))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "terms",
    [
        rw.Softcap(3.0),
        rw.ALiBi.of_heads(HEADS),
        "slopes",
        [rw.DistanceBias(torch.randn(HEADS, 41)), rw.Softcap(5.0)],
        "bias",
    ],
    ids=["softcap", "alibi", "slopes", "distance, softcap", "bias"],
)
def test_terms_and_sinks(terms: Term | list[Term] | str, backend: str) -> None:
    """Terms use positions in the sequence; a bias, and slopes of keys, have a column for each of its tokens."""
    logits = torch.randn(HEADS)
    for nq in (1, 20):
        rows = drawn([300, 65], nq)
        cache = cached(rows, 32)
        table, slopes = torch.randn(2, HEADS, nq, 320), torch.rand(HEADS, 320)
        of_all = rw.Bias(table) if terms == "bias" else rw.ALiBi(slopes) if terms == "slopes" else terms
        got = rw.paged_attention(
            queries(rows),
            cache,
            WINDOW,
            terms=of_all,
            sink_logits=logits,
            backend=backend,  # type: ignore[arg-type]
        )
        for b, x in enumerate(rows):
            mine = rw.Bias(table[b : b + 1, ..., : x.k.shape[2]].contiguous()) if terms == "bias" else terms
            mine = rw.ALiBi(slopes[:, : x.k.shape[2]]) if terms == "slopes" else mine
            want = alone(x, WINDOW, backend, terms=mine, sink_logits=logits)[0]
            if backend == "cpu":
                assert torch.equal(got[b], want)
            else:
                torch.testing.assert_close(got[b], want)


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "reference"])
@pytest.mark.parametrize("terms", [None, rw.Softcap(3.0)], ids=["plain", "softcap"])
def test_scores_out_of_range(terms: Term | None, backend: str) -> None:
    """A score sum that overflows to -inf makes its row NaN; in an unattended page it changes nothing."""
    rows = drawn([300, 200], 1)
    cache = cached(rows, 16)
    want = rw.paged_attention(queries(rows), cache, WINDOW, terms=terms, backend=backend)
    keys = cache.k.clone()
    keys[cache.table[0, 150 // 16]] = -1e38
    q = queries(rows).abs() + 1
    want = rw.paged_attention(q, cache, WINDOW, terms=terms, backend=backend)
    far = rw.PagedCache(keys, cache.v, cache.table, cache.lengths)
    assert torch.equal(rw.paged_attention(q, far, WINDOW, terms=terms, backend=backend), want)
    near = rw.paged_attention(q, far, rw.Causal(), terms=terms, backend=backend)
    assert near[0].isnan().all()
    assert not near[1].isnan().any()


def test_strided_pages() -> None:
    """Pages in another library's layout, tokens before heads, are read in place."""
    rows = drawn([300, 65], 1)
    cache = cached(rows, 16)
    k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (cache.k, cache.v))
    assert k.stride() != cache.k.stride()
    other = rw.PagedCache(k, v, cache.table, cache.lengths)
    for backend in BACKENDS:
        got = rw.paged_attention(queries(rows), other, WINDOW, backend=backend)
        assert torch.equal(got, rw.paged_attention(queries(rows), cache, WINDOW, backend=backend))


def test_block_tables() -> None:
    """A block table works with block sides that no page has."""
    rows = drawn([300, 300], 16)
    cache = cached(rows, 32, 300)
    pattern = rw.patterns.random_blocks(320, 0.5, block_size=48) & rw.Causal()
    got = rw.paged_attention(queries(rows), cache, pattern)
    for b, x in enumerate(rows):
        x.k, x.v = (torch.nn.functional.pad(side, (0, 0, 0, 20)) for side in (x.k, x.v))
        want = rw.attention(x.q, x.k, x.v, pattern & rw.KeyPadding(300), q_offset=284, backend="reference")
        torch.testing.assert_close(got[b], want[0])


# ---- ownership of pages ----------------------------------------------------------------------------------------------


def held(cache: rw.PagedCache, b: int) -> list[float]:
    """Return the number that each token of a sequence was filled with: all channels of its key, negated in its value."""
    token = torch.arange(int(cache.lengths[b]))
    page, place = cache.table[b, token // cache.page], token % cache.page
    k, v = (x[page, :, place].flatten(1) for x in (cache.k, cache.v))
    assert torch.equal(v, -k)
    assert torch.equal(k, k[:, :1].expand_as(k))
    numbers: list[float] = k[:, 0].tolist()
    return numbers


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_appending_forking_and_freeing(seed: int) -> None:
    """Appending, forking and freeing in any order matches lists of numbers; no page is lost, and a refused call changes nothing."""
    generator = torch.Generator().manual_seed(seed)

    def pick(n: int) -> int:
        return int(torch.randint(0, n, (), generator=generator))

    batch, length, page = 4, 80, 16
    cache = rw.PagedCache.empty(batch, length, 2, 8, page=page, pages=11)
    rows: list[list[float]] = [[] for _ in range(batch)]
    number, refused = 0.0, 0
    for _ in range(80):
        what = pick(8)
        chosen = sorted({pick(batch) for _ in range(1 + pick(batch))})
        if what < 5:
            tokens = 1 + pick(20)
            new = number + torch.arange(len(chosen) * tokens, dtype=torch.float32).view(-1, 1, tokens, 1)
            number += new.numel()
            before, free = [x.clone() for x in (cache.table, cache.lengths, cache.k)], cache.free_pages
            k = new.expand(-1, 2, -1, 8)
            error = None
            try:
                cache.append(k, -k, rows=chosen)
            except (rw.PageError, rw.ShapeError) as raised:
                error = raised
            full = any(len(rows[b]) + tokens > length for b in chosen)
            assert isinstance(error, rw.ShapeError) == full
            if error is not None:
                refused += 1
                assert all(map(torch.equal, before, (cache.table, cache.lengths, cache.k)))
                assert cache.free_pages == free
                continue
            for b, of in zip(chosen, new, strict=True):
                rows[b] = rows[b] + of.flatten().tolist()
        elif what < 7:
            sources = [pick(batch) for _ in chosen]
            most = min(len(rows[b]) for b in sources)
            taken = pick(most + 1) if pick(2) else None
            cache.fork(sources, chosen, taken)
            copies = [rows[b][:taken] for b in sources]
            for b, copy in zip(chosen, copies, strict=True):
                rows[b] = copy
        else:
            cache.free(chosen)
            for b in chosen:
                rows[b] = []
        assert [held(cache, b) for b in range(batch)] == rows
        used = {int(x) for b in range(batch) for x in cache.table[b, : -(-len(rows[b]) // page)]}
        assert cache.free_pages == 11 - len(used)
    assert refused > 2
    cache.free()
    assert cache.free_pages == 11


def test_a_shared_prefix_is_stored_once() -> None:
    rows = drawn([100], 1)
    cache = rw.PagedCache.empty(3, 320, KV_HEADS, DIM, value_dim=VALUE_DIM, page=32, pages=8)
    cache.append(rows[0].k, rows[0].v, rows=[0])
    assert cache.free_pages == 4
    cache.fork([0, 0], [1, 2])
    assert cache.free_pages == 4
    q = rows[0].q.expand(3, -1, -1, -1)
    before = rw.paged_attention(q, cache)
    assert torch.equal(before[0], before[1])
    new = torch.randn(1, KV_HEADS, 1, DIM), torch.randn(1, KV_HEADS, 1, VALUE_DIM)
    cache.append(*new, rows=[1])
    # only the last page was copied
    assert cache.free_pages == 3
    assert torch.equal(cache.table[0, :3], cache.table[1, :3])
    after = rw.paged_attention(q, cache)
    assert torch.equal(after[::2], before[::2])
    keys, values = torch.cat([rows[0].k, new[0]], 2), torch.cat([rows[0].v, new[1]], 2)
    torch.testing.assert_close(after[1:2], rw.attention(rows[0].q, keys, values, rw.Causal(), q_offset=100))
    # the last holder of a page writes in place
    cache.append(*new, rows=[2])
    cache.append(*new, rows=[0])
    assert cache.free_pages == 2


def test_a_copy_is_another_cache() -> None:
    rows = drawn([20, 30], 1)
    cache = cached(rows)
    for other in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        other.append(*(torch.ones(2, KV_HEADS, 1, dim) for dim in (DIM, VALUE_DIM)))
        assert other.lengths.tolist() == [21, 31]
    assert cache.lengths.tolist() == [20, 30]
    with pytest.raises(rw.UnsupportedError, match="cache: got a shallow copy"):
        copy.copy(cache)


@pytest.mark.parametrize("shared", [True, False])
def test_lengths_on_the_host_are_those_that_attention_reads(shared: bool) -> None:
    """The lengths on the host equal those that attention reads, also as a copy for a GPU; manual writes to lengths are noticed."""
    cache = rw.PagedCache.empty(3, 64, KV_HEADS, DIM, page=16)
    token = torch.randn(3, KV_HEADS, 1, DIM)
    assert cache._host_lengths is not None
    cache.append(token, token)
    if not shared:
        book = cache._opened()
        book.table, book.lengths, book.shared = book.table.copy(), book.lengths.copy(), False
    changes: list[Callable[[], object]] = [
        *[lambda: cache.append(token, token)] * 20,
        lambda: cache.append(token[:1], token[:1], rows=[1]),
        lambda: cache.fork(1, 0),
        lambda: cache.free([2]),
        lambda: cache.append(token, token),
    ]
    for change in changes:
        change()
        assert cache._host_lengths is not None
        assert cache._host_lengths.tolist() == cache.lengths.tolist()
        page, place = cache.table[0, (cache.lengths[0] - 1) // 16], (cache.lengths[0] - 1) % 16
        if change is changes[0]:
            assert torch.equal(cache.k[page, :, place], token[0, :, 0])
    assert cache.lengths.tolist() == [23, 23, 1]
    cache.lengths[0] -= 1
    by_hand = cache._host_lengths
    assert (by_hand is None) if not shared else by_hand is not None and by_hand[0] == 22


def test_many_steps_hold_no_more() -> None:
    """Sequences that end and begin again use no more pages than their tokens need, and no plan stays forever."""
    cache = rw.PagedCache.empty(2, 64, 1, 8, page=16, pages=8)
    token = torch.randn(2, 1, 1, 8)
    for step in range(150):
        if step % 20 == 19:
            cache.free([step // 20 % 2])
        if int(cache.lengths.max()) == 64:
            cache.free([int(cache.lengths.argmax())])
        cache.append(token, token)
        rw.paged_attention(token, cache, rw.SlidingWindow(20) & rw.Causal())
        assert cache.free_pages == 8 - sum(-(-n // 16) for n in cache.lengths.tolist())


# ---- replaced tensors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["k", "v", "table", "lengths", "scales"])
def test_the_tensors_of_a_cache_cannot_be_replaced(name: str) -> None:
    """Prepared calls pass addresses of the tensors that were checked, so an assignment is refused."""
    cache = rw.PagedCache.empty(1, 32, 1, 8, page=16)
    with pytest.raises(rw.ShapeError, match=rf"cache\.{name}: got an assignment; wanted .* Make another PagedCache\."):
        setattr(cache, name, getattr(cache, name))
    with pytest.raises(rw.ShapeError, match=rf"cache\.{name}: got a deletion"):
        delattr(cache, name)


@pytest.mark.parametrize("stored", [None, torch.int8])
def test_a_prepared_step_notices_tensors_with_other_storages(stored: torch.dtype | None) -> None:
    """If the storage of a cache's tensors is replaced through `.data`, a step is right or raises ShapeError."""
    cache = rw.PagedCache.empty(2, 96, 2, 16, page=16, precision=rw.Precision(kv=stored))
    cache.append(torch.randn(2, 2, 50, 16), torch.randn(2, 2, 50, 16))
    q = torch.randn(2, 2, 1, 16)
    want = rw.paged_attention(q, cache)
    assert torch.equal(rw.paged_attention(q, cache), want)
    wrong: list[tuple[torch.Tensor, torch.Tensor]] = [
        (cache.table, cache.table.long()),
        (cache.table, cache.table.T.contiguous().T),
        (cache.table, cache.table[:, :3].contiguous()),
        (cache.table, cache.table[:1]),
        (cache.lengths, cache.lengths.long()),
        (cache.lengths, cache.lengths.repeat_interleave(2)[::2]),
    ]
    for of in cache.scales or ():
        wrong += [(of, of[:2]), (of, of.half()), (of, of[:, :1])]
    for x, other in wrong:
        before = x.data
        x.data = other
        with pytest.raises(rw.ShapeError):
            rw.paged_attention(q, cache)
        x.data = before.clone()
        assert torch.equal(rw.paged_attention(q, cache), want)


# ---- torch.compile ---------------------------------------------------------------------------------------------------


def test_growing_lengths_compile_nothing_anew() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    rows = drawn([90, 0, 30], 1)
    cache = cached(rows, 16)
    q = queries(rows)
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()

    @torch.compile(backend=counter, fullgraph=True)
    def step(q: Tensor) -> Tensor:
        return rw.paged_attention(q * 1.0, cache, WINDOW, terms=rw.Softcap(9.0), sink_logits=torch.zeros(HEADS)) + 0.0

    with torch.no_grad():
        for _ in range(20):
            cache.append(torch.randn(3, KV_HEADS, 1, DIM), torch.randn(3, KV_HEADS, 1, VALUE_DIM))
            want = rw.paged_attention(q, cache, WINDOW, terms=rw.Softcap(9.0), sink_logits=torch.zeros(HEADS))
            assert torch.equal(step(q), want)
    assert counter.frame_count == 1


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_a_gradient_of_the_operator_is_refused() -> None:
    """The operator refuses a gradient that the boundary could not see: in a graph that was made without gradients."""
    rows = drawn([40], 1)
    cache = cached(rows)
    q = queries(rows).requires_grad_()
    call = Call.of(q, cache.k, cache.v, rw.Causal(), page_table=cache.table)
    out, _ = torch_ops.attend(call, q, cache.k, cache.v, [cache.table, cache.lengths])
    with pytest.raises(rw.UnsupportedError, match="forward-only"):
        out.sum().backward()


@pytest.mark.parametrize("lengths", [[5, 40, 17], [5, 0, 17]], ids=["full", "one_empty"])
@pytest.mark.parametrize(
    ("pattern", "ends"),
    [
        (rw.Causal(), True),
        (rw.SlidingWindow(8), True),
        ((rw.SlidingWindow(8) | rw.Sinks(2)) & rw.Causal(), True),
        (rw.SlidingWindow(8, 8), False),
        (rw.Full(), False),
    ],
    ids=repr,
)
def test_the_last_tokens_attend_no_key_after_their_sequence(pattern: Pattern, ends: bool, lengths: list[int]) -> None:
    """A pattern that ends at its query needs no bounds for that, unless a sequence is empty."""
    tokens = torch.tensor(lengths, dtype=torch.int32)
    placed = last_tokens(pattern, tokens, 3)
    bounded = placed & rw.KeyPadding(tokens)
    assert torch.equal(placed.to_dense(3, 40, batch=3), bounded.to_dense(3, 40, batch=3))
    assert ("KeyPadding" in placed.spec) == (not ends or 0 in lengths)


def contents(cache: rw.PagedCache) -> list[Tensor]:
    """Return the tokens of each sequence as they are stored, and the lengths."""
    found = [cache.lengths.clone()]
    for row, n in zip(cache.table, cache.lengths.tolist(), strict=True):
        pages = row[: -(-n // cache.page)].long()
        for x in (cache.k, cache.v, *(cache.scales or ())):
            # bytes, so that NaN equals NaN and types of 8 bits compare
            tokens = x[pages].transpose(0, 1).flatten(1, 2)[:, :n]
            found.append(tokens.contiguous().view(torch.uint8))
    return found


def equal(one: rw.PagedCache, other: rw.PagedCache) -> bool:
    return all(map(torch.equal, contents(one), contents(other)))


def forked(**options: Any) -> rw.PagedCache:
    """Return a cache in which sequences share pages: 0 and 1 all of 40 tokens, 2 the first 20, and 3 has 15 of its own."""
    torch.manual_seed(0)
    cache = rw.PagedCache.empty(5, 96, 2, 8, page=16, pages=14, **options)
    cache.append(*torch.randn(2, 1, 2, 40, 8), rows=[0])
    cache.append(*torch.randn(2, 1, 2, 15, 8), rows=[3])
    cache.fork(0, 1)
    cache.fork(1, 2, length=20)
    return cache


NEW = torch.randn(2, 5, 2, 20, 8)
CHANGES: dict[str, Callable[[rw.PagedCache], object]] = {
    "a token to each": lambda c: c.append(*NEW[:, :, :, :1]),
    "a token to one": lambda c: c.append(*NEW[:, :1, :, :1], rows=[3]),
    "a token to two of a page": lambda c: c.append(*NEW[:, :2, :, :1], rows=[2, 0]),
    "tokens to each": lambda c: c.append(*NEW),
    "tokens to an empty one": lambda c: c.append(*NEW[:, :1], rows=[4]),
    "no tokens": lambda c: c.append(*NEW[:, :, :, :0]),
    "tokens to no sequence": lambda c: c.append(*NEW[:, :0], rows=[]),
    "fork": lambda c: c.fork([0, 3], [3, 4]),
    "swap": lambda c: c.fork([0, 3], [3, 0]),
    "fork a part": lambda c: c.fork(1, 0, length=7),
    "fork of no sequence": lambda c: c.fork([], []),
    "free": lambda c: c.free([0, 2]),
    "free all": lambda c: c.free(),
    "free no sequence": lambda c: c.free([]),
}


@pytest.mark.parametrize("stored", [None, torch.int8], ids=str)
@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.parametrize("name", CHANGES)
def test_a_failure_at_any_line_of_a_change(name: str, opened: bool, stored: torch.dtype | None) -> None:
    """The cache is as before, no page is lost, and the repeated change does all that it does without the failure."""
    change, q = CHANGES[name], torch.randn(5, 4, 1, 8)
    start = forked(precision=None if stored is None else rw.Precision(kv=stored))

    def fresh() -> rw.PagedCache:
        # a copy has no book until the first change
        cache = copy.deepcopy(start)
        assert not opened or cache.free_pages
        return cache

    changed = fresh()
    change(changed)
    wanted = rw.paged_attention(q, changed)
    cache = fresh()
    lines, failed = executed(lambda: change(cache)), 0
    for number in range(1, len(lines) + 1):
        cache = fresh()
        if not fails(lambda: change(cache), number):  # noqa: B023
            continue
        failed += 1
        assert equal(cache, start), lines[number - 1]
        # the book of a copy counts the pages of its tokens
        assert cache.free_pages == copy.deepcopy(cache).free_pages, lines[number - 1]
        change(cache)
        assert equal(cache, changed), lines[number - 1]
        assert cache.free_pages == changed.free_pages == copy.deepcopy(changed).free_pages, lines[number - 1]
        assert torch.equal(rw.paged_attention(q, cache), wanted), lines[number - 1]
    assert failed > 5


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.append(*NEW.double()),
        lambda c: c.append(NEW[0], NEW[1, :, :, :3]),
        lambda c: c.append(NEW[0], None),
        lambda c: c.append(*NEW[:, :1].expand(2, 1, 2, 20, 8).repeat(1, 1, 1, 5, 1), rows=[3]),
        lambda c: c.append(*NEW.repeat(1, 1, 1, 2, 1)),
        lambda c: c.append(*NEW[:, :2], rows=[0, 0]),
        lambda c: c.append(*NEW[:, :1], rows=[5]),
        lambda c: c.fork(0, 5),
        lambda c: c.fork([0, 1], [2]),
        lambda c: c.fork(3, 0, length=16),
        lambda c: c.fork(0, [1, 1]),
        lambda c: c.free([0, 7]),
        lambda c: c.free("0"),
    ],
)
def test_a_refused_change_changes_nothing(change: Callable[[rw.PagedCache], object]) -> None:
    cache, start = forked(), forked()
    with pytest.raises(rw.RingweaveError):
        change(cache)
    assert equal(cache, start)
    assert torch.equal(cache.table, start.table)
    assert cache.free_pages == start.free_pages


def test_lengths_on_a_device_are_read_after_a_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors are fake, so reading one raises NotImplementedError."""
    lengths = torch.zeros(2, dtype=torch.int32, device="meta")
    record = np.array([3, 4], np.int32)
    _note_lengths(lengths, record.copy(), kept=True)
    assert host_lengths(lengths).tolist() == [3, 4]
    # equal lengths in another tensor are others
    with pytest.raises(NotImplementedError):
        host_lengths(lengths.clone())
    # lengths that no cache keeps are read at each call, since a kernel may write to them unseen
    _note_lengths(lengths, record.copy(), kept=False, device=lengths.clone())
    with pytest.raises(NotImplementedError):
        host_lengths(lengths)
    for module in (kv_cache, cuda_sync):
        monkeypatch.setattr(module, "capturing", lambda device: True)
    assert host_lengths(lengths).tolist() == [3, 4]
    lengths.add_(1)
    with pytest.raises(UnsupportedError, match="Call it before"):
        host_lengths(lengths)
    # without a copy on the device a replay could not be checked
    _note_lengths(lengths, record.copy(), kept=True)
    with pytest.raises(UnsupportedError, match="Call it before"):
        host_lengths(lengths)
