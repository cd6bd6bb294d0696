"""Keys and values that a caller stores, in pages that a table maps to sequences; a row of a batch is one page."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...api import attend_pages
from ...axes import Axes
from ...checks import INTEGERS
from ...errors import PageError, ShapeError, shown
from ...kv_cache import SIZES, PagedCache
from ...patterns import Full
from .conventions import Options, Result, attend, checked_bounds, joined, with_rest
from .rotary import Rotary

_STORED = Axes("k_cache: dtype[rows tokens Hkv D]; v_cache: dtype[rows tokens Hkv Dv]; Hq % Hkv")
_TABLES = {name: Axes(f"{name}: int[B n]") for name in ("block_table", "page_table")}
_NEW = Axes("k: dtype[B N Hkv D]; v: dtype[B N Hkv Dv]")
_NEW_PACKED = Axes("k: dtype[N Hkv D]; v: dtype[N Hkv Dv]")


def numbered(sizes: list[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the sequence of each token of a pack, and the token's number in it."""
    counts = torch.tensor(sizes, device=device)
    sequence = torch.arange(len(sizes), device=device).repeat_interleave(counts)
    return sequence, torch.arange(len(sequence), device=device) - (counts.cumsum(0) - counts)[sequence]


class New(NamedTuple):
    """Tokens to append to sequences.

    Attributes:
        k: Keys of all sequences, (tokens, Hkv, D).
        v: Values.
        sizes: Number of tokens of each sequence.
        sequence: Sequence of each token.
        step: Number of each token among those of its sequence.
    """

    k: Tensor
    v: Tensor
    sizes: list[int]
    sequence: Tensor
    step: Tensor

    @staticmethod
    def of(k: Tensor, v: Tensor, sizes: list[int]) -> New:
        """Number the tokens."""
        return New(k, v, sizes, *numbered(sizes, k.device))


@dataclass
class Cache:
    """Keys and values of several sequences, in tensors of the caller.

    Attributes:
        k: Pages, (pages, page, Hkv, D).
        v: In the same form.
        table: Page numbers, (sequences, n).
        first: Number of tokens of padding before each sequence.
        stop: End of each sequence, padding included.
        named: Name of the table in the caller's function; None if each sequence has a row of a batch.
    """

    k: Tensor
    v: Tensor
    table: Tensor
    first: list[int]
    stop: list[int]
    named: str | None

    @staticmethod
    def of(
        q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, chosen: Tensor | None, count: int, named: str
    ) -> Cache:
        """Check the tensors of a full cache for ``count`` sequences, with the rows that were chosen for them."""
        of_q: dict[str, Any] = {"Hq": q.shape[-2], "D": q.shape[-1], "dtype": q.dtype}
        _STORED.fit(k_cache=k, v_cache=v, **of_q, device=q.device, empty=("rows", "tokens"))
        if table is not None:
            given: dict[str, Any] = {named: table} if chosen is not None else {named: table, "B": count}
            _TABLES[named].fit(**given, remedy="Pass a row for each sequence.")
        pages = torch.arange(len(k), device=k.device)[:, None] if table is None else table
        rows = len(pages)
        if chosen is not None:
            listed = whole_numbers("cache_batch_idx", chosen, 0, count)
            if any(not 0 <= row < rows for row in listed):
                raise ShapeError("cache_batch_idx", shown(listed), f"rows from 0 to {rows - 1}", "Correct it.")
            pages = pages[listed]
        elif rows < count:
            raise ShapeError("k_cache rows", rows, f"at least the {count} of q", "Allocate a row for each sequence.")
        cache = Cache(k, v, pages[:count], [0] * count, [], None if table is None else named)
        cache.stop = [cache.capacity] * count
        return cache

    @property
    def capacity(self) -> int:
        """Number of tokens that a sequence has room for."""
        return self.k.shape[1] * self.table.shape[1]

    def check_room(self, new: list[int]) -> None:
        """Raise an error unless every sequence and its new tokens have places."""
        for b, (first, stop, more) in enumerate(zip(self.first, self.stop, new, strict=True)):
            if not 0 <= first <= stop:
                wanted = "0 <= cache_leftpad <= cache_seqlens"
                raise ShapeError("cache_seqlens", f"{stop} after {first} of padding", wanted, "Correct them.")
            if stop + more > self.capacity:
                got = f"{stop} tokens and {more} new ones in sequence {b}"
                if self.named is None:
                    raise ShapeError("cache_seqlens", got, f"at most {self.capacity}", "Allocate a longer cache.")
                wanted = f"at most {self.capacity}, the tokens of its columns"
                raise PageError(self.named, got, wanted, "Allocate more columns.")
        if self.named is not None:
            used = torch.tensor([self.stop[b] + new[b] for b in range(len(new))], device="cpu")
            columns = torch.arange(self.table.shape[1], device="cpu") * self.k.shape[1] < used[:, None]
            numbers = self.table.cpu()[columns]
            wrong = numbers[(numbers < 0) | (numbers >= len(self.k))]
            if len(wrong):
                raise ShapeError(self.named, int(wrong[0]), f"page numbers from 0 to {len(self.k) - 1}", "Correct it.")

    def check_writable(self) -> None:
        """Raise ShapeError unless both tensors take writes, before one of them is written."""
        for name, x in (("k_cache", self.k), ("v_cache", self.v)):
            if x.is_inference() and not torch.is_inference_mode_enabled():
                remedy = "Make the cache outside of inference mode, or call in it."
                raise ShapeError(name, "an inference tensor", "one that may be written here", remedy)
            if 0 in x.stride() and any(size > 1 and not step for size, step in zip(x.shape, x.stride(), strict=True)):
                raise ShapeError(name, "an expanded tensor", "one with its own memory", "Call .contiguous() once.")

    def write(self, new: New, k: Tensor) -> None:
        """Append new tokens in place, with their keys as they are stored."""
        place, page = torch.tensor(self.stop, device=k.device)[new.sequence] + new.step, self.k.shape[1]
        pages, place = self.table[new.sequence, place // page].long(), place % page
        for into, x in ((self.k, k), (self.v, new.v)):
            shared = into.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
            into.index_put_((pages, place), x.clone() if shared else x)
        self.stop = [stop + more for stop, more in zip(self.stop, new.sizes, strict=True)]

    def tokens(self, b: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of a sequence, (n, Hkv, D): views of a row, or a copy of pages."""
        inside = slice(self.first[b], self.stop[b])
        if self.named is None:
            row = int(self.table[b, 0])
            return self.k[row, inside], self.v[row, inside]
        numbers = self.table[b, : -(-self.stop[b] // self.k.shape[1])].long()
        return self.k[numbers].flatten(0, 1)[inside], self.v[numbers].flatten(0, 1)[inside]

    def together(self) -> tuple[Tensor, Tensor] | None:
        """Return keys and values of all sequences as views of the rows; None if their lengths or places differ."""
        sequences = len(self.table)
        same = self.named is None and len({*self.first}) == len({*self.stop}) == 1
        if not same or self.table.flatten().tolist() != list(range(sequences)):
            return None
        inside = slice(self.first[0], self.stop[0])
        return self.k[:sequences, inside], self.v[:sequences, inside]

    def paged(self, chosen: slice) -> PagedCache | None:
        """Return some sequences as a cache that reads the same pages; None if pages have to be copied."""
        if any(self.first[chosen]):
            return None
        views = _small_pages(self.k, self.v)
        if views is None:
            return None
        k, v, step, parts = views
        table = self.table[chosen].int()
        if step > 1 or parts > 1:
            table = (table[:, :, None] * step + torch.arange(parts, dtype=torch.int32, device=table.device)).flatten(1)
        lengths = torch.tensor(self.stop[chosen], dtype=torch.int32, device=k.device)
        return PagedCache(k.transpose(1, 2), v.transpose(1, 2), table.contiguous(), lengths)


def _small_pages(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, int, int] | None:
    """View pages of any size as pages of a size that kernels read.

    Returns:
        k and v in smaller pages, the number of them between the beginnings of two pages, and the number in a page;
        None if a page cannot be viewed so.
    """
    page = k.shape[1]
    size = max((each for each in SIZES if page % each == 0), default=0)
    if not size or k.stride(3) != 1 or v.stride(3) != 1:
        return None
    parts = page // size
    if parts == 1:
        return k, v, 1, 1
    steps = []
    for x in (k, v):
        step, rest = divmod(x.stride(0), size * x.stride(1)) if x.stride(1) else (0, 1)
        if rest or step < parts:
            return None
        steps.append(step)
    if steps[0] != steps[1]:
        return None
    count = (len(k) - 1) * steps[0] + parts
    small = [x.as_strided((count, size, *x.shape[2:]), (size * x.stride(1), *x.stride()[1:])) for x in (k, v)]
    return small[0], small[1], steps[0], parts


def attend_cache(q: Tensor, cache: Cache, options: Options) -> Result:
    """Compute attention of queries (B, Nq, H, D) over stored sequences; their last query is at their last key."""
    together = cache.together()
    if together is not None:
        return attend((q, *together), options)
    enough = all(stop >= q.shape[1] or not stop for stop in cache.stop)
    if options.shared and enough and q.numel():
        pages = cache.paged(slice(None))
        if pages is not None:
            return _attend_pages(q, pages, options)
    parts = [_attend_sequence(q[b : b + 1], cache, b, options.of_sequence(b)) for b in range(len(q))]
    return Result(torch.cat([part.out for part in parts]), joined(parts, 0))


def _attend_sequence(q: Tensor, cache: Cache, b: int, options: Options) -> Result:
    """Compute attention of the queries (1, Nq, H, D) of one sequence."""
    if q.numel() and cache.stop[b] >= q.shape[1]:
        pages = cache.paged(slice(b, b + 1))
        if pages is not None:
            return _attend_pages(q, pages, options)
    k, v = cache.tokens(b)
    return attend((q, k[None], v[None]), options)


def attend_packed_cache(q: Tensor, of_q: list[int], cache: Cache, options: Options) -> Result:
    """Compute attention of packed queries (tokens, H, D) with cumulative lengths over stored sequences."""
    sizes = [b - a for a, b in itertools.pairwise(of_q)]
    packed = q[: of_q[-1]]
    if len({*sizes}) == 1:
        out, lse = attend_cache(packed.unflatten(0, (len(sizes), sizes[0])), cache, options)
        out, lse = out.flatten(0, 1), None if lse is None else lse.transpose(0, 1).flatten(1)
    else:
        each = enumerate(packed.split(sizes))
        parts = [_attend_sequence(one[None], cache, b, options.of_sequence(b)) for b, one in each]
        joint = joined(parts, 2)
        out, lse = torch.cat([part.out[0] for part in parts]), None if joint is None else joint[0]
    return with_rest(Result(out, lse), len(q))


def _attend_pages(q: Tensor, pages: PagedCache, options: Options) -> Result:
    q = q.transpose(1, 2)
    out, lse = attend_pages(q, pages, options.pattern, options.scale, options.terms, with_lse=options.with_lse)
    return Result(out.transpose(1, 2).contiguous(), lse if options.with_lse else None)


def attend_and_append(
    q: Tensor, of_q: list[int] | None, cache: Cache, new: New | None, rotary: Rotary | None, starts: list[int],
    options: Options,
) -> Result:  # fmt: skip
    """Write new tokens into a cache, and compute attention of queries over it, without gradients.

    Args:
        q: (B, Nq, H, D), or packed with cumulative lengths, (tokens, H, D).
        of_q: These lengths, or None.
        cache: The cache.
        new: The new tokens, or None.
        rotary: The rotary embedding of queries and new keys, or None.
        starts: First rotary position of each sequence. In a call of all pairs, it is that of all its queries.
        options: Arguments besides the tokens.
    """
    with torch.no_grad():
        tokens = q.flatten(0, 1) if of_q is None else q[: of_q[-1]]
        if rotary is not None:
            sizes = [q.shape[1]] * len(q) if of_q is None else [b - a for a, b in itertools.pairwise(of_q)]
            sequence, step = numbered(sizes, q.device)
            steps = step * (not isinstance(options.pattern, Full))
            tokens = rotary.rotate(tokens, torch.tensor(starts, device=q.device)[sequence] + steps)
        if new is not None and len(new.k):
            keys = new.k
            if rotary is not None:
                keys = rotary.rotate(keys, torch.tensor(starts, device=keys.device)[new.sequence] + new.step)
            cache.write(new, keys)
        if of_q is None:
            return attend_cache(tokens.view(q.shape), cache, options)
        return with_rest(attend_packed_cache(tokens, of_q, cache, options), len(q))


def whole_numbers(name: str, value: int | Tensor | None, default: int, count: int) -> list[int]:
    """Return an argument with one whole number for each sequence: an int, an integer tensor (B,), or None."""
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return [default if value is None else value] * count
    if not isinstance(value, Tensor) or value.dtype not in INTEGERS or value.shape != (count,):
        raise ShapeError(name, shown(value), f"an int or an int32 tensor ({count},)", "Pass one for each sequence.")
    listed: list[int] = value.tolist()
    return listed


def new_tokens(
    k: Tensor | None, v: Tensor | None, cache: Cache, bounds: Tensor | None, rotary: Rotary | None, known: bool
) -> New | None:
    """Check the new keys and values of a call, (B, n, Hkv, D), or packed with ``bounds``; None without any.

    ``known`` tells whether the caller gave the lengths of the sequences.
    """
    if k is None or v is None:
        if k is not v:
            raise ShapeError("k, v", "one of the two", "both or neither", "Pass new keys with their values.")
        if rotary is not None:
            remedy = "Rotate q before the call."
            raise ShapeError("rotary_cos", "tables without new keys", "new keys, k and v", remedy)
        cache.check_room([0] * len(cache.table))
        return None
    if not known:
        remedy = "Pass the number of tokens that are stored already."
        raise ShapeError("cache_seqlens", None, "lengths, with new keys", remedy)
    count = len(cache.table)
    heads, dim, of_v = *cache.k.shape[2:], cache.v.shape[3]
    form: dict[str, Any] = {"B": count, "Hkv": heads, "D": dim, "Dv": of_v, "dtype": cache.k.dtype}
    form |= {"device": cache.k.device, "empty": ("B", "N"), "remedy": "Convert it to the form of the cache."}
    (_NEW if bounds is None else _NEW_PACKED).fit(k=k, v=v, **form)
    if bounds is None:
        new = New.of(k.flatten(0, 1), v.flatten(0, 1), [k.shape[1]] * count)
    else:
        stops = checked_bounds((bounds, bounds), (len(k), len(k)))[0]
        new = New.of(k[: stops[-1]], v[: stops[-1]], [b - a for a, b in itertools.pairwise(stops)])
    cache.check_room(new.sizes)
    cache.check_writable()
    return new
