"""Count the instructions of a tile in the kernels' machine code for sm_90, beside published loops; runs without a GPU.

    python gpu/scripts/machine_code.py            write this compiler's part of gpu/notes/machine-code.md
    python gpu/scripts/machine_code.py --check    compare with it: more instructions, spills or waits fail

Instructions are those of a warp for one turn of a loop: at least, past all branches, as of a tile without a mask, and
in all. The loops to compare with are written here and compiled by the same compiler.
"""

# Triton's constants have capital letters
# ruff: noqa: N803

from __future__ import annotations

import argparse
import itertools
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from kernel_resources import compiled, of_cubin
from kernel_shapes import TARGETS, WIDE, ScoreTerms, Shape
from triton.compiler import ASTSource

from ringweave_gpu.triton.kernels.score_terms import DISTANCE, SOFTCAP

PAGE = Path(__file__).parents[1] / "notes" / "machine-code.md"
MASKED, CLEAR = Shape(described=True), Shape(described=True, clear=True)
CASES: tuple[tuple[str, Shape, ScoreTerms], ...] = (
    ("no masks", CLEAR, ScoreTerms()),
    ("masks", MASKED, ScoreTerms()),
    ("masks, dead keys", Shape(described=True, dead=True), ScoreTerms()),
    ("masks, by addresses", WIDE, ScoreTerms()),
    ("masks, tiles of 64", Shape((64, 64), described=True), ScoreTerms()),
    ("softcap", MASKED, ScoreTerms((SOFTCAP.value,))),
    ("distance", MASKED, ScoreTerms((DISTANCE.value,))),
    ("dropout", MASKED, ScoreTerms(drop=True)),
)
#: Faults of configurations that were faster on an H200 than those without (gpu/notes/configurations.md): the bytes that
#: spill, and the waits of a turn. With half the registers products wait for each other, and another program of the
#: multiprocessor computes meanwhile.
MEASURED = {
    ("forward", 128, "no masks"): (0, 12),
    ("forward", 128, "masks"): (0, 12),
    ("forward", 128, "masks, dead keys"): (72, 2),
    ("backward_kv", 64, "no masks"): (32, 4),
    ("backward_kv", 64, "masks"): (72, 4),
    ("backward_kv", 64, "masks, by addresses"): (216, 4),
    ("backward_kv", 128, "masks"): (16, 4),
    ("backward_kv", 128, "masks, by addresses"): (16, 4),
    ("backward_kv", 128, "masks, tiles of 64"): (16, 4),
}
_LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?);", re.M)
_BRANCH = re.compile(r"^(?P<guard>@!?U?P\w+ )?BRA(?:\.\w+)*(?P<also> !?U?P\w+,)? `?\(?(?P<to>0x[0-9a-f]+)")
# these instructions list a source register first
_NO_RESULT = (
    "ST",
    "RED",
    "BAR",
    "SYNCS",
    "UTMA",
    "LDGSTS",
    "BRA",
    "EXIT",
    "NOP",
    "R2UR",
    "R2P",
    "WARPSYNC",
    "BSYNC",
    "PLOP",
)


@triton.jit
def reference(
    q, k, v, out, col, first, last, scale,
    D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """Attend whole tiles: all in turn, as FlashAttention-2 does, or those of a list, as FlexAttention does."""
    row, channel = tl.program_id(0) * M + tl.arange(0, M), tl.arange(0, D)
    queries = tl.load(q + row[:, None] * D + channel[None, :])
    top, total = tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    for step in tl.range(first, last, num_stages=STAGES):
        at = (tl.load(col + step) if LISTED else step) * N
        scores = tl.dot(queries, k.load([at, 0]).T)
        new_top = tl.maximum(top, tl.max(scores, 1) * scale)
        weights = tl.math.exp2(scores * scale - new_top[:, None])
        decay = tl.math.exp2(top - new_top)
        total = total * decay + tl.sum(weights, 1)
        acc = tl.dot(weights.to(tl.bfloat16), v.load([at, 0]), acc * decay[:, None])
        top = new_top
    tl.store(out + row[:, None] * D + channel[None, :], (acc / total[:, None]).to(tl.bfloat16))


@dataclass(frozen=True)
class Loop:
    """The loop over tiles of a compiled kernel.

    Attributes:
        least: Instructions of a warp past all branches.
        all: Instructions of a warp in all.
        products: Those for matrix products.
        waits: How often one of them ends a group that is waited for: once a product of tiles, or it is serialised.
        narrow: Asynchronous copies of fewer than 16 bytes.
    """

    least: int
    all: int
    products: int
    waits: int
    narrow: int


def disassembled(cubin: bytes) -> dict[int, str]:
    """Read the instructions by address."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True).stdout
    return {int(at, 16): what for at, what in _LINE.findall(text)}


def written(what: str) -> range:
    """Return the registers that an instruction writes."""
    guarded = re.match(r"(?:@!?U?P\w+ )?(\S+) ?(.*)", what)
    assert guarded is not None
    name, operands = guarded[1], [each.strip() for each in guarded[2].split(",")]
    if "SETP" in name or name.startswith(_NO_RESULT):
        return range(0)
    # predicates written by the instruction come before its register
    place = next((each for each in operands if not re.fullmatch(r"!?U?P[\dT]", each)), "")
    found = re.fullmatch(r"R(\d+)(\.\w+)*", place)
    if found is None:
        return range(0)
    if shape := re.match(r"HGMMA\.64x(\d+)x16\.F32", name):
        count = int(shape[1]) // 2
    elif name.startswith("LDSM"):
        count = int(name[-1]) if name[-1].isdigit() else 1
    else:
        wide = ".WIDE" in name or name.endswith(".64") or name == "CS2R" or name[:2] in ("DA", "DM", "DF")
        count = 4 if ".128" in name else 2 if wide or ".64." in name else 1
    return range(int(found[1]), int(found[1]) + count)


def unordered(code: dict[int, str]) -> list[str]:
    """Find registers of products that are written out of order.

    Register operands of a product, and its sums, must be written before ``WARPGROUP.ARRIVE``, as PTX demands, and
    operands must stay until the wait. Loops are walked twice, so that products in flight at the end of a turn are seen.
    """
    walks = [list(code)]
    for at, what in code.items():
        branch = _BRANCH.match(what)
        if branch and int(branch["to"], 16) <= at:
            body = [each for each in code if int(branch["to"], 16) <= each <= at]
            walks += [body * 2] * any("HGMMA" in code[each] for each in body)
    problems: dict[str, None] = {}
    for walk in walks:
        # since the last arrival; None where no product has been prepared on this way
        since: set[int] | None = None
        open_group: set[int] = set()
        groups: list[set[int]] = []
        for at in walk:
            what = code[at]
            if what.startswith("WARPGROUP.ARRIVE"):
                since = set()
            elif wait := re.match(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x[0-9a-f]+)", what):
                groups = groups[len(groups) - int(wait[1], 16) :] if int(wait[1], 16) < len(groups) else groups
            elif "HGMMA" in what:
                taken = re.match(r"(?:@!?U?P\w+ )?HGMMA\S+ R\d+, R(\d+)", what)
                held = set(range(int(taken[1]), int(taken[1]) + 4)) if taken else set()
                if since is not None and since & (held | ({*written(what)} if ", RZ," not in what else set())):
                    problems[f"{at:#x} {what.strip()}: its registers are written after the arrival before it"] = None
                open_group |= held
                if "gsb0" in what:
                    groups.append(open_group)
                    open_group = set()
            elif re.match(r"(EXIT|BRA|RET)", what):
                since, open_group, groups = None, set(), []
            else:
                results = {*written(what)}
                if results & open_group.union(*groups):
                    problems[f"{at:#x} {what.strip()}: a product under way takes what it writes"] = None
                if since is not None:
                    since |= results
    return [*problems]


def loop_of(code: dict[int, str]) -> Loop:
    """Find the innermost loop that multiplies: of several, for warps of other tasks, the one that costs most."""
    branches = {at: found for at, what in code.items() if (found := _BRANCH.match(what))}
    found: list[Loop] = []
    seen: list[tuple[int, int]] = []
    # an unconditional backward branch returns from a wait that the compiler moved out of the loop
    ends = [(int(b["to"], 16), at) for at, b in branches.items() if b["guard"] or b["also"]]
    for start, stop in sorted(((a, b) for a, b in ends if a <= b), key=lambda each: each[1] - each[0]):
        body = [at for at in code if start <= at <= stop]
        products = [code[at] for at in body if "HGMMA" in code[at]]
        if not products or any(start <= b and a <= stop for a, b in seen):
            continue
        seen.append((start, stop))
        cost = {start: 1}
        for at, after in zip(body, [*body[1:], None], strict=True):
            if at not in cost or after is None:
                continue
            branch = branches.get(at)
            to = [int(branch["to"], 16)] if branch else []
            goes_on = branch is None or branch["guard"] or branch["also"]
            for target in (each for each in [*to, *([after] if goes_on else [])] if at < each <= stop):
                cost[target] = min(cost.get(target, cost[at] + 1), cost[at] + 1)
        narrow = sum("LDGSTS" in code[at] and ".128" not in code[at] for at in body)
        waits = sum("gsb0" in each for each in products)
        found.append(Loop(cost[stop], len(body), len(products), waits, narrow))
    return max(found, key=lambda loop: loop.all)


def compiled_reference(dim: int, listed: bool) -> tuple[Any, int]:
    """Compile a loop to compare with, for 128 queries and the most keys that fit; return it and that number."""
    n = 64 if dim > 128 else 128
    names = reference.arg_names
    constants = {"D": dim, "M": 128, "N": n, "STAGES": 2, "LISTED": listed}
    tiles = dict.fromkeys(("k", "v"), f"tensordesc<bf16[{n},{dim}]>")
    rest = {"q": "*bf16", "out": "*bf16", "col": "*i32", "first": "i32", "last": "i32", "scale": "fp32"}
    signature = {name: "constexpr" if name in constants else (tiles | rest)[name] for name in names}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in ("q", "out", "col")}
    source = ASTSource(reference, signature, {(names.index(name),): x for name, x in constants.items()}, aligned)
    options = {"num_warps": 8, "num_stages": 2, "enable_fp_fusion": True}
    return triton.compile(source, target=TARGETS["sm_90"].triton, options=options), n


def rows(dims: list[int], every: int = 1) -> Iterator[tuple[str, list[str]]]:
    """Yield the lines of the table, or one in so many, each with its faults."""
    loops = itertools.count()
    for dim in dims:
        for listed in (False, True):
            if next(loops) % every:
                continue
            made, n = compiled_reference(dim, listed)
            yield _row("reference", dim, "listed" if listed else "in turn", f"128 x {n}", made, 2)
        for kernel, products in (("forward", 2), ("backward_q", 3), ("backward_kv", 4)):
            for case, shape, terms in CASES:
                if dim != 128 and terms.there:
                    continue
                if shape.dead and kernel == "backward_kv":
                    continue
                if next(loops) % every:
                    continue
                made, blocks = compiled(kernel, dim, "sm_90", shape, terms=terms)
                yield _row(kernel, dim, case, f"{blocks.m} x {blocks.n}", made, products)


def _row(kernel: str, dim: int, case: str, blocks: str, made: Any, products: int) -> tuple[str, list[str]]:
    registers, stack = of_cubin(made.asm["cubin"])
    code = disassembled(made.asm["cubin"])
    parts: list[object] = [kernel, dim, case, blocks, registers, stack]
    most, waits = MEASURED.get((kernel, dim, case), (0, products))
    problems = [f"{kernel}, D {dim}, {case}: {stack} bytes spill"] * (stack > most)
    problems += [f"{kernel}, D {dim}, {case}: {found}" for found in unordered(code)]
    if any("HGMMA" in what for what in code.values()):
        loop = loop_of(code)
        parts += [loop.least, loop.all, loop.products, loop.narrow]
        if loop.waits > waits:
            problems.append(f"{kernel}, D {dim}, {case}: {loop.waits} waits for {products} products of tiles")
    else:
        # fewer than 64 rows are too few for the instructions of a warp group
        parts += ["-"] * 4
    return "| " + " | ".join(map(str, parts)) + " |", problems


_ABOUT = """# What a tile costs in machine code

Written by `python gpu/scripts/machine_code.py`, a part by each compiler; compiled for sm_90, bfloat16, never run.
*full* and *all*: instructions of a warp in one turn of the loop over tiles, past all branches (a tile without a mask)
and in all; *wgmma*: those that multiply matrices; *narrow*: asynchronous copies of fewer than 16 bytes; *stack*: bytes
spilled; -: too few rows for wgmma. *reference*: the forward loop as others write it, over whole tiles in turn
(FlashAttention-2) or of a list (FlexAttention), by the same compiler.
"""
_HEAD = """| kernel | D | case | blocks | registers | stack | full | all | wgmma | narrow |
|---|---|---|---|---|---|---|---|---|---|"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--check", action="store_true", help="compare with the committed table instead of writing it")
    parser.add_argument("--dim", type=int, choices=(64, 128, 256), action="append")
    parser.add_argument("--every", type=int, default=1, help="with --check: one in so many loops")
    asked = parser.parse_args()
    lines, problems = [], []
    for line, wrong in rows(asked.dim or [64, 128, 256], asked.every if asked.check else 1):
        print(line, flush=True)
        lines.append(line)
        problems += wrong
    title = f"## triton {triton.__version__}"
    sections = dict(re.findall(r"^(## triton \S+)\n\n(.*?)(?=\n\n## |\n*\Z)", PAGE.read_text(), re.M | re.S))
    if not asked.check:
        if not asked.dim:
            sections[title] = "\n".join([_HEAD, *lines])
            parts = [f"{name}\n\n{table}\n" for name, table in sorted(sections.items(), reverse=True)]
            PAGE.write_text("\n".join([_ABOUT, *parts]))
    elif title in sections:
        problems += [f"differs from {PAGE.name}: {line}" for line in lines if line not in sections[title].splitlines()]
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
