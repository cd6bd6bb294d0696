"""Compile the Triton kernels for real GPUs, without a GPU, and write a table of the resources that they use.

    python gpu/scripts/kernel_resources.py            write gpu/notes/kernel-resources.md
    python gpu/scripts/kernel_resources.py --check    compare with it: spills and lost tensor instructions fail

Registers, stack and shared memory are read from the compiled binary (cuobjdump of the triton wheel; for ROCm the
metadata of the assembly). The blocks are those that the backend would choose on that device.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import triton
from kernel_shapes import NARROW, PLAIN, STREAMED, TARGETS, WIDE, ScoreTerms, Shape, blocks_of, shapes
from triton.compiler import ASTSource

from ringweave_gpu.triton import kernels, launch
from ringweave_gpu.triton.kernels.score_terms import ALIBI, BIAS, DISTANCE, SOFTCAP
from ringweave_gpu.triton.launch_config import LaunchConfig, Packing, goes_past_masks, padded

TABLE = Path(__file__).parents[1] / "notes" / "kernel-resources.md"
KERNELS = ("forward", "join", "delta", "backward_q", "backward_kv")
DIMS = (64, 128)
# each kind of term, with all that can learn doing so, and dropout
EVERY = ScoreTerms(tuple(kind.value for kind in (SOFTCAP, ALIBI, DISTANCE, BIAS)), drop=True)
# bytes a thread that may spill with another compiler than the table's: 3.6 spills 24 on sm_100, 3.9 56 there
SPARE = 64
# for a kernel, D, a device and a tile: the known spilled bytes, stored before the loop and read after it
SPILLED = {
    ("forward", 64, "sm_80", "128 x 128"): 8,
    # measured on an H200: faster than blocks that spill nothing
    ("backward_kv", 64, "sm_90", "128 x 128"): 216,
    ("backward_kv", 64, "sm_90", "128 x 128, 4 heads"): 240,
    ("backward_kv", 64, "sm_90", "128 x 128, described"): 72,
    ("backward_kv", 64, "sm_90", "128 x 128, 4 heads, described"): 88,
    ("backward_kv", 128, "sm_90", "128 x 128"): 8,
    ("backward_kv", 128, "sm_90", "128 x 128, 4 heads"): 40,
    ("backward_kv", 128, "sm_90", "64 x 64"): 144,
    ("backward_kv", 128, "sm_90", "128 x 128, described"): 16,
    ("backward_kv", 128, "sm_90", "128 x 128, 4 heads, described"): 24,
    ("backward_kv", 128, "sm_90", "64 x 64, described"): 16,
    ("backward_kv", 64, "sm_100", "128 x 128, described"): 16,
    ("backward_kv", 128, "sm_100", "128 x 128, 4 heads, described"): 16,
}

_POINTERS = {
    **dict.fromkeys(("q", "k", "v", "out", "dout", "dq", "dk", "dv", "result"), "*{}"),
    **dict.fromkeys(("lse", "slope", "dlse", "sums", "tops", "key_sums", "value_sums"), "*fp32"),
    **dict.fromkeys(("records", "splits", "col", "bits", "masks", "live"), "*i32"),
    **dict.fromkeys(("row", "bits_t", "masks_t", "live_t", "table", "lengths"), "*i32"),
    **dict.fromkeys(("k_scale", "v_scale"), "*fp32"),
}


@dataclass(frozen=True)
class Resources:
    """The resources of one compiled kernel."""

    kernel: str
    dim: int
    device: str
    tile: str
    blocks: str
    registers: int
    stack: int
    shared: int
    matrix: int

    @property
    def row(self) -> str:
        return "| " + " | ".join(map(str, dataclasses.astuple(self))) + " |"


def compile_kernel(kernel: str, dim: int, name: str, shape: Shape = WIDE, **changes: Any) -> Resources:
    """Compile one kernel as :func:`compiled` does, and return its resources."""
    target = TARGETS[name]
    made, blocks = compiled(kernel, dim, name, shape, **changes)
    label = f"{blocks.m} x {blocks.n}, {blocks.warps} warps, {blocks.stages} stages".replace("1 stages", "1 stage")
    if kernel in ("delta", "join"):
        label = "64 rows, 4 warps" if kernel == "delta" else "1 row, 4 warps"
    assembly = made.asm["amdgcn" if target.hip else "ptx"]
    registers, stack = of_rocm(assembly) if target.hip else of_cubin(made.asm["cubin"])
    # fewer than 64 rows are too few for the instructions of a warp group
    many = target.hip or (blocks.n if kernel == "backward_kv" else blocks.m) >= 64
    matrix = len(re.findall(target.matrix if many else r"mma\.sync", assembly))
    about = "any" if kernel in ("delta", "join") else str(shape)
    return Resources(kernel, dim, name, about, label, registers, stack, made.metadata.shared, matrix)


def compiled(
    kernel: str,
    dim: int,
    name: str,
    shape: Shape = WIDE,
    dtype: str = "bf16",
    value_dim: int | None = None,
    wide_out: bool = False,
    terms: ScoreTerms = PLAIN,
    **changes: object,
) -> tuple[Any, LaunchConfig]:
    """Compile one kernel for one device as the backend would launch it, with the blocks of that.

    Args:
        kernel: One of ``KERNELS``.
        dim: D.
        name: One of ``TARGETS``.
        shape: What for.
        dtype: Of the inputs.
        value_dim: Dv, where it is not D.
        wide_out: Whether results are float32, as for a branch of several.
        terms: Terms and dropout.
        changes: Values of arguments that Triton then treats as constants, as it does with 1.
    """
    value_dim = dim if value_dim is None else value_dim
    target = TARGETS[name]
    function = getattr(kernels, kernel)
    tile, height = shape.tile, (shape.queries or shape.tile[0]) * shape.tiles
    blocks, packing = LaunchConfig(64, 64, 4, 1), Packing(1, 64, 2)
    if kernel in STREAMED:
        blocks = blocks_of(kernel, dim, value_dim, 4 if dtype == "fp32" else 2, shape, name, terms.there)
        packing = Packing.of(blocks.m, height, shape.heads)
    constants = {
        "D": dim, "DV": value_dim, "PAD_D": padded(dim), "PAD_DV": padded(value_dim), "DIM": dim, "PADDED": padded(dim),
        "Q_TILE": tile[0], "KV_TILE": tile[1], "BLOCK_M": blocks.m, "BLOCK_N": blocks.n, "SHARES": launch.SHARES,
        "HEADS": packing.heads, "ROWS": packing.rows, "PARTS": packing.parts, "SPAN": tile[0], "SPLIT": shape.split,
        "TILES": shape.tiles,
        "MASKED": not shape.clear, "RAGGED": not shape.clear, "FOLDED": True, "SLOPED": True,
        "WIDE": False, "WEIGHTED": True, "DESCRIBED": shape.described,
        "DEAD": shape.dead,
        "STEP": 16 if shape.stored else 8, "SHARED": shape.heads > 1, "STAGES": blocks.stages,
        "PRECISION": "ieee", "l_n": 1, "s_n": 1,
    }  # fmt: skip
    constants |= {"TERMS": terms.terms, "SCORED": terms.there, "HOLES": terms.holes}
    branched = kernel in STREAMED and goes_past_masks(
        kernel, blocks, padded(max(dim, value_dim)), TARGETS[name].device, shape.described, shape.heads > 1
    )
    constants["BRANCHED"] = branched
    given = terms.signature()
    constants |= dict.fromkeys((argument for argument, held in given.items() if held is None))
    if "PAGE" not in changes:
        constants |= {"PAGE": 0, **dict.fromkeys(("table", "lengths", "columns"))}
    # Triton compiles a 1 as a constant
    if shape.heads == 1:
        constants["ratio"] = 1
    constants |= changes
    if not shape.stored:
        constants |= dict.fromkeys(("k_scale", "v_scale"))
    names = function.arg_names
    signature, divisible = {}, {}
    for index, argument in enumerate(names):
        own = shape.stored if shape.stored and argument in ("k", "v") else dtype
        # spelled as a call's, so that Triton's cache has one entry for both
        if argument in constants:
            signature[argument], divisible[(index,)] = "constexpr", []
        elif argument in given:
            signature[argument] = given[argument]
            continue
        elif shape.described and argument in STREAMED[kernel]:
            tokens = blocks.m if kernel == "backward_kv" else blocks.n
            channels = padded(value_dim if argument in ("v", "dout") else dim)
            signature[argument] = f"tensordesc<{own}[1, 1, {tokens}, {channels}]>"
            continue
        elif argument in _POINTERS:
            if argument in ("sums", "key_sums", "value_sums") and not shape.split and kernel != "join":
                # the result itself, where there are no partial ones
                signature[argument] = "*fp32" if wide_out else f"*{dtype}"
                divisible[(index,)] = [["tt.divisibility", 16]]
                continue
            held = "fp32" if wide_out and argument in ("out", "dq", "dk", "dv") and kernel != "delta" else own
            signature[argument] = (
                "*fp32" if (kernel, argument) == ("delta", "result") else _POINTERS[argument].format(held)
            )
        else:
            signature[argument] = "fp32" if argument == "scale" else "i32"
        if argument in _POINTERS and argument not in constants:
            divisible[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(
        function, signature, {(names.index(key),): value for key, value in constants.items() if key in names}, divisible
    )
    options = {"num_warps": blocks.warps, "num_stages": blocks.stages, "enable_fp_fusion": True}
    options |= {"maxnreg": blocks.registers} if blocks.registers else {}
    return triton.compile(source, target=target.triton, options=options), blocks


def of_cubin(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of its stack."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", said).groups()  # type: ignore[union-attr]
    return int(registers), int(stack)


def of_rocm(assembly: str) -> tuple[int, int]:
    """Registers of a thread, and bytes of its stack."""

    def value(name: str) -> int:
        return int(re.search(rf"\.{name}:\s*(\d+)", assembly)[1])  # type: ignore[index]

    return value("vgpr_count"), value("private_segment_fixed_size")


def spare() -> int:
    """Return the bytes that may spill: 0 with the compiler of the table."""
    return 0 if f"triton {triton.__version__}." in TABLE.read_text() else SPARE


def faults(found: Resources, room: int = 0) -> list[str]:
    """Return the reasons not to ship a kernel; it may spill ``room`` bytes, or the known number of them."""
    where = f"{found.kernel}, D {found.dim}, {found.device}"
    result = []
    if found.stack > max(room, SPILLED.get((found.kernel, found.dim, found.device, found.tile), 0)):
        result.append(f"{where}: {found.stack} bytes of registers spill to the stack")
    if not found.matrix and found.kernel not in ("delta", "join"):
        result.append(f"{where}: no {TARGETS[found.device].matrix} in the assembly")
    if found.shared > TARGETS[found.device].device.shared:
        result.append(
            f"{where}: {found.shared} bytes of shared memory, the device has {TARGETS[found.device].device.shared}"
        )
    return result


def variants() -> Iterator[Callable[[], Resources]]:
    """Yield compilations of every specialisation, which the interpreter cannot check.

    Every third is each of the first eight once, of one kernel or another.
    """
    for kernel in ("forward", "backward_q", "backward_kv"):
        yield partial(compile_kernel, kernel, 64, "sm_90", NARROW, wide_out=True, MASKED=False, FOLDED=False, WIDE=True)
        yield partial(compile_kernel, kernel, 24, "sm_90", Shape((32, 32), split=True), value_dim=40)
        yield partial(compile_kernel, kernel, 16, "sm_90", Shape((16, 128), heads=2), dtype="fp16")
        yield partial(compile_kernel, kernel, 256, "sm_80", dtype="fp32")
        yield partial(compile_kernel, kernel, 80, "sm_90", Shape(described=True), MASKED=False, RAGGED=False)
        yield partial(compile_kernel, kernel, 512, "sm_90", Shape(described=True))
        yield partial(compile_kernel, kernel, 64, "sm_90", NARROW, terms=EVERY)
    # pages smaller and larger than a block
    yield partial(compile_kernel, "forward", 128, "sm_90", NARROW, PAGE=16)
    yield partial(compile_kernel, "forward", 128, "sm_90", Shape((16, 128), heads=4), PAGE=256)
    # keys and values in 8 bits, in pages too, and of floats their bytes
    yield partial(compile_kernel, "forward", 128, "sm_90", Shape((64, 64), stored="fp8e4nv"), PAGE=16)
    yield partial(compile_kernel, "forward", 128, "sm_80", Shape(stored="u8"))
    yield partial(compile_kernel, "forward", 64, "gfx942", Shape(stored="fp8e4nv"), dtype="fp16")
    yield partial(compile_kernel, "forward", 64, "sm_90", Shape((32, 32), stored="i8"), dtype="fp32")
    yield partial(compile_kernel, "delta", 24, "sm_90", dtype="fp32", SLOPED=False)
    yield partial(compile_kernel, "join", 24, "sm_90", dtype="fp16", WEIGHTED=False)


def page(rows: Iterable[Resources]) -> str:
    """Return the table as committed."""
    return "\n".join(
        [
            "# What the Triton kernels need of a GPU",
            "",
            "Written by `python gpu/scripts/kernel_resources.py`; compiled offline, never run: these are no speeds.",
            f"bfloat16, a plan with partial tiles, triton {triton.__version__}. *blocks*: queries x keys that one",
            "program computes at a time; *registers*: per thread, of 255 (sm) or 512 (gfx942); *stack*: bytes",
            "spilled per thread; *shared*: bytes per program; *matrix*: matrix instructions in the assembly",
            "(mma.sync on sm_80 and of fewer than 64 rows, wgmma on sm_90, tcgen05 on sm_100, mfma on gfx942).",
            "*described*: tiles are loaded by tensor descriptors;",
            "*i8*, *fp8e4nv*: what keys and values are stored in. What spills is stored before the loop and read",
            "after it. Of forward on sm_80, 64 keys at a time or a third stage spill nothing, but have 964 or 912",
            "instructions in the loop for 128 keys instead of 861.",
            "",
            "| kernel | D | device | tile | blocks | registers | stack | shared | matrix |",
            "|---|---|---|---|---|---|---|---|---|",
            *(row.row for row in rows),
            "",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--check", action="store_true", help="compare with the committed table instead of writing it")
    parser.add_argument("--device", choices=list(TARGETS), action="append")
    parser.add_argument("--variants", action="store_true", help="only compile what no row of the table covers")
    parser.add_argument("--every", type=int, default=1, help="one in so many of these")
    parser.add_argument("--kernel", choices=KERNELS, action="append")
    parser.add_argument("--dim", type=int, choices=DIMS, action="append")
    parser.add_argument("--tile", type=int, choices=(16, 64, 128), action="append")
    asked = parser.parse_args()
    if asked.variants:
        for compile_one in islice(variants(), 0, None, asked.every):
            print(compile_one().row, flush=True)
        return 0
    rows = []
    for kernel in asked.kernel or KERNELS:
        for dim in asked.dim or DIMS:
            for device in asked.device or TARGETS:
                for shape in shapes(kernel, dim, device):
                    if asked.tile and shape.tile[0] not in asked.tile:
                        continue
                    rows.append(compile_kernel(kernel, dim, device, shape))
                    print(rows[-1].row, flush=True)
    problems = [fault for row in rows for fault in faults(row, spare() if asked.check else 0)]
    if asked.check:
        # other compilers count registers in another way
        committed = [row.row for row in rows] if spare() else TABLE.read_text().splitlines()
        problems += [f"differs from {TABLE.name}: {row.row}" for row in rows if row.row not in committed]
    elif not (asked.kernel or asked.dim or asked.device or asked.tile):
        TABLE.parent.mkdir(exist_ok=True)
        TABLE.write_text(page(rows))
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
