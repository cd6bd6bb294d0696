"""Choose from queries and keys which key blocks each query block attends, as a table of block indices.

Every method scores query blocks against key blocks, a chunk of block rows at a time, and keeps the best blocks. Scores
are freed after each chunk, so memory holds the chosen indices and one chunk of scores. Nothing is read back from a
device, and no shape depends on a value, with one exception: with ``mass`` on a CPU, the width of the lists does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..checks import block_sides, flag, number, one_of, whole
from ..errors import PatternError, ShapeError, shown
from ..patterns import BlockTable, Documents, Pattern, Selected
from ..patterns.block_sets import ListedBlocks
from ..relation.node import ELEMENT, ELEMENT_BITS
from ..types import acc_dtype
from ..validate import check_tensors
from .pooling import KeyBounds, block_means, by_block, largest, least
from .ranking import Scored, choose

METHODS = ("mean", "antidiagonal", "top_p", "bounds")
# the methods that read an option
_METHODS_OF = {"stride": ("antidiagonal",), "pool": ("mean", "top_p"), "bounds": ("bounds",)}
HEADS = ("query", "kv", "shared")


@dataclass(frozen=True)
class BlockGrid:
    """A grid of query blocks by key blocks, with the blocks that must be chosen and those that may be."""

    nq: int
    nk: int
    sides: tuple[int, int]  # tokens of a query block and of a key block
    q_offset: int
    causal: bool  # leaves out key blocks that begin after the last query of a query block
    local: int  # number of forced key blocks up to and including the query's block; on both sides if not causal
    sinks: int  # number of forced key blocks at the beginning

    @property
    def columns(self) -> int:
        """Number of key blocks."""
        return -(-self.nk // self.sides[1])

    @property
    def one_row(self) -> bool:
        """Whether all queries form one block row, regardless of block boundaries."""
        return self.nq <= self.sides[0]

    @property
    def front(self) -> int:
        """Number of block rows before the row of the first query."""
        return 0 if self.one_row else self.q_offset // self.sides[0]

    @property
    def rows(self) -> int:
        """Number of block rows that contain queries."""
        return 1 if self.one_row else -(-(self.q_offset + self.nq) // self.sides[0]) - self.front

    @property
    def first(self) -> int:
        """Number of queries in the first block row."""
        return self.nq if self.one_row else min(self.nq, (self.front + 1) * self.sides[0] - self.q_offset)

    @property
    def cut(self) -> int:
        """Number of positions of the first block row that precede the first query."""
        return 0 if self.one_row else self.q_offset - self.front * self.sides[0]

    def queries(self, rows: range) -> tuple[int, int]:
        """Return the range [begin, end) of queries in these block rows."""
        begin = 0 if rows.start == 0 else self.first + (rows.start - 1) * self.sides[0]
        return begin, min(self.nq, self.first + (rows.stop - 1) * self.sides[0])

    def reach(self, rows: range) -> int:
        """Return the number of leading key blocks that contain every block these rows may attend."""
        if not self.causal:
            return self.columns
        last = self.q_offset + self.queries(rows)[1] - 1
        return min(self.columns, last // self.sides[1] + 1)

    def marks(self, rows: range, columns: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Return three bool masks (rows, columns): allowed blocks, forced blocks, and blocks that hold later keys."""
        row = torch.arange(rows.start, rows.stop, device=device)[:, None]
        begin = torch.where(row == 0, 0, self.first + (row - 1) * self.sides[0]) + self.q_offset
        end = (self.first + row * self.sides[0]).clamp(max=self.nq) + self.q_offset
        # key blocks that contain the positions of each row's first and last query
        first, last = begin // self.sides[1], (end - 1) // self.sides[1]
        column = torch.arange(columns, device=device)
        may = column <= last if self.causal else torch.ones_like(column <= last)
        forced = (column < self.sinks).expand_as(may)
        if self.local:
            forced = forced | ((column > first - self.local) & (column < last + self.local))
        later = (column + 1) * self.sides[1] > end if self.causal else ~may
        return may, forced & may, later

    def forced(self) -> int:
        """Return an upper bound on the number of forced blocks in a row."""
        rows, columns = self.sides
        if self.one_row:
            crossed = (self.q_offset + self.nq - 1) // columns - self.q_offset // columns + 1
        else:
            crossed = -(-rows // columns) + (rows % columns != 0 and columns % rows != 0)
        near = (crossed + (self.local - 1) * (1 if self.causal else 2)) if self.local else 0
        return min(self.columns, self.sinks + near)


@dataclass(frozen=True)
class Amount:
    """The number of blocks to choose in a row: a count, a share of the allowed blocks, or a target attention mass."""

    top_k: int | None
    mass: float | None
    density: float | None

    def places(self, grid: BlockGrid) -> int:
        """Return an upper bound on the number of blocks chosen in a row."""
        if self.density is not None:
            return max(min(grid.columns, math.ceil(self.density * grid.columns - 1e-9)), grid.forced())
        return grid.columns if self.top_k is None else min(grid.columns, self.top_k)


#: Function (rows, columns): scores of these block rows against the first `columns` key blocks, (B, Hq, rows, columns).
Score = Callable[[range, int], Tensor]


def select(
    q: Tensor,
    k: Tensor,
    *,
    method: str = "mean",
    top_k: int | None = None,
    mass: float | None = None,
    density: float | None = None,
    block_size: int | tuple[int, int] = 128,
    causal: bool = True,
    local: int = 1,
    sinks: int = 1,
    heads: str = "query",
    q_offset: int = 0,
    scale: float | None = None,
    stride: int | None = None,
    pool: int | None = None,
    bounds: KeyBounds | None = None,
    documents: Documents | None = None,
) -> Pattern:
    """Choose the key blocks that each query block attends, from the values of queries and keys; no gradient.

    With ``causal``, the table leaves out blocks that lie wholly in the future, but it does not mask single tokens: use
    ``select(...) & rw.Causal()`` as the pattern. All queries of a block share one choice, so the choice for an early
    query depends on later tokens of its block. Those tokens are known in training and teacher forcing, but not in
    decoding. With blocks of one query, ``block_size=(1, n)``, no choice depends on a later token, and training and
    decoding choose the same blocks. Of blocks with equal scores the earlier is chosen.

    Each method scores a query block against a key block:

    - ``"mean"``: the product of the two block means (MoBA, with query blocks of 1). With ``pool``, the block's share of
      a softmax over products of pool means (NSA sums such shares): more precise, at 1 / (2 pool^2) of the cost of dense
      attention.
    - ``"antidiagonal"``: the block's share of a softmax over score sums along antidiagonals of ``stride`` tokens
      (XAttention), at 1 / (2 stride) of the cost of dense attention.
    - ``"top_p"``: the scores of ``"mean"``; a row gets the fewest blocks whose softmax sums to ``mass``, 0.9 unless
      ``density`` is given (FlexPrefill).
    - ``"bounds"``: an upper bound on the score of any query with any key of the block, from the minimum and maximum of
      every key channel (Quest); meant for decoding.

    Args:
        q: Queries, (B, Hq, Nq, D).
        k: Keys, (B, Hkv, Nk, D).
        method: One of the above.
        top_k: Number of blocks in a row, including the forced ones; together with ``mass``, the maximum.
        mass: Share of the estimated attention that the blocks of a row must hold; the number of blocks varies by row.
        density: Share of the blocks that a row may attend, rounded up.
        block_size: Tokens per block, or (query side, key side).
        causal: Whether to leave out blocks that lie wholly in a row's future.
        local: Number of nearest blocks that are always chosen: the blocks at the row's positions and local - 1 before
            them (and after them, if not causal). 0 forces none.
        sinks: Number of blocks at the beginning that are always chosen.
        heads: ``"query"`` for one table per query head, ``"kv"`` for one per key head, ``"shared"`` for a single table.
            The last two average the softmax over a row's blocks over the heads that share a table.
        q_offset: Position of the first query. Blocks are counted from position 0; queries that fit in one block form
            one row even if they cross a block boundary.
        scale: Factor of the scores; 1 / sqrt(D) by default.
        stride: Tokens of an antidiagonal, for ``"antidiagonal"``; must divide both sides of a block. 16 by default.
        pool: Tokens of a pool, for ``"mean"`` and ``"top_p"``; must divide both sides of a block. None uses the mean of
            the whole block.
        bounds: Key bounds that the caller maintains, for ``"bounds"``; ``k`` is then not read.
        documents: Documents that share the sequence. Each chooses as it would alone, with blocks from its first token
            on, and attends no other one. Their bounds are read.
    Returns:
        With ``documents``, lists of blocks for each query (:class:`ringweave.Selected`) in the documents. Else a table
        of indices, (B, Hq, Hkv or 1 by ``heads``, block rows, places). With several rows and a ``q_offset``,
        the rows before the first query are empty.
    Raises:
        PatternError: Not exactly one of ``top_k``, ``mass`` and ``density`` is given, ``top_k`` is less than the number
            of forced blocks, a stride or pool does not divide the block, an option of another method is given, or
            ``documents`` are combined with ``q_offset`` or ``bounds``, or one has more queries than keys.
        ShapeError: q and k do not fit each other, or the bounds do not fit the keys.
    Example:
        >>> table = rw.adaptive.select(q, k, density=0.25, block_size=32)
        >>> rw.attention(q, k, v, table & rw.Causal()).shape
        torch.Size([1, 4, 256, 32])

    References:
        Lu et al. (2025), MoBA. Xu et al. (2025), XAttention. Lai et al. (2025), FlexPrefill (which applies the mass to
        all rows together; this function applies it to each row). Tang et al. (2024), Quest. Yuan et al. (2025), NSA,
        section 3.3.2.
    """
    check_tensors(q, k, k)
    one_of("method", method, METHODS)
    one_of("heads", heads, HEADS)
    for name, value in (("stride", stride), ("pool", pool), ("bounds", bounds)):
        if value is not None and method not in _METHODS_OF[name]:
            wanted = f"None with method {method!r}"
            raise PatternError(name, shown(value), wanted, f"Use it with {' or '.join(map(repr, _METHODS_OF[name]))}.")
    q, k = q.detach(), k.detach()
    choice = _Choice(method, top_k, mass, density, block_size, causal, local, sinks, heads, scale, stride, pool)
    if documents is None:
        return choice.table(q, k, q_offset, bounds)
    if bounds is not None or q_offset:
        got = f"bounds and q_offset={shown(q_offset)}" if bounds is not None else f"q_offset={shown(q_offset)}"
        raise PatternError(
            "documents", f"documents with {got}", "whole documents", "Choose for one document at a time."
        )
    return _in_documents(choice, q, k, documents)


def _in_documents(choice: _Choice, q: Tensor, k: Tensor, documents: Documents) -> Pattern:
    """Choose blocks in each document alone, and list them for each of its queries."""
    if not isinstance(documents, Documents):
        raise PatternError("documents", shown(documents), "rw.Documents", "Pass rw.Documents(lengths).")
    documents.fits(q.shape[2], k.shape[2], 0)
    spans = documents.spans()
    longer = [f"{m} queries and {n} keys" for m, n in zip(*spans.lengths(), strict=True) if m > n]
    if longer:
        raise PatternError("documents", f"one of {longer[0]}", "no more queries than keys", "Leave its keys in.")
    found = list[tuple[slice, slice, Tensor]]()
    sides = (1, 1)
    for first, stop, k_first, k_stop in zip(spans.q_first, spans.q_stop, spans.k_first, spans.k_stop, strict=True):
        b, begin, keys = int(first) >> ELEMENT_BITS, int(first) & (ELEMENT - 1), int(k_first) & (ELEMENT - 1)
        count, length = int(stop - first), int(k_stop - k_first)
        if not count:
            continue  # a document without queries
        rows, places = slice(None) if spans.one else slice(b, b + 1), slice(begin, begin + count)
        table = choice.table(q[rows, :, places], k[rows, :, keys : keys + length], length - count)
        sides, listed = table.block_size, table.blocks.listed()
        of_query = (torch.arange(count, device=q.device) + (length - count)) // sides[0]
        listed = (
            listed.index_select(-2, of_query) if listed.shape[-2] > 1 else listed.expand(*listed.shape[:-2], count, -1)
        )
        found.append((rows, places, listed.masked_fill(listed >= table.blocks.key_blocks, -1)))
    most = max((each.shape[-1] for _, _, each in found), default=1)
    tables = found[0][2].shape[1] if found else 1
    lists = torch.full((q.shape[0], tables, q.shape[2], most), -1, dtype=torch.int32, device=q.device)
    for rows, places, each in found:
        lists[rows, :, places, : each.shape[-1]] = each
    return Selected(lists, sides[1], heads="kv" if choice.heads == "kv" else "query").within(documents)


@dataclass(frozen=True)
class _Choice:
    """The arguments of :func:`select` besides tensors and positions."""

    method: str
    top_k: int | None
    mass: float | None
    density: float | None
    block_size: int | tuple[int, int]
    causal: bool
    local: int
    sinks: int
    heads: str
    scale: float | None
    stride: int | None
    pool: int | None

    def table(self, q: Tensor, k: Tensor, q_offset: int, bounds: KeyBounds | None = None) -> BlockTable:
        """Choose blocks of one sequence."""
        grid = grid_of(q, k, self.block_size, q_offset, self.causal, self.local, self.sinks)
        amount = amount_of(self.method, self.top_k, self.mass, self.density, grid)
        scale = q.shape[3] ** -0.5 if self.scale is None else number("scale", self.scale)
        # in half precision other blocks would win
        with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
            if self.method == "antidiagonal":
                score, width = _antidiagonals(q, k, grid, scale, 16 if self.stride is None else self.stride)
            elif self.method == "bounds":
                score, width = _bounds(q, k, grid, scale, bounds)
            else:
                score, width = _means(q, k, grid, scale, self.pool)
            groups = {"query": 0, "kv": k.shape[1], "shared": 1}[self.heads]
            is_mass = self.method == "antidiagonal" or self.pool is not None
            return top_blocks(score, grid, amount, width, groups, q, is_mass)


def top_blocks(
    score: Score,
    grid: BlockGrid,
    amount: Amount,
    width: int,
    groups: int,
    q: Tensor,
    is_mass: bool,
) -> BlockTable:
    """Return the table of the best-scored blocks for queries ``q``; a block row of a head takes ``width`` numbers.

    Each of ``groups`` groups of heads shares a table; 0 gives every query head a separate table. With ``is_mass``, the
    scores are already shares of attention.
    """
    places, blocks = min(amount.places(grid), grid.reach(range(grid.rows))), grid.columns
    (batch, heads), device = q.shape[:2], q.device

    def scored(rows: range) -> Scored:
        columns = grid.reach(rows)
        may, forced, later = grid.marks(rows, columns, device)
        scores = score(rows, columns)
        if not is_mass:
            # a score covers all keys of a block; if some come after the row, it would leak the future into the choice
            scores = _cleaned(scores).masked_fill(later, -torch.inf)
            if groups or amount.mass is not None:
                scores = scores.softmax(-1)
        if groups:
            scores = scores.unflatten(1, (groups, -1)).mean(2)
        value, count, (most, fewest) = _cleaned(scores), None, (may.sum(-1), forced.sum(-1))
        if amount.mass is not None:
            order = value.masked_fill(forced, torch.inf).masked_fill(~may, -torch.inf)
            reached = scores.gather(-1, order.topk(min(places, columns), -1).indices).cumsum(-1)
            count = 1 + (reached[..., :-1] < amount.mass).sum(-1)
            count = torch.minimum(torch.maximum(count, fewest), most)
        elif amount.density is not None:
            count = torch.maximum((most * amount.density - 1e-9).ceil().long(), fewest)
        return Scored(value.to(acc_dtype(value.dtype)), may, forced, count)

    listed = choose(scored, places, rows=grid.rows, scores=batch * heads * width, device=device)
    # reading a value costs no synchronisation on a CPU, so its lists can be cut to the longest
    if amount.mass is not None and device.type == "cpu" and not torch.compiler.is_compiling():
        listed = listed[..., : int((listed >= 0).sum(-1).max())]
    listed = listed.masked_fill(listed < 0, blocks)
    if grid.front:
        listed = torch.nn.functional.pad(listed, (0, 0, grid.front, 0), value=blocks)
    group = heads // groups if groups > 1 else 1
    return BlockTable.of(ListedBlocks(listed.contiguous(), blocks), grid.sides, group)


def _cleaned(scores: Tensor) -> Tensor:
    """Make scores finite: infinite values are reserved for blocks that are forced or not allowed."""
    most = torch.finfo(scores.dtype).max
    return scores.nan_to_num(nan=-most, posinf=most, neginf=-most)


def grid_of(
    q: Tensor, k: Tensor, block_size: object, q_offset: object, causal: object, local: object, sinks: object
) -> BlockGrid:
    """Validate the arguments of a grid and build it.

    Raises:
        PatternError: block_size, causal, local or sinks is invalid.
        ShapeError: q_offset is not a position.
    """
    return BlockGrid(
        q.shape[2],
        k.shape[2],
        block_sides(block_size),
        whole("q_offset", q_offset, 0, error=ShapeError),
        flag("causal", causal),
        whole("local", local, 0),
        whole("sinks", sinks, 0),
    )


def amount_of(method: str, top_k: object, mass: object, density: object, grid: BlockGrid) -> Amount:
    """Validate ``top_k``, ``mass`` and ``density``, and combine them.

    Raises:
        PatternError: Not exactly one of them is given (apart from top_k with mass), or a row has fewer blocks than are
            forced.
    """
    if method == "top_p" and mass is None and density is None:
        mass = 0.9
    named = [name for name, value in (("top_k", top_k), ("mass", mass), ("density", density)) if value is not None]
    if named not in (["top_k"], ["mass"], ["density"], ["top_k", "mass"]):
        got = " and ".join(named) or "none of them"
        wanted = "exactly one of them (top_k may limit mass)"
        raise PatternError("top_k, mass, density", got, wanted, "Set the number of blocks in a row.")
    if mass is not None and method == "bounds":
        raise PatternError("mass", shown(mass), "no mass with 'bounds', which does not estimate it", "Pass top_k.")
    most = None if top_k is None else whole("top_k", top_k, 1)
    if most is not None and most < min(grid.forced(), grid.columns):
        raise PatternError(
            "top_k",
            most,
            f"at least {grid.forced()}: local={grid.local} and sinks={grid.sinks} are always chosen",
            "Raise top_k, or lower local or sinks.",
        )
    return Amount(
        most,
        None if mass is None else number("mass", mass, 1e-6, 1.0),
        None if density is None else number("density", density, 1e-9, 1.0),
    )


def products(q: Tensor, k: Tensor) -> Tensor:
    """Multiply the rows of each query head with the rows of its key head: (B, Hq, rows, columns)."""
    q_rows = q.unflatten(1, (k.shape[1], -1)).flatten(2, 3)
    if k.device.type == "cpu" and k.dtype.itemsize == 2 and len(k) and not torch.compiler.is_compiling():
        # A CPU's batched 16-bit product copies all keys if they are a slice. The keys of one head are contiguous, so
        # multiply head by head.
        pairs = zip(q_rows.flatten(0, 1), k.flatten(0, 1), strict=True)
        product = torch.stack([each @ keys.mT for each, keys in pairs]).unflatten(0, k.shape[:2])
    else:
        product = q_rows @ k.mT
    by_head: Tensor = product.unflatten(2, (-1, q.shape[2])).flatten(1, 2)
    return by_head


def _means(q: Tensor, k: Tensor, grid: BlockGrid, scale: float, pool: object) -> tuple[Score, int]:
    """Return a scorer by block means (with a pool: by a softmax over pool means) and its numbers per block row."""
    if pool is None:
        queries = block_means(q, grid.sides[0], first=grid.first) * scale
        keys = block_means(k, grid.sides[1])
        return lambda rows, columns: products(queries[:, :, rows.start : rows.stop], keys[:, :, :columns]), grid.columns
    pool = part_of("pool", pool, grid)
    front, per = grid.cut, grid.sides[0] // pool
    queries = block_means(q, pool, first=min(grid.nq, pool - front % pool)) * scale
    queries = _padded(queries, front // pool, grid.rows * per - front // pool - queries.shape[2])
    keys = block_means(k, pool)
    keys = _padded(keys, 0, -keys.shape[2] % (grid.sides[1] // pool))
    return _shares(lambda rows: queries[:, :, rows.start * per : rows.stop * per], keys, grid, pool)


def _shares(queries: Callable[[range], Tensor], keys: Tensor, grid: BlockGrid, pool: int) -> tuple[Score, int]:
    """Return a scorer by softmax over key pools, summed over a block's pools and averaged over its query pools.

    ``queries`` maps block rows to their scaled pooled queries, (B, Hq, pools, C); ``keys`` are (B, Hkv, pools, C). Both
    are padded to whole blocks. Also returns the scorer's numbers per block row and head.
    """
    mine, others = grid.sides[0] // pool, grid.sides[1] // pool
    # positions of the first block row's first pool, and of the first query
    start, begin = grid.q_offset - grid.cut, grid.q_offset
    most = torch.finfo(keys.dtype).max

    def score(rows: range, columns: int) -> Tensor:
        product = products(queries(rows), keys[:, :, : columns * others])
        # NaN or infinite products become finite: -inf is reserved for masked pairs
        product.nan_to_num_(nan=-most, posinf=most, neginf=-most)
        first = start + torch.arange(rows.start * mine, rows.stop * mine, device=keys.device)[:, None] * pool
        key = torch.arange(columns * others, device=keys.device) * pool
        if grid.causal:
            # columns before the first query position of these rows need no causal mask
            past = min(max(0, (start + rows.start * grid.sides[0]) // pool), columns * others)
            limit = (first + pool).clamp(max=begin + grid.nq)
            product[..., past:].masked_fill_(key[past:] >= limit, -torch.inf)
        if columns * grid.sides[1] > grid.nk:
            product.masked_fill_(key >= grid.nk, -torch.inf)
        weights = product.softmax(-1).unflatten(2, (-1, mine))
        lacking = (first + pool <= begin) | (first >= begin + grid.nq)
        pools = mine - lacking.view(-1, mine, 1).sum(1)
        if grid.cut or len(rows) * mine * pool + rows.start * grid.sides[0] > grid.cut + grid.nq:
            weights = weights.masked_fill(lacking.view(-1, mine, 1), 0)
        share: Tensor = (weights.sum(3) / pools).unflatten(3, (-1, others)).sum(4)
        return share

    return score, mine * others * grid.columns


def _bounds(q: Tensor, k: Tensor, grid: BlockGrid, scale: float, bounds: KeyBounds | None) -> tuple[Score, int]:
    if bounds is None:
        low, high = by_block(k, grid.sides[1], least), by_block(k, grid.sides[1], largest)
    else:
        batch, heads, _, dim = bounds.low.shape
        keys = batch, heads, bounds.length, dim
        if (bounds.block_size, keys) != (grid.sides[1], tuple(k.shape)):
            got = f"keys {keys} in blocks of {bounds.block_size}"
            wanted = f"{tuple(k.shape)} in blocks of {grid.sides[1]}, to match k"
            raise ShapeError("bounds", got, wanted, "Append every key once.")
        low, high = bounds.low, bounds.high
    acc = acc_dtype(q.dtype)

    def score(rows: range, columns: int) -> Tensor:
        begin, end = grid.queries(rows)
        part = q[:, :, begin:end].to(acc) * scale
        most = products(part.clamp(min=0), high[:, :, :columns].to(acc))
        most += products(part.clamp(max=0), low[:, :, :columns].to(acc))
        first = grid.first if rows.start == 0 else grid.sides[0]
        return by_block(most, grid.sides[0], largest, first)

    return score, grid.sides[0] * grid.columns


def _padded(x: Tensor, before: int, after: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, 0, before, after)) if before or after else x


def _antidiagonals(q: Tensor, k: Tensor, grid: BlockGrid, scale: float, stride: object) -> tuple[Score, int]:
    stride = part_of("stride", stride, grid)
    # With keys in token order and queries reversed, the product of two rows of `stride` tokens sums an antidiagonal.
    keys = _padded(k, 0, -k.shape[2] % grid.sides[1]).unflatten(2, (-1, stride)).flatten(3)

    def queries(rows: range) -> Tensor:
        begin, end = grid.queries(rows)
        head = grid.cut if rows.start == 0 else 0
        part = _padded(q[:, :, begin:end], head, len(rows) * grid.sides[0] - (end - begin) - head)
        rows_of_tokens: Tensor = part.unflatten(2, (-1, stride)).flip(3).flatten(3) * (scale / stride)
        return rows_of_tokens

    return _shares(queries, keys, grid, stride)


def part_of(name: str, tokens: object, grid: BlockGrid) -> int:
    """Validate the number of tokens in a part of a block: a pool or a stride.

    Raises:
        PatternError: It does not divide both sides of the block.
    """
    count = whole(name, tokens, 1)
    if grid.sides[0] % count or grid.sides[1] % count:
        raise PatternError(
            name, count, f"a divisor of both sides of block_size={grid.sides}", "Pass a power of two below both."
        )
    return count
