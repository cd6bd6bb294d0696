"""Attention over chosen keys: exact on every backend that runs here, query by query where heads share a list."""

from __future__ import annotations

import copy
import resource
import threading
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

import ringweave as rw
from ringweave.backends import cpu
from ringweave.backends.backend import Upstream
from ringweave.call import Operands
from ringweave.errors import PatternError
from ringweave.patterns import Pattern
from ringweave.plan import Branch
from ringweave.terms import Term

from ..oracle import Expected, Inputs, results
from ..parallel.processes import forked
from ..parallel.spread import alone, joined, spread

NATIVE = cpu.module() is not None
BACKENDS = ["dense_batched", "torch_sparse", *["cpu"] * NATIVE]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
needs_kernel = pytest.mark.skipif(not NATIVE, reason="the native kernel was not built")


def chosen(*shape: int, nk: int, block_size: int = 1, seed: int = 0) -> Tensor:
    """Return lists (..., queries, n) with pads, repeats and every seventh row empty."""
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randint(-1, -(-nk // block_size), shape, generator=generator)
    indices[..., ::7, :] = -1
    return indices


def run(x: Inputs, pattern: Pattern, backend: str, **options: Any) -> dict[str, Tensor]:
    leaves = x.leaves()
    out, lse = rw.attention_with_lse(*leaves, pattern, backend=backend, **options)
    assert out.dtype == x.q.dtype
    return results(out, lse, x, leaves)


def conforms(x: Inputs, pattern: Pattern, backend: str, q_offset: int = 0) -> None:
    """Check all five results against the definition in float64, within twice torch's own errors."""
    batch, heads, nq, nk = *x.q.shape[:3], x.k.shape[2]
    bound = pattern.bound(heads, x.k.shape[1])
    counts = bound.to_dense(nq, nk, heads, batch=batch, q_offset=q_offset)
    Expected.of(x, counts).check(run(x, pattern, backend, q_offset=q_offset))


# ---- the five results ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("block_size", [1, 3, 16, 64, 128])
@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (4, 1), (6, 1), (16, 1)], ids=str)
@pytest.mark.parametrize("shared", ["all heads", "a key head", "a query head"])
@pytest.mark.parametrize("filtered", [False, True])
def test_groups_and_block_sizes(
    filtered: bool, shared: str, heads: tuple[int, int], block_size: int, dtype: str, backend: str, poisoned: None
) -> None:
    """Lists shared by all heads, of each key head and of each query head agree with the definition."""
    nq, nk, sizes = 75, 200, {"batch": 2, "heads": heads[0], "kv_heads": heads[1], "dtype": DTYPES[dtype]}
    x = Inputs.random(nq, nk, dim=64, value_dim=64, **sizes)  # type: ignore[arg-type]
    lead = {"all heads": (), "a key head": (2, heads[1]), "a query head": (heads[0],)}[shared]
    indices = chosen(*lead, nq, 12 if block_size < 16 else 3, nk=nk, block_size=block_size)
    lists = rw.Selected(indices, block_size, heads="kv" if shared == "a key head" else "query")
    if filtered:
        conforms(x, lists & rw.Causal() & ~rw.Strided(5), backend, q_offset=nk - nq)
    else:
        conforms(x, lists, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("dims", [(64, 64), (192, 128), (576, 512)], ids=str)
@pytest.mark.parametrize("block_size", [1, 64])
def test_wide_heads(block_size: int, dims: tuple[int, int], dtype: str, backend: str) -> None:
    """Heads of latent attention: 192 / 128 channels where keys are expanded, 576 / 512 where all heads share a latent."""
    kind = DTYPES[dtype]
    x = Inputs.random(40, 130, batch=1, heads=16, kv_heads=1, dim=dims[0], value_dim=dims[1], dtype=kind)
    conforms(x, rw.Selected(chosen(40, 9, nk=130, block_size=block_size), block_size) & rw.Causal(), backend, 90)


@pytest.mark.parametrize("backend", BACKENDS)
def test_values_may_be_a_view_of_keys(backend: str) -> None:
    q, k = torch.randn(1, 16, 30, 576), torch.randn(1, 1, 90, 576)
    lists = rw.Selected(chosen(30, 9, nk=90))
    got = rw.attention(q, k, k[..., :512], lists, backend=backend)
    assert torch.equal(got, rw.attention(q, k, k[..., :512].contiguous(), lists, backend=backend))
    torch.testing.assert_close(got, rw.attention(q, k, k[..., :512], lists, backend="reference"))


UNIONS: dict[str, Callable[[Pattern, int, int], Pattern]] = {
    "window": lambda lists, nq, nk: lists & rw.Causal() | rw.SlidingWindow(7) & rw.Causal(),
    "sinks and window": lambda lists, nq, nk: (lists | rw.Sinks(3) | rw.SlidingWindow(9)) & rw.Causal(),
    "two lists": lambda lists, nq, nk: lists | rw.Selected(chosen(4, nq, 2, nk=nk, block_size=20), 20),
    "keys": lambda lists, nq, nk: (lists | rw.SlidingWindow(5)) & rw.KeyPadding([nk, nk // 2]),
    "documents": lambda lists, nq, nk: lists & rw.Causal() & rw.Documents([nk // 3, nk - nk // 3]),
    "function": lambda lists, nq, nk: lists & rw.from_mask_mod(lambda b, h, q, k: (q + k + h) % 3 != 0),
    "rest": lambda lists, nq, nk: ~lists & rw.Causal(),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", UNIONS)
def test_combinations(name: str, backend: str) -> None:
    nq, nk = 50, 120
    x = Inputs.random(nq, nk, batch=2, heads=4, kv_heads=2, dim=16)
    for block_size in (1, 16):
        lists = rw.Selected(chosen(2, 1, nq, 6, nk=nk, block_size=block_size), block_size)
        conforms(x, UNIONS[name](lists, nq, nk), backend, q_offset=nk - nq)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_key(backend: str) -> None:
    x = Inputs.random(5, 1, heads=4, kv_heads=1, dim=16)
    for indices in (torch.zeros(5, 3, dtype=torch.int64), torch.tensor([[0], [-1], [0], [-1], [-1]])):
        conforms(x, rw.Selected(indices), backend)
        conforms(x, rw.Selected(indices, 512), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [1e4, 1e19], ids=str)
def test_huge_values(size: float, backend: str) -> None:
    """Scores far apart are exact; a score out of range makes the row that lists its key NaN, and no other."""
    nq, nk = 8, 70
    indices = torch.full((nq, 2), -1)
    indices[:, 0] = torch.arange(nq)
    indices[3, 1] = 69
    q, k, v = torch.ones(1, 4, nq, 16), torch.randn(1, 1, nk, 16), torch.randn(1, 1, nk, 16)
    k[:, :, 69], q[:, :, 3] = size, size * 1e-3
    out = rw.attention(q, k, v, rw.Selected(indices), backend=backend)
    want = rw.attention(q, k, v, rw.Selected(indices), backend="reference")
    torch.testing.assert_close(out, want, equal_nan=True)
    q[:, :, 3] = k[:, :, 69] = 1e38
    out = rw.attention(q, k, v, rw.Selected(indices), backend=backend)
    assert out[:, :, 3].isnan().all()
    assert not out[:, :, torch.arange(nq) != 3].isnan().any()


# ---- terms, sinks, dropout -------------------------------------------------------------------------------------------

TERMS: dict[str, Callable[[int, int], Term | list[Term]]] = {
    "softcap": lambda nq, nk: rw.Softcap(3.0),
    "alibi": lambda nq, nk: rw.ALiBi.of_heads(8),
    "distance": lambda nq, nk: rw.DistanceBias(torch.randn(8, 81)),
    "bias": lambda nq, nk: rw.Bias(torch.randn(2, 8, nq, nk)),
    "shared bias": lambda nq, nk: [rw.Bias(torch.randn(1, 1, nq, nk)), rw.Softcap(9.0)],
}


@lru_cache(maxsize=1)
def by_the_reference(block_size: int, name: str) -> tuple[Inputs, Pattern, Any, list[tuple[dict[str, Any], Any]]]:
    """Return inputs, lists, terms, and the reference's results with each of some options."""
    nq, nk = 45, 100
    x = Inputs.random(nq, nk, batch=2, heads=8, kv_heads=2, dim=16)
    terms = TERMS[name](nq, nk)
    pattern = rw.Selected(chosen(2, 1, nq, 6, nk=nk, block_size=block_size), block_size) & rw.Causal()
    wanted: list[tuple[dict[str, Any], Any]] = []
    for more in ({}, {"sink_logits": torch.randn(8)}, {"dropout": 0.3}):
        torch.manual_seed(3)  # of dropout
        wanted.append((more, run(x, pattern, "reference", q_offset=nk - nq, terms=terms, **more)))
    return x, pattern, terms, wanted


@pytest.mark.parametrize("backend", ["dense_batched", "gather", *["cpu"] * NATIVE])
@pytest.mark.parametrize("name", TERMS)
@pytest.mark.parametrize("block_size", [1, 32])
def test_terms_and_sink_logits(block_size: int, name: str, backend: str) -> None:
    """Terms, learned sinks and dropout have the results of the reference, with gradients."""
    x, pattern, terms, wanted = by_the_reference(block_size, name)
    for more, want in wanted:
        torch.manual_seed(3)
        got = run(x, pattern, backend, q_offset=x.k.shape[2] - x.q.shape[2], terms=terms, **more)
        for result, right in zip(got.values(), want.values(), strict=True):
            torch.testing.assert_close(result, right, atol=2e-5, rtol=1e-4)


# ---- decoding and pages ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_steps(block_size: int, backend: str) -> None:
    """Each step passes the list of its query; all steps together are the call with all lists."""
    n, first = 150, 120
    x = Inputs.random(n, batch=2, heads=4, kv_heads=1, dim=32)
    indices = chosen(2, 1, n, 5, nk=first, block_size=block_size)
    whole = rw.attention(x.q, x.k, x.v, rw.Selected(indices, block_size) & rw.Causal(), backend=backend)
    # around the end of a tile and of blocks
    for t in (first, *range(125, 131), n - 1):
        step = rw.Selected(indices[:, :, t : t + 1], block_size) & rw.Causal()
        for q_offset in ("end", t, torch.tensor(t), torch.tensor([t, t])):
            got = rw.attention(
                x.q[:, :, t : t + 1], x.k[:, :, : t + 1], x.v[:, :, : t + 1], step, q_offset=q_offset, backend=backend
            )
            if backend == "cpu":
                assert torch.equal(got, whole[:, :, t : t + 1])
            else:
                torch.testing.assert_close(got, whole[:, :, t : t + 1])


LENGTHS = [65, 0, 300, 256]


def paged(x: Inputs, page: int = 32, precision: rw.Precision | None = None) -> rw.PagedCache:
    """Return a cache with sequences of different lengths, their tokens appended in turn."""
    batch, heads, _, dim = x.k.shape
    cache = rw.PagedCache.empty(batch, 320, heads, dim, value_dim=x.v.shape[3], page=page, precision=precision)
    for start in range(0, 320, 100):
        for b, length in enumerate(LENGTHS):
            k, v = (side[b : b + 1, :, start : min(start + 100, length)] for side in (x.k, x.v))
            if k.shape[2]:
                cache.append(k, v, rows=[b])
    return cache


@pytest.mark.parametrize("backend", ["reference", "dense_batched", *["cpu"] * NATIVE])
@pytest.mark.parametrize("block_size", [1, 16, 48])
@pytest.mark.parametrize("of", ["all heads", "key heads", "query heads"])
@pytest.mark.parametrize("nq", [1, 3])
def test_pages(nq: int, of: str, block_size: int, backend: str) -> None:
    """Each sequence of a paged cache has the result of its own keys alone, for lists of its own."""
    x = Inputs.random(nq, 300, batch=len(LENGTHS), heads=4, kv_heads=2, dim=24, value_dim=40)
    lead = {"all heads": 1, "key heads": 2, "query heads": 4}[of]
    heads = "kv" if of == "key heads" else "query"
    indices = torch.full((len(LENGTHS), lead, nq, 7), -1)
    for b, length in enumerate(LENGTHS):
        if length:
            indices[b] = chosen(lead, nq, 7, nk=length, block_size=block_size, seed=b)
            indices[b, :, :, 0] = 0
    cache = paged(x)
    for around in (rw.Full(), rw.Causal()):
        pattern = rw.Selected(indices, block_size, heads=heads) & around
        got = rw.paged_attention(x.q, cache, pattern, backend=backend)
        for b, length in enumerate(LENGTHS):
            if not length:
                assert not got[b].any()
                continue
            k, v = x.k[b : b + 1, :, :length], x.v[b : b + 1, :, :length]
            mine = rw.Selected(indices[b : b + 1], block_size, heads=heads) & around
            want = rw.attention(x.q[b : b + 1], k, v, mine, q_offset="end", backend=backend)
            if backend == "cpu":
                assert torch.equal(got[b : b + 1], want)
            else:
                torch.testing.assert_close(got[b : b + 1], want)


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("block_size", [1, 16])
def test_8_bit_keys(block_size: int, dtype: torch.dtype) -> None:
    """8-bit keys and values give the result of the keys that they stand for, in tensors and in pages."""
    precision = rw.Precision(kv=dtype)
    x = Inputs.random(3, 300, batch=len(LENGTHS), heads=4, kv_heads=2, dim=32)
    indices = torch.zeros(len(LENGTHS), 1, 3, 5, dtype=torch.int64)
    indices[2] = chosen(1, 3, 5, nk=300, block_size=block_size)
    pattern = rw.Selected(indices, block_size)
    got = rw.attention(x.q, x.k, x.v, pattern, precision=precision, backend="cpu")
    want = rw.attention(x.q, x.k, x.v, pattern, precision=precision, backend="reference")
    torch.testing.assert_close(got, want)
    pages = rw.paged_attention(x.q, paged(x, 16, precision), pattern, backend="cpu")
    assert torch.equal(pages[2], got[2])


# ---- bits ------------------------------------------------------------------------------------------------------------


@needs_kernel
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("block_size", [1, 16, 20, 128])
@pytest.mark.parametrize("lead", [(), (8,)], ids=["shared", "each head"])
def test_same_bits(lead: tuple[int, ...], block_size: int, dtype: str) -> None:
    """A row has the same bits in any chunk of queries, in any batch, and for any number of threads."""
    n = 500
    q, k, v = (torch.randn(3, heads, n, 32).to(DTYPES[dtype]) for heads in (8, 2, 2))
    indices = chosen(*lead, n, 17, nk=n, block_size=block_size)
    causal, before = rw.Causal(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        whole = rw.attention_with_lse(q, k, v, rw.Selected(indices, block_size) & causal, backend="cpu")
        for first, last in ((0, 1), (7, 60), (133, 134), (200, 500), (499, 500)):
            rows = rw.Selected(indices[..., first:last, :], block_size) & causal
            got = rw.attention_with_lse(q[:, :, first:last], k, v, rows, q_offset=first, backend="cpu")
            for one, all_of_them in zip(got, whole, strict=True):
                assert torch.equal(one, all_of_them[:, :, first:last])
        single = rw.attention_with_lse(q[1:2], k[1:2], v[1:2], rw.Selected(indices, block_size) & causal, backend="cpu")
        assert torch.equal(single.out, whole.out[1:2])
        assert torch.equal(single.lse, whole.lse[1:2])
        torch.set_num_threads(3)
        again = rw.attention_with_lse(q, k, v, rw.Selected(indices, block_size) & causal, backend="cpu")
        assert torch.equal(again.out, whole.out)
    finally:
        torch.set_num_threads(before)


# ---- calls that share shapes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("block_size", [1, 16])
def test_new_lists_of_the_same_shape_are_new_lists(block_size: int, backend: str) -> None:
    """No call uses lists of an earlier one, also where the same tensor was written between calls or memory was freed."""
    q, k, v = (torch.randn(1, heads, 20, 16) for heads in (4, 1, 1))
    indices = torch.empty(20, 3, dtype=torch.int32)
    for seed in range(12):
        indices.copy_(chosen(20, 3, nk=20, block_size=block_size, seed=seed))
        pattern = rw.Selected(indices, block_size) & rw.Causal()
        got = rw.attention(q, k, v, pattern, backend=backend)
        torch.testing.assert_close(got, rw.attention(q, k, v, pattern, backend="reference"))
        indices.fill_(0)  # the pattern has a copy
        assert torch.equal(rw.attention(q, k, v, pattern, backend=backend), got)
        again = copy.deepcopy(pattern)
        del pattern
        assert torch.equal(rw.attention(q, k, v, again, backend=backend), got)
        if seed % 4 == 3:
            rw.memory.trim()
            assert torch.equal(rw.attention(q, k, v, again, backend=backend), got)


def test_threads_call_with_lists_of_their_own() -> None:
    q, k, v = (torch.randn(1, heads, 40, 16) for heads in (4, 1, 1))
    lists = [rw.Selected(chosen(40, 5, nk=40, seed=seed)) & rw.Causal() for seed in range(8)]
    want = [rw.attention(q, k, v, each, backend="reference") for each in lists]
    failed: list[int] = []

    def work(number: int) -> None:
        for turn in range(30):
            at = (number + turn) % len(lists)
            if not torch.allclose(rw.attention(q, k, v, copy.deepcopy(lists[at])), want[at], atol=1e-5):
                failed.append(at)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


# ---- transforms ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [1, 16])
def test_transforms(block_size: int) -> None:
    """func.grad and vmap over queries, keys and values, and vmap over lists, agree with a loop."""
    q, k, v = (torch.randn(3, 1, heads, 20, 16) for heads in (4, 1, 1))
    pattern = rw.Selected(chosen(20, 3, nk=20, block_size=block_size), block_size) & rw.Causal()

    def loss(*x: Tensor) -> Tensor:
        return rw.attention(*x, pattern).square().sum()

    got = torch.func.vmap(lambda *x: rw.attention(*x, pattern))(q, k, v)
    want = torch.stack([rw.attention(*x, pattern) for x in zip(q, k, v, strict=True)])
    torch.testing.assert_close(got, want)
    lists = chosen(3, 20, 3, nk=20, block_size=block_size)
    got = torch.func.vmap(lambda each: rw.attention(q[0], k[0], v[0], rw.Selected(each, block_size) & rw.Causal()))(
        lists
    )
    for one, each in zip(got, lists, strict=True):
        same = rw.Selected(each, block_size) & rw.Causal()
        torch.testing.assert_close(one, rw.attention(q[0], k[0], v[0], same, backend="reference"))
    with pytest.raises(PatternError, match="indices: got"):
        torch.func.vmap(lambda each: rw.attention(q[0], k[0], v[0], rw.Selected(each, block_size)))(lists + 30)
    grads = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(q, k, v)
    for b in range(3):
        leaves = [x[b].clone().requires_grad_() for x in (q, k, v)]
        wanted = torch.autograd.grad(rw.attention(*leaves, pattern, backend="reference").square().sum(), leaves)
        for one, other in zip(grads, wanted, strict=True):
            torch.testing.assert_close(one[b], other, atol=1e-5, rtol=1e-4)


# ---- torch.compile ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("made", ["inside", "outside"])
@pytest.mark.parametrize("heads", ["query", "kv"])
def test_new_indices_compile_nothing_anew(heads: str, made: str) -> None:
    """A compiled function has one graph for all indices of a shape, which are its argument or a pattern's."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def make(indices: Tensor) -> Pattern:
        return rw.Selected(indices, 4, heads=heads) & rw.Causal()

    def step(q: Tensor, k: Tensor, v: Tensor, lists: Any) -> Tensor:
        return rw.attention(q * 1.0, k, v, make(lists) if made == "inside" else lists)

    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for seed in range(5):
        q, k, v = (torch.randn(2, h, 24, 8).requires_grad_() for h in (4, 2, 2))
        indices = chosen(2, 2 if heads == "kv" else 1, 24, 3, nk=24, block_size=4, seed=seed)
        got = compiled(q, k, v, indices if made == "inside" else make(indices))
        want = rw.attention(q, k, v, make(indices), backend="reference")
        torch.testing.assert_close(got, want)
        grads = (torch.autograd.grad(out.square().sum(), (q, k, v)) for out in (got, want))
        torch.testing.assert_close(*grads, atol=1e-5, rtol=1e-4)
    assert counter.frame_count == 1


def test_a_growing_cache_compiles_nothing_anew() -> None:
    compiled = 0
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter, dynamic=True)
    def step(q: Tensor, k: Tensor, v: Tensor, indices: Tensor) -> Tensor:
        return rw.attention(q * 1.0, k, v, rw.Selected(indices) & rw.Causal(), q_offset="end")

    with torch.no_grad():
        for nk in range(40, 60):
            q, k, v = torch.randn(2, 4, 1, 8), torch.randn(2, 2, nk, 8), torch.randn(2, 2, nk, 8)
            indices = chosen(2, 1, 1, 5, nk=nk, seed=nk).clamp(min=0)
            want = rw.attention(q, k, v, rw.Selected(indices), backend="reference")
            torch.testing.assert_close(step(q, k, v, indices), want)
            # a relation alone is compiled as often for its first two lengths
            compiled = counter.frame_count if nk < 42 else compiled
    assert counter.frame_count == compiled


# ---- several ranks ---------------------------------------------------------------------------------------------------

#: Numbers of ranks, and options of their contexts.
PARTS: list[tuple[int, dict[str, str]]] = [
    (2, {}),
    (3, {}),
    *((ranks, {"placement": placement, "schedule": schedule})
      for ranks, placement in [(2, "contiguous"), (2, "zigzag"), (3, "striped")]
      for schedule in ["allgather", "ring"]),
]  # fmt: skip


@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("lead", [(), (2,), (1, 2), (4,)], ids=str)
def test_a_context_equals_one_device(lead: tuple[int, ...], block_size: int) -> None:
    """A rank's queries and keys are some of the whole call's, to which rows and indices belong; gradients too."""
    n = 701
    x = Inputs.random(n, batch=1, heads=4, kv_heads=2, dim=16)
    heads = "kv" if lead[-1:] == (2,) else "query"
    lists = rw.Selected(chosen(*lead, n, 9, nk=n, block_size=block_size), block_size, heads=heads)
    for pattern in (lists & rw.Causal(), lists & rw.Causal() | rw.SlidingWindow(11) & rw.Causal()):
        want = alone(x, pattern)
        for ranks, options in PARTS:
            found = joined(spread(ranks, x, pattern, **options), n)
            for name, result in found.items():
                torch.testing.assert_close(
                    result, want[name], atol=1e-5, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
                )


# ---- memory ----------------------------------------------------------------------------------------------------------


def grown() -> int:
    """Return the bytes by which a training step over 8K tokens raises the process's peak."""
    n = 2**13
    torch.set_num_threads(2)
    q, k, v = (torch.randn(1, heads, n, 32, requires_grad=True) for heads in (16, 1, 1))
    indices = torch.randint(0, n, (n, 512), dtype=torch.int32)
    small = [x[:, :, :256] for x in (q, k, v)]
    rw.attention(*small, rw.Selected(indices[:256] % 256) & rw.Causal()).sum().backward()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    rw.attention(q, k, v, rw.Selected(indices) & rw.Causal()).sum().backward()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before


@pytest.mark.measures
@needs_kernel
def test_peak_memory() -> None:
    # a float for each pair of one head would take 268 MB; the lists 17 MB, inputs and gradients of 16 heads 70 MB
    assert forked(grown) < 0.9 * 4 * 2**26


class Allocated(TorchDispatchMode):
    """Record the bytes of each tensor that an operation allocates."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = list[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        held = {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)}
        if isinstance(found, Tensor) and found.untyped_storage().data_ptr() not in held:
            self.nbytes.append(found.nbytes)
        return found


@needs_kernel
@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("block_size", [1, 16])
def test_heads_that_share_lists_are_not_copied(block_size: int, kv_heads: int) -> None:
    """Forward allocates its output alone of that size, and backward the gradient of q, whatever the strides are."""
    x = Inputs.random(256, 256, batch=1, heads=16, kv_heads=kv_heads, dim=64, value_dim=64)
    lists = rw.Selected(chosen(256, 3, nk=256, block_size=block_size), block_size) & rw.Causal()
    branch = Branch.whole(lists, 256, 256, heads=16, batch=1, q_offset=0)
    for q in (x.q, x.q.transpose(1, 2).contiguous().transpose(1, 2)):
        operands, dout = Operands(q, x.k, x.v, 0.125), torch.randn_like(q)
        out, lse = cpu.forward(operands, branch, q.dtype)
        upstream = Upstream(dout, lse, (dout * out).sum(-1))
        with Allocated() as allocated:
            cpu.forward(operands, branch, q.dtype)
        assert sum(n >= q.nbytes for n in allocated.nbytes) == 1
        if block_size == 1:
            # backward of packed lists runs in other tiles
            continue
        with Allocated() as allocated:
            cpu.backward(upstream, operands, branch, q.dtype)
        assert sum(n >= q.nbytes for n in allocated.nbytes) == 1
