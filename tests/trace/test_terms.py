"""Score functions are read as the terms that compute them: results and gradients of the function over single pairs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ringweave.terms import KINDS
from ringweave.terms.term import Pairs
from ringweave.trace.graph import UntraceableError
from ringweave.trace.relation import as_relation
from ringweave.trace.symbols import trace
from ringweave.trace.terms import Terms, as_terms
from ringweave.types import Place

from ..oracle import check_errors, errors
from .definitions import dense
from .scores import SCORES, SIZES, TYPES, Score, ScoreMod, by_pair

# torch has no rule to map some operations in place, and maps them one by one
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")

PLACE = Place(*SIZES)
CASES = [
    pytest.param(score, learns, id=f"{name}{', learned' * learns}")
    for name, score in SCORES.items()
    for learns in ((False, True) if score.shapes else (False,))
]


def read(score_mod: ScoreMod, dtype: torch.dtype = torch.float32, place: Place = PLACE) -> Terms:
    return as_terms(trace(score_mod, dtype), place)


def said(score_mod: ScoreMod) -> str:
    """Return how a function is read."""
    try:
        graph = trace(score_mod, torch.float32)
    except UntraceableError as error:
        return f"refused: {error}"
    try:
        terms = as_terms(graph, PLACE)
    except UntraceableError as error:
        return f"general: {error}"
    factors = [] if terms.factor == 1 else [f"factor {terms.factor:g}"]
    return ", ".join([*factors, *(kind for kind, _ in terms.terms), *["mask"] * bool(terms.masks)])


def computed(terms: Terms, scores: Tensor, place: Place = PLACE) -> Tensor:
    """Apply terms and their mask to scores (B, H, Nq, Nk)."""
    b, h, q, k = (torch.arange(n).reshape([-1 if i == j else 1 for j in range(4)]) for i, n in enumerate(scores.shape))
    found = scores * terms.factor
    for kind, value in terms.terms:
        found = KINDS[kind](value).apply(found, Pairs(b, h, q, k, q, k))  # type: ignore[call-arg]
    for graph, no in terms.masks:
        found = found.masked_fill(dense(as_relation(graph, place), place) == no, -torch.inf)
    return found


@pytest.mark.parametrize(("score", "learns"), CASES)
def test_what_a_function_is_read_as(score: Score, learns: bool) -> None:
    got, want = said(score.make(*score.tables(learns=learns))), score.said(learns)
    kind, _, words = want.partition(": ")
    if words:
        assert got.startswith(kind)
        assert words in got
    else:
        assert got.startswith("factor -") if want == "factor" else got == want


@pytest.mark.parametrize(
    ("score", "learns"),
    [case for case in CASES if case.values[0] not in TYPES.values()],  # type: ignore[operator]
)
def test_terms_compute_the_function(score: Score, learns: bool) -> None:
    """Scores and the gradients of all tensors, at twice the error of the function itself, against float64."""
    generator = torch.Generator().manual_seed(3)
    drawn, grad = torch.randn(2, *SIZES, generator=generator) * 3
    runs: dict[str, dict[str, Tensor]] = {}
    for name in ("got", "theirs", "want"):
        dtype = torch.float64 if name == "want" else torch.float32
        tables, scores = score.tables(dtype, learns), drawn.to(dtype).requires_grad_()
        score_mod = score.make(*tables)
        if name != "got":
            out = by_pair(score_mod, scores)
        else:
            try:
                out = computed(read(score_mod), scores)
            except UntraceableError:
                return
            assert out.dtype == torch.float32
        leaves = [scores, *tables] if learns else [scores]
        # pairs of a mask have no gradient
        grads = torch.autograd.grad(
            out, leaves, grad.to(out.dtype).masked_fill(out == -torch.inf, 0), allow_unused=True
        )
        found = {str(i): x for i, x in enumerate(grads) if x is not None}
        runs[name] = {"out": out, **found}
    assert runs["got"].keys() == runs["want"].keys()
    # a gradient of a table is a sum over pairs
    floor = {name: (1 if name == "out" else 4) * torch.finfo(torch.float32).eps for name in runs["got"]}
    check_errors(runs["got"], runs["want"], [errors(runs["theirs"], runs["want"])], floor)


def test_a_bias_that_is_added_many_times_is_read_once() -> None:
    """Each summand of a formula with shared sums becomes one term, in time that grows with the formula."""
    rows, columns = torch.randn(40), torch.randn(40)

    def doubled(times: int) -> ScoreMod:
        def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            total = rows[q] + columns[k]
            for _ in range(times):
                total = total + total
            return s + total - 3.0

        return score_mod

    found = read(doubled(60), place=Place(1, 2, 40, 40)).terms
    assert [kind for kind, _ in found] == ["Bias", "Bias", "DistanceBias"]
    assert isinstance(found[0][1], Tensor)
    assert isinstance(found[1][1], Tensor)
    torch.testing.assert_close(found[0][1][0, 0] + found[1][1][0, 0], (rows[:, None] + columns) * 2.0**60)
    with pytest.raises(UntraceableError, match="nested too deeply"):
        read(doubled(1100))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("of", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_slopes_are_rounded_as_the_function_rounds(dtype: torch.dtype, of: torch.dtype) -> None:
    """A slope of 16 bits makes a product of 16 bits, and a number one of torch's default dtype."""
    slopes = torch.tensor([0.3, 0.07]).to(of)
    scores = torch.zeros(1, 2, 300, 300, dtype=dtype)
    for score_mod in (
        lambda s, b, h, q, k: s + slopes[h] * (q - k).abs(),
        lambda s, b, h, q, k: s + 0.1 * (q - k).abs(),
        lambda s, b, h, q, k: s + 2 * (q - k).abs(),
    ):
        place = Place(*scores.shape)
        assert torch.equal(computed(read(score_mod, dtype, place), scores, place), by_pair(score_mod, scores).to(dtype))
