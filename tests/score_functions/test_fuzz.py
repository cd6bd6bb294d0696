"""Random score functions, with offsets, casts and writes in place, against the function of one pair in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from ringweave.integrations.flex_attention import explain, flex_attention

from ..fuzz.strategies import outcomes, texts
from ..oracle import Inputs, attention, results
from ..sampled import is_long
from ..trace.scores import by_pair

# torch has no rule to map some operations in place, and maps them one by one
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")

N = 44
DISTANCES = (
    "i - j", "j - i", "i + 9 - j", "(i - 3) - (j + 2)", "i + j", "2 * i - j", "i // 4 - j // 4", "i - j + whole",
    "abs(i - j)", "(j - i - 1).abs()", "-(i - j)", "torch.maximum(i, j)", "i - 20", "(i - j) % 7", "h - i + j",
)  # fmt: skip
CASTS = "", "", ".float()", ".double()", ".to(torch.int32)", ".to(torch.int8)", ".to(s.dtype)"
CHANGES = (
    "d.abs_()", "d += 3", "d -= whole", "d *= 2", "torch.neg_(d)", "F.relu(d, inplace=True)", "e = d", "e += 1",
    "d = d.abs()", "d = d + whole", "d = -d", "d = d * number", "d = d.clamp(min=-2, max=9)", "d = torch.abs(d)",
)  # fmt: skip
BIASES = (
    "slopes[h] * d", "0.3 * d", "d * 0.1", "table[h, i, j]", "table[h][..., i, j]", "table[h, i][j]", "row[j]", "row[i] * 0.5",
    "torch.where(d > 2, 0.5, -0.25)", "d * number", "(d < 5) * slopes[h]", "row[(d % 8).abs().long()]", "slopes[h]",
    "slopes[h] * abs(i - j)", "slopes[h] * (i - j + whole).abs()", "table[1, j, i]", "(table[h, i] * table[h, j]).sum()",
)  # fmt: skip
SCORES = (
    "s = s + {bias}", "s = s - {bias}", "s = {bias} + s", "s += {bias}", "s -= {bias}", "s = s * 0.5", "s *= 1.5", "s.mul_(0.7)", "r = s",
    "s = 5 * torch.tanh(s / 5)", "s = s + 0.1 * r", "s = s * slopes[h]", "s = s + s * s * 0.1", "s = s.to(s.dtype)", "r += 0.2",
    "s = torch.add(s, {bias}, alpha=2)", "s = s - ({bias} - {bias})", "s = s if torch.is_tensor(s) else s * 0",
)  # fmt: skip
MASKS = "s = torch.where(i >= j, s, -math.inf)", "s = s.masked_fill((i - j).abs() > 9, -math.inf)", "r = s"


def written(distance: str, changes: list[str], scores: list[str], mask: str) -> str:
    """Return the text of a function."""
    lines = "def score_mod(s, b, h, i, j):", f"d = {distance}", "r = s", "e = d", *changes, *scores, mask, "return s"
    return "\n    ".join(lines)


FUNCTIONS = st.builds(
    written,
    texts(["({d}){cast}"], d=st.sampled_from(DISTANCES), cast=st.sampled_from(CASTS)),
    st.lists(st.sampled_from(CHANGES), max_size=2),
    st.lists(texts(SCORES, bias=st.sampled_from(BIASES)), min_size=1, max_size=3),
    st.sampled_from(MASKS),
)
SEEDS, FLOATS = st.integers(0, 2**30), st.sampled_from([torch.float32, torch.float64])


@st.composite
def captured(draw: Any) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(draw(SEEDS))

    def of(*shape: int) -> Tensor:
        # the definition sums products, and gradients, in the dtype of the tensor
        learns = draw(st.booleans())
        dtype = torch.float64 if learns or len(shape) > 1 else draw(FLOATS)
        return torch.randn(shape, generator=generator, dtype=dtype).requires_grad_(learns)

    tables = {"slopes": of(2), "table": of(2, N, N), "row": of(N)}
    number = torch.tensor(3).to(draw(FLOATS | st.just(torch.int64)))
    return {**tables, "whole": torch.tensor(draw(st.sampled_from([0, 0, 4]))), "number": number}


def checked(drawn: tuple[str, dict[str, Tensor], int]) -> str:
    """Compare a function with the one that torch maps over single pairs; return how it is computed."""
    text, tensors, seed = drawn
    names = {**tensors, "math": math, "torch": torch, "F": torch.nn.functional}
    exec(text, names)
    score_mod: Any = names["score_mod"]
    x = Inputs.random(N, batch=1, heads=2, dim=8, dtype=torch.float64, seed=seed)
    learned = {name: each for name, each in tensors.items() if each.requires_grad}

    def found(out: Tensor, lse: Tensor, leaves: list[Tensor]) -> dict[str, Tensor]:
        # every tensor is used, and gradients of those that the function does not use are 0
        out = out + sum(each.sum() * 0 for each in learned.values())
        return results(out, lse, x, leaves, **learned)

    leaves, exact = x.leaves(), x.leaves()
    pairs = torch.ones(1, 2, N, N, dtype=torch.float64)
    try:
        want = found(*attention(*exact, pairs, 0.25, scored=lambda s: by_pair(score_mod, s).to(s.dtype)), exact)
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        return "wrong function"  # it writes to a score that a gradient needs
    got = found(*flex_attention(*leaves, score_mod, scale=0.25, return_lse=True), leaves)
    for name, each in want.items():
        torch.testing.assert_close(got[name], each, rtol=1e-6 if name in learned else 1e-9, atol=1e-6, msg=name)
    return "general" if "general" in explain(x.q, x.k, x.v, score_mod, as_dict=True)["score_mod"] else "terms"


def test_random_functions() -> None:
    """Out, lse and the gradients of all tensors are those of the definition, for functions of both kinds."""
    kinds = outcomes(checked, st.tuples(FUNCTIONS, captured(), SEEDS), 2400 if is_long() else 240)
    assert {"general", "terms"} < {*kinds}
