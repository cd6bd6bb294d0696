"""flash-attn's functions with inputs that callers share, stride, poison, change and get wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ringweave.integrations import flash_attn, flash_attn_interface

from .test_flash_attn import bounds, drawn, qkv

call: Any = flash_attn.flash_attn_func
varlen: Any = flash_attn.flash_attn_varlen_func
cached: Any = flash_attn.flash_attn_with_kvcache


def test_an_output_can_be_viewed() -> None:
    """The output is contiguous, whatever strides the inputs have, so that callers may join the heads with view."""
    q, k, v = qkv(30, 30)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    last = [x.transpose(1, 3).contiguous().transpose(1, 3) for x in (q, k, v)]
    wanted = call(q, k, v, causal=True)
    for inputs in (strided, last):
        out = call(*inputs, causal=True)
        assert torch.equal(out.view(2, 30, -1), wanted.view(2, 30, -1))
    cu = bounds([10, 20, 30])
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    packed = varlen(*(x.transpose(0, 1).contiguous().transpose(0, 1) for x in flat), cu, cu, 30, 30, causal=True)
    assert torch.equal(packed.view(60, -1), varlen(*flat, cu, cu, 30, 30, causal=True).view(60, -1))
    paged = cached(q[:, :1], k, v, cache_seqlens=torch.tensor([3, 9], dtype=torch.int32))
    assert paged.is_contiguous()


def test_one_tensor_in_three_places_and_expanded_tensors() -> None:
    """Gradients of a tensor that is passed more than once, or expanded, are summed."""
    (x,) = drawn((2, 20, 4, 16))
    leaf = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(call(leaf, leaf, leaf, causal=True).square().sum(), leaf)
    parts = [x.clone().requires_grad_() for _ in range(3)]
    apart = torch.autograd.grad(call(*parts, causal=True).square().sum(), parts)
    torch.testing.assert_close(grad, sum(apart))
    one = drawn((1, 20, 1, 16))[0].requires_grad_()
    (grad,) = torch.autograd.grad(call(x, one.expand(2, 20, 4, 16), x).square().sum(), one)
    full = one.detach().expand(2, 20, 4, 16).clone().requires_grad_()
    (every,) = torch.autograd.grad(call(x, full, x).square().sum(), full)
    torch.testing.assert_close(grad, every.sum((0, 2), keepdim=True))


@pytest.mark.parametrize("learns", [(0,), (1,), (2,), (0, 2), ()], ids=str)
def test_some_inputs_learn(learns: tuple[int, ...]) -> None:
    inputs = qkv(20, 30)
    leaves = [x.clone().requires_grad_(i in learns) for i, x in enumerate(inputs)]
    every = [x.clone().requires_grad_() for x in inputs]
    out, _, _ = call(*leaves, causal=True, return_attn_probs=True)
    assert out.requires_grad == bool(learns)
    if learns:
        got = torch.autograd.grad(out.square().sum(), [leaves[i] for i in learns])
        wanted = torch.autograd.grad(call(*every, causal=True).square().sum(), every)
        assert all(torch.equal(x, wanted[i]) for x, i in zip(got, learns, strict=True))


def test_lse_passes_no_gradient() -> None:
    """A loss of output and lse has the gradients of the output alone; those of lse alone are 0."""
    for function in (call, flash_attn_interface.flash_attn_func):
        leaves = [x.requires_grad_() for x in qkv(9, 5)]
        out, lse, *_ = function(*leaves, causal=True, return_attn_probs=True)
        alone = torch.autograd.grad(out.square().sum(), leaves, retain_graph=True)
        finite = lse.masked_fill(lse.isinf(), 0).sum()
        both = torch.autograd.grad(out.square().sum() + finite, leaves, retain_graph=True)
        assert all(map(torch.equal, alone, both))
        assert not any(x.any() for x in torch.autograd.grad(finite, leaves))


def test_bounds_and_lengths_that_change_between_calls() -> None:
    """Each call reads its tensors, and backward uses the bounds of its forward."""
    flat = [x.requires_grad_() for x in drawn((30, 4, 16), (30, 2, 16), (30, 2, 16))]
    cu = bounds([10, 20])
    out = varlen(*flat, cu, cu, 20, 20, causal=True)
    wanted = torch.autograd.grad(out.square().sum(), flat, retain_graph=True)
    cu[1] = 25
    assert torch.equal(
        varlen(*flat, cu, cu, 25, 25, causal=True), varlen(*flat, bounds([25, 5]), bounds([25, 5]), 25, 25, causal=True)
    )
    assert all(map(torch.equal, torch.autograd.grad(out.square().sum(), flat), wanted))
    q, k, v = qkv(1, 40)
    lengths, table = torch.tensor([7, 30], dtype=torch.int32), torch.tensor([[0], [1]], dtype=torch.int32)
    for _ in range(3):
        for pages in (None, table):
            got = cached(q, k, v, cache_seqlens=lengths, block_table=pages)
            rows = range(2) if pages is None else pages[:, 0].tolist()
            parts = [
                call(q[i : i + 1], k[r : r + 1, :n], v[r : r + 1, :n])
                for i, (r, n) in enumerate(zip(rows, lengths.tolist(), strict=True))
            ]
            torch.testing.assert_close(got, torch.cat(parts))
        lengths += 3
        table.copy_(table.flip(0))
        k += 1


def test_windows_in_many_types() -> None:
    q, k, v = qkv(20, 30)
    wanted = call(q, k, v, window_size=(5, 2))
    for window in ([5, 2], torch.tensor([5, 2]), (torch.tensor(5), torch.tensor(2)), (np.int64(5), np.int32(2))):
        assert torch.equal(call(q, k, v, window_size=window), wanted)


def test_poison_after_the_end_of_a_sequence() -> None:
    """NaN in keys and values outside of a sequence reaches no output."""
    q, k, v = qkv(3, 64)
    lengths = torch.tensor([5, 40], dtype=torch.int32)
    wanted, wanted_lse = cached(q, k, v, cache_seqlens=lengths, causal=True, return_softmax_lse=True)
    for b, n in enumerate(lengths.tolist()):
        k[b, n:], v[b, n:] = torch.nan, torch.nan
    pages = torch.stack([k, v]).reshape(2, 8, 16, 2, 16)
    table = torch.arange(8, dtype=torch.int32).view(2, 4)
    for got in (
        cached(q, k, v, cache_seqlens=lengths, causal=True, return_softmax_lse=True),
        cached(q, pages[0], pages[1], cache_seqlens=lengths, block_table=table, causal=True, return_softmax_lse=True),
    ):
        torch.testing.assert_close(got[0], wanted)
        torch.testing.assert_close(got[1], wanted_lse)
    leaves = [x.clone().requires_grad_() for x in drawn((12, 4, 16), (12, 2, 16), (12, 2, 16))]
    cu = bounds([4, 5])
    with torch.no_grad():
        for x in leaves:
            x[9:] = torch.nan
    out = varlen(*leaves, cu, cu, 5, 5, causal=True)
    assert not out[9:].any()
    for grad in torch.autograd.grad(out.square().sum(), leaves):
        assert grad[:9].isfinite().all()
        assert not grad[9:].any()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_callers(backend: str) -> None:
    """Dense and packed calls are in one graph, with gradients; other lengths give eager's results too."""
    torch._dynamo.reset()
    leaves = [x.requires_grad_() for x in qkv(24, 24)]

    def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = call(q * 2, k, v, causal=True, window_size=(7, 0), softcap=5.0)
        return out + 1

    compiled = torch.compile(dense, fullgraph=True, backend=backend)
    for n in (24, 9):
        inputs = [x.detach()[:, :n].requires_grad_() for x in leaves]
        outs = compiled(*inputs), dense(*inputs)
        results = [[out, *torch.autograd.grad(out.square().sum(), inputs)] for out in outs]
        torch.testing.assert_close(*results)

    def packed(q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Tensor:
        out: Tensor = varlen(q, k, v, cu, cu, 20, 20, causal=True)
        return out * 2

    compiled = torch.compile(packed, fullgraph=True, backend=backend)
    flat = [x.detach().flatten(0, 1).requires_grad_() for x in leaves]
    for cu in (bounds([20, 28]), bounds([20, 0, 28]), bounds([8, 40]), bounds([48])):
        results = [
            [out, *torch.autograd.grad(out.square().sum(), flat)] for out in (compiled(*flat, cu), packed(*flat, cu))
        ]
        torch.testing.assert_close(*results)


def test_checkpoints_repeat_dropout() -> None:
    leaves = [x.requires_grad_() for x in qkv(40, 40)]
    found = []
    for again in (False, True):
        torch.manual_seed(0)
        out = checkpoint(call, *leaves, 0.3, use_reentrant=False) if again else call(*leaves, 0.3)
        found.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    assert all(map(torch.equal, *found))


def test_slopes_that_change_before_backward() -> None:
    """Backward has the slopes of its forward, or says that they were changed."""
    leaves = [x.requires_grad_() for x in qkv(20, 20)]
    slopes = drawn((4,))[0].abs()
    out = call(*leaves, causal=True, alibi_slopes=slopes)
    wanted = torch.autograd.grad(out.square().sum(), leaves, retain_graph=True)
    slopes.mul_(2)
    try:
        got = torch.autograd.grad(out.square().sum(), leaves)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)  # noqa: PT017
    else:
        assert all(map(torch.equal, got, wanted))


def test_inference_mode() -> None:
    with torch.inference_mode():
        q, k, v = qkv(4, 30)
        got = cached(q, k, v, k[:, :4], v[:, :4], cache_seqlens=20, causal=True)
    wanted = cached(q.clone(), k.clone(), v.clone(), cache_seqlens=24, causal=True)
    assert torch.equal(got, wanted)
    slopes = torch.rand(4, requires_grad=True)
    q, k, v = qkv(5, 5)
    # learned slopes are constants, as in flash-attn
    assert not call(q, k, v, alibi_slopes=slopes).requires_grad


def test_autocast_changes_no_dtype() -> None:
    """As in flash-attn, the dtype of a result is that of the inputs, in rows and pages too."""
    q, k, v = qkv(6, 64)
    cu, lengths, table = bounds([3, 3]), torch.tensor([30, 64], dtype=torch.int32), torch.arange(2).view(2, 1).int()
    flat = [x.flatten(0, 1) for x in (q, q[:, :, :2], q[:, :, 2:])]
    calls = [
        lambda: call(q, k, v, causal=True),
        lambda: varlen(*flat, cu, cu, 3, 3, causal=True),
        lambda: cached(q, k, v, cache_seqlens=lengths),
        lambda: cached(q, k, v, cache_seqlens=lengths, block_table=table),
    ]
    for each in calls:
        with torch.autocast("cpu", torch.bfloat16):
            got = each()
        assert got.dtype == torch.float32
        assert torch.equal(got, each())
