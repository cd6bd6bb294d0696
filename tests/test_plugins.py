"""Test commands and attributes of other distributions, installed and not installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

import ringweave as rw
from ringweave.errors import RingweaveError
from ringweave.plugins import ATTRIBUTES
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
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


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


def test_attributes_of_other_distributions() -> None:
    assert rw.audit.__name__ == "ringweave_audit"
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
