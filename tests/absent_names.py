"""Compute calls without private names of torch, a process each, and print JSON; test_torch_compat.py runs this.

One process imports torch and its compiler, and forks before it has computed with threads. In a child, ringweave does
not find the names: it imports ringweave, and digests the results of its calls. All names together are also deleted from
torch while a call runs, except for those that torch itself needs then.
"""

from __future__ import annotations

import gc
import hashlib
import importlib.util
import json
import multiprocessing
import sys
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch._dynamo
import torch.distributed.tensor.experimental
import torch.utils.flop_counter
from torch import Tensor
from torch.autograd import forward_ad

#: Names that torch itself needs in every call, and names that it needs in some calls.
NEEDED = (
    "Tensor._version", "_C.DispatchKeySet", "_C._are_functorch_transforms_active", "_dynamo",
    "autograd.forward_ad._current_level",
)  # fmt: skip
NEEDED_BY = {
    "_C.DisableTorchFunction": {"compile"},
    "_C._DisableFuncTorch": {"compile"},
    "_C._ForceDispatchKeyGuard": {"compile"},
    "_C._dispatch_keys": {"compile", "func", "mass"},
    "_C._dispatch_tls_local_exclude_set": {"compile", "func", "mass"},
    "_C._dispatch_tls_local_include_set": {"compile", "func", "mass"},
    "_C._functorch.is_batchedtensor": {"compile"},
    "_C._functorch.is_functorch_wrapped_tensor": {"compile"},
    "_C._len_torch_function_stack": {"compile"},
    "_assert_async": {"compile"},
    "overrides._get_current_function_mode_stack": {"compile", "hierarchical"},
    "utils._python_dispatch._disable_current_modes": {"compile"},
    "utils._python_dispatch._get_current_dispatch_mode": {"compile", "func"},
}


def without(names: Collection[str]) -> Any:
    """Import ringweave's module of private names such that it finds none of these; return the module."""

    def getter(path: str) -> Callable[[Any], Any]:
        # a name with a missing attribute raises as the name itself would
        return attrgetter(f"{path}.missing" if path in names else path)

    def spec(name: str, *rest: Any) -> Any:
        return None if name == "torch._dynamo" and "_dynamo" in names else find_spec(name, *rest)

    # these modules import nothing else of the package, so they can be imported first
    alone("cache")
    with mock.patch("operator.attrgetter", getter), mock.patch("importlib.util.find_spec", spec):
        module = alone("torch_compat")
        # the answers are cached for the life of the process
        assert all(module.find(name) is None for name in names)
    return module


@contextmanager
def deleted(names: Collection[str], what: str) -> Iterator[None]:
    """Delete names from torch, except those that torch needs for a call, and operators, which torch creates again."""
    with ExitStack() as stack:
        for path in names:
            if path not in NEEDED and what not in NEEDED_BY.get(path, ()) and not path.startswith("ops."):
                above, _, name = path.rpartition(".")
                owner = attrgetter(above)(torch) if above else torch
                stack.callback(setattr, owner, name, vars(owner)[name])
                delattr(owner, name)
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


def answer(names: Collection[str], all_calls: bool) -> dict[str, Any]:
    """Compute the calls without these names, or only the first one, and say whether calls take the quick path."""
    torch_compat = without(names)
    with deleted(names, "import"):
        steps = list(calls())
    assert sys.modules["ringweave.torch_compat"] is torch_compat
    found: dict[str, Any] = {"quick": torch_compat.no_interception()}
    for what, call in steps if all_calls else steps[:1]:
        with deleted(names, what):
            try:
                found[what] = digest(call())
            except Exception as error:  # noqa: BLE001
                found[what] = f"{type(error).__name__}: {error}"
                if "-v" in sys.argv:
                    traceback.print_exc()
    return found


def in_a_child(names: Collection[str], all_calls: bool) -> dict[str, Any]:
    """Return the answer of a forked process."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=lambda: theirs.send(answer(names, all_calls)))
    child.start()
    theirs.close()
    try:
        found: dict[str, Any] = ours.recv()
    except EOFError:
        found = {}
    child.join()
    return found or {"exit code": child.exitcode}


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # state that torch sets up at first use
    torch.compile(lambda x: x.sin(), backend="aot_eager")(torch.zeros(2, requires_grad=True)).sum().backward()
    torch.func.jvp(torch.sin, (torch.ones(2),), (torch.ones(2),))
    # a garbage collection would scan all of torch again in each child
    gc.freeze()
    gc.disable()
    names, quick = ([*filter(None, text.split(","))] for text in sys.argv[1:3])
    found = {"": in_a_child([], True), "all": in_a_child(names, True)}
    print(json.dumps(found | {name: in_a_child([name], False) for name in quick}))


if __name__ == "__main__":
    main()
