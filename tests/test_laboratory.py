"""What a plain installation says of the parts that the distribution ringweave-lab adds."""

from __future__ import annotations

import subprocess
import sys

import pytest

import ringweave as rw

# the command line as it is where no entry point of the laboratory is found
ALONE = """
import importlib.metadata, sys
found = importlib.metadata.entry_points
importlib.metadata.entry_points = lambda **given: () if given.get("group", "").startswith("ringweave.") else found(**given)
from ringweave_command import main
sys.argv = ["ringweave", *sys.argv[1:]]
main()
"""


@pytest.mark.parametrize("name", ["bench", "simulate"])
def test_a_plain_installation_says_where_a_command_is(name: str) -> None:
    done = subprocess.run([sys.executable, "-c", ALONE, name, "planning"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert (
        f"{name} belongs to the distribution ringweave-lab: install it from a clone of the repository with pip install ./lab."
        in done.stderr
    )
    assert done.stderr.count("\n") == 1


def test_a_plain_installation_has_its_own_commands() -> None:
    done = subprocess.run([sys.executable, "-c", ALONE, "--help"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert all(f" {name} " in done.stdout for name in ("show", "explain", "doctor", "audit", "tune"))
    assert " bench " not in done.stdout


def test_attributes_of_the_laboratory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rw.bench.__name__ == "ringweave_lab.bench"
    assert rw.parallel.simulate(rw.Causal(), 2**16, [8])[0].ranks == 8
    monkeypatch.setattr("ringweave.laboratory.entry_points", lambda **given: ())
    for owner, name in ((rw, "bench"), (rw.parallel, "simulate")):
        assert not hasattr(owner, name)
        with pytest.raises(AttributeError, match="belongs to the distribution ringweave-lab: install it"):
            getattr(owner, name)
