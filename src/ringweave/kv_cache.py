"""A paged cache of keys and values for many sequences, and the page arguments of a call over it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .axes import Axes
from .cache import PATTERNS
from .checks import check_device, check_dtype, whole
from .errors import PageError, PatternError, ShapeError, UnsupportedError, shown
from .patterns import KeyPadding, Pattern
from .patterns.alignment import ends_at_query
from .patterns.cache_key import TableId
from .patterns.shifted import with_offsets
from .plan.cuda_sync import capturing, require_no_capture, wait_for_stream
from .precision import STORED, Precision, Scales, as_codes, as_precision, quantize_rows
from .torch_compat import require, version
from .types import DTYPES

_POOL = Axes("k: stored[pages Hkv page D]; v: k[pages Hkv page Dv]; table: int32[B n]; lengths: int32[B]")
_SCALES = Axes("k_scales: float32[pages Hkv page]; v_scales: float32[pages Hkv page]")
#: Allowed numbers of tokens in a page.
SIZES = (16, 32, 64, 128, 256)


class PagedCache:
    """A cache of the keys and values of several sequences, in pages of one pool that a table maps to tokens.

    Token t of sequence b is in page ``table[b, t // page]``, at ``t % page``. Sequences may share pages, such as those
    of a common prompt; a shared page is copied before a sequence writes to it. Nothing is moved when sequences grow,
    and pages that one sequence frees are used by others. From the first ``append``, ``fork`` or ``free`` on, the cache
    keeps its own record of pages on the host; until then the tensors may be written in place. They cannot be replaced.

    Args:
        k: Keys, (pages, Hkv, page, D), with pages of 16, 32, 64, 128 or 256 tokens.
        v: Values, (pages, Hkv, page, Dv), dtype and device of k.
        table: Page numbers, (B, n) int32: a sequence has at most n * page tokens. Entries after its last token may have
            any value.
        lengths: Number of tokens of each sequence, (B,) int32.
        scales: Factors of k and v stored in 8 bits (int8, float8_e4m3fn), one per head and token: two float32 tensors
            (pages, Hkv, page).
    Raises:
        ShapeError: The tensors do not fit each other; when the cache is used, a length or page number is out of range.
    Example:
        >>> cache = rw.PagedCache.empty(batch=2, length=1024, heads=4, dim=32)
        >>> cache.append(k.expand(2, -1, -1, -1), v.expand(2, -1, -1, -1))
        >>> rw.paged_attention(q[:, :, -1:].expand(2, -1, -1, -1), cache).shape
        torch.Size([2, 4, 1, 32])

    References:
        Kwon et al. (2023), PagedAttention, sections 4.1 to 4.4; here kernels read through the table on CPUs too.
    """

    def __init__(
        self, k: Tensor, v: Tensor, table: Tensor, lengths: Tensor, *, scales: tuple[Tensor, Tensor] | None = None
    ):
        check_tensors(k, v, table, lengths)
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
        device: str | int | torch.device = "cpu",
        precision: Precision | None = None,
    ) -> PagedCache:
        """Make a cache without tokens.

        Args:
            batch: Number of sequences.
            length: Maximum number of tokens of a sequence.
            heads: Number of key heads.
            dim: D of keys.
            value_dim: Dv of values; D by default.
            page: Tokens in a page.
            pages: Pages in the pool; by default enough for every sequence at its maximum length.
            dtype: Dtype of keys and values; torch's default dtype if None.
            device: Device of all tensors.
            precision: A policy; its ``kv`` selects storage in 8 bits, to which each appended row of a head is rounded.
        Raises:
            ShapeError: A size is below 1, ``page`` is not an allowed number, or memory does not suffice.
            UnsupportedError: Both ``dtype`` and ``precision.kv`` are given.
        """
        sizes = {"batch": batch, "length": length, "heads": heads, "dim": dim, "page": page}
        sizes |= {"value_dim": dim if value_dim is None else value_dim}
        for name, size in sizes.items():
            sizes[name] = whole(name, size, 1, error=ShapeError)
        batch, page = sizes["batch"], sizes["page"]
        columns = -(-sizes["length"] // page)
        count = batch * columns if pages is None else whole("pages", pages, 1, error=ShapeError)
        check_dtype(dtype)
        stored = as_precision(precision).kv
        if stored is not None and dtype is not None:
            raise UnsupportedError("dtype", dtype, f"None with precision.kv={stored}", "Leave it out.")
        place = check_device(device)
        scales = None
        try:
            # not inference tensors, since append may write to them outside of inference mode
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
            raise ShapeError("pages", f"{count} pages of {page}", "a pool within memory", remedy) from error
        return cls(k, v, table, lengths, scales=scales)

    def __setattr__(self, name: str, value: object) -> None:
        # prepared calls pass the addresses of the tensors that were checked here
        if "_book" in self.__dict__ and name != "_book":
            wanted = "its own tensors, which may be written in place until the first append"
            raise ShapeError(f"cache.{name}", "an assignment", wanted, "Make another PagedCache.")
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> NoReturn:
        raise ShapeError(f"cache.{name}", "a deletion", "its own tensors", "Make another PagedCache.")

    def __getstate__(self) -> dict[str, Any]:
        # On a CPU the book shares the memory of this cache's tensors, so a copy opens another one.
        return self.__dict__ | {"_book": None}

    def __copy__(self) -> NoReturn:
        remedy = "Use copy.deepcopy, or fork() for sequences that continue from the same tokens."
        raise UnsupportedError("cache", "a shallow copy", "a single owner of its pages", remedy)

    def __repr__(self) -> str:
        pages, heads, page, dim = self.k.shape
        batch, columns = self.table.shape
        stored = "" if self.scales is None else f", {self.k.dtype}"
        return (
            f"PagedCache({batch} sequences of up to {columns * page}, {pages} pages of {page}, {heads} heads, "
            f"D {dim}{stored})"
        )

    @property
    def page(self) -> int:
        """Number of tokens in a page."""
        return self.k.shape[2]

    def check(self) -> None:
        """Raise ShapeError unless the tensors still fit each other; their owner may have given them other storages."""
        check_tensors(self.k, self.v, self.table, self.lengths)
        _checked_scales(self.scales, self.k)

    @property
    def _host_lengths(self) -> NDArray[np.int32] | None:
        """Lengths of the sequences without waiting for a device; None if ``lengths`` may have been changed by hand."""
        book = self._book
        if book is None or book.shared:
            return self.lengths.numpy() if self.lengths.device.type == "cpu" else None
        # inference tensors count no writes, so a write by hand would go unnoticed
        if book.published[0] is not self.lengths or self.lengths.is_inference():
            return None
        return book.lengths if book.published[1] == version(self.lengths) else None

    @property
    def _ends(self) -> tuple[int, int]:
        """Fewest and most tokens of a sequence; (0, 0) if only a device knows the lengths."""
        lengths = self._host_lengths
        if lengths is None or not len(lengths):
            return 0, 0
        if len(lengths) == 1:
            return int(lengths[0]), int(lengths[0])
        return int(lengths.min()), int(lengths.max())

    @property
    def free_pages(self) -> int:
        """Number of pages that no sequence holds."""
        return len(self._opened().free)

    def append(self, k: Tensor, v: Tensor, rows: Sequence[int] | None = None) -> None:
        """Write the next tokens of sequences.

        Args:
            k: Keys, (R, Hkv, tokens, D), in the cache's dtype, or any floating dtype for a cache in 8 bits.
            v: Values, (R, Hkv, tokens, Dv).
            rows: The R sequences, each once; all by default.
        Raises:
            ShapeError: The tensors do not fit the cache, or a row of the table has no room for the tokens.
            PageError: Too few pages are free. A call that raises an error has appended nothing.
        """
        book = self._book or self._opened()
        chosen = book.rows if rows is None else self._rows("rows", rows)
        for name, x, of in (("k", k, self.k), ("v", v, self.v)):
            wanted = (len(chosen), of.shape[1], k.shape[2] if isinstance(k, Tensor) and k.ndim == 4 else 1, of.shape[3])
            types = (of.dtype,) if self.scales is None else DTYPES
            if not isinstance(x, Tensor) or x.shape != wanted or x.dtype not in types or x.device != of.device:
                remedy = "Convert the tokens to the cache's form."
                one = of.dtype if self.scales is None else "a floating type"
                raise ShapeError(name, shown(x), f"{one} {wanted} on {of.device}", remedy)
        own = book.own_place(chosen) if len(chosen) == k.shape[2] == 1 and self.scales is None else None
        if own is not None:
            page, place = own
            with torch.no_grad():
                self.k[page, :, place] = k[0, :, 0]
                self.v[page, :, place] = v[0, :, 0]
        if own is not None and book.shared:
            # the last line, so that no failure comes after the token is taken
            book.lengths[chosen[0]] += 1
        else:
            self._append(book, chosen, k, v, written=own is not None)

    def _append(self, book: _Book, rows: NDArray[np.int64], k: Tensor, v: Tensor, *, written: bool) -> None:
        """Reserve pages for tokens of rows, write the tokens unless they are written already, and take both."""
        copied, entries, before = ([], [], book.lengths[rows]) if written else book.reserve(rows, k.shape[2])
        if copied:
            source, target = torch.tensor(copied, device=self.k.device).T
            for of in (self.k, self.v, *(self.scales or ())):
                as_codes(of)[target] = as_codes(of)[source]
        try:
            if entries:
                book.take(entries, copied)
            if not written:
                self._write(*book.places(rows, before, k.shape[2]), k, v)
            book.lengths[rows] = before + k.shape[2]
            self._publish(book)
        except BaseException:
            self._undo(book, rows, before)
            raise

    def _write(self, pages: NDArray[np.int64], places: NDArray[np.int64], k: Tensor, v: Tensor) -> None:
        """Write tokens to pages and places in them, both (R, tokens)."""
        at = torch.from_numpy(pages), torch.from_numpy(places)
        if self.k.device.type != "cpu":
            at = at[0].to(self.k.device), at[1].to(self.k.device)
        with torch.no_grad():
            if self.scales is None:
                self.k.transpose(1, 2).index_put_(at, k.transpose(1, 2))
                self.v.transpose(1, 2).index_put_(at, v.transpose(1, 2))
            else:
                for of, x, scales in zip((self.k, self.v), (k, v), self.scales, strict=True):
                    x, scale = quantize_rows(x, of.dtype)
                    scales.transpose(1, 2).index_put_(at, scale.transpose(1, 2))
                    as_codes(of).transpose(1, 2).index_put_(at, as_codes(x).transpose(1, 2))

    def fork(self, source: int | Sequence[int], target: int | Sequence[int], length: int | None = None) -> None:
        """Let target sequences start with the tokens of sources; they share pages until one of them writes.

        Args:
            source: A sequence, or several; one may occur more than once.
            target: One sequence for each source, each once; it may also be a source. Its own pages are freed.
            length: Number of first tokens that are shared; all by default.
        Raises:
            ShapeError: A row does not exist, the numbers of sources and targets differ, or a source has fewer tokens
                than ``length``.
        """
        book = self._opened()
        sources = self._rows("source", source if isinstance(source, Sequence) else [source], once=False)
        targets = self._rows("target", target if isinstance(target, Sequence) else [target])
        if len(sources) != len(targets):
            got = f"{len(targets)} rows for {len(sources)} sources"
            raise ShapeError("target", got, "one for each source", "Name a target for each.")
        lengths = book.lengths[sources]
        if length is not None:
            least = int(lengths.min(initial=2**31 - 1))
            whole("length", length, 0, least, error=ShapeError)
            lengths = np.full_like(lengths, length)
        before = book.lengths[targets], book.table[targets]
        try:
            book.share(sources, targets, lengths)
            self._publish(book)
        except BaseException:
            self._undo(book, targets, *before)
            raise

    def free(self, rows: Sequence[int] | None = None) -> None:
        """Empty sequences and free the pages that no other sequence holds.

        Args:
            rows: The sequences; all by default.
        Raises:
            ShapeError: A row does not exist.
        """
        book, chosen = self._opened(), self._rows("rows", rows)
        before = book.lengths[chosen]
        try:
            book.release(chosen)
            self._publish(book)
        except BaseException:
            self._undo(book, chosen, before)
            raise

    def _opened(self) -> _Book:
        if self._book is None:
            # of detached tensors, since an array keeps its tensor alive, and not the storage that it reads
            table, lengths = (x.detach().cpu().numpy() for x in (self.table, self.lengths))
            book = _Book(table, lengths, self.k.shape[0], self.page, self.k.device.type == "cpu")
            book.published = self.lengths, version(self.lengths)
            self._book = book
        return self._book

    def _undo(
        self,
        book: _Book,
        rows: NDArray[np.int64],
        lengths: NDArray[np.int32],
        table: NDArray[np.int32] | None = None,
    ) -> None:
        """Give rows their lengths and pages of before a change that failed, and let the next call make another book."""
        self._book = None
        book.lengths[rows] = lengths
        if table is not None:
            book.table[rows] = table
        self._publish(book)

    def _publish(self, book: _Book) -> None:
        if not book.shared:
            self.table.copy_(torch.from_numpy(book.table))
            self.lengths.copy_(torch.from_numpy(book.lengths))
            book.published = self.lengths, version(self.lengths)
            # the host cannot tell whether inference tensors were written to since
            _note_lengths(self.lengths, book.lengths.copy(), kept=not self.lengths.is_inference())

    def _rows(self, name: str, rows: Sequence[int] | None, *, once: bool = True) -> NDArray[np.int64]:
        batch = len(self.table)
        if rows is None:
            return np.arange(batch)
        if not isinstance(rows, (list, tuple, range)):
            raise ShapeError(name, shown(rows), "a list of ints", "Pass them as a list.")
        listed = np.array([whole(name, row, 0, batch - 1, error=ShapeError) for row in rows], np.int64)
        if once and len(np.unique(listed)) < len(listed):
            raise ShapeError(name, shown(rows), "each row once", "Name it once.")
        return listed


def check_tensors(k: Tensor, v: Tensor, table: Tensor, lengths: Tensor) -> None:
    """Raise ShapeError unless the tensors of a cache fit each other."""
    sizes = _POOL.fit(k=k, v=v, table=table, lengths=lengths, stored=(*DTYPES, *STORED))
    if k.device.type == "meta":
        raise ShapeError("k.device", k.device, "a device that holds values", "Make the cache there.")
    for name, x in (("k", k), ("v", v)):
        if x.stride(3) != 1 and x.shape[3] > 1:
            got = f"a stride of {x.stride(3)} in the last dimension"
            raise ShapeError(name, got, "1", f"Call {name}.contiguous() once.")
    for name, x in (("table", table), ("lengths", lengths)):
        if not x.is_contiguous():
            raise ShapeError(name, f"strides {x.stride()}", "a contiguous tensor", f"Call {name}.contiguous() once.")
    if sizes["page"] not in SIZES:
        raise ShapeError("page", sizes["page"], "16, 32, 64, 128 or 256 tokens", "Use one of these sizes.")


def _checked_scales(scales: object, k: Tensor) -> Scales | None:
    """Return the checked scales of a pool, None for one that is not stored in 8 bits; raise ShapeError otherwise."""
    if scales is None and k.dtype not in STORED:
        return None
    remedy = "Pass the scales of the cache that k and v belong to: scales=cache.scales."
    if k.dtype not in STORED or not isinstance(scales, (tuple, list)) or len(scales) != 2:
        wanted = "two tensors" if k.dtype in STORED else "None"
        raise ShapeError("scales", shown(scales), f"{wanted} with {k.dtype}", remedy)
    pages, heads, page = k.shape[:3]
    pair = Scales(*scales)
    sizes: dict[str, Any] = {"pages": pages, "Hkv": heads, "page": page}
    _SCALES.fit(k_scales=pair.k, v_scales=pair.v, **sizes, device=k.device, remedy=remedy)
    return pair


def check_pages(table: NDArray[np.int32], lengths: NDArray[np.int32], pages: int, size: int) -> None:
    """Raise ShapeError if a length exceeds its row of the table, or an entry in use is not a page number."""
    room = table.shape[1] * size
    if lengths.min() < 0 or lengths.max() > room:
        row = int(lengths.argmax() if lengths.max() > room else lengths.argmin())
        got = f"{lengths[row]} tokens in row {row}"
        raise ShapeError("lengths", got, f"0 to {room}, the room of a table row", "Add columns to the table.")
    # read as unsigned, negative numbers are too large as well
    wrong = (table.view(np.uint32) >= pages) & (np.arange(table.shape[1]) * size < lengths[:, None])
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        got = f"page {table[row, column]} in row {row}, column {column}"
        raise ShapeError("table", got, f"0 to {pages - 1}", "Correct it, or let the cache keep the table.")


@dataclass(frozen=True, eq=False)
class _Lengths:
    """Lengths of sequences on a device, as the host knew them last.

    Attributes:
        made_of: The tensor and its version.
        host: The lengths on the host, which nothing writes to.
        kept: Whether the record of a cache has them, so that the device need not be read.
        device: A copy on the device, with which captured graphs compare the lengths; None before the first call.
    """

    made_of: TableId
    host: NDArray[np.int32]
    kept: bool
    device: Tensor | None = None


def _note_lengths(lengths: Tensor, host: NDArray[np.int32], *, kept: bool, device: Tensor | None = None) -> _Lengths:
    noted = _Lengths(TableId(lengths), host, kept, device)
    # the storage is held, so no other tensor gets the address
    PATTERNS.put(("lengths", lengths.data_ptr()), noted, 2 * lengths.nbytes)
    return noted


def host_lengths(lengths: Tensor) -> Tensor:
    """Return the lengths of sequences on the host; nothing is copied if a cache keeps them, or in a CUDA graph.

    A captured graph has the plan of these lengths, so a device-side assertion stops its replay with others.

    Raises:
        UnsupportedError: A graph is captured, and no call before the capture had these lengths.
    """
    device = lengths.device
    if device.type == "cpu":
        return lengths
    known: _Lengths | None = PATTERNS.get(("lengths", lengths.data_ptr()))
    if known is not None and known.made_of != TableId(lengths):
        known = None
    if capturing(device):
        if known is None or known.device is None:
            require_no_capture(device)
        else:
            wait_for_stream(known, device)
            require((lengths == known.device).all(), "lengths: they changed since the graph was captured")
    elif known is None or not known.kept or known.device is None:
        host = known.host if known is not None and known.kept else lengths.cpu().numpy()
        known = _note_lengths(lengths, host, kept=known is not None and known.kept, device=lengths.clone())
    assert known is not None
    return torch.from_numpy(known.host)


def last_tokens(pattern: Pattern, lengths: Tensor, nq: int) -> Pattern:
    """Place a pattern so that q holds the last nq tokens of each sequence, and keys are its tokens.

    The pattern counts from each sequence's first token; ``lengths`` are on the host.

    Raises:
        ShapeError: A sequence that is not empty has fewer tokens than queries.
        PatternError: The pattern is a LongNet.
    """
    known = lengths.numpy()
    short = (known < nq) & (known > 0)
    if short.any():
        row = int(short.argmax())
        got = f"{nq} queries of row {row}, which has {known[row]} tokens"
        raise ShapeError("q", got, "at most as many as each sequence has", "Attend it in a separate call.")
    if not pattern.combinable:
        remedy = "A LongNet keeps tokens by their place: use Dilated or Segments."
        raise PatternError("pattern", repr(pattern), "a relation", remedy)
    last = with_offsets(pattern, (lengths.long() - nq).clamp_(min=0), 0, len(lengths))[0]
    # bounds that change nothing would take a fifth of the time of a plan
    return last if ends_at_query(pattern) and known.all() else last & KeyPadding(lengths)


class _Book:
    """The host's record of pages, their holders and the lengths of sequences.

    The pool has ``pages`` pages of ``page`` tokens. With ``shared``, the arrays share memory with the cache's tensors.
    """

    def __init__(self, table: NDArray[np.int32], lengths: NDArray[np.int32], pages: int, page: int, shared: bool):
        self.table, self.lengths, self.page, self.shared = table, lengths, page, shared
        self.rows = np.arange(len(table))
        # the tensor to which the lengths were last copied, and its version after that
        self.published: tuple[Tensor, Hashable]
        check_pages(table, lengths, pages, page)
        used = table[np.arange(table.shape[1]) * page < lengths[:, None]]
        self.holders = np.bincount(used, minlength=pages)
        self.free: list[int] = np.flatnonzero(self.holders == 0)[::-1].tolist()

    def _pages_of(self, length: NDArray[np.int32]) -> NDArray[np.int32]:
        return -(-length // self.page)

    def own_place(self, rows: NDArray[np.int64]) -> tuple[int, int] | None:
        """Return (page, place) of one row's next token if it fits in a page that only this row holds, else None."""
        row = rows.item()
        last, place = divmod(self.lengths.item(row), self.page)
        if not place:
            return None
        page = self.table.item(row, last)
        return (page, place) if self.holders.item(page) == 1 else None

    def reserve(
        self, rows: NDArray[np.int64], tokens: int
    ) -> tuple[list[tuple[int, int]], list[tuple[int, int, int]], NDArray[np.int32]]:
        """Choose free pages for the next tokens of rows, and change nothing.

        Returns:
            (from, to) of the shared pages that must be copied before the tokens are written; (row, column, page) of
            new entries of the table; the lengths of the rows.
        """
        before = self.lengths[rows]
        last, place = np.divmod(before, self.page)
        if tokens == 1 and np.count_nonzero(place) == len(rows):
            # fast path of most steps: each row continues in a page that only it holds
            pages = self.table[rows, last]
            if np.count_nonzero(self.holders[pages] == 1) == len(rows):
                return [], [], before
        have, need = self._pages_of(before), self._pages_of(before + tokens)
        columns = self.table.shape[1]
        if (need > columns).any():
            row = int(rows[need.argmax()])
            got = f"{tokens} tokens for row {row}, which has {self.lengths[row]}"
            remedy = "Free the row, or make a cache of a greater length."
            raise ShapeError("append", got, f"at most {columns * self.page} in all", remedy)
        written = rows[place > 0]
        pages = self.table[written, last[place > 0]]
        holders, shared = dict[int, int](), list[int]()
        for row, number in zip(written[self.holders[pages] > 1], pages[self.holders[pages] > 1].tolist(), strict=True):
            # the last holder writes to the page in place
            left = holders.setdefault(number, int(self.holders[number]))
            if left > 1:
                holders[number] = left - 1
                shared.append(int(row))
        wanted = int((need - have).sum()) + len(shared)
        if wanted > len(self.free):
            remedy = "Free sequences, or make a cache with more pages."
            raise PageError("append", f"{wanted} pages to take", f"at most the {len(self.free)} free", remedy)
        free = reversed(self.free)
        copied, entries = [], []
        for row in shared:
            at = int(self.lengths[row] // self.page)
            entries.append((row, at, next(free)))
            copied.append((int(self.table[row, at]), entries[-1][2]))
        for i in np.flatnonzero(need > have):
            entries += [(int(rows[i]), column, next(free)) for column in range(have[i], need[i])]
        return copied, entries, before

    def take(self, entries: list[tuple[int, int, int]], copied: list[tuple[int, int]]) -> None:
        """Take the pages of ``reserve``, after the copies: each token that a row has already is as before."""
        for row, column, page in entries:
            self.table[row, column] = page
            self.holders[page] = 1
        for page, _ in copied:
            self.holders[page] -= 1
        del self.free[len(self.free) - len(entries) :]

    def places(
        self, rows: NDArray[np.int64], before: NDArray[np.int32], tokens: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the page of each new token of rows, and its place in the page, both (R, tokens)."""
        if tokens == 1:
            # most steps
            column, place = np.divmod(before, self.page)
            return self.table[rows, column].astype(np.int64)[:, None], place.astype(np.int64)[:, None]
        column, place = np.divmod(before.astype(np.int64)[:, None] + np.arange(tokens), self.page)
        return self.table[rows[:, None], column].astype(np.int64), place

    def share(self, sources: NDArray[np.int64], targets: NDArray[np.int64], lengths: NDArray[np.int32]) -> None:
        """Let targets hold the pages with the first ``lengths`` tokens of sources."""
        taken = [self.table[row, :count].copy() for row, count in zip(sources, self._pages_of(lengths), strict=True)]
        for pages in taken:
            np.add.at(self.holders, pages, 1)
        self.release(targets)
        for row, pages in zip(targets, taken, strict=True):
            self.table[row, : len(pages)] = pages
        self.lengths[targets] = lengths

    def release(self, rows: NDArray[np.int64]) -> None:
        """Free the pages of rows that no other row holds, and set their lengths to 0."""
        for row, count in zip(rows, self._pages_of(self.lengths[rows]), strict=True):
            pages, times = np.unique(self.table[row, :count], return_counts=True)
            self.holders[pages] -= times
            self.free += pages[self.holders[pages] == 0].tolist()
        self.lengths[rows] = 0


__all__ = ["PagedCache"]
