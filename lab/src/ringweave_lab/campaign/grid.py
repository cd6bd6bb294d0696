"""All blocks that a kernel can take, side by side on the GPU: the best are stored, and what they say of the table.

A cell is a kernel, a head dimension, and whether tiles are partial. Its blocks are compiled ahead in a pool of
processes, checked, and timed in turn. The table has one row for both kinds of tiles: what is best for them together.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

import ringweave as rw
from ringweave import files
from ringweave.ops import tuning
from ringweave.ops.triton import compiling, launch_config
from ringweave.ops.triton.launch_config import Asked, LaunchConfig
from ringweave.tune import now
from ringweave.tune.descent import Descent, Tuned
from ringweave.tune.problem import BOTH, FORWARD, Drawn, Problem
from ringweave.tune.search import CLOSE, Candidate, Search
from ringweave.tune.session import FAILURES, Say, Session

from . import precompile
from .precompile import Variant

_HELD, _STREAMED, _WARPS, _STAGES, _RESIDENT = (64, 128), (32, 64, 128), (4, 8), (2, 3), (0, 1)
TOKENS, HEADS = 16384, 16


class Cell(NamedTuple):
    """What one search is about."""

    kernel: str
    dim: int
    masked: bool

    def __str__(self) -> str:
        return f"{self.kernel}, D {self.dim}, {'masked' if self.masked else 'clear'}"

    @property
    def direction(self) -> str:
        """What is timed: a forward call, or one of both directions."""
        return FORWARD if self.kernel == "forward" else BOTH

    def problem(self, device: str) -> Problem:
        """Make the problem that stands for it."""
        relation = rw.Causal() if self.masked else Drawn(0.1)
        return Problem(str(self), relation, TOKENS, HEADS, self.dim, dtype=torch.bfloat16, device=device)


CELLS = [
    Cell(kernel, dim, masked)
    for kernel in ("forward", "backward_q", "backward_kv")
    for dim in (64, 128)
    for masked in (True, False)
]


@dataclass(frozen=True)
class Found:
    """Seconds of a cell's blocks, and why the others have none.

    Attributes:
        cell: Which.
        usual: The table's blocks.
        generation: Of the device.
        seconds: By blocks.
        reasons: By blocks.
    """

    cell: Cell
    usual: LaunchConfig
    generation: str
    seconds: Mapping[LaunchConfig, float]
    reasons: Mapping[LaunchConfig, str]

    @property
    def best(self) -> LaunchConfig:
        """The fastest, or the table's where that is about as fast."""
        fastest = min(self.seconds, key=self.seconds.__getitem__)
        return fastest if self.gain > CLOSE else self.usual

    @property
    def gain(self) -> float:
        """The seconds of the table's blocks over the least."""
        return self.seconds[self.usual] / min(self.seconds.values())

    def plain(self) -> dict[str, Any]:
        """Write it as a line has it."""
        timed = [{**dataclasses.asdict(blocks), "seconds": seconds} for blocks, seconds in self.seconds.items()]
        refused = [{**dataclasses.asdict(blocks), "reason": reason} for blocks, reason in self.reasons.items()]
        return {
            "cell": list(self.cell), "usual": dataclasses.asdict(self.usual), "generation": self.generation,
            "blocks": [*timed, *refused],
        }  # fmt: skip

    @staticmethod
    def of(line: Mapping[str, Any]) -> Found:
        """Read a line."""
        names = [field.name for field in dataclasses.fields(LaunchConfig)]
        seconds: dict[LaunchConfig, float] = {}
        reasons: dict[LaunchConfig, str] = {}
        for each in line["blocks"]:
            blocks = LaunchConfig(**{name: each[name] for name in names})
            if "seconds" in each:
                seconds[blocks] = each["seconds"]
            else:
                reasons[blocks] = each["reason"]
        return Found(Cell(*line["cell"]), LaunchConfig(**line["usual"]), line["generation"], seconds, reasons)


def joint(asked: Asked) -> list[LaunchConfig]:
    """List every blocks that a kernel can take, the table's first."""
    held, streamed = ("n", "m") if asked.key.kernel == "backward_kv" else ("m", "n")
    found = [asked.usual]
    for rows, others, warps, stages, resident in itertools.product(_HELD, _STREAMED, _WARPS, _STAGES, _RESIDENT):
        sizes: dict[str, Any] = {held: rows, streamed: others, "warps": warps, "stages": stages, "resident": resident}
        plain = dataclasses.replace(asked.usual, **sizes)
        found.append(plain)
        if asked.key.kernel == "forward" and not asked.key.masked:
            found.append(dataclasses.replace(plain, specialised=True))
        if asked.key.kernel == "forward":
            found.append(dataclasses.replace(plain, pingpong=True))
    return [blocks for blocks in dict.fromkeys(found) if blocks == asked.usual or asked.misfit(blocks) is None]


def search(cell: Cell, device: str, say: Say) -> Found | str:
    """Compile, check and time a cell's blocks, and store the best; in words, why the table's could not be timed."""
    problem = cell.problem(device)
    whole = Search(problem, Session(problem.inputs(), say, ends=True, failures=FAILURES), cell.direction, rounds=5)
    own = Candidate("triton")
    asked = next(each for each in whole.asked(own) if each.key.kernel == cell.kernel)
    blocks = joint(asked)
    say(f"{cell}: compiling {len(blocks)}")
    ahead = {each: Variant(problem, cell.direction, cell.kernel, each) for each in blocks}
    failed, _ = precompile.precompile(list(ahead.values()), compiling.here())
    reasons = {each: failed[variant] for each, variant in ahead.items() if variant in failed}
    timed = whole.measure(own, asked, [each for each in blocks if each not in reasons])
    seconds = {each: value for each, value in timed.items() if not isinstance(value, str)}
    reasons |= {each: value for each, value in timed.items() if isinstance(value, str)}
    if asked.usual not in seconds:
        return reasons[asked.usual]
    found = Found(cell, asked.usual, asked.device.generation, seconds, reasons)
    descent = Descent(asked.usual, found.best, dict(seconds), reasons)
    said = f"{problem.pattern!r}, {problem.tokens} tokens, {problem.heads} heads"
    tuning.record([], [Tuned(asked.key, descent, found.gain, found.best).entry(said, now())])
    return found


def together(cells: Sequence[Found]) -> LaunchConfig:
    """Choose one row of the table for cells of a kernel and dimension: the least time over each one's best.

    Blocks that differ from a row of the table in more than a row says do not count; the table's stay where nothing is
    more than a few per cent faster.
    """
    usual = cells[0].usual
    rows = [blocks for blocks in cells[0].seconds if not blocks.resident and not blocks.specialised]
    common = [blocks for blocks in rows if all(blocks in each.seconds for each in cells)]

    def cost(blocks: LaunchConfig) -> float:
        return math.prod(each.seconds[blocks] / min(each.seconds.values()) for each in cells) ** (1 / len(cells))

    least = min(common, key=cost, default=usual)
    return least if usual not in common or cost(usual) > CLOSE * cost(least) else usual


def patch(found: Iterable[Found], source: str | None = None) -> str:
    """Write the table anew as cells say, as a difference of its source; empty where it stands.

    Args:
        found: Cells; of two of the same the later.
        source: The table's source; the one that is imported by default.
    """
    cells: dict[tuple[str, str, int], dict[Cell, Found]] = {}
    for each in found:
        cells.setdefault((each.cell.kernel, each.generation, each.cell.dim), {})[each.cell] = each
    old = Path(launch_config.__file__).read_text("utf-8") if source is None else source
    new = old
    for (kernel, generation, dim), of in cells.items():
        best = together(list(of.values()))
        if best == next(iter(of.values())).usual:
            continue
        held, streamed = (best.n, best.m) if kernel == "backward_kv" else (best.m, best.n)
        row = re.compile(rf'(    \("{kernel}", "{generation}"\): \()(\(.*?\)), (\(.*?\))')
        place, text = (2 if dim <= 64 else 3), str((held, streamed, best.warps, best.stages))
        new = row.sub(
            lambda match, place=place, text=text: (  # type: ignore[misc]
                match[1] + (text if place == 2 else match[2]) + ", " + (text if place == 3 else match[3])
            ),
            new,
        )
    name = "src/ringweave/ops/triton/launch_config.py"
    before, after = (text.splitlines(keepends=True) for text in (old, new))
    return "".join(difflib.unified_diff(before, after, f"a/{name}", f"b/{name}"))


def read(path: Path) -> list[Found]:
    """Read the cells of a file of lines; one that was cut short is none."""
    found = []
    for line in files.json_lines(path) if path.is_file() else ():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            found.append(Found.of(line))
    return found
