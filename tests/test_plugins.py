"""Test commands and attributes of other distributions, installed and not installed."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest

import ringweave as rw
from ringweave import program
from ringweave.backends import BACKENDS, Backends
from ringweave.errors import RingweaveError
from ringweave.plugins import ATTRIBUTES, require_package
from ringweave_command import COMMANDS, ELSEWHERE, how_to_install

# the command line of an installation in which no entry point extends ringweave
ALONE = """
import importlib.metadata, sys
found = importlib.metadata.entry_points
importlib.metadata.entry_points = lambda **given: () if given.get("group", "").startswith("ringweave.") else found(**given)
from ringweave_command import main
sys.argv = ["ringweave", *sys.argv[1:]]
main()
"""


def alone(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", ALONE, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.parametrize("name", ["audit", "bench"])
def test_an_absent_command_says_how_to_get_it(name: str) -> None:
    done = alone(name, "planning")
    owner = ELSEWHERE[name]
    assert done.returncode == 2
    assert done.stderr == (
        f"ringweave: command {name}: got an installation without it; wanted {owner}. {how_to_install(owner)}\n"
    )


def test_the_list_of_commands_names_absent_ones() -> None:
    done = alone("--help")
    commands, _, absent = done.stdout.partition("Not installed: ")
    assert done.returncode == 0
    assert all(f" {name} " in commands for name in COMMANDS)
    assert not any(f" {name} " in commands for name in ELSEWHERE)
    said = " ".join(absent.split())
    assert all(name in said for name in ELSEWHERE)
    assert all(how_to_install(owner) in said for owner in ELSEWHERE.values())


# a process without entry points, in which backends are chosen for a GPU that is not there
WITHOUT_BACKENDS = """
import importlib.metadata, sys
importlib.metadata.entry_points = lambda **given: ()
import torch, ringweave as rw
from ringweave import program
from ringweave.backends import BACKENDS, flex
flex.installed = lambda: True
assert not [name for name in sys.modules if name.startswith("ringweave_gpu")]
print(*BACKENDS)
q = torch.randn(1, 1, 64, 16)
for name in ("triton", "flash_attn_4", "attn_gym"):
    for call in (lambda: rw.attention(q, q, q, backend=name), lambda: rw.explain(rw.Causal(), 64, backend=name)):
        try:
            call()
        except rw.UnsupportedError as error:
            print(error)
try:
    rw.attention(torch.empty(1, 1, 64, 16, device="meta"), q, q, on_oom="stream")
except rw.UnsupportedError as error:
    print(error)
print(rw.attention(q, q, q, on_oom="stream").shape)
facts = rw.explain(rw.SlidingWindow(9), 256, device="cuda", as_dict=True)["backend"]
print([each["backend"] for each in facts["chosen"]], facts["others"]["triton"], facts["trials"], program.trials("cuda"))
lists = rw.Selected(torch.zeros(256, 1, dtype=torch.int64))
print(*[rw.explain(each, 256, device="cuda", as_dict=True)["backend"]["chosen"][0]["backend"] for each in (rw.Causal(), lists)])
from ringweave.cli.doctor import diagnose
findings = diagnose()
print(findings["backends"]["triton"], findings["trials"], "RINGWEAVE_TRIAL" in findings["variables"], sep="|")
assert not [name for name in sys.modules if name.startswith("ringweave_gpu")]
"""


def test_without_the_distribution_of_backends_a_gpu_has_the_engines_of_pytorch() -> None:
    """A named backend says how to get it, and so do explain and doctor; auto takes PyTorch's engines."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_BACKENDS], capture_output=True, text=True, timeout=240, check=True
    )
    said = how_to_install("ringweave-gpu")
    names, *errors, streamed, shape, facts, others, findings = done.stdout.splitlines()
    assert names.split() == ["reference", "dense_batched", "gather", "sdpa", "cpu", "flex", "flash", "torch_sparse"]
    assert errors == [
        f"backend: got '{name}' without ringweave-gpu; wanted ringweave-gpu. {said}"
        for name in ("triton", "flash_attn_4", "attn_gym")
        for _ in range(2)
    ]
    got = "'stream' for keys and values on the host, without ringweave-gpu"
    assert streamed == f"on_oom: got {got}; wanted ringweave-gpu. {said}"
    assert shape == "torch.Size([1, 1, 64, 16])"
    assert facts == f"['flex'] {[f'ringweave-gpu is not installed. {said}']} [] None"
    assert others == "flash gather"
    assert findings == f"ringweave-gpu is not installed. {said}|{{}}|False"


def test_backends_of_other_distributions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entry points add backends, which load when they are looked up; a name of the package stays its own."""
    own = BACKENDS["dense_batched"]
    loaded: list[str] = []

    def load(name: str, **changes: Any) -> Any:
        return lambda: loaded.append(name) or dataclasses.replace(own, name=name, **changes)

    found = {"zeta": load("zeta", before="gather"), "alpha": load("alpha", before="gather"), "cpu": load("cpu")}
    monkeypatch.setattr("ringweave.plugins.backends", lambda: found)
    known = Backends()
    assert known["cpu"] is BACKENDS["cpu"]
    assert "zeta" in known
    assert list(known)[-2:] == ["zeta", "alpha"]
    assert loaded == []
    assert known["zeta"] is known["zeta"]
    assert loaded == ["zeta"]
    with pytest.raises(KeyError):
        known["omega"]
    monkeypatch.setattr(program, "BACKENDS", known)
    assert program.preference("cuda") == ["cpu", "sdpa", "flash", "alpha", "zeta", "gather", "flex", "dense_batched"]
    assert program.preference("cpu") == list(program.PREFERENCE)


def test_attributes_of_the_laboratory() -> None:
    assert (rw.bench.__name__, rw.tune.__name__) == ("ringweave_lab.bench", "ringweave_lab.tune")
    assert rw.parallel.simulate(rw.Causal(), 2**16, [8])[0].ranks == 8


@pytest.mark.parametrize("full", ATTRIBUTES)
def test_an_absent_attribute_says_how_to_get_it(full: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringweave.plugins.entry_points", lambda **given: ())
    module, _, name = full.rpartition(".")
    owner = sys.modules[module]
    assert not hasattr(owner, name)
    with pytest.raises(AttributeError, match=f"{full}: got an installation without it; wanted ") as caught:
        getattr(owner, name)
    assert isinstance(caught.value, RingweaveError)
    assert str(caught.value).endswith(how_to_install(ATTRIBUTES[full]))
    assert "\n" not in str(caught.value)


# every module of the package is imported in a process without the optional packages, and then again
WITHOUT_EXTRAS = """
import importlib, pkgutil, sys
for name in ("matplotlib", "psutil", "scipy", "transformers", "triton"):
    sys.modules[name] = None
import ringweave as rw
for module in pkgutil.walk_packages(rw.__path__, "ringweave.", onerror=lambda name: None):
    for _ in range(2):
        try:
            importlib.import_module(module.name)
        except ImportError as error:
            print(module.name, type(error).__name__, isinstance(error, rw.RingweaveError), error, sep="|")
"""


def test_a_module_without_its_package_says_which_to_install() -> None:
    """Modules that need an absent package raise a typed error that is an ImportError; others import."""
    command = [sys.executable, "-c", WITHOUT_EXTRAS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = [line.split("|") for line in done.stdout.splitlines()]
    # the checks of transformers that install() satisfies are imported by a process that has imported transformers
    found = [each for each in found if each[0] != "ringweave.integrations.flash_attn.transformers_checks"]
    remedy = "transformers: got no such package; wanted version 5 or newer. Run pip install 'ringweave[hf]'."
    assert found == [["ringweave.integrations.transformers", "AbsentPackageError", "True", remedy]] * 2
    with pytest.raises(ModuleNotFoundError) as error:
        require_package("missing", 5, "hf")
    assert error.value.name == "missing"


def test_a_package_that_is_too_old_says_which_version_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringweave.plugins.version", lambda package: "4.57.1")
    with pytest.raises(ImportError, match=r"transformers: got version 4.57.1; wanted version 5 or newer"):
        require_package("transformers", 5, "hf")
