"""Test the FlexAttention backend: its adapter against a dense mask, its compiled functions, and results on a GPU."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import ringweave as rw
from ringweave.backends import BACKENDS, flex
from ringweave.cache import COMPILED
from ringweave.call import Call, Operands
from ringweave.errors import WARNED, UnsupportedError
from ringweave.plan import Branch, branches
from ringweave.plan.subplan import CutBranch
from ringweave.terms import Term
from ringweave.terms.operands import TermOperands

from .. import oracle
from ..cases import MIXTURES, PATTERNS
from ..oracle import Inputs
from ..plan.test_cuda_sync import CUDA, Gpu, Stream
from ..test_conformance import conforms, run
from ..test_terms import KINDS as TERMS
from ..test_terms import PAIRS as TERM_PAIRS
from ..test_terms import check, inputs, make, ours
from ..test_terms import dense as terms_of_formula

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
    monkeypatch.setattr(flex, "installed", lambda: True)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", list(EVERYTHING))
def test_every_pattern(name: str, monkeypatch: pytest.MonkeyPatch, poisoned: None) -> None:
    """Out, lse and gradients of each pattern, with grouped queries and a length that is no multiple of a tile."""
    use(monkeypatch, dense)
    dtype = torch.bfloat16 if len(name) % 2 else torch.float32
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
    """Compile without a code generator: FlexAttention's own tracing, dense form and backward, which a CPU runs."""
    from torch.nn.attention import flex_attention

    COMPILED.clear()

    def as_on_a_gpu(case: Call, branch: Branch) -> str | None:
        return flex.unsupported_reason(dataclasses.replace(case, device="cuda"), branch)

    able = dataclasses.replace(flex.BACKEND, unsupported_reason=as_on_a_gpu)
    monkeypatch.setitem(BACKENDS, "flex", able)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    monkeypatch.setattr(flex, "installed", lambda: True)
    # it refuses gradients on a CPU, where only its code generator has none
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    yield
    COMPILED.clear()


@torch.no_grad()
@torch._dynamo.config.patch(recompile_limit=2)
def test_more_sizes_than_the_compiler_keeps_variants_of_one_function(traced: None) -> None:
    """More sizes than the compiler's limit of variants all stay compiled, and a call of a known kind compiles nothing.

    A length between two others is padded to the longer one.
    """
    most = torch._dynamo.config.recompile_limit
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for step in range(most + 2):
        for n, pattern in itertools.product(
            (128 * step + 101, 128 * step + 128), (rw.SlidingWindow(9), rw.SlidingWindow(3))
        ):
            x = Inputs.random(n, heads=2, kv_heads=1, dtype=torch.float32)
            got = rw.attention_with_lse(x.q, x.k, x.v, pattern, backend="flex")
            want = oracle.attention(x.q, x.k, x.v, pattern.to_dense(n, heads=2))
            torch.testing.assert_close(got.out, want[0])
            torch.testing.assert_close(got.lse, want[1])
    assert len(COMPILED) == most + 2
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before == most + 2


def agrees(
    got: dict[str, Tensor],
    x: Inputs,
    pattern: rw.Pattern | Tensor,
    names: tuple[str, ...],
    terms: list[Term],
    **options: Any,
) -> None:
    check(got, lambda kind, order: terms_of_formula(x, pattern, names, terms, kind, order=order, **options), x.q.dtype)


RELATIONS = [
    (rw.SlidingWindow(40) | rw.Sinks(3)) & rw.Causal(),
    rw.SlidingWindow(20) | rw.Dilated(8, 16),
    rw.PerHead([rw.Causal(), rw.Full(), rw.SlidingWindow(9), rw.Causal()]),
]


@pytest.mark.parametrize("names", [(name,) for name in TERMS] + TERM_PAIRS, ids="-".join)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_terms(names: tuple[str, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every term and pair of terms, with the gradients of the tables that learn."""
    use(monkeypatch, dense)
    x, terms, pattern = inputs(150, dtype), make(names, 150, dtype), RELATIONS[sum(map(len, names)) % 3]
    agrees(ours(x, pattern, terms, "flex"), x, pattern, names, terms)


# test_terms has both dtypes without a compiler, which takes seconds for each
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.long)], ids=str)
def test_tables_learn_by_the_backward_of_flex_attention(dtype: torch.dtype, traced: None) -> None:
    """FlexAttention's backward, and not autograd of a dense formula, gives the gradients of captured tables."""
    names, pattern = ("distance", "alibi", "softcap", "bias"), RELATIONS[0]
    x, terms = inputs(150, dtype), make(names, 150, dtype)
    agrees(ours(x, pattern, terms, "flex"), x, pattern, names, terms)


@pytest.mark.parametrize(
    ("pattern", "sizes"),
    [
        (RELATIONS[1], {"heads": 4, "kv_heads": 2}),
        (rw.KeyPadding([300, 211], [0, 33]) & rw.Causal(), {"heads": 4, "kv_heads": 1, "batch": 2}),
        (rw.LongNet((64, 300), (1, 4), causal=True), {"heads": 2}),
    ],
    ids=["dilated", "bounds by batch element", "mixture"],
)
def test_gradients_by_the_backward_of_flex_attention(pattern: rw.Pattern, sizes: dict[str, int], traced: None) -> None:
    conforms(Inputs.random(300, dim=16, **sizes), pattern, "flex")


def test_offsets_by_batch_element_and_learned_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries at other positions in each batch element, terms of distances, and sinks, which join outside."""
    use(monkeypatch, dense)
    x, names, pattern = inputs(90), ("distance",), rw.SlidingWindow(40) & rw.Causal()
    terms, offsets, sinks = make(names, 90, torch.float32), torch.tensor([0, 17]), torch.randn(4)
    got = ours(x, pattern, terms, "flex", sinks=sinks, q_offset=offsets)
    allowed = torch.stack([pattern.to_dense(90, 90, heads=4, q_offset=first)[0] for first in offsets.tolist()])
    agrees(got, x, allowed, names, terms, sinks=sinks, q_offset=offsets)


def test_dropout_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, dense)
    x = inputs(40)
    with pytest.raises(UnsupportedError, match="it computes no dropout"):
        rw.attention(x.q, x.k, x.v, dropout=0.1, backend="flex")


@torch.no_grad()
def test_steps_of_decoding_share_a_compiled_function(traced: None) -> None:
    """Steps with one more key each, across the end of a tile, compile once; no query attends the keys that are added."""
    before, terms = torch._dynamo.utils.counters["stats"]["unique_graphs"], rw.ALiBi.of_heads(4)
    for pattern in (rw.Causal(), rw.SlidingWindow(100, 0)):
        for n in (380, 383, 384, 385, 511):
            x = Inputs.random(1, n, heads=4, kv_heads=2)
            got = rw.attention_with_lse(x.q, x.k, x.v, pattern, q_offset=n - 1, terms=terms, backend="flex")
            want = rw.attention_with_lse(x.q, x.k, x.v, pattern, q_offset=n - 1, terms=terms, backend="reference")
            torch.testing.assert_close(got.out, want.out)
            torch.testing.assert_close(got.lse, want.lse)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before == 1


def finite(results: dict[str, Tensor]) -> bool:
    return all(bool((x.isfinite() | x.isneginf()).all()) for x in results.values())


def test_numbers_of_unattended_tokens_reach_nothing(traced: None) -> None:
    """NaN in keys and values that no query attends, in a partial tile too, and in queries that attend nothing."""
    table = torch.tensor([[1, 1], [0, 0]]).bool()
    pattern = rw.patterns.Periodic(1000, 0, 80) & rw.BlockTable(table, 128)
    x = Inputs.random(200, heads=4, kv_heads=2)
    clean = run(x, pattern, "flex")
    for bad in (torch.nan, torch.inf):
        for tensor, first in ((x.k, 80), (x.v, 80), (x.q, 128), (x.dout, 128)):
            tensor[:, :, first:] = bad
        dirty = run(x, pattern, "flex")
        assert finite(dirty)
        assert all(torch.equal(clean[name], dirty[name]) for name in clean)


def test_a_nan_in_a_key_stays_with_the_queries_that_attend_it(traced: None) -> None:
    x = Inputs.random(200, heads=2)
    clean = run(x, rw.Causal(), "flex")
    x.k[:, :, 150, 3] = torch.nan
    dirty = run(x, rw.Causal(), "flex")
    for name in ("out", "lse", "dq"):
        assert torch.equal(clean[name][:, :, :150], dirty[name][:, :, :150])
        assert dirty[name][:, :, 150:].isnan().all()
    assert dirty["dk"][:, :, :151].isnan().any()


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_generates_code_for_masks_and_terms(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU inductor computes FlexAttention's out without lse: masks and all terms are code that it can generate."""
    from torch.nn.attention.flex_attention import flex_attention

    def attend(
        q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: float, grouped: bool, operands: TermOperands | None
    ) -> tuple[Tensor, Tensor]:
        assert operands is not None

        def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return operands.apply(score.float(), operands.pairs(b, h, i, j))[-1]

        attended = torch.compile(flex_attention, dynamic=False, fullgraph=True)
        out = attended(q, k, v, score_mod, mask, scale, grouped)
        assert isinstance(out, Tensor)
        return out, dense(q, k, v, mask, scale, grouped, operands)[1]

    use(monkeypatch, attend)
    names, pattern = ("distance", "alibi", "softcap", "bias"), rw.KeyPadding([150, 101]) & rw.Causal()
    x, terms = inputs(150), make(names, 150, torch.float32)
    with torch.no_grad():
        out = rw.attention(x.q, x.k, x.v, pattern, terms=terms, backend="flex")
    agrees({"out": out.double()}, x, pattern, names, terms)


def test_the_cost_of_a_first_call_is_said_once(traced: None, caplog: pytest.LogCaptureFixture) -> None:
    WARNED.discard("flex")
    with caplog.at_level(logging.WARNING, "ringweave"):
        for n in (40, 41):
            x = Inputs.random(n)
            rw.attention(x.q, x.k, x.v, backend="flex")
    (record,) = caplog.records
    assert "FlexAttention compiles for each kind of call" in record.getMessage()


def test_a_mask_waits_for_its_stream_and_is_not_made_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another stream waits once for a mask and holds its memory; while a graph is captured, none can be made."""
    branch = branches(rw.SlidingWindow(40), 300, 300, heads=2)[0]
    made = branch.plan("cpu", tile=128)
    gpu = Gpu(monkeypatch)
    monkeypatch.setattr(Branch, "plan", lambda *of, **how: made)
    mask = flex.Mask.of(branch, CUDA, 2)
    gpu.stream = Stream()
    for _ in range(2):
        assert flex.Mask.of(branch, CUDA, 2) is mask
    assert len(gpu.stream.waited) == 1
    assert {id(x) for x, _ in gpu.read} == {id(x) for x in mask.tensors}
    assert len(mask.tensors) >= 11
    gpu.capturing = True
    assert flex.Mask.of(branch, CUDA, 2) is mask
    with pytest.raises(UnsupportedError, match="while a CUDA graph is captured"):
        flex.Mask.of(branch, CUDA, 1)


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
def test_refusals(about: Call, reason: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "installed", lambda: True)
    assert unsupported_reason(about) == reason


@pytest.mark.parametrize(("tile", "refused"), [(64, True), (128, False), (256, False)])
def test_a_part_of_a_plan_keeps_its_tiles(tile: int, refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank's part of a plan is not planned anew, and FlexAttention's kernels need tiles of multiples of 128."""
    use(monkeypatch, dense)
    (branch,) = branches(rw.SlidingWindow(40), 512, 512, heads=2)
    part = CutBranch.of(branch, rw.plan(rw.SlidingWindow(40), 512, heads=2, tile=tile))
    reason = flex.unsupported_reason(Call(1, 2, 2, 512, 512, 16, 16, torch.float32, "cuda"), part)
    assert (reason is not None) == refused
    if not refused:
        x = Inputs.random(512, heads=2)
        out, lse = flex.forward(Operands(x.q, x.k, x.v, 0.25), part, torch.float32)
        want = rw.attention_with_lse(x.q, x.k, x.v, rw.SlidingWindow(40), backend="reference")
        torch.testing.assert_close(out, want.out)
        torch.testing.assert_close(lse, want.lse)


def test_a_cpu_is_refused() -> None:
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
