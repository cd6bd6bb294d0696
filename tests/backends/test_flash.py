"""Test PyTorch's fused kernels on a GPU: the choice, calls by the operators' schemas, and results on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import ringweave as rw
from ringweave.backends import flash
from ringweave.backends.backend import delta_as_channels
from ringweave.call import Call, Operands
from ringweave.plan import branches

from ..cases import PATTERNS
from ..oracle import Inputs
from ..test_conformance import conforms


def case(device: str = "cuda", dtype: torch.dtype = torch.bfloat16, dim: int = 64, value_dim: int = 64) -> Call:
    return Call(1, 4, 2, 256, 256, dim, value_dim, dtype, device)


def unsupported_reason(about: Call, pattern: rw.Pattern) -> str | None:
    return flash.unsupported_reason(about, branches(pattern, 256, 256, heads=4)[0])


def test_the_order_of_a_device() -> None:
    assert flash.kernel_preference(9, False) == ("cudnn", "flash", "efficient")
    assert flash.kernel_preference(10, False) == ("cudnn", "flash", "efficient")
    assert flash.kernel_preference(8, False) == ("flash", "efficient")
    assert flash.kernel_preference(7, False) == ("efficient",)
    assert flash.kernel_preference(9, True) == ("flash", "efficient")


@pytest.mark.parametrize("kernel", ["cudnn", "flash", "efficient"])
@pytest.mark.parametrize(("heads", "kv_heads", "nq", "nk"), [(4, 4, 64, 64), (4, 2, 70, 130)])
@pytest.mark.parametrize("causal", [True, False])
def test_calls_fit_the_operators(kernel: str, heads: int, kv_heads: int, nq: int, nk: int, causal: bool) -> None:
    """Calls fit the operators' names, order, dtypes and shapes of arguments, tested on tensors without data, gradients included."""

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    q, k, v, dout = empty(2, heads, nq, 64), empty(2, kv_heads, nk, 64), empty(2, kv_heads, nk, 64), None
    if heads != kv_heads and kernel == "cudnn":
        # torch's shape function assumes equally many key heads
        k, v = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))
    out, lse = flash.dense_forward(q, k, v, causal, 0.3, kernel)
    assert out.shape == q.shape
    assert lse.shape == (2, heads, nq)
    assert lse.dtype == torch.float32
    dout = torch.empty_like(out)
    grads = flash.dense_backward(dout, Operands(q, k, v, 0.3), out, lse.contiguous(), causal, kernel)
    assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize("strided", [False, True])
def test_the_efficient_backward_gets_out_by_token(strided: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's kernel assumes that out is stored by batch, token, head and channel, and does not look at its strides."""
    stored = []
    forward, backward = flash._FUSED["efficient"]

    def noting(*given: Any, **further: Any) -> Any:
        stored.append(given[5].stride())
        return backward(*given, **further)

    monkeypatch.setitem(flash._FUSED, "efficient", (forward, noting))
    q, k, v, dout, out = (torch.empty(2, 4, 40, 64, dtype=torch.bfloat16, device="meta") for _ in range(5))
    lse = torch.empty(2, 4, 40, device="meta")
    out = out.transpose(2, 3).contiguous().transpose(2, 3) if strided else out
    flash.dense_backward(dout, Operands(q, k, v, 0.3), out, lse, True, "efficient")
    assert stored == [(40 * 4 * 64, 64, 4 * 64, 1)]


def test_delta_goes_in_as_channels() -> None:
    x = Inputs.random(40, dtype=torch.bfloat16)
    delta = torch.randn(1, 2, 40) * 100
    dout, q, k, v, out = delta_as_channels(x.dout, x.q, x.k, x.v, delta)
    torch.testing.assert_close((dout.double() * out.double()).sum(-1), delta.double(), rtol=2**-22, atol=1e-6)
    assert torch.equal(q @ k.mT, x.q @ x.k.mT)
    # rowsum(dout * v) is the sum of dP
    assert torch.equal(dout @ v.mT, x.dout @ x.v.mT)


@pytest.mark.parametrize(
    ("about", "pattern", "reason"),
    [
        (case(), rw.Causal(), None),
        (case(dtype=torch.float32), rw.Full(), None),
        (case("cpu"), rw.Full(), "it calls kernels for CUDA tensors, and these are on cpu"),
        (case(dtype=torch.float64), rw.Full(), "it computes float32, bfloat16 and float16, and got torch.float64"),
        (case(value_dim=32), rw.Full(), "it needs Dv == D, and got D = 64, Dv = 32"),
        (case(dim=20, value_dim=20), rw.Full(), "it needs head dimensions of 8, 16, ... 256, and got 20"),
        (case(), rw.SlidingWindow(9), "the pattern is neither full nor causal from position 0"),
    ],
)
def test_refusals(about: Call, pattern: rw.Pattern, reason: str | None) -> None:
    assert unsupported_reason(about, pattern) == reason


def test_bfloat16_on_an_old_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    assert (
        unsupported_reason(case(), rw.Full())
        == "PyTorch's fused kernels need compute capability 8 or later for bfloat16"
    )
    assert unsupported_reason(case(dtype=torch.float16), rw.Full()) is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["full", "causal"])
@pytest.mark.parametrize(("heads", "kv_heads", "tokens", "dim"), [(4, 4, 512, 64), (4, 2, 700, 128), (2, 1, 63, 32)])
def test_dense_on_a_gpu(name: str, heads: int, kv_heads: int, tokens: int, dim: int, dtype: torch.dtype) -> None:
    x = Inputs.random(tokens, heads=heads, kv_heads=kv_heads, batch=2, dim=dim, dtype=dtype).to("cuda")
    conforms(x, PATTERNS[name](tokens), "flash")


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["cudnn", "flash", "efficient"])
@pytest.mark.parametrize("causal", [True, False])
def test_each_kernel_on_a_gpu(kernel: str, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kernel in the device's order is right on a GPU, also without a gradient of lse."""
    major = torch.cuda.get_device_capability()[0]
    if kernel not in flash.kernel_preference(major, torch.version.hip is not None):
        pytest.skip("not a kernel for this device")
    monkeypatch.setattr(flash, "_kernel", lambda *of: kernel)
    pattern = rw.Causal() if causal else rw.Full()
    x = Inputs.random(384, heads=4, kv_heads=2, dim=64, dtype=torch.bfloat16).to("cuda")
    conforms(x, pattern, "flash")
    leaves = x.leaves()
    rw.attention(*leaves, pattern, backend="flash").backward(x.dout)
    again = [leaf.grad.clone() for leaf in leaves if leaf.grad is not None]
    for leaf in leaves:
        leaf.grad = None
    rw.attention(*leaves, pattern, backend="reference").backward(x.dout)
    for got, leaf in zip(again, leaves, strict=True):
        assert leaf.grad is not None
        torch.testing.assert_close(got, leaf.grad, rtol=0.05, atol=0.05)


@pytest.mark.gpu
def test_a_causal_mask_of_more_keys_than_queries_on_a_gpu() -> None:
    conforms(Inputs.random(130, 300, heads=2, dim=64, dtype=torch.float16).to("cuda"), rw.Causal(), "flash")
