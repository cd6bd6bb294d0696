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
