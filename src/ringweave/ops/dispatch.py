"""Which backend computes a branch, and a program of branches computed with it.

Branches are strided views of the same tensors. Forward merges their (out, lse) in place; backward needs no merge: with
the whole attention's lse each branch's gradients are its share, and they are added.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..errors import UnsupportedError, message, shown
from ..merge import merge_into
from ..patterns import Pattern
from ..plan import Branch, branches
from ..plan.from_pattern import default_tile
from ..types import acc_dtype
from . import cpu, flash, flex, forks, gather, reference, sdpa, torch_sparse, triton, tuning
from .backend import Backend, Case, Heads, Inputs, Upstream, delta_in_chunks, readable

BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        reference.BACKEND, gather.BACKEND, sdpa.BACKEND, cpu.BACKEND, triton.BACKEND, flex.BACKEND, flash.BACKEND,
        torch_sparse.BACKEND,
    )
}  # fmt: skip
# what auto considers, best first; the last one runs everything
PREFERENCE: tuple[str, ...] = ("cpu", "sdpa", "flash", "triton", "gather")
# tiles (128 x 128) beyond which a dense branch goes to a kernel that needs no plan: 16 bytes a tile add up
_DENSE_TILES = 2**23


def names() -> tuple[str, ...]:
    """List what ``backend=`` takes."""
    return ("auto", *BACKENDS)


def choose(name: str, case: Case, branch: Branch) -> Backend:
    """Choose the backend for one branch.

    Raises:
        UnsupportedError: An unknown name, or a named backend that cannot run the branch, with the reason.
    """
    return step(name, case, branch)[1]


def step(name: str, case: Case, branch: Branch) -> tuple[Branch, Backend]:
    """Choose one branch's backend, as :func:`choose`; auto may give it the tiles that were measured to suit both."""
    if name == "auto":
        usual = (backend for backend, reason in candidates(case, branch) if reason is None)
        return measured(case, branch) or (branch, next(usual))
    backend = BACKENDS.get(name)
    if backend is None:
        raise UnsupportedError(message("backend", shown(name), f"one of {', '.join(names())}", "Use 'auto'."))
    reason = refusal(backend, case, branch)
    if reason is not None:
        raise UnsupportedError(
            message("backend", repr(name), f"a case that it can run, but {reason}", "Use backend='auto' or 'gather'.")
        )
    return branch, backend


def measured(case: Case, branch: Branch) -> tuple[Branch, Backend] | None:
    """Look up what ``ringweave tune`` found fastest for this kind of call here, if that backend can run it."""
    # what was measured was without terms, pages and scales
    answer = None if case.extras or case.paged or case.stored else tuning.lookup(case, branch)
    backend = None if answer is None else BACKENDS.get(answer.backend)
    if answer is None or backend is None or not backend.branched or backend.experimental:
        return None
    if refusal(backend, case, branch) is not None:
        return None
    if answer.tile is not None and backend.tiled:
        other = dataclasses.replace(branch, sides=answer.tile)
        branch = other if refusal(backend, case, other) is None else branch
    return branch, backend


def candidates(case: Case, branch: Branch) -> Iterator[tuple[Backend, str | None]]:
    """List what auto considers where nothing was measured, in order, with why it does not take it (None: it does)."""
    ordered = list(PREFERENCE)
    if branch.structure != "sparse" and branch.nq * branch.nk > _DENSE_TILES * 128**2:
        ordered.sort(key=lambda name: BACKENDS[name].planned)
    for name in ordered:
        yield BACKENDS[name], _why_not(BACKENDS[name], case, branch)


def refusal(backend: Backend, case: Case, branch: Branch) -> str | None:
    """Say why a backend cannot run a branch of a case; None where it can."""
    if case.needs_grad and backend.backward is None:
        return "it is forward-only, and an input requires gradients (detach the inputs, or use torch.no_grad)"
    if not case.extras <= backend.extras:
        return f"it computes no {' and no '.join(sorted(case.extras - backend.extras))}"
    if case.paged and not backend.paged:
        return "it reads no pages"
    if case.stored is not None and not backend.stored:
        return f"it reads no keys and values in {case.stored}"
    return backend.refusal(case, branch)


def _why_not(backend: Backend, case: Case, branch: Branch) -> str | None:
    """Say why auto does not take a backend by itself; None where it may."""
    if backend.checked and not backend.planned and branch.structure == "sparse" and case.device != "cpu":
        return "auto gives it sparse patterns only where ringweave tune found it fastest"
    reason = refusal(backend, case, branch)
    if reason is not None or not backend.checked:
        return reason
    # Triton's interpreter is for tests
    if case.device == "cpu":
        return "on a CPU it is used only when named"
    from . import gpu_check

    return gpu_check.reason(backend, case, branch)


def program(pattern: Pattern, case: Case, q_offset: int, backend: str) -> list[tuple[Branch, Backend]]:
    """Split a call into branches, each with its backend; auto may give them other tiles.

    A named backend keeps the tiles that length and pattern suggest: the bits of what was named depend on no store.
    """
    if backend in BACKENDS and not BACKENDS[backend].branched:
        whole = Branch.whole(pattern, case.nq, case.nk, heads=case.heads, batch=case.batch, q_offset=q_offset)
        return [(whole, choose(backend, case, whole))]
    if case.paged:
        # a page is not cut into strided views, and lies in tiles or tiles in it: sides are powers of two
        whole = Branch.whole(pattern, case.nq, case.nk, heads=case.heads, batch=case.batch, q_offset=q_offset)
        if whole.tile[1] & (whole.tile[1] - 1):
            whole = dataclasses.replace(whole, sides=(default_tile(case.nq), default_tile(case.nk)))
        return [step(backend, case, whole)]
    split = branches(pattern, case.nq, case.nk, heads=case.heads, batch=case.batch, q_offset=q_offset)
    return [step(backend, case, branch) for branch in split]


def run_forward(inputs: Inputs, pattern: Pattern, q_offset: int, backend: str) -> tuple[Tensor, Tensor]:
    """Compute (out, lse) of a pattern; out in q's dtype."""
    forks.check(inputs.q.device)
    inputs = inputs.map(readable)
    q, _, v = inputs[:3]
    case = Case.of(inputs)
    steps = program(pattern, case, q_offset, backend)
    if len(steps) == 1 and is_whole(steps[0][0], case):
        branch, chosen = steps[0]
        return chosen.forward(inputs, branch, q.dtype)
    acc = acc_dtype(q.dtype)
    out = q.new_zeros(*q.shape[:3], v.shape[3], dtype=acc)
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=acc)
    for branch, chosen in steps:
        view = View(branch, case)
        part, part_lse = chosen.forward(view.of(inputs), branch, acc)
        merge_into(view.of_q(out), view.of_q(lse), part, part_lse)
    return out.to(q.dtype), lse


def run_backward(
    dout: Tensor,
    dlse: Tensor | None,
    inputs: Inputs,
    out: Tensor,
    lse: Tensor,
    pattern: Pattern,
    q_offset: int,
    backend: str,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute (dq, dk, dv) of a pattern, in a dtype, by default the inputs'."""
    forks.check(inputs.q.device)
    dout, inputs = readable(dout), inputs.map(readable)
    case = Case.of(inputs, needs_grad=True)
    # a row with an infinite score is NaN, its weights too
    lse = lse.masked_fill(torch.isposinf(lse), torch.nan)
    steps = program(pattern, case, q_offset, backend)
    delta = (steps[0][1].delta if steps else delta_in_chunks)(dout, out, lse, dlse)
    if len(steps) == 1 and is_whole(steps[0][0], case):
        branch, chosen = steps[0]
        assert chosen.backward is not None
        whole = Upstream(dout, lse, delta, out if dlse is None else None)
        return chosen.backward(whole, inputs, branch, dtype or case.dtype)
    totals = [torch.zeros_like(x, dtype=lse.dtype, memory_format=torch.contiguous_format) for x in inputs[:3]]
    for branch, chosen in steps:
        assert chosen.backward is not None
        view = View(branch, case)
        mine = Upstream(view.of_q(dout), view.of_q(lse), view.of_q(delta))
        dq, dk, dv = chosen.backward(mine, view.of(inputs), branch, lse.dtype)
        view.of_q(totals[0]).add_(dq)
        view.add_to_k(totals[1], dk)
        view.add_to_k(totals[2], dv)
    dq, dk, dv = (total.to(dtype or case.dtype) for total in totals)
    return dq, dk, dv


def is_whole(branch: Branch, case: Case) -> bool:
    """Whether a branch is the whole call: no view of it."""
    return branch.rate == 1 and branch.head_count == case.heads


class View:
    """A branch's part of tensors laid out (B, heads, tokens, ...): strided views, no copies where heads allow it.

    Attributes:
        heads: Its heads.
        queries: Its queries.
        keys: Its keys.
    """

    def __init__(self, branch: Branch, case: Case):
        self.heads = Heads(branch, case.heads // case.kv_heads)
        self.queries = slice(branch.q_first, None, branch.rate)
        self.keys = slice(branch.k_first, None, branch.rate)

    def of(self, inputs: Inputs) -> Inputs:
        """Its part of all."""
        scoring = inputs.scoring
        if scoring is not None:
            heads, rows, columns = scoring.heads[self.heads.queries], scoring.rows, scoring.columns
            scoring = scoring._replace(heads=heads, rows=rows[self.queries], columns=columns[self.keys])
        return inputs._replace(q=self.of_q(inputs.q), scoring=scoring).of_keys(self.of_k)

    def of_q(self, x: Tensor) -> Tensor:
        """Its queries of (B, Hq, Nq, ...)."""
        return x[:, self.heads.queries, self.queries]

    def of_k(self, x: Tensor) -> Tensor:
        """Its keys of (B, Hkv, Nk, C), as a kernel takes them."""
        return self.heads.for_kernel(self.heads.of_keys(x[:, :, self.keys]))

    def add_to_k(self, total: Tensor, part: Tensor) -> None:
        """Add what a kernel gives to (B, Hkv, Nk, C)."""
        tokens = total[:, :, self.keys]
        self.heads.update(tokens, Tensor.add_, self.heads.from_kernel(part))


def describe(steps: Sequence[tuple[Branch, Backend]]) -> list[tuple[int, str]]:
    """Count branches by backend, for people: [(branches, backend), ...] in order of first use."""
    counts: dict[str, int] = {}
    for _, backend in steps:
        counts[backend.name] = counts.get(backend.name, 0) + 1
    return [(number, name) for name, number in counts.items()]
