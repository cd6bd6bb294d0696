"""Random mask functions, compared with their relations at every pair."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from ringweave.trace.graph import UntraceableError
from ringweave.trace.relation import Open, as_relation, leaves
from ringweave.trace.symbols import trace
from ringweave.types import Place

from ..fuzz.strategies import outcomes, texts
from ..sampled import is_long
from .definitions import by_pair, dense
from .masks import drawn

N = 2600
TABLE = torch.randint(-5, 60, (N,), generator=drawn(0))
IDS = torch.arange(N) // 37
ROWS = torch.stack([IDS, torch.arange(N) // 53])
NARROW = (torch.arange(N) // 11).int()
BYTES = (torch.arange(N) * 7).to(torch.uint8)
FAR = torch.where(torch.arange(N) % 6 > 0, torch.arange(N), torch.iinfo(torch.int64).max)
LISTS = torch.randint(-2, 90, (N, 5), generator=drawn(3))
FLOATS = torch.randn(N, generator=drawn(4))
FLOATS[::7], FLOATS[3::7], FLOATS[4::7], FLOATS[5::7] = torch.inf, -torch.inf, 0.0, -0.0
NANS = torch.where(torch.arange(N) % 9 > 0, FLOATS, torch.nan)
BOOLS = torch.rand(N, generator=drawn(1)) < 0.4
BLOCKS = torch.rand(N // 8 + 1, N // 8 + 1, generator=drawn(2)) < 0.5


NUMBERS = ["{leaf}"] * 6 + [
    "({n} + {n})", "({n} - {n})", "({n} - {n})", "({n} * {-3..4})", "({n} // {2|5|16|64|-7})", "({n} % {2|3|7|32|-5})",
    "abs({n} - k)", "torch.maximum({whole}, {n} + 0 * k)", "torch.minimum({whole}, {n} + 0 * q)",
    "{whole}.clamp({-9..5}, {6..90})", "torch.where(q - k > {-9..9}, {whole}, {n} + 0 * k)", "TABLE[{q|k}]",
    "IDS[{q|k}]", "ROWS[b, {q|k}]", "NARROW[{q|k}]", "(NARROW[q] - NARROW[k])", "(NARROW[{q|k}] * {2|100000|10000000})",
    "BYTES[{q|k}]", "(BYTES[{q|k}] + {0..300})", "FAR[{q|k}]", "({whole} & 15)", "({whole} >> 2)", "{whole}.int()",
    "BOOLS[{q|k}].long()",
]  # fmt: skip
COMPARISONS = [
    "({n} + 0 * q {compare} {n})", "({n} {compare} {n} + 0 * k)", "(q - k {compare} {-60..60})",
    "(IDS[q] {compare} IDS[k])", "(BYTES[{q|k}] {compare} {-3|80|300|BYTES[q]})", "(FAR[q] {compare} FAR[k])",
    "(FAR[(q - k).abs()] {compare} k - q + {-3..3})", "BOOLS[{q|k}]", "BLOCKS[q // 8, k // 8]",
    "(LISTS[q // {1|4}] == (k // {1|3})).any()", "({FLOATS|NANS|FLOATS.half()}[q] {compare} FLOATS[k])",
    "(BOOLS[q] {compare} BOOLS[k])", "(q * 0.5 {compare} k / 3)",
]  # fmt: skip
LOGIC = [
    "({deep} & {any})", "({deep} | {any})", "~{deep}", "({deep} ^ {any})", "torch.where({deep}, {any}, {flat})",
    "({deep} == {any})", "torch.logical_and({deep}, {any})", "({deep} + {any})",
]  # fmt: skip


@functools.cache
def number(depth: int) -> st.SearchStrategy[str]:
    """Draw the text of a whole number."""
    leaf = texts(["q", "k", "q", "k", "q", "k", "b", "h", "{0..40}"])
    if not depth:
        return leaf
    inner = number(depth - 1)
    return texts(NUMBERS, leaf=leaf, n=inner, whole=texts(["({n} + 0 * {q|k})"], n=inner))


@functools.cache
def logic(depth: int) -> st.SearchStrategy[str]:
    """Draw the text of a bool."""
    if not depth:
        compare = texts(["{<|<=|>|>=|==|!=}"])
        return texts(COMPARISONS, compare=compare, n=st.sampled_from([0, 1, 1, 2]).flatmap(number))
    return texts(LOGIC, deep=logic(depth - 1), any=st.integers(0, depth - 1).flatmap(logic), flat=logic(0))


def places(of: int) -> st.SearchStrategy[Place]:
    """Draw the place of a call; the last of 50 kinds is a long one."""
    sizes = ([1, 2], [1, 3], range(1, 61), range(1, 91), [0, 0, 31], [0, 0, 7], [0, 2])
    large = ([2], [3], [1100], [1300], [0, 700], [0, 5])
    return st.tuples(*map(st.sampled_from, large if of == 49 else sizes)).map(lambda each: Place(*each))


#: the text of a mask function, and the place of a call
MASKS = st.tuples(st.sampled_from([0, 1, 1, 2, 3]).flatmap(logic), st.integers(0, 49).flatmap(places))


def defined(mask: tuple[str, Place]) -> tuple[Callable[..., Any], Tensor | None]:
    """Return a mask's function and its pairs; None where a table is too short, or a divisor is 0."""
    text, place = mask
    function = eval(f"lambda b, h, q, k: {text}", globals())
    try:
        return function, by_pair(function, place)
    except (RuntimeError, ValueError, IndexError):
        return function, None


def checked(mask: tuple[str, Place]) -> str:
    """Compare a random mask with its relation; return whether it was recognised."""
    (function, want), place = defined(mask), mask[1]
    if want is None:
        return "wrong function"
    try:
        found = as_relation(trace(function), place)
    except UntraceableError:
        return "refused"
    assert torch.equal(dense(found, place).expand(place[:4]), want)
    return "open" if any(type(leaf) is Open for leaf in leaves(found)) else "recognised"


def test_random_masks() -> None:
    found = outcomes(checked, MASKS, 600 if is_long() else 300)
    # most functions are right, and most of these are recognised
    assert found.count("recognised") >= len(found) / 2, found
