"""flash_attn.layers.rotary: each pair of dimensions is turned by its angle, in both layouts, in place and with gradients."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor

import ringweave as rw
from ringweave.integrations.flash_attn import flash_attn_with_kvcache, install
from ringweave.integrations.flash_attn.layers.rotary import (
    RotaryEmbedding,
    apply_rotary_emb,
    apply_rotary_emb_kv_,
    apply_rotary_emb_qkv_,
)

POSITIONS = 40


def tables(half: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    angles = torch.outer(torch.arange(float(POSITIONS)), 100.0 ** (-torch.arange(float(half)) / half))
    return angles.cos().to(dtype), angles.sin().to(dtype)


def turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, positions: Tensor) -> Tensor:
    """Return the definition for (B, N, H, D) in float64: products of complex numbers; ``positions`` are (B, N)."""
    half = cos.shape[1]
    factor = torch.complex(cos.double(), sin.double())[positions][:, :, None]
    x = x.double()
    pairs = x[..., : 2 * half].unflatten(-1, (half, 2) if interleaved else (2, half))
    axis = -1 if interleaved else -2
    product = torch.complex(pairs.select(axis, 0), pairs.select(axis, 1)) * factor
    found = torch.stack([product.real, product.imag], axis).flatten(-2)
    return torch.cat([found, x[..., 2 * half :]], -1)


def close(got: Tensor, wanted: Tensor) -> None:
    # one rounding of the result, and those of float32 products
    step = torch.finfo(got.dtype).eps
    assert float((got.double() - wanted).abs().max()) <= (step + 1e-6) * float(wanted.abs().max())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("offsets", [0, 7, torch.tensor([3, 21], dtype=torch.int32)], ids=["0", "7", "own"])
def test_tokens_are_turned_by_their_positions(
    dtype: torch.dtype, inplace: bool, interleaved: bool, offsets: int | Tensor
) -> None:
    x = torch.randn(2, 13, 3, 20).to(dtype)
    # a view with other strides
    x = x.transpose(1, 2).contiguous().transpose(1, 2)
    cos, sin = tables(6, dtype)
    positions = torch.arange(13) + torch.as_tensor(offsets).reshape(-1, 1).expand(2, 1)
    wanted = turned(x, cos, sin, interleaved, positions)
    before = x.clone()
    found = apply_rotary_emb(x, cos, sin, interleaved, inplace, offsets)
    assert (found is x) == inplace
    assert torch.equal(x, before) != inplace
    close(found, wanted)


@pytest.mark.parametrize("interleaved", [False, True])
def test_packed_sequences_are_turned_as_each_alone(interleaved: bool) -> None:
    """Each begins at its own position, an empty one has no token, and tokens past the last one stay."""
    sizes, first = [5, 0, 9], torch.tensor([2, 9, 0], dtype=torch.int32)
    bounds = torch.tensor([0, 5, 5, 14], dtype=torch.int32)
    x = torch.randn(17, 2, 16)
    cos, sin = tables(8)
    found = apply_rotary_emb(x, cos, sin, interleaved, False, first, bounds, 9)
    for part, own, start in zip(x.split([*sizes, 3]), found.split([*sizes, 3]), [2, 9, 0, None], strict=True):
        wanted = part if start is None else apply_rotary_emb(part[None], cos, sin, interleaved, False, start)[0]
        assert torch.equal(own, wanted)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_gradients_are_turned_back(interleaved: bool, packed: bool) -> None:
    x = torch.randn(2, 6, 2, 12, dtype=torch.float64, requires_grad=True)
    cos, sin = tables(4, torch.float64)
    cos.requires_grad_()

    def call(x: Tensor, inplace: bool) -> Tensor:
        # in place on a result of an operation, as in a model
        x = x * 1.5
        if packed:
            bounds = torch.tensor([0, 6, 12], dtype=torch.int32)
            return apply_rotary_emb(x.flatten(0, 1), cos, sin, interleaved, inplace, 3, bounds, 6)
        return apply_rotary_emb(x, cos, sin, interleaved, inplace, 3)

    assert torch.autograd.gradcheck(lambda x: call(x, False), x)
    assert torch.autograd.gradcheck(lambda x: call(x, True), x)
    qkv = torch.randn(1, 6, 3, 2, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: apply_rotary_emb_qkv_(x * 1.5, cos, sin, None, None, interleaved), qkv)
    assert torch.autograd.gradcheck(lambda x: apply_rotary_emb_kv_(x * 1.5, cos, sin, interleaved), qkv[:, :, 1:])
    call(x, False).sum().backward()
    # flash-attn's tables have no gradient
    assert cos.grad is None


@pytest.mark.parametrize("own_tables", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_queries_and_keys_of_one_tensor(interleaved: bool, own_tables: bool) -> None:
    """In both layouts, values stay; keys may have tables of their own."""
    cos, sin = tables(4)
    of_keys = (0.5 * cos, 0.5 * sin) if own_tables else (None, None)
    for shape, heads, axis in (((2, 9, 3, 4, 8), None, 2), ((2, 9, 4 + 2 * 2, 8), 4, 2)):
        qkv = torch.randn(shape)
        parts = qkv.clone().unbind(axis) if heads is None else qkv.clone().split([4, 2, 2], axis)
        found = apply_rotary_emb_qkv_(qkv, cos, sin, *of_keys, interleaved, 5, heads)
        assert found is qkv
        got = found.unbind(axis) if heads is None else found.split([4, 2, 2], axis)
        factor = 0.5 if own_tables else 1.0
        assert torch.equal(got[0], apply_rotary_emb(parts[0], cos, sin, interleaved, False, 5))
        assert torch.equal(got[1], apply_rotary_emb(parts[1], factor * cos, factor * sin, interleaved, False, 5))
        assert torch.equal(got[2], parts[2])


@pytest.mark.parametrize("scale_base", [None, 16.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_module_turns_by_relative_positions(scale_base: float | None, dtype: torch.dtype) -> None:
    """Scores depend on the distance, with any first position, in all three forms of the arguments."""
    module = RotaryEmbedding(8, 50.0, scale_base=scale_base).to(dtype)
    q, k = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 1, 8)
    q, k = (x.expand(1, 12, 2, 8).to(dtype).clone() for x in (q, k))

    def scores(first: int) -> Tensor:
        qkv, kv = torch.stack([q, k, k], 2), torch.stack([k, k], 2)
        one = module(qkv.clone(), seqlen_offset=first)
        grouped = module(qkv.flatten(2, 3).clone(), None, first, None, 2)
        two, of_two = module(q.clone(), kv.clone(), first)
        start = torch.tensor([first], dtype=torch.int32)
        own = module(qkv.clone(), seqlen_offset=start, max_seqlen=first + 12)
        assert torch.equal(one.flatten(2, 3), grouped)
        assert torch.equal(one[:, :, 0], two)
        assert torch.equal(one[:, :, 1], of_two[:, :, 0])
        assert torch.equal(one[:, :, 2], of_two[:, :, 1])
        assert torch.equal(one, own)
        return (one[0, :, 0, 0].double() @ one[0, :, 1, 0].double().T).float()

    bound = 60 * torch.finfo(dtype).eps
    # larger positions first, so that the tables of the second are those of a longer call
    for found in (scores(20), scores(0)):
        for distance in range(-11, 12):
            line = found.diagonal(distance)
            assert float((line - line.mean()).abs().max()) <= bound * max(1.0, float(found.abs().max()))


def test_frequencies_of_a_converted_module_stay_precise() -> None:
    """A table of a long sequence in bfloat16 is that of float32, rounded once."""
    exact, converted = RotaryEmbedding(16), RotaryEmbedding(16).bfloat16()
    x = torch.randn(1, 3000, 3, 1, 16).bfloat16()
    assert torch.equal(exact(x.clone()), converted(x.clone()))


def test_modules_are_copied_and_saved_and_leave_inference_mode() -> None:
    module = RotaryEmbedding(8)
    assert not module.state_dict()
    with torch.inference_mode():
        module(torch.randn(1, 5, 3, 1, 8))
    x = torch.randn(1, 5, 3, 1, 8, requires_grad=True)
    module(x * 1.0).sum().backward()
    assert x.grad is not None
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    y = torch.randn(1, 5, 3, 1, 8)
    for other in (copy.deepcopy(module), torch.load(file, weights_only=False)):
        assert torch.equal(other(y.clone()), module(y.clone()))


def test_a_step_over_a_cache_turns_as_the_layer_does() -> None:
    """``flash_attn_with_kvcache`` with tables equals a call with tokens that were turned before."""
    cos, sin = tables(8)
    q, k, v = (torch.randn(1, 1, 2, 16) for _ in range(3))
    caches = [torch.zeros(1, 32, 2, 16) for _ in range(4)]
    at = torch.tensor([6], dtype=torch.int32)
    whole = flash_attn_with_kvcache(
        q, *caches[:2], k, v, rotary_cos=cos, rotary_sin=sin, cache_seqlens=at, causal=True, rotary_interleaved=False
    )
    turned_q, turned_k = (apply_rotary_emb(x, cos, sin, seqlen_offsets=at) for x in (q, k))
    apart = flash_attn_with_kvcache(turned_q, *caches[2:], turned_k, v, cache_seqlens=at, causal=True)
    assert torch.equal(whole, apart)
    assert torch.equal(caches[0], caches[2])


def test_a_compiled_layer_has_no_break() -> None:
    cos, sin = tables(4)
    x = torch.randn(1, 7, 2, 8)
    compiled = torch.compile(apply_rotary_emb, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, cos, sin, False, False, 3), apply_rotary_emb(x, cos, sin, False, False, 3))


def test_installed_code_finds_the_layer() -> None:
    with install():
        import flash_attn
        from flash_attn.layers.rotary import RotaryEmbedding as Found
        from flash_attn.layers.rotary import apply_rotary_emb as found

        assert Found is RotaryEmbedding
        assert flash_attn.layers.rotary.apply_rotary_emb_func is found is apply_rotary_emb


X, (COS, SIN) = torch.randn(2, 9, 3, 8), tables(4)
BOUNDS = torch.tensor([0, 4, 9], dtype=torch.int32)
REFUSED: dict[str, tuple[Any, str]] = {
    "three axes": (lambda: apply_rotary_emb(X[0], COS, SIN), r"x: got .*; wanted \(B, N, H, D\)"),
    "packed, four axes": (lambda: apply_rotary_emb(X, COS, SIN, cu_seqlens=BOUNDS), r"x: got .*; wanted \(tokens"),
    "no sines": (lambda: apply_rotary_emb(X, COS, None), "sin: got None; wanted"),
    "other sines": (lambda: apply_rotary_emb(X, COS, SIN[:, :2]), "sin: got"),
    "tables for more": (lambda: apply_rotary_emb(X, *tables(5)), "rotary dim: got 10; wanted"),
    "too few rows": (lambda: apply_rotary_emb(X, COS[:8], SIN[:8]), "cos rows: got 8; wanted at least 9"),
    "too few rows for one": (
        lambda: apply_rotary_emb(X, COS, SIN, seqlen_offsets=torch.tensor([0, 33])), "cos rows: got 40; wanted at least 42",
    ),
    "before the first": (lambda: apply_rotary_emb(X, COS, SIN, seqlen_offsets=-1), "seqlen_offsets: got -1"),
    "offsets of others": (lambda: apply_rotary_emb(X, COS, SIN, seqlen_offsets=torch.zeros(3)), "seqlen_offsets: got"),
    "a length without bounds": (lambda: apply_rotary_emb(X, COS, SIN, max_seqlen=9), "max_seqlen: got 9; wanted None"),
    "bounds without a length": (lambda: apply_rotary_emb(X[0], COS, SIN, cu_seqlens=BOUNDS), "max_seqlen: got None"),
    "a short length": (
        lambda: apply_rotary_emb(X[0], COS, SIN, cu_seqlens=BOUNDS, max_seqlen=4), "max_seqlen: got 4; wanted at least 5",
    ),
    "bounds past the tokens": (
        lambda: apply_rotary_emb(X[0], COS, SIN, cu_seqlens=torch.tensor([0, 4, 18]), max_seqlen=20),
        "cu_seqlens: got",
    ),
    "two parts": (lambda: apply_rotary_emb_qkv_(torch.randn(2, 9, 2, 3, 8), COS, SIN), "qkv: got"),
    "heads unknown": (lambda: apply_rotary_emb_qkv_(X, COS, SIN), "num_heads_q: got None"),
    "heads uneven": (lambda: apply_rotary_emb_qkv_(X, COS, SIN, num_heads_q=2), "num_heads_q: got 2"),
    "cosines of keys alone": (lambda: apply_rotary_emb_qkv_(X, COS, SIN, COS, num_heads_q=1), "cos_k, sin_k: got one"),
    "other heads": (
        lambda: apply_rotary_emb_qkv_(torch.randn(2, 9, 3, 3, 8), COS, SIN, num_heads_q=2), "num_heads_q: got 2; wanted 3",
    ),
    "keys alone": (lambda: apply_rotary_emb_kv_(X, COS, SIN), "kv: got"),
    "heads with keys apart": (
        lambda: RotaryEmbedding(8)(X, torch.randn(2, 9, 2, 3, 8), num_heads_q=3), "num_heads_q: got 3; wanted None",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_arguments_are_named(name: str) -> None:
    call, text = REFUSED[name]
    before = X.clone()
    with pytest.raises(rw.ShapeError, match=text):
        call()
    assert torch.equal(X, before)


def test_a_refused_call_writes_nothing() -> None:
    """The keys' tables are too short, so queries are not written either."""
    qkv = torch.randn(1, 9, 3, 2, 8)
    before = qkv.clone()
    with pytest.raises(rw.ShapeError, match="cos rows"):
        apply_rotary_emb_qkv_(qkv, COS, SIN, COS[:5], SIN[:5])
    module = RotaryEmbedding(8)
    kv = torch.randn(1, 9, 2, 2, 8)
    q, of_keys = torch.randn(1, 9, 2, 4), kv.clone()
    with pytest.raises(rw.ShapeError, match="rotary dim"):
        module(q, kv)
    assert torch.equal(kv, of_keys)
    assert torch.equal(qkv, before)
