"""Execute PTX for sm_90 on the CPU: the instructions that Triton's compiler emits for this library's kernels.

Each instruction becomes a line of numpy over the lanes of some warps (ptx_machine.py), which take turns, so that barriers
work. Asynchronous operations (wgmma, copies, TMA) happen as early as possible or, with ``late``, only at the wait for
them. ptxas is trusted; an unknown instruction is refused by name.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import ptx_machine
from .ptx_machine import BASE, F4, F8, TYPES, U1, U2, U4, U8, Array, Cta, Memory, PtxError, Warps


def flushed(x: Array) -> Array:
    """Subnormal numbers become 0."""
    return np.where(np.abs(x) < np.finfo(F4).tiny, np.copysign(F4(0), x), x)


def fma(a: Array, b: Array, c: Array) -> Array:
    if a.dtype == F8:
        raise PtxError("fma.f64")
    return (a.astype(F8) * b + c).astype(F4)


def shift(a: Array, by: Array, left: bool) -> Array:
    """By any number of bits."""
    bits = a.dtype.itemsize * 8
    if not left and a.dtype.kind == "i":
        return a >> np.minimum(by, bits - 1).astype(a.dtype)
    moved = (a << (by % bits).astype(a.dtype)) if left else (a >> (by % bits).astype(a.dtype))
    return np.where(by < bits, moved, a.dtype.type(0))


def divided(a: Array, b: Array, remainder: bool) -> Array:
    """Integers, towards zero."""
    if not b.all():
        b = np.where(b == 0, b.dtype.type(1), b)
    quotient = (np.abs(a.astype(np.int64)) // np.abs(b.astype(np.int64)) * np.sign(a) * np.sign(b)).astype(a.dtype)
    return a - quotient * b if remainder else quotient


def field_of(a: Array, low: int, n: int) -> Array:
    """bfe."""
    bits = a.dtype.itemsize * 8
    return a << a.dtype.type(bits - low - n) >> a.dtype.type(bits - n)


def whole(x: Array, kind: Any) -> Array:
    """The integer towards zero, the nearest there is; of NaN 0, and the least of 64 bits."""
    limits = np.iinfo(kind)
    least, most = F8(limits.min), F8(limits.max)
    inside = np.where(np.isnan(x) | (x >= most) | (x < least), F4(0), x).astype(kind)
    ends = np.where(x >= most, limits.max, np.where(x < least, limits.min, inside))
    return np.where(np.isnan(x), kind(limits.min if limits.bits == 64 else 0), ends).astype(kind)


def put(mask: Array, value: Array, before: Array | None) -> Array:
    return np.where(mask, value, value.dtype.type(0) if before is None else before)


FLOATS: dict[str, Callable[[Array], Array]] = {
    "ex2": np.exp2, "lg2": np.log2, "sqrt": np.sqrt, "tanh": np.tanh, "rcp": np.reciprocal,
    "rsqrt": lambda x: F4(1) / np.sqrt(x), "neg": np.negative, "abs": np.abs,
}  # fmt: skip
COMPARE = {
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "lo": "<",
    "ls": "<=",
    "hi": ">",
    "hs": ">=",
}


@dataclass
class Program:
    """A kernel: its parameters' bytes, its threads, and its basic blocks, each compiled for several warps together.

    Attributes:
        name: The kernel's.
        parameters: (name, bytes) each.
        threads: Of one program.
        source: Each block's statements.
    """

    name: str
    parameters: list[tuple[str, int]]
    threads: int
    source: list[list[str]]
    labels: dict[str, int]
    registers: dict[str, int] = field(default_factory=dict)

    @staticmethod
    def of(ptx: str) -> Program:
        ptx = re.sub(
            r"//.*|^\s*\.(loc|file|pragma)\b.*|^\$L__(tmp|func).*", "", ptx.partition("\t.section")[0], flags=re.M
        )
        head = re.search(r"\.entry\s+(\w+)\s*\((.*?)\)(.*?)\{(.*)^\}", ptx, re.S | re.M)
        if head is None:
            raise PtxError("no entry")
        name, parameters, about, body = head.groups()
        sizes = []
        for kind, count_name in re.findall(
            r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)\s+(?:\.ptr[^,]*?)?([\w\[\]]+)\s*(?:,|$)", parameters.strip()
        ):
            word, _, count = count_name.partition("[")
            sizes.append((word, TYPES[kind]().itemsize * int(count.rstrip("]") or 1)))
        # names of a scope are its own
        scopes = iter(range(1000))

        def scoped(match: re.Match[str]) -> str:
            inner, number = match[1], next(scopes)
            own = re.findall(r"^\s*(\w+):", inner, re.M) + re.findall(r"\.reg\s+\.\w+\s+(\w+)\s*;", inner)
            return re.sub(rf"\b({'|'.join(own)})\b", rf"\1_{number}", inner) if own else inner

        body = re.sub(r"^\s*\{\s*\n(.*?)^\s*\}\s*$", scoped, body, flags=re.S | re.M)
        body = re.sub(r"(\.reg)[^;]*;", "", body)
        made = Program(name, sizes, int(re.search(r"\.reqntid\s+(\d+)", about)[1]), [[]], {})  # type: ignore[index]
        for part in re.split(r"(?<=:)\s*\n|;", body):
            statement = " ".join(part.split())
            while match := re.match(r"([$\w]+):\s*", statement):
                made.source.append([])
                made.labels[match[1]] = len(made.source) - 1
                statement = statement[match.end() :]
            if statement:
                made.source[-1].append(statement)
                if re.match(r"(@!?[%\w]+ )?(bra|brx|ret)\b", statement):
                    made.source.append([])
        return made

    @functools.cache  # noqa: B019
    def compiled(self, lanes: int) -> list[tuple[Callable[..., Any], Callable[..., Any]]]:
        """Each block for all lanes, and for some."""
        lines: list[str] = []
        writer = Writer(self, lines, lanes)
        for number, statements in enumerate(self.source):
            for masked in (False, True):
                writer.block(number, statements, masked)
        scope = vars(ptx_machine) | globals() | writer.constants
        exec(compile("\n".join(lines), f"<{self.name}.ptx>", "exec"), scope)
        return [(scope[f"block_{at}"], scope[f"block_{at}_masked"]) for at in range(len(self.source))]

    __hash__ = object.__hash__


class Writer:
    """Writes Python for statements of PTX."""

    def __init__(self, program: Program, lines: list[str], lanes: int):
        self.program, self.lines, self.lanes = program, lines, lanes
        self.constants: dict[str, Any] = {}
        self.mask = "None"

    def block(self, number: int, statements: list[str], masked: bool) -> None:
        self.lines.append(f"def block_{number}{'_masked' * masked}(u, R, M):")
        ended = False
        for statement in statements:
            guard, instruction = re.match(r"(?:@(!?[%\w]+) )?(.*)", statement).groups()  # type: ignore[union-attr]
            on = None if guard is None else ("~" if guard[0] == "!" else "") + self.read(guard.lstrip("!"), "pred")
            opcode, _, rest = instruction.partition(" ")
            if opcode in ("ret", "bra", "bra.uni"):
                to = "" if opcode == "ret" else f"({self.program.labels[rest.strip()]}, M), "
                if on is None:
                    self.lines.append(f"    return ({to})")
                    ended = True
                else:
                    to = to.replace("M", "go")
                    self.lines.append(f"    go = {on}" + " & M" * masked)
                    self.lines.append(f"    stay = ~({on})" + " & M" * masked)
                    next_one = f"({number + 1}, stay), "
                    self.lines.append(f"    if not go.any(): return (({number + 1}, M), )")
                    self.lines.append(f"    if not stay.any(): return ({to.replace('go', 'M')})")
                    self.lines.append(f"    return ({to}{next_one})")
                    ended = True
                continue
            if opcode == ".branchtargets":
                targets = [self.program.labels[each] for each in operands(rest)]
                continue
            if opcode == "brx.idx":
                # its targets are named in the same block, just before
                self.lines.append(f"    at = {self.read(operands(rest)[0], 'u32')}")
                on = "np.ones(u.lanes, np.bool_)" if not masked else "M"
                self.lines.append(f"    went = [(to, (at == index) & {on}) for index, to in enumerate({targets})]")
                self.lines.append(
                    f"    if (at[{on}] >= {len(targets)}).any(): raise PtxError('brx.idx past its targets')"
                )
                self.lines.append("    return tuple((to, lanes) for to, lanes in went if lanes.any())")
                ended = True
                continue
            self.mask = "M" if masked else "None"
            if on is not None:
                self.lines.append(f"    G = {on}" + " & M" * masked)
                self.mask = "G"
            try:
                self.statement(opcode, operands(rest))
            except (KeyError, IndexError, ValueError) as error:
                raise PtxError(f"not known: {statement} ({error!r})") from error
        if not ended:
            after = f"({number + 1}, M), " if number + 1 < len(self.program.source) else ""
            self.lines.append(f"    return ({after})")
        # barriers make all of them generators
        self.lines.append("    yield")

    def index(self, name: str) -> int:
        if not re.match(r"%|complete", name):
            raise PtxError(f"no register: {name}")
        return self.program.registers.setdefault(name, len(self.program.registers))

    def read(self, name: str, kind: str) -> str:
        """An operand as an array of a type."""
        if name.startswith("{"):
            return self.packed(name, kind)
        if name.startswith("%") and name.split(".")[0] in ("%tid", "%ctaid", "%nctaid", "%laneid"):
            return f"u.special['{name[1:]}']"
        if re.match(r"%|complete", name):
            natural = f"R[{self.index(name)}]"
            return natural if TYPES[kind] in (U2, U4, U8, np.bool_) else f"{natural}.view({dtype(kind)})"
        return self.constant(name, kind)

    def constant(self, text: str, kind: str) -> str:
        if text == "global_smem":
            value: Any = BASE
        elif any(text == name for name, _ in self.program.parameters):
            return f"np.full(u.lanes, u.parameters['{text}'], U8)"
        elif (match := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})", text)) or (
            match := re.fullmatch(r"0[dD]([0-9a-fA-F]{16})", text)
        ):
            value = int(match[1], 16)
        elif text in ("true", "false"):
            value = text == "true"
        else:
            value = int(text, 0)
        size = np.dtype(TYPES[kind]).itemsize
        if kind == "pred":
            array: Array = np.full(self.lanes, bool(value))
        else:
            bits = value & (1 << 8 * size) - 1
            array = np.full(self.lanes, bits, f"u{size}").view(TYPES[kind])
        array.flags.writeable = False
        return self.hold(array, f"K_{kind}_{re.sub(r'[^0-9a-zA-Z]', '_', text)}")

    def hold(self, value: Any, name: str) -> str:
        self.constants[name] = value
        return name

    def packed(self, name: str, kind: str) -> str:
        parts = operands(name[1:-1])
        size = np.dtype(TYPES[kind]).itemsize // len(parts)
        each = ", ".join(self.read(part, f"b{8 * size}") for part in parts)
        return f"np.stack([{each}], 1).view({dtype(kind)})[:, 0]"

    def write(self, name: str, value: str, kind: str) -> None:
        """Assign to a register, under the mask."""
        if name == "_":
            return
        if name.startswith("{"):
            parts = operands(name[1:-1])
            size = np.dtype(TYPES[kind]).itemsize // len(parts)
            self.lines.append(f"    T = np.ascontiguousarray({value}).view(U{size}).reshape(u.lanes, {len(parts)}).T")
            for index, part in enumerate(parts):
                self.write(part, f"T[{index}]", f"b{8 * size}")
            return
        if TYPES[kind] not in (U1, U2, U4, U8, np.bool_):
            value = f"({value}).view(U{np.dtype(TYPES[kind]).itemsize})"
        at = self.index(name)
        self.lines.append(f"    R[{at}] = " + (value if self.mask == "None" else f"put({self.mask}, {value}, R[{at}])"))

    def address(self, text: str, kind: str) -> str:
        base, _, offset = text.strip("[] ").partition("+")
        found = self.read(base.strip(), kind)
        return found if not int(offset or "0", 0) else f"({found} + {self.constant(offset.strip(), kind)})"

    def statement(self, opcode: str, to: list[str]) -> None:
        """Write one instruction."""
        name, *mods = opcode.split(".")
        kind = mods[-1] if mods else ""
        line, m = self.lines.append, self.mask

        def do(call: str) -> None:
            line(f"    {call}")

        def compute(expression: str, *kinds: str, into: str = kind) -> None:
            values = [self.read(each, of) for each, of in zip(to[1:], kinds, strict=True)]
            self.write(to[0], expression.format(*values), into)

        if name in ("add", "sub", "and", "or", "xor") and set(mods) <= {kind, "rn", "ftz"}:
            sign = {"add": "+", "sub": "-", "and": "&", "or": "|", "xor": "^"}[name]
            compute(f"{{}} {sign} {{}}", kind, kind)
        elif name == "mul" and mods[0] == "wide":
            wide = kind[0] + "64"
            compute(f"{{}}.astype({dtype(wide)}) * {{}}", kind, kind, into=wide)
        elif name == "mad" and mods[0] == "wide":
            wide = kind[0] + "64"
            compute(f"{{}}.astype({dtype(wide)}) * {{}} + {{}}", kind, kind, wide, into=wide)
        elif name == "mul" and mods[0] == "hi" and kind[1:] == "32":
            compute(f"({{}}.astype({dtype(kind[0] + '64')}) * {{}} >> 32).astype({dtype(kind)})", kind, kind)
        elif name == "mul" and (mods[0] == "lo" or kind[0] == "f"):
            compute("{} * {}", kind, kind)
        elif name == "mad" and mods[0] == "lo":
            compute("{} * {} + {}", kind, kind, kind)
        elif name == "fma" and mods[0] == "rn":
            compute("fma({}, {}, {})", kind, kind, kind)
        elif name in ("min", "max"):
            function = f"np.{name}imum" if kind[0] != "f" or "NaN" in mods else f"np.f{name}"
            compute(f"{function}({{}}, {{}})", kind, kind)
        elif name in ("div", "rem") and kind[0] != "f":
            compute(f"divided({{}}, {{}}, {name == 'rem'})", kind, kind)
        elif name == "div":
            compute("{} / {}", kind, kind)
        elif name in FLOATS and (kind == "f32" or name in ("neg", "abs")):
            flush = "ftz" in mods
            call = f"FLOATS['{name}']({'flushed({})' if flush else '{}'})"
            compute(f"flushed({call})" if flush else call, kind)
        elif name == "not":
            compute("~{}", kind)
        elif name in ("shl", "shr"):
            compute(f"shift({{}}, {{}}, {name == 'shl'})", kind, "u32")
        elif name == "bfe":
            low, n = (int(each, 0) for each in to[2:])
            self.write(to[0], f"field_of({self.read(to[1], kind)}, {low}, {n})", kind)
        elif name == "selp":
            compute("np.where({2}, {0}, {1})", kind, kind, "pred")
        elif name == "setp":
            a, b = (self.read(each, kind) for each in to[1:3])
            test, float_ = mods[0], kind[0] == "f"
            if float_ and test.endswith("u") and test != "u":
                said = f"({a} {COMPARE[test[:-1]]} {b}) | np.isnan({a}) | np.isnan({b})"
            elif test in ("nan", "num"):
                said = f"np.isnan({a}) | np.isnan({b})" if test == "nan" else f"~(np.isnan({a}) | np.isnan({b}))"
            elif float_ and test == "ne":
                said = f"({a} < {b}) | ({a} > {b})"
            else:
                said = f"{a} {COMPARE[test]} {b}"
            if len(to) > 3:
                said = f"({said}) {dict(zip(('and', 'or', 'xor'), '&|^', strict=True))[mods[1]]} {self.read(to[3], 'pred')}"
            self.write(to[0], said, "pred")
        elif name == "mov":
            self.write(to[0], self.read(to[1], kind), kind)
        elif name == "cvta":
            self.write(to[0], self.read(to[1], "u64"), "u64")
        elif name == "cvt":
            self.convert(mods, to)
        elif name == "ld" and mods[0] == "param":
            base, _, offset = to[1].strip("[]").partition("+")
            found = f"u.parameter('{base}', {int(offset or 0)}, {dtype(kind)})"
            if to[0].startswith("%rd") and kind[1:] == "32":
                kind = kind[0].replace("b", "u") + "64"
                found += f".astype({dtype(kind)})"
            self.write(to[0], found, kind)
        elif (
            name in ("ld", "st")
            and mods[0] in ("global", "shared")
            and set(mods[1:-1]) <= {"v2", "v4", "L1::evict_last"}
        ):
            size, shared = np.dtype(TYPES[kind]).itemsize, mods[0] == "shared"
            where, many = (to[1], to[0]) if name == "ld" else (to[0], to[1])
            parts = operands(many[1:-1]) if many.startswith("{") else [many]
            at = self.address(where, "u32" if shared else "u64")
            if name == "st":
                values = ", ".join(self.read(part, f"b{max(16, 8 * size)}") for part in parts)
                do(f"u.store({shared}, {at}, [{values}], {size}, {m})")
            else:
                do(f"D = u.load({shared}, {at}, {size}, {len(parts)}, {m})")
                for index, part in enumerate(parts):
                    self.write(part, f"D[{index}]", f"b{max(16, 8 * size)}")
        elif name in ("atom", "red") and mods[0] == "global" and "add" in mods:
            at, value = (to[1], to[2]) if name == "atom" else (to[0], to[1])
            do(f"D = u.add({self.address(at, 'u64')}, {self.read(value, kind)}, {m})")
            if name == "atom":
                self.write(to[0], "D", kind)
        elif opcode == "elect.sync":
            _, chosen = to[0].split("|")
            self.write(chosen, "u.elected()", "pred")
        elif opcode.startswith("shfl.sync.") and kind == "b32":
            to.pop()
            compute(f"u.shuffle('{mods[1]}', {{}}, {{}}, {{}})", "b32", "u32", "u32")
        elif (name == "bar" and mods == ["warp", "sync"]) or name == "setmaxnreg":
            do(f"u.whole({m})")
        elif opcode in ("bar.sync", "barrier.sync"):
            number, threads = int(to[0]), int(to[1]) if len(to) > 1 else 0
            do(f"yield from u.meet({number}, {threads}, {m})")
        elif name == "mbarrier":
            address = self.address(to[1 if mods[0] in ("arrive", "try_wait") else 0], "u32")
            if mods[0] == "init":
                do(f"u.barrier_init({address}, {int(to[1])}, {m})")
            elif mods[0] == "inval":
                do(f"u.barrier_inval({address}, {m})")
            elif mods[:2] == ["arrive", "expect_tx"]:
                do(f"u.arrive({address}, 1, {self.read(to[2], 'u32')}, {m})")
            elif mods[0] == "arrive":
                do(f"u.arrive({address}, {int(to[2]) if len(to) > 2 else 1}, None, {m})")
            elif mods[:2] == ["try_wait", "parity"]:
                do(f"D = yield from u.try_wait({address}, {self.read(to[2], 'u32')}, {m})")
                self.write(to[0], "D", "pred")
            else:
                raise KeyError(opcode)
        elif opcode == "fence.proxy.async.shared::cta":
            do(f"u.cta.shared.fence(u.whole({m}))")
        elif opcode.startswith(("fence.proxy.tensormap", "cp.async.bulk.commit_group", "cp.async.bulk.wait_group")):
            # maps are read when a copy starts, and nothing is copied out
            pass
        elif re.fullmatch(r"cp\.async\.c[ag]\.shared\.global", opcode):
            address, source = self.address(to[0], "u32"), self.address(to[1], "u64")
            given = self.read(to[3] if len(to) > 3 else to[2], "u32")
            do(f"u.copy({address}, {source}, {int(to[2], 0)}, {given}, {m})")
        elif opcode == "cp.async.commit_group":
            do("u.commit_copies()")
        elif opcode == "cp.async.wait_group":
            do(f"u.wait_copies({int(to[0])})")
        elif re.fullmatch(
            # Triton 3.6 names the shared memory of the cluster, which is the block's own in a cluster of one block
            r"cp\.async\.bulk\.tensor\.\dd\.shared::(cta|cluster)\.global\.mbarrier::complete_tx::bytes",
            opcode,
        ):
            tensor, at = re.fullmatch(r"\[(%\w+), (\{.*\})\]", to[1]).groups()  # type: ignore[union-attr]
            places = ", ".join(self.read(each, "u32") for each in operands(at[1:-1]))
            address, barrier = self.address(to[0], "u32"), self.address(to[2], "u32")
            do(f"u.tma({address}, {self.read(tensor, 'u64')}, [{places}], {barrier}, {m})")
        elif name == "tensormap" and mods[0] == "replace":
            # an ordinal comes first for fields of several
            value = self.read(to[-1], kind)
            index = int(to[1], 0) if len(to) > 2 else 0
            do(f"u.replace('{mods[2]}', {self.address(to[0], 'u64')}, {index}, {value}, {m})")
        elif opcode.startswith("tensormap.cp_fenceproxy.global.shared::cta"):
            do(f"u.publish({self.address(to[0], 'u64')}, {self.address(to[1], 'u64')}, {m})")
        elif opcode == "wgmma.fence.sync.aligned":
            do("u.fenced = list(R)")
        elif opcode == "wgmma.commit_group.sync.aligned":
            do("u.commit_products()")
        elif opcode == "wgmma.wait_group.sync.aligned":
            do(f"u.wait_products({int(to[0])})")
        elif match := re.fullmatch(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.(b?f16)\.\2", opcode):
            sums = tuple(self.index(each) for each in operands(to[0][1:-1]))
            held = to[1].startswith("{")
            left = str([self.index(each) for each in operands(to[1][1:-1])]) if held else self.read(to[1], "u64")
            flips = (not held and to[6] == "1", to[-1] == "1")
            if len(sums) != int(match[1]) // 2 or to[4:6] != ["1", "1"]:
                raise KeyError(opcode)
            do(f"u.wgmma({sums}, '{match[2]}', {left}, {self.read(to[2], 'u64')}, {self.read(to[3], 'pred')}, {flips})")
        elif match := re.fullmatch(r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(b?f16)\.\1\.f32", opcode):
            parts = [", ".join(self.read(each, "b32") for each in operands(part[1:-1])) for part in to[1:]]
            do(f"D = u.mma('{match[1]}', [{parts[0]}], [{parts[1]}], [{parts[2]}])")
            for index, each in enumerate(operands(to[0][1:-1])):
                self.write(each, f"D[{index}]", "b32")
        elif re.fullmatch(r"(ld|st)matrix\.sync\.aligned\.m8n8\.x[124](\.trans)?\.shared\.b16", opcode):
            flip, loads = "trans" in mods, name == "ldmatrix"
            parts = operands(to[0 if loads else 1][1:-1])
            address = self.address(to[1 if loads else 0], "u32")
            if loads:
                do(f"D = u.load_matrices({address}, {len(parts)}, {flip})")
                for index, part in enumerate(parts):
                    self.write(part, f"D[{index}]", "b32")
            else:
                do(f"u.store_matrices({address}, [{', '.join(self.read(part, 'b32') for part in parts)}], {flip})")
        else:
            raise KeyError(opcode)

    def convert(self, mods: list[str], to: list[str]) -> None:
        """cvt."""
        into, of = [each for each in mods if each[-1].isdigit()][-2:]
        source = self.read(to[1], "b16" if of == "bf16" else of) if of[1:] != "8" else ""
        wider = {"%rs": 16, "%rd": 64}.get(to[1][:3], 32)
        if of[0] in "su" and wider > int(of[1:]):
            # of a register with more bits the lowest count
            source = f"{self.read(to[1], f'u{wider}')}.astype(np.{'u' * (of[0] == 'u')}int{of[1:]})"
        if into[1:] == "8":
            # no register is as small: extended
            size = 16 if to[0].startswith("%rs") else 32
            source, into = f"{source}.astype(np.{'u' * (into[0] == 'u')}int8)", f"{into[0]}{size}"
        if into.endswith("x2"):
            low = self.read(to[2], of)
            self.write(
                to[0], f"encoded({source}, '{into[:-2]}').astype(U4) << U4(16) | encoded({low}, '{into[:-2]}')", "b32"
            )
        elif of in ("bf16", "f16") and into == "f32":
            self.write(to[0], f"decoded(({source}).view(U2), '{of}')", "f32")
        elif into in ("bf16", "f16") and of == "f32":
            self.write(to[0], f"encoded({source}, '{into}')", "b16")
        elif of == "f32" and into in ("s32", "s64") and "rzi" in mods:
            self.write(to[0], f"whole({source}, {dtype(into)})", into)
        elif of[0] == "f" and into[0] != "f":
            raise KeyError(".".join(mods))
        else:
            self.write(to[0], f"{source}.astype({dtype(into)})", into)


def operands(text: str) -> list[str]:
    """Split at the commas outside of brackets."""
    return [part.strip() for part in re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,{\[])+", text) if part.strip()]


def dtype(kind: str) -> str:
    return f"np.{np.dtype(TYPES[kind]).name}" if kind != "pred" else "np.bool_"


def launch(
    program: Program,
    grid: int,
    shared: int,
    parameters: list[int],
    memory: Memory,
    late: bool = False,
    together: int | Sequence[int] = 4,
    formal: bool = False,
) -> None:
    """Run every program of a grid to its end, one after the other.

    Args:
        program: The kernel.
        grid: Programs.
        shared: Bytes of shared memory.
        parameters: Address of each parameter in this process.
        memory: Global memory.
        late: Whether asynchronous operations happen as late as possible, instead of immediately.
        together: Warps that take each step together; with several numbers, that many warps each, one group after the other.
            Warps that compute different things and meet at barriers must not be in one group.
        formal: Whether wgmma needs a proxy fence after cp.async too, as PTX's memory model has it.
    """
    where = {name: at for (name, _), at in zip(program.parameters, parameters, strict=True)}
    warps_of = [together] * (program.threads // 32 // together) if isinstance(together, int) else together
    blocks = {many: program.compiled(many * 32) for many in set(warps_of)}

    with np.errstate(all="ignore"):
        for number in range(grid):
            cta = Cta(memory, shared, program.threads, late, formal)
            special = {"ctaid.x": number, "ctaid.y": 0, "ctaid.z": 0, "nctaid.x": grid, "nctaid.y": 1, "nctaid.z": 1}
            groups = np.split(np.arange(program.threads // 32), np.cumsum(warps_of)[:-1])
            running = []
            for warps in groups:
                unit = Warps(cta, warps, special, len(program.registers))
                unit.parameters = where
                running.append(unit.run(blocks[len(warps)]))
            while running:
                before, waits, left = cta.progress, [], []
                for unit in running:
                    try:
                        waits.append(next(unit))
                        left.append(unit)
                    except StopIteration:
                        cta.progress += 1
                if left and cta.progress == before:
                    raise PtxError(f"{program.name}, program {number}: nobody goes on: {waits}")
                running = left
            if cta.shared.landing.any():
                raise PtxError(f"{program.name}, program {number} ended with copies under way")
