"""In packed sequences, each sequence has the result that it has alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import pytest
import torch
import torch._dynamo.testing

import ringweave as rw
from ringweave.backends import BACKENDS
from ringweave.terms import Term
from ringweave.weights import in_places

from .oracle import Inputs, attention, errors, results
from .patterns import candidates

LENGTHS = [1, 37, 90, 5]
PATTERNS = [
    rw.Causal(),
    rw.Full(),
    rw.SlidingWindow(7) & rw.Causal(),
    (rw.Sinks(2) | rw.SlidingWindow(3)) & rw.Causal(),
]


def bounds(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


@pytest.mark.parametrize("backend", ["dense_batched", "cpu"])
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize("terms", [[], [rw.ALiBi([0.5, 0.25, 1.0, 2.0]), rw.Softcap(3.0)]], ids=["plain", "terms"])
def test_each_sequence_has_its_result_alone(pattern: rw.Pattern, backend: str, terms: list[rw.Softcap]) -> None:
    torch.manual_seed(0)
    total = sum(LENGTHS)
    leaves = [torch.randn(total, heads, 16, requires_grad=True) for heads in (4, 2, 2)]
    sinks = torch.randn(4)
    packed = rw.varlen_attention(
        *leaves, bounds(LENGTHS), pattern=pattern, terms=terms, sink_logits=sinks, backend=backend
    )
    parts = []
    for q, k, v in zip(*(x.split(LENGTHS) for x in leaves), strict=True):
        one = [x.transpose(0, 1)[None] for x in (q, k, v)]
        parts.append(rw.attention(*one, pattern, terms=terms, sink_logits=sinks, backend=backend)[0].transpose(0, 1))
    alone = torch.cat(parts)
    torch.testing.assert_close(packed, alone)
    grads = (torch.autograd.grad(out.square().sum(), leaves, retain_graph=True) for out in (packed, alone))
    for got, wanted in zip(*grads, strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_fewer_queries_than_keys_are_the_last_tokens(pattern: rw.Pattern) -> None:
    torch.manual_seed(0)
    queries = [1, 1, 9, 2]
    q, k, v = torch.randn(sum(queries), 4, 16), torch.randn(sum(LENGTHS), 2, 16), torch.randn(sum(LENGTHS), 2, 8)
    packed = rw.varlen_attention(q, k, v, bounds(queries), bounds(LENGTHS), pattern)
    parts = zip(q.split(queries), k.split(LENGTHS), v.split(LENGTHS), strict=True)
    for got, one in zip(packed.split(queries), parts, strict=True):
        offset = len(one[1]) - len(one[0])
        wanted = rw.attention(*(x.transpose(0, 1)[None] for x in one), pattern, q_offset=offset)
        torch.testing.assert_close(got, wanted[0].transpose(0, 1))


def relation(pattern: rw.Pattern, queries: int, keys: int) -> torch.Tensor:
    """Return the pairs of a sequence by the definition: the last query is at the last key."""
    q, k = torch.arange(queries)[:, None] + keys - queries, torch.arange(keys)[None]
    return pattern.allows(q, k).expand(queries, keys)


def dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, allowed: torch.Tensor, sinks: torch.Tensor, cap: float
) -> torch.Tensor:
    """Compute attention of one sequence; a query without keys gives 0."""
    one = (x.transpose(0, 1)[None] for x in (q, k, v))
    return attention(*one, allowed, sinks=sinks, scored=lambda t: cap * torch.tanh(t / cap))[0][0].transpose(0, 1)


RAGGED = [
    ([3, 2, 4], [5, 0, 4]),
    ([7, 200, 1, 0, 5, 130], [3, 17, 0, 6, 5, 129]),
    ([1], [150]),
    ([150, 3], [1, 0]),
    ([64, 256], [128, 128]),
]
BEFORE = [
    *PATTERNS,
    rw.SlidingWindow(5, 3),
    (rw.Sinks(4) | rw.SlidingWindow(6)) & rw.Causal(),
    rw.Global(3) | rw.SlidingWindow(4),
    rw.Global([1, 9]),
    rw.Segments(5),
    rw.Dilated(3, 4),
    rw.SlidingWindow(5) | rw.Strided(16) & rw.Causal(),
    ~rw.Causal(),
    rw.PrefixLM(6),
    rw.PerHead([rw.Causal(), rw.Full(), rw.Sinks(2), rw.Strided(3)]),
]


@lru_cache(maxsize=len(RAGGED))
def of_each_sequence(pattern: rw.Pattern, place: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return float32 inputs of some lengths, and output and gradients by each sequence's dense attention in float64."""
    generator = torch.Generator().manual_seed(place)
    queries, keys = RAGGED[place]
    sizes = (sum(queries), 4, 16), (sum(keys), 2, 16), (sum(keys), 2, 8), (4,)
    inputs = [torch.randn(size, generator=generator) for size in sizes]
    exact = [x.double().requires_grad_() for x in inputs]
    parts = zip(exact[0].split(queries), exact[1].split(keys), exact[2].split(keys), strict=True)
    outs = []
    for part in parts:
        allowed = torch.stack([relation(pattern.select(0, h), len(part[0]), len(part[1])) for h in range(4)])
        outs.append(dense(*part, allowed, exact[3], 2.0))
    out = torch.cat(outs)
    return inputs, [out.detach(), *torch.autograd.grad((out * sloped(out)).sum(), exact)]


def sloped(out: torch.Tensor) -> torch.Tensor:
    """Return a gradient that differs between elements."""
    return torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)


# compiling takes seconds for each pattern
WAYS = [
    way
    for i, pattern in enumerate(BEFORE)
    for way in (
        *((backend, pattern) for backend in ("reference", "dense_batched", "cpu")),
        pytest.param("compiled", pattern, marks=[pytest.mark.long] * (i != 5)),
    )
]


@pytest.mark.parametrize(("backend", "pattern"), WAYS, ids=str)
def test_sequences_without_keys_or_with_more_queries_than_keys(backend: str, pattern: rw.Pattern) -> None:
    """Output and all gradients are those of each sequence's dense attention; a query without keys gives 0."""
    dtype = torch.float32 if backend == "cpu" else torch.float64
    call = rw.varlen_attention
    if backend == "compiled":
        torch._dynamo.reset()
        call = torch.compile(rw.varlen_attention, fullgraph=True, backend="aot_eager")
    for place, (queries, keys) in enumerate(RAGGED[:2] if backend == "compiled" else RAGGED):
        inputs, wanted = of_each_sequence(pattern, place)
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in inputs]
        out = call(
            *leaves[:3], bounds(queries), bounds(keys), pattern, sink_logits=leaves[3], terms=rw.Softcap(2.0),
            backend="auto" if backend == "compiled" else backend,
        )  # fmt: skip
        grads = torch.autograd.grad((out * sloped(out)).sum(), leaves)
        bound = 1e-12 if dtype == torch.float64 else 2e-5
        for got, right in zip((out, *grads), wanted, strict=True):
            torch.testing.assert_close(got.double(), right, atol=bound, rtol=bound)


@pytest.mark.parametrize("pattern", BEFORE, ids=str)
@pytest.mark.parametrize("tile", [16, (16, 64), 128])
def test_plans_of_sequences_with_more_queries_than_keys(pattern: rw.Pattern, tile: int | tuple[int, int]) -> None:
    for queries, keys in RAGGED:
        packed = pattern.within(rw.Documents(cu_seqlens_q=bounds(queries), cu_seqlens_k=bounds(keys)))
        wanted = torch.zeros(2, 4, sum(queries), sum(keys), dtype=torch.bool)
        for h in range(4):
            blocks = [relation(pattern.select(0, h), *pair) for pair in zip(queries, keys, strict=True)]
            wanted[:, h] = torch.block_diag(*blocks).bool()
        assert torch.equal(packed.to_dense(sum(queries), sum(keys), 4, batch=2), wanted)
        assert torch.equal(packed.plan(sum(queries), sum(keys), heads=4, batch=2, tile=tile).to_dense(), wanted)


def test_rows_without_keys_have_an_lse_of_minus_infinity() -> None:
    documents = rw.Documents(cu_seqlens_q=[0, 3, 5, 9], cu_seqlens_k=[0, 5, 5, 7])
    q, k = torch.randn(1, 4, 9, 16), torch.randn(1, 4, 7, 16)
    for backend in ("reference", "dense_batched", "cpu"):
        out, lse = rw.attention_with_lse(q, k, k, rw.Causal().within(documents), backend=backend)
        empty = torch.zeros(9, dtype=torch.bool)
        empty[3:7] = True
        assert torch.equal(lse == -torch.inf, empty.expand(1, 4, 9))
        assert not out[:, :, empty].any()


def test_a_long_batch_is_planned_without_all_pairs() -> None:
    """Planning 128 sequences of 1,024 queries and 512 keys, and as many without keys, does not visit all pairs."""
    queries, keys = [1024] * 256, [512, 0] * 128
    packed = rw.Causal().within(rw.Documents(cu_seqlens_q=bounds(queries), cu_seqlens_k=bounds(keys)))
    with candidates.counted() as looked_at:
        plan = packed.plan(sum(queries), sum(keys))
    # each is a triangle of 4 x 4 tiles
    assert plan.nnz == 128 * 10
    assert sum(looked_at) <= 128 * 16


def test_patterns_that_look_positions_up_refuse_more_queries_than_keys() -> None:
    q, k = torch.randn(6, 2, 16), torch.randn(4, 2, 16)
    ids = torch.tensor([0, 0, 1, 1])
    for pattern in (
        rw.from_mask_mod(lambda b, h, q, k: ids[q] == ids[k]) & rw.Causal(),
        rw.GridNeighborhood(rw.Grid((2, 2)), 1),
        rw.Sinks(torch.tensor([True, False, True, False])),
    ):
        with pytest.raises(
            rw.PatternError, match="document 0 of 6 queries and 4 keys; wanted no more queries than keys"
        ):
            rw.varlen_attention(q, k, k, [0, 6], [0, 4], pattern)


def alibi() -> rw.ALiBi:
    return rw.ALiBi([0.5, 0.25, 1.0, -0.125])


def distances() -> rw.DistanceBias:
    """A table that is shorter than some distances."""
    generator = torch.Generator().manual_seed(3)
    return rw.DistanceBias(torch.randn(4, 61, generator=generator, dtype=torch.float64).requires_grad_())


OF_DISTANCE = {
    "alibi": lambda: [alibi()],
    "table": lambda: [distances()],
    "several": lambda: [rw.Softcap(2.0), distances(), alibi()],
}


def apart(queries: list[int], keys: list[int]) -> rw.Documents:
    return rw.Documents(cu_seqlens_q=bounds(queries), cu_seqlens_k=bounds(keys))


def penalised(terms: list[Term], queries: list[int], keys: list[int]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function of scores of packed sequences, from the formulas of the terms."""
    each = (torch.arange(k) - (torch.arange(q)[:, None] + k - q) for q, k in zip(queries, keys, strict=True))
    distance = torch.block_diag(*each).long()

    def scored(t: torch.Tensor) -> torch.Tensor:
        for term in terms:
            if isinstance(term, rw.Softcap):
                t = term.cap * torch.tanh(t / term.cap)
            elif isinstance(term, rw.ALiBi):
                t = t - term.slopes.double()[:, None, None] * distance.abs()
            elif isinstance(term, rw.DistanceBias):
                reach = term.table.shape[1] // 2
                t = t + term.table[:, distance.clamp(-reach, reach) + reach]
        return t

    return scored


PENALISED = [
    rw.Causal(),
    rw.Full(),
    rw.SlidingWindow(5, 3),
    rw.SlidingWindow(5) | rw.Strided(16) & rw.Causal(),
    BEFORE[-1],
]


def learned(terms: list[Term]) -> dict[str, torch.Tensor]:
    return {f"table {i}": table for i, table in enumerate(table for term in terms for table in term.learned)}


@cache
def with_distances(name: str, pattern: rw.Pattern, place: int) -> dict[str, torch.Tensor]:
    """Return the results of sequences of some lengths by the formulas of the terms, in float64."""
    queries, keys = RAGGED[place]
    x = Inputs.random(sum(queries), sum(keys), heads=4, kv_heads=2, dim=16, dtype=torch.float64)
    terms, leaves = OF_DISTANCE[name](), x.leaves()
    each = [
        [relation(pattern.select(0, h), *pair) for pair in zip(queries, keys, strict=True)] for h in range(4)
    ]  # fmt: skip
    allowed = torch.stack([torch.block_diag(*blocks) for blocks in each])
    found = attention(*leaves, allowed, scored=penalised(terms, queries, keys))
    return results(*found, x, leaves, **learned(terms))


@pytest.mark.parametrize(("backend", "name"), [*itertools.product(BACKENDS, OF_DISTANCE), ("compiled", "several")])
def test_terms_of_distance_where_lengths_differ(backend: str, name: str) -> None:
    """One call has the output, lse and gradients of each sequence, or refuses the backend."""
    call, compiled = rw.attention_with_lse, backend == "compiled"
    if compiled:
        torch._dynamo.reset()
        call = torch.compile(rw.attention_with_lse, fullgraph=True, backend="aot_eager")
    dtype = torch.float64 if backend == "reference" else torch.float32
    places = range(2 if compiled else len(RAGGED))
    for place, pattern in itertools.product(places, PENALISED[:1] if compiled else PENALISED):
        queries, keys = RAGGED[place]
        x = Inputs.random(sum(queries), sum(keys), heads=4, kv_heads=2, dim=16, dtype=dtype)
        terms, leaves = OF_DISTANCE[name](), x.leaves()
        given = {"terms": terms, "backend": "auto" if compiled else backend}
        try:
            out, lse = call(*leaves, pattern.within(apart(queries, keys)), **given)
        except rw.UnsupportedError:
            if backend in ("reference", "dense_batched", "cpu", "compiled"):
                raise
            return
        got = results(out, lse, x, leaves, **learned(terms))
        bound = 1e-12 if dtype == torch.float64 else 2e-5
        for each, error in errors(got, with_distances(name, pattern, place)).items():
            assert error < bound, (each, pattern, queries)


def test_a_sequence_of_whole_tiles_has_its_bits() -> None:
    """The native kernel sums keys by tiles, so sequences of whole tiles have the bits that they have alone."""
    pytest.importorskip("ringweave._cpu", exc_type=ImportError)
    queries, keys = [128, 40, 0, 128], [256, 128, 128, 384]
    x, terms = Inputs.random(sum(queries), sum(keys), heads=4, kv_heads=2, dim=16), [alibi(), distances()]
    packed = rw.attention_with_lse(x.q, x.k, x.v, rw.Causal().within(apart(queries, keys)), terms=terms, backend="cpu")
    parts = zip(x.q.split(queries, 2), x.k.split(keys, 2), x.v.split(keys, 2), strict=True)
    for out, lse, one in zip(packed.out.split(queries, 2), packed.lse.split(queries, 2), parts, strict=True):
        if one[0].numel():
            alone = rw.attention_with_lse(*one, rw.Causal(), terms=terms, q_offset="end", backend="cpu")
            assert torch.equal(out, alone.out)
            assert torch.equal(lse, alone.lse)


def test_dropout_beside_terms_of_distance() -> None:
    """Backends drop the same pairs of sequences whose queries begin before the first key."""
    queries, keys = [7, 200, 1, 0, 5, 130], [3, 17, 0, 6, 5, 129]
    x, found = Inputs.random(sum(queries), sum(keys), heads=4, kv_heads=2, dim=16), []
    for backend in ("reference", "dense_batched", "cpu"):
        torch.manual_seed(4)
        leaves, terms = x.leaves(), OF_DISTANCE["several"]()
        pattern = rw.SlidingWindow(9, 4).within(apart(queries, keys))
        out, lse = rw.attention_with_lse(*leaves, pattern, terms=terms, dropout=0.3, backend=backend)
        found.append(results(out, lse, x, leaves, table=terms[1].table))
    for other in found[1:]:
        for name, error in errors(other, found[0]).items():
            assert error < 2e-5, name


def test_some_of_the_packed_queries() -> None:
    """A call of later queries counts distances from their positions."""
    queries, keys = [5, 0, 20], [9, 4, 31]
    x, pattern = (
        Inputs.random(sum(queries), sum(keys), heads=4, kv_heads=2, dim=16),
        rw.Causal().within(apart(queries, keys)),
    )
    for backend in ("reference", "dense_batched", "cpu"):
        given = {"terms": [alibi(), distances()], "backend": backend}
        whole = rw.attention(x.q, x.k, x.v, pattern, **given)
        some = rw.attention(x.q[:, :, 3:21], x.k, x.v, pattern, q_offset=3, **given)
        torch.testing.assert_close(some, whole[:, :, 3:21])


def test_terms_of_distance_in_a_batch_and_in_transforms() -> None:
    """All batch elements have the packing; vmap, and the mass of tiles, have the positions too."""
    queries, keys = [5, 40], [9, 21]
    x, documents = Inputs.random(sum(queries), sum(keys), batch=3, heads=4, kv_heads=2, dim=16), apart(queries, keys)
    pattern, terms = rw.Causal().within(documents), [alibi(), rw.DistanceBias(distances().table.detach().float())]
    out, lse = rw.attention_with_lse(x.q, x.k, x.v, pattern, terms=terms)
    for b in range(3):
        one = [each[b : b + 1] for each in (x.q, x.k, x.v)]
        torch.testing.assert_close(out[b : b + 1], rw.attention(*one, pattern, terms=terms))
    mapped = torch.vmap(lambda *one: rw.attention(*(each[None] for each in one), pattern, terms=terms)[0])
    torch.testing.assert_close(mapped(x.q, x.k, x.v), out)
    mass = rw.adaptive.tile_mass(x.q, x.k, lse, pattern, terms=terms, per="row")
    rows = torch.zeros(3, 4, sum(queries))
    rows[:, :, ~torch.isneginf(lse[0, 0])] = 1
    torch.testing.assert_close(
        in_places(mass.values, mass.plan, mass.first).sum(3).flatten(2)[..., : sum(queries)], rows
    )


@pytest.mark.parametrize("terms", [None, *OF_DISTANCE])
def test_bounds_that_change_recompile_nothing(terms: str | None) -> None:
    """Bounds are read when the operator runs, also those that positions follow."""
    q, made = torch.randn(60, 4, 16), [] if terms is None else OF_DISTANCE[terms]()
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def call(q: torch.Tensor, *cu: torch.Tensor) -> torch.Tensor:
        return rw.varlen_attention(q, q, q, *cu, terms=made)

    compiled = torch.compile(call, fullgraph=True, backend=counter)
    for lengths, others in (([20, 40], [30, 30]), ([59, 1], [2, 58]), ([33, 27], [33, 27])):
        cu = [bounds(lengths)] if terms is None else [bounds(lengths), bounds(others)]
        torch.testing.assert_close(compiled(q, *cu), call(q, *cu))
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("pattern", "options", "got"),
    [
        (rw.Causal(), {}, "ALiBi where queries and keys are packed apart, with Causal"),
        (~rw.Segments(4), {}, "ALiBi where queries and keys are packed apart, with ~"),
        (rw.Full().within(rw.KeyPadding(10)), {}, "ALiBi where queries and keys are packed apart, with "),
        (None, {"k_offset": 1}, "ALiBi where queries and keys are packed apart, with Shifted"),
        (None, {"terms": [rw.ALiBi([1.0, 1.0]), rw.Bias(torch.zeros(1, 1, 4, 10))]}, "ALiBi, Bias where queries and keys are packed apart; wanted"),
    ],
)  # fmt: skip
def test_distances_that_are_not_those_of_the_documents(
    pattern: rw.Pattern | None, options: dict[str, Any], got: str
) -> None:
    """Terms refuse a pattern that counts positions elsewhere, and indices of queries beside their positions."""
    q, k = torch.randn(1, 2, 4, 16), torch.randn(1, 2, 10, 16)
    documents = rw.Documents(cu_seqlens_q=[0, 4], cu_seqlens_k=[0, 10])
    with pytest.raises(rw.UnsupportedError, match=f"terms: got {got}"):
        rw.attention(
            q, k, k, documents if pattern is None else pattern & documents, q_offset=0, **{"terms": rw.ALiBi([1.0, 1.0])} | options
        )  # fmt: skip
