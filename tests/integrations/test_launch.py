"""``python -m ringweave.integrations.flash_attn program.py`` runs a program that imports flash-attn, unchanged."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# what a program may observe of the way it was started, and a call of its library
PROGRAM = """
import pickle, sys
import beside
from {module} import {function} as function
import torch

class Mine:
    pass

assert __name__ == "__main__" and "Mine" in vars(sys.modules["__main__"])
assert type(pickle.loads(pickle.dumps(Mine()))) is Mine
x = torch.randn(1, 8, 2, 16, requires_grad=True)
function(x, x, x).sum().backward()
assert x.grad.shape == x.shape
print(beside.TOLD, __file__, sys.argv[1:])
sys.exit(3)
"""
FACES = {
    "flash_attn": ("flash_attn", "flash_attn_func"),
    "flex_attention": ("torch.nn.attention.flex_attention", "flex_attention"),
}


def run(face: str, *arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"ringweave.integrations.{face}", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=240, check=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "programs").mkdir()
    (tmp_path / "programs" / "beside.py").write_text("TOLD = 'beside'")
    for face, (module, function) in FACES.items():
        program = PROGRAM.format(module=module, function=function)
        (tmp_path / "programs" / f"for_{face}.py").write_text(program)
    return tmp_path


@pytest.mark.parametrize("face", FACES)
def test_a_program_runs_as_python_runs_it(face: str, folder: Path) -> None:
    """It finds modules beside it, its own arguments, and its exit status is that of the command."""
    program = Path("programs") / f"for_{face}.py"
    done = run(face, program, "--lr", "3", "-m", "-h", cwd=folder)
    assert done.returncode == 3, done.stderr
    assert done.stdout.strip() == f"beside {program} ['--lr', '3', '-m', '-h']"


def test_a_module_runs_as_python_runs_it(folder: Path) -> None:
    # both faces have one launcher; this one does not import transformers
    done = run("flex_attention", "-m", "for_flex_attention", "one", cwd=folder / "programs")
    assert done.returncode == 3, done.stderr
    assert done.stdout.strip() == f"beside {folder / 'programs' / 'for_flex_attention.py'} ['one']"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [((), "required: program"), (("absent.py",), "no such file: absent.py"), (("-x", "a.py"), "usage:")],
)
def test_a_wrong_command_line_says_what_is_wrong(
    arguments: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["-m", *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("ringweave.integrations.flash_attn", run_name="__main__")
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
