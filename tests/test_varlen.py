"""In packed sequences, each sequence has the result that it has alone."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing

import ringweave as rw

from .oracle import attention
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


# compiling takes seconds for each pattern
WAYS = [
    *((backend, pattern) for backend in ("reference", "dense_batched", "cpu") for pattern in BEFORE),
    *(pytest.param("compiled", pattern, marks=[pytest.mark.long] * (i % 4 > 0)) for i, pattern in enumerate(BEFORE)),
]


@pytest.mark.parametrize(("backend", "pattern"), WAYS, ids=str)
def test_sequences_without_keys_or_with_more_queries_than_keys(backend: str, pattern: rw.Pattern) -> None:
    """Output and all gradients are those of each sequence's dense attention; a query without keys gives 0."""
    generator = torch.Generator().manual_seed(0)
    dtype = torch.float32 if backend == "cpu" else torch.float64
    call = rw.varlen_attention
    if backend == "compiled":
        torch._dynamo.reset()
        call = torch.compile(rw.varlen_attention, fullgraph=True, backend="aot_eager")
    for queries, keys in RAGGED[:2] if backend == "compiled" else RAGGED:
        sizes = (sum(queries), 4, 16), (sum(keys), 2, 16), (sum(keys), 2, 8), (4,)
        leaves = [torch.randn(size, generator=generator, dtype=dtype).requires_grad_() for size in sizes]
        out = call(
            *leaves[:3], bounds(queries), bounds(keys), pattern, sink_logits=leaves[3], terms=rw.Softcap(2.0),
            backend="auto" if backend == "compiled" else backend,
        )  # fmt: skip
        exact = [x.detach().double().requires_grad_() for x in leaves]
        parts = zip(exact[0].split(queries), exact[1].split(keys), exact[2].split(keys), strict=True)
        wanted = torch.cat(
            [
                dense(*part, torch.stack([relation(pattern.select(0, h), len(part[0]), len(part[1])) for h in range(4)]), exact[3], 2.0)
                for part in parts
            ]
        )  # fmt: skip
        slope = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)
        grads = [torch.autograd.grad((x * slope).sum(), of) for x, of in ((out, leaves), (wanted, exact))]
        bound = 1e-12 if dtype == torch.float64 else 2e-5
        for got, right in zip((out, *grads[0]), (wanted, *grads[1]), strict=True):
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


def test_bounds_that_change_recompile_nothing() -> None:
    q = torch.randn(60, 2, 16)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    call = torch.compile(lambda q, cu: rw.varlen_attention(q, q, q, cu), fullgraph=True, backend=counter)
    for lengths in ([20, 40], [59, 1], [33, 27]):
        torch.testing.assert_close(call(q, bounds(lengths)), rw.varlen_attention(q, q, q, bounds(lengths)))
    assert counter.frame_count == 1


def test_refusals() -> None:
    q = torch.randn(10, 2, 16)
    with pytest.raises(
        rw.ShapeError, match=r"q: got Tensor of torch.float32 \(1, 10, 2, 16\); wanted \(tokens, heads, dim\)"
    ):
        rw.varlen_attention(q[None], q, q, [0, 10])
    with pytest.raises(rw.PatternError, match="documents of 9 tokens in all for 10 keys"):
        rw.varlen_attention(q, q, q, [0, 4, 9])
    with pytest.raises(rw.PatternError, match="LongNet"):
        rw.varlen_attention(q, q, q, [0, 10], pattern=rw.LongNet([4], [1]))
    # positions on two axes have no distance
    with pytest.raises(rw.UnsupportedError, match="terms: got ALiBi where queries and keys are packed apart"):
        rw.varlen_attention(q[:4], q, q, [0, 4], [0, 10], terms=rw.ALiBi([1.0, 1.0]))
