"""Provide pools of workers for the whole test session, each started for the first test that uses it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

import ringweave as rw
from ringweave import api, validate
from ringweave.call import pack
from ringweave.terms import Term

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


@pytest.fixture
def _one_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fix the seed: the ranks are threads with one generator, so it would be random which seed rank 0 draws."""

    def fixed(pattern: rw.Pattern, terms: Sequence[Term], dropout: int, *more: Tensor) -> list[Tensor]:
        tensors = pack(pattern, terms, dropout)
        return [*(tensors[:-1] if dropout else tensors), *[torch.tensor(-(2**61) - 5)] * bool(dropout), *more]

    for module in (api, validate):
        monkeypatch.setattr(module, "pack", fixed)
