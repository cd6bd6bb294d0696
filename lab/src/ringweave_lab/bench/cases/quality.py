"""The case ``quality``: the loss of quality of methods that attend a tenth of the pairs, on text and in retrieval.

There are three parts: the share of dense attention's weight that each choice of blocks holds, in a densely trained
model; bits per byte of models trained with each method; and how often a value is found among thousands of keys. The
text is the source of Python's standard library. With a folder every figure is stored immediately, and a later run
continues from it.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ringweave as rw
from ringweave.adaptive import BlockIndexer, ImportanceTracker, SparsitySchedule, select, tile_mass
from ringweave.hierarchical import hierarchical_attention

from ...tune.problem import Attend
from ...tune.session import Say
from ..record import Measuring, Options, Score, Target, write_lines
from ..report import read_lines, record_of
from ..text import LAYERS, ByteModel, Corpus, standard_library, train

SELECTORS = ("mean", "antidiagonal", "top_p", "bounds")
_HEADS = 4
_POOLS = "means of pools"
_LOCAL_RANDOM = "local + random"
_INDEXER_RATE = 1e-2
# training steps of an indexer on a trained model, per update of the tracker
_INDEXER_STEPS = 4
# blocks before a row's block that form its window, which every choice contains
_NEAR = 2
# held-out contexts in the mean of bits, and the offset of seeds that gives later steps other excerpts than earlier ones
_EXCERPTS, _OTHER = 8, 1000
_FAR_RECALL = "recall beyond the window"


@dataclass(frozen=True)
class Sizes:
    """The sizes of the three parts.

    Attributes:
        density: Share of the causal pairs that sparse methods attend.
        recall: Tokens, training steps and updates of the tracker, of the first part; its seeds are held-out excerpts. A
            step is of a quarter of the tokens; those that follow, a twentieth as many, of all.
        text: Tokens and training steps of the second, and dense steps before them, which all methods share.
        retrieval: Lengths of the third part.
        seeds: Number of repetitions with different seeds.
    """

    density: float
    recall: tuple[int, int, int]
    text: tuple[int, int, int]
    retrieval: tuple[int, ...]
    seeds: int


WHOLE = Sizes(0.1, (4096, 1000, 50), (1024, 100, 400), (4096, 8192, 16384), 3)
QUICK = Sizes(0.25, (512, 3, 2), (256, 2, 1), (512,), 1)


def measure(options: Options, say: Say) -> Measuring:
    """Measure the three parts in turn, and compare the scores with their targets."""
    sizes = QUICK if options.quick else WHOLE
    if options.tokens:
        sizes = dataclasses.replace(
            sizes, recall=(options.tokens, *sizes.recall[1:]), text=(options.tokens, *sizes.text[1:]),
            retrieval=(options.tokens,),
        )  # fmt: skip
    kept = Kept(options.folder)
    corpus = standard_library(2**20 if options.quick else 4 * 2**20)
    found: list[Score] = []
    for part in (recall, bits, retrieval):
        for each in part(sizes, corpus, kept, say):
            found.append(each)
            yield each
    if options.folder is not None:
        from .. import plots

        path = Path(options.folder) / "quality.svg"
        path.write_text(plots.standing_alone(plots.scores(found)), encoding="utf-8")
    yield from _targets(found, options)
    best = max(SELECTORS, key=lambda name: _mean(found, "recall", name))
    return (
        f"Of dense attention's weight, {sizes.density:.0%} of the pairs hold {_mean(found, 'recall', best):.1%} as "
        f"{best} chooses them, {_mean(found, 'recall', _LOCAL_RANDOM):.1%} local and random, "
        f"{_mean(found, 'recall', 'best blocks'):.1%} at the most; beyond the window "
        f"{_mean(found, _FAR_RECALL, best):.1%}, {_mean(found, _FAR_RECALL, _LOCAL_RANDOM):.1%} and "
        f"{_mean(found, _FAR_RECALL, 'best blocks'):.1%}."
    )


class Kept:
    """The scores stored in a folder; a stored score is not measured again.

    Args:
        folder: The folder; None stores nothing.
    """

    def __init__(self, folder: str | None):
        self.path = None if folder is None else Path(folder) / "scores.jsonl"
        self.scores: dict[tuple[object, ...], Score] = {}
        if self.path is not None and self.path.exists():
            for score in map(record_of, read_lines([self.path])):
                assert isinstance(score, Score)
                self.add(score, write=False)

    def add(self, score: Score, write: bool = True) -> Score:
        """Store a score, and return it."""
        self.scores[score.key] = score
        if write and self.path is not None:
            write_lines(self.path, [score])
        return score

    def or_made(self, blank: Score, make: Callable[[], tuple[float, float, Sequence[float]]]) -> Score:
        """Return the stored score of a blank one; if missing, make its (density, value, curve) and store it."""
        known = self.scores.get(blank.key)
        if known is not None:
            return known
        density, value, curve = make()
        return self.add(dataclasses.replace(blank, density=density, value=value, curve=tuple(curve)))


# ---- choices of blocks -----------------------------------------------------------------------------------------------


def side_of(n: int) -> int:
    """Return the side of a block for a length; there are 64 blocks at 4,096 tokens and 32 at 1,024."""
    return 64 if n >= 4096 else 32


def share(pattern: rw.Pattern, n: int, heads: int = _HEADS) -> float:
    """Return the allowed pairs over those of causal attention."""
    return pattern.density(n, n, heads=heads) / rw.Causal().density(n, n)


def ranked(scores: Tensor, density: float, side: int) -> rw.Pattern:
    """Return the causal blocks of each row's own, the first and the highest scores, (H, blocks, blocks)."""
    blocks = scores.shape[-1]
    row, column = torch.arange(blocks)[:, None], torch.arange(blocks)
    scores = torch.where((column == row) | (column == 0), torch.inf, scores)
    order = torch.where(column <= row, scores, -torch.inf).argsort(-1, descending=True)
    counts = torch.maximum(((row + 1) * density - 1e-9).ceil(), (row + 1).clamp(max=2))
    mask = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, (column < counts).expand(scores.shape))
    return rw.BlockTable(mask, side) & rw.Causal()


def local_and_random(n: int, density: float, seed: int) -> rw.Pattern:
    """Return blocks for each head: half of each row's are the nearest, the others are random."""
    side = side_of(n)
    blocks = -(-n // side)
    row, column = torch.arange(blocks)[:, None], torch.arange(blocks)
    noise = torch.rand(_HEADS, blocks, blocks, generator=torch.Generator().manual_seed(seed))
    near = (row - column < ((row + 1) * density / 2).ceil()) & (column <= row)
    return ranked(torch.where(near, 2.0, noise), density, side)


def static(n: int, density: float, seed: int) -> dict[str, rw.Pattern]:
    """Return patterns of about one density that do not depend on queries and keys."""
    side = side_of(n)
    bigbird = rw.patterns.bigbird(
        n, window=n // 32, global_tokens=n // 64, random=1, block_size=max(16, n // 32), seed=seed
    )
    return {
        "local": ImportanceTracker(n, heads=_HEADS, density=density, block_size=side).pattern,
        _LOCAL_RANDOM: local_and_random(n, density, seed),
        "bigbird": bigbird & rw.Causal(),
    }


def chosen(method: str, q: Tensor, k: Tensor, density: float) -> rw.Pattern:
    """Return a selector's choice at a density; if it takes a mass, use the mass with the nearest smaller density."""
    n, side = q.shape[2], side_of(q.shape[2])
    if method == _POOLS:
        return select(q, k, density=density, block_size=side, pool=side // 4) & rw.Causal()
    if method != "top_p":
        stride = 8 if method == "antidiagonal" else None
        return select(q, k, method=method, density=density, block_size=side, stride=stride) & rw.Causal()
    least, most = 0.0, 1.0
    for _ in range(7):
        middle = (least + most) / 2
        table = select(q, k, method=method, mass=middle, block_size=side)
        assert isinstance(table, rw.BlockTable)
        held = (table.blocks.listed() < table.blocks.key_blocks).sum()
        blocks = -(-n // side)
        wanted = torch.maximum((torch.arange(1, blocks + 1) * density).ceil(), torch.arange(1, blocks + 1).clamp(max=2))
        fits = held <= wanted.sum() * q.shape[0] * q.shape[1]
        least, most = (middle, most) if fits else (least, middle)
    return select(q, k, method=method, mass=max(least, 1e-6), block_size=side) & rw.Causal()


def indexer_of(q: Tensor, side: int) -> BlockIndexer:
    """Return an indexer for queries (1, H, N, D) with as many key heads as query heads."""
    return BlockIndexer(q.shape[3], heads=q.shape[1], block_size=side, pool=side // 4)


def learn(indexer: BlockIndexer, optimizer: torch.optim.Optimizer, loss: Tensor) -> float:
    """Train an indexer by one step, and return its loss."""
    optimizer.zero_grad()
    torch.autograd.backward(loss, inputs=list(indexer.parameters()))
    optimizer.step()
    return loss.item()


def trained_densely(
    corpus: Corpus, n: int, steps: int, *, initial: ByteModel | None = None, seed: int = 0
) -> ByteModel:
    """Train a model with dense attention on excerpts of n tokens, from a seed's weights or another model's."""
    models: dict[str, ByteModel] = {}
    dense: Mapping[str, Attend] = {"dense": lambda q, k, v: rw.attention(q, k, v, rw.Causal())}
    train(dense, corpus, context=n, steps=steps, budget=1e9, seed=seed, initial=initial, finish=models.__setitem__)
    return models["dense"]


# ---- (a) how much of dense attention's weight ------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Seen:
    """Queries and keys of a layer on an excerpt, (1, H, N, D), with the lse of dense attention, (1, H, N)."""

    q: Tensor
    k: Tensor
    lse: Tensor

    def recall(self, pattern: rw.Pattern) -> float:
        """Share of the weight that a pattern's tiles hold."""
        return float(tile_mass(self.q, self.k, self.lse, pattern).values.double().sum()) / self.lse.numel()

    def far(self, pattern: rw.Pattern, side: int) -> float:
        """Weight of a pattern in blocks at a distance of two or more, without the first block of keys."""
        mass = tile_mass(self.q, self.k, self.lse, pattern, tile=side)
        _, row, column = mass.tiles()
        return float(mass.values.double()[(row - column >= _NEAR) & (column > 0)].sum())


def look(model: ByteModel, tokens: Tensor) -> list[Seen]:
    """Run a model with dense attention, and return its layers' queries and keys."""
    seen: list[Seen] = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = rw.attention_with_lse(q, k, v, rw.Causal())
        seen.append(Seen(q.detach().contiguous(), k.detach().contiguous(), lse.detach()))
        return out

    before = [block.attend for block in model.blocks]
    for block in model.blocks:
        setattr(block, "attend", attend)  # noqa: B010  (no submodule)
    with torch.no_grad():
        model(tokens)
    for block, own in zip(model.blocks, before, strict=True):
        block.attend = own
    return seen


def recall(sizes: Sizes, corpus: Corpus, kept: Kept, say: Say) -> Iterator[Score]:
    """Train a dense model, and measure the share of its weight on held-out text that each choice of blocks holds."""
    (n, steps, updates), density = sizes.recall, sizes.density
    side = side_of(n)
    known, held_out = corpus.split(sizes.seeds * n)

    @functools.cache
    def model() -> ByteModel:
        say(f"recall: training a dense model, {steps} steps of {n // 4:,} tokens, {max(1, steps // 20)} of {n:,}")
        return trained_densely(known, n, max(1, steps // 20), initial=trained_densely(known, n // 4, steps))

    @functools.cache
    def seen(seed: int) -> list[Seen]:
        return look(model(), held_out[:, seed * n : (seed + 1) * n])

    @functools.cache
    def tracked() -> tuple[list[ImportanceTracker], list[float]]:
        trackers = [ImportanceTracker(n, heads=_HEADS, density=density, block_size=side) for _ in range(LAYERS)]
        generator, curve = torch.Generator().manual_seed(1), []
        for step in range(updates + 1):
            if step % max(1, updates // 10) == 0:
                say(f"recall: tracker, update {step} of {updates}")
                curve.append(statistics.mean(s.recall(t.pattern) for s, t in zip(seen(0), trackers, strict=True)))
            for layer, tracker in zip(look(model(), known.batch(n, generator)[:, :n]), trackers, strict=True):
                _, lse = rw.attention_with_lse(layer.q, layer.k, layer.k, tracker.pattern)
                tracker.update(layer.q, layer.k, lse)
        return trackers, curve

    @functools.cache
    def indexed() -> tuple[list[BlockIndexer], list[float]]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            indexers = [indexer_of(s.q, side) for s in seen(0)]
        optimizers = [torch.optim.Adam(indexer.parameters(), lr=_INDEXER_RATE) for indexer in indexers]
        generator, curve = torch.Generator().manual_seed(1), []
        for step in range(total := _INDEXER_STEPS * updates):
            say(f"recall: indexer, step {step} of {total}")
            losses = []
            layers = look(model(), known.batch(n, generator)[:, :n])
            for layer, indexer, optimizer in zip(layers, indexers, optimizers, strict=True):
                optimizer.param_groups[0]["lr"] = _INDEXER_RATE * (1 - step / total)
                mass = tile_mass(layer.q, layer.k, layer.lse, rw.Causal(), tile=side)
                losses.append(learn(indexer, optimizer, indexer.loss(layer.q, layer.k, mass)))
            curve.append(statistics.mean(losses))
        return indexers, curve

    @functools.cache
    def all_far(seed: int) -> list[float]:
        return [s.far(rw.Causal(), side) for s in seen(seed)]

    @functools.lru_cache(1)
    def patterns(method: str, seed: int) -> list[rw.Pattern]:
        if method == "indexer":
            each = zip(indexed()[0], seen(seed), strict=True)
            return [indexer(s.q, s.k, density=density) & rw.Causal() for indexer, s in each]
        if method == "tracker":
            return [tracker.pattern for tracker in tracked()[0]]
        if method == "best blocks":
            masses = (tile_mass(s.q, s.k, s.lse, rw.Causal(), tile=side) for s in seen(seed))
            return [ranked(mass.to_dense()[0], density, side) for mass in masses]
        if method in (*SELECTORS, _POOLS):
            return [chosen(method, s.q, s.k, density) for s in seen(seed)]
        return [static(n, density, seed)[method]] * LAYERS

    def made(method: str, seed: int, beyond: bool) -> tuple[float, float, Sequence[float]]:
        say(f"recall: {method}, excerpt {seed + 1} of {sizes.seeds}")
        each = patterns(method, seed)
        shares = statistics.mean(share(pattern, n) for pattern in each)
        if beyond:
            layers = zip(seen(seed), each, all_far(seed), strict=True)
            return shares, statistics.mean(s.far(pattern, side) / whole for s, pattern, whole in layers), ()
        value = statistics.mean(s.recall(pattern) for s, pattern in zip(seen(seed), each, strict=True))
        curves = {"tracker": lambda: tracked()[1], "indexer": lambda: indexed()[1]}
        return shares, value, curves[method]() if method in curves else ()

    for method in ("local", _LOCAL_RANDOM, "bigbird", *SELECTORS, _POOLS, "tracker", "indexer", "best blocks"):
        for seed in range(sizes.seeds):
            for part in ("recall", _FAR_RECALL):
                blank = Score(part, method, n, seed, steps, "share")
                yield kept.or_made(blank, functools.partial(made, method, seed, part == _FAR_RECALL))


# ---- (b) bits per byte -----------------------------------------------------------------------------------------------


class Trained:
    """Attention of all layers of a model in training, by a method; measures its own density.

    Args:
        method: Name of the method.
        n: Number of tokens.
        density: Share of the causal pairs.
        steps: Number of training steps.
        seed: Seed of random choices.
    """

    def __init__(self, method: str, n: int, density: float, steps: int, seed: int):
        self.method, self.n, self.calls, self.share = method, n, 0, density
        self.schedule = SparsitySchedule(start=0.5, end=density, warmup=steps // 5, ramp=max(1, steps // 2))
        self.fixed: rw.Pattern | None = None
        if method == "dense":
            self.fixed = rw.Causal()
        elif method == "LongNet":
            self.fixed = rw.LongNet([n // 16, n // 4, n], [1, 4, 16], causal=True)
        elif method in (known := static(n, density, seed)):
            self.fixed = known[method]
        side = side_of(n)
        self.warmup = steps // 5
        self.indexers: list[tuple[BlockIndexer, torch.optim.Optimizer]] = []
        self.trackers = [
            ImportanceTracker(n, heads=_HEADS, density=density, block_size=side) for _ in range(LAYERS)
        ]  # fmt: skip

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Compute attention of the current layer, and advance to the next one."""
        layer, self.calls = self.calls % LAYERS, self.calls + 1
        if self.method == "hierarchical":
            side, blocks = side_of(self.n), -(-self.n // side_of(self.n))
            # attending the blocks' means costs pairs too
            top_k = max(1, round(self.share * blocks / 2))
            return hierarchical_attention(q, k, v, pool=side, top_k=top_k, window=0, causal=True)
        if self.method == "tracker":
            tracker = self.trackers[layer]
            out, lse = rw.attention_with_lse(q, k, v, tracker.pattern)
            if torch.is_grad_enabled():
                tracker.update(q, k, lse.detach())
            return out
        if self.method == "indexer":
            return self._indexed(layer, q, k, v)
        pattern = self.fixed
        if pattern is None:
            density = self.schedule.density if self.method == "scheduled" else self.share
            pattern = chosen("mean" if self.method == "scheduled" else self.method, q, k, density)
        if layer == LAYERS - 1 and torch.is_grad_enabled():
            self.schedule.step()
        self.last = pattern
        return rw.attention(q, k, v, pattern)

    def _indexed(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend the blocks that an indexer chooses, and train it, first on dense attention and then on its choice."""
        side = side_of(self.n)
        if len(self.indexers) <= layer:
            indexer = indexer_of(q, side)
            self.indexers.append((indexer, torch.optim.Adam(indexer.parameters(), lr=_INDEXER_RATE)))
        indexer, optimizer = self.indexers[layer]
        warm = torch.is_grad_enabled() and self.calls <= LAYERS * self.warmup
        self.last = rw.Causal() if warm else indexer(q, k, density=self.share) & rw.Causal()
        out, lse = rw.attention_with_lse(q, k, v, self.last)
        if torch.is_grad_enabled():
            mass = tile_mass(q.detach(), k.detach(), lse.detach(), self.last, tile=side)
            learn(indexer, optimizer, indexer.loss(q, k, mass))
        return out

    def density(self) -> float:
        """Share of the causal pairs in the last call of the last layer."""
        if self.method == "hierarchical":
            side, blocks = side_of(self.n), -(-self.n // side_of(self.n))
            tiles = min(1 + max(1, round(self.share * blocks / 2)), blocks)
            return sum(min(tiles, row + 1) for row in range(blocks)) / (blocks * (blocks + 1) / 2) + 1 / side
        return share(self.trackers[-1].pattern if self.method == "tracker" else self.last, self.n)


def bits(sizes: Sizes, corpus: Corpus, kept: Kept, say: Say) -> Iterator[Score]:
    """Continue training a dense model with each method on the same text, and measure bits of held-out text."""
    n, steps, before = sizes.text

    @functools.cache
    def start(seed: int) -> ByteModel:
        say(f"bits per byte: training a dense model, {before} steps, seed {seed + 1} of {sizes.seeds}")
        return trained_densely(corpus.split(_EXCERPTS * n + 1)[0], n, before, seed=seed)

    def made(method: str, seed: int) -> tuple[float, float, Sequence[float]]:
        say(f"bits per byte: {method}, seed {seed + 1} of {sizes.seeds}, {steps} steps of {n:,} tokens")
        attend = Trained(method, n, sizes.density, steps, seed)
        result = train(
            {method: attend}, corpus, context=n, steps=steps, budget=1e9, seed=_OTHER + seed, excerpts=_EXCERPTS,
            initial=start(seed),
        )[method]  # fmt: skip
        return attend.density(), result.bits_per_byte, result.losses

    static_ones = ("local", _LOCAL_RANDOM, "bigbird", "LongNet")
    for method in ("dense", *static_ones, *SELECTORS, "tracker", "indexer", "scheduled", "hierarchical"):
        for seed in range(sizes.seeds):
            yield kept.or_made(
                Score("bits per byte", method, n, seed, steps, "bits"), functools.partial(made, method, seed)
            )


# ---- (c) retrieval ---------------------------------------------------------------------------------------------------


def questions(kind: str, n: int, seed: int, dim: int = 64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return queries that look for single keys: q, k, v, (1, H, n, dim), and the key of each row, (rows, H).

    A ``"needle"`` is one key that all queries of the last block look for. In ``"associative recall"`` the keys of a
    block share a component, and each of the last half's blocks of queries looks for keys of two blocks before it.
    """
    generator = torch.Generator().manual_seed(seed)
    side = side_of(n)

    def units(*shape: int) -> Tensor:
        return torch.nn.functional.normalize(torch.randn(*shape, dim, generator=generator), dim=-1)

    k, v, q = units(1, _HEADS, n), units(1, _HEADS, n), 0.5 * units(1, _HEADS, n)
    if kind == "needle":
        wanted = torch.randint(0, n - side, (1, _HEADS), generator=generator).expand(side, -1)
        rows = torch.arange(n - side, n)
    else:
        common = units(1, _HEADS, n // side).repeat_interleave(side, 2)
        k = torch.nn.functional.normalize(k + 0.5 * common, dim=-1)
        rows = torch.arange(n // 2, n)
        of_tile = torch.randint(0, n // 2 // side, (n // 2 // side, 2, _HEADS), generator=generator)
        which = torch.randint(0, 2, (n // 2, _HEADS), generator=generator)
        blocks = of_tile.repeat_interleave(side, 0).gather(1, which[:, None])[:, 0]
        wanted = blocks * side + torch.randint(0, side, (n // 2, _HEADS), generator=generator)
    # 16 above chance, so that a row of dense attention gives nearly all weight to its key
    head = torch.arange(_HEADS)
    q[0, head[:, None], rows] = 16 * dim**0.5 * k[0, head[:, None], wanted.T]
    return q, k, v, torch.stack([rows[:, None].expand(-1, _HEADS), wanted])


def retrieval(sizes: Sizes, corpus: Corpus, kept: Kept, say: Say) -> Iterator[Score]:
    """Measure how often attention over the blocks that each method chooses finds the right value among n keys."""

    def made(kind: str, method: str, n: int, seed: int) -> tuple[float, float, Sequence[float]]:
        say(f"{kind}: {method}, {n:,} tokens, seed {seed + 1} of {sizes.seeds}")
        q, k, v, (rows, wanted) = questions(kind, n, seed)
        attend = Trained(method, n, sizes.density, 1, seed)
        out = attend(q, k, v)
        picked = slice(None, None, max(1, len(rows) // 256))
        right = []
        for head in range(_HEADS):
            nearest = (out[0, head, rows[picked, head]] @ v[0, head].T).argmax(-1)
            right.append((nearest == wanted[picked, head]).double().mean())
        return attend.density(), float(torch.stack(right).mean()), ()

    for n in sizes.retrieval:
        for kind in ("needle", "associative recall"):
            for method in ("dense", _LOCAL_RANDOM, *SELECTORS, "hierarchical"):
                for seed in range(sizes.seeds):
                    blank = Score(kind, method, n, seed, 0, "found")
                    yield kept.or_made(blank, functools.partial(made, kind, method, n, seed))


# ---- targets and report ----------------------------------------------------------------------------------------------


def _values(scores: Sequence[Score], part: str, method: str) -> list[float]:
    return [each.value for each in scores if (each.part, each.method) == (part, method)]


def _mean(scores: Sequence[Score], part: str, method: str) -> float:
    return statistics.mean(_values(scores, part, method))


def _targets(scores: Sequence[Score], options: Options) -> Iterator[Target]:
    first = scores[0]

    def target(what: str, figure: float, bound: float, at_least: bool, unit: str = "x") -> Target:
        size = f"{first.tokens:,} tokens, {len(_values(scores, 'recall', 'local'))} excerpts"
        return Target(what, size, figure, None if options.sized else bound, at_least, unit)

    random = _mean(scores, "recall", _LOCAL_RANDOM)
    for method in SELECTORS:
        yield target(f"recall of {method} over local + random", _mean(scores, "recall", method) / random, 1.3, True)
        beyond = _mean(scores, _FAR_RECALL, method) / _mean(scores, _FAR_RECALL, _LOCAL_RANDOM)
        yield target(f"{_FAR_RECALL} of {method} over local + random", beyond, 1.3, True)
    curve = next(each.curve for each in scores if each.method == "tracker" and each.part == "recall")
    best = max(_mean(scores, "recall", method) for method in SELECTORS)
    yield target(
        "recall of the trained indexer over the best selector", _mean(scores, "recall", "indexer") / best, 1.0, True
    )
    yield target("recall of the tracker, last update over first", curve[-1] / curve[0], 1.0, True)
    dense = _mean(scores, "bits per byte", "dense")
    scheduled = _mean(scores, "bits per byte", "scheduled")
    yield target("bits per byte, scheduled over dense", scheduled / dense, 1.01, False)


def spread(scores: Sequence[Score]) -> list[dict[str, Any]]:
    """Return the mean, least and largest score over seeds for each part, length and method, in the scores' order."""
    groups: dict[tuple[str, int, str], list[Score]] = {}
    for each in scores:
        groups.setdefault((each.part, each.tokens, each.method), []).append(each)
    return [
        {
            "part": part, "tokens": tokens, "method": method, "unit": members[0].unit, "seeds": len(members),
            "density": statistics.mean(each.density for each in members),
            "mean": statistics.mean(each.value for each in members),
            "least": min(each.value for each in members), "most": max(each.value for each in members),
        }
        for (part, tokens, method), members in groups.items()
    ]  # fmt: skip
