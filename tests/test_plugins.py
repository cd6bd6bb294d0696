"""Test commands and attributes of other distributions, installed and not installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

import ringweave as rw
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
for name in ("matplotlib", "psutil", "scipy", "transformers", "triton", "flash_attn", "attn_gym"):
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
    # Triton's kernels are imported by their backend, which says that it cannot run, and the checks of transformers
    # that install() satisfies by a process that has imported transformers
    inside = ("ringweave.backends.triton", "ringweave.integrations.flash_attn.transformers_checks")
    found = [each for each in found if not each[0].startswith(inside)]
    remedy = "transformers: got no such package; wanted version 5 or newer. Run pip install 'ringweave[hf]'."
    assert found == [["ringweave.integrations.transformers", "AbsentPackageError", "True", remedy]] * 2
    with pytest.raises(ModuleNotFoundError) as error:
        require_package("missing", 5, "hf")
    assert error.value.name == "missing"


def test_a_package_that_is_too_old_says_which_version_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringweave.plugins.version", lambda package: "4.57.1")
    with pytest.raises(ImportError, match=r"transformers: got version 4.57.1; wanted version 5 or newer"):
        require_package("transformers", 5, "hf")
