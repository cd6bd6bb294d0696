"""Test the gate: its measurements, its decisions, and its texts."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner

from ringweave.cli.app import app
from ringweave.errors import UnsupportedError
from ringweave_lab.bench import gate, gate_command
from ringweave_lab.bench.cliffs import CLIFFS
from ringweave_lab.bench.gate import HEADLINES, Held, Verdict, kind, measured, slowed
from ringweave_lab.tune.measure import by_processor

LAB = Path(__file__).parents[2]


def spin(number: int = 20_000) -> int:
    return sum(range(number))


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> dict[str, Iterator[float]]:
    """Return ratios in the order of measurement; 1 where none is given."""
    given: dict[str, Iterator[float]] = {}
    for module, name, every in ((gate, "HEADLINES", HEADLINES), (gate_command, "CLIFFS", CLIFFS)):
        fake = tuple(dataclasses.replace(each, pair=lambda say, name=each.name: (name, name)) for each in every)
        monkeypatch.setattr(module, name, fake)
    monkeypatch.setattr(gate, "measured", lambda pair, **longer: next(given.get(pair[1], iter((1.0,)))))
    return given


def verdicts(held: dict[str, Held]) -> dict[str, Verdict]:
    return {each.headline.name: each for each in gate.run(held)}


def bench(*words: str) -> Any:
    return CliRunner().invoke(app, ["bench", *words], env={"COLUMNS": "160", "NO_COLOR": "1"})


def test_ratio_of_two_calls_is_the_median_of_rounds_in_turn() -> None:
    names: list[str] = []
    drift = iter(range(1, 1000))

    def timer(call: Any, times: int) -> float:
        names.append(call())
        # the machine gets slower from round to round; within a round, both calls are slowed equally
        return (
            (3.0 if names[-1] == "ours" else 2.0) * (1.1 if names[-1] == "ours" else 1.0) * ((next(drift) - 1) // 2 + 1)
        )

    found = measured((lambda: "ours", lambda: "other"), rounds=9, timer=timer)
    assert found == pytest.approx(1.65)
    assert names[2:] == ["ours", "other"] * 9


@pytest.mark.measures
def test_slowed_takes_as_much_longer() -> None:
    found = [by_processor(slowed(spin, 1.3), 5) / by_processor(spin, 5) for _ in range(15)]
    assert 1.2 < sorted(found)[7] < 1.4
    assert slowed(spin, 1.3)() == spin()


def test_noise_passes_and_a_lasting_slowdown_does_not(figures: dict[str, Iterator[float]]) -> None:
    figures |= {"kernel": iter((1.3, 1.02)), "plan": iter((1.3, 1.25, 1.4, 1.3)), "call": iter((0.5,))}
    found = verdicts({each.name: Held(1.0, 1.1) for each in HEADLINES if each.name != "dense"})
    assert (found["kernel"].passed, found["kernel"].found, found["kernel"].times) == (True, 1.02, 2)
    assert (found["plan"].passed, found["plan"].slower) == (False, 1.25)
    assert found["plan"].times == 4
    assert found["call"].passed
    assert [name for name, each in found.items() if each.stale] == ["call"]
    assert (found["dense"].passed, found["dense"].slower) == (True, None)


def test_ratios_that_are_not_measured_again_decide_nothing(
    figures: dict[str, Iterator[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ratios that are not measured again decide nothing: so slow a machine is busy, and no change should fail for that."""
    monkeypatch.setattr(gate, "_WITHIN", -1.0)
    figures["kernel"] = iter((1.3,))
    found = verdicts({each.name: Held(1.0, 1.1) for each in HEADLINES})["kernel"]
    assert (found.within, found.passed, found.times) == (False, True, 1)


def test_a_baseline_is_the_median_and_its_tolerance_how_far_runs_lie(
    figures: dict[str, Iterator[float]], tmp_path: Path
) -> None:
    figures |= {"kernel": iter((2.0, 2.08, 2.5, 1.93, 2.0)), "plan": iter((1.0, 1.08, 1.0, 0.93, 1.0))}
    path = tmp_path / "new" / "baseline.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"another processor": {}}))
    held = gate.update(path)
    assert held["kernel"] == Held(2.0, 1.12)
    # three times the spread of 7 %, but at most the tolerance that still notices the slowdown
    assert held["plan"].tolerance == 1.14
    assert held["dense"] == Held(1.0, 1.1)
    assert gate.baseline(path) == held
    assert "another processor" in json.loads(path.read_text())
    figures.clear()
    figures["plan"] = iter((1.0, 1.5, 1.0, 0.8, 1.0))
    with pytest.raises(UnsupportedError, match="plan: got runs from 0.8 to 1.5"):
        gate.update(path)
    assert gate.baseline(path) == held


def test_the_command_names_the_slower_ratio(figures: dict[str, Iterator[float]], tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    unknown = bench("--gate", str(path))
    assert unknown.exit_code == 0
    assert "nothing of this processor" in unknown.output
    assert "wrote" in bench("--gate", str(path), "--update").output
    assert bench("--gate", str(path)).exit_code == 0
    part = tmp_path / "part.json"
    part.write_text(json.dumps({kind(): {"kernel": {"ratio": 1.0, "tolerance": 1.1}}}))
    said = " ".join(bench("--gate", str(part)).output.split())
    assert "has nothing of this processor for gradients, bfloat16" in said
    figures |= {"longnet": iter((1.3, 1.3, 1.4, 1.5)), "call": iter((0.5,))}
    found = bench("--gate", str(path))
    assert found.exit_code == 1
    assert "slower than it was: longnet (float32, LongNet: forward over SDPA's in each of its segments)" in found.output
    assert "kernel" not in found.output.split("slower than it was")[1]
    assert "1.30 x" in found.output
    assert "a slowdown would pass: call; --update" in found.output
    assert kind() in found.output


def test_a_cliff_has_a_bound_of_its_own(figures: dict[str, Iterator[float]], tmp_path: Path) -> None:
    """A cliff above its bound fails on every processor; a ratio far below the bound is no reason for an update."""
    path = tmp_path / "baseline.json"
    assert bench("--gate", str(path)).exit_code == 0
    figures |= {"residues": iter((26.0, 27.0, 30.0, 26.0)), "channels": iter((0.1,)), "period": iter((9.0, 1.0))}
    found = bench("--gate", str(path))
    assert found.exit_code == 1
    assert "more than 4: residues (a decoding step of a union by residue at each length" in found.output
    assert "--update holds that" not in found.output


@pytest.mark.parametrize("cliff", CLIFFS, ids=lambda cliff: cliff.name)
def test_the_calls_of_a_cliff_run(cliff: gate.Headline) -> None:
    """Both calls of each cliff run, repeatedly."""
    for call in cliff.pair(lambda text: None):
        for _ in range(3):
            assert call() is not None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--update"], "No such option: --update"),
        (["--slow", "kernel"], "No such option: --slow"),
        (["--gate"], "Missing argument 'FILE'"),
        (["--gate=x.json", "--slow", "speed"], "'speed' is none of kernel"),
        (["--gate", "x.json", "--slow", "speed"], "'speed' is none of kernel"),
    ],
)
def test_options_that_do_not_fit(words: list[str], said: str) -> None:
    found = bench(*words)
    assert found.exit_code == 2
    assert said in " ".join(found.output.replace("│", " ").split())


@pytest.mark.parametrize("text", ["[]", "{", json.dumps({kind(): {"kernel": 3}}), json.dumps({kind(): [1]})])
def test_an_invalid_baseline(tmp_path: Path, text: str) -> None:
    path = tmp_path / "baseline.json"
    path.write_text(text)
    with pytest.raises(UnsupportedError, match="wanted a file that --update wrote"):
        gate.baseline(path)


def test_the_committed_baseline_has_every_ratio() -> None:
    """The baseline of at least one processor has every ratio; others may lack ratios that were added after their measurement."""
    held = json.loads((LAB / "results" / "baseline.json").read_text())
    names = {each.name for each in HEADLINES}
    assert names in [set(ratios) for ratios in held.values()]
    for ratios in held.values():
        assert set(ratios) <= names
        # the tolerance never hides the slowdown
        assert all(1.1 <= each["tolerance"] <= 1.3**0.5 for each in ratios.values())


def test_every_headline_is_checked_and_measured() -> None:
    """Every headline has a check and a measurement; the two quick ones run, and their two calls differ."""
    for each in HEADLINES:
        if each.name in ("plan", "dense"):
            assert measured(each.pair(lambda text: None), rounds=1) > 0
