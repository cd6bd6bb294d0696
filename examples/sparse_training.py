"""Train a byte model on the sources of Python's library, with attention that becomes sparse during training.

    python examples/sparse_training.py
    python examples/sparse_training.py --density 0.05 --checkpoint sparse.pt --out metrics.jsonl

Attention is dense at first. Meanwhile each layer's indexer, a few narrow heads that score blocks of keys, learns the
share of attention in each block. Then the schedule lowers the density, the indexer chooses the remaining blocks, and it
continues to learn from their attention. The lines that sparsity needs are marked (1) to (5); the rest is an ordinary
training script. With --checkpoint, training continues from that file, with the steps of a run that was never stopped.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch
from torch import Tensor, nn

import ringweave as rw
from ringweave_lab.bench.text import ByteModel, standard_library


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--tokens", type=int, default=2048, help="length of a sequence")
    add("--steps", type=int, default=100)
    add("--layers", type=int, default=2)
    add("--width", type=int, default=128)
    add("--heads", type=int, default=4)
    add("--block", type=int, default=32, help="tokens along one side of a block")
    add("--density", type=float, default=0.1, help="share of attended blocks at the end")
    add("--lr", type=float, default=2e-3)
    add("--seed", type=int, default=0)
    add("--checkpoint", type=Path, help="file to save to and to resume from")
    add("--every", type=int, default=10, help="steps between checkpoints")
    add("--out", type=Path, help="file of metrics, one line of JSON for each step")
    return parser.parse_args()


class SparseAttention(nn.Module):
    """Causal attention of one layer over the blocks that its indexer chooses: (q, k, v) to out."""

    def __init__(self, head_dim: int, heads: int, block: int, schedule: rw.adaptive.SparsitySchedule):
        super().__init__()
        # (1) the indexer scores blocks; it has a separate loss and does not affect the gradients of the model
        self.indexer = rw.adaptive.BlockIndexer(head_dim, heads, block_size=block, pool=block // 2)
        self.schedule, self.block = schedule, block
        self.loss = torch.zeros(())

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Compute attention, and the loss of the indexer."""
        density = self.schedule.density
        # (2) a table of blocks, chosen from these queries and keys
        pattern = rw.Causal() if density == 1 else self.indexer(q, k, density=density) & rw.Causal()
        # (3) exact attention over those blocks, and each row's log-sum-exp
        out, lse = rw.attention_with_lse(q, k, v, pattern)
        if torch.is_grad_enabled():
            # (4) the attention in each block is the target of the indexer
            mass = rw.adaptive.tile_mass(q.detach(), k.detach(), lse.detach(), pattern, tile=self.block)
            self.loss = self.indexer.loss(q, k, mass)
        return out


def excerpt(text: Tensor, length: int, *, seed: int, step: int) -> Tensor:
    """Return the excerpt of a step, (1, length + 1). It depends on the arguments only, so a restart changes nothing."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    start = int(torch.randint(0, len(text) - length, (), generator=generator))
    return text[None, start : start + length + 1].long()


def main() -> None:
    """Train the model."""
    args = arguments()
    torch.manual_seed(args.seed)
    # (5) dense for a fifth of the steps, then sparser, quickly at first, and constant for the last third
    schedule = rw.adaptive.SparsitySchedule(
        start=1.0, end=args.density, warmup=args.steps // 5, ramp=max(1, args.steps // 2)
    )
    head_dim = args.width // args.heads
    layers = nn.ModuleList(SparseAttention(head_dim, args.heads, args.block, schedule) for _ in range(args.layers))
    model = ByteModel(list(layers), width=args.width, heads=args.heads, seed=args.seed)
    parameters = {id(p): p for p in [*model.parameters(), *layers.parameters()]}
    optimizer = torch.optim.AdamW(parameters.values(), lr=args.lr)

    parts = {"model": model, "layers": layers, "optimizer": optimizer, "schedule": schedule}
    if args.checkpoint is not None and args.checkpoint.exists():
        state = torch.load(args.checkpoint, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(state[name])
        print(f"continues with step {schedule.steps}")

    corpus = standard_library()
    text, held_out = corpus.tokens[: -args.tokens - 1], corpus.tokens[None, -args.tokens - 1 :].long()
    for step in range(schedule.steps, args.steps):
        loss = model.loss(excerpt(text, args.tokens, seed=args.seed, step=step))
        foreseen = torch.stack([layer.loss for layer in layers]).mean()
        (loss + foreseen).backward()
        optimizer.step()
        optimizer.zero_grad()
        line = {"step": step, "density": schedule.density, "loss": loss.item(), "divergence": foreseen.item()}
        print(
            "step {step:4}  density {density:.3f}  loss {loss:.4f}  indexer {divergence:.4f}".format(**line), flush=True
        )
        if args.out is not None:
            with args.out.open("a") as file:
                file.write(json.dumps(line) + "\n")
        schedule.step()
        if args.checkpoint is not None and (step + 1) % args.every == 0:
            torch.save({name: part.state_dict() for name, part in parts.items()}, args.checkpoint)

    with torch.no_grad():
        bits = model.loss(held_out).item() / math.log(2)
    print(f"held-out bits per byte at density {schedule.density:g}: {bits:.4f}")


if __name__ == "__main__":
    main()
