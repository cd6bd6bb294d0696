"""The answer to one request of the page: numbers, pictures, a modelled step on several ranks, and a line of Python.

The numbers come from the functions behind ``ringweave explain``, ``show`` and ``simulate``. The page draws them and
computes nothing.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from ringweave.errors import RingweaveError, ShapeError, UnsupportedError, shown
from ringweave.parallel.planning.cost import Estimate, Machine
from ringweave.parallel.planning.placement import Placement
from ringweave.patterns import Pattern, parse
from ringweave.plan.branches import branches
from ringweave.plan.from_pattern import estimate_tiles
from ringweave.reports.cells import Picture, picture
from ringweave.reports.explanation import explain
from ringweave.types import DTYPES
from ringweave.units import flops, nbytes, parse_size, percent, seconds

from ..simulation.simulate import Row, simulate
from .neighbours import grid_of, neighbours, shades
from .spots import python, spots

# limits of a request, chosen so that an answer takes a few seconds at most while a slider is dragged
_TOKENS, _HEADS, _RANKS, _TILES = 2**22, 1024, 1024, 2**21
_CELLS = 256
_MAP = 64  # maximum number of cells along a side of a placement's map
# Figures of a rank of each device, used where a request names none. A cpu rank is the two-core processor of
# docs/benchmarks/cpu.md (bfloat16, forward) with 10-gigabit Ethernet; its latency is an assumption. A device that is
# missing here has no figures, and its times are not modelled until the user enters them.
_MACHINES = {"cuda": Machine(), "cpu": Machine(flops=0.34e12, bandwidth=1.25e9, latency=50e-6)}
_TYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}


@dataclass(frozen=True)
class Asked:
    """A request of the page: the texts of its fields.

    ``tflops``, ``gbytes`` and ``micros`` describe a rank; an empty text means the figure of ``device``. ``pixel`` is
    the query that the image of a grid shows, such as ``3,5``; an empty text means the centre.
    """

    pattern: str = "(SlidingWindow(1024) | Sinks(64)) & Causal()"
    tokens: str = "16K"
    heads: str = "8"
    kv_heads: str = ""
    head_dim: str = "64"
    dtype: str = "bfloat16"
    device: str = "cpu"
    ranks: str = "8"
    tflops: str = ""
    gbytes: str = ""
    micros: str = ""
    cells: str = "128"
    pixel: str = ""

    @staticmethod
    def of(query: Mapping[str, str]) -> Asked:
        """Return the request of a query; unknown names are ignored."""
        known = {field.name for field in fields(Asked)}
        return Asked(**{name: value.strip() for name, value in query.items() if name in known})


def answer(asked: Asked) -> dict[str, Any]:
    """Compute the answer to a request.

    Returns:
        Plain values for JSON. ``facts`` are those of ``ringweave explain --json``. ``step`` has ``error`` in place of
        numbers if the ring cannot be modelled. ``grid`` is None if the pattern is not made for a grid.
    Raises:
        RingweaveError: The pattern or a size is invalid, or the answer would take too long.
    """
    relation = parse(asked.pattern)
    batch, made_heads = relation.extents()
    grid = grid_of(relation)
    made_tokens = grid.tokens if grid else None
    tokens = _length(str(made_tokens or asked.tokens))
    heads = _whole("heads", str(made_heads or asked.heads), _HEADS)
    kv_heads = _whole("key heads", asked.kv_heads, _HEADS) if asked.kv_heads else heads
    head_dim, cells = _whole("head dim", asked.head_dim, 2**12), _whole("cells", asked.cells, _CELLS)
    if asked.dtype not in _TYPES:
        raise ShapeError("dtype", shown(asked.dtype), f"one of {', '.join(_TYPES)}", "Name one of them.")
    dtype = _TYPES[asked.dtype]
    relation.check(tokens, tokens, 0)
    _check_size(relation, tokens, heads, batch or 1)
    facts = explain(
        relation, tokens, heads=heads, kv_heads=kv_heads, head_dim=head_dim, batch=batch or 1, dtype=dtype,
        device=asked.device, as_dict=True,
    )  # fmt: skip
    drawn = picture(relation, tokens, heads=heads, cells=cells)
    command = f"ringweave explain {shlex.quote(asked.pattern)} -n {tokens} --heads {heads} --kv-heads {kv_heads}"
    return {
        "sizes": {"tokens": tokens, "heads": heads, "kv_heads": kv_heads},
        "made": {"tokens": made_tokens, "heads": made_heads},
        "spots": [asdict(spot) for spot in spots(asked.pattern)],
        "python": python(asked.pattern),
        "command": f"{command} --head-dim {head_dim} --dtype {asked.dtype} --device {asked.device}",
        "facts": facts,
        "shown": _shown(facts),
        "picture": _drawn(drawn),
        "grid": neighbours(relation, grid, [panel.heads[0] for panel in drawn.panels], asked.pixel) if grid else None,
        "step": _step(asked, relation, tokens, (heads, kv_heads), head_dim, dtype.itemsize),
    }


def _whole(name: str, text: str, most: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= most):
        raise ShapeError(name, shown(text), f"a whole number from 1 to {most}", "Write one.")
    return int(text)


def _length(text: str) -> int:
    try:
        tokens = parse_size(text)
    except ValueError:
        tokens = 0
    if not 1 <= tokens <= _TOKENS:
        raise ShapeError("tokens", shown(text), f"1 to {_TOKENS}, such as 65536, 64K or 1M", "Write a length.")
    return tokens


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ShapeError(name, shown(text), "a number", "Write one.")
    return value


def _check_size(relation: Pattern, tokens: int, heads: int, batch: int) -> None:
    """Raise UnsupportedError if listing the tiles would take too long."""
    split = branches(relation, tokens, tokens, heads=heads, batch=batch)
    # strided views often have equal relations, and those share a plan
    sparse = {(each.pattern, each.nq, each.nk) for each in split if each.dense_kind == "sparse"}
    tiles = sum(estimate_tiles(*each) for each in sparse)
    if tiles > _TILES:
        got, wanted = (
            f"about {tiles / 1e6:.0f} million tiles a head",
            f"at most {_TILES / 1e6:.0f} million here",
        )
        raise UnsupportedError("pattern", got, wanted, "Take fewer tokens, or ask ringweave explain.")


# ---- numbers as they are shown ---------------------------------------------------------------------------------------


def _row(label: str, text: str, of: str, hint: str = "") -> dict[str, str]:
    return {"label": label, "text": text, "of": of, "hint": hint}


def _shown(facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Return explain's numbers in groups, in explain's units; ``of`` is the number's path in the facts."""
    pairs, tiles, memory, work = (facts[name] for name in ("pairs", "tiles", "memory", "flops"))
    chosen = ", ".join(
        each["backend"] if each["branches"] == 1 else f"{each['backend']} ({each['branches']} branches)"
        for each in facts["backend"]["chosen"]
    )
    ratio = work["dense_over_this"]
    counted = f"{tiles['computed']:,}" if tiles["computed"] else "none: dense kernels"
    return [
        {"title": "What is computed", "rows": [
            _row("density", percent(pairs["density"]), "pairs.density", "allowed pairs over all pairs"),
            _row("computed density", percent(pairs["computed_density"]), "pairs.computed_density",
                 "pairs in computed tiles over all pairs"),
            _row("tiles", counted, "tiles.computed", "computed squares of queries and keys, of all heads"),
            _row("full tiles", f"{tiles['full']:,}", "tiles.full", "tiles without a masked pair"),
            _row("causality", "causal" if facts["causality"]["causal"] else "not causal", "causality.causal",
                 facts["causality"]["text"]),
            _row("backend", chosen, "backend.chosen", f"chosen by auto for {facts['sizes']['device']}"),
        ]},
        {"title": "Work", "rows": [
            _row("forward", flops(work["forward"]), "flops.forward"),
            _row("backward", flops(work["backward"]), "flops.backward"),
            _row("dense forward", flops(work["dense_forward"]), "flops.dense_forward"),
            _row("dense / this pattern", "-" if ratio is None else f"{ratio:.3g} x", "flops.dense_over_this"),
        ]},
        {"title": "Memory", "rows": [
            _row("plan", nbytes(memory["plan"]), "memory.plan"),
            _row("q, k, v, out, lse", nbytes(memory["activations"]), "memory.activations"),
            _row("gradients", nbytes(memory["gradients"]), "memory.gradients"),
            _row("backend's buffers", nbytes(memory["scratch"]), "memory.scratch", "approximate upper bound"),
        ]},
    ]  # fmt: skip


# ---- pictures --------------------------------------------------------------------------------------------------------


def _drawn(drawn: Picture) -> dict[str, Any]:
    panels = [
        {"caption": panel.caption, "cells": len(panel.shares), "shades": shades(panel.shares)} for panel in drawn.panels
    ]
    return {"caption": drawn.caption, "tokens": drawn.tokens, "side": drawn.side, "panels": panels}


def _map(placement: Placement) -> dict[str, Any]:
    """Draw the tokens of each rank: a row per rank or group of ranks, a column per range of tokens."""
    side = -(-placement.tokens // _MAP)
    group = -(-placement.ranks // _MAP)
    position = np.arange(placement.tokens)
    row, col = placement.owners(position) // group, position // side
    rows, cols = -(-placement.ranks // group), int(col[-1]) + 1
    held = np.bincount(row * cols + col, minlength=rows * cols).reshape(rows, cols)
    shares = held / np.bincount(col)
    return {"rows": rows, "cols": cols, "side": side, "group": group, "shades": shades(shares / shares.max())}


# ---- a step on several ranks -----------------------------------------------------------------------------------------


def _step(
    asked: Asked, relation: Pattern, tokens: int, heads: tuple[int, int], head_dim: int, itemsize: int
) -> dict[str, Any]:
    """Model a step on ranks of the device that the request names."""
    usual = _usual(asked.device)
    ulysses = "-: Ulysses needs a number of ranks that divides the key heads."
    try:
        ranks = _whole("ranks", asked.ranks, _RANKS)
        machine = _machine(asked, usual)
        one, row = simulate(
            relation, tokens, [1, ranks], heads=heads, head_dim=head_dim, itemsize=itemsize, machine=machine
        )
    except RingweaveError as error:
        return {"usual": usual, "error": str(error)}
    return {
        "usual": usual,
        "title": f"One forward step on {ranks} {asked.device} {'rank' if ranks == 1 else 'ranks'}",
        "ranks": ranks,
        "shown": _step_rows(one, row),
        "systems": _systems(row),
        "notes": [
            f"Times are modelled, not measured, for a {asked.device} rank that computes "
            f"{machine.flops / 1e12:g} TFLOP/s, receives {machine.bandwidth / 1e9:g} GB/s and waits "
            f"{machine.latency * 1e6:g} us for a message. Bytes and work are counted from the plan.",
            *([ulysses] if None in row.systems.values() and ranks > 1 else []),
        ],
        "figures": {"one": _figures(one), "ranks": _figures(row)},
        "map": _map(row.placement) if ranks > 1 else None,
    }


def _usual(device: str) -> dict[str, str]:
    """Return the figures of a rank of a device as the page's texts; empty texts if they are unknown."""
    machine = _MACHINES.get(device.partition(":")[0])
    if machine is None:
        return {"tflops": "", "gbytes": "", "micros": ""}
    return {
        "tflops": f"{machine.flops / 1e12:g}",
        "gbytes": f"{machine.bandwidth / 1e9:g}",
        "micros": f"{machine.latency * 1e6:g}",
    }


def _machine(asked: Asked, usual: dict[str, str]) -> Machine:
    """Return the figures of the request's device; the request's own figures replace them one by one."""
    texts = {name: getattr(asked, name) or text for name, text in usual.items()}
    if not all(texts.values()):
        remedy = "Enter all three: the page has no defaults for this device."
        raise UnsupportedError(f"{asked.device} rank", "no figures", "TFLOP/s, GB/s and us / message", remedy)
    return Machine(
        _number("TFLOP/s", texts["tflops"]) * 1e12,
        _number("GB/s", texts["gbytes"]) * 1e9,
        _number("latency", texts["micros"]) / 1e6,
    )


def _step_rows(one: Row, row: Row) -> list[dict[str, str]]:
    own = row.ringweave
    rows = [_row("time, 1 rank", seconds(one.ringweave.seconds), "one.seconds", "modelled, forward")]
    if row.ranks == 1:
        return rows
    return [
        *rows,
        _row(f"time, {row.ranks} ranks", seconds(own.seconds), "ranks.seconds", "modelled, forward, with messages"),
        _row("efficiency", percent(own.efficiency), "ranks.efficiency", "mean rank's computing time over the step's"),
        _row("placement", own.name, "ranks.name", "how tokens are distributed over the ranks"),
        _row("received, busiest rank", nbytes(own.bytes_worst), "ranks.bytes_worst"),
        _row("received, mean rank", nbytes(own.bytes_total / row.ranks), "ranks.bytes_total"),
        _row("work, busiest rank", f"{own.imbalance:.3g} x the mean", "ranks.imbalance"),
    ]


def _figures(row: Row) -> dict[str, Any]:
    own = row.ringweave
    return asdict(own) | {"seconds": own.seconds, "efficiency": own.efficiency}


def _systems(row: Row) -> list[list[str]]:
    """Return the table that compares systems, its header first; empty for one rank, where all systems are equal."""
    if row.ranks == 1:
        return []
    lines = [[name, *(("", "", "") if each is None else _compared(each))] for name, each in row.systems.items()]
    return filled([["system", "modelled time", "received, busiest rank", "efficiency"], *lines])


def _compared(each: Estimate) -> tuple[str, str, str]:
    return seconds(each.seconds), nbytes(each.bytes_worst), percent(each.efficiency)


def filled(table: list[list[str]]) -> list[list[str]]:
    """Leave out the columns of a table that are empty below the header, and write a dash into other empty cells."""
    kept = [i for i in range(len(table[0])) if any(line[i] for line in table[1:])]
    return [[line[i] or "-" for i in kept] for line in table]


def as_json(value: object) -> str:
    """Return JSON that is also safe inside a script element of a page."""
    return json.dumps(value, allow_nan=False).replace("<", "\\u003c")
