"""Modules equal torch's own after loading its state_dict, and equal the functions that they call."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ringweave as rw
import ringweave.nn

from .oracle import check_errors, errors

E, H, N, B = 32, 4, 40, 3


def pair(dtype: torch.dtype = torch.float32, **options: Any) -> tuple[nn.MultiheadAttention, rw.nn.MultiheadAttention]:
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(E, H, **options).to(dtype)
    torch.manual_seed(0)
    ours = rw.nn.MultiheadAttention(E, H, **options).to(dtype)
    for (name, wanted), (other, got) in zip(theirs.named_parameters(), ours.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(wanted, got), name
    # biases are 0 at first, which would hide errors
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.2)
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    return theirs, ours


MASKS = {
    "none": {},
    "causal": {"attn_mask": torch.ones(N, N).triu(1).bool(), "is_causal": True},
    "bool": {"attn_mask": (torch.arange(N * N).view(N, N) % 5 == 1)},
    "float": {"attn_mask": torch.linspace(-2, 2, N * N).view(N, N)},
    "per head": {"attn_mask": torch.linspace(-2, 2, B * H * N * N).view(B * H, N, N)},
    "padding": {"key_padding_mask": torch.arange(N)[None] >= torch.tensor([N, 7, 20])[:, None]},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mask", list(MASKS))
@pytest.mark.parametrize("batch_first", [True, False])
def test_outputs_and_gradients_are_those_of_torch(mask: str, dtype: torch.dtype, batch_first: bool) -> None:
    theirs, ours = pair(dtype, batch_first=batch_first)
    exact = copy.deepcopy(theirs).double()
    x = torch.randn((B, N, E) if batch_first else (N, B, E)).to(dtype)

    def run(module: nn.Module, kind: torch.dtype) -> dict[str, Tensor]:
        masks = {
            name: m.to(kind) if isinstance(m, Tensor) and m.is_floating_point() else m
            for name, m in MASKS[mask].items()
        }
        leaf = x.to(kind).requires_grad_()
        out, weights = module(leaf, leaf, leaf, need_weights=False, **masks)
        assert weights is None
        assert out.dtype == kind
        learned = {"x": leaf, **dict(module.named_parameters())}
        grads = torch.autograd.grad(out.square().sum(), list(learned.values()))
        return {"out": out.detach(), **dict(zip(learned, grads, strict=True))}

    want = run(exact, torch.float64)
    check_errors(run(ours, dtype), want, [errors(run(theirs, dtype), want)], 4 * torch.finfo(dtype).eps)


def test_other_widths_cross_attention_and_no_batch() -> None:
    for bias, batch_first in itertools.product([True, False], [True, False]):
        theirs, ours = pair(kdim=24, vdim=16, bias=bias, batch_first=batch_first)
        shape = (lambda n, e: (B, n, e)) if batch_first else (lambda n, e: (n, B, e))
        q, k, v = torch.randn(shape(9, E)), torch.randn(shape(N, 24)), torch.randn(shape(N, 16))
        torch.testing.assert_close(ours(q, k, v)[0], theirs(q, k, v)[0])
        alone = [x[0] if batch_first else x[:, 0] for x in (q, k, v)]
        torch.testing.assert_close(ours(*alone)[0], theirs(*alone)[0])


def test_weights_are_those_of_the_tiles() -> None:
    theirs, ours = pair(batch_first=True)
    x = torch.randn(B, N, E)
    _, weights = ours(x, x, x, need_weights=True)
    wanted = theirs(x, x, x, average_attn_weights=False)[1]
    assert weights is not None
    torch.testing.assert_close(weights.to_dense(), wanted)
    assert repr(weights) == f"BlockWeights({len(weights.values)} tiles of 64 x 64, of {(B, H, N, N)})"
    with pytest.raises(rw.UnsupportedError, match=r"terms: got \(Bias\); wanted .*, with need_weights=True"):
        ours(x, x, x, need_weights=True, key_padding_mask=torch.zeros(B, N, dtype=torch.bool))


def test_patterns() -> None:
    _, module = pair(batch_first=True)
    x = torch.randn(B, N, E)
    module.pattern = rw.SlidingWindow(5)
    both = module(x, x, x, attn_mask=rw.Sinks(2) | rw.Segments(7), is_causal=True)[0]
    module.pattern = rw.SlidingWindow(5) & (rw.Sinks(2) | rw.Segments(7)) & rw.Causal()
    assert torch.equal(both, module(x, x, x)[0])
    q, k, v = (
        part.unflatten(-1, (H, -1)).transpose(1, 2)
        for part in nn.functional.linear(x, module.in_proj_weight, module.in_proj_bias).chunk(3, -1)
    )
    out = rw.attention(q, k, v, module.pattern).transpose(1, 2).flatten(2)
    torch.testing.assert_close(both, module.out_proj(out))


@pytest.mark.parametrize("training", [True, False])
def test_the_fast_path_of_an_encoder_layer_does_not_bypass_the_module(training: bool) -> None:
    # in eval its fast path would compute dense attention from the module's weights
    pattern = rw.SlidingWindow(2)
    layer = nn.TransformerEncoderLayer(E, H, 48, dropout=0.0, batch_first=True).train(training)
    layer.self_attn = rw.nn.MultiheadAttention(E, H, batch_first=True, pattern=pattern)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(training)
    x = torch.randn(B, N, E)
    padding = torch.arange(N)[None] >= torch.tensor([N, 7, 20])[:, None]
    with torch.no_grad():
        for call in (layer, encoder):
            out = call(x)
            far = x.clone()
            far[:, -1] += 1
            assert torch.equal(call(far)[:, :10], out[:, :10])
            padded = call(x, src_key_padding_mask=padding)
            poisoned = x.clone()
            poisoned[1, 7:] = 99.0
            torch.testing.assert_close(call(poisoned, src_key_padding_mask=padding)[1, :5], padded[1, :5])


def test_dropout_is_for_training() -> None:
    module = rw.nn.MultiheadAttention(E, H, dropout=0.5, batch_first=True)
    x = torch.randn(B, N, E)
    assert not torch.equal(module(x, x, x)[0], module(x, x, x)[0])
    module.eval()
    assert torch.equal(module(x, x, x)[0], module(x, x, x)[0])


def test_fewer_key_heads_norms_rotation_and_sinks() -> None:
    options = {"num_kv_heads": 2, "qk_norm": True, "rotary_base": 10000.0, "sink_logits": True, "batch_first": True}
    module = rw.nn.MultiheadAttention(E, H, pattern=rw.Causal(), **options)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    x = torch.randn(B, N, E)
    d = E // H
    assert module.in_proj_weight.shape == (E + 2 * 2 * d, E)
    q, k, v = (
        part.unflatten(-1, (-1, d)).transpose(1, 2)
        for part in nn.functional.linear(x, module.in_proj_weight, module.in_proj_bias).split([E, 2 * d, 2 * d], -1)
    )

    def turned(y: Tensor, norm: nn.RMSNorm) -> Tensor:
        y = nn.functional.rms_norm(y, (d,), norm.weight)
        angle = torch.arange(N)[:, None] * 10000.0 ** (-torch.arange(d // 2) / (d // 2))
        z = torch.complex(y[..., : d // 2], y[..., d // 2 :]) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([z.real, z.imag], -1)

    out = rw.attention(
        turned(q, module.q_norm), turned(k, module.k_norm), v, rw.Causal(), sink_logits=module.sink_logits
    )
    torch.testing.assert_close(module(x, x, x)[0], module.out_proj(out.transpose(1, 2).flatten(2)))
    # a step over cached keys
    step = module(x[:, -1:], x, x, q_offset=N - 1)[0]
    torch.testing.assert_close(step, module(x, x, x)[0][:, -1:])


def test_rows_of_a_batch_decode_at_positions_of_their_own() -> None:
    module = rw.nn.MultiheadAttention(E, H, rotary_base=10000.0, pattern=rw.Causal(), batch_first=True)
    x = torch.randn(2, N, E)
    at = torch.tensor([5, N - 1])
    new = x[torch.arange(2), at][:, None]
    got = module(new, x, x, q_offset=at)[0]
    for b, first in enumerate(at.tolist()):
        torch.testing.assert_close(got[b], module(new[b : b + 1], x[b : b + 1], x[b : b + 1], q_offset=first)[0][0])


def test_rotation_in_bfloat16_is_exact_far_out() -> None:
    module = rw.nn.MultiheadAttention(E, H, rotary_base=10000.0, batch_first=True).bfloat16()
    x = torch.randn(1, N, E).bfloat16()
    # only differences of positions matter
    near = module(x, x, x, positions=torch.arange(N))[0]
    far = module(x, x, x, positions=torch.arange(N) + 100_000)[0]
    torch.testing.assert_close(near, far, rtol=2e-2, atol=2e-2)


def test_context() -> None:
    options = {"rotary_base": 10000.0, "sink_logits": True, "batch_first": True}
    torch.manual_seed(0)
    alone = rw.nn.MultiheadAttention(E, H, pattern=rw.SlidingWindow(9) & rw.Causal(), **options)
    context = rw.ContextParallel(None, alone.pattern, N, heads=(H, H), placement="striped")
    torch.manual_seed(0)
    shared = rw.nn.MultiheadAttention(E, H, pattern=alone.pattern, context=context, **options)
    x = torch.randn(B, N, E)
    local = context.shard(x, dim=1)
    torch.testing.assert_close(context.unshard(shared(local, local, local)[0], dim=1), alone(x, x, x)[0])


def test_longnet() -> None:
    torch.manual_seed(0)
    options = {"segments": [8, 40], "rates": [1, 4], "causal": True}
    for detach in (False, True):
        module = rw.nn.LongNetAttention(E, H, batch_first=True, detach_weights=detach, **options)
        x = torch.randn(B, N, E, requires_grad=True)
        q, k, v = (
            part.unflatten(-1, (H, -1)).transpose(1, 2)
            for part in nn.functional.linear(x, module.in_proj_weight, module.in_proj_bias).chunk(3, -1)
        )
        out = rw.longnet_attention(q, k, v, detach_weights=detach, **options)
        wanted = module.out_proj(out.transpose(1, 2).flatten(2))
        got = module(x, x, x)[0]
        torch.testing.assert_close(got, wanted)
        one, other = (torch.autograd.grad(y.square().sum(), x, retain_graph=True)[0] for y in (got, wanted))
        torch.testing.assert_close(one, other)
    with pytest.raises(rw.PatternError):
        module(x, x, x, is_causal=True)
    module.pattern = rw.Causal()
    with pytest.raises(rw.PatternError, match="wanted a LongNet, with detach_weights=True"):
        module(x, x, x)


def test_autocast() -> None:
    theirs, ours = pair(batch_first=True)
    x = torch.randn(B, N, E)
    with torch.autocast("cpu", torch.bfloat16):
        got, wanted = ours(x, x, x)[0], theirs(x, x, x)[0]
    assert got.dtype == wanted.dtype
    want = {"out": copy.deepcopy(theirs).double()(*[x.double()] * 3)[0]}
    check_errors({"out": got}, want, [errors({"out": wanted}, want)], 4 * torch.finfo(got.dtype).eps)


def test_compiles_without_breaks() -> None:
    _, module = pair(batch_first=True)
    x = torch.randn(B, N, E)
    torch._dynamo.reset()
    call = torch.compile(
        lambda x: module(x, x, x, attn_mask=rw.SlidingWindow(4))[0], fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(call(x), module(x, x, x, attn_mask=rw.SlidingWindow(4))[0])
