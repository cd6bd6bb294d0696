"""The public surface: names, signatures, docstrings, and what importing costs."""

from __future__ import annotations

import inspect
import json
import operator
import os
import re
import subprocess
import sys

import pytest

import ringweave as rw
from ringweave import nn

NAMES = [
    "ALiBi", "AttentionOutput", "Bias", "BlockPlan", "BlockTable", "BlockWeights", "Causal", "ContextParallel", "Dilated", "DistanceBias", "Documents",
    "Full", "Global", "Grid", "GridNeighborhood", "GridWindows", "Keys", "LongNet", "Neighborhood", "Pattern", "PatternError", "PerHead", "Periodic", "PlanCache",
    "PrefixLM", "RingError", "RingweaveError", "Segments", "ShapeError", "Sinks", "SlidingWindow", "Softcap", "Strided",
    "TokenMask", "UnsupportedError", "attention", "attention_weights", "attention_with_lse", "bench", "bigbird",
    "dilated_blocks", "explain", "from_block_mask", "from_mask_mod", "local_global", "longformer",
    "longnet_attention", "merge", "natten_1d", "nn", "parallel", "plan", "random_blocks", "sparse_transformer_fixed",
    "variable",
]  # fmt: skip

SIGNATURES = {
    "attention": (
        "(q, k, v, pattern=Full(), *, scale=None, q_offset=0, backend='auto', context=None, terms=(), sink_logits=None, "
        "dropout=0.0)"
    ),
    "attention_with_lse": (
        "(q, k, v, pattern=Full(), *, scale=None, q_offset=0, backend='auto', context=None, terms=(), sink_logits=None, "
        "dropout=0.0)"
    ),
    "attention_weights": "(q, k, pattern, *, scale=None, q_offset=0)",
    "longnet_attention": (
        "(q, k, v, *, segments, rates, causal=False, offset='interleaved', heads='shared', detach_weights=False, "
        "scale=None, q_offset=0, backend='auto', context=None)"
    ),
    "merge": "(outs, lses)",
    "plan": "(pattern, nq, nk=None, *, heads=1, batch=1, q_offset=0, tile=None, device='cpu')",
}


def documented() -> list[str]:
    return [name for name in rw.__all__ if callable(getattr(rw, name))] + [f"nn.{name}" for name in nn.__all__]


def test_names() -> None:
    assert sorted(rw.__all__) == sorted(NAMES)
    assert set(rw.__all__) <= set(dir(rw))


@pytest.mark.parametrize("name", list(SIGNATURES))
def test_signatures(name: str) -> None:
    signature = inspect.signature(getattr(rw, name))
    plain = signature.replace(
        parameters=[p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()],
        return_annotation=inspect.Signature.empty,
    )
    assert str(plain) == SIGNATURES[name]


@pytest.mark.parametrize("name", documented())
def test_docstrings(name: str) -> None:
    """One sentence first; every parameter described, none that is not there; an example for what users call."""
    thing = operator.attrgetter(name)(rw)
    text = inspect.getdoc(thing)
    assert text
    assert text.splitlines()[0].endswith(".")
    if inspect.isclass(thing) and issubclass(thing, Exception):
        return
    sections = re.split(r"^(Args|Attributes|Returns|Raises|Example|References):$", text, flags=re.M)
    found = dict(zip(sections[1::2], sections[2::2], strict=True))
    listed = re.findall(r"^    (\w+):", found.get("Args", found.get("Attributes", "")), flags=re.M)
    parameters = [p for p in inspect.signature(thing).parameters if p != "self"]
    listed += re.findall(r"^    \*\*(\w+):", found.get("Args", ""), flags=re.M)
    if name not in ("Pattern", "BlockPlan"):
        assert listed == parameters
    if not hasattr(thing, "_fields") and not name.startswith(("BlockPlan", "BlockWeights")):
        assert ">>>" in found.get("Example", "")


def _measure(code: str) -> str:
    # with bytecode written, as an installed package has it
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120, env=env).stdout


def test_import_pulls_in_nothing_optional() -> None:
    loaded = json.loads(_measure("import json, sys, ringweave; print(json.dumps(sorted(sys.modules)))"))
    assert not {"triton", "matplotlib", "typer", "rich", "jinja2", "psutil", "scipy"} & set(loaded)
    assert not [name for name in loaded if name.startswith(("ringweave.cli", "ringweave.bench"))]


def test_import_is_quick() -> None:
    """Over `import torch`, in CPU seconds of the process; the least of up to five runs."""
    code = "import time, torch; t = time.process_time(); import ringweave; print(time.process_time() - t)"
    assert any(float(_measure(code)) < 0.050 for _ in range(5))
