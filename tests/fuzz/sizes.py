"""Define the arguments of a pattern's definition, and how to draw and print them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Sizes:
    """Sizes that a pattern must fit."""

    batch: int
    heads: int
    nq: int
    nk: int
    q_offset: int

    @property
    def stop(self) -> int:
        """Return the position after the last query."""
        return self.q_offset + self.nq

    @property
    def square(self) -> bool:
        """Return whether all queries are among the keys, as patterns for one length require."""
        return self.stop <= self.nk


class First(NamedTuple):
    """Positions of the first query and key of each batch element, and the way to pass them."""

    q: tuple[int, ...]
    k: tuple[int, ...]
    how: str

    def options(self) -> str:
        """Return them as Python."""
        sides = []
        for name, side in (("q_offset", self.q), ("k_offset", self.k)):
            alike = len(set(side)) == 1
            value = f"torch.tensor({list(side)})"
            if alike and self.how != "each":
                value = str(side[0]) if self.how == "int" else f"torch.tensor({side[0]}, dtype=torch.int32)"
            sides.append(f"{name}={value}")
        return ", ".join(sides)


class Kind(NamedTuple):
    """A kind of leaf: its arguments, the Python that makes it, and its definition for one batch element and head."""

    draw: Callable[[Random, Sizes], tuple[Any, ...]]
    source: Callable[..., str]
    allows: Callable[..., Any]
    fits: Callable[..., bool] = lambda s, *args: True


class At(NamedTuple):
    """Arguments of a definition: positions q (n, 1) and k (1, m) in one batch element and query head."""

    s: Sizes
    b: int
    h: int
    q: NDArray[np.int64]
    k: NDArray[np.int64]


def width(r: Random, s: Sizes, least: int = 0) -> int:
    return max(least, r.choice([0, 1, 2, 3, r.randint(0, s.nk), r.choice([15, 16, 31, 32, 64, 127, 128]), 2 * s.nk]))


def tokens(r: Random, s: Sizes) -> int | tuple[int, ...]:
    if r.random() < 0.5:
        return r.choice([0, 1, 2, r.randint(0, s.nk + 2)])
    # a call refuses listed tokens past its last one
    return tuple(sorted(r.sample(range(s.nk), min(s.nk, r.choice([0, 1, 2, 5, 40])))))


def chosen(of: int | tuple[int, ...], x: NDArray[np.int64]) -> Any:
    return x < of if isinstance(of, int) else np.isin(x, of)


def listing(of: int | tuple[int, ...]) -> str:
    return repr(of if isinstance(of, int) else list(of))


def near(at: At, left: int, right: int | None = None) -> Any:
    return (at.k - at.q <= (left if right is None else right)) & (at.q - at.k <= left)


def past(at: At, causal: bool) -> Any:
    return (at.k <= at.q) | (not causal)
