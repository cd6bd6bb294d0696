"""Run measured configurations in Triton's interpreter, in a process with TRITON_INTERPRET=1; test_interpreted.py starts it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

import ringweave as rw
from ringweave.backends import tuning
from ringweave.backends.triton import kernels, launch, launch_config
from ringweave.backends.triton.launch_config import LaunchConfig
from ringweave_lab.tune import save_answers, tune
from ringweave_lab.tune.answers import write_entries
from ringweave_lab.tune.measure import Timing
from ringweave_lab.tune.overrides import overriding
from ringweave_lab.tune.problem import BOTH, FORWARD, Problem
from ringweave_lab.tune.search import Candidate, Search
from ringweave_lab.tune.session import FAILURES, Entry, Session
from tests.oracle import Inputs
from tests.test_conformance import conforms

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
PATTERN = rw.SlidingWindow(20)
KERNELS = ("forward", "backward_q", "backward_kv")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tuning.VARIABLE, str(tmp_path))


class Launched:
    """A kernel that records its launch configurations."""

    def __init__(self, kernel: object, seen: dict[str, dict[str, int]], name: str):
        self.kernel, self.seen, self.name = kernel, seen, name

    def __getitem__(self, grid: object) -> object:
        def call(*arguments: object, **constants: int) -> object:
            self.seen[self.name] = constants
            return self.kernel[grid](*arguments, **constants)  # type: ignore[index]

        return call


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Mapping[str, Mapping[str, int]]:
    """Return the constants of each kernel's last launch."""
    seen: dict[str, dict[str, int]] = {}
    for name in KERNELS:
        monkeypatch.setattr(kernels, name, Launched(getattr(kernels, name), seen, name))
    return seen


def test_measured_blocks_are_what_a_call_runs_with_and_it_is_right(
    launched: Mapping[str, Mapping[str, int]], poisoned: None
) -> None:
    x = Inputs.random(130, heads=2, kv_heads=1, dtype=torch.float16)
    blocks = {
        "forward": LaunchConfig(64, 16, 2, 3),
        "backward_q": LaunchConfig(32, 64, 4, 1),
        "backward_kv": LaunchConfig(64, 16, 4, 1),
    }
    conforms(x, PATTERN, "triton")
    usual = {name: dict(constants) for name, constants in launched.items()}
    kinds = {}
    with overriding({}) as given:
        launch.cut("forward", x.q, x.k, x.v, PATTERN.plan(130, heads=2))
    for name in KERNELS:
        tile = (128, 128) if name == "backward_kv" else given.requests[0].key.tile
        kinds[name] = given.requests[0].key._replace(kernel=name, tile=tile)
    entries = [kinds[name]._asdict() | {"blocks": dataclasses.asdict(blocks[name])} for name in KERNELS]
    write_entries([], entries)
    conforms(x, PATTERN, "triton")
    for name in KERNELS:
        taken, before = (
            tuple(of[name][field] for field in ("BLOCK_N", "num_warps", "num_stages", "STAGES"))
            for of in (launched, usual)
        )
        assert taken == (blocks[name].n, blocks[name].warps, blocks[name].stages, blocks[name].stages)
        assert taken != before
    assert launched["backward_kv"]["BLOCK_M"] == 64
    assert launched["forward"]["ROWS"] * launched["forward"]["HEADS"] == 64


def test_blocks_of_half_a_word_know_which_keys_are_alive(poisoned: None) -> None:
    """In row 32, no query attends some keys of the tile of keys 0 to 31: a block finds its bits within a mask word."""
    for block in (LaunchConfig(16, 16, 4, 1), LaunchConfig(32, 16, 4, 2)):
        x = Inputs.random(40, heads=1, dtype=torch.float16)
        plan = PATTERN.plan(40, tile=32)
        with overriding({}) as given:
            launch.cut("forward", x.q, x.k, x.v, plan)
        kind = given.requests[0].key
        assert kind.tile == (32, 32)
        kinds = [kind._replace(kernel=kernel) for kernel in KERNELS]
        run = _search(True)
        candidate = Candidate("triton", (32, 32), tuple((each, block) for each in kinds))
        assert list(run.check([candidate], until=None)) == [candidate], run.reasons


def _search(needs_grad: bool) -> Search:
    problem = Problem("test", PATTERN, 40, 1, 16, dtype=torch.float16)
    session = Session(problem.inputs(), failures=FAILURES)
    return Search(problem, session, BOTH if needs_grad else FORWARD, rounds=1)


def test_of_another_type_they_are_not_taken(launched: Mapping[str, Mapping[str, int]]) -> None:
    x = Inputs.random(40, heads=1)
    with overriding({}) as given:
        launch.cut("forward", x.q, x.k, x.v, PATTERN.plan(40))
    kind = given.requests[0].key
    assert kind.dtype == "float32"
    write_entries(
        [], [kind._replace(dtype="float16")._asdict() | {"blocks": dataclasses.asdict(LaunchConfig(16, 16, 2, 1))}]
    )
    conforms(x, PATTERN, "triton")
    assert launched["forward"]["num_warps"] != 2


@pytest.mark.parametrize("needs_grad", [False, True])
def test_the_search_ends_where_the_clock_leads_it(needs_grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The search computes and checks candidates; its simulated clock makes 16 keys and one stage fastest."""
    run = _search(needs_grad)
    monkeypatch.setattr("ringweave_lab.tune.descent._HELD", (16, 32))
    monkeypatch.setattr("ringweave_lab.tune.descent._STREAMED", (16, 32))
    computed = []

    def time(calls: Mapping[Candidate, Entry], part: float) -> dict[Candidate, Timing]:
        computed.extend(calls)
        return {each: Timing((seconds(each),)) for each in calls}

    def seconds(candidate: Candidate) -> float:
        return 1.0 + sum(of.n + 9 * of.stages + 9 * of.warps for _, of in candidate.blocks)

    monkeypatch.setattr(run, "time", time)
    own = Candidate("triton")
    run.compete([own, Candidate("dense_batched")], None, 1.0)
    run.tune_blocks(own)
    assert [each.key.kernel for each in run.kernels] == (["backward_q", "backward_kv"] if needs_grad else ["forward"])
    for each in run.kernels:
        found = each.descent
        assert (found.best.n, found.best.stages, found.best.warps) == (16, 1, 4)
        assert min(found.seconds, key=found.seconds.__getitem__) == found.best
        assert found.best != found.start
        # only candidates that were computed and found right have seconds
        assert found.reasons == {}
    assert len(computed) > 8
    assert {each.backend for each in computed} == {"triton", "dense_batched"}


def test_wrong_blocks_have_a_reason_and_no_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    run = _search(False)
    (request,) = run.requests(Candidate("triton"))
    right = launch.forward

    def forward(*arguments: object) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = right(*arguments)  # type: ignore[arg-type]
        wrong = launch_config.chooser.get().configs[request.key].stages == 3  # type: ignore[union-attr]
        if launch_config.chooser.get().configs[request.key].stages == 4:  # type: ignore[union-attr]
            raise RuntimeError("PassManager::run failed")
        return (out * 1.1 if wrong else out), lse

    monkeypatch.setattr(launch, "forward", forward)
    tried = [dataclasses.replace(request.usual, stages=stages) for stages in (1, 3, 4)]
    found = run.measure(Candidate("triton"), request, tried)
    assert isinstance(found[tried[0]], float)
    assert str(found[tried[1]]).startswith("wrong: root mean square error")
    assert found[tried[2]] == "RuntimeError: PassManager::run failed"
    assert run.reasons == {}


def test_auto_runs_the_configuration_that_tune_stored(
    launched: Mapping[str, Mapping[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A configuration that tune stores is the one that auto then launches; the simulated clock prefers tiles of 32 and blocks of 16 keys."""

    def time(of: Search, calls: Mapping[Candidate, Entry], part: float) -> dict[Candidate, Timing]:
        return {each: Timing((seconds(each),)) for each in calls}

    def seconds(candidate: Candidate) -> float:
        if candidate.backend != "triton":
            return 9.0
        return sum([1.0 if candidate.tile is None else 0.8] + [0.0 if of.n < 32 else 0.1 for _, of in candidate.blocks])

    monkeypatch.setattr(Search, "time", time)
    monkeypatch.setattr("ringweave_lab.tune.descent._STREAMED", (16, 32))
    problem = Problem("test", PATTERN, 40, 1, 16, dtype=torch.float16)
    choices = tune(problem, rounds=1)
    assert [choice.chosen for choice in choices if choice.chosen is not None and choice.chosen.tile == (32, 32)]
    assert [[each.key.kernel for each in choice.kernels] for choice in choices] == [
        ["forward"], ["backward_q", "backward_kv"]
    ]  # fmt: skip
    assert save_answers(choices) == str(tuning.tuning_file())
    assert {kind.kernel: dict(fields)["n"] for kind, fields in tuning.configs().items()}["forward"] == 16
    x = Inputs.random(40, heads=1, dtype=torch.float16)
    assert "measured here: tiles of 32 x 32" in rw.explain(PATTERN, 40, head_dim=16, dtype=torch.float16)
    conforms(x, PATTERN, "auto")
    for name in KERNELS:
        assert (launched[name]["Q_TILE"], launched[name]["KV_TILE"]) == (32, 32)
    assert launched["forward"]["BLOCK_N"] == 16
