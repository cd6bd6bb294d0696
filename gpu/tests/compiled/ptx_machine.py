"""The machine that emulated PTX runs on: memory, barriers, asynchronous copies and products, and warps. See ptx_emulator.py.

What a device would leave to chance is an error: see :class:`Shared`.
"""

from __future__ import annotations

import ctypes
import functools
from collections import deque
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Steps = Generator[str, None, Any]
U1, U2, U4, U8, F4, F8 = np.uint8, np.uint16, np.uint32, np.uint64, np.float32, np.float64
TYPES = {
    "b8": U1, "u8": U1, "b16": U2, "u16": U2, "s16": np.int16, "f16": np.float16, "b32": U4, "u32": U4, "s32": np.int32,
    "f32": F4, "b64": U8, "u64": U8, "s64": np.int64, "f64": F8, "pred": np.bool_,
}  # fmt: skip
#: where shared memory begins, as programs see it
BASE = 1024


class PtxError(Exception):
    """A program performs a forbidden operation, or has an unknown instruction."""


_PENDING = "a register is read that wgmma is still to write"


class Pending:
    """The content of a register that wgmma has not written yet."""

    def __array__(self, *_: object, **__: object) -> Array:
        raise PtxError(_PENDING)

    def __getattr__(self, name: str) -> object:
        # doctest and the like look at everything in a module
        raise AttributeError(name) if name.startswith("__") else PtxError(_PENDING)


PENDING = Pending()


# --- memory


class Memory:
    """Global memory: the parts of this process's that a program was given."""

    def __init__(self) -> None:
        self.parts: dict[int, Array] = {}

    def give(self, address: int, size: int) -> None:
        """Let programs use ``size`` bytes from an address on."""
        if size and (address not in self.parts or len(self.parts[address]) < size):
            self.parts[address] = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))

    def part(self, low: int, high: int) -> tuple[int, Array]:
        for base, part in self.parts.items():
            if base <= low and high <= base + len(part):
                return base, part
        raise PtxError(f"global memory from {low:#x} to {high:#x} belongs to nothing that was passed")

    def _each(self, address: Array, width: int) -> Iterable[tuple[Array, Array, Array]]:
        """(part, which accesses, their bytes in it)."""
        if (address % width).any():
            raise PtxError(f"an access of {width} bytes to global memory is not aligned")
        left = np.ones(len(address), np.bool_)
        while left.any():
            first = int(address[left][0])
            base, part = self.part(first, first + width)
            here = left & (address >= base) & (address + width <= base + len(part))
            yield part, here, (address[here] - base).astype(np.int64)[:, None] + np.arange(width)
            left &= ~here

    def load(self, address: Array, width: int) -> Array:
        """(n, width) bytes of (n,) addresses."""
        found = np.empty((len(address), width), U1)
        for part, here, at in self._each(address, width):
            found[here] = part[at]
        return found

    def store(self, address: Array, data: Array) -> None:
        for part, here, at in self._each(address, data.shape[1]):
            part[at] = data[here]


class Shared:
    """Shared memory of a program, and who may touch which word of it when.

    Clocks are vectors: a warp knows about another one's progress only through barriers. Errors are: reading bytes that were
    never written; any access to the target of an unfinished asynchronous copy; writing an operand of an unfinished wgmma;
    accesses of two warps, one of them a write, without a barrier between; and an asynchronous read (wgmma) of bytes from
    ordinary stores without a proxy fence.
    """

    def __init__(self, size: int, warps: int):
        self.bytes = np.full(size + -size % 16, 0xFF, U1)
        words = len(self.bytes) // 4
        # the last of these warps is TMA
        self.clock = np.eye(warps + 1, dtype=np.int64)
        self.writer, self.written = np.zeros(words, np.int64), np.zeros(words, np.int64)
        self.read = np.zeros((warps + 1, words), np.int64)
        self.landing, self.reading = np.zeros(words, np.int64), np.zeros(words, np.int64)
        self.unfenced = np.zeros(words, np.bool_)

    def words(self, address: Array, width: int) -> Array:
        """(n, words) of (n,) addresses."""
        at = address.astype(np.int64) - BASE
        if (at < 0).any() or (at + width > len(self.bytes)).any() or (at % width).any():
            raise PtxError(f"an access of {width} bytes to shared memory lies outside it or is not aligned")
        return at[:, None] // 4 + np.arange(max(1, width // 4))

    def _before(self, words: Array, warp: Array, what: str) -> None:
        if self.landing[words].any():
            raise PtxError(f"{what} shared memory that an asynchronous copy is still to write")
        if (self.written[words] > self.clock[warp, self.writer[words]]).any():
            raise PtxError(f"{what} shared memory that another warp wrote, with no barrier between")

    def reads(self, words: Array, warp: Array, asynchronous: bool = False) -> None:
        self._before(words, warp, "reading")
        if not self.written[words].all():
            raise PtxError("reading shared memory that was never written")
        if asynchronous and self.unfenced[words].any():
            raise PtxError("an asynchronous read of shared memory that was written without a proxy fence since")
        self.read[np.broadcast_to(warp, words.shape), words] = self.clock[warp, warp]

    def may_write(self, words: Array, warp: Array) -> None:
        self._before(words, warp, "writing")
        if self.reading[words].any():
            raise PtxError("writing shared memory that wgmma may still read")
        knows = self.clock[np.broadcast_to(warp, words.shape)]
        if (self.read[:, words] > np.moveaxis(knows, -1, 0)).any():
            raise PtxError("writing shared memory that another warp read, with no barrier between")

    def writes(self, words: Array, warp: Array, asynchronous: bool = False) -> None:
        self.writer[words], self.written[words] = warp, self.clock[warp, warp]
        self.unfenced[words] = not asynchronous

    def fence(self, warps: Array) -> None:
        """What these warps wrote, or know of, may be read asynchronously."""
        for warp in warps:
            self.unfenced &= self.written > self.clock[warp, self.writer]

    def load(self, address: Array, width: int, warp: Array) -> Array:
        self.reads(self.words(address, width), warp[:, None])
        return self.bytes[(address.astype(np.int64) - BASE)[:, None] + np.arange(width)]

    def store(self, address: Array, data: Array, warp: Array) -> None:
        at = (address.astype(np.int64) - BASE)[:, None] + np.arange(data.shape[1])
        words = self.words(address, data.shape[1])
        # warps that hold the same rows store the same bytes in the same place
        other = (self.bytes[at] != data).any(1) | self.landing[words].any(1) | (self.written[words] == 0).any(1)
        address, data, warp, words = address[other], data[other], warp[other], words[other]
        self.may_write(words, warp[:, None])
        self.bytes[(address.astype(np.int64) - BASE)[:, None] + np.arange(data.shape[1])] = data
        self.writes(words, warp[:, None])

    def meet(self, warps: Array) -> None:
        """These warps have met at a barrier."""
        self.clock[warps] = self.clock[warps].max(0)
        self.clock[warps, warps] += 1


def swizzled(address: Array, span: int) -> Array:
    """Return the swizzled address of a byte in rows of ``span`` bytes; 16 does not swizzle."""
    return address ^ (address >> 3 & (span // 16 - 1) << 4)


#: of a tensor map as it is laid out here, by field: (byte, bytes of one)
FIELDS = {
    "global_address": (0, 8), "global_dim": (8, 4), "global_stride": (32, 8), "box_dim": (64, 4), "elemtype": (84, 4),
    "rank": (88, 4), "swizzle_mode": (92, 4),
}  # fmt: skip


@dataclass
class TensorMap:
    """A tensor map as libcuda.c and tensormap.replace lay it out here; the device's own layout is a secret."""

    address: int
    dims: list[int]
    strides: list[int]
    box: list[int]
    size: int
    span: int

    @staticmethod
    def of(data: bytes) -> TensorMap:
        def at(name: str, index: int = 0) -> int:
            start, size = FIELDS[name]
            return int.from_bytes(data[start + index * size : start + (index + 1) * size], "little")

        rank = at("rank") + 1
        dims, strides, box = (
            [at(n, i) for i in range(rank - (n == "global_stride"))] for n in ("global_dim", "global_stride", "box_dim")
        )
        found = TensorMap(
            at("global_address"),
            dims,
            strides,
            box,
            at("elemtype"),
            16 << at("swizzle_mode") if at("swizzle_mode") else 16,
        )
        if found.address % 16 or any(x % 16 for x in strides) or not all(dims) or not all(box) or not found.size:
            raise PtxError(f"a tensor map that no device takes: {found}")
        if found.span > 16 and box[0] * found.size > found.span:
            raise PtxError(f"a box wider than its swizzle: {found}")
        return found

    @property
    def bytes(self) -> int:
        return int(np.prod(self.box)) * self.size

    def load(self, memory: Memory, at: list[int]) -> Array:
        """The box at a place, (rows, bytes); zeros outside the tensor."""
        address, inside = np.zeros(1, np.int64) + self.address, np.ones(1, np.bool_)
        for start, dim, box, stride in reversed(
            list(zip(at, self.dims, self.box, [self.size, *self.strides], strict=True))
        ):
            place = start + np.arange(box)
            address = (address[:, None] + place * stride).reshape(-1)
            inside = (inside[:, None] & (place >= 0) & (place < dim)).reshape(-1)
        data = np.zeros((len(address), self.size), U1)
        data[inside] = memory.load(address[inside].astype(U8), self.size)
        return data.reshape(-1, self.box[0] * self.size)

    def places(self, to: int) -> Array:
        """Where a box's bytes lie in shared memory, (rows, bytes)."""
        return swizzled(to + np.arange(self.bytes), self.span).reshape(-1, self.box[0] * self.size)


@functools.lru_cache(maxsize=4096)
def tile_of(descriptor: int, rows: tuple[int, ...], transposed: bool) -> Array:
    """Where 16-bit elements (rows, 16) of an operand of wgmma lie, as its descriptor says; transposed: rows are adjacent."""

    def bits(low: int, n: int) -> int:
        return descriptor >> low & (1 << n) - 1

    start, leading, stride = (bits(low, 14) * 16 for low in (0, 16, 32))
    span = {0: 16, 1: 128, 2: 64, 3: 32}[bits(62, 2)]
    if bits(49, 3) or (transposed and span == 16):
        raise PtxError(f"a descriptor of wgmma of a kind that is not known: {descriptor:#x}")
    row, k = np.array(rows)[:, None], np.arange(16)
    if transposed:
        wide = span // 2
        at = row % wide * 2 + k % 8 * span + row // wide * leading + k // 8 * stride
    else:
        inner = k % 8 * 2 + k // 8 * leading if span == 16 else k * 2
        at = row % 8 * span + row // 8 * stride + inner
    return swizzled(start + at, span)


def decoded(data: Array, kind: str) -> Array:
    """16-bit numbers as float32."""
    return (data.astype(U4) << 16).view(F4) if kind == "bf16" else data.view(np.float16).astype(F4)


def encoded(x: Array, kind: str) -> Array:
    """float32 rounded to 16 bits."""
    if kind == "f16":
        return x.astype(np.float16).view(U2)
    bits = x.view(U4)
    return np.where(np.isnan(x), U4(0x7FFF), bits + U4(0x7FFF) + (bits >> 16 & U4(1)) >> 16).astype(U2)


def rows_of(registers: list[Array]) -> Array:
    """Accumulators of (warps x 32,) float32 as matrices (warps, 16, 2 x registers)."""
    parts = np.stack(registers).reshape(len(registers) // 4, 2, 2, -1, 8, 4)
    return parts.transpose(3, 1, 4, 0, 5, 2).reshape(parts.shape[3], 16, -1)


def registers_of(rows: Array) -> Array:
    """The inverse, (registers, warps x 32)."""
    parts = rows.reshape(len(rows), 2, 8, -1, 4, 2).transpose(3, 1, 5, 0, 2, 4)
    return parts.reshape(-1, len(rows) * 32)


def left_of(registers: list[Array], kind: str) -> Array:
    """Four registers of pairs as matrices (warps, 16, 16)."""
    parts = np.stack(registers).view(U2).reshape(2, 2, -1, 8, 4, 2).transpose(2, 1, 3, 0, 4, 5)
    return decoded(parts.reshape(len(parts), 16, 16), kind)


# --- a program (CTA) and its warps


@dataclass
class Barrier:
    """An mbarrier; ``copies`` are still to land."""

    count: int
    pending: int
    bytes: int = 0
    phase: int = 0
    copies: list[Callable[[], None]] = field(default_factory=list)
    clock: Array | None = None

    def turn(self) -> None:
        if self.pending < 0:
            raise PtxError("more arrivals at an mbarrier than it counts")
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = self.phase ^ 1, self.count


class Cta:
    """One program: shared memory and barriers."""

    def __init__(self, memory: Memory, shared: int, threads: int, late: bool, formal: bool):
        self.memory, self.late, self.threads, self.formal = memory, late, threads, formal
        self.shared = Shared(shared, threads // 32)
        self.barriers: dict[int, Barrier] = {}
        self.meetings: dict[int, list[Any]] = {}
        self.progress = 0

    def barrier(self, address: int) -> Barrier:
        if address not in self.barriers:
            raise PtxError(f"no mbarrier at {address}")
        return self.barriers[address]

    def copy(self, warp: int, to: int, tensor: TensorMap, at: list[int], barrier: Barrier) -> None:
        """Start a copy of a box."""
        places, tma = tensor.places(to), len(self.shared.clock) - 1
        words = np.unique(places // 4) - BASE // 4
        if to % 128 or words[-1] >= len(self.shared.written):
            raise PtxError(f"TMA to {to}: outside of shared memory, or not aligned")
        self.shared.may_write(words, np.array(warp))
        self.shared.landing[words] += 1

        def land() -> None:
            self.shared.bytes[places - BASE] = tensor.load(self.memory, at)
            self.shared.landing[words] -= 1
            self.shared.clock[tma, tma] += 1
            self.shared.writes(words, np.array(tma), asynchronous=True)
            self.arrive(barrier, tma, 0, -tensor.bytes)

        if self.late:
            barrier.copies.append(land)
        else:
            land()

    def arrive(self, barrier: Barrier, warp: int, count: int, more: int = 0) -> None:
        """Arrive as one warp does, and expect some bytes more."""
        known = self.shared.clock[warp]
        barrier.clock = known.copy() if barrier.clock is None else np.maximum(barrier.clock, known)
        self.shared.clock[warp, warp] += 1
        barrier.bytes += more
        barrier.pending -= count
        barrier.turn()
        self.progress += 1

    def done(self, barrier: Barrier, parity: int, warps: Array) -> bool:
        """Whether a phase is over; then these warps know what those that arrived did."""
        copies, barrier.copies = barrier.copies, []
        for land in copies:
            land()
        if barrier.phase == parity:
            return False
        if barrier.clock is not None:
            self.shared.clock[warps] = np.maximum(self.shared.clock[warps], barrier.clock)
        return True

    def meet(self, number: int, threads: int, warps: Array) -> Steps:
        """bar.sync."""
        meeting = self.meetings.setdefault(number, [[], 0])
        generation = meeting[1]
        meeting[0] += warps.tolist()
        if len(meeting[0]) * 32 == threads:
            self.shared.meet(np.array(meeting[0]))
            meeting[:] = [[], generation + 1]
            self.progress += 1
        if len(meeting[0]) * 32 > threads:
            raise PtxError(f"more warps at barrier {number} than it is for")
        while meeting[1] == generation:
            yield f"barrier {number}"


@dataclass
class Product:
    """A wgmma under way."""

    registers: tuple[int, ...]
    held: list[tuple[int, Array]]  # registers that it reads
    words: list[Array]  # of shared memory that it reads
    compute: Callable[[], Array]
    result: Array | None = None


class Warps:
    """Some warps of a program that take each step together, and their registers."""

    def __init__(self, cta: Cta, warps: Array, special: dict[str, int], registers: int):
        self.cta, self.warps, self.lanes = cta, warps, len(warps) * 32
        self.warp = np.repeat(warps, 32)
        self.lane = np.tile(np.arange(32), len(warps))
        self.special = {name: np.full(self.lanes, value, U4) for name, value in special.items()}
        self.special |= {"tid.x": (self.warp * 32 + self.lane).astype(U4), "laneid": self.lane.astype(U4)}
        self.R: list[Any] = [None] * registers
        self.fenced: list[Any] = [None] * registers
        self.copies: list[tuple[Array, Array, Callable[[], None]]] = []
        self.copied: deque[list[tuple[Array, Array, Callable[[], None]]]] = deque()
        self.products: list[Product] = []
        self.multiplied: deque[list[Product]] = deque()
        self.finished: dict[tuple[int, ...], Array] = {}
        self.parameters: dict[str, int] = {}

    def run(self, blocks: list[tuple[Callable[..., Any], Callable[..., Any]]]) -> Steps:
        """Run to the end; of lanes that went apart, those furthest behind go first."""
        left: dict[int, Array | None] = {0: None}
        while left:
            at = min(left)
            mask = left.pop(at)
            if mask is not None and mask.all():
                mask = None
            went = yield from blocks[at][mask is not None](self, self.R, mask)
            for to, lanes in went:
                if to in left and lanes is not None:
                    before = left[to]
                    lanes = None if before is None else before | lanes
                left[to] = lanes

    def parameter(self, name: str, offset: int, kind: Any) -> Array:
        at = self.parameters[name] + offset
        return np.full(self.lanes, np.frombuffer(ctypes.string_at(at, np.dtype(kind).itemsize), kind)[0])

    def active(self, mask: Array | None) -> Array:
        return np.arange(self.lanes) if mask is None else np.flatnonzero(mask)

    def whole(self, mask: Array | None) -> Array:
        """The warps of a mask, for what whole warps do."""
        if mask is None:
            return self.warps
        by_warp = mask.reshape(-1, 32)
        if (by_warp.any(1) != by_warp.all(1)).any():
            raise PtxError("part of a warp does what a whole warp must do")
        return self.warps[by_warp.any(1)]

    def load(self, shared: bool, address: Array, size: int, count: int, mask: Array | None) -> Array:
        """(count, lanes) of elements of ``size`` bytes."""
        on = self.active(mask)
        data = np.zeros((self.lanes, size * count), U1)
        if len(on) and shared:
            data[on] = self.cta.shared.load(address[on], size * count, self.warp[on])
        elif len(on):
            data[on] = self.cta.memory.load(address[on], size * count)
        found = data.view({1: U1, 2: U2, 4: U4, 8: U8}[size]).T
        return found.astype(U2) if size == 1 else found

    def store(self, shared: bool, address: Array, values: list[Array], size: int, mask: Array | None) -> None:
        on = self.active(mask)
        if not len(on):
            return
        values = [each.astype(U1) if size == 1 else each for each in values]
        data = np.ascontiguousarray(np.stack(values, 1)[on]).view(U1)
        if shared:
            self.cta.shared.store(address[on], data, self.warp[on])
        else:
            self.cta.memory.store(address[on], data)

    def add(self, address: Array, value: Array, mask: Array | None) -> Array:
        """Add atomically, lane by lane, and return the values from before."""
        before = np.zeros_like(value)
        for lane in self.active(mask):
            at = address[lane : lane + 1]
            old = self.cta.memory.load(at, value.itemsize).view(value.dtype)[:, 0]
            before[lane] = old[0]
            self.cta.memory.store(at, (old + value[lane]).astype(value.dtype).view(U1)[None])
        return before

    # copies of each lane

    def copy(self, to: Array, source: Array, size: int, given: Array, mask: Array | None) -> None:
        """cp.async."""
        on = self.active(mask)
        shared = self.cta.shared
        words, warp = shared.words(to[on], size), self.warp[on][:, None]
        shared.may_write(words, warp)
        shared.landing[words] += 1

        def land() -> None:
            data = np.zeros((len(on), size), U1)
            for many in np.unique(given[on]):
                these = given[on] == many
                if many:
                    data[these, :many] = self.cta.memory.load(source[on][these], int(many))
            shared.bytes[(to[on].astype(np.int64) - BASE)[:, None] + np.arange(size)] = data

        if not self.cta.late:
            land()
        self.copies.append((words, warp, land if self.cta.late else lambda: None))

    def commit_copies(self) -> None:
        self.copied.append(self.copies)
        self.copies = []

    def wait_copies(self, left: int) -> None:
        while len(self.copied) > left:
            for words, warp, land in self.copied.popleft():
                land()
                self.cta.shared.landing[words] -= 1
                self.cta.shared.writes(words, warp, asynchronous=not self.cta.formal)

    # matrix products

    def wgmma(
        self, registers: tuple[int, ...], kind: str, left: Any, right: Array, keep: Array, flips: tuple[bool, bool]
    ) -> None:
        """wgmma.mma_async of 16 k; ``left``: four registers, or a descriptor in each lane."""
        shared, now = self.cta.shared, self.R
        open_ones = [*(each for group in self.multiplied for each in group), *self.products]
        last = next((each for each in reversed(open_ones) if each.registers == registers), None)
        goes_on = bool(keep.all())
        if keep.any() != goes_on:
            raise PtxError("lanes of wgmma differ in whether they keep what was there")
        held = [] if isinstance(left, np.ndarray) else [(at, now[at]) for at in left]
        for at in [*(() if last or not goes_on else registers), *(at for at, _ in held)]:
            if self.fenced[at] is not now[at]:
                raise PtxError("wgmma on registers that were written since the last wgmma.fence")
        n, groups = len(registers) * 2, self.warps // 4
        places: list[Array] = []

        def tiles(descriptor: Array, of_rows: bool, flip: bool) -> list[Array]:
            found = []
            for index, warp in enumerate(self.warps):
                said = np.unique(descriptor[self.warp // 4 == groups[index]])
                if len(said) > 1:
                    raise PtxError("lanes of wgmma differ in its descriptor")
                rows = range(warp % 4 * 16, warp % 4 * 16 + 16) if of_rows else range(n)
                found.append(tile_of(int(said[0]), tuple(rows), flip))
                places.append(found[-1])
            return found

        of_left = tiles(left, True, flips[0]) if isinstance(left, np.ndarray) else None
        of_right = tiles(right, False, flips[1])
        values = left_of([value for _, value in held], kind) if held else None
        words = []
        for index, at in enumerate(places):
            here = np.unique(at // 4) - BASE // 4
            if here[0] < 0 or here[-1] >= len(shared.written):
                raise PtxError("wgmma reads outside of shared memory")
            shared.reads(here, np.array(self.warps[index % len(self.warps)]), asynchronous=True)
            shared.reading[here] += 1
            words.append(here)

        def gather(at: Array) -> Array:
            return decoded(shared.bytes.view(U2)[(at - BASE) // 2], kind)

        before = rows_of([now[at].view(F4) for at in registers]) if goes_on and last is None else None

        def compute() -> Array:
            a = values if of_left is None else np.stack([gather(at) for at in of_left])
            same = all(at is of_right[0] for at in of_right)
            b = gather(of_right[0])[None] if same else np.stack([gather(at) for at in of_right])
            product = a @ b.transpose(0, 2, 1)  # type: ignore[operator]
            if not goes_on:
                return product
            return product + (before if last is None else last.result)

        made = Product(registers, held, words, compute)
        if not self.cta.late:
            made.result = compute()
        self.products.append(made)
        for at in registers:
            now[at] = PENDING

    def commit_products(self) -> None:
        self.multiplied.append(self.products)
        self.products = []

    def wait_products(self, left: int) -> None:
        while len(self.multiplied) > left:
            for product in self.multiplied.popleft():
                if any(self.R[at] is not value for at, value in product.held):
                    raise PtxError("a register that wgmma reads was written before a wait for it")
                if product.result is None:
                    product.result = product.compute()
                for index, words in enumerate(product.words):
                    warp = self.warps[index % len(self.warps)]
                    self.cta.shared.reading[words] -= 1
                    self.cta.shared.read[warp, words] = self.cta.shared.clock[warp, warp]
                open_ones = [*(each for group in self.multiplied for each in group), *self.products]
                self.finished[product.registers] = product.result
                if any(set(each.registers) & set(product.registers) for each in open_ones):
                    del self.finished[product.registers]
        for registers, result in self.finished.items():
            if any(self.R[at] is not PENDING for at in registers):
                raise PtxError("a register that wgmma writes was written before a wait for it")
            for at, value in zip(registers, registers_of(result), strict=True):
                self.R[at] = value.view(U4)
        self.finished.clear()

    def mma(self, kind: str, left: list[Array], right: list[Array], sums: list[Array]) -> Array:
        """mma.sync.m16n8k16."""
        b = np.stack(right).view(U2).reshape(2, -1, 8, 4, 2).transpose(1, 0, 3, 4, 2)
        b = decoded(b.reshape(len(b), 16, 8), kind)
        result = left_of(left, kind) @ b + rows_of([each.view(F4) for each in sums])
        return registers_of(result).view(U4)

    def load_matrices(self, address: Array, count: int, flip: bool) -> Array:
        """ldmatrix of ``count`` 8 x 8 matrices, (count, lanes)."""
        at = address.reshape(-1, 32)[:, : 8 * count].reshape(-1)
        data = self.cta.shared.load(at, 16, np.repeat(self.warps, 8 * count)).view(U2).reshape(-1, count, 8, 8)
        data = np.ascontiguousarray(data.transpose(0, 1, 3, 2) if flip else data)
        return data.view(U4).transpose(1, 0, 2, 3).reshape(count, -1)

    def store_matrices(self, address: Array, values: list[Array], flip: bool) -> None:
        count = len(values)
        data = np.ascontiguousarray(np.stack(values).reshape(count, -1, 8, 4).transpose(1, 0, 2, 3)).view(U2)
        data = np.ascontiguousarray(data.transpose(0, 1, 3, 2) if flip else data).reshape(-1, 8).view(U1)
        at = address.reshape(-1, 32)[:, : 8 * count].reshape(-1)
        self.cta.shared.store(at, data, np.repeat(self.warps, 8 * count))

    def shuffle(self, mode: str, value: Array, by: Array, clamp: Array) -> Array:
        if (clamp & U4(31) != U4(0 if mode == "up" else 31)).any() or (clamp >> 8).any():
            raise PtxError("a shuffle within parts of a warp")
        lane, by = self.lane, by.astype(np.int64)
        to = {"bfly": lane ^ by, "idx": by & 31, "up": lane - by, "down": lane + by}[mode]
        to = np.where((to < 0) | (to > 31), lane, to)
        return value[np.arange(self.lanes) - lane + to]

    # barriers, and what one lane does for all

    def meet(self, number: int, threads: int, mask: Array | None) -> Steps:
        yield from self.cta.meet(number, threads or self.cta.threads, self.whole(mask))

    def barrier_init(self, address: Array, count: int, mask: Array | None) -> None:
        for lane in self.active(mask):
            at = int(address[lane])
            self.cta.barriers[at] = Barrier(count, count)
            words = self.cta.shared.words(address[lane : lane + 1], 8)
            self.cta.shared.may_write(words, self.warp[lane : lane + 1, None])
            self.cta.shared.writes(words, self.warp[lane : lane + 1, None])

    def barrier_inval(self, address: Array, mask: Array | None) -> None:
        for lane in self.active(mask):
            if self.cta.barrier(int(address[lane])).copies:
                raise PtxError("an mbarrier ends while copies are under way")
            del self.cta.barriers[int(address[lane])]

    def arrive(self, address: Array, count: int, more: Array | None, mask: Array | None) -> None:
        for lane in self.active(mask):
            expected = 0 if more is None else int(more[lane])
            self.cta.arrive(self.cta.barrier(int(address[lane])), int(self.warp[lane]), count, expected)

    def try_wait(self, address: Array, parity: Array, mask: Array | None) -> Steps:
        """Return the lanes with a completed phase; let other warps run while all lanes wait."""
        over = np.zeros(self.lanes, np.bool_)
        on = np.zeros(self.lanes, np.bool_)
        on[self.active(mask)] = True
        # compiled code gives -1 for 1; the device looks at the lowest bit
        parity = parity & U4(1)
        for at, which in {(int(address[x]), int(parity[x])) for x in np.flatnonzero(on)}:
            these = on & (address == at) & (parity == which)
            over[these] = self.cta.done(self.cta.barrier(at), which, np.unique(self.warp[these]))
        if not over[on].any():
            yield f"mbarrier {int(address[on][0])}, parity {int(parity[on][0])}"
        return over

    def tma(self, to: Array, tensor: Array, at: list[Array], barrier: Array, mask: Array | None) -> None:
        for lane in self.active(mask):
            found = TensorMap.of(ctypes.string_at(int(tensor[lane]), 128))
            coordinates = [int(each[lane].view(np.int32)) for each in at]
            where = self.cta.barrier(int(barrier[lane]))
            self.cta.copy(int(self.warp[lane]), int(to[lane]), found, coordinates, where)

    def replace(self, name: str, address: Array, index: int, value: Array, mask: Array | None) -> None:
        """tensormap.replace."""
        if name in ("element_stride", "interleave_layout", "fill_mode"):
            if (value != (name == "element_stride")).any():
                raise PtxError(f"tensormap.replace of {name} by what is not known here")
            return
        start, size = FIELDS[name]
        if name == "elemtype":
            value = np.array([1, 2, 4, 4, 8, 8, 2, 4, 4, 8, 2])[value]
        self.store(
            True, address.astype(U4) + U4(start + index * size), [value.astype(U8 if size == 8 else U4)], size, mask
        )

    def publish(self, to: Array, source: Array, mask: Array | None) -> None:
        """tensormap.cp_fenceproxy: 128 bytes of shared memory become a map in global memory."""
        self.whole(mask)
        on = self.active(mask)[:1]
        at = source[on].astype(U4) + np.arange(0, 128, 16, dtype=U4)
        data = self.cta.shared.load(at, 16, np.broadcast_to(self.warp[on], 8))
        self.cta.memory.store(to[on] + np.arange(0, 128, 16, dtype=U8), data)

    def elected(self) -> Array:
        return self.lane == 0
