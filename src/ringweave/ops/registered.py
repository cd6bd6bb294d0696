"""The two ``torch.library`` operators that every call goes through, with fakes and autograd.

They take a pattern as text and tables, so that ``torch.compile`` traces a call as one opaque node: planning and
dispatch happen when it runs, and a new table of the same shape recompiles nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..patterns.function import held
from ..plan import pattern_of
from .dispatch import run_backward, run_forward


@torch.library.custom_op("ringweave::attention", mutates_args=())
def attention_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tables: Sequence[Tensor],
    spec: str,
    scale: float,
    q_offset: int,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of the pattern that ``spec`` and ``tables`` spell."""
    return run_forward(q, k, v, pattern_of(spec, tables), scale, q_offset, backend)


@torch.library.custom_op("ringweave::attention_backward", mutates_args=())
def attention_backward_op(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    tables: Sequence[Tensor],
    spec: str,
    scale: float,
    q_offset: int,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv)."""
    pattern = pattern_of(spec, tables)
    return run_backward(dout, dlse, q, k, v, out, lse, pattern, scale, q_offset, backend)


@attention_op.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tables: Sequence[Tensor],
    spec: str,
    scale: float,
    q_offset: int,
    backend: str,
) -> tuple[Tensor, Tensor]:
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=wide)


@attention_backward_op.register_fake
def _(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    tables: Sequence[Tensor],
    spec: str,
    scale: float,
    q_offset: int,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return dq, dk, dv


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, tables, ctx.spec, ctx.scale, ctx.q_offset, ctx.backend = inputs
    # alive until backward has run
    ctx.held = held(ctx.spec, q)
    ctx.tables = len(tables)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, *tables)


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    if ctx.held is not None:
        ctx.held.check()
    q, k, v, out, lse, *tables = ctx.saved_tensors
    rest = (None,) * 4
    if dout is None and dlse is None:
        return (None, None, None, [None] * ctx.tables, *rest)
    dout = torch.zeros_like(out) if dout is None else dout
    dq, dk, dv = attention_backward_op(
        dout, dlse, q, k, v, out, lse, tables, ctx.spec, ctx.scale, ctx.q_offset, ctx.backend
    )
    return (dq, dk, dv, [None] * ctx.tables, *rest)


attention_op.register_autograd(_backward, setup_context=_setup)
