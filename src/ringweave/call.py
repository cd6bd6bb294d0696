"""Describe an attention call: `Call` is everything about it except its tensors, `Operands` are its tensors."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from .patterns import Full, Pattern, check_extents
from .patterns.shifted import first_positions
from .plan import pattern_of
from .precision import Precision, Scales, dequantize_rows
from .terms import Term
from .terms.dropout import Dropout
from .terms.term import ScoreMod, tables_in, terms_of, written
from .torch_compat import require
from .types import DTYPES, Context, Pages, acc_dtype

if TYPE_CHECKING:
    from .terms.function import Pass
    from .terms.operands import TermOperands

T = TypeVar("T")


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


# marks a field that does not cross an operator by its type: other fields determine it, or the call needs none
_OWN = {"crosses": False}


@dataclass(frozen=True)
class Call:
    """Everything about one attention call except its tensors: frozen, hashable, and writable as one text.

    A new option is one field. The sizes, which have no defaults, follow from the tensors. Each other field that is not
    marked crosses an operator by its type: a number as an argument of the operator, text or a flag as a line of
    :attr:`text`.

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
    needs_grad: bool = field(default=False, metadata=_OWN)
    features: frozenset[str] = field(default=frozenset(), metadata=_OWN)
    learned: int = field(default=0, metadata=_OWN)
    paged: bool = False
    kv_dtype: torch.dtype | None = field(default=None, metadata=_OWN)
    pattern: Pattern = field(default=Full(), kw_only=True, metadata=_OWN)
    scale: float = field(default=1.0, kw_only=True)
    q_offset: int = field(default=0, kw_only=True)
    backend: str = field(default="auto", kw_only=True)
    terms: str = field(default="", kw_only=True)
    dropout: int = field(default=0, kw_only=True)
    on_oom: str = field(default="degrade", kw_only=True)
    summation_order: str = field(default="fixed", kw_only=True)
    pair_bytes: int = field(default=0, kw_only=True, metadata=_OWN)

    @staticmethod
    def of(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, *, page_table: Tensor | None = None, **rest: Any) -> Call:
        """Build a call from its tensors; ``rest`` are the fields that the tensors do not determine."""
        batch, heads, nq, head_dim = q.shape
        nk = k.shape[2] if page_table is None else page_table.shape[1] * k.shape[2]
        sizes = batch, heads, k.shape[1], nq, nk, head_dim, v.shape[3]
        derived = {
            "paged": page_table is not None,
            "kv_dtype": _stored_dtype(k),
            "features": features_of(rest.get("terms", ""), rest.get("dropout", 0)),
        }
        return Call(*sizes, q.dtype, q.device.type, pattern=pattern, **(derived | rest))

    @property
    def text(self) -> str:
        """The pattern's text, and a line for each other text or flag that is not its default: see :meth:`read`.

        Numbers are passed separately, since ``torch.compile`` may treat them as symbols: see :attr:`numbers`.
        """
        lines = [f"{name} {getattr(self, name)}" for name in _LINES if getattr(self, name) != _DEFAULTS[name]]
        return "\n".join([self.pattern.spec, *lines])

    @property
    def numbers(self) -> tuple[Any, ...]:
        """The values of :data:`NUMBERS`."""
        return tuple([getattr(self, name) for name in NUMBERS])

    @staticmethod
    def read(text: str, q: Tensor, k: Tensor, v: Tensor, tensors: Sequence[Tensor], *numbers: float) -> Call:
        """Build the call from its text, numbers and tensors, the latter in the order of :func:`pack`."""
        spec, lines = lines_of(text)
        given: dict[str, Any] = {name: _LINES[name](value) for name, value in lines.items()}
        given |= zip(NUMBERS, numbers, strict=True)
        by_field = ByField.of(tensors, _stored_dtype(k), **given)
        table = by_field.pages[0] if by_field.pages else None
        call = Call.of(q, k, v, pattern_of(spec, by_field.pattern), page_table=table, **given)
        return call.at_lengths(k, tensors) if call.paged else call

    def by_field(self, tensors: Sequence[T]) -> ByField[T]:
        """Return the tensors of the call besides q, k and v by field; also flags, one for each."""
        return ByField.of(tensors, self.kv_dtype, self.terms, self.dropout, self.paged)

    def at_lengths(self, k: Tensor, tensors: Sequence[Tensor]) -> Call:
        """Return a paged call for the current lengths of its sequences, with the queries as their last tokens."""
        # imported when a call has pages
        from .kv_cache import check_pages, host_lengths, last_tokens

        table, lengths = self.by_field(tensors).pages
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


_DEFAULTS = {each.name: each.default for each in dataclasses.fields(Call)}
#: The fields that follow from the tensors.
SIZES = tuple([name for name, default in _DEFAULTS.items() if default is dataclasses.MISSING])
_CROSS = {each.name: each.type for each in dataclasses.fields(Call) if not (each.name in SIZES or each.metadata)}
#: The fields that operators take as arguments, in their order.
NUMBERS = tuple([name for name, kind in _CROSS.items() if kind in ("int", "float")])
_READERS: dict[Any, Callable[[str], object]] = {"str": str, "bool": "True".__eq__}
# reads the line of each other field
_LINES = {name: _READERS[kind] for name, kind in _CROSS.items() if name not in NUMBERS}
#: How calls cross operators: another version with another format cannot read their texts.
FORMAT = "\n".join([f"{name} {_DEFAULTS[name]}" for name in _CROSS])


def lines_of(text: str) -> tuple[str, dict[str, str]]:
    """Return the pattern's text and the other lines, by field, of a :attr:`Call.text`."""
    spec, *lines = text.split("\n")
    return spec, dict([line.split(" ", 1) for line in lines])


def _stored_dtype(k: Tensor) -> torch.dtype | None:
    """Return the dtype of keys in 8 bits, which need scales, else None."""
    return None if k.dtype in DTYPES else k.dtype


class ByField(NamedTuple, Generic[T]):
    """The tensors of a call besides q, k and v, or a flag for each, in the order of :func:`pack`.

    Attributes:
        pattern: Tables of the pattern.
        terms: Tables of the terms.
        dropout: The seed if weights are dropped, else none.
        pages: Page table and lengths if keys and values are stored in pages, else none.
        scales: Scales of k and v if they are stored in 8 bits, else none.
    """

    pattern: Sequence[T]
    terms: Sequence[T]
    dropout: Sequence[T]
    pages: Sequence[T]
    scales: Sequence[T]

    @staticmethod
    def of(
        tensors: Sequence[T],
        kv_dtype: torch.dtype | None,
        terms: str = "",
        dropout: int = 0,
        paged: bool = False,
        **others: object,
    ) -> ByField[T]:
        """Split the tensors of a call with these fields; the pattern has those that are left."""
        counts = tables_in(terms) if terms else 0, int(dropout > 0), 2 * paged, 2 * (kv_dtype is not None)
        ends = itertools.accumulate(counts, initial=len(tensors) - sum(counts))
        return ByField(*[tensors[start:end] for start, end in itertools.pairwise((0, *ends))])


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
        by_field = call.by_field(tensors)
        scales = Scales(*by_field.scales) if by_field.scales else None
        pages = Pages(by_field.pages[0], by_field.pages[1], k.shape[2]) if by_field.pages else None
        terms = None
        if call.features:
            # from the lengths on the device: to copy the pattern's positions there would wait for it
            first = None if pages is None else pages.first_positions(call.nq)
            terms = term_operands(call, (call.nq, call.nk), q.device, by_field, learns, first)
        return Operands(q, k, v, call.scale, terms, pages, scales)

    @property
    def nk(self) -> int:
        """Number of keys; with pages, the most that a row of the page table has room for."""
        return self.k.shape[2] if self.pages is None else self.pages.capacity

    def call(self, needs_grad: bool = False) -> Call:
        """Describe these tensors as a call over the full pattern, for the choice of a backend."""
        table = None if self.pages is None else self.pages.table
        features, learned = frozenset[str](), 0
        if self.terms is not None:
            features = self.terms.names
            learned = sum(total.numel() for total in self.terms.totals if total is not None)
        return Call.of(
            self.q, self.k, self.v, Full(), page_table=table, needs_grad=needs_grad, features=features, learned=learned,
            scale=self.scale,
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


def pack(pattern: Pattern, terms: Sequence[Term], dropout: int, *more: Tensor) -> list[Tensor]:
    """Return the tensors of a call besides q, k and v, with a new dropout seed: see :class:`ByField`.

    ``more`` are page table and lengths, and the scales of k and v, of a call that has them.
    """
    tensors = [*pattern.tables, *written(terms)[1]]
    if dropout:
        tensors.append(torch.randint(-(2**63), 2**63 - 1, (), device="cpu"))
    return [*tensors, *more]


def term_operands(
    call: Call,
    tokens: tuple[int, int],
    device: torch.device,
    tensors: ByField[Tensor],
    learns: Sequence[bool] | None = None,
    positions: Tensor | None = None,
    function: Pass | None = None,
) -> TermOperands | None:
    """Return the terms, or the score function, and the dropout of a call; None if it has none of these.

    Args:
        call: The call.
        tokens: (queries, keys) of the whole sequence, also where ranks share it.
        device: Device of the computation.
        tensors: Tensors of the call besides q, k and v.
        learns: Whether each of these tensors gets a sum of gradients.
        positions: First positions of queries and keys, (B, 2) int64; those of the call's pattern by default.
        function: The evaluation of the call's score function.
    """
    if not call.terms and not call.dropout and function is None:
        return None
    from .terms.operands import TermOperands

    flags = itertools.repeat(False) if learns is None else iter(call.by_field(learns).terms)
    terms, totals = terms_of(call.terms, tensors.terms), list[Tensor | None]()
    for term in terms:
        term.check(call.batch, call.heads, *tokens, device)
        totals += [term.total(name, acc_dtype(call.dtype)) if next(flags) else None for name in term.axes]
    places = [torch.arange(n, device=device) for n in (call.heads, *tokens)]
    if call.pattern._packed_apart and any(term.distances for term in terms):
        # without such terms, dropout and a Bias take the queries' indices
        places[1] = call.pattern._among_keys(places[1] + call.q_offset) - call.q_offset
    dropout = Dropout(call.dropout, int(tensors.dropout[0])) if tensors.dropout else None
    offsets = first_positions(call.pattern, call.q_offset, call.batch, device) if positions is None else positions
    return TermOperands(terms, dropout, places[0], places[1], places[2], offsets, tuple(totals), function)
