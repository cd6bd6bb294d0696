"""Test flash-attn-4 for plans of full tiles: its lists, its contract, which a model in plain torch follows, and refusals."""

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
from ringweave.backends import BACKENDS
from ringweave.call import Call
from ringweave.errors import UnsupportedError
from ringweave.plan import branches, plan
from ringweave_gpu import flash_attn_4
from tests import oracle
from tests.oracle import Inputs
from tests.test_conformance import conforms


def case(device: str = "cuda", dtype: torch.dtype = torch.bfloat16, dim: int = 64, value_dim: int = 64) -> Call:
    return Call(1, 4, 2, 256, 256, dim, value_dim, dtype, device)


def unsupported_reason(about: Call, pattern: rw.Pattern) -> str | None:
    return flash_attn_4.unsupported_reason(about, branches(pattern, 256, 256, heads=4)[0])


@pytest.mark.parametrize("name", ["table_per_head", "segments"])
def test_lists_for_flash_attn(name: str) -> None:
    """Each side of a plan becomes counts and padded indices that list exactly its tiles."""
    pattern = rw.Segments(64) if name == "segments" else rw.patterns.random_blocks(512, 0.4, block_size=64, heads=4)
    of = plan(pattern, 512, heads=4, batch=2, tile=64)
    assert of.mask_words.shape[0] == 0
    tiles = pattern.to_dense(512, heads=4, batch=2)[:, :, ::64, ::64] > 0
    for side, want in (("rows", tiles), ("columns", tiles.mT)):
        counts, index = flash_attn_4.padded_lists(of, side)
        assert counts.dtype == index.dtype == torch.int32
        assert torch.equal(counts, want.sum(-1).int())
        counted = torch.arange(index.shape[-1]) < counts[..., None]
        found = torch.zeros(*want.shape[:3], want.shape[3] + 1, dtype=torch.bool)
        found.scatter_(-1, torch.where(counted, index, want.shape[3]).long(), True)
        assert torch.equal(found[..., :-1], want)
        assert (index[~counted] == 0).all()


def test_an_empty_table_has_lists_too() -> None:
    of = plan(rw.BlockTable(torch.zeros(2, 2, dtype=torch.bool), 64), 128, tile=64)
    counts, index = flash_attn_4.padded_lists(of, "rows")
    assert not counts.any()
    assert index.shape == (1, 1, 2, 1)


@pytest.mark.parametrize(
    ("about", "pattern", "reason"),
    [
        (case(), rw.Causal(), "PyTorch's fused kernels compute full and causal patterns: name 'flash'"),
        (case("cpu"), rw.Segments(128), "it calls kernels for CUDA tensors, and these are on cpu"),
        (case(value_dim=32), rw.Segments(128), "it needs Dv == D, and got D = 64, Dv = 32"),
        (case(dim=20, value_dim=20), rw.Segments(128), "it needs head dimensions of 8, 16, ... 128, and got 20"),
        (case(), rw.Segments(128), "flash-attn-4 is not installed: pip install flash-attn-4"),
    ],
)
def test_refusals(about: Call, pattern: rw.Pattern, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attn_4, "installed", lambda: False)
    assert unsupported_reason(about, pattern) == reason
    with pytest.raises(UnsupportedError, match=reason.split(",")[0]):
        program.choose_backend("flash_attn_4", about, branches(pattern, 256, 256, heads=4)[0])


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
    monkeypatch.setattr(flash_attn_4, "installed", lambda: True)
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
    monkeypatch.setattr(flash_attn_4, "_cute", lambda: module)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (major, 0))
    able = dataclasses.replace(flash_attn_4.BACKEND, unsupported_reason=lambda case, branch: None)
    monkeypatch.setitem(BACKENDS, "flash_attn_4", able)
    tile = flash_attn_4.SPARSE_TILES[major]
    table = torch.rand(4, 512 // tile[0], 512 // tile[1], generator=torch.Generator().manual_seed(0)) < 0.5
    table[0, 1], table[1, :, 2] = False, False
    x = Inputs.random(512, heads=4, kv_heads=2, batch=2)
    conforms(x, rw.BlockTable(table, tile), "flash_attn_4")
    leaves = x.leaves()
    got = torch.autograd.grad(rw.attention(*leaves, rw.BlockTable(table, tile), backend="flash_attn_4"), leaves, x.dout)
    want = torch.autograd.grad(
        rw.attention(*leaves, rw.BlockTable(table, tile), backend="dense_batched"), leaves, x.dout
    )
    torch.testing.assert_close(got, want)


def test_another_version_of_flash_attn_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def old(q: Tensor, k: Tensor, v: Tensor) -> None: ...

    found = types.SimpleNamespace(flash_attn_func=old, _flash_attn_bwd=old)
    monkeypatch.setattr(flash_attn_4.importlib, "import_module", lambda name: found)
    flash_attn_4._cute.cache_clear()
    assert (
        flash_attn_4._cute()
        == "this version of flash-attn-4 has no flash_attn_func with block_sparse_tensors: 4.0.0b36 does"
    )
    flash_attn_4._cute.cache_clear()


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128])
def test_flash_attn_on_a_gpu(dim: int) -> None:
    pytest.importorskip("flash_attn.cute")
    tile = flash_attn_4.SPARSE_TILES.get(torch.cuda.get_device_capability()[0])
    if tile is None:
        pytest.skip("flash-attn-4 takes no blocks on this device")
    n = 1024
    table = torch.rand(4, n // tile[0], n // tile[1], generator=torch.Generator().manual_seed(0)) < 0.4
    table[:, 1] = False
    x = Inputs.random(n, heads=4, kv_heads=2, dim=dim, dtype=torch.bfloat16).to("cuda")
    conforms(x, rw.BlockTable(table, tile), "flash_attn_4")
