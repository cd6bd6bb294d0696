"""Provide pools of workers for the whole test session, each started for the first test that uses it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .processes import Pool, fresh


@pytest.fixture(scope="session")
def pool2() -> Iterator[Pool]:
    with fresh(2) as pool:
        yield pool


@pytest.fixture(scope="session")
def pool4() -> Iterator[Pool]:
    with fresh(4) as pool:
        yield pool


@pytest.fixture(scope="module")
def fragile4() -> Iterator[Pool]:
    """Provide four ranks to kill; a killed rank is replaced before the next job."""
    with fresh(4) as pool:
        yield pool


@pytest.fixture(scope="session")
def pool8() -> Iterator[Pool]:
    with fresh(8) as pool:
        yield pool
