"""A step that fails, anywhere and for any reason, leaves a module's cache as it was; a cache serves one module."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ringweave as rw
from ringweave import nn
from ringweave.cache import PLANS, PROGRAMS

from .failing import executed, fails

E, H = 32, 4
Layer = nn.MixtureOfBlockAttention | nn.NativeSparseAttention
MODULES: dict[str, Callable[[], Layer]] = {
    "moba": lambda: nn.MixtureOfBlockAttention(E, H, block_size=8, top_k=3, num_kv_heads=2),
    "nsa": lambda: nn.NativeSparseAttention(
        E, H, num_kv_heads=2, compress_block=8, compress_stride=4, block_size=8, top_k=4, window=6, rotary_base=100.0
    ),
}


def made(name: str) -> Layer:
    torch.manual_seed(0)
    return MODULES[name]()


def contents(cache: nn.key_cache.KeyCache) -> dict[str, Any]:
    names = cache._taken.rows
    return {"length": cache.length, "repr": repr(cache)} | {name: cache.read(name).clone() for name in names}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(x, other[name]) if isinstance(x, Tensor) else x == other[name] for name, x in one.items()
    )


@pytest.mark.parametrize(
    ("before", "tokens"), [(40, 1), (31, 1), (0, 30), (21, 20)], ids=["step", "full buffer", "prompt", "chunk"]
)
@pytest.mark.parametrize("name", MODULES)
@torch.no_grad()
def test_a_failure_at_any_line(name: str, before: int, tokens: int) -> None:
    """The cache keeps its bits, and the repeated step has the result and leaves the cache of one that never failed."""
    layer, x = made(name), torch.randn(1, before + tokens + 3, E)
    old, more, rest = x.split([before, tokens, 3], 1)
    start = layer.empty_cache()
    for part in old.split(31, 1):
        layer(part, cache=start)

    def step(cache: nn.key_cache.KeyCache) -> Tensor:
        # a step that finds its plan has fewer lines
        PROGRAMS.clear()
        PLANS.clear()
        return layer(more, cache=cache)

    cache = copy.deepcopy(start)
    want, taken = step(cache), contents(cache)
    wanted = layer(rest, cache=cache)
    lines = executed(lambda: step(copy.deepcopy(start)))
    own = [number for number, (file, _) in enumerate(lines, 1) if "/nn/" in file]
    # what these lines call fails in other lines of the package
    numbers = sorted({*own[:: 1 if tokens == 1 else 5], *range(1, len(lines) + 1, 150)})
    failed = 0
    for number in numbers:
        cache = copy.deepcopy(start)
        if not fails(lambda: step(cache), number):  # noqa: B023
            continue
        failed += 1
        assert same(contents(cache), contents(start)), lines[number - 1]
        assert torch.equal(step(cache), want), lines[number - 1]
        assert same(contents(cache), taken), lines[number - 1]
    assert failed > 0.9 * len(numbers)
    assert torch.equal(layer(rest, cache=cache), wanted)


@pytest.mark.parametrize("name", MODULES)
@torch.no_grad()
def test_a_step_that_is_refused(name: str) -> None:
    """A backend that cannot run a step, and a projection that raises after attention, take nothing."""
    layer, x = made(name), torch.randn(1, 50, E)
    whole, cache = layer(x), layer.empty_cache()
    layer(x[:, :40], cache=cache)
    before = contents(cache)
    layer.backend = "sdpa"
    with pytest.raises(rw.UnsupportedError):
        layer(x[:, 40:41], cache=cache)
    layer.backend = "auto"
    weight = layer.out_proj.weight
    layer.out_proj.weight = torch.nn.Parameter(weight[:, :5])
    with pytest.raises(RuntimeError):
        layer(x[:, 40:41], cache=cache)
    layer.out_proj.weight = weight
    assert same(contents(cache), before)
    steps = torch.cat([layer(x[:, t : t + 1], cache=cache) for t in range(40, 50)], 1)
    torch.testing.assert_close(steps, whole[:, 40:])


@pytest.mark.parametrize("name", MODULES)
@torch.no_grad()
def test_a_cache_serves_one_module(name: str) -> None:
    layer, x = made(name), torch.randn(1, 20, E)
    for other in (made(name), copy.deepcopy(layer), made("nsa" if name == "moba" else "moba")):
        cache = layer.empty_cache()
        layer(x, cache=cache)
        before = contents(cache)
        with pytest.raises(
            rw.ShapeError, match="cache: got a cache of another module; wanted one that this module made"
        ):
            other(x[:, :1], cache=cache)
        assert same(contents(cache), before)


@pytest.mark.parametrize("name", MODULES)
@torch.no_grad()
def test_copies_of_caches_and_modules(name: str) -> None:
    """A copied or loaded cache continues with the module; a copy of both continues together, in either order."""
    layer, x = made(name), torch.randn(1, 21, E)
    cache = layer.empty_cache()
    layer(x[:, :20], cache=cache)
    want = layer(x[:, 20:], cache=copy.deepcopy(cache))
    assert cache.length == 20

    def loaded(value: Any) -> Any:
        return pickle.loads(pickle.dumps(value))

    for again in (copy.deepcopy, loaded):
        assert torch.equal(layer(x[:, 20:], cache=again(cache)), want)
        both = again({"layer": layer, "cache": cache})
        assert torch.equal(both["layer"](x[:, 20:], cache=both["cache"]), want)
        inside = torch.nn.Module()
        inside.layer, inside.cache = layer, cache
        inside = again(inside)
        assert torch.equal(inside.layer(x[:, 20:], cache=inside.cache), want)
    # as a program that has stopped in between
    assert torch.equal(loaded(layer)(x[:, 20:], cache=loaded(cache)), want)
    assert cache.length == 20


@pytest.mark.parametrize("name", MODULES)
@torch.no_grad()
def test_copies_that_continue_differently(name: str) -> None:
    """After a step the buffers have room, and each copy, as of a beam, writes its own token."""
    layer, x = made(name), torch.randn(1, 24, E)
    for again in (copy.copy, copy.deepcopy):
        cache = layer.empty_cache()
        for part in x[:, :21].split([20, 1], 1):
            layer(part, cache=cache)
        other = again(cache)
        layer(x[:, 21:22], cache=cache)
        layer(x[:, 22:23], cache=other)
        got = layer(x[:, 23:], cache=cache)
        torch.testing.assert_close(got, layer(x[:, [*range(22), 23]])[:, -1:])


@pytest.mark.parametrize("frozen", ["weight", "in_proj", "gate|compress|in_proj", ""])
@pytest.mark.parametrize("name", MODULES)
def test_no_parameter_may_need_gradients(name: str, frozen: str) -> None:
    layer = made(name)
    for of, parameter in layer.named_parameters():
        parameter.requires_grad_(not any(part in of for part in frozen.split("|") if part))
    x, cache = torch.randn(1, 3, E), layer.empty_cache()
    with pytest.raises(rw.UnsupportedError, match="cache: got a call with gradients"):
        layer(x, cache=cache)
    layer.requires_grad_(False)
    with pytest.raises(rw.UnsupportedError, match="cache: got a call with gradients"):
        layer(x.requires_grad_(), cache=cache)
    layer(x.detach(), cache=cache)
    assert not cache.read("keys" if name == "moba" else "selected keys").requires_grad


@pytest.mark.parametrize("name", MODULES)
def test_a_prompt_in_inference_mode_and_steps_outside_of_it(name: str) -> None:
    layer, x = made(name), torch.randn(1, 20, E)
    cache = layer.empty_cache()
    with torch.inference_mode():
        outs = [layer(x[:, :15], cache=cache)]
    with torch.no_grad():
        outs.append(layer(x[:, 15:17], cache=cache))
        with torch.inference_mode():
            outs.append(layer(x[:, 17:], cache=cache))
        torch.testing.assert_close(torch.cat(outs, 1), layer(x))


@torch.no_grad()
def test_tokens_of_another_dtype() -> None:
    layer, x = made("moba"), torch.randn(1, 20, E)
    cache = layer.empty_cache()
    layer(x, cache=cache)
    before = contents(cache)
    layer.double()
    with pytest.raises(rw.ShapeError, match="batch, heads, channels, dtype, device: got .*float64.*those of the cache"):
        layer(x[:, :1].double(), cache=cache)
    assert same(contents(cache), before)
