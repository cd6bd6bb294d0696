"""Nothing that a query does not attend reaches it: NaN or infinity there changes no bit of out, lse and gradients.

A call is made twice, with and without a number that is not finite in q, k, v, dout or dlse. The relation tells which
results the number may reach; all others must have equal bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import ringweave as rw
from ringweave.integrations.flash_attn import flash_attn_varlen_func
from ringweave.integrations.flex_attention import flex_attention
from ringweave.patterns import Pattern

from .oracle import Inputs, results
from .parallel.spread import joined, spread
from .sampled import is_long
from .test_conformance import DTYPES, EVERYTHING, SPARSE

BACKENDS = ["reference", *SPARSE, "torch_sparse"]
BAD = [torch.nan, torch.inf, -torch.inf]
HEADS, KV_HEADS, CHANNEL = 4, 2, 3


class Poison(NamedTuple):
    """A number in a channel of one token of the last batch element and the first head of q, k, v, dout or dlse."""

    name: str
    token: int
    value: float

    def into(self, x: Inputs) -> Inputs:
        given = getattr(x, self.name).clone()
        given[-1, 0, self.token][..., None if given.ndim == 3 else CHANNEL] = self.value
        return replace(x, **{self.name: given})


def reached(poison: Poison, allowed: Tensor) -> dict[str, Tensor]:
    """Return which rows and keys a number may reach, by result, for pairs (B, Hq, Nq, Nk)."""
    batch, heads, nq, _ = allowed.shape
    group = heads // KV_HEADS
    rows = torch.zeros(batch, heads, nq, dtype=torch.bool)
    if poison.name in ("k", "v"):
        rows[-1, :group] = allowed[-1, :group, :, poison.token]
    else:
        rows[-1, 0, poison.token] = allowed[-1, 0, poison.token].any()
    keys = (allowed & rows[..., None]).any(2).unflatten(1, (KV_HEADS, group)).any(2)
    return {
        "out": rows & (poison.name in ("q", "k", "v")),
        "lse": rows & (poison.name in ("q", "k")),
        "dq": rows,
        "dk": keys,
        # P^T dO reads neither values nor dlse
        "dv": keys & (poison.name not in ("v", "dlse")),
    }


def token_between(allowed: Tensor, name: str) -> int:
    """Return a token that about half of the other side attend, so that tiles hold both kinds."""
    share = allowed[-1, 0].double().mean(0 if name in ("k", "v") else 1)
    return int(torch.where(share > 0, (share - 0.5).abs(), 2.0).argmin())


def poisons(allowed: Tensor) -> Iterator[Poison]:
    """Yield a number for each tensor; in a long run, each number. Relations differ in the numbers that they get."""
    first = int(allowed.sum())
    for at, name in enumerate(("v", "k", "q", "dout", "dlse")):
        for value in BAD if is_long() else [BAD[(first + at) % 3]]:
            yield Poison(name, token_between(allowed, name), value)


Run = Callable[[Inputs], dict[str, Tensor]]


def check(run: Run, x: Inputs, counts: Tensor, whole_tokens: bool = False) -> None:
    """Check each number in turn.

    A row that attends it as a value has it in this channel alone, unless a token is not finite as a whole.
    """
    allowed = (counts > 0).expand(len(x.q), -1, -1, -1)
    clean = run(x)
    assert all(result[~result.isneginf()].isfinite().all() for result in clean.values())
    for poison in poisons(allowed):
        if poison.name in ("dout", "dlse") and "dq" not in clean:
            continue
        found, may = run(poison.into(x)), reached(poison, allowed)
        for name, result in clean.items():
            spared = ~may[name]
            assert torch.equal(found[name][spared], result[spared]), (poison, name)
        wanted = clean["out"].clone()
        if poison.name == "v" and not whole_tokens:
            wanted[..., CHANNEL].masked_fill_(may["out"], poison.value)
            torch.testing.assert_close(found["out"], wanted, rtol=0, atol=0, equal_nan=True)
        elif poison.name == "dout":
            assert torch.equal(~found["dv"].isfinite().all(-1), may["dv"]), poison
            assert found["dv"][..., :CHANNEL].isfinite().all(), poison


def attending(pattern: Pattern, backend: str, **options: Any) -> Run:
    """Return a function that makes the call forward and backward."""

    def run(x: Inputs) -> dict[str, Tensor]:
        leaves = x.leaves()
        with torch.random.fork_rng([]):
            torch.manual_seed(0)  # the seed of dropout
            out, lse = rw.attention_with_lse(*leaves, pattern, backend=backend, **options)
        return results(out, lse, x, leaves)

    return run


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", list(EVERYTHING))
def test_every_pattern(name: str, backend: str, poisoned: None) -> None:
    n = 150
    pattern = EVERYTHING[name](n)
    x = Inputs.random(n, batch=2, heads=HEADS, kv_heads=KV_HEADS, dim=8)
    check(attending(pattern, backend), x, pattern.to_dense(n, heads=HEADS, batch=2))


def test_full_attention_of_torch() -> None:
    x = Inputs.random(150, batch=2, heads=HEADS, kv_heads=KV_HEADS, dim=8)
    check(attending(rw.Full(), "sdpa"), x, torch.ones(2, HEADS, 150, 150))


@pytest.mark.sampled(3, whole="backend")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", list(EVERYTHING))
def test_many_numbers(name: str, backend: str) -> None:
    """Numbers in all tensors leave exactly those elements finite that the definition leaves finite.

    Queries and keys get no infinities, since a score of -inf in a row of NaN has no weight in the definition alone.
    """
    n = 150
    pattern = EVERYTHING[name](n)
    x = Inputs.random(n, batch=2, heads=HEADS, kv_heads=KV_HEADS, dim=8)
    generator = torch.Generator().manual_seed(len(name))
    for tensor, values in ((x.q, BAD[:1]), (x.k, BAD[:1]), (x.v, 6 * BAD), (x.dout, 3 * BAD)):
        some = torch.randint(0, tensor.numel(), (len(values),), generator=generator)
        tensor.view(-1)[some] = torch.tensor(values)
    got, want = (attending(pattern, each)(x) for each in (backend, "reference"))
    for result, element in got.items():
        assert torch.equal(element.isfinite(), want[result].isfinite()), result


def lists(n: int) -> Pattern:
    """Return lists of single keys that heads with common keys share, half of which a query may not attend."""
    return rw.Selected(torch.randint(-1, n, (n, 9), generator=torch.Generator().manual_seed(n))) & rw.Strided(2)


#: Patterns in tiles, in views, as lists, and in parts that are merged.
KINDS: dict[str, Callable[[int], Pattern]] = {
    "documents": lambda n: EVERYTHING["causal_documents"](n),
    "dilated": lambda n: rw.Dilated(9, 4) & rw.Causal(),
    "lists": lists,
    "union": lambda n: (rw.SlidingWindow(20) | rw.Dilated(8, 16)) & rw.Causal(),
    "per_head": EVERYTHING["per_head"],
}
OPTIONS: dict[str, Callable[[int], dict[str, Any]]] = {
    "softcap": lambda n: {"terms": rw.Softcap(2.0)},
    "alibi": lambda n: {"terms": rw.ALiBi.of_heads(HEADS)},
    "distances": lambda n: {"terms": (rw.DistanceBias(torch.randn(HEADS, 2 * 30 + 1)), rw.Softcap(3.0))},
    "bias": lambda n: {"terms": rw.Bias(torch.randn(2, 1, n, n))},
    "dropout": lambda n: {"dropout": 0.3},
    "sinks": lambda n: {"sink_logits": torch.randn(HEADS)},
    "negative scale": lambda n: {"scale": -0.3},
}


@pytest.mark.parametrize("backend", ["reference", *SPARSE])
@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("options", list(OPTIONS))
def test_options(options: str, kind: str, backend: str) -> None:
    n = 150
    pattern, x = KINDS[kind](n), Inputs.random(n, batch=2, heads=HEADS, kv_heads=KV_HEADS, dim=8)
    check(attending(pattern, backend, **OPTIONS[options](n)), x, pattern.to_dense(n, heads=HEADS, batch=2))


@pytest.mark.parametrize("backend", [*BACKENDS, "gather"])
@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_types(dtype: str, kind: str, backend: str) -> None:
    if (backend == "gather" and kind != "lists") or (backend == "cpu" and dtype == "fp64"):
        return
    n = 150
    pattern = KINDS[kind](n)
    x = Inputs.random(n, batch=2, heads=HEADS, kv_heads=KV_HEADS, dim=24, value_dim=40, dtype=DTYPES[dtype])
    check(attending(pattern, backend), x, pattern.to_dense(n, heads=HEADS, batch=2))


@pytest.mark.parametrize("backend", ["reference", *SPARSE])
@pytest.mark.parametrize("kind", ["window", "dilated", "sinks", "per_head"])
@pytest.mark.parametrize("nq", [1, 2, 3, 4, 5, 40])
def test_last_queries(nq: int, kind: str, backend: str) -> None:
    """Few queries, as in a decoding step, which the native kernel computes otherwise, are spared like others."""
    nk, first = 300, 300 - nq
    pattern = (KINDS | EVERYTHING)[kind](nk)
    x = Inputs.random(nq, nk, batch=2, heads=HEADS, kv_heads=KV_HEADS, dim=24)
    counts = pattern.to_dense(nq, nk, HEADS, batch=2, q_offset=first)
    check(attending(pattern, backend, q_offset=first), x, counts)


@pytest.mark.parametrize("backend", SPARSE)
def test_long_rows(backend: str) -> None:
    """Rows of several blocks, which threads share, and rows that dense_batched computes in pieces, are spared."""
    nq, nk = 40, 5000
    allowed = torch.rand(nq, nk, generator=torch.Generator().manual_seed(0)) < 0.7
    pattern = rw.from_mask_mod(lambda b, h, q, k: allowed[q, k], tables=[allowed])
    x = Inputs.random(nq, nk, heads=2, kv_heads=KV_HEADS, dim=8)
    check(attending(pattern, backend), x, pattern.to_dense(nq, nk, 2))


def test_pieces_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece of which a row attends nothing adds nothing to it, whatever its values are."""
    monkeypatch.setattr("ringweave.chunks._BUDGET", 1)
    n, pattern = 150, EVERYTHING["causal_documents"](150)
    pattern = rw.patterns.rebuild(pattern.spec, pattern.tables)
    x = Inputs.random(n, heads=HEADS, kv_heads=KV_HEADS, dim=8)
    for sized in (pattern, rw.Causal() | rw.Sinks(2)):
        check(attending(sized, "dense_batched"), x, sized.to_dense(n, heads=HEADS))


@pytest.mark.parametrize("backend", ["reference", *SPARSE])
@pytest.mark.parametrize("kv", [None, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("nq", [1, 3, 40])
def test_pages(nq: int, kv: torch.dtype | None, backend: str) -> None:
    """A token that is not finite is so as a whole in 8 bits, since its scale is not."""
    n, pattern = 200, rw.SlidingWindow(30, 0) | rw.Sinks(5)
    x = Inputs.random(nq, n, batch=2, heads=HEADS, kv_heads=KV_HEADS, dim=16)

    def run(x: Inputs) -> dict[str, Tensor]:
        cache = rw.PagedCache.empty(2, n, KV_HEADS, 16, page=16, precision=None if kv is None else rw.Precision(kv=kv))
        cache.append(x.k, x.v)
        return {"out": rw.paged_attention(x.q, cache, pattern, backend=backend)}

    counts = pattern.to_dense(nq, n, HEADS, batch=2, q_offset=n - nq)
    check(run, x, counts, whole_tokens=kv is not None)


@pytest.mark.parametrize("backend", SPARSE)
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("of", ["k", "v"])
def test_scales_and_codes_of_eight_bits(of: str, bad: float, backend: str) -> None:
    """A scale that is not finite, and a code of NaN, reach the rows that attend them."""
    n, nq, pattern = 64, 3, rw.Causal()
    x = Inputs.random(nq, n, heads=HEADS, kv_heads=KV_HEADS)
    cache = rw.PagedCache.empty(1, n, KV_HEADS, 16, page=16, precision=rw.Precision(kv=torch.float8_e4m3fn))
    cache.append(x.k, x.v)
    clean = rw.paged_attention(x.q, cache, pattern, backend=backend)
    codes, scales = getattr(cache, of), getattr(cache.scales, of)
    page, place = int(cache.table[0, 3]), 15  # of the last token
    for tensor in (scales[page, :, place : place + 1], codes[page, :, place, 3:4]):
        before = tensor.clone()
        tensor.copy_(torch.full(tensor.shape, bad if tensor.dtype == torch.float32 else torch.nan).to(tensor.dtype))
        found = rw.paged_attention(x.q, cache, pattern, backend=backend)
        tensor.copy_(before)
        assert torch.equal(found[:, :, : nq - 1], clean[:, :, : nq - 1])
        if of == "v":
            assert not found[:, :, -1].isfinite().any(-1).all() or not found[:, :, -1, 3].isfinite().any()


def test_a_packed_document_does_not_reach_another() -> None:
    """By flash-attn's function, a document with NaN leaves the others as they are, with their gradients."""
    q, k, v = (torch.randn(45, 2, 16) for _ in range(3))
    bounds, other = torch.tensor([0, 20, 45], dtype=torch.int32), slice(20)

    def run(v: Tensor) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = flash_attn_varlen_func(*leaves, bounds, bounds, 25, 25, causal=True)
        return [out.detach()[other], *(x[other] for x in torch.autograd.grad(out.sum(), leaves))]

    clean = run(v)
    v[30] = torch.nan
    for found, wanted in zip(run(v), clean, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("backend", ["reference", *SPARSE])
def test_varlen_attention(backend: str) -> None:
    n, bounds = 150, [0, 20, 90, 150]
    x = Inputs.random(n, heads=HEADS, kv_heads=KV_HEADS)
    pattern = rw.Documents(lengths=[20, 70, 60]) & rw.Causal()

    def run(x: Inputs) -> dict[str, Tensor]:
        leaves = x.leaves()
        out = rw.varlen_attention(*(leaf[0].transpose(0, 1) for leaf in leaves), bounds, backend=backend)
        out = out.transpose(0, 1)[None]
        grads = torch.autograd.grad(out, leaves, x.dout)
        return dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *grads), strict=True))

    allowed = pattern.to_dense(n, heads=HEADS)
    check(run, x, allowed)


def squared(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Return a score that no term describes."""
    return s + 0.01 * s * s


@pytest.mark.parametrize("with_lse", [False, True])
def test_any_score_function(with_lse: bool) -> None:
    n, ids = 150, torch.arange(150) // 37
    x = Inputs.random(n, batch=2, heads=HEADS, kv_heads=KV_HEADS, dim=8)
    x = x if with_lse else replace(x, dlse=torch.zeros_like(x.dlse))
    mask = create_block_mask(lambda b, h, q, k: (q >= k) & (ids[q] == ids[k]), None, None, n, n, device="cpu")

    def run(x: Inputs) -> dict[str, Tensor]:
        leaves = x.leaves()
        out, lse = flex_attention(*leaves, squared, mask, enable_gqa=True, return_lse=True)
        return results(out, lse if with_lse else lse.detach(), x, leaves)

    check(run, x, (rw.Documents(ids=ids) & rw.Causal()).to_dense(n, heads=HEADS, batch=2))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", [*KINDS, "longnet_causal", "table_per_head"])
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (4, {"schedule": "allgather", "placement": "zigzag"}),
        (3, {"schedule": "ring", "placement": "auto"}),
        (4, {"schedule": "ring", "placement": "residue"}),
    ],
    ids=["allgather", "ring", "residue"],
)
def test_ranks(ranks: int, options: dict[str, Any], kind: str) -> None:
    n = 150
    pattern = (KINDS | EVERYTHING)[kind](n)
    x = Inputs.random(n, heads=HEADS, kv_heads=KV_HEADS, dim=8)

    def run(x: Inputs) -> dict[str, Tensor]:
        return joined(spread(ranks, x, pattern, **options), n)

    check(run, x, pattern.to_dense(n, heads=HEADS))
