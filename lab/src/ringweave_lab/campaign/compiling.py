"""Kernels compiled without a launch: the launch code runs as it would, on tensors without data.

Its driver loads and launches nothing, so that no device is needed; what it compiles goes into Triton's own cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple


class Target(NamedTuple):
    """What is compiled for: Triton's name of it, and what the launch code reads of a device."""

    backend: str
    arch: int | str
    warp: int
    shared: int
    units: int


#: An H100, where there is no device to ask.
HOPPER = Target("cuda", 90, 32, 227 * 1024, 132)


class Driver:
    """A driver of Triton's that loads and launches nothing."""

    def __init__(self, target: Target):
        self.target, self.utils, self._functions = target, self, itertools.count(1)

    def get_current_target(self) -> Any:
        """Name what is compiled for."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget(self.target.backend, self.target.arch, self.target.warp)

    def get_current_device(self) -> int:
        """Number the only device."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Give the default stream."""
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        """Say what the launch code asks."""
        return {"max_shared_mem": self.target.shared, "multiprocessor_count": self.target.units}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        """Give a module, a function, registers, spills and most threads of what is not loaded."""
        return 1, next(self._functions), 0, 0, 1024

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        """Make a launcher of nothing."""
        return lambda *arguments: None


def here() -> Target:
    """Ask Triton's own driver for the current device."""
    import triton

    active = triton.runtime.driver.active
    target, facts = active.get_current_target(), active.utils.get_device_properties(active.get_current_device())
    return Target(target.backend, target.arch, target.warp_size, facts["max_shared_mem"], facts["multiprocessor_count"])


def begin(target: Target) -> None:
    """Let this process, which uses no GPU, compile for a target from now on."""
    import triton

    triton.runtime.driver.set_active(Driver(target))


def kernels() -> set[str]:
    """Name what this process has compiled, by what Triton's cache calls it."""
    from ringweave.backends.triton import kernels as module

    caches = [getattr(module, name).device_caches for name in module.__all__]
    return {each.hash for of in caches for cache in of.values() for each in cache[0].values()}
