"""The audit of models with each end of the stated range of transformers: `make oldest` runs it with the oldest version."""

from __future__ import annotations

import pytest
import transformers

from ringweave_audit import html_report, model_zoo
from tests.integrations.test_models import TOLD


@pytest.fixture(autouse=True)
def _quiet() -> None:
    transformers.logging.set_verbosity_error()


@pytest.mark.parametrize("name", ["mistral", "llama4_text", "gpt_oss"])
def test_the_audit_examines_every_case(name: str) -> None:
    """No case of a decoder is left out, and all that transformers passes on agree."""
    cases = tuple(case for case in model_zoo.CASES if case != "packed" or name not in TOLD)
    for result in model_zoo.run(model_zoo.target(name, 2), ("eager", "ringweave"), cases):
        assert result.agrees is True, (result.case, html_report.lines(result))
