from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import typer
from typer.testing import CliRunner

from ringweave.backends import cpu
from ringweave.units import nbytes
from ringweave_lab.bench import launched
from ringweave_lab.bench.report import error_text, milliseconds
from ringweave_lab.bench.text import ByteModel, standard_library, text_inputs
from ringweave_lab.commands import register
from ringweave_lab.demo import command as module
from ringweave_lab.demo import demo
from ringweave_lab.demo.demo import DemoResult, bits
from ringweave_lab.demo.report import render
from ringweave_lab.tune.oracle import Error

app = typer.Typer()
register(app)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[DemoResult, str, Any]:
    """Run the command once; return its measurements, its report and its output."""
    kept: list[DemoResult] = []
    patch = pytest.MonkeyPatch()
    original = module.run_demo

    def run_demo(**options: Any) -> DemoResult:
        kept.append(original(**options))
        return kept[-1]

    patch.setattr(module, "run_demo", run_demo)
    # all steps, however busy the machine is
    unbounded = {"around_budget": 400.0, "train_budget": 400.0, "whole_budget": 400.0}
    patch.setattr(demo, "QUICK", dataclasses.replace(demo.QUICK, **unbounded))
    path: Path = tmp_path_factory.mktemp("demo") / "report.html"
    try:
        found = CliRunner().invoke(app, ["demo", "--quick", "--out", str(path)], env={"COLUMNS": "120"})
    finally:
        patch.undo()
    assert found.exit_code == 0, found.output
    return kept[0], path.read_text(encoding="utf-8"), found


def test_the_report_is_self_contained(run: tuple[DemoResult, str, Any]) -> None:
    report = run[1]
    assert not re.search(r"(src|href|action|data)\s*=\s*[\"']?(?!#)[a-z]", report)
    assert not re.search(r"url\((?!#)", report)
    assert "@import" not in report
    assert "<link" not in report
    # script elements contain only data
    assert re.findall(r"<script[^>]*>", report) == ['<script type="application/json" id="results">']
    assert "http" not in report


def test_the_report_has_its_sections_and_pictures(run: tuple[DemoResult, str, Any]) -> None:
    report = run[1]
    assert re.findall(r'<h2 id="(\w+)"', report) == [
        "pattern",
        "exactness",
        "speed",
        "chosen",
        "training",
        "around",
        "next",
        "machine",
    ]
    assert report.count("<svg") == 5
    assert "prefers-color-scheme: dark" in report
    assert 'name="viewport"' in report


def test_the_report_shows_the_measurements(run: tuple[DemoResult, str, Any]) -> None:
    result, report, _ = run
    body, data = report.split('<script type="application/json" id="results">')
    figures = json.loads(data.split("</script>")[0])
    assert figures["exactness"]["ringweave"]["out"][1] == result.exactness.ringweave.out.largest
    for shown, outcome in zip(figures["outcomes"], result.outcomes, strict=True):
        assert outcome.timing is not None, outcome.reason
        assert shown["timing"]["seconds"] == list(outcome.timing.seconds)
        assert f"<td>{milliseconds(outcome.timing.median)}</td>" in body
    for name in ("out", "dq", "dk", "dv"):
        assert f"<td>{error_text(getattr(result.exactness.ringweave, name).largest)}</td>" in body
        assert f"<td>{error_text(getattr(result.exactness.torch, name).largest)}</td>" in body
    for training in result.training.values():
        assert f"<td>{training.tokens_per_second:,.0f}</td>" in body
        assert f"<td>{bits(training.losses[-1]):.3f}</td>" in body
    assert f"{result.pattern.tiles:,} of {result.pattern.all_tiles:,}" in body


def test_the_demonstration_is_right_and_learns(run: tuple[DemoResult, str, Any]) -> None:
    result = run[0]
    assert result.correct
    assert result.exactness.ringweave.out.largest < 1e-5
    sparse, dense = result.training["ringweave"], result.training["dense causal"]
    # equal weights and data, and mostly equal context
    assert sparse.losses[0] == pytest.approx(dense.losses[0], rel=0.02)
    assert sparse.losses[-1] < 0.9 * sparse.losses[0]
    assert len(sparse.losses) == len(dense.losses)


def test_two_processes_learn_what_one_does_and_receive_less_than_a_full_ring(run: tuple[DemoResult, str, Any]) -> None:
    result, report, found = run
    around = result.around
    assert not isinstance(around, str), around
    assert around.correct
    assert len(around.alone.losses) == len(around.shared.losses) == result.sizes.around[2]
    assert around.shared.losses == pytest.approx(around.alone.losses, rel=1e-4)
    assert (around.alone.processes, around.shared.processes) == (1, 2)
    assert 0 < around.shared.received < around.shared.full_ring
    assert around.alone.received == 0
    for shown in (
        nbytes(around.shared.received),
        f"{bits(around.shared.losses[-1]):.4f}",
        error_text(around.difference),
    ):
        assert shown in report
    assert "2 processes share 512 tokens" in " ".join(found.output.split())


def test_another_library_past_its_bound_is_shown_and_does_not_fail_the_demonstration(
    run: tuple[DemoResult, str, Any],
) -> None:
    result = run[0]
    first = next(o for o in result.outcomes if o.peer == "sdpa")
    mine = next(o for o in result.outcomes if o.peer == "ringweave" and o.direction == first.direction)
    for peer, correct in ((first, True), (mine, False)):
        assert peer.accuracy is not None
        assert peer.limit is not None
        past = dataclasses.replace(peer.accuracy, out=Error(3 * peer.limit.out, 1.0))
        wrong = dataclasses.replace(peer, accuracy=past, timing=None, over_first=None, reason="wrong: of the test")
        others = tuple(wrong if o is peer else o for o in result.outcomes)
        found = dataclasses.replace(result, outcomes=others)
        assert found.correct == correct
        assert any("wrong: of the test" in remark for remark in found.remarks())
        assert "wrong, not timed" in render(found)


def test_losses_that_differ_are_wrong(run: tuple[DemoResult, str, Any]) -> None:
    result = run[0]
    assert not isinstance(result.around, str)
    for bad in (3.0, math.nan):
        shared = dataclasses.replace(result.around.shared, losses=(*result.around.shared.losses[:-1], bad))
        wrong = dataclasses.replace(result, around=dataclasses.replace(result.around, shared=shared))
        assert not wrong.correct
        assert "the result is wrong" in render(wrong)
        assert "WRONG" in dict(wrong.summary())["around the ring"]


def test_without_a_checkout_the_section_says_so(
    run: tuple[DemoResult, str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launched.ringweave, "__file__", "/usr/lib/python3/site-packages/ringweave/__init__.py")
    assert launched.example() is None
    reason = launched.around(tokens=64, window=8, steps=1, threads=1, limit=60)
    assert isinstance(reason, str)
    without = dataclasses.replace(run[0], around=reason)
    assert without.correct
    report = render(without)
    assert f"Not run:</span> {reason}." in report
    assert report.count("<svg") == 4
    assert dict(without.summary())["around the ring"] == f"not run: {reason}"


def test_a_trainer_that_fails_or_takes_too_long_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    monkeypatch.setattr(launched, "example", lambda: script)
    script.write_text("raise ValueError('no text')")
    reason = launched.around(tokens=64, window=8, steps=1, threads=1, limit=60)
    assert reason == "one process: exit status 1 (ValueError: no text)"
    # torchrun's workers are in their own sessions, and must be ended separately
    script.write_text(
        "import json, os, pathlib, sys, time\n"
        "if 'RANK' in os.environ:\n"
        "    pathlib.Path(__file__).with_name(os.environ['RANK']).touch()\n"
        "    time.sleep(300)\n"
        "line = {'loss': 1.0, 'tokens_per_second': 1.0, 'received': 0, 'full_ring': 0}\n"
        "pathlib.Path(sys.argv[sys.argv.index('--out') + 1]).write_text(json.dumps(line))\n"
    )
    limit = 5.0
    while not (tmp_path / "1").exists():
        reason = launched.around(tokens=64, window=8, steps=1, threads=1, limit=limit)
        assert reason == "2 processes: not done in time"
        limit *= 2
    assert not [p for p in psutil.process_iter() if str(script) in _words(p)]


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_the_terminal_ends_with_the_figures_and_the_path(run: tuple[DemoResult, str, Any]) -> None:
    result, _, found = run
    for row, cells in result.speeds():
        assert row in found.output
        assert all(cell in found.output for cell in cells.values())
    assert "report.html" in found.output.strip().splitlines()[-1]


def test_backend_and_instruction_set_are_named(run: tuple[DemoResult, str, Any]) -> None:
    result, report, found = run
    assert result.environment.kernel == (None if cpu.module() is None else cpu.variant())
    assert result.kernel in report
    assert result.kernel.split()[0] in found.output
    assert f"{result.exactness.backend} backend" in report
    if result.environment.kernel:
        assert result.exactness.backend == "cpu"
        assert {o.peer for o in result.outcomes} == {"ringweave", "ringweave:dense_batched", "sdpa"}


def test_the_text_is_this_pythons_library() -> None:
    corpus = standard_library(2**17)
    assert len(corpus.tokens) == 2**17
    assert b"import" in bytes(corpus.tokens.tolist())
    inputs = text_inputs(corpus, 256, heads=2, head_dim=16)
    assert inputs.q.shape == (1, 2, 256, 16)
    assert all(torch.isfinite(x).all() and x.std() > 0.1 for x in inputs)
    again = text_inputs(corpus, 256, heads=2, head_dim=16)
    assert torch.equal(inputs.k, again.k)


def test_installed_packages_are_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("inner/b.py", "a.py", "site-packages/torch/c.py", "inner/__pycache__/d.py", "e.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(path.stem * 2**15)
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    corpus = standard_library()
    assert corpus.files == 2
    assert bytes(corpus.tokens.tolist()) == b"a" * 2**15 + b"b" * 2**15


def test_models_of_one_seed_differ_only_in_their_attention() -> None:
    def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    one, two = ByteModel([dense] * 2), ByteModel([dense] * 2)
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b)
    tokens = torch.randint(0, 256, (1, 64))
    changed = tokens.clone()
    changed[0, 40] = (changed[0, 40] + 1) % 256
    # causal: later tokens do not change earlier results
    torch.testing.assert_close(one(tokens)[:, :40], one(changed)[:, :40])
    assert not torch.equal(one(tokens)[:, 40:], one(changed)[:, 40:])


def test_a_model_takes_the_positions_of_its_tokens() -> None:
    """A sharded model without attention across tokens needs its tokens' positions, not their places in the shard."""

    def alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        # neighbours' scores depend on the distance between their positions
        weight = (q * k.roll(1, 2).repeat_interleave(2, 1)).sum(-1, keepdim=True)
        return v.repeat_interleave(2, 1) * weight

    model = ByteModel([alone], width=32, heads=4, kv_heads=2)
    tokens = torch.randint(0, 256, (1, 16))
    torch.testing.assert_close(model(tokens), model(tokens, torch.arange(16)))
    # shifting all positions keeps their differences, and so the scores
    torch.testing.assert_close(model(tokens), model(tokens, torch.arange(16) + 5), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(model(tokens), model(tokens, torch.arange(0, 32, 2)), atol=1e-4)


def test_chosen_keys_are_checked_and_timed(run: tuple[DemoResult, str, Any]) -> None:
    chosen = run[0].chosen
    assert {(o.peer, o.direction) for o in chosen.outcomes if o.timing is not None} == {
        (peer, direction) for peer in ("ringweave", "sdpa") for direction in ("forward", "forward + backward")
    }
    assert all(o.accuracy is not None for o in chosen.outcomes if o.peer == "ringweave")
    assert chosen.summary() in dict(run[0].summary())["chosen keys"]
