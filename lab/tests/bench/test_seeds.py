"""The case `seeds` lists every published row, with our figure where this machine can compute it."""

from __future__ import annotations

from ringweave_lab.bench import Options, run_case
from ringweave_lab.bench.record import Published


def test_rows() -> None:
    rows = {}
    for row in run_case("seeds", Options(quick=True, tokens=256, heads=1, rounds=1)).records:
        assert isinstance(row, Published)
        assert row.what not in rows
        rows[row.what] = row
    assert rows["4K tokens, 90% sparse: BlockSparse, optimised"].published == "28.23 ms"
    assert "returned zeros" in rows["4K tokens around a ring"].note
    assert rows["pattern cache: hits"].figure == 99
    assert rows["kernel launches of a forward pass"].figure == 1
    assert "torch_sparse" in rows["4K tokens, 90% sparse: TorchSparse"].size
    assert all(row.figure is not None and row.figure > 0 for row in rows.values())
