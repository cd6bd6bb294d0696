"""Backends of ringweave on a GPU: our Triton kernels with the trials that must prove them, flash-attn-4 and attn-gym.

Keys and values may stay on the host (``host_offload``). ringweave finds all of this by the distribution's entry points.
"""

from __future__ import annotations

import importlib

from ringweave.backends import BACKENDS
from ringweave.plugins import HOST_PROGRAMS

_NAMES = ("attn_gym", "flash_attn_4", "triton")


def register() -> None:
    """Add all of these to ringweave where this package runs from its sources, which have no entry points."""
    for name in _NAMES:
        if name not in BACKENDS:
            BACKENDS[name] = importlib.import_module(f".{name}", __name__).BACKEND
    if not HOST_PROGRAMS:
        HOST_PROGRAMS.append(importlib.import_module(".host_offload", __name__).HostProgram)
