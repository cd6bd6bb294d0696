"""A model with a context inside the usual wrappers has the loss and gradients of one process."""

from __future__ import annotations

import pytest
import torch

from .processes import Pool

JOBS = "tests.parallel.jobs_compose"
# relative; float32 sums in another order
BOUND = 1e-5
# 2 parameters of the embedding and the head, 10 of each layer
WEIGHTS = 23


def hold(pool: Pool, *options: object) -> None:
    results = pool.run(f"{JOBS}:compose", *options, timeout=240)
    for result in results:
        got, wanted = result["loss"]
        assert got == pytest.approx(wanted, rel=BOUND)
        assert len(result["errors"]) == WEIGHTS
        assert max(result["errors"].values()) < BOUND, result["errors"]
        assert result["padding"] > 0
    assert sum(result["received"] for result in results) > 0


@pytest.mark.parametrize("compiler", [None, "aot_eager"])
@pytest.mark.parametrize("again", [False, True], ids=["kept", "computed_again"])
@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_context_and_data_parallel(pool4: Pool, wrap: str, again: bool, compiler: str | None) -> None:
    hold(pool4, 2, wrap, again, compiler)


@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_context_of_all_ranks(pool4: Pool, wrap: str) -> None:
    hold(pool4, 4, wrap, False, None, "ring")


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_whole_graph(pool2: Pool, compiler: str) -> None:
    assert max(pool2.run(f"{JOBS}:whole_graph", compiler, timeout=240)) < BOUND


def test_one_graph_for_several_contexts(pool2: Pool) -> None:
    for same in pool2.run(f"{JOBS}:contexts_in_turn", timeout=240):
        assert same == [True] * 3


def test_short_batches_of_modules_that_choose_keys(pool2: Pool) -> None:
    """Every parameter has a gradient on every rank, so that ranks average them."""
    one, other = pool2.run(f"{JOBS}:short_batches", timeout=120)
    assert len(one) == 12
    assert all(map(torch.equal, one, other))
