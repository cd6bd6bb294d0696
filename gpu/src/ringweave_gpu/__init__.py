"""Backends of ringweave on a GPU: our Triton kernels with the trials that must prove them, flash-attn-4 and attn-gym.

ringweave finds them by the entry points ``ringweave.backends`` of this distribution.
"""

from __future__ import annotations

import importlib

from ringweave.backends import BACKENDS

_NAMES = ("attn_gym", "flash_attn_4", "triton")


def register() -> None:
    """Add the backends to ringweave where this package runs from its sources, which have no entry points."""
    for name in _NAMES:
        if name not in BACKENDS:
            BACKENDS[name] = importlib.import_module(f".{name}", __name__).BACKEND
