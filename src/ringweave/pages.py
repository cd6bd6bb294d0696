"""Keys and values that are stored in pages, and attention over them: what serves many sequences at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .checks import DTYPES, check_sinks, checked_scale
from .errors import PageError, ShapeError, UnsupportedError, message, shown
from .merge import with_sinks
from .ops.dispatch import names
from .ops.stored import attend, check_pages, refuse_gradient
from .patterns import Causal, Pattern
from .patterns.fit import refuse
from .patterns.numbers import check_device, whole
from .patterns.parse import of_call
from .precision import STORED, Precision, Scales, as_precision, store
from .terms import Term, as_terms

#: Tokens that a page may have.
SIZES = (16, 32, 64, 128, 256)


class PagedCache:
    """Keys and values of several sequences in pages of one pool, found through a table.

    Token t of sequence b lies in page ``table[b, t // page]``, at ``t % page``. Sequences may share pages, such as
    those of a common prompt; one that is written to while others hold it is copied first. Nothing is moved as sequences
    grow, and what one gives back another takes. The cache keeps book on the host, from the first ``append``, ``fork``
    or ``free`` on; until then what it was made of may be written by hand.

    Args:
        k: Keys, (pages, Hkv, page, D), a page being 16, 32, 64, 128 or 256 tokens.
        v: Values, (pages, Hkv, page, Dv), alike.
        table: Page numbers, (B, n) int32: a sequence has at most n * page tokens. Those behind its last token may be
            anything.
        lengths: Tokens of each sequence, (B,) int32.
        scales: Of k and v that are stored in 8 bits (int8, float8_e4m3fn), both (pages, Hkv, page) float32: what each
            token's row of a head is multiplied by.
    Raises:
        ShapeError: Tensors that do not fit each other; at use, a length or a page number out of range.
    Example:
        >>> cache = rw.PagedCache.empty(batch=2, length=1024, heads=4, dim=32)
        >>> cache.append(k.expand(2, -1, -1, -1), v.expand(2, -1, -1, -1))
        >>> rw.paged_attention(q[:, :, -1:].expand(2, -1, -1, -1), cache).shape
        torch.Size([2, 4, 1, 32])

    References:
        Kwon et al. (2023), PagedAttention, sections 4.1 to 4.4; here a kernel reads through the table on a CPU too.
    """

    def __init__(
        self, k: Tensor, v: Tensor, table: Tensor, lengths: Tensor, *, scales: tuple[Tensor, Tensor] | None = None
    ):
        for name, x in (("k", k), ("v", v)):
            if not isinstance(x, Tensor) or x.ndim != 4 or x.layout != torch.strided or 0 in x.shape:
                raise ShapeError(
                    message(name, shown(x), "(pages, heads, page, dim)", "Make one with PagedCache.empty.")
                )
            if x.dtype not in (*DTYPES, *STORED) or x.device.type == "meta":
                got = f"{x.dtype} on {x.device}"
                raise ShapeError(
                    message(
                        name, got, "values of a floating type, int8 or float8_e4m3fn", f"Convert {name} with .to(...)."
                    )
                )
            if x.stride(3) != 1 and x.shape[3] > 1:
                got = f"a stride of {x.stride(3)} in the last dimension"
                raise ShapeError(message(name, got, "1", f"Call {name}.contiguous() once."))
        if v.shape[:3] != k.shape[:3] or v.dtype != k.dtype or v.device != k.device:
            got = f"{shown(v)} on {v.device}"
            raise ShapeError(message("v", got, f"as k but for Dv: {shown(k)} on {k.device}", "Make them alike."))
        if k.shape[2] not in SIZES:
            raise ShapeError(message("page", k.shape[2], "16, 32, 64, 128 or 256 tokens", "Store them in such pages."))
        for name, x, ndim in (("table", table, 2), ("lengths", lengths, 1)):
            if not isinstance(x, Tensor) or x.dtype != torch.int32 or x.ndim != ndim or not x.is_contiguous():
                wanted = "a contiguous int32 tensor " + ("(B, n)" if ndim == 2 else "(B,)")
                raise ShapeError(message(name, shown(x), wanted, "Convert it with .int()."))
            if x.device != k.device:
                raise ShapeError(message(f"{name}.device", x.device, f"{k.device}, as k", "Move it there."))
        if len(table) != len(lengths) or 0 in table.shape:
            raise ShapeError(message("lengths", shown(lengths), f"one for each row of {shown(table)}", "Add them."))
        self.k, self.v, self.table, self.lengths = k, v, table, lengths
        self.scales = _checked_scales(scales, k)
        self._book: _Book | None = None

    @classmethod
    def empty(
        cls,
        batch: int,
        length: int,
        heads: int,
        dim: int,
        *,
        value_dim: int | None = None,
        page: int = 64,
        pages: int | None = None,
        dtype: torch.dtype | None = None,
        device: str | torch.device = "cpu",
        precision: Precision | None = None,
    ) -> PagedCache:
        """Make a cache without tokens.

        Args:
            batch: Sequences.
            length: Most tokens of one.
            heads: Key heads.
            dim: D of keys.
            value_dim: Dv of values; D by default.
            page: Tokens of a page.
            pages: Pages of the pool; by default as many as all sequences have room for.
            dtype: Of keys and values; torch's default.
            device: Where they live.
            precision: A policy, of whose ``kv`` they are stored in 8 bits: what is appended is rounded, a row at a
                time, and read as it is stored.
        Raises:
            ShapeError: A size below 1, another number of tokens in a page, or more than memory holds.
            UnsupportedError: Both a dtype and 8 bits.
        """
        sizes = {"batch": batch, "length": length, "heads": heads, "dim": dim, "page": page}
        sizes |= {"value_dim": dim if value_dim is None else value_dim}
        for name, size in sizes.items():
            sizes[name] = whole(name, size, 1, error=ShapeError)
        batch, page = sizes["batch"], sizes["page"]
        columns = -(-sizes["length"] // page)
        count = batch * columns if pages is None else whole("pages", pages, 1, error=ShapeError)
        if dtype is not None and (not isinstance(dtype, torch.dtype) or dtype not in DTYPES):
            raise ShapeError(message("dtype", shown(dtype), "a floating type", "Use float32, float16 or bfloat16."))
        stored = as_precision(precision).kv
        if stored is not None and dtype is not None:
            raise UnsupportedError(message("dtype", dtype, f"none beside precision.kv={stored}", "Leave it out."))
        place = check_device(device)
        scales = None
        try:
            # written to later, in whatever mode
            with torch.inference_mode(False):
                k, v = (
                    torch.zeros(count, sizes["heads"], page, sizes[of], dtype=stored or dtype, device=place)
                    for of in ("dim", "value_dim")
                )
                table, lengths = (
                    torch.zeros(shape, dtype=torch.int32, device=place) for shape in ((batch, columns), batch)
                )
                if stored is not None:
                    scales = Scales(*(torch.zeros(k.shape[:3], dtype=torch.float32, device=place) for _ in range(2)))
        except RuntimeError as error:
            remedy = "Lower batch, length or pages."
            raise ShapeError(message("pages", f"{count} pages of {page}", "what memory holds", remedy)) from error
        return cls(k, v, table, lengths, scales=scales)

    def __getstate__(self) -> dict[str, Any]:
        # on a CPU the book is kept in this cache's own tensors: a copy opens another
        return self.__dict__ | {"_book": None}

    def __copy__(self) -> NoReturn:
        remedy = "Use copy.deepcopy, or fork() for sequences that go on from the same tokens."
        raise UnsupportedError(message("cache", "a shallow copy", "one keeper of its pages", remedy))

    def __repr__(self) -> str:
        pages, heads, page, dim = self.k.shape
        batch, columns = self.table.shape
        kept = "" if self.scales is None else f", {self.k.dtype}"
        return (
            f"PagedCache({batch} sequences of up to {columns * page}, {pages} pages of {page}, {heads} heads, "
            f"D {dim}{kept})"
        )

    @property
    def page(self) -> int:
        """Tokens of a page."""
        return self.k.shape[2]

    @property
    def free_pages(self) -> int:
        """How many pages nobody holds."""
        return len(self._opened().free)

    def append(self, k: Tensor, v: Tensor, rows: Sequence[int] | None = None) -> None:
        """Write the next tokens of sequences.

        Args:
            k: Keys, (R, Hkv, tokens, D), of the cache's dtype; of any floating type where that has 8 bits.
            v: Values, (R, Hkv, tokens, Dv).
            rows: R sequences, each once; all by default.
        Raises:
            ShapeError: Tensors that do not fit the cache, or tokens for which a row of the table has no room.
            PageError: No page is free; nothing was written.
        """
        book, chosen = self._opened(), self._rows("rows", rows)
        for name, x, of in (("k", k, self.k), ("v", v, self.v)):
            wanted = (len(chosen), of.shape[1], k.shape[2] if isinstance(k, Tensor) and k.ndim == 4 else 1, of.shape[3])
            types = (of.dtype,) if self.scales is None else DTYPES
            if not isinstance(x, Tensor) or x.shape != wanted or x.dtype not in types or x.device != of.device:
                remedy = "Append tokens as the cache takes them."
                one = of.dtype if self.scales is None else "a floating type"
                raise ShapeError(message(name, shown(x), f"{one} {wanted} on {of.device}", remedy))
        copied = book.reserve(chosen, k.shape[2])
        if copied:
            source, target = torch.tensor(copied, device=self.k.device).T
            for of in (self.k, self.v, *(self.scales or ())):
                _indexed(of)[target] = _indexed(of)[source]
        page, place = (torch.from_numpy(x).to(self.k.device) for x in book.places(chosen, k.shape[2]))
        with torch.no_grad():
            for i, (of, x) in enumerate(((self.k, k), (self.v, v))):
                if self.scales is not None:
                    x, scale = store(x, of.dtype)
                    self.scales[i][page, :, place] = scale.transpose(1, 2)
                _indexed(of)[page, :, place] = _indexed(x).transpose(1, 2)
        book.lengths[chosen] += k.shape[2]
        self._publish(book)

    def fork(self, source: int | Sequence[int], target: int | Sequence[int], length: int | None = None) -> None:
        """Let sequences begin as others: they share their pages, until one writes to a page of both.

        Args:
            source: A sequence, or several; one may be named more than once.
            target: As many, each once, which give back what they held. A source may be among them.
            length: Tokens that are taken over; all by default.
        Raises:
            ShapeError: A row that there is not, another number of targets, or more tokens than a source has.
        """
        book = self._opened()
        sources = self._rows("source", source if isinstance(source, Sequence) else [source], once=False)
        targets = self._rows("target", target if isinstance(target, Sequence) else [target])
        if len(sources) != len(targets):
            got = f"{len(targets)} rows for {len(sources)} sources"
            raise ShapeError(message("target", got, "one for each source", "Name a target for each."))
        lengths = book.lengths[sources]
        if length is not None:
            least = int(lengths.min(initial=2**31 - 1))
            whole("length", length, 0, least, error=ShapeError)
            lengths = np.full_like(lengths, length)
        book.share(sources, targets, lengths)
        self._publish(book)

    def free(self, rows: Sequence[int] | None = None) -> None:
        """Empty sequences: pages that no other holds are free again.

        Args:
            rows: Which ones; all by default.
        Raises:
            ShapeError: A row that there is not.
        """
        book = self._opened()
        book.release(self._rows("rows", rows))
        self._publish(book)

    def _opened(self) -> _Book:
        if self._book is None:
            self._book = _Book(self.table.cpu().numpy(), self.lengths.cpu().numpy(), self.k.shape[0], self.page)
        return self._book

    def _publish(self, book: _Book) -> None:
        # on a CPU the book is kept in the tensors themselves
        if self.k.device.type != "cpu":
            self.table.copy_(torch.from_numpy(book.table))
            self.lengths.copy_(torch.from_numpy(book.lengths))

    def _rows(self, name: str, rows: Sequence[int] | None, *, once: bool = True) -> NDArray[np.int64]:
        batch = len(self.table)
        if rows is None:
            return np.arange(batch)
        if not isinstance(rows, (list, tuple, range)):
            raise ShapeError(message(name, shown(rows), "a list of ints", "Pass them as a list."))
        listed = np.array([whole(name, row, 0, batch - 1, error=ShapeError) for row in rows], np.int64)
        if once and len(np.unique(listed)) < len(listed):
            raise ShapeError(message(name, shown(rows), "each row once", "Name it once."))
        return listed


def _checked_scales(scales: object, k: Tensor) -> Scales | None:
    """The scales of a pool, which has them where it is stored in 8 bits; ShapeError for what is none."""
    if scales is None and k.dtype not in STORED:
        return None
    wanted = f"two float32 tensors {tuple(k.shape[:3])} on {k.device}" if k.dtype in STORED else f"none of {k.dtype}"
    pair = scales if isinstance(scales, (tuple, list)) and len(scales) == 2 else (None, None)
    for x in pair:
        fits = isinstance(x, Tensor) and x.dtype == torch.float32 and x.shape == k.shape[:3] and x.device == k.device
        if k.dtype not in STORED or not fits:
            remedy = "Pass those of the cache that k and v are of: scales=cache.scales."
            raise ShapeError(message("scales", shown(x), wanted, remedy))
    return Scales(*pair)


def _indexed(x: Tensor) -> Tensor:
    """A tensor that can be indexed: floats of 8 bits cannot, as bytes they can."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


class _Book:
    """Who holds which pages, on the host."""

    def __init__(self, table: NDArray[np.int32], lengths: NDArray[np.int32], pages: int, page: int):
        self.table, self.lengths, self.page = table, lengths, page
        check_pages(table, lengths, pages, page)
        held = table[np.arange(table.shape[1]) * page < lengths[:, None]]
        self.holders = np.bincount(held, minlength=pages)
        self.free: list[int] = np.flatnonzero(self.holders == 0)[::-1].tolist()

    def _held(self, length: NDArray[np.int32]) -> NDArray[np.int32]:
        return -(-length // self.page)

    def reserve(self, rows: NDArray[np.int64], tokens: int) -> list[tuple[int, int]]:
        """Give rows the pages of their next tokens; (from, to) of those to be copied, since others hold them too."""
        before = self.lengths[rows]
        have, need = self._held(before), self._held(before + tokens)
        columns = self.table.shape[1]
        if (need > columns).any():
            row = int(rows[need.argmax()])
            got = f"{tokens} tokens for row {row}, which has {self.lengths[row]}"
            remedy = "Free the row, or make a cache of a greater length."
            raise ShapeError(message("append", got, f"at most {columns * self.page} in all", remedy))
        written = rows[before % self.page > 0]
        pages = self.table[written, self.lengths[written] // self.page]
        holders, shared = dict[int, int](), list[int]()
        for row, number in zip(written[self.holders[pages] > 1], pages[self.holders[pages] > 1].tolist(), strict=True):
            # the last one to hold it may write
            left = holders.setdefault(number, int(self.holders[number]))
            if left > 1:
                holders[number] = left - 1
                shared.append(int(row))
        wanted = int((need - have).sum()) + len(shared)
        if wanted > len(self.free):
            remedy = "Free sequences, or make a cache with more pages."
            raise PageError(message("append", f"{wanted} pages to take", f"at most the {len(self.free)} free", remedy))
        copied = []
        for row in shared:
            at = self.lengths[row] // self.page
            number = int(self.table[row, at])
            self.table[row, at] = self._taken()
            self.holders[number] -= 1
            copied.append((number, int(self.table[row, at])))
        for i in np.flatnonzero(need > have):
            for column in range(have[i], need[i]):
                self.table[rows[i], column] = self._taken()
        return copied

    def _taken(self) -> int:
        number = self.free.pop()
        self.holders[number] = 1
        return number

    def places(self, rows: NDArray[np.int64], tokens: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The page and the place in it of each row's next tokens, (R, tokens) each."""
        token = self.lengths[rows].astype(np.int64)[:, None] + np.arange(tokens)
        return self.table[rows[:, None], token // self.page].astype(np.int64), token % self.page

    def share(self, sources: NDArray[np.int64], targets: NDArray[np.int64], lengths: NDArray[np.int32]) -> None:
        """Let targets hold the pages of the first tokens of sources."""
        taken = [self.table[row, :held].copy() for row, held in zip(sources, self._held(lengths), strict=True)]
        for pages in taken:
            np.add.at(self.holders, pages, 1)
        self.release(targets)
        for row, pages in zip(targets, taken, strict=True):
            self.table[row, : len(pages)] = pages
        self.lengths[targets] = lengths

    def release(self, rows: NDArray[np.int64]) -> None:
        """Give back what rows hold."""
        for row, held in zip(rows, self._held(self.lengths[rows]), strict=True):
            pages, times = np.unique(self.table[row, :held], return_counts=True)
            self.holders[pages] -= times
            self.free += pages[self.holders[pages] == 0].tolist()
        self.lengths[rows] = 0


def paged_attention(
    q: Tensor,
    cache: PagedCache,
    pattern: Pattern = Causal(),  # noqa: B008  (immutable)
    *,
    scale: float | None = None,
    terms: Term | Sequence[Term] | None = None,
    sink_logits: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Compute attention of the last tokens of each sequence over the pages that hold it, read through the table.

    What :func:`ringweave.attention` gives for each sequence by itself at ``q_offset = lengths - Nq``. Pages in which
    the pattern allows nothing are not touched. Forward only: a cache is no place for gradients.

    Args:
        q: Queries, (B, Hq, Nq, D), dtype (where that has 8 bits: any) and device of the cache: of the last Nq tokens of
            each sequence, whose keys and values are in the cache already. What stands for an empty sequence gives 0.
        cache: Keys and values.
        pattern: A relation, counted from each sequence's first token; causal by default.
        scale: Factor of the scores; 1 / sqrt(D) by default.
        terms: What is added to or made of the scaled scores, in order; a Bias has a column for every token of
            which a row of the table has room.
        sink_logits: (Hq,): one learned logit a head that joins the denominator and has no value.
        backend: ``"auto"``, or one that reads pages: cpu, triton, gather, reference.
    Returns:
        Output, (B, Hq, Nq, Dv), dtype of q.
    Raises:
        ShapeError: Shapes, dtypes or devices do not fit; a sequence with fewer tokens than queries; a page number
            out of range (on a GPU an assertion there).
        PatternError: The pattern is made for other lengths, heads or batch, or is a LongNet.
        UnsupportedError: A gradient is asked for, or the named backend reads no pages.
    Example:
        >>> cache = rw.PagedCache.empty(batch=1, length=512, heads=4, dim=32)
        >>> cache.append(k, v)
        >>> window = (rw.SlidingWindow(64) | rw.Sinks(4)) & rw.Causal()
        >>> at_once = rw.attention(q, k, v, window)
        >>> torch.testing.assert_close(rw.paged_attention(q[:, :, -1:], cache, window), at_once[:, :, -1:])

    References:
        Kwon et al. (2023), PagedAttention, section 4.1.
    """
    if not isinstance(cache, PagedCache):
        raise ShapeError(message("cache", type(cache).__name__, "a PagedCache", "Make one with PagedCache.empty."))
    if not isinstance(pattern, Pattern):
        refuse(pattern)
    k, v = cache.k, cache.v
    heads = k.shape[1]
    fits = isinstance(q, Tensor) and q.ndim == 4 and q.shape[0] == len(cache.table) and q.shape[3] == k.shape[3]
    if not fits or q.shape[1] % heads or 0 in q.shape:
        wanted = f"({len(cache.table)}, a multiple of {heads}, tokens, {k.shape[3]})"
        raise ShapeError(message("q", shown(q), wanted, "Give each sequence of the cache its queries."))
    if q.dtype not in ((k.dtype,) if cache.scales is None else DTYPES) or q.device != k.device:
        got, dtype = f"{q.dtype} on {q.device}", k.dtype if cache.scales is None else "a floating type"
        raise ShapeError(message("q", got, f"{dtype} on {k.device}, as the cache", "Convert it with .to(...)."))
    listed = () if terms is None else as_terms(terms)
    capacity = cache.table.shape[1] * cache.page
    for term in listed:
        term.check(q.shape[0], q.shape[1], q.shape[2], capacity, q.device)
    if sink_logits is not None:
        check_sinks(sink_logits, q)
    learned = [table for term in listed for table in term.tables] + [x for x in (sink_logits,) if x is not None]
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, *learned)):
        refuse_gradient("paged_attention")
    if not isinstance(backend, str) or backend not in names():
        raise UnsupportedError(message("backend", shown(backend), f"one of {', '.join(names())}", "Use 'auto'."))
    scale = checked_scale(scale, q.shape[3])
    paged = (cache.table, cache.lengths)
    out, lse = attend(q, k, v, of_call(pattern), scale, backend, listed, scales=cache.scales or (), paged=paged)
    return out if sink_logits is None else with_sinks(out, lse, sink_logits).out


__all__ = ["PagedCache", "paged_attention"]
