"""Random patterns as trees of plain data: the Python that makes one, and its definition spelled in numpy.

Nothing here asks the library what a pattern means. Only the random presets are asked which blocks they drew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

import ringweave as rw

Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Sizes:
    """What a pattern must fit."""

    batch: int
    heads: int
    nq: int
    nk: int
    q_offset: int

    @property
    def stop(self) -> int:
        """The position after the last query."""
        return self.q_offset + self.nq

    @property
    def square(self) -> bool:
        """Queries stand among the keys, as patterns that are made for one length want."""
        return self.stop <= self.nk


@dataclass(frozen=True)
class Tree:
    kind: str
    args: tuple[Any, ...] = ()
    parts: tuple[Tree, ...] = field(default=())

    def walk(self) -> list[Tree]:
        return [self, *(below for part in self.parts for below in part.walk())]


class Kind(NamedTuple):
    """A leaf: its arguments, the Python that makes it, and its definition for one batch element and head."""

    draw: Callable[[Random, Sizes], tuple[Any, ...]]
    source: Callable[..., str]
    allows: Callable[..., Any]
    fits: Callable[..., bool] = lambda s, *args: True


class At(NamedTuple):
    """Where a definition is asked: positions q (n, 1) and k (1, m) of a batch element and a query head."""

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
    return tuple(sorted(r.sample(range(s.nk + 3), min(s.nk, r.choice([0, 1, 2, 5, 40])))))


def chosen(of: int | tuple[int, ...], x: NDArray[np.int64]) -> Any:
    return x < of if isinstance(of, int) else np.isin(x, of)


def listing(of: int | tuple[int, ...]) -> str:
    return repr(of if isinstance(of, int) else list(of))


def near(at: At, left: int, right: int | None = None) -> Any:
    return (at.k - at.q <= (left if right is None else right)) & (at.q - at.k <= left)


def past(at: At, causal: bool) -> Any:
    return (at.k <= at.q) | (not causal)


# ---- packed documents, neighbourhoods --------------------------------------------------------------------------------


def document_lengths(s: Sizes, *sizes: int) -> list[int]:
    """Documents of these sizes in turn until the keys are used up."""
    lengths: list[int] = []
    while (left := s.nk - sum(lengths)) > 0:
        lengths.append(min(sizes[len(lengths) % len(sizes)], left))
    return lengths


def documents_source(s: Sizes, how: str, *sizes: int) -> str:
    lengths = document_lengths(s, *sizes)
    bounds = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    return {
        "list": f"rw.Documents({lengths})",
        "tensor": f"rw.Documents(torch.tensor({lengths}))",
        "bounds": f"rw.Documents(cu_seqlens={bounds})",
        "int32": f"rw.Documents(cu_seqlens=torch.tensor({bounds}, dtype=torch.int32))",
    }[how]


def same_document(at: At, how: str, *sizes: int) -> Any:
    ids = np.repeat(
        np.arange(at.s.nk), document_lengths(at.s, *sizes) + [0] * (at.s.nk - len(document_lengths(at.s, *sizes)))
    )
    return ids[at.q] == ids[at.k]


def neighbours(at: At, count: int, dilation: int) -> Bools:
    allowed = np.zeros((at.q.size, at.k.size), np.bool_)
    for row, q in enumerate(at.q[:, 0]):
        members = list(range(int(q) % dilation, at.s.nk, dilation))
        place = members.index(int(q))
        first = min(max(place - count // 2, 0), max(len(members) - count, 0))
        allowed[row, members[first : first + count]] = True
    return allowed


# ---- tables ----------------------------------------------------------------------------------------------------------

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
    """Shapes of indices and counts, and the number of key blocks."""
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


# ---- presets that draw: their blocks are taken as drawn, and counted --------------------------------------------------


def drawn(n: int, density: float, side: int, seed: int, diagonal: bool, heads: int | None = None) -> NDArray[Any]:
    table = rw.random_blocks(n, density, block_size=side, seed=seed, diagonal=diagonal, heads=heads).mask.numpy()
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
    return f"rw.random_blocks({s.nk}, {density}, block_size={side}, seed={seed}, diagonal={diagonal}{heads})"


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


# ---- functions -------------------------------------------------------------------------------------------------------


FUNCTIONS = {
    "residue": "lambda b, h, q, k: (q + {c} * k) % {m} < {c}",
    "by_head": "lambda b, h, q, k: (q - k).abs() <= {c} * (h + 1)",
    "by_batch": "lambda b, h, q, k: k <= q + {c} * b",
    "ids": "lambda b, h, q, k: t[q] == t[k]",
    "pairs": "lambda b, h, q, k: t[q, k] == 1",
    "lengths": "lambda b, h, q, k: k < t[b]",
    "reach": "lambda b, h, q, k: (q - k).abs() <= t[h]",
    "by_both": "lambda b, h, q, k: (q + k) % 3 == t[b, h]",
}


def draw_function(r: Random, s: Sizes) -> tuple[Any, ...]:
    return (
        r.choice(list(FUNCTIONS)),
        r.choice(["rw.TokenMask", "rw.from_mask_mod"]),
        r.choice([1, 2, 3, 5, 40]),
        r.randint(0, 99),
    )


def captured(s: Sizes, name: str, c: int, seed: int) -> tuple[tuple[int, ...], float]:
    """The shape of the tensor that a function reads, and what uniform numbers are multiplied with; or ()."""
    longest = max(s.stop, s.nk)
    return {
        "ids": ((longest,), float(c + 1)),
        "pairs": ((s.stop, s.nk), 2.0),
        "lengths": ((s.batch,), s.nk + 1.0),
        "reach": ((s.heads,), float(c + 1)),
        "by_both": ((s.batch, s.heads), 3.0),
    }.get(name, ((), 0.0))


def function_source(s: Sizes, name: str, maker: str, c: int, seed: int) -> str:
    body = FUNCTIONS[name].format(c=c, m=c + 2)
    shape, times = captured(s, name, c, seed)
    if not shape:
        return f"{maker}({body})"
    return f"{maker}((lambda t: {body})(({random_source(shape, seed)} * {times}).long()))"


def function_allows(at: At, name: str, maker: str, c: int, seed: int) -> Any:
    _, b, h, q, k = at
    shape, times = captured(at.s, name, c, seed)
    t = (uniform(shape, seed) * np.float32(times)).astype(np.int64) if shape else np.zeros(0)
    return {
        "residue": lambda: np.mod(q + c * k, c + 2) < c,
        "by_head": lambda: near(at, c * (h + 1)),
        "by_batch": lambda: k - q <= c * b,
        "ids": lambda: np.equal.outer(t[q[:, 0]], t[k[0]]),
        "pairs": lambda: t[q[:, 0]][:, k[0]] == 1,
        "lengths": lambda: (k < t[b]) & (q == q),
        "reach": lambda: near(at, int(t[h])),
        "by_both": lambda: (q + k) % 3 == t[b, h],
    }[name]()


def draw_block_mask(r: Random, s: Sizes) -> tuple[Any, ...]:
    return r.choice(["residue", "by_head", "by_batch"]), "", r.choice([1, 3, 40]), r.choice([16, 32, 48, 128])


def block_mask_source(s: Sizes, name: str, maker: str, c: int, side: int) -> str:
    made = f"torch.nn.attention.flex_attention.create_block_mask({FUNCTIONS[name].format(c=c, m=c + 2)}"
    return f"rw.from_block_mask({made}, {s.batch}, {s.heads}, {s.stop}, {s.nk}, device='cpu', BLOCK_SIZE={side}))"


# ---- all of them -----------------------------------------------------------------------------------------------------


def plain(name: str) -> Callable[..., str]:
    return lambda s, *args: f"rw.{name}({', '.join(map(repr, args))})"


def square(s: Sizes, *args: Any) -> bool:
    return s.square


def no_arguments(r: Random, s: Sizes) -> tuple[Any, ...]:
    return ()


def one_width(least: int) -> Callable[[Random, Sizes], tuple[Any, ...]]:
    return lambda r, s: (width(r, s, least),)


def draw_periodic(r: Random, s: Sizes) -> tuple[Any, ...]:
    period = width(r, s, 1)
    start = r.randint(0, period - 1)
    return period, start, r.randint(start + 1, period)


def draw_documents(r: Random, s: Sizes) -> tuple[Any, ...]:
    sizes = [width(r, s, 1) for _ in range(r.randint(1, 4))]
    return r.choice(["list", "tensor", "bounds", "int32"]), *sizes


def draw_neighbours(r: Random, s: Sizes) -> tuple[Any, ...]:
    return width(r, s, 1), r.choice([1, 1, 2, 3, 7])


def is_global(at: At, of: int | tuple[int, ...]) -> Any:
    return chosen(of, at.q) | chosen(of, at.k)


def fixed_allows(at: At, block: int, summary: int, causal: bool) -> Any:
    inside = at.q // block == at.k // block
    return (inside | (at.k % block >= block - summary)) & past(at, causal)


def dilated_allows(at: At, window: int, *rates: int) -> Any:
    found: Any = False
    for rate in rates:
        found = found | (near(at, window * rate) & ((at.q - at.k) % rate == 0))
    return found


def draw_fixed(r: Random, s: Sizes) -> tuple[Any, ...]:
    block = width(r, s, 1)
    return block, r.randint(1, block), r.random() < 0.5


KINDS: dict[str, Kind] = {
    "Full": Kind(no_arguments, plain("Full"), lambda at: True),
    "Causal": Kind(no_arguments, plain("Causal"), lambda at: at.k <= at.q),
    "SlidingWindow": Kind(lambda r, s: (width(r, s), r.choice([0, width(r, s)])), plain("SlidingWindow"), near),
    "Global": Kind(lambda r, s: (tokens(r, s),), lambda s, of: f"rw.Global({listing(of)})", is_global),
    "Sinks": Kind(
        lambda r, s: (tokens(r, s),), lambda s, of: f"rw.Sinks({listing(of)})", lambda at, of: chosen(of, at.k)
    ),
    "Segments": Kind(one_width(1), plain("Segments"), lambda at, n: at.q // n == at.k // n),
    "Strided": Kind(one_width(1), plain("Strided"), lambda at, n: (at.q - at.k) % n == 0),
    "Dilated": Kind(lambda r, s: (width(r, s), r.choice([1, 2, 3, 8, 40])), plain("Dilated"), dilated_allows),
    "PrefixLM": Kind(one_width(0), plain("PrefixLM"), lambda at, n: (at.k < n) | (at.k <= at.q)),
    "Periodic": Kind(draw_periodic, plain("Periodic"), lambda at, p, a, z: (at.k % p >= a) & (at.k % p < z)),
    "Documents": Kind(draw_documents, documents_source, same_document, square),
    "Neighborhood": Kind(
        draw_neighbours, lambda s, n, d: f"rw.Neighborhood({n}, {d}, tokens={s.nk})", neighbours, square
    ),
    "natten_1d": Kind(draw_neighbours, lambda s, n, d: f"rw.natten_1d({n}, {d}, tokens={s.nk})", neighbours, square),
    "BlockTable": Kind(draw_table, table_source, table_allows),
    "BlockTable of indices": Kind(draw_listed, listed_source, listed_allows),
    "function": Kind(draw_function, function_source, function_allows),
    "from_block_mask": Kind(draw_block_mask, block_mask_source, function_allows),
    "longformer": Kind(
        lambda r, s: (width(r, s), tokens(r, s), r.random() < 0.5),
        lambda s, n, of, causal: f"rw.longformer({n}, {listing(of)}, causal={causal})",
        lambda at, n, of, causal: (near(at, n) | is_global(at, of)) & past(at, causal),
    ),
    "local_global": Kind(
        lambda r, s: (width(r, s), width(r, s, 1), r.random() < 0.5),
        lambda s, n, stride, causal: f"rw.local_global({n}, {stride}, causal={causal})",
        lambda at, n, stride, causal: (near(at, n) | (at.k % stride == 0)) & past(at, causal),
    ),
    "fixed": Kind(
        draw_fixed,
        lambda s, block, summary, causal: f"rw.sparse_transformer_fixed({block}, {summary}, causal={causal})",
        fixed_allows,
    ),
    "dilated_blocks": Kind(
        lambda r, s: (r.choice([0, 1, 3]), *r.sample([1, 2, 3, 4, 16], r.randint(1, 3))),
        lambda s, n, *rates: f"rw.dilated_blocks({n}, {list(rates)})",
        dilated_allows,
    ),
    "random_blocks": Kind(draw_blocks, blocks_source, blocks_allow, blocks_fit),
    "bigbird": Kind(
        lambda r, s: (width(r, s), r.choice([0, 1, 9]), r.randint(1, 3), r.choice(SIDES[3:]), r.randint(0, 9)),
        lambda s, n, first, random, side, seed: (
            f"rw.bigbird({s.nk}, window={n}, global_tokens={first}, random={random}, block_size={side}, seed={seed})"
        ),
        bigbird_allows,
        lambda s, n, first, random, side, seed: table_fits(s, side),
    ),
    "variable": Kind(
        lambda r, s: (
            tuple(r.choice([1, 2, 3]) for _ in range(r.randint(1, 3))),
            tuple(sorted(r.sample(range(4), r.randint(0, 2)))),
            r.randint(0, 2), r.choice(SIDES[3:]), r.randint(0, 9),
        ),
        lambda s, local, whole, random, side, seed: (
            f"rw.variable({s.nk}, local_blocks={local}, global_blocks={whole}, random={random}, block_size={side}, "
            f"seed={seed})"
        ),
        variable_allows,
        lambda s, local, whole, random, side, seed: s.square and table_fits(s, side),
    ),
}  # fmt: skip


def fits(tree: Tree, s: Sizes) -> bool:
    """Whether a tree makes a pattern for these sizes."""
    if tree.kind == "PerHead" and len(tree.parts) != s.heads:
        return False
    if tree.kind == "LongNet" and tree.args[4] == "partitioned" and len(tree.args[0]) > s.heads:
        return False
    kind = KINDS.get(tree.kind)
    return (kind is None or kind.fits(s, *tree.args)) and all(fits(part, s) for part in tree.parts)


def source(tree: Tree, s: Sizes) -> str:
    """The Python that makes the pattern."""
    parts = [source(part, s) for part in tree.parts]
    if tree.kind in ("&", "|"):
        return "(" + f" {tree.kind} ".join(parts) + ")"
    if tree.kind == "~":
        return f"~{parts[0]}"
    if tree.kind == "PerHead":
        return f"rw.PerHead([{', '.join(parts)}])"
    if tree.kind == "LongNet":
        return f"rw.LongNet({longnet_arguments(tree)})"
    return KINDS[tree.kind].source(s, *tree.args)


def longnet_arguments(tree: Tree) -> str:
    segments, rates, causal, offset, heads = tree.args
    return f"segments={list(segments)}, rates={list(rates)}, causal={causal}, offset={offset!r}, heads={heads!r}"


def counts(tree: Tree, s: Sizes) -> NDArray[np.int64]:
    """How often each query attends each key, by branch: (branches, B, Hq, nq, nk); one branch but for a LongNet."""
    q, k = np.arange(s.q_offset, s.stop)[:, None], np.arange(s.nk)[None]
    if tree.kind == "LongNet":
        return _mixture(tree, s, q, k)
    found = np.zeros((1, s.batch, s.heads, s.nq, s.nk), np.int64)
    per_batch, per_head = _depends(tree)
    for b in range(s.batch if per_batch else 1):
        for h in range(s.heads if per_head else 1):
            where = slice(b, b + 1) if per_batch else slice(None), slice(h, h + 1) if per_head else slice(None)
            found[(0, *where)] = _allowed(tree, At(s, b, h, q, k))
    return found


def _depends(tree: Tree) -> tuple[bool, bool]:
    varied = any(
        below.kind in ("PerHead", "function", "BlockTable", "BlockTable of indices", "random_blocks", "from_block_mask")
        for below in tree.walk()
    )
    return varied, varied


def _allowed(tree: Tree, at: At) -> Bools:
    if tree.kind == "~":
        return ~_allowed(tree.parts[0], at)
    if tree.kind == "PerHead":
        return _allowed(tree.parts[at.h], at)
    if tree.kind in ("&", "|"):
        join = np.logical_and if tree.kind == "&" else np.logical_or
        result = _allowed(tree.parts[0], at)
        for part in tree.parts[1:]:
            result = join(result, _allowed(part, at))
        return result
    allowed = KINDS[tree.kind].allows(at, *tree.args)
    return np.broadcast_to(np.asarray(allowed, np.bool_), (at.q.size, at.k.size))


def _mixture(tree: Tree, s: Sizes, q: NDArray[np.int64], k: NDArray[np.int64]) -> NDArray[np.int64]:
    segments, rates, causal, offset, heads = tree.args
    found = np.zeros((len(rates), s.batch, s.heads, s.nq, s.nk), np.int64)
    # the branch of each head, where each has one: groups in order, the first of them one larger where it does not divide
    sizes = [s.heads // len(rates) + (i < s.heads % len(rates)) for i in range(len(rates))]
    owner = [branch for branch, size in enumerate(sizes) for _ in range(size)]
    for branch, (segment, rate) in enumerate(zip(segments, rates, strict=True)):
        for h in range(s.heads):
            if heads == "partitioned" and owner[h] != branch:
                continue
            residue = {"interleaved": h, "grouped": h * rate // s.heads}.get(offset, offset) % rate
            kept = (q % rate == residue) & (k % rate == residue) & (q // segment == k // segment)
            found[branch, :, h] = kept & ((k <= q) | (not causal))
    return found


#: what may be computed in strided views
RESIDUES = ["Strided", "Dilated", "dilated_blocks", "Neighborhood", "natten_1d"]


def draw(r: Random, s: Sizes, depth: int = 3) -> Tree:
    """A relation."""
    choice = r.random()
    if depth and choice < 0.45:
        kind = r.choice(["&", "|", "|", "~"])
        parts = 1 if kind == "~" else r.choice([2, 2, 3])
        return Tree(kind, (), tuple(draw(r, s, depth - 1) for _ in range(parts)))
    if depth and choice < 0.5:
        different = [draw(r, s, depth - 2 if depth > 1 else 0) for _ in range(min(s.heads, r.randint(1, 3)))]
        return Tree("PerHead", (), tuple(r.choice(different) for _ in range(s.heads)))
    while True:
        kind = r.choice(RESIDUES if r.random() < 0.15 else list(KINDS))
        tree = Tree(kind, KINDS[kind].draw(r, s))
        if fits(tree, s):
            return tree


def draw_mixture(r: Random, s: Sizes) -> Tree:
    """A LongNet."""
    count = r.randint(1, 3)
    rates = tuple(r.choice([1, 2, 3, 4, 8]) for _ in range(count))
    segments = tuple(rate * r.choice([1, 2, 5, 16, 50]) for rate in rates)
    heads = r.choice(["shared", "shared", "partitioned"]) if count <= s.heads else "shared"
    return Tree("LongNet", (segments, rates, r.random() < 0.5, r.choice(["interleaved", "grouped", 0, 1, 5]), heads))
