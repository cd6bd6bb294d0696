"""Calls of the Triton backend's launch code, and the kernels that each must launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import ringweave as rw
from ringweave import call as described
from ringweave.backends.backend import Upstream
from ringweave.call import Operands
from ringweave.patterns import Pattern
from ringweave.plan import branches
from ringweave_gpu.triton import launch

from .stand_in import Launch, Notes


@dataclass(frozen=True)
class Call:
    """A forward call, with gradients if requested."""

    pattern: Pattern
    nq: int
    nk: int = 0
    heads: int = 4
    kv_heads: int = 0
    dim: int = 64
    value_dim: int = 0
    batch: int = 1
    dtype: torch.dtype = torch.bfloat16
    q_offset: int = 0
    part: bool = False  # one branch of several: float32 results, and a gradient of lse
    gradients: bool = True
    device: str = "cpu"
    view: Callable[[Tensor], Tensor] = lambda x: x
    terms: str = ""  # a distance table (of 129 entries) and a bias of all pairs
    threshold: int = 0
    stored: torch.dtype | None = None  # dtype of keys and values, if 8 bits

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        nk, kv_heads, value_dim = self.nk or self.nq, self.kv_heads or self.heads, self.value_dim or self.dim
        shapes = [(self.heads, self.nq, self.dim), (kv_heads, nk, self.dim), (kv_heads, nk, value_dim)]
        kept = self.stored or self.dtype
        made = (
            torch.empty(self.batch, *of, dtype=dtype, device=self.device)
            for of, dtype in zip(shapes, (self.dtype, kept, kept), strict=True)
        )
        q, k, v = map(self.view, made)
        return q, k, v, torch.empty(*q.shape[:3], value_dim, dtype=self.dtype, device=self.device)

    def operands(self, q: Tensor, k: Tensor, v: Tensor, scales: list[Tensor]) -> Operands:
        n = self.terms.count("_")
        tables = [torch.zeros(shape) for shape in ((self.heads, 129), (1, 1, q.shape[2], k.shape[2]))[:n]]
        seed = [torch.randint(-(2**63), 2**63 - 1, ())] if self.threshold else []
        call = described.Call.of(
            q, k, v, self.pattern, scale=0.125, q_offset=self.q_offset, terms=self.terms, dropout=self.threshold
        )
        return Operands.of(call, q, k, v, [*tables, *seed, *scales])

    def __call__(self) -> None:
        q, k, v, dout = self.tensors()
        (branch,) = branches(
            self.pattern, q.shape[2], k.shape[2], heads=self.heads, batch=self.batch, q_offset=self.q_offset
        )
        dtype = torch.float32 if self.part else self.dtype
        inputs = self.operands(q, k, v, [] if self.stored is None else [torch.empty(k.shape[:3]) for _ in "kv"])
        out, lse = launch.forward(inputs, branch, dtype)
        assert (out.dtype, out.shape, lse.shape) == (dtype, dout.shape, q.shape[:3])
        if self.gradients:
            delta = launch.delta(dout, out, lse, lse if self.part else None)
            upstream = Upstream(dout, lse, delta)
            grads = launch.backward(upstream, inputs, branch, dtype)
            for got, of in zip(grads, (q, k, v), strict=True):
                assert (got.dtype, got.shape) == (dtype, of.shape)


def launched(call: Call, device: Notes) -> list[tuple[Any, Launch]]:
    """Return the kernels that a call launches, in order, as compiled."""
    device.taken()
    call()
    made = device.compiled()
    return [(made[each.function], each) for each in device.taken()]


STREAMING = ("forward", "backward_q", "backward_kv")
ALL = ["forward", "delta", "backward_q", "backward_kv"]
# few keys for many multiprocessors: columns of a group are long
SHARED = ["forward", "delta", "backward_q", "backward_kv", "join", "join"]
JOINED = ["forward", "join", "delta", "backward_q", "join", "backward_kv", "join", "join"]
TABLE = rw.patterns.random_blocks(1024, 0.4, block_size=64)
PAIRS = rw.BlockTable(
    (torch.rand(4, 8, 16, generator=torch.Generator().manual_seed(1)) < 0.4).repeat_interleave(2, 1), 64
)
HALF = torch.float16
CALLS = {
    "causal, D 64": (Call(rw.Causal(), 1024), ALL),
    "full, D 128, fp16": (Call(rw.Full(), 1000, dim=128, dtype=HALF), ALL),
    "window, D 40": (Call(rw.SlidingWindow(300), 1000, dim=40), ALL),
    "window, D 16, Dv 128, fp32": (Call(rw.SlidingWindow(300), 700, dim=16, value_dim=128, dtype=torch.float32), ALL),
    "D 256": (Call(rw.Causal(), 512, dim=256), ALL),
    "grouped": (Call(rw.Causal(), 1024, heads=8, kv_heads=2, dim=128), SHARED),
    "grouped, packed": (Call(TABLE, 1024, heads=8, kv_heads=2, batch=2), SHARED),
    "pairs": (Call(PAIRS, 1024), ALL),
    "pairs, masked": (Call(PAIRS & rw.Causal(), 1024, dim=128), ALL),
    "a branch": (Call(rw.SlidingWindow(300), 1000, part=True), ALL),
    "a branch, fp16": (Call(rw.Causal(), 1000, part=True, dtype=HALF), ALL),
    "every other token": (Call(rw.Causal(), 1000, view=lambda x: x[:, :, ::2], dim=128), ALL),
    "addresses of two bytes": (Call(rw.Causal(), 512, view=lambda x: torch.empty(x.numel() + 1)[1:].to(x.dtype).view(x.shape)), ALL),
    "heads last": (Call(rw.Causal(), 512, batch=2, view=lambda x: x.mT.contiguous().mT), ALL),
    "broadcast keys": (Call(rw.Causal(), 512, batch=2, view=lambda x: x[:, :1].expand(x.shape)), ALL),
    "D 512": (Call(rw.Causal(), 512, dim=512), ALL),
    "terms": (Call(rw.Causal(), 512, heads=8, kv_heads=2, terms="Softcap(30.0), DistanceBias(_), Bias(_)", threshold=9), ALL),
    "long lists": (Call(rw.SlidingWindow(64) | rw.Global(1), 6000, heads=2, kv_heads=1), JOINED),
    "one query": (Call(rw.Causal(), 1, 5000, heads=8, kv_heads=1, q_offset=4999, gradients=False), ["forward", "join"]),
    "int8": (Call(rw.Causal(), 1024, dim=128, stored=torch.int8, gradients=False), ["forward"]),
    "fp8, one query": (Call(rw.Causal(), 1, 5000, heads=8, kv_heads=1, q_offset=4999, stored=torch.float8_e4m3fn, gradients=False), ["forward", "join"]),
    "few queries": (Call(rw.Causal(), 5, 20_000, heads=6, kv_heads=2, dim=128, q_offset=19_995, gradients=False), ["forward", "join"]),
}  # fmt: skip
