"""What the page shows of one request: explain's numbers, a picture, a modelled step around a ring, a line of Python.

Everything that is counted comes from what ``ringweave explain``, ``show`` and ``simulate`` call; the page draws and
computes nothing of its own.
"""

from __future__ import annotations

import base64
import json
import math
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import typer
from numpy.typing import NDArray

from ringweave.cells import Picture, picture
from ringweave.errors import RingweaveError, ShapeError, UnsupportedError, message, shown
from ringweave.explanation import explain
from ringweave.parallel.planning.cost import Machine
from ringweave.parallel.planning.placement import Placement
from ringweave.patterns import Pattern, parse
from ringweave.patterns.grids import GridNeighborhood, GridWindows
from ringweave.patterns.local import Neighborhood
from ringweave.plan.branches import branches
from ringweave.plan.from_pattern import estimate_tiles
from ringweave.types import DTYPES
from ringweave.units import flops, nbytes, percent, seconds

from ..simulation.command import size_of
from ..simulation.simulate import Row, simulate
from .spots import python, spots

# what a page may ask for while a slider is dragged: a second's work, or a few
_TOKENS, _HEADS, _RANKS, _TILES = 2**22, 1024, 1024, 2**21
_CELLS = 256
_MAP = 64  # cells of a placement's map along a side
_MACHINE = Machine()
_TYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}


@dataclass(frozen=True)
class Asked:
    """A request of the page: texts as they stand in its fields."""

    pattern: str = "(SlidingWindow(1024) | Sinks(64)) & Causal()"
    tokens: str = "16K"
    heads: str = "8"
    kv_heads: str = ""
    head_dim: str = "64"
    dtype: str = "bfloat16"
    device: str = "cpu"
    ranks: str = "8"
    tflops: str = f"{_MACHINE.flops / 1e12:g}"
    gbytes: str = f"{_MACHINE.bandwidth / 1e9:g}"
    micros: str = f"{_MACHINE.latency * 1e6:g}"
    cells: str = "128"

    @staticmethod
    def of(query: Mapping[str, str]) -> Asked:
        """Take what is known of a query."""
        known = {field.name for field in fields(Asked)}
        return Asked(**{name: value.strip() for name, value in query.items() if name in known})


def answer(asked: Asked) -> dict[str, Any]:
    """Count, draw and model what was asked for.

    Returns:
        Plain values for JSON. ``facts`` are those of ``ringweave explain --json``; ``step`` has ``error`` alone where
        the ring cannot be modelled.
    Raises:
        RingweaveError: What was asked for is no pattern or does not fit, or more than a page can wait for.
    """
    relation = parse(asked.pattern)
    batch, made_heads = relation.extents()
    made_tokens = _made_for(relation)
    tokens = _length(str(made_tokens or asked.tokens))
    heads = _whole("heads", str(made_heads or asked.heads), _HEADS)
    kv_heads = _whole("key heads", asked.kv_heads, _HEADS) if asked.kv_heads else heads
    head_dim, cells = _whole("head dim", asked.head_dim, 2**12), _whole("cells", asked.cells, _CELLS)
    if asked.dtype not in _TYPES:
        raise ShapeError(message("dtype", shown(asked.dtype), f"one of {', '.join(_TYPES)}", "Name one of them."))
    dtype = _TYPES[asked.dtype]
    relation.check(tokens, tokens, 0)
    _check_size(relation, tokens, heads, batch or 1)
    facts = explain(
        relation, tokens, heads=heads, kv_heads=kv_heads, head_dim=head_dim, batch=batch or 1, dtype=dtype,
        device=asked.device, as_dict=True,
    )  # fmt: skip
    command = f"ringweave explain {shlex.quote(asked.pattern)} -n {tokens} --heads {heads} --kv-heads {kv_heads}"
    return {
        "sizes": {"tokens": tokens, "heads": heads, "kv_heads": kv_heads},
        "made": {"tokens": made_tokens, "heads": made_heads},
        "spots": [asdict(spot) for spot in spots(asked.pattern)],
        "python": python(asked.pattern),
        "command": f"{command} --head-dim {head_dim} --dtype {asked.dtype} --device {asked.device}",
        "facts": facts,
        "shown": _shown(facts),
        "picture": _drawn(picture(relation, tokens, heads=heads, cells=cells)),
        "step": _step(asked, relation, tokens, (heads, kv_heads), head_dim, dtype.itemsize),
    }


def _made_for(pattern: Pattern) -> int | None:
    """Find the length that a pattern is made for, if it is made for one."""
    if isinstance(pattern, (GridNeighborhood, GridWindows)):
        return pattern.grid.tokens
    if isinstance(pattern, Neighborhood):
        return pattern.tokens
    return next((made for part in pattern.parts_within() if (made := _made_for(part))), None)


def _whole(name: str, text: str, most: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= most):
        raise ShapeError(message(name, shown(text), f"a whole number from 1 to {most}", "Write one."))
    return int(text)


def _length(text: str) -> int:
    try:
        tokens = size_of(text, "tokens")
    except typer.BadParameter:
        tokens = 0
    if not 1 <= tokens <= _TOKENS:
        raise ShapeError(message("tokens", shown(text), f"1 to {_TOKENS}, such as 65536, 64K or 1M", "Write a length."))
    return tokens


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ShapeError(message(name, shown(text), "a number", "Write one."))
    return value


def _check_size(relation: Pattern, tokens: int, heads: int, batch: int) -> None:
    """Raise UnsupportedError for tiles that take longer to list than one waits for."""
    split = branches(relation, tokens, tokens, heads=heads, batch=batch)
    # a view's relation is often another's: they share a plan
    sparse = {(each.pattern, each.nq, each.nk) for each in split if each.structure == "sparse"}
    tiles = sum(estimate_tiles(*each) for each in sparse)
    if tiles > _TILES:
        got, wanted = (
            f"about {tiles / 1e6:.0f} million tiles a head",
            f"at most {_TILES / 1e6:.0f} million here",
        )
        raise UnsupportedError(message("pattern", got, wanted, "Take fewer tokens, or ask ringweave explain."))


# ---- numbers as they are shown ---------------------------------------------------------------------------------------


def _row(label: str, text: str, of: str, hint: str = "") -> dict[str, str]:
    return {"label": label, "text": text, "of": of, "hint": hint}


def _shown(facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Write explain's numbers in its own units, in groups; ``of`` says which number."""
    pairs, tiles, memory, work = (facts[name] for name in ("pairs", "tiles", "memory", "flops"))
    chosen = ", ".join(f"{each['backend']} x {each['branches']}" for each in facts["backend"]["chosen"])
    ratio = work["dense_over_this"]
    counted = f"{tiles['computed']:,}" if tiles["computed"] else "none: dense kernels"
    return [
        {"title": "What is computed", "rows": [
            _row("density", percent(pairs["density"]), "pairs.density", "allowed pairs over all pairs"),
            _row("computed density", percent(pairs["computed_density"]), "pairs.computed_density",
                 "pairs in computed tiles over all pairs"),
            _row("tiles", counted, "tiles.computed", "of all heads"),
            _row("full tiles", f"{tiles['full']:,}", "tiles.full", "every pair allowed: no mask is read"),
            _row("causality", "causal" if facts["causality"]["causal"] else "sees the future", "causality.causal",
                 facts["causality"]["text"]),
            _row("backend", chosen, "backend.chosen", "what auto chooses on that device"),
        ]},
        {"title": "Work", "rows": [
            _row("forward", flops(work["forward"]), "flops.forward"),
            _row("backward", flops(work["backward"]), "flops.backward"),
            _row("dense forward", flops(work["dense_forward"]), "flops.dense_forward"),
            _row("dense over this", "-" if ratio is None else f"{ratio:.3g} x", "flops.dense_over_this"),
        ]},
        {"title": "Memory", "rows": [
            _row("plan", nbytes(memory["plan"]), "memory.plan"),
            _row("q, k, v, out, lse", nbytes(memory["activations"]), "memory.activations"),
            _row("gradients", nbytes(memory["gradients"]), "memory.gradients"),
            _row("backend's own", nbytes(memory["scratch"]), "memory.scratch", "at most about"),
        ]},
    ]  # fmt: skip


# ---- pictures --------------------------------------------------------------------------------------------------------


def _shades(shares: NDArray[np.float64]) -> str:
    """Write shares in bytes: 0 is none and 255 all, whatever is between is never either."""
    level = np.clip(np.round(254 * shares), 1, 254)
    level = np.where(shares <= 0, 0, np.where(shares >= 1, 255, level))
    return base64.b64encode(level.astype(np.uint8).tobytes()).decode("ascii")


def _drawn(drawn: Picture) -> dict[str, Any]:
    panels = [
        {"caption": panel.caption, "cells": len(panel.shares), "shades": _shades(panel.shares)}
        for panel in drawn.panels
    ]
    return {"caption": drawn.caption, "tokens": drawn.tokens, "side": drawn.side, "panels": panels}


def _map(placement: Placement) -> dict[str, Any]:
    """Draw which ranks, downwards, hold which tokens, to the right: the share of each cell's tokens."""
    side = -(-placement.tokens // _MAP)
    group = -(-placement.ranks // _MAP)
    position = np.arange(placement.tokens)
    row, col = placement.owners(position) // group, position // side
    rows, cols = -(-placement.ranks // group), int(col[-1]) + 1
    held = np.bincount(row * cols + col, minlength=rows * cols).reshape(rows, cols)
    shares = held / np.bincount(col)
    return {"rows": rows, "cols": cols, "side": side, "group": group, "shades": _shades(shares / shares.max())}


# ---- a step around a ring --------------------------------------------------------------------------------------------


def _step(
    asked: Asked, relation: Pattern, tokens: int, heads: tuple[int, int], head_dim: int, itemsize: int
) -> dict[str, Any]:
    try:
        ranks = _whole("ranks", asked.ranks, _RANKS)
        machine = Machine(
            _number("TFLOP/s", asked.tflops) * 1e12, _number("GB/s", asked.gbytes) * 1e9,
            _number("latency", asked.micros) / 1e6,
        )  # fmt: skip
        one, row = simulate(
            relation, tokens, [1, ranks], heads=heads, head_dim=head_dim, itemsize=itemsize, machine=machine
        )
    except RingweaveError as error:
        return {"error": str(error)}
    own = row.ringweave
    rows = [
        _row("modelled time, 1 rank", seconds(one.ringweave.seconds), "one.seconds", "forward, computing alone"),
        _row(f"modelled time, {ranks} ranks", seconds(own.seconds), "ranks.seconds", "forward, with its messages"),
        _row("efficiency", percent(own.efficiency), "ranks.efficiency", "computing over all time, of the mean rank"),
        _row("placement", own.name, "ranks.name"),
        _row("received, most", nbytes(own.bytes_worst), "ranks.bytes_worst", "by the rank that receives most"),
        _row("received, mean", nbytes(own.bytes_total / ranks), "ranks.bytes_total", "a rank"),
        _row("work, most", f"{own.imbalance:.3g} x the mean", "ranks.imbalance"),
    ]
    return {
        "ranks": ranks,
        "shown": rows,
        "systems": _systems(row),
        "figures": {"one": _figures(one), "ranks": _figures(row)},
        "map": _map(row.placement),
    }


def _figures(row: Row) -> dict[str, Any]:
    own = row.ringweave
    return asdict(own) | {"seconds": own.seconds, "efficiency": own.efficiency}


def _systems(row: Row) -> list[list[str]]:
    return [
        [name, "-", "-", "-"]
        if each is None
        else [name, seconds(each.seconds), nbytes(each.bytes_worst), percent(each.efficiency)]
        for name, each in row.systems.items()
    ]


def as_json(value: object) -> str:
    """Write JSON that may stand inside a page's script element too."""
    return json.dumps(value, allow_nan=False).replace("<", "\\u003c")
