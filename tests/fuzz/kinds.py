"""Every pattern and preset: a generator of arguments, the Python that makes it, and its definition in numpy."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import torch

from ringweave.errors import PatternError
from ringweave.patterns import parse
from ringweave.patterns.declared import DECLARED

from .functions import block_mask_source, draw_block_mask, draw_function, function_allows, function_source
from .grids import (
    draw_neighborhood,
    draw_windows,
    fits,
    neighborhood_allows,
    neighborhood_source,
    windows_allow,
    windows_source,
)
from .ragged import (
    bounds_source,
    draw_bounds,
    draw_ids,
    draw_known,
    draw_marks,
    draw_nodes,
    exists,
    ids_source,
    is_known,
    is_marked,
    is_on_path,
    known_source,
    marks_source,
    nodes_source,
    same_id,
)
from .sizes import At, Bools, Kind, Sizes, chosen, listing, near, past, tokens, width
from .tables import (
    SIDES,
    bigbird_allows,
    blocks_allow,
    blocks_fit,
    blocks_source,
    draw_blocks,
    draw_listed,
    draw_selected,
    draw_table,
    listed_allows,
    listed_source,
    selected_allows,
    selected_source,
    table_allows,
    table_fits,
    table_source,
    variable_allows,
)  # fmt: skip


def document_lengths(s: Sizes, *sizes: int) -> list[int]:
    """Return documents of these sizes, repeated until the keys are used up."""
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
    allowed = np.zeros((at.q.size, at.s.nk), np.bool_)
    for row, q in enumerate(at.q[:, 0]):
        members = list(range(int(q) % dilation, at.s.nk, dilation))
        place = members.index(int(q))
        first = min(max(place - count // 2, 0), max(len(members) - count, 0))
        allowed[row, members[first : first + count]] = True
    return allowed[:, at.k[0]]


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
    "Periodic": Kind(draw_periodic, plain("patterns.Periodic"), lambda at, p, a, z: (at.k % p >= a) & (at.k % p < z)),
    "Documents": Kind(draw_documents, documents_source, same_document, square),
    "KeyPadding": Kind(draw_bounds, bounds_source, exists),
    "ids": Kind(draw_ids, ids_source, same_id, square),
    "Tree": Kind(draw_nodes, nodes_source, is_on_path, square),
    "marks": Kind(draw_marks, marks_source, is_marked, square),
    "known": Kind(draw_known, known_source, is_known),
    "Neighborhood": Kind(
        draw_neighbours, lambda s, n, d: f"rw.patterns.Neighborhood({n}, {d}, tokens={s.nk})", neighbours, square
    ),
    "natten_1d": Kind(draw_neighbours, lambda s, n, d: f"rw.patterns.natten_1d({n}, {d}, tokens={s.nk})", neighbours, square),
    "GridNeighborhood": Kind(draw_neighborhood, neighborhood_source, neighborhood_allows, fits),
    "GridWindows": Kind(draw_windows, windows_source, windows_allow, fits),
    "BlockTable": Kind(draw_table, table_source, table_allows),
    "BlockTable of indices": Kind(draw_listed, listed_source, listed_allows),
    "Selected": Kind(draw_selected, selected_source, selected_allows),
    "function": Kind(draw_function, function_source, function_allows),
    "from_block_mask": Kind(draw_block_mask, block_mask_source, function_allows),
    "longformer": Kind(
        lambda r, s: (width(r, s), tokens(r, s), r.random() < 0.5),
        lambda s, n, of, causal: f"rw.patterns.longformer({n}, {listing(of)}, causal={causal})",
        lambda at, n, of, causal: (near(at, n) | is_global(at, of)) & past(at, causal),
    ),
    "local_global": Kind(
        lambda r, s: (width(r, s), width(r, s, 1), r.random() < 0.5),
        lambda s, n, stride, causal: f"rw.patterns.local_global({n}, {stride}, causal={causal})",
        lambda at, n, stride, causal: (near(at, n) | (at.k % stride == 0)) & past(at, causal),
    ),
    "fixed": Kind(
        draw_fixed,
        lambda s, block, summary, causal: f"rw.patterns.sparse_transformer_fixed({block}, {summary}, causal={causal})",
        fixed_allows,
    ),
    "dilated_blocks": Kind(
        lambda r, s: (r.choice([0, 1, 3]), *r.sample([1, 2, 3, 4, 16], r.randint(1, 3))),
        lambda s, n, *rates: f"rw.patterns.dilated_blocks({n}, {list(rates)})",
        dilated_allows,
    ),
    "random_blocks": Kind(draw_blocks, blocks_source, blocks_allow, blocks_fit),
    "bigbird": Kind(
        lambda r, s: (width(r, s), r.choice([0, 1, 9]), r.randint(1, 3), r.choice(SIDES[3:]), r.randint(0, 9)),
        lambda s, n, first, random, side, seed: (
            f"rw.patterns.bigbird({s.nk}, window={n}, global_tokens={first}, random={random}, block_size={side}, seed={seed})"
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
            f"rw.patterns.variable({s.nk}, local_blocks={local}, global_blocks={whole}, random={random}, block_size={side}, "
            f"seed={seed})"
        ),
        variable_allows,
        lambda s, local, whole, random, side, seed: s.square and table_fits(s, side),
    ),
}  # fmt: skip

#: Patterns that are drawn under another name, or inside of trees.
ELSEWHERE = {"sparse_transformer_fixed", "TokenMask", "PerHead", "LongNet", "Within"}


def of_example(example: str) -> Kind:
    """Draw a declared pattern with other numbers than its example's; its own ``allows``, by token, is the definition."""

    def drawn(r: Random, s: Sizes) -> tuple[str]:
        for _ in range(100):
            text = re.sub(r"\d+", lambda found: str(width(r, s)), example)
            with contextlib.suppress(PatternError):
                parse(text)
                return (text,)
        return (example,)

    def allows(at: At, text: str) -> Any:
        return parse(text).allows(torch.from_numpy(at.q), torch.from_numpy(at.k)).numpy()

    def fits_sizes(s: Sizes, text: str) -> bool:
        try:
            parse(text).check(s.nq, s.nk, s.q_offset)
        except PatternError:
            return False
        return True

    return Kind(drawn, lambda s, text: f"rw.patterns.parse({text!r})", allows, fits_sizes)


KINDS |= {name: of_example(known.example) for name, known in DECLARED.items() if name not in {*KINDS, *ELSEWHERE}}
