"""Triton drivers for devices that run nothing; calls follow the path to a GPU, for CUDA through Triton's own launcher.

The launcher calls libcuda; a library of that name, built from libcuda.c, is loaded in its place. It checks tensor maps
as the driver would and notes launches. For processes of their own: the library cannot be unloaded.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver
from triton.compiler import CompiledKernel

from ringweave_gpu.triton import kernels
from ringweave_gpu.triton.launch_config import Device

#: Simulated devices, by index: an H100, an A100, a B200 and an MI300X.
DEVICES = (
    Device.of_cuda(9, 227 * 1024, 132),
    Device.of_cuda(8, 163 * 1024, 108),
    Device.of_cuda(10, 227 * 1024, 148),
    Device("cdna", 64 * 1024, 304),
)
_CAPABILITIES = ((9, 0), (8, 0), (10, 0))
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


class Notes:
    """The current device, and the launches on it."""

    index = 0

    def __init__(self) -> None:
        self.launches: list[Launch] = []

    def taken(self) -> list[Launch]:
        """Return the launches since the last call."""
        launches, self.launches[:] = list(self.launches), []
        return launches

    def compiled(self) -> dict[int, CompiledKernel]:
        """Return the kernels compiled and loaded for the current device, by the driver's handle."""
        caches = [getattr(kernels, name).device_caches[self.index][0] for name in NAMES]
        return {kernel.function: kernel for cache in caches for kernel in cache.values()}


class Cuda(Notes, driver.CudaDriver):  # type: ignore[misc]
    """Triton's driver over the library that runs nothing.

    Args:
        folder: Where the library goes.
    """

    def __init__(self, folder: Path):
        Notes.__init__(self)
        path = folder / "libcuda.so.1"
        header = Path(driver.__file__).parent / "include"
        command = [compiler(), "-shared", "-fPIC", f"-I{header}", str(Path(__file__).parent / "libcuda.c")]
        subprocess.run([*command, f"-Wl,-soname,{path.name}", "-o", str(path)], check=True)
        library = ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
        triton.knobs.nvidia.libcuda_path = str(folder)
        unsigned = ctypes.c_uint
        prototype = ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(unsigned), unsigned, unsigned, ctypes.POINTER(ctypes.c_void_p)
        )
        # held: the library calls it
        self._noted = prototype(self._note)
        library.stand_in_tell(self._noted)
        self.utils, self.launcher_cls = driver.CudaUtils(), driver.CudaLauncher
        self.get_current_device = lambda: self.index
        self.get_current_stream = lambda device: 0
        self.get_device_capability = lambda device: _CAPABILITIES[device]

    def _note(
        self, function: int, grid: ctypes.Array[ctypes.c_uint], threads: int, shared: int, parameters: Any
    ) -> int:
        self.launches.append(Launch(function, (grid[0], grid[1], grid[2]), threads, shared))
        return 0


class Hip(Notes):
    """A simulated driver for ROCm; Triton's own launcher for it does not run."""

    index = 3
    # handles for all such drivers, since compiled kernels are stored by device
    functions = itertools.count(1)

    def __init__(self) -> None:
        super().__init__()
        self.utils = self

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("hip", "gfx942", 64)

    def get_current_device(self) -> int:
        return self.index

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 64 * 1024, "multiprocessor_count": 304}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        """(module, function, registers, spills, most threads)."""
        return 1, next(Hip.functions), 0, 0, 1024

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        def launch(x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
            self.launches.append(Launch(function, (x, y, z), 64 * metadata.num_warps, metadata.shared))

        return launch


def compiler() -> str | None:
    """Return the C compiler that Triton would use, if any."""
    return os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
