"""Nothing that a query does not attend reaches it: NaN or infinity there changes no bit of out, lse and gradients.

A call is made with and without numbers that are not finite in q, k, v, dout or dlse, and with NaN in all tokens that no
pair has. The relation tells which elements of each result the numbers reach: those are not finite, and all others have
equal bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import ringweave as rw
from ringweave.integrations.flash_attn import flash_attn_varlen_func
from ringweave.integrations.flex_attention import flex_attention
from ringweave.patterns import Pattern

from .cases import MIXTURES
from .oracle import Inputs, results
from .parallel.spread import joined, spread
from .sampled import is_long
from .test_conformance import DTYPES, EVERYTHING, SPARSE

BACKENDS = ["reference", *SPARSE, "torch_sparse"]
BAD = [torch.nan, torch.inf, -torch.inf]
TENSORS = ("v", "k", "q", "dout", "dlse")
HEADS, KV_HEADS, CHANNEL = 4, 2, 3


class Part(NamedTuple):
    """Numbers that are not finite in a tensor of a batch element.

    Attributes:
        name: The tensor.
        elements: Which of its elements hold the numbers, (B, H, N, C); C is 1 for dlse.
        exact: Whether all results that depend on the numbers are not finite: an infinite score may have no weight.
    """

    name: str
    elements: Tensor
    exact: bool


def token_between(allowed: Tensor, name: str) -> int:
    """Return a token that about half of the other side attend, so that tiles hold both kinds."""
    share = allowed[0].double().mean(0 if name in ("k", "v") else 1)
    return int(torch.where(share > 0, (share - 0.5).abs(), 2.0).argmin())


def spoiled(x: Inputs, allowed: Tensor, names: Sequence[str]) -> Iterator[tuple[list[Part], Inputs]]:
    """Yield numbers in a token of each tensor, and NaN in all queries and keys without a pair.

    Values and gradients get each number in a channel of its own. Relations differ in the numbers of the other tensors;
    in a long run these get each number. A call has numbers in two tensors, each in a batch element of its own; each
    tensor is alone for some relations, and always in a long run.
    """
    rows = allowed.any(3, keepdim=True)
    keys = allowed.any(2).unflatten(1, (x.k.shape[1], -1)).any(2)[..., None]
    q, dout = (t.masked_fill(~rows, torch.nan) for t in (x.q, x.dout))
    k, v = (t.masked_fill(~keys, torch.nan) for t in (x.k, x.v))
    around, first = replace(x, q=q, k=k, v=v, dout=dout), int(allowed.sum())
    choices = {
        name: [BAD] if name in ("v", "dout") else [[bad] for bad in BAD] if is_long() else [[BAD[(first + at) % 3]]]
        for at, name in enumerate(TENSORS)
    }
    turned = [*names[first % len(names) :], *names[: first % len(names)]]
    alone = is_long() or len(x.q) == 1
    begins = range(len(names)) if alone else [0, *range(2 - len(names) % 2, len(names), 2)]
    for begin, end in pairwise([*begins, len(names)]):
        for values in zip(*(choices[name] for name in turned[begin:end]), strict=True):
            given, parts = around, list[Part]()
            for element, name, numbers in zip((-1, 0), turned[begin:end], values, strict=False):
                spoilt = getattr(around, name).clone()
                wide = spoilt if spoilt.ndim == 4 else spoilt[..., None]
                elements = torch.zeros_like(wide, dtype=torch.bool)
                channels = slice(0, 1) if wide is not spoilt else slice(CHANNEL, CHANNEL + len(numbers))
                place = element, 0, token_between(allowed[element], name), channels
                wide[place], elements[place] = torch.tensor(numbers).to(wide.dtype), True
                parts.append(Part(name, elements, name not in ("q", "k") or numbers[0] != numbers[0]))
                given = replace(given, **{name: spoilt})
            yield parts, given


def reached(name: str, elements: Tensor, allowed: Tensor, kv_heads: int) -> dict[str, Tensor]:
    """Return which elements of each result depend on a tensor's elements, for pairs (B, Hq, Nq, Nk)."""
    group = allowed.shape[1] // kv_heads

    def of_key_heads(x: Tensor) -> Tensor:
        return x.unflatten(1, (kv_heads, group)).any(2)

    if name in ("k", "v"):
        through = allowed.double() @ elements.repeat_interleave(group, 1).double() > 0
    else:
        through = elements & allowed.any(3, keepdim=True)
    rows = through.any(3, keepdim=True)
    keys = of_key_heads((allowed & rows).any(2))[..., None]
    of_values = of_key_heads(allowed.mT.double() @ elements.double() > 0) if name == "dout" else keys
    return {
        "out": through if name == "v" else rows & (name in ("q", "k")),
        "lse": rows[..., 0] & (name in ("q", "k")),
        "dq": rows,
        "dk": keys,
        # P^T dO reads neither values nor dlse
        "dv": of_values & (name not in ("v", "dlse")),
    }


Run = Callable[[Inputs], dict[str, Tensor]]


def check(run: Run, x: Inputs, counts: Tensor, whole_tokens: bool = False, dropped: bool = False) -> None:
    """Check the numbers of each tensor in turn.

    With ``whole_tokens``, a token is not finite as a whole if one of its elements is not. A pair that is dropped has no
    weight, also in a row of NaN.
    """
    allowed = (counts > 0).expand(len(x.q), -1, -1, -1)
    clean = run(x)
    assert all(result[~result.isneginf()].isfinite().all() for result in clean.values())
    without = [name for name, of in (("dout", {"dq"}), ("dlse", {"lse", "dq"})) if not of <= clean.keys()]
    for parts, given in spoiled(x, allowed, [name for name in TENSORS if name not in without]):
        found = run(given)
        may = {name: torch.zeros_like(wanted, dtype=torch.bool) for name, wanted in clean.items()}
        for name, elements, exact in parts:
            whole = elements.any(3, keepdim=True).expand_as(elements) if whole_tokens else elements
            reach = reached(name, whole, allowed, x.k.shape[1])
            for result, got in found.items():
                mine = reach[result].expand_as(got)
                may[result] |= mine
                assert not exact or (dropped and result == "dv") or not got[mine].isfinite().any(), (name, result)
            if name == "v" and not whole_tokens:
                # a sum with one number that is not finite is that number
                at = elements.flatten(1).any(1)
                numbers = given.v.masked_fill(~elements, 0.0).sum((0, 1, 2))
                wanted = torch.where(reach["out"], numbers, clean["out"])[at]
                torch.testing.assert_close(found["out"][at], wanted, rtol=0, atol=0, equal_nan=True)
        for result, wanted in clean.items():
            spared = ~may[result]
            assert torch.equal(found[result][spared], wanted[spared]), ([part.name for part in parts], result)


def attending(pattern: Pattern, backend: str, **options: Any) -> Run:
    """Return a function that makes the call forward and backward."""

    def run(x: Inputs) -> dict[str, Tensor]:
        leaves = x.leaves()
        with torch.random.fork_rng([]):
            torch.manual_seed(0)  # the seed of dropout
            out, lse = rw.attention_with_lse(*leaves, pattern, backend=backend, **options)
        return results(out, lse, x, leaves)

    return run


# the reference computes from the pairs alone, which those of test_options and the mixtures stand for
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        pytest.param(name, backend, marks=[pytest.mark.long] * (backend == "reference" and name not in MIXTURES))
        for name in EVERYTHING
        for backend in BACKENDS
    ],
)
def test_every_pattern(name: str, backend: str, poisoned: None) -> None:
    n = 150
    pattern = EVERYTHING[name](n)
    x = Inputs.random(n, batch=2, heads=HEADS, kv_heads=KV_HEADS, dim=8)
    check(attending(pattern, backend), x, pattern.to_dense(n, heads=HEADS, batch=2))


def test_attention_of_torch() -> None:
    """PyTorch's kernels spread NaN within a tile, but not from keys after the last query."""
    x = Inputs.random(150, batch=2, heads=HEADS, kv_heads=KV_HEADS, dim=8)
    check(attending(rw.Full(), "sdpa"), x, torch.ones(2, HEADS, 150, 150))
    x, run = Inputs.random(5, 9), attending(rw.Causal(), "sdpa", q_offset=0)
    clean = run(x)
    x.k[:, :, 5:] = x.v[:, :, 5:] = torch.nan
    assert all(torch.equal(result, clean[name]) for name, result in run(x).items())


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
    allowed = pattern.to_dense(n, heads=HEADS, batch=2)
    check(attending(pattern, backend, **OPTIONS[options](n)), x, allowed, dropped=options == "dropout")


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
    mask = create_block_mask(lambda b, h, q, k: (q >= k) & (ids[q] == ids[k]), None, None, n, n, device="cpu")

    def run(x: Inputs) -> dict[str, Tensor]:
        leaves = x.leaves()
        out, lse = flex_attention(*leaves, squared, mask, enable_gqa=True, return_lse=True)
        found = results(out, lse if with_lse else lse.detach(), x, leaves)
        # a result without lse has no gradient of it
        return found if with_lse else {name: found[name] for name in ("out", "dq", "dk", "dv")}

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
    x = Inputs.random(n, batch=2, heads=HEADS, kv_heads=KV_HEADS, dim=8)

    def run(x: Inputs) -> dict[str, Tensor]:
        return joined(spread(ranks, x, pattern, **options), n)

    check(run, x, pattern.to_dense(n, heads=HEADS, batch=2))
