"""Calls that go round the operators: the same bits, nothing that watches is passed by, and nothing stale is served."""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import ringweave as rw
from ringweave.ops import cpu, dispatch, prepared
from ringweave.ops.backend import Inputs
from ringweave.ops.registered import attend
from ringweave.plan import plan_cache
from ringweave.precision import as_precision

pytest.importorskip("ringweave._cpu", exc_type=ImportError)

PATTERN = (rw.SlidingWindow(9) | rw.Sinks(2)) & rw.Causal()


def tensors(dtype: torch.dtype = torch.float32, grad: bool = False) -> list[Tensor]:
    made = (torch.randn(2, heads, n, width, dtype=dtype) for heads, n, width in ((4, 37, 16), (2, 50, 16), (2, 50, 24)))
    return [x.requires_grad_(grad) for x in made]


def direct(*args: Any, **options: Any) -> rw.AttentionOutput:
    """A call that was made before."""
    rw.attention_with_lse(*args, **options)
    return rw.attention_with_lse(*args, **options)


def is_direct(out: Tensor) -> bool:
    return type(out.grad_fn).__name__ == "_DirectBackward"


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "as they lie": lambda x: x,
    "tokens before heads": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "every other token": lambda x: x.repeat_interleave(2, 2)[:, :, ::2],
    "one for all": lambda x: x[:1].expand(2, -1, -1, -1),
    "channels apart": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "a lazy negation": lambda x: torch.complex(torch.zeros_like(x), -x).conj().imag if x.dtype == torch.float32 else x,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_are_those_of_the_operators(dtype: torch.dtype, layout: str) -> None:
    q, k, v = (LAYOUTS[layout](x) for x in tensors(dtype))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out, lse = direct(q, k, v, PATTERN, q_offset=5)
    assert is_direct(out) == (q.stride(3) == 1 and not q.is_neg())
    wanted, wanted_lse = attend(Inputs(q, k, v, 0.25), PATTERN, 5, "auto")
    assert torch.equal(out, wanted)
    assert torch.equal(lse, wanted_lse)
    for names in (("out",), ("lse",), ("out", "lse")):
        grads = [torch.randn_like({"out": out, "lse": lse}[name]) for name in names]
        got, right = (
            torch.autograd.grad([of[name] for name in names], (q, k, v), grads, retain_graph=True)
            for of in ({"out": out, "lse": lse}, {"out": wanted, "lse": wanted_lse})
        )
        assert all(map(torch.equal, got, right))


@pytest.fixture
def straight(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each call that went straight to the kernel, whether it wanted lse."""
    calls: list[bool] = []
    forward = prepared.Call.forward

    def spy(self: prepared.Call, q: Tensor, k: Tensor, v: Tensor, with_lse: bool) -> Any:
        found = forward(self, q, k, v, with_lse)
        calls.extend([with_lse] * (found is not None))
        return found

    monkeypatch.setattr(prepared.Call, "forward", spy)
    return calls


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_without_lse_bits_are_the_same(dtype: torch.dtype, layout: str, straight: list[bool]) -> None:
    q, k, v = (LAYOUTS[layout](x) for x in tensors(dtype))
    wanted = attend(Inputs(q, k, v, 0.25), PATTERN, 5, "auto")[0]
    for _ in range(2):
        out = rw.attention(q, k, v, PATTERN, q_offset=5)
        assert torch.equal(out, wanted)
        assert out.is_contiguous()
    assert straight[-1:] == [False] * (q.stride(3) == 1 and not q.is_neg())
    # a score out of range, which takes lse to tell what becomes of it
    q, k, v = tensors()
    q[0, 0, 33, 0] = torch.inf
    q[1, 1, 30], k[1, 0, 30] = 1e38, -1e38
    wanted = attend(Inputs(q, k, v, 0.25), PATTERN, 5, "auto")[0]
    assert wanted.isnan().any()
    for _ in range(2):
        torch.testing.assert_close(rw.attention(q, k, v, PATTERN, q_offset=5), wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning", "ignore::UserWarning")
def test_who_watches_sees_operators(straight: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors()

    def call(x: Tensor) -> Tensor:
        return rw.attention(x, k, v, PATTERN)

    wanted = direct(q, k, v, PATTERN).out

    def seen() -> bool:
        straight.clear()
        torch.testing.assert_close(call(q), wanted, rtol=0.05, atol=0.05, check_dtype=False)
        return not straight

    for context in (contextlib.nullcontext(), torch.no_grad(), torch.inference_mode()):
        with context:
            seen()
            assert not seen()
    for context in (
        _Seen(), _SeenFunctions(), torch.device("cpu"), torch.autocast("cpu", torch.bfloat16),
        torch.profiler.profile(), forward_ad.dual_level(),
    ):  # fmt: skip
        with context:
            assert seen(), context
    for transformed in (
        lambda x: torch.vmap(call)(x[None])[0],
        lambda x: torch.func.vjp(call, x)[0],
        lambda x: make_fx(call)(x)(x),
        lambda x: make_fx(call, pre_dispatch=True)(x)(x),
        lambda x: torch.jit.trace(call, (x,), check_trace=False)(x),
    ):
        straight.clear()
        assert torch.equal(transformed(q), wanted)
        assert not straight
    with FakeTensorMode() as mode:
        assert rw.attention(*map(mode.from_tensor, (q, k, v)), PATTERN).shape == wanted.shape
    assert not straight
    monkeypatch.setitem(dispatch.BACKENDS, "cpu", dataclasses.replace(cpu.BACKEND))
    assert seen()
    monkeypatch.undo()


def test_modules_go_straight(straight: list[bool]) -> None:
    """What they pass where nothing was asked for is as good as nothing."""
    q, k, v = tensors()
    wanted = direct(q, k, v, PATTERN).out
    for options in ({"terms": []}, {"terms": None}, {"precision": as_precision(None)}):
        straight.clear()
        assert torch.equal(rw.attention(q, k, v, PATTERN, **options), wanted)
        assert straight == [False]
    layer, x = rw.nn.MultiheadAttention(64, 4, batch_first=True, pattern=rw.Causal()).eval(), torch.randn(1, 40, 64)
    with torch.no_grad():
        wanted = layer(x, x, x)[0]  # makes it
        straight.clear()
        assert torch.equal(layer(x, x, x)[0], wanted)
    assert straight == [False]


def test_layers_that_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two alike calls is not looked up by its kind; it is once anything differs, or the store is empty."""
    q, k, v = (torch.randn(1, heads, n, 16) for heads, n in ((4, 1), (2, 300), (2, 300)))
    pattern, looked = rw.SlidingWindow(50) & rw.Causal(), list[int]()
    kind = prepared._kind
    monkeypatch.setattr(prepared, "_kind", lambda *call: looked.append(1) or kind(*call))

    def looks(n: int = 300, grad: bool = False, **options: Any) -> int:
        looked.clear()
        x, now = q.clone().requires_grad_(grad), (k[:, :, :n], v[:, :, :n])
        options = {"q_offset": n - 1} | options
        out = rw.attention(x, *now, pattern, **options)
        scale = options.get("scale", 0.25)
        assert torch.equal(out, attend(Inputs(q, *now, scale), pattern, options["q_offset"], "auto")[0])
        return len(looked)

    looks()
    assert looks() == 1  # after it was made
    assert looks() == 0
    for changed in ({"n": 299}, {"scale": 0.5}, {"q_offset": 310}, {"grad": True}, {"backend": "cpu"}):
        # to make it, to find it, and no more
        assert looks(**changed)
        assert looks(**changed)
        assert looks(**changed) == 0
        assert looks()
    monkeypatch.setenv("RINGWEAVE_CPU_VARIANT", "generic")
    assert looks()
    monkeypatch.delenv("RINGWEAVE_CPU_VARIANT")
    looks()
    assert looks() == 0
    prepared._steps.clear()
    # made anew: nothing else holds what was dropped
    assert looks()


def test_what_attends_nothing_and_what_is_infinite() -> None:
    q, k, v = tensors(grad=True)
    with torch.no_grad():
        q[0, 0, 33, 0] = torch.inf
        q[1, 1, 30] = 1e38
    pattern = rw.Causal() & ~rw.SlidingWindow(20)
    out, lse = direct(q, k, v, pattern)
    wanted, wanted_lse = attend(Inputs(q, k, v, 0.25), pattern, 0, "auto")
    assert lse.isneginf().any()
    assert (~lse.isfinite() & ~lse.isneginf()).any()
    for x, y in ((out, wanted), (lse, wanted_lse)):
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)
    for x, y in zip(*(torch.autograd.grad(o.sum(), (q, k, v)) for o in (out, wanted)), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


class _Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class _SeenFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [_Seen, _SeenFunctions])
def test_modes_see_the_operators(mode: type) -> None:
    q, k, v = tensors(grad=True)
    out = direct(q, k, v, PATTERN).out
    with mode() as seen:
        rw.attention(q, k, v, PATTERN)
        assert any("ringweave" in name for name in seen.names)
        seen.names.clear()
        out.sum().backward()
        assert any("ringweave" in name for name in seen.names) or mode is _SeenFunctions


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_others_that_watch() -> None:
    q, k, v = tensors()
    wanted = direct(q, k, v, PATTERN).out
    with torch.profiler.profile() as profile:
        rw.attention(q, k, v, PATTERN)
    assert any("ringweave::attention" in event.key for event in profile.key_averages())
    with torch.autocast("cpu", torch.bfloat16):
        assert rw.attention(q, k, v, PATTERN).dtype == torch.bfloat16
    with torch.inference_mode():
        assert torch.equal(direct(q, k, v, PATTERN).out, wanted)
    assert torch.equal(torch.vmap(lambda x: rw.attention(x, k, v, PATTERN))(q[None])[0], wanted)
    with pytest.raises(rw.UnsupportedError, match="forward-mode"):
        torch.func.jvp(lambda x: rw.attention(x, k, v, PATTERN), (q,), (q,))
    graph = torch.jit.trace(lambda x: rw.attention(x, k, v, PATTERN), (q,), check_trace=False).graph
    assert "ringweave::attention" in str(graph)
    spied = type("Spied", (Tensor,), {})
    assert isinstance(rw.attention(q.as_subclass(spied), k, v, PATTERN), spied)


def test_autograd_keeps_its_promises() -> None:
    q, k, v = tensors(grad=True)
    packed: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x) or x.clone(), lambda x: x):
        out = direct(q, k, v, PATTERN).out
    assert is_direct(out)
    assert len(packed) == 10
    (first,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(rw.UnsupportedError, match="second derivative"):
        torch.autograd.grad(first.sum(), q)
    out = rw.attention(q, k, v, PATTERN)
    with torch.no_grad():
        k.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_nothing_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors()
    wanted = direct(q, k, v, PATTERN).out
    for wrong in (
        {"scale": True},
        {"scale": float("nan")},
        {"q_offset": False},
        {"backend": "gpu"},
        {"dropout": False},
    ):
        with pytest.raises(rw.RingweaveError):
            rw.attention(q, k, v, PATTERN, **wrong)
    with pytest.raises(rw.ShapeError):
        rw.attention(q, k, v[:, :, 1:], PATTERN)
    assert not torch.equal(rw.attention(q, k, v, PATTERN, scale=0.5), wanted)
    monkeypatch.setenv("RINGWEAVE_CPU_VARIANT", "sse9")
    with pytest.raises(rw.UnsupportedError, match="sse9"):
        rw.attention(q, k, v, PATTERN)
    monkeypatch.delenv("RINGWEAVE_CPU_VARIANT")
    assert torch.equal(rw.attention(q, k, v, PATTERN), wanted)
    # a pattern with values that others may write is none of them
    lengths = torch.tensor([50, 50])
    before = rw.attention(q, k, v, rw.Keys(lengths))
    lengths[1] = 10
    assert not torch.equal(rw.attention(q, k, v, rw.Keys(lengths)), before)


@pytest.mark.parametrize("pattern", [rw.Causal(), rw.Full(), PATTERN])
def test_steps_of_decoding(pattern: rw.Pattern) -> None:
    """A cache that grows by a token: one call serves all lengths of as many tiles, where every key is attended."""
    q, k, v = torch.randn(1, 4, 1, 16), torch.randn(1, 2, 300, 16), torch.randn(1, 2, 300, 16)
    prepared._steps.clear()
    prepared._passing.clear()
    for n in (127, 128, 129, 130, 255, 256, 257, 129, 300):
        now = k[:, :, :n], v[:, :, :n]
        wanted = attend(Inputs(q, *now, 0.25), pattern, n - 1, "auto")
        assert all(map(torch.equal, rw.attention_with_lse(q, *now, pattern, q_offset=n - 1), wanted))
        assert torch.equal(rw.attention(q, *now, pattern, q_offset=n - 1), wanted[0])
    # those of 127 and 128 keys are of smaller tiles, and pass as those do whose window is in the tile of the sinks
    assert (len(prepared._steps), len(prepared._passing)) == ((4, 4) if pattern is PATTERN else (2, 2))
    # a sum that overflows to -inf is looked at in this length, not in the first one's
    k[0, 0, 299], k[0, 1, 140] = -3e38, -3e38
    out, lse = rw.attention_with_lse(q.abs() * 10, k, v, pattern, q_offset=299)
    wanted = attend(Inputs(q.abs() * 10, k, v, 0.25), pattern, 299, "auto")
    assert lse.isnan().any()
    torch.testing.assert_close((out, lse), wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("left", [5, 100, 127, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_in_a_window(left: int, dtype: torch.dtype) -> None:
    """A window that has begun in every place of a tile plans nothing any more, and has the bits of the whole cache."""
    pattern = rw.SlidingWindow(left) & rw.Causal()
    q, k, v = (torch.randn(1, heads, n, 16).to(dtype) for heads, n in ((4, 700), (2, 700), (2, 700)))
    whole = rw.attention_with_lse(q, k, v, pattern, backend="cpu")
    prepared._steps.clear()

    def step(n: int) -> None:
        got = rw.attention_with_lse(q[:, :, n - 1 : n], k[:, :, :n], v[:, :, :n], pattern, q_offset=n - 1)
        assert all(torch.equal(each, of_all[:, :, n - 1 : n]) for each, of_all in zip(got, whole, strict=True))
        alone = rw.attention(q[:, :, n - 1 : n], k[:, :, :n], v[:, :, :n], pattern, q_offset=n - 1)
        assert torch.equal(alone, whole.out[:, :, n - 1 : n])

    for n in range(left + 130, left + 258):
        step(n)
    misses = plan_cache.statistics().misses
    for n in range(left + 258, 700, 7):
        step(n)
    assert plan_cache.statistics().misses == misses
    # before it has left anything behind, it attends all keys
    kinds = len(prepared._steps)
    for n in range(129, left + 1):
        step(n)
    assert len(prepared._steps) == kinds + (left > 128) * (-(-left // 128) - 1)


def test_forgotten_and_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors()
    wanted = direct(q, k, v, PATTERN).out
    prepared._calls.clear()
    results: list[bool] = []

    def work() -> None:
        results.extend(torch.equal(rw.attention(q, k, v, PATTERN), wanted) for _ in range(20))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 80


def test_the_first_call_imports_no_compiler() -> None:
    program = (
        "import sys, torch, ringweave as rw; q = torch.ones(1, 2, 40, 16, requires_grad=True); "
        "rw.attention(q, q, q, rw.Causal()).sum().backward(); rw.attention(q, q, q, rw.Keys(torch.tensor([30]))).sum()"
        ".backward(); print('torch._dynamo' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert found.stdout.strip() == "False"


def test_a_policy_of_types_is_no_bare_call() -> None:
    """What was prepared for calls without one is not taken for one with it."""
    q, k, v = (torch.randn(1, 2, 64, 16, generator=torch.Generator().manual_seed(each)) for each in range(3))
    exact = [rw.attention(q, k, v, rw.Causal()) for _ in range(3)][-1]
    stored = [rw.attention(q, k, v, rw.Causal(), precision=rw.Precision(kv=torch.int8)) for _ in range(2)]
    assert torch.equal(*stored)
    assert not torch.equal(stored[0], exact)
    assert rw.attention(q, k, v, rw.Causal(), precision=rw.Precision(compute=torch.float64)).dtype == torch.float32
