"""The headline figures: absolute times of each engine on six problems, forward and backward.

Each figure is yielded as soon as it is measured. An engine is first held to the float64 oracle, then timed between
events with several calls in a row. Engines of other origins are measured before ours, which runs in units of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

import ringweave as rw
from ringweave.errors import in_a_line
from ringweave.patterns import Pattern

from ..bench.cases.gpu import OWN
from ..bench.compare import weighed
from ..bench.peers import peers
from ..bench.record import Outcome
from ..tune.measure import by_events
from ..tune.problem import BACKWARD, FORWARD, Problem, RandomBlocks, RandomKeys
from ..tune.session import Entry, Say, Session, in_turn

_ENGINES = ("flex", "sdpa:cudnn", "sdpa:flash", "ringweave")
_OF_LISTS = ("sdpa:flash", "ringweave:attn_gym", "ringweave:dense_batched", "ringweave")
_DOCUMENTS = 24
#: Tokens, heads and channels of a dry run.
_SMALL = _DOCUMENTS * 6, 2, 32
_ROUNDS, _BUDGET = 10, 4.0


@dataclass(frozen=True)
class Headline:
    """A problem and its engines.

    Attributes:
        relation: Function from the number of tokens to the pattern.
        tokens: Number of tokens.
        heads: Number of query heads.
        kv_heads: Number of key heads.
        engines: Names of peers, in the order of measurement.
    """

    relation: Callable[[int], Pattern | RandomBlocks | RandomKeys]
    tokens: int = 16384
    heads: int = 16
    kv_heads: int | None = None
    engines: tuple[str, ...] = _ENGINES

    def problem(self, name: str, device: str, dry: bool) -> Problem:
        """Return the problem on a device, or a small one on the CPU."""
        if dry:
            tokens, heads, dim = _SMALL
            kv_heads = None if self.kv_heads is None else 1
            return Problem(name, self.relation(tokens), tokens, heads, dim, kv_heads=kv_heads)
        return Problem(
            name, self.relation(self.tokens), self.tokens, self.heads, 128, dtype=torch.bfloat16, device=device,
            kv_heads=self.kv_heads,
        )  # fmt: skip


#: Headlines by name, the most important first.
HEADLINES = {
    "causal": Headline(lambda tokens: rw.Causal()),
    "window": Headline(lambda tokens: rw.SlidingWindow(1023, 0), 65536),
    "blocks of 128": Headline(lambda tokens: RandomBlocks(0.1)),
    "blocks of 64": Headline(lambda tokens: RandomBlocks(block_size=64, chosen=64), 109632, 7),
    "documents": Headline(
        lambda tokens: rw.Documents([tokens // _DOCUMENTS] * _DOCUMENTS) & rw.Causal(), _DOCUMENTS * 2731
    ),
    "selected": Headline(lambda tokens: RandomKeys(512), kv_heads=1, engines=_OF_LISTS),
}


def measure(problem: Problem, engines: Sequence[str], say: Say) -> Iterator[Outcome]:
    """Check and time engines on a problem one after another, and yield each figure as soon as it is measured."""
    # compilers raise exceptions of any type, and an engine's failure must not cost the figures of the next one
    session = Session(problem.inputs(), say, ends=True, failures=(Exception,))
    for peer in peers(*engines):
        for direction in (FORWARD, BACKWARD):
            entry = session.check(problem, peer, direction)
            say(f"{problem.name}, {direction}: timing {peer.name}")
            _time(entry)
            yield weighed(entry)


def _time(entry: Entry) -> None:
    timer = by_events if torch.device(entry.problem.device).type == "cuda" else None
    try:
        in_turn([entry], rounds=_ROUNDS, budget=_BUDGET, timer=timer)
    except Exception as error:  # noqa: BLE001 as above
        entry.learn(reason=in_a_line(error))
    # a retained graph holds memory that the next engine may need
    entry.learn(call=None)


def own(name: str, device: str, dry: bool, say: Say) -> Iterator[Outcome]:
    """Measure our Triton kernel on a headline's problem."""
    yield from measure(HEADLINES[name].problem(name, device, dry), (OWN,), say)


def others(name: str, device: str, dry: bool, say: Say) -> Iterator[Outcome]:
    """Measure the engines of a headline, without our Triton kernel."""
    of = HEADLINES[name]
    yield from measure(of.problem(name, device, dry), of.engines, say)
