"""Test the command ``ringweave bits``, and the promise that it checks."""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

from ringweave.cli.app import app
from ringweave_lab import batch_invariance


def test_every_way_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row has the same bits for any threads, batch, chunks, steps, pages and padding, in each dtype and grouping."""
    pytest.importorskip("ringweave._cpu", exc_type=ImportError)
    found = batch_invariance.compared((300, 1300))
    features = dict.fromkeys(["dilated", "LongNet", "terms, sinks", "dropout", "8 bits", "chosen keys"], 6)
    assert {each.added: each.cases for each in found} == {"causal": 18, **features}
    assert [each for each in found if each.equal < each.cases] == []
    one = batch_invariance.Bits("another function", "causal", 9, 9)
    monkeypatch.setattr(batch_invariance, "compared", lambda: [one, one._replace(added="dropout", equal=0)])
    result = CliRunner().invoke(app, ["bits"], env={"COLUMNS": "100", "NO_COLOR": "1"})
    assert result.exit_code == 1
    assert re.search(r"causal +dropout\s+another function +9 of 9 +0 of 9", result.stdout)
