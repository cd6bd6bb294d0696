"""Block tables, and presets that draw one; their drawn blocks are taken as given, and counted."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import ringweave as rw

from .sizes import At, Sizes, near

SIDES = [1, 3, 8, 16, 16, 20, 32, 32, 48, 64, 128]


def random_source(shape: tuple[int, ...], seed: int) -> str:
    return f"torch.rand({shape}, generator=torch.Generator().manual_seed({seed}))"


def uniform(shape: tuple[int, ...], seed: int) -> NDArray[np.float32]:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)).numpy()


def draw_table(r: Random, s: Sizes) -> tuple[Any, ...]:
    side = r.choice(SIDES)
    sides = side if r.random() < 0.8 else (side, r.choice(SIDES))
    return sides, r.choice(["", "", "h", "bh", "1h", "b1", "1"]), r.choice([0.1, 0.5, 0.9]), r.randint(0, 99)


def table_shape(s: Sizes, sides: int | tuple[int, int], lead: str) -> tuple[int, ...]:
    q_side, k_side = (sides, sides) if isinstance(sides, int) else sides
    counts = {"b": s.batch, "h": s.heads, "1": 1}
    return (*(counts[c] for c in lead), -(-s.stop // q_side), -(-s.nk // k_side))


def table_source(s: Sizes, sides: Any, lead: str, density: float, seed: int) -> str:
    return f"rw.BlockTable({random_source(table_shape(s, sides, lead), seed)} < {density}, {sides})"


def block_of(at: At, sides: Any) -> tuple[Any, Any]:
    q_side, k_side = (sides, sides) if isinstance(sides, int) else sides
    return at.q // q_side, at.k // k_side


def own(at: At, table: NDArray[Any], lead: str) -> NDArray[Any]:
    for c in lead:
        table = table[{"b": at.b, "h": at.h, "1": 0}[c]]
    return table


def table_allows(at: At, sides: Any, lead: str, density: float, seed: int) -> Any:
    table = uniform(table_shape(at.s, sides, lead), seed) < np.float32(density)
    return own(at, table, lead)[block_of(at, sides)]


def draw_listed(r: Random, s: Sizes) -> tuple[Any, ...]:
    sides, lead, _, seed = draw_table(r, s)
    return sides, lead, r.choice([1, 2, 5]), seed


def listed(s: Sizes, sides: Any, lead: str, most: int, seed: int) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Return the shapes of indices and counts, and the number of key blocks."""
    *rows, blocks = table_shape(s, sides, lead)
    return (*rows, most), tuple(rows), blocks


def listed_source(s: Sizes, sides: Any, lead: str, most: int, seed: int) -> str:
    shape, rows, blocks = listed(s, sides, lead, most, seed)
    indices, counts = (
        f"({random_source(shape, seed)} * {blocks}).int()",
        f"({random_source(rows, seed + 1)} * {most + 1}).int()",
    )
    return f"rw.BlockTable(indices={indices}, counts={counts}, key_blocks={blocks}, block_size={sides})"


def listed_allows(at: At, sides: Any, lead: str, most: int, seed: int) -> Any:
    shape, rows, blocks = listed(at.s, sides, lead, most, seed)
    indices = own(at, (uniform(shape, seed) * np.float32(blocks)).astype(np.int64), lead)
    counts = own(at, (uniform(rows, seed + 1) * np.float32(most + 1)).astype(np.int64), lead)
    table = np.zeros((rows[-1], blocks), np.bool_)
    for row, (places, count) in enumerate(zip(indices, counts, strict=True)):
        table[row, places[:count]] = True
    return table[block_of(at, sides)]


def draw_selected(r: Random, s: Sizes) -> tuple[Any, ...]:
    side = r.choice([1, 1, 1, *SIDES])
    return side, r.choice(["", "", "1", "h", "b1", "bh"]), r.choice([0, 1, 2, 5, 40]), r.randint(0, 99)


def selected_shape(s: Sizes, side: int, lead: str, most: int) -> tuple[tuple[int, ...], int]:
    """Return the shape of the indices, and the number of key blocks."""
    *of_lead, _, blocks = table_shape(s, side, lead)
    return (*of_lead, s.nq, most), blocks


def selected_source(s: Sizes, side: int, lead: str, most: int, seed: int) -> str:
    shape, blocks = selected_shape(s, side, lead, most)
    return f"rw.Selected(({random_source(shape, seed)} * {blocks + 1}).int() - 1, {side})"


def selected_allows(at: At, side: int, lead: str, most: int, seed: int) -> Any:
    shape, blocks = selected_shape(at.s, side, lead, most)
    indices = own(at, (uniform(shape, seed) * np.float32(blocks + 1)).astype(np.int64) - 1, lead)
    # rows and keys count from the first query and key of the call
    block = (at.k - at.k[0, 0]) // side
    return (indices[(at.q - at.q[0, 0])[:, 0]][:, :, None] == block).any(1)


def drawn(n: int, density: float, side: int, seed: int, diagonal: bool, heads: int | None = None) -> NDArray[Any]:
    table = rw.patterns.random_blocks(
        n, density, block_size=side, seed=seed, diagonal=diagonal, heads=heads
    ).mask.numpy()
    rows = -(-n // side)
    counts = table.sum(-1)
    assert table.shape[-2:] == (rows, rows), table.shape
    assert (counts.sum(-1) == round(density * rows * rows)).all(), counts
    assert counts.max() - counts.min() <= 1, counts
    assert not diagonal or np.diagonal(table, axis1=-2, axis2=-1).all()
    return table


def blocks_allow(at: At, density: float, side: int, seed: int, per_head: bool, diagonal: bool) -> Any:
    table = drawn(at.s.nk, density, side, seed, diagonal, at.s.heads if per_head else None)
    return own(at, table, "h" if per_head else "")[at.q // side, at.k // side]


def table_fits(s: Sizes, side: int) -> bool:
    return -(-s.stop // side) == -(-s.nk // side)


def draw_blocks(r: Random, s: Sizes) -> tuple[Any, ...]:
    side = r.choice(SIDES[3:])
    diagonal = r.random() < 0.5
    least = 1 / -(-s.nk // side) if diagonal else 0.0
    return max(least, r.choice([0.2, 0.6, 1.0])), side, r.randint(0, 9), r.random() < 0.3, diagonal


def blocks_fit(s: Sizes, density: float, side: int, seed: int, per_head: bool, diagonal: bool) -> bool:
    rows = -(-s.nk // side)
    return table_fits(s, side) and (not diagonal or round(density * rows * rows) >= rows)


def blocks_source(s: Sizes, density: float, side: int, seed: int, per_head: bool, diagonal: bool) -> str:
    heads = f", heads={s.heads}" if per_head else ""
    return f"rw.patterns.random_blocks({s.nk}, {density}, block_size={side}, seed={seed}, diagonal={diagonal}{heads})"


def random_part(at: At, side: int, random: int, seed: int) -> Any:
    if not random:
        return False
    rows = -(-at.s.nk // side)
    return drawn(at.s.nk, min(1.0, random / rows), side, seed, False)[at.q // side, at.k // side]


def bigbird_allows(at: At, window: int, first: int, random: int, side: int, seed: int) -> Any:
    return near(at, window) | (at.q < first) | (at.k < first) | random_part(at, side, random, seed)


def variable_allows(at: At, local: tuple[int, ...], whole: tuple[int, ...], random: int, side: int, seed: int) -> Any:
    window = np.zeros(at.s.nk, np.int64)
    start = number = 0
    while start < at.s.nk:
        stop = start + side * local[min(number, len(local) - 1)]
        window[start:stop] = number
        start, number = stop, number + 1
    everywhere = np.isin(at.q // side, whole) | np.isin(at.k // side, whole)
    return (window[at.q] == window[at.k]) | everywhere | random_part(at, side, random, seed)
