"""FlexAttention's function is its definition: outputs, log-sum-exps, and the gradients of all tensors."""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention as torch_flex

from ringweave.cache import PATTERNS
from ringweave.integrations.flex_attention import explain, flex_attention, recognised, symbols
from ringweave.integrations.flex_attention.agreement import Sizes
from ringweave.integrations.flex_attention.block_masks import pattern_of
from ringweave.integrations.flex_attention.score_tiles import attend
from ringweave.integrations.flex_attention.writes import IN_PLACE
from ringweave.patterns.per_pair import per_pair
from ringweave.terms.term import Pairs
from ringweave.trace.relation import Place

from ..oracle import Inputs
from .flex_cases import MASKS, compare

# torch warns of its own function without a compiler, and of return_lse
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without", "ignore:return_lse is deprecated")

N = 150
Made = Callable[..., Callable[..., Tensor]]


def softcap() -> Any:
    return lambda s, b, h, q, k: 5.0 * torch.tanh(s / 5.0)


def alibi(slopes: Tensor) -> Any:
    return lambda s, b, h, q, k: s - slopes[h] * (q - k).abs()


def by_distance(table: Tensor) -> Any:
    return lambda s, b, h, q, k: s + table[h, q - k + N]


def clipped(table: Tensor) -> Any:
    return lambda s, b, h, q, k: s + table[h, torch.clamp(k - q, -8, 8) + 8]


def by_pair(table: Tensor) -> Any:
    return lambda s, b, h, q, k: s + table[b, h, q, k]


def of_head_and_cap(table: Tensor, biases: Tensor) -> Any:
    return lambda s, b, h, q, k: 9 * (0.7 * s / 9).tanh() + table[q, k] - biases[h]


def scaled_by_head(factors: Tensor) -> Any:
    return lambda s, b, h, q, k: s * factors[h] + (q - k).abs() * 0.01


def squared(table: Tensor) -> Any:
    return lambda s, b, h, q, k: s + 0.1 * s * s - table[k] * q / 50


def masking() -> Any:
    return lambda s, b, h, q, k: torch.where((q - k) % 4 > 0, s, -float("inf"))


#: Score functions with the shapes of their tables, and the terms that they are recognised as.
SCORES: dict[str, tuple[Made, dict[str, tuple[int, ...]], str]] = {
    "softcap": (softcap, {}, "Softcap"),
    "alibi": (alibi, {"slopes": (4,)}, "DistanceBias"),
    "by_distance": (by_distance, {"table": (4, 2 * N)}, "DistanceBias"),
    "clipped": (clipped, {"table": (4, 17)}, "DistanceBias"),
    "by_pair": (by_pair, {"table": (2, 4, N, N)}, "Bias"),
    "of_head_and_cap": (of_head_and_cap, {"table": (N, N), "biases": (4,)}, "Softcap, Bias, DistanceBias"),
    "scaled_by_head": (scaled_by_head, {"factors": (4,)}, "general path"),
    "squared": (squared, {"table": (N,)}, "general path"),
    "masking": (masking, {}, "general path"),
}


def tables(name: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {each: torch.randn(shape, generator=generator).to(dtype) for each, shape in SCORES[name][1].items()}


def test_the_signature_is_torchs() -> None:
    ours, theirs = inspect.signature(flex_attention).parameters, inspect.signature(torch_flex).parameters
    assert [(p.name, p.kind, p.default) for p in ours.values()] == [
        (p.name, p.kind, p.default) for p in theirs.values()
    ]


@pytest.mark.parametrize(("nq", "nk"), [(N, N), (37, 129)])
@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask: str, nq: int, nk: int) -> None:
    """Each kind of mask, with lengths that are no multiple of a block, and grouped heads."""
    x = Inputs.random(nq, nk, batch=2, heads=4, kv_heads=2)
    compare(x, MASKS[mask](2, 4, nq, nk), None, {})


@pytest.mark.parametrize("mask", ["none", "causal", "sparse", "listed"])
@pytest.mark.parametrize("score", SCORES)
def test_scores(score: str, mask: str) -> None:
    x = Inputs.random(N, batch=2, heads=4)
    compare(x, MASKS[mask](2, 4, N, N), SCORES[score][0], tables(score))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("score", SCORES)
def test_dtypes(score: str, dtype: torch.dtype) -> None:
    """Tables have gradients in their own dtype."""
    x = Inputs.random(N, batch=2, heads=4, kv_heads=1, dim=24, value_dim=8, dtype=dtype)
    compare(x, MASKS["causal"](2, 4, N, N), SCORES[score][0], tables(score, dtype), scale=0.3)


@pytest.mark.parametrize("score", SCORES)
def test_what_is_recognised(score: str) -> None:
    x = Inputs.random(N, batch=2, heads=4)
    learned = {name: table.requires_grad_() for name, table in tables(score).items()}
    text = explain(x.q, x.k, x.v, SCORES[score][0](**learned)).splitlines()[-1]
    assert text.startswith("score_mod ")
    assert SCORES[score][2] in text


@pytest.mark.parametrize("score", SCORES)
def test_both_paths_are_equal(score: str) -> None:
    """A recognised function has the results and gradients of the general path."""
    x = Inputs.random(N, batch=2, heads=4, kv_heads=2)
    mask = MASKS["sparse"](2, 4, N, N)
    learned = [table.requires_grad_() for table in tables(score).values()]
    score_mod, leaves = SCORES[score][0](**dict(zip(tables(score), learned, strict=True))), x.leaves()
    results = [
        flex_attention(*leaves, score_mod, mask, enable_gqa=True, return_lse=True),
        attend(*leaves, pattern_of(mask, Place(2, 4, N, N)), score_mod, scale=0.25)[:2],
    ]
    torch.testing.assert_close(*results)
    grads = [torch.autograd.grad(out, [*leaves, *learned], x.dout) for out, _ in results]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=2e-5)


INF = float("inf")
MINUS_INF: dict[str, tuple[Made, dict[str, tuple[int, ...]]]] = {
    "by distance": (lambda: lambda s, b, h, q, k: s + torch.where(q >= k + 5, 0.0, -INF), {}),
    "everywhere": (lambda: lambda s, b, h, q, k: s + torch.where(q - k > 1000, 0.0, -INF), {}),
    "by head": (lambda: lambda s, b, h, q, k: s + torch.where(h > 1, 0.0, -INF), {}),
    "by key": (lambda: lambda s, b, h, q, k: s + torch.where((k < 90) & (b > 0), 0.0, -INF), {}),
    "after a cap": (lambda: lambda s, b, h, q, k: 9 * torch.tanh(s / 9) + torch.where(q >= k + 5, 0.0, -INF), {}),
    "selected": (lambda: lambda s, b, h, q, k: torch.where(q >= k + 5, s, -INF), {}),
    "with a table": (lambda table: lambda s, b, h, q, k: torch.where(q >= k + 5, s + table[h], -INF), {"table": (4,)}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("name", MINUS_INF)
def test_scores_of_minus_infinity_are_masked(name: str, mask: str, dtype: torch.dtype) -> None:
    """A row in which all scores are -inf is an empty row."""
    made, shapes = MINUS_INF[name]
    x = Inputs.random(N, batch=2, heads=4, dtype=dtype)
    compare(x, MASKS[mask](2, 4, N, N), made, {each: torch.randn(shape) for each, shape in shapes.items()})


SPELLINGS: dict[str, tuple[str, Any]] = {
    "nothing": ("none", lambda s, b, h, q, k: s),
    "cap by a factor": ("Softcap", lambda s, b, h, q, k: (s * (1 / 3.0)).tanh() * 3.0),
    "cap in a tensor": ("Softcap", lambda s, b, h, q, k, cap=torch.tensor(3.0): cap * torch.tanh(s / cap)),
    "scaled": ("factor 2.5", lambda s, b, h, q, k: s * 5 / 2),
    "negative slopes": ("ALiBi", lambda s, b, h, q, k: s + -(abs(k - q) * torch.tensor([0.5, 0.1])[h])),
    "negative distances": ("ALiBi", lambda s, b, h, q, k: s + -abs(k - q) * torch.tensor([0.5, 0.1])[h]),
    "opposite slopes": ("ALiBi", lambda s, b, h, q, k: s + (q - k).abs() * -torch.tensor([0.5, 0.1])[h]),
    "one slope": ("ALiBi", lambda s, b, h, q, k: s - 0.1 * torch.abs(q - k)),
    # attention-gym's
    "slopes of a formula": ("DistanceBias", lambda s, b, h, q, k: s + (k - q) * torch.exp2(-((h + 1) * 8.0 / 2))),
    "relative": ("DistanceBias", lambda s, b, h, q, k: s + (q - k)),
    "floats": ("DistanceBias", lambda s, b, h, q, k: s - (q.float() - k.float()).pow(2) / 100),
    "comparison": ("DistanceBias", lambda s, b, h, q, k: torch.where(q > k, 0.5, -1.0) + s),
    "shifted": ("DistanceBias", lambda s, b, h, q, k, t=torch.randn(79): s + t[(k + 39) - q]),
    "masked": ("DistanceBias", lambda s, b, h, q, k: s + torch.where(q >= k, 0.0, float("-inf"))),
    "of keys": ("Bias", lambda s, b, h, q, k, t=torch.randn(2, 40): s + t[b, k]),
    "of queries": ("Bias", lambda s, b, h, q, k: s + q % 3),
    "step by step": ("Bias", lambda s, b, h, q, k, t=torch.randn(2, 1, 40, 60): s + t[b][0][q][k]),
    "transposed": ("Bias", lambda s, b, h, q, k, t=torch.randn(40, 2, 40): s + t[k, h, q]),
    "two": ("ALiBi, DistanceBias", lambda s, b, h, q, k: s - (q - k).abs() * 0.1 + h),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings(name: str) -> None:
    """Spellings that are recognised, which torch's own function computes too."""
    what, score_mod = SPELLINGS[name]
    x = Inputs.random(40, batch=2, heads=2)
    got = flex_attention(x.q, x.k, x.v, score_mod, return_lse=True)
    want = torch_flex(x.q, x.k, x.v, score_mod, return_lse=True)
    torch.testing.assert_close(got, want)
    assert explain(x.q, x.k, x.v, score_mod).splitlines()[-1] == f"score_mod {what}"
    assert explain(x.q, x.k, x.v, score_mod, as_dict=True)["score_mod"] == what


class Straight(torch.autograd.Function):
    """The identity with a gradient of its own."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 3 * grad

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor) -> tuple[Tensor, Any]:
        return Straight.apply(x), dims[0]


UNKNOWN: dict[str, tuple[str, Any]] = {
    "other cap": ("no score term", lambda s, b, h, q, k: 5.0 * torch.tanh(s / 4.0)),
    "product of positions": ("neither", lambda s, b, h, q, k: s + q * k * 1e-3),
    "position of a group": ("neither", lambda s, b, h, q, k: s - (q // 4 - k // 4).abs() * 0.1),
    "rounded": ("neither", lambda s, b, h, q, k: s + ((q + 0.3) - k) * 0.01),
    "after a cap": ("multiplies the score after", lambda s, b, h, q, k: 2 * (3 * torch.tanh(s / 3))),
    "detached": ("no score term", lambda s, b, h, q, k: s.detach() + s * 0),
    "own gradient": ("autograd.Function", lambda s, b, h, q, k: Straight.apply(s)),
    "learned keys": ("needs gradients", lambda s, b, h, q, k, t=torch.ones(40, requires_grad=True): s + t[k]),
    "distance by batch": ("neither", lambda s, b, h, q, k: s + (b + 1) * (q - k) * 0.01),
}


OFFSET = torch.tensor(9)


def of_tensors(d: Any) -> Any:
    """Penalise a distance in a tensor, and ignore a number."""
    return 0.3 * d.clamp(min=0) if isinstance(d, Tensor) else 0.0


def of_symbols(d: Any) -> Any:
    return 0.3 * d.clamp(min=0) if type(d) is Tensor else 0.0


def swallowing(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    d = (q - k).float()
    with contextlib.suppress(Exception):
        d.abs_()
    return s - 0.1 * d


def swallowing_an_attribute(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    try:
        return s - 0.1 * (q - k) * (0 if s.requires_grad else 1)
    except Exception:  # noqa: BLE001
        return s


def writing(write: Callable[[Tensor], object]) -> Any:
    """Return a function that writes to a distance and does not use the result of the write."""

    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        d = (q - k).float()
        write(d)
        return s - 0.1 * d

    return score_mod


def writing_to_the_score(write: Callable[[Tensor, Tensor], object]) -> Any:
    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        write(s, 0.1 * (q - k))
        return s

    return score_mod


#: Functions that were recognised as other ones, by the fault of a reader.
MISREAD: dict[str, dict[str, Any]] = {
    "offsets": {
        "after": lambda s, b, h, q, k: s - 0.3 * (q - k + 9).abs(),
        "in a tensor": lambda s, b, h, q, k: s - (q - k + OFFSET).abs() * 0.3,
        "on both": lambda s, b, h, q, k: s - 0.3 * abs((q + 5) - (k - 4)),
        "of the last key": lambda s, b, h, q, k: s + -abs(k - (q + 40 - 30)) * torch.tensor([0.5, 0.1])[h],
        "of one": lambda s, b, h, q, k: s - 0.01 * (k - q - 1).abs(),
        "of floats": lambda s, b, h, q, k: s - 0.3 * (q.float() - k.float() + 2).abs(),
        "negated": lambda s, b, h, q, k: s - 0.3 * (-(q - 3) + k).abs(),
        "large": lambda s, b, h, q, k: s - 0.3 * ((q + 2**24 + 1).float() - (k + 2**24).float()),
    },
    "writes": {
        "abs_": writing(torch.abs_),
        "method": writing(lambda d: d.abs_()),
        "relu_": writing(lambda d: torch.nn.functional.relu_(d)),
        "inplace=": writing(lambda d: torch.nn.functional.relu(d, inplace=True)),
        "inplace by position": writing(lambda d: torch.nn.functional.leaky_relu(d, 0.2, True)),
        "overload": writing(lambda d: torch.ops.aten.relu_.default(d)),
        "packet": writing(lambda d: torch.ops.aten.abs_(d)),
        "module": writing(torch.nn.ReLU(inplace=True)),
    },
    "writes to a score": {
        "tanh_": writing_to_the_score(lambda s, d: torch.tanh_(s)),
        "add_": writing_to_the_score(lambda s, d: s.add_(d)),
        "mul_": writing_to_the_score(lambda s, d: s.mul_(2)),
    },
    "operators in place": {
        "second name": writing_to_the_score(lambda s, d: operator.iadd(s, d)),
        "product": writing_to_the_score(lambda s, d: operator.imul(s, 0.5)),
        "difference": writing_to_the_score(lambda s, d: operator.isub(s, d)),
        "quotient": writing_to_the_score(lambda s, d: operator.itruediv(s, 3)),
        "of a distance": writing(lambda d: operator.ipow(d, 2)),
    },
    "types": {
        "isinstance": lambda s, b, h, q, k: s - of_tensors(q - k),
        "is_tensor": lambda s, b, h, q, k: s * 2 if torch.is_tensor(s) else s,
        "class": lambda s, b, h, q, k: s - 0.1 * (q - k) if s.__class__ is Tensor else s,
    },
    "types that no symbol sees": {
        "type": lambda s, b, h, q, k: s - of_symbols(q - k),
        "subclass": lambda s, b, h, q, k: s * 0.5 if issubclass(type(s), Tensor) else s,
        "name": lambda s, b, h, q, k: s if type(k).__name__ == "Symbol" else s - 0.2 * (q - k).abs(),
    },
    "caught refusals": {"write": swallowing, "attribute": swallowing_an_attribute},
}
EACH_MISREAD = [(kind, name) for kind, each in MISREAD.items() for name in each]


@pytest.mark.parametrize(("kind", "name"), EACH_MISREAD)
def test_functions_that_were_misread(kind: str, name: str) -> None:
    """Offsets of a distance, writes, and questions for types are computed as torch's own function computes them."""
    x, score_mod = Inputs.random(40, batch=2, heads=2), MISREAD[kind][name]
    got = flex_attention(x.q, x.k, x.v, score_mod, return_lse=True)
    with torch.no_grad():
        want = torch_flex(x.q, x.k, x.v, score_mod, return_lse=True)
    torch.testing.assert_close(got, want)
    said = explain(x.q, x.k, x.v, score_mod, as_dict=True)["score_mod"]
    assert said.startswith("DistanceBias" if kind == "offsets" and name != "large" else "general path")


LOOKED_UP = torch.randn(2, 60, 60)


@pytest.mark.parametrize(
    ("why", "score_mod"),
    [
        ("neither", lambda s, b, h, q, k: s + LOOKED_UP[h, q + 1, k]),
        ("neither", lambda s, b, h, q, k: s + LOOKED_UP[h, q, :][k + 1]),
        ("subtracts a value from itself", lambda s, b, h, q, k: s + ((d := q * 0.1 + k) - d)),
        ("writes to a score or an index in place", lambda s, b, h, q, k: operator.iadd(s, 1.0)),
        ("writes to a tensor", lambda s, b, h, q, k: s + torch.zeros(2).fill_(1)[h]),
        ("asks for the type", lambda s, b, h, q, k: s * 2 if isinstance(s, Tensor) else s),
        ("another value than its formula", lambda s, b, h, q, k: s * 2 if type(s) is Tensor else s),
        ("no_grad", lambda s, b, h, q, k: torch.no_grad()(lambda x: x * 2)(s)),
        ("sets .data", lambda s, b, h, q, k: [setattr(s, "data", s), s][1]),
        ("out of range of a scale", lambda s, b, h, q, k: s * 1e-37),
    ],
)
def test_reasons_for_the_general_path(why: str, score_mod: Any) -> None:
    x = Inputs.random(40, batch=1, heads=2)
    assert why in explain(x.q, x.k, x.v, score_mod, as_dict=True)["score_mod"]


def test_a_bias_that_is_added_many_times_is_read_once() -> None:
    """Each summand of a formula with shared sums becomes one term, in time that grows with the formula."""
    rows, columns = torch.randn(40), torch.randn(40)

    def doubled(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        total = rows[q] + columns[k]
        for _ in range(60):
            total = total + total
        return s + total - 3.0

    found = recognised.recognised(doubled, Sizes(1, 2, 40, 40, torch.float32)).terms
    assert [type(term).__name__ for term in found] == ["Bias", "Bias", "DistanceBias"]
    got = found[0].tables[0][0, 0] + found[1].tables[0][0, 0]
    torch.testing.assert_close(got, (rows[:, None] + columns) * 2.0**60)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("of", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_slopes_are_rounded_as_the_function_rounds(dtype: torch.dtype, of: torch.dtype) -> None:
    """A slope of 16 bits makes a product of 16 bits, and a number one of torch's default dtype."""
    slopes = torch.tensor([0.3, 0.07]).to(of)
    for score_mod in (
        lambda s, b, h, q, k: s + slopes[h] * (q - k).abs(),
        lambda s, b, h, q, k: s + 0.1 * (q - k).abs(),
        lambda s, b, h, q, k: s + 2 * (q - k).abs(),
    ):
        (term,) = recognised.recognised(score_mod, Sizes(1, 2, 300, 300, dtype)).terms
        h, q, k = torch.arange(2)[:, None, None], torch.arange(300)[:, None], torch.arange(300)
        want = per_pair(functools.partial(score_mod, torch.zeros((), dtype=dtype), torch.tensor(0)), h, q, k).to(dtype)
        got = term.apply(torch.zeros(2, 300, 300, dtype=dtype), Pairs(h * 0, h, q, k, q, k))
        assert torch.equal(got, want)


def without_constants(patch: pytest.MonkeyPatch) -> None:
    line = recognised._Positions.line

    def broken(self: Any, x: Any) -> Any:
        found = line(self, x)
        return None if found is None else (*found[:2], 0)

    patch.setattr(recognised._Positions, "line", broken)


def without_operators(patch: pytest.MonkeyPatch) -> None:
    for name in IN_PLACE:
        patch.delattr(symbols.Symbol, name)


def without_types(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(symbols.Trace, "active", property(lambda self: False, lambda self, value: None), raising=False)


def without_notes(patch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any, why: str) -> None:
        raise symbols.UntraceableError(why)

    patch.setattr(symbols.Trace, "refuse", refuse)


#: Planted faults: the function that plants one, by the kinds of functions that are then misread.
FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "offsets": without_constants,
    "writes": lambda patch: patch.setattr(symbols, "written", lambda *args: None),
    "writes to a score": lambda patch: patch.setattr(symbols, "written", lambda *args: None),
    "operators in place": without_operators,
    "types": without_types,
    "types that no symbol sees": lambda patch: None,
    "caught refusals": without_notes,
}


@pytest.mark.parametrize(("kind", "name"), [each for each in EACH_MISREAD if each[1] not in ("large", "attribute")])
def test_a_misread_function_is_found_by_comparing_it(kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the reader's own check, the comparison at some pairs alone refuses the function, once and again."""
    monkeypatch.setattr(symbols.Symbol, "__getattr__", unguarded)
    FAULTS[kind](monkeypatch)
    PATTERNS.clear()
    for sizes in ((1, 1, 40, 40), (2, 2, 300, 200), (1, 2, 2, 40)):
        for _ in range(2):
            with pytest.raises(symbols.UntraceableError, match="another value than its formula"):
                recognised.recognised(MISREAD[kind][name], Sizes(*sizes, torch.float32))
    PATTERNS.clear()


def unguarded(self: Any, name: str) -> Any:
    """Record any method, and raise for an attribute."""
    method = getattr(Tensor, name)
    if not callable(method):
        raise AttributeError(name)
    return lambda *args, **kwargs: self.trace.__torch_function__(method, (), (self, *args), kwargs)


@pytest.mark.parametrize("name", UNKNOWN)
def test_near_spellings_take_the_general_path(name: str) -> None:
    why, score_mod = UNKNOWN[name]
    x = Inputs.random(40, batch=2, heads=2)
    line = explain(x.q, x.k, x.v, score_mod).splitlines()[-1]
    assert line.startswith("score_mod general path, slower than terms: ")
    assert why in line
    got = flex_attention(x.q, x.k, x.v, score_mod, return_lse=True)
    with torch.no_grad():
        want = torch_flex(x.q, x.k, x.v, score_mod, return_lse=True)
    torch.testing.assert_close(got, want)
