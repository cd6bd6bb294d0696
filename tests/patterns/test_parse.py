from __future__ import annotations

import functools
import operator
import time
import tracemalloc
from collections.abc import Callable

import pytest
import torch

import ringweave as rw
from ringweave.errors import PatternError
from ringweave.patterns import parse, rebuild
from ringweave.patterns.declared import DECLARED

from ..cases import MIXTURES, PATTERNS
from .candidates import built


@pytest.mark.parametrize("name", list(PATTERNS | MIXTURES))
def test_a_pattern_without_tensors_is_its_own_text(name: str) -> None:
    pattern = (PATTERNS | MIXTURES)[name](200)
    if not pattern.tables and "TokenMask" not in pattern.spec:
        assert parse(pattern.spec) == pattern
        assert repr(pattern) == pattern.spec


@pytest.mark.parametrize("name", [name for name, known in DECLARED.items() if known.text])
def test_the_repr_of_a_pattern_without_tensors_is_read(name: str) -> None:
    """The repr of the examples and hostile expressions of declarations, alone and combined, is parsed to an equal pattern."""
    known = DECLARED[name]
    for expression in filter(None, (known.example, known.hostile)):
        pattern = built(expression, known.tokens if expression == known.example else 2048)
        combined = [pattern]
        if pattern.combinable:
            combined += [~pattern, pattern & rw.Causal() | rw.Sinks(2), rw.PerHead([pattern, ~pattern])]
        for each in combined:
            # tensors have no text, except the lengths of a few documents
            if not each.tables or (expression == known.example and "BlockTable" not in each.spec):
                assert parse(repr(each)) == each


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("SlidingWindow(1024) & Causal() | Sinks(64)", rw.SlidingWindow(1024) & rw.Causal() | rw.Sinks(64)),
        (" ~(Causal() | Strided(stride=4)) ", ~rw.Causal() & ~rw.Strided(4)),
        ("Documents([3, 4])", rw.Documents([3, 4])),
        ("Causal().within(Documents([1, 2]))", rw.Causal().within(rw.Documents([1, 2]))),
        ("~Sinks(1) . within(bounds=KeyPadding(9))", ~rw.Sinks(1).within(rw.KeyPadding(9))),
        (
            "((Sinks(1) | Causal()).within(Documents([3, 4])) & ~Full().within(Documents([3, 4])))",
            (rw.Sinks(1) | rw.Causal()).within(rw.Documents([3, 4])) & ~rw.Full().within(rw.Documents([3, 4])),
        ),
        ("PerHead([Causal(), Full()])", rw.PerHead([rw.Causal(), rw.Full()])),
        ("longformer(256, [0, 5], causal=True)", rw.patterns.longformer(256, [0, 5], causal=True)),
        ("LongNet((8, 16), (1, 2), offset='grouped')", rw.LongNet((8, 16), (1, 2), offset="grouped")),
        ("random_blocks(1024, 0.25, heads=2)", rw.patterns.random_blocks(1024, 0.25, heads=2)),
    ],
)
def test_reads(text: str, pattern: rw.Pattern) -> None:
    assert parse(text) == pattern


@pytest.mark.parametrize(
    "text",
    [
        "Causal() & 3",
        "Causal().within(Documents([1]), 2)",
        "Causal().within(Documents([1])",
        "Causal().within (Documents([1])).within",
        ".within(Documents([1]))",
        "Sinks(3 .within(Documents([1])))",
        "[1].within(Documents([1]))",
        "TokenMask(0)",
        "BlockTable(_, 128)",
        "Unknown(3)",
        "SlidingWindow(",
        "(" * 500 + "Causal()" + ")" * 500,
        "(" * 10**6,
        "[" * 500 + "]" * 500,
        "~" * 500 + "Full()",
        "~" * 10**6 + "Full()",
        "Sinks(" + "-" * 500 + "1)",
        f"Sinks({10**400})",
        f"SlidingWindow({2**70})",
        "~bigbird(9223372036854775807)",
        f"bigbird({2**31 - 1}, block_size=1)",
        "Documents((9999999999999999999999999999999999999999,))",
        "Documents([2147483647, 2147483647])",
        "random_blocks(1000000000000, 0.1)",
        f"random_blocks({2**31 - 1}, 0.1)",
        f"random_blocks({2**31 - 1}, 1e-9, block_size=1)",
        f"variable({2**31 - 1}, block_size=1)",
        "random_blocks(10**12, 0.1)",
        "Sinks([" + "1, " * 10**5 + "1])",
        "Causal() Causal()",
        "Causal() ~Causal()",
        "Sinks('\\d')",
        "Causal() # comment",
        "x" * 2**21,
        "&".join(["Sinks(1)"] * 5000 + [f"Strided({i + 1})" for i in range(5000)]),
        "PerHead([" + "PerHead([" * 70 + "Causal()" + "])" * 70 + "])",
    ],
    ids=lambda text: text[:40],
)
def test_refuses(text: str) -> None:
    """Any text is refused in bounded time and memory, with a message of a few lines."""
    tracemalloc.start()
    began = time.process_time()
    with pytest.raises(PatternError, match="; wanted ") as caught:
        parse(text)
    spent, (_, peak) = time.process_time() - began, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert spent < 3  # with allocations traced, which takes several times as long
    assert peak < 100 * 2**20
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("text", [None, 3, b"Causal()", ["Causal()"]])
def test_reads_text_alone(text: object) -> None:
    with pytest.raises(PatternError, match="wanted the text of a pattern"):
        parse(text)  # type: ignore[arg-type]


@pytest.mark.parametrize("sign", [operator.or_, operator.and_])
def test_hundreds_of_operands(sign: Callable[[rw.Pattern, rw.Pattern], rw.Pattern]) -> None:
    """Joining and parsing hundreds of operands takes time linear in their number, and no deep recursion."""
    began = time.process_time()
    pattern = functools.reduce(sign, [rw.patterns.Periodic(5000, 3 * i, 3 * i + 2) for i in range(1000)])
    assert len(pattern.parts) == 1000
    assert rebuild(pattern.spec, ()) == pattern == parse(pattern.spec)
    assert ~~pattern == pattern
    assert time.process_time() - began < 5
    # nested by groups, since Python's parser needs a level for each operator of a chain
    most = functools.reduce(sign, [rw.Strided(i + 2) for i in range(4096)])
    assert most.spec.startswith("(Strided(2)")
    assert parse(most.spec) == most
    heads = rw.PerHead([rw.SlidingWindow(i, i) for i in range(128)]) & rw.Causal()
    assert parse(heads.spec) == heads


def test_unions_of_sinks_are_sinks() -> None:
    """A union of sinks is one pattern of sinks; 600 operands once took 14.8 s and ended in a RecursionError."""
    pattern = functools.reduce(operator.or_, [rw.Sinks([4 * i]) for i in range(600)])
    assert pattern == rw.Sinks([4 * i for i in range(600)])
    assert rw.Sinks(3) | rw.Causal() | rw.Sinks([5]) == rw.Sinks([0, 1, 2, 5]) | rw.Causal()
    assert rw.Global(3) | rw.Sinks([5]) | rw.Global([3]) == rw.Global(4) | rw.Sinks([5])
    assert rw.Sinks(2**31 - 1) | rw.Sinks([3]) == rw.Sinks(2**31 - 1)
    assert (rw.Sinks(2**30) | rw.Sinks([2**30 + 1])).to_dense(1, 5).all()
    q = torch.randn(1, 1, 4096, 8)
    rw.attention(q, q, q)  # start whatever starts at a first call
    began = time.process_time()
    rw.attention(q, q, q, pattern | rw.Strided(5000))
    assert time.process_time() - began < 2


def test_deep_nesting_is_planned_or_refused() -> None:
    def nested(depth: int) -> rw.Pattern:
        pattern: rw.Pattern = rw.SlidingWindow(9)
        for i in range(depth):
            pattern = (pattern & rw.Segments(50 + i)) | rw.patterns.Periodic(100, i, i + 1)
        return pattern

    pattern = nested(31)
    assert parse(pattern.spec) == pattern
    assert torch.equal(pattern.plan(200).to_dense(), pattern.to_dense(200))
    with pytest.raises(
        PatternError, match="operators nested 65 deep; wanted at most 64. Write chosen tokens as one Sinks"
    ):
        nested(300)
    with pytest.raises(PatternError, match="got 4097 patterns combined; wanted at most 4096"):
        functools.reduce(operator.or_, [rw.Strided(i + 1) for i in range(4097)])
    with pytest.raises(PatternError, match="wanted at most 4096"):
        rw.PerHead([functools.reduce(operator.or_, [rw.Strided(i + 1) for i in range(64)])] * 65)


def test_a_name_that_resembles_no_pattern_is_refused() -> None:
    """The error for an unknown name that resembles no other says where the names are listed."""
    with pytest.raises(PatternError, match=r"the unknown name 'Kays', .* dir\(ringweave.patterns\) lists"):
        rw.patterns.parse("Kays(5)")
