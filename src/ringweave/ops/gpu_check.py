"""A kernel's trial on the GPU that is here: auto takes a kernel for GPUs once it has computed a small case right on it.

One source is compiled for GPUs of many generations, by compilers of many versions, and no test machine has them all.
So the first time that auto would give a GPU kernel work of some type, head dimensions and structure, the kernel first
computes a few hundred tokens of that kind, which are compared with the definition. One that does not compile, or is
wrong, is left out for as long as the process lives, and the log says so. It costs what the kernel's first compilation
costs anyway. It is no proof of every size: tests are for that. A kernel that is named runs without.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import RingweaveError, in_a_line
from ..patterns import Causal, Full, Global, Pattern, SlidingWindow
from ..plan import Branch
from . import reference
from .backend import Backend, Case, Inputs, Upstream

# error over result, both as root mean squares: well above what rounding does, well below what a wrong kernel does
_LIMITS = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_TOKENS = 500  # the last tile of any size is cut short
_HEADS, _KV_HEADS = 4, 2
_PATTERNS: dict[str, Pattern] = {
    "full": Full(),
    "causal": Causal(),
    "sparse": SlidingWindow(260, 20) | Global(3),  # full tiles, partial ones, and rows longer than others
}
_log = logging.getLogger("ringweave")


class Kind(NamedTuple):
    """What a trial stands for."""

    device: str
    dtype: torch.dtype
    head_dim: int
    value_dim: int
    structure: str
    needs_grad: bool


_verdicts: dict[tuple[str, Kind], str | None] = {}


def reason(backend: Backend, case: Case, branch: Branch) -> str | None:
    """Why auto should not give a branch to a backend on the current GPU; None where its trial went well.

    None, too, where there is no GPU to try it on.
    """
    if case.device != "cuda" or not torch.cuda.is_available():
        return None
    device = f"cuda:{torch.cuda.current_device()}"
    kind = Kind(device, case.dtype, case.head_dim, case.value_dim, branch.structure, case.needs_grad)
    if (backend.name, kind) not in _verdicts:
        if torch.cuda.is_current_stream_capturing():
            return "it has not been tried on this GPU, and nothing can be while a graph is captured: call once before"
        verdict = _verdicts[backend.name, kind] = attempt(backend, kind)
        if verdict is not None:
            _log.warning("auto leaves out the backend %s on %s: %s", backend.name, device, verdict)
    return _verdicts[backend.name, kind]


def attempt(backend: Backend, kind: Kind) -> str | None:
    """Compute a small case, and say what is wrong with it: None if nothing is."""
    generator = torch.Generator(kind.device).manual_seed(0)

    def drawn(heads: int, dim: int) -> Tensor:
        x = torch.randn(1, heads, _TOKENS, dim, generator=generator, device=kind.device)
        return x.to(kind.dtype)

    q, k = drawn(_HEADS, kind.head_dim), drawn(_KV_HEADS, kind.head_dim)
    v, dout = drawn(_KV_HEADS, kind.value_dim), drawn(_HEADS, kind.value_dim)
    branch = Branch.whole(_PATTERNS[kind.structure], _TOKENS, _TOKENS, heads=_HEADS)
    inputs = Inputs(q, k, v, kind.head_dim**-0.5)
    out, lse = reference.forward(inputs, branch, kind.dtype)

    def results(of: Backend) -> dict[str, Tensor]:
        if not kind.needs_grad:
            return dict(zip(("out", "lse"), of.forward(inputs, branch, kind.dtype), strict=True))
        assert of.backward is not None
        upstream = Upstream(dout, lse, of.delta(dout, out, lse, None), out)
        found = of.backward(upstream, inputs, branch, kind.dtype)
        return dict(zip(("dq", "dk", "dv"), found, strict=True))

    exact = results(reference.BACKEND)
    try:
        found = results(backend)
        errors = {name: _error(found[name], exact[name]) for name in exact}
    except (RingweaveError, RuntimeError) as error:
        return f"tried on this GPU, it raises {in_a_line(error)}"
    wrong = [f"{name} by {error:.2g}" for name, error in errors.items() if not error <= _LIMITS[kind.dtype]]
    return f"tried on this GPU, it is wrong: {', '.join(wrong)} of its size" if wrong else None


def _error(found: Tensor, exact: Tensor) -> float:
    exact = exact.double()
    return float((found.double() - exact).norm() / exact.norm())
