"""Test the GPU case without a GPU: its sizes, its arithmetic, and its answers to wrong or missing kernels."""

from __future__ import annotations

import dataclasses
import importlib
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

import ringweave as rw
from ringweave.errors import UnsupportedError
from ringweave_lab.bench import CaseResult, Options, Outcome, Target
from ringweave_lab.bench.cases import gpu
from ringweave_lab.bench.cases.gpu import OWN, asked, linear, part
from ringweave_lab.bench.compare import Comparison
from ringweave_lab.bench.peak import Peak, aside
from ringweave_lab.bench.record import targets
from ringweave_lab.tune import session
from ringweave_lab.tune.measure import Ratio, Runnable, Timing, replayed
from ringweave_lab.tune.problem import Problem, RandomBlocks
from ringweave_lab.tune.session import Built, Peer

# the package's function hides its module of the same name
compare = importlib.import_module("ringweave_lab.bench.compare")
PROBLEM = Problem("stage A", RandomBlocks(0.5), 512, 3, 16)
SMALL = part(PROBLEM, ("ringweave:dense_batched", "flex"))


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every call; the n-th one takes n seconds."""

    def interleaved(calls: Mapping[str, Runnable], *, rounds: int, **options: object) -> dict[str, Timing]:
        for call in calls.values():
            call()
        return {name: Timing((number + 1.0,) * rounds) for number, name in enumerate(calls)}

    monkeypatch.setattr(session, "interleaved", interleaved)


def measure(of: Comparison, peak: float | None = None) -> list[Outcome]:
    return list(compare.outcomes(dataclasses.replace(of, rounds=2), peak=peak))


def run(options: Options, clock: Callable[[], float] = time.perf_counter) -> CaseResult:
    measuring, records = gpu.measure(options, silent, clock), []
    while True:
        try:
            records.append(next(measuring))
        except StopIteration as end:
            return CaseResult("kernels", tuple(records), end.value)


def silent(text: str) -> None: ...


def test_the_sizes_are_those_of_the_targets() -> None:
    problems = [each.entries[0][0] for each in gpu.PARTS.values()]
    by_name = {each.name: each for each in problems}
    drawn = {each.name: each.relation for each in problems if isinstance(each.relation, RandomBlocks)}
    assert {*by_name} - {*drawn} == {"causal", "window", "documents", "sinks"}
    stage = [each for each in gpu.PARTS.values() if each.entries[0][0].name == "stage A"]
    assert [each.entries[0][0].tokens for each in stage] == [16384, 32768, 65536]
    assert (drawn["stage A"].block_size, drawn["stage A"].density, by_name["stage A"].head_dim) == (128, 0.1, 128)
    assert all({"flex", "ringweave:flash"} < {*each.entries[0][1]} for each in stage)
    series = [problem.relation.density for problem, _ in gpu.PARTS["densities"].entries]  # type: ignore[union-attr]
    assert (max(series), min(series)) == (0.5, 0.01)
    sparse = by_name["90% sparse"]
    assert (sparse.tokens, sparse.heads, sparse.head_dim, drawn["90% sparse"].density) == (65536, 8, 64, 0.1)
    top = by_name["64 x 64, top 64"]
    assert (top.tokens, top.heads, drawn[top.name].block_size, drawn[top.name].chosen) == (109632, 7, 64, 64)
    million = by_name["a million tokens"]
    assert (million.tokens, million.heads, drawn[million.name].density) == (2**20, 16, 0.01)
    assert [each.directions for each in gpu.PARTS.values() if each.memory] == [("forward + backward",)]
    assert {(each.dtype, each.device) for each in problems} == {(torch.bfloat16, "cuda")}
    # every part's tiles are full, so operations are counted by tiles
    for each in (*gpu.PARTS.values(), *gpu.QUICK):
        problem = each.entries[0][0]
        if isinstance(problem.relation, RandomBlocks):
            assert problem.tokens % problem.relation.block_size == 0


def test_the_patterns_have_the_density_asked_for() -> None:
    half = PROBLEM.pattern
    assert half.density(512) == 0.5
    assert half == dataclasses.replace(PROBLEM).pattern
    drawn = RandomBlocks(block_size=64, chosen=4)
    top = drawn.pattern(1024)
    assert isinstance(top, rw.BlockTable)
    assert top.mask.sum(-1).tolist() == [4] * 16
    assert top.blocks.most == 4
    assert top.tables[0].device.type == "cpu"
    assert drawn.pattern(1024, "meta").tables[0].device.type == "meta"
    # a row has more tiles than the diagonal
    assert RandomBlocks(0.01).pattern(512).density(512) > 0.25
    assert RandomBlocks(0.01).pattern(100).density(100) == 1.0


def test_kernels_are_checked_timed_and_counted(steady: None) -> None:
    found = measure(SMALL, 1e9)
    mine = {each.direction: each for each in found if each.peer == "ringweave:dense_batched"}
    assert set(mine) == {"forward", "backward"}
    tiles = 8  # half of the 16
    for direction, products in (("forward", 2), ("backward", 5)):
        each = mine[direction]
        assert each.timing == Timing((1.0, 1.0))
        assert each.gflops == pytest.approx(tiles * 3 * 128**2 * 16 * 2 * products / 1e9)
        assert each.peak_share == pytest.approx(each.gflops)
        assert each.accuracy is not None
        assert (each.accuracy.dk is not None) == (direction == "backward")
    flex = next(each for each in found if (each.peer, each.direction) == ("flex", "backward"))
    assert flex.timing is None
    assert flex.reason == "FlexAttention has no backward on a CPU"


def test_forward_and_backward_in_one_go_with_memory(steady: None) -> None:
    (each,) = measure(part(PROBLEM, ("ringweave:dense_batched",), whole=True))
    assert each.direction == "forward + backward"
    assert each.peak is not None
    assert each.peak_share is None
    assert PROBLEM.flops("forward + backward") == 7 * PROBLEM.flops("forward") / 2
    assert PROBLEM.flops("backward") == 5 * PROBLEM.flops("forward") / 2


def test_dense_kernels_of_a_gpu_are_not_there(steady: None) -> None:
    found = measure(part(PROBLEM, ("ringweave:dense_batched",), dense=True))
    dense = [each for each in found if each.workload == "stage A, dense"]
    assert {(each.peer, each.direction) for each in dense} >= {("sdpa:cudnn", "forward"), ("sdpa:cudnn", "backward")}
    assert all(each.density == 1.0 for each in dense)
    cudnn = next(each for each in dense if each.peer == "sdpa:cudnn")
    assert str(cudnn.reason).startswith("RuntimeError: No ")


def test_dense_kernels_are_over_the_first_sparse_one(steady: None) -> None:
    def build(problem, inputs):  # type: ignore[no-untyped-def]
        return Built(lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v), rw.Full(), "there")

    of = part(PROBLEM, ("ringweave:dense_batched",), dense=True)
    there = Peer("sdpa:there", "", lambda problem, backward: None, build)
    of = dataclasses.replace(of, entries=[of.entries[0], (of.entries[1][0], [there])])
    for sparse, dense in (measure(of)[:2], measure(of)[2:]):
        assert dense.timing == Timing((2.0, 2.0))
        assert (sparse.over_first, dense.over_first) == (Ratio(1.0, 1.0, 1.0, 1.0), Ratio(2.0, 2.0, 2.0, 2.0))


def test_a_wrong_kernel_is_not_timed(steady: None) -> None:
    def build(problem, inputs):  # type: ignore[no-untyped-def]
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return rw.attention(q, k, v, problem.pattern) * 1.01

        return Built(attend, problem.pattern, "slightly wrong")

    wrong = Peer("wrong", "", lambda problem, backward: None, build)
    found = measure(dataclasses.replace(SMALL, entries=[(PROBLEM, [wrong])]))
    assert [each.timing for each in found] == [None, None]
    assert all(str(each.reason).startswith("wrong: root mean square error of out") for each in found)


def outcome(name: str, peer: str, direction: str, **known: object) -> Outcome:
    sizes: dict[str, object] = {"tokens": 16384, "heads": 16, "kv_heads": 16, "head_dim": 128, "dtype": "bfloat16"}
    fields = sizes | {"density": 0.1, "workload": name, "peer": peer, "direction": direction, "computes": ""} | known
    return Outcome(**fields)  # type: ignore[arg-type]


def test_rates_and_ratios_beside_their_targets() -> None:
    own = OWN
    found = targets(
        gpu.TARGETS,
        [
            outcome("stage A", own, "forward", gflops=500e3, timing=Timing((1.0,))),
            outcome("stage A", "flex", "forward", over_first=Ratio(1.2, 1.2, 1.2, 1.2)),
            outcome("stage A", own, "backward", reason="wrong"),
        ],
    )
    size = "16,384 tokens, 16 heads, D 128, density 10.0%"
    assert found == [
        Target("stage A: forward", size, 500.0, 480.0, True, "TFLOP/s"),
        Target("stage C: forward", size, 500.0, 600.0, True, "TFLOP/s"),
        Target("forward: FlexAttention's time over ringweave's", size, 1.2, 1.3, True),
        Target("stage A: backward", size, None, 320.0, True, "TFLOP/s", "wrong"),
        Target("stage C: backward", size, None, 500.0, True, "TFLOP/s", "wrong"),
    ]
    assert [each.met for each in found] == [True, False, False, None, None]
    assert found[0].spelled(500.0) == "500.00 TFLOP/s"


def test_replays_are_timed_and_calls_that_no_graph_can_hold_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Graph:
        def replay(self) -> None:
            done.append("replay")

    def timed(calls: Mapping[str, Runnable], **options: object) -> dict[str, Timing]:
        for call in calls.values():
            call()
        return {name: Timing((1.0,)) for name in calls}

    def reads() -> None:
        done.append("reads")
        if "reads" not in done[:-1]:
            raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(session, "on_device", lambda device: nullcontext())
    monkeypatch.setattr(session, "interleaved", timed)
    problem = Problem("small", rw.Full(), 128, device="cuda")
    made = [session.Entry(problem, name, "forward", how=name) for name in ("captured", "reads", "wrong", "captured")]
    made[0].call = made[3].call = lambda: done.append("called")
    made[1].call = reads
    session.in_turn(made, rounds=1)
    assert done == ["called", "reads", "replay", "reads"]
    assert [each.timing is not None for each in made] == [True, True, False, True]
    why = "timed with its launches, not as a graph: RuntimeError: operation not permitted when stream is capturing"
    assert [each.how for each in made] == ["captured", f"reads; {why}", "wrong", "captured"]
    done.clear()
    # another timer, and any timer on a CPU, still times calls
    session.in_turn(made[:1], rounds=1, timer=lambda call, times: 1.0)
    assert done == ["called"]


@pytest.mark.gpu
def test_backward_alone_is_captured_on_a_stream_of_its_own() -> None:
    q, k, v, dout = (torch.randn(1, 2, 512, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    with aside("cuda"):
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = rw.attention(*leaves, rw.Causal(), backend="triton")
        found: list[tuple[Tensor, ...]] = []
        replay = replayed(lambda: found.append(torch.autograd.grad(out, leaves, dout, retain_graph=True)))
        replay()
        want = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(found[0], want, strict=True))


def test_time_per_tile_over_densities() -> None:
    own = OWN
    series = [
        outcome("densities", own, "forward", density=density, gflops=rate, timing=Timing((1.0,)))
        for density, rate in ((0.5, 550.0), (0.1, 500.0), (0.01, 400.0))
    ]
    (target,) = linear(series)
    assert (target.figure, target.bound, target.at_least, target.met) == (550 / 400, 1.15, False, False)
    assert target.size == "16,384 tokens, density 1.0% to 50.0%"
    series[1] = outcome("densities", own, "forward", reason="wrong")
    (target,) = linear(series)
    assert (target.figure, target.reason) == (None, "wrong")


def test_milliseconds_have_a_target_at_their_own_length() -> None:
    own = OWN
    for tokens, bound, met in ((109632, 4.0, False), (16384, None, None)):
        each = outcome("64 x 64, top 64", own, "forward", tokens=tokens, timing=Timing((0.005,)))
        (target,) = targets(gpu.TARGETS, [each])
        assert (target.figure, target.bound, target.met) == (5.0, bound, met)


def test_memory_beyond_the_tensors() -> None:
    own = OWN
    tensors = 16 * 16384 * 128 * 2  # spoil one of q, k, v, dout, out, dq, dk, dv
    lse = 16 * 16384 * 4
    peak = Peak(4 * tensors + lse + (8 * tensors + lse) // 10, "cuda allocator")
    (target,) = targets(gpu.TARGETS, [outcome("a million tokens", own, "forward + backward", peak=peak)])
    assert target.figure == pytest.approx(0.1)
    assert (target.bound, target.unit, target.met) == (0.05, "%", False)


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedError, match="device: got 'cuda'; wanted a CUDA device"):
        run(Options(device="cuda"))


def test_no_part_starts_once_the_time_is_used_up(steady: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "matmul_peak", lambda *of: 2e9)
    monkeypatch.setattr(gpu, "PARTS", {"one": part(PROBLEM, ("ringweave:dense_batched",)), "two": SMALL})
    times = iter((0.0, 1.0, gpu.BUDGET + 1.0))
    result = run(Options(device="cpu", dtype=torch.float32, rounds=1), lambda: next(times))
    assert result.conclusion == ("Matrix product of float32: 0 TFLOP/s. No time was left for stage A at 512 tokens.")
    outcomes = [each for each in result.records if isinstance(each, Outcome)]
    assert [each.direction for each in outcomes] == ["forward", "backward"]
    assert outcomes[0].gflops is not None
    assert outcomes[0].peak_share == pytest.approx(outcomes[0].gflops / 2)


def test_a_length_of_the_users() -> None:
    quick = asked(Options(quick=True, device="cuda"))
    assert [each.entries[0] for each in quick] == [each.entries[0] for each in gpu.QUICK]
    assert {each.rounds for each in quick} == {5}
    (part_of_it,) = asked(Options(part="causal", device="cuda"))
    assert part_of_it.entries[0][0].relation == rw.Causal()
    with pytest.raises(UnsupportedError, match="part: got 'casual'; wanted one of 16K, 32K"):
        asked(Options(part="casual", device="cuda"))
    (only,) = asked(Options(tokens=4096, heads=2, device="cuda"))
    problem = only.entries[0][0]
    assert (problem.tokens, problem.heads, problem.key_heads, problem.name) == (4096, 2, 2, "stage A")


@pytest.mark.gpu
@pytest.mark.timeout(500)
def test_on_a_gpu() -> None:
    result = run(Options(device="cuda", tokens=4096, heads=2, rounds=2))
    mine = [each for each in result.records if isinstance(each, Outcome) and each.peer == "ringweave:triton"]
    assert [each.direction for each in mine] == ["forward", "backward"]
    assert all(each.timing is not None for each in mine), [each.reason for each in mine]
    assert any(isinstance(each, Target) for each in result.records)
