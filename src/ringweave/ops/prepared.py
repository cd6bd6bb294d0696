"""Calls that are alike, checked, planned and cut into work once: what is left of each is its tensors.

A small call costs less to compute than to look at. So what the native kernel needs besides tensors is kept by all that
it depends on: the pattern's text, shapes, types, scale, position, backend, threads. Such a call goes round the
operators, straight to the kernel or through one autograd function, with the same bits.

Only where nothing would see the difference: plain tensors in main memory, and no mode, transform, trace, profiler or
autocast, which watch operators or change them. All other calls, and what is too large to matter, take the operators.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..environment import setting
from ..errors import is_out_of_memory
from ..patterns import Or, Pattern, rebuild
from ..patterns.base import Lookback
from ..plan import BlockPlan, Branch
from ..plan.from_pattern import DEFAULT_TILE
from ..recent import Recent
from ..torch_compat import plain, unwatched
from . import cpu, dispatch, forks, tuning
from .backend import Case, Inputs, readable
from .overflow import spoil
from .registered import attention_backward_op

if TYPE_CHECKING:
    from .._cpu import Prepared

# what is larger takes longer to compute than to look at: rows of tiles over batch and heads, and listed tiles
_MOST_ROWS, _MOST_TILES = 2**12, 2**14
_ROW_BYTES, _TILE_BYTES, _CALL_BYTES = 64, 16, 16 * 2**10

_backends, _native = dispatch.BACKENDS, cpu.BACKEND


class Call:
    """A kind of call on the native kernel.

    Args:
        inputs: Tensors of its shapes and types.
        pattern: A checked pattern, without tables.
        q_offset: Position of the first query.
        backend: As it was asked for.
        branch: The whole call.
        plan: The branch's.
        first: The first tile of keys that lies as many tiles later as a longer cache has more.
    """

    def __init__(
        self,
        inputs: Inputs,
        pattern: Pattern,
        q_offset: int,
        backend: str,
        branch: Branch,
        plan: BlockPlan,
        first: int = 0,
    ):
        q, k, v, self.scale = inputs[:4]
        self.pattern, self.q_offset, self.backend = pattern, q_offset, backend
        self.shapes = q.shape, k.shape, v.shape
        # one element each: what is made like them is compact, in half the time that sizes and strides take
        self._out = torch.empty(1, dtype=q.dtype, device="cpu").expand(*q.shape[:3], v.shape[3])
        self._lse = torch.empty(1, dtype=torch.float32, device="cpu").expand(q.shape[:3])
        self._threads, self._first = torch.get_num_threads(), first
        self._branch = branch
        self._backward: Prepared | None = None
        self._forward = cpu.prepared(inputs, plan)
        #: What auto knew of measurements.
        self.read = tuning.current()

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, degrade: bool, with_lse: bool = True
    ) -> tuple[Tensor, Any] | None:
        """(out, lse), differentiable; None where the operators have to do it: layouts to copy, or too little memory.

        lse may be None where it is not asked for.
        """
        try:
            if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
                if q.stride(3) != 1 or k.stride(3) != 1 or v.stride(3) != 1:
                    return None
                return _Direct.apply(q, k, v, self, degrade)  # type: ignore[no-any-return, no-untyped-call]
            return self.forward(q, k, v, with_lse)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, with_lse: bool) -> tuple[Tensor, Any] | None:
        """(out, lse); None for the operators: layouts to copy; infinite scores, without lse or at other lengths."""
        of_q, of_k, of_v = q.stride(), k.stride(), v.stride()
        if of_q[3] != 1 or of_k[3] != 1 or of_v[3] != 1:
            return None
        if self._threads > 1:
            forks.check(q.device)
        out = torch.empty_like(self._out)
        lse = torch.empty_like(self._lse) if with_lse else None
        if self._forward.forward(
            q.data_ptr(), of_q, k.data_ptr(), of_k, v.data_ptr(), of_v, out.data_ptr(),
            0 if lse is None else lse.data_ptr(), k.shape[2], self._first, self._threads,
        ):  # fmt: skip
            if lse is None or k.shape != self.shapes[1]:
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


class _Direct(torch.autograd.Function):
    """A call with its gradient, outside of all that watches operators."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: Call, degrade: bool) -> tuple[Tensor, Tensor]:
        found = call.forward(q, k, v, True)
        assert found is not None  # of the first one's length, and of layouts that were looked at
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
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or not (unwatched() and _backends["cpu"] is _native):
        return False
    q, k, v, out, lse = saved
    return (
        plain(q, k, v)
        and plain(dout, out, lse)
        and (dlse is None or plain(dlse, out, lse))
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
# a pattern's last call, as layers of a model repeat it: to compare it reads less memory than to look up its kind
_last: dict[int, tuple[Pattern, tuple[object, ...], weakref.ref[Call]]] = {}
_MOST_LAST = 16


def find(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, scale: float | None, q_offset: int | Tensor, backend: str
) -> tuple[Hashable | None, Call | None]:
    """(key, call) of what has neither terms nor dropout nor a context: the key of calls like it, and what is kept.

    Without a key it takes the operators; with one alone it is new, or does.
    """
    if not (
        plain(q, k, v)
        and unwatched()
        and _backends["cpu"] is _native
        and (type(q_offset) is int and type(backend) is str and (scale is None or type(scale) is float))
    ):
        return None, None
    read = tuning.current()
    # in place, as in a call: between layers of a model a function of its own costs a microsecond
    grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    means = q.dtype, k.dtype, v.dtype, scale, backend, torch.get_num_threads(), setting(cpu.VARIANT)
    exact = q_offset, q.shape, k.shape, v.shape, grad, means
    last = _last.get(id(pattern))
    if last is not None and last[0] is pattern and last[1] == exact:
        known = last[2]()
        if known is not None and known.read is read:
            return None, known
    if not (isinstance(pattern, Pattern) and pattern.fixed):
        return None, None
    store, alike, _, _ = _kind(q, k, v, pattern._spec, q_offset, grad, bool(read.answers))
    key = alike, means
    call = store.get(key)
    if call is None:
        return key, None
    if isinstance(call, bool):
        return None, None
    if call.read is not read:
        return key, None
    if len(_last) >= _MOST_LAST:
        _last.clear()
    _last[id(pattern)] = pattern, exact, weakref.ref(call)
    return key, call


@functools.lru_cache(1024)
def _lookback(spec: str) -> Lookback | None:
    pattern = rebuild(spec, ())
    # whether one is cut into strided views may depend on the length
    parts = pattern.parts if isinstance(pattern, Or) else (pattern,)
    return pattern.lookback() if all(part.residue_rate() == 1 for part in parts) else None


def _kind(
    q: Tensor, k: Tensor, v: Tensor, spec: str, q_offset: int, grad: bool, measured: bool
) -> tuple[Recent[Call | bool], Hashable, int, int]:
    """(store, key, first, behind): what calls have in common that share a preparation, and what this one passes over.

    That is the ``behind`` keys from tile ``first`` on. Steps of decoding in which all keys are attended are alike where
    those fill as many tiles, none of which is partial. Where distances say what is attended, it is those that end in
    the same place of a tile, less the tiles that they pass over.
    """
    of_q, of_k, of_v = q.shape, k.shape, v.shape
    if not (len(of_q) == len(of_k) == len(of_v) == 4 and of_q[2] == 1):
        return _calls, (spec, of_q, of_k, of_v, q_offset), 0, 0
    batch_k, heads_k, nk, d = of_k
    batch_v, heads_v, nv, dv = of_v
    passing = _passing, (spec, of_q, of_k, of_v, q_offset), 0, 0
    # shorter ones have smaller tiles; what was measured goes by lengths; gradients want one length
    if nk <= DEFAULT_TILE or not q_offset == nk - 1 == nv - 1 or measured or grad or (look := _lookback(spec)) is None:
        return passing
    sizes = spec, of_q, batch_k, heads_k, d, batch_v, heads_v, dv
    if q_offset <= look.every:
        return _steps, (*sizes, -(-nk // DEFAULT_TILE)), 0, 0
    first = -(-look.first // DEFAULT_TILE)
    # a whole tile is left, or tiles were smaller
    behind = min((q_offset - look.back) // DEFAULT_TILE - first, (nk - 1) // DEFAULT_TILE - 1) * DEFAULT_TILE
    if look.far or behind < 0:
        return passing
    return _steps, (*sizes, "last", nk - behind), first, behind


def make(key: Hashable, inputs: Inputs, pattern: Pattern, q_offset: int, backend: str) -> Call | None:
    """Keep a call that was checked by its key; None where it takes the operators."""
    # before anything is copied: a forked process has no threads to do that
    forks.check(inputs.q.device)
    q, k, v = inputs[:3]
    grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    store, _, first, behind = _kind(q, k, v, pattern.spec, q_offset, grad, bool(tuning.current().answers))
    if behind:
        # of these keys only the shape is looked at
        inputs = inputs._replace(k=inputs.k[:, :, behind:], v=inputs.v[:, :, behind:])
        q_offset -= behind
    case = Case.of(inputs)
    found = _whole(pattern, case, q_offset, backend)
    if found is None:
        store.put(key, False, _CALL_BYTES)
        return None
    branch, plan = found
    call = Call(inputs.map(readable), pattern, q_offset, backend, branch, plan, first)
    rows = plan.q_tiles * case.batch * case.heads
    store.put(key, call, _CALL_BYTES + plan.nbytes + _ROW_BYTES * rows + _TILE_BYTES * plan.places)
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
