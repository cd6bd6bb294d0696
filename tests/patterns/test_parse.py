from __future__ import annotations

import pytest

import ringweave as rw
from ringweave.errors import PatternError
from ringweave.patterns import parse

from ..cases import MIXTURES, PATTERNS


@pytest.mark.parametrize("name", list(PATTERNS | MIXTURES))
def test_a_pattern_without_tensors_is_its_own_text(name: str) -> None:
    pattern = (PATTERNS | MIXTURES)[name](200)
    if not pattern.tables and "TokenMask" not in pattern.spec:
        assert parse(pattern.spec) == pattern
        assert repr(pattern) == pattern.spec


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("SlidingWindow(1024) & Causal() | Sinks(64)", rw.SlidingWindow(1024) & rw.Causal() | rw.Sinks(64)),
        (" ~(Causal() | Strided(stride=4)) ", ~rw.Causal() & ~rw.Strided(4)),
        ("Documents([3, 4])", rw.Documents([3, 4])),
        ("PerHead([Causal(), Full()])", rw.PerHead([rw.Causal(), rw.Full()])),
        ("longformer(256, [0, 5], causal=True)", rw.longformer(256, [0, 5], causal=True)),
        ("LongNet((8, 16), (1, 2), offset='grouped')", rw.LongNet((8, 16), (1, 2), offset="grouped")),
        ("random_blocks(1024, 0.25, heads=2)", rw.random_blocks(1024, 0.25, heads=2)),
    ],
)
def test_reads(text: str, pattern: rw.Pattern) -> None:
    assert parse(text) == pattern


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "Causal().__class__",
        "(lambda: Causal())()",
        "[Causal() for _ in range(3)]",
        "Causal() if 1 else Full()",
        "Causal() + Full()",
        "Causal() & 3",
        "TokenMask(0)",
        "BlockTable(_, 128)",
        "Unknown(3)",
        "SlidingWindow(1, 2, 3)",
        "SlidingWindow(**{'left': 3})",
        "SlidingWindow(",
        "3",
        "",
        "f'{1}'",
        "Causal() and Full()",
        "(" * 500 + "Causal()" + ")" * 500,
    ],
)
def test_refuses(text: str) -> None:
    with pytest.raises(PatternError, match="wanted|got"):
        parse(text)
