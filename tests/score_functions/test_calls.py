"""Functions in ``terms=``: results and gradients by definition, equal to terms written by hand, with every option of a call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import ringweave as rw
from ringweave.backends import BACKENDS
from ringweave.call import Arguments
from ringweave.errors import PatternError, RingweaveError, ShapeError, UnsupportedError
from ringweave.integrations.flex_attention import flex_attention
from ringweave.patterns import Pattern
from ringweave.score_functions import calls
from ringweave.terms.term import ScoreMod, Term

from ..cases import PATTERNS, TREES
from ..integrations.flex_cases import scored
from ..oracle import Inputs, attention, check_errors, errors, results
from ..trace import scores as corpus

# torch has no rule to map some operations in place, and maps them one by one
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")

INF = float("inf")
HEADS = 4
Tables = dict[str, Tensor]
Listed = Term | ScoreMod | Sequence[Term | ScoreMod]


class _Unread(corpus.Straight):
    """The identity with its own gradient, which no trace follows."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor) -> tuple[Tensor, Any]:
        return _Unread.apply(x), dims[0]  # type: ignore[no-untyped-call]


def unread(score_mod: ScoreMod) -> ScoreMod:
    """Return a function with the same values that must be called for every tile."""
    return lambda s, b, h, q, k: score_mod(_Unread.apply(s), b, h, q, k)  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Case:
    """Terms of a call with functions.

    Attributes:
        make: Makes the functions from tensors.
        shapes: Shapes of the tensors for (batch, heads, queries, keys); all learn.
        terms: Makes the terms that the functions are from the tensors; None if they take the general path.
        distant: Whether the functions count distances.
        indexed: Whether tables have the sizes of the tensors, as that of a Bias, and not those of the positions.
    """

    make: Callable[..., Listed]
    shapes: Callable[[int, int, int, int], dict[str, tuple[int, ...]]] = lambda b, h, n, m: {}
    terms: Callable[..., Listed] | None = None
    distant: bool = False
    indexed: bool = False

    def tables(self, *sizes: int, dtype: torch.dtype = torch.float32, learns: bool = True) -> Tables:
        generator = torch.Generator().manual_seed(7)
        drawn = {name: torch.randn(shape, generator=generator) for name, shape in self.shapes(*sizes).items()}
        return {name: x.to(dtype).requires_grad_(learns) for name, x in drawn.items()}


def _relative(table: Tensor) -> ScoreMod:
    reach = table.shape[1] // 2
    return lambda s, b, h, q, k: s + table[h, (k - q).clamp(-reach, reach) + reach]


CASES: dict[str, Case] = {
    "cap": Case(lambda: lambda s, b, h, q, k: 5.0 * torch.tanh(s / 5.0), terms=lambda: rw.Softcap(5.0)),
    "factor and cap": Case(lambda: [lambda s, b, h, q, k: s * 2, rw.Softcap(3.0)]),
    "distances": Case(_relative, lambda b, h, n, m: {"table": (h, 25)}, rw.DistanceBias, True),
    "slope by hand": Case(lambda: lambda s, b, h, q, k: s - 0.1 * (q - k).abs(), distant=True),
    "pairs": Case(
        lambda table: lambda s, b, h, q, k: s + table[b, h, q, k], lambda b, h, n, m: {"table": (b, h, n, m)}, rw.Bias
    ),
    "term, then function": Case(
        lambda table: [rw.Softcap(4.0), lambda s, b, h, q, k: s + table[h, q, k]],
        lambda b, h, n, m: {"table": (h, n, m)},
        lambda table: [rw.Softcap(4.0), rw.Bias(table[None])],
    ),
    "function, then term": Case(
        lambda table: (lambda s, b, h, q, k: 6.0 * torch.tanh(s / 6.0), rw.DistanceBias(table)),
        lambda b, h, n, m: {"table": (h, 9)},
        lambda table: (rw.Softcap(6.0), rw.DistanceBias(table)),
        True,
    ),
    "square": Case(lambda w: lambda s, b, h, q, k: s + w[h] * s * s * 0.1, lambda b, h, n, m: {"w": (h,)}),
    "rows": Case(
        lambda left, right: lambda s, b, h, q, k: s + 0.2 * (left[b, q] * right[h, k]).sum(),
        lambda b, h, n, m: {"left": (b, n, 3), "right": (h, m, 3)},
    ),
    "a number": Case(lambda w: lambda s, b, h, q, k: s * torch.sigmoid(w), lambda b, h, n, m: {"w": ()}),
    "term, then square": Case(
        lambda table, w: [rw.Bias(table), lambda s, b, h, q, k: s + w * s * s * 0.1, rw.Softcap(9.0)],
        lambda b, h, n, m: {"table": (1, h, n, m), "w": ()},
        indexed=True,
    ),
    "two functions": Case(
        lambda w: [lambda s, b, h, q, k: s * w[b], lambda s, b, h, q, k: s + 0.3 * torch.cos((q - 2 * k) / 10)],
        lambda b, h, n, m: {"w": (b,)},
    ),
    # also rows without a pair
    "holes": Case(
        lambda w: lambda s, b, h, q, k: torch.where(((q * 7 + k * k) % 5 > 1) & (q % 11 > 0), s * w[h], -INF),
        lambda b, h, n, m: {"w": (h,)},
    ),
    "unread": Case(lambda w: unread(lambda s, b, h, q, k: s * w[h] + k / 50), lambda b, h, n, m: {"w": (h,)}),
}
SOME = ["distances", "term, then function", "rows", "unread"]


def joined(terms: Listed, first: Tensor) -> ScoreMod:
    """Return terms as a function of indices, by the formulas of terms and the functions themselves."""
    members = terms if isinstance(terms, (list, tuple)) else [terms]

    def score_mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        q, k = i + first[b, 0], j + first[b, 1]
        for term in members:
            s = term.apply(s, rw.terms.Pairs(b, h, i, j, q, k)) if isinstance(term, Term) else term(s, b, h, q, k)  # type: ignore[operator]
        return s

    return score_mod


def check(
    x: Inputs, pattern: Pattern, case: Case, dtype: torch.dtype = torch.float32, first: Any = ((0, 0),), **options: Any
) -> None:  # fmt: skip
    """Compare out, lse and all gradients with the definition in float64, at twice its error in float32.

    ``first`` has the positions of the first query and the first key, for all batch elements or for each.
    """
    (batch, heads, nq, _), nk = x.q.shape, x.k.shape[2]
    begins = torch.tensor(first).expand(batch, 2)
    ends = nq + int(begins[:, 0].max()), nk + int(begins[:, 1].max())
    sizes = batch, heads, *((nq, nk) if case.indexed else ends)
    whole = pattern.to_dense(*ends, heads, batch=batch).expand(batch, heads, -1, -1)
    dense = torch.stack(
        [pairs[:, i : i + nq, j : j + nk] for pairs, (i, j) in zip(whole, begins.tolist(), strict=True)]
    )
    if len(first) > 1:
        options |= {"q_offset": begins[:, 0], "k_offset": begins[:, 1]}
    else:
        options |= dict(zip(("q_offset", "k_offset"), first[0], strict=True))

    def defined(of: torch.dtype, exact: bool) -> dict[str, Tensor]:
        leaves = x.leaves(of)
        tables = case.tables(*sizes, dtype=dtype)
        tables = {
            name: t.detach().to(torch.float64 if exact else t.dtype).requires_grad_() for name, t in tables.items()
        }
        apply = functools.partial(scored, joined(case.make(**tables), begins))
        return results(*attention(*leaves, dense.to(of), scored=apply), x, leaves, **tables)

    leaves, tables = x.leaves(), case.tables(*sizes, dtype=dtype)
    out, lse = rw.attention_with_lse(*leaves, pattern, terms=case.make(**tables), **options)
    got = results(out, lse, x, leaves, **tables)
    want = defined(torch.float64, exact=True)
    theirs = errors(defined(torch.promote_types(x.q.dtype, torch.float32), exact=False), want)
    # gradients of tables are sums over all pairs, in which terms cancel
    floor = {name: (16 if name in tables else 4) * torch.finfo(got[name].dtype).eps for name in got}
    check_errors(got, want, [theirs], floor)


# ---- the definition --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("nq", "nk"), [(70, 70), (37, 129)])
@pytest.mark.parametrize("name", CASES)
def test_functions_match_the_definition(name: str, nq: int, nk: int) -> None:
    """Out, lse and all gradients, captured ones too, with grouped heads, a batch, odd lengths and empty rows."""
    x = Inputs.random(nq, nk, batch=2, heads=HEADS, kv_heads=2)
    check(x, rw.SlidingWindow(30, 3) & ~rw.Segments(9), CASES[name])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_dtypes(name: str, dtype: torch.dtype) -> None:
    check(Inputs.random(50, batch=2, heads=HEADS, dtype=dtype), rw.Causal(), CASES[name], dtype)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns(pattern: str, name: str) -> None:
    """Every kind of pattern; functions of positions are refused on trees, as terms of distance are."""
    x, case = Inputs.random(80, batch=2, heads=HEADS), CASES[name]
    made = PATTERNS[pattern](80)
    if pattern in TREES and (case.distant or case.terms is None):
        with pytest.raises(UnsupportedError, match="Tree"):
            check(x, made, case)
        return
    check(x, made, case)


FIRST = [[(12, 0)], [(12, 7)], [(0, 5)], [(12, 0), (3, 0)], [(12, 7), (12, 2)]]


@pytest.mark.parametrize("first", FIRST, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_offsets(name: str, first: list[tuple[int, int]]) -> None:
    """A function gets the positions that the pattern counts; the table of a Bias has the indices of the tensors."""
    check(Inputs.random(40, 61, batch=2, heads=HEADS), rw.SlidingWindow(30, 3) | rw.Sinks(9), CASES[name], first=first)


# ---- the same as in other words --------------------------------------------------------------------------------------

HAND = [name for name, case in CASES.items() if case.terms is not None]


def run(x: Inputs, pattern: Pattern, terms: Listed, tables: Tables, **options: Any) -> dict[str, Tensor]:
    leaves = x.leaves()
    torch.manual_seed(5)
    return results(*rw.attention_with_lse(*leaves, pattern, terms=terms, **options), x, leaves, **tables)


def same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    for name, x in want.items():
        torch.testing.assert_close(got[name], x, rtol=1e-4, atol=1e-5 * max(1.0, float(x.abs().max())), msg=name)


@pytest.mark.parametrize("options", [{}, {"q_offset": 9}, {"k_offset": 4, "q_offset": torch.tensor([9, 4])}], ids=str)
@pytest.mark.parametrize("name", HAND)
def test_recognised_functions_have_the_bits_of_their_terms(name: str, options: dict[str, Any]) -> None:
    """A table of all pairs is one of positions in a function, and of indices in a Bias."""
    x, case = Inputs.random(50, 70, batch=2, heads=HEADS, kv_heads=2), CASES[name]
    assert case.terms is not None
    if options and not case.distant and case.shapes(1, 1, 1, 1):
        return
    tables = case.tables(2, HEADS, 50, 70)
    pattern = rw.SlidingWindow(20, 5)
    got = run(x, pattern, case.make(**tables), tables, **options)
    want = run(x, pattern, case.terms(**tables), tables, **options)
    for each, wanted in want.items():
        if each in tables and case.distant:
            # a function's entries are summed by distance before they are summed by entry
            torch.testing.assert_close(got[each], wanted, rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(got[each], wanted), each


@pytest.mark.parametrize("name", corpus.SCORES)
def test_functions_that_people_write(name: str) -> None:
    """Each has the bits that flex_attention has of it, or fails as that does."""
    score = corpus.SCORES[name]
    x = Inputs.random(corpus.Q, corpus.K, batch=corpus.B, heads=corpus.H)
    score_mod = score.make(*score.tables())

    def result(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except (RingweaveError, ValueError, TypeError, RuntimeError, IndexError) as error:
            return type(error), str(error)

    got = result(lambda: rw.attention_with_lse(x.q, x.k, x.v, terms=score_mod, q_offset=0))
    want = result(lambda: flex_attention(x.q, x.k, x.v, score_mod, return_lse=True))
    if isinstance(want[0], Tensor):
        assert torch.equal(got[0], want[0])
        assert torch.equal(got[1], want[1])
    else:
        assert got == want


def test_a_mask_narrows_the_pattern() -> None:
    """Its pairs are skipped, and whatever follows it applies to scores of -inf."""
    x = Inputs.random(300, heads=HEADS)
    near: ScoreMod = lambda s, b, h, q, k: torch.where((q - k).abs() <= 9, s, -INF)  # noqa: E731
    got = run(x, rw.Causal(), [rw.Softcap(5.0), near], {})
    want = run(x, rw.Causal() & rw.SlidingWindow(9, 9), rw.Softcap(5.0), {})
    for name, wanted in want.items():
        assert torch.equal(got[name], wanted)
    facts = rw.explain(rw.Causal(), 300, heads=HEADS, terms=near, as_dict=True)
    assert facts["score_mod"] == "mask"
    assert facts["pairs"] == rw.explain(rw.Causal() & rw.SlidingWindow(9, 9), 300, heads=HEADS, as_dict=True)["pairs"]
    capped = Case(lambda: [near, rw.Softcap(5.0)])
    check(x, rw.Causal(), capped)
    assert (
        "follow its mask" in rw.explain(rw.Causal(), 300, heads=HEADS, terms=capped.make(), as_dict=True)["score_mod"]
    )
    check(x, rw.Causal(), Case(lambda: [near, lambda s, b, h, q, k: torch.where(k % 4 > 0, s, -INF)]))


@pytest.mark.parametrize("first", FIRST, ids=str)
def test_a_mask_counts_positions(first: list[tuple[int, int]]) -> None:
    for mask in (lambda q, k: q >= k, lambda q, k: k > 20, lambda q, k: (q // 16 + k // 16) % 2 == 0):
        case = Case(lambda mask=mask: lambda s, b, h, q, k: torch.where(mask(q, k), s - 0.1 * (q - k).abs(), -INF))
        check(Inputs.random(40, 48, batch=2, heads=HEADS), rw.SlidingWindow(30, 9), case, first=first)


def test_the_end_is_that_of_the_callers_pattern() -> None:
    """A mask of keys in a function does not move the queries."""
    x, stop = Inputs.random(9, 40, batch=2, heads=HEADS), torch.tensor([21, 35])
    score_mod: ScoreMod = lambda s, b, h, q, k: torch.where(k < stop[b], s - 0.1 * (q - k).abs(), -INF)  # noqa: E731
    got = run(x, rw.Causal(), score_mod, {}, q_offset="end")
    want = run(x, rw.Causal() & rw.KeyPadding(stop), rw.ALiBi([0.1] * HEADS), {}, q_offset=31)
    same(got, want)
    padded = run(x, rw.KeyPadding(stop), lambda s, b, h, q, k: s - 0.1 * (q - k).abs(), {}, q_offset="end")
    same(padded, run(x, rw.KeyPadding(stop), rw.ALiBi([0.1] * HEADS), {}, q_offset="end"))


# ---- options ---------------------------------------------------------------------------------------------------------

SLOPES = torch.tensor([0.3, 0.1, 0.05, 0.0])


def slope(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return s - SLOPES[h] * (q - k).abs()


OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "nothing": dict,
    "scale": lambda: {"scale": 0.7},
    "dropout": lambda: {"dropout": 0.3},
    "sinks": lambda: {"sink_logits": torch.linspace(-1, 2, HEADS).requires_grad_()},
    "compute": lambda: {"precision": rw.Precision(compute=torch.float64)},
    "raise": lambda: {"on_oom": "raise"},
    "stream": lambda: {"on_oom": "stream"},
    "sparsify": lambda: {"on_oom": "sparsify"},
    "offset": lambda: {"q_offset": 3},
    "offset in a tensor": lambda: {"q_offset": torch.tensor(3)},
    "offsets": lambda: {"q_offset": torch.tensor([3, 11]), "k_offset": torch.tensor([0, 5])},
    "end": lambda: {"q_offset": "end"},
}


@pytest.mark.parametrize("function", [slope, unread(slope)], ids=["terms", "tiles"])
@pytest.mark.parametrize("option", OPTIONS)
def test_options_have_the_effect_that_they_have_with_terms(option: str, function: ScoreMod) -> None:
    """Dropout drops the same pairs, and gradients reach sinks."""
    x = Inputs.random(45, 60, batch=2, heads=HEADS, kv_heads=2)
    found = []
    for terms in (function, rw.ALiBi(SLOPES)):
        options = OPTIONS[option]()
        learned = {name: value for name, value in options.items() if getattr(value, "requires_grad", False)}
        found.append(run(x, rw.SlidingWindow(25, 2), terms, learned, **options))
    same(*found)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"precision": rw.Precision(kv=torch.int8)}, "precision.kv"),
        ({"precision": rw.Precision(table=torch.bfloat16)}, "precision.table"),
        ({"precision": rw.Precision(summation_order="fast")}, "precision.summation_order"),
    ],
    ids=str,
)
def test_what_tiles_do_not_have_is_refused(options: dict[str, Any], said: str) -> None:
    x = Inputs.random(40, heads=HEADS)
    with pytest.raises(UnsupportedError, match=said) as caught:
        rw.attention(x.q, x.k, x.v, rw.Causal(), terms=unread(slope), **options)
    assert "general path" in str(caught.value)


def test_a_named_backend_computes_recognised_functions() -> None:
    x = Inputs.random(40, heads=HEADS)
    for backend in ("cpu", "reference", "dense_batched"):
        got = rw.attention(x.q, x.k, x.v, rw.Causal(), terms=slope, backend=backend)
        assert torch.equal(got, rw.attention(x.q, x.k, x.v, rw.Causal(), terms=rw.ALiBi(SLOPES), backend=backend))
    with pytest.raises(UnsupportedError, match="backend: got 'no such'"):
        rw.attention(x.q, x.k, x.v, rw.Causal(), terms=slope, backend="no such")


def test_a_named_backend_computes_any_function() -> None:
    """A backend that evaluates functions has the bits of auto; the others say why not, also in explain."""
    x, listed = (
        Inputs.random(40, heads=HEADS),
        rw.Selected((torch.arange(40)[:, None] - torch.tensor([9, 1, 0])).clamp(min=-1)),
    )
    for pattern, able in ((rw.Causal(), {"dense_batched"}), (listed & rw.Causal(), {"dense_batched", "gather"})):
        want = run(x, pattern, unread(slope), {})
        for backend in BACKENDS:
            if backend in able:
                got = run(x, pattern, unread(slope), {}, backend=backend)
                if backend == sorted(able)[-1]:
                    assert all(torch.equal(got[each], want[each]) for each in want)
                same(got, want)
                continue
            said = "lists of keys" if backend == "gather" else "it computes no score function"
            with pytest.raises(UnsupportedError, match=f"backend: got '{backend}'"):
                rw.attention(x.q, x.k, x.v, pattern, terms=unread(slope), backend=backend)
            with pytest.raises(UnsupportedError, match=f"backend: got '{backend}'; .*{said}"):
                rw.explain(pattern, 40, heads=HEADS, terms=unread(slope), backend=backend)
    with pytest.raises(UnsupportedError, match="backend: got 'no such'"):
        rw.attention(x.q, x.k, x.v, rw.Causal(), terms=unread(slope), backend="no such")


@pytest.mark.parametrize("terms", [unread, "text", rw.Softcap, [slope, 3], [[slope]]])
def test_values_that_are_no_terms(terms: Any) -> None:
    """A function that makes functions fails as a call of it does."""
    x = Inputs.random(20, heads=HEADS)
    with pytest.raises((UnsupportedError, TypeError)):
        rw.attention(x.q, x.k, x.v, terms=terms)


@pytest.mark.parametrize("function", [slope, unread(slope)], ids=["terms", "tiles"])
def test_tensors_are_checked(function: ScoreMod) -> None:
    x = Inputs.random(20, heads=HEADS)
    with pytest.raises(ShapeError, match="k: got .* the head dim of q"):
        rw.attention(x.q, x.k[..., :8], x.v, terms=function)
    with pytest.raises(ShapeError, match="q: got .* without an empty axis"):
        rw.attention(x.q[:, :, :0], x.k, x.v, terms=function)
    with pytest.raises(ShapeError, match="sink_logits"):
        rw.attention(x.q, x.k, x.v, terms=function, sink_logits=torch.zeros(3))
    with pytest.raises(ShapeError, match="table"):
        rw.attention(x.q, x.k, x.v, terms=[function, rw.DistanceBias(torch.zeros(3, 5))])
    with pytest.raises(UnsupportedError, match="tensors on meta"):
        rw.attention(*(each.to("meta") for each in (x.q, x.k, x.v)), terms=function)
    with pytest.raises(UnsupportedError, match="context: got str"):
        rw.attention(x.q, x.k, x.v, terms=function, context="ranks")  # type: ignore[arg-type]
    with pytest.raises(RingweaveError, match="pattern"):
        rw.attention(x.q, x.k, x.v, rw.LongNet([8, 16], [1, 2]), terms=unread(slope))


def test_a_mixture_takes_functions_that_are_terms() -> None:
    x, pattern = Inputs.random(64, heads=HEADS), rw.LongNet([16, 64], [1, 4])
    got = rw.attention(x.q, x.k, x.v, pattern, terms=slope)
    assert torch.equal(got, rw.attention(x.q, x.k, x.v, pattern, terms=rw.ALiBi(SLOPES)))
    with pytest.raises(RingweaveError, match="LongNet"):
        rw.attention(x.q, x.k, x.v, pattern, terms=lambda s, b, h, q, k: torch.where(q >= k, s, -INF))


# ---- other functions and modules -------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [slope, unread(slope)], ids=["terms", "tiles"])
def test_packed_sequences(function: ScoreMod) -> None:
    """A function gets the tokens of the packed axis; other packings of queries and keys have no distances."""
    q, k, v = (torch.randn(50, HEADS, 16) for _ in range(3))
    got = rw.varlen_attention(q, k, v, [0, 17, 50], terms=function)
    torch.testing.assert_close(got, rw.varlen_attention(q, k, v, [0, 17, 50], terms=rw.ALiBi(SLOPES)))
    with pytest.raises(UnsupportedError, match="packed apart"):
        rw.varlen_attention(q, k, v, [0, 17, 50], [0, 20, 50], terms=function)
    capped = rw.varlen_attention(q, k, v, [0, 17, 50], [0, 20, 50], terms=lambda s, b, h, q, k: 5 * torch.tanh(s / 5))
    torch.testing.assert_close(capped, rw.varlen_attention(q, k, v, [0, 17, 50], [0, 20, 50], terms=rw.Softcap(5.0)))


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("shape", [(60,), (6, 10), (3, 4, 5)])
def test_grids(shape: tuple[int, ...], learns: bool) -> None:
    """A function gets row-major indices, as the rows and columns of a Bias are."""
    q, k, v = (torch.randn(2, HEADS, *shape, 16) for _ in range(3))
    tables = [torch.randn(1, HEADS, 60, 60).requires_grad_(learns) for _ in range(2)]
    tables[1].data.copy_(tables[0])
    outs = [
        rw.neighborhood_attention(q, k, v, 3, terms=terms)
        for terms in (lambda s, b, h, q, k: s + tables[0][0, h, q, k], rw.Bias(tables[1]))
    ]
    torch.testing.assert_close(*outs)
    if learns:
        torch.testing.assert_close(
            *(torch.autograd.grad(out.square().sum(), t)[0] for out, t in zip(outs, tables, strict=True))
        )


def test_pages_take_no_functions() -> None:
    cache = rw.PagedCache.empty(batch=1, length=64, heads=HEADS, dim=16)
    cache.append(torch.randn(1, HEADS, 40, 16), torch.randn(1, HEADS, 40, 16))
    with pytest.raises(UnsupportedError, match="the function slope; wanted .*Softcap"):
        rw.paged_attention(torch.randn(1, HEADS, 1, 16), cache, terms=slope)  # type: ignore[arg-type]


@pytest.mark.parametrize("function", [slope, unread(slope)], ids=["terms", "tiles"])
def test_modules(function: ScoreMod) -> None:
    outs = []
    for terms in (function, rw.ALiBi(SLOPES)):
        torch.manual_seed(1)
        layer = rw.nn.MultiheadAttention(64, HEADS, batch_first=True, pattern=rw.Causal(), terms=terms)
        x = torch.randn(2, 30, 64)
        outs.append(layer(x, x, x, torch.arange(30).expand(2, -1) > 20)[0])
        assert layer(*(torch.zeros(2, 0, 64),) * 3)[0].shape == (2, 0, 64)
    torch.testing.assert_close(*outs)


# ---- compilers and transforms ----------------------------------------------------------------------------------------


# torch looks at the gradient of a tensor that is no leaf where a graph was broken
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("name", SOME)
def test_compiled_code_breaks_its_graph(name: str) -> None:
    x, case = Inputs.random(40, batch=2, heads=HEADS), CASES[name]
    tables = case.tables(2, HEADS, 40, 40)
    graphs = []

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return rw.attention(q * 2, k, v, rw.Causal(), terms=case.make(**tables)) * 3

    compiled = torch.compile(call, backend=lambda graph, inputs: graphs.append(graph) or graph)
    leaves = [x.leaves(), x.leaves()]
    outs = [function(*each) for function, each in zip((call, compiled), leaves, strict=True)]
    assert torch.equal(*outs)
    grads = [
        torch.autograd.grad(out, [*each, *tables.values()], x.dout) for out, each in zip(outs, leaves, strict=True)
    ]
    torch.testing.assert_close(*grads)
    assert graphs
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="Pass score terms"):
        torch.compile(call, backend="eager", fullgraph=True)(*x.leaves())


@pytest.mark.parametrize("name", ["distances", "pairs", "rows", "square", "unread"])
def test_checkpoints(name: str) -> None:
    """The first call of a function, in which it is compared, and the repeated one save the same tensors."""
    x, case = Inputs.random(40, batch=2, heads=HEADS), CASES[name]
    leaves, tables = x.leaves(), case.tables(2, HEADS, 40, 40)
    call = functools.partial(rw.attention, *leaves, rw.Causal(), terms=case.make(**tables))
    rw.memory.trim()
    saved = checkpoint(call, use_reentrant=False)
    inputs = [*leaves, *tables.values()]
    found, want = (torch.autograd.grad(out, inputs, x.dout) for out in (saved, call()))
    assert all(map(torch.equal, found, want))


def test_transforms() -> None:
    """Terms run in every transform, and tiles in none: that is an error."""
    x = Inputs.random(30, batch=2, heads=HEADS)

    def of_query(function: Listed) -> Callable[[Tensor], Tensor]:
        return lambda q: rw.attention(q, x.k, x.v, rw.Causal(), terms=function).sin().sum()

    got, want = (torch.func.grad(of_query(terms))(x.q) for terms in (slope, rw.ALiBi(SLOPES)))
    assert torch.equal(got, want)
    batched = [
        torch.vmap(lambda q, terms=terms: rw.attention(q, x.k, x.v, rw.Causal(), terms=terms))(
            torch.stack([x.q, 2 * x.q])
        )
        for terms in (slope, rw.ALiBi(SLOPES))
    ]
    assert torch.equal(*batched)
    for transform in (torch.func.grad, torch.func.jacfwd):
        with pytest.raises(UnsupportedError, match=r"torch\.func"):
            transform(of_query(unread(slope)))(x.q)


def test_traces_are_refused() -> None:
    """A function mode hides a function from its trace, and its tiles need values."""
    x = Inputs.random(30, heads=HEADS)
    for function in (slope, unread(slope)):
        with pytest.raises(UnsupportedError, match="a trace, or fake tensors"):
            make_fx(lambda q: rw.attention(q, x.k, x.v, rw.Causal(), terms=function))(x.q)  # noqa: B023
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(each) for each in (x.q, x.k, x.v)]
        assert rw.attention(*fake, rw.Causal(), terms=lambda s, b, h, q, k: 5 * torch.tanh(s / 5)).shape == x.q.shape
        with pytest.raises(UnsupportedError, match="a trace, or fake tensors"):
            rw.attention(*fake, rw.Causal(), terms=lambda s, b, h, q, k: s + s * s)


def test_a_repeated_call_has_the_pattern_of_the_first() -> None:
    """Programs of patterns with tensors are found by the object, so a new function of the same values finds one."""
    x, ids, causal = Inputs.random(40, heads=HEADS), torch.arange(40) // 9, rw.Causal()

    def narrowed() -> Pattern:
        terms: ScoreMod = lambda s, b, h, q, k: torch.where(ids[q] == ids[k], s, -INF)  # noqa: E731
        return calls.by_terms(calls.scored(Arguments(x.q, x.k, x.v, causal, terms=terms))).pattern

    first = narrowed()
    assert torch.equal(first.to_dense(40), (causal & rw.Documents(ids=ids)).to_dense(40))
    assert narrowed() is first
    ids.add_(torch.arange(40) // 20)
    assert torch.equal(narrowed().to_dense(40), (causal & rw.Documents(ids=ids)).to_dense(40))


def test_autocast_does_not_reach_the_function() -> None:
    """A product in the function is in its own dtype, forward and backward; the call rounds queries, keys and values."""
    x, w = Inputs.random(40, heads=HEADS), torch.randn(16, 16, requires_grad=True)
    for function in (
        lambda s, b, h, q, k: s + (w @ w)[q % 16, k % 16] / 9,
        unread(lambda s, b, h, q, k: s + (w @ w)[q % 16, k % 16] / 9),
    ):
        found = []
        for enabled, inputs in ((True, (x.q, x.k, x.v)), (False, [each.bfloat16() for each in (x.q, x.k, x.v)])):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                out = rw.attention(*inputs, rw.Causal(), terms=function)
            found.append([out, *torch.autograd.grad(out.float().sum(), w)])
        assert found[0][0].dtype == torch.bfloat16
        assert all(map(torch.equal, *found))


# ---- explanation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("terms", "said"),
    [
        (slope, "ALiBi"),
        ([rw.Softcap(5.0), slope], "Softcap, ALiBi"),
        (
            [slope, lambda s, b, h, q, k: s * 2],
            "general path, slower than terms: it multiplies the score",
        ),
        (unread(slope), "general path, slower than terms: "),
        (lambda s, b, h, q, k: s * 2, "factor 2"),
    ],
    ids=["a term", "terms", "a factor after a term", "unread", "a factor"],
)
def test_explain_tells_the_way(terms: Listed, said: str) -> None:
    text = rw.explain(rw.Causal(), 40, heads=HEADS, terms=terms).splitlines()[-1]
    assert text.startswith(f"score_mod {said}")
    assert rw.explain(rw.Causal(), 40, heads=HEADS, terms=terms, as_dict=True)["score_mod"].startswith(said)


def test_explain_counts_the_costs_of_any_function() -> None:
    """The tiles are those of the call, and smaller for a function that computes many values for a pair."""
    window, wide = rw.SlidingWindow(200), torch.randn(40, 4096)
    facts = rw.explain(window, 2000, heads=HEADS, terms=unread(slope), dropout=0.1, as_dict=True)
    assert facts["backend"]["chosen"] == [{"backend": "dense_batched", "branches": 1}]
    assert facts["backend"]["others"]["cpu"] == ["it computes no score function"]
    assert facts["sizes"]["features"] == ["dropout", "score function"]
    plain = rw.explain(window, 2000, heads=HEADS, backend="dense_batched", as_dict=True)
    assert (facts["pairs"], facts["tiles"], facts["flops"]) == (plain["pairs"], plain["tiles"], plain["flops"])
    assert facts["memory"]["scratch"] > 0
    small = rw.explain(
        window, 2000, heads=HEADS, terms=lambda s, b, h, q, k: s + (wide[q % 40] * k).sin().sum(), as_dict=True
    )
    assert small["branches"][0]["tile"] == [[16, 128]]
    assert small["backend"]["tiles"] == []
    with pytest.raises(PatternError, match="a relation"):
        rw.explain(rw.LongNet([32, 64], [1, 2]), 64, terms=unread(slope))


@pytest.mark.parametrize("name", HAND)
def test_functions_are_recognised_at_other_positions(name: str) -> None:
    case = CASES[name]
    terms = case.make(**case.tables(2, HEADS, 40 + 12, 61 + 7))
    said = rw.explain(rw.Causal(), 40, 61, heads=HEADS, batch=2, q_offset=12, k_offset=7, terms=terms, as_dict=True)[
        "score_mod"
    ]
    assert "general" not in said


def test_explain_refuses_what_a_call_refuses() -> None:
    with pytest.raises(UnsupportedError, match="random numbers"):
        rw.explain(rw.Causal(), 40, heads=HEADS, terms=lambda s, b, h, q, k: s + torch.rand(()))
    with pytest.raises(UnsupportedError, match="tensors on cuda"):
        rw.explain(rw.Causal(), 40, heads=HEADS, terms=slope, device="cuda")
    with pytest.raises(UnsupportedError, match="backend: got 'cpu'"):
        rw.explain(rw.Causal(), 40, heads=HEADS, terms=unread(slope), backend="cpu")
    with pytest.raises(ShapeError, match="table"):
        rw.explain(rw.Causal(), 40, heads=HEADS, terms=[unread(slope), rw.DistanceBias(torch.zeros(3, 5))])
    assert "cpu x 1 (asked for cpu)" in rw.explain(rw.Causal(), 40, heads=HEADS, terms=slope, backend="cpu")
