"""Compile a call to a program, a list of steps: each step is a branch and the backend that computes it.

Branches are strided views of the same tensors. Forward merges their (out, lse) in place. Backward needs no merge: each
branch's gradients are computed with the lse of the whole attention, so they add up.

Programs are cached by a cheap key of the call's arguments. An equal call skips validation, planning and the preparation
of kernel arguments, which take longer than the computation of a small call.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import weakref
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .backends import BACKENDS, cpu, forks, gpu_check, tuning
from .backends.backend import RENAMED, Backend, Heads, Upstream, delta_in_chunks, readable
from .cache import PROGRAMS
from .call import Arguments, Call, Operands, term_operands
from .environment import setting
from .errors import PatternError, UnsupportedError, shown
from .kv_cache import PagedCache, Pages
from .patterns import Pattern
from .patterns.alignment import END
from .plan import BlockPlan, Branch, branches, step_plan, summands
from .plan.from_pattern import default_tile
from .plan.steps import StepPart, parts_of_step
from .precision import NATIVE, Precision
from .terms import Term, TermOperands, tables_in, threshold_of
from .torch_compat import plain, unwatched
from .types import NotGiven, acc_dtype

# backends that auto considers, best first; the last one runs every call
PREFERENCE: tuple[str, ...] = ("cpu", "sdpa", "flash", "triton", "dense_batched")
# A dense branch of more tiles (128 x 128) prefers kernels that need no plan: a plan takes 16 bytes per tile.
_DENSE_TILES = 2**23


class Step(NamedTuple):
    """A branch of a call and the backend that computes it."""

    branch: Branch
    backend: Backend


def names() -> tuple[str, ...]:
    """List the values that ``backend=`` accepts."""
    return ("auto", *BACKENDS)


def choose(name: str, call: Call, branch: Branch) -> Backend:
    """Choose the backend for one branch.

    Raises:
        UnsupportedError: The name is unknown, or the named backend cannot run the branch; the message says why.
    """
    return step(name, call, branch)[1]


def step(name: str, call: Call, branch: Branch) -> Step:
    """Choose the backend of one branch, as :func:`choose` does; auto may also choose the measured tile sides."""
    if name == "auto":
        usual = (backend for backend, reason in candidates(call, branch) if reason is None)
        return measured(call, branch) or Step(branch, next(usual))
    # a graph compiled by an older version may contain an old name
    backend = BACKENDS.get(RENAMED.get(name, name))
    if backend is None:
        raise UnsupportedError("backend", shown(name), f"one of {', '.join(names())}", "Use 'auto'.")
    reason = unsupported_reason(backend, call, branch)
    if reason is not None:
        wanted = f"a case that it can run, but {reason}"
        raise UnsupportedError("backend", repr(name), wanted, "Use backend='auto' or 'dense_batched'.")
    return Step(branch, backend)


def measured(call: Call, branch: Branch) -> Step | None:
    """Return the step that ``ringweave tune`` measured to be fastest here, or None without one that can run."""
    # the measurements are made without terms, pages and scales
    answer = None if call.features or call.paged or call.kv_dtype else tuning.lookup(call, branch)
    backend = None if answer is None else BACKENDS.get(answer.backend)
    if answer is None or backend is None or not backend.branched or backend.experimental:
        return None
    if unsupported_reason(backend, call, branch) is not None:
        return None
    if answer.tile is not None and backend.tiled:
        other = dataclasses.replace(branch, sides=answer.tile)
        branch = other if unsupported_reason(backend, call, other) is None else branch
    return Step(branch, backend)


def candidates(call: Call, branch: Branch) -> Iterator[tuple[Backend, str | None]]:
    """Yield the backends that auto considers without measurements, in order, with a reason against each or None."""
    ordered = list(PREFERENCE)
    if branch.structure != "sparse" and branch.nq * branch.nk > _DENSE_TILES * 128**2:
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
    if backend.checked and not backend.planned and branch.structure == "sparse" and call.device != "cpu":
        return "auto gives it sparse patterns only where ringweave tune found it fastest"
    reason = unsupported_reason(backend, call, branch)
    if reason is not None or not backend.checked:
        return reason
    # On a CPU these backends run in Triton's interpreter, which is for tests.
    if call.device == "cpu":
        return "on a CPU it is used only when named"

    return gpu_check.reason(backend, call, branch)


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
        return self._replace(dout=readable(self.dout), lse=self.lse.masked_fill(torch.isposinf(self.lse), torch.nan))


def compiled(call: Call) -> tuple[Step, ...]:
    """Split a call into branches and choose a backend for each.

    Only auto may change the tile sides. A named backend keeps those that follow from lengths and pattern, so that its
    bits do not depend on stored measurements.

    Raises:
        UnsupportedError: The named backend cannot run the call.
    """
    sizes = {"heads": call.heads, "batch": call.batch, "q_offset": call.q_offset}
    named = BACKENDS.get(call.backend)
    if named is not None and not named.branched:
        whole = Branch.whole(call.pattern, call.nq, call.nk, **sizes)
        return (Step(whole, choose(call.backend, call, whole)),)
    if call.paged:
        # Pages are not cut into strided views. On a GPU, sides are powers of two, so that tiles and pages divide each
        # other.
        parts = [Branch.whole(part, call.nq, call.nk, **sizes) for part in summands(call.pattern)]
        for at, part in enumerate(parts):
            if call.device != "cpu" and part.tile[1] & (part.tile[1] - 1):
                parts[at] = dataclasses.replace(part, sides=(default_tile(call.nq), default_tile(call.nk)))
        return tuple(step(call.backend, call, part) for part in parts)
    split = branches(call.pattern, call.nq, call.nk, **sizes)
    if call.order == "fast":
        split = tuple(dataclasses.replace(branch, spacing=None) for branch in split)
    return tuple(step(call.backend, call, branch) for branch in split)


class Program:
    """A call and the steps that compute it.

    Args:
        call: The call.
        constant: Whether the pattern cannot change; the program of a small call then holds its plans.
    """

    def __init__(self, call: Call, *, constant: bool = False):
        self.call, self.constant = call, constant
        #: Version of the tuning table that the program was compiled with.
        self.read = tuning.current()
        #: The pattern's tables if it is constant, else empty.
        self.tables = call.pattern.tables if constant else ()
        #: Kernel arguments of a small call in one step, or of a step of a union; None if the native kernel has none.
        self.prepared: cpu.PreparedCall | cpu.PreparedUnion | None = None

    def again(self, call: Call) -> Program:
        """Return a program of the same class for another call, such as a piece of this one."""
        return type(self)(call)

    def at(self, k: Tensor) -> Program:
        """Return the program for the length of these keys.

        Decoding steps of one run share prepared kernel arguments, so their keys may be more than those of ``call``.
        """
        more = k.shape[2] - self.call.nk
        if not more or self.call.paged:
            return self
        return Program(dataclasses.replace(self.call, nk=k.shape[2], q_offset=self.call.q_offset + more))

    @functools.cached_property
    def steps(self) -> tuple[Step, ...]:
        """The steps of forward."""
        call = self.call
        return self._kept(dataclasses.replace(call, needs_grad=False, learned=0) if call.needs_grad else call)

    @functools.cached_property
    def backward_steps(self) -> tuple[Step, ...]:
        """The steps of backward, for which auto may choose other backends."""
        return self._kept(self.call if self.call.needs_grad else dataclasses.replace(self.call, needs_grad=True))

    @functools.cached_property
    def native(self) -> bool:
        """Whether the native kernel computes every step; only then may the program run without its operator."""
        return all(each.backend is _native for each in self.steps)

    @functools.cached_property
    def prepares_steps(self) -> bool:
        """Whether the native kernel computes every part of a decoding step of this kind, in tiles of usual sides."""
        call = self.call
        return self.native and call.pattern.block_side is None and call.batch * call.heads <= _MOST_ROWS

    @functools.cached_property
    def terms(self) -> TermOperands | None:
        """Score terms of a constant program if all its calls share them: no tables and no dropout seed; else None."""
        call = self.call
        if not self.constant or not call.terms or call.dropout or tables_in(call.terms):
            return None
        return term_operands(call, (call.nq, call.nk), torch.device(call.device), ())

    def operands(
        self, q: Tensor, k: Tensor, v: Tensor, tensors: Sequence[Tensor], learns: Sequence[bool] | None = None
    ) -> Operands:
        """Build the operands from the tensors of the call: see :meth:`Operands.of`."""
        if self.terms is not None:
            return Operands(q, k, v, self.call.scale, self.terms)
        return Operands.of(self.call, q, k, v, tensors, learns)

    def _kept(self, call: Call) -> tuple[Step, ...]:
        steps = compiled(call)
        small = -(-call.nq // 16) * call.batch * call.heads <= _MOST_ROWS
        if not (self.constant and small and call.device == "cpu" and all(each.backend is _native for each in steps)):
            return steps
        return tuple(each._replace(branch=_planned(each.branch)) for each in steps)

    def whole(self, steps: Sequence[Step]) -> Step | None:
        """Return the only step if it computes the whole call rather than a view of it, else None."""
        one = steps[0] if len(steps) == 1 else None
        return one if one is not None and is_whole(one.branch, self.call) else None

    def forward(self, operands: Operands) -> tuple[Tensor, Tensor]:
        """Compute (out, lse), with out in q's dtype."""
        forks.check(operands.q.device)
        operands = operands.map(readable)
        q, v = operands.q, operands.v
        one = self.whole(self.steps)
        if one is not None:
            return one.backend.forward(operands, one.branch, q.dtype)
        acc = acc_dtype(q.dtype)
        out = q.new_zeros(*q.shape[:3], v.shape[3], dtype=acc)
        lse = q.new_full(q.shape[:3], -torch.inf, dtype=acc)
        for branch, backend in self.steps:
            view = BranchSlice(branch, self.call)
            part, part_lse = backend.forward(view.of(operands), branch, acc)
            cpu.merge_into(view.of_q(out), view.of_q(lse), part, part_lse)
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
        delta = (steps[0].backend.delta if steps else delta_in_chunks)(dout, out, lse, dlse)
        dtype = dtype or self.call.dtype
        one = self.whole(steps)
        if one is not None:
            assert one.backend.backward is not None
            upstream = Upstream(dout, lse, delta, out if dlse is None else None)
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

    def step(self, operands: Operands, keys: int, parts: Sequence[StepPart]) -> Program:
        """Return the program of another decoding step of this kind, which differs only in its plan.

        Args:
            operands: Tensors of the step.
            keys: Number of keys.
            parts: Parts of the step; empty if its plan is not known from other lengths.
        Raises:
            PatternError: The pattern does not fit this number of keys.
        """
        call = self.call if self.call.paged else dataclasses.replace(self.call, nk=keys, q_offset=keys - 1)
        call.pattern.check(1, keys, keys - 1)
        # not constant, so that it holds no plans: the cache of plans bounds their bytes
        program = Program(call)
        program.tables = self.tables
        if not (parts and self.prepares_steps):
            return program
        sides = self.steps[0].branch.sides if call.paged else None
        found: list[tuple[Branch, BlockPlan]] = []
        for part in parts:
            # a prepared call skips keys of its run; the general path takes all of them
            branch = (part.alone() if call.features else part).branch(call.heads, call.batch, sides)
            sizes = 1, branch.nk, call.heads, call.batch, branch.q_offset, *branch.tile
            found.append((branch, step_plan(branch.pattern, sizes)))
        if any(plan.capacity > _MOST_TILES for _, plan in found):
            return program
        if call.features:
            planned = tuple(Step(dataclasses.replace(branch, known=plan), _native) for branch, plan in found)
            if all(unsupported_reason(_native, call, branch) is None for branch, _ in planned):
                program.steps, program.constant = planned, True
            return program
        operands = operands._replace(scale=call.scale)
        if not operands.q.stride(3) == operands.k.stride(3) == operands.v.stride(3) == 1:
            operands = operands.map(readable)
        dtype = None if len(parts) == 1 else torch.float32
        prepared = [
            cpu.PreparedCall(operands, branch, plan, part.run.first, dtype=dtype)
            for part, (branch, plan) in zip(parts, found, strict=True)
        ]
        program.prepared = prepared[0] if len(prepared) == 1 else cpu.PreparedUnion(prepared, operands.q.dtype)
        program.constant = True
        return program

    def prepare(self, operands: Operands) -> None:
        """Prepare the kernel arguments of a small call without terms, if each of its steps is the whole call."""
        plans = [_small_plan(branch) for branch, _ in self.steps]
        whole = self.native and all(is_whole(branch, self.call) for branch, _ in self.steps)
        if not plans or not whole or None in plans:
            return
        operands = operands.map(readable)
        dtype = None if len(plans) == 1 else torch.float32
        calls = [
            cpu.PreparedCall(operands, branch, plan, dtype=dtype)
            for (branch, _), plan in zip(self.steps, plans, strict=True)
            if plan is not None
        ]
        self.prepared = calls[0] if len(calls) == 1 else cpu.PreparedUnion(calls, operands.q.dtype)

    def small(self, steps: Sequence[Step]) -> BlockPlan | None:
        """Return the plan if the native kernel computes the whole call in one step and it is small, else None."""
        one = self.whole(steps)
        if one is None or one.backend is not _native:
            return None
        return _small_plan(one.branch)

    def describe(self) -> list[tuple[int, str]]:
        """Count branches by backend: [(branches, backend), ...] in order of first use."""
        return describe(self.steps)


def is_whole(branch: Branch, call: Call) -> bool:
    """Whether a branch is the whole call rather than a view of it."""
    return branch.rate == 1 and branch.head_count == call.heads


def _small_plan(branch: Branch) -> BlockPlan | None:
    """Return the plan that a branch holds if it is small, else None."""
    plan = branch.known
    return None if plan is None or plan.capacity > _MOST_TILES else plan


def _planned(branch: Branch) -> Branch:
    """Return a branch of a constant pattern with its plan on the CPU attached."""
    return dataclasses.replace(branch, known=branch.plan("cpu"))


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


# ---- programs by a cheap key -----------------------------------------------------------------------------------------

_native = cpu.BACKEND
# Larger calls are not prepared, since their compute time hides the overhead. The bounds are rows of tiles over batch
# and heads, and listed tiles.
_MOST_ROWS, _MOST_TILES = 2**12, 2**14
_ROW_BYTES, _TILE_BYTES, _PROGRAM_BYTES = 64, 16, 16 * 2**10
# The last program of each pattern object, since the layers of a model repeat a call. Comparing its arguments touches
# less memory than a look-up by key.
_last: dict[int, tuple[Pattern, tuple[object, ...], weakref.ref[Program]]] = PROGRAMS.front
_MOST_LAST = 16


# "end" is a function of the other parts of a key: sizes, the first key, and paddings in the pattern's text
_OFFSETS = (int, NotGiven, str)


def find(given: Arguments) -> tuple[Hashable | None, Program | None]:
    """Look up a program by the arguments of a call.

    Returns:
        (None, program) for a known call; (key, None) for a new one, to be passed to :func:`keep`; (None, None) where
        something watches operators, or an argument cannot be part of a key.
    """
    q, k, v, pattern, scale, q_offset, backend = given[:7]
    if not (plain(q, k, v) and unwatched() and BACKENDS["cpu"] is _native and type(backend) is str):
        return None, None
    options = _options(given)
    if type(q_offset) not in _OFFSETS or not (scale is None or type(scale) is float) or options is None:
        usual = _with_usual_numbers(given)
        return (None, None) if usual is given else find(usual)
    read = tuning.current()
    # inlined: between the layers of a model a separate function costs a microsecond
    grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    means = q.dtype, k.dtype, v.dtype, scale, backend, torch.get_num_threads(), setting(cpu.VARIANT), options
    exact = q_offset, q.shape, k.shape, v.shape, grad, means
    last = _last.get(id(pattern))
    if last is not None and last[0] is pattern and last[1] == exact:
        known = last[2]()
        if known is not None and known.read is read:
            return None, known
    if not (isinstance(pattern, Pattern) and pattern.fixed):
        return None, None
    spec = pattern._spec
    key: Hashable = (spec, exact)
    # a decoding step has one query, at the position of the last key
    if (
        not (grad or read.answers)
        and _steps(options)
        and q.ndim == k.ndim == v.ndim == 4
        and (q.shape[2] == 1 and k.shape[2] == v.shape[2])
        and (q_offset == k.shape[2] - 1 or (q_offset == END and "KeyPadding" not in spec))
    ):
        keys = k.shape[2]
        kind = spec, q.shape, k.shape[:2], k.shape[3], v.shape[:2], v.shape[3], means
        key = _StepKey(kind, keys, parts_of_step(spec, keys, default_tile(keys), True))
        program = _step(key, Operands(q, k, v, 1.0), read)
    else:
        program = PROGRAMS.get(key)
        if program is not None and program.read is not read:
            program = None
    return (key, None) if program is None else (None, _noted(pattern, exact, program))


def _noted(pattern: Pattern, exact: tuple[object, ...], program: Program) -> Program:
    """Store a program as the pattern's last one and return it."""
    if len(_last) >= _MOST_LAST:
        _last.clear()
    _last[id(pattern)] = pattern, exact, weakref.ref(program)
    return program


_OTHERS = tuple(Arguments._field_defaults.values())[Arguments._fields.index("on_oom") - 2 :]


def _options(given: Arguments) -> tuple[Any, ...] | None:
    """Return the other arguments as a key, of length 1 if they are defaults, or None if a key cannot contain them."""
    # learned sinks are not part of the key: they join after the program has run
    k_offset, context, terms, _sinks, dropout, precision, on_oom = given[7:14]
    if (
        context is not None
        or (precision is not None and precision is not NATIVE)
        or type(k_offset) is not int
        or type(on_oom) is not str
        or (on_oom != "degrade" and on_oom != "raise")
        or type(dropout) is not float
        # options after on_oom are not part of the key yet, so they must be defaults
        or (_OTHERS and any(map(operator.is_not, given[14:], _OTHERS)))
    ):
        return None
    listed = terms if isinstance(terms, (tuple, list)) else () if terms is None else (terms,)
    if not k_offset and not listed and dropout == 0.0:
        return (on_oom,)
    if not all(isinstance(term, Term) for term in listed) or not 0 <= dropout < 1 or k_offset < 0:
        return None
    kinds, grad = [], torch.is_grad_enabled()
    for term in listed:
        of_tables = []
        for x in term.tables:
            if not plain(x, x, x):
                return None
            of_tables.append((x.shape, x.dtype, grad and x.requires_grad))
        kinds.append((term.spec, tuple(of_tables)))
    return on_oom, k_offset, tuple(kinds), threshold_of(dropout)


def _steps(options: tuple[Any, ...]) -> bool:
    """Return whether decoding steps with these options differ only in their plan."""
    if len(options) == 1:
        return True
    _, k_offset, kinds, dropped = options
    return not (k_offset or dropped or any(learns for _, tables in kinds for *_, learns in tables))


def _with_usual_numbers(given: Arguments) -> Arguments:
    """Return the arguments with numbers and policy in the types that a key has; the same object if nothing changes."""
    usual: dict[str, Any] = {}
    for name, kind in (("scale", float), ("q_offset", int), ("k_offset", int), ("dropout", float)):
        value = getattr(given, name)
        whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool) and abs(int(value)) < 2**53
        if type(value) is not kind and (whole or (kind is float and isinstance(value, np.floating))):
            usual[name] = kind(value)
    if given.precision is not NATIVE and isinstance(given.precision, Precision) and given.precision == NATIVE:
        usual["precision"] = NATIVE
    return given._replace(**usual) if usual else given


class _StepKey(NamedTuple):
    """The key of a decoding step.

    Attributes:
        kind: Everything about the step except its length.
        keys: Number of keys.
        parts: Parts of the step, with the runs of lengths that share their plans.
    """

    kind: tuple[Hashable, ...]
    keys: int
    parts: tuple[StepPart, ...]

    @property
    def of_run(self) -> Hashable:
        """Key of the prepared program that the lengths of a run share."""
        return self.kind, tuple([part.key for part in self.parts])

    @property
    def of_length(self) -> Hashable:
        """Key of a program for this length alone."""
        return self.kind, self.keys


def _step(key: _StepKey, operands: Operands, read: object) -> Program | None:
    """Look up the program of a decoding step; None if no step of its kind was checked, or this length does not fit.

    Once a step of the kind was checked, further steps need no check: their programs differ only in the plan.
    """
    program: Program | None = PROGRAMS.get(key.of_run) or PROGRAMS.get(key.of_length)
    if program is None or program.read is not read:
        of_kind: Program | None = PROGRAMS.get(key.kind)
        if of_kind is None or of_kind.read is not read:
            return None
        try:
            program = of_kind.step(operands, key.keys, key.parts)
        except PatternError:
            return None
        _put(key, program)
    return program


def _put(key: Hashable, program: Program) -> None:
    """Cache a program by its key; a decoding step's by its kind, and its run or length."""
    size, prepared = _PROGRAM_BYTES, program.prepared
    if prepared is not None:
        heads = program.call.batch * program.call.heads
        size += sum(p.nbytes + _ROW_BYTES * p.q_tiles * heads + _TILE_BYTES * p.capacity for p in prepared.plans)
    elif isinstance(key, _StepKey) and program.constant:
        size += sum(step.branch.known.nbytes for step in program.steps if step.branch.known is not None)
    if isinstance(key, _StepKey):
        key = key.of_length if prepared is None else key.of_run
    PROGRAMS.put(key, program, size)


def keep(key: Hashable, call: Call, operands: Operands) -> Program:
    """Compile a checked call of a constant pattern and cache its program by its key."""
    # before any copy, since a forked process may lack the threads that a copy needs
    forks.check(operands.q.device)
    program = Program(call, constant=True)
    if isinstance(key, _StepKey):
        PROGRAMS.put(key.kind, program, _PROGRAM_BYTES)
        program = program.step(operands, call.nk, key.parts)
    elif not call.features:
        program.prepare(operands)
    _put(key, program)
    return program


def find_paged(given: Arguments, cache: PagedCache) -> tuple[Hashable | None, Program | None, int]:
    """Look up (key, program, keys) of a decoding step over pages; all sequences must have the same number of keys.

    A program is prepared. The key of a step of a new kind is to be passed to :func:`keep_paged`.
    """
    q, k, v, pattern, scale, _, backend = given[:7]
    lengths, table, scales = cache._host_lengths, cache.table, cache.scales
    if lengths is None or not len(lengths):
        return None, None, 0
    if scales and not (plain(*scales, k) and scales.k.is_contiguous() and scales.v.is_contiguous()):
        return None, None, 0
    keys = int(lengths[0])
    if keys < 1 or (len(lengths) > 1 and not bool((lengths == keys).all())):
        return None, None, 0
    if not (
        plain(q, k, v)
        and unwatched()
        and BACKENDS["cpu"] is _native
        and type(backend) is str
        and (q.ndim == 4 and q.shape[2] == 1 and isinstance(pattern, Pattern) and pattern.fixed)
    ) or (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)):
        return None, None, 0
    options, columns = _options(given), table.shape[1]
    if not (scale is None or type(scale) is float) or options is None:
        usual = _with_usual_numbers(given)
        return (None, None, 0) if usual is given else find_paged(usual, cache)
    read = tuning.current()
    if len(options) > 1 or keys > columns * cache.page or read.answers:
        return None, None, 0
    means = q.dtype, k.dtype, v.dtype, scale, backend, torch.get_num_threads(), setting(cpu.VARIANT)
    # prepared calls pass addresses of these tensors, and `.data` may give a tensor another storage
    layouts = table.shape, table.stride(), table.dtype, cache.lengths.stride(), cache.lengths.dtype
    of_scales = scales and (scales.k.shape, scales.v.shape, scales.k.dtype, scales.v.dtype)
    of_kind = "pages", q.shape, k.shape, v.shape, layouts, len(lengths), of_scales, means
    # The layers of a model repeat a step.
    exact = keys, of_kind
    last = _last.get(id(pattern))
    if last is not None and last[0] is pattern and last[1] == exact:
        known = last[2]()
        if known is not None and known.read is read:
            return None, known, keys
    operands = Operands(q, k, v, 1.0, pages=Pages(cache.table, cache.lengths, cache.page), scales=scales)
    parts = parts_of_step(pattern._spec, keys, default_tile(columns * cache.page), False)
    key = _StepKey((pattern._spec, *of_kind), keys, parts)
    program = _step(key, operands, read)
    if program is None:
        return key, None, keys
    # a kind that is known and cannot be prepared takes the checked path at each step, and is not compiled for a key
    return (None, None, 0) if program.prepared is None else (None, _noted(pattern, exact, program), keys)


def keep_paged(key: Hashable, call: Call, cache: PagedCache) -> None:
    """Cache the kind of a checked step over pages; the native kernel prepares its steps if it computes every part."""
    assert isinstance(key, _StepKey)
    tensors = cache.table, cache.lengths, *(cache.scales or ())
    steps = compiled(call.at_lengths(cache.k, tensors))
    native = all(each.backend is _native and is_whole(each.branch, call) for each in steps)
    # a call's steps have equal tiles, unless auto measured other sides
    sides = {each.branch.tile for each in steps}
    program = Program(call, constant=True)
    whole = Branch.whole(call.pattern, 1, call.nk, heads=call.heads, batch=call.batch)
    program.steps = (Step(dataclasses.replace(whole, sides=sides.pop()), _native),)
    program.prepares_steps = native and not sides and call.batch * call.heads <= _MOST_ROWS
    PROGRAMS.put(key.kind, program, _PROGRAM_BYTES)
