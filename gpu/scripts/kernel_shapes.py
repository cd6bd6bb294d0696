"""Shapes of work, and devices, that kernel_resources.py compiles the Triton kernels for."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from triton.backends.compiler import GPUTarget

from ringweave_gpu.triton.kernels.score_terms import ALIBI, BIAS, DISTANCE, SOFTCAP
from ringweave_gpu.triton.launch_config import Device, LaunchConfig, Traits, launch_config_for


@dataclass(frozen=True)
class Shape:
    """A shape of work: a plan's tile, heads that share keys and lists, the number of queries, and tiles in a row."""

    tile: tuple[int, int] = (128, 128)
    heads: int = 1
    queries: int = 0
    tiles: int = 1
    split: bool = False
    clear: bool = False
    described: bool = False
    dead: bool = False  # whether tiles may have keys that no query attends
    stored: str = ""  # 8-bit type of stored keys and values: i8, fp8e4nv, or u8 for its bytes; else empty

    def __str__(self) -> str:
        said = [f"{self.tile[0]} x {self.tile[1]}"]
        said += [f"{self.heads} heads"] * (self.heads > 1)
        said += [f"{self.queries} query"] * (self.queries == 1)
        said += [f"{self.tiles} tiles"] * (self.tiles > 1)
        said += ["split"] * self.split + ["no masks"] * self.clear
        said += ["described"] * self.described + ["dead keys"] * self.dead
        said += [self.stored] * bool(self.stored)
        return ", ".join(said)


WIDE, NARROW = Shape(), Shape((64, 64))
DECODING = Shape((16, 128), heads=8, queries=1, split=True)
SHAPES = {
    "forward": (WIDE, NARROW, Shape((64, 64), heads=4), Shape((64, 64), tiles=2), DECODING),
    "join": (WIDE,),
    "delta": (WIDE,),
    "backward_q": (WIDE, NARROW, Shape((64, 64), heads=4), Shape((64, 64), tiles=2)),
    "backward_kv": (WIDE, Shape(heads=4), NARROW),
}
# tensors that a kernel streams, by descriptors where a device has them
STREAMED = {"forward": ("k", "v"), "backward_q": ("k", "v"), "backward_kv": ("q", "dout")}
# a shape with block sizes of its own
CLEAR = Shape(clear=True, described=True)
# Triton's names of the 8-bit types
STORED = ("i8", "fp8e4nv")


@dataclass(frozen=True)
class Target:
    """A compilation target."""

    triton: GPUTarget
    device: Device
    matrix: str  # pattern of its matrix instructions in the assembly

    @property
    def hip(self) -> bool:
        return self.triton.backend == "hip"


TARGETS = {
    "sm_80": Target(GPUTarget("cuda", 80, 32), Device.of_cuda(8, 163 * 1024), r"mma\.sync"),
    "sm_90": Target(GPUTarget("cuda", 90, 32), Device.of_cuda(9, 227 * 1024), r"wgmma\.mma_async"),
    "sm_100": Target(GPUTarget("cuda", 100, 32), Device.of_cuda(10, 227 * 1024), r"tcgen05\.mma"),
    "gfx942": Target(GPUTarget("hip", "gfx942", 64), Device("cdna", 64 * 1024), r"v_mfma_f32"),
}


@dataclass(frozen=True)
class ScoreTerms:
    """The terms of a call by the kinds of kernels.score_terms, and dropout."""

    terms: tuple[int, ...] | None = None
    drop: bool = False

    @property
    def there(self) -> bool:
        return self.terms is not None or self.drop

    @property
    def holes(self) -> bool:
        return any(kind in (DISTANCE.value, BIAS.value) for kind in self.terms or ())

    def signature(self) -> dict[str, object]:
        """Return the types of a kernel's arguments."""
        found: dict[str, object] = dict.fromkeys(("places", "tables", "numbers", "drop"))
        if self.there:
            found["places"] = ("*i64",) * 4
        if self.drop:
            found["drop"] = ("i32",) * 5 + ("fp32",)
        if self.terms is not None:
            numbers = {SOFTCAP.value: ("fp32",), ALIBI.value: (), DISTANCE.value: ("i32",), BIAS.value: ("i32",) * 4}
            held = {SOFTCAP.value: (), ALIBI.value: ("*fp32",), DISTANCE.value: ("*fp32",), BIAS.value: ("*bf16",)}
            found["numbers"] = tuple(numbers[kind] for kind in self.terms)
            found["tables"] = tuple(held[kind] for kind in self.terms)
        return found


PLAIN = ScoreTerms()


def shapes(kernel: str, dim: int, name: str) -> list[Shape]:
    """Return the shapes to compile a kernel for on one device."""
    found = list(SHAPES[kernel])
    if kernel in STREAMED:
        # a few queries are computed by addresses on every device
        many = [shape for shape in found if shape.queries != 1]
        many = [dataclasses.replace(shape, described=True) for shape in many]
        found += [shape for shape in many if blocks_of(kernel, dim, dim, 2, shape, name).described]
    found += [CLEAR] * (kernel == "backward_kv" and dim == 256 and name == "sm_90")
    if kernel == "forward" and name == "sm_90":
        found += [dataclasses.replace(shape, stored=stored) for shape in (WIDE, DECODING) for stored in STORED]
    return found


def blocks_of(
    kernel: str, dim: int, value_dim: int, itemsize: int, shape: Shape, name: str, scored: bool = False
) -> LaunchConfig:
    """Return the launch configuration that the backend would choose."""
    rows = (shape.queries or shape.tile[0]) * shape.heads * shape.tiles
    tile = (shape.tile[0] if kernel == "backward_kv" else max(16, rows), shape.tile[1])
    device, described = TARGETS[name].device, shape.described
    return launch_config_for(kernel, dim, value_dim, itemsize, tile, device, Traits(shape.clear, scored, described))
