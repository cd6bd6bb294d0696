"""Test ``q_offset="end"``, warnings about probable mistakes, and keyword arguments of other libraries."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import ringweave as rw
from ringweave import validate
from ringweave.patterns.alignment import ends_at_query, first_query, padded_keys

from .oracle import Inputs

STREAMING = (rw.SlidingWindow(9) | rw.Sinks(4)) & rw.Causal()


@pytest.mark.parametrize(
    "pattern", [STREAMING, rw.Causal(), rw.Full(), rw.LongNet([16, 32], [1, 2], causal=True)], ids=repr
)
@pytest.mark.parametrize("nq", [1, 5, 40])
def test_end_has_the_bits_of_the_number(pattern: rw.Pattern, nq: int) -> None:
    x = Inputs.random(nq, 40, batch=2, heads=4, kv_heads=2)
    wanted = rw.attention_with_lse(*x.leaves(), pattern, q_offset=40 - nq)
    for _ in range(3):
        # the second and third calls are served by the program of the first
        leaves = x.leaves()
        out, lse = rw.attention_with_lse(*leaves, pattern, q_offset="end")
        assert torch.equal(out, wanted.out)
        assert torch.equal(lse, wanted.lse)
        with torch.no_grad():
            assert torch.equal(rw.attention(x.q, x.k, x.v, pattern, q_offset="end"), wanted.out)
        torch.autograd.grad(out.sum(), leaves)


def test_end_is_served_by_a_program_and_follows_the_number_of_keys() -> None:
    x = Inputs.random(1, 60, heads=4, kv_heads=2)
    for n in (40, 41, 60, 40):
        k, v = x.k[:, :, :n], x.v[:, :, :n]
        wanted = rw.attention(x.q, k, v, STREAMING, q_offset=n - 1)
        assert torch.equal(rw.attention(x.q, k, v, STREAMING, q_offset="end"), wanted)
    padded = STREAMING & rw.KeyPadding(33)
    for nq in (1, 3):
        q = x.q.expand(-1, -1, nq, -1)
        wanted = rw.attention(q, x.k, x.v, padded, q_offset=33 - nq)
        for _ in range(2):
            assert torch.equal(rw.attention(q, x.k, x.v, padded, q_offset="end"), wanted)
            assert torch.equal(
                rw.attention(q, x.k, x.v, STREAMING, q_offset="end"),
                rw.attention(q, x.k, x.v, STREAMING, q_offset=60 - nq),
            )


def test_a_padded_batch_decodes_as_its_rows_alone() -> None:
    n, lengths = 40, torch.tensor([40, 7, 0, 25])
    x = Inputs.random(2, n, batch=4, heads=4, kv_heads=2)
    for bounds in (lambda p: p & rw.KeyPadding(lengths), lambda p: p.within(rw.KeyPadding(lengths))):
        out = rw.attention(x.q, x.k, x.v, bounds(STREAMING), q_offset="end")
        for b, length in enumerate(lengths.tolist()):
            if not length:
                assert not out[b].any()
                continue
            alone = rw.attention(
                x.q[b : b + 1], x.k[b : b + 1, :, :length], x.v[b : b + 1, :, :length], STREAMING, q_offset=length - 2
            )
            torch.testing.assert_close(out[b : b + 1], alone)
    # padding on the left ends with the last key
    left = STREAMING.within(rw.KeyPadding(n, n - lengths))
    wanted = rw.attention(x.q, x.k, x.v, left, q_offset=torch.tensor([38, 38, 0, 38]))
    torch.testing.assert_close(rw.attention(x.q, x.k, x.v, left, q_offset="end"), wanted)


def test_the_first_key_counts() -> None:
    x = Inputs.random(3, 40, batch=2, heads=4)
    for k_offset, first in ((5, 42), (torch.tensor([5, 9], dtype=torch.uint8), torch.tensor([42, 46]))):
        wanted = rw.attention(x.q, x.k, x.v, STREAMING, q_offset=first, k_offset=k_offset)
        for _ in range(2):
            got = rw.attention(x.q, x.k, x.v, STREAMING, q_offset="end", k_offset=k_offset)
            assert torch.equal(got, wanted)
    # bounds of padding count positions
    pattern = STREAMING & rw.KeyPadding(41)
    wanted = rw.attention(x.q, x.k, x.v, pattern, q_offset=38, k_offset=5)
    assert torch.equal(rw.attention(x.q, x.k, x.v, pattern, q_offset="end", k_offset=5), wanted)


def test_every_function_takes_end() -> None:
    x = Inputs.random(3, 40, heads=4)
    mixture: dict[str, Any] = {"segments": [16, 32], "rates": [1, 2], "causal": True}
    for detach in (False, True):
        got, wanted = (
            rw.longnet_attention(x.q, x.k, x.v, **mixture, detach_weights=detach, q_offset=offset)
            for offset in ("end", 37)
        )
        assert torch.equal(got, wanted)
    weights = rw.attention_weights(x.q, x.k, STREAMING, q_offset="end").to_dense()
    assert torch.equal(weights, rw.attention_weights(x.q, x.k, STREAMING, q_offset=37).to_dense())
    assert rw.explain(STREAMING, 3, 40, q_offset="end") == rw.explain(STREAMING, 3, 40, q_offset=37)
    assert torch.equal(
        rw.plan(STREAMING, 3, 40, q_offset="end").to_dense(), rw.plan(STREAMING, 3, 40, q_offset=37).to_dense()
    )
    lengths = torch.tensor([40, 9])
    planned = rw.plan(STREAMING & rw.KeyPadding(lengths), 3, 40, batch=2, q_offset="end").to_dense()
    for b, length in enumerate(lengths.tolist()):
        alone = (STREAMING & rw.KeyPadding(length)).to_dense(3, 40, q_offset=length - 3)
        assert torch.equal(planned[b], alone[0])
    layer = rw.nn.MultiheadAttention(32, 4, batch_first=True, pattern=rw.Causal(), rotary_base=100.0)
    inputs = torch.randn(2, 20, 32)
    torch.testing.assert_close(
        layer(inputs[:, -2:], inputs, inputs, q_offset="end")[0], layer(inputs, inputs, inputs)[0][:, -2:]
    )


def test_end_compiles_and_changed_lengths_recompile_nothing() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    x = Inputs.random(2, 40, batch=2, heads=4)

    def call(q: Tensor, lengths: Tensor) -> Tensor:
        return rw.attention(q * 1.0, x.k, x.v, STREAMING & rw.KeyPadding(lengths), q_offset="end")

    step = torch.compile(call, fullgraph=True, backend=counter)
    for lengths in (torch.tensor([40, 7]), torch.tensor([12, 31])):
        torch.testing.assert_close(step(x.q, lengths), call(x.q, lengths))
    assert counter.frame_count == 1
    plain = torch.compile(
        lambda q: rw.attention(q, x.k, x.v, STREAMING, q_offset="end"), fullgraph=True, backend="eager"
    )
    torch.testing.assert_close(plain(x.q), rw.attention(x.q, x.k, x.v, STREAMING, q_offset=38))


def test_bounds_of_combined_patterns() -> None:
    a, b = rw.KeyPadding(30, 2), rw.KeyPadding(torch.tensor([20, 35]), 5)
    assert padded_keys(rw.Causal()) is None
    assert padded_keys(a | rw.Sinks(3)) is None
    assert padded_keys(~a) is None
    assert padded_keys(rw.Causal().within(a) | rw.Sinks(3).within(a)) == (2, 30)
    assert padded_keys(rw.PerHead([a, a & rw.Causal()])) == (2, 30)
    both, either = padded_keys(a & b), padded_keys(a | b)
    assert both is not None
    assert either is not None
    assert (both[0], both[1].tolist()) == (5, [20, 30])  # type: ignore[union-attr]
    assert (either[0], either[1].tolist()) == (2, [30, 35])  # type: ignore[union-attr]
    assert first_query(a & b, "end", 0, batch=2, nq=4, nk=40).tolist() == [16, 26]  # type: ignore[union-attr]
    assert first_query(rw.KeyPadding(4, 4), "end", 0, batch=2, nq=9, nk=40) == 0


def _call(pattern: rw.Pattern = STREAMING, nq: int = 4, **options: Any) -> Tensor:
    x = Inputs.random(nq, 8, batch=2, heads=4)
    return rw.attention(x.q, x.k, x.v, pattern, **options)


# ---- probable mistakes -----------------------------------------------------------------------------------------------


@pytest.fixture
def unwarned() -> Iterator[None]:
    """Forget which warnings were shown."""
    validate._warn_once.cache_clear()
    yield
    validate._warn_once.cache_clear()


@pytest.mark.usefixtures("unwarned")
@pytest.mark.parametrize(
    "pattern",
    [rw.Causal(), STREAMING, rw.SlidingWindow(3), rw.PerHead([rw.Causal()] * 4), rw.Causal().within(rw.Documents([8])), rw.Causal() & rw.KeyPadding(8), rw.LongNet([8], [1], causal=True)],
    ids=repr,
)  # fmt: skip
def test_decoding_at_the_first_position_warns_once(pattern: rw.Pattern) -> None:
    assert ends_at_query(pattern)
    with pytest.warns(UserWarning, match=re.escape("Pass q_offset='end' if the queries are the last tokens")) as seen:
        _call(pattern)
    assert seen[0].filename == __file__
    # a repeated warning would be an error by pytest's filter
    _call(rw.SlidingWindow(4), 3)


@pytest.mark.usefixtures("unwarned")
def test_longnet_attention_warns_too() -> None:
    x = Inputs.random(4, 8, heads=4)
    with pytest.warns(UserWarning, match="q_offset: got 0 by default"):
        rw.longnet_attention(x.q, x.k, x.v, segments=[8], rates=[1], causal=True)


@pytest.mark.usefixtures("unwarned")
def test_calls_that_mean_it_do_not_warn() -> None:
    x = Inputs.random(4, 8, batch=2, heads=4)
    for pattern in (rw.Full(), rw.Sinks(2), rw.SlidingWindow(3, 1), rw.Causal() | rw.Sinks(3), rw.LongNet([8], [1])):
        assert not ends_at_query(pattern)
        _call(pattern)
    # passed explicitly, aligned, or with keys that do not exist yet
    for offset in (0, torch.tensor(0), "end", 3):
        _call(q_offset=offset)
    _call(nq=8)
    _call(rw.Causal() & rw.KeyPadding(4))
    _call(rw.Causal() & rw.KeyPadding(torch.tensor([8, 4])))
    # calls that the library itself makes
    rw.attention_weights(x.q, x.k, rw.Causal())
    rw.hierarchical_attention(x.q, x.k, x.v, pool=2, top_k=1, window=2, causal=True)
    layer = rw.nn.MultiheadAttention(16, 4, batch_first=True, pattern=rw.Causal())
    inputs = torch.randn(2, 8, 16)
    layer(inputs[:, :3], inputs, inputs)
    packed = x.q[0].transpose(0, 1), x.k[0].transpose(0, 1), x.v[0].transpose(0, 1)
    rw.varlen_attention(*packed, [0, 1, 4], [0, 3, 8])
    cache = rw.PagedCache.empty(2, 16, 4, x.k.shape[3], page=16)
    cache.append(x.k, x.v)
    rw.paged_attention(x.q, cache)
    torch._dynamo.reset()
    torch.compile(lambda q: rw.attention(q, x.k, x.v, rw.Causal()), fullgraph=True, backend="eager")(x.q)


@pytest.mark.usefixtures("unwarned")
def test_tokens_before_heads_warn_once() -> None:
    q, k = torch.randn(1, 300, 8, 4), torch.randn(1, 300, 2, 4)
    with pytest.warns(UserWarning, match=re.escape("pass q.transpose(1, 2)")) as seen:
        rw.attention(q, k, k)
    assert seen[0].filename == __file__
    rw.attention(q, k, k)


@pytest.mark.usefixtures("unwarned")
@pytest.mark.parametrize(
    "shapes",
    [
        ((1, 128, 1, 4), (1, 128, 20, 4)),
        ((1, 512, 1, 4), (1, 8, 4, 4)),
        ((1, 128, 3, 4), (1, 128, 3, 4)),
        ((1, 256, 64, 4), (1, 256, 64, 4)),
    ],
)
def test_many_heads_do_not_warn(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    q, k = (torch.randn(shape) for shape in shapes)
    rw.attention(q, k, k)


# ---- keyword arguments of other libraries ----------------------------------------------------------------------------

UNKNOWN = [
    "attn_mask", "is_causal", "attention_mask", "key_padding_mask", "dropout_p", "causal", "window_size", "block_mask",
    "score_mod", "enable_gqa",
]  # fmt: skip


@pytest.mark.parametrize("name", UNKNOWN)
@pytest.mark.parametrize("function", [rw.attention, rw.attention_with_lse])
def test_arguments_of_other_libraries_name_what_takes_their_place(name: str, function: Callable[..., Any]) -> None:
    x = Inputs.random(8, heads=2)
    with pytest.raises(
        TypeError, match=rf"{name}: got an argument that {function.__name__}\(\) does not have; wanted"
    ) as error:
        function(x.q, x.k, x.v, **{name: None})
    assert "docs/migration.md" in str(error.value)


def test_other_keywords_are_refused_as_python_does() -> None:
    x = Inputs.random(8, heads=2)
    with pytest.raises(TypeError, match=r"attention\(\) got an unexpected keyword argument 'colour'"):
        rw.attention(x.q, x.k, x.v, colour=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="is_causal: got"):
        rw.attention(x.q, x.k, x.v, colour=1, is_causal=True)  # type: ignore[arg-type]


def test_signatures_show_neither_the_catch_nor_the_default() -> None:
    for function in (rw.attention, rw.attention_with_lse):
        parameters = inspect.signature(function).parameters
        assert "unknown" not in parameters
        assert repr(parameters["q_offset"].default) == "0"
        assert parameters["q_offset"].default == 0
    with warnings.catch_warnings(), pytest.raises(TypeError):
        inspect.signature(rw.attention).bind(1, 2, 3, is_causal=True)
