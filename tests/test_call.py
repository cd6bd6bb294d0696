"""Calls are equal by value, and are restored after crossing an operator as text and tensors."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import ringweave as rw
from ringweave.call import NUMBERS, SIZES, Arguments, Call, Operands
from ringweave.kv_cache import PagedCache
from ringweave.parallel.operators import ring_attention, ring_attention_backward
from ringweave.program import Program
from ringweave.torch_ops import attention, attention_backward
from ringweave.validate import Checked, checked, paged

from .cases import MIXTURES, PATTERNS, TREES

N, HEADS, KV_HEADS, DIM = 60, 4, 2, 16
EVERYTHING = PATTERNS | MIXTURES


def drawn(name: str, seed: int) -> Checked:
    """Draw a checked call of a pattern with random options."""
    draw = random.Random(f"{name} {seed}")
    q, k, v = (torch.randn(2, heads, N, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    stored = draw.random() < 0.3
    terms: list[rw.terms.Term] = [
        rw.Softcap(draw.choice([0.1, 5.0, 30.0])),
        rw.ALiBi.of_heads(HEADS),
        rw.DistanceBias(torch.randn(HEADS, 2 * draw.randint(1, 9) + 1)),
        rw.Bias(torch.randn(draw.choice([1, 2]), draw.choice([1, HEADS]), N, N)),
    ]
    if name in TREES:
        terms = [term for term in terms if not term.distances]
    options: dict[str, Any] = {
        "terms": draw.sample(terms, draw.randint(0, min(3, len(terms)))),
        "dropout": 0.0 if stored else draw.choice([0.0, 0.0, 0.1, 2**-16]),
        "precision": rw.Precision(kv=torch.int8) if stored else None,
        "scale": draw.choice([None, 0.1, -3.0, 0.0]),
        "backend": draw.choice(["auto", "dense_batched", "reference"]),
        "on_oom": draw.choice(["raise", "degrade", "stream"]),
    }
    with torch.no_grad():
        return checked(Arguments(q, k, v, EVERYTHING[name](N), **options))


@pytest.mark.parametrize("name", list(EVERYTHING))
def test_a_call_crosses_an_operator_as_it_is(name: str) -> None:
    """Every field of a call crosses the operator; a field missing from text and tensors would be lost."""
    for seed in range(12):
        call, q, k, v, tensors, _ = drawn(name, seed)
        again = Call.read(call.text, q, k, v, tensors, *call.numbers)
        for field in dataclasses.fields(Call):
            assert getattr(again, field.name) == getattr(call, field.name), (field.name, seed)
        assert again.text == call.text
        assert (again == call, hash(again) == hash(call)) == (True, True)
        given, read = (Operands.of(each, q, k, v, tensors) for each in (call, again))
        assert (given.scales is not None) == (call.kv_dtype is not None)
        assert (given.terms is not None) == bool(call.features)
        if given.terms is not None and read.terms is not None:
            assert given.terms.dropout == read.terms.dropout
            assert [term.spec for term in given.terms.terms] == [term.spec for term in read.terms.terms]
            assert torch.equal(given.terms.offsets, read.terms.offsets)


@pytest.mark.parametrize("kv", [None, torch.int8])
def test_a_call_over_pages_crosses_an_operator(kv: torch.dtype | None) -> None:
    """Every field except the pattern crosses the operator; the pattern is bound again to the current lengths."""
    cache = PagedCache.empty(2, 64, KV_HEADS, DIM, page=16, precision=None if kv is None else rw.Precision(kv=kv))
    cache.append(*(torch.randn(2, KV_HEADS, 40, DIM) for _ in range(2)))
    pattern = rw.SlidingWindow(9) & rw.Causal()
    for terms in ((), [rw.Softcap(3.0), rw.DistanceBias(torch.randn(HEADS, 5))]):
        q = torch.randn(2, HEADS, 3, DIM)
        given = Arguments(q, cache.k, cache.v, pattern, 0.3, 0, "dense_batched", terms=terms)
        call, q, k, v, tensors, _ = paged(given, cache)
        again = Call.read(call.text, q, k, v, tensors, *call.numbers)
        assert dataclasses.replace(again, pattern=call.pattern) == call
        assert (again.paged, again.kv_dtype, again.nk) == (True, kv, 64)
        operands = Operands.of(again, q, k, v, tensors)
        assert operands.pages is not None
        assert torch.equal(operands.pages.lengths, cache.lengths)
        out, _ = Program(again).forward(operands)
        torch.testing.assert_close(
            out, rw.paged_attention(q, cache, pattern, scale=0.3, terms=terms, backend="dense_batched")
        )


CALL = Call(1, 4, 2, 60, 60, 16, 16, torch.float32, "cpu", pattern=rw.Causal())
CHANGED: dict[str, object] = {
    "batch": 2, "heads": 8, "kv_heads": 4, "nq": 61, "nk": 61, "head_dim": 8, "value_dim": 8, "dtype": torch.float64,
    "device": "cuda", "needs_grad": True, "features": frozenset({"Softcap"}), "learned": 3, "paged": True,
    "kv_dtype": torch.int8, "pattern": rw.SlidingWindow(3), "scale": 2.0, "q_offset": 1, "backend": "dense_batched",
    "terms": "Softcap(3.0)", "dropout": 5, "on_oom": "raise", "summation_order": "fast", "pair_bytes": 24,
}  # fmt: skip


@pytest.mark.parametrize("field", [each.name for each in dataclasses.fields(Call)])
def test_calls_are_equal_by_value(field: str) -> None:
    """Calls are equal by value; a new field needs a value here."""
    same = dataclasses.replace(CALL, pattern=rw.Causal())
    assert same == CALL
    assert hash(same) == hash(CALL)
    other = dataclasses.replace(CALL, **{field: CHANGED[field]})  # type: ignore[arg-type]
    assert other != CALL
    assert len({CALL, same, other}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(CALL, field, CHANGED[field])


#: The fields that do not cross an operator, and why the call is right without them.
STAY = {
    "needs_grad": "the operator of backward sets it",
    "learned": "the operator of backward counts it",
    "pair_bytes": "a call with a function has no operator",
}
#: Fields that another field needs, or is derived from.
BESIDE: dict[str, dict[str, Any]] = {"features": {"terms": "Softcap(3.0)"}}


@pytest.mark.parametrize("field", [each.name for each in dataclasses.fields(Call) if each.name not in (*SIZES, *STAY)])
def test_every_field_crosses_an_operator(field: str) -> None:
    """A field that is neither text, flag, number nor derived from the others would be lost in an operator."""
    given = BESIDE.get(field, {}) | {field: CHANGED[field]}
    call = dataclasses.replace(CALL, **given)
    stored = call.kv_dtype or call.dtype
    q, k = torch.zeros(1, 4, 60, 16), torch.zeros(1, 2, 60, 16, dtype=stored)
    tensors = [
        *call.pattern.tables,
        *[torch.tensor(1)] * (call.dropout > 0),
        *[torch.zeros(1, 1, dtype=torch.int32), torch.tensor([60], dtype=torch.int32)] * call.paged,
        *[torch.ones(1, 2, 60)] * 2 * (call.kv_dtype is not None),
    ]
    again = Call.read(call.text, q, k, k, tensors, *call.numbers)
    assert getattr(again, field) == CHANGED[field]
    assert sum(len(part) for part in call.by_field(tensors)) == len(tensors)


@pytest.mark.parametrize("kernel", [attention, attention_backward, ring_attention, ring_attention_backward])
def test_operators_take_the_numbers_of_a_call(kernel: Callable[..., object]) -> None:
    names = list(kernel.__annotations__)
    first = names.index("call") + 1
    assert tuple(names[first : first + len(NUMBERS)]) == NUMBERS


def test_a_text_of_another_version_is_refused() -> None:
    q = torch.zeros(1, 1, 8, 8)
    for text in ("Full()\nno_such option", "Full()\ndegrade"):
        with pytest.raises((KeyError, ValueError)):
            Call.read(text, q, q, q, [], 1.0, 0, 0)
    with pytest.raises(ValueError, match="shorter"):
        Call.read("Full()", q, q, q, [], 1.0, 0)


def test_every_argument_of_a_call_is_one_of_attention() -> None:
    import inspect

    for function in (rw.attention, rw.attention_with_lse):
        parameters = inspect.signature(function).parameters
        assert set(parameters) == set(Arguments._fields)
        defaults = {name: each.default for name, each in parameters.items() if each.default is not each.empty}
        assert defaults == Arguments._field_defaults
