"""A repeated call over lists of keys keeps its program: only what the lists contain is checked and planned again."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import ringweave as rw
from ringweave import api, program
from ringweave.errors import PatternError
from ringweave.merge import with_sinks
from ringweave.patterns import Pattern

from ..operators import by_operators
from .test_selected import chosen

pytest.importorskip("ringweave._cpu", exc_type=ImportError)

BATCH, HEADS, KV_HEADS, NQ, NK = 2, 4, 2, 40, 60
FIRST = NK - NQ
DOCUMENTS = rw.Documents([25, 35])
BLOCKS = rw.BlockTable(torch.ones(15, 15, dtype=torch.bool).tril(), 4)

#: Patterns of lists, most of which filter the lists or unite them with other keys.
PATTERNS: dict[str, Callable[[rw.Selected], Pattern]] = {
    "alone": lambda lists: lists,
    "causal": lambda lists: lists & rw.Causal(),
    "strided": lambda lists: lists & rw.Causal() & ~rw.Strided(3),
    "rest": lambda lists: ~lists & rw.Causal(),
    "window": lambda lists: lists & rw.Causal() | rw.SlidingWindow(5, 0),
    "two lists": lambda lists: lists | rw.Selected(chosen(NQ, 2, nk=NK, block_size=20), 20),
    "documents": lambda lists: lists & DOCUMENTS,
    "equal documents": lambda lists: lists & rw.Documents([25, 35]),
    "blocks": lambda lists: lists & BLOCKS,
    "per head": lambda lists: lists & rw.PerHead([rw.Causal(), rw.Full(), rw.Strided(2), rw.Causal()]),
    "function": lambda lists: lists & rw.from_mask_mod(lambda b, h, q, k: k <= q),
}
#: Leading sides of the lists, and the heads that they are for.
LEADS = [
    ((), "query"),
    ((HEADS,), "query"),
    ((BATCH, 1), "query"),
    ((BATCH, KV_HEADS), "kv"),
    ((BATCH, HEADS), "query"),
]


def tensors(grad: bool = True, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = (HEADS, NQ), (KV_HEADS, NK), (KV_HEADS, NK)
    return [torch.randn(BATCH, *size, 16, generator=generator).requires_grad_(grad) for size in sizes]


def lists_of(seed: int, lead: tuple[int, ...] = (), heads: str = "query", block_size: int = 1) -> rw.Selected:
    return rw.Selected(chosen(*lead, NQ, 5, nk=NK, block_size=block_size, seed=seed), block_size, heads=heads)


def results(x: list[Tensor], pattern: Pattern, attend: Callable[..., rw.AttentionOutput]) -> list[Tensor]:
    out, lse = attend(*x, pattern, q_offset=FIRST)
    if not out.requires_grad:
        return [out, lse]
    return [out, lse, *torch.autograd.grad((out.sum() + lse[torch.isfinite(lse)].sum()), x)]


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function after which a call that is checked or split into branches again fails."""

    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("the call is checked or compiled again")

    def stop() -> None:
        monkeypatch.setattr(api, "checked", refuse)
        monkeypatch.setattr(program, "compiled", refuse)
        monkeypatch.setattr("ringweave.call.pattern_of", refuse)

    return stop


@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("name", PATTERNS)
def test_a_repeated_call_has_the_results_of_a_first_one(name: str, block_size: int) -> None:
    """The results of other lists of the same shape, and the gradients, are those of the operators, bit for bit."""
    for lead, heads in LEADS:
        for grad in (True, False):
            x = tensors(grad)
            for seed in range(3):
                pattern = PATTERNS[name](lists_of(seed, lead, heads, block_size))
                for got, want in zip(
                    results(x, pattern, rw.attention_with_lse), results(x, pattern, by_operators), strict=True
                ):
                    assert torch.equal(got, want)


@pytest.mark.parametrize("name", [name for name in PATTERNS if name != "function"])
def test_other_lists_keep_the_program(name: str, kept: Callable[[], None]) -> None:
    x, lead = tensors(), (BATCH, 1)
    want = results(x, PATTERNS[name](lists_of(9, lead)), by_operators)
    results(x, PATTERNS[name](lists_of(0, lead)), rw.attention_with_lse)
    kept()
    got = results(x, PATTERNS[name](lists_of(9, lead)), rw.attention_with_lse)
    assert all(map(torch.equal, got, want))


def test_gradients_are_a_kind_of_their_own(kept: Callable[[], None]) -> None:
    """A call without gradients after one with gradients, in any order, has the results of its kind."""
    x, patterns = tensors(), [lists_of(seed) & rw.Causal() for seed in range(3)]
    wanted = [results(x, pattern, by_operators) for pattern in patterns]
    for pattern, want in zip(patterns, wanted, strict=True):
        for _ in range(2):
            with torch.no_grad():
                out, lse = rw.attention_with_lse(*x, pattern, q_offset=FIRST)
            assert not out.requires_grad
            assert torch.equal(out, want[0])
            assert torch.equal(lse, want[1])
            assert all(map(torch.equal, results(x, pattern, rw.attention_with_lse), want))
        kept()


@pytest.mark.parametrize("backend", ["auto", "reference", "dense_batched", "gather", "cpu", "torch_sparse"])
@pytest.mark.parametrize("index", [-2, NK, 2**40])
def test_a_wrong_index_is_refused_as_in_a_first_call(index: int, backend: str) -> None:
    for grad in (True, False):
        q, k, v = tensors(grad and backend != "torch_sparse")
        texts = []
        for first in (True, False):
            rw.memory.trim()
            if not first:
                rw.attention(q, k, v, lists_of(0), q_offset=FIRST, backend=backend)
            wrong = chosen(NQ, 5, nk=NK, seed=1)
            wrong[7, 3] = index
            with pytest.raises(PatternError, match="indices: got") as error:
                rw.attention(q, k, v, rw.Selected(wrong), q_offset=FIRST, backend=backend)
            texts.append(str(error.value))
        assert texts[0] == texts[1]
        assert rw.attention(q, k, v, lists_of(2), q_offset=FIRST, backend=backend).isfinite().all()


@pytest.mark.parametrize(
    "options",
    [
        {"terms": rw.Softcap(5.0)}, {"terms": (rw.ALiBi.of_heads(HEADS), rw.Softcap(9.0))}, {"scale": 0.3},
        {"k_offset": 7}, {"q_offset": "end"}, {"q_offset": torch.tensor(FIRST)},
        {"on_oom": "raise"}, {"backend": "gather"}, {"backend": "dense_batched"}, {"backend": "reference"},
        {"precision": rw.Precision(kv=torch.int8)},
    ],
    ids=str,
)  # fmt: skip
def test_options(options: dict[str, object]) -> None:
    x = tensors("precision" not in options)
    given = {"q_offset": FIRST} | options
    for seed in range(3):
        pattern = lists_of(seed) & rw.Causal()
        found = []
        for attend in (rw.attention_with_lse, by_operators):
            out, lse = attend(*x, pattern, **given)
            found.append([out, lse, *(torch.autograd.grad(out.sum(), x) if out.requires_grad else ())])
        assert all(map(torch.equal, *found))


def test_learned_sinks_join_the_result() -> None:
    x, logits = tensors(), torch.randn(HEADS, requires_grad=True)
    for seed in range(3):
        out, lse = by_operators(*x, lists_of(seed), q_offset=FIRST)
        want = with_sinks(out, lse, logits)
        got = rw.attention_with_lse(*x, lists_of(seed), q_offset=FIRST, sink_logits=logits)
        assert all(map(torch.equal, got, want))
        assert all(map(torch.equal, *(torch.autograd.grad(each[0].sum(), (*x, logits)) for each in (got, want))))


def test_learned_terms_and_dropout() -> None:
    """Tables of terms get their gradients, and each call draws a seed."""
    x, bias = tensors(), torch.randn(1, HEADS, NQ, NK, requires_grad=True)
    for seed in range(3):
        found = []
        for attend in (rw.attention_with_lse, by_operators):
            torch.manual_seed(seed)
            pattern = lists_of(seed) & rw.Causal()
            out = attend(*x, pattern, q_offset=FIRST, terms=rw.Bias(bias), dropout=0.3)[0]
            found.append([out, *torch.autograd.grad(out.sum(), (*x, bias))])
        assert all(map(torch.equal, *found))


def test_a_table_that_is_written_is_read_again() -> None:
    """A write to a pattern's own table is seen by the next call, and refused between a call and its backward."""
    x, pattern = tensors(), lists_of(0)
    for seed in range(4):
        (table,) = pattern.tables
        table.copy_(lists_of(seed).tables[0])
        want = results(x, lists_of(seed), by_operators)
        assert all(map(torch.equal, results(x, pattern, rw.attention_with_lse), want))
    out = rw.attention(*x, pattern, q_offset=FIRST)
    table.fill_(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_bounds_that_are_written_are_read_again() -> None:
    """Padding follows its tensor, so a call with it is checked each time, and in backward."""
    x, lengths = tensors(), torch.tensor([NK, NK])
    padding = rw.KeyPadding(lengths)
    for length in (NK, 30, 45):
        lengths.fill_(length)
        pattern = lists_of(length) & padding
        want = results(x, lists_of(length) & rw.KeyPadding(length), by_operators)
        assert all(map(torch.equal, results(x, pattern, rw.attention_with_lse), want))
    out = rw.attention(*x, lists_of(1) & padding, q_offset=FIRST)
    lengths.fill_(7)
    with pytest.raises(PatternError, match="bounds that were changed"):
        out.sum().backward()


def test_a_program_keeps_no_lists_of_its_calls() -> None:
    """The first lists alone stay with the program: later ones go with their pattern, its plans and its outputs."""
    x = tensors(grad=False)
    rw.attention(*x, lists_of(0), q_offset=FIRST)
    for number in (1, 2):
        pattern = lists_of(number)
        rw.attention(*x, pattern, q_offset=FIRST)
    (table,) = pattern.tables
    place = table.untyped_storage()._weak_ref()
    del pattern, table
    rw.memory.trim()
    assert torch.UntypedStorage._expired(place)
    torch.UntypedStorage._free_weak_ref(place)


def test_threads_call_with_lists_of_their_own() -> None:
    x = tensors()
    patterns = [lists_of(seed) & rw.Causal() for seed in range(8)]
    want = [results(x, pattern, by_operators) for pattern in patterns]
    failed: list[int] = []

    def work(number: int) -> None:
        for turn in range(20):
            at = (number + turn) % len(patterns)
            if not all(map(torch.equal, results(x, lists_of(at) & rw.Causal(), rw.attention_with_lse), want[at])):
                failed.append(at)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


@pytest.mark.parametrize(
    "pattern",
    [
        rw.Documents([NK - 1, 1]), rw.KeyPadding(torch.tensor([NK, NK - 3])), BLOCKS & rw.Documents([25, 35]),
        rw.BlockTable(torch.ones(1, 15, dtype=torch.bool), (NK, 4)), rw.Tree([-1, 0], [25, 35]),
        rw.TokenMask(lambda b, h, q, k: k <= q),
    ],
    ids=lambda pattern: repr(pattern)[:30],
)  # fmt: skip
def test_a_step_of_another_pattern_with_tables_is_no_call_over_lists(pattern: Pattern) -> None:
    q, k, v = (x.detach() for x in tensors())
    for _ in range(3):
        out = rw.attention(q[:, :, -1:], k, v, pattern, q_offset="end")
        wanted = rw.attention(q[:, :, -1:], k, v, pattern, q_offset="end", backend="reference")
        torch.testing.assert_close(out, wanted)
