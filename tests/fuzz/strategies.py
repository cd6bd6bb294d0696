"""Hypothesis strategies for calls and relations, and random numbers of Hypothesis for draws that take a ``Random``."""

from __future__ import annotations

from random import Random
from typing import Any

from hypothesis import strategies as st

from . import trees
from .calls import Call, draw
from .sizes import Sizes

_FINE = 2**12


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
