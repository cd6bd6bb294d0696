"""Jobs of test_models: models of transformers with sequences sharded over ranks, against one process."""

from __future__ import annotations

import itertools
import os
import signal
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ringweave.errors import RingError
from ringweave.integrations.transformers import context_parallel
from tests.integrations.tiny import config_of, model_of
from tests.sampled import is_long

from .processes import ring_error, ring_mesh

TOKENS, BATCH = 203, 2


def batch_of(case: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 64, (BATCH, TOKENS), generator=generator)
    found = {"input_ids": ids, "labels": ids.masked_fill(ids == 7, -100)}
    if case == "packed":
        found["position_ids"] = torch.cat([torch.arange(70), torch.arange(TOKENS - 70)])[None]
    if case == "padded":
        mask = torch.ones_like(ids)
        mask[1, :40] = 0
        found |= {"attention_mask": mask, "labels": found["labels"].masked_fill(mask == 0, -100)}
    return found


def changes(name: str) -> dict[str, Any]:
    near = {"attention_chunk_size": 24} if name == "llama4_text" else {"sliding_window": 24}
    return {**near, "max_position_embeddings": 256}


def tiny(name: str, implementation: str = "ringweave", **more: Any) -> Any:
    """Return a tiny model whose window or chunk of attention ends within a rank's tokens."""
    return model_of(name, implementation, config_of(name, **changes(name), **more))


def logits_of(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the logits of a whole batch on this process alone."""
    text = {"position_ids": torch.arange(batch["labels"].shape[1])[None], **batch}
    del text["labels"]
    found: torch.Tensor = model(**text, use_cache=False).logits
    return found


def shifted(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the label of each position's next token; -100 at the end."""
    return torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)


def gradient_errors(ours: Any, theirs: Any) -> dict[str, float]:
    """Return the relative errors of a model's gradients against another's, by parameter."""
    errors = {}
    for (label, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if other.grad is not None:
            grad = mine.grad.full_tensor() if hasattr(mine.grad, "full_tensor") else mine.grad
            errors[label] = ((grad - other.grad).norm() / other.grad.norm().clamp(min=1e-6)).item()
    return errors


def learn(name: str, case: str, wrap: str, again: bool = False) -> dict[str, Any]:
    """Return loss and gradients over all ranks, relative to those of this process alone."""
    batch = batch_of(case)
    alone = tiny(name, "eager" if name == "gpt_oss" else "sdpa").train()
    # packed sequences one by one: gpt-oss passes no positions to the library's masks, and attends across them
    cuts = [0, 70, TOKENS] if case == "packed" else [0, TOKENS]
    pieces = [
        alone(
            batch["input_ids"][:, begin:end], attention_mask=batch.get("attention_mask"), use_cache=False,
            position_ids=torch.arange(end - begin)[None],
        ).logits
        for begin, end in itertools.pairwise(cuts)
    ]  # fmt: skip
    logits = torch.cat(pieces, 1)
    targets = shifted(batch)
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    wanted.backward()

    mesh = ring_mesh()
    bare = tiny(name).train()
    if again:
        bare.activation_checkpointing_enable()
    if wrap == "fsdp":
        for layer in bare.model.layers:
            fully_shard(layer, mesh=mesh["cp"])
        model: Any = fully_shard(bare, mesh=mesh["cp"])
    else:
        model = DistributedDataParallel(bare)
    ctx = context_parallel(model, mesh["cp"])
    shard = ctx.shard(**batch)
    out = model(**shard)
    loss = ctx.cross_entropy(out.logits, shard["shift_labels"])
    loss.backward()
    own = out.loss.detach().clone()
    dist.all_reduce(own)
    context = ctx.context(TOKENS)
    counters = context.transport.counters
    return {
        "loss": (loss.item(), wanted.item()), "own": own.item() / dist.get_world_size(), "errors": gradient_errors(bare, alone),
        "received": sum(counters.received), "placement": context.placement.name,
        "logits": ((ctx.unshard(out.logits, shard) - logits.detach()) * (targets != -100)[..., None]).abs().max().item(),
    }  # fmt: skip


def lose(victim: int) -> RingError:
    """Kill a rank between two layers, and return another rank's error."""
    mesh = ring_mesh()
    model = tiny("mistral").train()
    ctx = context_parallel(model, mesh["cp"], deadline=20.0)
    if dist.get_rank() == victim:
        model.model.layers[1].register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    shard = ctx.shard(**batch_of("packed"))
    return ring_error(lambda: ctx.cross_entropy(model(**shard).logits, shard["shift_labels"]).backward())


def refuse_differing() -> str:
    """Shard batches of different lengths on different ranks, which raises RingError and gives no result."""
    mesh = ring_mesh()
    model = model_of("llama", "ringweave").eval()
    ctx = context_parallel(model, mesh["cp"], deadline=10.0)
    n = 64 + 16 * dist.get_rank()
    return str(ring_error(lambda: model(**ctx.shard(torch.arange(n)[None] % 60))))


def take_turns(name: str) -> dict[str, Any]:
    """Shard several batches ahead and train on them in turn; return the largest differences from one process, by name."""
    mesh = ring_mesh()
    alone = tiny(name).train()
    bare = tiny(name).train()
    model = DistributedDataParallel(bare)
    ctx = context_parallel(model, mesh["cp"], deadline=20.0)
    # two lengths with equally many tokens on a rank, and a longer one
    batches = [shortened(batch_of(case), n) for case, n in (("padded", 131), ("whole", 132), ("packed", 203))]
    shards = [ctx.shard(**batch) for batch in batches]
    logits, found = [], {}
    for batch in batches:
        wanted, targets = logits_of(alone, batch), shifted(batch)
        torch.nn.functional.cross_entropy(wanted.flatten(0, 1), targets.flatten()).backward()
        logits.append((wanted.detach(), targets))
    # each batch before an optimiser step, the last one first
    for at, step in ((2, False), (0, False), (1, True)):
        with nullcontext() if step else model.no_sync():
            out = model(**shards[at]).logits
            ctx.cross_entropy(out, shards[at]["shift_labels"]).backward()
        wanted, targets = logits[at]
        found[f"batch {at}"] = (
            ((ctx.unshard(out, shards[at]) - wanted) * (targets != -100)[..., None]).abs().max().item()
        )
    found["gradients"] = max(gradient_errors(bare, alone).values())
    # ordinary passes of one rank alone
    text = {key: batches[0][key] for key in ("input_ids", "attention_mask")}
    if dist.get_rank() == 0:
        with torch.no_grad():
            found["ordinary"] = (bare.eval()(**text).logits - alone.eval()(**text).logits).abs().max().item()
        words = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
        found["generated"] = (bare.generate(**text, **words) != alone.generate(**text, **words)).sum().item()
    return found


def shortened(batch: dict[str, torch.Tensor], n: int) -> dict[str, torch.Tensor]:
    return {name: x[:, -n:] if name == "attention_mask" else x[:, :n] for name, x in batch.items()}


def compile_whole(name: str, backend: str, how: str) -> float:
    """Compile a model, or its parts, under a context, and return the largest error of several batches."""
    torch.compiler.reset()
    mesh = ring_mesh()
    # tracing takes seconds for each layer; test_compose compiles two layers with a context to one graph
    fewer = {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]} if name == "gemma3_text" else {}
    model = tiny(name, **fewer).eval()
    ctx = context_parallel(model, mesh["cp"], deadline=30.0)
    alone = tiny(name, **fewer).eval()
    compiled: Any = model
    if how == "model":
        compiled = torch.compile(model, backend=backend, fullgraph=True)
    elif how == "breaks":
        compiled = torch.compile(model, backend=backend)
    elif how == "forward":
        model.forward = torch.compile(model.forward, backend=backend, fullgraph=True)
    else:
        for layer in model.model.layers:
            layer.compile(backend=backend, fullgraph=True)
    worst = 0.0
    # one process compiles padded batches in test_contexts
    padded = [("padded", 132)] if is_long() else []
    for case, n in (("whole", 132), *padded, ("packed", 203), ("whole", 132)):
        batch = shortened(batch_of(case), n)
        shard = ctx.shard(**batch)
        logits = compiled(**shard).logits
        ctx.cross_entropy(logits, shard["shift_labels"]).backward()
        with torch.no_grad():
            wanted = logits_of(alone, batch)
        exist = batch.get("attention_mask", torch.ones_like(batch["labels"]))[..., None]
        worst = max(worst, ((ctx.unshard(logits, shard) - wanted) * exist).abs().max().item())
    return worst


def shard_different_batches() -> str:
    """Shard different batches of one length, as a sampler deals them to replicas, which raises RingError."""
    mesh = ring_mesh()
    model = model_of("llama", "ringweave").eval()
    ctx = context_parallel(model, mesh["cp"], deadline=10.0)
    return str(ring_error(lambda: model(**ctx.shard(torch.arange(64)[None] % 60 + dist.get_rank()))))
