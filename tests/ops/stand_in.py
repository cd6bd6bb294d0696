"""A driver for Triton whose devices run nothing: calls take the way to a GPU, Triton's own launcher included.

The launcher calls libcuda; a library of that name, built from libcuda.c, is loaded in its place. It checks tensor maps
as the driver would and notes launches. For processes of their own: the library cannot be unloaded.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.backends.nvidia import driver
from triton.compiler import CompiledKernel

from ringweave.ops.triton import kernels
from ringweave.ops.triton.blocks import Device

#: (compute capability, what the backend reads of such a device), by index: an H100, an A100, a B200.
DEVICES = (
    ((9, 0), Device.of_cuda(9, 227 * 1024, 132)),
    ((8, 0), Device.of_cuda(8, 163 * 1024, 108)),
    ((10, 0), Device.of_cuda(10, 227 * 1024, 148)),
)
NAMES = ("forward", "join", "delta", "backward_q", "backward_kv")


@dataclass(frozen=True)
class Launch:
    """One launch, as the driver saw it.

    Attributes:
        function: The driver's handle of a kernel.
        grid: Programs.
        threads: Threads of one.
        shared: Bytes of shared memory of one.
    """

    function: int
    grid: tuple[int, int, int]
    threads: int
    shared: int


class Driver(driver.CudaDriver):  # type: ignore[misc]
    """Triton's driver over the library that runs nothing.

    Args:
        folder: Where the library goes.
    """

    def __init__(self, folder: Path):
        self.index = 0
        self.launches: list[Launch] = []
        path = folder / "libcuda.so.1"
        header = Path(driver.__file__).parent / "include"
        command = [compiler(), "-shared", "-fPIC", f"-I{header}", str(Path(__file__).parent / "libcuda.c")]
        subprocess.run([*command, f"-Wl,-soname,{path.name}", "-o", str(path)], check=True)
        library = ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
        triton.knobs.nvidia.libcuda_path = str(folder)
        unsigned = ctypes.c_uint
        prototype = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(unsigned), unsigned, unsigned)
        # held: the library calls it
        self._noted = prototype(self._note)
        library.stand_in_tell(self._noted)
        self.utils, self.launcher_cls = driver.CudaUtils(), driver.CudaLauncher
        self.get_current_device = lambda: self.index
        self.get_current_stream = lambda device: 0
        self.get_device_capability = lambda device: DEVICES[device][0]

    def _note(self, function: int, grid: ctypes.Array[ctypes.c_uint], threads: int, shared: int) -> int:
        self.launches.append(Launch(function, (grid[0], grid[1], grid[2]), threads, shared))
        return 0

    def taken(self) -> list[Launch]:
        """The launches since the last call."""
        launches, self.launches[:] = list(self.launches), []
        return launches

    def compiled(self) -> dict[int, CompiledKernel]:
        """What was compiled and loaded so far for the current device, by the driver's handle."""
        caches = [getattr(kernels, name).device_caches[self.index][0] for name in NAMES]
        return {kernel.function: kernel for cache in caches for kernel in cache.values()}


def compiler() -> str | None:
    """The C compiler that Triton would take, if there is one."""
    return os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
