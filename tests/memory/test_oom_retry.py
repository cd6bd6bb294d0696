"""Out of memory: every smaller split computes the same results, forward and backward, and leaks no memory."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import logging
import resource
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ringweave as rw
from ringweave import errors, oom_retry
from ringweave.backends import BACKENDS, tile_attention
from ringweave.backends.backend import Upstream
from ringweave.call import Call, Operands
from ringweave.memory.pressure import to_system
from ringweave.oom_retry import Split

from .. import oracle
from ..parallel.processes import forked

N, HEADS, KV_HEADS = 512, 4, 2


@contextlib.contextmanager
def short_of(most: int, *, said: BaseException | None = None) -> Iterator[list[tuple[int, int]]]:
    """Let every backend run out of memory above a number of (head, query) pairs; yield the shapes that were tried."""
    tried: list[tuple[int, int]] = []
    before = dict(BACKENDS)

    def scarce(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            q = (args[1] if isinstance(args[0], Upstream) else args[0]).q
            tried.append(tuple(q.shape[1:3]))
            if q.shape[1] * q.shape[2] > most:
                waste = torch.zeros(1000)
                raise said or torch.OutOfMemoryError(f"out of memory beside {waste.numel()}")
            return call(*args)

        return run

    for name, each in before.items():
        backward = None if each.backward is None else scarce(each.backward)
        BACKENDS[name] = dataclasses.replace(each, forward=scarce(each.forward), backward=backward, prepare=None)
    try:
        yield tried
    finally:
        BACKENDS.update(before)


def results(x: oracle.Inputs, pattern: rw.Pattern, **options: Any) -> dict[str, Tensor]:
    """Return output, lse and gradients, with the same dropout seed each time."""
    torch.manual_seed(1)
    leaves = x.leaves()
    out, lse = rw.attention_with_lse(*leaves, pattern, **options)
    return oracle.results(out, lse, x, leaves)


PATTERNS = {
    "window": (rw.SlidingWindow(70) | rw.Sinks(3)) & rw.Causal(),
    "documents": rw.Documents([100, 250, N - 350]) & rw.Causal(),
    "table": rw.patterns.random_blocks(N, 0.5, block_size=64, heads=HEADS),
    "by head": rw.PerHead([rw.Causal(), rw.SlidingWindow(9), ~rw.Causal(), rw.Full()]),
    "chosen": rw.Selected((torch.arange(N)[:, None] * 7 - torch.arange(9) ** 3).clamp(min=-1) % N) & rw.Causal(),
    "chosen blocks": rw.Selected(torch.arange(HEADS * N).view(HEADS, N, 1) * torch.tensor([3, 5]) % (N // 16), 16),
    "keys": rw.KeyPadding(torch.tensor([N, 300]), torch.tensor([0, 50])) & rw.Causal(),
    "mixture": rw.LongNet([128, 512], [1, 4]),
    "dilated": rw.Dilated(8, 16) | rw.SlidingWindow(20),
}
# there are two key heads: both together, then one at a time, then 128 of 512 queries
RUNGS = {"heads": HEADS // 2 * N, "queries": 2 * 128}


@pytest.mark.parametrize("backend", ["cpu", "dense_batched"])
@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("name", PATTERNS)
def test_each_rung_computes_the_same(name: str, rung: str, backend: str) -> None:
    if backend == "cpu":
        pytest.importorskip("ringweave._cpu", exc_type=ImportError)
    batch = 2 if name == "keys" else 1
    x = oracle.Inputs.random(N, heads=HEADS, kv_heads=KV_HEADS, batch=batch)
    whole = results(x, PATTERNS[name], backend=backend)
    # dropout depends on a head's index among all heads
    most = RUNGS[rung] * (2 if name == "mixture" else 1)
    if (name, rung) == ("table", "queries"):
        # it is made for all queries
        with short_of(RUNGS[rung]), pytest.raises(torch.OutOfMemoryError):
            results(x, PATTERNS[name], backend=backend)
        return
    with short_of(most) as tried:
        got = results(x, PATTERNS[name], backend=backend)
    if (name, rung) != ("mixture", "heads"):
        assert max(heads * rows for heads, rows in tried) > most
    for each, error in oracle.errors(got, whole).items():
        assert error < 1e-6, each
    if backend == "cpu" and name in ("window", "documents", "table", "by head", "chosen", "chosen blocks"):
        # tiles have the same sides, and a row its tiles in order
        exact = ("out", "lse", "dq", *(("dk", "dv") if rung == "heads" else ()))
        assert all(torch.equal(got[each], whole[each]) for each in exact)


@pytest.mark.parametrize("backend", ["cpu", "dense_batched"])
def test_distances_in_documents_that_are_packed_apart(backend: str) -> None:
    """A piece of the queries counts distances from the positions that they have in the whole call."""
    if backend == "cpu":
        pytest.importorskip("ringweave._cpu", exc_type=ImportError)
    documents = rw.Documents(cu_seqlens_q=[0, 100, 300, N], cu_seqlens_k=[0, 300, 301, 400])
    table = torch.randn(HEADS, 41, requires_grad=True)
    x, found = oracle.Inputs.random(N, 400, heads=HEADS, kv_heads=KV_HEADS), []
    for most in (10**9, *RUNGS.values()):
        with short_of(most):
            torch.manual_seed(5)
            leaves = x.leaves()
            terms = [rw.ALiBi.of_heads(HEADS), rw.DistanceBias(table)]
            given = {"terms": terms, "dropout": 0.25, "backend": backend}
            out, lse = rw.attention_with_lse(*leaves, rw.Causal().within(documents), **given)
            found.append(oracle.results(out, lse, x, leaves, table=table))
    for other in found[1:]:
        for each, error in oracle.errors(other, found[0]).items():
            assert error < 1e-5, each


@pytest.mark.parametrize("opaque", [False, True], ids=["formula", "mapped"])
@pytest.mark.parametrize("name", ["window", "by head", "chosen"])
def test_score_functions_and_their_gradients_stay(name: str, opaque: bool) -> None:
    """A piece evaluates the function at the heads and positions of the call, and captured tensors get all gradients."""
    rows, columns = (torch.rand(HEADS, N + 7, requires_grad=True) for _ in range(2))
    x = oracle.Inputs.random(N, heads=HEADS, kv_heads=KV_HEADS)

    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if opaque:
            with torch.no_grad():
                s = s * 1 + 0 * s
        return s * rows[h, q] - columns[h, k].tanh()

    found, options = [], {} if name == "chosen" else {"q_offset": 7, "k_offset": 5}
    for most in (10**9, *RUNGS.values()):
        with short_of(most) as tried:
            torch.manual_seed(5)
            leaves = x.leaves()
            out, lse = rw.attention_with_lse(*leaves, PATTERNS[name], terms=score_mod, dropout=0.25, **options)
            grads = torch.autograd.grad((out * x.dout).sum() + lse.clamp(min=-9).sum(), [*leaves, rows, columns])
            found.append([out, lse, *grads])
        assert (max(heads * queries for heads, queries in tried) > most) == (most < HEADS * N)
    for other in found[1:]:
        for got, want in zip(other, found[0], strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_sums_of_an_attempt_that_failed_are_discarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory runs out after the gradients of captured tensors were added."""
    x, slopes = oracle.Inputs.random(N, heads=HEADS, kv_heads=KV_HEADS), torch.rand(HEADS, requires_grad=True)
    backward, failures = tile_attention.backward, [2]

    def late(*args: Any) -> Any:
        found = backward(*args)
        if failures[0]:
            failures[0] -= 1
            raise torch.OutOfMemoryError("out of memory")
        return found

    def gradient() -> Tensor:
        out = rw.attention(x.q, x.k, x.v, rw.Causal(), terms=lambda s, b, h, q, k: s * slopes[h])
        return torch.autograd.grad((out * x.dout).sum(), slopes)[0]

    want = gradient()
    monkeypatch.setattr(tile_attention, "backward", late)
    torch.testing.assert_close(gradient(), want)
    assert failures == [0]


def test_after_caches_are_given_back_the_call_is_made_again(caplog: pytest.LogCaptureFixture) -> None:
    x = oracle.Inputs.random(N)
    left = [1]

    @rw.memory.on_trim
    def give() -> int:
        left.clear()
        return 1

    whole, real = results(x, rw.Causal()), BACKENDS["cpu"].forward
    tries = []

    def run(*args: Any) -> Any:
        tries.append(1)
        if left:
            raise MemoryError
        return real(*args)

    before = BACKENDS["cpu"]
    errors.WARNED.clear()
    BACKENDS["cpu"] = dataclasses.replace(before, forward=run, prepare=None)
    try:
        with caplog.at_level(logging.WARNING, "ringweave"):
            for _ in range(3):
                left.append(1)
                assert torch.equal(rw.attention(x.q, x.k, x.v, rw.Causal()), whole["out"])
    finally:
        BACKENDS["cpu"] = before
    assert len(tries) == 6
    assert [record.message for record in caplog.records] == [
        "memory ran out: attention continues, forward after the caches were cleared (the same result; cost: plans are made again)"
    ]


SAID = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB"),
    MemoryError(),
    RuntimeError("[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: 5 bytes"),
    RuntimeError("std::bad_alloc"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
]


@pytest.mark.parametrize("error", SAID, ids=str)
def test_the_first_error_comes_back_with_a_hint(error: Exception) -> None:
    q, k, v = (torch.randn(1, 2, 256, 16) for _ in range(3))
    with short_of(0, said=error) as tried, pytest.raises(type(error)) as caught:
        rw.attention(q, k, v, rw.Causal())
    assert caught.value is error
    assert "on_oom='sparsify'" in caught.value.__notes__[-1]
    assert tried == [(2, 256), (2, 256), (1, 256), (1, 128)]
    tried.clear()
    with short_of(0, said=error) as tried, pytest.raises(type(error)) as caught:
        rw.attention(q, k, v, rw.Causal(), on_oom="raise")
    assert tried == [(2, 256)]
    assert "on_oom='degrade'" in caught.value.__notes__[-1]


@pytest.mark.parametrize("error", [RuntimeError("another matter"), ValueError("no"), KeyboardInterrupt()], ids=str)
def test_other_errors_pass(error: BaseException) -> None:
    q, k, v = (torch.randn(1, 2, 256, 16) for _ in range(3))
    with short_of(0, said=error) as tried, pytest.raises(type(error)):
        rw.attention(q, k, v, rw.Causal())
    assert tried == [(2, 256)]


def test_pieces_that_cannot_be_are_left_out() -> None:
    """The sdpa backend cannot compute causal rows after the first, so it cannot split queries."""
    x = oracle.Inputs.random(N)
    whole = rw.attention(x.q, x.k, x.v, rw.Causal(), backend="sdpa")
    with short_of(N):
        assert torch.equal(rw.attention(x.q, x.k, x.v, rw.Causal(), backend="sdpa"), whole)
    with short_of(128), pytest.raises(torch.OutOfMemoryError):
        rw.attention(x.q, x.k, x.v, rw.Causal(), backend="sdpa")


def test_sparsify_is_another_answer_and_says_so() -> None:
    x = oracle.Inputs.random(N)

    @contextlib.contextmanager
    def few_tiles(most: int) -> Iterator[None]:
        before = BACKENDS["cpu"]

        def run(inputs: Any, branch: Any, *rest: Any) -> Any:
            if branch.plan().computed_pairs() > most:
                raise MemoryError
            return before.forward(inputs, branch, *rest)

        BACKENDS["cpu"] = dataclasses.replace(before, forward=run, prepare=None)
        try:
            yield
        finally:
            BACKENDS["cpu"] = before

    with few_tiles(2 * 128 * 128), pytest.warns(RuntimeWarning, match="changes the answer") as said:
        got = results(x, rw.Causal(), on_oom="sparsify", backend="cpu")
    assert [str(each.message).split()[-3] for each in said] == ["256", "128"]
    want = results(x, rw.Causal() & rw.SlidingWindow(128))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = results(x, rw.Causal(), on_oom="sparsify")
    torch.testing.assert_close(plain, results(x, rw.Causal()), rtol=0, atol=0)
    # a LongNet mixture is not a relation, so no pairs can be left out
    with short_of(0), pytest.raises(torch.OutOfMemoryError):
        rw.attention(x.q, x.k, x.v, rw.LongNet([128], [2]), on_oom="sparsify")


def test_pages_are_read_in_pieces_of_heads() -> None:
    cache = rw.PagedCache.empty(batch=1, length=128, heads=2, dim=16)
    cache.append(torch.randn(1, 2, 70, 16), torch.randn(1, 2, 70, 16))
    q = torch.randn(1, 4, 1, 16)
    want = rw.paged_attention(q, cache)
    with short_of(2) as tried:
        assert torch.equal(rw.paged_attention(q, cache), want)
    assert tried == [(4, 1), (4, 1), (2, 1), (2, 1)]


SOAK = 50


def failures(count: int) -> tuple[int, int]:
    """Count in a separate process the tensors and bytes left by calls that ran out of memory."""
    q, k, v = (torch.randn(1, 2, 256, 64, requires_grad=True) for _ in range(3))

    def fail(count: int) -> None:
        for _ in range(count):
            with short_of(256):
                rw.attention(q, k, v, rw.Causal()).sum().backward()
            with short_of(0), contextlib.suppress(torch.OutOfMemoryError):
                rw.attention(q, k, v, rw.Causal())

    def held() -> tuple[int, int]:
        gc.collect()
        to_system()
        # without file pages, which vary
        _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
        tensors = sum(1 for each in gc.get_objects() if type(each) is Tensor)
        return tensors, (resident - shared) * resource.getpagesize()

    fail(20)
    before = held()
    fail(count)
    after = held()
    return after[0] - before[0], after[1] - before[1]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_failures_leave_nothing() -> None:
    tensors, nbytes = forked(failures, SOAK)
    assert tensors <= 8
    assert nbytes < 8 * 2**20


def limited(backend: str, on_oom: str, spare: int) -> tuple[str, float]:
    """Run attention in a process with a limited growth of its address space; return the outcome."""
    torch.set_num_threads(1)
    # freed memory must leave the address space: if the heap kept it, the limited call could use it
    ctypes.CDLL(None).mallopt(-3, 2**16)  # M_MMAP_THRESHOLD
    n = 8100
    q, k, v, dout = (torch.randn(1, 8, n, 64, dtype=torch.bfloat16) for _ in range(4))
    q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
    pattern = rw.SlidingWindow(128) & rw.Causal()
    want = rw.attention(q, k, v, pattern, backend=backend)
    wanted = torch.autograd.grad(want, [q, k, v], dout)
    small = [x[:, :, :256] for x in (q, k, v)]
    rw.attention(*small, pattern, backend=backend).sum().backward()
    gc.collect()
    rw.memory.trim()
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + spare, resource.RLIM_INFINITY))
    try:
        got = rw.attention(q, k, v, pattern, backend=backend, on_oom=on_oom)
        grads = torch.autograd.grad(got, [q, k, v], dout)
    except (RuntimeError, MemoryError) as error:
        return type(error).__name__, 0.0
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    off = max(
        float((a.detach() - b).float().norm() / b.detach().float().norm())
        for a, b in zip((got, *grads), (want, *wanted), strict=True)
    )
    return "done", off


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")
def test_a_process_with_too_little_address_space_computes_in_pieces() -> None:
    """With too little memory for the call, its pieces compute the same result."""
    # Results take 4 x 8 MiB; dense_batched's tiles and gradients in float32 take more than as much again. How much fits
    # beside the heap left by a failed attempt depends on the processor's kernels, so several sizes are tried.
    for spare in (72, 88, 96, 64):
        if forked(limited, "dense_batched", "raise", spare * 2**20)[0] == "done":
            continue
        became, off = forked(limited, "dense_batched", "degrade", spare * 2**20)
        if became == "done":
            assert off < 1e-6
            return
    raise AssertionError("no size at which the call fails and its pieces do not")


def test_cuts() -> None:
    q, k = torch.zeros(1, 12, 1000, 8), torch.zeros(1, 6, 1000, 8)
    rungs = list(oom_retry._splits(Operands(q, k, k, 1.0), Call.of(q, k, k, rw.Causal())))
    assert rungs == [None, Split(2, 1000), Split(6, 1000), Split(6, 256), Split(6, 128)]
