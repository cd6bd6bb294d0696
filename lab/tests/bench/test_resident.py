"""Test measurements of a process's memory: each kind runs, and growth is told from a steady state."""

from __future__ import annotations

import json
import mmap
import sys

import pytest
import torch

import ringweave as rw
from ringweave_lab.bench import resident

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks the system what is resident")


@pytest.mark.parametrize("kind", ["training", "pages", "joined", "mapped", "long"])
def test_every_kind_runs(kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident, "_PIECE", 600)
    resident.main(kind, 1024 if kind in ("mapped", "long") else 20)
    found = json.loads(capsys.readouterr().out)
    if kind in ("mapped", "long"):
        assert found["peak"] >= 8 * resident.HEADS * 1024 * resident.DIM
    else:
        assert len(found["held"]) == resident.PARTS


def test_a_wrong_row_is_seen() -> None:
    q, k, v = torch.randn(3, 1, 2, 700, resident.DIM).unbind()
    out = rw.attention(q, k, v, resident._pattern(512))
    resident._check(q, k, v, out)
    out[:, 1, 699] *= 1.05
    with pytest.raises(rw.RingweaveError, match="out: got row 699, off by"):
        resident._check(q, k, v, out)


def test_growth_is_noticed_and_a_filled_cache_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    # mapped pages: a heap might reuse memory freed by earlier tests, and grow less
    kept: list[mmap.mmap] = []

    def step(counted: bool) -> int:
        kept.append(mmap.mmap(-1, 2**20))
        kept[-1].write(b"x" * 2**20)
        return sum(map(len, kept)) if counted else 0

    for counted in (False, True):
        kept.clear()
        held = list(resident._parts(2 * resident.PARTS, lambda counted=counted: step(counted)))  # type: ignore[misc]
        monkeypatch.setattr(resident, "_measured", lambda kind, size, held=held: {"held": held})
        grown = resident.growth("pages", 1) * held[resident.SETTLED - 1]
        assert (grown > 24 * 2**20) != counted
