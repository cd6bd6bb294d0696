"""Compare kernels over keys and values of 8 bits with PyTorch's own attention over the stored numbers."""

from __future__ import annotations

from typing import Any

import torch

import ringweave as rw
from ringweave.patterns import Pattern
from tests.oracle import Expected, Inputs, torch_errors
from tests.test_precision import kept


def stored_conforms(
    x: Inputs, pattern: Pattern, kv: torch.dtype, q_offset: int = 0, scale: float | None = None
) -> None:
    """Compare the Triton kernel with PyTorch's own attention over the stored numbers, converted to the dtype of q."""
    call: dict[str, Any] = {"q_offset": q_offset, "scale": scale}
    got = rw.attention_with_lse(x.q, x.k, x.v, pattern, precision=rw.Precision(kv=kv), backend="triton", **call)
    stored, sizes = kept(x, kv), (x.q.shape[2], x.k.shape[2], x.q.shape[1])
    counts = pattern.to_dense(*sizes, batch=len(x.q), q_offset=q_offset).to(x.q.device)
    expected = Expected.of(stored, counts, scale)
    given = Inputs(x.q, stored.k.to(x.q.dtype), stored.v.to(x.q.dtype), x.dout, x.dlse)
    assert got.out.dtype == x.q.dtype
    expected._replace(theirs=torch_errors(given, counts, expected.results, scale)).check(got._asdict())
