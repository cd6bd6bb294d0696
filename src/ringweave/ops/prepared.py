"""Calls that are alike, checked, planned and cut into work once: what is left of each is its tensors.

A small call costs less to compute than to look at. So what the native kernel needs besides tensors is kept by all that
it depends on: the pattern's text, shapes, types, scale, position, backend, threads. Such a call goes round the
operators, straight to the kernel or through one autograd function, with the same bits.

Only where nothing would see the difference: plain tensors in main memory, and no mode, transform, trace, profiler or
autocast, which watch operators or change them. All other calls, and what is too large to matter, take the operators.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..errors import is_out_of_memory
from ..patterns import And, Causal, Full, Pattern, SlidingWindow, rebuild
from ..plan import BlockPlan, Branch
from ..plan.from_pattern import DEFAULT_TILE
from ..recent import Recent
from . import cpu, dispatch, forks, tuning
from .backend import Case, Inputs, readable
from .overflow import spoil
from .registered import attention_backward_op

if TYPE_CHECKING:
    from .._cpu import Prepared

# what is larger takes longer to compute than to look at: rows of tiles over batch and heads, and listed tiles
_MOST_ROWS, _MOST_TILES = 2**12, 2**14
_ROW_BYTES, _TILE_BYTES, _CALL_BYTES = 64, 16, 16 * 2**10

_C = torch._C
_KEYS = _C.DispatchKey


def _key_set(*keys: Any) -> int:
    found = _C.DispatchKeySet(_KEYS.CPU)
    for key in keys:
        found = found.add(key)
    return int(found.raw_repr())


# tensors as they are, and those of inference mode; a lazy negation, a wrapper or another device has other keys
_PLAIN = frozenset({_key_set(_KEYS.AutocastCPU), _key_set(_KEYS.ADInplaceOrView, _KEYS.AutogradCPU, _KEYS.AutocastCPU)})


def _plain(a: Tensor, b: Tensor, c: Tensor) -> bool:
    # a generator would take as long again
    keys = _C._dispatch_keys
    return (
        type(a) is type(b) is type(c) is Tensor
        and keys(a).raw_repr() in _PLAIN
        and keys(b).raw_repr() in _PLAIN
        and keys(c).raw_repr() in _PLAIN
    )


def _unwatched() -> bool:
    """Whether nothing would see that operators were gone round."""
    return not (
        _C._len_torch_dispatch_stack()
        or _C._len_torch_function_stack()
        or _C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or torch._ops._len_torch_dispatch_stack_pre_dispatch()
        or _C._get_tracing_state() is not None
        or _C._autograd._profiler_enabled()
        or torch.is_autocast_enabled("cpu")
        or dispatch.BACKENDS["cpu"] is not cpu.BACKEND
    )


class Call:
    """A kind of call on the native kernel.

    Args:
        inputs: Tensors of its shapes and types.
        pattern: A checked pattern, without tables.
        q_offset: Position of the first query.
        backend: As it was asked for.
        branch: The whole call.
        plan: The branch's.
        last: Whether it is of the last keys of however many there are.
    """

    def __init__(
        self,
        inputs: Inputs,
        pattern: Pattern,
        q_offset: int,
        backend: str,
        branch: Branch,
        plan: BlockPlan,
        last: bool = False,
    ):
        q, k, v, self.scale = inputs[:4]
        self.pattern, self.q_offset, self.backend = pattern, q_offset, backend
        self.shapes = q.shape, k.shape, v.shape
        self._lse = q.shape[:3]
        self._out = (*q.shape[:3], v.shape[3])
        self._threads, self._last = torch.get_num_threads(), last
        self._branch = branch
        self._backward: Prepared | None = None
        self._forward = cpu.prepared(inputs, plan)
        #: What auto knew of measurements.
        self.read = tuning.current()

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, degrade: bool) -> tuple[Tensor, Tensor] | None:
        """(out, lse), differentiable; None where the operators have to do it: layouts to copy, or too little memory."""
        if q.stride(3) != 1 or k.stride(3) != 1 or v.stride(3) != 1:
            return None
        if self._last and k.shape != self.shapes[1]:
            behind = k.shape[2] - self.shapes[1][2]
            k, v = k[:, :, behind:], v[:, :, behind:]
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            run = _Direct.apply
        else:
            run = _without_gradient
        try:
            return run(q, k, v, self, degrade)  # type: ignore[no-any-return, no-untyped-call]
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
        """(out, lse); None where scores are out of range at another length than the first one's."""
        forks.check(q.device)
        out, lse = q.new_empty(self._out), q.new_empty(self._lse, dtype=torch.float32)
        if self._forward.forward(
            q.data_ptr(), q.stride(), k.data_ptr(), k.stride(), v.data_ptr(), v.stride(), out.data_ptr(),
            lse.data_ptr(), k.shape[2], self._threads,
        ):  # fmt: skip
            if k.shape != self.shapes[1]:
                return None
            spoil(out, lse, Inputs(q, k, v, self.scale), self._branch)
        return out, lse

    def backward(
        self, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """(dq, dk, dv); None where auto takes another backend for them."""
        forks.check(q.device)
        native = self._backward
        if native is None:
            inputs = Inputs(q, k, v, self.scale)
            found = _whole(self.pattern, Case.of(inputs, True), self.q_offset, self.backend)
            if found is None:
                return None
            native = self._backward = cpu.prepared(inputs, found[1], True)
        dout = dout if dout.stride(3) == 1 else dout.contiguous()
        dlse = None if dlse is None else dlse.contiguous()
        dq, dk, dv = (q.new_empty(shape) for shape in self.shapes)
        native.backward(
            dout.data_ptr(), dout.stride(), q.data_ptr(), q.stride(), k.data_ptr(), k.stride(), v.data_ptr(),
            v.stride(), out.data_ptr(), lse.data_ptr(), 0 if dlse is None else dlse.data_ptr(), dq.data_ptr(),
            dk.data_ptr(), dv.data_ptr(), self._threads,
        )  # fmt: skip
        return dq, dk, dv


def _without_gradient(q: Tensor, k: Tensor, v: Tensor, call: Call, degrade: bool) -> tuple[Tensor, Tensor] | None:
    return call.forward(q, k, v)


class _Direct(torch.autograd.Function):
    """A call with its gradient, outside of all that watches operators."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: Call, degrade: bool) -> tuple[Tensor, Tensor]:
        found = call.forward(q, k, v)
        assert found is not None  # of the first one's length
        out, lse = found
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call, ctx.degrade = call, degrade
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        if dout is None and dlse is None:
            return None, None, None, None, None
        call: Call = ctx.call
        q, k, v, out, lse = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        if _direct(call, dout, dlse, q, k, v, out, lse):
            try:
                grads = call.backward(dout, dlse, q, k, v, out, lse)
                if grads is not None:
                    return *grads, None, None
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
        dq, dk, dv, _ = attention_backward_op(
            dout, dlse, q, k, v, out, lse, [], call.pattern.spec, call.scale, call.q_offset, call.backend, "", 0,
            ctx.degrade, [], [],
        )  # fmt: skip
        return dq, dk, dv, None, None


def _direct(call: Call, dout: Tensor, dlse: Tensor | None, *saved: Tensor) -> bool:
    """Whether nothing watches backward either, and what was saved came back as it was."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or not _unwatched():
        return False
    q, k, v, out, lse = saved
    return (
        _plain(q, k, v)
        and _plain(dout, out, lse)
        and (dlse is None or _plain(dlse, out, lse))
        and (q.shape, k.shape, v.shape) == call.shapes
        and q.dtype == k.dtype == v.dtype == out.dtype == dout.dtype
        and q.stride(3) == k.stride(3) == v.stride(3) == 1
        and out.is_contiguous()
        and lse.is_contiguous()
    )


# False: one of this kind takes the operators
_calls: Recent[Call | bool] = Recent(64 * 2**20, 2048)
# kinds of decoding step: in a window as many as a tile has keys
_steps: Recent[Call | bool] = Recent(32 * 2**20, 1024)
# decoding of another pattern makes one a step, soon of no use
_passing: Recent[Call | bool] = Recent(8 * 2**20, 128)


def _store(q: Tensor, step: _Step | None) -> Recent[Call | bool]:
    return _steps if step is not None else _passing if q.ndim == 4 and q.shape[2] == 1 else _calls


def find(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, scale: float | None, q_offset: int | Tensor, backend: str
) -> tuple[Hashable | None, Call | None]:
    """(key, call) of what has neither terms nor dropout nor a context: the key of calls like it, and what is kept.

    Without a key it takes the operators; with one alone it is new, or does.
    """
    if (
        not _plain(q, k, v)
        or not (isinstance(pattern, Pattern) and pattern.fixed and _unwatched())
        or not (type(q_offset) is int and type(backend) is str and (scale is None or type(scale) is float))
    ):
        return None, None
    threads, variant = torch.get_num_threads(), os.environ.get(cpu.VARIANT)
    rest = q.dtype, k.dtype, v.dtype, scale, backend, threads, variant
    step = _step(q, k, v, pattern._spec, q_offset)
    key = (pattern._spec, q.shape, k.shape, v.shape, q_offset) if step is None else step.key, rest
    call = _store(q, step).get(key)
    if call is None:
        return key, None
    if isinstance(call, bool):
        return None, None
    return key, call if call.read is tuning.current() else None


@functools.lru_cache(1024)
def _reach(spec: str) -> int | None:
    """How many keys before itself a query attends at most, in a pattern that knows distances alone; None in others."""
    if not spec.startswith(("Causal()", "Full()", "SlidingWindow(")):
        return None
    pattern = rebuild(spec, ())
    parts = pattern.parts if type(pattern) is And else (pattern,)
    if not all(type(part) in (Causal, Full, SlidingWindow) for part in parts):
        return None
    return min((part.left for part in parts if isinstance(part, SlidingWindow)), default=sys.maxsize)


class _Step(NamedTuple):
    """What is alike in steps of decoding; behind: keys that this one leaves out, None where all are attended."""

    key: Hashable
    behind: int | None


def _step(q: Tensor, k: Tensor, v: Tensor, spec: str, q_offset: int) -> _Step | None:
    """Find what kind of step a call is; None of others.

    Where all keys are attended those of as many tiles are alike, none of which is partial. In a window, whose pattern
    knows distances alone, it is those whose first key lies in the same place of its tile, less the tiles before it.
    """
    reach = _reach(spec)
    if reach is None or not (q.ndim == k.ndim == v.ndim == 4 and q.shape[2] == 1):
        return None
    # shorter ones have smaller tiles; what was measured goes by lengths; gradients want one length
    nk = k.shape[2]
    if nk <= DEFAULT_TILE or v.shape[2] != nk or q_offset != nk - 1 or tuning.current().answers:
        return None
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return None
    sizes = spec, q.shape, k.shape[:2], k.shape[3], v.shape[:2], v.shape[3]
    if reach >= q_offset:
        return _Step((*sizes, -(-nk // DEFAULT_TILE)), None)
    behind = (q_offset - reach) // DEFAULT_TILE * DEFAULT_TILE
    return _Step((*sizes, "last", nk - behind), behind)


def make(key: Hashable, inputs: Inputs, pattern: Pattern, q_offset: int, backend: str) -> Call | None:
    """Keep a call that was checked by its key; None where it takes the operators."""
    # before anything is copied: a forked process has no threads to do that
    forks.check(inputs.q.device)
    step = _step(*inputs[:3], pattern.spec, q_offset)
    if step is not None and step.behind:
        inputs = inputs._replace(k=inputs.k[:, :, step.behind :], v=inputs.v[:, :, step.behind :])
        q_offset -= step.behind
    case = Case.of(inputs)
    found = _whole(pattern, case, q_offset, backend)
    if found is None:
        _store(inputs.q, step).put(key, False, _CALL_BYTES)
        return None
    branch, plan = found
    last = step is not None and step.behind is not None
    call = Call(inputs.map(readable), pattern, q_offset, backend, branch, plan, last)
    rows = plan.q_tiles * case.batch * case.heads
    _store(inputs.q, step).put(key, call, _CALL_BYTES + plan.nbytes + _ROW_BYTES * rows + _TILE_BYTES * plan.places)
    return call


def _whole(pattern: Pattern, case: Case, q_offset: int, backend: str) -> tuple[Branch, BlockPlan] | None:
    """The one branch of a small call that the native kernel computes, and its plan; None of others."""
    if -(-case.nq // 16) * case.batch * case.heads > _MOST_ROWS:
        return None
    steps = dispatch.program(pattern, case, q_offset, backend)
    if len(steps) != 1 or not dispatch.is_whole(steps[0][0], case) or steps[0][1] is not cpu.BACKEND:
        return None
    branch = steps[0][0]
    plan = branch.plan("cpu")
    return None if plan.places > _MOST_TILES else (branch, plan)
