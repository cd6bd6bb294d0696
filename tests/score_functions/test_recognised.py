"""Terms of a score function are kept while nothing of the function changes, and compared with it before they are trusted."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask

from ringweave.cache import PATTERNS
from ringweave.errors import RingweaveError
from ringweave.integrations.flex_attention import explain, flex_attention
from ringweave.patterns import Causal
from ringweave.score_functions import recognised
from ringweave.score_functions.reading import Positions, read
from ringweave.trace import symbols, values
from ringweave.types import Place

from ..integrations.flex_cases import scored
from ..oracle import Inputs
from ..oracle import attention as by_definition
from ..trace import scores as corpus

N = 40
INF = float("inf")


def expected(x: Inputs, score_mod: Any) -> Tensor:
    pairs = torch.ones(*x.q.shape[:3], x.k.shape[2])
    return by_definition(x.q, x.k, x.v, pairs, scored=lambda t: scored(score_mod, t.detach()))[0]


def check(x: Inputs, score_mod: Any) -> None:
    torch.testing.assert_close(flex_attention(x.q, x.k, x.v, score_mod), expected(x, score_mod))


CHANGES: dict[str, Callable[[Tensor], object]] = {
    "nothing": lambda table: None,
    "in place": lambda table: table.add_(1),
    "data": lambda table: table.data.mul_(2),
    "memory": lambda table: table.numpy().__setitem__(0, 5.0),
    "another storage": lambda table: table.set_(torch.full((2, N, N), 0.5)),
    "gradients": lambda table: table.requires_grad_(),
}
READS: dict[str, Callable[[Tensor], Any]] = {
    "slopes": lambda t: lambda s, b, h, q, k: s - t[h, 0, 0] * (q - k).abs(),
    "distances": lambda t: lambda s, b, h, q, k: s + t[h, 0, (q - k).clamp(0, 20)],
    "a view": lambda t: lambda s, b, h, q, k: s + t[h, q, k],
    "keys": lambda t: lambda s, b, h, q, k: s + t[0, 0, k],
    "a number": lambda t: lambda s, b, h, q, k, c=t.view(-1)[0]: s + c,
    "a mask": lambda t: lambda s, b, h, q, k: torch.where(t[0, 0, k] > 0, s, -INF),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("reads", READS)
def test_what_a_function_reads_may_change_between_calls(reads: str, change: str) -> None:
    x, table = Inputs.random(N), torch.randn(2, N, N, generator=torch.Generator().manual_seed(1))
    score_mod = READS[reads](table)
    for _ in range(2):
        check(x, score_mod)
        with torch.no_grad() if change != "gradients" else torch.enable_grad():
            CHANGES[change](table)
        check(x, score_mod)


def test_equal_contents_of_other_memory() -> None:
    """A term that is a view of a table is not used for another table with the contents that the first one had."""
    x, one = Inputs.random(N), torch.randn(1, N, N)
    other = one.clone()
    make: Any = lambda t: lambda s, b, h, q, k: s + t[0, q, k]  # noqa: E731
    check(x, make(one))
    one.zero_()
    check(x, make(other))
    check(x, make(one))


@pytest.mark.parametrize("reads", READS)
def test_the_first_call_may_be_without_gradients_or_in_a_transform(reads: str) -> None:
    x, table = Inputs.random(N), torch.rand(2, N, N)
    score_mod = READS[reads](table)

    def grads() -> tuple[Tensor, ...]:
        leaves = x.leaves()
        return torch.autograd.grad(flex_attention(*leaves, score_mod), leaves, x.dout)

    def of_query(q: Tensor) -> Tensor:
        return (flex_attention(q, x.k, x.v, score_mod) * x.dout).sum()

    with torch.inference_mode():
        flex_attention(x.q, x.k, x.v, score_mod)
    in_transform = torch.func.grad(of_query)(x.q)
    with torch.no_grad():
        flex_attention(x.q, x.k, x.v, score_mod)
    want = grads()
    PATTERNS.clear()
    torch.testing.assert_close(grads(), want)
    torch.testing.assert_close(in_transform, want[0])


@pytest.mark.parametrize("reads", READS)
def test_a_transform_leaves_nothing_behind(reads: str) -> None:
    """A function that is first called in a transform is read as in any other call, there and later."""
    x, table, found = Inputs.random(N), torch.rand(2, N, N) - 0.5, list[str]()
    score_mod = READS[reads](table)
    PATTERNS.clear()

    def of_query(q: Tensor) -> Tensor:
        found.append(read((score_mod,), Positions(Place(*q.shape[:3], N)), torch.float32, 1.0).said)
        return flex_attention(q, x.k, x.v, score_mod).sum()

    torch.func.grad(of_query)(x.q)
    check(x, score_mod)
    of_query(x.q)
    assert found[0] == found[1]


def test_a_function_that_disagrees_is_known_in_a_transform() -> None:
    x, score_mod = Inputs.random(N), corpus.TYPES["type"].make()
    check(x, score_mod)
    with pytest.raises(RingweaveError, match=r"torch\.func"):
        torch.func.grad(lambda q: flex_attention(q, x.k, x.v, score_mod).sum())(x.q)


def test_a_value_that_is_read_for_tensors_alone_may_change() -> None:
    x, factor = Inputs.random(N), [1.0]

    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s * factor[0] if isinstance(s, Tensor) else s

    for factor[0] in (1.0, 3.0, 0.5):
        check(x, score_mod)


@pytest.mark.parametrize("reads", ["slopes", "distances", "a view"])
def test_gradients_reach_a_table_at_each_call(reads: str) -> None:
    x, table = Inputs.random(N), torch.rand(2, N, N, requires_grad=True)
    score_mod = READS[reads](table)
    with torch.no_grad():
        flex_attention(x.q, x.k, x.v, score_mod)
    found = [torch.autograd.grad(flex_attention(x.q, x.k, x.v, score_mod), table, x.dout)[0] for _ in range(3)]
    assert found[0].any()
    torch.testing.assert_close(found[1:], [found[0]] * 2)


def test_a_mask_in_a_score_function_is_one_of_the_call() -> None:
    """Its pairs are skipped, also with a block mask, grouped heads and other lengths; largest scores are those of its pairs."""
    x = Inputs.random(300, 200, heads=4, kv_heads=2)
    causal: Any = lambda b, h, q, k: q >= k  # noqa: E731
    near: Any = lambda s, b, h, q, k: torch.where((q - k).abs() <= 9 + 30 * h, s, -INF)  # noqa: E731
    mask = create_block_mask(causal, None, None, 300, 200, device="cpu")
    out, aux = flex_attention(
        x.q, x.k, x.v, near, mask, enable_gqa=True, return_aux=AuxRequest(lse=True, max_scores=True)
    )
    q, k = torch.arange(300)[:, None], torch.arange(200)
    pairs = (q >= k) & ((q - k).abs() <= 9 + 30 * torch.arange(4)[:, None, None])
    scores = x.q @ x.k.repeat_interleave(2, 1).mT / 4
    want, lse = by_definition(x.q, x.k, x.v, pairs.float())
    torch.testing.assert_close((out, aux.lse), (want, lse))
    torch.testing.assert_close(aux.max_scores, scores.masked_fill(~pairs, -INF).amax(-1))
    facts = explain(x.q, x.k, x.v, near, mask, enable_gqa=True, as_dict=True)
    assert facts["score_mod"] == "mask"
    assert facts["pairs"]["density"] == pytest.approx(pairs.float().mean().item())


def test_a_function_that_fails_at_some_calls() -> None:
    x, fails = Inputs.random(N), True

    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if fails:
            raise ValueError("not now")
        return s - 0.1 * (q - k).abs()

    for _ in range(2):
        fails = True
        with pytest.raises(ValueError, match="not now"):
            flex_attention(x.q, x.k, x.v, score_mod)
        fails = False
        check(x, score_mod)


def test_threads_with_functions_of_one_code() -> None:
    x = Inputs.random(N)
    score_mods: list[Any] = [READS[name](torch.full((2, N, N), value)) for name in READS for value in (0.1, 0.9)]
    wanted = [expected(x, score_mod) for score_mod in score_mods]

    def run(which: int) -> None:
        for i in range(4 * len(score_mods)):
            at = (i * (which + 1)) % len(score_mods)
            torch.testing.assert_close(flex_attention(x.q, x.k, x.v, score_mods[at]), wanted[at])

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, range(2))) == [None, None]


def test_terms_are_tabulated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeated calls with small tables, new functions of one text too, use the terms of the first."""
    x, made = Inputs.random(N), []
    as_terms = recognised.as_terms
    monkeypatch.setattr(recognised, "as_terms", lambda *args: made.append(1) or as_terms(*args))
    small, large = torch.rand(1, 2 * N), torch.rand(1, 2**13)
    for table, times in ((small, 1), (large, 3)):
        PATTERNS.clear()
        made.clear()
        for _ in range(3):
            check(x, lambda s, b, h, q, k, t=table: s + t[0, q - k + N])
        assert len(made) == times


def test_terms_of_another_dtype_are_not_used() -> None:
    """A number times a distance is rounded in float32, which is a slope of float32 scores and a table of float64 ones."""
    score_mod: Any = lambda s, b, h, q, k: s - 0.1 * (q - k).abs()  # noqa: E731
    PATTERNS.clear()
    for dtype, said in ((torch.float32, "ALiBi"), (torch.float64, "DistanceBias"), (torch.float32, "ALiBi")):
        x = Inputs.random(N, dtype=dtype)
        assert explain(x.q, x.k, x.v, score_mod, as_dict=True)["score_mod"] == said
        check(x, score_mod)


def test_a_compiled_function_is_read_as_it_was_written() -> None:
    x, compiled = Inputs.random(N), list[Any]()
    plain: Any = lambda s, b, h, q, k: s - 0.1 * (q - k).abs()  # noqa: E731
    score_mod = torch.compile(plain, backend=lambda graph, inputs: compiled.append(graph) or graph)
    assert explain(x.q, x.k, x.v, score_mod, as_dict=True)["score_mod"] == "ALiBi"
    torch.testing.assert_close(flex_attention(x.q, x.k, x.v, score_mod), expected(x, plain))
    assert not compiled


# ---- comparison ------------------------------------------------------------------------------------------------------


def without_constants(patch: pytest.MonkeyPatch) -> None:
    distance = values.Values.distance
    patch.setattr(values.Values, "distance", lambda self, x: (found := distance(self, x)) and (found[0], 0))


def without_writes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(symbols.Trace, "assign", lambda self, target, result: result)


def without_notes(patch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any, why: str) -> None:
        raise symbols.UntraceableError(why)

    patch.setattr(symbols.Trace, "refuse", refuse)


def with_other_masks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(recognised, "of_graph", lambda *args: Causal())


def with_other_tables(patch: pytest.MonkeyPatch) -> None:
    computed = values.Values.computed
    patch.setattr(values.Values, "computed", lambda self, *args, **of: computed(self, *args, **of) * 1.01)


def with_next_entries(patch: pytest.MonkeyPatch) -> None:
    computed = values.Values.computed
    patch.setattr(values.Values, "computed", lambda self, *args, **of: computed(self, *args, **of).roll(1, -1))


#: Faults of a reader: the function that plants one, and names of functions of the corpus that are then misread.
FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], object], tuple[str, ...]]] = {
    "none": (lambda patch: None, tuple(corpus.TYPES)),
    "offsets": (
        without_constants,
        ("offset", "offset in a tensor", "offsets on both", "offset of one"),
    ),
    "writes": (without_writes, ("abs_", "relu_", "packet", "add_ to the score", "second name", "quotient")),
    "caught refusals": (without_notes, ("caught write", "caught attribute")),
    "masks": (with_other_masks, ("window", "residues", "other order", "nothing allowed")),
    "next entries": (with_next_entries, ("by distance", "shifted", "bfloat16 table", "of keys")),
    "tables": (with_other_tables, ("slopes", "by distance", "of keys", "T5", "causal and a term")),
}


@pytest.mark.parametrize(("fault", "name"), [(fault, name) for fault, (_, names) in FAULTS.items() for name in names])
def test_a_misread_function_is_found_by_comparing_it(fault: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison at some pairs alone refuses the function, at the first call and again."""
    score = corpus.SCORES[name]
    score_mod = score.make(*score.tables())
    PATTERNS.clear()
    FAULTS[fault][0](monkeypatch)
    for x in (Inputs.random(corpus.Q, corpus.K, batch=corpus.B, heads=corpus.H), Inputs.random(30, 20, heads=1)):
        for _ in range(2):
            said = explain(x.q, x.k, x.v, score_mod, as_dict=True)["score_mod"]
            assert "another value than its formula" in said
            check(x, score_mod)
    PATTERNS.clear()


def test_a_known_function_is_not_compared_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function is compared once for its code, formula and sizes; a table of zeros shows nothing of it until a write."""
    x, calls = Inputs.random(N), list[bool]()

    def counted(table: Tensor) -> Any:
        def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            calls.append(hasattr(s, "node"))
            return s + table[0, q - k + N]

        return score_mod

    table, zeros = torch.rand(1, 2 * N), torch.zeros(1, 2 * N)
    for _ in range(3):
        flex_attention(x.q, x.k, x.v, counted(table))
    flex_attention(x.q, x.k, x.v, counted(table + 1))
    assert calls == [True, False, True, True, True]
    PATTERNS.clear()
    calls.clear()
    for _ in range(2):
        flex_attention(x.q, x.k, x.v, counted(zeros))
    zeros[0, N + 1] = 1.0
    for _ in range(2):
        flex_attention(x.q, x.k, x.v, counted(zeros))
    assert calls == [True, False, True, True, False, True]
