"""The script that audits every model of transformers lists each difference on its page."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
LAB = Path(__file__).parents[1]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(LAB / "scripts"))
    yield importlib.import_module("huggingface_audit")
    # the script imports the other one by name
    for name in ("huggingface_audit", "huggingface_models"):
        sys.modules.pop(name, None)


def row(name: str, word: str, *lines: str) -> dict[str, Any]:
    rest = [("sdpa", "unpadded"), ("sdpa", "left")]
    results = [["eager", "left", word, list(lines)], *([way, case, "agrees", []] for way, case in rest)]
    return {"name": name, "results": results}


def test_the_page_hides_nothing(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "JUDGED", (("is ignored", "a|b", "Finding: so it is."),))
    monkeypatch.setattr(script, "CASES", ("left",))
    monkeypatch.setattr(script.model_zoo, "IMPLEMENTATIONS", ("eager", "sdpa"))
    rows = [
        row("a", "differs", "x and 1 more: padding is ignored", "y: agrees with Full()"),
        row("c", "differs", "x: padding is ignored"),
        row("d", "raises", "ValueError: no 5"),
        {"name": "e", "untried": "why"},
    ]
    page = script.document(rows)
    assert "\n3 of the 4 model types" in page
    assert "\n2 types differ somewhere." in page
    assert "| Finding: so it is. | eager | left | 1: a |" in page
    assert "| **not judged**: x: padding is ignored | eager | left | 1: c |" in page
    assert "| **not judged**: ValueError: no N | eager | left | 1: d |" in page
    assert "| eager | 2 / 0 / 2 / 1 |" in page
    assert "| a | `D` | `+` |" in page
    assert page.endswith("\nNot made or fed by the script, 1: e.\n")


def test_a_model_is_seen_in_a_process_of_its_own(script: Any, tmp_path: Path) -> None:
    # a new process, since its address space is limited: a fork of this one would hold all tests' modules
    log, names = tmp_path / "seen.jsonl", ("vit", "edgetam_mask_decoder")
    command = [sys.executable, LAB / "scripts" / "huggingface_audit.py", *names, "--log", log]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    found = {each["name"]: each for each in map(json.loads, log.read_text("utf-8").splitlines())}
    assert found["vit"]["class"] == "ViTModel"
    assert script.line(found["vit"]) == "vit: +.... +.... +.... +...."
    assert "not tried" in script.line(found["edgetam_mask_decoder"])
