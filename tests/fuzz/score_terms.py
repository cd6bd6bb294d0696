"""Score terms, sinks and dropout of a call: generators, the Python that makes them, and their formulas."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from ringweave.terms import KINDS, Axis

from ..term_oracles import ORACLES
from .layouts import LAYOUTS
from .sizes import Sizes

STEPS = 2**16
# kinds repeated by their frequency: two kinds that learn count twice, and T5's buckets are a table of distances
_DRAWN = [name for name, kind in KINDS.items() for name in [name] * (1 + bool(kind.learns))]
_DRAWN.insert(_DRAWN.index("DistanceBias") + 2, "buckets")
FILLS = [".normal_()"] * 6 + [".normal_(0, 9)", ".normal_(0, 0.01)", ".fill_(1)", ".zero_()"]
#: entries of a bias, or logits; one of the three is -inf
HOLES = ".random_(0, 3).log_()"
DTYPES = ["float32", "float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class Term:
    """A term by the name of its kind; "buckets" and the logits of "sinks" are terms too.

    ``args`` are its numbers; the reach of a table of distances; whether a table has batch elements and heads of its
    own, where they may share it, or an optional axis; how many buckets, their largest distance, whether they have two sides.
    """

    kind: str
    args: tuple[float | bool, ...] = ()
    dtype: str = "float32"
    fill: str = ".normal_()"
    layout: str = "contiguous"
    learns: bool = False

    @property
    def axes(self) -> tuple[Axis, ...]:
        """Return the axes of its tensor, if any."""
        return next(iter(KINDS[self.kind].axes.values()), ()) if self.kind in KINDS else (Axis("heads"),)

    @property
    def alone(self) -> bool:
        """Return whether it has numbers but no tensor."""
        return not self.axes

    @property
    def placed(self) -> bool:
        """Return whether its tensor has an element for each pair."""
        return self.kind in KINDS and KINDS[self.kind].places

    @property
    def of_distance(self) -> bool:
        """Return whether it counts distances."""
        return self.kind == "buckets" or (self.kind in KINDS and KINDS[self.kind].distances)

    def shape(self, s: Sizes, nk: int) -> tuple[int, ...]:
        """Return the shape of its tensor in a call with ``nk`` keys."""
        if self.kind == "buckets":
            return int(self.args[0]), s.heads
        sizes, rest = {"batch": s.batch, "heads": s.heads, "queries": s.nq, "keys": nk}, iter(self.args)
        shape = []
        for axis in self.axes:
            if axis.along == "distance":
                shape.append(2 * int(next(rest)) + 1)
            elif not axis.optional or next(rest):
                shape.append(sizes[axis.along] if not axis.shared or next(rest) else 1)
        return tuple(shape)

    def made(self, s: Sizes, nk: int) -> str:
        """Return the Python that makes its tensor."""
        shape = self.shape(s, nk)
        leaf = ".requires_grad_()" if self.learns else ""
        if self.placed:
            return LAYOUTS[self.layout](*shape, self.dtype, self.fill) + leaf
        return f"torch.empty({list(shape)}, dtype=torch.{self.dtype}){self.fill}{leaf}"

    def source(self, name: str) -> str:
        """Return the Python that makes the term from its tensor."""
        if self.kind == "buckets":
            _, far, both = self.args
            return f"rw.DistanceBias.from_buckets({name}, max_distance={far}, bidirectional={both})"
        return f"rw.terms.{self.kind}({', '.join(map(repr, self.args)) if self.alone else name})"

    def formula(self, t: Tensor, table: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Apply the term to scores (B, Hq, nq, nk) of queries and keys at positions (B, nq) and (B, nk)."""
        distance = k[:, None] - q[:, :, None]
        if self.kind == "buckets":
            return t + table[bucket(distance, *self.args)].movedim(3, 1)
        return ORACLES[self.kind].formula(t, self.args, table, distance[:, None])

    def slopes(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Return the least and the steepest slope between two bounds of scores, for a term without a tensor."""
        slopes = ORACLES[self.kind].slopes
        assert slopes is not None
        return slopes(self.args, low, high)


def bucket(distance: Tensor, buckets: float, far: float, both: bool) -> Tensor:
    """Return T5's bucket of a distance from query to key, as the model's own code computes it."""
    found = torch.zeros_like(distance)
    if both:
        buckets //= 2
        found, distance = (distance > 0) * int(buckets), distance.abs()
    else:
        distance = (-distance).clamp(min=0)
    exact = int(buckets) // 2
    share = torch.log(distance.clamp(min=1).float() / exact) / math.log(far / exact) * (buckets - exact)
    return found + torch.where(distance < exact, distance, (exact + share.long()).clamp(max=int(buckets) - 1))


@dataclass(frozen=True)
class ScoreTerms:
    """The changes of a call to scores and weights besides scale and mask; ``dropped`` of 2 ** 16 weights are dropped."""

    terms: tuple[Term, ...] = ()
    sinks: Term | None = None
    dropped: int = 0

    def __bool__(self) -> bool:
        return bool(self.terms or self.sinks or self.dropped)

    @property
    def tensors(self) -> dict[str, Term]:
        """Return the terms that have a tensor, by its name."""
        named = {f"table{i}": term for i, term in enumerate(self.terms) if not term.alone}
        return named | ({} if self.sinks is None else {"sinks": self.sinks})

    @property
    def learning(self) -> list[str]:
        """Return the names of tensors that require gradients."""
        return [name for name, term in self.tensors.items() if term.learns]

    def inputs(self, s: Sizes, nk: int) -> list[str]:
        """Return the lines that make the tensors."""
        return [f"{name} = {term.made(s, nk)}" for name, term in self.tensors.items()]

    def options(self) -> str:
        """Return the options of the call as Python source."""
        sources = [term.source(f"table{i}") for i, term in enumerate(self.terms)]
        text = f", terms={sources[0] if len(sources) == 1 else '[' + ', '.join(sources) + ']'}" if sources else ""
        text += ", sink_logits=sinks" if self.sinks is not None else ""
        return text + (f", dropout={self.dropped} / {STEPS}" if self.dropped else "")


def draw(r: Random, s: Sizes, dtype: str, *, sinks: bool, dropout: bool) -> ScoreTerms:
    """Draw terms, sinks and dropout; without the latter two where a call cannot have them."""
    wide = ["float64"] * (dtype == "float64")
    while True:
        terms = tuple(_term(r, s, r.choice(DTYPES + wide)) for _ in range(r.choice([0, 1, 1, 1, 2, 2])))
        logits, dropped = None, 0
        if sinks and r.random() < 0.4:
            fill = HOLES if r.random() < 0.1 else r.choice([*FILLS, ".normal_(0, 30)"])
            logits = Term("sinks", (), r.choice(DTYPES + wide), fill, learns=r.random() < 0.7)
        if dropout and r.random() < 0.35:
            dropped = r.choice([1, 6554, STEPS // 4, STEPS // 2, STEPS // 2, 60000, r.randint(1, 65000)])
        if terms or logits or dropped:
            return ScoreTerms(terms, logits, dropped)


def _term(r: Random, s: Sizes, dtype: str) -> Term:
    kind = r.choice(_DRAWN)
    fill, learns = r.choice(FILLS), r.random() < 0.7
    if kind in KINDS and not KINDS[kind].axes:
        drawn = ORACLES[kind].drawn
        assert drawn is not None
        return Term(kind, drawn(r))
    if kind == "ALiBi":
        fill = r.choice([".uniform_()", ".uniform_()", ".uniform_(0, 0.1)", fill])
        return Term(kind, (r.random() < 0.3,), dtype, fill)
    if kind == "DistanceBias":
        reach = r.choice([0, 1, 2, 5, r.randint(0, s.nk), r.randint(0, s.nk), s.stop + s.nk])
        return Term(kind, (reach,), dtype, fill, learns=learns)
    if kind == "buckets":
        both, buckets = r.random() < 0.5, r.choice([4, 8, 16, 32])
        exact = buckets // (4 if both else 2)
        return Term(kind, (buckets, r.choice([exact + 1, 2 * exact, 20, 40, 128, 300]) if exact < 20 else 128, both),
                    dtype, fill, learns=learns)  # fmt: skip
    fill = HOLES if r.random() < 0.15 else fill
    layout = "contiguous" if r.random() < 0.4 else r.choice(list(LAYOUTS))
    return Term(kind, (r.random() < 0.5, r.random() < 0.5), dtype, fill, layout, learns)
