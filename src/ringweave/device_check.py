"""Check a backend on the user's device: small cases are compared with the definition before ``auto`` first uses it.

The definition is computed in float64 on the host. The cases are published faults of some kernel: NaN in keys that no
query attends and after the last token, lengths that are no multiple of 128, 64 channels, queries that attend nothing.
A check does not prove every size right; the tests do that. A backend that the user names runs without one.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .backends import BACKENDS
from .backends.backend import Backend, Heads, Upstream
from .cache import process_cache
from .call import Call, Operands
from .errors import UnsupportedError, in_a_line
from .patterns import BlockTable, Causal, Full, Global, KeyPadding, Pattern, Selected, SlidingWindow
from .plan import Branch
from .plan.cuda_sync import require_no_capture
from .precision import Scales, quantize_rows
from .terms import KINDS
from .terms.dropout import DROPOUT_LEVELS, Dropout
from .terms.operands import TermOperands

#: Why auto leaves out a backend in a graph capture before its first check.
NOT_CHECKED = "it has not been tried on this GPU, and no trial can run during a graph capture: call it once before"
# limits of the relative root mean square error: well above rounding errors, well below the errors of a wrong kernel
_LIMITS = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_TOKENS = 500  # not a multiple of any tile size, so the last tile is incomplete
_HEADS, _KV_HEADS = 4, 2
_log = logging.getLogger("ringweave")


def form(branch: Branch) -> str:
    """Return the form of a branch's relation: "full", "causal", "sparse", or "selected" for lists of keys."""
    return "selected" if branch.lists is not None else branch.dense_kind


def small(call: Call) -> Call:
    """Return the call of the checks for a kind of call: a few hundred tokens, without a pattern."""
    sizes = 1, _HEADS, _KV_HEADS, _TOKENS, _TOKENS, call.head_dim, call.value_dim
    about = call.needs_grad, call.features, int(call.learned > 0), False, call.kv_dtype
    return Call(*sizes, call.dtype, call.device, *about)


def small_here(call: Call) -> Call | None:
    """Return the call of the checks on the current GPU; None if there is no GPU to check on."""
    if call.device != "cuda" or not torch.cuda.is_available():
        return None
    return dataclasses.replace(small(call), device=f"cuda:{torch.cuda.current_device()}")


def reason(
    backend: Backend, call: Call, branch: Branch, checked: Callable[[Backend, Call, str], str | None] | None = None
) -> str | None:
    """Return why auto should not use a checked backend for a branch on the current GPU; None if its check passed.

    Also None if there is no GPU to check it on. ``checked`` does the check of a form in another way than in this
    process.
    """
    here = small_here(call)
    try:
        return None if here is None else (checked or _checked)(backend, here, form(branch))
    except UnsupportedError:
        return NOT_CHECKED


@process_cache
def _checked(backend: Backend, small: Call, form: str) -> str | None:
    """Return why a backend fails the check of a form, once in a process; PyTorch's dense kernels take milliseconds."""
    # raised and not returned, so that no result is cached
    require_no_capture(small.device)
    found = check(backend, small, form)
    if found is not None:
        left_out(backend, small, found)
    return found


def left_out(backend: Backend, small: Call, why: str) -> None:
    """Log that auto leaves a backend out."""
    _log.warning("auto leaves out the backend %s on %s: %s", backend.name, small.device, why)


class Case(NamedTuple):
    """A small case: a call of the case's sizes, its pattern, and whether its inputs are hostile."""

    call: Call
    pattern: Pattern
    hostile: bool = False


def _cases(call: Call, form: str) -> Iterator[Case]:
    """Yield the cases of a form; together they cover each way in which kernels load tiles."""
    n = call.nq
    narrow = dataclasses.replace(call, head_dim=64, value_dim=64)
    if form == "full":
        yield Case(call, Full())
        yield Case(narrow, Full(), hostile=True)
    elif form == "causal":
        yield Case(call, Causal())
        # no query attends the last keys
        yield Case(dataclasses.replace(narrow, nq=n - 200), Causal(), hostile=True)
    elif form == "selected":
        lists = torch.randint(-1, n, (n, 37), generator=torch.Generator("cpu").manual_seed(0), device="cpu")
        lists[::7] = -1
        chosen = Selected(lists.to(call.device))
        yield Case(call, chosen)
        yield Case(narrow, chosen & KeyPadding(n - 70), hostile=True)
    else:
        # full tiles, partial tiles with keys that no query attends, longer rows
        yield Case(call, SlidingWindow(260, 20) | Global(3))
        # partial tiles without such keys, which descriptors can load
        yield Case(call, SlidingWindow(260, 0))
        # only full tiles, also of 256 x 128
        blocks = torch.tensor([[1, 0, 1, 0], [1, 0, 1, 0], [0, 1, 1, 1], [0, 1, 1, 1]], device="cpu").bool()
        yield Case(dataclasses.replace(call, nq=512, nk=512), BlockTable(blocks, 128))
        # the last queries attend nothing
        yield Case(narrow, SlidingWindow(40, 20) & KeyPadding(n - 70), hostile=True)


def check(backend: Backend, call: Call, form: str) -> str | None:
    """Compute small cases of a form and describe the first that is wrong; None if all that it can run are right."""
    tried = False
    for case in _cases(call, form):
        about = dataclasses.replace(case.call, device=torch.device(call.device).type)
        branch = Branch.whole(case.pattern, about.nq, about.nk, heads=about.heads, batch=about.batch)
        if backend.unsupported_reason(about, branch) is not None:
            continue
        tried = True
        verdict = _check(backend, case, branch)
        if verdict is not None:
            return verdict
    return None if tried else "it can run no case of the trial"


def _check(backend: Backend, case: Case, branch: Branch) -> str | None:
    call = case.call
    exact, dout = sample(call, branch, "cpu")
    if case.hostile:
        _spoil(exact, dout, branch)
    wanted = _results(BACKENDS["reference"], exact, dout, branch, call, None)
    given = _on(exact, torch.device(call.device), case.hostile)
    lse = wanted["lse"].to(call.device), wanted["out"].to(call.device)
    try:
        computed = _results(backend, given, dout.to(call.device), branch, call, lse)
        errors = {name: _error(computed[name].cpu(), wanted[name]) for name in computed}
    except Exception as error:  # noqa: BLE001 compilers raise exceptions of any type
        return f"tried on this GPU, it raises {in_a_line(error)}"
    wrong = [f"{name} by {error:.2g}" for name, error in errors.items() if not error <= _LIMITS[call.dtype]]
    return f"tried on this GPU, it is wrong: {', '.join(wrong)} of its size" if wrong else None


def _results(
    of: Backend, operands: Operands, dout: Tensor, branch: Branch, call: Call, forward: tuple[Tensor, Tensor] | None
) -> dict[str, Tensor]:
    """Return the results of a direction, and gradients of the terms' tables; ``forward`` is the exact (lse, out)."""
    if forward is None or not call.needs_grad:
        out, lse = of.forward(operands, branch, call.dtype)
        found = {"out": out, "lse": lse}
    else:
        lse, out = forward
        found = {}
    if call.needs_grad:
        assert of.backward is not None
        learned = [] if operands.terms is None else [total for total in operands.terms.totals if total is not None]
        upstream = Upstream(dout, lse, of.delta(dout, out, lse, None), out)
        grads = of.backward(upstream, operands, branch, call.dtype)
        found |= dict(zip(("dq", "dk", "dv"), grads, strict=True))
        found |= {f"table {i}": total for i, total in enumerate(learned)}
    return found


def sample(call: Call, branch: Branch, device: str) -> tuple[Operands, Tensor]:
    """Draw the operands of a branch of a call, and the gradient of its output, on a device."""
    generator = torch.Generator(device).manual_seed(0)
    shared = Heads(branch, call.heads // call.kv_heads)
    kv_heads = shared.count if shared.repeat is None else branch.head_count

    def drawn(heads: int, tokens: int, dim: int) -> Tensor:
        return torch.randn(call.batch, heads, tokens, dim, generator=generator, device=device).to(call.dtype)

    q, k = drawn(branch.head_count, branch.nq, call.head_dim), drawn(kv_heads, branch.nk, call.head_dim)
    v, dout = drawn(kv_heads, branch.nk, call.value_dim), drawn(branch.head_count, branch.nq, call.value_dim)
    scales = None
    if call.kv_dtype is not None:
        (k, of_k), (v, of_v) = quantize_rows(k, call.kv_dtype), quantize_rows(v, call.kv_dtype)
        scales = Scales(of_k, of_v)
    return Operands(q, k, v, call.head_dim**-0.5, _terms(call, branch, generator), None, scales), dout


def _terms(call: Call, branch: Branch, generator: torch.Generator) -> TermOperands | None:
    """Return example terms and dropout for a branch; their tables get gradients if those of the call do."""
    if not call.features:
        return None
    device, sides = generator.device, (call.batch, branch.head_count, branch.nq, branch.nk)
    terms = tuple(kind.example(*sides, generator) for name, kind in KINDS.items() if name in call.features)
    totals = tuple(
        term.total(name, torch.float32) if call.learned and name in term.learns else None
        for term in terms for name in term.axes
    )  # fmt: skip
    heads, rows, columns = (torch.arange(side, device=device) for side in sides[1:])
    offsets = torch.zeros(call.batch, 2, dtype=torch.int64, device=device)
    dropout = Dropout(DROPOUT_LEVELS // 8, 2**40 + 7) if "dropout" in call.features else None
    return TermOperands(terms, dropout, heads, rows, columns, offsets, totals)


def _spoil(operands: Operands, dout: Tensor, branch: Branch) -> None:
    """Write NaN into keys that no query attends, and into queries that attend nothing, with their gradients."""
    allowed = branch.pattern.to_dense(branch.nq, branch.nk, branch.head_count, batch=branch.batch)[0].any(0)
    for x, alive in (
        (operands.k, allowed.any(0)),
        (operands.v, allowed.any(0)),
        (operands.q, allowed.any(1)),
        (dout, allowed.any(1)),
    ):
        if x.is_floating_point() and x.element_size() > 1:
            x[:, :, ~alive] = torch.nan


def _on(operands: Operands, device: torch.device, padded: bool) -> Operands:
    """Return operands on a device; ``padded`` puts NaN after the last token in memory."""

    def moved(x: Tensor) -> Tensor:
        if not padded or x.element_size() == 1:
            return x.to(device)
        more = torch.full((*x.shape[:2], x.shape[2] + 140, x.shape[3]), torch.nan, dtype=x.dtype, device=device)
        more[:, :, : x.shape[2]] = x
        return more[:, :, : x.shape[2]]

    terms, scales = operands.terms, operands.scales
    if terms is not None:
        there = {name: getattr(terms, name).to(device) for name in ("heads", "rows", "columns", "offsets")}
        tables = tuple(term.over(*(table.to(device) for table in term.tables)) for term in terms.terms)
        totals = tuple(None if total is None else torch.zeros_like(total, device=device) for total in terms.totals)
        terms = terms._replace(terms=tables, totals=totals, **there)
    scales = None if scales is None else Scales(*(x.to(device) for x in scales))
    return operands.map(moved)._replace(terms=terms, scales=scales)


def _error(computed: Tensor, exact: Tensor) -> float:
    """Return the relative root mean square error; an lse of -inf is no error where it is expected."""
    computed, exact = computed.double(), exact.double()
    off = torch.where(computed == exact, 0.0, computed - exact)
    return float(off.norm() / exact[exact.isfinite()].norm())
