"""flash-attn 2's functions against their conventions, written as a dense definition in float64."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from ringweave.api import attention, attention_with_lse
from ringweave.integrations import flash_attn
from ringweave.integrations.flash_attn import conventions

from .flash import Options, check, dense, packed

LENGTHS = [(1, 1), (1, 130), (37, 37), (65, 193), (64, 20), (140, 3), (5, 0)]
WINDOWS = [(-1, -1), (7, 0), (0, 0), (3, 5), (-1, 4), (6, -1), (300, 2), (1, 200), (-3, 2)]
HEADS = [(4, 4), (4, 2), (3, 1)]


def drawn(*sizes: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


def qkv(
    nq: int, nk: int, heads: int = 4, groups: int = 2, dim: int = 16, batch: int = 2, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    of_keys = batch, nk, groups, dim
    return drawn((batch, nq, heads, dim), of_keys, of_keys, dtype=dtype, seed=nq + nk)


def check_dense(inputs: list[Tensor], options: Options) -> None:
    def ours(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flash_attn.flash_attn_func(q, k, v, return_attn_probs=True, **options.keywords())

    check(ours, lambda q, k, v: dense(q, k, v, options), inputs)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize(("nq", "nk"), LENGTHS)
def test_windows_are_aligned_to_the_last_key(nq: int, nk: int, window: tuple[int, int]) -> None:
    """Out, lse and gradients, with more and fewer queries than keys, and a window of one limited side."""
    for causal in (False, True):
        check_dense(qkv(nq, nk), Options(causal, window))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "groups"), HEADS)
def test_dtypes_and_groups(dtype: torch.dtype, heads: int, groups: int) -> None:
    for nq, nk in ((65, 193), (64, 20)):
        check_dense(qkv(nq, nk, heads, groups, dtype=dtype), Options(True, (17, 0), scale=0.3))


@pytest.mark.parametrize("dim", [1, 40, 59, 111, 256])
def test_head_dimensions(dim: int) -> None:
    check_dense(qkv(33, 47, dim=dim), Options(True))


@pytest.mark.parametrize("shape", [None, (4,), (2, 4)], ids=str)
@pytest.mark.parametrize("softcap", [-1.0, 0.0, 1.5])
@pytest.mark.parametrize(("nq", "nk"), [(37, 37), (33, 65), (64, 20), (1, 50)])
def test_softcap_comes_before_alibi(nq: int, nk: int, softcap: float, shape: tuple[int, ...] | None) -> None:
    slopes = None if shape is None else drawn(shape, seed=9)[0].abs() / 8
    for causal, window in ((False, (-1, -1)), (True, (-1, -1)), (False, (9, 3))):
        check_dense(qkv(nq, nk), Options(causal, window, softcap=softcap, slopes=slopes))


RAGGED = [
    ([5, 9, 1], [5, 9, 1]),
    ([3, 2, 4, 0], [5, 0, 4, 3]),
    ([7, 90, 1, 0, 5, 70], [3, 17, 0, 6, 5, 69]),
    ([0, 3], [0, 0]),
    ([64, 5], [128, 1]),
    ([0, 4, 0, 3], [0, 4, 0, 3]),
    ([1, 1, 1, 1], [40, 3, 0, 170]),
]


def bounds(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def check_packed(queries: list[int], keys: list[int], options: Options, dtype: torch.dtype = torch.float32) -> None:
    inputs = drawn((sum(queries), 4, 16), (sum(keys), 2, 16), (sum(keys), 2, 16), dtype=dtype)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flash_attn.flash_attn_varlen_func(
            q, k, v, bounds(queries), bounds(keys), max(queries), max(keys), return_attn_probs=True,
            **options.keywords(),
        )  # fmt: skip

    check(ours, lambda q, k, v: packed(q, k, v, queries, keys, options), inputs)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize(("queries", "keys"), RAGGED)
def test_packed_sequences(queries: list[int], keys: list[int], window: tuple[int, int]) -> None:
    """Sequences of any lengths, with the windows' limits by the longest one."""
    for causal in (False, True):
        check_packed(queries, keys, Options(causal, window))


@pytest.mark.parametrize("shape", [(4,), "sequences"], ids=str)
@pytest.mark.parametrize(("queries", "keys"), RAGGED)
def test_packed_sequences_with_terms(queries: list[int], keys: list[int], shape: Any) -> None:
    slopes = drawn((len(queries), 4) if shape == "sequences" else shape, seed=9)[0].abs() / 8
    for causal, window in ((False, (-1, -1)), (True, (-1, -1)), (False, (9, 3)), (False, (2, -1))):
        check_packed(queries, keys, Options(causal, window, softcap=2.0, slopes=slopes))
    check_packed(queries, keys, Options(True, scale=0.2), torch.bfloat16)
    check_packed(queries, keys, Options(True), torch.float64)


@pytest.mark.parametrize("queries", [[9, 40, 0, 130], [1, 1, 1, 1], [30, 40, 5, 130]], ids=str)
def test_packed_sequences_are_one_call(queries: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """So are those with ALiBi and with other numbers of keys, also with slopes for each sequence."""
    made = []

    def counted(*args: Any, **options: Any) -> Any:
        made.append(args[0].shape[2])
        return attention(*args, **options)

    monkeypatch.setattr(conventions, "attention", counted)
    keys = [30, 40, 5, 130]
    q, k, v = drawn((sum(queries), 4, 16), (sum(keys), 2, 16), (sum(keys), 2, 16))
    for slopes in (None, torch.ones(4), torch.ones(4, 4)):
        made.clear()
        flash_attn.flash_attn_varlen_func(
            q, k, v, bounds(queries), bounds(keys), max(queries), max(keys), causal=True, alibi_slopes=slopes
        )
        assert len(made) == 1


@pytest.mark.parametrize("backend", ["reference", "dense_batched", "cpu"])
@pytest.mark.parametrize(("queries", "keys"), RAGGED)
def test_slopes_of_sequences_on_every_backend(
    queries: list[int], keys: list[int], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conventions, "attention_with_lse", functools.partial(attention_with_lse, backend=backend))
    slopes = drawn((len(queries), 4), seed=9)[0].abs() / 8
    for causal, softcap in ((True, 0.0), (False, 2.0)):
        check_packed(queries, keys, Options(causal, softcap=softcap, slopes=slopes))
        check_packed(queries, keys, Options(causal, softcap=softcap, slopes=slopes), torch.bfloat16)


def test_other_slopes_of_sequences_in_repeated_calls() -> None:
    """A repeated call reads the slopes that it is given, also those written into the same tensor."""
    lengths = [30, 7, 0, 90]
    q, k, v = drawn((127, 4, 16), (127, 2, 16), (127, 2, 16))
    slopes = torch.zeros(4, 4)
    for seed in range(4):
        slopes.copy_(drawn((4, 4), seed=seed)[0].abs() / 8)
        got = flash_attn.flash_attn_varlen_func(
            q, k, v, bounds(lengths), bounds(lengths), 90, 90, causal=True, alibi_slopes=slopes
        )
        want = packed(q.double(), k.double(), v.double(), lengths, lengths, Options(True, slopes=slopes))[0]
        torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


def test_a_nan_in_the_slopes_of_one_sequence() -> None:
    """The other sequences, and their gradients, are as they were."""
    lengths = [30, 7, 0, 90]
    leaves = [x.requires_grad_() for x in drawn((127, 4, 16), (127, 2, 16), (127, 2, 16))]
    slopes, found = drawn((4, 4), seed=9)[0].abs() / 8, []
    for slope in (0.5, torch.nan):
        slopes[1] = slope
        out = flash_attn.flash_attn_varlen_func(
            *leaves, bounds(lengths), bounds(lengths), 90, 90, causal=True, alibi_slopes=slopes
        )
        found.append([out, *torch.autograd.grad(out[:30].sum() + out[37:].sum(), leaves)])
    others = torch.tensor([True] * 30 + [False] * 7 + [True] * 90)
    # the first key of the sequence has the distance 0
    assert found[1][0][31:37].isnan().all()
    assert all(torch.equal(one[others], other[others]) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize(("nq", "nk"), [(37, 37), (5, 60), (64, 20)])
def test_slopes_of_equally_long_sequences_are_one_call(nq: int, nk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed or not, their heads are those of one sequence; a NaN in one leaves the others as they are."""
    made = []

    def counted(*args: Any, **options: Any) -> Any:
        made.append(args[0].shape[:2])
        return attention(*args, **options)

    monkeypatch.setattr(conventions, "attention", counted)
    count = 3
    slopes = drawn((count, 4), seed=9)[0].abs() / 8
    q, k, v = drawn((count, nq, 4, 16), (count, nk, 2, 16), (count, nk, 2, 16))
    v[1, 3] = torch.nan
    alone = [
        flash_attn.flash_attn_func(*(x[b : b + 1] for x in (q, k, v)), causal=True, alibi_slopes=slopes[b])
        for b in range(count)
    ]
    made.clear()
    whole = flash_attn.flash_attn_func(q, k, v, causal=True, alibi_slopes=slopes)
    assert torch.equal(whole.nan_to_num(7.0), torch.cat(alone).nan_to_num(7.0))
    sides = bounds([nq] * count), bounds([nk] * count)
    packed = flash_attn.flash_attn_varlen_func(
        *(x.flatten(0, 1) for x in (q, k, v)), *sides, nq, nk, causal=True, alibi_slopes=slopes
    )
    assert torch.equal(packed.nan_to_num(7.0), whole.flatten(0, 1).nan_to_num(7.0))
    assert made == [(1, 4 * count)] * 2
    monkeypatch.undo()
    for causal, window in ((True, (-1, -1)), (False, (9, 3))):
        check_packed([nq] * count, [nk] * count, Options(causal, window, softcap=2.0, slopes=slopes))


def test_few_queries_over_many_keys_are_a_call_for_each_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """One tile of their queries would be computed with the keys of all; the results do not depend on that."""
    monkeypatch.setattr(conventions, "_MANY_PAIRS", 100)
    monkeypatch.setattr(conventions, "_in_documents", None)
    check_packed([1, 2, 0, 1], [40, 3, 5, 0], Options(True, slopes=drawn((4,), seed=9)[0].abs() / 8))


PLAIN = {
    "flash_attn_func": "q, k, v",
    "flash_attn_kvpacked_func": "q, kv",
    "flash_attn_qkvpacked_func": "qkv",
    "flash_attn_varlen_func": "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k",
    "flash_attn_varlen_kvpacked_func": "q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k",
    "flash_attn_varlen_qkvpacked_func": "qkv, cu_seqlens, max_seqlen",
}
OPTIONS = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
    "deterministic=False, return_attn_probs=False"
)


def written(function: Any) -> str:
    """Return the parameters of a function with their defaults."""
    signature = inspect.signature(function)
    plain = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
    return str(signature.replace(parameters=plain, return_annotation=signature.empty))[1:-1]


@pytest.mark.parametrize("name", PLAIN)
def test_signatures(name: str) -> None:
    """Names, order and defaults are those of 2.8; transformers reads them."""
    more = ", block_table=None" if name == "flash_attn_varlen_func" else ""
    for module in (flash_attn, flash_attn.flash_attn_interface):
        assert written(getattr(module, name)) == f"{PLAIN[name]}, {OPTIONS}{more}"


def test_packed_tensors_are_the_same_call() -> None:
    """One tensor of queries, keys and values, or of keys and values, gives the same bits and gradients."""
    qkv_, kv, q = drawn((2, 30, 3, 4, 16), (2, 45, 2, 2, 16), (2, 30, 4, 16))
    options: dict[str, Any] = {"causal": True, "window_size": (9, 0), "return_attn_probs": True}
    pairs: list[tuple[list[Tensor], Any, Any]] = [
        ([qkv_], flash_attn.flash_attn_qkvpacked_func, lambda x: flash_attn.flash_attn_func(*x.unbind(2), **options)),
        (
            [q, kv],
            flash_attn.flash_attn_kvpacked_func,
            lambda q, x: flash_attn.flash_attn_func(q, *x.unbind(2), **options),
        ),
    ]
    flat, cu = [x.flatten(0, 1) for x in (qkv_, kv, q)], [bounds([n, n]) for n in (30, 45)]
    varlen = flash_attn.flash_attn_varlen_func
    pairs += [
        (
            flat[:1],
            lambda x, **o: flash_attn.flash_attn_varlen_qkvpacked_func(x, cu[0], 30, **o),
            lambda x: varlen(*x.unbind(1), cu[0], cu[0], 30, 30, **options),
        ),
        (
            [flat[2], flat[1]],
            lambda q, x, **o: flash_attn.flash_attn_varlen_kvpacked_func(q, x, cu[0], cu[1], 30, 45, **o),
            lambda q, x: varlen(q, *x.unbind(1), cu[0], cu[1], 30, 45, **options),
        ),
    ]
    for inputs, one, several in pairs:
        found = []
        for call in (lambda *x, one=one: one(*x, **options), several):
            leaves = [x.clone().requires_grad_() for x in inputs]
            out, lse, weights = call(*leaves)
            assert weights.shape == (0,)
            found.append([out, lse, *torch.autograd.grad(out.square().sum(), leaves)])
        assert all(map(torch.equal, *found))
