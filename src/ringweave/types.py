"""Records and dtypes that several layers use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

#: Dtypes of queries, keys and values.
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class NotGiven(int):
    """A default that can be told from the same number passed by the caller. It is equal to that number."""


#: Default of ``q_offset``.
FIRST_POSITION = NotGiven(0)


class AttentionOutput(NamedTuple):
    """The result of attention, with the log-sum-exp that makes partial results mergeable.

    Attributes:
        out: Output, (B, Hq, Nq, Dv), dtype of the queries.
        lse: Log-sum-exp of each row's scaled scores, (B, Hq, Nq), natural log, float32 (float64 for float64 queries);
            -inf where a row attends nothing.
    """

    out: Tensor
    lse: Tensor


class Pages(NamedTuple):
    """The location of keys and values in pages: token t is in page ``table[b, t // size]``, at ``t % size``.

    Attributes:
        table: Page numbers, (B, n) int32; entries after an element's last token are not used.
        lengths: Number of tokens of each batch element, (B,) int32.
        size: Tokens in a page: 16, 32, 64, 128 or 256.
    """

    table: Tensor
    lengths: Tensor
    size: int

    @property
    def capacity(self) -> int:
        """Number of tokens for which a row of the table has room."""
        return self.table.shape[1] * self.size

    def first_positions(self, nq: int) -> Tensor:
        """Return the positions of the first of the last ``nq`` tokens and of the first key, (B, 2) int64."""
        first = (self.lengths.long() - nq).clamp(min=0)
        return torch.stack([first, torch.zeros_like(first)], 1)

    def gathered(self, x: Tensor, b: int, h: int) -> Tensor:
        """Copy one head of one batch element out of its pages, (capacity, D); rows after its last token are arbitrary.

        Only the reference and rare re-checks use this; kernels read through the table.
        """
        return x[self.table[b].long().clamp(0, len(x) - 1), h].flatten(0, 1)


class Place(NamedTuple):
    """The indices of a call: their numbers, the first query, key and head, and the device of computed tables.

    An index with one value is a number, so a function of it may be recognised where one of the index is not.
    """

    batch: int
    heads: int
    nq: int
    nk: int
    q0: int = 0
    k0: int = 0
    h0: int = 0
    device: torch.device = torch.device("cpu")

    def lengths(self) -> dict[str, Tensor]:
        """Return the index vectors of the call."""
        first = {"b": (0, self.batch), "h": (self.h0, self.heads), "q": (self.q0, self.nq), "k": (self.k0, self.nk)}
        return {name: torch.arange(start, start + count, device=self.device) for name, (start, count) in first.items()}


class Context(Protocol):
    """Ranks that share a sequence, as calls use them: :class:`ringweave.ContextParallel`."""

    @property
    def seq_len(self) -> int:
        """Number of tokens of the whole sequence."""
        ...

    @property
    def options(self) -> Any:
        """Options of the context, such as the number format of messages, ``wire``."""
        ...

    def check(self, call: Any, q: Tensor, k: Tensor) -> None:
        """Raise an error unless a call on these shards fits the context."""
        ...

    def attend(
        self,
        call: Any,
        inputs: tuple[Tensor, Tensor, Tensor],
        tensors: Sequence[Tensor],
        given: Any,
        function: Any = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute this rank's shard of (out, lse) of a checked call."""
        ...


class Offender(NamedTuple):
    """A pair that sees the future.

    Attributes:
        query: Position of the query (q_offset counts).
        key: Position of the key.
        batch: Batch element.
        head: Query head.
    """

    query: int
    key: int
    batch: int
    head: int


class Causality(NamedTuple):
    """The number of pairs of a pattern that see the future, and the first of them.

    Attributes:
        pairs: Number of pairs with a key after the query's position, over batch and heads (and the branches of a
            LongNet).
        first: The first of them, by query, key, batch element and head; None without such pairs.
        many: Whether there are several batch elements, and several heads; the text then names them.
    """

    pairs: int
    first: Offender | None
    many: tuple[bool, bool] = (False, False)

    @property
    def is_causal(self) -> bool:
        """Whether no pair sees the future."""
        return self.pairs == 0

    def __str__(self) -> str:
        if self.first is None:
            return "causal"
        query, key, batch, head = self.first
        number = "1 pair sees the future" if self.pairs == 1 else f"{self.pairs:,} pairs see the future, the first"
        where = ("" if not self.many[0] else f", batch element {batch}") + (
            "" if not self.many[1] else f", head {head}"
        )
        return f"not causal: {number}{':' if self.pairs == 1 else ' is'} query {query}, key {key}{where}"


def acc_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums over inputs of a dtype, and of lse: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
