"""The script of all models finds equal models equal and different ones different."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

spec = importlib.util.spec_from_file_location(
    "huggingface_models", Path(__file__).parents[1] / "scripts" / "huggingface_models.py"
)
assert spec is not None
assert spec.loader is not None
script: Any = importlib.util.module_from_spec(spec)
# its dataclasses look up their own module
sys.modules[spec.name] = script
spec.loader.exec_module(script)
ONE, NAN = torch.ones(3), torch.full((3,), math.nan)


@pytest.mark.parametrize(
    ("mine", "theirs", "worst"),
    [
        ([ONE], [ONE], 0.0),
        ([ONE, ONE * 3], [ONE, ONE * 4], 0.25),
        ([NAN], [ONE], math.inf),
        ([NAN, ONE], [ONE, ONE], math.inf),
        ([ONE, NAN], [ONE, ONE], math.inf),
        ([None], [ONE], math.inf),
        ([None], [None], 0.0),
    ],
)
def test_nan_and_missing_tensors_are_differences(mine: list[Any], theirs: list[Any], worst: float) -> None:
    assert script.difference(mine, theirs) == worst


def test_outcomes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert script.outcome("vit") == ("equal", script.outcome("vit")[1])
    assert script.outcome("doge")[0] == "refused"
    attend = script.integration.interface.attention
    monkeypatch.setattr(script.integration.interface, "attention", lambda *args, **kw: 1.01 * attend(*args, **kw))
    assert script.outcome("vit")[0] == "differs"


def test_the_page_hides_nothing() -> None:
    rows = [("a", "equal", "1e-7, to sdpa; one graph"), ("b", "failed", "KeyError: 'x'"), ("c", "not tried", "why")]
    page = script.page(rows)
    assert "3 model types" in page
    assert "1 equal, 0 differs, 0 refused, 1 failed, 1 not tried." in page
    assert all(f"| {' | '.join(row)} |" in page for row in rows)
    assert "Of 1 decoders, 1 compile in one graph" in page
