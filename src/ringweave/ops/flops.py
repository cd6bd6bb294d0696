"""Operations of a call, as PyTorch's ``FlopCounterMode`` asks for them: those of the tiles that are computed."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..plan import pattern_of
from ..torch_compat import dispatch_modes
from . import dispatch
from .backend import Case, Inputs

_FORWARD, _BACKWARD = 2, 5  # matrix products


def _pairs(case: Case, tables: Sequence[Tensor], spec: str, q_offset: int, backend: str) -> int:
    if any(type(table) is not Tensor for table in tables):
        # tensors without values: as many as there may be
        return case.batch * case.heads * case.nq * case.nk
    steps = dispatch.program(pattern_of(spec, tables), case, q_offset, backend)
    return sum(
        branch.plan().computed_pairs() if chosen.planned or branch.structure == "sparse" else branch.pairs()
        for branch, chosen in steps
    )


def _forward(q: Tensor, k: Tensor, v: Tensor, *call: Any, **_: Any) -> int:
    tables, spec, scale, q_offset, backend = call[:5]
    case = Case.of(Inputs(q, k, v, scale))
    return _FORWARD * (case.head_dim + case.value_dim) * _pairs(case, tables, spec, q_offset, backend)


def _backward(dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *call: Any, **_: Any) -> int:
    return _forward(q, k, v, *call[2:]) * _BACKWARD // _FORWARD


@functools.cache
def register() -> None:
    """Tell counters, those that count already too. Their module imports triton: called once somebody else has."""
    from torch.utils import flop_counter

    formulas: dict[Any, Any] = {
        torch.ops.ringweave.attention: _forward,
        torch.ops.ringweave.attention_backward: _backward,
    }
    for packet, formula in formulas.items():
        flop_counter.register_flop_formula(packet, get_raw=True)(formula)
    for mode in dispatch_modes():
        registry = getattr(getattr(mode, "counter", mode), "flop_registry", None)
        if isinstance(registry, dict):
            registry.update({packet: flop_counter.flop_registry[packet] for packet in formulas})
