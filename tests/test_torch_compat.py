"""Without a private name of torch the library is slower or refuses by name; its results keep their bits."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ringweave import torch_compat
from ringweave.backends import flash, flex
from ringweave.call import Call
from ringweave.patterns import Full
from ringweave.plan import Branch

# a minute of CPU time, and several minutes on a busy machine
pytestmark = pytest.mark.timeout(900)

NAMES = [name for name in torch_compat.WITHOUT if torch_compat.find(name) is not None]
#: Names that a build without NCCL lacks, and a name that is None before a process group exists.
ELSEWHERE = {name for name in torch_compat.WITHOUT if "NCCL" in name or "_default_pg" in name}
#: Names that the quick path needs.
QUICK = {name for name, words in torch_compat.WITHOUT.items() if "small calls go through the operators" in words}

Answers = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def answers() -> Answers:
    """Return the answers without each name of the quick path; "" is with all names, "all" without any."""
    script = Path(__file__).with_name("absent_names.py")
    run = [sys.executable, "-W", "ignore", str(script), ",".join(NAMES), ",".join(sorted(QUICK))]
    done = subprocess.run(run, capture_output=True, text=True, timeout=800, cwd=script.parents[1])
    assert not done.returncode, done.stderr[-2000:]
    found: Answers = json.loads(done.stdout)
    return found


def test_the_names_are_those_that_torch_has() -> None:
    assert {name for name in torch_compat.WITHOUT if name not in NAMES} <= ELSEWHERE


def test_with_all_names_calls_compute(answers: Answers) -> None:
    whole = answers[""]
    assert whole["quick"]
    raised = {what for what, found in whole.items() if isinstance(found, str) and "Error" in found}
    assert raised == {"forward mode", "mass of vmap"}
    assert all("UnsupportedError" in whole[what] for what in raised)


def test_without_any_name_calls_give_the_same_bits(answers: Answers) -> None:
    """Only the sdpa backend needs its names; it refuses."""
    found, wanted = answers["all"], answers[""]
    assert found["sdpa"].startswith("UnsupportedError: backend: got 'sdpa'")
    assert found == wanted | {"quick": False, "sdpa": found["sdpa"]}


@pytest.mark.parametrize("name", sorted(QUICK))
def test_without_a_name_of_the_quick_path_calls_go_through_the_operators(name: str, answers: Answers) -> None:
    assert answers[name] == {"quick": False, "plain": answers[""]["plain"]}


def _private(tree: ast.Module) -> set[str]:
    """Return the private names of torch that a module uses, through its imports of torch, and its uses of tensor versions."""
    found, roots = set(), {"torch"}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            module = getattr(node, "module", None) or ""
            for each in node.names:
                path = f"{module}.{each.name}".lstrip(".")
                if path.partition(".")[0] == "torch" and not getattr(node, "level", 0):
                    roots.add(each.asname or each.name)
                    found |= {path} if re.search(r"\._[a-zA-Z]", path) else set()
        elif isinstance(node, ast.Attribute):
            path = ast.unparse(node)
            if path.partition(".")[0] in roots and re.fullmatch(r"[\w.]*\._[a-zA-Z]\w*", path):
                found.add(path)
            if node.attr == "_version":
                found.add(path)
    return found


def test_no_other_module_uses_a_private_name_of_torch() -> None:
    folder = Path(torch_compat.__file__).parent
    files = [path for path in folder.rglob("*.py") if path.name != "torch_compat.py" and "bench" not in path.parts]
    found = {str(path.relative_to(folder)): _private(ast.parse(path.read_text())) for path in files}
    assert not {path: names for path, names in found.items() if names}
    assert "torch._C" in _private(ast.parse("import torch as t, torch\ntorch._C.f()"))
    assert _private(ast.parse("from torch.utils import _pytree\nx._version")) == {"torch.utils._pytree", "x._version"}


def test_kernels_that_torch_lacks_are_refused_or_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    branch = Branch.whole(Full(), 256, 256, heads=4, batch=1, q_offset=0)
    case = Call(1, 4, 4, 256, 256, 64, 64, torch.float16, "cuda", needs_grad=True)
    assert flex.unsupported_reason(case, branch) is None
    assert flash.unsupported_reason(case, branch) is None
    monkeypatch.setattr(flex, "AUTOGRAD_WITHIN", False)
    assert "private names" in str(flex.unsupported_reason(case, branch))
    monkeypatch.setitem(flash._FUSED, "efficient", (None, None))
    assert "does not have" in str(flash.unsupported_reason(case, branch))


def test_device_indices_are_checked_immediately_if_torch_cannot_check_them_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch_compat, "_assert_async", None)
    torch_compat.require(torch.tensor(True), "words")
    torch_compat.require(torch.zeros((), dtype=torch.bool, device="meta"), "words")
    with pytest.raises(RuntimeError, match="words"):
        torch_compat.require(torch.tensor(False), "words")
