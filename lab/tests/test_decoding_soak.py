"""Run the soak test of decoding steps briefly."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")


def test_later_steps_take_no_more_memory() -> None:
    path = Path(__file__).parents[1] / "scripts" / "decoding_soak.py"
    spec = importlib.util.spec_from_file_location("decoding_soak", path)
    assert spec is not None
    assert spec.loader is not None
    script: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    for kind in script.KINDS:
        assert script.growth(script.soak(kind, 40))[1] < 4 * 2**20
