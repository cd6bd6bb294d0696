"""Backends. Each computes branches of a call from tensors and a plan."""

from __future__ import annotations

from . import cpu, dense_batched, flash, flex, reference, sdpa, torch_sparse, triton
from .backend import Backend

#: All backends by name.
BACKENDS: dict[str, Backend] = {
    module.BACKEND.name: module.BACKEND
    for module in (reference, dense_batched, sdpa, cpu, triton, flex, flash, torch_sparse)
}
