"""Functions as patterns: a call computes the graph of a function, with the tensors that the graph reads."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import math
import operator
import pickle
import threading
import types
import weakref
from collections.abc import Callable
from operator import ge
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo.testing
from torch import where

import ringweave as rw
from ringweave.errors import PatternError, ShapeError
from ringweave.patterns import Pattern
from ringweave.patterns.recorded import recorded
from ringweave.plan import from_pattern, pattern_of, plan_cache
from ringweave.trace.vmapped import ScalarIndices

from ..trace.masks import masks

N = 40


def even(b, h, q, k):  # type: ignore[no-untyped-def]
    return k % 2 == 0


def results(pattern: Pattern) -> torch.Tensor:
    """Return the relation that attention computes: the non-zero weights of equal scores."""
    with torch.no_grad():
        zero = torch.zeros(1, 1, N, 8)
        return rw.attention(zero, zero, torch.eye(N)[None, None], pattern)[0, 0] > 0


def follows(pattern: Pattern, want: Callable[[], torch.Tensor]) -> None:
    expected = want() & torch.ones_like(Q - K, dtype=torch.bool)
    assert torch.equal(results(pattern), expected)
    assert torch.equal(pattern.plan(N).to_dense()[0, 0], expected)


Q, K = torch.arange(N)[:, None], torch.arange(N)[None]
width = 3
module = types.ModuleType("settings")


def test_equal_functions_are_equal_patterns() -> None:
    assert rw.TokenMask(even) == rw.TokenMask(even)
    assert rw.TokenMask(even) != rw.TokenMask(even, head=1)
    assert repr(rw.TokenMask(even)) == "TokenMask(even)"
    assert repr(rw.TokenMask(even, head=1)) == "TokenMask(even, head=1)"

    class Odd:
        def allows(self, b, h, q, k):  # type: ignore[no-untyped-def]
            return k % 2 == 1

    odd = Odd()
    assert rw.TokenMask(odd.allows) == rw.TokenMask(odd.allows)
    wide = functools.partial(lambda b, h, q, k, width: q - k < width, width=3)
    assert rw.TokenMask(wide) == rw.TokenMask(wide)


@pytest.mark.parametrize("again", [False, True], ids=["held", "wrapped again"])
def test_a_changed_tensor_is_another_mask(again: bool) -> None:
    shift = torch.tensor(0)

    def mask(b, h, q, k):  # type: ignore[no-untyped-def]
        return k <= q + shift

    pattern: Pattern = rw.from_mask_mod(mask)
    trees = [
        lambda p: p, lambda p: p & rw.Causal() | rw.Sinks(2), lambda p: ~p, lambda p: rw.PerHead([p]),
        lambda p: p.within(rw.Documents([13, 27])),
    ]  # fmt: skip
    for change in (lambda: shift.add_(3), lambda: shift.data.add_(2), lambda: shift.numpy().__iadd__(4)):
        for tree in trees:
            held = tree(pattern)
            for _ in range(2):
                dense = Q + shift >= K
                inside = dense & ((Q < 13) == (K < 13))
                want = [dense, dense & (K <= Q) | (K < 2), ~dense, dense, inside][trees.index(tree)]
                follows(tree(rw.from_mask_mod(mask)) if again else held, lambda want=want: want)
                change()


def fused(kind: type[torch.optim.Optimizer]) -> Callable[[torch.nn.Parameter], None]:
    return lambda gate: kind([gate], lr=1.0, fused=True).step()  # type: ignore[call-arg]


WRITES_TO_PARAMETERS: dict[str, Callable[[torch.nn.Parameter], object]] = {
    **{kind.__name__: fused(kind) for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)},
    "Adagrad": fused(torch.optim.Adagrad),
    "data": lambda gate: gate.data.neg_(),
}


@pytest.mark.parametrize("compiled", [False, True])
def test_a_mask_that_reads_a_parameter_has_gradients(compiled: bool) -> None:
    """Gradients reach q, k and v, and pass the parameter by."""
    # the compiler writes attributes to a Parameter
    gate = torch.randn(N, N, requires_grad=True) if compiled else torch.nn.Parameter(torch.randn(N, N))
    pattern, x = rw.TokenMask(lambda b, h, q, k: gate[q, k] > 0), torch.randn(1, 1, N, 8, requires_grad=True)

    def attend(x: torch.Tensor, pattern: Pattern) -> torch.Tensor:
        return rw.attention(x, x, x, pattern)

    act = torch.compile(attend, backend="aot_eager") if compiled else attend
    want = torch.autograd.grad(attend(x, rw.TokenMask(lambda b, h, q, k, g=gate.detach(): g[q, k] > 0)).sum(), x)
    for tree in (pattern, pattern & rw.Full(), rw.PerHead([pattern])):
        assert torch.equal(torch.autograd.grad(act(x, tree).sum(), x)[0], want[0])
    assert not rw.attention(x.detach(), x.detach(), x.detach(), pattern).requires_grad
    assert gate.grad is None


@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize("kind", WRITES_TO_PARAMETERS)
def test_a_large_parameter_is_followed_whoever_writes_it(kind: str, learns: bool) -> None:
    """Fused optimizers, among others, change a parameter and not its version.

    A recognised mask then has the gradient of its call, and that of an evaluated one is refused.
    """
    gate = torch.nn.Parameter(torch.randn(600, 600, generator=torch.Generator().manual_seed(0)))
    gate.requires_grad_(learns)
    assert gate.nbytes > 2**20
    recognised = rw.TokenMask(lambda b, h, q, k: gate[q, k] > 0)
    pattern = rw.TokenMask(lambda b, h, q, k: gate[q, k] > -gate[q, k])
    follows(recognised, lambda: gate.detach()[Q, K] > 0)
    follows(pattern, lambda: gate.detach()[Q, K] > 0)
    x = torch.randn(1, 1, N, 8, requires_grad=True)
    (want,) = torch.autograd.grad(rw.attention(x, x, x, recognised).sum(), x)
    known = rw.attention(x, x, x, recognised)
    out, version = rw.attention(x, x, x, pattern), gate._version
    gate.grad = 2 * gate.detach()
    WRITES_TO_PARAMETERS[kind](gate)
    assert gate._version == version
    follows(recognised, lambda: gate.detach()[Q, K] > 0)
    follows(pattern, lambda: gate.detach()[Q, K] > 0)
    assert torch.equal(torch.autograd.grad(known.sum(), x)[0], want)
    with pytest.raises(PatternError, match="Change it after backward"):
        out.sum().backward()


def test_a_rebound_variable_is_another_mask() -> None:
    shift = torch.tensor(0)
    pattern = rw.from_mask_mod(lambda b, h, q, k: k <= q + shift)
    for new in (torch.tensor(3), 5, torch.tensor([2]), 2.0):
        shift = new
        follows(pattern, lambda new=new: Q + new >= K)


class Window:
    step = 1

    def __init__(self, reach: int):
        self.reach = reach

    def __call__(self, b, h, q, k):  # type: ignore[no-untyped-def]
        return self.near((q - k) // self.step)

    def masks(self, b, h, q, k):  # type: ignore[no-untyped-def]
        return self(b, h, q, k)

    def near(self, distance):  # type: ignore[no-untyped-def]
        return distance.abs() <= self.reach


def test_a_pattern_in_a_function() -> None:
    base = rw.Documents([10, 30])
    pattern = rw.from_mask_mod(lambda b, h, q, k: base.allows(q, k) & (q >= k))
    follows(pattern, lambda: base.allows(Q, K) & (Q >= K))
    base = rw.Documents([20, 20])
    follows(pattern, lambda: base.allows(Q, K) & (Q >= K))


class Unhashable:
    __hash__ = None  # type: ignore[assignment]

    def __call__(self, b, h, q, k):  # type: ignore[no-untyped-def]
        return q >= k


numbers = np.array([2])
Change = Callable[[], object]


def called(kind: str) -> tuple[Any, Change]:
    """Return a mask function that no graph records, with reach 2, and a function that changes the reach to 5."""
    window = Window(2)

    def by_numpy(b, h, q, k):  # type: ignore[no-untyped-def]
        return torch.from_numpy(abs(q.numpy() - k.numpy()) <= window.reach)

    def without_gradients(b, h, q, k):  # type: ignore[no-untyped-def]
        with torch.no_grad():
            return (q - k).abs() <= window.reach

    def by_condition(b, h, q, k):  # type: ignore[no-untyped-def]
        near = (q - k).abs() <= window.reach
        return near if bool((q >= 0).all()) else ~near

    def by_type(b, h, q, k):  # type: ignore[no-untyped-def]
        return (q - k).abs() <= (window.reach if isinstance(q, torch.Tensor) else 0)

    kinds = {"numpy": by_numpy, "no_grad": without_gradients, "condition": by_condition, "type": by_type}
    return kinds[kind], lambda: setattr(window, "reach", 5)


CALLED = ["numpy", "no_grad", "condition"]


@pytest.mark.parametrize("kind", [*CALLED, "type"])
def test_a_function_without_a_graph_is_evaluated_anew(kind: str) -> None:
    fn, change = called(kind)
    own: Pattern = rw.from_mask_mod(fn)
    trees = [own, own & rw.Causal() | rw.Sinks(2), ~own, rw.PerHead([own])]
    for reach in (2, 5):
        dense = (Q - K).abs() <= reach
        for tree, want in zip(trees, (dense, dense & (K <= Q) | (K < 2), ~dense, dense), strict=True):
            follows(tree, lambda want=want: want)
        change()
    assert (recorded(fn).function.graph is None) == (kind != "type")


def test_a_value_that_is_read_for_tensors_alone_may_change() -> None:
    """A function that agrees with its graph is compared again if it asks for types, since no graph has this value."""
    window = Window(0)

    def mask(b, h, q, k):  # type: ignore[no-untyped-def]
        return k - q <= (window.reach if isinstance(q, torch.Tensor) else 0)

    pattern = rw.from_mask_mod(mask)
    for window.reach in (0, 5, 2):
        follows(pattern, lambda: window.reach >= K - Q)


@pytest.mark.parametrize("kind", CALLED)
@pytest.mark.parametrize("backend", ["auto", "dense_batched", "reference"])
@pytest.mark.parametrize("evicted", [False, True])
def test_gradients_of_a_function_without_a_graph(kind: str, backend: str, evicted: bool) -> None:
    fn, change_reach = called(kind)
    pattern = rw.from_mask_mod(fn) & rw.Causal()
    q = torch.randn(1, 1, N, 8, requires_grad=True)
    (want,) = torch.autograd.grad(rw.attention(q, q, q, rw.SlidingWindow(2), backend="reference").square().sum(), q)
    for change in (lambda: None, change_reach):
        out = rw.attention(q, q, q, pattern, backend=backend)
        change()
        if evicted:
            plan_cache.clear()
        refused = change is change_reach and (evicted or backend == "reference")
        with pytest.raises(PatternError, match="cannot be followed") if refused else contextlib.nullcontext():
            (grad,) = torch.autograd.grad(out.square().sum(), q)
            torch.testing.assert_close(grad, want, atol=1e-4, rtol=1e-4)


def test_functions_with_graphs_are_planned_once_and_others_at_each_call() -> None:
    window, reach = Window(2), 2

    def seen(b, h, q, k):  # type: ignore[no-untyped-def]
        return (q * k) % 5 <= reach

    ids = torch.arange(N)[None]

    def selects(b, h, q, k):  # type: ignore[no-untyped-def]
        # a method with the name of a module
        return (ids.select(0, 0)[q] * k) % 5 >= 2

    def of_object(b, h, q, k):  # type: ignore[no-untyped-def]
        return (q * k) % 7 <= window.reach

    def asked(fn: Any) -> list[int]:
        pattern, found = rw.from_mask_mod(fn), list[int]()
        for _ in range(3):
            before = plan_cache.statistics()
            results(pattern)
            found.append(plan_cache.statistics().misses - before.misses)
        return found

    plan_cache.clear()
    assert asked(seen) == asked(selects) == asked(of_object) == [1, 0, 0]
    # a new function of the same text
    assert asked(lambda b, h, q, k: (q * k) % 7 <= window.reach) == [0, 0, 0]
    gc.collect()
    rest = plan_cache.statistics().plans
    assert asked(called("numpy")[0]) == [1, 1, 1]
    gc.collect()
    assert plan_cache.statistics().plans <= rest


@pytest.mark.parametrize("kind", ["numpy", "condition"])
def test_a_function_without_a_graph_is_refused_by_the_compiler(kind: str) -> None:
    torch._dynamo.reset()
    fn, _ = called(kind)
    pattern, q = rw.from_mask_mod(fn), torch.randn(1, 1, N, 8)
    compiled = torch.compile(lambda q, p: rw.attention(q, q, q, p), fullgraph=True, backend="eager")
    with pytest.raises(PatternError, match="a function that cannot be traced: it .*tables="):
        compiled(q, pattern)
    vouched = rw.from_mask_mod(fn, tables=[])
    torch.testing.assert_close(compiled(q, vouched), rw.attention(q, q, q, vouched))


def test_a_function_that_counts_its_calls_has_the_value_of_each() -> None:
    calls = [0]

    def mask(b, h, q, k):  # type: ignore[no-untyped-def]
        calls[0] += 1
        return (q - k).abs() <= calls[0]

    pattern = rw.from_mask_mod(mask)
    for _ in range(2):
        found = results(pattern)
        reach = int((found[0] > 0).sum()) - 1
        assert 0 < reach <= calls[0]
        assert torch.equal(found, (Q - K).abs() <= reach)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("read", [operator.getitem, lambda table, at: torch.take(table, at)], ids=["index", "take"])
def test_a_table_that_is_counted_from_the_first_query(read: Callable[..., torch.Tensor], grad: bool) -> None:
    """The queries of a draft tree follow 96 keys of the prompt; its table has no entry for position 0."""
    tree = torch.rand(4, generator=torch.Generator().manual_seed(0)) > 0.4

    def drafts(b, h, q, k):  # type: ignore[no-untyped-def]
        return (k < 96) | (q == k) | read(tree, q - 96) & (h > 0)

    pattern = rw.from_mask_mod(drafts)
    q = torch.randn(2, 3, 4, 8, dtype=torch.float64, requires_grad=grad)
    k = torch.randn(2, 3, 100, 8, dtype=torch.float64)
    at_q, at_k, head = torch.arange(96, 100)[:, None], torch.arange(100), torch.arange(3)[:, None, None]
    dense = (at_k < 96) | (at_q == at_k) | tree[:, None] & (head > 0)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, k, dense)
    for backend in ("auto", "reference", "dense_batched"):
        for offset in (96, torch.tensor(96), "end"):
            out = rw.attention(q, k, k, pattern, q_offset=offset, backend=backend)
            torch.testing.assert_close(out, wanted)
            if grad:
                slopes = (torch.autograd.grad(x.square().sum(), q, retain_graph=True) for x in (out, wanted))
                torch.testing.assert_close(*slopes)
    assert torch.equal(pattern.to_dense(4, 100, 3, q_offset=96)[0], dense)
    assert torch.equal(pattern.plan(4, 100, heads=3, q_offset=96).to_dense()[0], dense)
    with pytest.raises(PatternError, match="raises IndexError.*; wanted tables with an entry for each position"):
        rw.attention(q, k, k, pattern, q_offset=0)


def test_named_tables_are_followed() -> None:
    holder = types.SimpleNamespace(shift=torch.tensor(0))
    mask = lambda b, h, q, k: k <= q + holder.shift  # noqa: E731
    pattern = rw.from_mask_mod(mask, tables=[holder.shift])
    for _ in range(3):
        follows(pattern, lambda: Q + holder.shift >= K)
        holder.shift.add_(2)


@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (lambda b, h, q: q > 0, "raises TypeError: .*takes 3 positional arguments"),
        (lambda b, h, q, k: q >= k if h > 0 else q > k, "raises RuntimeError: Boolean value of Tensor"),
        (lambda b, h, q, k: q >= undefined, "raises NameError"),  # type: ignore[name-defined]  # noqa: F821
        (lambda b, h, q, k: None, "returns builtins.NoneType; wanted one that returns bool"),
        (lambda b, h, q, k: q - k, "returns torch.int64"),
        (lambda b, h, q, k: torch.ones(3, 5, dtype=torch.bool), r"returns shape \(3, 5\) for indices"),
        (lambda b, h, q, k: torch.ones(2, 1, 1, 1, 1, dtype=torch.bool), r"returns shape \(2, 1, 1, 1, 1\)"),
        (lambda b, h, q, k: np.ones(3, bool), "returns numpy.ndarray"),
    ],
)
def test_functions_that_are_no_masks(fn: Any, said: str) -> None:
    with pytest.raises(PatternError, match=f"mask_mod: got a function that {said}"):
        rw.from_mask_mod(fn)
    with pytest.raises(PatternError, match="mask_mod: got a function that"):
        rw.attention(*(torch.randn(1, 1, 8, 8) for _ in range(3)), rw.TokenMask(fn))


def by_pair(fn: Any, batch: int, heads: int, nq: int, nk: int, first: int) -> torch.Tensor:
    """Return the values of a function for each pair, with 0-dim indices."""
    for dim in range(3, -1, -1):
        fn = torch.vmap(fn, tuple(0 if each == dim else None for each in range(4)))
    with ScalarIndices():
        found: torch.Tensor = fn(
            *(torch.arange(n) for n in (batch, heads)), torch.arange(first, first + nq), torch.arange(nk)
        )
    return found


# torch maps no function that returns a Python number
CORPUS = [name for name, mask in masks().items() if mask.state != "refused" and name != "hostile: number"]


# trace/test_relation.py reads every function of the corpus in each run
@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CORPUS)
def test_the_corpus(name: str) -> None:
    fn = masks()[name].function
    for batch, heads, nq, nk, first in ((2, 4, N, N, 0), (1, 2, 20, 53, 33), (2, 4, 5, 130, 125)):
        want, pattern = by_pair(fn, batch, heads, nq, nk, first), rw.TokenMask(fn)
        before = pattern.key()
        q, k = (torch.zeros(batch, heads, n, 8) for n in (nq, nk))
        eye, early = (
            torch.eye(nk).expand(batch, heads, -1, -1),
            torch.arange(first, first + nq)[:, None] >= torch.arange(nk),
        )
        assert torch.equal(rw.attention(q, k, eye, pattern, q_offset=first) > 0, want)
        both = rw.attention(q.requires_grad_(), k, eye, pattern & rw.Causal(), q_offset=first)
        assert torch.equal(both > 0, want & early)
        got = pattern.to_dense(nq, nk, heads, batch=batch, q_offset=first)
        assert torch.equal(got.expand_as(want), want)
        # numpy access to a large table would change how it is identified
        assert pattern.key().value == before.value


def test_constants_and_calls_without_pairs() -> None:
    follows(rw.from_mask_mod(lambda b, h, q, k: False), lambda: torch.tensor(False))
    follows(rw.from_mask_mod(lambda b, h, q, k: torch.tensor(True)), lambda: torch.tensor(True))
    empty = torch.randn(1, 2, 0, 8)
    with pytest.raises(ShapeError, match="q: got .* without an empty axis"):
        rw.attention(empty, empty, empty, rw.from_mask_mod(lambda b, h, q, k: q * k % 3 == 0))


def test_a_tensor_of_a_transform_has_no_pairs() -> None:
    each = torch.stack([torch.arange(N) // 5, torch.arange(N) // 7])

    def call(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return rw.attention(x, x, x, rw.from_mask_mod(lambda b, h, q, k: ids[q] == ids[k]))

    with pytest.raises(PatternError, match="reads a tensor of a transform of torch.func"):
        torch.vmap(call)(torch.randn(2, 1, 1, N, 8), each)


def test_a_compiled_function() -> None:
    torch._dynamo.reset()
    follows(rw.from_mask_mod(torch.compile(lambda b, h, q, k: q >= k, backend="eager")), lambda: Q >= K)


def test_an_unhashable_function() -> None:
    pattern = rw.from_mask_mod(Unhashable())
    follows(pattern, lambda: Q >= K)
    hash(pattern)


def test_functions_of_libraries() -> None:
    pattern = rw.from_mask_mod(lambda b, h, q, k: where(ge(q, k), operator.gt(k, math.pi), torch.Tensor.eq(q, k)))
    follows(pattern, lambda: torch.where(Q >= K, math.pi < K, Q == K))


# ---- numbers, and lifetimes -------------------------------------------------------------------------------------------


def test_backward_after_the_pattern_is_gone() -> None:
    q = torch.randn(1, 1, 40, 8, requires_grad=True)
    ids = torch.arange(40) // 7
    out = rw.attention(q, q, q, rw.from_mask_mod(lambda b, h, q, k: ids[q] == ids[k]))
    gc.collect()
    out.sum().backward()
    assert q.grad is not None


def test_what_changes_between_forward_and_backward() -> None:
    shift, reach = torch.tensor(0), 3
    pattern = rw.from_mask_mod(lambda b, h, q, k: (q * k % 7 <= shift) | (q - k <= reach))
    changes: list[Callable[[], object]] = [lambda: shift.add_(1), lambda: shift.data.add_(1)]
    for change in changes:
        q = torch.randn(1, 1, N, 8, requires_grad=True)
        out = rw.attention(q, q, q, pattern)
        change()
        with pytest.raises(PatternError, match="a tensor that was changed"):
            out.sum().backward()
    # numbers, and the tensors of a function with the pairs of a pattern, are those of the call
    window = rw.from_mask_mod(lambda b, h, q, k: q - k <= reach + shift)
    for own in (pattern, window):
        out = rw.attention(q, q, q, own)
        (want,) = torch.autograd.grad(out.square().sum(), q, retain_graph=True)
        reach = 5
        if own is not pattern:
            shift.add_(1)
        assert torch.equal(torch.autograd.grad(out.square().sum(), q)[0], want)
        reach = 3


def test_captures_are_freed() -> None:
    gone: list[weakref.ref[Any]] = []

    def step(size: int) -> None:
        ids = torch.arange(size) // 9
        q = torch.randn(1, 1, N, 8, requires_grad=True)

        def mask(b, h, q, k):  # type: ignore[no-untyped-def]
            return (ids[q] == ids[k]) & (q * k % 3 == 0)

        pattern = rw.from_mask_mod(mask) & rw.Causal() | rw.Dilated(3, 2)
        rw.attention(q, q, q, pattern).sum().backward()
        pattern.plan(N)
        rw.explain(pattern, N)
        gone.extend(map(weakref.ref, (ids, mask, pattern)))

    for size in (N, 2**18):  # small tables are identified by contents, large ones by address
        step(size)
    gc.collect()
    assert [each() for each in gone] == [None] * 6


def test_captures_die_with_a_context_alive() -> None:
    context = rw.ContextParallel(None, rw.Causal(), 64, heads=(1, 1), schedule="ring")
    ids = torch.arange(64) // 9
    gone = weakref.ref(ids)
    q = torch.randn(1, 1, 64, 8)
    pattern: Pattern = rw.from_mask_mod(lambda b, h, q, k, ids=ids: ids[q] == ids[k])
    out = rw.attention(q, q, q, pattern, context=context)
    torch.testing.assert_close(out, rw.attention(q, q, q, pattern))
    del pattern, ids
    # the schedule reads them
    rw.memory.trim()
    gc.collect()
    assert gone() is None


def test_a_live_pattern_outlives_any_number_of_others() -> None:
    held = rw.from_mask_mod(lambda b, h, q, k: k % 3 == 0)
    for i in range(4300):
        rw.TokenMask(lambda b, h, q, k, i=i: k == i)
    follows(held, lambda: K % 3 == 0)


def test_numbers_are_never_given_again() -> None:
    def number() -> int:
        return recorded(called("numpy")[0]).function.number

    first = number()
    gc.collect()
    assert number() > first
    with pytest.raises(PatternError, match=f"number {first}, of a function that no longer exists"):
        rw.TokenMask.own(first)


def test_the_number_of_a_function_stands_for_its_graph() -> None:
    reach = 3
    pattern = rw.TokenMask(lambda b, h, q, k: q - k <= reach)
    before = pattern.spec
    reach = 4
    assert pattern.spec != before
    assert torch.equal(pattern_of(before, ()).to_dense(N)[0, 0], Q - K <= 3)
    reach = 3
    assert pattern.spec == before


def test_a_change_while_it_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    reach, table = 2, torch.arange(N) % 5
    pattern = rw.TokenMask(lambda b, h, q, k: (q * table[k]) % 7 <= reach)
    build = from_pattern.build

    def interrupted(*args: Any, **options: Any) -> Any:
        nonlocal reach
        reach = 5
        return build(*args, **options)

    def interrupted_by_a_write(*args: Any, **options: Any) -> Any:
        table.add_(1)
        return build(*args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(from_pattern, "build", interrupted)
        # a plan has the numbers of its call
        assert torch.equal(pattern.plan(N).to_dense()[0, 0], (Q * table[K]) % 7 <= 2)
        patched.setattr(from_pattern, "build", interrupted_by_a_write)
        with pytest.raises(PatternError, match="a function that reads values that another thread changed"):
            pattern.plan(N)
    for reach in (2, 5):
        follows(pattern, lambda want=(Q * table[K]) % 7 <= reach: want)


def test_threads_that_wrap_and_call() -> None:
    start, wrong = threading.Barrier(4), []

    def work(seed: int) -> None:
        start.wait()
        for i in range(12):
            reach = (seed * 7 + i) % 5

            def mask(b, h, q, k, reach=reach):  # type: ignore[no-untyped-def]
                return (q - k).abs() <= reach

            if not torch.equal(results(rw.from_mask_mod(mask)), (Q - K).abs() <= reach):
                wrong.append(reach)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not wrong


def test_each_head_reads_its_own_number_inside_of_other_patterns() -> None:
    near, band = (
        rw.TokenMask(lambda b, h, q, k: q - k <= h),
        rw.TokenMask(lambda b, h, q, k: (q >= k) & (q - k <= h)),
    )
    inner = rw.PerHead([near, band])
    for pattern in (
        rw.PerHead([inner, inner]),
        rw.PerHead([rw.Causal(), rw.Causal() & inner]),
        rw.PerHead([inner, rw.PerHead([band, inner]) | rw.Sinks(1)]),
    ):
        dense = pattern.to_dense(N, heads=2)
        assert torch.equal(rw.plan(pattern, N, heads=2).to_dense(), dense)
        q = torch.randn(1, 2, N, 8)
        want = torch.nn.functional.scaled_dot_product_attention(q, q, q, dense)
        torch.testing.assert_close(rw.attention(q, q, q, pattern), want)


# ---- copies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tree", [lambda p: p, lambda p: p & rw.Causal(), lambda p: rw.PerHead([p, ~p])])
def test_copies(tree: Callable[[Pattern], Pattern]) -> None:
    pattern = tree(rw.TokenMask(even, batch=1))
    assert copy.copy(pattern) is pattern
    assert copy.deepcopy({"a": pattern})["a"] is pattern
    again = pickle.loads(pickle.dumps(pattern))
    assert again == pattern
    assert b"TokenMask(" not in pickle.dumps(pattern)  # a pickle contains no number of this process


# ---- torch.compile ----------------------------------------------------------------------------------------------------


def test_compiled() -> None:
    torch._dynamo.reset()
    ids = torch.arange(N) // 9
    graphs = []

    def backend(graph, inputs):  # type: ignore[no-untyped-def]
        graphs.append(graph)
        return graph

    pattern = rw.from_mask_mod(lambda b, h, q, k: ids[q] == ids[k]) & rw.Causal()
    passed = torch.compile(lambda q, p: rw.attention(q, q, q, p), fullgraph=True, backend=backend)
    closed = torch.compile(lambda q: rw.attention(q, q, q, pattern), fullgraph=True, backend=backend)
    q = torch.randn(1, 1, N, 8)
    for shift in (0, 3, 1):
        ids.add_(shift * torch.arange(N) // 5)
        want = rw.attention(q, q, q, pattern)
        torch.testing.assert_close(passed(q, pattern), want)
        torch.testing.assert_close(closed(q), want)
    assert len(graphs) == 2
    # another tensor is followed as in an eager call, and a new pattern of it is another input of the same graph
    ids = torch.arange(N) // 4
    again = rw.from_mask_mod(pattern.parts[0].fn) & rw.Causal()  # type: ignore[attr-defined]
    want = rw.attention(q, q, q, again)
    for got in (passed(q, pattern), closed(q), passed(q, again)):
        torch.testing.assert_close(got, want)
    assert len(graphs) == 2


def test_compiled_gradients() -> None:
    torch._dynamo.reset()
    reach = 5
    pattern = rw.from_mask_mod(lambda b, h, q, k: (q - k).abs() <= reach)
    compiled = torch.compile(lambda q: rw.attention(q, q, q, pattern), fullgraph=True, backend="aot_eager")
    q = torch.randn(1, 1, N, 8, requires_grad=True)
    want = torch.autograd.grad(rw.attention(q, q, q, pattern).square().sum(), q)
    out = compiled(q)
    torch.testing.assert_close(torch.autograd.grad(out.square().sum(), q), want)
    out = compiled(q)
    reach = 6
    with pytest.raises(PatternError, match="reads other values"):
        out.sum().backward()
    # the next call has eager's mask; gradients need a new pattern, since those of two masks could be confused
    out = compiled(q)
    torch.testing.assert_close(out, rw.attention(q, q, q, pattern))
    with pytest.raises(PatternError, match="reads other values.*with torch.compile wrap the function again"):
        out.sum().backward()
    pattern = rw.from_mask_mod(pattern.fn)
    want = torch.autograd.grad(rw.attention(q, q, q, pattern).square().sum(), q)
    torch.testing.assert_close(torch.autograd.grad(compiled(q).square().sum(), q), want)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_new_functions_are_inputs_of_one_graph(backend: str) -> None:
    """With gradients, for more functions than the compiler makes graphs."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(lambda q, p: rw.attention(q, q, q, p & rw.Causal()), fullgraph=True, backend=counter)
    q, held = torch.randn(1, 2, N, 8, requires_grad=True), []
    for i in range(12):
        ids = torch.arange(N) // (3 + i)
        pattern = rw.PerHead(
            [rw.from_mask_mod(lambda b, h, q, k, ids=ids: ids[q] == ids[k]), rw.from_mask_mod(lambda b, h, q, k, i=i: k % 13 != i)]
        )  # fmt: skip
        out, want = compiled(q, pattern), rw.attention(q, q, q, pattern & rw.Causal())
        torch.testing.assert_close(out, want)
        held.append((out, torch.autograd.grad(want.square().sum(), q)))
    assert counter.frame_count == 1
    # the graph keeps the functions that its backward pass needs
    del pattern, ids
    gc.collect()
    for out, want in held:
        torch.testing.assert_close(torch.autograd.grad(out.square().sum(), q), want)


@pytest.mark.parametrize("captured", [False, True])
def test_made_inside_compiled_code(captured: bool) -> None:
    torch._dynamo.reset()
    fixed = torch.arange(N) // 9

    def step(q: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        segment = ids * 2 + 1 if captured else fixed
        pattern = rw.from_mask_mod(lambda b, h, q, k: segment[q] == segment[k]) & rw.Causal()
        return rw.attention(2 * q, q, q, pattern) + 1

    compiled = torch.compile(step, backend="aot_eager")
    q = torch.randn(1, 1, N, 8, requires_grad=True)
    for side in range(3, 15):
        ids = torch.arange(N) // side
        got, want = compiled(q, ids), step(q, ids)
        torch.testing.assert_close(got, want)
        grads = (torch.autograd.grad(out.square().sum(), q) for out in (got, want))
        torch.testing.assert_close(*grads)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="Make patterns of functions outside of code that is comp"):
        torch.compile(step, fullgraph=True, backend="eager")(q, ids)


def test_a_global_that_is_rebound_before_the_first_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()

    def by_global(b, h, q, k):  # type: ignore[no-untyped-def]
        return (q - k).abs() <= width

    pattern = rw.from_mask_mod(by_global)
    compiled = torch.compile(lambda q: rw.attention(q, q, q, pattern), fullgraph=True, backend="aot_eager")
    q = torch.randn(1, 1, N, 8, requires_grad=True)
    for new in (7, torch.tensor(11)):
        monkeypatch.setitem(globals(), "width", new)
        with torch.no_grad():
            torch.testing.assert_close(compiled(q), rw.attention(q, q, q, rw.SlidingWindow(int(new), int(new))))
    pattern = rw.from_mask_mod(by_global)
    monkeypatch.setitem(globals(), "width", 5)
    out, want = compiled(q), rw.attention(q, q, q, rw.SlidingWindow(5, 5))
    torch.testing.assert_close(torch.autograd.grad(out.sum(), q), torch.autograd.grad(want.sum(), q))


def test_a_tensor_that_compiled_code_changes_before_the_call() -> None:
    """The function's own tensor changes after the graph, so the call cannot see the new values."""
    torch._dynamo.reset()
    ids = torch.arange(N) // 9
    pattern = rw.from_mask_mod(lambda b, h, q, k: ids[q] == ids[k])

    def step(q: torch.Tensor) -> torch.Tensor:
        ids.add_(torch.arange(N) // 20)
        return rw.attention(q, q, q, pattern)

    with pytest.raises(PatternError, match="reads tensors that compiled code changed before the call"):
        torch.compile(step, fullgraph=True, backend="aot_eager")(torch.randn(1, 1, N, 8))
