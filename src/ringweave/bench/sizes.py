"""How large the demonstration is: whole, in three minutes on two cores, or quick."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """How large the demonstration is.

    Attributes:
        lengths: Tokens at which speed and memory are measured; exactness at the first.
        context: Tokens of a training step.
        window: Of the pattern.
        sinks: Of the pattern.
        heads: Heads of the measured attention.
        head_dim: Its head dimension.
        rounds: Timed rounds.
        steps: Training steps of each model.
        around: Tokens, window and steps of the training that several processes share.
        speed_budget: Seconds after which no further timed round of a length and direction starts.
        around_budget: Seconds after which the training that several processes share is given up.
        train_budget: Seconds after which no further training step starts.
        train_least: Seconds for training where the parts before it were slow.
        whole_budget: Seconds after the start of all when training ends; what several processes share comes after it.
        peers: Who is timed beside ringweave's own backends.
    """

    lengths: tuple[int, ...]
    context: int
    window: int
    sinks: int
    heads: int
    head_dim: int
    rounds: int
    steps: int
    around: tuple[int, int, int]
    speed_budget: float
    around_budget: float
    train_budget: float
    train_least: float
    whole_budget: float
    peers: tuple[str, ...]


WHOLE = Sizes(
    lengths=(8192, 16384), context=8192, window=1024, sinks=64, heads=2, head_dim=64, rounds=3, steps=40,
    around=(4096, 256, 10), speed_budget=4.0, around_budget=60.0, train_budget=100.0, train_least=15.0,
    whole_budget=100.0, peers=("sdpa", "flex"),
)  # fmt: skip
QUICK = Sizes(
    lengths=(2048, 4096), context=2048, window=256, sinks=16, heads=4, head_dim=64, rounds=3, steps=24,
    around=(1024, 128, 4), speed_budget=3.0, around_budget=60.0, train_budget=10.0, train_least=4.0,
    whole_budget=16.0, peers=("sdpa",),
)  # fmt: skip
