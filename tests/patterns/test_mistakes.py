"""Errors for probable mistakes with patterns name remedies, and the remedies work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import ringweave as rw
from ringweave.errors import PatternError
from ringweave.patterns import parse

B, HEADS, N = 2, 3, 32
CAUSAL = torch.ones(N, N).tril()
LENGTHS = torch.tensor([N, 20])
PADDING = torch.arange(N) < LENGTHS[:, None]


def raised(make: Callable[[], object]) -> str:
    with pytest.raises(PatternError) as caught:
        make()
    return str(caught.value)


# ---- truth -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "test",
    [
        lambda p: p and rw.Causal(),
        lambda p: p or rw.Causal(),
        lambda p: not p,
        lambda p: 1 if p else 0,
        lambda p: [x for x in (p,) if x],
        lambda p: any([p]),
        bool,
    ],
)
@pytest.mark.parametrize(
    "pattern",
    [
        rw.SlidingWindow(64),
        ~rw.Causal() | rw.Sinks(2),
        rw.LongNet([8, 16], [1, 2]),
        rw.BlockTable(torch.ones(3, 3).bool(), 16),
        rw.PerHead([rw.Causal()]),
        rw.KeyPadding(torch.tensor([3])),
    ],
    ids=repr,
)
def test_a_pattern_has_no_truth_value(test: Callable[[Any], object], pattern: rw.Pattern) -> None:
    assert raised(lambda: test(pattern)) == (
        f"pattern: got {pattern!r} in `and`, `or`, `not` or a condition; wanted an operator of patterns: `&`, `|` or `~`. "
        "Write `a & b` for `a and b`, `a | b` for `a or b`, `~a` for `not a`, and `a is None` for a condition."
    )


def test_the_error_of_a_truth_value_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="in `and`, `or`, `not` or a condition"):
        assert rw.Causal()


# ---- other values than patterns --------------------------------------------------------------------------------------


def block_mask() -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(lambda b, h, q, k: q >= k, None, None, N, N, device="cpu", BLOCK_SIZE=16)


PAIRS = "For a mask of pairs write {}; a rule such as rw.Causal() is faster where one fits."
ROWS = (
    "For a padding mask (B, N) write rw.KeyPadding(mask.sum(1)), or rw.Sinks({0}) where it has holes or begins with "
    "padding; for a mask of pairs rw.BlockTable({0}, block_size=1)."
)
BIAS = "For a bias that is added to scores pass rw.Full() and terms=rw.Bias(mask{})."
ONES = "For a padding mask (B, N) of ones and zeros write rw.Sinks(mask.bool()). "
BROADCAST = "For a padding mask write rw.Sinks({}), & rw.Causal() for causal attention."
RULES = "Build the pattern by rules, such as rw.Causal(), or from a bool mask: rw.BlockTable(mask, block_size=1)."
NUMPY = "Make it a tensor with mask = torch.from_numpy(mask). "
LISTS = "For lengths write rw.KeyPadding(mask); for cumulative bounds rw.Documents(cu_seqlens=mask)."
GENERAL = "Combine patterns with & | ~, or wrap a function in rw.from_mask_mod."
EVERYTHING = "Pass rw.Full() to attend all keys, rw.Causal() for causal attention."


def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


OTHERS: dict[str, tuple[Callable[[], Any], str, str]] = {
    "bool pairs": (lambda: CAUSAL.bool(), "Tensor of torch.bool (32, 32)", PAIRS.format("rw.BlockTable(mask, block_size=1)")),
    "int pairs": (lambda: CAUSAL.long(), "Tensor of torch.int64 (32, 32)", PAIRS.format("rw.BlockTable(mask.bool(), block_size=1)")),
    "one for all": (lambda: CAUSAL.bool()[None, None], "Tensor of torch.bool (1, 1, 32, 32)", PAIRS.format("rw.BlockTable(mask, block_size=1)")),
    "by batch": (lambda: CAUSAL.bool().expand(B, 1, N, N), "Tensor of torch.bool (2, 1, 32, 32)", PAIRS.format("rw.BlockTable(mask, block_size=1)")),
    "by head": (lambda: CAUSAL.bool().expand(1, HEADS, N, N), "Tensor of torch.bool (1, 3, 32, 32)", PAIRS.format("rw.BlockTable(mask, block_size=1)")),
    "heads alone": (lambda: CAUSAL.bool().expand(HEADS, N, N), "Tensor of torch.bool (3, 32, 32)", PAIRS.format("rw.BlockTable(mask, block_size=1)")),
    "by both": (lambda: CAUSAL.bool().expand(B, HEADS, N, N), "Tensor of torch.bool (2, 3, 32, 32)", PAIRS.format("rw.BlockTable(mask, block_size=1)")),
    "bias": (lambda: CAUSAL.log(), "Tensor of torch.float32 (32, 32)", BIAS.format("[None, None]")),
    "half bias": (lambda: CAUSAL.log().half().expand(B, HEADS, N, N), "Tensor of torch.float16 (2, 3, 32, 32)", BIAS.format("")),
    "bias by head": (lambda: CAUSAL.log().expand(HEADS, N, N), "Tensor of torch.float32 (3, 32, 32)", BIAS.format("[None]")),
    "bool padding": (lambda: PADDING, "Tensor of torch.bool (2, 32)", ROWS.format("mask")),
    "int padding": (lambda: PADDING.long(), "Tensor of torch.int64 (2, 32)", ROWS.format("mask.bool()")),
    "float padding": (lambda: PADDING.float(), "Tensor of torch.float32 (2, 32)", ONES + BIAS.format("[None, None]")),
    "broadcast padding": (lambda: PADDING[:, None, None], "Tensor of torch.bool (2, 1, 1, 32)", BROADCAST.format("mask[:, 0, 0]")),
    "broadcast ints": (lambda: PADDING[:, None, None].int(), "Tensor of torch.int32 (2, 1, 1, 32)", BROADCAST.format("mask[:, 0, 0].bool()")),
    "broadcast floats": (lambda: PADDING[:, None, None].log(), "Tensor of torch.float32 (2, 1, 1, 32)", BROADCAST.format("mask[:, 0, 0] == 0")),
    "lengths": (lambda: LENGTHS, "Tensor of torch.int64 (2,)", LISTS),
    "keys": (lambda: PADDING[1], "Tensor of torch.bool (32,)", "For a mask of keys write rw.Sinks(mask)."),
    "float list": (lambda: torch.ones(N), "Tensor of torch.float32 (32,)", RULES),
    "complex": (lambda: CAUSAL.to(torch.complex64), "Tensor of torch.complex64 (32, 32)", RULES),
    "number": (lambda: torch.tensor(3), "Tensor of torch.int64 ()", RULES),
    "numpy pairs": (lambda: CAUSAL.bool().numpy(), "ndarray of bool (32, 32)", NUMPY + PAIRS.format("rw.BlockTable(mask, block_size=1)")),
    "numpy bias": (lambda: CAUSAL.log().numpy(), "ndarray of float32 (32, 32)", NUMPY + BIAS.format("[None, None]")),
    "numpy objects": (lambda: np.array([None]), "ndarray of object (1,)", RULES),
    "text": (lambda: "Causal()", "'Causal()'", "Read it with rw.patterns.parse(text)."),
    "function": (lambda: mask_mod, "the function mask_mod", "Wrap a function of (b, h, q, k) with rw.from_mask_mod(fn)."),
    "block mask": (block_mask, "BlockMask", "Take FlexAttention's masks through rw.from_block_mask(mask)."),
    "class": (lambda: rw.Causal, "the class Causal", "Call it: Causal()."),
    "class with arguments": (lambda: rw.SlidingWindow, "the class SlidingWindow", "Call it: SlidingWindow(192, 64), for example."),
    "mixture's class": (lambda: rw.LongNet, "the class LongNet", "Call it: LongNet([16, 64], [1, 4], causal=True), for example."),
    "base class": (lambda: rw.Pattern, "the class Pattern", GENERAL),
    "preset": (lambda: rw.patterns.longformer, "the function longformer", "Call it: longformer(96, 48), for example."),
    "union": (lambda: rw.Causal | rw.Sinks, "UnionType", "It is a union of classes: call each class, as in Causal() | Sinks(64)."),
    "None": (lambda: None, "None", EVERYTHING),
    "True": (lambda: True, "True", EVERYTHING),
    "int": (lambda: 64, "64", GENERAL),
    "list": (lambda: [rw.Causal(), rw.Full()], "[Causal, Full]", "Combine them with & | ~, or give each head one with rw.PerHead([...])."),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_another_value_in_place_of_a_pattern(name: str) -> None:
    make, got, remedy = OTHERS[name]
    q = torch.randn(B, HEADS, N, 8)
    value = make()
    wanted = f"got {got}; wanted a ringweave pattern. {remedy}"
    assert raised(lambda: rw.attention(q, q, q, value)) == f"pattern: {wanted}"
    assert raised(lambda: rw.plan(value, N)) == f"pattern: {wanted}"
    if not isinstance(value, type):
        assert raised(lambda: rw.Causal() & value) == f"operand: {wanted}"


#: For each expression that a remedy proposes, the values of OTHERS that it is proposed for.
PAIRS_BY = {
    "rw.BlockTable(mask, block_size=1)": ("bool pairs", "one for all", "by batch", "by head", "heads alone", "by both"),
    "rw.BlockTable(mask.bool(), block_size=1)": ("int pairs",),
    "rw.Bias(mask[None, None])": ("bias",),
    "rw.Bias(mask[None])": ("bias by head",),
    "rw.Bias(mask)": ("half bias",),
    "rw.patterns.parse(text)": ("text",),
    "rw.from_mask_mod(fn)": ("function",),
    "rw.from_block_mask(mask)": ("block mask",),
    "Causal()": ("class",),
}
ROWS_BY = {
    "rw.KeyPadding(mask.sum(1))": ("bool padding", "int padding"),
    "rw.Sinks(mask)": ("bool padding", "keys"),
    "rw.Sinks(mask.bool())": ("int padding", "float padding"),
    "rw.Sinks(mask[:, 0, 0])": ("broadcast padding",),
    "rw.Sinks(mask[:, 0, 0].bool())": ("broadcast ints",),
    "rw.Sinks(mask[:, 0, 0] == 0)": ("broadcast floats",),
    "rw.KeyPadding(mask)": ("lengths",),
}
MEANT = [(text, name) for by in (PAIRS_BY, ROWS_BY) for text, names in by.items() for name in names]


@pytest.mark.parametrize(("text", "name"), MEANT)
def test_a_remedy_attends_the_meant_pairs(text: str, name: str) -> None:
    make, _, remedy = OTHERS[name]
    assert text in remedy
    value = make()
    found = eval(text, {"rw": rw, "mask": value, "text": value, "fn": value, "Causal": rw.Causal})
    given: dict[str, Any] = {"pattern": found}
    if isinstance(found, rw.Bias):
        assert "rw.Full() and terms=" in remedy
        given = {"pattern": rw.Full(), "terms": rw.Bias(found.table.double())}
    q, k, v = (torch.randn(B, HEADS, N, 8, dtype=torch.float64) for _ in range(3))
    keys = (PADDING[1] if name == "keys" else PADDING[:, None, None]).expand(B, HEADS, N, N)
    meant = CAUSAL.bool() if text in PAIRS_BY else keys
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=meant)
    torch.testing.assert_close(rw.attention(q, k, v, **given), wanted)


# ---- text ------------------------------------------------------------------------------------------------------------


SIGNATURE = "wanted SlidingWindow(left, right=0). Correct its arguments."
WORDS = "wanted & | ~. Write & for `and`, | for `or`, ~ for `not`."
IN_PYTHON = "wanted a pattern that has a text. It takes {}, and exists in Python only: build this pattern there."
UNKNOWN = "wanted the name of a pattern or preset. {}"
VALUE = "wanted a pattern or another value. Write a value before {0!r}, or remove it."
PLAIN = "wanted patterns with numbers and lists, and & | ~. "


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Causal() & (SlidingWindow(3)", "got ( without ')', at column 12; wanted ')'. Add a ')'."),
        ("Full() | SlidingWindow(3", "got SlidingWindow( without ')', at column 10; wanted ')'. Add a ')'."),
        ("PerHead([Causal()", "got [ without ']', at column 9; wanted ']'. Add a ']'."),
        ("Causal()\n & (Full()\n", "got ( without ')', at column 4 of line 2; wanted ')'. Add a ')'."),
        ("Causal())", "got ')' that closes no bracket, at column 9; wanted an open bracket before it. Remove it."),
        ("PerHead([Causal())", "got ')' for the '[' of column 9, at column 18; wanted ']'. Write ']'."),
        ("Sinks((1, 2]", "got ']' for the '(' of column 7, at column 12; wanted ')'. Write ')'."),
        ("Causal", "got Causal without arguments, at column 1; wanted Causal(...). Write Causal()."),
        ("Sinks(2) & SlidingWindow", "got SlidingWindow without arguments, at column 12; wanted SlidingWindow(...). Write SlidingWindow(192, 64), for example."),
        ("GridNeighborhood(Grid, 3)", "got Grid without arguments, at column 18; wanted Grid(...). Write Grid((32, 32)), for example."),
        ("SlidingWindow(1, 2, 3)", f"got SlidingWindow with too many positional arguments, at column 1; {SIGNATURE}"),
        ("Full() & SlidingWindow()", f"got SlidingWindow with no argument 'left', at column 10; {SIGNATURE}"),
        ("SlidingWindow(1, rigth=2)", f"got SlidingWindow with an unexpected keyword argument 'rigth', at column 1; {SIGNATURE}"),
        ("SlidingWindow(1, left=2)", f"got SlidingWindow with multiple values for argument 'left', at column 1; {SIGNATURE}"),
        ("Causal(1)", "got Causal with too many positional arguments, at column 1; wanted Causal(). Correct its arguments."),
        ("natten_1d(3)", "got natten_1d with no argument 'tokens', at column 1; wanted natten_1d(window, dilation=1, *, tokens). Correct its arguments."),
        ("TokenMask(3)", f"got TokenMask, at column 1; {IN_PYTHON.format('a function')}"),
        ("Causal() & BlockTable(3)", f"got BlockTable, at column 12; {IN_PYTHON.format('a tensor')}"),
        ("from_mask_mod(f)", f"got from_mask_mod, at column 1; {IN_PYTHON.format('a function')}"),
        ("from_block_mask(m)", f"got from_block_mask, at column 1; {IN_PYTHON.format('a BlockMask')}"),
        ("lambda b, h, q, k: q >= k", f"got lambda, at column 1; {IN_PYTHON.format('a function')}"),
        ("KeyPadding(_)", "got '_', which stands for a tensor, at column 12; wanted a value. A text holds no tensors: build this pattern in Python."),
        ("sliding_window(3)", f"got the unknown name 'sliding_window', at column 1; {UNKNOWN.format('Did you mean SlidingWindow?')}"),
        ("Sinks(3) | causal()", f"got the unknown name 'causal', at column 12; {UNKNOWN.format('Did you mean Causal?')}"),
        ("SlidinWindow(3)", f"got the unknown name 'SlidinWindow', at column 1; {UNKNOWN.format('Did you mean SlidingWindow?')}"),
        ("Big_Bird(1024)", f"got the unknown name 'Big_Bird', at column 1; {UNKNOWN.format('Did you mean bigbird?')}"),
        ("Unheard(3)", f"got the unknown name 'Unheard', at column 1; {UNKNOWN.format('dir(ringweave.patterns) lists the patterns.')}"),
        ("rw.Causal()", "got 'rw' and a dot, at column 1; wanted names without a module. Write Causal() in place of rw.Causal()."),
        ("Causal() and Full()", f"got the word 'and', at column 10; {WORDS}"),
        ("Causal() or Full()", f"got the word 'or', at column 10; {WORDS}"),
        ("not Causal()", f"got the word 'not', at column 1; {WORDS}"),
        ("Sinks(None)", "got None, at column 7; wanted a value. Leave the argument out."),
        ("Sinks(1) & 3", "got & | ~ on 3, at column 12; wanted patterns under & | ~. Write a pattern such as Causal()."),
        ("Sinks(-'a')", "got - before 'a', at column 8; wanted - before a number. Remove the sign."),
        ("3", "got 3, at column 1; wanted a pattern. Write a pattern such as Causal() or SlidingWindow(1024)."),
        ("", "got no pattern, at column 1; wanted a pattern. Write a pattern there, such as Causal()."),
        ("Causal() &", "got the end after an operator, at column 11; wanted a pattern. Write a pattern there, such as Causal()."),
        ("Sinks(, 1)", f"got ',' where a value begins, at column 7; {VALUE.format(',')}"),
        ("| Causal()", f"got '|' where a value begins, at column 1; {VALUE.format('|')}"),
        ("Sinks(tokens=)", f"got ')' where a value begins, at column 14; {VALUE.format(')')}"),
        ("Sinks(tokens=1, 1)", "got an argument without a name after one with a name, at column 18; wanted arguments with names last. Give its name, or write it first."),
        ("Sinks(tokens=1, tokens=2)", f"got 'tokens' twice, at column 17; {PLAIN}Pass it once."),
        ("Causal() Full()", "got 'Full' after a value, at column 10; wanted an operator, or the end. Write & or | before 'Full', or remove it."),
        ("Causal() + Full()", f"got '+ Full()', at column 10; {PLAIN}Combine patterns with & | ~, and remove other signs."),
        (
            "Causal().spec",
            "got '.spec' after a value, at column 10; wanted .within(...). Call other methods in Python.",
        ),
        ("~" * 65 + "Full()", f"got more than 64 signs in a row, at column 65; {PLAIN}Remove signs."),
        ("(" * 256, f"got too many nested brackets, at column 201; {PLAIN}Remove brackets."),
        ("Sinks([1 2])", "got '1 2', two values in a row, at column 8; wanted a comma, & or | between them. Write one, or remove a value."),
        ("Causal() if 1 else Full()", "got 'if' after a value, at column 10; wanted an operator, or the end. Write & or | before 'if', or remove it."),
        ("(Causal()) < Full()", f"got '< Full()', at column 12; {PLAIN}Combine patterns with & | ~, and remove other signs."),
        (" \n Causal() # all", f"got '# all', at column 11 of line 2; {PLAIN}Combine patterns with & | ~, and remove other signs."),
        ("Causal().within(KeyPadding(3)) & Cäusal()", f"got 'äusal()', at column 35; {PLAIN}Combine patterns with & | ~, and remove other signs."),
        ("~" * 10**5 + "Full()", "got values or operators that are nested too deeply, at column 1; wanted fewer levels. Write a long chain of operators in brackets of 256 operands."),
        ("Sinks(" + "9" * 5000 + ")", f"got a number of 5000 digits, at column 7; {PLAIN}Write fewer digits."),
    ],
    ids=lambda each: each[:40],
)  # fmt: skip
def test_a_mistake_in_a_text(text: str, said: str) -> None:
    shown = text if len(text) <= 120 else f"{text[:120]}..."
    assert raised(lambda: parse(text)) == f"pattern {shown!r}: {said}"


# ---- arguments -------------------------------------------------------------------------------------------------------


BLOCKS = "wanted (4, 4) blocks for queries up to position 256 and 256 keys. "
NO_LIMIT = (
    "For flash-attn's window_size, where -1 means no limit, write Causal() for (-1, 0), Full() for (-1, -1), and the "
    "sequence length in place of another -1."
)
TWO = "They count keys before and after the query, as flash-attn's window_size=(left, right) does."
LENGTHS_SUM = "wanted lengths that sum to the number of keys, and every query inside. "


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: rw.Documents([0, 3, 7]), "lengths: got [0, 3, 7], which are cumulative bounds; wanted the tokens of each document. Name them: Documents(cu_seqlens=cu)."),
        (lambda: rw.Documents(np.array([0, 5])), "lengths: got [0, 5], which are cumulative bounds; wanted the tokens of each document. Name them: Documents(cu_seqlens=cu)."),
        (lambda: rw.Documents([0, 3, 3]), "lengths: got [0, 3, 3]; wanted documents of at least one token. Drop empty documents."),
        (lambda: rw.Documents(torch.tensor([0, 3, 7])).plan(7), "cu_seqlens: got [0, 0, 3, 10]; wanted bounds that increase from 0. Drop empty documents. If bounds were given as lengths, name them: Documents(cu_seqlens=cu)."),
        (lambda: rw.Documents(torch.tensor([3, 0, 2])).plan(5), "cu_seqlens: got [0, 3, 3, 5]; wanted bounds that increase from 0. Drop empty documents."),
        (lambda: rw.Documents(cu_seqlens=[3, 4]), "cu_seqlens: got [3, 4]; wanted bounds that increase from 0. Begin with 0; pass the lengths of documents as Documents(lengths)."),
        (lambda: rw.SlidingWindow((64, 32)), f"left: got (64, 32); wanted an int. Pass two numbers: SlidingWindow(64, 32). {TWO}"),
        (lambda: rw.SlidingWindow([64, 32]), f"left: got [64, 32]; wanted an int. Pass two numbers: SlidingWindow(64, 32). {TWO}"),
        (lambda: rw.SlidingWindow(-1), f"left: got -1; wanted at least 0. {NO_LIMIT}"),
        (lambda: rw.SlidingWindow(64, -1), f"right: got -1; wanted at least 0. {NO_LIMIT}"),
        (lambda: rw.SlidingWindow(-3), "left: got -3; wanted at least 0. Raise left to 0 or more."),
        (lambda: rw.patterns.bigbird(1000).plan(256), f"BlockTable: got a table of (16, 16) blocks of (64, 64) (made by bigbird for 1000 tokens); {BLOCKS}Make it for this length: bigbird(256, ...)."),
        (lambda: (parse("bigbird(1024) & Causal()")).plan(256), f"BlockTable: got a table of (16, 16) blocks of (64, 64) (made by bigbird for 1024 tokens); {BLOCKS}Make it for this length: bigbird(256, ...)."),
        (lambda: rw.patterns.random_blocks(1024, 0.25, block_size=64).plan(256), f"BlockTable: got a table of (16, 16) blocks of (64, 64) (made by random_blocks for 1024 tokens); {BLOCKS}Make it for this length: random_blocks(256, ...)."),
        (lambda: rw.patterns.variable(256, random=1).plan(1024), f"Documents: got documents of 256 tokens in all (made by variable for 256 tokens) for 1024 keys and queries up to position 1024; {LENGTHS_SUM}Make it for this length: variable(1024, ...)."),
        (lambda: rw.BlockTable(torch.ones(16, 16).bool(), 64).plan(256), f"BlockTable: got a table of (16, 16) blocks of (64, 64); {BLOCKS}Build the table for these lengths, ceil(tokens / block_size) a side."),
        (lambda: rw.PerHead([rw.Full(), rw.Causal]), "patterns: got [Full, the class Causal]; wanted a list of relations. Call it: Causal()."),
        (lambda: rw.Sinks(1).within(rw.Documents), "bounds: got the class Documents; wanted Documents, Tree or KeyPadding. Call it: Documents([160, 480, 96, 288]), for example."),
        (lambda: rw.TokenMask(rw.Causal), "fn: got the class Causal; wanted a function of (b, h, q, k). Pass a mask_mod."),
        (lambda: rw.Sinks(rw.Causal), "tokens: got the class Causal; wanted a list of ints. Pass tokens as a list."),
        (lambda: rw.Causal & rw.Sinks(1), "operand: got the class Causal; wanted a ringweave pattern. Call it: Causal()."),
        (lambda: rw.Causal() | rw.Sinks, "operand: got the class Sinks; wanted a ringweave pattern. Call it: Sinks(64), for example."),
    ],
)  # fmt: skip
def test_a_mistake_in_an_argument(make: Callable[[], object], said: str) -> None:
    assert raised(make) == said


OUTSIDE: dict[str, rw.Pattern] = {
    "alone": rw.Global([300]), "keys": rw.Sinks([3, 300]), "in a union": rw.SlidingWindow(4) | rw.Global([0, 300]),
    "negated": rw.Causal() & ~rw.Sinks([300]), "of a head": rw.PerHead([rw.Full()] * (HEADS - 1) + [rw.Sinks([300])]),
}  # fmt: skip


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_listed_token_that_a_call_does_not_have(name: str) -> None:
    """A whole call refuses a list of tokens past its end; steps, later chunks and documents may be shorter than it."""
    pattern = OUTSIDE[name]
    x = torch.randn(1, HEADS, 256, 8)
    said = raised(lambda: rw.attention(x, x, x, pattern))
    assert "got token 300 for a sequence of 256; wanted tokens from 0 to 255. List the tokens of this length" in said
    assert said.startswith(("Global: ", "Sinks: "))
    raised(lambda: rw.attention(x[:, :, :1], x, x, pattern))
    more = torch.randn(1, HEADS, 301, 8)
    rw.attention(more, more, more, pattern)
    rw.attention(x[:, :, -1:], x, x, pattern, q_offset="end")
    rw.attention(x, x, x, pattern.within(rw.Documents([100, 156])))
    # a number of first tokens fits every length
    rw.attention(x, x, x, rw.Sinks(300) | rw.Global(range(300)))


def test_a_preset_of_another_length_is_known_after_pickling() -> None:
    import copy
    import pickle

    pattern = rw.patterns.bigbird(1024)
    for again in (pickle.loads(pickle.dumps(pattern)), copy.deepcopy(pattern), pattern & rw.Causal()):
        assert "(made by bigbird for 1024 tokens)" in raised(lambda again=again: again.plan(256))  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(pattern)) == pattern
