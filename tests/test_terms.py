"""Score terms, sinks and dropout against their formulas, written here once more for dense float64 tensors."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch._dynamo.testing
import torch.utils.checkpoint
from torch import Tensor

import ringweave as rw
from ringweave.ops.backend import EXTRAS
from ringweave.ops.dispatch import BACKENDS
from ringweave.terms import Term

from .cases import PATTERNS
from .dropped import kept, next_seed
from .oracle import Inputs

ABLE = ["reference", "gather", "cpu"]
HEADS = 4


@dataclass
class Kind:
    """A term for a length and dtype, with its formula."""

    make: Callable[[int, torch.dtype, torch.Generator], Term]
    formula: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # scores, table, q positions, k positions


def _distance(t: Tensor, table: Tensor, q: Tensor, k: Tensor) -> Tensor:
    reach = table.shape[1] // 2
    return t + table[:, (k[None] - q[:, None]).clamp(-reach, reach) + reach]


def _slopes(n: int, dtype: torch.dtype, g: torch.Generator) -> Term:
    return rw.ALiBi(torch.rand(HEADS, generator=g))


def _bias(batch: int, heads: int) -> Callable[[int, torch.dtype, torch.Generator], Term]:
    def make(n: int, dtype: torch.dtype, g: torch.Generator) -> Term:
        return rw.Bias(torch.randn(batch, heads, n, n, generator=g).to(dtype).requires_grad_())

    return make


KINDS = {
    "softcap": Kind(lambda n, dtype, g: rw.Softcap(1.5), lambda t, table, q, k: 1.5 * torch.tanh(t / 1.5)),
    "alibi": Kind(_slopes, lambda t, s, q, k: t - s[:, None, None] * (q[:, None] - k[None]).abs()),
    "distance": Kind(
        lambda n, dtype, g: rw.DistanceBias(torch.randn(HEADS, 23, generator=g).requires_grad_()), _distance
    ),
    "bias": Kind(_bias(2, HEADS), lambda t, table, q, k: t + table),
    "shared_bias": Kind(_bias(1, 1), lambda t, table, q, k: t + table),
}


def dense(
    x: Inputs,
    pattern: rw.Pattern,
    names: Sequence[str],
    terms: Sequence[Term],
    dtype: torch.dtype,
    *,
    sinks: Tensor | None = None,
    keep: Tensor | None = None,
    q_offset: int = 0,
    order: int = 0,
) -> dict[str, Tensor]:
    """The formula, in one dtype, with the gradients of everything that learns."""
    q, k, v = x.leaves(dtype)
    tables = [table.detach().to(dtype).requires_grad_() for term in terms for table in term.tables]
    sink = None if sinks is None else sinks.detach().to(dtype).requires_grad_()
    group = q.shape[1] // k.shape[1]
    channels = torch.arange(q.shape[3]).roll(order)
    t = (q[..., channels] @ k.repeat_interleave(group, 1)[..., channels].mT) * q.shape[3] ** -0.5
    at_q, at_k, rest = torch.arange(q.shape[2]) + q_offset, torch.arange(k.shape[2]), iter(tables)
    for name, term in zip(names, terms, strict=True):
        t = KINDS[name].formula(t, next(rest) if term.tables else t, at_q, at_k)
    allowed = pattern.to_dense(q.shape[2], k.shape[2], q.shape[1], batch=q.shape[0], q_offset=q_offset)
    scores, t = t, t.masked_fill(~allowed, -torch.inf)
    logits = t if sink is None else torch.cat([t, sink[:, None, None].expand(*t.shape[:2], t.shape[2], 1)], -1)
    top = logits.detach().amax(-1, keepdim=True)
    weights = torch.exp(logits - torch.where(torch.isneginf(top), 0.0, top))
    total = weights.sum(-1, keepdim=True)
    lse = torch.where(total[..., 0] > 0, (top + torch.where(total > 0, total, 1.0).log())[..., 0], -torch.inf)
    weights = (weights / torch.where(total > 0, total, 1.0))[..., : k.shape[2]]
    out = (weights if keep is None else weights * keep.to(dtype)) @ v.repeat_interleave(group, 1)
    loss = (out * x.dout.to(dtype)).sum() + (lse * x.dlse.to(dtype)).masked_fill(torch.isneginf(lse), 0.0).sum()
    leaves = [q, k, v, *tables, *([] if sink is None else [sink])]
    grads = torch.autograd.grad(loss, leaves, allow_unused=True, retain_graph=True)
    found = dict(zip(range(len(leaves)), grads, strict=True))
    named = {"out": out, "lse": lse, "dq": found[0], "dk": found[1], "dv": found[2]}
    named |= {f"table {i - 3}": found[i] for i in range(3, 3 + len(tables))}
    if tables:
        # the addends of their sums, each off by as many units as its exponent is large
        alive = lse.masked_fill(torch.isneginf(lse), 0.0)[..., None].abs()
        of_weights = (x.dout.to(dtype) @ v.repeat_interleave(group, 1).mT).abs()
        of_row = (x.dlse.abs() + (x.dout.to(dtype) * out).abs().sum(-1))[..., None]
        addends = weights * (of_weights + of_row) * (1 + t.masked_fill(~allowed, 0.0).abs() + alive)
        sizes = torch.autograd.grad(scores, tables, addends.detach(), allow_unused=True)
        named |= {f"sizes of table {i}": size for i, size in enumerate(sizes)}
    if sink is not None:
        named["sinks"] = found[len(leaves) - 1]
        # the addends of its sum, which cancel
        addends = (x.dlse.abs() + (x.dout.to(dtype) * out).abs().sum(-1)) * (sink[:, None] - lse).exp()
        named["sizes of sinks"] = addends.sum((0, 2))
    return {name: x.detach().double() for name, x in named.items() if x is not None}


def ours(
    x: Inputs,
    pattern: rw.Pattern,
    terms: Sequence[Term],
    backend: str,
    *,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    q_offset: int = 0,
) -> dict[str, Tensor]:
    leaves = x.leaves()
    tables = [table for term in terms for table in term.tables]
    sinks = None if sinks is None else sinks.detach().requires_grad_()
    out, lse = rw.attention_with_lse(
        *leaves, pattern, terms=terms, sink_logits=sinks, dropout=dropout, backend=backend, q_offset=q_offset
    )
    loss = (out * x.dout.to(out.dtype)).sum() + (lse * x.dlse).masked_fill(torch.isneginf(lse), 0.0).sum()
    learning = [*leaves, *(table for table in tables if table.requires_grad), *([] if sinks is None else [sinks])]
    grads = iter(torch.autograd.grad(loss, learning))
    named = {"out": out, "lse": lse} | {name: next(grads) for name in ("dq", "dk", "dv")}
    named |= {f"table {i}": next(grads) for i, table in enumerate(tables) if table.requires_grad}
    if sinks is not None:
        named["sinks"] = next(grads)
    return {name: x.detach().double() for name, x in named.items()}


def error(got: Tensor, wanted: Tensor) -> float:
    """The norm of the difference, relative to that of what is wanted."""
    same = (got == wanted) | (got.isnan() & wanted.isnan())
    norm = wanted[wanted.isfinite()].norm().clamp(min=1e-30)
    return float(torch.where(same, 0.0, got - wanted).norm() / norm)


def check(got: dict[str, Tensor], formula: Callable[[torch.dtype, int], dict[str, Tensor]], dtype: torch.dtype) -> None:
    """Within twice the error of the formula in the dtype's own arithmetic, or a few units of it.

    That error is partly chance: the largest of some orders in which the channels of a score are added counts.
    """
    wanted = formula(torch.float64, 0)
    errors = {name: error(value, wanted[name]) for name, value in got.items() if not name.startswith("sizes")}
    allowed = dict.fromkeys(errors, 0.0)
    for order in (0, 3, 7, 12):
        plain = formula(dtype, order)
        for name in allowed:
            floor = 4 * torch.finfo(dtype).eps
            if f"sizes of {name}" in wanted:
                # tables and logits are of float32, and so is what is added
                most = float(wanted[f"sizes of {name}"].norm() / wanted[name].norm().clamp(min=1e-30))
                floor = torch.finfo(torch.float32).eps * max(4.0, most)
            allowed[name] = max(allowed[name], floor, 2 * error(plain[name], wanted[name]))
        if all(errors[name] <= allowed[name] for name in errors):
            return
    assert not {name: (errors[name], allowed[name]) for name in errors if not errors[name] <= allowed[name]}


def make(names: Sequence[str], n: int, dtype: torch.dtype) -> list[Term]:
    generator = torch.Generator().manual_seed(7)
    return [KINDS[name].make(n, dtype, generator) for name in names]


def inputs(n: int, dtype: torch.dtype = torch.float32, kv_heads: int = 2, **sizes: int) -> Inputs:
    return Inputs.random(n, batch=2, heads=HEADS, kv_heads=kv_heads, dim=16, value_dim=24, dtype=dtype, **sizes)


def runs(backend: str, dtype: torch.dtype) -> None:
    if backend == "cpu" and dtype == torch.float64:
        pytest.skip("the native kernel computes up to 32 bits")


PAIRS = [("softcap", "distance"), ("distance", "softcap"), ("alibi", "bias"), ("shared_bias", "softcap")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("names", [(name,) for name in KINDS] + PAIRS, ids="-".join)
@pytest.mark.parametrize("backend", ABLE)
def test_formula(backend: str, names: tuple[str, ...], dtype: torch.dtype) -> None:
    runs(backend, dtype)
    n = 150
    x, pattern, terms = inputs(n, dtype), (rw.SlidingWindow(40) | rw.Sinks(3)) & rw.Causal(), make(names, n, dtype)
    got = ours(x, pattern, terms, backend)
    check(got, lambda kind, order: dense(x, pattern, names, terms, kind, order=order), dtype)


def drawn() -> list[tuple[tuple[str, str], str, torch.dtype, int]]:
    """Every ordered pair of terms once, with a pattern, a type and key heads: each of these with terms of all kinds."""
    patterns, types = sorted(PATTERNS), [torch.float32, torch.bfloat16, torch.float16]
    pairs = itertools.product(KINDS, KINDS)
    return [
        (pair, patterns[7 * i % len(patterns)], types[i % 3], (4, 2, 1)[i // 3 % 3]) for i, pair in enumerate(pairs)
    ]


@pytest.mark.parametrize(("names", "pattern", "dtype", "kv_heads"), drawn(), ids=str)
def test_pairs_of_terms(names: tuple[str, str], pattern: str, dtype: torch.dtype, kv_heads: int) -> None:
    n = 61
    x, terms, relation = inputs(n, dtype, kv_heads), make(names, n, dtype), PATTERNS[pattern](n)
    known: dict[tuple[torch.dtype, int], dict[str, Tensor]] = {}

    def formula(kind: torch.dtype, order: int) -> dict[str, Tensor]:
        if (kind, order) not in known:
            known[kind, order] = dense(x, relation, names, terms, kind, order=order)
        return known[kind, order]

    for backend in ("cpu", "gather"):
        check(ours(x, relation, terms, backend), formula, dtype)


@pytest.mark.parametrize("name", sorted(PATTERNS))
@pytest.mark.parametrize("backend", ABLE)
def test_every_pattern(backend: str, name: str) -> None:
    n, names = 97, ("softcap", "distance", "bias")
    x, pattern, terms = inputs(n), PATTERNS[name](n), make(names, n, torch.float32)
    torch.manual_seed(0)
    sinks = torch.randn(HEADS)
    got = ours(x, pattern, terms, backend, sinks=sinks)
    check(got, lambda kind, order: dense(x, pattern, names, terms, kind, sinks=sinks, order=order), torch.float32)


@pytest.mark.parametrize("backend", ABLE)
@pytest.mark.parametrize("pattern", [rw.Causal(), rw.SlidingWindow(20) | rw.Dilated(8, 16)], ids=str)
def test_offset(backend: str, pattern: rw.Pattern) -> None:
    # positions count from the offset, places in a table do not
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
    # another call, other pairs
    assert not torch.equal(ours(x, rw.Causal(), [], backend, dropout=0.3, q_offset=offset)["out"], got["out"])


@pytest.mark.parametrize("backend", ["reference", "gather"])
def test_dropout_of_float64_is_exact(backend: str) -> None:
    x = inputs(20, torch.float64)
    torch.manual_seed(3)
    keep = kept(next_seed(), 0.1, 2, HEADS, range(20), range(20))
    got = ours(x, rw.Causal(), [], backend, dropout=0.1)
    check(got, lambda kind, order: dense(x, rw.Causal(), (), [], kind, keep=keep, order=order), torch.float64)


@pytest.mark.parametrize("tile", [16, 32, 128])
def test_dropout_does_not_depend_on_tiles_or_branches(tile: int) -> None:
    from ringweave.ops import gather
    from ringweave.ops.backend import Inputs as Record
    from ringweave.ops.dispatch import run_forward
    from ringweave.ops.registered import scoring_of
    from ringweave.plan import Branch

    n, pattern = 300, rw.SlidingWindow(20) | rw.Dilated(8, 16)
    x = Inputs.random(n, heads=HEADS)
    scoring = scoring_of(x.q, (x.q.shape[2], x.k.shape[2]), pattern, 0, "", 2**14, [torch.tensor(77)])
    record = Record(x.q, x.k, x.v, 0.25, scoring)
    whole = Branch(pattern, (0, HEADS, 1), 1, 0, 0, n, n, 0, 1, sides=(tile, tile))
    alone = gather.forward(record, whole, torch.float32)
    for got, wanted in zip(alone, run_forward(record, pattern, 0, "reference"), strict=True):
        torch.testing.assert_close(got, wanted)
    # in strided views
    for got, wanted in zip(run_forward(record, pattern, 0, "gather"), alone, strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("backend", ABLE)
@pytest.mark.parametrize("p", [0.1, 0.5, 1 / 65536])
def test_drop_rate(backend: str, p: float) -> None:
    n = 512
    q = k = torch.zeros(1, 1, n, 16)
    v = torch.eye(n)[None, None, :, :256]  # what is left of the weights of 256 keys
    out = rw.attention(q, k, v, dropout=p, backend=backend)
    dropped = (out == 0).double().mean()
    count = out.numel()
    assert abs(dropped - p) <= 4 * (p * (1 - p) / count) ** 0.5
    torch.testing.assert_close(out[out != 0], torch.full_like(out[out != 0], 1 / n / (1 - p)))


def test_dropout_keeps_lse_and_repeats_in_checkpoints() -> None:
    x = inputs(80)
    torch.manual_seed(5)
    first = rw.attention_with_lse(x.q, x.k, x.v, dropout=0.5)
    torch.testing.assert_close(first.lse, rw.attention_with_lse(x.q, x.k, x.v).lse)
    q = x.q.requires_grad_()
    grads = []
    for wrapped in (False, True):
        torch.manual_seed(5)

        def call(q: Tensor) -> Tensor:
            return rw.attention(q, x.k, x.v, dropout=0.5)

        out = torch.utils.checkpoint.checkpoint(call, q, use_reentrant=False) if wrapped else call(q)
        assert torch.equal(out.detach(), first.out)
        grads.append(torch.autograd.grad(out.square().sum(), q)[0])
    assert torch.equal(*grads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", ["auto", *ABLE])
def test_sinks(backend: str, dtype: torch.dtype) -> None:
    x, sinks = inputs(70, dtype), torch.tensor([0.5, -3.0, 9.0, -torch.inf])
    pattern = rw.Causal() & ~rw.Segments(20)  # the first rows attend nothing
    got = ours(x, pattern, [], backend, sinks=sinks)
    finite = slice(0, 3)
    # the logit of -inf is no sink
    plain = ours(x, pattern, [], backend)
    assert torch.equal(got["out"][:, 3], plain["out"][:, 3])
    assert torch.equal(got["lse"][:, 3], plain["lse"][:, 3])
    assert not any(value.isnan().any() for value in got.values())
    assert torch.equal(got["lse"][:, finite, :20], sinks[finite, None].double().expand(2, 3, 20))

    def of_finite(result: dict[str, Tensor]) -> dict[str, Tensor]:
        for name in ("sinks", "sizes of sinks"):
            result[name] = result.get(name, sinks.double())[finite]
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
    assert torch.equal(
        got["lse"][:, :, 5],
        torch.full(
            (
                2,
                HEADS,
                7 - 6,
            ),
            -torch.inf,
        )
        .double()
        .expand(2, HEADS, 1)[..., 0],
    )
    assert torch.equal(got["out"][:, :, 5], torch.zeros_like(got["out"][:, :, 5]))
    others = [i for i in range(n) if i != 5]
    torch.testing.assert_close(got["out"][:, :, others], causal["out"][:, :, others])


@pytest.mark.parametrize("backend", ABLE)
def test_a_masked_nan_stays_where_it_is(backend: str) -> None:
    n, names = 70, ("softcap", "distance", "bias")
    x, terms = inputs(n), make(names, n, torch.float32)
    x.k[:, :, -1] = torch.nan
    pattern = rw.Causal()
    got = ours(x, pattern, terms, backend)
    for name in ("out", "lse"):
        assert not got[name][:, :, :-1].isnan().any(), name
        assert got[name][:, :, -1].isnan().all(), name


@pytest.mark.parametrize("backend", ABLE)
@pytest.mark.parametrize("size", [2e19, torch.inf])
def test_scores_out_of_range_are_told_whatever_the_terms(backend: str, size: float) -> None:
    # a cap would hide what went wrong before it
    x = inputs(70)
    x.q[:, :, 40] = size
    x.k[:, :, 12] = size
    plain = ours(x, rw.Causal(), [], backend)
    got = ours(x, rw.Causal(), [rw.Softcap(30.0)], backend)
    assert plain["out"][:, :, 40].isnan().all()
    assert torch.equal(got["out"].isnan(), plain["out"].isnan())


@pytest.mark.parametrize("backend", ABLE)
def test_what_lies_past_the_last_query_has_no_gradient(backend: str) -> None:
    # in a whole tile, where a score would be past every number
    x, terms = inputs(5), [rw.ALiBi([-5.0] * HEADS)]
    pattern = rw.BlockTable(torch.ones(1, 1, dtype=torch.bool), 64)
    got = ours(x, pattern, terms, backend)
    check(got, lambda kind, order: dense(x, pattern, ["alibi"], terms, kind, order=order), torch.float32)


def test_tables_of_any_layout() -> None:
    n, x = 50, inputs(50)
    table = torch.randn(n, HEADS, n, 2).permute(3, 1, 2, 0)[:1].requires_grad_()
    got = ours(x, rw.Causal(), [rw.Bias(table)], "gather")
    again = table.detach().contiguous().requires_grad_()
    wanted = ours(x, rw.Causal(), [rw.Bias(again)], "gather")
    for name, value in got.items():
        torch.testing.assert_close(value, wanted[name], msg=name)


def test_buckets_are_those_of_t5() -> None:
    def bucket(distance: int, both: bool, buckets: int, far: int) -> int:
        # Raffel et al., as their code computes it: half of the buckets exact, then logarithmic up to `far`
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
        out = rw.attention(x.q, x.k, x.v, terms=rw.DistanceBias.from_buckets(leaf), backend="gather")
        grads += torch.autograd.grad(out.square().sum(), leaf)
    assert torch.equal(grads[0], grads[1].bfloat16())


def test_alibi_of_the_paper() -> None:
    assert rw.ALiBi.of_heads(8).slopes.tolist() == [2.0**-i for i in range(1, 9)]
    # twelve heads: those of eight, then every other one of sixteen
    wanted = [2.0**-i for i in range(1, 9)] + [2 ** -(i / 2) for i in (1, 3, 5, 7)]
    torch.testing.assert_close(rw.ALiBi.of_heads(12).slopes, torch.tensor(wanted))


@pytest.mark.parametrize("backend", ABLE)
def test_alibi_far_from_the_start(backend: str) -> None:
    n, far = 64, 2**16
    x = Inputs.random(8, n, heads=HEADS, dtype=torch.bfloat16)
    terms = [rw.ALiBi.of_heads(HEADS)]
    # every distance is large; what counts is how they differ
    got = rw.attention(x.q, x.k, x.v, terms=terms, q_offset=far, backend=backend)
    near = rw.attention(x.q, x.k, x.v, terms=terms, q_offset=n, backend=backend)
    torch.testing.assert_close(got, near, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("backend", ["cpu", "gather"])
def test_alibi_costs_no_accuracy_at_65536_tokens(backend: str) -> None:
    """In bfloat16, over all of a long sequence: distances are computed in float32, whatever the inputs' type."""
    n, rows = 2**16, 4
    x = Inputs.random(rows, n, heads=HEADS, dim=64, dtype=torch.bfloat16)
    slopes = torch.tensor([2.0**-4, 2.0**-8, 2.0**-12, 2.0**-16])
    distance = (torch.arange(n)[None] - torch.arange(n - rows, n)[:, None]).abs()
    allowed = rw.Causal().to_dense(rows, n, q_offset=n - rows)
    errors = []
    for terms in ([], [rw.ALiBi(slopes)]):
        t = x.q.double() @ x.k.double().mT / 8
        t = t - slopes.double()[:, None, None] * distance if terms else t
        want = torch.softmax(t.masked_fill(~allowed, -torch.inf), -1) @ x.v.double()
        got = rw.attention(x.q, x.k, x.v, rw.Causal(), terms=terms, q_offset=n - rows, backend=backend)
        errors.append(error(got.double(), want))
    assert errors[1] <= 1.5 * errors[0]


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


def test_gradcheck() -> None:
    x = Inputs.random(7, batch=2, heads=2, kv_heads=1, dim=4, dtype=torch.float64)
    tables = [torch.randn(2, 5).double(), torch.randn(1, 2, 7, 7).double(), torch.randn(2).double()]
    leaves = [y.requires_grad_() for y in (x.q, x.k, x.v, *tables)]

    def call(q: Tensor, k: Tensor, v: Tensor, distance: Tensor, bias: Tensor, sinks: Tensor) -> tuple[Tensor, ...]:
        terms = [rw.DistanceBias(distance), rw.Softcap(2.0), rw.Bias(bias)]
        return rw.attention_with_lse(q, k, v, rw.Causal(), terms=terms, sink_logits=sinks, backend="gather")

    assert torch.autograd.gradcheck(call, leaves)


def test_records() -> None:
    assert rw.Softcap(30) == rw.Softcap(30.0)
    assert hash(rw.Softcap(30)) == hash(rw.Softcap(30.0))
    again = pickle.loads(pickle.dumps(rw.DistanceBias(torch.ones(2, 3))))
    assert torch.equal(again.table, torch.ones(2, 3))
    for bad in (0, -1.0, torch.nan, "a", True, 1e39, 1e-50):
        with pytest.raises(rw.ShapeError, match="cap: got"):
            rw.Softcap(bad)  # type: ignore[arg-type]


def _call(**options: object) -> Tensor:
    x = Inputs.random(8, heads=HEADS)
    return rw.attention(x.q, x.k, x.v, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (
            lambda: rw.ALiBi(torch.ones(2, 2)),
            rw.ShapeError,
            "slopes: got Tensor of torch.float32 (2, 2); wanted a float",
        ),
        (lambda: rw.ALiBi(torch.ones(2, requires_grad=True)), rw.ShapeError, "slopes: got a tensor that requires grad"),
        (lambda: rw.DistanceBias(torch.ones(2, 4)), rw.ShapeError, "table.shape[1]: got 4; wanted 2 R + 1, an odd"),
        (lambda: rw.DistanceBias(torch.ones(2, 3).int()), rw.ShapeError, "table: got Tensor of torch.int32 (2, 3)"),
        (lambda: rw.Bias(torch.ones(3, 3)), rw.ShapeError, "table: got Tensor of torch.float32 (3, 3); wanted a float"),
        (lambda: _call(terms=rw.ALiBi([1.0])), rw.ShapeError, "slopes.shape[0]: got 1; wanted 4, the call's query h"),
        (lambda: _call(terms=rw.DistanceBias(torch.ones(3, 3))), rw.ShapeError, "table.shape[0]: got 3; wanted 4, the"),
        (lambda: _call(terms=rw.Bias(torch.ones(1, 1, 8, 9))), rw.ShapeError, "table.shape[3]: got 9; wanted 8, the"),
        (lambda: _call(terms=rw.Bias(torch.ones(2, 1, 8, 8))), rw.ShapeError, "table.shape[0]: got 2; wanted 1, the"),
        (lambda: _call(terms=[torch.ones(1)]), rw.UnsupportedError, "terms: got Tensor of torch.float32 (1,); wanted"),
        (lambda: _call(terms=torch.ones(1)), rw.UnsupportedError, "terms: got Tensor of torch.float32 (1,); wanted"),
        (lambda: _call(sink_logits=torch.ones(3)), rw.ShapeError, "sink_logits: got Tensor of torch.float32 (3,); wan"),
        (lambda: _call(sink_logits=0.5), rw.ShapeError, "sink_logits: got 0.5; wanted a floating tensor (4,): one for"),
        (lambda: _call(dropout=1e-9), rw.ShapeError, "dropout: got 1e-09; wanted 0, or at least 2 ** -16 and at most"),
        (lambda: _call(terms=rw.Softcap(1), backend="sdpa"), rw.UnsupportedError, "but it computes no Softcap. Use"),
        (lambda: _call(dropout=0.5, backend="flex"), rw.UnsupportedError, "but it computes no dropout. Use"),
    ],
)
def test_refusals(call: Callable[[], object], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert text in str(caught.value)


def test_backends_name_what_they_compute() -> None:
    everything = {name for name, backend in BACKENDS.items() if backend.extras == EXTRAS}
    assert everything == {*ABLE, "triton"}
    assert {name for name, backend in BACKENDS.items() if backend.extras} == everything | {"flex"}
    assert EXTRAS - BACKENDS["flex"].extras == {"dropout"}


def test_sinks_of_inference_mode() -> None:
    q = torch.randn(1, 2, 32, 16, requires_grad=True)
    with torch.inference_mode():
        logits = torch.ones(2)
    rw.attention(q, q, q, rw.Causal(), sink_logits=logits).sum().backward()
    got, q.grad = q.grad, None
    rw.attention(q, q, q, rw.Causal(), sink_logits=logits.clone()).sum().backward()
    assert torch.equal(got, q.grad)
