"""Train a byte model with native sparse attention beside its dense twin, on the sources of Python's library.

    python examples/train_nsa.py
    python examples/train_nsa.py --tokens 8192 --steps 200 --out metrics.jsonl
    python examples/train_nsa.py --text my.txt

Both models see the same excerpts in the same order. They have equal sizes; the sparse one has, besides, weights that
compress blocks of keys and gates that mix its three branches. The last lines compare bits per byte of text that neither
has seen, and seconds of processor time.
"""

from __future__ import annotations

import argparse
import json
import math
import sysconfig
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, silu

import ringweave as rw


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--text", type=Path, help="file to train on; by default, the sources of Python's library")
    add("--tokens", type=int, default=2048, help="bytes of an excerpt")
    add("--steps", type=int, default=100)
    add("--layers", type=int, default=3)
    add("--width", type=int, default=128)
    add("--heads", type=int, default=8, help="query heads; a quarter as many key heads")
    add("--block", type=int, default=32, help="keys of a chosen block")
    add("--top", type=int, default=8, help="blocks that each query attends")
    add("--window", type=int, default=128, help="keys that each query attends before itself")
    add("--lr", type=float, default=2e-3)
    add("--seed", type=int, default=0)
    add("--out", type=Path, help="file of metrics, one line of JSON for each step of each model")
    return parser.parse_args()


class Dense(nn.Module):
    """Causal attention over every key, called like native sparse attention."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.attention = rw.nn.MultiheadAttention(
            width, heads, num_kv_heads=heads // 4, batch_first=True, pattern=rw.Causal(), rotary_base=10000.0
        )

    def forward(self, x: Tensor) -> Tensor:
        """Compute attention of (B, N, width) over itself."""
        out: Tensor = self.attention(x, x, x)[0]
        return out


def sparse(given: argparse.Namespace) -> nn.Module:
    """Return native sparse attention: compressed keys, chosen blocks and a window, mixed by gates."""
    return rw.nn.NativeSparseAttention(
        given.width, given.heads, num_kv_heads=given.heads // 4, compress_block=given.block // 2,
        compress_stride=given.block // 4, block_size=given.block, top_k=given.top, window=given.window,
        rotary_base=10000.0,
    )  # fmt: skip


class Block(nn.Module):
    """A layer: attention, then a gated network, each added to its input."""

    def __init__(self, width: int, attention: nn.Module):
        super().__init__()
        self.attention = attention
        self.before, self.between = nn.RMSNorm(width), nn.RMSNorm(width)
        self.up, self.down = nn.Linear(width, 6 * width), nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the layer of (B, N, width)."""
        x = x + self.attention(self.before(x))
        gate, values = self.up(self.between(x)).chunk(2, -1)
        out: Tensor = x + self.down(silu(gate) * values)
        return out


class Model(nn.Module):
    """A language model over bytes."""

    def __init__(self, width: int, attentions: list[nn.Module]):
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.layers = nn.Sequential(*(Block(width, each) for each in attentions))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, 256)

    def forward(self, excerpt: Tensor) -> Tensor:
        """Return the mean loss of the bytes after the first of (B, N + 1), in nats."""
        states = self.norm(self.layers(self.embed(excerpt[:, :-1])))
        return cross_entropy(self.head(states).flatten(0, 1), excerpt[:, 1:].flatten())


def read(path: Path | None) -> Tensor:
    """Return the bytes of a file, or of 4 MiB of Python's library."""
    if path is not None:
        text = path.read_bytes()
    else:
        library = Path(sysconfig.get_paths()["stdlib"])
        text = b"".join(each.read_bytes() for each in sorted(library.glob("*.py")))[: 4 * 2**20]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def excerpt(text: Tensor, length: int, seed: int, step: int) -> Tensor:
    """Return the excerpt of a step, (1, length + 1), which depends on the arguments alone."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    start = int(torch.randint(0, len(text) - length, (), generator=generator))
    return text[None, start : start + length + 1].long()


def train(name: str, model: Model, given: argparse.Namespace, text: Tensor) -> float:
    """Train a model, and return its seconds of processor time."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.lr)
    started = time.process_time()
    for step in range(given.steps):
        for group in optimizer.param_groups:
            # a short rise, then half a cosine
            group["lr"] = given.lr * min(1.0, (step + 1) / 10, 0.5 + 0.5 * math.cos(math.pi * step / given.steps))
        loss = model(excerpt(text, given.tokens, given.seed, step))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        line = {"model": name, "step": step, "loss": loss.item(), "seconds": time.process_time() - started}
        if step % 10 == 0 or step == given.steps - 1:
            print("{model:6}  step {step:4}  loss {loss:.4f}  {seconds:6.1f} s".format(**line), flush=True)
        if given.out is not None:
            with given.out.open("a") as file:
                file.write(json.dumps(line) + "\n")
    return time.process_time() - started


def main() -> None:
    """Train both models and compare them."""
    given = arguments()
    text = read(given.text)
    # a tenth, at most four excerpts
    held = max(1, min(4, len(text) // (10 * (given.tokens + 1)))) * given.tokens + 1
    if len(text) <= held + given.tokens:
        raise SystemExit(f"the text has {len(text):,} bytes: pass a longer one, or fewer --tokens")
    text, unseen = text[:-held], text[-held:].long()
    parts = torch.stack([unseen[at : at + given.tokens + 1] for at in range(0, held - 1, given.tokens)])
    makers = {"dense": lambda: Dense(given.width, given.heads), "sparse": lambda: sparse(given)}
    found = {}
    for name, make in makers.items():
        torch.manual_seed(given.seed)
        model = Model(given.width, [make() for _ in range(given.layers)])
        seconds = train(name, model, given, text)
        with torch.no_grad():
            bits = model(parts).item() / math.log(2)
        found[name] = bits, seconds
    for name, (bits, seconds) in found.items():
        print(f"{name:6}  {bits:.4f} bits per unseen byte, {seconds:.1f} s of processor time")


if __name__ == "__main__":
    main()
