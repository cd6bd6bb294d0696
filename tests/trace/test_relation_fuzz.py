"""Random mask functions, compared with their relations at every pair."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from ringweave.trace.graph import UntraceableError
from ringweave.trace.relation import Open, as_relation, leaves
from ringweave.trace.symbols import trace
from ringweave.types import Place

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


def number(r: random.Random, depth: int) -> str:
    """Return the text of a whole number."""
    if depth == 0 or r.random() < 0.2:
        return r.choice(["q", "k", "q", "k", "q", "k", "b", "h", str(r.randint(0, 40))])
    a, b, side = number(r, depth - 1), number(r, depth - 1), r.choice("qk")
    whole = f"({a} + 0 * {side})"
    return r.choice(
        [
            f"({a} + {b})",
            f"({a} - {b})",
            f"({a} - {b})",
            f"({a} * {r.randint(-3, 4)})",
            f"({a} // {r.choice([-7, 2, 5, 16, 64])})",
            f"({a} % {r.choice([-5, 2, 3, 7, 32])})",
            f"abs({a} - k)",
            f"torch.maximum({whole}, {b} + 0 * k)",
            f"torch.minimum({whole}, {b} + 0 * q)",
            f"{whole}.clamp({r.randint(-9, 5)}, {r.randint(6, 90)})",
            f"torch.where(q - k > {r.randint(-9, 9)}, {whole}, {b} + 0 * k)",
            f"TABLE[{side}]",
            f"IDS[{side}]",
            f"ROWS[b, {side}]",
            f"NARROW[{side}]",
            "(NARROW[q] - NARROW[k])",
            f"(NARROW[{side}] * {r.choice([2, 10**5, 10**7])})",
            f"BYTES[{side}]",
            f"(BYTES[{side}] + {r.randint(0, 300)})",
            f"FAR[{side}]",
            f"({whole} & 15)",
            f"({whole} >> 2)",
            f"{whole}.int()",
            f"BOOLS[{side}].long()",
        ]
    )


def logic(r: random.Random, depth: int) -> str:
    """Return the text of a bool."""
    if depth == 0:
        compare, n = r.choice(["<", "<=", ">", ">=", "==", "!="]), r.choice([0, 1, 1, 2])
        return r.choice(
            [
                f"({number(r, n)} + 0 * q {compare} {number(r, n)})",
                f"({number(r, n)} {compare} {number(r, n)} + 0 * k)",
                f"(q - k {compare} {r.randint(-60, 60)})",
                f"(IDS[q] {compare} IDS[k])",
                f"(BYTES[{r.choice('qk')}] {compare} {r.choice([-3, 80, 300, 'BYTES[q]'])})",
                f"(FAR[q] {compare} FAR[k])",
                f"(FAR[(q - k).abs()] {compare} k - q + {r.randint(-3, 3)})",
                f"BOOLS[{r.choice('qk')}]",
                "BLOCKS[q // 8, k // 8]",
                f"(LISTS[q // {r.choice([1, 4])}] == (k // {r.choice([1, 3])})).any()",
                f"({r.choice(['FLOATS', 'NANS', 'FLOATS.half()'])}[q] {compare} FLOATS[k])",
                f"(BOOLS[q] {compare} BOOLS[k])",
                f"(q * 0.5 {compare} k / 3)",
            ]
        )
    a, b = logic(r, depth - 1), logic(r, r.randint(0, depth - 1))
    return r.choice(
        [
            f"({a} & {b})",
            f"({a} | {b})",
            f"~{a}",
            f"({a} ^ {b})",
            f"torch.where({a}, {b}, {logic(r, 0)})",
            f"({a} == {b})",
            f"torch.logical_and({a}, {b})",
            f"({a} + {b})",
        ]
    )


def drawn_mask(seed: int) -> tuple[str, Place]:
    """Return the text of a mask function, and the place of a call."""
    r = random.Random(seed)
    text = logic(r, r.choice([0, 1, 1, 2, 3]))
    if seed % 50 == 0:
        return text, Place(2, 3, 1100, 1300, r.choice([0, 700]), r.choice([0, 5]))
    sizes = r.choice([1, 2]), r.choice([1, 3]), r.randint(1, 60), r.randint(1, 90)
    return text, Place(*sizes, r.choice([0, 0, 31]), r.choice([0, 0, 7]), r.choice([0, 2]))


def checked(seed: int) -> str:
    """Compare a random mask with its relation; return whether it was recognised."""
    text, place = drawn_mask(seed)
    function: Any = eval(f"lambda b, h, q, k: {text}", globals())
    try:
        want = by_pair(function, place)
    except (RuntimeError, ValueError, IndexError):
        # a table that is too short, or a division by 0
        return "wrong function"
    try:
        found = as_relation(trace(function), place)
    except UntraceableError:
        return "refused"
    assert torch.equal(dense(found, place).expand(place[:4]), want), (seed, text, place)
    return "open" if any(type(leaf) is Open for leaf in leaves(found)) else "recognised"


@pytest.mark.parametrize("part", range(12 if is_long() else 6))
def test_random_masks(part: int) -> None:
    outcomes = [checked(seed) for seed in range(part * 50, (part + 1) * 50)]
    # most functions are right, and most of these are recognised
    assert outcomes.count("recognised") >= 25, outcomes
