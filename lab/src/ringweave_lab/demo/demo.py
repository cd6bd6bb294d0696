"""Measure exactness, speed, memory and training on real input: the source of Python's standard library.

The report contains only figures of :class:`DemoResult`, all of which are measured in the run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import ringweave as rw

from ..bench.cases.attention import window_with_sinks
from ..bench.compare import Comparison, outcomes
from ..bench.launched import SharedTraining, around
from ..bench.peers import chosen_backend, peers
from ..bench.record import Environment, Outcome, environment
from ..bench.text import Corpus, Training, standard_library, text_inputs, train
from ..tune.oracle import Accuracy, Limit
from ..tune.problem import BOTH, Problem, Sample
from ..tune.session import Session, is_ours

#: A function that receives the part, the share of it that is done, and a progress message.
Advance = Callable[[str, float, str], None]
_TRAINED = ("ringweave", "dense causal")
_CHOSEN_BLOCK = 64  # keys


def bits(nats: float) -> float:
    """Convert a loss of a byte from nats to bits."""
    return nats / math.log(2)


def faster(ratio: float) -> str:
    """Return a text such as ``2.0 times faster`` for the ratio of another time to ringweave's."""
    if round(ratio, 1) == 1:
        return "no faster"
    return f"{ratio:.1f} times faster" if ratio > 1 else f"{1 / ratio:.1f} times slower"


@dataclass(frozen=True)
class DemoSizes:
    """The sizes of the demonstration.

    Attributes:
        lengths: Tokens at which speed and memory are measured; exactness at the first.
        context: Tokens of a training step.
        window: Tokens before a token that it attends.
        sinks: Tokens at the beginning that every token attends.
        heads: Heads of the measured attention.
        head_dim: Channels of a head.
        rounds: Number of timed rounds.
        steps: Training steps of each model.
        chosen: Tokens, query heads and blocks of a query where an indexer chooses the keys.
        around: Tokens, window and steps of the training that several processes share.
        speed_budget: Seconds after which no further timed round of a length and direction starts.
        around_budget: Seconds after which the shared training is stopped.
        train_budget: Seconds after which no further training step starts.
        train_least: Minimum seconds for training, even if the parts before it were slow.
        whole_budget: Seconds after the start when training ends; the shared training follows it.
        peers: Names of the peers that are timed next to ringweave's backends.
    """

    lengths: tuple[int, ...]
    context: int
    window: int
    sinks: int
    heads: int
    head_dim: int
    rounds: int
    steps: int
    chosen: tuple[int, int, int]
    around: tuple[int, int, int]
    speed_budget: float
    around_budget: float
    train_budget: float
    train_least: float
    whole_budget: float
    peers: tuple[str, ...]


WHOLE = DemoSizes(
    lengths=(8192, 16384), context=8192, window=1024, sinks=64, heads=2, head_dim=64, rounds=3, steps=24,
    chosen=(4096, 16, 8), around=(4096, 256, 10), speed_budget=4.0, around_budget=60.0, train_budget=100.0,
    train_least=40.0, whole_budget=100.0, peers=("sdpa", "flex"),
)  # fmt: skip
QUICK = DemoSizes(
    lengths=(1024, 2048), context=1024, window=128, sinks=16, heads=2, head_dim=64, rounds=2, steps=12,
    chosen=(512, 16, 4), around=(512, 64, 3), speed_budget=2.0, around_budget=60.0, train_budget=10.0,
    train_least=4.0, whole_budget=16.0, peers=("sdpa",),
)  # fmt: skip


@dataclass(frozen=True)
class Exactness:
    """Errors against the float64 oracle on some rows.

    Attributes:
        tokens: Length of the text.
        rows: Checked rows, in every head.
        ringweave: Errors of ringweave.
        torch: Errors of torch's SDPA with the pattern as a dense mask, on the same inputs.
        limit: Largest errors that count as correct; see :attr:`Oracle.limit`.
        backend: Name of ringweave's backend.
    """

    tokens: int
    rows: int
    ringweave: Accuracy
    torch: Accuracy
    limit: Limit
    backend: str


@dataclass(frozen=True)
class PatternFacts:
    """Facts about the pattern at one length."""

    text: str
    tokens: int
    tiles: int
    all_tiles: int
    masks: int
    density: float
    plan_bytes: int
    picture: str


@dataclass(frozen=True)
class ChosenKeys:
    """Attention over the blocks of the keys that an indexer chooses, next to torch's dense causal attention.

    Attributes:
        tokens: Length of the text.
        heads: Query heads, which share a key head and its lists.
        blocks: Most blocks of a query.
        block_size: Keys of a block.
        seconds: Seconds that the indexer took.
        outcomes: The checked and timed peers, in both directions.
    """

    tokens: int
    heads: int
    blocks: int
    block_size: int
    seconds: float
    outcomes: tuple[Outcome, ...]

    def ratio(self) -> float | None:
        """Return dense attention's time over ringweave's, forward and backward."""
        dense = next(o for o in self.outcomes if o.direction == BOTH and o.peer == "sdpa")
        return None if dense.over_first is None else dense.over_first.medians

    def summary(self) -> str:
        """Return the figures as a line of text."""
        found = self.ratio()
        speed = "not timed" if found is None else f"{faster(found)} than dense attention, forward + backward"
        lists = f"{self.blocks} blocks of {self.block_size} of {self.tokens:,} tokens a query, {self.heads} heads"
        return f"{lists}: {speed}; chosen in {self.seconds:.2f} s"


@dataclass(frozen=True)
class DemoResult:
    """All figures of a demonstration; ``around`` is the reason if the shared training could not run."""

    environment: Environment
    quick: bool
    seconds: float
    source: str
    files: int
    bytes_read: int
    sizes: DemoSizes
    pattern: PatternFacts
    exactness: Exactness
    outcomes: tuple[Outcome, ...]
    chosen: ChosenKeys
    training: dict[str, Training]
    training_backend: str
    around: SharedTraining | str

    @property
    def kernel(self) -> str:
        """Text with the native kernel's instruction set, or that the kernel is missing."""
        found = self.environment.kernel
        return f"native kernel for {found}" if found else "no native kernel: ringweave was built without a C++ compiler"

    @property
    def exact(self) -> bool:
        """Whether ringweave's errors are within the limit."""
        return self.exactness.ringweave.excess(self.exactness.limit) is None

    @property
    def correct(self) -> bool:
        """Whether every checked result of ringweave is correct; the page shows which other ones are not."""
        together = isinstance(self.around, str) or self.around.correct
        wrong = [o for o in (*self.outcomes, *self.chosen.outcomes) if o.wrong and is_ours(o.peer)]
        return self.exact and together and not wrong

    def find(self, tokens: int, direction: str, peer: str) -> Outcome:
        """Return the outcome of a peer."""
        return next(o for o in self.outcomes if (o.tokens, o.direction, o.peer) == (tokens, direction, peer))

    def speed_up(self) -> float:
        """Training speed with ringweave over training speed with dense attention."""
        sparse, dense = (self.training[name] for name in _TRAINED)
        return sparse.tokens_per_second / dense.tokens_per_second

    def speeds(self) -> list[tuple[str, dict[str, str]]]:
        """Return the milliseconds of each peer as texts, by length and direction."""
        rows: dict[str, dict[str, str]] = {}
        for outcome in self.outcomes:
            what = "forward" if outcome.direction == "forward" else "both"
            row = rows.setdefault(f"{outcome.tokens:,}, {what}", {})
            if outcome.timing is None:
                row[outcome.peer] = "wrong" if outcome.wrong else "cannot"
                continue
            row[outcome.peer] = f"{outcome.timing.median * 1e3:,.0f}"
            if outcome.over_first is not None and outcome.peer != "ringweave":
                row[outcome.peer] += f" ({outcome.over_first.medians:.1f} x)"
        return list(rows.items())

    def remarks(self) -> list[str]:
        """Return the reasons why peers were not timed, each once."""
        every = *self.outcomes, *self.chosen.outcomes
        return sorted({f"{o.peer}, {o.direction}: {o.reason}." for o in every if o.reason is not None})

    def summary(self) -> list[tuple[str, str]]:
        """Return the other figures as (name, text)."""
        mine, torchs = self.exactness.ringweave.out, self.exactness.torch.out
        sparse, dense = (self.training[name] for name in _TRAINED)
        return [
            ("pattern", f"{self.pattern.text}, density {self.pattern.density:.3f} at {self.pattern.tokens:,} tokens"),
            ("backend", f"{self.exactness.backend}, in training {self.training_backend}; {self.kernel}"),
            (
                "exactness",
                f"{'right' if self.exact else 'WRONG'}: largest error of the output {mine.largest:.1e}, "
                f"torch's masked attention {torchs.largest:.1e}, both against float64",
            ),
            ("chosen keys", self.chosen.summary()),
            (
                "training",
                f"{sparse.tokens_per_second:,.0f} tokens/s, with dense attention {dense.tokens_per_second:,.0f}: "
                f"{faster(self.speed_up())}",
            ),
            (
                "loss",
                f"{bits(sparse.losses[0]):.2f} to {bits(sparse.losses[-1]):.2f} bits per byte in {len(sparse.losses)} "
                f"steps of {sparse.tokens:,} tokens, dense {bits(dense.losses[0]):.2f} to {bits(dense.losses[-1]):.2f}",
            ),
            ("around the ring", f"not run: {self.around}" if isinstance(self.around, str) else self.around.summary()),
        ]


def run_demo(*, quick: bool = False, advance: Advance = lambda part, done, text: None) -> DemoResult:
    """Run the demonstration.

    Args:
        quick: Whether to use small sizes, without FlexAttention.
        advance: Function that receives the part, the share of it that is done, and a progress message.
    Raises:
        UnsupportedError: This Python has no source files.
    """
    start = time.perf_counter()
    where = environment()
    sizes = QUICK if quick else WHOLE
    advance("Reading text", 0.0, "")
    corpus = standard_library()
    advance("Reading text", 1.0, "")
    pattern = window_with_sinks(sizes.window, sizes.sinks)
    advance("Exactness", 0.0, "against the float64 oracle")
    exactness = _exactness(pattern, corpus, sizes)
    advance("Exactness", 1.0, "")
    speed = _speed(pattern, corpus, sizes, advance)
    chosen = _chosen(corpus, sizes, advance)
    # a slow or busy machine trains for fewer steps
    left = sizes.whole_budget - (time.perf_counter() - start)
    training, backend = _train(pattern, corpus, sizes, min(sizes.train_budget, max(left, sizes.train_least)), advance)
    together = _around(sizes, where.threads, advance)
    facts = _facts(pattern, max(sizes.lengths))
    return DemoResult(
        environment=where,
        quick=quick,
        seconds=time.perf_counter() - start,
        source=corpus.source,
        files=corpus.files,
        bytes_read=len(corpus.tokens),
        sizes=sizes,
        pattern=facts,
        exactness=exactness,
        outcomes=tuple(speed),
        chosen=chosen,
        training=training,
        training_backend=backend,
        around=together,
    )


def _problem(pattern: rw.Pattern, tokens: int, sizes: DemoSizes) -> Problem:
    return Problem(f"{tokens:,} tokens", pattern, tokens, sizes.heads, sizes.head_dim)


def _exactness(pattern: rw.Pattern, corpus: Corpus, sizes: DemoSizes) -> Exactness:
    problem = _problem(pattern, sizes.lengths[0], sizes)
    session = Session(text_inputs(corpus, problem.tokens, heads=sizes.heads, head_dim=sizes.head_dim), rows=64)
    mine, torchs = (session.check(problem, peer, BOTH) for peer in peers("ringweave", "sdpa+mask"))
    assert mine.accuracy is not None
    assert torchs.accuracy is not None
    return Exactness(
        problem.tokens,
        len(session.rows),
        mine.accuracy,
        torchs.accuracy,
        session.oracle(pattern).limit,
        mine.how,
    )


def _speed(pattern: rw.Pattern, corpus: Corpus, sizes: DemoSizes, advance: Advance) -> list[Outcome]:
    part = "Speed and memory"
    # ringweave:dense_batched runs if the native kernel is missing
    names = ("ringweave", "ringweave:dense_batched", *sizes.peers)
    found: list[Outcome] = []
    for done, tokens in enumerate(sizes.lengths):
        inputs: Sample = text_inputs(corpus, tokens, heads=sizes.heads, head_dim=sizes.head_dim)
        told = 0

        def say(text: str, done: int = done) -> None:
            nonlocal told
            told += 1
            advance(part, (done + min(told / 20, 0.95)) / len(sizes.lengths), text)

        entry = _problem(pattern, tokens, sizes), names
        found += outcomes(Comparison([entry], rounds=sizes.rounds, budget=sizes.speed_budget), say, inputs=inputs)
    advance(part, 1.0, "")
    return found


def _chosen(corpus: Corpus, sizes: DemoSizes, advance: Advance) -> ChosenKeys:
    tokens, heads, blocks = sizes.chosen
    part = "Chosen keys"
    advance(part, 0.0, "the indexer")
    q, k, v, dout = text_inputs(corpus, tokens, heads=heads, head_dim=sizes.head_dim)
    k, v = k[:, :1].contiguous(), v[:, :1].contiguous()
    start = time.perf_counter()
    best = rw.adaptive.lightning_indexer(q.transpose(1, 2), k[:, 0], torch.ones(1, tokens, heads), blocks)
    seconds = time.perf_counter() - start
    # the blocks that hold the best keys: a block that holds several of them counts once
    pattern = rw.Selected((best // _CHOSEN_BLOCK)[:, None], _CHOSEN_BLOCK) & rw.Causal()
    problem = Problem("chosen keys", pattern, tokens, heads, sizes.head_dim, kv_heads=1)
    comparison = Comparison(
        [(problem, ("ringweave", "sdpa"))], ("forward", BOTH), rounds=sizes.rounds, budget=sizes.speed_budget
    )
    advance(part, 0.3, "timing in turn")
    found = tuple(outcomes(comparison, inputs=Sample(q, k, v, dout)))
    advance(part, 1.0, "")
    return ChosenKeys(tokens, heads, blocks, _CHOSEN_BLOCK, seconds, found)


def _around(sizes: DemoSizes, threads: int, advance: Advance) -> SharedTraining | str:
    def told(done: float, text: str) -> None:
        advance("Around the ring", min(done, 0.99), text)

    told(0.0, "")
    tokens, window, steps = sizes.around
    found = around(tokens=tokens, window=window, steps=steps, threads=threads, limit=sizes.around_budget, advance=told)
    advance("Around the ring", 1.0, "")
    return found


def _train(
    pattern: rw.Pattern, corpus: Corpus, sizes: DemoSizes, budget: float, advance: Advance
) -> tuple[dict[str, Training], str]:
    def sparse(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return rw.attention(q, k, v, pattern)

    def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    def told(done: float, text: str) -> None:
        advance("Training", min(done, 0.99), text)

    told(0.0, "")
    training = train(
        dict(zip(_TRAINED, (sparse, dense), strict=True)),
        corpus,
        context=sizes.context,
        steps=sizes.steps,
        budget=budget,
        advance=told,
    )
    advance("Training", 1.0, "")
    return training, chosen_backend(Problem("model", pattern, sizes.context, 4, 32), backward=True)


def _facts(pattern: rw.Pattern, tokens: int) -> PatternFacts:
    plan = pattern.plan(tokens)
    picture = pattern.plot(tokens)
    masks = int(plan.mask_words.shape[0])
    return PatternFacts(
        repr(pattern),
        tokens,
        plan.nnz,
        plan.q_tiles * plan.kv_tiles,
        masks,
        pattern.density(tokens),
        plan.nbytes,
        picture,
    )
