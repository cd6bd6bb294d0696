"""Text that every machine has, and a small transformer over bytes with its training, for the demo and the example.

The text is the source of Python's standard library; its bytes are the tokens.
"""

from __future__ import annotations

import math
import os
import statistics
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ringweave.errors import UnsupportedError

from ..tune.problem import Attend, Sample

LAYERS = 2
_WARMUP = 5
_FOREIGN = {"site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class Corpus:
    """Text as tokens.

    Attributes:
        tokens: (N,) uint8.
        files: Number of files.
        source: Folder of the files.
    """

    tokens: Tensor
    files: int
    source: str

    def batch(self, length: int, generator: torch.Generator) -> Tensor:
        """Return a random excerpt and the token after it, (1, length + 1) int64."""
        start = int(torch.randint(0, len(self.tokens) - length, (), generator=generator))
        return self.tokens[None, start : start + length + 1].long()

    def split(self, held_out: int) -> tuple[Corpus, Tensor]:
        """Return the text without its last ``held_out`` tokens, and these tokens, (1, held_out) int64."""
        kept = Corpus(self.tokens[:-held_out], self.files, self.source)
        return kept, self.tokens[None, -held_out:].long()


def standard_library(limit: int = 4 * 2**20) -> Corpus:
    """Return the library's ``*.py`` files in sorted order, up to ``limit`` bytes.

    Raises:
        UnsupportedError: This Python has no source files on disk.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    files = 0
    for path in sorted(_sources(root)):
        text += path.read_bytes()
        files += 1
        if len(text) >= limit:
            break
    if len(text) < 2**16:
        got = f"{len(text)} bytes of *.py files in {root}"
        raise UnsupportedError("standard library", got, "at least 64 KiB", "Use a Python with its sources.")
    return Corpus(torch.frombuffer(text[:limit], dtype=torch.uint8).clone(), files, str(root))


def _sources(root: Path) -> Iterator[Path]:
    """Yield the ``*.py`` files of a folder, without those in folders of installed packages, which hold most files."""
    for folder, inside, names in os.walk(root):
        inside[:] = [name for name in inside if name not in _FOREIGN]
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def text_inputs(corpus: Corpus, tokens: int, *, heads: int, head_dim: int, seed: int = 0) -> Sample:
    """Return q, k, v and dout of the first tokens of a text, from a fixed random embedding and projections.

    Each byte has a random vector, each position a sinusoidal one; their sum is projected to q, k and v. Equal words at
    different places therefore have similar vectors, as in a model. The gradient of the output is the values of the next
    token.
    """
    generator = torch.Generator().manual_seed(seed)
    width = heads * head_dim
    byte = torch.randn(256, width, generator=generator)[corpus.tokens[:tokens].long()]
    angle = torch.arange(tokens)[:, None] * torch.logspace(0, -4, width // 2)[None, :]
    hidden = byte + torch.cat([angle.sin(), angle.cos()], 1)
    hidden = hidden / hidden.std(-1, keepdim=True)

    def projected() -> Tensor:
        weight = torch.randn(width, width, generator=generator) / width**0.5
        x: Tensor = hidden @ weight
        return x.view(1, tokens, heads, head_dim).transpose(1, 2).contiguous()

    q, k, v = projected(), projected(), projected()
    return Sample(q, k, v, v.roll(-1, 2).contiguous())


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Apply rotary positions: rotate pairs of channels by an angle that grows with the token's position."""
    half = x.shape[-1] // 2
    angle = positions[:, None] * torch.logspace(0, -4, half)
    cos, sin = angle.cos(), angle.sin()
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Block(nn.Module):
    """Attention and a two-layer network, each on normalised input and with a residual connection."""

    def __init__(self, width: int, heads: int, kv_heads: int, attend: Attend):
        super().__init__()
        self.heads, self.kv_heads, self.attend = heads, kv_heads, attend
        self.before_attention, self.before_network = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * (width // heads), bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.network = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Map (B, N, width) to the same shape."""
        groups = self.heads, self.kv_heads, self.kv_heads
        parts = self.qkv(self.before_attention(x)).unflatten(-1, (sum(groups), -1)).transpose(1, 2)
        q, k, v = parts.split(groups, 1)
        mixed = self.attend(rotate(q, positions), rotate(k, positions), v)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y: Tensor = x + self.network(self.before_network(x))
        return y


class ByteModel(nn.Module):
    """A model from bytes to logits of the next byte; the embedding is shared with the output.

    Args:
        attends: Causal attention function of each layer, from (q, k, v) to out.
        width: Channels.
        heads: Query heads.
        kv_heads: Key heads; by default as many as query heads.
        seed: Seed of the initial weights, which are the same for every attention.
    """

    def __init__(
        self, attends: Sequence[Attend], *, width: int = 128, heads: int = 4, kv_heads: int | None = None, seed: int = 0
    ):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(256, width)
            self.blocks = nn.ModuleList(Block(width, heads, kv_heads or heads, attend) for attend in attends)
            self.norm = nn.LayerNorm(width)
            nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Map (B, N) tokens to (B, N, 256) logits; positions default to 0 to N - 1."""
        positions = torch.arange(tokens.shape[1]) if positions is None else positions
        x: Tensor = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, positions)
        hidden: Tensor = self.norm(x)
        return hidden @ self.embedding.weight.T

    def loss(self, tokens: Tensor) -> Tensor:
        """Return the mean cross entropy, in nats, of each token given the tokens before it."""
        logits = self(tokens[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


@dataclass(frozen=True)
class Training:
    """The figures of training one model.

    Attributes:
        losses: Nats per byte before each step.
        seconds: Seconds of each step.
        tokens: Tokens of a step.
        parameters: Number of weights.
        held_out: Loss on held-out text after training.
    """

    losses: tuple[float, ...]
    seconds: tuple[float, ...]
    tokens: int
    parameters: int
    held_out: float

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second in the median step, without the first step."""
        return self.tokens / float(torch.tensor(self.seconds[1:] or self.seconds).median())

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of held-out text."""
        return self.held_out / math.log(2)


def train(
    attends: Mapping[str, Attend],
    corpus: Corpus,
    *,
    context: int,
    steps: int,
    budget: float,
    learning_rate: float = 3e-3,
    seed: int = 0,
    excerpts: int = 1,
    initial: ByteModel | None = None,
    advance: Callable[[float, str], None] = lambda done, text: None,
    finish: Callable[[str, ByteModel], object] = lambda name, model: None,
) -> dict[str, Training]:
    """Train one model per attention from the same weights on the same excerpts, step by step in turn.

    Args:
        attends: Attention functions by name.
        corpus: The text; its last ``excerpts * context + 1`` tokens are held out.
        context: Tokens in a step.
        steps: Steps of each model.
        budget: Seconds after which no further step starts; all models stop at the same step.
        learning_rate: AdamW's learning rate, after a short warm-up.
        seed: Seed of weights and excerpts.
        excerpts: Number of held-out contexts in the mean of the final loss.
        initial: Model with the initial weights; by default the seed's.
        advance: Function that receives the share done and the losses.
        finish: Function that receives each trained model.
    Returns:
        A training for each name.
    """
    corpus, held_out = corpus.split(excerpts * context + 1)
    held_out = held_out[0].unfold(0, context + 1, context)
    models = {name: ByteModel([attend] * LAYERS, seed=seed) for name, attend in attends.items()}
    if initial is not None:
        for model in models.values():
            model.load_state_dict(initial.state_dict())
    optimizers = {name: torch.optim.AdamW(model.parameters(), lr=learning_rate) for name, model in models.items()}
    losses: dict[str, list[float]] = {name: [] for name in attends}
    seconds: dict[str, list[float]] = {name: [] for name in attends}
    generator = torch.Generator().manual_seed(seed)
    begin = time.perf_counter()
    for step in range(steps):
        if step and time.perf_counter() - begin > budget:
            break
        tokens = corpus.batch(context, generator)
        for name, model in models.items():
            start = time.perf_counter()
            for group in optimizers[name].param_groups:
                group["lr"] = learning_rate * min(1.0, (step + 1) / _WARMUP)
            loss = model.loss(tokens)
            loss.backward()
            optimizers[name].step()
            optimizers[name].zero_grad()
            losses[name].append(loss.item())
            seconds[name].append(time.perf_counter() - start)
        shown = ", ".join(f"{name} {values[-1]:.2f}" for name, values in losses.items())
        advance((step + 1) / steps, f"step {step + 1} of {steps}, loss {shown}")
    results = {}
    for name, model in models.items():
        with torch.no_grad():
            final = statistics.mean(model.loss(excerpt[None]).item() for excerpt in held_out)
        count = sum(weight.numel() for weight in model.parameters())
        results[name] = Training(tuple(losses[name]), tuple(seconds[name]), context, count, final)
        finish(name, model)
    return results
