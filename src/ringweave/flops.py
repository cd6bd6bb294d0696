"""Flop formulas of the operators, for ``torch.utils.flop_counter``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .cache import process_cache
from .call import Call, lines_of
from .program import Program
from .torch_compat import dispatch_modes

_FORWARD, _BACKWARD = 2, 5  # matrix products


def _pairs(call: Call, tables: Sequence[Tensor]) -> int:
    if any(type(table) is not Tensor for table in tables):
        # these tensors have no values, so every pair counts
        return call.batch * call.heads * call.nq * call.nk
    return sum(
        branch.plan().computed_pairs() if backend.planned or branch.dense_kind == "sparse" else branch.pairs()
        for branch, backend in Program(call).steps
    )


def _forward_flops(
    q: Tensor, k: Tensor, v: Tensor, tensors: Sequence[Tensor], text: str, *numbers: Any, **_: Any
) -> int:
    if "paged" in lines_of(text)[1]:
        return 0
    call = Call.read(text, q, k, v, tensors, *numbers)
    return _FORWARD * (call.head_dim + call.value_dim) * _pairs(call, call.pattern.tables)


def _backward_flops(dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *call: Any, **_: Any) -> int:
    # without (out, lse), and which tensors learn
    return _forward_flops(q, k, v, *call[2:-1]) * _BACKWARD // _FORWARD


@process_cache
def register() -> None:
    """Register flop formulas with torch, and with counters that are already active.

    ``torch.utils.flop_counter`` imports triton, so call this only once a caller has loaded it.
    """
    from torch.utils import flop_counter

    formulas: dict[Any, Any] = {
        torch.ops.ringweave.attention: _forward_flops,
        torch.ops.ringweave.attention_backward: _backward_flops,
    }
    for packet, formula in formulas.items():
        flop_counter.register_flop_formula(packet, get_raw=True)(formula)
    for mode in dispatch_modes():
        registry = getattr(getattr(mode, "counter", mode), "flop_registry", None)
        if isinstance(registry, dict):
            registry.update({packet: flop_counter.flop_registry[packet] for packet in formulas})
