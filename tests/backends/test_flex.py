"""Test the FlexAttention backend: its adapter against a dense mask, its compiled functions, and results on a GPU."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import ringweave as rw
from ringweave import program
from ringweave.backends import BACKENDS, flex
from ringweave.cache import COMPILED
from ringweave.call import Call
from ringweave.errors import UnsupportedError
from ringweave.plan import Branch, branches
from ringweave.terms import Term
from ringweave.terms.operands import TermOperands

from .. import oracle
from ..cases import MIXTURES, PATTERNS
from ..operators import by_operators
from ..oracle import Inputs
from ..test_conformance import conforms
from ..test_terms import check, inputs, make, ours
from ..test_terms import dense as terms_of_formula

#: every kind of plan: masks shared and per head, tables, empty rows, views
NAMES = ["sinks", "per_head", "table_per_head", "future", "window_and_dilated", "longnet_causal"]
EVERYTHING = PATTERNS | MIXTURES


def listed(mask: Any, q: Tensor, k: Tensor) -> Tensor:
    """Return the pairs of a BlockMask: its mask_mod in partial blocks, all pairs in full ones."""
    batch, heads = mask.kv_indices.shape[:2]
    rows, columns = torch.arange(q.shape[2], device=q.device), torch.arange(k.shape[2], device=q.device)
    b, h = torch.arange(batch)[:, None, None, None], torch.arange(heads)[None, :, None, None]
    b, h = b.to(q.device), h.to(q.device)
    allowed = mask.mask_mod(b, h, rows[None, None, :, None], columns[None, None, None, :])
    blocks = torch.zeros(2, batch, heads, mask.kv_indices.shape[2], mask.kv_indices.shape[3] + 1, dtype=torch.bool)
    blocks = blocks.to(q.device)
    both = ((mask.kv_num_blocks, mask.kv_indices), (mask.full_kv_num_blocks, mask.full_kv_indices))
    for kind, (counts, indices) in zip(blocks, both, strict=True):
        counted = torch.arange(indices.shape[-1], device=q.device) < counts[..., None]
        kind.scatter_(-1, torch.where(counted, indices, indices.shape[-1]).long(), True)
    sides = mask.BLOCK_SIZE
    partial, full = blocks[..., rows[:, None] // sides[0], columns[None, :] // sides[1]]
    return partial & allowed | full


def dense(
    q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: float, grouped: bool, operands: TermOperands | None
) -> tuple[Tensor, Tensor]:
    """Compute FlexAttention's result in float32, differentiable on a CPU; empty rows stay undefined."""
    assert grouped == (q.shape[1] != k.shape[1])
    assert all(x.is_contiguous() for x in (q, k, v))
    index = [torch.arange(n).view(-1, *[1] * (3 - i)) for i, n in enumerate((*q.shape[:3], k.shape[2]))]
    out, lse = oracle.attention(
        *(x.float() for x in (q, k, v)), listed(mask, q, k), scale,
        scored=lambda t: t if operands is None else operands.apply(t, operands.pairs(*index))[-1],
    )  # fmt: skip
    return torch.where(torch.isneginf(lse)[..., None], torch.nan, out).to(q.dtype), lse


def use(monkeypatch: pytest.MonkeyPatch, attend: flex.Attend) -> None:
    """Run the backend on a CPU, with another function in place of the compiled one."""

    def as_on_a_gpu(case: Call, branch: Branch) -> str | None:
        return flex.unsupported_reason(dataclasses.replace(case, device="cuda"), branch)

    able = dataclasses.replace(flex.BACKEND, unsupported_reason=as_on_a_gpu)
    monkeypatch.setitem(BACKENDS, "flex", able)
    monkeypatch.setattr(flex, "compiled", lambda kind: attend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_forward_and_gradients(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, dense)
    conforms(Inputs.random(300, heads=4, kv_heads=2, batch=2, dim=24, dtype=dtype), EVERYTHING[name](300), "flex")


def test_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, dense)
    conforms(Inputs.random(70, 300, heads=2), rw.SlidingWindow(40) & rw.Causal(), "flex", q_offset=230, scale=0.3)


def test_gradients_through_the_compiler_inside_an_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients work although the operator runs below autograd, which the compiler's tracing of gradients needs."""

    def attend(
        q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: float, grouped: bool, operands: object
    ) -> tuple[Tensor, Tensor]:
        allowed = listed(mask, q, k)
        traced = torch.compile(oracle.attention, backend="aot_eager", fullgraph=True)
        out, lse = traced(q, k, v, allowed, scale)
        assert isinstance(out, Tensor)
        return out, lse

    use(monkeypatch, attend)
    conforms(Inputs.random(150, heads=2), rw.SlidingWindow(40), "flex")


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compile without a code generator, by FlexAttention's own tracing and its dense form, which gives lse on a CPU."""
    COMPILED.clear()

    def as_on_a_gpu(case: Call, branch: Branch) -> str | None:
        return flex.unsupported_reason(dataclasses.replace(case, device="cuda"), branch)

    able = dataclasses.replace(flex.BACKEND, unsupported_reason=as_on_a_gpu)
    monkeypatch.setitem(BACKENDS, "flex", able)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    yield
    COMPILED.clear()


@torch.no_grad()
def test_more_sizes_than_the_compiler_keeps_variants_of_one_function(traced: None) -> None:
    """More sizes than the compiler's limit of variants all stay compiled, and a call of a known kind compiles nothing."""
    most = torch._dynamo.config.recompile_limit
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for step in range(most + 2):
        x = Inputs.random(40 + step, heads=2, kv_heads=1, dtype=torch.float32)
        for pattern in (rw.SlidingWindow(9), rw.SlidingWindow(3)):
            got = rw.attention_with_lse(x.q, x.k, x.v, pattern, backend="flex")
            want = oracle.attention(x.q, x.k, x.v, pattern.to_dense(40 + step, heads=2))
            torch.testing.assert_close(got.out, want[0])
            torch.testing.assert_close(got.lse, want[1])
    assert len(COMPILED) == most + 2
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before == most + 2


def fixed(names: tuple[str, ...], n: int, dtype: torch.dtype) -> list[Term]:
    """Return terms with tables that require no gradients."""
    return [term.over(*(table.detach() for table in term.tables)) for term in make(names, n, dtype)]


def agrees(got: dict[str, Tensor], x: Inputs, pattern: rw.Pattern, names: tuple[str, ...], terms: list[Term]) -> None:
    def formula(kind: torch.dtype, order: int) -> dict[str, Tensor]:
        found = terms_of_formula(x, pattern, names, terms, kind, order=order)
        return {name: found[name] for name in got}

    check(got, formula, x.q.dtype)


@pytest.mark.parametrize(
    ("names", "pattern", "dtype"),
    [
        (("softcap", "distance"), (rw.SlidingWindow(40) | rw.Sinks(3)) & rw.Causal(), torch.bfloat16),
        (("alibi", "bias"), rw.SlidingWindow(20) | rw.Dilated(8, 16), torch.float32),
        (
            ("shared_bias", "softcap"),
            rw.PerHead([rw.Causal(), rw.Full(), rw.SlidingWindow(9), rw.Causal()]),
            torch.float32,
        ),
    ],
    ids=str,
)
def test_terms(
    names: tuple[str, ...], pattern: rw.Pattern, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, dense)
    x, terms = inputs(150, dtype), fixed(names, 150, dtype)
    agrees(ours(x, pattern, terms, "flex"), x, pattern, names, terms)


@torch.no_grad()
def test_terms_are_traced_as_a_score_mod(traced: None) -> None:
    names, pattern = ("distance", "alibi", "softcap", "bias"), rw.SlidingWindow(40) & rw.Causal()
    x, terms = inputs(70), fixed(("distance", "alibi", "softcap", "bias"), 70, torch.float32)
    out, lse = rw.attention_with_lse(x.q, x.k, x.v, pattern, terms=terms, backend="flex")
    with torch.enable_grad():
        agrees({"out": out.double(), "lse": lse.double()}, x, pattern, names, terms)


def test_what_a_table_learns_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, dense)
    x = inputs(40)
    terms = rw.DistanceBias(torch.zeros(4, 5, requires_grad=True))
    for call in (rw.attention_with_lse, by_operators):
        out, _ = call(x.q, x.k, x.v, rw.Full(), terms=terms, backend="flex")
        with pytest.raises(UnsupportedError, match="FlexAttention's gradients of terms' tables have not been tested"):
            out.sum().backward()


def case(device: str = "cuda", dtype: torch.dtype = torch.bfloat16, dim: int = 64, n: int = 256) -> Call:
    return Call(1, 4, 2, n, n, dim, dim, dtype, device)


def unsupported_reason(about: Call) -> str | None:
    return flex.unsupported_reason(about, branches(rw.SlidingWindow(9), about.nq, about.nk, heads=4)[0])


@pytest.mark.parametrize(
    ("about", "reason"),
    [
        (case(), None),
        (case("cpu"), "FlexAttention compiled for a CPU returns no lse and has no backward"),
        (case("mps"), "it runs on CUDA and ROCm tensors, and these are on mps"),
        (case(dtype=torch.float64), "it computes float32, bfloat16 and float16, and got torch.float64"),
        (case(dim=8), "it needs head dimensions of 16 to 256, and got D = 8"),
        (case(n=2**20), "a BlockMask has an entry for every tile, empty or not, and this one would take 5 GiB"),
    ],
)
def test_refusals(about: Call, reason: str | None) -> None:
    assert unsupported_reason(about) == reason


def test_it_runs_only_when_named() -> None:
    assert "flex" not in program.PREFERENCE
    q = torch.randn(1, 2, 64, 16)
    with pytest.raises(UnsupportedError, match="no lse and has no backward"):
        rw.attention(q, q, q, backend="flex")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "tokens", "dtype"),
    [
        ("sinks", 700, torch.float32),
        ("sinks", 700, torch.bfloat16),
        ("per_head", 700, torch.bfloat16),
        ("table_per_head", 700, torch.bfloat16),
        ("future", 700, torch.float16),
        # views of one length: each kind compiles for some seconds
        ("window_and_dilated", 704, torch.bfloat16),
    ],
)
def test_on_a_gpu(name: str, tokens: int, dtype: torch.dtype) -> None:
    x = Inputs.random(tokens, heads=4, kv_heads=2, batch=2, dim=64, dtype=dtype).to("cuda")
    conforms(x, EVERYTHING[name](tokens), "flex")
