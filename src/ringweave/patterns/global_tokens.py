"""Patterns of chosen tokens: global tokens and attention sinks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..checks import integers, whole, whole_fields
from ..errors import PatternError, shown
from ..relation.arrays import Int64, number_rows
from ..relation.node import ELEMENT, FAR, Node, Or
from ..relation.zones import K, Residue, Zones
from .base import Composite, Pattern
from .batch_axis import Bounds
from .declared import declare
from .fitting import made_again, made_by

# the most first tokens that are listed one by one to be joined with others
_WRITTEN_OUT = 1024


@declare("Sinks(64)", "By chosen tokens", hostile="Sinks(range(0, n, 1000))")
class Sinks(Bounds):
    """Keys that every query attends, such as the first tokens of a sequence, or the tokens that a mask marks.

    ``Causal() & Sinks(mask)`` is causal attention over the keys that exist, for padding at any place.

    Args:
        tokens: Positions as a list, or a 1-D array or tensor of integers; or an int n for the first n; or a bool tensor
            (N,), or (B, N) for each batch element, which is copied, and read when a plan is made.
    Raises:
        PatternError: Positions are not ints, negative or repeated; at use, a bool tensor does not have one value for
            each key, or a call whose queries begin at position 0 does not have a listed token.
    Example:
        >>> rw.Sinks(1).to_dense(3)[0, 0].int()
        tensor([[1, 0, 0],
                [1, 0, 0],
                [1, 0, 0]], dtype=torch.int32)
        >>> rw.Sinks(torch.tensor([True, False, True])).to_dense(1, 3)[0, 0].int()
        tensor([[1, 0, 1]], dtype=torch.int32)

    References:
        Xiao et al. (2023), Efficient streaming language models with attention sinks.
    """

    _mask: Tensor | None = None

    private: ClassVar[bool] = True

    def __init__(self, tokens: int | Sequence[int] | Tensor):
        if not isinstance(tokens, Tensor) or tokens.dtype != torch.bool:
            alone = isinstance(tokens, (int, float, str, np.number))
            self.tokens: int | tuple[int, ...] = whole("tokens", tokens, 0) if alone else _positions(tokens)
            self.__post_init__()
            return
        if tokens.ndim not in (1, 2) or not tokens.numel() or tokens.layout != torch.strided:
            wanted = "a bool tensor (N,) or (B, N)"
            raise PatternError("tokens", shown(tokens), wanted, "Mark the chosen tokens of each row.")
        self._hold(tokens.detach().clone())

    def _hold(self, mask: Tensor) -> Self:
        self.tokens, self._mask = (), mask
        self.__post_init__()
        return self

    @classmethod
    def own(cls, tokens: int | Sequence[int] | Tensor) -> Self:
        """Build the pattern of tokens; a bool tensor is not copied, and must not be written to."""
        return cls.__new__(cls)._hold(tokens) if isinstance(tokens, Tensor) else cls(tokens)

    lists_tokens = True

    def _either(self, other: Pattern) -> Pattern | None:
        if not isinstance(other, Sinks) or self.tables or other.tables:
            return None
        for one, two in ((self, other), (other, self)):
            # the first tokens of one contain all tokens of the other
            if isinstance(one.tokens, int) and one.tokens > two._last:
                return one
        if any(isinstance(x.tokens, int) and x.tokens > _WRITTEN_OUT for x in (self, other)):
            return None
        mine, theirs = (range(x.tokens) if isinstance(x.tokens, int) else x.tokens for x in (self, other))
        return type(self)._of(_shortest(sorted({*mine, *theirs})))

    @property
    def _last(self) -> int:
        return self.tokens - 1 if isinstance(self.tokens, int) else self.tokens[-1]

    @classmethod
    def _of(cls, tokens: int | tuple[int, ...]) -> Self:
        """Build the pattern of positions that were checked."""
        pattern = cls.__new__(cls)
        pattern.tokens = tokens
        pattern.__post_init__()
        return pattern

    def _text(self) -> str:
        if self._mask is not None:
            return f"{type(self).__name__}(_)"
        return f"{type(self).__name__}({self.tokens if isinstance(self.tokens, int) else list(self.tokens)})"

    def __repr__(self) -> str:
        if self._mask is None:
            return self.spec
        return f"{type(self).__name__}(<{' x '.join(map(str, self._mask.shape))} tokens>)"

    @property
    def tables(self) -> tuple[Tensor, ...]:
        return () if self._mask is None else (self._mask,)

    def extents(self) -> tuple[int | None, int | None]:
        mask = self._mask
        return (len(mask) if mask is not None and mask.ndim == 2 and len(mask) > 1 else None), None

    def select(self, b: int, h: int) -> Pattern:
        return self if self._mask is None or self.extents()[0] is None else type(self).own(self._mask[b])

    def _make(self) -> NDArray[np.bool_] | None:
        return None if self._mask is None else np.atleast_2d(self._mask.cpu().numpy()).copy()

    def bound_ids(self) -> tuple[Int64, ...]:
        return (number_rows(self._now),)

    def fits(self, nq: int, nk: int, q_offset: int) -> None:
        if self._mask is not None and self._mask.shape[-1] != nk:
            got, remedy = f"a mask of {self._mask.shape[-1]} tokens for {nk} keys", "Mark the tokens of this length."
            raise PatternError("Sinks", got, f"a mask of {nk} tokens", remedy)

    def zones(self, n: int | None) -> Node:
        if isinstance(self.tokens, int) and self._mask is None:
            return Zones(k=(0, self.tokens))
        base, first, stop, ptr = self._chosen_runs()
        each = len(base) > 1
        # each batch element has its own tokens
        q = (base - FAR, base + FAR) if each else (-FAR, FAR)
        return Zones(q, (first, stop), ptr=ptr, each=each)

    def _chosen_runs(self) -> tuple[Int64, Int64, Int64, Int64]:
        """Return the starts of batch elements, and the runs of chosen tokens: first, end, first run of each element."""
        if self._mask is None:
            token = np.asarray(self.tokens, np.int64)
            row = np.zeros_like(token)
        else:
            row, token = np.nonzero(self._now)
        elements = 1 if self._mask is None else len(self._now)
        place = token + row * ELEMENT
        new = np.flatnonzero(np.diff(place, prepend=-2) > 1)
        last = np.append(new, len(place))[1:] - 1
        counts = np.bincount(row[new], minlength=elements)
        return np.arange(elements) * ELEMENT, place[new], place[last] + 1, np.append(0, np.cumsum(counts))


def _positions(tokens: object) -> int | tuple[int, ...]:
    listed = sorted(integers("tokens", tokens, 0))
    if len(set(listed)) != len(listed):
        raise PatternError("tokens", shown(listed), "distinct positions", "Drop the repeated ones.")
    return _shortest(listed)


def _shortest(listed: list[int]) -> int | tuple[int, ...]:
    """Replace ascending positions by their number if they are the first ones."""
    return len(listed) if not listed or listed[-1] == len(listed) - 1 else tuple(listed)


@declare("Global([0, 1, 2, 3, 512, 513, 514, 515])", "By chosen tokens", hostile="Global([0, n - 1])")
class Global(Sinks):
    """Tokens that attend every key and that every query attends.

    Args:
        tokens: As in :class:`Sinks`; a bool tensor marks tokens that are both queries and keys.
    Raises:
        PatternError: As in :class:`Sinks`; at use, also if queries are past the last token of a bool tensor.
    Example:
        >>> rw.Global([1]).to_dense(3)[0, 0].int()
        tensor([[0, 1, 0],
                [1, 1, 1],
                [0, 1, 0]], dtype=torch.int32)

    References:
        Beltagy, Peters, Cohan (2020), Longformer, section 3.1; Zaheer et al. (2020), BigBird, section 2.
    """

    def fits(self, nq: int, nk: int, q_offset: int) -> None:
        if self._mask is not None and (self._mask.shape[-1] != nk or q_offset + nq > nk):
            got = f"a mask of {self._mask.shape[-1]} tokens for {nk} keys and queries up to position {q_offset + nq}"
            wanted = f"a mask of {nk} tokens, and every query among them"
            remedy = "Mark the tokens of this length; Sinks(mask) marks keys alone."
            raise PatternError("Global", got, wanted, remedy)

    def zones(self, n: int | None) -> Node:
        keys = super().zones(n)
        if isinstance(self.tokens, int) and self._mask is None:
            return Or([keys, Zones((0, self.tokens))])
        base, first, stop, ptr = self._chosen_runs()
        element = np.repeat(base, np.diff(ptr))
        queries = Zones((first, stop), (element - FAR, element + FAR), each=len(base) > 1)
        return Or([keys, queries])


def check_places(pattern: Pattern, tokens: int) -> None:
    """Raise PatternError if a pattern lists a token that a whole sequence does not have.

    Their :meth:`Pattern.check` cannot tell, since a chunk, a decoding step or a document may have fewer tokens.

    Args:
        pattern: The pattern.
        tokens: Number of tokens in the sequence.
    """
    for each in _listing(pattern, tokens):
        first = next(token for token in each.tokens if token >= tokens)  # type: ignore[union-attr]
        got = f"token {first}{made_by(pattern)} for a sequence of {tokens}"
        remedy = made_again(pattern, tokens) or "List the tokens of this length, or mark them in a bool tensor."
        raise PatternError(type(each).__name__, got, f"tokens from 0 to {tokens - 1}", remedy)


def within_length(pattern: Pattern, tokens: int) -> Pattern:
    """Return a pattern without the listed tokens that a sequence of some tokens does not have: the same pairs of it."""
    if not _listing(pattern, tokens):
        return pattern
    if isinstance(pattern, Sinks):
        return type(pattern)([token for token in pattern.tokens if token < tokens])  # type: ignore[union-attr]
    assert isinstance(pattern, Composite)
    return pattern.with_parts([within_length(part, tokens) for part in pattern.parts_within()])


def _listing(pattern: Pattern, tokens: int) -> list[Sinks]:
    """Return the parts of a pattern that list tokens past a length; inside of documents, lengths differ."""
    if isinstance(pattern, Sinks):
        return [pattern] if isinstance(pattern.tokens, tuple) and pattern.tokens[-1:] >= (tokens,) else []
    if pattern.counts_apart:
        return []
    found: list[Sinks] = []
    for part in pattern.parts_within():
        found += _listing(part, tokens)
    return found


@declare("Periodic(256, 192, 256)", "By chosen tokens", hostile="Periodic(2**30, 0, 1)")
@dataclass(frozen=True, eq=False, repr=False)
class Periodic(Pattern):
    """Keys that every query attends, at ``start <= k % period < stop``.

    Args:
        period: Tokens after which the choice repeats.
        start: First chosen token of a period.
        stop: End of the chosen tokens of a period, exclusive.
    Raises:
        PatternError: ``0 <= start < stop <= period`` does not hold.
    Example:
        >>> rw.patterns.Periodic(3, 2, 3).to_dense(1, 6)[0, 0].int()
        tensor([[0, 0, 1, 0, 0, 1]], dtype=torch.int32)
    """

    period: int
    start: int
    stop: int

    def __post_init__(self) -> None:
        whole_fields(self, start=0)
        whole_fields(self, stop=self.start + 1)
        whole_fields(self, period=self.stop)
        super().__post_init__()

    def _text(self) -> str:
        return f"Periodic({self.period}, {self.start}, {self.stop})"

    def zones(self, n: int | None) -> Node:
        return Zones(residue=Residue(K, self.period, self.stop - self.start), phase=self.start)
