"""Look up every private name of torch that the library uses, once.

``WITHOUT`` describes the effect if this version of torch lacks a name. The library is then slower, or raises for the
feature that needs the name, but its results stay correct. Other modules never use a private name of torch; they call
functions of this module.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from datetime import timedelta
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .cache import process_cache

Function = TypeVar("Function", bound=Callable[..., Any])

_QUICK = "small calls go through the operators, which takes some microseconds more"
_FOUND = "repeated calls on a GPU are checked and compiled again, which takes a hundred microseconds more"
_FLEX = "the flex backend does not support calls with gradients"
_SDPA = "the sdpa backend is not available, and auto chooses another one"
_FUSED = "the flash backend does not use this kernel of PyTorch"
_NCCL = "a ring of CUDA tensors raises an error"
_MODES = "in `with torch.device(...)` score functions are mapped by vmap, which is slower"

#: Effect of the absence of each name, by its path below ``torch``.
WITHOUT = {
    "Tensor._version": "a table is identified by a digest of its contents, so each look-up of a plan reads all of it",
    "_C.DispatchKey.ADInplaceOrView": f"{_QUICK}; {_FLEX}",
    "_C.DispatchKey.AutocastCPU": _QUICK,
    "_C.DispatchKey.AutocastCUDA": _FOUND,
    "_C.DispatchKey.AutogradCPU": _QUICK,
    "_C.DispatchKey.AutogradCUDA": _FOUND,
    "_C.DispatchKey.AutogradFunctionality": _FLEX,
    "_C.DispatchKey.AutogradNestedTensor": _FLEX,
    "_C.DispatchKey.AutogradOther": _FLEX,
    "_C.DispatchKey.BackendSelect": _QUICK,
    "_C.DispatchKey.CPU": _QUICK,
    "_C.DispatchKey.CUDA": _FOUND,
    "_C.DispatchKeySet": _QUICK,
    "_C.DisableTorchFunction": (
        "a caller's function modes see the calls with which audit probes a layer; score functions are mapped by vmap, "
        "which is slower"
    ),
    "_C._DisableFuncTorch": "a pattern with tensors raises RuntimeError inside a transform of torch.func",
    "_C._ForceDispatchKeyGuard": _FLEX,
    "_C._are_functorch_transforms_active": f"{_QUICK}; a transform is detected by the tensors that it wraps",
    "_C._autograd._profiler_enabled": _QUICK,
    "_C._dispatch_keys": _QUICK,
    "_C._dispatch_tls_local_exclude_set": _FLEX,
    "_C._dispatch_tls_local_include_set": f"{_QUICK}; {_FLEX}",
    "_C._functorch.is_batchedtensor": "torch.vmap is detected by a failing item(), for which the host waits for a GPU",
    "_C._functorch.is_functorch_wrapped_tensor": "a wrapped tensor is detected by its lack of memory",
    "_C._len_torch_function_stack": _QUICK,
    "_C._functorch.is_legacy_batchedtensor": "is_grads_batched and jacobian(vectorize=True) raise an error of torch",
    "_assert_async": "the host waits for checks of indices on a GPU",
    "_dynamo": "the first operator imports the compiler, which takes a second",
    "autograd.forward_ad._current_level": f"{_QUICK}; forward mode is detected by trying it",
    "distributed.device_mesh.DeviceMesh._flatten": "a mesh of two dimensions gets a new group for its ranks",
    "distributed.distributed_c10d._default_pg_init_method": (
        "mesh=None computes on one rank after a default group that ringweave never used was destroyed"
    ),
    "distributed.ProcessGroupNCCL.Options._timeout": "NCCL's watchdog may end the process before a longer deadline",
    "distributed.ProcessGroupNCCL._end_coalescing": _NCCL,
    "distributed.ProcessGroupNCCL._start_coalescing": _NCCL,
    "ops.aten._scaled_dot_product_cudnn_attention": _FUSED,
    "ops.aten._scaled_dot_product_cudnn_attention_backward": _FUSED,
    "ops.aten._scaled_dot_product_efficient_attention": "the flash backend refuses dense patterns",
    "ops.aten._scaled_dot_product_efficient_attention_backward": "the flash backend refuses dense patterns",
    "ops.aten._scaled_dot_product_flash_attention": _FUSED,
    "ops.aten._scaled_dot_product_flash_attention_backward": _FUSED,
    "ops.aten._scaled_dot_product_flash_attention_for_cpu": _SDPA,
    "ops.aten._scaled_dot_product_flash_attention_for_cpu_backward": _SDPA,
    "utils._python_dispatch._disable_current_modes": "a BlockMask or chosen keys raise RuntimeError inside a trace",
    "utils._python_dispatch._get_current_dispatch_mode": "scratch memory is allocated anew at each use",
    "utils._python_dispatch._get_current_dispatch_mode_stack": (
        "a FlopCounterMode made before ringweave registers its formulas counts 0 for its calls"
    ),
    "overrides._get_current_function_mode_stack": _MODES,
    "utils._pytree.register_pytree_node": "a BlockPlan is one leaf to torch.export and tree_map",
}


@process_cache
def find(path: str) -> Any:
    """Return the object of a name in ``WITHOUT``, or None if this torch lacks it."""
    assert path in WITHOUT, path
    if path == "_dynamo":
        # not by attribute, which would import the compiler
        return importlib.util.find_spec("torch._dynamo")
    try:
        return attrgetter(path)(torch)
    except AttributeError:
        return None


# ---- detection of modes, transforms and profilers that watch operators -----------------------------------------------

_keys_of, _included = find("_C._dispatch_keys"), find("_C._dispatch_tls_local_include_set")
_functions, _transforms = find("_C._len_torch_function_stack"), find("_C._are_functorch_transforms_active")
_profiled, _has_level = find("_C._autograd._profiler_enabled"), find("autograd.forward_ad._current_level") is not None
_autocast = torch.is_autocast_enabled
#: Types of devices with autocast; looked up at import, because torch 2.11 cannot compile is_autocast_available.
AUTOCAST = frozenset(
    device
    for device in ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "maia", "xla", torch.device("privateuseone").type)
    if torch.amp.is_autocast_available(device)
)


def _key_sets(*sets: tuple[str, ...]) -> Any:
    """Return sets of dispatch keys as numbers, or None if a key is missing."""
    kind, keys = find("_C.DispatchKeySet"), [[find(f"_C.DispatchKey.{name}") for name in names] for names in sets]
    if kind is None or any(key is None for names in keys for key in names):
        return None
    found = (functools.reduce(kind.add, rest, kind(first)) for first, *rest in keys)
    return frozenset(int(each.raw_repr()) for each in found)


# keys of inference tensors and of ordinary ones; a lazy negation, a wrapper or another device has other keys
_PLAIN = _key_sets(("CPU", "AutocastCPU"), ("CPU", "ADInplaceOrView", "AutogradCPU", "AutocastCPU"))
# the same on a GPU, for CUDA and ROCm; empty if a key is missing
_PLAIN_GPU = _key_sets(("CUDA", "AutocastCUDA"), ("CUDA", "ADInplaceOrView", "AutogradCUDA", "AutocastCUDA")) or ()
# classes without a ``__torch_function__`` that would see their operators
_CLASSES = {Tensor, torch.nn.Parameter}
# Dispatch keys active on every thread, without and with inference mode; dispatch modes, transforms and traces add more.
_USUAL = _key_sets(("BackendSelect", "ADInplaceOrView"), ("BackendSelect",))

if _has_level and None not in (_keys_of, _included, _functions, _transforms, _profiled, _PLAIN, _USUAL):

    def is_plain_cpu(a: Tensor, b: Tensor, c: Tensor, /) -> bool:
        """Whether three tensors are ordinary tensors in main memory."""
        # unrolled by hand: a generator expression doubles the overhead
        return (
            (type(a) is type(b) is type(c) is Tensor or {type(a), type(b), type(c)} <= _CLASSES)
            and _keys_of(a).raw_repr() in _PLAIN
            and _keys_of(b).raw_repr() in _PLAIN
            and _keys_of(c).raw_repr() in _PLAIN
        )

    def are_plain_gpu(tensors: Sequence[Tensor], /) -> bool:
        """Whether all tensors are ordinary tensors on one GPU, without autocast there."""
        # a plain loop, since a generator expression doubles the overhead; the first may be no tensor
        for x in tensors:
            if type(x) not in _CLASSES or _keys_of(x).raw_repr() not in _PLAIN_GPU or x.device != tensors[0].device:
                return False
        return not _autocast("cuda")

    def are_plain_cpu(tensors: Iterable[Tensor], /) -> bool:
        """Whether all tensors are ordinary tensors in main memory."""
        # a plain loop, since a generator expression doubles the overhead
        for x in tensors:  # noqa: SIM110
            if type(x) not in _CLASSES or _keys_of(x).raw_repr() not in _PLAIN:
                return False
        return True

    def no_interception() -> bool:
        """Whether no mode, transform, trace, profiler or autocast is active that would see or change operators."""
        return not (
            _included().raw_repr() not in _USUAL
            or _functions()
            or _transforms()
            or forward_ad._current_level >= 0
            or _profiled()
            or _autocast("cpu")
        )

else:

    def _unknown(*tensors: object) -> bool:
        """Return False, since this cannot be known: the call then goes through the operators."""
        return False

    is_plain_cpu = are_plain_gpu = are_plain_cpu = no_interception = _unknown


def forward_mode() -> bool:
    """Whether forward-mode differentiation is active."""
    if _has_level:
        return forward_ad._current_level >= 0
    one = torch.zeros((), device="cpu")
    try:
        forward_ad.make_dual(one, one)
    except RuntimeError:  # no level is active
        return False
    return True


_wraps = find("_C._functorch.is_functorch_wrapped_tensor")
_batches = find("_C._functorch.is_batchedtensor")


_batched_gradient = find("_C._functorch.is_legacy_batchedtensor")


def batched_gradient(*grads: Tensor | None) -> bool:
    """Whether gradients are batches, as with ``is_grads_batched`` and ``vectorize=True``: torch's older vmap."""
    if _batched_gradient is None or torch.compiler.is_compiling():
        return False
    return any(x is not None and _batched_gradient(x) for x in grads)


def unbatched(x: Tensor) -> Tensor:
    """Return the batch (n, ...) of a gradient."""
    whole: Tensor = torch._remove_batch_dim(x, _level(), 0, 0)
    return whole


def rebatched(x: Tensor) -> Tensor:
    """Return the gradient of a batch (n, ...)."""
    batch: Tensor = torch._add_batch_dim(x, 0, _level())
    return batch


def _level() -> int:
    try:
        return int(torch._C._vmapmode_increment_nesting()) - 1
    finally:
        torch._C._vmapmode_decrement_nesting()


def transforming(*tensors: Tensor) -> bool:
    """Whether a transform of ``torch.func`` is active, which may have wrapped ``tensors``."""
    if _transforms is not None:
        return bool(_transforms())
    # a new tensor detects differentiating transforms, which wrap new tensors too
    return any(map(wrapped, (torch.zeros((), device="cpu"), *tensors)))


def wrapped(x: Tensor) -> bool:
    """Whether a tensor is a wrapper of a ``torch.func`` transform."""
    if _wraps is not None:
        return bool(_wraps(x))
    try:
        return x.data_ptr() == 0 and x.numel() > 0 and not x.is_meta
    except RuntimeError:
        return True


def mapped(x: Tensor) -> bool:
    """Whether a tensor is a wrapper of ``torch.vmap``."""
    if _batches is not None:
        return bool(_batches(x))
    if not wrapped(x):
        return False
    try:
        x.new_zeros(()).item()
    except RuntimeError:
        return True
    return False


_mode = find("utils._python_dispatch._get_current_dispatch_mode")
_modes = find("utils._python_dispatch._get_current_dispatch_mode_stack")


def dispatched() -> bool:
    """Whether a dispatch mode may be active, which could make tensors of another class."""
    return _mode is None or _mode() is not None


def dispatch_modes() -> list[Any]:
    """Return the active dispatch modes."""
    return [] if _modes is None else _modes()


def without_values() -> bool:
    """Whether a mode records operations or computes shapes alone, as those of ``make_fx`` and fake tensors do."""
    # torch's own modes of this kind have a key; those of others see tensors with values
    return any(getattr(mode, "_mode_key", None) is not None for mode in dispatch_modes())


_functions_now = find("overrides._get_current_function_mode_stack")


def function_modes() -> bool:
    """Whether a function mode may be active, other than that of ``torch.device``, which changes no values."""
    if _functions is not None and not _functions():
        return False
    if _functions_now is None:
        return True
    # torch imports the module of this class with the first such mode
    return any(type(mode).__module__ != "torch.utils._device" for mode in _functions_now())


_hides_functions = find("_C.DisableTorchFunction")


def without_function_modes() -> AbstractContextManager[None]:
    """Hide operations from all function modes."""
    return nullcontext() if _hides_functions is None else _hides_functions()


def constant_in_traces(function: Function) -> Function:
    """Let ``torch.compile`` call a function of constants, instead of tracing it, and keep its result as a constant.

    ``torch.compiler.assume_constant_result`` does the same, but imports the compiler. A torch that does not know the
    attribute traces the function.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


_without_transforms = find("_C._DisableFuncTorch")
_without_modes = find("utils._python_dispatch._disable_current_modes")


def outside_transforms(*constants: Tensor) -> AbstractContextManager[None]:
    """Hide operations on constants from every transform of ``torch.func``, trace and dispatch mode.

    A constant of a call, such as the bounds of a pattern, has memory. The results of operations on it inside a
    transform have not, so the host reads constants in this context. It hides nothing if a transform has wrapped one of
    the tensors.
    """
    if torch.compiler.is_dynamo_compiling() or not (transforming() or dispatched()) or any(map(wrapped, constants)):
        return nullcontext()
    return _outside()


@contextmanager
def _outside() -> Iterator[None]:
    with ExitStack() as entered:
        for hide in (_without_transforms, _without_modes):
            if hide is not None:
                entered.enter_context(hide())
        yield


_excluded = find("_C._dispatch_tls_local_exclude_set")
_force_keys = find("_C._ForceDispatchKeyGuard")
_VMAP = "FuncTorchBatched", "FuncTorchVmapMode", "FuncTorchDynamicLayerFrontMode", "FuncTorchDynamicLayerBackMode"


def vmap_enabled() -> AbstractContextManager[None]:
    """Let ``torch.vmap`` run inside of an operator of compiled code, where torch skips its rules."""
    if torch.compiler.is_dynamo_compiling() or _excluded is None or _force_keys is None:
        return nullcontext()
    excluded = _excluded()
    if not excluded.has(torch._C.DispatchKey.FuncTorchBatched):
        return nullcontext()
    for name in _VMAP:
        excluded = excluded.remove(getattr(torch._C.DispatchKey, name))
    return _force_keys(torch._C._dispatch_tls_local_include_set(), excluded)  # type: ignore[no-any-return]


# ---- tensors ---------------------------------------------------------------------------------------------------------

if find("Tensor._version") is not None:

    def version(x: Tensor) -> Hashable:
        """Return a value that changes with each write to a tensor; inference tensors count no writes."""
        return 0 if x.is_inference() else x._version

else:

    def version(x: Tensor) -> Hashable:
        """Return a digest of a tensor's contents, which changes with its values."""
        return 0 if x.is_inference() or x.is_meta else digest(x)


def digest(x: Tensor) -> bytes:
    """Return a digest of a tensor's contents, computed on the host."""
    with outside_transforms(x):
        # of a copy, since numpy access to the memory itself would forbid its owner to resize it
        data = x.detach().resolve_conj().resolve_neg().cpu().clone(memory_format=torch.contiguous_format).reshape(-1)
        return hashlib.blake2b(data.view(torch.uint8).numpy().data, digest_size=16).digest()


_assert_async = find("_assert_async")


def require(condition: Tensor, words: str) -> None:
    """Raise RuntimeError unless a one-element bool tensor on another device is true, if possible without waiting."""
    if _assert_async is not None:
        _assert_async(condition, words)
    elif not condition.is_meta and not bool(condition):
        raise RuntimeError(words)


def aten(name: str) -> Any:
    """Return one of PyTorch's attention operators, or None if this torch lacks it."""
    return find(f"ops.aten._scaled_dot_product_{name}")


# ---- autograd and the compiler ---------------------------------------------------------------------------------------

_guard, _excluded = find("_C._ForceDispatchKeyGuard"), find("_C._dispatch_tls_local_exclude_set")
_AUTOGRAD = [
    find(f"_C.DispatchKey.{name}")
    for name in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", "ADInplaceOrView")
]
#: Whether ``autograd_within`` works.
AUTOGRAD_WITHIN = None not in (_guard, _excluded, _included, *_AUTOGRAD)


@contextmanager
def autograd_within() -> Iterator[None]:
    """Enable autograd inside an operator, where the dispatcher has excluded its keys."""
    excluded = _excluded()
    for key in _AUTOGRAD:
        excluded = excluded.remove(key)
    with _guard(_included(), excluded), torch.enable_grad():
        yield


_COMPILER = None if find("_dynamo") is None else "torch._dynamo"


def untraced(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Disable the compiler in a function that implements an operator, without importing it (which takes a second)."""

    # a list, since the compiler warns of functools.cache in a frame that it meets after a graph
    disabled: list[Callable[..., Any]] = []

    def run(*args: Any, **kwargs: Any) -> Any:
        if not (_COMPILER is None or _COMPILER in sys.modules):
            return kernel(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(kernel))
        return disabled[0](*args, **kwargs)

    # the name that torch.compiler.disable sets; without it a trace ends in `run`, with a warning
    run._torchdynamo_disable = True  # type: ignore[attr-defined]
    return run


def uncompiled(why: str) -> Callable[[Function], Function]:
    """Make compiled code break its graph at a function and run it as it is; ``why`` is in the error of fullgraph=True.

    Unlike ``torch.compiler.disable`` this does not import the compiler.
    """

    def marked(function: Function) -> Function:
        # a compiler that does not read these attributes traces the function, and raises its own errors
        outer: Any = functools.wraps(function)(untraced(function))
        outer._torchdynamo_disable, outer._torchdynamo_disable_msg = True, why
        return outer  # type: ignore[no-any-return]

    return marked


def before_compiling(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function or module that ``torch.compile`` has wrapped; others as they are."""
    for name in ("_torchdynamo_orig_callable", "_orig_mod"):
        function = getattr(function, name, function)
    return function


def register_pytree(kind: type, flatten: Callable[[Any], Any], unflatten: Callable[[Any, Any], Any], name: str) -> None:
    """Register a class as a pytree node; ``flatten`` returns its leaves."""
    register = find("utils._pytree.register_pytree_node")
    if register is not None:
        register(kind, flatten, unflatten, serialized_type_name=name)


# ---- processes; looked up at each use, since torch may import these modules late -------------------------------------


def flat(mesh: Any) -> Any:
    """Return the one-dimensional mesh over all ranks of a mesh, or None if torch cannot make it."""
    flatten = find("distributed.device_mesh.DeviceMesh._flatten")
    return None if flatten is None else flatten(mesh)


def default_group_was_made() -> bool:
    """Whether torch recorded an init method of a default group; a group made with a store leaves none."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    return getattr(c10d, "_default_pg_init_method", None) is not None


def set_timeout(options: Any, seconds: float) -> None:
    """Set the timeout of NCCL's watchdog."""
    with suppress(AttributeError):  # the class accepts only attributes that it defines
        options._timeout = timedelta(seconds=seconds)


def coalescing(group: Any) -> tuple[Callable[[], None], Callable[[], Any]] | None:
    """Return the functions that begin and end one NCCL group of messages, or None if torch has no such calls."""
    begin, end = getattr(group, "_start_coalescing", None), getattr(group, "_end_coalescing", None)
    return None if begin is None or end is None else (begin, end)
