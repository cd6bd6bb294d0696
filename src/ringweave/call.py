"""A call of attention: everything about it except its tensors (`Call`), and its tensors (`Operands`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .kv_cache import Pages, check_pages, last_tokens
from .patterns import Full, KeyPadding, Pattern, check_extents
from .patterns.shifted import first_positions
from .plan import pattern_of
from .precision import Precision, Scales, widened
from .terms import Dropout, Term, TermOperands, tables_in, terms_of, written
from .torch_compat import require
from .types import acc_dtype

if TYPE_CHECKING:
    from .parallel import ContextParallel


class Arguments(NamedTuple):
    """The arguments of one call as a user passed them to :func:`ringweave.attention`, unchecked.

    A new option is one field here and, where steps need it, one in :class:`Call`; its check is in ``validate``.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    pattern: Pattern = Full()  # (immutable)
    scale: float | None = None
    q_offset: int | Tensor = 0
    backend: str = "auto"
    k_offset: int | Tensor = 0
    context: ContextParallel | None = None
    terms: Term | Sequence[Term] | None = ()
    sink_logits: Tensor | None = None
    dropout: float = 0.0
    precision: Precision | None = None
    on_oom: str = "degrade"


#: Arguments with one number for each query head: a rank that has some heads takes its part of them.
PER_HEAD = ("sink_logits",)


@dataclass(frozen=True)
class Call:
    """Everything about one attention call except its tensors: frozen, hashable, and one text.

    Attributes:
        batch: Batch elements.
        heads: Query heads.
        kv_heads: Key heads.
        nq: Queries.
        nk: Keys, or the most that a page table has room for.
        head_dim: D.
        value_dim: Dv.
        dtype: Of the queries.
        device: Type of their device.
        needs_grad: Whether a gradient is asked for.
        features: Names of the score terms, and "dropout".
        learned: Elements of the terms' tables that get gradients.
        paged: Whether keys and values lie in pages.
        kv_dtype: Type of keys and values that are stored in 8 bits with scales.
        pattern: Which triples may attend; bound to these heads, by positions from which offsets are taken already.
        scale: Factor of the scores.
        q_offset: Position of the first query.
        backend: As it was asked for.
        terms: Text of the score terms, with ``_`` for each table.
        dropout: Of 2 ** 16 random numbers, those that drop a weight.
        on_oom: What happens when memory runs out.
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

    @staticmethod
    def of(
        q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, *, page_table: Tensor | None = None, **rest: object
    ) -> Call:
        """Describe a call by its tensors; ``rest`` are fields that they do not say."""
        batch, heads, nq, head_dim = q.shape
        nk = k.shape[2] if page_table is None else page_table.shape[1] * k.shape[2]
        sizes = batch, heads, k.shape[1], nq, nk, head_dim, v.shape[3]
        paged = page_table is not None
        return Call(*sizes, q.dtype, q.device.type, paged=paged, pattern=pattern, **rest)  # type: ignore[arg-type]

    @property
    def text(self) -> str:
        """Spell what the tensors do not say, so that the call can cross an operator: see :meth:`read`.

        The numbers that torch.compile may leave open go beside it: see :attr:`numbers`.
        """
        dropout = "dropout" if self.dropout else ""
        kv = " ".join(["pages"] * self.paged + ["scales"] * (self.kv_dtype is not None))
        return "\n".join((self.pattern.spec, self.terms, dropout, self.on_oom, kv, self.backend))

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
        """Give the call of a text and its tensors, in the order of :func:`pack`."""
        spec, terms, seeded, on_oom, kv, backend = text.split("\n", 5)
        before = len(tensors) - tables_in(terms) - bool(seeded) - 2 * len(kv.split())
        call = Call.of(
            q, k, v, pattern_of(spec, tensors[:before]), page_table=_page_table(tensors, kv), scale=scale,
            q_offset=q_offset, backend=backend, terms=terms, dropout=dropout, on_oom=on_oom,
            features=features_of(terms, dropout), kv_dtype=k.dtype if "scales" in kv else None,
        )  # fmt: skip
        return call.at_lengths(k, tensors) if call.paged else call

    def at_lengths(self, k: Tensor, tensors: Sequence[Tensor]) -> Call:
        """Give the call of a paged one for the lengths that its sequences have now: queries are their last tokens."""
        last = len(tensors) - 2 * (self.kv_dtype is not None)
        table, lengths = tensors[last - 2 : last]
        size = k.shape[2]
        if table.device.type == "cpu":
            check_pages(table.numpy(), lengths.numpy(), k.shape[0], size)
        else:
            used = torch.arange(table.shape[1], device=table.device) * size < lengths[:, None]
            require((~used | ((table >= 0) & (table < k.shape[0]))).all(), "pages: one is not in the pool")
        check_extents(self.pattern, self.batch, self.heads)
        known = lengths.cpu()
        return dataclasses.replace(self, pattern=last_tokens(self.pattern, known, self.nq) & KeyPadding(known))

    def part(self, operands: Operands, pattern: Pattern, q_offset: int) -> Call:
        """Give the call of a part of its operands."""
        q, k = operands.q, operands.k
        sizes = {"heads": q.shape[1], "kv_heads": k.shape[1], "nq": q.shape[2]}
        return dataclasses.replace(self, **sizes, pattern=pattern, q_offset=q_offset)  # type: ignore[arg-type]


def _page_table(tensors: Sequence[Tensor], kv: str) -> Tensor | None:
    if "pages" not in kv:
        return None
    return tensors[-2 * len(kv.split())]


def features_of(terms: str, dropout: float) -> frozenset[str]:
    """Name what a call asks for beyond scale and mask."""
    names = [part.partition("(")[0] for part in terms.split("), ")] if terms else []
    return frozenset(names + ["dropout"] * bool(dropout))


class Operands(NamedTuple):
    """The tensors of a call, or of a branch's part of it, as backends take them.

    Attributes:
        q: Queries, (B, Hq, Nq, D).
        k: Keys, (B, Hkv, Nk, D); with pages (pages, Hkv, size, D).
        v: Values, (B, Hkv, Nk, Dv), or in pages like the keys.
        scale: Factor of the scores.
        terms: Score terms and dropout, if any.
        pages: Where keys and values lie, if they are stored in pages.
        scales: Of keys and values that are stored in 8 bits; k and v are then codes, and those of q have its dtype.
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
        """Sort the tensors of a call, in the order of :func:`pack`; those that ``learns`` names get a sum."""
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
            terms = term_operands(call, whole, q.device, rest, None if learns is None else learns[: len(rest)])
        return Operands(q, k, v, call.scale, terms, pages, scales)

    @property
    def nk(self) -> int:
        """Keys, or the most that a row of the table has room for."""
        return self.k.shape[2] if self.pages is None else self.pages.capacity

    def call(self, needs_grad: bool = False) -> Call:
        """Describe the tensors: what a backend is asked about."""
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
        """Change queries, keys and values."""
        return self._replace(q=change(self.q), k=change(self.k), v=change(self.v))

    def of_keys(self, change: Callable[[Tensor], Tensor]) -> Operands:
        """Change keys and values, and their scales: something about batch elements, heads and tokens."""
        scales = None if self.scales is None else Scales(*map(change, self.scales))
        return self._replace(k=change(self.k), v=change(self.v), scales=scales)

    def widened(self) -> Operands:
        """Give keys and values as numbers, in the type that is summed in, if they are stored in 8 bits."""
        if self.scales is None:
            return self
        k, v = (widened(x, scale, acc_dtype(self.q.dtype)) for x, scale in zip(self[1:3], self.scales, strict=True))
        return self._replace(k=k, v=v, scales=None)


def pack(pattern: Pattern, terms: Sequence[Term], dropout: int, *more: Tensor) -> tuple[str, list[Tensor]]:
    """Give the terms' text, and the tensors of a call besides q, k and v, in their order.

    These are the pattern's tables, those of terms, a new seed of dropout, page table and lengths, scales of k and of v.
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
) -> TermOperands | None:
    """Give the terms and dropout of a call over (queries, keys) tokens; None where it has neither.

    Args:
        call: The call.
        tokens: Queries and keys that positions count: those of the whole sequence, where ranks share it.
        device: Where they are computed.
        tensors: Those of the call up to the seed, in the order of :func:`pack`.
        learns: Which of them get a sum of gradients.
    """
    if not call.terms and not call.dropout:
        return None
    count, seeds = tables_in(call.terms), int(call.dropout > 0)
    first = len(tensors) - seeds - count
    flags = iter([False] * count if learns is None else learns[first : first + count])
    terms, totals = terms_of(call.terms, tensors[first : first + count]), list[Tensor | None]()
    for term in terms:
        term.check(call.batch, call.heads, *tokens, device)
        totals.append(term.total(acc_dtype(call.dtype)) if bool(term.tables) and next(flags) else None)
    places = [torch.arange(n, device=device) for n in (call.heads, *tokens)]
    dropout = Dropout(call.dropout, int(tensors[-1])) if seeds else None
    offsets = first_positions(call.pattern, call.q_offset, call.batch, device)
    return TermOperands(terms, dropout, places[0], places[1], places[2], offsets, tuple(totals))
