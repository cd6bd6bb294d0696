"""Describe an attention call: `Call` is everything about it except its tensors, `Operands` are its tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .patterns import Full, Pattern, check_extents
from .patterns.shifted import first_positions
from .plan import pattern_of
from .precision import Precision, Scales, dequantize_rows
from .terms import Term
from .terms.term import ScoreMod, tables_in, terms_of, written
from .torch_compat import require
from .types import Context, Pages, acc_dtype

if TYPE_CHECKING:
    from .terms.operands import TermOperands


class Arguments(NamedTuple):
    """The unchecked arguments that a user passed to :func:`ringweave.attention`.

    A new option is one field here and, if steps need it, one in :class:`Call`; ``validate`` checks it.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    pattern: Pattern = Full()  # (immutable)
    scale: float | None = None
    q_offset: int | Tensor | str = 0
    backend: str = "auto"
    k_offset: int | Tensor = 0
    context: Context | None = None
    terms: Term | ScoreMod | Sequence[Term | ScoreMod] | None = ()
    sink_logits: Tensor | None = None
    dropout: float = 0.0
    precision: Precision | None = None
    on_oom: str = "degrade"


#: Arguments with one number per query head; a rank that computes some of the heads takes its part of them.
PER_HEAD = ("sink_logits",)


@dataclass(frozen=True)
class Call:
    """Everything about one attention call except its tensors: frozen, hashable, and writable as one text.

    Attributes:
        batch: Batch elements.
        heads: Query heads.
        kv_heads: Key heads.
        nq: Queries.
        nk: Keys; with pages, the most that a row of the page table has room for.
        head_dim: D of queries and keys.
        value_dim: Dv of values.
        dtype: Dtype of the queries.
        device: Type of the queries' device, such as "cpu".
        needs_grad: Whether gradients are needed.
        features: Names of the score terms, "dropout", and ``terms.function.FUNCTION`` for a score function.
        learned: Number of elements of the terms' tables that get gradients.
        paged: Whether keys and values are stored in pages.
        kv_dtype: Dtype of keys and values stored in 8 bits with scales, else None.
        pattern: The (head, query, key) triples that may attend, bound to these heads; tensor offsets and k_offset are
            already part of it.
        scale: Factor of the scores.
        q_offset: Position of the first query.
        backend: Name that the caller passed.
        terms: Text of the score terms, with ``_`` for each table.
        dropout: Threshold below which one of 2 ** 16 equally likely numbers drops a weight.
        on_oom: Policy when memory runs out: "degrade", "stream", "raise" or "sparsify".
        summation_order: Order of sums over the keys of a relation by residue: see :class:`ringweave.Precision`.
        pair_bytes: Bytes of the values that a score function computes for a pair. A call with a function has no text.
    """

    batch: int
    heads: int
    kv_heads: int
    nq: int
    nk: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    device: str
    needs_grad: bool = False
    features: frozenset[str] = frozenset()
    learned: int = 0
    paged: bool = False
    kv_dtype: torch.dtype | None = None
    pattern: Pattern = field(default=Full(), kw_only=True)
    scale: float = field(default=1.0, kw_only=True)
    q_offset: int = field(default=0, kw_only=True)
    backend: str = field(default="auto", kw_only=True)
    terms: str = field(default="", kw_only=True)
    dropout: int = field(default=0, kw_only=True)
    on_oom: str = field(default="degrade", kw_only=True)
    summation_order: str = field(default="fixed", kw_only=True)
    pair_bytes: int = field(default=0, kw_only=True)

    @staticmethod
    def of(
        q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, *, page_table: Tensor | None = None, **rest: object
    ) -> Call:
        """Build a call from its tensors; ``rest`` are the fields that the tensors do not determine."""
        batch, heads, nq, head_dim = q.shape
        nk = k.shape[2] if page_table is None else page_table.shape[1] * k.shape[2]
        sizes = batch, heads, k.shape[1], nq, nk, head_dim, v.shape[3]
        paged = page_table is not None
        return Call(*sizes, q.dtype, q.device.type, paged=paged, pattern=pattern, **rest)  # type: ignore[arg-type]

    @property
    def text(self) -> str:
        """The call without its tensors as text, which an operator can take: see :meth:`read`.

        Numbers that ``torch.compile`` may treat as symbols are passed separately: see :attr:`numbers`.
        """
        dropout = "dropout" if self.dropout else ""
        kv = " ".join(["pages"] * self.paged + ["scales"] * (self.kv_dtype is not None))
        return "\n".join((self.pattern.spec, self.terms, dropout, self.on_oom, kv, self.summation_order, self.backend))

    @property
    def numbers(self) -> tuple[float, int, int]:
        """Scale, q_offset and dropout, in the order of :meth:`read`."""
        return self.scale, self.q_offset, self.dropout

    @staticmethod
    def read(
        text: str,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tensors: Sequence[Tensor],
        scale: float,
        q_offset: int = 0,
        dropout: int = 0,
    ) -> Call:
        """Build the call from its text, numbers and tensors, the latter in the order of :func:`pack`."""
        spec, terms, seeded, on_oom, kv, order, backend = text.split("\n", 6)
        before = len(tensors) - tables_in(terms) - bool(seeded) - 2 * len(kv.split())
        call = Call.of(
            q, k, v, pattern_of(spec, tensors[:before]), page_table=_page_table(tensors, kv), scale=scale,
            q_offset=q_offset, backend=backend, terms=terms, dropout=dropout, on_oom=on_oom, summation_order=order,
            features=features_of(terms, dropout), kv_dtype=k.dtype if "scales" in kv else None,
        )  # fmt: skip
        return call.at_lengths(k, tensors) if call.paged else call

    def at_lengths(self, k: Tensor, tensors: Sequence[Tensor]) -> Call:
        """Return a paged call for the current lengths of its sequences, with the queries as their last tokens."""
        # imported when a call has pages
        from .kv_cache import check_pages, host_lengths, last_tokens

        last = len(tensors) - 2 * (self.kv_dtype is not None)
        table, lengths = tensors[last - 2 : last]
        size = k.shape[2]
        if table.device.type == "cpu":
            check_pages(table.numpy(), lengths.numpy(), k.shape[0], size)
        else:
            used = torch.arange(table.shape[1], device=table.device) * size < lengths[:, None]
            require((~used | ((table >= 0) & (table < k.shape[0]))).all(), "pages: one is not in the pool")
        check_extents(self.pattern, self.batch, self.heads)
        return dataclasses.replace(self, pattern=last_tokens(self.pattern, host_lengths(lengths), self.nq))

    def part(self, operands: Operands, pattern: Pattern, q_offset: int) -> Call:
        """Return the call for a part of its operands."""
        q, k = operands.q, operands.k
        sizes = {"heads": q.shape[1], "kv_heads": k.shape[1], "nq": q.shape[2]}
        return dataclasses.replace(self, **sizes, pattern=pattern, q_offset=q_offset)  # type: ignore[arg-type]


def _page_table(tensors: Sequence[Tensor], kv: str) -> Tensor | None:
    if "pages" not in kv:
        return None
    return tensors[-2 * len(kv.split())]


def features_of(terms: str, dropout: float) -> frozenset[str]:
    """Return the names of the score terms, and "dropout" if weights are dropped."""
    names = [part.partition("(")[0] for part in terms.split("), ")] if terms else []
    return frozenset(names + ["dropout"] * bool(dropout))


class Operands(NamedTuple):
    """The tensors of a call, or of a branch's part of it, as backends take them.

    Attributes:
        q: Queries, (B, Hq, Nq, D).
        k: Keys, (B, Hkv, Nk, D); with pages (pages, Hkv, size, D).
        v: Values, (B, Hkv, Nk, Dv); with pages (pages, Hkv, size, Dv).
        scale: Factor of the scores.
        terms: Score terms and dropout, or None.
        pages: Page table and lengths if keys and values are stored in pages, else None.
        scales: Scales if k and v are 8-bit codes, else None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    terms: TermOperands | None = None
    pages: Pages | None = None
    scales: Scales | None = None

    @staticmethod
    def of(
        call: Call,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tensors: Sequence[Tensor] = (),
        learns: Sequence[bool] | None = None,
    ) -> Operands:
        """Build the operands from a call's tensors, in the order of :func:`pack`.

        Tables that ``learns`` flags get zeros to which backward adds their gradients.
        """
        if not tensors and not call.terms:
            return Operands(q, k, v, call.scale)
        rest, scales, pages = list(tensors), None, None
        if call.kv_dtype is not None:
            rest, scales = rest[:-2], Scales(*rest[-2:])
        if call.paged:
            rest, pages = rest[:-2], Pages(rest[-2], rest[-1], k.shape[2])
        terms = None
        if call.features:
            whole = call.nq, call.nk
            # from the lengths on the device: to copy the pattern's positions there would wait for it
            first = None if pages is None else pages.first_positions(call.nq)
            flags = None if learns is None else learns[: len(rest)]
            terms = term_operands(call, whole, q.device, rest, flags, first)
        return Operands(q, k, v, call.scale, terms, pages, scales)

    @property
    def nk(self) -> int:
        """Number of keys; with pages, the most that a row of the page table has room for."""
        return self.k.shape[2] if self.pages is None else self.pages.capacity

    def call(self, needs_grad: bool = False) -> Call:
        """Describe these tensors as a call over the full pattern, for the choice of a backend."""
        table = None if self.pages is None else self.pages.table
        kv_dtype = None if self.scales is None else self.k.dtype
        features, learned = frozenset[str](), 0
        if self.terms is not None:
            features = self.terms.names
            learned = sum(total.numel() for total in self.terms.totals if total is not None)
        return Call.of(
            self.q, self.k, self.v, Full(), page_table=table, needs_grad=needs_grad, features=features, learned=learned,
            kv_dtype=kv_dtype, scale=self.scale,
        )  # fmt: skip

    def map(self, change: Callable[[Tensor], Tensor]) -> Operands:
        """Apply a function to queries, keys and values."""
        return self._replace(q=change(self.q), k=change(self.k), v=change(self.v))

    def of_keys(self, change: Callable[[Tensor], Tensor]) -> Operands:
        """Apply a function of batch elements, heads and tokens to keys, values and their scales."""
        scales = None if self.scales is None else Scales(*map(change, self.scales))
        return self._replace(k=change(self.k), v=change(self.v), scales=scales)

    def widened(self) -> Operands:
        """Convert keys and values stored in 8 bits to numbers in the dtype of sums; others stay as they are."""
        if self.scales is None:
            return self
        k, v = (
            dequantize_rows(x, scale, acc_dtype(self.q.dtype)) for x, scale in zip(self[1:3], self.scales, strict=True)
        )
        return self._replace(k=k, v=v, scales=None)


def pack(pattern: Pattern, terms: Sequence[Term], dropout: int, *more: Tensor) -> tuple[str, list[Tensor]]:
    """Return the text of the terms, and the tensors of a call besides q, k and v.

    Their order is: tables of the pattern, tables of the terms, a new dropout seed, page table and lengths, and the
    scales of k and v.
    """
    text, tables = written(terms) if terms else ("", [])
    tensors = [*pattern.tables, *tables]
    if dropout:
        tensors.append(torch.randint(-(2**63), 2**63 - 1, (), device="cpu"))
    return text, [*tensors, *more]


def term_operands(
    call: Call,
    tokens: tuple[int, int],
    device: torch.device,
    tensors: Sequence[Tensor],
    learns: Sequence[bool] | None = None,
    positions: Tensor | None = None,
) -> TermOperands | None:
    """Return the terms and dropout of a call, or None if it has neither.

    Args:
        call: The call.
        tokens: (queries, keys) of the whole sequence, also where ranks share it.
        device: Device of the computation.
        tensors: Tensors of the call up to the seed, in the order of :func:`pack`.
        learns: Whether each of these tensors gets a sum of gradients.
        positions: First positions of queries and keys, (B, 2) int64; those of the call's pattern by default.
    """
    if not call.terms and not call.dropout:
        return None
    from .terms.dropout import Dropout
    from .terms.operands import TermOperands

    count, seeds = tables_in(call.terms), int(call.dropout > 0)
    first = len(tensors) - seeds - count
    flags = iter([False] * count if learns is None else learns[first : first + count])
    terms, totals = terms_of(call.terms, tensors[first : first + count]), list[Tensor | None]()
    for term in terms:
        term.check(call.batch, call.heads, *tokens, device)
        totals += [term.total(name, acc_dtype(call.dtype)) if next(flags) else None for name in term.axes]
    places = [torch.arange(n, device=device) for n in (call.heads, *tokens)]
    if call.pattern._packed_apart and any(term.distances for term in terms):
        # without such terms, dropout and a Bias take the queries' indices
        places[1] = call.pattern._among_keys(places[1] + call.q_offset) - call.q_offset
    dropout = Dropout(call.dropout, int(tensors[-1])) if seeds else None
    offsets = first_positions(call.pattern, call.q_offset, call.batch, device) if positions is None else positions
    return TermOperands(terms, dropout, places[0], places[1], places[2], offsets, tuple(totals))
