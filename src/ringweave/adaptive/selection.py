"""Which blocks of keys each block of queries should attend, found from queries and keys: tables by indices.

Every method scores query blocks against key blocks, some rows of blocks at a time, and keeps the best; no score
outlives its rows, so memory is what is chosen and one chunk. Nothing is read back from a device, and no shape depends
on a value (but where a CPU may look: the width of a list that a mass decides).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import PatternError, ShapeError, message, shown
from ..patterns import BlockTable
from ..patterns.block_sets import ListedBlocks
from ..patterns.validate import flag, number, one_of, whole
from ..types import acc_dtype
from ..validate import check_tensors
from .pooling import KeyBounds, block_means, by_block, largest, least

METHODS = ("mean", "antidiagonal", "top_p", "bounds")
_POOLED = ("mean", "top_p")
HEADS = ("query", "kv", "shared")
# bytes of scores at a time: in a processor's cache, or a bounded part of a GPU's memory
_CHUNK, _CHUNK_ELSEWHERE = 2**22, 2**28


@dataclass(frozen=True)
class Grid:
    """Blocks of queries by blocks of keys, and which of them have to or may be chosen.

    Attributes:
        nq: Queries, at positions q_offset and after.
        nk: Keys.
        sides: Tokens of a block of queries and of keys.
        q_offset: Position of the first query.
        causal: Whether blocks wholly after a block's last query are left out.
        local: Blocks of keys that end with the query's own; to both sides where not causal.
        sinks: First blocks of keys.
    """

    nq: int
    nk: int
    sides: tuple[int, int]
    q_offset: int
    causal: bool
    local: int
    sinks: int

    @property
    def columns(self) -> int:
        """Count the blocks of keys."""
        return -(-self.nk // self.sides[1])

    @property
    def one_row(self) -> bool:
        """Tell whether all queries are one row of blocks, wherever blocks begin."""
        return self.nq <= self.sides[0]

    @property
    def front(self) -> int:
        """Count the rows of blocks before the first query's."""
        return 0 if self.one_row else self.q_offset // self.sides[0]

    @property
    def rows(self) -> int:
        """Count the rows of blocks that have queries."""
        return 1 if self.one_row else -(-(self.q_offset + self.nq) // self.sides[0]) - self.front

    @property
    def first(self) -> int:
        """Count the queries of the first row."""
        return self.nq if self.one_row else min(self.nq, (self.front + 1) * self.sides[0] - self.q_offset)

    @property
    def cut(self) -> int:
        """Count the tokens that the first row of blocks lacks before its first query."""
        return 0 if self.one_row else self.q_offset - self.front * self.sides[0]

    def queries(self, rows: range) -> tuple[int, int]:
        """Give the queries [begin, end) of some rows."""
        begin = 0 if rows.start == 0 else self.first + (rows.start - 1) * self.sides[0]
        return begin, min(self.nq, self.first + (rows.stop - 1) * self.sides[0])

    def reach(self, rows: range) -> int:
        """Count the blocks of keys from the first on that some rows may attend."""
        if not self.causal:
            return self.columns
        last = self.q_offset + self.queries(rows)[1] - 1
        return min(self.columns, last // self.sides[1] + 1)

    def marks(self, rows: range, columns: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Tell which blocks may be chosen, which have to be, and which hold later keys; bool (rows, columns)."""
        row = torch.arange(rows.start, rows.stop, device=device)[:, None]
        begin = torch.where(row == 0, 0, self.first + (row - 1) * self.sides[0]) + self.q_offset
        end = (self.first + row * self.sides[0]).clamp(max=self.nq) + self.q_offset
        # the key blocks where the first and the last query of each row stand
        first, last = begin // self.sides[1], (end - 1) // self.sides[1]
        column = torch.arange(columns, device=device)
        may = column <= last if self.causal else torch.ones_like(column <= last)
        forced = (column < self.sinks).expand_as(may)
        if self.local:
            forced = forced | ((column > first - self.local) & (column < last + self.local))
        later = (column + 1) * self.sides[1] > end if self.causal else ~may
        return may, forced & may, later

    def forced(self) -> int:
        """Bound how many blocks of a row have to be chosen."""
        rows, columns = self.sides
        if self.one_row:
            crossed = (self.q_offset + self.nq - 1) // columns - self.q_offset // columns + 1
        else:
            crossed = -(-rows // columns) + (rows % columns != 0 and columns % rows != 0)
        near = (crossed + (self.local - 1) * (1 if self.causal else 2)) if self.local else 0
        return min(self.columns, self.sinks + near)


@dataclass(frozen=True)
class Amount:
    """How many blocks of a row are chosen: a number, a share of those that may be, or as many as hold a mass."""

    top_k: int | None
    mass: float | None
    density: float | None

    def places(self, grid: Grid) -> int:
        """Bound how many are chosen of a row."""
        if self.density is not None:
            return max(min(grid.columns, math.ceil(self.density * grid.columns - 1e-9)), grid.forced())
        return grid.columns if self.top_k is None else min(grid.columns, self.top_k)


#: Scores some rows of blocks against the first columns of blocks: (B, Hq, rows, columns).
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
    stride: int = 16,
    pool: int | None = None,
    bounds: KeyBounds | None = None,
) -> BlockTable:
    """Choose the blocks of keys that each block of queries attends, by what queries and keys hold; no gradient.

    The table has no blocks in the future where causal, but says nothing of single tokens: attend
    ``select(...) & rw.Causal()``. The queries of a block choose together, so the choice of an early query depends on
    the later tokens of its block: training and teacher forcing see them, decoding cannot. Blocks of one query,
    ``block_size=(1, n)``, depend on no later token, and choose in training what they choose in decoding.

    Methods, each a score of a block of queries against one of keys:

    - ``"mean"``: the product of their means (MoBA, which has a block of queries of 1). With a ``pool``, their share of
      a softmax over the products of the pools' means (NSA sums such shares): finer, at 1 / (2 pool^2) of what dense
      attention costs.
    - ``"antidiagonal"``: their share of a softmax over sums of scores along antidiagonals, ``stride`` tokens long
      (XAttention): at 1 / (2 stride) of what dense attention costs.
    - ``"top_p"``: as ``"mean"``, and of its softmax as many blocks as hold ``mass``, 0.9 unless ``density`` is given
      (FlexPrefill).
    - ``"bounds"``: the largest score that any query could have with any key of the block, by the least and the largest
      of every channel (Quest): for decoding.

    Args:
        q: Queries, (B, Hq, Nq, D).
        k: Keys, (B, Hkv, Nk, D).
        method: One of the above.
        top_k: Blocks of a row, the forced ones included; beside ``mass`` the most.
        mass: Share of the estimated attention that a row's blocks hold: rows differ in how many they have.
        density: Share of the blocks that a row may attend, rounded up.
        block_size: Tokens in a block's side, or (query side, key side).
        causal: Whether blocks wholly in a row's future are left out.
        local: Blocks that are always chosen: those where the row's queries stand, and local - 1 before (where not
            causal, also after). 0: none.
        sinks: First blocks, which are always chosen.
        heads: A table for each ``"query"`` head, for each key head (``"kv"``) or one that is ``"shared"``: then the
            softmax over a row's blocks is averaged over the heads.
        q_offset: Position of the first query. Blocks are counted from position 0; queries that fit one block are one
            row, wherever they stand.
        scale: Factor of the scores; 1 / sqrt(D) by default.
        stride: Tokens of an antidiagonal; divides both sides of a block.
        pool: For ``"mean"`` and ``"top_p"``: tokens of a pool; divides both sides of a block. None: a block is one.
        bounds: Bounds of the keys, kept by the caller; then ``k`` is not read.
    Returns:
        The table, by indices: (B, Hq or 1, rows of blocks, places). Where several rows are asked for at a ``q_offset``,
        rows before it are empty.
    Raises:
        PatternError: Not one of ``top_k``, ``mass`` and ``density``, or fewer than are forced; a stride or a pool that
            divides no block.
        ShapeError: q and k do not fit each other, or bounds the keys.
    Example:
        >>> table = rw.adaptive.select(q, k, density=0.25, block_size=32)
        >>> rw.attention(q, k, v, table & rw.Causal()).shape
        torch.Size([1, 4, 256, 32])

    References:
        Lu et al. (2025), MoBA. Xu et al. (2025), XAttention. Lai et al. (2025), FlexPrefill; here of each row and not
        of all together. Tang et al. (2024), Quest. Yuan et al. (2025), NSA, section 3.3.2.
    """
    check_tensors(q, k, k)
    one_of("method", method, METHODS)
    one_of("heads", heads, HEADS)
    q, k = q.detach(), k.detach()
    grid = grid_of(q, k, block_size, q_offset, causal, local, sinks)
    amount = amount_of(method, top_k, mass, density, grid)
    scale = q.shape[3] ** -0.5 if scale is None else number("scale", scale)
    if pool is not None and method not in _POOLED:
        raise PatternError(message("pool", shown(pool), f"none with {method!r}", f"Use one of {_POOLED}."))
    with torch.no_grad():
        if method == "antidiagonal":
            score, width = _antidiagonals(q, k, grid, scale, stride)
        elif method == "bounds":
            score, width = _bounds(q, k, grid, scale, bounds)
        else:
            score, width = _means(q, k, grid, scale, pool)
        groups = {"query": 0, "kv": k.shape[1], "shared": 1}[heads]
        is_mass = method == "antidiagonal" or pool is not None
        return choose(score, grid, amount, chunk_rows(q, width), groups, q.shape[1], is_mass, q.device)


def choose(
    score: Score,
    grid: Grid,
    amount: Amount,
    step: int,
    groups: int,
    heads: int,
    is_mass: bool,
    device: torch.device,
) -> BlockTable:
    """Make the table of the best blocks, ``step`` rows at a time.

    Args:
        score: Scores rows of blocks.
        grid: Which blocks there are.
        amount: How many of them.
        step: Rows at a time.
        groups: Heads that get a table of their own; 0: all.
        heads: Query heads.
        is_mass: Whether scores are shares of attention already.
        device: Where they are.
    """
    places, width = amount.places(grid), grid.columns
    # a CPU may look how long its lists are
    short = amount.mass is not None and device.type == "cpu" and not torch.compiler.is_compiling()
    chunks = []
    for begin in range(0, grid.rows, step):
        rows = range(begin, min(begin + step, grid.rows))
        columns = grid.reach(rows)
        may, forced, later = grid.marks(rows, columns, device)
        scores = score(rows, columns)
        if not is_mass:
            # a block's score is of all its keys: where some come after the row, it would tell of the future
            scores = _cleaned(scores).masked_fill(later, -torch.inf)
            if groups or amount.mass is not None:
                scores = scores.softmax(-1)
        if groups:
            scores = scores.unflatten(1, (groups, -1)).mean(2)
        value = _cleaned(scores).masked_fill(forced, torch.inf).masked_fill(~may, -torch.inf)
        index = value.topk(min(places, columns), -1).indices
        most, fewest = may.sum(-1), forced.sum(-1)
        if amount.mass is not None:
            held = scores.gather(-1, index).cumsum(-1)
            count = 1 + (held[..., :-1] < amount.mass).sum(-1)
            count = torch.minimum(torch.maximum(count, fewest), most)
        elif amount.density is not None:
            count = torch.maximum((most * amount.density - 1e-9).ceil().long(), fewest)
        else:
            count = most.clamp(max=places)
        listed = torch.where(torch.arange(index.shape[-1], device=device) < count[..., None], index, width)
        if short:
            listed = listed[..., : int(count.max())]
        chunks.append(listed.int().sort(-1).values)
    places = max(chunk.shape[-1] for chunk in chunks)
    chunks = [torch.nn.functional.pad(chunk, (0, places - chunk.shape[-1]), value=width) for chunk in chunks]
    listed = chunks[0] if len(chunks) == 1 else torch.cat(chunks, -2)
    if grid.front:
        listed = torch.nn.functional.pad(listed, (0, 0, grid.front, 0), value=width)
    group = heads // groups if groups > 1 else 1
    return BlockTable.of(ListedBlocks(listed.contiguous(), width), grid.sides, group)


def _cleaned(scores: Tensor) -> Tensor:
    """Make scores finite: infinite ones are the marks of blocks that have to be chosen, or may not."""
    most = torch.finfo(scores.dtype).max
    return scores.nan_to_num(nan=-most, posinf=most, neginf=-most)


def chunk_rows(q: Tensor, width: int) -> int:
    """Bound the rows of blocks that are scored together, of ``width`` numbers a head each."""
    budget = _CHUNK if q.device.type == "cpu" else _CHUNK_ELSEWHERE
    return max(1, budget // (4 * q.shape[0] * q.shape[1] * width))


def grid_of(
    q: Tensor, k: Tensor, block_size: object, q_offset: object, causal: object, local: object, sinks: object
) -> Grid:
    """Check what makes a grid.

    Raises:
        PatternError: Sides, local or sinks that are no counts.
        ShapeError: A q_offset that is no position.
    """
    sides = block_size if isinstance(block_size, (tuple, list)) else (block_size, block_size)
    if len(sides) != 2:
        raise PatternError(message("block_size", shown(sides), "one side or two", "Pass (queries, keys)."))
    return Grid(
        q.shape[2],
        k.shape[2],
        (whole("block_size", sides[0], 1), whole("block_size", sides[1], 1)),
        whole("q_offset", q_offset, 0, error=ShapeError),
        flag("causal", causal),
        whole("local", local, 0),
        whole("sinks", sinks, 0),
    )


def amount_of(method: str, top_k: object, mass: object, density: object, grid: Grid) -> Amount:
    """Check how many blocks are asked for.

    Raises:
        PatternError: Not one way to say it, or fewer than are forced.
    """
    if method == "top_p" and mass is None and density is None:
        mass = 0.9
    given = [name for name, value in (("top_k", top_k), ("mass", mass), ("density", density)) if value is not None]
    if given not in (["top_k"], ["mass"], ["density"], ["top_k", "mass"]):
        got = " and ".join(given) or "none of them"
        wanted = "one of them (top_k beside mass bounds it)"
        raise PatternError(message("top_k, mass, density", got, wanted, "Say how many blocks a row gets."))
    if mass is not None and method == "bounds":
        raise PatternError(message("mass", shown(mass), "none with bounds, which estimate none", "Pass top_k."))
    most = None if top_k is None else whole("top_k", top_k, 1)
    if most is not None and most < min(grid.forced(), grid.columns):
        raise PatternError(
            message(
                "top_k",
                most,
                f"at least {grid.forced()}: local={grid.local} and sinks={grid.sinks} are always chosen",
                "Raise top_k, or lower local or sinks.",
            )
        )
    return Amount(
        most,
        None if mass is None else number("mass", mass, 1e-6, 1.0),
        None if density is None else number("density", density, 1e-9, 1.0),
    )


def products(q: Tensor, k: Tensor) -> Tensor:
    """Multiply rows of query heads with those of their key heads: (B, Hq, rows, columns)."""
    q_rows = q.unflatten(1, (k.shape[1], -1)).flatten(2, 3)
    if k.device.type == "cpu" and k.dtype.itemsize == 2 and len(k) and not torch.compiler.is_compiling():
        # of 16 bits a CPU's batched product copies all keys where some are left out; one head's lie side by side
        pairs = zip(q_rows.flatten(0, 1), k.flatten(0, 1), strict=True)
        product = torch.stack([each @ keys.mT for each, keys in pairs]).unflatten(0, k.shape[:2])
    else:
        product = q_rows @ k.mT
    by_head: Tensor = product.unflatten(2, (-1, q.shape[2])).flatten(1, 2)
    return by_head


def _means(q: Tensor, k: Tensor, grid: Grid, scale: float, pool: object) -> tuple[Score, int]:
    """Score blocks by their means, or by their share of a softmax over pools' means; and count a row's numbers."""
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


def _shares(queries: Callable[[range], Tensor], keys: Tensor, grid: Grid, pool: int) -> tuple[Score, int]:
    """Score blocks by the softmax over pools of keys, summed over a block's, averaged over the pools of its queries.

    Args:
        queries: Gives of some rows of blocks (B, Hq, pools, C), in whole blocks; scaled.
        keys: (B, Hkv, pools, C), in whole blocks.
        grid: Which blocks there are.
        pool: Tokens of a pool.
    """
    mine, others = grid.sides[0] // pool, grid.sides[1] // pool
    # positions of the first pool of a block of queries and of the queries themselves
    start, begin = grid.q_offset - grid.cut, grid.q_offset
    most = torch.finfo(keys.dtype).max

    def score(rows: range, columns: int) -> Tensor:
        product = products(queries(rows), keys[:, :, : columns * others])
        # a product that is none, or infinite, is an ordinary one: only marks are infinite
        product.nan_to_num_(nan=-most, posinf=most, neginf=-most)
        first = start + torch.arange(rows.start * mine, rows.stop * mine, device=keys.device)[:, None] * pool
        key = torch.arange(columns * others, device=keys.device) * pool
        if grid.causal:
            # of the columns that no row is before, nothing is in the future
            past = min(max(0, (start + rows.start * grid.sides[0]) // pool), columns * others)
            limit = (first + pool).clamp(max=begin + grid.nq)
            product[..., past:].masked_fill_(key[past:] >= limit, -torch.inf)
        if columns * grid.sides[1] > grid.nk:
            product.masked_fill_(key >= grid.nk, -torch.inf)
        weights = product.softmax(-1).unflatten(2, (-1, mine))
        lacking = (first + pool <= begin) | (first >= begin + grid.nq)
        held = mine - lacking.view(-1, mine, 1).sum(1)
        if grid.cut or len(rows) * mine * pool + rows.start * grid.sides[0] > grid.cut + grid.nq:
            weights = weights.masked_fill(lacking.view(-1, mine, 1), 0)
        share: Tensor = (weights.sum(3) / held).unflatten(3, (-1, others)).sum(4)
        return share

    return score, mine * others * grid.columns


def _bounds(q: Tensor, k: Tensor, grid: Grid, scale: float, bounds: KeyBounds | None) -> tuple[Score, int]:
    if bounds is None:
        low, high = by_block(k, grid.sides[1], least), by_block(k, grid.sides[1], largest)
    else:
        if bounds.block_size != grid.sides[1] or bounds.length != grid.nk or bounds.low.shape[1] != k.shape[1]:
            got = f"{bounds.length} tokens of {bounds.low.shape[1]} heads in blocks of {bounds.block_size}"
            wanted = f"{grid.nk} of {k.shape[1]} in blocks of {grid.sides[1]}, as k"
            raise ShapeError(message("bounds", got, wanted, "Append every key once."))
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


def _antidiagonals(q: Tensor, k: Tensor, grid: Grid, scale: float, stride: object) -> tuple[Score, int]:
    stride = part_of("stride", stride, grid)
    # keys in token order and queries against it: what their rows of `stride` tokens multiply to is an antidiagonal
    keys = _padded(k, 0, -k.shape[2] % grid.sides[1]).unflatten(2, (-1, stride)).flatten(3)

    def queries(rows: range) -> Tensor:
        begin, end = grid.queries(rows)
        head = grid.cut if rows.start == 0 else 0
        part = _padded(q[:, :, begin:end], head, len(rows) * grid.sides[0] - (end - begin) - head)
        rows_of_tokens: Tensor = part.unflatten(2, (-1, stride)).flip(3).flatten(3) * (scale / stride)
        return rows_of_tokens

    return _shares(queries, keys, grid, stride)


def part_of(name: str, tokens: object, grid: Grid) -> int:
    """Check how many tokens a part of a block has.

    Raises:
        PatternError: Not a divisor of both sides.
    """
    count = whole(name, tokens, 1)
    if grid.sides[0] % count or grid.sides[1] % count:
        raise PatternError(message(name, count, f"a divisor of {grid.sides}", "Pass a power of two below both."))
    return count
