"""Score terms, sinks and dropout equal their formulas, written here again for dense float64 tensors."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

import ringweave as rw
from ringweave import terms as declarations
from ringweave.backends import BACKENDS, cpu, flex
from ringweave.call import Call, Operands
from ringweave.program import Program, compiled
from ringweave.terms import Term
from ringweave.terms.term import terms_of, written

from .cases import PATTERNS, TREES
from .dropped import kept, next_seed
from .fuzz import score_terms
from .fuzz.sizes import Sizes
from .oracle import Inputs, attention, check_errors, errors, results
from .term_oracles import ORACLES

ABLE = ["reference", "dense_batched", "cpu"]
HEADS = 4


def made(kind: type[Term], n: int, dtype: torch.dtype, g: torch.Generator, *, shared: bool = False) -> Term:
    """Return a term of a kind with its oracle's numbers, and tables for n queries and keys that learn if the kind's do."""
    sizes = {"batch": 2, "heads": HEADS, "distance": 23, "queries": n, "keys": n}
    tables = []
    for name, axes in kind.axes.items():
        shape = [1 if shared and axis.shared else sizes[axis.along] for axis in axes if not (shared and axis.optional)]
        table = torch.randn(shape, generator=g) if name in kind.learns else torch.rand(shape, generator=g)
        table = table.to(dtype) if kind.places else table
        tables.append(table.requires_grad_(name in kind.learns))
    return kind(*ORACLES[kind.__name__].some, *tables)


#: A term's constructor and formula, by the kernel's name of its kind.
KINDS = {
    kind.kernel: (functools.partial(made, kind), ORACLES[name].formula) for name, kind in declarations.KINDS.items()
}
KINDS |= {
    f"shared_{kind.kernel}": (functools.partial(made, kind, shared=True), ORACLES[name].formula)
    for name, kind in declarations.KINDS.items()
    if any(axis.shared or axis.optional for axes in kind.axes.values() for axis in axes)
}  # fmt: skip


def dense(
    x: Inputs,
    pattern: rw.Pattern | Tensor,
    names: Sequence[str],
    terms: Sequence[Term],
    dtype: torch.dtype,
    *,
    sinks: Tensor | None = None,
    keep: Tensor | None = None,
    q_offset: int | Tensor = 0,
    order: int = 0,
    most: float = torch.inf,
) -> dict[str, Tensor]:
    """Compute the formula in one dtype, with the gradients of every learned tensor; scores above ``most`` become infinite.

    ``pattern`` may be the allowed pairs, and ``q_offset`` (B,) the first query's position less the first key's.
    """
    leaves, nq, nk = x.leaves(dtype), x.q.shape[2], x.k.shape[2]
    q, k, v = leaves
    tables = [table.detach().to(dtype).requires_grad_() for term in terms for table in term.tables]
    learned = {f"table {i}": table for i, table in enumerate(tables)}
    if sinks is not None:
        learned["sinks"] = sinks = sinks.detach().to(dtype).requires_grad_()
    distance = torch.arange(nk) - torch.arange(nq)[:, None] - torch.as_tensor(q_offset).view(-1, 1, 1, 1)
    scores = q

    def scored(t: Tensor) -> Tensor:
        nonlocal scores
        rest = iter(tables)
        for name, term in zip(names, terms, strict=True):
            t = KINDS[name][1](t, term.numbers, next(rest) if term.tables else t, distance)
        scores = torch.where(t.abs() > most, t.sign() * torch.inf, t)
        return scores

    def weigh(exponentials: Tensor, total: Tensor) -> Tensor:
        return exponentials / total * (1.0 if keep is None else keep.to(total.dtype))

    if isinstance(pattern, Tensor):
        allowed = pattern
    else:
        allowed = pattern.to_dense(nq, nk, q.shape[1], batch=q.shape[0], q_offset=q_offset)
    channels = torch.arange(q.shape[3]).roll(order)
    out, lse = attention(q[..., channels], k[..., channels], v, allowed, sinks=sinks, scored=scored, weigh=weigh)
    sizes = {}
    if tables or sinks is not None:
        # the summands of exponents, each with as many units of error as it is large
        alive = lse.masked_fill(torch.isneginf(lse), 0.0)[..., None]
        of_row = x.dlse.abs() + (x.dout.to(dtype) * out).abs().sum(-1)
        of_weights = (x.dout.to(dtype) @ v.repeat_interleave(q.shape[1] // v.shape[1], 1).mT).abs()
        addends = torch.exp(scores.masked_fill(~allowed, -torch.inf) - alive) * (of_weights + of_row[..., None])
        addends = addends * (1 + scores.masked_fill(~allowed, 0.0).abs() + alive.abs())
        if tables:
            found = torch.autograd.grad(scores, tables, addends.detach().to(scores.dtype), retain_graph=True)
            sizes = {f"sizes of table {i}": size for i, size in enumerate(found)}
        if sinks is not None:
            # the summands of its sum, which cancel
            sizes["sizes of sinks"] = (of_row * (sinks[:, None] - lse).exp()).sum((0, 2))
    return {name: y.detach().double() for name, y in (results(out, lse, x, leaves, **learned) | sizes).items()}


def ours(
    x: Inputs, pattern: rw.Pattern, terms: Sequence[Term], backend: str, *, sinks: Tensor | None = None, **options: Any
) -> dict[str, Tensor]:
    leaves, tables = x.leaves(), [table for term in terms for table in term.tables]
    learned = {f"table {i}": table for i, table in enumerate(tables) if table.requires_grad}
    if sinks is not None:
        learned["sinks"] = sinks = sinks.detach().requires_grad_()
    out, lse = rw.attention_with_lse(*leaves, pattern, terms=terms, sink_logits=sinks, backend=backend, **options)
    return {name: y.double() for name, y in results(out, lse, x, leaves, **learned).items()}


def check(got: dict[str, Tensor], formula: Callable[[torch.dtype, int], dict[str, Tensor]], dtype: torch.dtype) -> None:
    """Check that errors are within twice those of the formula in the dtype's own arithmetic, or a few units.

    That arithmetic adds the channels of a score in some orders.
    """
    wanted, floor = formula(torch.float64, 0), {}
    for name in got:
        floor[name] = 4 * torch.finfo(dtype).eps
        if f"sizes of {name}" in wanted:
            # tables and logits are float32, and so are their sums
            most = float(wanted[f"sizes of {name}"].norm() / wanted[name].norm().clamp(min=1e-30))
            floor[name] = torch.finfo(torch.float32).eps * max(4.0, most)
    plain = (formula(dtype, order) for order in (0, 3, 7, 12))
    check_errors(got, wanted, (errors({name: each[name] for name in got}, wanted) for each in plain), floor)


def make(names: Sequence[str], n: int, dtype: torch.dtype) -> list[Term]:
    generator = torch.Generator().manual_seed(7)
    return [KINDS[name][0](n, dtype, generator) for name in names]


def constant(terms: Sequence[Term]) -> list[Term]:
    """Return terms with tables that require no gradients."""
    return [term.over(*(table.detach() for table in term.tables)) for term in terms]


def inputs(n: int, dtype: torch.dtype = torch.float32, kv_heads: int = 2, **sizes: int) -> Inputs:
    return Inputs.random(n, batch=2, heads=HEADS, kv_heads=kv_heads, dim=16, value_dim=24, dtype=dtype, **sizes)


def runs(backend: str, dtype: torch.dtype) -> None:
    if backend == "cpu" and dtype == torch.float64:
        pytest.skip("the native kernel computes up to 32 bits")


PAIRS = [("softcap", "distance"), ("distance", "softcap"), ("alibi", "bias"), ("shared_bias", "softcap")]


@functools.lru_cache(maxsize=1)
def defined(name: str, names: tuple[str, ...], n: int, dtype: torch.dtype, sinks: bool = False) -> tuple[Any, ...]:
    """Return inputs, a pattern, terms, logits and the formula, which is computed once for all backends in turn."""
    x, terms = inputs(n, dtype), make(names, n, dtype)
    pattern = PATTERNS[name](n) if name in PATTERNS else (rw.SlidingWindow(40) | rw.Sinks(3)) & rw.Causal()
    logits = torch.randn(HEADS, generator=torch.Generator().manual_seed(0)) if sinks else None

    @functools.cache
    def formula(kind: torch.dtype, order: int) -> dict[str, Tensor]:
        return dense(x, pattern, names, terms, kind, sinks=logits, order=order)

    return x, pattern, terms, logits, formula


@pytest.mark.parametrize("backend", ABLE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("names", [(name,) for name in KINDS] + PAIRS, ids="-".join)
def test_formula(names: tuple[str, ...], dtype: torch.dtype, backend: str) -> None:
    runs(backend, dtype)
    x, pattern, terms, _, formula = defined("a window and sinks", names, 150, dtype)
    check(ours(x, pattern, terms, backend), formula, dtype)


def drawn() -> list[tuple[tuple[str, str], str, torch.dtype, int]]:
    """Draw every ordered pair of terms once, each with a pattern, a dtype and a number of key heads."""
    # lists of chosen keys have tests of their own with terms, in backends/test_selected.py, and comparisons of a traced
    # mask are zones, as documents are
    patterns = sorted(name for name in {*PATTERNS} - TREES if not name.startswith(("selected", "compared")))
    types = [torch.float32, torch.bfloat16, torch.float16]
    pairs = itertools.product(KINDS, KINDS)
    return [
        (pair, patterns[7 * i % len(patterns)], types[i % 3], (4, 2, 1)[i // 3 % 3]) for i, pair in enumerate(pairs)
    ]


@pytest.mark.parametrize(("names", "pattern", "dtype", "kv_heads"), drawn(), ids=str)
def test_pairs_of_terms(names: tuple[str, str], pattern: str, dtype: torch.dtype, kv_heads: int) -> None:
    n = 61
    x, terms, relation = inputs(n, dtype, kv_heads), make(names, n, dtype), PATTERNS[pattern](n)

    @functools.cache
    def formula(kind: torch.dtype, order: int) -> dict[str, Tensor]:
        return dense(x, relation, names, terms, kind, order=order)

    for backend in ("cpu", "dense_batched"):
        check(ours(x, relation, terms, backend), formula, dtype)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("backend", ABLE)
@pytest.mark.parametrize("name", sorted({*PATTERNS} - TREES))
def test_every_pattern(name: str, backend: str) -> None:
    x, pattern, terms, sinks, formula = defined(name, ("softcap", "distance", "bias"), 97, torch.float32, True)
    check(ours(x, pattern, terms, backend, sinks=sinks), formula, torch.float32)


@pytest.mark.parametrize("backend", ABLE)
@pytest.mark.parametrize("pattern", [rw.Causal(), rw.SlidingWindow(20) | rw.Dilated(8, 16)], ids=str)
def test_offset(backend: str, pattern: rw.Pattern) -> None:
    # positions count from the offset, a table's entries from 0
    x = Inputs.random(9, 60, batch=2, heads=HEADS, kv_heads=2)
    names = ("alibi", "distance")
    terms = make(names, 60, torch.float32)
    got = ours(x, pattern, terms, backend, q_offset=51)
    check(got, lambda kind, order: dense(x, pattern, names, terms, kind, q_offset=51, order=order), torch.float32)


@pytest.mark.parametrize("backend", ABLE)
@pytest.mark.parametrize("sizes", [(1, 60, 59), (40, 40, 0), (3, 40, 17)], ids=str)
def test_dropout_is_that_of_its_numbers(backend: str, sizes: tuple[int, int, int]) -> None:
    nq, nk, offset = sizes
    x = Inputs.random(nq, nk, batch=2, heads=HEADS, kv_heads=2)
    torch.manual_seed(3)
    keep = kept(next_seed(), 0.3, 2, HEADS, range(offset, offset + nq), range(nk))
    got = ours(x, rw.Causal(), [], backend, dropout=0.3, q_offset=offset)

    def formula(kind: torch.dtype, order: int) -> dict[str, Tensor]:
        return dense(x, rw.Causal(), (), [], kind, keep=keep, q_offset=offset, order=order)

    check(got, formula, torch.float32)
    # another call drops other pairs
    assert not torch.equal(ours(x, rw.Causal(), [], backend, dropout=0.3, q_offset=offset)["out"], got["out"])


@pytest.mark.parametrize("backend", ["reference", "dense_batched"])
def test_dropout_of_float64_is_exact(backend: str) -> None:
    x = inputs(20, torch.float64)
    torch.manual_seed(3)
    keep = kept(next_seed(), 0.1, 2, HEADS, range(20), range(20))
    got = ours(x, rw.Causal(), [], backend, dropout=0.1)
    check(got, lambda kind, order: dense(x, rw.Causal(), (), [], kind, keep=keep, order=order), torch.float64)


@pytest.mark.parametrize("tile", [16, 32, 128])
def test_dropout_does_not_depend_on_tiles_or_branches(tile: int) -> None:
    from ringweave.backends import dense_batched
    from ringweave.plan import Branch

    n, pattern = 300, rw.SlidingWindow(20) | rw.Dilated(8, 16)
    x = Inputs.random(n, heads=HEADS)
    call = Call.of(x.q, x.k, x.v, pattern, scale=0.25, dropout=2**14)
    record = Operands.of(call, x.q, x.k, x.v, [*pattern.tables, torch.tensor(77)])

    def by(name: str) -> tuple[Tensor, Tensor]:
        return Program(dataclasses.replace(call, backend=name)).forward(record)

    whole = Branch(pattern, (0, HEADS, 1), 1, 0, 0, n, n, 0, 1, tile_size=(tile, tile))
    alone = dense_batched.forward(record, whole, torch.float32)
    for got, wanted in zip(alone, by("reference"), strict=True):
        torch.testing.assert_close(got, wanted)
    # also in strided views
    for got, wanted in zip(by("dense_batched"), alone, strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("backend", ABLE)
@pytest.mark.parametrize("p", [0.1, 0.5, 1 / 65536])
def test_drop_rate(backend: str, p: float) -> None:
    n = 512
    q = k = torch.zeros(1, 1, n, 16)
    v = torch.eye(n)[None, None, :, :256]  # the remaining weights of 256 keys
    out = rw.attention(q, k, v, dropout=p, backend=backend)
    dropped = (out == 0).double().mean()
    count = out.numel()
    assert abs(dropped - p) <= 4 * (p * (1 - p) / count) ** 0.5
    torch.testing.assert_close(out[out != 0], torch.full_like(out[out != 0], 1 / n / (1 - p)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", ["auto", *ABLE])
def test_sinks(backend: str, dtype: torch.dtype) -> None:
    x, sinks = inputs(70, dtype), torch.tensor([0.5, -3.0, 9.0, -torch.inf])
    pattern = rw.Causal() & ~rw.Segments(20)  # the first rows attend nothing
    got = ours(x, pattern, [], backend, sinks=sinks)
    finite = slice(0, 3)
    # a logit of -inf is no sink
    plain = ours(x, pattern, [], backend)
    assert torch.equal(got["out"][:, 3], plain["out"][:, 3])
    assert torch.equal(got["lse"][:, 3], plain["lse"][:, 3])
    assert not any(value.isnan().any() for value in got.values())
    assert torch.equal(got["lse"][:, finite, :20], sinks[finite, None].double().expand(2, 3, 20))

    def of_finite(result: dict[str, Tensor]) -> dict[str, Tensor]:
        for name in {"sinks", "sizes of sinks"} & result.keys():
            result[name] = result[name][finite]
        result["lse"] = result["lse"][:, finite]
        for name in ("dk", "dv"):
            result[name] = result[name][:, :1]
        for name in ("out", "dq"):
            result[name] = result[name][:, finite]
        return result

    def formula(kind: torch.dtype, order: int) -> dict[str, Tensor]:
        return of_finite(dense(x, pattern, (), [], kind, sinks=sinks, order=order))

    check(of_finite(got), formula, dtype)


@pytest.mark.parametrize("backend", ABLE)
def test_bias_of_minus_infinity_leaves_pairs_out(backend: str) -> None:
    x, n = inputs(70), 70
    table = torch.zeros(1, 1, n, n).masked_fill_(torch.ones(n, n).triu(1).bool(), -torch.inf)
    table[..., 5, :] = -torch.inf
    got = ours(x, rw.Full(), [rw.Bias(table)], backend)
    causal = ours(x, rw.Causal(), [], backend)
    assert got["lse"][:, :, 5].isneginf().all()
    assert not got["out"][:, :, 5].any()
    others = [i for i in range(n) if i != 5]
    torch.testing.assert_close(got["out"][:, :, others], causal["out"][:, :, others])


@pytest.mark.parametrize("backend", ABLE)
@pytest.mark.parametrize("size", [2e19, torch.inf])
def test_scores_out_of_range_are_told_whatever_the_terms(backend: str, size: float) -> None:
    # a cap would hide an error before it
    x = inputs(70)
    x.q[:, :, 40] = size
    x.k[:, :, 12] = size
    plain = ours(x, rw.Causal(), [], backend)
    got = ours(x, rw.Causal(), [rw.Softcap(30.0)], backend)
    assert plain["out"][:, :, 40].isnan().all()
    assert torch.equal(got["out"].isnan(), plain["out"].isnan())


@pytest.mark.parametrize("backend", ABLE)
def test_what_lies_past_the_last_query_has_no_gradient(backend: str) -> None:
    # in a full tile, where all scores would be out of range
    x, terms = inputs(5), [rw.ALiBi([-5.0] * HEADS)]
    pattern = rw.BlockTable(torch.ones(1, 1, dtype=torch.bool), 64)
    got = ours(x, pattern, terms, backend)
    check(got, lambda kind, order: dense(x, pattern, ["alibi"], terms, kind, order=order), torch.float32)


def test_tables_of_any_layout() -> None:
    n, x = 50, inputs(50)
    table = torch.randn(n, HEADS, n, 2).permute(3, 1, 2, 0)[:1].requires_grad_()
    got = ours(x, rw.Causal(), [rw.Bias(table)], "dense_batched")
    again = table.detach().contiguous().requires_grad_()
    wanted = ours(x, rw.Causal(), [rw.Bias(again)], "dense_batched")
    for name, value in got.items():
        torch.testing.assert_close(value, wanted[name], msg=name)


def test_buckets_are_those_of_t5() -> None:
    def bucket(distance: int, both: bool, buckets: int, far: int) -> int:
        # Raffel et al., as in their code: half of the buckets exact, the rest logarithmic up to `far`
        found = 0
        if both:
            buckets //= 2
            found += buckets if distance > 0 else 0
            distance = abs(distance)
        else:
            distance = max(-distance, 0)
        exact = buckets // 2
        if distance < exact:
            return found + distance
        share = torch.log(torch.tensor(float(distance)) / exact) / np.log(far / exact)
        return found + min(exact + int(share * (buckets - exact)), buckets - 1)

    for both, buckets, far in itertools.product([True, False], [32, 16], [128, 40]):
        weight = torch.arange(float(buckets))[:, None].repeat(1, 3)
        table = rw.DistanceBias.from_buckets(weight, max_distance=far, bidirectional=both).table
        reach = table.shape[1] // 2
        for distance in range(-3 * far, 3 * far + 1):
            at = min(max(distance, -reach), reach) + reach
            assert table[1, at] == bucket(distance, both, buckets, far), (distance, both, buckets, far)


def test_buckets_learn() -> None:
    weight = torch.randn(32, HEADS, requires_grad=True)
    x = inputs(60)
    rw.attention(x.q, x.k, x.v, terms=rw.DistanceBias.from_buckets(weight)).square().sum().backward()
    assert weight.grad is not None
    assert weight.grad.abs().sum() > 0


def test_buckets_of_few_bits_learn_as_of_many() -> None:
    x = inputs(60)
    weight, grads = torch.randn(32, HEADS).bfloat16(), []
    for dtype in (torch.bfloat16, torch.float32):
        leaf = weight.to(dtype).requires_grad_()
        out = rw.attention(x.q, x.k, x.v, terms=rw.DistanceBias.from_buckets(leaf), backend="dense_batched")
        grads += torch.autograd.grad(out.square().sum(), leaf)
    assert torch.equal(grads[0], grads[1].bfloat16())


def test_alibi_of_the_paper() -> None:
    assert rw.ALiBi.of_heads(8).slopes.tolist() == [2.0**-i for i in range(1, 9)]
    # twelve heads: the slopes of eight, then every other one of sixteen
    wanted = [2.0**-i for i in range(1, 9)] + [2 ** -(i / 2) for i in (1, 3, 5, 7)]
    torch.testing.assert_close(rw.ALiBi.of_heads(12).slopes, torch.tensor(wanted))


def test_slopes_of_keys_in_a_graph() -> None:
    """A graph computes with the slopes that it is given, one for each head or for each head and key."""
    x = inputs(96)
    torch._dynamo.reset()

    def call(q: Tensor, slopes: Tensor) -> Tensor:
        return rw.attention(q, x.k, x.v, rw.Causal(), terms=rw.ALiBi(slopes))

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    program = torch.export.export(_Called(call), (x.q, torch.rand(HEADS, 96))).module()
    for shape in ((HEADS, 96), (HEADS,), (HEADS, 96)):
        slopes, q = torch.rand(shape), x.q.clone().requires_grad_()
        got, want = compiled(q, slopes), call(q, slopes)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(*(torch.autograd.grad(out.square().sum(), q) for out in (got, want)))
        if len(shape) == 2:
            torch.testing.assert_close(program(x.q, slopes), want)
    many = torch.func.vmap(call, in_dims=(0, None))(torch.stack([x.q, -x.q]), slopes)
    torch.testing.assert_close(many, torch.stack([call(x.q, slopes), call(-x.q, slopes)]))


class _Called(torch.nn.Module):
    def __init__(self, call: Callable[..., Tensor]):
        super().__init__()
        self.call = call

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.call(*inputs)


@pytest.mark.parametrize("backend", ABLE)
def test_alibi_far_from_the_start(backend: str) -> None:
    n, far = 64, 2**16
    x = Inputs.random(8, n, heads=HEADS, dtype=torch.bfloat16)
    terms = [rw.ALiBi.of_heads(HEADS)]
    # every distance is large; only differences matter
    got = rw.attention(x.q, x.k, x.v, terms=terms, q_offset=far, backend=backend)
    near = rw.attention(x.q, x.k, x.v, terms=terms, q_offset=n, backend=backend)
    torch.testing.assert_close(got, near, rtol=2e-2, atol=2e-2)


def test_alibi_costs_no_accuracy_at_65536_tokens() -> None:
    """For bfloat16 inputs of 65,536 tokens ALiBi stays accurate, since distances are computed in float32."""
    n, rows = 2**16, 4
    x = Inputs.random(rows, n, heads=HEADS, dim=64, dtype=torch.bfloat16)
    slopes = torch.tensor([2.0**-4, 2.0**-8, 2.0**-12, 2.0**-16])
    distance = (torch.arange(n)[None] - torch.arange(n - rows, n)[:, None]).abs()
    allowed = rw.Causal().to_dense(rows, n, q_offset=n - rows)
    backends, found = ["dense_batched"] + ["cpu"] * (cpu.module() is not None), list[list[float]]()
    for terms in ([], [rw.ALiBi(slopes)]):
        far = slopes.double()[:, None, None] * distance if terms else 0.0
        want, _ = attention(x.q.double(), x.k.double(), x.v.double(), allowed, scored=lambda t, far=far: t - far)
        given = {"terms": terms, "q_offset": n - rows}
        gots = [rw.attention(x.q, x.k, x.v, rw.Causal(), backend=backend, **given) for backend in backends]
        found.append([errors({"out": got}, {"out": want})["out"] for got in gots])
    for backend, without, with_terms in zip(backends, *found, strict=True):
        assert with_terms <= 1.5 * without, backend


def test_terms_compile_without_breaks_and_once() -> None:
    x = inputs(96)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter)
    def call(q: Tensor, table: Tensor, sinks: Tensor) -> Tensor:
        terms = [rw.Softcap(5.0), rw.DistanceBias(table)]
        return rw.attention(q, x.k, x.v, rw.Causal(), terms=terms, sink_logits=sinks)

    for seed in range(3):
        torch.manual_seed(seed)
        q, table, sinks = x.q.clone().requires_grad_(), torch.randn(HEADS, 9, requires_grad=True), torch.randn(HEADS)
        out = call(q, table, sinks)
        terms = [rw.Softcap(5.0), rw.DistanceBias(table)]
        wanted = rw.attention(q, x.k, x.v, rw.Causal(), terms=terms, sink_logits=sinks)
        torch.testing.assert_close(out, wanted)
        got = torch.autograd.grad(out.square().sum(), [q, table])
        for one, other in zip(got, torch.autograd.grad(wanted.square().sum(), [q, table]), strict=True):
            torch.testing.assert_close(one, other)
    assert counter.frame_count == 1


def test_dropout_compiled_draws_anew() -> None:
    x = inputs(64)
    torch._dynamo.reset()
    call = torch.compile(lambda q: rw.attention(q, x.k, x.v, dropout=0.5), fullgraph=True, backend="aot_eager")
    torch.manual_seed(1)
    first, second = call(x.q), call(x.q)
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    assert torch.equal(call(x.q), first)


def test_transforms() -> None:
    x = Inputs.random(40, heads=HEADS)
    table = torch.randn(HEADS, 9)

    def loss(q: Tensor, table: Tensor) -> Tensor:
        return rw.attention(q, x.k, x.v, rw.Causal(), terms=[rw.Softcap(3.0), rw.DistanceBias(table)]).square().sum()

    got = torch.func.grad(loss, argnums=(0, 1))(x.q, table)
    leaves = [y.clone().requires_grad_() for y in (x.q, table)]
    for one, other in zip(got, torch.autograd.grad(loss(*leaves), leaves), strict=True):
        torch.testing.assert_close(one, other)
    many = torch.stack([x.q, 2 * x.q])
    each = torch.func.vmap(torch.func.grad(loss), in_dims=(0, None))(many, table)
    for one, q in zip(each, many, strict=True):
        torch.testing.assert_close(one, torch.func.grad(loss)(q, table))
    each = torch.func.vmap(torch.func.grad(loss, argnums=1), in_dims=(0, None))(many, table)
    for one, q in zip(each, many, strict=True):
        torch.testing.assert_close(one, torch.func.grad(loss, argnums=1)(q, table))
    with pytest.raises(rw.UnsupportedError, match="forward-mode"):
        torch.func.jvp(lambda table: loss(x.q, table), (table,), (table,))


def test_numbers_that_a_trace_leaves_open() -> None:
    x = Inputs.random(40, heads=HEADS)

    class Capped(torch.nn.Module):
        cap = 3.0

        def forward(self, q: Tensor, kept: rw.Softcap) -> Tensor:
            return rw.attention(q, x.k, x.v, rw.Causal(), terms=[rw.Softcap(self.cap), kept])

    layer, kept = Capped(), rw.Softcap(2.0)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="eager", dynamic=True)
    torch.testing.assert_close(compiled(x.q, kept), layer(x.q, kept))


def test_a_drop_rate_that_a_trace_leaves_open() -> None:
    """A compiled module may have another dropout rate at each call."""
    x = Inputs.random(40, heads=HEADS)

    class Dropping(torch.nn.Module):
        rate = 0.25

        def forward(self, q: Tensor) -> Tensor:
            return rw.attention(q, x.k, x.v, rw.Causal(), dropout=self.rate)

    layer = Dropping()
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(layer, fullgraph=True, backend=counter, dynamic=True)
    for layer.rate in (0.25, 0.5, 0.0, 0.1):
        found = []
        for call in (compiled, layer):
            torch.manual_seed(3)
            found.append(call(x.q))
        assert torch.equal(*found)
    # one graph with dropout, one without
    assert counter.frame_count == 2


def test_gradcheck() -> None:
    x = Inputs.random(5, batch=2, heads=2, kv_heads=1, dim=4, dtype=torch.float64)
    tables = [torch.randn(2, 5).double(), torch.randn(1, 2, 5, 5).double(), torch.randn(2).double()]
    leaves = [y.requires_grad_() for y in (x.q, x.k, x.v, *tables)]

    def call(q: Tensor, k: Tensor, v: Tensor, distance: Tensor, bias: Tensor, sinks: Tensor) -> tuple[Tensor, ...]:
        terms = [rw.DistanceBias(distance), rw.Softcap(2.0), rw.Bias(bias)]
        return rw.attention_with_lse(q, k, v, rw.Causal(), terms=terms, sink_logits=sinks, backend="dense_batched")

    assert torch.autograd.gradcheck(call, leaves)


def test_records() -> None:
    assert rw.Softcap(30) == rw.Softcap(30.0)
    assert hash(rw.Softcap(30)) == hash(rw.Softcap(30.0))
    again = pickle.loads(pickle.dumps(rw.DistanceBias(torch.ones(2, 3))))
    assert torch.equal(again.table, torch.ones(2, 3))


def test_every_kind_is_everywhere() -> None:
    """Each of these places knows every kind of ringweave.terms."""
    kinds = set(declarations.KINDS)
    assert all(getattr(rw.terms, name) is kind for name, kind in declarations.KINDS.items())
    assert kinds == set(ORACLES)
    drawn = {score_terms._term(Random(i), Sizes(1, 2, 8, 8, 0), "float32").kind for i in range(400)}
    assert drawn == kinds | {"buckets"}
    assert len({kind.kernel for kind in declarations.KINDS.values()}) == len(kinds)


@pytest.mark.parametrize("name", list(BACKENDS))
def test_backends_name_what_they_compute(name: str) -> None:
    """Each backend declares the terms that it computes: all, all without dropout, or none; each kernel, those it has formulas for."""
    everything = frozenset(declarations.KINDS)
    lacking = BACKENDS[name].lacks(everything | {"dropout"}, "cpu")
    if name in {*ABLE, "gather", "triton"}:
        assert not lacking
    else:
        assert lacking == ({"dropout"} if name == "flex" else everything | {"dropout"})


def test_the_kernel_knows_every_kind() -> None:
    """The kernel's list contains every kind: a missing one would be refused or left to slower backends."""
    native = cpu.module()
    if native is not None:
        assert set(native.term_kinds()) == {kind.kernel for kind in declarations.KINDS.values()}


#: Numbers and table entries at the bounds of float32 and beyond.
HOSTILE = [0.0, 1e-300, -1e-39, 1e-37, 1.0, 1.0 + 1e-12, 1e30, -3e38, 1e39, -1e300, torch.inf, -torch.inf, torch.nan]


def agrees(term: Term, backend: str, formula: Callable[..., Tensor], dtype: torch.dtype, dim: int = 8) -> None:
    """A call with the term is right on a backend, or raises a typed error."""
    x = Inputs.random(24, batch=2, heads=HEADS, kv_heads=2, dim=dim, dtype=dtype)
    # a table is read in the dtype of sums
    tables = [t if dtype == torch.float64 else t.detach().float().requires_grad_(t.requires_grad) for t in term.tables]
    read = term.over(*tables) if tables else term
    try:
        got = ours(x, rw.Causal(), [term], backend)
    except rw.UnsupportedError:
        # the kernel computes in up to 32 bits
        return
    name = next(name for name, (_, known) in KINDS.items() if known is formula)
    if any(bool((x.abs() > 1e3).any()) for x in read.tables):
        # a float32 lse this large has no digits for the logarithm of the sum, which backward needs
        got = {each: got[each] for each in ("out", "lse")}
    most = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).max

    def told(found: dict[str, Tensor]) -> dict[str, Tensor]:
        # a row with a score out of range has an lse of NaN or infinity
        broken = found["lse"].isposinf() | found["out"].isnan().any(-1)
        return found | {"lse": found["lse"].masked_fill(broken, torch.nan)}

    def wanted(kind: torch.dtype, order: int) -> dict[str, Tensor]:
        # float16 cannot represent most of these numbers
        kind = torch.float32 if kind == torch.float16 else kind
        return told(dense(x, rw.Causal(), [name], [read], kind, order=order, most=most))

    check(told(got), wanted, dtype)


@pytest.mark.parametrize("backend", ABLE)
@pytest.mark.parametrize("name", list(declarations.KINDS))
def test_hostile_numbers(name: str, backend: str) -> None:
    """Each number of a term is refused when the term is made, or every backend computes with it."""
    kind, taken = declarations.KINDS[name], 0
    example = kind.example(2, HEADS, 24, 24, torch.Generator())
    for values in itertools.product(HOSTILE, repeat=len(example.numbers)) if example.numbers else ():
        try:
            term = kind(*values, *example.tables)
        except rw.ShapeError:
            continue
        taken += 1
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            agrees(term, backend, ORACLES[name].formula, dtype)
    assert taken or not example.numbers


@pytest.mark.parametrize("backend", ABLE)
@pytest.mark.parametrize("name", list(declarations.KINDS))
def test_hostile_tables(name: str, backend: str) -> None:
    """With one entry of a table, or all, at the bounds of float32, every backend gives the formula's results."""
    kind = declarations.KINDS[name]
    for at, value, (dtype, stored) in itertools.product(
        range(len(kind.axes)), [-1e-39, 1e30, -3e38, 1e39, torch.inf, -torch.inf, torch.nan],
        [(torch.float32, torch.float64), (torch.bfloat16, torch.bfloat16), (torch.float64, torch.float64)],
    ):  # fmt: skip
        for whole in (False, True):
            tables = list(made(kind, 24, torch.float32, torch.Generator().manual_seed(5)).tables)
            table = tables[at].detach().to(stored)
            (table if whole else table.view(-1)[1:2]).copy_(torch.tensor(value, dtype=torch.float64))
            tables[at] = table.requires_grad_([*kind.axes][at] in kind.learns)
            agrees(kind(*ORACLES[name].some, *tables), backend, ORACLES[name].formula, dtype)


def declared() -> type[Term]:
    """A kind unknown to the kernels: it adds a number, and a multiple of the score."""

    @dataclass(frozen=True)
    class Raised(Term):
        kernel: ClassVar[str] = "raised"

        by: float
        share: float

        @classmethod
        def example(cls, batch: int, heads: int, nq: int, nk: int, generator: torch.Generator) -> Term:
            return cls(1.0, 0.5)

        def apply(self, t: Tensor, at: declarations.Pairs) -> Tensor:
            return t * (1 + self.share) + self.by

        def slope(self, before: Tensor, after: Tensor, at: declarations.Pairs) -> Tensor:
            return torch.full_like(before, 1 + self.share)

    return Raised


def mixed() -> type[Term]:
    """A kind with a number and three tables: one multiplies scores, one is constant, one has an entry for each pair."""

    @dataclass(frozen=True, eq=False)
    class Mixed(Term):
        kernel: ClassVar[str] = "mixed"
        axes: ClassVar[dict[str, tuple[declarations.Axis, ...]]] = {
            "gain": (declarations.Axis("heads"),),
            "ages": (declarations.Axis("heads"), declarations.Axis("distance")),
            "table": (declarations.Axis("batch", True), declarations.Axis("queries"), declarations.Axis("keys")),
        }
        learns: ClassVar[tuple[str, ...]] = ("gain", "table")
        distances: ClassVar[bool] = True
        places: ClassVar[bool] = True

        strength: float
        gain: Tensor
        ages: Tensor
        table: Tensor

        @classmethod
        def example(cls, batch: int, heads: int, nq: int, nk: int, generator: torch.Generator) -> Term:
            shapes = (heads,), (heads, 7), (1, nq, nk)
            return cls(0.5, *(torch.rand(shape, generator=generator) for shape in shapes))

        def _place(self, at: declarations.Pairs) -> tuple[Tensor, ...]:
            batch, nq, nk = self.table.shape
            return at.batch * (batch > 1), at.row.clamp(max=nq - 1), at.column.clamp(max=nk - 1)

        def apply(self, t: Tensor, at: declarations.Pairs) -> Tensor:
            reach = self.ages.shape[1] // 2
            ages = self.ages.to(t.dtype)[at.head, (at.key - at.query).clamp(-reach, reach) + reach]
            return self.gain.to(t.dtype)[at.head] * t - ages + self.strength * self.table[self._place(at)].to(t.dtype)

        def slope(self, before: Tensor, after: Tensor, at: declarations.Pairs) -> Tensor:
            return self.gain.to(before.dtype)[at.head]

        def entry(self, name: str, at: declarations.Pairs) -> Tensor:
            b, i, j = self._place(at)
            _, nq, nk = self.table.shape
            return at.head if name == "gain" else (b * nq + i) * nk + j

        def share(self, name: str, before: Tensor, at: declarations.Pairs) -> Tensor | float:
            return before if name == "gain" else self.strength

    return Mixed


def mixed_formula(t: Tensor, strength: float, gain: Tensor, ages: Tensor, table: Tensor) -> Tensor:
    """The kind's formula again, for equally many queries and keys."""
    distance = torch.arange(t.shape[3]) - torch.arange(t.shape[2])[:, None]
    reach = ages.shape[1] // 2
    return gain[:, None, None] * t - ages[:, distance.clamp(-reach, reach) + reach] + strength * table[:, None]


def of_a_test(declare: Callable[[], type[Term]]) -> Iterator[type[Term]]:
    """Declare a kind for the duration of a test."""
    known = dict(declarations.KINDS)
    yield declare()
    declarations.KINDS.clear()
    declarations.KINDS.update(known)


@pytest.fixture
def raised() -> Iterator[type[Term]]:
    yield from of_a_test(declared)


@pytest.fixture
def kind_of_tables() -> Iterator[type[Term]]:
    yield from of_a_test(mixed)


@pytest.mark.parametrize("backend", ["reference", "dense_batched", "auto"])
@pytest.mark.parametrize("shared", [True, False])
def test_a_kind_with_a_number_and_tables(kind_of_tables: type[Term], backend: str, shared: bool) -> None:
    """Results and the gradients of learned tables are those of the formula, also between other terms."""
    x, g = inputs(40, torch.float64), torch.Generator().manual_seed(1)
    gain, ages, table = (
        torch.rand(shape, generator=g, dtype=torch.float64)
        for shape in ((HEADS,), (HEADS, 7), (1 if shared else 2, 40, 40))
    )
    bias = torch.randn(HEADS, 5, generator=g, dtype=torch.float64).requires_grad_()
    leaves = [*x.leaves(), gain.requires_grad_(), table.requires_grad_(), bias]
    q, k, v = leaves[:3]
    terms = [rw.Softcap(3.0), kind_of_tables(0.5, gain, ages, table), rw.DistanceBias(bias)]
    assert terms[1].spec == "Mixed(0.5, _, _, _)"
    assert [type(term) for term in terms_of(*written(terms))] == [type(term) for term in terms]
    got = rw.attention(q, k, v, rw.Causal(), terms=terms, backend=backend)
    distance = torch.arange(40) - torch.arange(40)[:, None]

    def scored(t: Tensor) -> Tensor:
        mixed = mixed_formula(3 * torch.tanh(t / 3), 0.5, gain, ages, table)
        return ORACLES["DistanceBias"].formula(mixed, (), bias, distance)

    wanted, _ = attention(q, k, v, rw.Causal().to_dense(40), scored=scored)
    torch.testing.assert_close(got, wanted)
    grads = (torch.autograd.grad((out * x.dout).sum(), leaves) for out in (got, wanted))
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)


def test_a_kind_of_tables_in_a_graph_and_refused(kind_of_tables: type[Term]) -> None:
    """Compiled code passes all tables; the kernel refuses the kind; a constant table must not require gradients."""
    x, g = inputs(40), torch.Generator().manual_seed(1)
    example = kind_of_tables.example(2, HEADS, 40, 40, g)
    gain, ages, table = example.tables
    gain.requires_grad_(), table.requires_grad_()

    def call(gain: Tensor, table: Tensor) -> Tensor:
        return rw.attention(x.q, x.k, x.v, rw.Causal(), terms=kind_of_tables(0.5, gain, ages, table))

    torch._dynamo.reset()
    found = []
    for function in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        out = function(gain, table)
        found.append([out, *torch.autograd.grad(out.square().sum(), [gain, table])])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
    with pytest.raises(rw.UnsupportedError, match="it computes no Mixed"):
        rw.attention(x.q, x.k, x.v, terms=example, backend="cpu")
    half = torch.bfloat16
    rounded = rw.attention(x.q, x.k, x.v, terms=example, precision=rw.Precision(table=half))
    by_hand = example.over(gain.to(half), ages, table.to(half))
    torch.testing.assert_close(rounded, rw.attention(x.q, x.k, x.v, terms=by_hand))
    ages.requires_grad_()
    with pytest.raises(rw.ShapeError, match="ages: got a tensor that requires gradients; wanted constants"):
        rw.attention(x.q, x.k, x.v, terms=example)


@pytest.mark.parametrize("warm", [False, True])
def test_slopes_that_learn_later_are_refused(warm: bool) -> None:
    """A constant table that requires gradients after its term was made, or used in a call, is refused."""
    x, slopes = inputs(20), torch.rand(HEADS)
    term = rw.ALiBi(slopes)
    for leaves in (x.leaves(), [x.q, x.k, x.v]):
        slopes.requires_grad_(False)
        if warm:
            rw.attention(*leaves, rw.Causal(), terms=term)
        slopes.requires_grad_()
        with pytest.raises(rw.ShapeError, match="slopes: got a tensor that requires gradients; wanted constants"):
            rw.attention(*leaves, rw.Causal(), terms=term)
        with torch.no_grad():
            rw.attention(*leaves, rw.Causal(), terms=term)


@pytest.mark.parametrize(
    ("numbers", "name"),
    [((-1e300, 4.0), "by"), ((1.0, 1.0 + 1e-12), "share"), ((1e-300, 1.0), "by"), ((1.0, 1e38), "share")],
)
def test_numbers_that_float32_does_not_have(raised: type[Term], numbers: tuple[float, float], name: str) -> None:
    with pytest.raises(rw.ShapeError, match=f"{name}: got .*; wanted .* Kernels compute in float32"):
        raised(*numbers)
    # the next float32
    assert raised(1.0, 1.0 + 2.0**-22).numbers == (1.0, 1.0 + 2.0**-22)


def test_a_kind_that_no_kernel_knows(raised: type[Term]) -> None:
    """For a kind unknown to the kernels, a named kernel raises, and auto uses a backend that computes its formula and gradient."""
    term, x = raised(0.25, 0.5), inputs(40)
    assert term.spec == "Raised(0.25, 0.5)"
    assert terms_of(*written([term, rw.Softcap(2), term])) == (term, rw.Softcap(2.0), term)
    for name in ("cpu", "sdpa", "flash"):
        with pytest.raises(rw.UnsupportedError, match="it computes no Raised"):
            rw.attention(x.q, x.k, x.v, terms=[rw.Softcap(1.0), term], backend=name)
    call = Call.of(x.q, x.k, x.v, rw.Causal(), features=frozenset({"Raised"}))
    assert [chosen.name for _, chosen in compiled(call)] == ["dense_batched"]
    plain = ours(dataclasses.replace(x, q=1.5 * x.q), rw.Causal(), [], "reference")
    plain["dq"] *= 1.5
    plain["lse"] += 0.25
    for name in ("auto", "dense_batched", "reference"):
        got = ours(x, rw.Causal(), [term], name)
        for each, wanted in plain.items():
            torch.testing.assert_close(got[each], wanted, rtol=1e-5, atol=1e-5)


def test_a_kind_that_no_kernel_knows_is_computed_by_its_formula(raised: type[Term]) -> None:
    assert flex.BACKEND.lacks(frozenset({"Raised", "dropout"}), "cuda") == {"dropout"}


def test_a_declaration_that_lacks_something() -> None:
    """A kind without its slope is refused: gradients would pass through it unchanged."""
    before = dict(declarations.KINDS)
    for body, text in (
        ({"__annotations__": {"low": "float"}, "kernel": "x"}, "does not define slope"),
        ({"__annotations__": {"low": "float"}, "slope": None}, "does not define kernel"),
        ({"__annotations__": {"table": "Tensor"}, "kernel": "x", "slope": None}, "then a Tensor for each of its axes"),
        ({"__annotations__": {"low": "int"}, "kernel": "x", "slope": None}, "a term has floats"),
        ({"__annotations__": {"low": "float"}, "kernel": "alibi", "slope": None}, "'alibi' in kernels, is declared"),
        (
            {
                "__annotations__": {"table": "Tensor"},
                "kernel": "x",
                "axes": {"table": (declarations.Axis("heads"),)},
                "learns": ("table",),
            },
            "does not define entry",
        ),
        (
            {
                "__annotations__": {"table": "Tensor"},
                "kernel": "x",
                "axes": {"table": (declarations.Axis("keys", optional=True), declarations.Axis("heads"))},
            },
            "an optional axis before another one",
        ),
    ):
        with pytest.raises(TypeError, match=text):
            type("Bad", (Term,), body)
    assert before == declarations.KINDS


def test_the_text_of_a_kind_that_is_not_declared() -> None:
    with pytest.raises(rw.UnsupportedError, match="terms: got 'Gone'; wanted one of Softcap, ALiBi"):
        terms_of("Gone(1.0)", [])


def test_sinks_of_inference_mode() -> None:
    q = torch.randn(1, 2, 32, 16, requires_grad=True)
    with torch.inference_mode():
        logits = torch.ones(2)
    rw.attention(q, q, q, rw.Causal(), sink_logits=logits).sum().backward()
    got, q.grad = q.grad, None
    rw.attention(q, q, q, rw.Causal(), sink_logits=logits.clone()).sum().backward()
    assert torch.equal(got, q.grad)
