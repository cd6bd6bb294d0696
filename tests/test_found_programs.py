"""Calls that skip the operators have their bits, are seen by every mode, transform and tracer, and never use a stale program."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import subprocess
import sys
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import ringweave as rw
from ringweave import api, program_cache, torch_ops
from ringweave.backends import BACKENDS, cpu
from ringweave.backends.decoding import Steps
from ringweave.call import Arguments, Call
from ringweave.merge import with_sinks
from ringweave.plan import plan_cache
from ringweave.precision import as_precision
from ringweave.program import Program

from .cases import LAYOUTS
from .operators import by_operators, is_direct
from .options import VALUES

pytest.importorskip("ringweave._cpu", exc_type=ImportError)

# queries are at the first positions on purpose, which warns
pytestmark = pytest.mark.filterwarnings("ignore:q_offset:UserWarning")
PATTERN = (rw.SlidingWindow(9) | rw.Sinks(2)) & rw.Causal()


def tensors(dtype: torch.dtype = torch.float32, grad: bool = False) -> list[Tensor]:
    made = (torch.randn(2, heads, n, width, dtype=dtype) for heads, n, width in ((4, 37, 16), (2, 50, 16), (2, 50, 24)))
    return [x.requires_grad_(grad) for x in made]


def direct(*args: Any, **options: Any) -> rw.AttentionOutput:
    """Compute through a program that an earlier call compiled."""
    rw.attention_with_lse(*args, **options)
    return rw.attention_with_lse(*args, **options)


@pytest.fixture
def straight(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Record each call that went straight to the kernel, as whether it asked for lse."""
    calls: list[bool] = []
    forward = cpu.PreparedCall.forward

    def spy(self: cpu.PreparedCall, q: Tensor, k: Tensor, v: Tensor, with_lse: bool) -> Any:
        found = forward(self, q, k, v, with_lse)
        calls.extend([with_lse] * (found is not None))
        return found

    monkeypatch.setattr(cpu.PreparedCall, "forward", spy)
    return calls


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_without_lse_bits_are_the_same(dtype: torch.dtype, layout: str, straight: list[bool]) -> None:
    q, k, v = (LAYOUTS[layout](x) for x in tensors(dtype))
    wanted = by_operators(q, k, v, PATTERN, q_offset=5)[0]
    for _ in range(2):
        out = rw.attention(q, k, v, PATTERN, q_offset=5)
        assert torch.equal(out, wanted)
        assert out.is_contiguous()
    assert straight[-1:] == [False] * (q.stride(3) == 1 and not q.is_neg())
    # an out-of-range score: only lse tells which value its row gets
    q, k, v = tensors()
    q[0, 0, 33, 0] = torch.inf
    q[1, 1, 30], k[1, 0, 30] = 1e38, -1e38
    wanted = by_operators(q, k, v, PATTERN, q_offset=5)[0]
    assert wanted.isnan().any()
    for _ in range(2):
        torch.testing.assert_close(rw.attention(q, k, v, PATTERN, q_offset=5), wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning", "ignore::UserWarning")
def test_modes_and_transforms_see_operators(straight: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
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
    spied = type("Spied", (Tensor,), {})
    assert isinstance(call(q.as_subclass(spied)), spied)
    assert not straight
    monkeypatch.setitem(BACKENDS, "cpu", dataclasses.replace(cpu.BACKEND, prepare=None))
    assert seen()
    monkeypatch.undo()


def test_empty_options_of_modules_stay_on_the_direct_path(straight: list[bool]) -> None:
    """Options that modules pass as empty values keep a call on the direct path."""
    q, k, v = tensors()
    wanted = direct(q, k, v, PATTERN).out
    for options in ({"terms": []}, {"terms": None}, {"precision": as_precision(None)}):
        straight.clear()
        assert torch.equal(rw.attention(q, k, v, PATTERN, **options), wanted)
        assert straight == [False]
    layer, x = rw.nn.MultiheadAttention(64, 4, batch_first=True, pattern=rw.Causal()).eval(), torch.randn(1, 40, 64)
    with torch.no_grad():
        wanted = layer(x, x, x)[0]  # compiles the program
        straight.clear()
        assert torch.equal(layer(x, x, x)[0], wanted)
    assert straight == [False]


def test_a_repeated_call_looks_up_no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """A repeated call looks up no program; a call with any other argument does, and so does one after the cache is emptied."""
    q, k, v = (torch.randn(1, heads, n, 16) for heads, n in ((4, 1), (2, 300), (2, 300)))
    pattern, looked = rw.SlidingWindow(50) & rw.Causal(), list[int]()
    get = program_cache.PROGRAMS.get
    monkeypatch.setattr(program_cache.PROGRAMS, "get", lambda key: looked.append(1) or get(key))

    def looks(n: int = 300, grad: bool = False, **options: Any) -> int:
        looked.clear()
        x, now = q.clone().requires_grad_(grad), (k[:, :, :n], v[:, :, :n])
        options = {"q_offset": n - 1} | options
        out = rw.attention(x, *now, pattern, **options)
        scale = options.get("scale", 0.25)
        assert torch.equal(out, by_operators(q, *now, pattern, scale=scale, q_offset=options["q_offset"])[0])
        return len(looked)

    looks()
    assert looks() == 1  # after the program was compiled
    assert looks() == 0
    for changed in ({"n": 299}, {"scale": 0.5}, {"q_offset": 310}, {"grad": True}, {"backend": "cpu"}):
        # compile the program, then find it: all steps of one kind share a program
        assert looks(**changed)
        looks(**changed)
        assert looks(**changed) == 0
        assert looks()
    # a build for one machine has no other variant, and to name its own is another setting, too
    monkeypatch.setenv("RINGWEAVE_CPU_VARIANT", cpu.module().variants()[-1])  # type: ignore[union-attr]
    assert looks()
    monkeypatch.delenv("RINGWEAVE_CPU_VARIANT")
    looks()
    assert looks() == 0
    program_cache.PROGRAMS.clear()
    # compiled anew: nothing else holds the dropped program
    assert looks()


def test_empty_rows_and_infinite_scores() -> None:
    q, k, v = tensors(grad=True)
    with torch.no_grad():
        q[0, 0, 33, 0] = torch.inf
        q[1, 1, 30] = 1e38
    pattern = rw.Causal() & ~rw.SlidingWindow(20)
    out, lse = direct(q, k, v, pattern)
    wanted, wanted_lse = by_operators(q, k, v, pattern)
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


@pytest.mark.parametrize("which", ["q", "k", "v", "lse"])
def test_saved_tensors_that_come_back_in_another_type(which: str) -> None:
    """The kernel refuses saved tensors that return in another dtype, however often the program ran before."""
    q, k, v = tensors(grad=True)
    direct(q, k, v, PATTERN).out.sum().backward()
    place, seen = ["q", "k", "v", "out", "lse"].index(which), list[Tensor]()

    def unpack(x: Tensor) -> Tensor:
        seen.append(x)
        return x.bfloat16() if len(seen) == place + 1 else x

    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
        out = rw.attention(q, k, v, PATTERN)
    assert is_direct(out)
    with pytest.raises((TypeError, ValueError)):
        out.sum().backward()
    assert len(seen) == 5


def test_nothing_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors()
    wanted = direct(q, k, v, PATTERN).out
    # equal to arguments of the call that is found, or kept beside it, and yet wrong
    rw.attention(q, k, v, PATTERN, scale=1.0)
    for wrong in ({"scale": True}, {"q_offset": False}, {"dropout": False}):
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
    # a pattern over a tensor that its owner may write to is never on the direct path
    lengths = torch.tensor([50, 50])
    before = rw.attention(q, k, v, rw.KeyPadding(lengths))
    lengths[1] = 10
    assert not torch.equal(rw.attention(q, k, v, rw.KeyPadding(lengths)), before)


def of_one_length() -> int:
    """Return the number of programs of decoding steps that serve one length only."""
    return sum(isinstance(key, program_cache.StepKey) for key in program_cache.PROGRAMS._entries)


@pytest.mark.parametrize("pattern", [rw.Causal(), rw.Full(), PATTERN])
def test_steps_of_decoding(pattern: rw.Pattern) -> None:
    """A cache that grows by a token is served by one program for all lengths."""
    q, k, v = torch.randn(1, 4, 1, 16), torch.randn(1, 2, 300, 16), torch.randn(1, 2, 300, 16)
    program_cache.PROGRAMS.clear()
    for n in (127, 128, 129, 130, 255, 256, 257, 129, 300):
        now = k[:, :, :n], v[:, :, :n]
        wanted = by_operators(q, *now, pattern, q_offset=n - 1)
        assert all(map(torch.equal, rw.attention_with_lse(q, *now, pattern, q_offset=n - 1), wanted))
        assert torch.equal(rw.attention(q, *now, pattern, q_offset=n - 1), wanted[0])
    assert of_one_length() == 0
    # a sum that overflows to -inf is checked in the current length, not in the first one's
    k[0, 0, 299], k[0, 1, 140] = -3e38, -3e38
    out, lse = rw.attention_with_lse(q.abs() * 10, k, v, pattern, q_offset=299)
    wanted = by_operators(q.abs() * 10, k, v, pattern, q_offset=299)
    assert lse.isnan().any()
    torch.testing.assert_close((out, lse), wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("left", [5, 100, 127, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_in_a_window(left: int, dtype: torch.dtype) -> None:
    """Steps of a window plan nothing, and have the bits of a call over the whole cache."""
    pattern = rw.SlidingWindow(left) & rw.Causal()
    q, k, v = (torch.randn(1, heads, n, 16).to(dtype) for heads, n in ((4, 700), (2, 700), (2, 700)))
    whole = rw.attention_with_lse(q, k, v, pattern, backend="cpu")
    program_cache.PROGRAMS.clear()

    def step(n: int) -> None:
        got = rw.attention_with_lse(q[:, :, n - 1 : n], k[:, :, :n], v[:, :, :n], pattern, q_offset=n - 1)
        assert all(torch.equal(each, of_all[:, :, n - 1 : n]) for each, of_all in zip(got, whole, strict=True))
        alone = rw.attention(q[:, :, n - 1 : n], k[:, :, :n], v[:, :, :n], pattern, q_offset=n - 1)
        assert torch.equal(alone, whole.out[:, :, n - 1 : n])

    step(1)
    misses = plan_cache.statistics().misses
    for n in (*range(2, left + 258), *range(left + 258, 700, 7)):
        step(n)
    assert plan_cache.statistics().misses == misses
    assert of_one_length() == 0


#: Kinds of decoding steps: dense, by residue, a union with such a part, patterns per head, a mixture, and terms.
KINDS: dict[str, tuple[rw.Pattern, dict[str, Any]]] = {
    "causal": (rw.Causal(), {}),
    "dilated": (rw.Dilated(8, 4), {}),
    "odd rate": (rw.Strided(5) & rw.Causal(), {}),
    "rate above the length": (rw.Strided(2**30) & rw.Causal(), {}),
    "union": (rw.SlidingWindow(50) | rw.Strided(16) & rw.Causal(), {}),
    "heads": (rw.PerHead([rw.Causal(), rw.SlidingWindow(64), rw.Dilated(9, 3), rw.Causal()]), {}),
    "mixture": (rw.LongNet([64, 256], [1, 4]), {}),
    "padding": (rw.KeyPadding(90) & rw.Causal(), {}),
    "softcap": (PATTERN, {"terms": rw.Softcap(2.0)}),
    "alibi of views": (rw.Dilated(8, 4) | rw.Sinks(3), {"terms": rw.ALiBi([0.1, 0.2, 0.3, 0.4])}),
    "another backend": (PATTERN, {"backend": "dense_batched"}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_of_step_is_checked_once(kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of a known kind are neither checked nor compiled, and have the results of new calls."""
    pattern, options = KINDS[kind]
    q, k, v = (torch.randn(2, heads, n, 16).to(dtype) for heads, n in ((4, 1), (2, 700), (2, 700)))
    program_cache.PROGRAMS.clear()
    rw.attention(q, k[:, :, :100], v[:, :, :100], pattern, q_offset=99, **options)
    checks: list[Arguments] = []
    checked = api.checked
    monkeypatch.setattr(api, "checked", lambda given: checks.append(given) or checked(given))  # type: ignore[func-returns-value]
    got = {}
    for n in (*range(91, 300, 3), *range(300, 700, 57), 150, 151):
        now = k[:, :, :n], v[:, :, :n]
        for _ in range(2):
            got[n] = rw.attention_with_lse(q, *now, pattern, q_offset=n - 1, **options)
    assert not checks
    program_cache.PROGRAMS.clear()
    for n, found in got.items():
        # a batch of two queries is no decoding step
        want = rw.attention_with_lse(
            q.expand(-1, -1, 2, -1), k[:, :, :n], v[:, :, :n], pattern & rw.Full() if kind != "mixture" else pattern,
            q_offset=n - 1, **options,
        )  # fmt: skip
        if kind == "another backend" or "terms" in options:
            torch.testing.assert_close(found.out, want.out[:, :, :1])
        else:
            assert torch.equal(found.out, want.out[:, :, :1]), n
            assert torch.equal(found.lse, want.lse[:, :, :1]), n


def test_a_step_that_does_not_fit_is_refused_as_a_new_call() -> None:
    """A step of a known kind raises the error of a new call if its pattern does not fit the number of keys."""
    q, k = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 100, 8)
    pattern = rw.KeyPadding(60) & rw.Causal()
    rw.attention(q, k, k, pattern, q_offset=99)
    with pytest.raises(rw.PatternError, match="KeyPadding: got start 0 and stop 60; wanted .* <= 50"):
        rw.attention(q, k[:, :, :50], k[:, :, :50], pattern, q_offset=49)


@pytest.mark.parametrize("pattern", [PATTERN, rw.SlidingWindow(50) | rw.Strided(16) & rw.Causal(), rw.Dilated(3, 7)])
def test_a_kind_of_paged_step_is_checked_once(pattern: rw.Pattern, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paged steps of a known kind are not checked again, and have the bits of contiguous keys."""
    q, k, v = (torch.randn(2, heads, n, 16) for heads, n in ((4, 1), (2, 300), (2, 300)))
    cache = rw.PagedCache.empty(2, 300, 2, 16, page=16)
    cache.append(k[:, :, :100], v[:, :, :100])
    rw.paged_attention(q, cache, pattern)
    monkeypatch.setattr(api, "paged", None)
    for n in range(100, 300):
        cache.append(k[:, :, n : n + 1], v[:, :, n : n + 1])
        got = rw.paged_attention(q, cache, pattern)
        assert torch.equal(got, rw.attention(q, k[:, :, : n + 1], v[:, :, : n + 1], pattern, q_offset=n))


#: Arguments in other types that equal those of an earlier call.
SPELLINGS: dict[str, dict[str, Any]] = {
    "an int for a float": {"scale": 1, "dropout": 0},
    "numpy's numbers": {
        "scale": np.float32(1),
        "q_offset": np.int64(3),
        "k_offset": np.int32(0),
        "dropout": np.float64(0),
    },
    "an equal policy": {"precision": rw.Precision()},
    "no terms": {"terms": None},
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_equal_arguments_find_the_program(spelling: str) -> None:
    """A call with equal arguments of other types finds the known program."""
    q, k, v = tensors()
    usual = {"scale": 1.0, "q_offset": 3}
    want = rw.attention(q, k, v, PATTERN, **usual)
    given = Arguments(q, k, v, PATTERN, **(usual | SPELLINGS[spelling]))
    assert program_cache.find(given)[1] is program_cache.find(Arguments(q, k, v, PATTERN, **usual))[1] is not None
    assert torch.equal(rw.attention(q, k, v, PATTERN, **(usual | SPELLINGS[spelling])), want)


@pytest.mark.parametrize("scale", [True, "1", 10**400, torch.tensor(1.0), float("nan"), np.float64("inf"), 1 + 0j])
def test_a_wrong_number_is_refused_after_a_right_one(scale: Any) -> None:
    """A number that a call refuses is also refused after a valid call with an equal or similar number."""
    q, k, v = tensors()
    for _ in range(2):
        rw.attention(q, k, v, PATTERN, scale=1.0)
        with pytest.raises(rw.ShapeError, match="scale"):
            rw.attention(q, k, v, PATTERN, scale=scale)


def test_parameters_and_constant_bounds_are_known() -> None:
    """Calls with parameters as tensors, and with constant bounds, find their programs."""
    q, k, v = tensors()
    of_parameters = [torch.nn.Parameter(x) for x in (q, k, v)]
    for given, pattern in ((of_parameters, PATTERN), ([q, k, v], rw.KeyPadding(40))):
        want = rw.attention_with_lse(*given, pattern)
        assert program_cache.find(Arguments(*given, pattern))[1] is not None
        assert all(map(torch.equal, rw.attention_with_lse(*given, pattern), want))
    with torch.no_grad():
        assert type(rw.attention(*of_parameters, PATTERN)) is Tensor


def test_the_first_call_imports_no_compiler() -> None:
    program = (
        "import sys, torch, ringweave as rw; q = torch.ones(1, 2, 40, 16, requires_grad=True); "
        "rw.attention(q, q, q, rw.Causal()).sum().backward(); rw.attention(q, q, q, rw.KeyPadding(torch.tensor([30]))).sum()"
        ".backward(); print('torch._dynamo' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=240)
    assert found.stdout.strip() == "False"


def test_a_program_without_a_policy_does_not_serve_a_call_with_one() -> None:
    """A program of a call without a precision policy does not serve a call with one."""
    q, k, v = (torch.randn(1, 2, 64, 16, generator=torch.Generator().manual_seed(each)) for each in range(3))
    exact = [rw.attention(q, k, v, rw.Causal()) for _ in range(3)][-1]
    stored = [rw.attention(q, k, v, rw.Causal(), precision=rw.Precision(kv=torch.int8)) for _ in range(2)]
    assert torch.equal(*stored)
    assert not torch.equal(stored[0], exact)
    assert rw.attention(q, k, v, rw.Causal(), precision=rw.Precision(compute=torch.float64)).dtype == torch.float32


def options(name: str) -> dict[str, Any]:
    """Return the options of a call with new tensors."""
    table = torch.randn(4, 9, requires_grad=True)
    some: dict[str, dict[str, Any]] = {
        "none": {},
        "terms": {"terms": [rw.Softcap(3.0), rw.ALiBi.of_heads(4)]},
        "a learned table": {"terms": rw.DistanceBias(table)},
        "sinks": {"sink_logits": torch.randn(4, requires_grad=True)},
        "dropout": {"dropout": 0.25},
        "offsets": {"q_offset": 5, "k_offset": 2, "on_oom": "raise"},
    }
    every = {each: value for of in some.values() for each, value in of.items()}
    return some.get(name, every)


OPTIONS = ["none", "terms", "a learned table", "sinks", "dropout", "offsets", "everything"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", OPTIONS)
def test_every_mode_and_hook_sees_a_call_with_a_cached_program(name: str) -> None:
    """Every mode, hook and transform sees the forward and backward of a call with a cached program."""
    q, k, v = tensors(grad=True)
    given = options(name)

    def call(x: Tensor) -> Tensor:
        torch.manual_seed(7)
        return rw.attention(x, k, v, PATTERN, **given)

    for _ in range(3):
        kept = call(q)
    assert is_direct(kept) or "sink_logits" in given
    (wanted,) = torch.autograd.grad(kept.sum(), q)
    for mode in (_Seen(), _SeenFunctions()):
        with mode as seen:
            out = call(q)
        assert any("ringweave" in each for each in seen.names), mode
        assert torch.equal(out, kept)
    with _Seen() as seen:
        (grad,) = torch.autograd.grad(out.sum(), q)
    assert any("ringweave.attention_backward" in each for each in seen.names)
    assert torch.equal(grad, wanted)
    with torch.profiler.profile() as profile:
        call(q).sum().backward()
    events = {event.key for event in profile.key_averages()}
    assert {"ringweave::attention", "ringweave::attention_backward"} <= events
    # with a program that was found before any mode was active
    out = call(q)
    with torch.profiler.profile() as profile:
        out.sum().backward()
    assert "ringweave::attention_backward" in {event.key for event in profile.key_averages()}
    with torch.autocast("cpu", torch.bfloat16):
        assert call(q).dtype == torch.bfloat16
    with torch.no_grad():
        plain = q.detach()
        torch.testing.assert_close(torch.func.grad(lambda x: call(x).sum())(plain), wanted)
        if "dropout" not in given:
            assert torch.equal(torch.vmap(call)(plain[None])[0], kept)
        assert "ringweave.attention" in str(make_fx(call)(plain).graph)
    with pytest.raises(rw.UnsupportedError, match="forward-mode"):
        torch.func.jvp(call, (plain,), (plain,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kv", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(
    "pattern", [rw.Causal(), PATTERN, (rw.SlidingWindow(70) | rw.Dilated(40, 16)) & rw.Causal()], ids=repr
)
def test_steps_over_pages_of_8_bits(
    pattern: rw.Pattern, kv: torch.dtype, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps over 8-bit pages are prepared, with the bits of the checked call, also where a scale is NaN or a score is out of range."""
    calls: list[bool] = []
    forward = Steps.forward

    def noted(self: Steps, *args: Any) -> Any:
        found = forward(self, *args)
        calls.append(found is not None)
        return found

    monkeypatch.setattr(Steps, "forward", noted)
    cache = rw.PagedCache.empty(2, 400, 2, 32, page=16, precision=rw.Precision(kv=kv))
    cache.append(torch.randn(2, 2, 200, 32), torch.randn(2, 2, 200, 32))
    assert cache.scales is not None
    for step in range(40):
        k, v = torch.randn(2, 2, 1, 32), torch.randn(2, 2, 1, 32)
        if step == 20:
            k[0, 1, 0, 3], v[1, 0, 0, 0] = torch.nan, torch.inf
        cache.append(k, v)
        q = torch.randn(2, 4, 1, 32).to(dtype) * (1e38 if step == 30 and dtype != torch.float16 else 1)
        straight = rw.paged_attention(q, cache, pattern, backend="cpu")
        with _Seen():
            checked = rw.paged_attention(q, cache, pattern, backend="cpu")
        assert torch.equal(straight.isnan(), checked.isnan()), step
        assert torch.equal(straight.nan_to_num(), checked.nan_to_num()), step
    assert sum(calls) > 30
    # scales that are not contiguous take the checked path
    apart = tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in cache.scales)
    view = rw.PagedCache(cache.k, cache.v, cache.table, cache.lengths, scales=(apart[0], apart[1]))
    calls.clear()
    for _ in range(3):
        got = rw.paged_attention(q, view, pattern, backend="cpu")
        assert torch.equal(got.nan_to_num(), straight.nan_to_num())
    assert not calls


@pytest.mark.parametrize("mode", [_Seen, _SeenFunctions])
def test_calls_over_pages_are_seen(mode: type) -> None:
    cache = rw.PagedCache.empty(2, 64, 2, 16, page=16)
    cache.append(*(torch.randn(2, 2, 40, 16) for _ in range(2)))
    q = torch.randn(2, 4, 1, 16)
    for given in ({}, {"terms": rw.Softcap(3.0), "sink_logits": torch.zeros(4)}):
        wanted = [rw.paged_attention(q, cache, PATTERN, **given) for _ in range(3)][-1]  # type: ignore[arg-type]
        with mode() as seen:
            out = rw.paged_attention(q, cache, PATTERN, **given)  # type: ignore[arg-type]
        assert any("ringweave" in name for name in seen.names)
        assert torch.equal(out, wanted)
        with torch.profiler.profile() as profile:
            rw.paged_attention(q, cache, PATTERN, **given)  # type: ignore[arg-type]
        assert "ringweave::attention" in {event.key for event in profile.key_averages()}


def fresh() -> None:
    program_cache.PROGRAMS.clear()
    program_cache._last.clear()


@pytest.mark.parametrize("name", OPTIONS)
def test_programs_are_found_by_identity_and_by_equal_patterns(name: str) -> None:
    q, k, v = tensors()
    given = options(name)
    fresh()
    rw.attention(q, k, v, PATTERN, **given)
    first = program_cache.find(Arguments(q, k, v, PATTERN, **given)).program
    equal = (rw.SlidingWindow(9) | rw.Sinks(2)) & rw.Causal()
    for pattern in (PATTERN, equal, PATTERN):
        found = program_cache.find(Arguments(q, k, v, pattern, **given)).program
        assert found is first is not None
    # the owner may write to tables, and functions may change
    table = rw.BlockTable(torch.ones(1, 1, dtype=torch.bool), 64)
    assert program_cache.find(Arguments(q, k, v, table, **given)) == program_cache.Found(None, None)


# values of each argument that change the key of a call; a new option needs an entry here and in VALUES
OTHERS: dict[str, list[Any]] = {
    "q": [torch.zeros(2, 4, 36, 16), torch.zeros(2, 4, 37, 16).double(), torch.zeros(2, 4, 37, 16, requires_grad=True)],
    "k": [torch.zeros(2, 1, 50, 16), torch.zeros(2, 2, 50, 16, requires_grad=True), torch.zeros(2, 2, 49, 16)],
    "v": [torch.zeros(2, 2, 50, 16), torch.zeros(2, 2, 50, 24, requires_grad=True), torch.zeros(2, 2, 50, 24).half()],
    "pattern": [rw.Causal(), (rw.SlidingWindow(10) | rw.Sinks(2)) & rw.Causal(), ~PATTERN],
    "scale": [0.5, -0.25, 0.0],
    "q_offset": [1, 2**40, torch.tensor(0), torch.tensor([0, 1])],
    "backend": ["dense_batched", "reference", "cpu", "no such"],
    "k_offset": [1, torch.tensor(0)],
    "context": [object()],
    "terms": [
        rw.Softcap(2.0), [rw.Softcap(2.0)], [rw.Softcap(3.0)], [rw.Softcap(2.0), rw.Softcap(2.0)], rw.ALiBi.of_heads(4),
        rw.DistanceBias(torch.zeros(4, 5)), rw.DistanceBias(torch.zeros(4, 7)), rw.Bias(torch.zeros(1, 1, 37, 50)),
        rw.DistanceBias(torch.zeros(4, 5, requires_grad=True)), rw.DistanceBias(torch.zeros(4, 5).double()), ["no term"],
    ],
    "dropout": [0.5, 0.25, 2**-16, 1e-9, -1.0],
    "precision": [rw.Precision(kv=torch.int8), rw.Precision(compute=torch.float64), rw.Precision(table=torch.bfloat16)],
    "on_oom": ["raise", "stream", "sparsify", "no such"],
}  # fmt: skip


def test_no_program_serves_another_call() -> None:
    """Each value of each argument has a key of its own or no key; learned sinks join a program's results."""
    q, k, v = tensors()
    usual = Arguments(q, k, v, PATTERN)
    fresh()
    rw.attention(q, k, v, PATTERN)
    kept = program_cache.find(usual).program
    assert kept is not None
    keys: list[object] = []
    for name in Arguments._fields:
        if name == "sink_logits":
            continue
        for value in OTHERS[name] if name in OTHERS else [VALUES[name](50)]:
            try:
                key, found, *_ = program_cache.find(usual._replace(**{name: value}))
            except rw.RingweaveError:
                # a dropout rate that is out of range
                continue
            assert found is None, (name, value)
            assert key is None or key not in program_cache.PROGRAMS._entries
            # a single term equals a list of one, and gradients are those of all three
            of_another = value is OTHERS["terms"][1] or (name in ("k", "v") and value.requires_grad)
            keys += [key] if key is not None and not of_another else []
    assert len(keys) == len(set(keys)) > 20
    sinks = torch.zeros(4)
    assert program_cache.find(usual._replace(sink_logits=sinks)) == program_cache.Found(None, kept)
    assert torch.equal(rw.attention(q, k, v, PATTERN, sink_logits=sinks), _with_sinks(q, k, v, sinks))


def test_a_table_learns_only_where_gradients_are_enabled() -> None:
    q, k, v = tensors()
    given = Arguments(q, k, v, PATTERN, terms=rw.Bias(torch.zeros(1, 1, 37, 50, requires_grad=True)))
    fresh()
    with torch.no_grad():
        rw.attention(q, k, v, PATTERN, terms=given.terms)
    assert program_cache.find(given)[1] is None
    rw.attention(q, k, v, PATTERN, terms=given.terms)
    found = program_cache.find(given).program
    assert found is not None
    assert found.call.needs_grad


def _with_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    out, lse = by_operators(q, k, v, PATTERN)
    return with_sinks(out, lse, sinks).out


def by_tables() -> dict[str, rw.Pattern]:
    """Return patterns with tensors of their own, for 2 batch elements, 4 heads, 37 queries and 50 keys."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.repeat_interleave(torch.arange(3), torch.tensor([20, 12, 18]))
    return {
        "documents": rw.Causal() & rw.Documents(ids=ids),
        "documents of each row": rw.Documents(ids=torch.stack([ids, ids.flip(0).contiguous()]).sort(1).values),
        "window in documents": rw.SlidingWindow(5).within(rw.Documents([20, 30])),
        "tree": rw.Tree([-1, 0, 0], [20, 14, 16]),
        "block table": rw.BlockTable(torch.rand(3, 4, generator=generator) > 0.4, (16, 16)) | rw.Sinks(1),
    }


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", by_tables())
def test_patterns_with_tensors_of_their_own_are_found_by_the_object(
    name: str, grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pattern, (q, k, v) = by_tables()[name], tensors(grad=grad)

    def computed() -> list[Tensor]:
        out, lse = rw.attention_with_lse(q, k, v, pattern)
        inputs = (q, k, v) if grad else ()
        return [out.detach(), lse.detach(), *(torch.autograd.grad(out.square().sum(), inputs) if grad else ())]

    first, second = computed(), computed()
    with monkeypatch.context() as patched:
        patched.setattr(api, "checked", lambda given: pytest.fail("a known call is checked again"))
        third = computed()
        # other sizes are another call, and so is an equal pattern if its contents take long to compare
        patched.setattr(program_cache, "_MOST_CONTENTS", 0)
        for call in (
            lambda: rw.attention(q[:1], k[:1], v[:1], pattern),
            lambda: rw.attention(q, k, v, by_tables()[name]),
        ):
            with pytest.raises(pytest.fail.Exception):
                call()
    for got in (second, third):
        assert all(map(torch.equal, got, first))


@pytest.mark.parametrize("name", by_tables())
def test_equal_patterns_that_are_made_for_each_call_share_a_program(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors()
    first, second = (rw.attention(q, k, v, by_tables()[name]) for _ in range(2))
    with monkeypatch.context() as patched:
        patched.setattr(api, "checked", lambda given: pytest.fail("a known call is checked again"))
        for _ in range(2):
            assert torch.equal(rw.attention(q, k, v, by_tables()[name]), first)
        # the shape of a pattern's tensors does not decide
        with pytest.raises(pytest.fail.Exception):
            rw.attention(q, k, v, rw.Documents([21, 29]))
    assert torch.equal(second, first)


def test_documents_of_other_lengths_have_programs_of_their_own() -> None:
    q, k, v = tensors(grad=True)
    row, column = torch.arange(37)[:, None], torch.arange(50)
    for _ in range(4):
        for middle in (20, 31, 5):
            ids = (column >= middle).long()
            for pattern, causal in ((rw.Documents([middle, 50 - middle]), False), (rw.Documents(ids=ids), True)):
                mask = (ids[:37, None] == ids) & ((column <= row) | (not causal))
                repeated = (x.repeat_interleave(2, 1) for x in (k, v))
                want = torch.nn.functional.scaled_dot_product_attention(q, *repeated, mask)
                out = rw.attention(q, k, v, pattern & rw.Causal() if causal else pattern)
                torch.testing.assert_close(out, want)
                slopes = [torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, want)]
                torch.testing.assert_close(*slopes, rtol=1e-4, atol=1e-4)


def test_a_pattern_that_follows_a_tensor_is_checked_at_each_call() -> None:
    stop = torch.tensor([50, 20])
    pattern = rw.Documents([20, 30]) & rw.KeyPadding(stop)
    q, k, v = tensors()
    for end in (20, 20, 20, 35, 7):
        stop[1] = end
        want = rw.attention(q, k, v, rw.Documents([20, 30]) & rw.KeyPadding(stop.clone()))
        assert torch.equal(rw.attention(q, k, v, pattern), want)


def test_a_pattern_that_is_called_once_is_not_kept() -> None:
    q, k, v = tensors()
    gone = []
    for n in range(3):
        pattern = rw.Causal() & rw.Documents([20 + n, 30 - n])
        rw.attention(q, k, v, pattern)
        gone.append(weakref.ref(pattern))
    del pattern
    gc.collect()
    assert [each() for each in gone] == [None] * 3


def test_functions_with_the_pairs_of_patterns_find_their_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, reach = torch.repeat_interleave(torch.arange(3), torch.tensor([20, 12, 18])), 7
    masks = {
        "causal": (lambda: lambda b, h, q, k: q >= k, lambda: rw.Causal()),
        "window": (lambda: lambda b, h, q, k: (q >= k) & (q - k <= reach), lambda: rw.SlidingWindow(reach)),
        "documents": (lambda: lambda b, h, q, k: ids[q] == ids[k], lambda: rw.Documents(ids=ids)),
        "of each row": (lambda: lambda b, h, q, k: q - k >= b, lambda: None),
        "evaluated": (lambda: lambda b, h, q, k: (q * k) % 7 <= reach, lambda: None),
    }
    q, k, v = tensors()
    for name, (function, written) in masks.items():
        for change in (0, 1):
            ids[5 : 5 + change] = 1
            reach = 7 - change
            dense = rw.from_mask_mod(function()).to_dense(37, 50, 4, batch=2)
            want = torch.nn.functional.scaled_dot_product_attention(q, k, v, dense, enable_gqa=True)
            for _ in range(3):
                # a new function in each call
                got = rw.attention(q, k, v, rw.from_mask_mod(function()))
                torch.testing.assert_close(got, want)
            pattern = written()
            assert pattern is None or torch.equal(rw.attention(q, k, v, pattern), got)
        if name != "evaluated":
            with monkeypatch.context() as patched:
                patched.setattr(api, "checked", lambda given: pytest.fail("a known call is checked again"))
                rw.attention(q, k, v, rw.from_mask_mod(function()))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the look-up take plain tensors on the CPU for tensors on a GPU."""
    for module in (program_cache, torch_ops):
        monkeypatch.setattr(module, "are_plain_gpu", torch_ops.are_plain_cpu)
    monkeypatch.setattr(program_cache, "is_plain_cpu", lambda *tensors: False)
    monkeypatch.setattr(torch_ops, "are_plain_cpu", lambda tensors: False)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", ["relation", "step", "table", "softcap"])
def test_a_named_backend_on_a_gpu_is_checked_once(
    name: str, grad: bool, gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = tensors(grad=grad)
    table = rw.BlockTable(torch.tensor([[True]]), 64)
    pattern = table if name == "table" else PATTERN
    given: dict[str, Any] = {"backend": "dense_batched", "terms": rw.Softcap(2.0) if name == "softcap" else ()}
    if name == "step":
        q, given["q_offset"] = q.detach()[:, :, :1].requires_grad_(grad), 49

    def computed() -> list[Tensor]:
        out = rw.attention(q, k, v, pattern, **given)
        return [out.detach(), *(torch.autograd.grad(out.square().sum(), (q, k, v)) if grad else ())]

    out = by_operators(q, k, v, pattern, **given)[0]
    wanted = [out.detach(), *(torch.autograd.grad(out.square().sum(), (q, k, v)) if grad else ())]
    first, second = computed(), computed()
    with monkeypatch.context() as patched:
        patched.setattr(api, "checked", lambda given: pytest.fail("a known call is checked again"))
        patched.setattr(torch_ops, "attention_backward_op", lambda *args: pytest.fail("backward takes the operator"))
        third = computed()
        with pytest.raises(pytest.fail.Exception):
            rw.attention(q[:1], k[:1], v[:1], pattern, **given)
    for got in (first, second, third):
        assert all(map(torch.equal, got, wanted))


def test_auto_on_a_gpu_is_chosen_once_but_in_a_graph(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that auto has not checked yet cannot be checked in a graph, which decides for no further call."""
    program_cache.PROGRAMS.trim()
    q, k, v = tensors()
    given = Arguments(q, k, v, PATTERN)
    with monkeypatch.context() as patched:
        patched.setattr(program_cache, "capturing", lambda device: True)
        rw.attention(q, k, v, PATTERN)
        assert program_cache.find(given).program is None
        rw.attention(q, k, v, PATTERN, backend="dense_batched")
        assert program_cache.find(given._replace(backend="dense_batched")).program is not None
    rw.attention(q, k, v, PATTERN)
    assert program_cache.find(given).program is not None
    # a verdict of a trial drops all programs
    program_cache.PROGRAMS.trim()
    assert program_cache.find(given).program is None


def test_places_of_terms_on_a_gpu_are_made_in_each_call() -> None:
    """Places that a program keeps would have to wait for the stream that made them."""
    call = Call(1, 4, 2, 37, 50, 16, 24, torch.float32, "meta", terms="Softcap(2.0)", features=frozenset({"Softcap"}))
    assert Program(call, constant=True).terms is None
    assert Program(dataclasses.replace(call, device="cpu"), constant=True).terms is not None
