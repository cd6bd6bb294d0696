"""Models of transformers on several ranks have the loss, logits and gradients of one process."""

from __future__ import annotations

import pytest

from .processes import Pool

JOBS = "tests.parallel.jobs_models"
BOUND = 1e-5


def hold(pool: Pool, *options: object) -> None:
    for result in pool.run(f"{JOBS}:learn", *options, timeout=240):
        got, wanted = result["loss"]
        assert got == pytest.approx(wanted, rel=BOUND)
        # the model's own loss, from shift_labels and the number of items, has the same mean
        assert result["own"] == pytest.approx(wanted, rel=BOUND)
        assert result["logits"] < 1e-4
        assert max(result["errors"].values()) < 5 * BOUND, result["errors"]


@pytest.mark.parametrize("name", ["mistral", "gemma3_text", "gpt_oss", "llama4_text"])
@pytest.mark.parametrize("case", ["whole", "packed"])
def test_two_ranks(pool2: Pool, name: str, case: str) -> None:
    hold(pool2, name, case, "ddp")


def test_padding_and_checkpointing(pool2: Pool) -> None:
    hold(pool2, "gemma3_text", "padded", "ddp", True)
    hold(pool2, "llama4_text", "padded", "ddp")


def test_four_ranks_and_fsdp_with_checkpointing(pool4: Pool) -> None:
    hold(pool4, "mistral", "packed", "fsdp", True)


def test_ranks_that_differ_raise(pool2: Pool) -> None:
    for said in pool2.run(f"{JOBS}:refuse_differing", timeout=240):
        assert "seq_len" in said or "rank" in said, said


@pytest.mark.parametrize("name", ["mistral", pytest.param("gemma3_text", marks=pytest.mark.long)])
def test_batches_in_turn(pool2: Pool, name: str) -> None:
    """Batches that are sharded ahead are trained on in another order with accumulation, and ordinary passes of a rank still work."""
    for found in pool2.run(f"{JOBS}:take_turns", name, timeout=240):
        assert max(found.values()) < 5 * BOUND, found


@pytest.mark.parametrize(
    ("name", "backend", "how"),
    [
        ("gemma3_text", "aot_eager", "model"),
        *(pytest.param("llama", "aot_eager", how, marks=pytest.mark.long) for how in ("forward", "layers", "breaks")),
        *(pytest.param(name, "inductor", "model", marks=pytest.mark.long) for name in ("llama4_text", "gpt_oss")),
    ],
)
def test_a_compiled_model(pool2: Pool, name: str, backend: str, how: str) -> None:
    for worst in pool2.run(f"{JOBS}:compile_whole", name, backend, how, timeout=400):
        assert worst < 5 * BOUND


def test_ranks_with_different_batches_raise(pool2: Pool) -> None:
    for said in pool2.run(f"{JOBS}:shard_different_batches", timeout=240):
        assert "tag batch " in said, said


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_a_ring_error(pool2: Pool, victim: int) -> None:
    pool2.start(f"{JOBS}:lose", victim)
    (error,) = pool2.survivors(victim)
    assert error.peer == victim
