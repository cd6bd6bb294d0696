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
        speed_budget: Seconds after which no further timed round of a length and direction starts.
        train_budget: Seconds after which no further training step starts.
        whole_budget: Seconds of the whole run that training keeps to.
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
    speed_budget: float
    train_budget: float
    whole_budget: float
    peers: tuple[str, ...]


WHOLE = Sizes((8192, 16384), 8192, 1024, 64, 2, 64, 3, 40, 4.0, 110.0, 165.0, ("sdpa", "flex"))
QUICK = Sizes((2048, 4096), 2048, 256, 16, 4, 64, 3, 24, 3.0, 10.0, 16.0, ("sdpa",))
