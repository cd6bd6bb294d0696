"""Compile a call to a program, a list of steps: each step is a branch and the backend that computes it.

Branches are strided views of the same tensors. Forward merges their (out, lse) in place. Backward needs no merge: each
branch's gradients are computed with the lse of the whole attention, so they add up.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .backends import BACKENDS, forks, merge_into, tuning
from .backends.backend import (
    Backend,
    Heads,
    Part,
    Prepared,
    PreparedStep,
    Trials,
    Upstream,
    Verdict,
    delta_in_chunks,
    readable,
)
from .backends.tile_batches import tile_within
from .call import Call, Operands, term_operands
from .errors import UnsupportedError, shown
from .patterns.lists import lists_in, with_lists
from .plan import BlockPlan, Branch, branches, branches_of_step, summands
from .plan.tile_size import default_tile_size
from .terms.function import FUNCTION
from .terms.term import tables_in
from .torch_compat import constant_in_traces
from .types import acc_dtype

if TYPE_CHECKING:
    from .patterns import Pattern
    from .terms.operands import TermOperands

# backends of this package that auto considers without a trial or measurement, best first; the last one runs every call
PREFERENCE: tuple[str, ...] = ("cpu", "sdpa", "flash", "gather", "flex", "dense_batched")
# Larger calls are not prepared, since their compute time hides the overhead. The bounds are rows of tiles over batch
# and heads, and listed tiles.
_MOST_ROWS, _MOST_TILES = 2**12, 2**14
# A dense branch of more tiles (128 x 128) prefers kernels that need no plan: a plan takes 16 bytes per tile.
_DENSE_TILES = 2**23


class Step(NamedTuple):
    """A branch of a call and the backend that computes it."""

    branch: Branch
    backend: Backend


def names() -> tuple[str, ...]:
    """List the values that ``backend=`` accepts."""
    return ("auto", *BACKENDS)


def named_backend(name: object) -> Backend:
    """Return the backend that a user named.

    Raises:
        UnsupportedError: There is no such backend, or its distribution is not installed.
    """
    backend = BACKENDS.get(name) if isinstance(name, str) else None
    if backend is not None:
        return backend
    # imported for an error
    from .plugins import require_backend

    if isinstance(name, str):
        require_backend(name)
    raise UnsupportedError("backend", shown(name), f"one of {', '.join(names())}", "Use 'auto'.")


def check_name(name: object) -> None:
    """Raise UnsupportedError unless ``backend=`` accepts a value."""
    if not isinstance(name, str) or (name != "auto" and not _known(name)):
        named_backend(name)


# it may import what other distributions declare
@constant_in_traces
def _known(name: str) -> bool:
    return name in BACKENDS


def preference(device: str) -> list[str]:
    """Return the backends that auto considers without a trial or measurement, best first.

    On a device that is not a CPU, backends of other distributions are among them (``Backend.before``).
    """
    ordered = list(PREFERENCE)
    for name, backend in sorted(BACKENDS.items()) if device != "cpu" else ():
        if backend.before is not None:
            ordered.insert(ordered.index(backend.before), name)
    return ordered


def trials(device: str) -> Trials | None:
    """Return the trials of backends on a device that is not a CPU; None if no installed distribution holds trials."""
    if device == "cpu":
        return None
    return next((backend.trials() for backend in BACKENDS.values() if backend.trials is not None), None)


def verdict_on(call: Call, branch: Branch) -> Verdict | None:
    """Return the verdict of a trial of this kind of call, or None without one."""
    held = trials(call.device)
    return None if held is None else held.known(call, branch)


def choose_backend(name: str, call: Call, branch: Branch) -> Backend:
    """Choose the backend for one branch.

    Raises:
        UnsupportedError: The name is unknown, or the named backend cannot run the branch; the message says why.
    """
    return choose_step(name, call, branch).backend


def choose_step(name: str, call: Call, branch: Branch) -> Step:
    """Choose the backend of one branch, and under auto the measured tile sizes; see :func:`choose_backend`."""
    if name == "auto":
        held = trials(call.device)
        if held is not None:
            held.begin(call, branch, contenders)
        usual = (backend for backend, reason in candidates(call, branch) if reason is None)
        return measured(call, branch) or Step(branch, next(usual))
    backend = named_backend(name)
    reason = unsupported_reason(backend, call, branch)
    if reason is not None:
        wanted = f"a case that it can run, but {reason}"
        raise UnsupportedError("backend", repr(name), wanted, "Use backend='auto' or 'dense_batched'.")
    return Step(branch, backend)


def measured(call: Call, branch: Branch) -> Step | None:
    """Return the step that was measured to be fastest here, or None without one that can run.

    ``ringweave tune`` measures on a CPU, without terms, pages and scales; a trial measures on a GPU.
    """
    answer: tuning.Answer | None = None
    if call.device != "cpu":
        verdict = verdict_on(call, branch)
        answer = None if verdict is None or verdict.best is None else tuning.Answer(verdict.best)
    elif not (call.features or call.paged or call.kv_dtype):
        answer = tuning.lookup(call, branch)
    backend = None if answer is None else BACKENDS.get(answer.backend)
    if answer is None or backend is None or not backend.branched or backend.experimental:
        return None
    if unsupported_reason(backend, call, branch) is not None:
        return None
    if answer.tile is not None and backend.tiled:
        other = dataclasses.replace(branch, tile_size=answer.tile)
        branch = other if unsupported_reason(backend, call, other) is None else branch
    return Step(branch, backend)


def contenders(call: Call, branch: Branch) -> list[str]:
    """Return the names of the backends that a trial of a call compares, in auto's order.

    Last are those that auto does not use without a trial: they have to be faster than the first.
    """
    able = [
        each
        for each in map(BACKENDS.__getitem__, preference(call.device))
        if unsupported_reason(each, call, branch) is None
    ]
    able.sort(key=lambda each: each.untried is not None and each.untried(call, branch) is not None)
    return [each.name for each in able]


def candidates(call: Call, branch: Branch) -> Iterator[tuple[Backend, str | None]]:
    """Yield the backends that auto considers without measurements, in order, with a reason against each or None."""
    ordered = preference(call.device)
    if branch.dense_kind != "sparse" and branch.nq * branch.nk > _DENSE_TILES * 128**2:
        ordered.sort(key=lambda name: BACKENDS[name].planned)
    for name in ordered:
        yield BACKENDS[name], _why_not(BACKENDS[name], call, branch)


def unsupported_reason(backend: Backend, call: Call, branch: Branch) -> str | None:
    """Return why a backend cannot run a branch of a call, or None if it can."""
    if call.needs_grad and backend.backward is None:
        return "it is forward-only, and an input requires gradients (detach the inputs, or use torch.no_grad)"
    if missing := backend.lacks(call.features, call.device):
        return f"it computes no {' and no '.join(sorted(missing))}"
    if call.paged and not backend.paged:
        return "it reads no pages"
    if call.kv_dtype is not None and call.kv_dtype not in backend.kv_dtypes:
        return f"it reads no keys and values in {call.kv_dtype}"
    return backend.unsupported_reason(call, branch)


def _why_not(backend: Backend, call: Call, branch: Branch) -> str | None:
    """Return why auto does not choose a backend, or None if it may."""
    reason = unsupported_reason(backend, call, branch)
    if reason is None and branch.nq < backend.least_queries:
        return "it compiles for each length, and calls of so few queries, as steps of decoding, have many"
    if reason is not None or call.device == "cpu" or backend.name == PREFERENCE[-1]:
        return reason
    held = trials(call.device)
    verdict = None if held is None else held.known(call, branch)
    if verdict is not None and backend.name in verdict.outcomes:
        return verdict.outcomes[backend.name].reason
    if backend.untried is not None and (reason := backend.untried(call, branch)) is not None:
        return reason
    if not backend.checked:
        return None
    if held is not None:
        return held.reason(backend, call, branch)
    # imported where there is a GPU
    from . import device_check

    return device_check.reason(backend, call, branch)


class Returned(NamedTuple):
    """The outputs of forward and their gradients.

    Attributes:
        dout: Gradient of out, (B, Hq, Nq, Dv).
        dlse: Gradient of lse, (B, Hq, Nq), or None.
        out: Output, (B, Hq, Nq, Dv).
        lse: Log-sum-exp of each row's scaled scores, (B, Hq, Nq).
    """

    dout: Tensor
    dlse: Tensor | None
    out: Tensor
    lse: Tensor

    def detached(self) -> Returned:
        """Return them as kernels read them: dout with adjacent channels, and lse NaN in rows with an infinite score.

        The weights of such a row then are NaN.
        """
        # one launch on a GPU
        lse = self.lse.nan_to_num(nan=torch.nan, posinf=torch.nan, neginf=-torch.inf)
        return self._replace(dout=readable(self.dout), lse=lse)


def compiled(call: Call, *, step: bool = False) -> tuple[Step, ...]:
    """Split a call into branches and choose a backend for each.

    Only auto may change the tile sizes. A named backend keeps those that follow from lengths and pattern, so that its
    bits do not depend on stored measurements. With ``step`` the call is a decoding step of one query at the last key.

    Raises:
        UnsupportedError: The named backend cannot run the call.
    """
    sizes = {"heads": call.heads, "batch": call.batch, "q_offset": call.q_offset}
    if call.backend != "auto" and not named_backend(call.backend).branched:
        whole = Branch.whole(call.pattern, call.nq, call.nk, **sizes)
        return (Step(whole, choose_backend(call.backend, call, whole)),)
    if FUNCTION in call.features:
        return (choose_step(call.backend, call, branch_of_function(call)),)
    if call.paged:
        # Pages are not cut into strided views. On a GPU, tile sizes are powers of two, so that tiles and pages divide
        # each other.
        parts = [Branch.whole(part, call.nq, call.nk, **sizes) for part in summands(call.pattern)]
        for at, part in enumerate(parts):
            if call.device != "cpu" and part.tile[1] & (part.tile[1] - 1):
                parts[at] = dataclasses.replace(
                    part, tile_size=(default_tile_size(call.nq), default_tile_size(call.nk))
                )
        return tuple(choose_step(call.backend, call, part) for part in parts)
    if step and call.pattern.combinable:
        split = branches_of_step(call.pattern, call.nk, heads=call.heads, batch=call.batch)
    else:
        split = branches(call.pattern, call.nq, call.nk, **sizes)
    if call.summation_order == "fast":
        split = tuple(dataclasses.replace(branch, spacing=None) for branch in split)
    return tuple(choose_step(call.backend, call, branch) for branch in split)


def branch_of_function(call: Call) -> Branch:
    """Return the branch of a call with a score function: the whole call, in tiles that hold the function's values."""
    whole = Branch.whole(call.pattern, call.nq, call.nk, heads=call.heads, batch=call.batch, q_offset=call.q_offset)
    return dataclasses.replace(whole, spacing=None, tile_size=tile_within(whole.tile, call.pair_bytes, call.device))


class Program:
    """A call and the steps that compute it.

    Args:
        call: The call.
        constant: Whether the pattern cannot change; the program of a small call then holds its plans.
    Attributes:
        direct: Whether it runs without its operator also where something watches operators.
    """

    direct = False

    def __init__(self, call: Call, *, constant: bool = False):
        self.call, self.constant = call, constant
        #: Version of the tuning table that the program was compiled with.
        self.tuning_version = tuning.current()
        #: The pattern's tables if it is constant, else empty.
        self.tables = call.pattern.tables if constant else ()
        #: Kernel arguments of a small call or of decoding steps; None if its backends prepare none.
        self.prepared: Prepared | None = None
        #: Numbers of keys for which the pattern of decoding steps was checked: the fewest and the most of a sequence.
        self.fits = 0, 0
        #: Kernel arguments of decoding steps over pages; None if the general path computes them.
        self.over_pages: PreparedStep | None = None
        #: Kernel arguments of decoding steps over lists of keys; None if the general path computes them.
        self.over_lists: PreparedStep | None = None
        #: The program of a call over lists with other contents, which has the same branches and backends; or None.
        self.kind: Program | None = None

    def for_call(self, call: Call) -> Program:
        """Return a program of the same class for another call, such as a piece of this one."""
        return type(self)(call)

    def for_lists(self, pattern: Pattern) -> Program:
        """Return the program for the lists of keys in a pattern, which differs from this one's in their contents.

        Raises:
            PatternError: An index is not a key of the call.
        """
        call = self.call
        pattern = pattern.bound(call.heads, call.kv_heads)
        if pattern.spec != call.pattern.spec:
            # the pattern of the call has offsets beside its lists
            pattern = with_lists(call.pattern, iter(lists_in(pattern)))
        pattern.check(call.nq, call.nk, call.q_offset)
        program = Program(dataclasses.replace(call, pattern=pattern), constant=True)
        program.kind = self
        return program

    def for_length(self, k: Tensor) -> Program:
        """Return the program for the length of these keys.

        Decoding steps share prepared kernel arguments, so their keys may be more or fewer than those of ``call``.
        """
        more = k.shape[2] - self.call.nk
        if not more or self.call.paged:
            return self
        return Program(dataclasses.replace(self.call, nk=k.shape[2], q_offset=self.call.q_offset + more))

    @functools.cached_property
    def steps(self) -> tuple[Step, ...]:
        """The steps of forward."""
        call = self.call
        if self.kind is not None:
            return self._of_kind(self.kind.steps)
        return self._compile(dataclasses.replace(call, needs_grad=False, learned=0) if call.needs_grad else call)

    @functools.cached_property
    def backward_steps(self) -> tuple[Step, ...]:
        """The steps of backward, for which auto may choose other backends."""
        if self.kind is not None:
            return self._of_kind(self.kind.backward_steps)
        return self._compile(self.call if self.call.needs_grad else dataclasses.replace(self.call, needs_grad=True))

    @functools.cached_property
    def native(self) -> bool:
        """Whether every step's backend prepares calls; only then may the program run without its operator."""
        return all(each.backend.prepare is not None for each in self.steps)

    @functools.cached_property
    def terms(self) -> TermOperands | None:
        """Score terms of a constant program if all its calls share them: no tables and no dropout seed; else None."""
        call = self.call
        # on a GPU the places of heads, queries and keys would have to wait for the stream that made them
        if not self.constant or call.device != "cpu" or not call.terms or call.dropout or tables_in(call.terms):
            return None
        return term_operands(call, (call.nq, call.nk), torch.device(call.device), call.by_field(()))

    def operands(
        self, q: Tensor, k: Tensor, v: Tensor, tensors: Sequence[Tensor], learns: Sequence[bool] | None = None
    ) -> Operands:
        """Build the operands from the tensors of the call: see :meth:`Operands.of`."""
        if self.terms is not None:
            return Operands(q, k, v, self.call.scale, self.terms)
        return Operands.of(self.call, q, k, v, tensors, learns)

    def _of_kind(self, steps: tuple[Step, ...]) -> tuple[Step, ...]:
        """Return the steps of the kind, which are the whole call, with the lists of this program's pattern."""
        pattern = self.call.pattern
        parts = (pattern,) if len(steps) == 1 else summands(pattern)
        if len(parts) != len(steps):
            # lists that are equal now are one part of the union
            return compiled(self.call)
        return tuple(
            Step(dataclasses.replace(branch, pattern=part), backend)
            for (branch, backend), part in zip(steps, parts, strict=True)
        )

    def _compile(self, call: Call, *, step: bool = False) -> tuple[Step, ...]:
        """Compile a call; the steps of a small call of a constant pattern hold their plans."""
        steps = compiled(call, step=step)
        small = -(-call.nq // 16) * call.batch * call.heads <= _MOST_ROWS
        if not (self.constant and small and all(each.backend.prepare is not None for each in steps)):
            return steps
        return tuple(map(with_plan, steps))

    def single_step(self, steps: Sequence[Step]) -> Step | None:
        """Return the only step if it computes the whole call rather than a view of it, else None."""
        one = steps[0] if len(steps) == 1 else None
        return one if one is not None and is_whole(one.branch, self.call) else None

    def forward(self, operands: Operands) -> tuple[Tensor, Tensor]:
        """Compute (out, lse), with out in q's dtype."""
        forks.check(operands.q.device)
        operands = operands.map(readable)
        q, v = operands.q, operands.v
        one = self.single_step(self.steps)
        if one is not None:
            return one.backend.forward(operands, one.branch, q.dtype)
        acc = acc_dtype(q.dtype)
        out = q.new_zeros(*q.shape[:3], v.shape[3], dtype=acc)
        lse = q.new_full(q.shape[:3], -torch.inf, dtype=acc)
        for branch, backend in self.steps:
            view = BranchSlice(branch, self.call)
            part, part_lse = backend.forward(view.of(operands), branch, acc)
            merge_into(view.of_q(out), view.of_q(lse), part, part_lse)
        return out.to(q.dtype), lse

    def backward(
        self, operands: Operands, returned: Returned, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute (dq, dk, dv) in ``dtype``, by default that of the queries.

        Gradients of the terms' tables are added to ``operands.terms.totals``.
        """
        forks.check(operands.q.device)
        operands, returned = operands.map(readable), returned.detached()
        dout, dlse, out, lse = returned
        steps = self.backward_steps
        dtype = dtype or self.call.dtype
        one = self.single_step(steps)
        delta_of = steps[0].backend.delta if steps else delta_in_chunks
        unread = one is not None and one.backend.own_delta and dlse is None
        delta = lse.new_empty(0) if unread else delta_of(dout, out, lse, dlse)
        if one is not None:
            assert one.backend.backward is not None
            upstream = Upstream(dout, lse, delta, out if dlse is None else None, dlse)
            return one.backend.backward(upstream, operands, one.branch, dtype)
        like = torch.contiguous_format
        totals = [torch.zeros_like(x, dtype=lse.dtype, memory_format=like) for x in operands[:3]]
        for branch, backend in steps:
            assert backend.backward is not None
            view = BranchSlice(branch, self.call)
            upstream = Upstream(view.of_q(dout), view.of_q(lse), view.of_q(delta))
            dq, dk, dv = backend.backward(upstream, view.of(operands), branch, lse.dtype)
            view.of_q(totals[0]).add_(dq)
            view.add_to_k(totals[1], dk)
            view.add_to_k(totals[2], dv)
        dq, dk, dv = (total.to(dtype) for total in totals)
        return dq, dk, dv

    def at_length(self, keys: int) -> Program:
        """Return the program of a decoding step with so many keys, for steps that are not prepared."""
        program = Program(dataclasses.replace(self.call, nk=keys, q_offset=keys - 1), constant=self.constant)
        program.steps = program._compile(program.call, step=True)
        return program

    def prepare_steps(self, operands: Operands) -> None:
        """Prepare the decoding steps of this kind, if one backend computes every part of them."""
        call = self.call
        general = call.paged or bool(call.pattern.tables)
        backends = {each.backend.name: each.backend for each in compiled(call, step=not general)}
        step = backends.popitem()[1].step if len(backends) == 1 else None
        if step is None or call.batch * call.heads > _MOST_ROWS:
            return
        found = step(call, operands)
        if call.paged:
            self.over_pages = found
        elif call.pattern.tables:
            self.over_lists = found
        else:
            self.prepared = found

    def prepare(self, operands: Operands) -> None:
        """Prepare a small call's kernel arguments, if each step is the whole call and its terms are constant."""
        call, parts = self.call, list[Part]()
        for branch, _ in self.steps:
            plan = _small_plan(branch)
            if plan is None or not is_whole(branch, call):
                return
            parts.append(Part(branch, plan))
        if not parts or not self.native or (call.features and (self.terms is None or len(parts) > 1)):
            return
        prepare = self.steps[0].backend.prepare
        assert prepare is not None
        self.prepared = prepare(operands.map(readable)._replace(terms=self.terms), parts)

    def small_plan(self, steps: Sequence[Step]) -> BlockPlan | None:
        """Return the plan if a backend that prepares calls computes the whole call in one small step, else None."""
        one = self.single_step(steps)
        return None if one is None or one.backend.prepare is None else _small_plan(one.branch)


def is_whole(branch: Branch, call: Call) -> bool:
    """Whether a branch is the whole call rather than a view of it."""
    return branch.rate == 1 and branch.head_count == call.heads


def _small_plan(branch: Branch) -> BlockPlan | None:
    """Return the plan that a branch holds if it is small, else None."""
    plan = branch.cached_plan
    return None if plan is None or plan.capacity > _MOST_TILES else plan


def with_plan(step: Step) -> Step:
    """Return a step with its plan on the CPU attached."""
    return step._replace(branch=dataclasses.replace(step.branch, cached_plan=step.branch.plan("cpu")))


def describe(steps: Sequence[Step]) -> list[tuple[int, str]]:
    """Count branches by backend: [(branches, backend), ...] in order of first use."""
    counts: dict[str, int] = {}
    for each in steps:
        counts[each.backend.name] = counts.get(each.backend.name, 0) + 1
    return [(number, name) for name, number in counts.items()]


class BranchSlice:
    """A branch's part of tensors laid out (B, heads, tokens, ...), as strided views without copies where heads allow.

    Attributes:
        heads: Query heads of the branch and the key heads that they share.
        queries: Indices of the branch's queries.
        keys: Indices of the branch's keys.
    """

    def __init__(self, branch: Branch, call: Call):
        self.heads = Heads(branch, call.heads // call.kv_heads)
        self.queries = slice(branch.q_first, None, branch.rate)
        self.keys = slice(branch.k_first, None, branch.rate)

    def of(self, operands: Operands) -> Operands:
        """Return the branch's part of all operands."""
        terms = operands.terms
        if terms is not None:
            heads, rows, columns = terms.heads[self.heads.queries], terms.rows, terms.columns
            terms = terms._replace(heads=heads, rows=rows[self.queries], columns=columns[self.keys])
        return operands._replace(q=self.of_q(operands.q), terms=terms).of_keys(self.of_k)

    def of_q(self, x: Tensor) -> Tensor:
        """Return the branch's queries of (B, Hq, Nq, ...)."""
        return x[:, self.heads.queries, self.queries]

    def of_k(self, x: Tensor) -> Tensor:
        """Return the branch's keys of (B, Hkv, Nk, C), as a kernel takes them."""
        return self.heads.for_kernel(self.heads.of_keys(x[:, :, self.keys]))

    def add_to_k(self, total: Tensor, part: Tensor) -> None:
        """Add a kernel's gradient of the branch's keys to (B, Hkv, Nk, C)."""
        tokens = total[:, :, self.keys]
        self.heads.update(tokens, Tensor.add_, self.heads.from_kernel(part))
