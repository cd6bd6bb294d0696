"""Terms, sinks and dropout on several ranks use positions of the sequence, and a table's gradient is the sum of the ranks'."""

from __future__ import annotations

import collections
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import ringweave as rw
from ringweave.call import Arguments, Call
from ringweave.errors import RingError, ShapeError, UnsupportedError
from ringweave.parallel import ContextParallel
from ringweave.terms import Term

from .. import oracle
from ..options import VALUES
from ..oracle import NAMES, Inputs, check_errors, errors
from ..test_terms import mixed, of_a_test
from .processes import Pool
from .spread import Share, joined
from .threads import run

TOKENS = 203


def made(name: str, tokens: int = TOKENS, dtype: torch.dtype = torch.float32) -> list[Term]:
    """Return terms of four query heads and two batch elements with learned tables, equal at each call."""
    g = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g).to(dtype).requires_grad_()

    kinds = {
        "softcap": lambda: [rw.Softcap(1.5)],
        "alibi": lambda: [rw.ALiBi(torch.rand(4, generator=g))],
        "slopes of keys": lambda: [rw.ALiBi(torch.rand(4, tokens, generator=g))],
        "distance": lambda: [rw.DistanceBias(draw(4, 2 * 70 + 1))],
        "bias": lambda: [rw.Bias(draw(2, 4, tokens, tokens))],
        "shared bias": lambda: [rw.Bias(draw(1, 1, tokens, tokens)), rw.Softcap(2.0)],
        "all": lambda: [rw.ALiBi.of_heads(4), rw.DistanceBias(draw(4, 23)), rw.Bias(draw(1, 4, tokens, tokens))],
    }
    return kinds[name]()


class Given(NamedTuple):
    """Terms or functions of a call: the function that makes them of their tensors, and the tensors."""

    make: Callable[..., Any]
    tables: dict[str, Tensor]

    @staticmethod
    def of(terms: Given | Sequence[Term]) -> Given:
        """Return terms with the tables that they have."""
        if isinstance(terms, Given):
            return terms
        tables = [table for term in terms for table in term.tables]

        def make(**tables: Tensor) -> list[Term]:
            rest = iter(tables.values())
            return [term.over(*(next(rest) for _ in term.axes)) for term in terms]

        return Given(make, {f"table {i}": table for i, table in enumerate(tables)})


def share(mesh: Any, x: Inputs, pattern: rw.Pattern, terms: Given | Sequence[Term], options: dict[str, Any]) -> Any:
    """Return this rank's results, with gradients of tables and sinks."""
    dropout, backend = options.get("dropout", 0.0), options.get("backend", "auto")
    placed = {name: value for name, value in options.items() if name in ("schedule", "placement")}
    ctx = ContextParallel(mesh, pattern, x.q.shape[2], heads=(x.q.shape[1], x.k.shape[1]), **placed)
    ctx.schedules.per_node = options.get("per_node")
    leaves = [ctx.shard(t, dim=2).requires_grad_() for t in (x.q, x.k, x.v)]
    found = results(
        leaves, Inputs(*leaves, ctx.shard(x.dout, 2), ctx.shard(x.dlse, 2)), pattern, terms, dropout, backend, ctx
    )
    return Share(ctx.positions, {name: found.pop(name) for name in NAMES}, [], [], 0, None), found


def results(
    leaves: list[Tensor],
    x: Inputs,
    pattern: rw.Pattern,
    terms: Given | Sequence[Term],
    dropout: float,
    backend: str,
    context: ContextParallel | None = None,
) -> dict[str, Tensor]:
    """Return the five results, and gradients of tables and sinks."""
    sinks = torch.linspace(-1, 1, x.q.shape[1]).requires_grad_()
    make, tables = Given.of(terms)
    tables = {name: table.detach().requires_grad_(table.requires_grad) for name, table in tables.items()}
    q, k, v = leaves
    out, lse = rw.attention_with_lse(
        q, k, v, pattern, terms=make(**tables), dropout=dropout, sink_logits=sinks, backend=backend, context=context
    )
    learned = {name: table for name, table in tables.items() if table.requires_grad}
    return oracle.results(out, lse, x, leaves, **learned, sinks=sinks)


def whole(
    x: Inputs, pattern: rw.Pattern, terms: Given | Sequence[Term], dropout: float, backend: str
) -> dict[str, Tensor]:
    """Compute on one device, with gradients of tables."""
    return results(x.leaves(), x, pattern, terms, dropout, backend)


def together(shares: list[Any], tokens: int) -> dict[str, Tensor]:
    found = joined_with_sinks([one for one, _ in shares], tokens)
    return found | {name: torch.stack([rest[name].double() for _, rest in shares]).sum(0) for name in shares[0][1]}


def joined_with_sinks(shares: list[Share], tokens: int) -> dict[str, Tensor]:
    for one in shares:
        # a row without keys has the sink's logit as lse
        one.results["lse"][:, :, one.positions >= tokens] = -torch.inf
    return joined(shares, tokens)


def double(x: Inputs) -> Inputs:
    return Inputs(*(t.double() for t in (x.q, x.k, x.v, x.dout, x.dlse)))


WINDOW = rw.SlidingWindow(100)
BY_HEAD = rw.PerHead([rw.Causal(), WINDOW, rw.Causal(), rw.Dilated(8, 4)])
DILATED = rw.SlidingWindow(20) | rw.Dilated(30, 8)
# a query's place and its distance to a key's place differ
APART = rw.Causal().within(rw.Documents(cu_seqlens_q=[0, 50, 50, 120, TOKENS], cu_seqlens_k=[0, 90, 100, 110, TOKENS]))


def by(schedule: str, placement: str, dropout: float = 0.0, **rest: Any) -> dict[str, Any]:
    return {"schedule": schedule, "placement": placement, "dropout": dropout, **rest}


# by name: the pattern, the terms, and options of the ranks
CASES = {
    "window, distances": (WINDOW, "distance", by("allgather", "zigzag", 0.2)),
    "causal, everything": (rw.Causal(), "all", by("allgather", "striped")),
    "causal, nodes": (rw.Causal(), "all", by("allgather", "striped", per_node=2)),
    "heads differ": (BY_HEAD, "all", by("allgather", "zigzag", 0.2)),
    "mixture": (rw.LongNet([64, 256], [1, 4]), "alibi", by("allgather", "residue")),
    "mixture, a ring": (rw.LongNet([64, 256], [1, 4]), "distance", by("ring", "residue", 0.2)),
    "dilated": (DILATED, "bias", by("ring", "striped")),
    "ring": (rw.Causal(), "shared bias", by("ring", "zigzag")),
    "ring, by dense_batched": (rw.Causal(), "all", by("ring", "zigzag", 0.2, backend="dense_batched")),
    "ring, heads differ": (BY_HEAD, "bias", by("ring", "contiguous")),
    "packed apart": (APART, "alibi", by("allgather", "zigzag", 0.2)),
    "ring, packed apart": (APART, "distance", by("ring", "striped", 0.2)),
    "mixture, slopes": (rw.LongNet([64, 256], [1, 4]), "slopes of keys", by("allgather", "residue")),
    "packed apart, slopes": (APART, "slopes of keys", by("allgather", "zigzag", 0.2)),
    "ring, packed apart, slopes": (APART, "slopes of keys", by("ring", "striped", 0.2)),
    "ring, a cap": (rw.Full(), "softcap", by("ring", "striped", 0.2)),
}


@pytest.mark.usefixtures("_one_seed", "poisoned")
@pytest.mark.parametrize("name", list(CASES))
def test_as_on_one_device(name: str) -> None:
    """Errors are at most twice one device's, and the ranks' table gradients sum to one device's."""
    pattern, kind, options = CASES[name]
    x = Inputs.random(TOKENS, batch=2, heads=4, kv_heads=2, dim=8)
    compare(x, pattern, made(kind), options, "reference")


def compare(
    x: Inputs, pattern: rw.Pattern, terms: Given | Sequence[Term], options: dict[str, Any], exact: str, ranks: int = 4
) -> None:
    tokens, dropout, backend = x.q.shape[2], options.get("dropout", 0.0), options.get("backend", "auto")
    found = together(run(ranks, share, x, pattern, terms, options), tokens)
    one, want = whole(x, pattern, terms, dropout, backend), whole(double(x), pattern, terms, dropout, exact)
    check_errors(found, want, [errors(one, want)], 2e-6)


@pytest.fixture
def kind_of_tables() -> Iterator[type[Term]]:
    yield from of_a_test(mixed)


def test_a_kind_with_several_tables(kind_of_tables: type[Term]) -> None:
    """The sum of the ranks' gradients of each table is that of one device."""
    x, g = Inputs.random(TOKENS, batch=2, heads=4, kv_heads=2, dim=8), torch.Generator().manual_seed(1)
    term = kind_of_tables.example(2, 4, TOKENS, TOKENS, g)
    for table in term.learned:
        table.requires_grad_()
    compare(x, WINDOW, [rw.Softcap(2.0), term], by("ring", "zigzag"), "reference")
    term = kind_of_tables.example(2, 2, 500, 500, g)
    for table in term.learned:
        table.requires_grad_()
    learns = {"q": lambda q: q.requires_grad_(), "terms": term}
    texts = told(learns | {"terms": term.over(term.tables[0].detach(), *term.tables[1:])}, learns)
    assert "terms=(Mixed(0.5, (2,), (2, 7), learned (1, 500, 500))) here and another" in texts[0]


def test_a_table_of_one_entry_of_any_stride() -> None:
    """A tensor of one element is contiguous with any stride, and ranks compare its bytes."""
    table = torch.tensor([5.0, 7.0]).view(1, 1, 1, 2)[..., 1::2]
    x, ctx = Inputs.random(1, heads=1), rw.ContextParallel(None, rw.Full(), 1, heads=(1, 1))
    got = rw.attention_with_lse(
        *(ctx.shard(each, dim=2) for each in (x.q, x.k, x.v)), rw.Full(), context=ctx, terms=rw.terms.Bias(table)
    )
    want = rw.attention_with_lse(x.q, x.k, x.v, rw.Full(), terms=rw.terms.Bias(table))
    torch.testing.assert_close(got.lse[:, :, :1], want.lse)


@pytest.mark.usefixtures("_one_seed")
def test_queries_that_move() -> None:
    """Rows of global tokens are computed where their keys are, with the gradients of tables for those pairs."""
    x = Inputs.random(4096, heads=2, dim=8)
    pattern = rw.SlidingWindow(64) | rw.Global(32)
    g = torch.Generator().manual_seed(1)
    terms = [rw.DistanceBias(torch.randn(2, 601, generator=g).requires_grad_()), rw.ALiBi.of_heads(2)]

    def moves(mesh: Any) -> bool:
        ctx = ContextParallel(mesh, pattern, 4096, heads=(2, 2), schedule="ring", placement="contiguous")
        return any(stage.remote for stage in ctx.schedules.of(pattern).stages)

    assert all(run(4, moves)[1:])
    compare(x, pattern, terms, by("ring", "contiguous", 0.1), "dense_batched")


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_forward_bits(ranks: int) -> None:
    """Gathered rows have the bits of one device, terms included."""
    x = Inputs.random(700, batch=2, heads=4, kv_heads=2, dim=16, dtype=torch.bfloat16)
    terms = [*made("distance"), rw.Softcap(3.0)]
    found = together(run(ranks, share, x, rw.Causal(), terms, by("allgather", "zigzag")), 700)
    one = whole(x, rw.Causal(), terms, 0.0, "auto")
    for name in ("out", "lse"):
        assert torch.equal(found[name], one[name]), name


def test_one_seed_for_all_processes(pool4: Pool) -> None:
    """Ranks with different generators drop the pairs that rank 0 would drop alone, in the second call too."""
    x = Inputs.random(TOKENS, batch=2, heads=4, kv_heads=2, dim=8)
    for schedule in ("allgather", "ring"):
        shares = pool4.run("tests.parallel.jobs_ring:scored", x, WINDOW, schedule)
        torch.manual_seed(100)
        for call in range(2):
            found = together([each[call] for each in shares], TOKENS)
            one = whole(x, WINDOW, made("distance"), 0.3, "auto")
            assert all(error < 1e-5 for error in errors(found, one).values())


DIFFERENT: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "terms": ({"terms": rw.Softcap(2.0)}, {}, "terms Softcap(2.0) here and none on rank 1"),
    "a number": ({"terms": rw.Softcap(2.0)}, {"terms": rw.Softcap(3.0)}, "terms Softcap(2.0) here and another"),
    "shapes": (
        {"terms": rw.DistanceBias(torch.zeros(2, 5))},
        {"terms": rw.DistanceBias(torch.zeros(2, 7))},
        "terms DistanceBias((2, 5)) here and another",
    ),
    "dropout": ({"dropout": 0.25}, {}, "terms dropout 0.25 here and none"),
    "learning": (
        {"terms": rw.DistanceBias(torch.zeros(2, 5, requires_grad=True))},
        {"terms": rw.DistanceBias(torch.zeros(2, 5))},
        "requires_grad True here and False",
    ),
}


def told(first: dict[str, Any], others: dict[str, Any], asked: dict[str, object] | None = None) -> list[str]:
    """Return the error of each of three ranks when the first passes other arguments; it is raised before any bytes move."""

    def job(mesh: Any) -> str:
        ctx = ContextParallel(mesh, WINDOW, 500, heads=(2, 2))
        x = torch.randn(1, 2, ctx.local, 8)
        given = {"q": x, "k": x, "v": x, "pattern": WINDOW, "context": ctx}
        own = others if mesh.rank else first
        own = {name: value(given.get(name)) if callable(value) else value for name, value in own.items()}
        with pytest.raises(RingError) as error:
            rw.attention(**(given | own))
        assert sum(mesh.counters.sent) == 0
        return str(error.value)

    return run(3, job)


@pytest.mark.parametrize("name", list(DIFFERENT))
def test_ranks_that_differ(name: str) -> None:
    first, others, wanted = DIFFERENT[name]
    assert wanted in told(first, others)[0]


def alibi(slope: float, *, many: bool = False) -> rw.ALiBi | rw.Bias:
    # a table too large to compare by entries
    return rw.Bias(torch.full((1, 1, 1, 1), slope).expand(1, 1, 500, 500)) if many else rw.ALiBi([slope, 0.5])


def changed(formula: str, *captured: Tensor) -> Callable[..., Any]:
    """Return what makes a function that is no term, of a formula of the score s, of h and of captured tensors t0 and t1."""
    names = {f"t{i}": x for i, x in enumerate(captured)}
    score_mod = eval(f"lambda s, b, h, q, k: {formula}", {"torch": torch, **names})
    return lambda _: score_mod


# arguments of the first rank, of the others, and the error's name for the difference
TOLD: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (dict.fromkeys("qkv", lambda x: x.double()), {}, "dtype float64 here and float32 on rank 1"),
    (dict.fromkeys("qk", lambda x: x[..., :4]), {}, "D 4 here and 8 on rank 1"),
    ({"v": lambda x: x[..., :4]}, {}, "Dv 4 here and 8 on rank 1"),
    ({"pattern": rw.Causal()}, {}, "pattern Causal() here and SlidingWindow(100) on rank 1"),
    ({"scale": 0.5}, {}, "scale 0.5 here and 0.35"),
    ({"backend": "dense_batched"}, {}, "backend dense_batched here and auto on rank 1"),
    ({"context": lambda ctx: ctx.tagged("a")}, {}, "tag a here and thread rank on rank 1"),
    ({"terms": rw.Softcap(2.0)}, {}, "terms Softcap(2.0) here and none on rank 1"),
    ({"terms": alibi(0.25)}, {"terms": alibi(0.2)}, "arguments terms=(ALiBi((2,))) here and another on rank 1"),
    ({"terms": alibi(0.25, many=True)}, {"terms": alibi(0.2, many=True)}, "arguments terms=(Bias((1, 1, 500, 500)))"),
    (
        {"terms": rw.DistanceBias(torch.ones(2, 5).half())},
        {"terms": rw.DistanceBias(torch.ones(2, 5))},
        "arguments terms=(DistanceBias((2, 5))) here and another",
    ),
    # the second kind of rank would leave its share out of the gradient
    (
        {"q": lambda x: x.requires_grad_(), "terms": rw.DistanceBias(torch.ones(2, 5, requires_grad=True))},
        {"q": lambda x: x.requires_grad_(), "terms": rw.DistanceBias(torch.ones(2, 5))},
        "arguments terms=(DistanceBias(learned (2, 5))) here and another",
    ),
    ({"sink_logits": torch.zeros(2)}, {}, "arguments sink_logits=(2,) here and none on rank 1"),
    ({"sink_logits": torch.zeros(2)}, {"sink_logits": torch.ones(2)}, "arguments sink_logits=(2,) here and another"),
    ({}, {"sink_logits": torch.ones(2, requires_grad=True)}, "arguments none here and another on rank 1"),
    ({"dropout": 0.25}, {}, "terms dropout 0.25 here and none on rank 1"),
    ({"precision": rw.Precision(table=torch.bfloat16)}, {}, "arguments precision=Precision(compute=None, "),
    ({"precision": rw.Precision(compute=torch.float64)}, {}, "dtype float64 here and float32 on rank 1"),
    ({"precision": rw.Precision(compute=torch.float32)}, {}, "arguments precision=Precision(compute=torch.float32"),
    ({"on_oom": "raise"}, {}, "arguments on_oom='raise' here and none on rank 1"),
    ({"terms": changed("s + s * s")}, {}, "arguments terms=ComparedFunction(formula='score + score * score', "),
    ({"terms": changed("s + s * s")}, {"terms": changed("s - s * s")}, "arguments terms=ComparedFunction(formula='"),
    ({"terms": changed("s + s * s")}, {"terms": changed("torch.add(s, s * s, alpha=2)")}, "arguments terms="),
    ({"terms": changed("s + s * s * 0.5")}, {"terms": changed("s + s * s * 0.25")}, "arguments terms="),
    ({"terms": changed("s * h")}, {"terms": changed("s * q")}, "arguments terms="),
    # terms on one rank, and tiles on another
    ({"terms": changed("s * 0.5")}, {"terms": changed("s * 0.5 + s * s")}, "scale 0.17"),
    (
        {"terms": changed("s * t0[h]", torch.ones(2))}, {"terms": changed("s * t0[h]", torch.zeros(2))},
        "arguments terms=ComparedFunction(formula='score * t0[h]', dtype=torch.float32, captured=((2,))) here and another",
    ),
    ({"terms": changed("s * t0[h]", torch.ones(2))}, {"terms": changed("s * t0[h]", torch.ones(3))}, "arguments terms="),
    (
        {"terms": changed("s * t0[h]", torch.ones(2))}, {"terms": changed("s * t0[h]", torch.ones(2).double())},
        "arguments terms=",
    ),
    (
        {"terms": changed("s * t0[h] + t1[h]", torch.ones(2), torch.zeros(2))},
        {"terms": changed("s * t1[h] + t0[h]", torch.ones(2), torch.zeros(2))},
        "arguments terms=",
    ),
    # the second kind of rank would leave its share out of the gradient
    (
        {"q": lambda x: x.requires_grad_(), "terms": changed("s * t0[h]", torch.ones(2, requires_grad=True))},
        {"q": lambda x: x.requires_grad_(), "terms": changed("s * t0[h]", torch.ones(2))},
        "arguments terms=ComparedFunction(formula='score * t0[h]', dtype=torch.float32, captured=(learned (2,)))",
    ),
    ({"terms": changed("s + s * s"), "dropout": 0.25}, {"terms": changed("s + s * s")}, "terms dropout 0.25 here and none"),
]  # fmt: skip


@pytest.mark.parametrize(("first", "others", "wanted"), TOLD, ids=lambda each: each if isinstance(each, str) else "")
def test_ranks_are_told_which_argument_differs(first: dict[str, Any], others: dict[str, Any], wanted: str) -> None:
    texts = told(first, others)
    assert wanted in texts[0]
    assert all(f"got {wanted.split(' ')[0]} " in text for text in texts)


@pytest.mark.parametrize("name", [name for name in VALUES if name not in ("context", "q_offset", "k_offset")])
def test_ranks_agree_on_every_option(name: str) -> None:
    """If a rank passes another value of any option, all ranks raise before anything moves."""
    assert len(told({name: VALUES[name](500)}, {})) == 3


@pytest.mark.parametrize("name", ["q_offset", "k_offset"])
@pytest.mark.parametrize("value", [1, torch.tensor(0)])
def test_ranks_refuse_offsets(name: str, value: Any) -> None:
    ctx, x = ContextParallel(None, WINDOW, 256, heads=(2, 2)), torch.zeros(1, 2, 256, 8)
    with pytest.raises(UnsupportedError, match="with a context"):
        rw.attention(x, x, x, WINDOW, context=ctx, **{name: value})


def test_ranks_agree_on_arguments_to_come() -> None:
    """Every future option of the signature is compared too, without code of its own."""
    parameters = inspect.signature(rw.attention).parameters
    assert Arguments._field_defaults == {name: each.default for name, each in parameters.items() if name not in "qkv"}
    later = collections.namedtuple(
        "later", [*Arguments._fields, "new"], defaults=[*Arguments._field_defaults.values(), object()]
    )

    @dataclasses.dataclass(frozen=True)
    class Record:
        number: int
        table: Tensor

    for one, other in [
        (1, 2), (1.0, 1), ("_", None), (torch.float16, None), (torch.ones(2), torch.zeros(2)), (torch.ones(2), torch.ones(3)),
        ([1, torch.ones(2)], [1, torch.zeros(2)]), (Record(1, torch.ones(2)), Record(1, torch.zeros(2))),
        (Record(1, torch.ones(2)), Record(2, torch.ones(2))), (torch.ones(2), torch.ones(2).bfloat16()),
    ]:  # fmt: skip

        def job(mesh: Any) -> str:
            ctx = ContextParallel(mesh, WINDOW, 500, heads=(2, 2))
            x = torch.randn(1, 2, ctx.local, 8)
            with pytest.raises(RingError) as error:
                ctx.attend(Call.of(x, x, x, WINDOW), (x, x, x), [], later(x, x, x, new=other if mesh.rank else one))  # noqa: B023
            return error.value.cause

        assert all(cause.startswith("arguments new=") for cause in run(2, job))


@pytest.mark.parametrize("compiled", [False, True])
def test_ranks_that_agree_on_everything(compiled: bool) -> None:
    """Equal arguments raise nothing, also if made differently; learned values may differ by their rounding."""
    x = torch.randn(1, 2, 500, 8)
    layer = torch.nn.Parameter(torch.zeros(2, 9))

    def job(mesh: Any) -> None:
        ctx = ContextParallel(mesh, WINDOW, 500, heads=(2, 2))

        def call(x: Tensor, sinks: Tensor, slopes: Tensor) -> Tensor:
            terms = [rw.ALiBi(slopes), rw.DistanceBias(layer + mesh.rank), rw.Softcap(9.0)]
            return rw.attention(
                x, x, x, WINDOW, context=ctx, terms=terms if mesh.rank else tuple(terms), sink_logits=sinks,
                precision=rw.Precision(table=torch.bfloat16), dropout=0.1, on_oom="raise",
            )  # fmt: skip

        function = torch.compile(call, fullgraph=True, backend="eager") if compiled else call
        local = ctx.shard(x, 2)
        slopes, sinks = torch.ones(2, 2)[:, mesh.rank], torch.zeros(2, requires_grad=True)
        function(local, sinks, slopes).sum().backward()
        for precision in (None, rw.Precision()):
            rw.attention(local, local, local, WINDOW, context=ctx, precision=precision if mesh.rank else None)

    run(1 if compiled else 2, job)


def test_errors() -> None:
    ctx = ContextParallel(None, WINDOW, 256, heads=(2, 2))
    x = torch.randn(1, 2, 256, 8)
    with pytest.raises(UnsupportedError, match=re.escape("backend: got 'flex'; wanted one that computes dropout")):
        rw.attention(x, x, x, WINDOW, context=ctx, dropout=0.5, backend="flex")

    def job(mesh: Any) -> None:
        ctx = ContextParallel(mesh, WINDOW, 256, heads=(2, 2))
        x = torch.randn(1, 2, 128, 8)
        # a table for a rank's own rows
        with pytest.raises(ShapeError, match="table: got shape .* with Nq = 256, the number of queries"):
            rw.attention(x, x, x, WINDOW, context=ctx, terms=rw.Bias(torch.zeros(1, 1, 128, 256)))

    run(2, job)


def test_compiled() -> None:
    """A call with terms compiles to one graph, with the table's gradient among its results."""
    ctx = ContextParallel(None, WINDOW, 256, heads=(2, 2))
    x, table = torch.randn(1, 2, 256, 8), torch.randn(2, 9, requires_grad=True)

    def call(x: Tensor, table: Tensor) -> Tensor:
        return rw.attention(x, x, x, WINDOW, context=ctx, terms=rw.DistanceBias(table), dropout=0.1)

    found = []
    for function in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(3)
        out = function(x, table)
        found.append((out.detach(), *torch.autograd.grad(out.square().sum(), table)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def check_module(
    make: Callable[[ContextParallel | None], tuple[torch.nn.Module, torch.nn.Parameter]], x: Tensor, **options: Tensor
) -> None:
    """Check that ranks have the rows of one device, and that their gradients of all parameters add up to its own."""

    def step(mesh: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
        ctx = None if mesh is None else ContextParallel(mesh, WINDOW, TOKENS, heads=(4, 4), placement="zigzag")
        layer, table = make(ctx)
        parameters, g = [*layer.parameters(), table], torch.Generator().manual_seed(2)
        with torch.no_grad():
            for each in parameters:
                each.copy_(torch.randn(each.shape, generator=g) / 4)
        places = torch.arange(TOKENS) if ctx is None else ctx.positions
        local = x if ctx is None else ctx.shard(x)
        out, _ = layer(local, local, local, **options)
        real = places < TOKENS
        grads = torch.autograd.grad(out[:, real].square().sum(), parameters)
        return places[real], out[:, real].detach(), list(grads)

    _, wanted, of_one = step(None)
    ranks = run(3, step)
    for places, out, _ in ranks:
        torch.testing.assert_close(out, wanted[:, places])
    for one, *shares in zip(of_one, *(grads for _, _, grads in ranks), strict=True):
        torch.testing.assert_close(sum(shares), one, rtol=1e-4, atol=1e-4 * float(one.abs().max()))


@pytest.mark.usefixtures("_one_seed")
def test_the_module_and_its_parameters() -> None:
    """With terms, dropout, a mask and padding around a ring, the gradients of all parameters are the sums of the ranks'."""
    x, mask = torch.randn(2, TOKENS, 32), torch.randn(TOKENS, TOKENS)
    padding = torch.arange(TOKENS) >= torch.tensor([[TOKENS], [150]])

    def make(ctx: ContextParallel | None) -> tuple[torch.nn.Module, torch.nn.Parameter]:
        layer = rw.nn.MultiheadAttention(
            32, 4, dropout=0.2, batch_first=True, pattern=WINDOW, rotary_base=1000.0, sink_logits=True, context=ctx
        )
        bias = torch.nn.Parameter(torch.zeros(4, 65))
        layer.terms = (rw.DistanceBias(bias),)
        return layer, bias

    check_module(make, x, attn_mask=mask, key_padding_mask=padding)
