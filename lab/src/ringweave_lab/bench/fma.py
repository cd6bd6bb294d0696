"""The processor's peak: a loop of fused multiply-adds in C, compiled at first use."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from ringweave.backends import cpu
from ringweave.errors import UnsupportedError

_SOURCE = Path(__file__).with_name("fma.c")
_AVX2 = ("-mavx2", "-mfma")
_AVX512 = (*_AVX2, "-mavx512f")
#: Options of the compiler for each instruction set of the native kernel.
FLAGS: dict[str, tuple[str, ...]] = {
    "generic": (), "avx2": _AVX2, "avx512": _AVX512, "avx512bf16": (*_AVX512, "-mavx512bf16"),
    "neon": (), "neonbf16": ("-march=armv8.2-a+bf16",),
}  # fmt: skip
_NO_COMPILER = "there is no C compiler. Install gcc or clang, or set CC."


def fma_peak(dtype: torch.dtype, seconds: float = 0.02, samples: int = 10) -> float:
    """Return the operations per second of fused multiply-adds on as many threads as torch has, in the best sample.

    The best sample counts, since the peak should not include the load of other processes. The loop has the native
    kernel's instruction set, which widens bfloat16 unless it multiplies pairs.

    Raises:
        UnsupportedError: There is no C compiler.
    """
    rate, threads = _rate(cpu.variant()), torch.get_num_threads()
    with ThreadPoolExecutor(threads) as pool:
        found = [pool.map(rate, [seconds] * threads, [dtype == torch.bfloat16] * threads) for _ in range(samples)]
        return max(float(sum(each)) for each in found)


def _compiler() -> str | None:
    return os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


def why_no_peak() -> str | None:
    """Return why the peak cannot be measured, with a remedy; None if it can."""
    return _NO_COMPILER if _compiler() is None else None


def library(variant: str, folder: Path) -> Path:
    """Compile the loop for an instruction set.

    Raises:
        UnsupportedError: There is no C compiler.
    """
    compiler = _compiler()
    if compiler is None:
        raise UnsupportedError(_NO_COMPILER)
    path = folder / f"fma_{variant}.so"
    options = ("-O3", "-shared", "-fPIC", *FLAGS[variant])
    subprocess.run([*compiler.split(), *options, str(_SOURCE), "-o", str(path)], check=True)
    return path


@functools.cache
def _rate(variant: str) -> ctypes._NamedFuncPointer:
    # a loaded library needs no file
    with tempfile.TemporaryDirectory() as folder:
        rate = ctypes.CDLL(str(library(variant, Path(folder)))).fma_rate
    rate.argtypes, rate.restype = (ctypes.c_double, ctypes.c_int), ctypes.c_double
    return rate
