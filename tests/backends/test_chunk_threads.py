"""Chunks in threads: their order, their errors, and the number of threads of each operation."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from ringweave.backends.chunk_threads import in_order, undivided
from ringweave.integrations.flex_attention import flex_attention

CPU = torch.device("cpu")


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_chunks_are_in_order_and_each_is_computed_by_one_thread(threads: int) -> None:
    begun = threading.active_count()
    places: set[int] = set()

    def compute(chunk: int) -> tuple[int, int]:
        places.add(threading.get_ident())
        return chunk * chunk, torch.get_num_threads()

    found = []
    for chunk, (square, inside) in in_order(compute, iter(range(40)), CPU):
        assert inside == torch.get_num_threads() == 1
        found.append((chunk, square))
    assert found == [(chunk, chunk * chunk) for chunk in range(40)]
    assert torch.get_num_threads() == threads
    assert threading.active_count() == begun
    assert (threading.get_ident() in places) == (threads == 1)


def test_a_result_lives_until_the_consumer_drops_it(threads: int) -> None:
    """And at most as many others wait, or are computed, as there are threads."""
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()

    def compute(chunk: int) -> Tensor:
        made = torch.zeros(1)
        alive.add(made)
        return made

    for chunk, result in in_order(compute, iter(range(40)), CPU):
        last = weakref.ref(result)
        assert len(alive) <= threads + 1, chunk
        del result
        assert last() is None


def test_one_chunk_needs_no_thread(threads: int) -> None:
    assert list(in_order(lambda chunk: threading.get_ident(), [0], CPU)) == [(0, threading.get_ident())]
    assert list(in_order(lambda chunk: chunk, [], CPU)) == []
    assert torch.get_num_threads() == threads


def test_other_devices_and_modes_are_computed_in_this_thread() -> None:
    here = threading.get_ident()
    assert {place for _, place in in_order(lambda chunk: threading.get_ident(), range(4), torch.device("meta"))} == {
        here
    }
    with torch.device("cpu"):
        assert {place for _, place in in_order(lambda chunk: threading.get_ident(), range(4), CPU)} == {here}


@pytest.mark.parametrize("where", ["chunk", "source", "consumer"])
def test_an_error_ends_all_threads(threads: int, where: str) -> None:
    begun = threading.active_count()

    def chunks() -> Iterator[int]:
        yield from range(5)
        if where == "source":
            raise ZeroDivisionError
        yield from range(5, 40)

    def compute(chunk: int) -> int:
        return 1 // (where != "chunk" or chunk != 7)

    def consume() -> None:
        for chunk, _ in in_order(compute, chunks(), CPU):
            if where == "consumer" and chunk == 3:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        consume()
    assert torch.get_num_threads() == threads
    assert threading.active_count() == begun


def test_gradient_and_inference_modes_are_those_of_the_caller(threads: int) -> None:
    def modes(chunk: int) -> tuple[bool, bool]:
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    assert {found for _, found in in_order(modes, range(4), CPU)} == {(True, False)}
    with torch.no_grad():
        assert {found for _, found in in_order(modes, range(4), CPU)} == {(False, False)}
    with torch.inference_mode():
        assert {found for _, found in in_order(modes, range(4), CPU)} == {(False, True)}


def test_other_threads_keep_their_number() -> None:
    found: list[int] = []
    before = torch.get_num_threads()
    with undivided():
        other = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        other.start()
        other.join()
        assert torch.get_num_threads() == 1
    assert found == [before]
    assert torch.get_num_threads() == before


def test_a_score_function_has_the_same_bits_with_any_number_of_threads() -> None:
    """The sums of gradients of keys and captured tensors are in the order of chunks."""
    n, before = 1500, torch.get_num_threads()
    q, k, v = (torch.randn(2, 4, n, 16, requires_grad=True) for _ in range(3))
    table, gate = (torch.randn(n, requires_grad=True) for _ in range(2))

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.tanh(s) * table[j] + gate[i]

    results = []
    try:
        for number in (1, 2, 4):
            torch.set_num_threads(number)
            out, lse = flex_attention(q, k, v, score, return_lse=True)
            grads = torch.autograd.grad((out.square().sum() + lse.sum()), (q, k, v, table, gate))
            results.append((out, lse, *grads))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


def test_a_score_function_that_fails_at_a_chunk_raises_its_error() -> None:
    """In forward and in backward, and no thread is left."""
    n, begun = 1500, threading.active_count()
    q = torch.randn(1, 2, n, 16, requires_grad=True)
    table = torch.randn(n - 100)
    with pytest.raises((IndexError, RuntimeError)):
        flex_attention(q, q, q, lambda s, b, h, i, j: torch.tanh(s) * table[j])
    assert threading.active_count() == begun
