"""A misspelt public name raises AttributeError with the name that it resembles."""

from __future__ import annotations

import subprocess
import sys

import pytest

import ringweave as rw
from ringweave.names import nearest


@pytest.mark.parametrize(
    ("module", "name", "wanted"),
    [
        (rw, "sliding_window", "SlidingWindow"),
        (rw, "Slidingwindow", "SlidingWindow"),
        (rw, "attentoin", "attention"),
        (rw, "longformr", "patterns.longformer"),
        (rw, "PatternErorr", "PatternError"),
        (rw.patterns, "long_former", "longformer"),
        (rw.patterns, "strided", "Strided"),
        (rw.nn, "MultiHeadAttention", "MultiheadAttention"),
        (rw.memory, "press", "pressure"),
        (rw.adaptive, "tilemass", "tile_mass"),
    ],
)
def test_a_misspelt_name_raises_with_the_right_one(module: object, name: str, wanted: str) -> None:
    with pytest.raises(AttributeError, match=rf"has no attribute '{name}'; did you mean {wanted}\?"):
        getattr(module, name)
    assert not hasattr(module, name)


@pytest.mark.parametrize("module", [rw, rw.patterns, rw.nn], ids=lambda module: module.__name__)
def test_a_name_that_resembles_no_other_raises_with_the_list(module: object) -> None:
    listed = r"its names are listed by dir\(ringweave"
    for name in ("qqqq", "x" * 10_000):
        with pytest.raises(AttributeError, match=listed):
            getattr(module, name)
    # private names, which libraries probe for, get no suggestion
    with pytest.raises(AttributeError, match=listed):
        module._attention  # type: ignore[attr-defined]  # noqa: B018
    assert nearest("x" * 10_000, ["x" * 10_000]) is None


def test_a_misspelt_name_imports_nothing() -> None:
    program = (
        "import sys, ringweave as rw\n"
        "before = set(sys.modules)\n"
        "try:\n    rw.sliding_window\n"
        "except AttributeError:\n    pass\n"
        "assert set(sys.modules) == before, set(sys.modules) - before\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
