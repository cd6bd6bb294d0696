"""Every private name of torch that the library uses, looked up once.

``WITHOUT`` says what happens where this torch lacks a name: the library is slower, or refuses what only that name can
do; it is never wrong. No other module uses a private name of torch: it calls a function of this one.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .cache import fact

_QUICK = "small calls take the operators: some microseconds more"
_FLEX = "the flex backend refuses calls with gradients"
_SDPA = "the sdpa backend refuses, and auto takes another one"
_FUSED = "the flash backend goes without this one of PyTorch's kernels"
_NCCL = "a ring of CUDA tensors is refused"

#: What happens without each name, by its path below ``torch``.
WITHOUT = {
    "Tensor._version": "a table is known by a digest of its contents: to make sure of a plan reads the whole table",
    "_C.DispatchKey.ADInplaceOrView": f"{_QUICK}; {_FLEX}",
    "_C.DispatchKey.AutocastCPU": _QUICK,
    "_C.DispatchKey.AutogradCPU": _QUICK,
    "_C.DispatchKey.AutogradFunctionality": _FLEX,
    "_C.DispatchKey.AutogradNestedTensor": _FLEX,
    "_C.DispatchKey.AutogradOther": _FLEX,
    "_C.DispatchKey.BackendSelect": _QUICK,
    "_C.DispatchKey.CPU": _QUICK,
    "_C.DispatchKeySet": _QUICK,
    "_C.DisableTorchFunction": "a caller's function modes see the calls by which audit probes a layer",
    "_C._ForceDispatchKeyGuard": _FLEX,
    "_C._are_functorch_transforms_active": f"{_QUICK}; a transform is known by the tensors that it wraps",
    "_C._autograd._profiler_enabled": _QUICK,
    "_C._dispatch_keys": _QUICK,
    "_C._dispatch_tls_local_exclude_set": _FLEX,
    "_C._dispatch_tls_local_include_set": f"{_QUICK}; {_FLEX}",
    "_C._functorch.is_batchedtensor": "torch.vmap is known by an item that it will not give; a GPU is waited for",
    "_C._functorch.is_functorch_wrapped_tensor": "a wrapped tensor is known by the memory that it does not have",
    "_C._len_torch_function_stack": _QUICK,
    "_assert_async": "indices on a GPU are checked at once: the host waits for them",
    "_dynamo": "the first operator imports the compiler, a second",
    "autograd.forward_ad._current_level": f"{_QUICK}; forward mode is known by trying it",
    "distributed.device_mesh.DeviceMesh._flatten": "a mesh of two dimensions gets a new group for its ranks",
    "distributed.distributed_c10d._default_pg_init_method": (
        "mesh=None computes alone after a default group that ringweave never used was destroyed"
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
    "utils._python_dispatch._get_current_dispatch_mode": "scratch memory is allocated anew at each use",
    "utils._python_dispatch._get_current_dispatch_mode_stack": (
        "a FlopCounterMode that was made before ringweave registers counts its calls as nothing"
    ),
    "utils._pytree.register_pytree_node": "a BlockPlan is one leaf to torch.export and tree_map",
}


@fact
def find(path: str) -> Any:
    """Look up a name of ``WITHOUT``; None where this torch lacks it."""
    assert path in WITHOUT, path
    if path == "_dynamo":
        # not by attribute: that would import it
        return importlib.util.find_spec("torch._dynamo")
    try:
        return attrgetter(path)(torch)
    except AttributeError:
        return None


# ---- whether something watches operators -----------------------------------------------------------------------------

_keys_of, _included = find("_C._dispatch_keys"), find("_C._dispatch_tls_local_include_set")
_functions, _transforms = find("_C._len_torch_function_stack"), find("_C._are_functorch_transforms_active")
_profiled, _has_level = find("_C._autograd._profiler_enabled"), find("autograd.forward_ad._current_level") is not None
_autocast = torch.is_autocast_enabled


def _key_sets(*sets: tuple[str, ...]) -> Any:
    """Give sets of dispatch keys as numbers; None where a key is missing."""
    kind, keys = find("_C.DispatchKeySet"), [[find(f"_C.DispatchKey.{name}") for name in names] for names in sets]
    if kind is None or any(key is None for names in keys for key in names):
        return None
    found = (functools.reduce(kind.add, rest, kind(first)) for first, *rest in keys)
    return frozenset(int(each.raw_repr()) for each in found)


# tensors as they are, and those of inference mode; a lazy negation, a wrapper or another device has other keys
_PLAIN = _key_sets(("CPU", "AutocastCPU"), ("CPU", "ADInplaceOrView", "AutogradCPU", "AutocastCPU"))
# active on every thread, with and without inference mode: modes of dispatch, transforms and traces add more
_USUAL = _key_sets(("BackendSelect", "ADInplaceOrView"), ("BackendSelect",))

if _has_level and None not in (_keys_of, _included, _functions, _transforms, _profiled, _PLAIN, _USUAL):

    def plain(a: Tensor, b: Tensor, c: Tensor) -> bool:
        """Whether three tensors are ordinary ones in main memory."""
        # unrolled by hand: a generator expression doubles the overhead
        return (
            type(a) is type(b) is type(c) is Tensor
            and _keys_of(a).raw_repr() in _PLAIN
            and _keys_of(b).raw_repr() in _PLAIN
            and _keys_of(c).raw_repr() in _PLAIN
        )

    def all_plain(tensors: Iterable[Tensor]) -> bool:
        """Whether tensors are ordinary ones in main memory."""
        # a loop: a generator expression doubles the overhead
        for x in tensors:  # noqa: SIM110
            if type(x) is not Tensor or _keys_of(x).raw_repr() not in _PLAIN:
                return False
        return True

    def unwatched() -> bool:
        """Whether nothing would see that operators were gone round: no mode, transform, trace, profiler or autocast."""
        return not (
            _included().raw_repr() not in _USUAL
            or _functions()
            or _transforms()
            or forward_ad._current_level >= 0
            or _profiled()
            or _autocast("cpu")
        )

else:

    def plain(a: Tensor, b: Tensor, c: Tensor) -> bool:
        """Unknown: False takes the operators."""
        return False

    def all_plain(tensors: Iterable[Tensor]) -> bool:
        """Unknown: False takes the operators."""
        return False

    def unwatched() -> bool:
        """Unknown: False takes the operators."""
        return False


def forward_mode() -> bool:
    """Whether forward-mode differentiation is on."""
    if _has_level:
        return forward_ad._current_level >= 0
    one = torch.zeros((), device="cpu")
    try:
        forward_ad.make_dual(one, one)
    except RuntimeError:  # there is no level
        return False
    return True


_wraps = find("_C._functorch.is_functorch_wrapped_tensor")
_batches = find("_C._functorch.is_batchedtensor")


def transforming(*tensors: Tensor) -> bool:
    """Whether a transform of ``torch.func`` is active; ``tensors``: those that it may have wrapped."""
    if _transforms is not None:
        return bool(_transforms())
    # what differentiates wraps new tensors too
    return any(map(wrapped, (torch.zeros((), device="cpu"), *tensors)))


def wrapped(x: Tensor) -> bool:
    """Whether a transform of ``torch.func`` stands in for a tensor."""
    if _wraps is not None:
        return bool(_wraps(x))
    try:
        return x.data_ptr() == 0 and x.numel() > 0 and not x.is_meta
    except RuntimeError:
        return True


def mapped(x: Tensor) -> bool:
    """Whether ``torch.vmap`` stands in for a tensor."""
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
    """Whether a dispatch mode may make tensors of its own kind."""
    return _mode is None or _mode() is not None


def dispatch_modes() -> list[Any]:
    """List the dispatch modes that are on."""
    return [] if _modes is None else _modes()


_no_functions = find("_C.DisableTorchFunction")


def without_functions() -> AbstractContextManager[None]:
    """Keep calls from function modes and subclasses."""
    return nullcontext() if _no_functions is None else _no_functions()


# ---- tensors ---------------------------------------------------------------------------------------------------------

if find("Tensor._version") is not None:

    def version(x: Tensor) -> Hashable:
        """Identify a tensor's state between writes; inference mode counts none."""
        return 0 if x.is_inference() else x._version

else:

    def version(x: Tensor) -> Hashable:
        """Identify a tensor's state by its contents."""
        return 0 if x.is_inference() or x.is_meta else digest(x)


def digest(x: Tensor) -> bytes:
    """Digest what a tensor holds, on the host."""
    # a copy: exposing the memory itself would fix its size for its owner
    data = x.detach().resolve_conj().resolve_neg().cpu().clone(memory_format=torch.contiguous_format).reshape(-1)
    return hashlib.blake2b(data.view(torch.uint8).numpy().data, digest_size=16).digest()


_assert_async = find("_assert_async")


def require(condition: Tensor, words: str) -> None:
    """Raise RuntimeError, maybe later, unless a tensor of one bool on another device is true; nobody waits for it."""
    if _assert_async is not None:
        _assert_async(condition, words)
    elif not condition.is_meta and not bool(condition):
        raise RuntimeError(words)


def aten(name: str) -> Any:
    """Give one of PyTorch's attention operators, and None where there is none of the name."""
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
    """Allow autograd inside an operator, which runs below it: the dispatch keys that were taken out are put back."""
    excluded = _excluded()
    for key in _AUTOGRAD:
        excluded = excluded.remove(key)
    with _guard(_included(), excluded), torch.enable_grad():
        yield


_COMPILER = None if find("_dynamo") is None else "torch._dynamo"


def untraced(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Keep the compiler out of a function that PyTorch calls for an operator, without importing it (a second)."""

    @fact
    def disabled() -> Callable[..., Any]:
        return torch.compiler.disable(kernel)  # type: ignore[no-any-return]

    def run(*args: Any, **kwargs: Any) -> Any:
        return (disabled() if _COMPILER is None or _COMPILER in sys.modules else kernel)(*args, **kwargs)

    return run


def register_pytree(kind: type, flatten: Callable[[Any], Any], unflatten: Callable[[Any, Any], Any], name: str) -> None:
    """Make a class a node of trees, whose leaves ``flatten`` gives."""
    register = find("utils._pytree.register_pytree_node")
    if register is not None:
        register(kind, flatten, unflatten, serialized_type_name=name)


# ---- processes; looked up when asked for, since torch may import these modules late ----------------------------------


def flat(mesh: Any) -> Any:
    """Give the mesh of one dimension over all ranks of a mesh; None where torch cannot."""
    flatten = find("distributed.device_mesh.DeviceMesh._flatten")
    return None if flatten is None else flatten(mesh)


def default_group_was_made() -> bool:
    """Tell whether torch remembers a default group by its method, which is None where it was made with a store."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    return getattr(c10d, "_default_pg_init_method", None) is not None


def set_timeout(options: Any, seconds: float) -> None:
    """Set how long NCCL's watchdog waits."""
    with suppress(AttributeError):  # the class takes no attribute that it does not have
        options._timeout = timedelta(seconds=seconds)


def coalescing(group: Any) -> tuple[Callable[[], None], Callable[[], Any]] | None:
    """Give what begins and what ends one NCCL group of messages; None where torch has no such calls."""
    begin, end = getattr(group, "_start_coalescing", None), getattr(group, "_end_coalescing", None)
    return None if begin is None or end is None else (begin, end)
