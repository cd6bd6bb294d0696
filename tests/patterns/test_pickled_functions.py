"""A pickle of a function's pattern holds its operations as text, and its tensors."""

from __future__ import annotations

import copy
import io
import multiprocessing.reduction
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import ringweave as rw
from ringweave.patterns import Pattern
from ringweave.patterns.algebra import PerHead
from ringweave.trace.text import TextFunction

N = 48
WIDTH = 5
IDS = torch.arange(N) // 7


def in_window(b, h, q, k):  # type: ignore[no-untyped-def]
    return (q - k).abs() <= WIDTH


def by_value(b, h, q, k):  # type: ignore[no-untyped-def]
    return torch.from_numpy(q.numpy() >= k.numpy() + WIDTH)


def by_type(b, h, q, k):  # type: ignore[no-untyped-def]
    return q >= k if isinstance(q, torch.Tensor) else q <= k


def again(pattern: Pattern) -> Pattern:
    loaded = pickle.loads(pickle.dumps(pattern))
    assert isinstance(loaded, Pattern)
    return loaded


def pairs(pattern: Pattern) -> torch.Tensor:
    return pattern.to_dense(N, heads=2, batch=2)


def documents(ids: torch.Tensor) -> rw.TokenMask:
    return rw.from_mask_mod(lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k))


@pytest.mark.parametrize(
    "made",
    [
        lambda f: f,
        lambda f: f & rw.Causal(),
        lambda f: ~f | rw.Sinks(2),
        lambda f: rw.PerHead([f, ~f]),
        lambda f: f & rw.TokenMask(lambda b, h, q, k: (q + 2 * k) % 5 > 0, batch=1),
        lambda f: rw.TokenMask(lambda b, h, q, k: (q + k + b + h) % 3 > 0, batch=1, head=1),
    ],
)
def test_functions_without_a_name_are_pickled(made: Callable[[Pattern], Pattern]) -> None:
    pattern = made(documents(IDS.clone()))
    loaded = again(pattern)
    assert loaded == pattern == again(loaded)
    assert loaded.spec == pattern.spec
    assert torch.equal(pairs(loaded), pairs(pattern))
    assert repr(loaded) == repr(pattern)
    assert copy.deepcopy(loaded) is loaded


def test_another_process_loads_them() -> None:
    """The functions do not exist there; the program sees the copy's tensors only."""
    reach, ids = 3, IDS.clone()
    pattern = rw.from_mask_mod(lambda b, h, q, k: (ids[q] == ids[k]) & (q - k <= reach)) & rw.Causal()
    program = (
        "import pickle, sys, torch, ringweave as rw\n"
        "pattern = pickle.load(sys.stdin.buffer)\n"
        f"q = torch.ones(1, 1, {N}, 8)\n"
        "rw.attention(q, q, q, pattern)\n"
        f"sys.stdout.buffer.write(pickle.dumps((pattern.to_dense({N}), pattern)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], input=pickle.dumps(pattern), capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    found, returned = pickle.loads(done.stdout)
    assert torch.equal(found, pattern.to_dense(N))
    assert returned == pattern


def test_the_copy_keeps_the_values_of_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function of a module and a closure have one rule."""
    ids, reach = IDS.clone(), [5]
    patterns = [
        rw.from_mask_mod(in_window),
        rw.from_mask_mod(lambda b, h, q, k: (ids[q] == ids[k]) & (q - k <= 9)),
        rw.from_mask_mod(lambda b, h, q, k: q - k <= reach[0]),
    ]
    copies = [(pattern, again(pattern), pairs(pattern)) for pattern in patterns]
    monkeypatch.setattr(sys.modules[__name__], "WIDTH", 1)
    reach[0] = 2
    ids.add_(torch.arange(N) // 3)
    for pattern, loaded, before in copies:
        assert torch.equal(pairs(loaded), before)
        assert not torch.equal(pairs(pattern), before)
        assert torch.equal(pairs(again(loaded)), before)
        assert torch.equal(pairs(again(pattern)), pairs(pattern))


def test_torch_saves_them() -> None:
    ids = IDS.clone()
    file = io.BytesIO()
    torch.save({"pattern": documents(ids) & rw.SlidingWindow(9), "ids": ids}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)["pattern"]
    assert torch.equal(pairs(loaded), pairs(documents(ids) & rw.SlidingWindow(9)))


def test_a_tensor_is_pickled_once() -> None:
    """By several patterns of it too, and alone: a view does not carry the rest of its storage."""
    large = torch.arange(2**20) // 100
    pattern = documents(large)
    size = len(pickle.dumps(pattern))
    assert large.nbytes < size < large.nbytes + 2000
    assert len(again(pattern).tables) == 1
    assert len(pickle.dumps(rw.PerHead([pattern, ~pattern, pattern & rw.SlidingWindow(5)]))) < size + 2000
    view = rw.from_mask_mod(lambda b, h, q, k, part=large[5 : 5 + N]: part[q] == part[k])
    assert len(pickle.dumps(view)) < 4000
    assert again(view) == view


def test_an_expanded_tensor_stays_small() -> None:
    table = torch.zeros(1, dtype=torch.int64).expand(2**20)
    pattern = rw.from_mask_mod(lambda b, h, q, k: table[q] == table[k])
    assert len(pickle.dumps(pattern)) < 2000
    assert again(pattern) == pattern


def test_queues_share_the_tensors() -> None:
    """torch.multiprocessing pickles no contents. The copy follows writes to the memory, as the pattern does."""
    ids = IDS.clone()
    pattern = documents(ids)
    loaded = pickle.loads(multiprocessing.reduction.ForkingPickler.dumps(pattern))
    for _ in range(2):
        assert torch.equal(pairs(loaded), pairs(pattern))
        ids.add_(torch.arange(N) // 3)


def test_a_block_mask_of_a_lambda() -> None:
    ids = torch.arange(256) // 70
    mask = create_block_mask(
        lambda b, h, q, k: ((ids[q] == ids[k]) | (q * k % 5 == 1)) & (q >= k), 1, 1, 256, 256, "cpu"
    )
    pattern = rw.from_block_mask(mask)
    assert torch.equal(again(pattern).to_dense(256), pattern.to_dense(256))


def test_tensors_that_require_gradients() -> None:
    """The copy has leaves of their values, by which its caches know it as they know the function."""
    module = torch.nn.Embedding(4, 3)
    hidden = module.weight * 2
    pattern = rw.from_mask_mod(lambda b, h, q, k: (module.weight[h, 0] > 0) & (hidden[b, 1] < q - k))
    loaded = again(pattern)
    assert loaded == pattern
    assert isinstance(loaded, rw.TokenMask)
    assert isinstance(loaded.fn, TextFunction)
    assert all(x.requires_grad and x.is_leaf for x in loaded.fn.tensors)
    assert torch.equal(pairs(loaded), pairs(pattern))


def test_tables_that_are_short() -> None:
    """A function is compared with its text at pairs that its tables have."""
    for size in (64, 9, 1):
        table = torch.arange(size)
        pattern = rw.from_mask_mod(lambda b, h, q, k, table=table: table[b] + table[q] >= table[k])
        assert torch.equal(again(pattern).to_dense(size), pattern.to_dense(size))


def test_functions_that_are_no_text_are_pickled_themselves() -> None:
    """One that needs a value, and one that computes other pairs for tensors than for symbols."""
    for pattern in (rw.TokenMask(by_value), rw.TokenMask(by_value, tables=[IDS], head=1), rw.TokenMask(by_type)):
        loaded = again(pattern)
        assert isinstance(loaded, rw.TokenMask)
        assert loaded.fn is pattern.fn
        assert repr(loaded) == repr(pattern)
        assert torch.equal(pairs(loaded), pairs(pattern))
    for function in (lambda b, h, q, k: q >= k if q > 3 else k > q, lambda b, h, q, k: torch.ops.aten.sub(q, k) > 0):
        with pytest.raises((pickle.PicklingError, AttributeError)):
            pickle.dumps(rw.TokenMask(function) & rw.Causal())


def test_a_function_of_symbols_alone_is_never_pickled_as_its_graph() -> None:
    calls: list[Any] = []

    def typed(b, h, q, k):  # type: ignore[no-untyped-def]
        calls.append(q)
        return q >= k if isinstance(q, torch.Tensor) else q <= k

    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(rw.TokenMask(typed))
    assert any(isinstance(q, torch.Tensor) for q in calls)


def test_the_default_dtype_is_that_of_the_caller() -> None:
    """As it is for the function."""
    function = lambda b, h, q, k: q / 7 * 1.1 >= k / 7 * 1.1 + 0.1  # noqa: E731
    pattern = rw.from_mask_mod(function)
    loaded = again(pattern)
    try:
        torch.set_default_dtype(torch.bfloat16)
        assert torch.equal(pairs(loaded), pairs(rw.from_mask_mod(function)))
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(pairs(loaded), pairs(pattern))


def test_loaded_functions_in_calls() -> None:
    """Eager and compiled calls, gradients, and the head of a call with several."""
    ids = IDS.clone()
    pattern = rw.from_mask_mod(lambda b, h, q, k: ((ids[q] + ids[k] + h) * k % 3 > 0) & (q >= k)) | rw.SlidingWindow(0)
    loaded = again(pattern)
    q = torch.randn(1, 2, N, 8, requires_grad=True)
    want = rw.attention(q, q, q, pattern)
    (grad,) = torch.autograd.grad(want.sum(), q)
    got = rw.attention(q, q, q, loaded)
    assert torch.equal(got, want)
    assert torch.equal(torch.autograd.grad(got.sum(), q)[0], grad)
    compiled = torch.compile(lambda q: rw.attention(q, q, q, loaded), fullgraph=True, backend="eager")
    assert torch.equal(compiled(q), want)
    shards = [again(pattern.shard(rank, 2, heads=2)) for rank in range(2)]
    assert isinstance(PerHead([each.select(0, 0) for each in shards]), Pattern)
    assert torch.equal(torch.cat([each.to_dense(N) for each in shards], 1), pattern.to_dense(N, heads=2))
