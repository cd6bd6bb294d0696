"""Test arguments and error texts of the public functions, autocast, offsets, LongNet's options, and torch.compile."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from typing import Any

import pytest
import torch

import ringweave as rw
from ringweave.backends import BACKENDS
from ringweave.call import Call
from ringweave.errors import UnsupportedError
from ringweave.torch_ops import attention_op

from .cases import MIXTURES, PATTERNS
from .oracle import Inputs, attention, exact


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(shape).to(dtype) for shape in shapes]


Q, K = (1, 4, 10, 8), (1, 2, 12, 8)


def test_a_forward_only_backend_refuses_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    forward_only = dataclasses.replace(BACKENDS["dense_batched"], name="peek", backward=None)
    monkeypatch.setitem(BACKENDS, "peek", forward_only)
    q, k, v = tensors(Q, K, K)
    assert rw.attention(q, k, v, backend="peek").shape == Q
    with pytest.raises(UnsupportedError, match=r"'peek'.*forward-only, and an input requires gradients"):
        rw.attention(q.requires_grad_(), k, v, backend="peek")
    with torch.no_grad():
        rw.attention(q, k, v, backend="peek")


def test_the_callers_tensors_stay_as_they_are() -> None:
    q, k, v = tensors(Q, K, K)
    versions = [x._version for x in (q, k, v)]
    rw.attention(q, k, v, rw.SlidingWindow(3), q_offset="end")
    assert versions == [x._version for x in (q, k, v)]


def test_patterns_and_terms_made_in_inference_mode_serve_training() -> None:
    x = Inputs.random(40, heads=2, batch=2)
    with torch.inference_mode():
        pattern = rw.KeyPadding(torch.tensor([40, 9])) & rw.Documents(ids=torch.arange(40) // 9)
        terms = [rw.ALiBi.of_heads(2), rw.Bias(torch.randn(1, 1, 40, 40))]
        wanted = rw.attention(x.q, x.k, x.v, pattern, terms=terms)
    q = x.q.clone().requires_grad_()
    out = rw.attention(q, x.k, x.v, pattern, terms=terms)
    assert torch.equal(out, wanted)
    out.sum().backward()
    assert q.grad is not None
    assert bool(q.grad.isfinite().all())


def test_weights_under_autocast_are_float32_of_what_attention_takes() -> None:
    x = Inputs.random(40)
    with torch.autocast("cpu", torch.bfloat16):
        values = rw.attention_weights(x.q, x.k, rw.Causal()).values
    assert torch.equal(values, rw.attention_weights(x.q.bfloat16(), x.k.bfloat16(), rw.Causal()).values)


def test_autocast() -> None:
    q, k, v = tensors((1, 2, 40, 8), (1, 2, 40, 8), (1, 2, 40, 8))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert rw.attention(q, k.bfloat16(), v, rw.Causal()).dtype == torch.bfloat16
    assert rw.attention(q, k, v, rw.Causal()).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["cpu", "sdpa", "dense_batched", "gather", "torch_sparse", "reference"])
def test_backends_compute_without_autocast(backend: str, dtype: torch.dtype) -> None:
    """Autocast converts the inputs of a call and rounds nothing else, also where scores are looked at again for NaN."""
    lists = rw.Selected((torch.arange(40)[:, None] - torch.arange(5)).clamp(min=-1))
    pattern = lists if backend == "gather" else rw.Causal()
    results, given = [], tensors((1, 2, 40, 8), (1, 2, 40, 8), (1, 2, 40, 8))
    for cast in (False, True):
        q, k, v = (x.to(dtype).requires_grad_() for x in given)
        broken = k.clone()
        broken.data[:, :, 30] = torch.nan
        with torch.autocast("cpu", dtype, enabled=cast):
            out, lse = rw.attention_with_lse(q, broken, v, pattern, backend=backend)
            out.nan_to_num().float().sum().backward()
        results.append((out, lse, q.grad, k.grad, v.grad))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("offset", ["interleaved", "grouped", 1])
@pytest.mark.parametrize("heads", ["shared", "partitioned"])
@pytest.mark.parametrize("kv_heads", [6, 3, 2])
def test_longnet(causal: bool, offset: str | int, heads: str, kv_heads: int) -> None:
    x = Inputs.random(203, heads=6, kv_heads=kv_heads, dtype=torch.float64)
    options = {"segments": (32, 64, 256), "rates": (1, 2, 8), "causal": causal, "offset": offset, "heads": heads}
    counts = rw.LongNet(**options).to_dense(203, heads=6)
    leaves = x.leaves()
    out = rw.longnet_attention(*leaves, **options)
    x.dlse.zero_()
    want = exact(x, counts)
    torch.testing.assert_close(out, want["out"])
    got = torch.autograd.grad((out * x.dout).sum(), leaves)
    torch.testing.assert_close(got, tuple(want[name] for name in ("dq", "dk", "dv")))


def test_longnet_detached_weights() -> None:
    """With detached weights the output is equal, and the gradient is that with constant branch weights, unlike the exact one."""
    x = Inputs.random(100, heads=4, kv_heads=2, dtype=torch.float64)
    options = {"segments": (16, 64), "rates": (1, 4), "causal": True}
    leaves = x.leaves()
    exact_out = rw.longnet_attention(*leaves, **options)
    out = rw.longnet_attention(*leaves, **options, detach_weights=True)
    torch.testing.assert_close(out, exact_out)
    got = torch.autograd.grad((out * x.dout).sum(), leaves)

    # by definition: each branch densely, weights without gradients
    outs, lses = [], []
    for segment, rate in zip(options["segments"], options["rates"], strict=True):
        counts = rw.LongNet([segment], [rate], causal=True).to_dense(100, heads=4)
        part, lse = attention(*leaves, counts)
        outs.append(part)
        lses.append(lse.detach())
    want = torch.autograd.grad((rw.merge(outs, lses).out * x.dout).sum(), leaves)
    torch.testing.assert_close(got, want)
    whole = torch.autograd.grad((exact_out * x.dout).sum(), leaves)
    assert not torch.allclose(got[0], whole[0])


def test_union_and_mixture_differ() -> None:
    """A key in two branches counts twice in a LongNet, once in a union of relations."""
    x = Inputs.random(64, heads=1, dtype=torch.float64)
    mixture = rw.longnet_attention(x.q, x.k, x.v, segments=(8, 64), rates=(1, 1))
    union = rw.attention(x.q, x.k, x.v, rw.Segments(8) | rw.Segments(64))
    torch.testing.assert_close(union, rw.attention(x.q, x.k, x.v))
    assert not torch.allclose(mixture, union)


# ---- transforms: each is right, or raises


def _dense(q: torch.Tensor) -> torch.Tensor:
    return attention(q, q + 1, q - 1, torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril())[0]


def _ours(q: torch.Tensor) -> torch.Tensor:
    return rw.attention(q, q + 1, q - 1, rw.Causal())


def test_axes_of_vmap() -> None:
    """Mapped dimensions in other places, and one map inside of another."""
    (q,) = tensors((2, 2, 19, 8), dtype=torch.float64)
    for transform in (
        lambda f: torch.vmap(f, in_dims=3, out_dims=1)(torch.stack([q, q + 1], 3)),
        lambda f: torch.vmap(torch.vmap(f))(q.expand(2, 3, *q.shape)),
    ):
        torch.testing.assert_close(transform(_ours), transform(_dense))


def _vmapped(call, *inputs, **options) -> None:  # type: ignore[no-untyped-def]
    """torch.vmap of a call gives the results of a loop over its elements."""
    wanted = torch.stack([call(*each) for each in zip(*inputs, strict=True)])
    torch.testing.assert_close(torch.vmap(call, **options)(*inputs), wanted)


def test_vmap_knows_batch_elements() -> None:
    x = Inputs.random(48, heads=4, kv_heads=2, batch=2)
    many, cache = torch.stack([x.q, x.q * 2, x.q - 1]), rw.PagedCache.empty(2, 64, 2, x.k.shape[3], page=16)
    cache.append(x.k, x.v)
    bias, seen = torch.randn(2, 4, 48, 48), torch.tensor([[20, 28], [3, 40], [48, 7]])
    by_element = rw.TokenMask(lambda b, h, q, k: k <= q - 5 * b)
    table = rw.patterns.random_blocks(48, 0.5, block_size=16, heads=4, batch=2)
    offset = torch.tensor([0, 9])
    _vmapped(lambda q: rw.attention(q, x.k, x.v, by_element), many)
    _vmapped(lambda q: rw.attention(q, x.k, x.v, table), many)
    _vmapped(lambda q: rw.attention(q, x.k, x.v, rw.Causal(), terms=rw.Bias(bias)), many)
    _vmapped(lambda q: rw.attention(q[:, :, :5], x.k, x.v, rw.Causal(), q_offset=offset), many)
    _vmapped(lambda q, stop: rw.attention(q, x.k, x.v, rw.KeyPadding(stop)), many, seen)
    _vmapped(lambda q, bias: rw.attention(q, x.k, x.v, terms=rw.Bias(bias)), many, torch.randn(3, 1, 4, 48, 48))
    _vmapped(lambda q: rw.paged_attention(q[:, :, -2:], cache), many)
    _vmapped(lambda q: rw.attention(q, x.k, x.v, precision=rw.Precision(kv=torch.int8)), many)
    _vmapped(torch.func.grad(lambda q: rw.attention(q, x.k, x.v, by_element).square().sum()), many)
    alike = many[:1].expand(2, -1, -1, -1, -1)
    for randomness in ("same", "different"):
        out = torch.vmap(lambda q: rw.attention(q, x.k, x.v, dropout=0.5), randomness=randomness)(alike)
        assert torch.equal(out[0], out[1]) == (randomness == "same")


@pytest.mark.parametrize("transform", ["jvp", "jacfwd", "dual", "compiled"])
def test_forward_mode_raises(transform: str) -> None:
    q, tangent = tensors((1, 2, 19, 8), (1, 2, 19, 8))

    def dual() -> torch.Tensor:
        with torch.autograd.forward_ad.dual_level():
            return _ours(torch.autograd.forward_ad.make_dual(q, tangent))

    def compiled() -> torch.Tensor:
        torch._dynamo.reset()
        step = torch.compile(lambda q: torch.func.jvp(_ours, (q,), (tangent,))[1], backend="eager")
        return step(q)

    calls = {
        "jvp": lambda: torch.func.jvp(_ours, (q,), (tangent,)),
        "jacfwd": lambda: torch.func.jacfwd(_ours)(q),
        "dual": dual,
        "compiled": compiled,
    }
    with pytest.raises(UnsupportedError, match="attention: got a forward-mode derivative; wanted reverse-mode"):
        calls[transform]()


def test_second_derivatives_raise() -> None:
    (q,) = tensors((1, 2, 19, 8))
    q.requires_grad_()
    (first,) = torch.autograd.grad(_ours(q).square().sum(), q, create_graph=True)
    for second in (
        lambda: torch.autograd.grad(first.sum(), q),
        lambda: torch.func.hessian(lambda q: _ours(q).sum())(q.detach()),
        lambda: torch.func.jacrev(torch.func.jacrev(lambda q: _ours(q).sum()))(q.detach()),
    ):
        with pytest.raises(UnsupportedError, match="attention: got a (second|forward-mode) derivative"):
            second()


def test_flop_counter() -> None:
    """The flop counter counts the products of computed tiles, whether the counter or the first call came first."""
    # both processes import the compiler, which a counted call needs, once
    code = """
import importlib, os, sys
import torch._dynamo
assert "torch.utils.flop_counter" not in sys.modules

def check(counted_first):
    if counted_first:
        importlib.import_module("torch.utils.flop_counter")
    import ringweave as rw
    q, k, v = (torch.randn(2, 4, 300, 32, requires_grad=True) for _ in range(3))
    if not counted_first:
        rw.attention(q, k, v)
    from torch.utils.flop_counter import FlopCounterMode

    def count(call):
        with FlopCounterMode(display=False) as counter:
            call().sum().backward()
        return counter.get_total_flops()

    # two products forward, five backward
    assert count(lambda: rw.attention(q, k, v)) == 7 * 2 * 32 * 2 * 4 * 300 * 300
    table = rw.patterns.random_blocks(300, 0.4, block_size=16, heads=4)
    for pattern in (rw.SlidingWindow(20), rw.Causal(), table, rw.LongNet([64], [2])):
        facts = rw.explain(pattern, 300, heads=4, batch=2, head_dim=32, as_dict=True)["flops"]
        assert count(lambda: rw.attention(q, k, v, pattern)) == facts["forward"] + facts["backward"], pattern

child = os.fork()
check(child == 0)
assert child == 0 or os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


def test_meta_tensors_have_the_shapes_of_results() -> None:
    q, k, v = (x.to("meta") for x in tensors(Q, K, K))
    assert rw.attention(q, k, v, rw.Causal(), q_offset="end").shape == Q


# ---- torch.library and torch.compile


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["sinks", "table_per_head", "longnet", "causal", "window_and_dilated"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(name: str, dtype: torch.dtype) -> None:
    pattern = (PATTERNS | MIXTURES)[name](150)
    leaves = Inputs.random(150, heads=4, kv_heads=2, dtype=dtype).leaves()
    call = Call.of(*leaves, pattern, scale=0.25)
    torch.library.opcheck(attention_op, (*leaves, pattern.tables, call.text, *call.numbers))


def test_a_compiled_call_asks_for_no_device_with_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled call does not query a device for autocast: torch 2.11 would break the graph there."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch.amp, "is_autocast_available", lambda device: pytest.fail(device))
    x = Inputs.random(20)
    step = torch.compile(lambda q: rw.attention(q, x.k, x.v, rw.Causal()), fullgraph=True, backend="eager")
    torch.testing.assert_close(step(x.q), rw.attention(x.q, x.k, x.v, rw.Causal()))


@pytest.mark.parametrize("backend", ["auto", "dense_batched", "reference"])
def test_compiles_in_one_graph(backend: str) -> None:
    torch._dynamo.reset()
    x = Inputs.random(100, heads=4, kv_heads=2)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(q, k, v, pattern):  # type: ignore[no-untyped-def]
        return rw.attention(q * 1.5, k, v, pattern, backend=backend).sin()

    # one compiled function with several patterns never returns a result of another pattern; each compiles
    patterns = rw.Causal(), rw.SlidingWindow(9), rw.SlidingWindow(30), rw.SlidingWindow(9) | rw.Sinks(2)
    for pattern in patterns if backend == "auto" else patterns[1:3]:
        compiled, eager = x.leaves(), x.leaves()
        got = step(*compiled, pattern)
        want = rw.attention(eager[0] * 1.5, eager[1], eager[2], pattern, backend=backend).sin()
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(
            torch.autograd.grad((got * x.dout).sum(), compiled), torch.autograd.grad((want * x.dout).sum(), eager)
        )


def test_compiles_patterns_made_inside_and_longnet_and_merge() -> None:
    torch._dynamo.reset()
    x = Inputs.random(100, heads=4)

    def step(q, k, v):  # type: ignore[no-untyped-def]
        near = rw.attention_with_lse(q, k, v, (rw.SlidingWindow(9) | rw.Sinks(3)) & rw.Causal())
        far = rw.attention_with_lse(q, k, v, rw.PrefixLM(5))
        return rw.merge([near.out, far.out], [near.lse, far.lse]).out + rw.longnet_attention(
            q, k, v, segments=[20, 40], rates=[1, 4]
        )

    def detached(q, k, v):  # type: ignore[no-untyped-def]
        return rw.longnet_attention(q, k, v, segments=[20, 40], rates=[1, 4], detach_weights=True)

    torch.testing.assert_close(
        torch.compile(detached, fullgraph=True, backend="aot_eager")(x.q, x.k, x.v), detached(x.q, x.k, x.v)
    )

    got = torch.compile(step, fullgraph=True, backend="aot_eager")(x.q, x.k, x.v)
    torch.testing.assert_close(got, step(x.q, x.k, x.v))


@pytest.mark.parametrize(("density", "lists"), [(0.6, False), (0.1, True)])
def test_a_new_table_of_the_same_shape_recompiles_nothing(density: float, lists: bool) -> None:
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter = CompileCounter()
    x = Inputs.random(256, heads=4)
    step = torch.compile(lambda q, k, v, p: rw.attention(q, k, v, p), fullgraph=True, backend=counter)
    for seed in range(4):
        table = rw.patterns.random_blocks(256, density, block_size=16, seed=seed) & rw.Causal()
        assert ("key_blocks" in table.spec) == lists
        torch.testing.assert_close(step(x.q, x.k, x.v, table), rw.attention(x.q, x.k, x.v, table))
    assert counter.frame_count == 1


def test_inductor() -> None:
    torch._dynamo.reset()
    x = Inputs.random(64, heads=2)
    step = torch.compile(lambda q, k, v: rw.attention(q + 1, k, v, rw.SlidingWindow(9)) * 2, fullgraph=True)
    torch.testing.assert_close(step(x.q, x.k, x.v), rw.attention(x.q + 1, x.k, x.v, rw.SlidingWindow(9)) * 2)


def test_weights() -> None:
    for name in ("sinks", "per_head", "documents", "table_per_head", "nothing"):
        x = Inputs.random(150, heads=4, kv_heads=2, dtype=torch.float64)
        pattern = PATTERNS[name](150)
        weights = rw.attention_weights(x.q, x.k, pattern)
        dense = weights.to_dense()
        v = x.v.repeat_interleave(2, 1)
        torch.testing.assert_close(dense @ v, rw.attention(x.q, x.k, x.v, pattern, backend="reference"))
        assert (dense[~pattern.to_dense(150, heads=4)] == 0).all()
        assert weights.values.shape[0] == weights.plan.tiles


def test_weights_of_rows_that_attend_a_broken_key() -> None:
    """They are NaN where the row attends, as its output is, and 0 elsewhere; other rows keep their bits."""
    x = Inputs.random(100)
    pattern = rw.SlidingWindow(9) & rw.Causal()
    allowed, sound = pattern.to_dense(100), rw.attention_weights(x.q, x.k, pattern).to_dense()
    for broken in (torch.nan, torch.inf):
        k = x.k.abs()
        k[:, :, 50] = broken
        dense = rw.attention_weights(x.q.abs(), k, pattern).to_dense()
        assert dense[:, :, 50:60].isnan().equal(allowed[:, :, 50:60].expand_as(dense[:, :, 50:60]))
        assert (dense[~allowed.expand_as(dense)] == 0).all()
        k = x.k.clone()
        k[:, :, 50] = broken
        dense = rw.attention_weights(x.q, k, pattern).to_dense()
        assert torch.equal(dense[:, :, :50], sound[:, :, :50])
        assert torch.equal(dense[:, :, 60:], sound[:, :, 60:])


def test_weights_of_rows_longer_than_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    x = Inputs.random(300)
    results = []
    for budget in (None, 1):
        if budget is not None:
            monkeypatch.setattr("ringweave.chunks._BUDGET", budget)
        q, k = x.q.clone().requires_grad_(), x.k.clone().requires_grad_()
        values = rw.attention_weights(q, k, rw.Causal()).values
        results.append((values, *torch.autograd.grad(values.square().sum(), (q, k))))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_weights_without_tiles_have_gradients() -> None:
    x = Inputs.random(40)
    q = x.q.clone().requires_grad_()
    weights = rw.attention_weights(q, x.k, ~rw.Full())
    assert weights.values.shape[0] == 0
    assert not torch.autograd.grad(weights.values.sum(), q)[0].any()
    assert not weights.to_dense().any()


def test_weights_in_compiled_code() -> None:
    x = Inputs.random(40)

    def plain(q: torch.Tensor) -> torch.Tensor:
        return rw.attention_weights(q, x.k, rw.Causal()).values + 1

    results = []
    for call in (plain, torch.compile(plain, backend="aot_eager")):
        q = x.q.clone().requires_grad_()
        out = call(q)
        results.append((out, *torch.autograd.grad(out.square().sum(), q)))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize(
    "make",
    [
        lambda: rw.SlidingWindow(5) & rw.Causal() | rw.Sinks([4, 9]) | rw.Sinks([7]),
        lambda: rw.Dilated(3, 4) | rw.PrefixLM(3),
        lambda: rw.PerHead([rw.Causal(), rw.patterns.Periodic(5, 1, 2)]),
        lambda: rw.LongNet([16, 32], [1, 2], causal=True),
    ],
)
def test_patterns_are_made_inside_compiled_functions(make) -> None:  # type: ignore[no-untyped-def]
    q = torch.randn(1, 2, 64, 16)
    torch._dynamo.reset()
    compiled = torch.compile(lambda q: rw.attention(q, q, q, make()), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(q), rw.attention(q, q, q, make()))


#: Wrong values of arguments, in the order in which a call checks its arguments, and the name in the error.
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "tensors": ({"v": torch.zeros(1, 2, 7, 8)}, "v: got shape"),
    "pattern": ({"pattern": "Causal()"}, "pattern"),
    "position": ({"q_offset": -1}, "q_offset"),
    "dropout": ({"dropout": 2.0}, "dropout"),
    "terms": ({"terms": ["no term"]}, "terms"),
    "context": ({"context": object()}, "context"),
    "scale": ({"scale": "1"}, "scale"),
    "backend": ({"backend": "no such"}, "backend"),
    "sinks": ({"sink_logits": torch.zeros(3)}, "sink_logits"),
    "precision": ({"precision": rw.Precision(kv=torch.int8), "dropout": 0.5}, "precision.kv"),
}


@pytest.mark.parametrize("first", range(len(WRONG)))
def test_the_first_wrong_argument_is_named(first: int) -> None:
    """A call with several wrong arguments names the one that it checks first."""
    q, k = torch.zeros(1, 2, 8, 8), torch.zeros(1, 2, 8, 8)
    given: dict[str, Any] = {"v": torch.zeros(1, 2, 8, 8), "pattern": rw.Causal()}
    for values, _ in reversed(list(WRONG.values())[first:]):
        given |= values
    name = list(WRONG.values())[first][1]
    with pytest.raises(rw.RingweaveError, match=rf"^{re.escape(name)}") as caught:
        rw.attention(q, k, given.pop("v"), given.pop("pattern"), **given)
    assert caught.value.__class__ in (rw.ShapeError, rw.PatternError, rw.UnsupportedError)
