"""Files and names as targets: no code runs without consent, and every failure is a typed error."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from ringweave.cli.app import app
from ringweave.errors import UnsupportedError
from ringweave_audit import model_zoo

pytest.importorskip("transformers")


class Runs:
    """A pickle that makes a folder when it is loaded."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


def test_a_pickle_does_not_run_unasked(tmp_path: Path) -> None:
    file, made = tmp_path / "model.pt", tmp_path / "made"
    torch.save(Runs(made), file)
    run = CliRunner()
    done = run.invoke(app, ["audit", str(file)])
    assert done.exit_code == 2
    assert "a pickle, which may run any code" in done.output
    assert "--trust" in done.output
    assert not made.exists()
    done = run.invoke(app, ["audit", str(file), "--trust"])
    assert "holds NoneType" in done.output
    assert made.exists()


def test_a_saved_module_with_trust(tmp_path: Path) -> None:
    file = tmp_path / "model.pt"
    torch.save(nn.Linear(2, 3), file)
    assert isinstance(model_zoo.target(str(file), trust=True).build(None), nn.Linear)
    torch.save(nn.Linear(2, 3).state_dict(), file)
    with pytest.raises(UnsupportedError, match=r"holds OrderedDict; wanted a whole module"):
        model_zoo.target(str(file), trust=True).build(None)
    with pytest.raises(UnsupportedError, match="There is no such file"):
        model_zoo.target(str(tmp_path / "none.pt"))


def test_a_configuration_does_not_run_its_code_unasked(tmp_path: Path) -> None:
    made = tmp_path / "made"
    code = f"import os; os.mkdir({str(made)!r})"
    (tmp_path / "code.py").write_text(code)
    for kind, error in (("nothing_known", "--trust"), ("llama", None)):
        config = {"model_type": kind, "auto_map": {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}}
        (tmp_path / "config.json").write_text(json.dumps(config))
        if error is None:
            assert model_zoo.target(str(tmp_path), 1).build("eager") is not None
        else:
            with pytest.raises(UnsupportedError, match=error):
                model_zoo.target(str(tmp_path))
    assert not made.exists()


@pytest.mark.parametrize(
    ("name", "says"),
    [("mistrl", "Did you mean mistral"), ("zzzzzzzz", "An id to download is"), ("./a/b", "owner/name")],
)
def test_an_unknown_name_asks_no_network(name: str, says: str, no_network: None) -> None:
    with pytest.raises(UnsupportedError, match=says):
        model_zoo.target(name)


BUILD = """
import transformers
from torch.nn.functional import scaled_dot_product_attention

def build():
    return transformers.LlamaModel(transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    ))

def attention(q, k, v, allowed):
    return scaled_dot_product_attention(q, k, v, allowed)
"""
# what an installed script does: the first folder of the path is its own, not the current one
SCRIPT = "import sys; sys.path[:] = [each for each in sys.path if each]; from ringweave_command import main; main()"


def test_a_module_of_the_current_folder_is_found(tmp_path: Path) -> None:
    """The script finds modules of the current folder, for a model and for a kernel, as ``python -m`` does."""
    (tmp_path / "mymodel.py").write_text(BUILD)
    command = [sys.executable, "-c", SCRIPT, "audit"]

    def said(*arguments: str) -> tuple[int, str]:
        done = subprocess.run([*command, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    status, text = said("mymodel:build", "--case", "unpadded")
    assert status == 0, text
    assert "1 case" in text
    status, text = said("--kernel", "mymodel:attention", "--examples", "1")
    assert "rules" in text, text


SOUND = json.dumps({"model_type": "llama", "num_hidden_layers": 2, "sliding_window": None, "rope_theta": 1e4}).encode()
BROKEN = {
    "empty": b"", "cut": SOUND[:-9], "deep": b"[" * 100_000, "deep objects": b'{"a":' * 100_000, "a number": b"5",
    "a list": b"[1]", "bytes": bytes(range(256)), "a pickle": b"\x80\x04K\x05.", "no type": b"{}",
    "a type of numbers": b'{"model_type": 5}', "types": b'{"model_type": "llama", "hidden_size": "x"}',
    "huge": b'{"model_type": "gpt2", "n_positions": 100000000}',
    "huger": b'{"model_type": "gpt2", "n_positions": 100000000000000}',
    "digits": b'{"model_type": "llama", "vocab_size": ' + b"9" * 10_000 + b"}",
    "negative": b'{"model_type": "gpt2", "n_positions": -5}',
}  # fmt: skip


@pytest.mark.parametrize("name", list(BROKEN))
def test_a_broken_configuration_is_told(name: str, tmp_path: Path, no_network: None) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(BROKEN[name])
    for path in (tmp_path, file):
        try:
            found = model_zoo.target(str(path), 1)
        except UnsupportedError:
            continue
        (result,) = model_zoo.run(found, ("eager",), ("unpadded",))
        assert result.failed
        assert result.reason


def test_flipped_bytes(tmp_path: Path, no_network: None) -> None:
    """Any text gives a target, a failed result or a result, and no other error."""
    draw, file = random.Random(0), tmp_path / "config.json"
    for _ in range(60):
        data = bytearray(SOUND)
        for _ in range(draw.choice((1, 1, 3, 20))):
            data[draw.randrange(len(data))] = draw.randrange(256)
        file.write_bytes(bytes(data))
        try:
            found = model_zoo.target(str(file), 1)
        except UnsupportedError:
            continue
        assert list(model_zoo.run(found, ("eager",), ())) == []
        try:
            found.build("eager")
        except model_zoo._ERRORS:
            continue
    module = tmp_path / "model.pt"
    torch.save(nn.Linear(2, 3), module)
    whole = module.read_bytes()
    for stop in (0, 1, 100, len(whole) // 2, len(whole) - 1):
        module.write_bytes(whole[:stop])
        with pytest.raises(UnsupportedError, match="It could not be loaded"):
            model_zoo.target(str(module), trust=True).build(None)
