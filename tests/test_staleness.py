"""After any change to the values that a pattern reads, each answer is that of the state at the call."""

from __future__ import annotations

import functools
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import types
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask

import ringweave as rw
from ringweave import api
from ringweave.errors import PatternError, RingweaveError
from ringweave.integrations.flex_attention.attention import pattern_of
from ringweave.patterns import Pattern, cache_key, traced
from ringweave.patterns.cache_key import TableId
from ringweave.score_functions import recognised
from ringweave.trace.relation import Place

from .oracle import attention

N = 48
Q, K = torch.arange(N)[:, None], torch.arange(N)[None]
reach = 3
knobs = types.ModuleType("knobs")
knobs.left = 4  # type: ignore[attr-defined]
ROOT = Path(__file__).parents[1]


def by_global(b, h, q, k):  # type: ignore[no-untyped-def]
    return (q - k).abs() <= reach


def by_module(b, h, q, k, right=2):  # type: ignore[no-untyped-def]
    return (q - k <= knobs.left) & (k - q <= right)


def by_helper(b, h, q, k):  # type: ignore[no-untyped-def]
    return by_global(b, h, q, k) | by_module(b, h, q, k)


class World:
    """Patterns, each with its expected mask in the current state, and the objects that they read."""

    def __init__(self) -> None:
        global reach
        reach, knobs.left, by_module.__defaults__ = 3, 4, (2,)  # type: ignore[attr-defined]
        self.shift = shift = torch.tensor(1)
        # small is identified by its contents, large by its version
        self.small, self.large = small, large = torch.arange(N) // 5, torch.arange(2**18) // 7
        self.spans = spans = [3, 20]
        self.partial = functools.partial(lambda b, h, q, k, width: (q - k).abs() < width, width=6)
        self.mask, self.lengths = torch.eye(3, dtype=torch.bool), [10, 30, 8]
        self.tokens, self.rates = [1, 5], [1, 2]
        self.bounds = torch.tensor([0, 9, N])
        self.heads: list[Pattern] = [rw.Causal()]
        self.patterns: list[tuple[Pattern, Callable[[], torch.Tensor]]] = []
        turn = 0

        def turned(b, h, q, k):  # type: ignore[no-untyped-def]
            return (q + turn) % 3 >= k % 3

        def turn_on() -> None:
            nonlocal turn
            turn += 1

        self.turn = turn_on
        followed: list[Any] = [
            by_global, by_module, by_helper, self.partial, turned,
            lambda b, h, q, k: k <= q + shift,
            lambda b, h, q, k: (small[q] == small[k]) & (k >= spans[0]) & (k < spans[1]),
            lambda b, h, q, k: large[q] == large[k],
        ]  # fmt: skip
        for fn in followed:
            self.add(rw.from_mask_mod(fn), lambda fn=fn: fn(None, None, Q, K))
        self.add(rw.TokenMask(followed[5]) & rw.SlidingWindow(9) | rw.Sinks(2),
                 lambda: (Q + shift >= K) & (K <= Q) & (Q - K <= 9) | (K < 2))  # fmt: skip
        self.add(~rw.TokenMask(by_global) | rw.Dilated(4, 3), lambda: ((Q - K).abs() > reach)
                 | (((Q - K).abs() <= 12) & ((Q - K) % 3 == 0)))  # fmt: skip
        # values: the objects that these patterns were built from may change
        for pattern in self.values():
            self.add(pattern, lambda dense=pattern.to_dense(N)[0, 0].clone(): dense)

    def values(self) -> list[Pattern]:
        return [
            rw.BlockTable(self.mask, 16), rw.Documents(self.lengths), rw.Documents(cu_seqlens=self.bounds),
            rw.Sinks(self.tokens), rw.Global(self.tokens), rw.PerHead(self.heads),
            rw.BlockTable(self.mask, 16) & rw.Causal() | rw.Sinks(self.tokens),
        ]  # fmt: skip

    def add(self, pattern: Pattern, want: Callable[[], torch.Tensor]) -> None:
        self.patterns.append((pattern, want))

    def mutate(self, what: int) -> None:
        global reach
        match what:
            case 0:
                self.shift.add_(2)
            case 1:
                self.shift.data.sub_(1)
            case 2:
                self.small.numpy()[7:] += 1
            case 3:
                self.large[5:] += 1
            case 4:
                reach = (reach + 3) % 7
            case 5:
                knobs.left = (knobs.left + 3) % 8  # type: ignore[attr-defined]
            case 6:
                by_module.__defaults__ = (by_module.__defaults__[0] + 1,)  # type: ignore[index]
            case 7:
                self.partial.keywords["width"] = 1 + self.partial.keywords["width"] % 9
            case 8:
                self.spans[0] = (self.spans[0] + 5) % 19
            case 9:
                self.turn()
            case 10:
                self.mask[0, 2] = ~self.mask[0, 2]
            case 11:
                self.lengths[:2] = [20, 20]
                self.bounds[1] = 30
            case 12:
                self.tokens[0] = 0
                self.rates[1] = 4
                self.heads[0] = rw.SlidingWindow(2)
            case 13:
                for pattern in self.values():
                    self.add(pattern, lambda dense=pattern.to_dense(N)[0, 0].clone(): dense)
                del self.patterns[8:12]


def attended(pattern: Pattern) -> torch.Tensor:
    """Return the attended pairs: with equal scores and one-hot values the output is the row of weights."""
    zero = torch.zeros(1, 1, N, 8)
    with torch.no_grad():
        return rw.attention(zero, zero, torch.eye(N)[None, None], pattern)[0, 0] > 0


def planned(pattern: Pattern) -> torch.Tensor:
    return pattern.plan(N, tile=16).to_dense()[0, 0]


def copied(pattern: Pattern) -> torch.Tensor:
    try:
        again = pickle.loads(pickle.dumps(pattern))
    except (pickle.PicklingError, AttributeError):
        return attended(pattern)  # a pickled pattern carries no function, and is refused
    return attended(again)


def wrapped(pattern: Pattern) -> torch.Tensor:
    return attended(rw.from_mask_mod(pattern.fn) if isinstance(pattern, rw.TokenMask) else pattern)


def in_a_thread(pattern: Pattern) -> torch.Tensor:
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.append(attended(pattern)))
    thread.start()
    thread.join(60)
    return found[0]


LOOKS = [attended, planned, copied, wrapped, in_a_thread]
actions = st.lists(st.tuples(st.integers(0, 13), st.integers(0, 63), st.integers(0, len(LOOKS) - 1)), max_size=12)


@settings(max_examples=40, database=None)
@given(actions)
def test_every_answer_is_that_of_the_state_at_the_call(actions: list[tuple[int, int, int]]) -> None:
    world = World()
    # every plan is built before anything changes
    for pattern, want in world.patterns:
        assert torch.equal(attended(pattern), want().expand(N, N))
    for what, which, look in actions:
        world.mutate(what)
        pattern, want = world.patterns[which % len(world.patterns)]
        assert torch.equal(LOOKS[look](pattern), want().expand(N, N)), (pattern, what)


@pytest.mark.parametrize("what", range(13))
def test_gradients_are_of_the_mask_of_the_call_or_refused(what: int) -> None:
    world = World()
    for pattern, want in world.patterns:
        q = torch.randn(1, 1, N, 8, requires_grad=True)
        before = want().expand(N, N).clone()
        expected = torch.autograd.grad(attention(q, q, q, before)[0].square().sum(), q)
        out = rw.attention(q, q, q, pattern)
        world.mutate(what)
        try:
            got = torch.autograd.grad(out.square().sum(), q)
        except RingweaveError:
            assert "TokenMask(" in pattern.spec
            continue
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


PROGRAM = """
import pickle, sys
import torch
import ringweave as rw
others = [rw.from_mask_mod(lambda b, h, q, k, i=i: k == i) for i in range(20)]  # with the numbers of the sender's
world = pickle.load(sys.stdin.buffer)
sys.stdout.buffer.write(pickle.dumps([pattern.to_dense(48)[0, 0].numpy() for pattern in world]))
"""


def test_a_pattern_in_another_process_has_its_own_function() -> None:
    world = World()
    sent = [rw.TokenMask(by_global), rw.TokenMask(by_module) & rw.Causal(), rw.PerHead([~rw.TokenMask(by_helper)])]
    want = [pattern.to_dense(N)[0, 0] for pattern in sent]
    sent += [pattern for pattern, _ in world.patterns[10:]]
    want += [dense() for _, dense in world.patterns[10:]]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=pickle.dumps(sent),
        capture_output=True,
        check=True,
        timeout=240,
        cwd=ROOT,
    )
    for found, expected in zip(pickle.loads(done.stdout), want, strict=True):
        assert torch.equal(torch.from_numpy(found), expected.expand(N, N))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_inherits_the_functions() -> None:
    world = World()
    specs = [pattern.spec for pattern, _ in world.patterns]
    read, write = os.pipe()
    child = os.fork()
    if not child:
        # use none of torch's threads, and exit without running the parent's cleanup
        world.mutate(4)
        fresh = rw.TokenMask(lambda b, h, q, k: k > 40)
        same = [pattern.spec == spec for (pattern, _), spec in zip(world.patterns, specs, strict=True)]
        small = rw.TokenMask(by_global).allows(Q, K).equal((Q - K).abs() <= reach)
        os.write(write, repr((same.count(False), small, fresh.spec not in specs)).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        told = file.read()
    assert os.waitpid(child, 0)[1] == 0
    assert told == repr((3, True, True))
    assert [pattern.spec for pattern, _ in world.patterns] == specs


FORKS = """
    import os, signal, sys, torch, ringweave as rw
    from ringweave.backends import forks
    torch.set_num_threads(2)
    q = torch.randn(1, 2, 16, 4096).mT.requires_grad_()  # to be copied first, by threads
    a = torch.randn(3_000_000)

    def call():
        out = rw.attention(q, q, q, rw.Causal())
        return torch.cat([out, *torch.autograd.grad(out.sum(), q)])

    {parent}
    if not os.fork():
        signal.alarm(60)
        {child}
        if not os.fork():  # the child of a forked process that has a pool of its own by now
            signal.alarm(60)
            print((a + 1).shape[0], call().shape[0], flush=True)
            os._exit(0)
        assert os.wait()[1] == 0
        torch.set_num_threads(1)
        torch.save(call().detach(), sys.argv[1])
        os._exit(0)
    assert os.wait()[1] == 0
    assert torch.equal(torch.load(sys.argv[1]), call())
"""
PARENTS = {
    "torch": "(a + 1).sum()",
    "attention": "call()",
    "a thread's": "import threading; t = threading.Thread(target=call); t.start(); t.join(); (a + 1).sum()",
}


def _said(parent: str, child: str, path: Path) -> str:
    program = textwrap.dedent(FORKS.format(parent=parent, child=child))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, str(path)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other threads")
@pytest.mark.parametrize("parent", PARENTS)
def test_a_fork_of_a_process_with_threads_computes(parent: str, tmp_path: Path) -> None:
    """A forked child computes after the parent started threads with torch alone, with attention, or in a thread that has ended."""
    assert _said(PARENTS[parent], "call(); (a + 1).sum()", tmp_path / "out") == "3000000 2\n"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other threads")
def test_a_fork_that_would_hang_raises(tmp_path: Path) -> None:
    """A fork raises where the thread pool cannot be stopped: an OpenMP without the function for it."""
    child = """
        try:
            call()
        except rw.UnsupportedError as error:
            print(error, flush=True)
        torch.set_num_threads(1)
    """
    said = _said("forks.ctypes.CDLL = lambda name: None; call()", child.strip(), tmp_path / "out").splitlines()
    assert "process: got a fork of a process that could not end its OpenMP threads" in said[0]
    assert said[1] == "3000000 2"


def test_threads_that_change_what_others_read() -> None:
    """If a function is changed while a call reads it, the call gives the mask of one state in that time, or an error; later calls are right."""
    shift = torch.tensor(0)
    pattern = rw.from_mask_mod(lambda b, h, q, k: k <= q + shift)
    masks = [Q + each >= K for each in range(4)]
    stop, wrong = threading.Event(), []

    def change() -> None:
        while not stop.is_set():
            shift.copy_((shift + 1) % 4)

    def call() -> None:
        for _ in range(40):
            try:
                found = attended(pattern)
            except RingweaveError:
                continue
            if not any(torch.equal(found, mask) for mask in masks):
                wrong.append(found)

    changer, callers = threading.Thread(target=change), [threading.Thread(target=call) for _ in range(2)]
    for thread in (changer, *callers):
        thread.start()
    for thread in callers:
        thread.join(120)
    stop.set()
    changer.join(60)
    assert not wrong
    for value in range(4):
        shift.fill_(value)
        assert torch.equal(attended(pattern), masks[value])


@pytest.mark.parametrize("what", ["mask", "score", "block mask"])
def test_a_write_while_something_is_computed(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was computed from values that another thread wrote meanwhile serves no later call."""
    bound = torch.tensor([31])
    blocks = create_block_mask(lambda b, h, q, k: k <= q - 31, None, None, N, N, device="cpu", BLOCK_SIZE=16)

    def called(bound: torch.Tensor) -> torch.Tensor:
        pattern: Pattern = rw.Full()
        terms = None
        if what == "mask":
            pattern = rw.from_mask_mod(lambda b, h, q, k: k <= q - bound[0])
        elif what == "score":
            terms = [lambda s, b, h, q, k: s + bound[0] * (q - k) * 0.01]
        else:
            blocks.mask_mod = lambda b, h, q, k: k <= q - bound[0]
            pattern = pattern_of(blocks, Place(1, 1, N, N))
        zero = torch.zeros(1, 1, N, 8)
        return rw.attention(zero, zero, torch.eye(N)[None, None], pattern, terms=terms)

    want = called(bound.clone())
    rw.memory.trim()
    module, name = (recognised, "_score_of") if what == "score" else (traced, "of_graph")
    compute: Callable[..., Any] = getattr(module, name)
    written = 0

    def interrupted(*args: Any) -> Any:
        nonlocal written
        written += 1
        bound.fill_(30)
        found = compute(*args)
        bound.fill_(31)
        return found

    with monkeypatch.context() as patched:
        patched.setattr(module, name, interrupted)
        with pytest.raises(PatternError, match="another thread"):
            called(bound)
    assert written
    assert torch.equal(called(bound), want)


def test_a_write_between_the_key_and_the_check_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program of a call is kept for the pairs that it computes, not for those before another thread's write."""
    bound = torch.tensor(0)
    pattern = rw.from_mask_mod(lambda b, h, q, k: k <= q - bound)
    check = api.checked

    def interrupted(*args: Any) -> Any:
        bound.fill_(30)
        return check(*args)

    with monkeypatch.context() as patched:
        patched.setattr(api, "checked", interrupted)
        attended(pattern)
    for value in (0, 30):
        bound.fill_(value)
        assert torch.equal(attended(pattern), Q - value >= K)


@pytest.mark.parametrize("at", ["before the contents", "after the contents"])
def test_a_key_whose_tensors_change_while_it_is_made(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys around a write do not match, though torch counts it after it has written."""
    bound = torch.tensor(3)
    pattern = rw.from_mask_mod(lambda b, h, q, k: k <= q - bound)
    contents = cache_key.content_key

    def written(table: torch.Tensor) -> Hashable | None:
        found = contents(table) if at == "after the contents" else None
        table.fill_(4).fill_(3)
        return found or contents(table)

    monkeypatch.setattr(cache_key, "content_key", written)
    during = pattern.key()
    monkeypatch.setattr(cache_key, "content_key", contents)
    assert during.value == pattern.key().value
    with pytest.raises(PatternError, match="another thread"):
        during.check(pattern)


def test_equal_bounds_that_may_change_are_not_merged() -> None:
    """Operators keep both of two operands with tensors that are equal now, since their owner may write to either."""
    within = rw.Sinks(9).within
    joined: list[Callable[[torch.Tensor, torch.Tensor], Pattern]] = [
        lambda a, b: rw.KeyPadding(a) & rw.Causal() & rw.KeyPadding(b),
        lambda a, b: rw.KeyPadding(a) & rw.KeyPadding(b) & rw.Causal(),
        lambda a, b: rw.KeyPadding(a) | rw.KeyPadding(b),
        lambda a, b: rw.KeyPadding(N, a) & rw.KeyPadding(N, b),
        lambda a, b: within(rw.KeyPadding(a)) | within(rw.KeyPadding(b)),
        lambda a, b: rw.PerHead([rw.KeyPadding(a) & rw.KeyPadding(b)]),
        lambda a, b: ~rw.KeyPadding(a) | rw.SlidingWindow(1) | ~rw.KeyPadding(b),
        lambda a, b: rw.from_mask_mod(lambda *i: i[3] < a) & rw.from_mask_mod(lambda *i: i[3] < b),
    ]
    for make in joined:
        for which in range(2):
            a, b = torch.tensor([8]), torch.tensor([8])
            pattern = make(a, b)
            attended(pattern)
            (a, b)[which][0] = 5
            assert torch.equal(attended(pattern), make(a.clone(), b.clone()).to_dense(N)[0, 0]), pattern


def test_equal_bounds_of_two_patterns_stay_apart() -> None:
    """A pattern by residue is computed with its own bounds after equal bounds of an earlier pattern were written."""
    for rate in (2, 5):
        earlier, later = torch.tensor([40]), torch.tensor([40])
        patterns = [rw.Strided(rate) & rw.KeyPadding(stop) for stop in (earlier, later)]
        want = attended(patterns[0])
        earlier[0] = 7
        assert torch.equal(attended(patterns[1]), want)
        assert torch.equal(attended(patterns[0]), want & (K < 7))


def test_operands_that_stay_equal_are_merged() -> None:
    """Operators drop an operand over the same tensors, and a repeated pattern without tensors."""
    bounds, table = torch.tensor([8]), torch.eye(3, dtype=torch.bool)
    made: list[Callable[[], Pattern]] = [
        lambda: rw.KeyPadding(bounds),
        lambda: rw.Sinks(3).within(rw.KeyPadding(bounds)),
        lambda: rw.Documents([20, 28]),
        lambda: rw.BlockTable(table, 16),
        lambda: rw.TokenMask(by_global),
    ]
    for make in made:
        assert (make() & make()).spec == (make() | make()).spec == make().spec


def test_a_key_keeps_the_memory_that_it_names() -> None:
    """No new table gets the address of one that a key names, even if that tensor got another storage."""
    for replace in (lambda x, y: x.set_(y), lambda x, y: setattr(x, "data", y)):
        for _ in range(20):
            table = torch.ones(2**18, dtype=torch.int64)
            key = TableId(table)
            replace(table, torch.zeros(2**18, dtype=torch.int64))
            others = [torch.ones(2**18, dtype=torch.int64) for _ in range(3)]
            assert key not in set(map(TableId, others))


def test_a_table_at_a_reused_address_has_its_own_mask() -> None:
    """A function over a table above 1 MiB is read anew when its name is bound to new tables while old storages are freed."""
    keys = torch.arange(2**18)
    table = keys // 3
    pattern = rw.from_mask_mod(lambda b, h, q, k: table[q] == table[k])
    for step in range(12):
        assert torch.equal(attended(pattern), table[Q] == table[K]), step
        old, width = table, 2 + step % 7
        if step % 2:
            old.data = torch.zeros(1, dtype=torch.int64)
        else:
            old.set_(torch.zeros(1, dtype=torch.int64))
        table = keys // width


def test_bounds_with_a_changed_number_of_elements_are_refused() -> None:
    """Bounds that got another number of elements through `.data` raise PatternError."""
    bounds = torch.tensor([10, 20])
    pattern, q = rw.KeyPadding(bounds), torch.randn(2, 1, N, 8)
    for other in (torch.tensor([1, 2, 3]), torch.tensor([[1, 2]]), torch.tensor([], dtype=torch.int64)):
        bounds.data = other
        with pytest.raises(PatternError, match="stop: got .* bounds; wanted as many as when the pattern was made, 2"):
            rw.attention(q, q, q, pattern)


@pytest.mark.parametrize("pattern", [rw.Sinks(2), rw.Documents([20, 28]), rw.Causal(), rw.TokenMask(by_global)])
def test_a_pattern_takes_no_assignment(pattern: Pattern) -> None:
    for name in ("tokens", "_bounds", "fn"):
        with pytest.raises((RingweaveError, AttributeError)):
            setattr(pattern, name, 5)
