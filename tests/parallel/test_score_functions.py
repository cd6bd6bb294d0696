"""Functions among the terms get positions of the whole sequence on several ranks, and ranks with different functions raise."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import ringweave as rw
from ringweave.errors import RingweaveError, UnsupportedError
from ringweave.parallel import ContextParallel
from ringweave.terms.term import ScoreMod

from ..oracle import NAMES, Inputs, check_errors, errors
from ..score_functions.test_calls import CASES, unread
from .processes import Pool
from .test_scored import CASES as PLACED
from .test_scored import TOKENS, WINDOW, Given, by, check_module, compare, share, together, whole
from .threads import run

JOBS = "tests.parallel.jobs_functions"
INF = float("inf")
# ranks compare graphs, which it has none of
READ = [name for name in CASES if name != "unread"]


def given(name: str, tokens: int = TOKENS, batch: int = 2, heads: int = 4) -> Given:
    """Return a case's functions, and its tensors, which learn."""
    case = CASES[name]
    return Given(case.make, case.tables(batch, heads, tokens, tokens))


def refusal(call: Callable[[], object]) -> tuple[type, str] | None:
    """Return the error that a call raises, or None."""
    try:
        call()
    except RingweaveError as error:
        return type(error), str(error)
    return None


@pytest.mark.sampled(4)
@pytest.mark.usefixtures("_one_seed", "poisoned")
@pytest.mark.parametrize("placed", PLACED)
@pytest.mark.parametrize("name", READ)
def test_as_on_one_device(name: str, placed: str) -> None:
    """Results have one device's error, gradients of captured tensors sum to one device's, and a refusal is the same."""
    pattern, _, options = PLACED[placed]
    x, terms = Inputs.random(TOKENS, batch=2, heads=4, kv_heads=2, dim=8), given(name)
    refused = refusal(lambda: whole(x, pattern, terms, 0.0, "auto"))
    if refused is not None:
        assert refusal(lambda: run(4, share, x, pattern, terms, options)) == refused
        return
    compare(x, pattern, terms, options, "auto")


def test_the_refusals_are_known() -> None:
    """Mixtures take functions that are terms, and packed queries functions without positions."""
    x = Inputs.random(TOKENS, batch=2, heads=4, kv_heads=2, dim=8)
    for placed, wanted in [("mixture", "a relation"), ("packed apart", "packed apart")]:
        said = refusal(lambda: whole(x, PLACED[placed][0], given("rows"), 0.0, "auto"))  # noqa: B023
        assert said is not None
        assert wanted in said[1]
        assert refusal(lambda: whole(x, PLACED[placed][0], given("cap"), 0.0, "auto")) is None  # noqa: B023


@pytest.mark.parametrize("schedule", ["allgather", "ring"])
@pytest.mark.parametrize("tokens", [1, 5, 129, 257])
def test_ranks_without_tokens(tokens: int, schedule: str) -> None:
    """Some ranks have no tokens, or only padding."""
    for name in ("square", "holes"):
        compare(
            Inputs.random(tokens, batch=2, heads=4, kv_heads=2, dim=8), rw.Full(), given(name, tokens),
            by(schedule, "contiguous"), "auto",
        )  # fmt: skip


@pytest.mark.parametrize("schedule", ["allgather", "ring"])
def test_large_scores(schedule: str) -> None:
    """Weights of a large score are as exact as on one device by the terms."""
    x = Inputs.random(TOKENS, batch=2, heads=4, kv_heads=2, dim=8)
    table = torch.full((4, TOKENS, TOKENS), 3e3)
    by_hand = Given(lambda w, t: lambda s, b, h, q, k: s * w[h] + t[h, q, k], {"w": torch.ones(4), "t": table})
    found = together(run(4, share, x, WINDOW, by_hand, by(schedule, "zigzag")), TOKENS)
    terms = Given(lambda t: rw.Bias(t), {"t": table[None]})
    theirs = together(run(4, share, x, WINDOW, terms, by(schedule, "zigzag", backend="dense_batched")), TOKENS)
    want = whole(Inputs(*(each.double() for each in (x.q, x.k, x.v, x.dout, x.dlse))), WINDOW, terms, 0.0, "reference")
    check_errors(found, want, [errors(theirs, want)], 2e-6)


@pytest.mark.usefixtures("_one_seed")
@pytest.mark.parametrize("placed", ["causal, everything", "ring", "ring, by dense_batched"])
def test_numbers_that_no_query_attends_reach_nothing(placed: str) -> None:
    """NaN in the last queries, keys and values, on every rank, leaves the bits of all other rows and gradients."""
    _, _, options = PLACED[placed]
    clean, last = Inputs.random(TOKENS, batch=2, heads=4, kv_heads=2, dim=8), 190
    mask = rw.Causal() & ~rw.Sinks(torch.arange(TOKENS) >= last)
    masked = Given(lambda w: lambda s, b, h, q, k: torch.where(k < last, s + s * s * w[h], -INF), {"w": torch.ones(4)})
    plain = Given(lambda w: lambda s, b, h, q, k: s + s * s * w[h], {"w": torch.ones(4)})
    broken = Inputs(*(x.clone() for x in (clean.q, clean.k, clean.v, clean.dout, clean.dlse)))
    for x in broken.k, broken.v:
        x[:, :, last:] = torch.nan
    for pattern, terms in ((mask, plain), (rw.Causal(), masked)):
        found, want = (together(run(4, share, x, pattern, terms, options), TOKENS) for x in (broken, clean))
        for name in want:
            got, wanted = found[name], want[name]
            if name in ("dk", "dv"):
                got, wanted = got[:, :, :last], wanted[:, :, :last]
            assert torch.equal(got, wanted), (name, pattern)


@pytest.mark.parametrize("schedule", ["allgather", "ring"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_dtypes(dtype: torch.dtype, schedule: str) -> None:
    compare(
        Inputs.random(TOKENS, batch=2, heads=4, kv_heads=2, dim=8, dtype=dtype), rw.Causal(), given("square"),
        by(schedule, "zigzag"), "auto",
    )  # fmt: skip


def test_a_block_mask_beside_a_function() -> None:
    """The mask of FlexAttention is a pattern of the whole sequence."""
    from torch.nn.attention.flex_attention import create_block_mask

    ids = torch.arange(TOKENS) // 60

    def packed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (ids[q] == ids[k]) & (q >= k)

    mask = rw.from_block_mask(create_block_mask(packed, None, None, TOKENS, TOKENS, device="cpu"))
    x = Inputs.random(TOKENS, batch=2, heads=4, kv_heads=2, dim=8)
    for schedule in ("allgather", "ring"):
        compare(x, mask, given("square"), by(schedule, "zigzag"), "auto")


@pytest.mark.parametrize("schedule", ["allgather", "ring"])
def test_a_mask_in_a_function_narrows_the_pattern(schedule: str) -> None:
    """A function that is terms and a mask has the results of these on the same ranks."""
    x = Inputs.random(TOKENS, batch=2, heads=4, kv_heads=2, dim=8)
    near = Given(lambda: lambda s, b, h, q, k: torch.where((q - k).abs() <= 30, s - 0.1 * (q - k).abs(), -INF), {})
    slopes = Given(lambda: rw.ALiBi([0.1] * 4), {})
    found, want = (
        together(run(4, share, x, pattern, terms, by(schedule, "zigzag")), TOKENS)
        for pattern, terms in ((rw.Causal(), near), (rw.Causal() & rw.SlidingWindow(30, 30), slopes))
    )
    for name in NAMES:
        torch.testing.assert_close(found[name], want[name], rtol=1e-5, atol=1e-6)


def calls(mesh: Any, score_mod: ScoreMod, **options: Any) -> tuple[Any, ...]:
    """Return a call of this rank with a function, and its leaves."""
    ctx = ContextParallel(mesh, WINDOW, 500, heads=(2, 2))
    g = torch.Generator().manual_seed(0)
    leaves = [ctx.shard(torch.randn(1, 2, 500, 8, generator=g), 2).requires_grad_() for _ in range(3)]
    return (lambda: rw.attention(*leaves, WINDOW, terms=score_mod, context=ctx, **options)), leaves


def test_captured_tensors_change_between_calls() -> None:
    """Each call reads the present values; a write before backward raises, as with each tensor that autograd has saved."""

    def job(mesh: Any) -> None:
        w = torch.ones(2, requires_grad=True)
        call, leaves = calls(mesh, lambda s, b, h, q, k: s + w[h] * s * s)
        first = call()
        with torch.no_grad():
            w.add_(1.0)
        second = call()
        assert not torch.equal(first, second)
        again = call()
        assert torch.equal(second, again)
        second.sum().backward()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            first.sum().backward()
        assert w.grad is not None
        assert leaves[0].grad is not None

    run(2, job)


def test_the_graph_of_the_call_is_that_of_its_gradient() -> None:
    """A name that the function reads may be bound again before backward, and a table of the pattern may be written to."""
    found = []
    for changes in (False, True):

        def job(mesh: Any) -> list[Tensor]:
            w, stop = torch.ones(2, requires_grad=True), torch.tensor([400])
            ctx = ContextParallel(mesh, WINDOW, 500, heads=(2, 2))
            g = torch.Generator().manual_seed(0)
            leaves = [ctx.shard(torch.randn(1, 2, 500, 8, generator=g), 2).requires_grad_() for _ in range(3)]
            factor = 2.0
            pattern = WINDOW & rw.KeyPadding(stop)
            out = rw.attention(*leaves, pattern, terms=lambda s, b, h, q, k: s * s * w[h] * factor, context=ctx)
            if changes:  # noqa: B023
                factor = 3.0
                stop.fill_(100)
            return [out, *torch.autograd.grad(out.square().sum(), [*leaves, w])]

        found.append(run(2, job))
    for before, after in zip(*found, strict=True):
        assert all(map(torch.equal, before, after))


def test_checkpoints_and_second_derivatives() -> None:
    def job(mesh: Any) -> None:
        w = torch.ones(2, requires_grad=True)
        call, leaves = calls(mesh, lambda s, b, h, q, k: s + w[h] * s * s)
        want = torch.autograd.grad(call().square().sum(), [*leaves, w])
        again = checkpoint(call, use_reentrant=False)
        assert all(map(torch.equal, want, torch.autograd.grad(again.square().sum(), [*leaves, w])))
        once = torch.autograd.grad(call().square().sum(), leaves[0], create_graph=True)
        with pytest.raises(UnsupportedError, match="a second derivative"):
            once[0].sum().backward()

    run(2, job)


# torch looks at the gradient of a tensor that is no leaf where a graph was broken
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_autocast_and_compiled_callers() -> None:
    def job(mesh: Any) -> None:
        call, _ = calls(mesh, lambda s, b, h, q, k: s + s * s)
        want = call()
        torch.testing.assert_close(torch.compile(lambda: call() * 2, backend="eager")(), want * 2)
        with torch.autocast("cpu", torch.bfloat16):
            half = call()
        assert half.dtype == torch.bfloat16
        half.sum().backward()
        torch.testing.assert_close(half.float(), want, rtol=0.05, atol=0.05)

    run(1, job)


def test_formats_on_the_wire() -> None:
    """Keys travel in the format of the context, which the precision of a call may repeat."""

    def job(mesh: Any, precision: rw.Precision | None) -> Tensor:
        ctx = ContextParallel(mesh, rw.Causal(), 500, heads=(2, 2), wire="bf16", placement="zigzag")
        g = torch.Generator().manual_seed(0)
        shards = [ctx.shard(torch.randn(1, 2, 500, 8, generator=g), 2) for _ in range(3)]
        out = rw.attention(*shards, terms=lambda s, b, h, q, k: s + s * s, context=ctx, precision=precision)
        assert ctx.statistics.messages["bf16"]
        return out

    plain = run(2, job, None)
    assert all(map(torch.equal, plain, run(2, job, rw.Precision(wire="bf16"))))
    with pytest.raises(UnsupportedError, match=r"precision\.wire"):
        run(2, job, rw.Precision(wire="int8"))
    with pytest.raises(UnsupportedError, match=r"precision\.table"):
        run(2, job, rw.Precision(table=torch.bfloat16))


REFUSED: dict[str, tuple[Callable[[], ScoreMod], dict[str, Any], str]] = {
    "no graph": (
        lambda: unread(lambda s, b, h, q, k: s * s),
        {},
        "terms: got a function that ranks cannot compare, with a context: it computes without gradients",
    ),
    "a type": (
        lambda: lambda s, b, h, q, k: s * s if type(s) is Tensor else s + 1,
        {},
        "terms: got a function that ranks cannot compare, with a context: it computes another value than its formula",
    ),
    "a backend without functions": (
        lambda: lambda s, b, h, q, k: s * s,
        {"backend": "cpu"},
        "backend: got 'cpu'; wanted one that computes score function",
    ),
    "a dense backend": (
        lambda: lambda s, b, h, q, k: s * s,
        {"backend": "reference"},
        "backend: got 'reference'; wanted 'auto' or one that computes a plan",
    ),
    "random numbers": (lambda: lambda s, b, h, q, k: s + torch.rand(()), {}, "score_mod: got a function that draws"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    """Each rank raises before anything moves."""
    make, options, said = REFUSED[name]

    def job(mesh: Any) -> None:
        with pytest.raises(UnsupportedError) as caught:
            calls(mesh, make(), **options)[0]()
        assert str(caught.value).startswith(said)
        assert sum(mesh.counters.sent) == 0

    run(2, job)


def test_a_table_of_a_shard() -> None:
    """A captured table is the whole sequence's on each rank; one of a shard's length fails as on one device."""

    def job(mesh: Any) -> None:
        table = torch.ones(256)
        with pytest.raises(IndexError, match="out of bounds for dimension 0 with size 256"):
            calls(mesh, lambda s, b, h, q, k: s * s * table[q])[0]()
        assert sum(mesh.counters.sent) == 0

    run(2, job)


def test_transforms_are_refused() -> None:
    ctx, x = ContextParallel(None, WINDOW, 256, heads=(2, 2)), torch.randn(1, 2, 256, 8)
    square: ScoreMod = lambda s, b, h, q, k: s + s * s  # noqa: E731
    for transform in (torch.func.grad, torch.func.jacfwd):
        with pytest.raises(UnsupportedError, match=r"torch\.func|forward-mode"):
            transform(lambda q: rw.attention(q, x, x, WINDOW, terms=square, context=ctx).sum())(x)


def test_processes(pool4: Pool) -> None:
    """Every process has its own function and its own captured tensors."""
    x = Inputs.random(TOKENS, batch=2, heads=4, kv_heads=2, dim=8)
    for schedule in ("allgather", "ring"):
        for name in ("square", "rows", "holes", "term, then square"):
            found = together(pool4.run(f"{JOBS}:case", x, name, schedule), TOKENS)
            compared = whole(x, WINDOW, given(name), 0.0, "auto")
            assert max(errors(found, compared).values()) < 1e-5


def test_processes_with_different_functions(pool4: Pool) -> None:
    for text in pool4.run(f"{JOBS}:different"):
        assert "got arguments terms=ComparedFunction(formula='score + 0." in text
        assert "and another" in text or "and arguments" in text


@pytest.mark.parametrize("where", ["trace", "forward", "backward"])
def test_a_function_that_fails_on_one_rank(fragile4: Pool, where: str) -> None:
    """Every rank raises: at the deadline if the rank makes no call, and soon if it fails inside of one."""
    begin = time.monotonic()
    texts = fragile4.run(f"{JOBS}:failing", where, 1, 6.0)
    assert time.monotonic() - begin < 40.0
    assert texts[1].startswith("ZeroDivisionError")
    for rank in (0, 2, 3):
        assert texts[rank].startswith("RingError")
        if where != "trace":
            assert "rank 1 raised ZeroDivisionError" in texts[rank]
    fragile4.reopen()


def test_modules() -> None:
    """A module with a function gives each rank its rows, and its parameters the sum of the ranks' gradients."""

    def make(ctx: ContextParallel | None) -> tuple[torch.nn.Module, torch.nn.Parameter]:
        w = torch.nn.Parameter(torch.empty(4))
        layer = rw.nn.MultiheadAttention(
            32, 4, batch_first=True, pattern=WINDOW, context=ctx, terms=lambda s, b, h, q, k: s + w[h] * s * s
        )
        return layer, w

    check_module(make, torch.randn(2, TOKENS, 32))
