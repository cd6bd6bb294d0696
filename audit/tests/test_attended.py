"""Planted faults are found and named, and correct functions pass."""

from __future__ import annotations

import re

import pytest
import torch

import ringweave as rw
import ringweave_audit as audit
from ringweave.errors import ShapeError

from .functions import BATCH, CAUSAL, FAULTS, HEADS, KV_HEADS, LEAKLESS, LEAKS, SOUND, Case, masked


def audited(case: Case, dtype: torch.dtype | None = None) -> audit.Comparison:
    dtype = dtype or case.dtype
    q = torch.randn(BATCH, HEADS, case.nq, 16, dtype=dtype)
    k, v = (torch.randn(BATCH, KV_HEADS, case.nk, 16, dtype=dtype) for _ in range(2))
    found = audit.attended(case.fn, q, k, v)
    return audit.compare(found, case.asked, q_offset=case.q_offset, **case.options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", list(FAULTS))
def test_faults(name: str) -> None:
    comparison = audited(FAULTS[name])
    assert not comparison.agrees
    assert re.search(FAULTS[name].says, comparison.sentence), comparison.sentence


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", list(SOUND))
def test_sound(name: str, dtype: torch.dtype) -> None:
    comparison = audited(SOUND[name], dtype)
    assert comparison.agrees, comparison.sentence
    assert comparison.sentence.startswith(f"agrees with {SOUND[name].asked!r}")
    if dtype == torch.float32:
        assert re.search(SOUND[name].says, comparison.sentence), comparison.sentence


def test_what_else_is_found() -> None:
    q, k, v = (torch.randn(1, 2, 30, 8) for _ in range(3))
    logits = torch.tensor([0.5, -2.0])
    found = audit.attended(lambda q, k, v: rw.attention(q, k, v, CAUSAL, scale=0.3, sink_logits=logits), q, k, v)
    assert found.scale == pytest.approx(0.3, rel=0.02)
    torch.testing.assert_close(found.sinks, logits.double(), atol=1e-4, rtol=1e-4)
    assert found.steady


@pytest.mark.parametrize(
    "pattern",
    [
        rw.Full(), rw.Causal(), rw.SlidingWindow(5), rw.SlidingWindow(4, 2), rw.Segments(8), rw.Segments(8) & CAUSAL,
        (rw.SlidingWindow(5) | rw.Sinks(3)) & CAUSAL, rw.Documents([7, 20, 13]), CAUSAL & rw.KeyPadding(33, 2),
        rw.Strided(3), rw.Strided(3) & CAUSAL,
    ],
    ids=str,
)  # fmt: skip
def test_masks_get_their_names(pattern: rw.Pattern) -> None:
    dense = pattern.to_dense(40)[0, 0]
    found = audit.named(dense)
    assert found is not None
    assert torch.equal(found.to_dense(40)[0, 0], dense)


def test_a_mask_without_a_name() -> None:
    assert audit.named(torch.rand(30, 30, generator=torch.Generator().manual_seed(0)) > 0.5) is None


def test_queries_that_do_not_count() -> None:
    """Padding rows may attend any key."""
    promised = CAUSAL & rw.KeyPadding(40, torch.tensor([0, 11]))
    allowed = promised.to_dense(40, heads=2, batch=2)
    loose = allowed | ~allowed.any(-1, keepdim=True)
    q, k, v = (torch.randn(2, 2, 40, 16) for _ in range(3))
    found = audit.attended(masked(loose), q, k, v)
    assert not audit.compare(found, promised).agrees
    rows = torch.arange(40) >= torch.tensor([[0], [11]])
    assert audit.compare(found, promised, rows=rows).agrees


@pytest.mark.filterwarnings("ignore:q, k, v. got more heads than tokens:UserWarning")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(1, 300), (300, 1), (2, 9)])
def test_rows_and_heads_of_many(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """16-bit types cannot represent every integer above 256, and beside a sink even fewer."""
    q = torch.randn(*shape, 3, 8, dtype=dtype)
    plain = audit.attended(lambda q, k, v: rw.attention(q, k, v), q, q, q)
    assert audit.compare(plain, rw.Full()).agrees
    sink = audit.attended(lambda q, k, v: rw.attention(q, k, v, sink_logits=torch.ones(shape[1])), q, q, q)
    assert audit.compare(sink, rw.Full(), sinks=True).agrees
    rolled = audit.attended(lambda q, k, v: rw.attention(q, k, v.roll(1, 0).roll(1, 1)), q, q, q)
    comparison = audit.compare(rolled, rw.Full())
    assert not comparison.agrees
    assert "reads values of" in comparison.sentence


def test_wrong_shapes() -> None:
    q = torch.randn(1, 2, 8, 16)
    with pytest.raises(ShapeError, match=r"fn: got .*wanted out of \(1, 2, 8, 16\)"):
        audit.attended(lambda q, k, v: q[:, :1], q, q, q)
    with pytest.raises(ShapeError, match=r"found: got"):
        audit.compare(torch.zeros(3, 3, dtype=torch.bool), CAUSAL)


@pytest.mark.parametrize("name", list(LEAKS))
def test_planted_leaks(name: str) -> None:
    x = torch.randn(2, 12, 8)
    x[0, 3] = 4.0
    promised = CAUSAL & rw.KeyPadding(12, 3) if "padding" in name else CAUSAL
    assert not audit.leaks(LEAKS[name], x, promised).agrees


@pytest.mark.parametrize("name", list(LEAKLESS))
def test_no_leak(name: str) -> None:
    found = audit.leaks(
        LEAKLESS[name], torch.randn(2, 12, 8), CAUSAL & rw.KeyPadding(12, 3) if "padding" in name else CAUSAL
    )
    assert found.agrees or "NaN" in str(found), str(found)
    assert "future" not in str(found)


def test_leaks() -> None:
    """Two layers with windows of 3 reach 6 tokens back; a mean over the row reaches every token."""
    x = torch.randn(2, 12, 8)
    window = rw.SlidingWindow(3)

    def layer(x: torch.Tensor) -> torch.Tensor:
        y = x[:, None]
        return x + rw.attention(y, y, y, window)[:, 0]

    assert audit.leaks(lambda x: layer(layer(x)), x, [window, window]).agrees
    once = audit.leaks(lambda x: layer(layer(x)), x, [window])
    assert (once.agrees, once.leaks[0]) == (False, (0, 4, 0, 0))
    future = audit.leaks(lambda x: layer(x) + x.mean(1, keepdim=True), x, CAUSAL)
    assert str(future).endswith("leaks, first: output 0 depends on input 1: the future is visible")
    across = audit.leaks(lambda x: layer(x) + x.mean(0), x, CAUSAL)
    assert "output 0 of row 0 depends on row 1: batch elements see each other" in str(across)


def test_leaks_are_found_in_whatever_mode() -> None:
    x = torch.randn(1, 8, 4)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert not audit.leaks(lambda x: x + x.roll(-1, 1), x, CAUSAL).agrees
    with pytest.raises(ShapeError, match="fn: got an output without a gradient"):
        audit.leaks(lambda x: (x + x.roll(-1, 1)).detach(), x, CAUSAL)


def test_the_package_has_the_audit_as_an_attribute() -> None:
    assert rw.audit is audit
