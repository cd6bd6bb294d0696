"""Compare attended pairs with a pattern: list the pairs that differ, and name the pattern that was attended instead."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Literal

import torch
from torch import Tensor

from ringweave.axes import Axes
from ringweave.errors import PatternError
from ringweave.patterns import (
    Causal,
    Documents,
    Full,
    KeyPadding,
    Pattern,
    Segments,
    Sinks,
    SlidingWindow,
    Strided,
    parse,
)
from ringweave.patterns.algebra import And, Combined, Not, Or, join
from ringweave.patterns.within import Within
from ringweave.units import count

from .random_probe import RandomCall
from .weight_probe import Attended

_PAIRS = Axes("found: bool[B Hq Nq Nk]")
_OFFENDERS = 5
_TILES = (8, 16, 32, 64, 128)


@dataclass(frozen=True, eq=False)
class Comparison:
    """The comparison of a function's attended pairs with a pattern.

    Attributes:
        agrees: Whether the pairs, their multiplicities, the sums of rows and the scores match the request; None if no
            query was compared.
        sentence: Description of the result.
        found: Attended pairs, (B, Hq, Nq, Nk) bool.
        promised: Pairs that the pattern allows, (B, Hq, Nq, Nk) bool.
        offenders: The first pairs that differ: (batch element, head, query, key).
        explanation: The pattern that was attended instead, or None if no known pattern fits.
    """

    agrees: bool | None
    sentence: str
    found: Tensor
    promised: Tensor
    offenders: tuple[tuple[int, int, int, int], ...] = ()
    explanation: Pattern | None = None

    @property
    def missing(self) -> Tensor:
        """Pairs that the pattern allows but the function does not attend, (B, Hq, Nq, Nk) bool."""
        return self.promised & ~self.found

    @property
    def extra(self) -> Tensor:
        """Pairs that the function attends but the pattern does not allow, (B, Hq, Nq, Nk) bool."""
        return self.found & ~self.promised

    def __str__(self) -> str:
        return self.sentence


def compare(
    found: Attended | Tensor,
    pattern: Pattern,
    *,
    q_offset: int = 0,
    k_offset: int = 0,
    rows: Tensor | None = None,
    bias: bool = False,
    sinks: bool | None = False,
    scale: float | Literal["fitted"] | None = None,
    softcap: float | Literal["fitted"] | None = None,
) -> Comparison:
    """Compare attended pairs with a pattern.

    Args:
        found: Result of :func:`attended`, or pairs (B, Hq, Nq, Nk) bool.
        pattern: The expected pattern.
        q_offset: Position of the first query.
        k_offset: Position of the first key, for caches that dropped older keys.
        rows: (B, Nq) bool, queries to compare; for example False for padding. All by default.
        bias: Whether weights may differ where scores are equal, as with ALiBi; otherwise that is a fault.
        sinks: Whether learned sinks are expected; None accepts both.
        scale: Expected factor of the scores, D**-0.5 by default; "fitted" accepts any factor and reports it.
        softcap: Expected cap of the scores, no cap by default; "fitted" accepts any cap and reports it.
    Returns:
        A :class:`Comparison`.
    Raises:
        ShapeError: The pairs have another rank or dtype.
        PatternError: The pattern does not fit these sizes.
    Example:
        >>> wrong = rw.audit.compare(rw.SlidingWindow(12).to_dense(64), rw.SlidingWindow(13))
        >>> print(wrong)
        attends SlidingWindow(12) instead of SlidingWindow(13); 51 pairs missing, the first is query 13, key 0
    """
    pairs = found.pairs if isinstance(found, Attended) else found
    _PAIRS.fit(found=pairs, empty=("B", "Hq", "Nq", "Nk"), remedy="Pass the result of attended().")
    pairs = pairs.cpu()
    batch, heads, nq, nk = pairs.shape
    counts = _dense(pattern, (batch, heads, nq, nk), q_offset, k_offset).long()
    counted = torch.ones(batch, nq, dtype=torch.bool, device="cpu") if rows is None else rows.cpu()
    promised = counts > 0
    if not bool(counted.any()):
        return Comparison(None, "not examined: no query is compared", pairs, promised)
    wrong = (pairs ^ promised) & counted[:, None, :, None]
    remarks: list[str] = []
    also = ""
    if isinstance(found, Attended):
        remarks = list(_weights(found, counts, counted, bias, sinks))
        if found.steady and not remarks:
            fault, also = _scores(found.random_call, counted, scale, softcap)
            remarks += [fault] if fault else []
    if not bool(wrong.any()):
        sentence = "; ".join(remarks) if remarks else f"agrees with {pattern!r}{also}"
        return Comparison(not remarks, sentence, pairs, promised)
    why, explanation = _Difference(pairs, promised, wrong, counted, pattern, q_offset, k_offset).explain()
    first = [(b, h, q, k) for b, h, q, k in wrong.nonzero()[:_OFFENDERS].tolist()]
    said = [*([why] if why else []), *_numbers(pairs, promised, wrong), *remarks]
    return Comparison(False, "; ".join(said), pairs, promised, tuple(first), explanation)


def _dense(pattern: Pattern, shape: tuple[int, int, int, int], q_offset: int, k_offset: int) -> Tensor:
    """Return the multiplicity of each pair, (B, H, Nq, Nk); queries at negative positions attend no key."""
    batch, heads, nq, nk = shape
    skipped = max(0, -q_offset)
    if skipped >= nq:
        return torch.zeros(shape, dtype=torch.bool, device="cpu")
    whole = pattern.to_dense(nq - skipped, k_offset + nk, heads, batch=batch, q_offset=max(0, q_offset))
    return torch.nn.functional.pad(whole[..., k_offset:], (0, 0, skipped, 0))


def _numbers(pairs: Tensor, promised: Tensor, wrong: Tensor) -> Iterator[str]:
    batch, heads = pairs.shape[:2]
    for name, these in (("missing", wrong & promised), ("extra", wrong & pairs)):
        number = int(these.sum())
        if number:
            b, h, q, k = these.nonzero()[0].tolist()
            place = [f"row {b}"] * (batch > 1) + [f"head {h}"] * (heads > 1) + [f"query {q}", f"key {k}"]
            some = count(number, "pair")
            yield f"{some} {name}, the first is {', '.join(place)}"


def _weights(found: Attended, counts: Tensor, counted: Tensor, bias: bool, sinks: bool | None) -> Iterator[str]:
    """Describe faults that show in the weights but not in the pairs."""
    if not found.steady:
        yield "weights differ from call to call: dropout is on"
        return
    alive = (found.sums > 0) & counted[:, None]
    sums = torch.where(alive, found.sums, 1.0)
    slack = found.noise * max(1.0, found.weights.shape[-1] ** 0.5)
    if bool((sums > 1 + slack).any()):
        worst = float(sums.max())
        yield f"weights of a row sum to {worst:.3g}, not to 1: parts are normalised separately and added"
    elif bool((sums < 1 - slack).any()):
        logits = found.sinks
        if logits is None:
            yield f"weights of a row sum to {float(sums.min()):.3g}, not to 1: some weights are dropped"
        elif sinks is False:
            some = ", ".join(
                [*(f"{logit:.3g}" for logit in logits[:4].tolist()), *(["..."] if len(logits) > 4 else [])]
            )
            yield f"learned sinks ({some}) take a share of each row, but no sinks were requested"
    elif sinks is True and bool(alive.any()):
        yield "learned sinks are missing: rows sum to 1 without them"
    repeated = found.counts
    if repeated is None:
        if not bias:
            yield "weights differ where scores are equal: a bias is applied, but none was requested"
    else:
        # multiplicities are relative to the least one of each row
        unit = torch.where(counts > 0, counts, 2**30).amin(-1, keepdim=True)
        relative = torch.where(counts > 0, counts / unit, 0.0)
        both = (counts > 0) & found.pairs & counted[:, None, :, None]
        other = both & ((repeated - relative).abs() > 0.25)
        if bool(other.any()):
            b, h, q, k = other.nonzero()[0].tolist()
            times, wanted = int(repeated[b, h, q, k]), float(relative[b, h, q, k])
            yield f"key {k} counts {times} times for query {q} of head {h}, not {wanted:g}"


def _scores(
    call: RandomCall, counted: Tensor, scale: float | str | None, softcap: float | str | None
) -> tuple[str, str]:
    """Describe the random call: a fault in the scores ("" if they are right), and remarks to append on success."""
    dim = call.q.shape[-1]
    # report a fitted scale only if the default does not fit
    plain = dim**-0.5 if call.softcap == 0 and not bool(call.off(dim**-0.5, 0.0).any()) else call.scale
    asked = (
        plain if isinstance(scale, str) else dim**-0.5 if scale is None else scale,
        call.softcap if isinstance(softcap, str) else softcap or 0.0,
    )
    also = f", scores times {asked[0]:.4g}" if scale == "fitted" and abs(asked[0] - dim**-0.5) > 0 else ""
    also += f", capped at {asked[1]:.4g}" if softcap == "fitted" and asked[1] else ""
    also += "" if call.precision == call.q.dtype else f", computed in {str(call.precision).removeprefix('torch.')}"
    counted = counted[:, None]
    wrong = call.off(*asked) & counted
    if not bool(wrong.any()):
        return "", also
    if not bool((call.off(call.scale, call.softcap) & counted).any()):
        cap = f" and capped at {call.softcap:.3g}" if call.softcap else ""
        wanted = f" and capped at {asked[1]:.4g}" if asked[1] else ""
        return f"scores are multiplied by {call.scale:.3g}{cap}, not by {asked[0]:.4g}{wanted}", also
    b, h, q = wrong.nonzero()[0].tolist()
    for factors in (asked, (call.scale, call.softcap)):
        source = call.source(b, h, counted[b, 0], *factors)
        if source:
            return source, also
    by = float(call.errors(*asked)[b, h, q])
    return (
        f"query {q} of head {h} of row {b} is off by {by:.2g} where scores differ: this is not a softmax of q k^T over "
        "the pairs, at any scale",
        also,
    )


class _Difference:
    """The (batch element, head) masks that differ from the expected ones, and tests for patterns that explain them."""

    def __init__(
        self,
        pairs: Tensor,
        promised: Tensor,
        wrong: Tensor,
        counted: Tensor,
        pattern: Pattern,
        q_offset: int,
        k_offset: int,
    ):
        self.pairs, self.promised, self.pattern = pairs, promised, pattern
        self.q_offset, self.k_offset = q_offset, k_offset
        self.counted = counted[:, None, :, None]
        self.where = wrong.flatten(2).any(2)  # (B, Hq)

    def fits(self, dense: Tensor) -> bool:
        """Whether a dense mask equals the attended pairs in all rows and heads that differ."""
        differs = (self.pairs ^ dense) & self.counted
        return not bool(differs.flatten(2).any(2)[self.where].any())

    def is_pattern(self, pattern: Pattern, step: int = 0) -> bool:
        shape = tuple(self.pairs.shape)
        try:
            return self.fits(_dense(pattern, shape, self.q_offset + step, self.k_offset) > 0)  # type: ignore[arg-type]
        except PatternError:
            return False

    def explain(self) -> tuple[str, Pattern | None]:
        """Return a sentence and the pattern that it names; "" and None if no explanation fits."""
        place = self._place()
        for text, candidate in _without(self.pattern):
            if self.is_pattern(candidate):
                return f"{text}{place}", candidate
        for candidate in _altered(self.pattern):
            if self.is_pattern(candidate):
                return f"attends {candidate!r} instead of {self.pattern!r}{place}", candidate
        said = self._moved()
        if said:
            return said + place, None
        future, known = self._future(), self._named()
        if known is not None:
            text = f"attends {known!r} instead of {self.pattern!r}{place}"
            return f"{future}: {text}" if future else text, known
        return future + place if future else "", None

    def _place(self) -> str:
        """Name the rows and heads that differ; "" if all do."""
        said = []
        rows = self.where.any(1).nonzero().flatten().tolist()
        heads = self.where.any(0).nonzero().flatten().tolist()
        if len(rows) < self.where.shape[0]:
            said.append(_listed("row", rows))
        if len(heads) < self.where.shape[1]:
            said.append(_listed("head", heads))
        return f", in {' and '.join(said)}" if said else ""

    def _future(self) -> str:
        nq, nk = self.pairs.shape[2:]
        later = torch.arange(nk, device="cpu") + self.k_offset > torch.arange(nq, device="cpu")[:, None] + self.q_offset
        if bool((self.promised & later).any()):
            return ""
        seen = (self.pairs & later & self.counted).any(-1).flatten(0, 1).any(0)
        return f"future visible from token {int(seen.nonzero()[0]) + self.q_offset}" if bool(seen.any()) else ""

    def _moved(self) -> str:
        """Describe a mask that is misplaced: another row's or head's, transposed, shifted or rounded to tiles."""
        batch, heads, nq, nk = self.pairs.shape
        for b in range(batch) if batch > 1 else ():
            if self.fits(self.promised[b : b + 1].expand_as(self.pairs)):
                return f"the mask of row {b} is used for every row"
        for h in range(heads) if heads > 1 else ():
            if self.fits(self.promised[:, h : h + 1].expand_as(self.pairs)):
                return f"the mask of head {h} is used for every head"
        if heads > 1:
            order = [self._like(h) for h in range(heads)]
            if all(place is not None for place in order):
                return "the masks of heads are exchanged: head 0 uses the mask of head " + str(order[0])
        if nq == nk and self.fits(self.promised.mT):
            return "queries and keys are exchanged: the mask is transposed"
        steps = sorted({*range(-8, 9), self.q_offset, -self.q_offset, nk - nq, nq - nk} - {0}, key=abs)
        for step in steps:
            if self.is_pattern(self.pattern, step):
                way = "later" if step > 0 else "earlier"
                return f"the mask is shifted: it fits queries {abs(step)} positions {way}"
        for side in _TILES:
            small = side < min(nq, nk) or (nq == 1 and side < nk)
            if small and self.fits(_in_tiles(self.promised, side, self.q_offset)):
                return f"whole tiles of {side} x {side} are attended, although the pattern allows only a part of them"
        return ""

    def _like(self, head: int) -> int | None:
        mine = self.pairs[:, head]
        counted = self.counted[:, 0]
        for other in range(self.pairs.shape[1]):
            if not bool(((mine ^ self.promised[:, other]) & counted).any()):
                return other
        return None

    def _named(self) -> Pattern | None:
        """Return the pattern that all differing rows and heads attend, or None if they attend no common pattern."""
        kept = self.pairs[self.where]
        counted = self.counted[:, 0].expand(-1, *self.pairs.shape[2:])[self.where.nonzero()[:, 0]]
        if bool(((kept ^ kept[:1]) & counted & counted[:1]).any()):
            return None
        # uncounted queries fit any mask, so take the mask with the most counted queries
        best = int(counted[..., 0].sum(-1).argmax())
        candidate = named(kept[best], self.q_offset - self.k_offset, counted[best, :, 0])
        return candidate if candidate is not None and self.is_pattern(candidate) else None


def _listed(name: str, numbers: list[int]) -> str:
    if len(numbers) == 1:
        return f"{name} {numbers[0]}"
    if len(numbers) > 8:
        return f"{len(numbers)} {name}s"
    return f"{name}s {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"


def _in_tiles(promised: Tensor, side: int, q_offset: int) -> Tensor:
    """Return the mask rounded up to whole tiles."""
    nq, nk = promised.shape[2:]
    query, key = (torch.arange(nq, device="cpu") + q_offset) // side, torch.arange(nk, device="cpu") // side
    shape = (*promised.shape[:2], int(query[-1]) + 1, int(key[-1]) + 1)
    grid = torch.zeros(shape, dtype=torch.int64, device="cpu")
    rows = torch.zeros(*shape[:3], nk, dtype=torch.int64, device="cpu").index_add_(2, query, promised.long())
    grid.index_add_(3, key, rows)
    return grid[:, :, query][..., key] > 0


def _kind(leaf: Pattern) -> str:
    """Describe the effect of leaving out a part of a pattern."""
    if isinstance(leaf, KeyPadding) or (isinstance(leaf, Sinks) and leaf.tables):
        return "padding is ignored"
    if isinstance(leaf, Documents):
        return "packing is ignored: documents attend each other"
    if isinstance(leaf, Causal):
        return "the future is visible: causality is ignored"
    return f"{leaf!r} is ignored"


def _without(pattern: Pattern) -> Iterator[tuple[str, Pattern]]:
    """Yield the pattern with one operand left out, each with a description of the effect."""
    if isinstance(pattern, Within):
        yield f"{_kind(pattern.bounds)}, and positions are counted from the start of the row", pattern.pattern
        yield "positions are counted from the start of the row", pattern.pattern & pattern.bounds
    if not isinstance(pattern, Combined):
        return
    for n, part in enumerate(pattern.parts):
        others = (*pattern.parts[:n], *pattern.parts[n + 1 :])
        yield _kind(part), join(type(pattern), *others)
        for text, smaller in _without(part):
            yield text, join(type(pattern), *others, smaller)


def _altered(pattern: Pattern) -> Iterator[Pattern]:
    """Yield the pattern with one of its numbers changed by -1, 1, -2 or 2."""
    for step in (-1, 1, -2, 2):
        yield from _off_by(pattern, step)


def _off_by(pattern: Pattern, step: int) -> Iterator[Pattern]:
    if isinstance(pattern, Combined):
        for n, part in enumerate(pattern.parts):
            for other in _off_by(part, step):
                yield join(type(pattern), *pattern.parts[:n], other, *pattern.parts[n + 1 :])
    elif isinstance(pattern, Not):
        yield from (~other for other in _off_by(pattern.part, step))
    elif isinstance(pattern, Within):
        yield from (other.within(pattern.bounds) for other in _off_by(pattern.pattern, step))
    elif not pattern.tables:
        text = pattern.spec
        for number in re.finditer(r"\d+", text):
            value = int(number[0]) + step
            if value >= 0:
                try:
                    yield parse(f"{text[: number.start()]}{value}{text[number.end() :]}")
                except PatternError:
                    continue
        if isinstance(pattern, SlidingWindow) and step == 1:
            yield SlidingWindow(pattern.left, pattern.left)


def named(pairs: Tensor, q_offset: int = 0, counted: Tensor | None = None) -> Pattern | None:
    """Find a simple pattern for a mask, from bands, sinks, documents, chunks, strides and padding.

    Args:
        pairs: The mask, (Nq, Nk) bool.
        q_offset: Position of the first query.
        counted: (Nq,) bool, queries to consider; all by default.
    Returns:
        The pattern, or None if no combination equals the mask.
    Example:
        >>> rw.audit.named((rw.SlidingWindow(5) & rw.Causal() & rw.Segments(16)).to_dense(64)[0, 0])
        SlidingWindow(5) & Segments(16)
    """
    nq, nk = pairs.shape
    counted = torch.ones(nq, dtype=torch.bool, device="cpu") if counted is None else counted
    shown_pairs = pairs & counted[:, None]
    if not bool(shown_pairs.any()):
        return ~Full() if bool(counted.any()) else None
    keys = shown_pairs.any(0).nonzero().flatten()
    bounds: list[Pattern] = []
    if int(keys[0]) > 0 or int(keys[-1]) < nk - 1:
        bounds.append(KeyPadding(int(keys[-1]) + 1, int(keys[0])))
    chunks: list[list[Pattern]] = [[]]
    chunks += [[each] for each in _pieces(shown_pairs, q_offset)]
    for sinks in range(9):
        band = _band(shown_pairs[:, sinks:], q_offset - sinks)
        if band is None:
            break
        window, causal, rate = band
        bases = {whole.spec: whole for whole in (Causal() if causal else Full(), window)}.values()
        for chunk in chunks:
            for base, tail in product(bases, ([], bounds) if bounds else ([],)):
                for thin in ([], [Strided(rate)]) if rate > 1 else ([],):
                    local = [part for part in (base, *chunk, *thin) if not isinstance(part, Full)]
                    inner = join(And, *local) if local else Full()
                    if sinks:
                        inner = join(Or, inner, Sinks(sinks))
                        if causal:
                            inner = join(And, inner, Causal())
                    candidate = join(And, inner, *tail) if tail else inner
                    try:
                        dense = candidate.to_dense(nq, nk, q_offset=q_offset)[0, 0]
                    except PatternError:
                        continue
                    if not bool(((dense ^ pairs) & counted[:, None]).any()):
                        return candidate
    return None


def _band(pairs: Tensor, q_offset: int) -> tuple[Pattern, bool, int] | None:
    """Return the narrowest band around these pairs, whether it is causal, and the gcd of the pairs' distances."""
    nq, nk = pairs.shape
    if not bool(pairs.any()):
        return None
    query, key = pairs.nonzero().unbind(1)
    distance = query + q_offset - key
    left, right = max(0, int(distance.max())), max(0, int(-distance.min()))
    causal = right == 0
    rate = math.gcd(*distance.unique().tolist())
    # if the band reaches the edge of the matrix, its width is unknown
    ends_left, ends_right = left < nq - 1 + q_offset, right < nk - 1 - q_offset
    if not ends_left and (causal or not ends_right):
        return (Causal() if causal else Full()), causal, rate
    return SlidingWindow(left, right), causal, rate


def _pieces(pairs: Tensor, q_offset: int) -> Iterator[Pattern]:
    """Yield candidate chunks or documents: boundaries that no pair crosses."""
    nq, nk = pairs.shape
    if q_offset != 0 or nq != nk:
        for length in range(2, nk):
            yield Segments(length)
        return
    query, key = pairs.nonzero().unbind(1)
    low, high = torch.minimum(query, key), torch.maximum(query, key)
    # a pair crosses a boundary before token n if low < n <= high
    crossed = torch.zeros(nk + 1, dtype=torch.int64, device="cpu")
    crossed.index_add_(0, low + 1, torch.ones_like(low))
    crossed.index_add_(0, high + 1, -torch.ones_like(high))
    cuts = [n for n in range(1, nk) if int(crossed[: n + 1].sum()) == 0]
    if not cuts:
        return
    ends = [0, *cuts, nk]
    lengths = [b - a for a, b in pairwise(ends)]
    if len({*lengths[:-1]}) == 1 and lengths[-1] <= lengths[0]:
        yield Segments(lengths[0])
    yield Documents(lengths)
