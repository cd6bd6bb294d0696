"""Define the two ``torch.library`` operators of a call, their fakes, and the one autograd function.

The operators take tensors and one text, so ``torch.compile`` traces a call as one opaque node. Planning and the choice
of backends happen when it runs, and a new table of the same shape causes no recompilation. Eager calls go through one
autograd function. It calls the operators where a mode, transform or profiler watches them, and otherwise runs the
program directly. A derivative that does not exist raises, because an operator alone would return zero for a
forward-mode derivative.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from .call import FORMAT, Call, Operands, lines_of
from .errors import UnsupportedError, is_out_of_memory
from .patterns import Pattern
from .patterns.base import names_in
from .plan import pattern_of
from .program import Program, Returned
from .torch_compat import (
    AUTOCAST,
    are_plain_cpu,
    are_plain_gpu,
    batched_gradient,
    forward_mode,
    no_interception,
    rebatched,
    transforming,
    unbatched,
    untraced,
)
from .types import acc_dtype

if TYPE_CHECKING:
    from .patterns.recorded import Pinned

_library = torch.library.Library("ringweave", "DEF")
# register_fake asks inspect for the module of its caller; without this entry inspect searches all loaded modules (6 ms)
getattr(inspect, "modulesbyfile", {})[inspect.getabsfile(sys.modules[__name__])] = __name__


def operators(*kernels: tuple[Callable[..., Any], Callable[..., Any]]) -> list[Any]:
    """Define an operator ``ringweave::<name of the kernel>`` for each (kernel, fake) and return them.

    A kernel's annotations are the operator's schema; the fake computes shapes. All operators share one overload name, a
    hash of their schemas and of the format of a call, so that PyTorch never reuses a graph from its cache on disk that
    another version compiled.
    """
    schemas = [_schema(kernel) for kernel, _ in kernels]
    overload = "of_" + hashlib.blake2b("".join([FORMAT, *schemas]).encode(), digest_size=4).hexdigest()
    return [_operator(*each, schema, overload) for each, schema in zip(kernels, schemas, strict=True)]


def _operator(kernel: Callable[..., Any], fake: Callable[..., Any], schema: str, overload: str) -> Any:
    name = f"{kernel.__name__}.{overload}"
    _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, untraced(_without_autocast(kernel)), "CompositeExplicitAutograd")
    torch.library.register_fake(f"ringweave::{name}", fake, lib=_library)
    return getattr(getattr(torch.ops.ringweave, kernel.__name__), overload)


def _without_autocast(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Disable the caller's autocast in a kernel, which chooses the dtypes of its products; it has cast the inputs."""

    def run(*args: Any, **kwargs: Any) -> Any:
        device = args[0].device.type
        if device not in AUTOCAST or not torch.is_autocast_enabled(device):
            return kernel(*args, **kwargs)
        with torch.autocast(device, enabled=False):
            return kernel(*args, **kwargs)

    return run


_SCHEMA = {
    "Tensor": "Tensor", "Tensor | None": "Tensor?", "Sequence[Tensor]": "Tensor[]", "Sequence[bool]": "bool[]",
    "list[Tensor]": "Tensor[]", "str": "str", "float": "float", "int": "SymInt", "bool": "bool",
}  # fmt: skip


def _schema(kernel: Callable[..., Any]) -> str:
    """Write a kernel's annotations, which are text, as a schema; torch's ``infer_schema`` does the same, slowly."""
    *arguments, (_, result) = kernel.__annotations__.items()
    results = result.removeprefix("tuple[").removesuffix("]" if result.startswith("tuple[") else "").split(", ")
    parameters = ", ".join(f"{_SCHEMA[kind]} {name}" for name, kind in arguments)
    return f"({parameters}) -> ({', '.join(_SCHEMA[each] for each in results)})"


def program_of(call: Call, q: Tensor, k: Tensor) -> Program:
    """Return the program of a call on these tensors; keys and values may be on the host, and queries on a device."""
    if not hosted(q, k):
        return Program(call)
    # imported with the first such call
    from .plugins import host_program

    program: Program = host_program()(call)
    return program


def hosted(q: Tensor, k: Tensor) -> bool:
    """Whether keys and values are on another device than queries."""
    return k.device != q.device


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensors: Sequence[Tensor],
    call: str,
    scale: float,
    q_offset: int,
    dropout: int,
) -> tuple[Tensor, Tensor]:
    """Compute (out, lse) of a call, given as the text ``Call.text`` and the ``tensors`` of ``call.pack``."""
    about = Call.read(call, q, k, v, tensors, scale, q_offset, dropout)
    if about.pattern.has_function:
        from .patterns.function import note_use

        note_use(about.pattern)
    program = program_of(about, q, k)
    return _forward(program, program.operands(q, k, v, tensors))


def attention_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    tensors: Sequence[Tensor],
    call: str,
    scale: float,
    q_offset: int,
    dropout: int,
    learns: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Compute (dq, dk, dv, gradients of ``tensors``); where ``learns`` is False the gradient is an empty tensor."""
    learned = sum(x.numel() for x, one in zip(tensors, learns, strict=True) if one)
    about = replace(Call.read(call, q, k, v, tensors, scale, q_offset, dropout), needs_grad=True, learned=learned)
    if about.pattern.has_function:
        from .patterns.function import check_use

        check_use(about.pattern)
    return _backward(program_of(about, q, k), (q, k, v, out, lse), tensors, learns, dout, dlse)


def _backward(
    program: Program,
    saved: tuple[Tensor, ...],
    tensors: Sequence[Tensor],
    learns: Sequence[bool],
    dout: Tensor,
    dlse: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    q, k, v, out, lse = saved
    if program.call.paged or program.call.kv_dtype is not None:
        refuse_gradient("keys and values in pages or in 8 bits")
    operands = program.operands(q, k, v, tensors, learns)
    # a saved-tensor hook may have changed their layout
    returned = Returned(dout, dlse, out.contiguous(), lse.contiguous())
    try:
        grads = program.backward(operands, returned)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        from . import oom_retry

        grads = oom_retry.backward(program, operands, returned, error)
    return *grads, table_grads(tensors, learns, operands)


def _forward(program: Program, operands: Operands) -> tuple[Tensor, Tensor]:
    try:
        return program.forward(operands)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        # imported when memory has run out
        from . import oom_retry

        return oom_retry.forward(program, operands, error)


def table_grads(tensors: Sequence[Tensor], learns: Sequence[bool], operands: Operands) -> list[Tensor]:
    """Return the summed gradient of each tensor that learns, in its dtype, and an empty tensor for the others."""
    return _by_tensor(tensors, learns, () if operands.terms is None else operands.terms.gradients())


def fake_grads(tensors: Sequence[Tensor], learns: Sequence[bool]) -> list[Tensor]:
    """Return tensors with the shapes and dtypes of :func:`table_grads`, without values."""
    return _by_tensor(tensors, learns, (x.new_empty(x.shape) for x, one in zip(tensors, learns, strict=True) if one))


def _by_tensor(tensors: Sequence[Tensor], learns: Sequence[bool], grads: Iterable[Tensor]) -> list[Tensor]:
    rest = iter(grads)
    return [next(rest).to(x.dtype) if one else x.new_empty(0) for x, one in zip(tensors, learns, strict=True)]


def _fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=acc_dtype(q.dtype))


def _fake_backward(dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Any, ...]:
    tensors, learns = rest[2], rest[-1]
    grads = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return *grads, fake_grads(tensors, learns)


def differentiate(op: Any, setup: Callable[..., None] | None, backward: Callable[..., Any]) -> None:
    """Register an operator's gradient, as ``torch.library.register_autograd`` does."""
    torch.library.register_autograd(op.name(), backward, setup_context=setup, lib=_library)


attention_op, attention_backward_op = operators((attention, _fake), (attention_backward, _fake_backward))


def refuse_gradient(what: str) -> NoReturn:
    """Raise UnsupportedError, since keys and values in pages or 8 bits are for inference."""
    remedy = "Call it under torch.no_grad(); train with attention() on tensors of a floating dtype."
    raise UnsupportedError(what, "an input that requires gradients", "none: it is forward-only", remedy)


class Differentiable(torch.autograd.Function):
    """Base of the autograd functions: ``torch.func`` may take first-order reverse mode and ``vmap`` of them."""

    generate_vmap_rule = True

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        """Raise UnsupportedError, since without a rule the tangent would silently be zero."""
        _refuse("a forward-mode derivative", "Use reverse mode: torch.func.vjp, jacrev or grad.")


def refuse_forward_mode() -> None:
    """Raise UnsupportedError under forward-mode differentiation, which an operator alone would silently ignore."""
    if forward_mode():
        Differentiable.jvp(None)


def _refuse(got: str, remedy: str) -> NoReturn:
    raise UnsupportedError("attention", got, "reverse-mode derivatives of first order", remedy)


def refuse_twice(ctx: Any, *_: Any) -> NoReturn:
    """Raise UnsupportedError for the gradient of a gradient."""
    _refuse("a second derivative", "Call the formula on small dense tensors for one.")


def can_bypass_operator(program: Program, tensors: Sequence[Tensor]) -> bool:
    """Whether a program may run without its operator, with no difference that anything could observe.

    This needs plain tensors in main memory, the native kernel, and no mode, transform, trace, profiler or autocast,
    which watch or change operators. It also needs a pattern without tables, which a transform may have wrapped, or a
    program that was looked up because nothing watched the call. On a GPU it needs plain tensors and such a program.
    """
    # first, since a trace cannot follow the other checks
    if torch.compiler.is_compiling() or not no_interception():
        return False
    if are_plain_cpu(tensors):
        return (program.constant or not program.call.pattern.tables) and program.native
    return program.constant and are_plain_gpu(tensors)


class _Backward(Differentiable):
    backward = staticmethod(refuse_twice)

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        """Call the operator and return the gradients of its tensor list as separate outputs."""
        *grads, of_tensors = attention_backward_op(*args)
        return *grads, *of_tensors

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Save nothing, since there is no second derivative."""


class _DirectBackward(Differentiable):
    backward = staticmethod(refuse_twice)

    @staticmethod
    def forward(
        program: Program, learns: list[bool], dout: Tensor, dlse: Tensor | None, *saved: Tensor
    ) -> tuple[Tensor, ...]:
        """Run the program without its operator and return the gradients of all tensors as separate outputs."""
        *grads, of_tensors = _backward(program, saved[:5], saved[5:], learns, dout, dlse)
        return *grads, *of_tensors

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Save nothing, since there is no second derivative."""


# compiled autograd would trace the tiles
_direct_backward = untraced(lambda *args: _DirectBackward.apply(*args))  # type: ignore[no-untyped-call]


class _Attention(Differentiable):
    """The differentiable call of a program on tensors."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, program: Program, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        """Run the program or its operator; tensors are separate arguments because autograd ignores those in lists."""
        # a constant program is direct, or was looked up only because nothing watches the call
        if program.constant or can_bypass_operator(program, (q, k, v, *tensors)):
            return run(program, q, k, v, tensors)
        call = program.call
        return attention_op(q, k, v, list(tensors), call.text, *call.numbers)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Save the program and the tensors for backward."""
        q, k, v, ctx.program, *tensors = inputs
        _save(ctx, None if ctx.program.constant else ctx.program.call.pattern, q, k, v, tensors, output)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        learns = list(ctx.needs_input_grad[4:])
        dq, dk, dv, of_tensors = _gradients(ctx, ctx.program, learns, dout, dlse)
        return dq, dk, dv, None, *of_tensors


# Skips Function.apply, which first binds the arguments by name for transforms; the binding takes 50 microseconds.
_differentiable: Callable[..., Any] = super(torch.autograd.Function, _Attention).apply


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, tensors, *ctx.call = inputs
    _save(ctx, followed(ctx.call[0], tensors, q), q, k, v, tensors, output)


def followed(text: str, tensors: Sequence[Tensor], q: Tensor) -> Pattern | None:
    """Build the pattern of an operator's text if it contains a function or key bounds, and the call is not traced."""
    spec, _ = lines_of(text)
    follows = are_plain_cpu((q,)) and names_in(spec) & {"TokenMask", "KeyPadding"}
    return pattern_of(spec, tensors) if follows else None


def _save(ctx: Any, pattern: Pattern | None, *saved: Any) -> None:
    *inputs, tensors, output = saved
    # kept alive for backward, which checks that the pattern's function and key bounds have not changed
    ctx.pinned = None if pattern is None else pinned(pattern, tensors, inputs[0])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs, *output, *savable(tensors))


def pinned(pattern: Pattern, tensors: Sequence[Tensor], q: Tensor) -> Pinned | None:
    """Hold the functions and bounds that a call's pattern follows; None if there are none, or the call is traced."""
    if type(q) not in (Tensor, torch.nn.Parameter):
        return None
    if not (pattern.has_function or "KeyPadding" in names_in(pattern.spec)):
        return None
    from .patterns.recorded import Pinned

    return Pinned(pattern, tensors)


def savable(tensors: Iterable[Tensor]) -> Iterable[Tensor]:
    """Yield tensors that can be saved for backward; those of a pattern made in inference mode are cloned."""
    return (x.clone() if x.is_inference() else x for x in tensors)


# compiled autograd traces backward; the check reads values, so it runs between two graphs
_check_pinned = untraced(lambda pin: pin.check())


def _gradients(
    ctx: Any, program: Program | None, learns: list[bool], dout: Tensor | None, dlse: Tensor | None
) -> tuple[Any, ...]:
    """Compute (dq, dk, dv, gradients of the tensors).

    The given program runs directly if nothing watches operators; otherwise the backward operator does.
    """
    if ctx.pinned is not None:
        _check_pinned(ctx.pinned)
    if dout is None and dlse is None:
        return None, None, None, [None] * len(learns)
    if batched_gradient(dout, dlse):
        return _batched_gradients(ctx, program, learns, dout, dlse)
    q, k, v, out, lse, *tensors = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout
    watched = q, k, v, out, lse, dout, *(tensors if dlse is None else (dlse, *tensors))
    if program is not None and not torch.is_grad_enabled() and can_bypass_operator(program, watched):
        saved = q, k, v, out, lse
        grads = None if program.prepared is None else _prepared_backward(program, saved, dout, dlse)
        if grads is not None:
            return *grads, [None] * len(learns)
        *found, of_tensors = _backward(program.for_length(k), saved, tensors, learns, dout, dlse)
    else:
        every = dout, dlse, q, k, v, out, lse, tensors
        if program is None:
            *found, of_tensors = attention_backward_op(*every, *ctx.call, learns)
        elif program.direct:
            dq, dk, dv, *of_tensors = _direct_backward(program, learns, *every[:-1], *tensors)
            found = [dq, dk, dv]
        else:
            call = program.for_length(k).call
            args = *every, call.text, *call.numbers, learns
            if torch.compiler.is_compiling():
                # compiled autograd traces this function; the operator refuses a second derivative too
                *found, of_tensors = attention_backward_op(*args)
            else:
                dq, dk, dv, *of_tensors = _Backward.apply(*args)  # type: ignore[no-untyped-call]
                found = [dq, dk, dv]
    return *found, [grad if one else None for grad, one in zip(of_tensors, learns, strict=True)]


def _batched_gradients(
    ctx: Any, program: Program | None, learns: list[bool], dout: Tensor | None, dlse: Tensor | None
) -> tuple[Any, ...]:
    """Compute the gradients of a batch one by one, since the operator takes lists, for which torch has no rule."""
    # a batch is a tuple of its members; the other gradient, if there is one, belongs to each of them
    members = [unbatched(x).unbind() if x is not None and batched_gradient(x) else x for x in (dout, dlse)]
    count = next(len(each) for each in members if isinstance(each, tuple))
    parts = []
    for i in range(count):
        one = [each[i] if isinstance(each, tuple) else each for each in members]
        *found, of_tensors = _gradients(ctx, program, learns, *one)
        parts.append((*found, *of_tensors))
    stacked = [None if each[0] is None else rebatched(torch.stack(each)) for each in zip(*parts, strict=True)]
    return *stacked[:3], stacked[3:]


def _prepared_backward(
    program: Program, saved: tuple[Tensor, ...], dout: Tensor, dlse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor] | None:
    assert program.prepared is not None
    try:
        return program.prepared.backward(lambda: program.small_plan(program.backward_steps), saved, dout, dlse)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return None


def _backward_compiled(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    dq, dk, dv, of_tensors = _gradients(ctx, None, list(ctx.needs_input_grad[3]), *grads)
    return dq, dk, dv, of_tensors, *[None] * len(ctx.call)


differentiate(attention_op, _setup, _backward_compiled)
differentiate(attention_backward_op, None, refuse_twice)


def vectorize(op: Any) -> None:
    """Register an operator's rule under ``torch.vmap``."""

    def run(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        # Folding changes the numbers of batch elements, on which tables, seeds and functions may depend.
        apart = any(
            x if isinstance(x, (list, tuple)) else isinstance(x, str) and "TokenMask" in names_in(x) for x in args
        )
        results = (_one_by_one if apart else _folded)(op, info.batch_size, in_dims, args)
        several = isinstance(results, tuple)
        dims = tuple(0 if isinstance(x, Tensor) else [0] * len(x) for x in results)
        return results, dims if several else 0

    torch.library.register_vmap(op, run, lib=_library)


def _one_by_one(op: Any, count: int, in_dims: tuple[Any, ...], args: tuple[Any, ...]) -> Any:
    def at(x: Any, dim: Any, i: int) -> Any:
        if isinstance(x, (list, tuple)):
            return [at(y, place, i) for y, place in zip(x, dim or [None] * len(x), strict=True)]
        return x if dim is None else x.select(dim, i)

    each = [op(*(at(x, dim, i) for x, dim in zip(args, in_dims, strict=True))) for i in range(count)]
    return tuple(
        torch.stack(x) if isinstance(x[0], Tensor) else [torch.stack(y) for y in zip(*x, strict=True)]
        for x in zip(*each, strict=True)
    )


def _folded(op: Any, count: int, in_dims: tuple[Any, ...], args: tuple[Any, ...]) -> Any:
    """Fold the mapped dimension into the batch."""

    def folded(x: Any, dim: int | None) -> Any:
        if not isinstance(x, Tensor):
            return x
        x = x.movedim(dim, 0) if dim is not None else x.expand(count, *x.shape)
        return x.flatten(0, 1)

    results = op(*(folded(x, dim) for x, dim in zip(args, in_dims, strict=True)))
    return tuple(x.unflatten(0, (count, -1)) if isinstance(x, Tensor) else x for x in results)


vectorize(attention_op)
vectorize(attention_backward_op)


def run(
    program: Program, q: Tensor, k: Tensor, v: Tensor, tensors: Sequence[Tensor] = (), with_lse: bool = True
) -> tuple[Tensor, Any]:
    """Compute (out, lse) of a program where nothing watches operators; without ``with_lse``, lse may be None."""
    if torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or (tensors and any(x.requires_grad for x in tensors))
    ):
        return _differentiable(q, k, v, program, *tensors)  # type: ignore[no-any-return]
    if program.prepared is not None:
        try:
            found = program.prepared.forward(q, k, v, with_lse)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            found = None
        if found is not None:
            return found
        program = program.for_length(k)
    if program.call.paged:
        program = Program(program.call.at_lengths(k, tensors))
    return _forward(program, program.operands(q, k, v, tensors))


def attend(call: Call, q: Tensor, k: Tensor, v: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Compute (out, lse) of a checked call, differentiably; ``tensors`` are in the order of ``call.pack``."""
    if torch.compiler.is_compiling():
        refuse_forward_mode()
        return attention_op(q, k, v, tensors, call.text, *call.numbers)  # type: ignore[no-any-return]
    if "torch.utils.flop_counter" in sys.modules:
        # a caller may count
        from .flops import register

        register()
    stored = call.paged or call.kv_dtype is not None
    if stored:
        refuse_forward_mode()
    elif forward_mode() or transforming(q, k, v, *tensors):
        return _Attention.apply(q, k, v, program_of(call, q, k), *tensors)  # type: ignore[no-any-return, no-untyped-call]
    elif not call.needs_grad and not call.pattern.has_function and no_interception():
        # Nothing watches the call. A table that its pattern has sorted already is not sorted again.
        inputs = q, k, v, *tensors
        if are_plain_cpu(inputs) and not (torch.is_grad_enabled() and any(x.requires_grad for x in inputs)):
            program = program_of(call, q, k)
            if program.native:
                return run(program, q, k, v, tensors)
    return attention_op(q, k, v, tensors, call.text, *call.numbers)  # type: ignore[no-any-return]
