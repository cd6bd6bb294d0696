"""Training: two models side by side that differ in their attention, and the example trainer as a user starts it.

The example runs as one process alone, and as several that share a sequence.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch

import ringweave

from ..units import percent
from .launched import LaunchError, run, torchrun
from .problem import Attend
from .text import ByteModel, Corpus

# on the relative difference of losses: float32 sums in another order, which training amplifies
LIMIT = 1e-4
LAYERS = 2
_WARMUP = 5


@dataclass(frozen=True)
class Training:
    """What came of training one model.

    Attributes:
        losses: Nats per byte before each step.
        seconds: What each step took.
        tokens: Tokens of a step.
        parameters: How many weights the model has.
        held_out: Loss after training on text that was not trained on.
    """

    losses: tuple[float, ...]
    seconds: tuple[float, ...]
    tokens: int
    parameters: int
    held_out: float

    @property
    def tokens_per_second(self) -> float:
        """How many tokens the median step takes in a second, the first one left out."""
        return self.tokens / float(torch.tensor(self.seconds[1:] or self.seconds).median())

    @property
    def bits_per_byte(self) -> float:
        """How many bits a byte of held-out text takes."""
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
        steps: How many each model takes.
        budget: Seconds after which no further step starts; all models stop at the same step.
        learning_rate: AdamW's, after a short warm-up.
        seed: What weights and excerpts depend on.
        advance: Told the share done and the losses.
    Returns:
        A training for each name.
    """
    corpus, held_out = corpus.split(context + 1)
    models = {name: ByteModel([attend] * LAYERS, seed=seed) for name, attend in attends.items()}
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


@dataclass(frozen=True)
class Steps:
    """What a run of the trainer printed.

    Attributes:
        processes: How many share a sequence.
        threads: How many each has.
        losses: Nats per byte, by step.
        tokens_per_second: Median, without the first step.
        received: Bytes that the busiest process received in a forward pass.
        full_ring: Bytes that it would receive if all keys and values went around.
    """

    processes: int
    threads: int
    losses: tuple[float, ...]
    tokens_per_second: float
    received: int
    full_ring: int

    @staticmethod
    def read(path: Path, processes: int, threads: int) -> Steps:
        """Read the trainer's metrics."""
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return Steps(
            processes,
            threads,
            tuple(line["loss"] for line in lines),
            median(line["tokens_per_second"] for line in lines[1:] or lines),
            max(line["received"] for line in lines),
            lines[0]["full_ring"],
        )


@dataclass(frozen=True)
class SharedTraining:
    """One process, and several that share its sequences: the same weights, the same excerpts.

    Attributes:
        tokens: Length of a sequence.
        window: Tokens that a token sees before itself.
        alone: One process.
        shared: Several.
    """

    tokens: int
    window: int
    alone: Steps
    shared: Steps

    @property
    def difference(self) -> float:
        """The largest of a step's losses, relative; NaN where one of them is."""
        one, several = np.array(self.alone.losses), np.array(self.shared.losses)
        return float(np.max(np.abs(several - one) / np.abs(one)))

    @property
    def share(self) -> float:
        """Which part of a full ring's bytes was received."""
        return self.shared.received / self.shared.full_ring

    @property
    def correct(self) -> bool:
        """Whether the losses agree; NaN does not."""
        return self.difference <= LIMIT

    def summary(self) -> str:
        """Say the figures in words."""
        losses = "same losses as" if self.correct else "WRONG: other losses than"
        return (
            f"{self.shared.processes} processes share {self.tokens:,} tokens and receive "
            f"{percent(self.share)} of a full ring's bytes; {losses} one process, to {self.difference:.0e}"
        )


def example() -> Path | None:
    """``examples/train_lm.py`` of the checkout that this package is imported from; None where it is installed alone."""
    root = Path(ringweave.__file__).resolve().parents[2]
    path = root / "examples" / "train_lm.py"
    return path if path.is_file() and (root / "pyproject.toml").is_file() else None


def around(
    *,
    tokens: int,
    window: int,
    steps: int,
    threads: int,
    limit: float,
    processes: int = 2,
    advance: Callable[[float, str], None] = lambda done, text: None,
) -> SharedTraining | str:
    """Run the trainer with one process, and with several on the same cores.

    Args:
        tokens: Length of a sequence.
        window: Tokens that a token sees before itself.
        steps: Steps of each run.
        threads: What the one process has; the several have as many together, one each at least.
        limit: Seconds that both runs may take together.
        processes: How many share a sequence.
        advance: Told the share done and what happens.
    Returns:
        Both runs; or, in words, why there are none.
    """
    script = example()
    if script is None:
        return "the example lies in a checkout of ringweave, and this ringweave is installed without one"
    until = time.monotonic() + limit
    runs = []
    with tempfile.TemporaryDirectory(prefix="ringweave-") as folder:
        for number, (count, each) in enumerate([(1, threads), (processes, max(1, threads // processes))]):
            out = Path(folder) / f"{count}.jsonl"
            options = ["--tokens", tokens, "--window", window, "--steps", steps, "--out", out]
            words = "one process" if count == 1 else f"{count} processes"

            def look(out: Path = out, number: int = number, words: str = words) -> None:
                done = len(out.read_bytes().splitlines()) if out.exists() else 0
                advance((number + 0.95 * done / steps) / 2, f"{words}, step {done} of {steps}" if done else words)

            try:
                run(command(script, count, *options), threads=each, until=until, look=look)
            except LaunchError as error:
                return f"{words}: {error}"
            runs.append(Steps.read(out, count, each))
    return SharedTraining(tokens, window, runs[0], runs[1])


def command(script: Path, processes: int, *options: object, restarts: int = 0) -> list[str]:
    """Give the command line of the trainer, through torchrun if there are several processes."""
    if processes > 1:
        return torchrun(processes, script, *options, restarts=restarts)
    return [sys.executable, *map(str, (script, *options))]
