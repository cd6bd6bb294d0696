"""Environment variables are read at each use."""

from __future__ import annotations

import os

import pytest

from ringweave.environment import setting


def test_a_variable_that_comes_and_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "RINGWEAVE_OF_A_TEST"
    assert setting(name) == ""
    for value in ("a", "", "\u00e4 b"):
        monkeypatch.setenv(name, value)
        assert setting(name) == os.environ[name] == value
    monkeypatch.delenv(name)
    assert setting(name) == ""
