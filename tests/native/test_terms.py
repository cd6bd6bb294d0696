"""Score terms and dropout of the kernel equal dense formulas in float64."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from torch import Tensor

import ringweave as rw
from ringweave import terms
from ringweave.errors import ShapeError

from ..dropped import philox
from ..oracle import NAMES, attention, check_errors, errors, results
from ..term_oracles import ORACLES
from .plans import DTYPES, VARIANTS, Case, _cpu, case, poison, random_masks

every_variant = pytest.mark.parametrize("variant", VARIANTS)
#: Terms by the kernel's names, and those without tables.
KINDS = {kind.kernel: kind for kind in terms.KINDS.values()}
ALONE = [name for name, kind in KINDS.items() if not kind.axes]
Term = tuple[str, list[float], Tensor | None]
SEED = -(2**40) - 7


@dataclass
class Scored:
    """A case with terms and dropout; ``places`` are the kernel's position arguments."""

    plain: Case
    terms: list[Term] = field(default_factory=list)
    places: dict[str, Tensor] = field(default_factory=dict)
    drop: int = 0

    def positions(self) -> tuple[Tensor, Tensor]:
        """Return the positions (B or 1, Nq) and (B or 1, Nk)."""
        places, zero = self.places, torch.zeros(1, dtype=torch.int32)
        return (
            places["rows"] + places.get("q_offset", zero)[:, None],
            places["columns"] + places.get("k_offset", zero)[:, None],
        )

    def kept(self) -> Tensor:
        """Return the weights that dropout keeps, (B, Hq, Nq, Nk)."""
        x = self.plain.x
        rows, columns = (p.expand(len(x.q), -1).long().numpy() for p in self.positions())
        heads, batch = self.places["heads"].numpy(), np.arange(len(x.q))
        counter = (
            columns[:, None, None, :] >> 3,
            rows[:, None, :, None],
            heads[:, None, None],
            batch[:, None, None, None],
        )
        words = np.stack(np.broadcast_arrays(*philox(np.broadcast_arrays(*counter), SEED)), -1)
        half = np.broadcast_to(columns[:, None, None, :] & 7, words.shape[:-1])[..., None]
        word = np.take_along_axis(words, half >> 1, -1)
        return torch.from_numpy(
            (np.where(half & 1, word >> np.uint64(16), word & np.uint64(0xFFFF)) >= self.drop)[..., 0]
        )

    def score(self, t: Tensor, tables: list[Tensor | None]) -> Tensor:
        rows, columns = self.positions() if self.places else (torch.zeros(1, 1), torch.zeros(1, 1))
        distance = (columns[:, None, :] - rows[:, :, None])[:, None]
        for (kernel, numbers, _), table in zip(self.terms, tables, strict=True):
            kind = KINDS[kernel]
            if kind.places and table is not None:
                table = table[:, :, self.places["rows"].long()]
            if table is not None and (kind.places or (kernel == "alibi" and table.ndim == 2)):
                table = table[..., self.places["columns"].long()]
            t = ORACLES[kind.__name__].formula(t, tuple(numbers), t if table is None else table, distance)
        return t

    def dense(self, dtype: torch.dtype, order: int = 0) -> dict[str, Tensor]:
        """Compute all results densely; in float32, round weights and their gradients to the inputs' dtype as the kernel does.

        Order 0 adds the channels of a score in sequence; an order above 0 adds them in a random order with that seed.
        """
        x = self.plain.x

        def narrow(t: Tensor) -> Tensor:
            return t if dtype == torch.float64 else t.to(x.q.dtype).to(t.dtype)

        def scored(t: Tensor) -> Tensor:
            t.register_hook(narrow)
            return self.score(t, tables)

        def weigh(exponentials: Tensor, total: Tensor) -> Tensor:
            sums = total.detach()
            if dtype != torch.float64:  # backward reads the stored, rounded result
                total.register_hook(lambda _: (x.dlse - (x.dout * narrow(out.detach())).sum(-1))[..., None] / sums)
            weights = exponentials / total
            return narrow(weights * self.kept() * (65536 / (65536 - self.drop)) if self.drop else weights)

        q, k, v = leaves = x.leaves(dtype)
        tables = [None if t is None else t.detach().to(dtype).requires_grad_(t.requires_grad) for _, _, t in self.terms]
        channels = torch.randperm(q.shape[3], generator=torch.Generator().manual_seed(order))
        channels = channels if order else channels.sort().values
        q, k = q[..., channels], k[..., channels]
        out, lse = attention(q, k, v, self.plain.mask, self.plain.scale, scored=scored, weigh=weigh)
        learned = [t for t in tables if t is not None and t.requires_grad]
        return results(out, lse, x, leaves, **{f"table {i}": t for i, t in enumerate(learned)})

    def options(self) -> dict[str, object]:
        detached = [(kind, numbers, None if table is None else table.detach()) for kind, numbers, table in self.terms]
        return {"terms": detached, "drop": self.drop, "seed": SEED, **self.places}

    def run(self, variant: str = "", threads: int = 2) -> dict[str, Tensor]:
        x, processor = self.plain.x, {"threads": threads, "variant": variant}
        inputs = self.plain.inputs() | self.options() | processor
        out, lse, delta = poison(*x.dout.shape, dtype=x.q.dtype), poison(*x.q.shape[:3]), poison(*x.q.shape[:3])
        _cpu.forward(**inputs, **self.plain.rows(), out=out, lse=lse)
        _cpu.delta(x.dout, out, x.dlse, delta, threads, variant)
        dq, dk, dv = grads = [poison(*t.shape, dtype=t.dtype) for t in (x.q, x.k, x.v)]
        tables = [poison(*t.shape) if t is not None and t.requires_grad else None for _, _, t in self.terms]
        _cpu.backward(
            **inputs, **self.plain.plan, dout=x.dout, lse=lse, delta=delta, dq=dq, dk=dk, dv=dv, table_grads=tables
        )
        found = {f"table {i}": t for i, t in enumerate(t for t in tables if t is not None)}
        return dict(zip(NAMES, (out, lse, *grads), strict=True)) | found

    def check(self, variant: str = "", threads: int = 2) -> dict[str, Tensor]:
        """Check that errors are at most twice those of the formula in float32, or those of rounding.

        Where few pairs are added the formula's own error is chance, so its sums have several orders.
        """
        want, got = self.dense(torch.float64), self.run(variant, threads)
        stored = {name: self.plain.x.q.dtype if name in NAMES and name != "lse" else torch.float32 for name in got}
        # the formula's results are not rounded to the stored dtype
        plain = (
            {
                name: error + torch.finfo(stored[name]).eps
                for name, error in errors(self.dense(torch.float32, order), want).items()
            }
            for order in range(8)
        )
        check_errors(got, want, plain, 0.0)
        return got


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 + seed))


def learned(table: Tensor) -> Tensor:
    return table.detach().requires_grad_()


def places_of(plain: Case, *, spread: bool = False, offsets: bool = False, seed: int = 0) -> dict[str, Tensor]:
    """Return positions that are consecutive, or rise at random."""
    x, generator = plain.x, torch.Generator().manual_seed(seed)

    def tokens(n: int) -> Tensor:
        some = torch.randperm(3 * n, generator=generator)[:n].sort().values if spread else torch.arange(n)
        return some.int()

    places = {"rows": tokens(x.q.shape[2]), "columns": tokens(x.k.shape[2])}
    places["heads"] = torch.arange(x.q.shape[1], dtype=torch.int32) * 3 + 1
    if offsets:
        places["q_offset"] = torch.arange(len(x.q), dtype=torch.int32) * 37 - 30
        places["k_offset"] = torch.tensor([-13], dtype=torch.int32)
    return places


def terms_of(name: str, plain: Case, places: dict[str, Tensor]) -> tuple[list[Term], int]:
    """Return terms by name, in order, and the threshold of dropout."""
    heads = plain.x.q.shape[1]
    size = int(places["rows"].max()) + 1, int(places["columns"].max()) + 3
    kinds: dict[str, Term] = {
        **{name: (name, list(ORACLES[KINDS[name].__name__].some), None) for name in ALONE},
        "alibi": ("alibi", [], torch.logspace(-1, -3, heads)),
        "slopes": ("alibi", [], slopes(heads, size[1])),
        "distance": ("distance", [], learned(draw(heads, 81))),
        "bias": ("bias", [], learned(draw(len(plain.x.q), heads, *size))),
        "shared": ("bias", [], learned(draw(1, 1, *size))),
    }
    names = name.split()
    return [kinds[each] for each in names if each in kinds], 20000 if "dropout" in names else 0


def slopes(heads: int, columns: int) -> Tensor:
    """Return slopes for each key: those of a sequence of 50 keys, of one of 20, and so on."""
    sequence = torch.tensor([50, 20, 1, 0, 70]).repeat(columns)[:columns].cumsum(0)
    of_sequence = torch.rand(heads, columns, generator=torch.Generator().manual_seed(3)) / 10
    return of_sequence[:, torch.searchsorted(sequence, torch.arange(columns), right=True)]


def scored(name: str, plain: Case, **options: bool) -> Scored:
    places = places_of(plain, **options)
    return Scored(plain, terms_of(name, plain, places)[0], places, terms_of(name, plain, places)[1])


NAMED = [
    *ALONE,
    "alibi",
    "slopes",
    "distance",
    "bias",
    "shared",
    "dropout",
    "softcap distance",
    "distance softcap",
    "alibi dropout",
    "slopes distance",
    "bias softcap",
    "shared distance alibi bias softcap distance softcap shared dropout",
]


@every_variant
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("name", NAMED)
def test_terms(name: str, dtype: str, variant: str) -> None:
    """Terms are right for several heads on a list, batches, partial tiles, and rows and columns that end within a tile."""
    plain = case(150, 130, (64, 32), dtype=dtype, batch=2, heads=4, kv_heads=2, dims=(24, 40), groups=2, density=0.7)
    first = scored(name, plain).check(variant, threads=1)
    assert all(torch.equal(first[key], result) for key, result in scored(name, plain).run(variant).items())


@every_variant
@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize(
    ("nq", "heads", "dims"),
    [(1, (2, 2), (64, 64)), (1, (4, 1), (24, 16)), (3, (6, 2), (32, 32)), (70, (5, 1), (16, 8))],
    ids=str,
)
def test_few_and_odd_queries(nq: int, heads: tuple[int, int], dims: tuple[int, int], name: str, variant: str) -> None:
    """Terms are right in decoding, and where lanes of one vector belong to several heads."""
    plain = case(nq, 333, (32, 48), heads=heads[0], kv_heads=heads[1], dims=dims, density=0.9)
    scored(name, plain, offsets=True).check(variant)


@every_variant
@pytest.mark.parametrize("nq", [2, 150])
@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize("name", [*NAMED[-12:-6], NAMED[-1]])
def test_uneven_tokens(name: str, offsets: bool, nq: int, variant: str) -> None:
    plain = case(nq, 130, (32, 64), batch=2, heads=4, kv_heads=2, dims=(16, 16), density=0.8)
    each = scored(name, plain, spread=True, offsets=offsets)
    first = each.check(variant)
    assert all(torch.equal(first[key], result) for key, result in each.run(variant, threads=1).items())


@pytest.mark.parametrize("step", [(3, 3), (8, 8), (2, 5), (-1, 1), (0, 1), (1, 0)], ids=str)
def test_even_tokens_that_are_apart(step: tuple[int, int]) -> None:
    """Terms use positions in dilated views, with uneven steps, in descending order, and of tokens at one position."""
    plain = case(100, 90, (32, 32), dims=(16, 16))
    places = places_of(plain)
    places["rows"] = places["rows"] * abs(step[0])
    places["rows"] = places["rows"].flip(0).contiguous() if step[0] < 0 else places["rows"]
    places["columns"] = places["columns"] * step[1]
    for name in ("alibi distance bias dropout", "shared"):
        Scored(plain, terms_of(name, plain, places)[0], places, 30000 if "dropout" in name else 0).check()


@every_variant
@pytest.mark.parametrize("scale", [-0.3, 0.0])
@pytest.mark.parametrize("nq", [1, 70])
def test_scales(nq: int, scale: float, variant: str) -> None:
    scored(NAMED[-1], case(nq, 90, (32, 32), scale=scale, density=0.9)).check(variant)


@every_variant
def test_slopes_of_a_softcap_far_below_the_scores(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every score is near the cap, slopes are small differences; they keep their digits, also with a gradient of lse alone."""
    monkeypatch.setenv("RINGWEAVE_CPU_VARIANT", variant)
    torch.manual_seed(0)
    q, k, v = (1 + 0.1 * torch.randn(1, 2, 6, 16) for _ in range(3))
    for cap in (1.5, 0.7, 0.4):  # scores are about 4: slopes from 0.02 to 1e-8
        grads = {}
        for dtype in (torch.float32, torch.float64):
            leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
            scores = cap * torch.tanh(leaves[0] @ leaves[1].mT / 4 / cap)
            if dtype == torch.float32:
                lse = rw.attention_with_lse(*leaves, rw.Full(), terms=rw.Softcap(cap), backend="cpu").lse
            else:
                lse = scores.logsumexp(-1)
            grads[dtype] = torch.autograd.grad(lse.sum(), leaves[:2])
        for got, want in zip(*grads.values(), strict=True):
            torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=0.0)


@every_variant
@pytest.mark.parametrize("nq", [2, 60])
def test_an_infinite_bias_is_a_mask(nq: int, variant: str) -> None:
    """An infinite bias gives weight 0 without an overflow, and a row of nothing else is empty."""
    plain = case(nq, 64, (32, 32), masks=torch.ones(1, nq, 64, dtype=torch.bool))
    each = scored("bias", plain)
    table = each.terms[0][2]
    assert table is not None
    with torch.no_grad():
        table[:, :, :, 7:60:3] = -torch.inf
        table[:, :, 0] = -torch.inf
    out, lse = poison(*plain.x.dout.shape), poison(*plain.x.q.shape[:3])
    x = plain.x
    args = plain.inputs() | plain.rows() | {"out": out, "lse": lse, "threads": 1, "variant": variant}
    assert not _cpu.forward(**args, **each.options())
    assert lse[:, :, 0].isneginf().all()
    assert (out[:, :, 0] == 0).all()
    allowed = (plain.mask > 0) & (table[..., :64].detach() > -torch.inf)
    want = Scored(
        replace(plain, mask=allowed.float()), [("bias", [], table.detach().nan_to_num(neginf=0))], each.places
    ).dense(torch.float64)
    got = each.run(variant)
    assert all(error < 1e-5 for error in errors({name: got[name] for name in want}, want).values())
    x.q[:, :, 1], x.k[:, :, 5] = -3e38, 3e38
    assert _cpu.forward(**args, **each.options())


@every_variant
@pytest.mark.parametrize("nq", [3, 100])
@pytest.mark.parametrize("name", [*NAMED[:-6], NAMED[-1]])
def test_nan_in_unattended_keys_changes_nothing(name: str, nq: int, variant: str) -> None:
    mask = random_masks(1, nq, 120, 32, 32, density=0.9)
    dead_q, dead_k = torch.arange(nq) % 7 == 2, torch.arange(120) % 9 == 5
    mask[:, dead_q] = False
    mask[:, :, dead_k] = False
    each = scored(name, case(nq, 120, (32, 32), dims=(16, 24), masks=mask))
    clean = each.run(variant)
    x = each.plain.x
    x.q[:, :, dead_q] = x.k[:, :, dead_k] = torch.nan
    x.dout[:, :, dead_q] = x.v[:, :, dead_k] = torch.nan
    x.dlse[:, :, dead_q] = torch.nan
    for kind, _, table in each.terms:
        if kind == "bias" and table is not None:
            table.data[:, :, :nq][:, :, dead_q] = torch.nan
            table.data[..., :120][..., dead_k] = torch.nan
        elif kind == "alibi" and table is not None and table.ndim == 2:
            table[:, :120][:, dead_k] = torch.nan
    dirty = each.run(variant)
    assert all(torch.equal(clean[key], dirty[key]) for key in clean)


@every_variant
@pytest.mark.parametrize("name", ["distance softcap", "softcap bias", "shared"])
def test_nan_reaches_its_readers(name: str, variant: str) -> None:
    """A NaN key makes NaN exactly the table gradients of pairs with a query that attends it."""
    masks = torch.tril(torch.ones(1, 64, 64, dtype=torch.bool))
    each = scored(name, case(64, 64, (32, 32), heads=1, kv_heads=1, masks=masks))
    each.plain.x.k[:, :, 40] = torch.nan
    got = each.run(variant)
    assert torch.equal(got["lse"].isnan().flatten(), torch.arange(64) >= 40)
    rows, columns = masks[0, 40:].nonzero().unbind(-1)
    wanted = torch.zeros(got["table 0"].shape[-2:], dtype=torch.bool)
    if "distance" in name:
        wanted[0, (columns - rows - 40).clamp(-40, 40) + 40] = True
    else:
        wanted[rows + 40, columns] = True
    assert torch.equal(got["table 0"].isnan(), wanted.view_as(got["table 0"]))


def test_unattended_keys_do_not_coarsen_a_tables_gradient() -> None:
    """A table's gradient is summed in multiples of a bound over pairs, and padding, also of one head's keys, does not raise the bound."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, heads, 200, 8, generator=generator) for heads in (4, 2, 2, 4))
    short = rw.SlidingWindow(5) & rw.KeyPadding(100)
    # no query attends the first key head's keys from 100 on, and queries from 150 on attend nothing
    pattern = rw.PerHead([short, short & rw.Causal(), rw.Full(), rw.Causal()])

    def grad() -> Tensor:
        table = torch.zeros(4, 9, requires_grad=True)
        out = rw.attention(q, k, v, pattern, terms=rw.DistanceBias(table), backend="cpu")
        return torch.autograd.grad((out * dout).sum(), table)[0]

    want = grad()
    v[:, 0, 100:], dout[:, :2, 150:] = 1e30, -1e30
    torch.testing.assert_close(grad(), want)


@every_variant
def test_the_cap_is_exact_near_zero_and_far(variant: str) -> None:
    """A row of one key has its capped score as lse, near zero and far from it; an infinite product stays infinite."""
    n = 2048
    masks = torch.eye(n, dtype=torch.bool)[None]
    plain = case(n, n, (16, 16), heads=1, kv_heads=1, dims=(8, 8), masks=masks, scale=1.0)
    plain.x.q.zero_()
    plain.x.k.zero_()
    plain.x.q[..., 0], plain.x.k[..., 0] = 1, torch.logspace(-30, 6, n) * (-1) ** torch.arange(n)
    plain.x.k[0, 0, :2, 0] = torch.tensor([0.0, torch.inf])
    for cap in (1.0, 30.0, 1e-3):
        got = Scored(plain, [("softcap", [cap], None)]).run(variant)["lse"].double().flatten()
        want = cap * torch.tanh(plain.x.k[0, 0, :, 0].double() / cap)
        want[1] = torch.inf
        assert ((got == want) | ((got - want).abs() <= 4e-7 * want.abs())).all()


def test_dropout_leaves_lse_and_what_it_scales() -> None:
    plain = case(70, 90, (32, 32), dims=(16, 16))
    lse = plain.forward()[1]
    each = scored("dropout", plain)
    for drop in (1, 20000, 65535):
        each.drop = drop
        got = each.check()
        torch.testing.assert_close(got["lse"], lse, rtol=0, atol=1e-6)
    share = 1 - each.kept().double().mean()
    assert share > 0.999


def test_philox_by_its_published_words() -> None:
    """Philox gives the known answers of Random123."""
    full = [np.array([0xFFFFFFFF])] * 4
    assert [int(w[0]) for w in philox([np.array([0])] * 4, 0)] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert [int(w[0]) for w in philox(full, 2**64 - 1)] == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


@pytest.mark.parametrize(
    "change",
    {
        "float16": lambda t: t.half(),
        "bfloat16": lambda t: t.bfloat16(),
        "transposed": lambda t: t.mT.contiguous().mT,
        "every other": lambda t: t.repeat_interleave(2, -1)[..., ::2],
        "repeated": lambda t: t[:1, :1].expand_as(t),
        "turned": lambda t: t.transpose(0, 2).contiguous().transpose(0, 2),
    }.items(),
    ids=lambda item: item[0],
)
@pytest.mark.parametrize("nq", [3, 70])
def test_strides_of_a_bias(change: tuple[str, object], nq: int) -> None:
    plain = case(nq, 90, (32, 32), batch=2, heads=4, kv_heads=2)
    each = scored("bias softcap", plain)
    table = each.terms[0][2]
    assert table is not None
    each.terms[0] = ("bias", [], learned(change[1](table.detach())))  # type: ignore[operator]
    each.check()


@pytest.mark.parametrize("shape", [(1, 4), (2, 1), (1, 1)], ids=str)
@pytest.mark.parametrize("nq", [3, 70])
def test_a_bias_for_all(shape: tuple[int, int], nq: int) -> None:
    plain = case(nq, 90, (32, 32), batch=2, heads=4, kv_heads=2)
    each = scored("", plain)
    each.terms = [("bias", [], learned(draw(*shape, nq, 90)))]
    assert torch.equal(each.check()["table 0"], each.run(threads=5)["table 0"])


def test_strides_of_other_tables() -> None:
    each = scored("", case(70, 90, (32, 32)))
    each.terms = [("alibi", [], torch.tensor(0.1).expand(2)), ("distance", [], learned(draw(1, 1).expand(2, 1)))]
    each.check()
    each.terms = [("distance", [], learned(draw(4, 50)[::2, 3:12]))]
    each.check()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_windows_of_query_tiles(dtype: str) -> None:
    """dV is kept between windows of query tiles, and only the last window applies dropout's factor."""
    plain = case(1300, 90, (64, 32), dtype=dtype, heads=16, kv_heads=1, dims=(256, 24), groups=2)
    each = scored("distance dropout", plain)
    first = each.check(threads=1)
    assert all(torch.equal(first[key], result) for key, result in each.run(threads=3).items())


def test_long_lists() -> None:
    """Terms are right for lists in blocks that several threads sum."""
    masks = random_masks(1, 66, 1500, 16, 16, density=0.4)
    masks[:, :16] = True
    each = scored("alibi distance softcap dropout", case(66, 1500, (16, 16), heads=4, kv_heads=1, masks=masks))
    first = each.check(threads=1)
    assert all(torch.equal(first[key], result) for key, result in each.run(threads=3).items())


def test_no_tiles_at_all() -> None:
    each = scored(NAMED[-1], case(70, 50, (32, 32), masks=torch.zeros(1, 70, 50, dtype=torch.bool)))
    got = each.run()
    assert got.pop("lse").isneginf().all()
    assert all((result == 0).all() for result in got.values())


@every_variant
def test_nothing_asked_changes_nothing(variant: str) -> None:
    plain = case(130, 200, (64, 32), dims=(64, 64))
    places = {"rows": None, "columns": None, "q_offset": None, "k_offset": None, "heads": None}
    got = Scored(plain, [], places).run(variant)  # type: ignore[arg-type]
    assert all(torch.equal(result, got[name]) for name, result in plain.run(variant).items())


REFUSED: list[tuple[str, dict[str, object]]] = [
    ("terms", {"terms": [("softcap", [0.0], None)]}),
    ("terms", {"terms": [("softcap", [float("nan")], None)]}),
    ("terms", {"terms": [("softcap", [1e-39], None)]}),
    ("terms", {"terms": [("softcap", [], None)]}),
    ("terms", {"terms": [("softcap", [1.0, 2.0], None)]}),
    ("terms", {"terms": [("alibi", [1.0], draw(2))]}),
    ("terms", {"terms": [("sine", [1.0], None)]}),
    ("alibi", {"terms": [("alibi", [], None)]}),
    ("alibi", {"terms": [("alibi", [], draw(3))]}),
    ("alibi", {"terms": [("alibi", [], draw(2).half())]}),
    ("alibi", {"terms": [("alibi", [], draw(3, 90))]}),
    ("alibi", {"terms": [("alibi", [], draw(1, 2, 90))]}),
    ("columns", {"terms": [("alibi", [], draw(2, 89))]}),
    ("distance", {"terms": [("distance", [], draw(2, 4))]}),
    ("distance", {"terms": [("distance", [], draw(2, 0))]}),
    ("distance", {"terms": [("distance", [], draw(3, 5))]}),
    ("distance", {"terms": [("distance", [], draw(5, 2).mT)]}),
    ("bias", {"terms": [("bias", [], draw(70, 90))]}),
    ("bias", {"terms": [("bias", [], draw(2, 2, 70, 90))]}),
    ("bias", {"terms": [("bias", [], draw(1, 2, 70, 90).double())]}),
    ("rows", {"terms": [("bias", [], draw(1, 2, 69, 90))]}),
    ("columns", {"terms": [("bias", [], draw(1, 2, 70, 89))]}),
    ("rows", {"rows": None}),
    ("rows", {"rows": torch.arange(70)}),
    ("rows", {"rows": torch.arange(69, dtype=torch.int32)}),
    ("rows", {"rows": torch.full((70,), 2**30, dtype=torch.int32)}),
    ("columns", {"columns": torch.arange(180, dtype=torch.int32)[::2]}),
    ("q_offset", {"q_offset": torch.zeros(2, dtype=torch.int32)}),
    ("q_offset", {"q_offset": torch.full((1,), -(2**31), dtype=torch.int32)}),
    ("k_offset", {"k_offset": torch.zeros(1, 1, dtype=torch.int32)}),
    ("k_offset", {"k_offset": torch.full((1,), 2**31 - 1, dtype=torch.int32)}),
    ("heads", {"heads": None}),
    ("heads", {"heads": torch.zeros(3, dtype=torch.int32)}),
    ("drop", {"drop": 65536}),
    ("drop", {"drop": -1}),
    ("table_grads", {"table_grads": [None]}),
    ("table_grads", {"table_grads": [None, torch.zeros(2, 9), None]}),
    ("table_grads", {"table_grads": [torch.zeros(2, 9), None]}),
    ("table_grads", {"table_grads": [None, torch.zeros(2, 10)]}),
    ("table_grads", {"table_grads": [None, torch.zeros(2, 9, dtype=torch.double)]}),
    ("table_grads", {"table_grads": [None, torch.zeros(2, 18)[:, ::2]]}),
    ("table_grads", {"table_grads": [None, torch.zeros(1, 9).expand(2, 9)]}),
]


@pytest.mark.parametrize(("name", "change"), REFUSED, ids=str)
def test_refuses(name: str, change: dict[str, object]) -> None:
    plain = case(70, 90, (32, 32))
    x, rows = plain.x, torch.zeros(plain.x.q.shape[:3])
    dq, dk, dv = (torch.empty_like(t) for t in (x.q, x.k, x.v))
    good = places_of(plain) | {"terms": [("alibi", [], draw(2)), ("distance", [], draw(2, 9))], "drop": 1}

    def call(options: dict[str, object]) -> None:
        args = plain.inputs() | {"threads": 1} | options
        if "table_grads" not in options:
            _cpu.forward(**args, **plain.rows(), out=torch.empty_like(x.dout), lse=rows.clone())
        _cpu.backward(**args, **plain.plan, dout=x.dout, lse=rows, delta=rows, dq=dq, dk=dk, dv=dv)

    call(good)
    call(good | {"table_grads": [None, torch.zeros(2, 9)]})
    with pytest.raises(ShapeError, match=f"^{name}: "):
        call(good | change)
