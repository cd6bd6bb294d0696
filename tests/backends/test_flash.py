"""Test the vendors' kernels: the choice, calls by the operators' schemas, lists for flash-attn-4, and results on a GPU."""

from __future__ import annotations

import dataclasses
import sys
import types
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import ringweave as rw
from ringweave import program
from ringweave.backends import BACKENDS, flash
from ringweave.backends.backend import delta_as_channels
from ringweave.call import Call, Operands
from ringweave.errors import UnsupportedError
from ringweave.plan import branches, plan

from .. import oracle
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


def test_delta_goes_in_as_channels() -> None:
    x = Inputs.random(40, dtype=torch.bfloat16)
    delta = torch.randn(1, 2, 40) * 100
    dout, q, k, v, out = delta_as_channels(x.dout, x.q, x.k, x.v, delta)
    torch.testing.assert_close((dout.double() * out.double()).sum(-1), delta.double(), rtol=2**-22, atol=1e-6)
    assert torch.equal(q @ k.mT, x.q @ x.k.mT)
    # rowsum(dout * v) is the sum of dP
    assert torch.equal(dout @ v.mT, x.dout @ x.v.mT)


@pytest.mark.parametrize("name", ["table_per_head", "segments"])
def test_lists_for_flash_attn(name: str) -> None:
    """Each side of a plan becomes counts and padded indices that list exactly its tiles."""
    pattern = rw.Segments(64) if name == "segments" else rw.patterns.random_blocks(512, 0.4, block_size=64, heads=4)
    of = plan(pattern, 512, heads=4, batch=2, tile=64)
    assert of.mask_words.shape[0] == 0
    tiles = pattern.to_dense(512, heads=4, batch=2)[:, :, ::64, ::64] > 0
    for side, want in (("rows", tiles), ("columns", tiles.mT)):
        counts, index = flash.padded_lists(of, side)
        assert counts.dtype == index.dtype == torch.int32
        assert torch.equal(counts, want.sum(-1).int())
        counted = torch.arange(index.shape[-1]) < counts[..., None]
        found = torch.zeros(*want.shape[:3], want.shape[3] + 1, dtype=torch.bool)
        found.scatter_(-1, torch.where(counted, index, want.shape[3]).long(), True)
        assert torch.equal(found[..., :-1], want)
        assert (index[~counted] == 0).all()


def test_an_empty_table_has_lists_too() -> None:
    of = plan(rw.BlockTable(torch.zeros(2, 2, dtype=torch.bool), 64), 128, tile=64)
    counts, index = flash.padded_lists(of, "rows")
    assert not counts.any()
    assert index.shape == (1, 1, 2, 1)


@pytest.mark.parametrize(
    ("about", "pattern", "reason"),
    [
        (case(), rw.Causal(), None),
        (case(dtype=torch.float32), rw.Full(), None),
        (case("cpu"), rw.Full(), "it calls kernels for CUDA tensors, and these are on cpu"),
        (case(dtype=torch.float64), rw.Full(), "it computes float32, bfloat16 and float16, and got torch.float64"),
        (case(value_dim=32), rw.Full(), "it needs Dv == D, and got D = 64, Dv = 32"),
        (case(dim=20, value_dim=20), rw.Full(), "it needs head dimensions of 8, 16, ... 256, and got 20"),
    ],
)
def test_refusals(about: Call, pattern: rw.Pattern, reason: str | None) -> None:
    assert unsupported_reason(about, pattern) == reason


def test_sparse_branches_without_flash_attn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "installed", lambda: False)
    assert "flash-attn-4 is not installed" in str(unsupported_reason(case(), rw.SlidingWindow(9)))
    with pytest.raises(UnsupportedError, match="neither full nor causal"):
        program.choose_backend("flash", case(), branches(rw.SlidingWindow(9), 256, 256, heads=4)[0])


@pytest.mark.parametrize(
    ("major", "pattern", "about", "reason"),
    [
        (8, rw.Segments(128), case(), "supports block sparsity only on Hopper and Blackwell"),
        (12, rw.Segments(128), case(), "supports block sparsity only on Hopper and Blackwell"),
        (9, rw.Segments(128), case(dim=192, value_dim=192), "head dimensions up to 128, and got torch.bfloat16, 192"),
        (9, rw.Segments(128), case(dtype=torch.float32), "needs a 16-bit type"),
    ],
)
def test_devices_and_types_that_flash_attn_does_not_take(
    major: int, pattern: rw.Pattern, about: Call, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash, "installed", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (major, 0))
    assert reason in str(unsupported_reason(about, pattern))


class Lists(NamedTuple):
    """flash-attn-4's record of blocks, with the fields that are used."""

    mask_block_cnt: Tensor
    mask_block_idx: Tensor
    full_block_cnt: Tensor
    full_block_idx: Tensor
    block_size: tuple[int, int]

    def pairs(self, lines: int, across: int) -> Tensor:
        """Return the listed blocks as bool (B, H, lines, across)."""
        assert not self.mask_block_cnt.any()
        assert self.mask_block_idx.shape[:3] == self.full_block_idx.shape[:3]
        counted = torch.arange(self.full_block_idx.shape[-1]) < self.full_block_cnt[..., None]
        blocks = torch.zeros(*self.full_block_cnt.shape, across + 1, dtype=torch.bool)
        blocks.scatter_(-1, torch.where(counted, self.full_block_idx, across).long(), True)
        return blocks[..., :across]


def _forward(
    q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, block_sparse_tensors: Lists, return_lse: bool
) -> tuple[Tensor, Tensor]:
    """Simulate flash-attn-4 4.0.0b36: tokens before heads, lse (B, H, Nq) in natural logarithms."""
    sides = block_sparse_tensors.block_size
    rows = block_sparse_tensors.pairs(q.shape[1] // sides[0], k.shape[1] // sides[1])
    allowed = rows.repeat_interleave(sides[0], 2).repeat_interleave(sides[1], 3)
    assert return_lse
    out, lse = oracle.attention(*(x.transpose(1, 2) for x in (q, k, v)), allowed, softmax_scale)
    return out.transpose(1, 2), lse


def _backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, softmax_scale: float, *,
    block_sparse_tensors: Lists, dlse: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Simulate its backward: blocks by columns, delta = rowsum(dout * out) - dlse."""
    sides = block_sparse_tensors.block_size
    columns = block_sparse_tensors.pairs(k.shape[1] // sides[1], q.shape[1] // sides[0])
    allowed = columns.repeat_interleave(sides[1], 2).repeat_interleave(sides[0], 3).mT
    q, k, v, out, dout = (x.transpose(1, 2) for x in (q, k, v, out, dout))
    ratio = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(ratio, 1) for x in (k, v))
    weights = torch.where(allowed, (q @ keys.mT * softmax_scale - lse[..., None]).exp(), 0.0)
    delta = (dout * out).sum(-1) - (0.0 if dlse is None else dlse)
    slopes = weights * (dout @ values.mT - delta[..., None]) * softmax_scale
    grads = (slopes @ keys, slopes.mT @ q, weights.mT @ dout)
    dq, dk, dv = (x if x is grads[0] else x.unflatten(1, (-1, ratio)).sum(2) for x in grads)
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


@pytest.mark.parametrize("major", [9, 10])
def test_what_flash_attn_is_given_and_gives(major: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls of flash-attn-4 follow its contract, here in plain torch: layouts, both lists, and delta with and without dlse."""
    module = types.SimpleNamespace(BlockSparseTensorsTorch=Lists, flash_attn_func=_forward, _flash_attn_bwd=_backward)
    monkeypatch.setitem(sys.modules, "flash_attn.cute.block_sparsity", module)  # type: ignore[arg-type]
    monkeypatch.setattr(flash, "_cute", lambda: module)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (major, 0))
    able = dataclasses.replace(flash.BACKEND, unsupported_reason=lambda case, branch: None)
    monkeypatch.setitem(BACKENDS, "flash", able)
    tile = flash.SPARSE_TILES[major]
    table = torch.rand(4, 512 // tile[0], 512 // tile[1], generator=torch.Generator().manual_seed(0)) < 0.5
    table[0, 1], table[1, :, 2] = False, False
    x = Inputs.random(512, heads=4, kv_heads=2, batch=2)
    conforms(x, rw.BlockTable(table, tile), "flash")
    leaves = x.leaves()
    got = torch.autograd.grad(rw.attention(*leaves, rw.BlockTable(table, tile), backend="flash"), leaves, x.dout)
    want = torch.autograd.grad(
        rw.attention(*leaves, rw.BlockTable(table, tile), backend="dense_batched"), leaves, x.dout
    )
    torch.testing.assert_close(got, want)


def test_bfloat16_on_an_old_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    assert (
        unsupported_reason(case(), rw.Full())
        == "PyTorch's fused kernels need compute capability 8 or later for bfloat16"
    )
    assert unsupported_reason(case(dtype=torch.float16), rw.Full()) is None


def test_another_version_of_flash_attn_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def old(q: Tensor, k: Tensor, v: Tensor) -> None: ...

    found = types.SimpleNamespace(flash_attn_func=old, _flash_attn_bwd=old)
    monkeypatch.setattr(flash.importlib, "import_module", lambda name: found)
    flash._cute.cache_clear()
    assert (
        flash._cute() == "this version of flash-attn-4 has no flash_attn_func with block_sparse_tensors: 4.0.0b36 does"
    )
    flash._cute.cache_clear()


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


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128])
def test_flash_attn_on_a_gpu(dim: int) -> None:
    pytest.importorskip("flash_attn.cute")
    tile = flash.SPARSE_TILES.get(torch.cuda.get_device_capability()[0])
    if tile is None:
        pytest.skip("flash-attn-4 takes no blocks on this device")
    n = 1024
    table = torch.rand(4, n // tile[0], n // tile[1], generator=torch.Generator().manual_seed(0)) < 0.4
    table[:, 1] = False
    x = Inputs.random(n, heads=4, kv_heads=2, dim=dim, dtype=torch.bfloat16).to("cuda")
    conforms(x, rw.BlockTable(table, tile), "flash")
