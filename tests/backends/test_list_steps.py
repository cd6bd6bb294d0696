"""Decoding steps over lists of keys: checked and planned in the kernel, with the bits and the errors of other calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import ringweave as rw
from ringweave import program_cache
from ringweave.backends import cpu, decoding
from ringweave.backends.decoding import Steps
from ringweave.cache import PROGRAMS
from ringweave.environment import CPU_VARIANT
from ringweave.errors import PatternError
from ringweave.patterns import Pattern

pytestmark = pytest.mark.skipif(cpu.module() is None, reason="the native kernel was not built")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
RELATIONS: dict[str, Callable[[Pattern], Pattern]] = {
    "lists": lambda lists: lists,
    "causal": lambda lists: lists & rw.Causal(),
    "causal first": lambda lists: rw.Causal() & lists,
    "window": lambda lists: lists & (rw.SlidingWindow(90) | rw.Sinks(5)) & rw.Causal(),
    "residues": lambda lists: lists & rw.Strided(3),
    "holes": lambda lists: lists & ~rw.SlidingWindow(40),
    "segments": lambda lists: rw.Segments(64) & lists,
    "none": lambda lists: lists & (rw.Full() & ~rw.Full()),
}


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Record for each prepared step with lists whether the kernel has computed it."""
    PROGRAMS.clear()
    steps, forward = list[bool](), Steps.forward

    def recorded(self: Steps, *tensors: Any, **options: Any) -> Any:
        found = forward(self, *tensors, **options)
        if options.get("lists") is not None:
            steps.append(found is not None)
        return found

    monkeypatch.setattr(decoding.Steps, "forward", recorded)
    yield steps
    PROGRAMS.clear()


class Watched(TorchDispatchMode):
    """A mode that changes nothing; calls under it take the general path."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def inputs(
    heads: int, kv_heads: int, keys: int, *, batch: int = 1, dims: tuple[int, int] = (40, 24), dtype: Any = None
) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (batch, heads, 1, dims[0]), (batch, kv_heads, keys, dims[0]), (batch, kv_heads, keys, dims[1])
    q, k, v = (torch.randn(shape).to(dtype or torch.float32) for shape in shapes)
    return q, k, v


def chosen(*lead: int, most: int, keys: int, block_size: int = 1, seed: int = 0) -> Tensor:
    """Return lists (..., 1, most) in any order, with pads and repeats."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, -(-keys // block_size), (*lead, 1, most), generator=generator)


def step(x: tuple[Tensor, Tensor, Tensor], pattern: Pattern, **options: Any) -> rw.AttentionOutput:
    return rw.attention_with_lse(*x, pattern, q_offset="end", **options)


def same(x: tuple[Tensor, Tensor, Tensor], pattern: Pattern) -> None:
    """Check that a step has the bits of the general path, under both names of the last position."""
    with Watched():
        wanted = step(x, pattern)
    for got in (step(x, pattern), rw.attention_with_lse(*x, pattern, q_offset=x[1].shape[2] - 1)):
        assert torch.equal(got.out, wanted.out)
        assert torch.equal(got.lse, wanted.lse)


@pytest.mark.parametrize("variant", [] if cpu.module() is None else cpu.module().variants())  # type: ignore[union-attr]
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [1, 3, 16, 24, 48, 64, 128])
def test_bits_on_every_variant(
    block_size: int, dtype: torch.dtype, variant: str, taken: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lists for all, for each batch element and for each key head; few rows and many; blocks cut by the last key."""
    monkeypatch.setenv(CPU_VARIANT, variant)
    for heads, kv_heads, batch in ((16, 1, 1), (6, 2, 2), (3, 1, 2)):
        x = inputs(heads, kv_heads, 301, batch=batch, dtype=dtype)
        for lead, of in (((), "query"), ((1,), "query"), ((batch, 1), "query"), ((batch, kv_heads), "kv")):
            lists = chosen(*lead, most=40 if block_size < 16 else 4, keys=301, block_size=block_size)
            pattern = rw.Selected(lists, block_size, heads=of) & rw.Causal()
            step(x, pattern)
            taken.clear()
            same(x, pattern)
            assert taken == [True, True]


@pytest.mark.parametrize("block_size", [1, 32])
@pytest.mark.parametrize("name", RELATIONS)
def test_relations_filter_lists(name: str, block_size: int, taken: list[bool]) -> None:
    for keys, seeds in ((130, 3), (131, 3), (40, 3), (9000, 1)):
        x = inputs(8, 2, keys, batch=2)
        for seed in range(seeds):
            lists = chosen(2, 1, most=9, keys=keys, block_size=block_size, seed=seed)
            pattern = RELATIONS[name](rw.Selected(lists, block_size))
            same(x, pattern)
            torch.testing.assert_close(step(x, pattern).out, step(x, pattern, backend="reference").out)
    # only a kind's first step of all keeps it
    assert all(taken)
    assert len(taken) == 3 * 10 - 1


def test_the_definition(taken: list[bool]) -> None:
    """Latent keys of many heads: the values are channels of the keys, and lists are long enough to be split."""
    # more heads than a vector has lanes, and not a multiple; the reference repeats the keys for each head
    q, k, _ = inputs(20, 1, 3000, dims=(576, 512))
    for seed in range(2):
        pattern = rw.Selected(chosen(most=2048, keys=3000, seed=seed)) & rw.Causal()
        got = rw.attention(q, k, k[..., :512], pattern, q_offset="end")
    wanted = rw.attention(q, k, k[..., :512], pattern, q_offset="end", backend="reference")
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    # the first step of its kind takes the general path
    assert taken == [True]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_any_layout_of_indices(dtype: torch.dtype, taken: list[bool]) -> None:
    """Lists in other types and strides; a write to the caller's tensor changes nothing, and a new list is read."""
    x, whole = inputs(4, 2, 70, batch=2), torch.randint(-1, 70, (7, 2, 2, 20)).to(dtype)
    for lists in (
        whole.permute(1, 2, 0, 3)[:, :, 3:4, ::2],
        whole[5:6, :, 1:2, :9],
        whole[0, 0, :1].expand(2, 1, 1, 20),
    ):
        pattern = rw.Selected(lists, heads="kv" if lists.shape[1] == 2 else "query")
        same(x, pattern)
        before, wanted = step(x, pattern), rw.Selected(lists.clone(), heads="kv" if lists.shape[1] == 2 else "query")
        whole.fill_(0)
        assert torch.equal(step(x, pattern).out, before.out)
        assert torch.equal(step(x, wanted).out, before.out)
        whole.copy_(torch.randint(-1, 70, whole.shape))
    assert all(taken)
    assert len(taken) > 9


@pytest.mark.parametrize("block_size", [1, 16])
def test_lists_are_checked_in_each_step(block_size: int, taken: list[bool]) -> None:
    """An index out of range and a list of other queries raise what a first call raises; later steps are right."""
    x, blocks = inputs(4, 1, 100), -(-100 // block_size)
    good = rw.Selected(torch.tensor([[3, 1, -1, 3, blocks - 1]]), block_size) & rw.Causal()
    wanted = step(x, good)
    for wrong in ([[0, blocks, 1, 2, 3]], [[0, -2, 1, 2, 3]], [[2**31 - 1, 0, 0, 0, 0]], [[0, -(2**40), 1, 2, 3]]):
        pattern = rw.Selected(torch.tensor(wrong), block_size) & rw.Causal()
        with pytest.raises(PatternError) as first, Watched():
            step(x, pattern)
        with pytest.raises(PatternError, match="indices") as later:
            step(x, pattern)
        assert str(later.value) == str(first.value)
        assert torch.equal(step(x, good).out, wanted.out)
    with pytest.raises(PatternError, match="2 queries"):
        step(x, rw.Selected(torch.tensor([[0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]), block_size) & rw.Causal())
    with pytest.raises(PatternError, match="key_blocks"):
        step(x, rw.Selected(torch.tensor([[0, 1, 2, 3, 0]]), block_size, key_blocks=blocks + 1) & rw.Causal())
    counted = rw.Selected(torch.tensor([[3, 1, -1, 3, blocks - 1]]), block_size, key_blocks=blocks) & rw.Causal()
    assert torch.equal(step(x, counted).out, wanted.out)
    # fewer keys: the same list is out of range
    with pytest.raises(PatternError, match="indices"):
        rw.attention(x[0], x[1][:, :, :50], x[2][:, :, :50], good, q_offset="end")


def test_an_empty_list_attends_nothing(taken: list[bool]) -> None:
    x = inputs(4, 1, 50)
    for lists in (torch.full((1, 3), -1), torch.zeros(1, 0, dtype=torch.int64), torch.tensor([[-1, 2, -1]])):
        pattern = rw.Selected(lists)
        same(x, pattern)
        assert (step(x, pattern).out.abs().sum() > 0) == bool((lists >= 0).any())
    assert taken.count(True) == len(taken) > 3


@pytest.mark.parametrize("value", [torch.inf, torch.nan, 3e38])
@pytest.mark.parametrize("block_size", [1, 16])
def test_numbers_that_are_not_finite(block_size: int, value: float, taken: list[bool]) -> None:
    """Attended ones spread as in the definition, and keys outside of the list are not read."""
    q, k, v = inputs(8, 2, 64)
    lists = torch.tensor([[1, 2]])
    pattern = rw.Selected(lists, block_size)
    step((q, k, v), pattern)
    for side in (k, v):
        kept = side.clone()
        side[:, :, 63] = value
        same((q, k, v), pattern)
        assert step((q, k, v), pattern).out.isfinite().all()
        side[:, 1, 2] = value
        side[:, 1, 40] = value
        got, wanted = step((q, k, v), pattern), step((q, k, v), pattern, backend="reference")
        torch.testing.assert_close(got.out, wanted.out, equal_nan=True, rtol=1e-4, atol=1e-5)
        side.copy_(kept)
    assert True in taken


def test_sinks_threads_and_strides(taken: list[bool]) -> None:
    """Learned sinks join, threads and strides change no bits, and channels that are not adjacent are copied."""
    x = inputs(16, 2, 2000, batch=2)
    pattern = rw.Selected(chosen(2, 1, most=900, keys=2000)) & rw.Causal()
    wanted = step(x, pattern)
    sinks = torch.randn(16)
    step(x, pattern, sink_logits=sinks)
    with Watched():
        joined = step(x, pattern, sink_logits=sinks)
    assert torch.equal(step(x, pattern, sink_logits=sinks).out, joined.out)
    q, k, v = x
    strided = q.transpose(1, 2).contiguous().transpose(1, 2), k.transpose(1, 2).contiguous().transpose(1, 2), v
    apart = q.mT.contiguous().mT, k, v.mT.contiguous().mT
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            for each in (x, strided, apart):
                for _ in range(2):
                    assert torch.equal(step(each, pattern).out, wanted.out)
    finally:
        torch.set_num_threads(threads)
    assert taken.count(False) > 0  # apart
    assert taken.count(True) > taken.count(False)


OTHERS: dict[str, Callable[[Pattern], Pattern]] = {
    "a window beside": lambda lists: lists & rw.Causal() | rw.SlidingWindow(9) & rw.Causal(),
    "two lists": lambda lists: lists & rw.Selected(torch.arange(30)[None]),
    "padding": lambda lists: lists & rw.KeyPadding([31, 64]),
    "documents": lambda lists: lists & rw.Documents([40, 24]),
    "a function": lambda lists: lists & rw.from_mask_mod(lambda b, h, q, k: k % 3 != b),
    "heads": lambda lists: lists & rw.PerHead([rw.Causal()] * 4 + [rw.SlidingWindow(20)] * 4),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_patterns_and_calls(name: str, taken: list[bool]) -> None:
    """What the kernel cannot plan takes the general path, also after a step of lists of the same shape."""
    x = inputs(8, 2, 64, batch=2)
    for seed in range(3):
        lists = rw.Selected(chosen(2, 1, most=9, keys=64, seed=seed))
        step(x, lists)
        pattern = OTHERS[name](lists)
        torch.testing.assert_close(step(x, pattern).out, step(x, pattern, backend="reference").out)
        for options in (
            {"terms": rw.terms.Softcap(5.0)},
            {"k_offset": 3},
            {"scale": 0.5},
            {"backend": "dense_batched"},
        ):
            got, wanted = step(x, lists, **options), step(x, lists, **options | {"backend": "reference"})
            torch.testing.assert_close(got.out, wanted.out)
        leaves = tuple(side.clone().requires_grad_() for side in x)
        got, wanted = (rw.attention(*leaves, lists, q_offset="end", backend=each) for each in ("auto", "reference"))
        for one, other in zip(*(torch.autograd.grad(out.sum(), leaves) for out in (got, wanted)), strict=True):
            torch.testing.assert_close(one, other)
        mapped = torch.vmap(partial(rw.attention, pattern=lists, q_offset="end"), (0, None, None))
        torch.testing.assert_close(mapped(torch.stack([x[0]] * 2), *x[1:])[1], step(x, lists).out)


@pytest.mark.parametrize("first", [True, False])
def test_a_function_that_is_a_pattern(first: bool, taken: list[bool]) -> None:
    """A mask function is recognised in each call; the tensor that it captures is not taken for the lists."""
    x, back = inputs(4, 2, 64, batch=2), torch.tensor([20], dtype=torch.int32)

    def near(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k >= q - back[0]) & (k <= q)

    for seed in range(4):
        function = rw.from_mask_mod(near)
        lists = rw.Selected(chosen(2, 1, most=9, keys=64, seed=seed))
        for _ in range(2):
            pattern = function & lists if first else lists & function
            torch.testing.assert_close(step(x, pattern).out, step(x, pattern, backend="reference").out)
        back += 7


def test_nothing_of_a_list_is_kept(taken: list[bool]) -> None:
    """New lists of one length share one program; a list of another length has a program of its own."""
    for keys in range(200, 230):
        x = inputs(4, 1, keys)
        for most in (5, 6):
            step(x, rw.Selected(chosen(most=most, keys=keys, seed=keys)) & rw.Causal())
        if keys == 201:
            held = len(PROGRAMS)
    assert len(PROGRAMS) == held
    assert len(taken) == 58
    assert program_cache.PROGRAMS is PROGRAMS
