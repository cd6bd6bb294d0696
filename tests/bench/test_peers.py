from __future__ import annotations

import dataclasses

import pytest
import torch

import ringweave as rw
from ringweave.bench.compare import compare
from ringweave.bench.gather_scatter import gather_scatter
from ringweave.bench.peers import PEERS, Built, Peer, peers
from ringweave.bench.workload import Oracle, Workload, sample_rows
from ringweave.errors import UnsupportedError

WINDOW = rw.SlidingWindow(50) & rw.Causal() | rw.Sinks(8) & rw.Causal()
LONGNET = rw.LongNet([64, 256], [1, 4], causal=True)


def _workload(pattern: rw.Pattern, tokens: int = 300, heads: int = 2) -> Workload:
    return Workload("test", pattern, tokens, heads, 32)


@pytest.mark.parametrize("pattern", [WINDOW, rw.Causal(), rw.SlidingWindow(20, 20), LONGNET], ids=repr)
def test_the_oracle_agrees_with_the_reference(pattern: rw.Pattern) -> None:
    workload = _workload(pattern)
    inputs = workload.inputs()
    oracle = Oracle(pattern, inputs, sample_rows(300))
    q, k, v, dout = (x.double().requires_grad_() for x in oracle.sliced)
    out = rw.attention(q, k, v, pattern, backend="reference")
    accuracy = oracle.check_gradients(out, *torch.autograd.grad(out, (q, k, v), dout))
    assert all(error.largest < 1e-12 for error in (accuracy.out, accuracy.dq, accuracy.dk, accuracy.dv))


@pytest.mark.parametrize("name", [name for name in PEERS if name != "flex"])
def test_every_peer_computes_what_it_says(name: str) -> None:
    workload = _workload(WINDOW)
    outcomes = compare(workload, peers(name), rounds=1, memory=False)
    for outcome in outcomes:
        if outcome.timing is None:
            said = {
                "ringweave:sdpa": "neither full nor causal",
                "ringweave:cpu": "native kernel is not there",
                "ringweave:triton": "it runs on CUDA and ROCm tensors",
                "ringweave:flex": "gives no lse and has no backward",
                "ringweave:flash": "it calls kernels for CUDA tensors",
            }
            assert name in said, outcome.reason
            assert said[name] in str(outcome.reason)
        else:
            assert not outcome.wrong
            assert outcome.computes == ("Causal()" if name == "sdpa" else repr(WINDOW))


@pytest.mark.parametrize("name", ["ringweave", "ringweave:gather", "sdpa", "sdpa+mask", "gather_scatter"])
def test_peers_group_queries(name: str) -> None:
    workload = Workload("grouped", rw.SlidingWindow(50), 300, 4, 32, kv_heads=2)
    assert workload.inputs().k.shape == (1, 2, 300, 32)
    for outcome in compare(workload, peers(name), rounds=1, memory=False):
        assert outcome.timing is not None, outcome.reason
        assert outcome.kv_heads == 2


def test_dense_is_not_causal_where_the_pattern_is_not() -> None:
    assert _workload(rw.SlidingWindow(8, 8)).dense_pattern == rw.Full()
    assert _workload(WINDOW).dense_pattern == rw.Causal()


def test_a_wrong_peer_is_not_timed() -> None:
    def build(workload, inputs):  # type: ignore[no-untyped-def]
        def attend(q, k, v):  # type: ignore[no-untyped-def]
            # one key too many in one row
            out = rw.attention(q, k, v, workload.pattern)
            return torch.cat([out[:, :, :-1], out[:, :, -1:] * 1.001], 2)

        return Built(attend, workload.pattern, "slightly wrong")

    wrong = Peer("wrong", "", lambda workload, backward: None, build)
    outcomes = compare(_workload(WINDOW), [*peers("ringweave"), wrong], rounds=1, memory=False)
    assert [o.peer for o in outcomes if o.wrong] == ["wrong", "wrong"]
    for outcome in outcomes:
        assert (outcome.timing is None) == outcome.wrong
    assert "root mean square error of out" in str(outcomes[1].reason)


def test_a_wrong_gradient_is_found() -> None:
    def build(workload, inputs):  # type: ignore[no-untyped-def]
        return Built(
            lambda q, k, v: rw.attention(q, k.detach() * 0.999 + k * 0.001, v, workload.pattern), workload.pattern, "x"
        )

    wrong = Peer("wrong", "", lambda workload, backward: None, build)
    forward, both = compare(_workload(rw.Causal()), [wrong], rounds=1, memory=False)
    assert not forward.wrong
    assert both.wrong
    assert "error of dk" in str(both.reason)


def test_nan_is_wrong() -> None:
    def build(workload, inputs):  # type: ignore[no-untyped-def]
        return Built(lambda q, k, v: rw.attention(q, k, v) * torch.nan, rw.Full(), "x")

    outcomes = compare(
        _workload(rw.Full()), [Peer("nan", "", lambda w, b: None, build)], directions=("forward",), rounds=1
    )
    assert outcomes[0].wrong
    assert outcomes[0].timing is None


def test_ratios_are_over_the_first_peer() -> None:
    first, second = compare(_workload(WINDOW), peers("ringweave", "sdpa"), directions=("forward",), rounds=3)
    assert first.over_first is not None
    assert second.over_first is not None
    assert first.over_first.medians == 1.0
    assert first.timing is not None
    assert second.timing is not None
    assert second.over_first.medians == second.timing.median / first.timing.median
    assert first.how == "gather" or first.how in PEERS or first.how
    assert first.gflops == pytest.approx(WINDOW.density(300) * 2 * 300**2 * 32 * 4 / first.timing.median / 1e9)
    assert first.peak is not None


def test_flex_compiles_a_table_of_lists() -> None:
    """Its lists are looked up in ways that dynamo cannot trace: it is given the mask."""
    indices = torch.tensor([[0, 1], [1, 0], [3, 2], [3, 3]])
    table = rw.BlockTable(indices=indices, counts=torch.full((4,), 2), key_blocks=4)
    (outcome,) = compare(_workload(table, 512), peers("flex"), rounds=1, memory=False, directions=("forward",))
    assert outcome.timing is not None, outcome.reason
    assert not outcome.wrong


def test_what_flex_cannot_do_is_said() -> None:
    flex = PEERS["flex"]
    assert flex.supports(_workload(WINDOW), False) is None
    assert flex.supports(_workload(WINDOW), True) == "FlexAttention has no backward on a CPU"
    assert "mixture" in str(flex.supports(_workload(LONGNET), False))
    assert "N x N" in str(PEERS["sdpa+mask"].supports(dataclasses.replace(_workload(WINDOW), tokens=2**20), False))


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
