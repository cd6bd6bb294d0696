"""Messages among ranks: contents, counts to the byte, traces."""

from __future__ import annotations

import pytest

from .jobs_transport import part
from .processes import Pool

JOBS = "tests.parallel.jobs_transport"


@pytest.mark.parametrize("size", [2, 4, 8])
def test_all_to_all(size: int, request: pytest.FixtureRequest) -> None:
    pool: Pool = request.getfixturevalue(f"pool{size}")
    for rank, result in enumerate(pool.run(f"{JOBS}:all_to_all", 3)):
        others = [peer for peer in range(size) if peer != rank]
        assert result["sent"] == [3 * part(rank, peer) if peer != rank else 0 for peer in range(size)]
        assert result["received"] == [3 * part(peer, rank) if peer != rank else 0 for peer in range(size)]
        assert result["messages"] == 3 * sum(part(rank, peer) > 0 for peer in others)
        assert result["metadata"] == 0
