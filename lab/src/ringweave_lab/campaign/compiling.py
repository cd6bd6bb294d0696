"""Compile kernels without launching them: the launch code runs on tensors without data.

A stand-in for Triton's driver loads and launches nothing, so no device is needed. The kernels go into Triton's cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple


class Target(NamedTuple):
    """A device to compile for: Triton's name of it, and the properties that the launch code reads."""

    backend: str
    arch: int | str
    warp: int
    shared: int
    units: int


#: An H100, the target if no device is present.
HOPPER = Target("cuda", 90, 32, 227 * 1024, 132)


class Driver:
    """A driver of Triton's that loads and launches nothing."""

    def __init__(self, target: Target):
        self.target, self.utils, self._functions = target, self, itertools.count(1)

    def get_current_target(self) -> Any:
        """Return the target in Triton's form."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget(self.target.backend, self.target.arch, self.target.warp)

    def get_current_device(self) -> int:
        """Return the number of the only device."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Return the default stream."""
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        """Return the properties that the launch code reads."""
        return {"max_shared_mem": self.target.shared, "multiprocessor_count": self.target.units}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        """Return placeholders for a module, a function, registers, spills and the maximum number of threads."""
        return 1, next(self._functions), 0, 0, 1024

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        """Return a launcher that does nothing."""
        return lambda *arguments: None


def here() -> Target:
    """Return the current device as reported by Triton's driver."""
    import triton

    active = triton.runtime.driver.active
    target, facts = active.get_current_target(), active.utils.get_device_properties(active.get_current_device())
    return Target(target.backend, target.arch, target.warp_size, facts["max_shared_mem"], facts["multiprocessor_count"])


def begin(target: Target) -> None:
    """Let this process, which uses no GPU, compile for a target from now on."""
    import triton

    triton.runtime.driver.set_active(Driver(target))


def kernels() -> set[str]:
    """Return the names in Triton's cache of the kernels that this process has compiled."""
    from ringweave_gpu.triton import kernels as module

    caches = [getattr(module, name).device_caches for name in module.__all__]
    return {each.hash for of in caches for cache in of.values() for each in cache[0].values()}
