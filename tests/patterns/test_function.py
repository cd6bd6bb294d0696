"""Functions by number: what text can say of them, and how long they are kept."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import ringweave as rw
from ringweave.errors import PatternError
from ringweave.patterns import function


def test_a_function_keeps_its_number() -> None:
    def even(b, h, q, k):  # type: ignore[no-untyped-def]
        return k % 2 == 0

    assert rw.TokenMask(even) == rw.TokenMask(even)
    assert repr(rw.TokenMask(even)) == "TokenMask(even)"

    class Odd:
        def allows(self, b, h, q, k):  # type: ignore[no-untyped-def]
            return k % 2 == 1

    odd = Odd()
    assert rw.TokenMask(odd.allows) == rw.TokenMask(odd.allows)


def test_backward_after_the_pattern_is_gone() -> None:
    q = torch.randn(1, 1, 40, 8, requires_grad=True)
    out = rw.attention(q, q, q, rw.from_mask_mod(lambda b, h, q, k: (q - k) % 3 == 0))
    gc.collect()
    out.sum().backward()
    assert q.grad is not None


def test_old_functions_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(function, "_KEPT", len(function._functions) + 2)

    def make(i: int):  # type: ignore[no-untyped-def]
        return lambda b, h, q, k: k == i

    first = make(0)
    number = rw.TokenMask(first)._number
    gone = weakref.ref(first)
    for i in range(1, 2 + function._KEPT):
        rw.TokenMask(make(i))
    del first
    gc.collect()
    assert gone() is None
    with pytest.raises(PatternError, match="a function numbered in this process"):
        rw.TokenMask.numbered(number)
    assert len(function._functions) == len(function._numbers) == function._KEPT
