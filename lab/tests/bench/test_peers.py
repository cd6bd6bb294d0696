from __future__ import annotations

import dataclasses
import importlib
import subprocess
import sys

import pytest
import torch

import ringweave as rw
from ringweave.errors import ShapeError, UnsupportedError
from ringweave_lab.bench.compare import compare
from ringweave_lab.bench.peers import PEERS, gather_scatter, peers, taking_part
from ringweave_lab.tune import session
from ringweave_lab.tune.oracle import Oracle, sample_rows
from ringweave_lab.tune.problem import Problem, RandomBlocks, Sample
from ringweave_lab.tune.session import Built, Peer, Session

# the package's function hides its module of the same name
module = importlib.import_module("ringweave_lab.bench.compare")
WINDOW = rw.SlidingWindow(50) & rw.Causal() | rw.Sinks(8) & rw.Causal()
LONGNET = rw.LongNet([64, 256], [1, 4], causal=True)


def _problem(pattern: rw.Pattern, tokens: int = 300, heads: int = 2) -> Problem:
    return Problem("test", pattern, tokens, heads, 32)


FROM_SOURCES = """
import importlib.metadata
importlib.metadata.entry_points = lambda **given: ()
from ringweave_lab.campaign import units
from ringweave.backends import BACKENDS
from ringweave.plugins import host_program
from ringweave_lab.bench.peers import PEERS
print(*(f"ringweave:{name}" in PEERS and name in BACKENDS for name in ("attn_gym", "flash_attn_4", "triton")))
print(host_program().__module__)
"""


def test_without_an_installation_the_campaign_has_all_backends() -> None:
    """From the sources no entry point names the backends of ringweave-gpu, and peers are listed as they are imported."""
    done = subprocess.run([sys.executable, "-c", FROM_SOURCES], capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout.splitlines() == ["True True True", "ringweave_gpu.host_offload"]


@pytest.mark.parametrize("pattern", [WINDOW, rw.Causal(), rw.SlidingWindow(20, 20), LONGNET], ids=repr)
def test_the_oracle_agrees_with_the_reference(pattern: rw.Pattern) -> None:
    problem = _problem(pattern)
    inputs = problem.inputs()
    oracle = Oracle(pattern, inputs, sample_rows(300))
    q, k, v, dout = (x.double().requires_grad_() for x in oracle.sliced)
    out = rw.attention(q, k, v, pattern, backend="reference")
    accuracy = oracle.check_gradients(out, *torch.autograd.grad(out, (q, k, v), dout))
    assert all(error.largest < 1e-12 for error in (accuracy.out, accuracy.dq, accuracy.dk, accuracy.dv))


@pytest.mark.parametrize("name", [name for name in PEERS if name != "flex"])
def test_every_peer_computes_its_pattern(name: str) -> None:
    problem = _problem(WINDOW)
    outcomes = compare(problem, peers(name), rounds=1, memory=False)
    for outcome in outcomes:
        if outcome.timing is None:
            said = {
                "ringweave:sdpa": "neither full nor causal",
                "ringweave:cpu": "native kernel is missing",
                "ringweave:triton": "it runs on CUDA and ROCm tensors",
                "ringweave:flex": "returns no lse and has no backward",
                "ringweave:flash": "it calls kernels for CUDA tensors",
                "ringweave:flash_attn_4": "it calls kernels for CUDA tensors",
                "ringweave:gather": "it computes lists of keys",
                "ringweave:attn_gym": "it computes lists of keys",
            }
            assert name in said, outcome.reason
            assert said[name] in str(outcome.reason)
        else:
            assert not outcome.wrong
            assert outcome.computes == ("Causal()" if name == "sdpa" else repr(WINDOW))


@pytest.mark.parametrize("name", ["ringweave", "ringweave:dense_batched", "sdpa", "sdpa+mask", "gather_scatter"])
def test_peers_group_queries(name: str) -> None:
    problem = Problem("grouped", rw.SlidingWindow(50), 300, 4, 32, kv_heads=2)
    assert problem.inputs().k.shape == (1, 2, 300, 32)
    for outcome in compare(problem, peers(name), rounds=1, memory=False):
        assert outcome.timing is not None, outcome.reason
        assert outcome.kv_heads == 2


def test_dense_is_not_causal_where_the_pattern_is_not() -> None:
    assert _problem(rw.SlidingWindow(8, 8)).dense_pattern == rw.Full()
    assert _problem(WINDOW).dense_pattern == rw.Causal()


def test_a_wrong_peer_is_not_timed() -> None:
    def build(problem, inputs):  # type: ignore[no-untyped-def]
        def attend(q, k, v):  # type: ignore[no-untyped-def]
            # one extra key in one row
            out = rw.attention(q, k, v, problem.pattern)
            return torch.cat([out[:, :, :-1], out[:, :, -1:] * 1.001], 2)

        return Built(attend, problem.pattern, "slightly wrong")

    wrong = Peer("wrong", "", lambda problem, backward: None, build)
    outcomes = compare(_problem(WINDOW), [*peers("ringweave"), wrong], rounds=1, memory=False)
    assert [o.peer for o in outcomes if o.wrong] == ["wrong", "wrong"]
    for outcome in outcomes:
        assert (outcome.timing is None) == outcome.wrong
    assert "root mean square error of out" in str(outcomes[1].reason)


def test_a_wrong_gradient_is_found() -> None:
    def build(problem, inputs):  # type: ignore[no-untyped-def]
        return Built(
            lambda q, k, v: rw.attention(q, k.detach() * 0.999 + k * 0.001, v, problem.pattern), problem.pattern, "x"
        )

    wrong = Peer("wrong", "", lambda problem, backward: None, build)
    forward, both = compare(_problem(rw.Causal()), [wrong], rounds=1, memory=False)
    assert not forward.wrong
    assert both.wrong
    assert "error of dk" in str(both.reason)


def test_nan_is_wrong() -> None:
    def build(problem, inputs):  # type: ignore[no-untyped-def]
        return Built(lambda q, k, v: rw.attention(q, k, v) * torch.nan, rw.Full(), "x")

    outcomes = compare(
        _problem(rw.Full()), [Peer("nan", "", lambda w, b: None, build)], directions=("forward",), rounds=1
    )
    assert outcomes[0].wrong
    assert outcomes[0].timing is None


def test_ratios_are_over_the_first_peer() -> None:
    first, second = compare(_problem(WINDOW), peers("ringweave", "sdpa"), directions=("forward",), rounds=3)
    assert first.over_first is not None
    assert second.over_first is not None
    assert first.over_first.medians == 1.0
    assert first.timing is not None
    assert second.timing is not None
    assert second.over_first.medians == second.timing.median / first.timing.median
    assert first.how == "dense_batched" or first.how in PEERS or first.how
    assert first.gflops == pytest.approx(WINDOW.density(300) * 2 * 300**2 * 32 * 4 / first.timing.median / 1e9)
    assert first.peak is not None


def test_flex_compiles_a_table_of_lists() -> None:
    """FlexAttention gets a table of lists as a mask, since dynamo cannot trace the look-up of lists."""
    indices = torch.tensor([[0, 1], [1, 0], [3, 2], [3, 3]])
    table = rw.BlockTable(indices=indices, counts=torch.full((4,), 2), key_blocks=4)
    (outcome,) = compare(_problem(table, 512), peers("flex"), rounds=1, memory=False, directions=("forward",))
    assert outcome.timing is not None, outcome.reason
    assert not outcome.wrong


@pytest.mark.parametrize(
    "pattern",
    [rw.Causal(), (WINDOW | rw.Sinks(4)) & rw.Causal(), rw.Strided(8) & rw.Causal(), rw.Segments(64)],
    ids=repr,
)
def test_flex_compiles_a_relation(pattern: rw.patterns.Pattern) -> None:
    """FlexAttention is compiled in one graph with the mask, which its compiler inlines."""
    (outcome,) = compare(_problem(pattern, 512), peers("flex"), rounds=1, memory=False, directions=("forward",))
    assert outcome.timing is not None, outcome.reason
    assert not outcome.wrong


def test_what_flex_cannot_do_is_said() -> None:
    flex = PEERS["flex"]
    assert flex.supports(_problem(WINDOW), False) is None
    assert flex.supports(_problem(WINDOW), True) == "FlexAttention has no backward on a CPU"
    assert "mixture" in str(flex.supports(_problem(LONGNET), False))
    assert "N x N" in str(PEERS["sdpa+mask"].supports(dataclasses.replace(_problem(WINDOW), tokens=2**20), False))


def test_an_unknown_peer_is_named() -> None:
    with pytest.raises(UnsupportedError, match=r"peer: got 'fast'; wanted one of ringweave, "):
        peers("fast")


@pytest.mark.parametrize("tokens", [63, 300])
def test_gather_scatter_has_zero_rows_where_nothing_is_allowed(tokens: int) -> None:
    pattern = rw.SlidingWindow(5) & ~rw.SlidingWindow(2)
    q, k, v = (torch.randn(2, 2, tokens, 16) for _ in range(3))
    out = gather_scatter(q, k, v, pattern.plan(tokens, heads=2, batch=2))
    torch.testing.assert_close(out, rw.attention(q, k, v, pattern, backend="reference"))
    assert not out[:, :, :2].any()


def test_the_oracle_of_some_heads_is_that_of_all() -> None:
    """An oracle of some key heads has the results of the whole one, and sees errors in exactly its heads."""
    pattern = rw.PerHead([rw.SlidingWindow(9 * n) for n in range(1, 7)])
    problem = Problem("heads", pattern, 200, 6, 16, kv_heads=3)
    inputs = problem.inputs()
    every, ends = (Oracle(pattern, inputs, sample_rows(200), keys) for keys in (None, [0, 2]))
    assert ends.heads == [0, 1, 4, 5]
    assert torch.equal(ends.exact.out, every.exact.out[:, ends.heads])
    assert torch.equal(ends.exact.dk, every.exact.dk[:, [0, 2]])
    out = rw.attention(*inputs[:3], pattern)
    for head, seen in ((2, False), (5, True)):
        wrong = out.clone()
        wrong[:, head] *= 1.01
        assert every.check_out(wrong).excess(every.limit) is not None
        assert (ends.check_out(wrong).excess(ends.limit) is not None) == seen


def test_other_libraries_are_timed_up_to_twice_our_limits() -> None:
    problem = _problem(rw.Causal())
    checks = Session(problem.inputs())
    limit = checks.oracle(problem.pattern).limit
    for name, most in (("ringweave", limit), ("ringweave:dense_batched", limit), ("sdpa", limit.doubled())):
        (peer,) = peers(name)
        assert checks.check(problem, peer, "forward").limit == most


def test_names_of_peers() -> None:
    problem = _problem(WINDOW)
    mine, *others = taking_part(problem, ["ringweave", "ringweave:*", "sdpa"], "forward")
    chosen = str(mine.how and mine.how(problem, False))
    assert mine.name == "ringweave"
    assert [each.name for each in others][-1] == "sdpa"
    assert f"ringweave:{chosen}" not in [each.name for each in others]
    # the peer that auto chooses is listed once, but a peer requested alone is always run
    assert taking_part(problem, ["ringweave", f"ringweave:{chosen}"], "forward") == [mine]
    assert [each.name for each in taking_part(problem, [f"ringweave:{chosen}"], "forward")] == [f"ringweave:{chosen}"]


def test_a_function_that_several_problems_share_is_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[int] = []
    usual = session.interleaved
    monkeypatch.setattr(
        session, "interleaved", lambda calls, **options: timed.append(len(calls)) or usual(calls, **options)
    )
    problems = [Problem(f"{density}", RandomBlocks(density), 512, 2, 16) for density in (0.5, 1.0)]
    comparison = module.Comparison([(each, ("ringweave", "sdpa")) for each in problems], ("forward",), 1, memory=False)
    found = list(module.outcomes(comparison))
    assert timed == [3]
    assert [(each.workload, each.peer) for each in found] == [
        ("0.5", "ringweave"), ("0.5", "sdpa"), ("1.0", "ringweave"), ("1.0", "sdpa")
    ]  # fmt: skip
    assert found[1].timing == found[3].timing
    for mine, dense in (found[:2], found[2:]):
        assert mine.over_first is not None and dense.over_first is not None  # noqa: PT018
        assert mine.over_first.medians == 1.0
        assert dense.over_first.medians == dense.timing.median / mine.timing.median  # type: ignore[union-attr]
        assert dense.density == mine.density


@pytest.mark.parametrize("error", [RuntimeError, AssertionError, TypeError])
def test_a_peer_that_breaks_ends_the_run_unless_its_failure_is_a_reason(error: type[Exception]) -> None:
    built: list[str] = []

    def build(problem, inputs):  # type: ignore[no-untyped-def]
        built.append(problem.name)
        raise error("no memory\nand more")

    broken = Peer("broken", "", lambda problem, backward: None, build)
    with pytest.raises(error, match="no memory"):
        compare(_problem(WINDOW), [broken])
    comparison = module.Comparison([(_problem(WINDOW), [broken, *peers("sdpa")])], rounds=1, failures=session.FAILURES)
    found = list(module.outcomes(comparison))
    assert [each.reason for each in found if each.peer == "broken"] == [f"{error.__name__}: no memory"] * 2
    # once a run, not once a direction
    assert len(built) == 2
    assert all(each.timing is not None and each.over_first is None for each in found if each.peer == "sdpa")


def test_a_peer_that_writes_to_its_inputs_ends_the_run() -> None:
    """A peer that writes to its inputs ends the run: the next peers would compute, faster, on zeros, and be found right."""

    def build(problem, inputs):  # type: ignore[no-untyped-def]
        def attend(q, k, v):  # type: ignore[no-untyped-def]
            out = rw.attention(q, k, v, problem.pattern)
            k.zero_()
            return out

        return Built(attend, problem.pattern, "x")

    comparison = module.Comparison(
        [(_problem(WINDOW), [Peer("careless", "", lambda problem, backward: None, build), *peers("sdpa")])],
        ("forward",), failures=session.FAILURES,
    )  # fmt: skip
    with pytest.raises(ShapeError, match="careless: got a peer that writes to its inputs"):
        list(module.outcomes(comparison))


@pytest.mark.parametrize("names", [[], ["sdpa", "sdpa"]])
def test_peers_have_names_of_their_own(names: list[str]) -> None:
    with pytest.raises(ShapeError, match="peers: got .*; wanted one or more, of different names"):
        compare(_problem(WINDOW), peers(*names), rounds=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inputs_that_are_strided_views(dtype: torch.dtype) -> None:
    problem = dataclasses.replace(_problem(WINDOW), dtype=dtype)
    views = Sample(*(x[:, :, ::2] for x in dataclasses.replace(problem, tokens=600).inputs()))
    for each in compare(problem, peers("ringweave", "sdpa+mask"), inputs=views, rounds=1, memory=False):
        assert each.timing is not None, each.reason


def test_a_compiled_mask_has_no_numbers_beyond_int32() -> None:
    """FlexAttention's kernels have positions of 32 bits, and a larger number wraps there."""
    from torch.fx.experimental.proxy_tensor import make_fx

    # the package's function hides its module of the same name
    masks = importlib.import_module("ringweave_lab.bench.peers")
    for pattern in (rw.Causal(), rw.SlidingWindow(20, 0), rw.Documents([3, 97]) & rw.Causal()):
        mask_mod = masks._mask_mod(pattern, "cpu")
        q, k = torch.arange(100, dtype=torch.int32)[:, None], torch.arange(100, dtype=torch.int32)[None]
        traced = make_fx(mask_mod)(q, q, q, k)
        numbers = [x for node in traced.graph.nodes for x in node.args if isinstance(x, int)]
        assert all(abs(x) < 2**31 for x in numbers)
        assert traced(q, q, q, k).equal(pattern.to_dense(100)[0, 0])
