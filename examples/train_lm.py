"""Train a byte model on the sources of Python's library, sharing each sequence among processes.

    python examples/train_lm.py                                           one process
    torchrun --nproc-per-node 2 examples/train_lm.py                      one sequence at a time, on two processes
    torchrun --nproc-per-node 4 examples/train_lm.py --cp 2               two sequences, each on two processes
    torchrun --nproc-per-node 2 --max-restarts 3 examples/train_lm.py --checkpoint lm.pt --out metrics.jsonl

The lines that share a sequence are marked (1) to (5); the rest is an ordinary training script. The model, a small
transformer, has no code for it: it gets the attention of each layer as an argument. With --checkpoint, training
continues from that file when it is started again, also with another number of processes, and when torchrun restarts all
processes after one has died.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import ringweave as rw
from ringweave_lab.bench.text import ByteModel, standard_library
from ringweave_lab.tune.problem import Attend

WARMUP = 5


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--cp", type=int, help="number of processes that share a sequence (default: all)")
    add("--tokens", type=int, default=4096, help="length of a sequence")
    add("--steps", type=int, default=50)
    add("--layers", type=int, default=4, help="number of layers; every fourth one sees the sinks")
    add("--width", type=int, default=128)
    add("--heads", type=int, default=4, help="query heads; there are half as many key heads")
    add("--window", type=int, default=256, help="tokens that each token sees before itself")
    add("--sinks", type=int, default=16, help="number of first tokens that every token sees")
    add("--lr", type=float, default=2e-3)
    add("--seed", type=int, default=0)
    add("--checkpoint", type=Path, help="file to save to and to resume from")
    add("--every", type=int, default=10, help="steps between checkpoints")
    add("--out", type=Path, help="file of metrics, one line of JSON for each step; bytes of the forward pass")
    return parser.parse_args()


def join(cp: int | None) -> DeviceMesh | None:
    """Return a mesh (replicas, processes of a sequence), or None if torchrun did not start this process."""
    if "RANK" not in os.environ:
        return None
    store, rank, ranks = next(dist.rendezvous("env://"))
    cp = cp or ranks
    if ranks % cp:
        raise SystemExit(f"--cp {cp} does not divide {ranks} processes")
    # torchrun's store outlives a restart and keeps the addresses of dead processes, so each attempt gets its own part.
    # Several nodes may count attempts differently: there, set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and leave this out.
    store = dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    return init_device_mesh("cpu", (ranks // cp, cp), mesh_dim_names=("dp", "cp"))


def excerpt(text: Tensor, length: int, *, seed: int, step: int, replica: int) -> Tensor:
    """Return the excerpt of a step, (1, length + 1). It depends on the arguments only, so a restart changes nothing."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + step) * 1_009 + replica)
    start = int(torch.randint(0, len(text) - length, (), generator=generator))
    return text[None, start : start + length + 1].long()


def layer(pattern: rw.Pattern, context: rw.ContextParallel) -> Attend:
    """Return the attention of a layer: a function of q, k and v of this process's tokens."""
    # (4) attention is the only layer in which tokens of different processes meet
    return lambda q, k, v: rw.attention(q, k, v, pattern, context=context)


def save(path: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write a checkpoint atomically: a process that dies while writing leaves the previous one intact."""
    new = path.with_name(path.name + ".new")
    with new.open("wb") as file:
        torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def resume(path: Path | None, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the checkpoint, if it exists, and return the next step."""
    if path is None or not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def reopen(path: Path, start: int) -> TextIO:
    """Open the file of metrics without the steps after the checkpoint, which will run again."""
    kept = path.read_text().splitlines(keepends=True)[:start] if path.exists() else []
    file = path.open("w")
    file.writelines(kept)
    return file


def over_ranks(figures: list[float]) -> Tensor:
    """Return the figures of all ranks, (ranks, figures)."""
    mine = torch.tensor(figures, dtype=torch.float64)
    if not dist.is_initialized():
        return mine[None]
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    return torch.stack(every)


def main() -> None:
    """Train the model."""
    args = arguments()
    mesh = join(args.cp)
    rank, ranks = (0, 1) if mesh is None else (dist.get_rank(), dist.get_world_size())
    replica, replicas = (0, 1) if mesh is None else (mesh.get_local_rank("dp"), mesh.size(0))

    near = rw.SlidingWindow(args.window) & rw.Causal()
    far = near | rw.Sinks(args.sinks) & rw.Causal()
    patterns = [far if layer % 4 == 3 else near for layer in range(args.layers)]
    # (1) the placement of tokens, chosen once for all layers
    heads = args.heads, max(1, args.heads // 2)
    context = rw.ContextParallel(None if mesh is None else mesh["cp"], patterns, args.tokens, heads=heads)
    positions = context.positions  # (2) positions of this process's tokens, for rotation
    real = positions < args.tokens  # the rest is padding: no loss, and no query attends it

    layers = [layer(pattern, context) for pattern in patterns]
    bare = ByteModel(layers, width=args.width, heads=heads[0], kv_heads=heads[1], seed=args.seed)
    model = bare if mesh is None else DistributedDataParallel(bare)
    optimizer = torch.optim.AdamW(bare.parameters(), lr=args.lr)
    start = resume(args.checkpoint, bare, optimizer)
    metrics = reopen(args.out, start) if rank == 0 and args.out is not None else None
    if rank == 0:
        print(f"{replicas} x {args.tokens:,} tokens a step, {context.local:,} a process ({context.placement.name})")
        print(f"continues with step {start}" if start else f"{sum(w.numel() for w in bare.parameters()):,} parameters")

    text = standard_library().tokens  # real text of every Python installation
    counters = context.transport.counters
    # bytes that a full ring brings to a process in the forward pass: all keys and values, for every pattern
    ring = (context.size - 1) * context.local * heads[1] * (2 * args.width // args.heads) * 4 * args.layers
    for step in range(start, args.steps):
        began = time.perf_counter()
        whole = excerpt(text, args.tokens, seed=args.seed, step=step, replica=replica)
        # (3) shift inputs and targets before sharding: the next token may be on another process
        inputs, targets = context.shard(whole[:, :-1]), context.shard(whole[:, 1:])
        counters.reset()
        logits = model(inputs, positions)
        received = sum(counters.received)  # in the forward pass
        losses = cross_entropy(logits.transpose(1, 2), targets, reduction="none")[:, real]
        # (5) DDP takes the mean of gradients over ranks; with this factor it is the mean over all tokens
        loss = losses.sum() * ranks / (replicas * args.tokens)
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, (step + 1) / WARMUP)
        optimizer.step()
        optimizer.zero_grad()

        every = over_ranks([loss.item(), received])
        if rank != 0:
            continue
        line = {
            "step": step,
            "loss": every[:, 0].mean().item(),
            "tokens_per_second": replicas * args.tokens / (time.perf_counter() - began),
            "received": int(every[:, 1].max()),
            "full_ring": ring,
        }
        print("step {step:4}  loss {loss:.4f}  {tokens_per_second:8,.0f} tokens/s".format(**line), end="")
        print(f"  received {line['received']:,} of a full ring's {ring:,} bytes" if ring else "", flush=True)
        if metrics is not None:
            metrics.write(json.dumps(line) + "\n")
            metrics.flush()
        if args.checkpoint is not None and (step + 1) % args.every == 0:
            save(args.checkpoint, step + 1, bare, optimizer)
    if metrics is not None:
        metrics.close()
    context.close()
    if mesh is not None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
