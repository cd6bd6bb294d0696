"""Compute calls with private names of torch removed, a process each, and print JSON; test_torch_compat.py runs this.

One process imports torch and its compiler, and forks before it has computed with threads. A child takes a name away,
imports ringweave, and digests what its calls give. A name is deleted for good where torch gets through these calls
without it; those in ``PUT_BACK`` torch needs itself: they are away while ringweave looks its names up, and come back for
the calls that need them.
"""

from __future__ import annotations

import gc
import hashlib
import importlib.util
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo
import torch.distributed.tensor.experimental
import torch.utils.flop_counter
from torch import Tensor
from torch.autograd import forward_ad

_EVERYWHERE = frozenset[str]()
#: Names that torch itself uses, by the calls for which they come back, or for all and the import of ringweave.
PUT_BACK = {
    "Tensor._version": _EVERYWHERE,
    "_C.DispatchKeySet": _EVERYWHERE,
    "_C.DisableTorchFunction": {"compile"},
    "_C._ForceDispatchKeyGuard": {"compile"},
    "_C._are_functorch_transforms_active": _EVERYWHERE,
    "_C._dispatch_keys": {"compile", "func", "mass"},
    "_C._dispatch_tls_local_exclude_set": {"compile", "func", "mass"},
    "_C._dispatch_tls_local_include_set": {"compile", "func", "mass"},
    "_C._functorch.is_batchedtensor": {"compile"},
    "_C._functorch.is_functorch_wrapped_tensor": {"compile"},
    "_C._len_torch_function_stack": {"compile"},
    "_assert_async": {"compile"},
    "_dynamo": _EVERYWHERE,
    "autograd.forward_ad._current_level": _EVERYWHERE,
    "utils._python_dispatch._get_current_dispatch_mode": {"compile", "func"},
} | {
    # operators are not deleted: looking them up is denied
    f"ops.aten._scaled_dot_product_{name}{end}": _EVERYWHERE
    for name in ("cudnn_attention", "efficient_attention", "flash_attention", "flash_attention_for_cpu")
    for end in ("", "_backward")
}


class _Missing:
    def __get__(self, *_: object) -> Any:
        raise AttributeError


@contextmanager
def away(path: str) -> Iterator[None]:
    """Remove a name of torch, in the way that its owner allows."""
    *above, name = path.split(".")
    owner: Any = attrgetter(".".join(above))(torch) if above else torch
    if path == "_dynamo":  # a module, which is found but not loaded
        owner, name, found = importlib.util, "find_spec", importlib.util.find_spec
        importlib.util.find_spec = lambda each, *rest: None if each == "torch._dynamo" else found(each, *rest)
    elif path == "Tensor._version":  # an attribute of a C class: hidden by a subclass
        owner._version, found = _Missing(), None
    elif path.startswith("ops."):  # created on first access
        owner, found = type(owner), type(owner).__getattr__
        vars(torch.ops.aten).pop(name, None)

        def missing(self: Any, each: str) -> Any:
            if each == gone:
                raise AttributeError(each)
            return found(self, each)

        owner.__getattr__, gone, name = missing, name, "__getattr__"
    else:
        found = vars(owner)[name]
        delattr(owner, name)
    yield
    if path == "Tensor._version":
        del owner._version
    else:
        setattr(owner, name, found)


@contextmanager
def gone(names: list[str], what: str = "") -> Iterator[None]:
    """Remove names, except those that torch needs for a call."""
    with ExitStack() as stack:
        for name in names:
            back = PUT_BACK.get(name)
            if not what or (back != _EVERYWHERE and what not in (back or ())):
                stack.enter_context(away(name))
        yield


def calls() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield (name, call) pairs; each call computes tensors, numbers, or the type and text of an error."""
    import ringweave as rw
    from ringweave.adaptive import tile_mass
    from ringweave.hierarchical import hierarchical_attention

    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 4, 96, 16, generator=generator) for _ in range(3))
    window = rw.SlidingWindow(24) & rw.Causal()
    small, large = torch.arange(96) % 5, torch.arange(2**18 + 96) % 7
    masks = [rw.TokenMask(lambda b, h, i, j, x=x: (x[i] <= x[j]) & (i >= j)) for x in (small, large)]
    table = rw.BlockTable(torch.eye(6, dtype=torch.bool), 16)

    def grads(run: Callable[..., Tensor], *tensors: Tensor) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in tensors]
        out = run(*leaves)
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    def following(pattern: Any, *follows: Tensor) -> list[Tensor]:
        def both() -> list[Tensor]:
            return [rw.attention(q, k, v, pattern), *grads(lambda *x: rw.attention(*x, pattern), q, k, v)]

        before = both()
        for x in follows:
            x[48:50] = x.max()
        return [*before, *both()]

    def functional() -> list[Tensor]:
        grad = torch.func.grad(lambda x: rw.attention(x, k, v, window).square().sum())
        return [grad(q), torch.vmap(lambda x: rw.attention(x, k, v, window))(torch.stack([q, k]))]

    def forward_mode() -> Tensor:
        with forward_ad.dual_level():
            return rw.attention(forward_ad.make_dual(q, q), k, v, window)

    def counted() -> Tensor:
        with torch.utils.flop_counter.FlopCounterMode(display=False):
            return rw.attention(q, k, v, window)

    def masses() -> list[Tensor]:
        lse = rw.attention_with_lse(q, k, v, window).lse
        mass = torch.func.jvp(lambda x: tile_mass(x, k, lse, window).values, (q,), (q,))
        return [tile_mass(q, k, lse, window).values, mass[0]]

    def mapped() -> Tensor:
        lse = rw.attention_with_lse(q, k, v, window).lse
        return torch.vmap(lambda x: tile_mass(x, k, lse, window).values)(q[None])

    def scratch() -> list[Tensor]:
        space = rw.memory.Workspace()
        return [space.take((300, 5), torch.float32).fill_(1.0) for _ in range(3)]

    def meshed() -> list[int]:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        from ringweave.parallel.transport.mesh import group_of

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("node", "cp"))
        first, again = group_of(mesh)[0], group_of(mesh)[0]
        assert first is again
        ranks = dist.get_process_group_ranks(first)
        dist.destroy_process_group()
        return ranks

    yield "plain", lambda: rw.attention_with_lse(q, k, v, window)
    yield "backward", lambda: grads(lambda *x: rw.attention(*x, window), q, k, v)
    yield "term", lambda: grads(lambda *x: rw.attention(*x, window, terms=rw.Softcap(2.0)), q, k, v)
    yield "inference", lambda: torch.inference_mode()(rw.attention)(q, k, v, window).clone()
    compiled = torch.compile(lambda *x: rw.attention(*x, window), backend="aot_eager", fullgraph=True)
    yield "compile", lambda: grads(compiled, q, k, v)
    yield "mask", lambda: following(masks[0], small)
    yield "mask of a large tensor", lambda: following(masks[1], large)
    yield "table", lambda: following(table, *table.tables)
    yield "func", functional
    yield "forward mode", forward_mode
    yield "flops", counted
    yield "mass", masses
    yield "mass of vmap", mapped
    yield "hierarchical", lambda: grads(lambda *x: hierarchical_attention(*x, window=32, pool=16, top_k=1), q, k, v)
    yield "scratch", scratch
    yield "mesh", meshed
    yield "sdpa", lambda: rw.attention(q, k, v, rw.Causal(), backend="sdpa")


def digest(found: Any) -> Any:
    if isinstance(found, Tensor):
        return hashlib.blake2b(np.ascontiguousarray(found.detach().numpy()).tobytes(), digest_size=8).hexdigest()
    return [digest(each) for each in found] if isinstance(found, (list, tuple)) else found


def alone(name: str) -> Any:
    """Import a module of ringweave without the package."""
    package = importlib.util.find_spec("ringweave")
    assert package is not None
    assert package.origin is not None
    spec = importlib.util.spec_from_file_location(f"ringweave.{name}", Path(package.origin).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def answer(names: list[str]) -> dict[str, Any]:
    """Compute all calls without these names."""
    # these modules import nothing else of the package, so they can be imported first
    alone("cache")
    with gone(names):
        torch_compat = alone("torch_compat")
        still = [name for name in names if torch_compat.find(name) is not None]
    with gone(names, "import"):
        steps = list(calls())
    assert sys.modules["ringweave.torch_compat"] is torch_compat
    found: dict[str, Any] = {"still there": still, "quick": torch_compat.no_interception()}
    for what, call in steps:
        with gone(names, what):
            try:
                found[what] = digest(call())
            except Exception as error:  # noqa: BLE001
                found[what] = f"{type(error).__name__}: {error}"
                if "-v" in sys.argv:
                    traceback.print_exc()
    return found


def children(jobs: list[list[str]], at_once: int = 2) -> Iterator[dict[str, Any]]:
    """Fork a process for each job, several at a time."""
    waiting: list[tuple[int, int]] = []
    for names in [*jobs, *[None] * at_once]:
        if len(waiting) == at_once or (names is None and waiting):
            child, end = waiting.pop(0)
            with os.fdopen(end) as pipe:
                said = pipe.read()
            _, status = os.waitpid(child, 0)
            yield json.loads(said) if said else {"died": status}
        if names is not None:
            begin, end = os.pipe()
            child = os.fork()
            if not child:
                try:
                    with os.fdopen(end, "w") as pipe:
                        pipe.write(json.dumps(answer(names)))
                except BaseException:  # noqa: BLE001
                    traceback.print_exc()
                finally:
                    os._exit(0)
            os.close(end)
            waiting.append((child, begin))


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # state that torch sets up at first use
    torch.compile(lambda x: x.sin(), backend="aot_eager")(torch.zeros(2, requires_grad=True)).sum().backward()
    torch.func.jvp(torch.sin, (torch.ones(2),), (torch.ones(2),))
    # a garbage collection would scan all of torch again in each child
    gc.freeze()
    gc.disable()
    names = [name for name in sys.argv[1:] if name != "-v"]
    jobs = [[], *([name] for name in names), names]
    print(json.dumps(list(children(jobs))))


if __name__ == "__main__":
    main()
