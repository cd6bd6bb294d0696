"""A small byte-level transformer, and two of them trained side by side: the same but for their attention."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .corpus import Corpus
from .peers import Attend

_WARMUP = 5


def rotate(x: Tensor) -> Tensor:
    """Rotary positions: pairs of channels turned by an angle that grows with the position."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[2])[:, None] * torch.logspace(0, -4, half)[None, :]
    cos, sin = angle.cos(), angle.sin()
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Block(nn.Module):
    """Attention and a two-layer network, each on normalised input, each added."""

    def __init__(self, width: int, heads: int, attend: Attend):
        super().__init__()
        self.heads, self.attend = heads, attend
        self.before_attention, self.before_network = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.network = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, width) to the same shape."""
        q, k, v = self.qkv(self.before_attention(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = self.attend(rotate(q), rotate(k), v)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y: Tensor = x + self.network(self.before_network(x))
        return y


class ByteModel(nn.Module):
    """Bytes to logits of the next byte; the embedding is shared with the output.

    Args:
        attend: (q, k, v) to out, causal.
        width: Channels.
        layers: Blocks.
        heads: Of attention.
        seed: Of the initial weights; the same for every attention.
    """

    def __init__(self, attend: Attend, *, width: int = 128, layers: int = 2, heads: int = 4, seed: int = 0):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(256, width)
            self.blocks = nn.Sequential(*(Block(width, heads, attend) for _ in range(layers)))
            self.norm = nn.LayerNorm(width)
            nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, N) tokens to (B, N, 256) logits."""
        hidden: Tensor = self.norm(self.blocks(self.embedding(tokens)))
        return hidden @ self.embedding.weight.T

    def loss(self, tokens: Tensor) -> Tensor:
        """Mean cross entropy, in nats, of every token given those before it."""
        logits = self(tokens[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


@dataclass(frozen=True)
class Training:
    """One model's training.

    Attributes:
        losses: In nats per byte, before each step.
        seconds: Of each step.
        tokens: In a step.
        parameters: Of the model.
        held_out: Loss after training on text that was not trained on.
    """

    losses: tuple[float, ...]
    seconds: tuple[float, ...]
    tokens: int
    parameters: int
    held_out: float

    @property
    def tokens_per_second(self) -> float:
        """Tokens of a step over the median step time, without the first step."""
        return self.tokens / float(torch.tensor(self.seconds[1:] or self.seconds).median())

    @property
    def bits_per_byte(self) -> float:
        """The held-out loss in bits."""
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
    advance: Callable[[float, str], None] = lambda done, text: None,
) -> dict[str, Training]:
    """Train one model per attention from the same weights on the same excerpts, step by step in turn.

    Args:
        attends: Attention functions by name.
        corpus: The text; its last ``context + 1`` tokens are held out.
        context: Tokens in a step.
        steps: Of each model.
        budget: Seconds after which no further step starts; all models stop at the same step.
        learning_rate: Of AdamW, after a short warm-up.
        seed: Of weights and excerpts.
        advance: Told the share done and the losses.
    Returns:
        A training for each name.
    """
    corpus, held_out = corpus.split(context + 1)
    models = {name: ByteModel(attend, seed=seed) for name, attend in attends.items()}
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
            final = model.loss(held_out).item()
        count = sum(weight.numel() for weight in model.parameters())
        results[name] = Training(tuple(losses[name]), tuple(seconds[name]), context, count, final)
    return results
