"""Run the native kernel on an emulated processor: ``ringweave._cpu`` becomes a program that receives the calls.

The module's own binding and kernels are compiled for aarch64 and run by qemu-user, with ``aarch64/nanobind/nanobind.h``
as their nanobind. A plugin of pytest replaces the extension before the package imports it, so that the suite runs
unchanged. ``python -m tests.native.emulated FOLDER [pytest arguments]``, which is ``make arm``, builds the program into
a folder and runs the kernel's tests on each processor.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import os
import re
import shutil
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ringweave.errors import ShapeError, UnsupportedError

ROOT = Path(__file__).parents[2]
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
#: One processor that multiplies pairs of bfloat16, and one of 2016 without that and without float16 arithmetic.
PROCESSORS = ("max", "cortex-a72")
#: Environment variables: the processor that the plugin uses, and the path of the program.
PROCESSOR, PROGRAM = "RINGWEAVE_TEST_PROCESSOR", "RINGWEAVE_TEST_PROGRAM"

#: Files of this folder that do not run on it: they build or measure, start processes of their own, need calls that are
#: prepared, or take thousands of tokens.
_ELSEWHERE = {"build", "emulated", "guarded", "lanes", "memory", "narrow", "rows", "same_bits", "step"}
#: Tests that run on it: the kernel's, and those of the library that name it. Left out are threads that call together,
#: since calls take turns here, and measurements of speed.
SUITE = [
    *(f"tests/native/{x.name}" for x in sorted(ROOT.glob("tests/native/test_*.py")) if x.stem[5:] not in _ELSEWHERE),
    "tests/native/test_rows.py::test_a_tile_alone_on_every_variant",
    "tests/test_conformance.py",
    "tests/test_precision.py",
    "tests/test_kv_cache.py",
    "-k=native or cpu",
    # the last test measures the processor, and an emulator's speed says nothing
    *(
        f"--deselect=tests/native/test_kernel.py::test_{name}"
        for name in ("several_python_threads", "variants", "the_first_variant_is_as_fast_as_any")
    ),
]

_TYPES = {  # DLPack's codes of dtypes
    torch.int8: (0, 8), torch.int16: (0, 16), torch.int32: (0, 32), torch.int64: (0, 64), torch.uint8: (1, 8),
    torch.float16: (2, 16), torch.float32: (2, 32), torch.float64: (2, 64), torch.bfloat16: (4, 16),
}  # fmt: skip


def _path() -> str:
    """Return the folders of programs: the environment's own before the system's."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


#: Tools and their Debian packages: to build for this machine, and to build and run for aarch64.
NATIVE = {"cmake": "cmake", "ninja": "ninja-build", "c++": "g++"}
CROSS = {"cmake": "cmake", "ninja": "ninja-build", COMPILER: "g++-aarch64-linux-gnu", EMULATOR: "qemu-user"}


def missing(packages: dict[str, str] = CROSS) -> str | None:
    """Return the tools to install, or None if all are installed."""
    wanted = [
        f"{name} (Debian: {package})" for name, package in packages.items() if not shutil.which(name, path=_path())
    ]
    return f"needs {', '.join(wanted)}" if wanted else None


#: Options of CMake to compile for aarch64.
TOOLS = (f"-DCMAKE_CXX_COMPILER={COMPILER}", "-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64")


def build(folder: Path, *options: str) -> Path:
    """Compile the program and return its path."""
    # ninja cannot read the job server that make passes on
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "CXXFLAGS")}
    environment["PATH"] = _path()
    folders = "-S", str(ROOT), "-B", str(folder)
    commands = [
        ["cmake", *folders, "-G", "Ninja", "-DRINGWEAVE_PROGRAM=ON", *TOOLS, *options],
        ["cmake", "--build", str(folder)],
    ]
    for command in commands:
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")
    return folder / "_cpu"


def _span(x: Tensor) -> Tensor:
    """Return the bytes from a tensor's first element to its last."""
    elements = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    return x.detach().as_strided((elements,), (1,)).view(torch.uint8)


def _encoded(value: Any, tensors: list[tuple[Tensor, bytes]]) -> Iterator[bytes]:
    if value is None:
        yield b"n"
    elif isinstance(value, Tensor):
        memory = _span(value).numpy().tobytes()
        tensors.append((value, memory))
        sizes = (*value.shape, *value.stride())
        yield struct.pack("<cBBB", b"t", *_TYPES[value.dtype], value.ndim)
        yield struct.pack(f"<{len(sizes)}qQ", *sizes, len(memory)) + memory
    elif isinstance(value, int):
        yield struct.pack("<cq", b"i", value)
    elif isinstance(value, float):
        yield struct.pack("<cd", b"f", value)
    elif isinstance(value, str):
        yield struct.pack("<cI", b"s", len(value)) + value.encode()
    else:
        yield struct.pack("<cI", b"l", len(value))
        for each in value:
            yield from _encoded(each, tensors)


class Program:
    """The program on an emulated processor; calls take turns."""

    def __init__(self, path: Path, processor: str):
        self._command = [EMULATOR, "-cpu", processor, str(path)]
        self._process: subprocess.Popen[bytes] | None = None
        self._one = threading.Lock()

    def call(self, name: str, arguments: tuple[Any, ...]) -> object:
        """Call a function in the emulated process, and copy the tensors that it wrote into the caller's."""
        tensors: list[tuple[Tensor, bytes]] = []
        message = b"".join([struct.pack("<I", len(name)) + name.encode(), *_encoded(arguments, tensors)])
        with self._one:
            try:
                kind, text, found = self._answer(message, [len(memory) for _, memory in tensors])
            except BaseException:  # an abandoned call leaves an answer, which the next call would take for its own
                if self._process is not None:
                    self._process.kill()
                    self.close()
                raise
        if kind == b"e":
            raise (UnsupportedError if text.startswith("variant: ") else ShapeError)(text)
        for (tensor, before), after in zip(tensors, found, strict=True):
            if before != after:
                flat = torch.frombuffer(bytearray(after), dtype=tensor.dtype)
                tensor.detach().copy_(flat.as_strided(tensor.shape, tensor.stride()))
        return ast.literal_eval(text)

    def _answer(self, message: bytes, sizes: list[int]) -> tuple[bytes, str, list[bytes]]:
        if self._process is None:
            self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # nor does one that has ended have an answer
            self._process.stdin.write(message)
            self._process.stdin.flush()
        kind, size = struct.unpack("<cI", self._read(5))
        text = self._read(size).decode()
        return kind, text, [self._read(length) for length in sizes if kind != b"e"]

    def _read(self, size: int) -> bytes:
        assert self._process is not None
        assert self._process.stdout is not None
        read = self._process.stdout.read(size)
        if len(read) < size:
            raise RuntimeError(f"the program ended with {self.close()}")
        return read

    def close(self) -> int | None:
        """End the program and return its exit status."""
        if self._process is None:
            return None
        self._process.communicate()
        code, self._process = self._process.returncode, None
        return code


def module(program: Program, like: ModuleType) -> ModuleType:
    """Return a module with the functions of the extension ``like``, called by its signatures."""
    made = ModuleType("ringweave._cpu")
    made.__file__ = like.__file__

    def function(name: str, signature: Any) -> Callable[..., object]:
        text, _, defaults = signature
        if "**" in text:
            return lambda **options: program.call(name, (tuple(options.items()),))
        names = re.findall(r"[(,] ?(\w+): ", text)
        known = dict(zip(names[len(names) - len(defaults or ()) :], defaults or (), strict=True))

        def called(*args: Any, **options: Any) -> object:
            options = known | dict(zip(names, args, strict=False)) | options
            if {*options} != {*names}:
                raise TypeError(f"{name}(): incompatible function arguments")
            return program.call(name, tuple(options[each] for each in names))

        return called

    for name, one in vars(like).items():
        if hasattr(one, "__nb_signature__") and not isinstance(one, type):
            setattr(made, name, function(name, one.__nb_signature__[0]))
    # prepared calls pass addresses, which are invalid in another process
    made.Prepared, made.Step = like.Prepared, like.Step  # type: ignore[attr-defined]
    # masks are painted by code that is the same for every processor, and plans hold the zones
    made.Zones = like.Zones  # type: ignore[attr-defined]
    return made


_stand_in: list[Program] = []


def pytest_configure() -> None:
    """Replace the extension, and let no call be prepared."""
    import ringweave
    from ringweave import _cpu
    from ringweave.backends import BACKENDS, cpu

    _stand_in.append(Program(Path(os.environ[PROGRAM]), os.environ[PROCESSOR]))
    ringweave._cpu = sys.modules["ringweave._cpu"] = module(_stand_in[0], _cpu)  # type: ignore[attr-defined]
    BACKENDS["cpu"] = dataclasses.replace(cpu.BACKEND, prepare=None, step=None)


def pytest_unconfigure() -> None:
    """End the program."""
    _stand_in.pop().close()


def main(folder: str, *arguments: str) -> int:
    """Build, run the tests, and return 0 if all pass."""
    if absent := missing():
        print(absent, file=sys.stderr)
        return 2
    program = build(ROOT / folder)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.native.emulated",
        "-p",
        "no:cacheprovider",
        "--timeout=1800",  # emulated instructions take many times longer
        *SUITE,
        *arguments,
    ]
    codes = []
    for processor in PROCESSORS:
        print(f"{EMULATOR} -cpu {processor}", flush=True)
        environment = os.environ | {PROGRAM: str(program), PROCESSOR: processor, "OMP_WAIT_POLICY": "passive"}
        codes.append(subprocess.run(command, cwd=ROOT, env=environment).returncode)
    return max(codes)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
