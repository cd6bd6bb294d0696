"""A sharded batch carries its own facts within one process: for batches in turn, from workers, through the Trainer, compiled."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils.data import DataLoader

import ringweave as rw
from ringweave.integrations.transformers import ModelContext, context_parallel, model_context
from ringweave.integrations.transformers.masks import ShardMask

from .tiny import CACHE, config_of, model_of

generator = torch.Generator().manual_seed(7)


def features(n: int, kind: str) -> dict[str, torch.Tensor]:
    """Draw a batch of two texts: whole, padded on the left or right, or packed."""
    ids = torch.randint(3, 64, (2, n), generator=generator)
    mask = torch.ones_like(ids)
    if kind == "left":
        mask[1, :5] = 0
    if kind == "right":
        mask[0, 7:] = 0
    if kind == "packed":
        return {"input_ids": ids, "position_ids": torch.cat([torch.arange(9), torch.arange(n - 9)])[None]}
    return {"input_ids": ids} if kind == "whole" else {"input_ids": ids, "attention_mask": mask}


BATCHES = [features(n, kind) for n in (23, 31) for kind in ("whole", "left", "packed", "right")]


def alone(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the logits of an ordinary forward pass, with the positions that a shard has."""
    text = {"position_ids": torch.arange(batch["input_ids"].shape[1])[None], **batch}
    with torch.no_grad():
        return model(**text, use_cache=False).logits  # type: ignore[no-any-return]


def off(got: torch.Tensor, wanted: torch.Tensor, batch: dict[str, torch.Tensor]) -> float:
    """Return the largest difference where tokens exist."""
    exist = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    return (got - wanted)[exist].abs().max().item()


def shared(context: ModelContext, model: Any, batch: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        return context.unshard(model(**batch).logits, batch)


@pytest.mark.parametrize("name", ["mistral", "gemma3_text", "llama4_text"])
def test_batches_are_computed_in_any_order(name: str) -> None:
    """Shard all of them first, and compute ordinary forward passes in between."""
    model = model_of(name, "ringweave").eval()
    context = context_parallel(model)
    shards = [context.shard(**batch) for batch in BATCHES]
    for batch, shard in reversed(list(zip(BATCHES, shards, strict=True))):
        wanted = alone(model, batch)
        assert off(shared(context, model, shard), wanted, batch) < 1e-5
        # as a copy, and as another process receives it
        assert off(shared(context, model, pickle.loads(pickle.dumps(copy.deepcopy(shard)))), wanted, batch) < 1e-5
    whole, left = BATCHES[0], BATCHES[1]
    assert off(alone(model, left), alone(model, {"input_ids": left["input_ids"]}), left) > 1e-3
    given = dict(left, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert torch.equal(model.generate(**given), model_of(name, "eager").eval().generate(**given))
    with pytest.raises(TypeError, match="attention_mask"):
        model(**context.shard(**whole), attention_mask=left["attention_mask"])


def test_a_worker_shards_and_its_process_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("mistral", "ringweave").eval()
    context = context_parallel(model)
    collate = context.collate(lambda batches: batches[0])
    # a forked worker makes the placement for a length that the process has not seen
    for batch, shard in zip(BATCHES, DataLoader(BATCHES, collate_fn=collate, num_workers=2), strict=True):  # type: ignore[arg-type]
        assert shard["attention_mask"].owner is context
        assert off(shared(context, model, shard), alone(model, batch), batch) < 1e-5
    # a spawned worker is a process that has never seen the context
    written = pickle.dumps(context.collate(first))
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(model_context, "_LIVE", type(model_context._LIVE)())
        there = pickle.loads(written)
        shard = there([BATCHES[1]])
        assert shard["attention_mask"].owner is not context
        with pytest.raises(rw.UnsupportedError, match="a call of another process"):
            model(**shard)
        written = pickle.dumps(shard)
    shard = pickle.loads(written)
    assert shard["attention_mask"].owner is context
    assert off(shared(context, model, shard), alone(model, BATCHES[1]), BATCHES[1]) < 1e-5


def first(batches: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return batches[0]


def test_calls_that_the_mask_of_a_shard_refuses() -> None:
    model = model_of("llama", "ringweave").eval()
    context, other = context_parallel(model), context_parallel(model)
    shard = context.shard(**BATCHES[1])
    mask = shard["attention_mask"]
    cached = shard | {"use_cache": True}
    cached[CACHE] = model(**cached)[CACHE]
    with pytest.raises(rw.ShapeError, match="tokens: got 2 x 32 queries, 64 keys"):
        model(**cached)
    with pytest.raises(rw.UnsupportedError, match="batch: got"):
        other.unshard(shard["input_ids"], shard)
    with pytest.raises(rw.ShapeError, match="logits: got"):
        context.cross_entropy(torch.zeros(2, 31, 64), shard["input_ids"])
    for use in (
        lambda: mask[:, None, None, :],
        lambda: 1 - mask,
        lambda: mask == 1,
        lambda: torch.cat([mask, mask], 1),
        lambda: torch.all(mask),
        lambda: model.generate(**shard, max_new_tokens=2),
    ):
        with pytest.raises((rw.UnsupportedError, AttributeError), match="mask"):
            use()
    assert torch.equal(context.unshard(mask.local, shard), BATCHES[1]["attention_mask"].bool())
    assert mask.to(torch.device("meta")).local.device.type == "meta"
    assert isinstance(mask.to("cpu", non_blocking=True), ShardMask)
    assert torch.zeros_like(mask).dtype == torch.bool
    assert torch.zeros_like(mask, dtype=torch.int64).dtype == torch.int64
    config = transformers.T5Config(vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    config._attn_implementation = "ringweave"
    with pytest.raises(rw.UnsupportedError, match="model: got T5ForConditionalGeneration"):
        context_parallel(transformers.T5ForConditionalGeneration(config))


def test_a_collator_has_no_entry_that_shards_leave_out() -> None:
    context, ids = context_parallel(model_of("llama", "ringweave")), torch.arange(32)[None] % 8
    bounds = {"cu_seq_lens_q": torch.tensor([0, 8, 16, 24, 32]), "max_length_q": 8}
    collate = context.collate(lambda batches: batches[0])
    assert collate([{"input_ids": ids, "position_ids": ids, **bounds}])["attention_mask"].packed is not None
    for entries in (bounds, {"token_type_ids": ids}, {"inputs_embeds": ids, "position_ids": ids}):
        with pytest.raises(
            rw.UnsupportedError, match=f"batch: got .*{next(iter(entries))}.* of the collator; wanted only"
        ):
            collate([{"input_ids": ids, **entries}])


def test_experts_are_balanced_over_tokens_that_exist() -> None:
    inputs = {"labels": BATCHES[1]["input_ids"], "output_router_logits": True}
    config = config_of("mixtral", num_local_experts=4)
    model = model_of("mixtral", "ringweave", config).eval()
    context = context_parallel(model)
    text = dict(BATCHES[1], position_ids=torch.arange(23)[None])
    wanted = model(**text, **inputs, use_cache=False).aux_loss
    got = model(**context.shard(**text), output_router_logits=True).aux_loss
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("workers", [0, 1])
def test_the_librarys_trainer_with_a_collator(workers: int, tmp_path: Path) -> None:
    """The Trainer collates the next batch before it computes one, and several batches before a step."""
    padded = [batch for batch in BATCHES if "attention_mask" in batch]
    texts = [{name: x[row] for name, x in batch.items()} for batch in padded for row in (0, 1)]
    texts = [{**text, "labels": text["input_ids"].masked_fill(text["attention_mask"] == 0, -100)} for text in texts]

    def losses(context: bool, accumulation: int) -> tuple[list[float], float]:
        model = model_of("mistral", "ringweave")
        collate: Any = transformers.default_data_collator
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=4 // accumulation, per_device_train_batch_size=2,
            per_device_eval_batch_size=2, gradient_accumulation_steps=accumulation, use_cpu=True, logging_steps=1,
            report_to=[], disable_tqdm=True, save_strategy="no", dataloader_num_workers=workers,
            remove_unused_columns=False, learning_rate=1e-2, logging_nan_inf_filter=False, train_sampling_strategy="sequential",
            prediction_loss_only=True,
        )  # fmt: skip
        trainer = transformers.Trainer(
            model, arguments, train_dataset=texts, eval_dataset=texts,
            data_collator=context_parallel(model).collate(collate) if context else collate,
        )  # fmt: skip
        trainer.train()
        return [line["loss"] for line in trainer.state.log_history if "loss" in line], trainer.evaluate()["eval_loss"]

    for accumulation in (1, 2):
        got, wanted = losses(True, accumulation), losses(False, accumulation)
        assert got[0] == pytest.approx(wanted[0], abs=2e-4)
        assert got[1] == pytest.approx(wanted[1], abs=2e-4)


def test_compiled_models_take_batches_in_turn() -> None:
    """A whole model in one graph takes padded and whole batches in turn, and also without a context.

    Batches of other lengths are compiled on two ranks, in parallel/test_models.py.
    """
    torch.compiler.reset()
    # tracing takes seconds for each layer
    model = model_of("mistral", "ringweave", config_of("mistral", num_hidden_layers=1)).eval()
    context = context_parallel(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for batch in (BATCHES[0], BATCHES[1], BATCHES[0]):
        assert off(shared(context, compiled, context.shard(**batch)), alone(model, batch), batch) < 1e-5
    assert off(alone(compiled, BATCHES[1]), alone(model, BATCHES[1]), BATCHES[1]) < 1e-5
