"""Hypothesis strategies for calls, relations and texts; random numbers of Hypothesis for draws that take a ``Random``."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.database import InMemoryExampleDatabase

from . import trees
from .calls import Call, draw
from .sizes import Sizes

_FINE = 2**12
#: number of bytes that a case is drawn from
BYTES = 4000


class Choices(Random):
    """Random numbers from Hypothesis, which makes a failing draw plain: first items, numbers close to 1, least integers.

    Draws compare a number with the share of cases that are special, so that 1 is the plain one.
    """

    def __init__(self, drawn: Any):
        super().__init__(0)
        self.drawn = drawn

    def random(self) -> float:
        """Return a number from 0 to 1, without 1."""
        return 1.0 - (int(self.drawn(st.integers(1, _FINE))) / _FINE)

    def _randbelow(self, n: int) -> int:
        """Return an integer below n, on which ``choice``, ``sample``, ``randint`` and ``randrange`` draw."""
        return int(self.drawn(st.integers(0, n - 1))) if n > 1 else 0


@st.composite
def calls(drawn: Any, backend: str) -> Call:
    """Draw a call of a backend."""
    return draw(Choices(drawn), backend)


@st.composite
def relations(drawn: Any) -> tuple[trees.Tree, Sizes]:
    """Draw a relation, and sizes that it fits."""
    r = Choices(drawn)
    nk = r.randint(1, 200)
    nq = r.choice([nk, r.randint(1, nk)])
    sizes = Sizes(r.choice([1, 1, 2]), r.choice([1, 2, 4]), nq, nk, r.randint(0, nk - nq))
    return trees.draw(r, sizes, r.choice([0, 1, 1, 2, 3])), sizes


@st.composite
def texts(drawn: Any, templates: Sequence[str], **parts: st.SearchStrategy[str]) -> str:
    """Draw a template and fill it: ``{name}`` is a part, ``{a|b}`` one of some words, and ``{1..9}`` an integer."""

    def filled(field: re.Match[str]) -> str:
        text = field[1]
        if text in parts:
            return str(drawn(parts[text]))
        if ".." in text:
            return str(drawn(st.integers(*map(int, text.split("..")))))
        return str(drawn(st.sampled_from(text.split("|"))))

    return re.sub(r"\{(.+?)\}", filled, drawn(st.sampled_from(templates)))


def outcomes(check: Callable[[Any], Any], drawn: st.SearchStrategy[Any], count: int) -> list[Any]:
    """Check uniform draws, equal in each run, and return the outcomes; Hypothesis makes a failing draw small.

    Its own draws are plain for the most part, or repeat parts of earlier ones.
    """
    found = list[Any]()

    @settings(database=InMemoryExampleDatabase(), phases=[Phase.reuse, Phase.shrink], report_multiple_bugs=False)
    @given(drawn)
    def tried(case: Any) -> None:
        found.append(check(case))

    draw = tried.hypothesis.fuzz_one_input  # type: ignore[attr-defined]
    for index in range(count):
        try:
            draw(Random(index).randbytes(BYTES))
        except Exception:
            tried()
            raise
    assert len(found) == count
    return found
