"""The GPU case without a GPU: its sizes, its arithmetic, what it makes of a kernel that is wrong or missing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

import ringweave as rw
from ringweave.bench import gpu
from ringweave.bench.case import Options, Target
from ringweave.bench.compare import Outcome
from ringweave.bench.goals import goals
from ringweave.bench.gpu import Part, asked, measure, operations, run
from ringweave.bench.measure import Call, Peak, Ratio, Timing
from ringweave.bench.peers import PEERS, Built, Peer
from ringweave.bench.workload import Workload
from ringweave.errors import UnsupportedError

SMALL = Part("stage A", 512, 3, 16, 0.5, peers=("ringweave:gather", "flex"))


def steady(calls: Mapping[str, Call], rounds: int) -> dict[str, Timing]:
    """Every call runs, and takes as many seconds as it comes in order."""
    for call in calls.values():
        call()
    return {name: Timing((number + 1.0,) * rounds) for number, name in enumerate(calls)}


def silent(text: str) -> None: ...


def test_the_sizes_are_those_of_the_targets() -> None:
    by_name = {part.name: part for part in gpu.PARTS}
    stage = [part for part in gpu.PARTS if part.name == "stage A"]
    assert [part.tokens for part in stage] == [16384, 32768, 65536]
    assert {(part.tile, part.head_dim, part.density) for part in stage} == {(128, 128, 0.1)}
    assert all("flex" in part.peers and "ringweave:flash" in part.peers for part in stage)
    series = [part.density for part in gpu.PARTS if part.name == "densities"]
    assert (max(series), min(series)) == (0.5, 0.01)
    sparse = by_name["90% sparse"]
    assert (sparse.tokens, sparse.heads, sparse.head_dim, sparse.density) == (65536, 8, 64, 0.1)
    top = by_name["64 x 64, top 64"]
    assert (top.tokens, top.heads, top.tile, top.chosen) == (109632, 7, 64, 64)
    million = by_name["a million tokens"]
    assert (million.tokens, million.heads, million.density, million.whole) == (2**20, 16, 0.01, True)
    # tiles of every part are whole: operations are those of tiles
    assert all(part.tokens % part.tile == 0 for part in (*gpu.PARTS, *gpu.QUICK))


def test_the_patterns_have_the_density_asked_for() -> None:
    half = SMALL.pattern()
    assert half.density(512) == 0.5
    assert half == SMALL.pattern()
    top = Part("", 1024, 2, 16, tile=64, chosen=4).pattern()
    assert isinstance(top, rw.BlockTable)
    assert top.mask.sum(-1).tolist() == [4] * 16
    assert top.blocks.most == 4
    assert top.tables[0].device.type == "cpu"
    assert Part("", 1024, 2, 16, tile=64, chosen=4).pattern("meta").tables[0].device.type == "meta"


def test_kernels_are_checked_timed_and_counted() -> None:
    found = measure(SMALL, torch.float32, "cpu", 2, steady, 1e9, silent)
    mine = {each.direction: each for each in found if each.peer == "ringweave:gather"}
    assert set(mine) == {"forward", "backward"}
    tiles = 8  # of 16, by half
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


def test_forward_and_backward_in_one_go_with_memory() -> None:
    part = dataclasses.replace(SMALL, name="a million tokens", peers=("ringweave:gather",), whole=True)
    (each,) = measure(part, torch.float32, "cpu", 1, steady, None, silent)
    assert each.direction == "forward + backward"
    assert each.peak is not None
    assert each.peak_share is None
    workload = Workload("", part.pattern(), 512, 3, 16)
    assert operations(workload, "forward + backward") == 7 * operations(workload, "forward") / 2


def test_dense_kernels_of_a_gpu_are_not_there() -> None:
    part = dataclasses.replace(SMALL, peers=("ringweave:gather",), dense=True)
    found = measure(part, torch.float32, "cpu", 1, steady, None, silent)
    dense = [each for each in found if each.workload == "stage A, dense"]
    assert {(each.peer, each.direction) for each in dense} >= {("sdpa:cudnn", "forward"), ("sdpa:cudnn", "backward")}
    assert all(each.density == 1.0 for each in dense)
    cudnn = next(each for each in dense if each.peer == "sdpa:cudnn")
    assert str(cudnn.reason).startswith("RuntimeError: No ")


def test_a_wrong_kernel_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(workload, inputs):  # type: ignore[no-untyped-def]
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return rw.attention(q, k, v, workload.pattern) * 1.01

        return Built(attend, workload.pattern, "slightly wrong")

    monkeypatch.setitem(PEERS, "wrong", Peer("wrong", "", lambda workload, backward: None, build))
    part = dataclasses.replace(SMALL, peers=("wrong",))
    found = measure(part, torch.float32, "cpu", 1, steady, None, silent)
    assert [each.timing for each in found] == [None, None]
    assert all(str(each.reason).startswith("wrong: root mean square error of out") for each in found)


def outcome(name: str, peer: str, direction: str, **known: object) -> Outcome:
    sizes: dict[str, object] = {"tokens": 16384, "heads": 16, "kv_heads": 16, "head_dim": 128, "dtype": "bfloat16"}
    fields = sizes | {"density": 0.1, "workload": name, "peer": peer, "direction": direction, "computes": ""} | known
    return Outcome(**fields)  # type: ignore[arg-type]


def test_rates_and_ratios_beside_their_targets() -> None:
    own = "ringweave:triton"
    found = goals(
        [
            outcome("stage A", own, "forward", gflops=500e3, timing=Timing((1.0,))),
            outcome("stage A", own, "backward", reason="wrong"),
            outcome("stage A", "flex", "forward", over_first=Ratio(1.2, 1.2, 1.2, 1.2)),
        ],
        own,
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


def test_time_per_tile_over_densities() -> None:
    own = "ringweave:triton"
    series = [
        outcome("densities", own, "forward", density=density, gflops=rate, timing=Timing((1.0,)))
        for density, rate in ((0.5, 550.0), (0.1, 500.0), (0.01, 400.0))
    ]
    (target,) = goals(series, own)
    assert (target.figure, target.bound, target.at_least, target.met) == (550 / 400, 1.15, False, False)
    assert target.size == "16,384 tokens, density 1.0% to 50.0%"
    series[1] = outcome("densities", own, "forward", reason="wrong")
    (target,) = goals(series, own)
    assert (target.figure, target.reason) == (None, "wrong")


def test_milliseconds_have_a_target_at_their_own_length() -> None:
    own = "ringweave:triton"
    for tokens, bound, met in ((109632, 4.0, False), (16384, None, None)):
        each = outcome("64 x 64, top 64", own, "forward", tokens=tokens, timing=Timing((0.005,)))
        (target,) = goals([each], own)
        assert (target.figure, target.bound, target.met) == (5.0, bound, met)


def test_memory_beyond_the_tensors() -> None:
    own = "ringweave:triton"
    tensors = 16 * 16384 * 128 * 2  # one of q, k, v, dout, out, dq, dk, dv
    lse = 16 * 16384 * 4
    peak = Peak(4 * tensors + lse + (8 * tensors + lse) // 10, "cuda allocator")
    (target,) = goals([outcome("a million tokens", own, "forward + backward", peak=peak)], own)
    assert target.figure == pytest.approx(0.1)
    assert (target.bound, target.unit, target.met) == (0.05, "%", False)


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedError, match="device: got 'cuda'; wanted a CUDA device"):
        run(Options(device="cuda"), silent)


def test_no_part_starts_once_the_time_is_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "matmul_peak", lambda *of: 2e9)
    monkeypatch.setattr(gpu, "PARTS", (dataclasses.replace(SMALL, peers=("ringweave:gather",)), SMALL))
    times = iter((0.0, 1.0, gpu.BUDGET + 1.0))
    result = run(Options(device="cpu", dtype=torch.float32, rounds=1), silent, steady, lambda: next(times))
    assert result.conclusion == ("Matrix product of float32: 0 TFLOP/s. No time was left for stage A at 512 tokens.")
    outcomes = [each for each in result.records if isinstance(each, Outcome)]
    assert [each.direction for each in outcomes] == ["forward", "backward"]
    assert outcomes[0].gflops is not None
    assert outcomes[0].peak_share == pytest.approx(outcomes[0].gflops / 2)


def test_a_length_of_the_users() -> None:
    assert asked(Options(quick=True)) == list(gpu.QUICK)
    (part,) = asked(Options(tokens=4096, heads=2))
    assert (part.tokens, part.heads, part.name) == (4096, 2, "stage A")


@pytest.mark.gpu
@pytest.mark.timeout(500)
def test_on_a_gpu() -> None:
    result = run(Options(device="cuda", tokens=4096, heads=2, rounds=2), silent)
    mine = [each for each in result.records if isinstance(each, Outcome) and each.peer == "ringweave:triton"]
    assert [each.direction for each in mine] == ["forward", "backward"]
    assert all(each.timing is not None for each in mine), [each.reason for each in mine]
    assert any(isinstance(each, Target) for each in result.records)
