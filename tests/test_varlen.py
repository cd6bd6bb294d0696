"""Sequences that lie end to end: each is what it is alone."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing

import ringweave as rw

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
def test_each_sequence_is_what_it_is_alone(pattern: rw.Pattern, backend: str, terms: list[rw.Softcap]) -> None:
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
    # places on two axes are no distance
    with pytest.raises(rw.UnsupportedError, match="terms: got ALiBi where queries and keys are packed apart"):
        rw.varlen_attention(q[:4], q, q, [0, 4], [0, 10], terms=rw.ALiBi([1.0, 1.0]))
