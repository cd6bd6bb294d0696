"""Masks of transformers as patterns: the mask function, and the objects that carry a pattern through a model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol, Self

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from transformers.masking_utils import causal_mask_function

from ...errors import PatternError, ShapeError, UnsupportedError, in_a_line, message, warn_once
from ...patterns import Documents, KeyPadding, Pattern, Selected
from ...patterns.base import parts_of
from ...trace.graph import UntraceableError
from .mask_reading import read, read_sharded
from .packing import positions_of_the_call
from .positions import Positions, joined

if TYPE_CHECKING:
    from ...parallel import ContextParallel

# errors of a mask function without a pattern, also of one with more operators than a pattern may have
_UNREAD = (UntraceableError, PatternError)

#: Attribute of the values of a mask that a model has restricted: the mask.
ORIGIN = "_ringweave_origin"


class _Carried:
    """An object that a model passes on as a mask; using its values raises a typed error."""

    sizes: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the mask."""
        return self.sizes

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.sizes)

    def dim(self) -> int:
        """Return the number of dimensions."""
        return len(self.sizes)

    def size(self, dim: int | None = None) -> Any:
        """Return the shape, or the size of a dimension, as a tensor does."""
        return self.sizes if dim is None else self.sizes[dim]

    def contiguous(self) -> Self:
        """Return self; ``generate`` calls this."""
        return self

    def clone(self) -> Self:
        """Return self: a mask never changes."""
        return self

    def to(self, *args: object, **kwargs: object) -> Self:
        """Return self: patterns have no device."""
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        # an AttributeError, so that hasattr returns False
        raise AttributeError(message("mask", f"a use of .{name}", _WANTED, _REMEDY))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse operations of torch, such as concatenation with other masks."""
        _refuse_values(f"torch.{func.__name__}")

    def _no_arithmetic(self, other: object = None) -> NoReturn:
        _refuse_values("arithmetic with it")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __and__ = __or__ = __invert__ = _no_arithmetic


class Facts(NamedTuple):
    """Everything that a mask says about its call.

    Attributes:
        pattern: The pattern, over indices of the call's queries and keys.
        sizes: (B, 1, queries, keys).
        q_offset: Index of the first query among the keys.
        rows: Bounds of the sequences if they are packed or padded on the left; a layer's pattern counts from there.
        k_offset: Position of the first key.
        context: Ranks that share the sequence. The pattern then covers the whole sequence, and the sizes are this
            rank's share.
        row: Index of the only query if it is a tensor. The pattern then bounds the keys, whatever the query's index.
        device: Device of the values.
        positions: Positions that the model's forward was called with, for a warning about packing that the mask does
            not take into account.
        cut: Whether the mask holds some of the queries of another one.
    """

    pattern: Pattern
    sizes: tuple[int, int, int, int]
    q_offset: int = 0
    rows: Documents | KeyPadding | None = None
    k_offset: int = 0
    context: ContextParallel | None = None
    row: Tensor | None = None
    device: torch.device | None = None
    positions: Tensor | None = None
    cut: bool = False


class Found:
    """Results of the layers that share a mask, for the layers after them.

    Attributes:
        positions_seen: Whether a layer has looked at the call's positions.
        told: Documents that keywords of the call name, and the tensors that they were made from.
        lists: The last lists of chosen keys, with their version and their pattern.
        values: The values of the mask.
    """

    positions_seen: bool = False
    told: tuple[list[tuple[Tensor, object]], Documents] | None = None
    lists: tuple[Tensor, object, Selected] | None = None
    values: Tensor | None = None


class PatternMask(_Carried, BlockMask):
    """A pattern as a mask: the mask function returns it, and the attention function reads it.

    A model passes it on like a mask of shape (B, 1, queries, keys). It holds no values, so its memory does not grow
    with queries times keys. transformers accepts a finished 4-D mask if it is a tensor or a BlockMask, so this
    class inherits from BlockMask. An indexer, which chooses keys by content, may read its values, which are made then.
    Any other use of its values raises an error.

    Args:
        facts: Everything that it says about the call.
    """

    #: What indexers ask for, to know how the values mask scores.
    dtype = torch.bool

    def __init__(self, facts: Facts):
        self.facts, self.found = facts, Found()

    @property
    def pattern(self) -> Pattern:
        """The pattern, over indices of the call's queries and keys."""
        return self.facts.pattern

    @property
    def sizes(self) -> tuple[int, ...]:  # type: ignore[override]
        """Shape of the mask, (B, 1, queries, keys)."""
        return self.facts.sizes

    @property
    def q_offset(self) -> int:
        """Index of the first query among the keys."""
        return self.facts.q_offset

    @property
    def device(self) -> torch.device:
        """Device of the values."""
        return torch.device("cpu") if self.facts.device is None else self.facts.device

    def values(self) -> Tensor:
        """Return the values, (B, 1, queries, keys) bool, which are made on first use and serve all layers of a call."""
        if self.facts.context is not None:
            _refuse_values("values of a sharded batch")
        if self.found.values is None:
            batch, _, nq, nk = self.facts.sizes
            if nq > 1 and not torch.compiler.is_compiling():
                got = f"a model that reads its values, {batch} x {nq:,} x {nk:,}"
                remedy = "Call patch(model): indexers that ringweave knows then choose keys without them."
                warn_once("values of a mask", "attention mask", got, _WANTED, remedy)
            self.found.values = _dense(self.facts).to(self.device)
        return self.found.values

    def with_pattern(self, pattern: Pattern, keys: int) -> PatternMask:
        """Return the mask of the same queries with another pattern and number of keys."""
        facts = self.facts._replace(pattern=pattern, sizes=(*self.facts.sizes[:3], keys))
        mask = PatternMask(facts)
        mask.found.positions_seen, mask.found.told = self.found.positions_seen, self.found.told
        return mask

    def __getitem__(self, at: object) -> Any:
        if isinstance(at, tuple) and at[1:2] == (0,):
            whole = all(each == slice(None) for each in (at[0], *at[2:]))
            return MaskRows(self) if whole else self.values()[at]
        rows = _rows_of(at, self.sizes)
        if rows is None:
            return _refuse_values(f"mask[{at!r}]")
        return self if rows == (0, self.sizes[2]) else self.of_rows(*rows)

    def of_rows(self, first: int, stop: int) -> PatternMask:
        """Return the mask of some of the queries, which a model computes alone.

        Args:
            first: Index of the first query among those of this mask.
            stop: One past the index of the last query.
        Raises:
            UnsupportedError: The queries are sharded, or the pattern lists keys for each query of this mask.
        """
        facts = self.facts
        if facts.context is not None or parts_of(facts.pattern, Selected):
            _refuse_values("some queries of a sharded batch, or of chosen keys")
        batch, heads, _, nk = facts.sizes
        # the positions belong to all queries, and the layers before have looked at them
        rows = facts._replace(
            sizes=(batch, heads, stop - first, nk), q_offset=facts.q_offset + first, positions=None, cut=True
        )
        mask = PatternMask(rows)
        mask.found.positions_seen = self.found.positions_seen
        return mask

    def __and__(self, other: object) -> Any:  # type: ignore[override]
        """Return the mask of the pairs that a pattern allows too, or the values where other bool values hold too."""
        if isinstance(other, Pattern):
            return self.with_pattern(other & self.pattern, self.sizes[3])
        if isinstance(other, Tensor) and other.dtype == torch.bool:
            values = self.values() & other
            if not torch.compiler.is_compiling():
                # attention asks which documents the keys were chosen in
                setattr(values, ORIGIN, self)
            return values
        return _refuse_values("arithmetic with it")

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"PatternMask({self.pattern!r}, {self.sizes})"

    __str__ = __repr__


def _rows_of(at: object, sizes: tuple[int, ...]) -> tuple[int, int] | None:
    """Return the range of queries that an index of a mask selects with all its keys, or None for another index."""
    index: list[Any] = list(at) if isinstance(at, tuple) else [at]
    # an index without an ellipsis has one at its end
    gap = next((i for i, each in enumerate(index) if each is Ellipsis), len(index))
    before, after = index[:gap], index[gap + 1 :]
    index = [*before, *[slice(None)] * (len(sizes) - len(before) - len(after)), *after]
    if len(index) != len(sizes) or not all(isinstance(each, slice) and each.step in (None, 1) for each in index):
        return None
    ranges = [each.indices(size)[:2] for each, size in zip(index, sizes, strict=True)]
    first, stop = ranges[2]
    whole = all((0, size) == ranges[i] for i, size in enumerate(sizes) if i != 2)
    return (first, stop) if whole and first < stop else None


@torch.compiler.disable  # type: ignore[untyped-decorator]  # patterns are evaluated outside of graphs
def _dense(facts: Facts) -> Tensor:
    batch, _, nq, nk = facts.sizes
    return facts.pattern.to_dense(nq, nk, 1, batch=batch, q_offset=facts.q_offset)


class MaskRows(_Carried):
    """A mask without its dimension of heads, (B, queries, keys), which an indexer reads.

    Any operation of torch gets its values.

    Args:
        mask: The mask.
        forbidden: Whether it holds where the mask does not.
    """

    def __init__(self, mask: PatternMask, forbidden: bool = False):
        self.mask, self.forbidden = mask, forbidden
        self.sizes = (mask.sizes[0], *mask.sizes[2:])
        # an indexer inverts a bool mask, which torch.compile cannot trace, and adds any other one to its scores
        self.dtype = torch.float32 if torch.compiler.is_compiling() else torch.bool

    def values(self) -> Tensor:
        """Return the values, (B, queries, keys): bool, or numbers to add to scores."""
        values = self.mask.values()[:, 0]
        values = ~values if self.forbidden else values
        if self.dtype == torch.bool:
            return values
        return torch.zeros(self.sizes, dtype=self.dtype, device=values.device).masked_fill(~values, -torch.inf)

    def __invert__(self) -> MaskRows:  # type: ignore[override]
        return MaskRows(self.mask, not self.forbidden)

    def __getitem__(self, at: object) -> Any:
        return self.values()[at]  # type: ignore[index]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operation of torch with the values."""
        return func(*values_of(MaskRows, args), **values_of(MaskRows, kwargs or {}))

    def __repr__(self) -> str:
        return f"MaskRows({self.mask!r}, {self.forbidden})"


def values_of(symbols: type[Any], given: Any) -> Any:
    """Replace the objects of a class by their values in an argument of an operation, and in lists and dicts in it."""
    if isinstance(given, symbols):
        return given.values()
    if type(given) in (list, tuple):
        return type(given)([values_of(symbols, each) for each in given])
    if type(given) is dict:
        return {name: values_of(symbols, each) for name, each in given.items()}
    return given


_WANTED = "a mask that goes to attention as it is"
_REMEDY = "This model reads the values of its mask: use attn_implementation='sdpa' or 'eager' for it."


def _refuse_values(what: str) -> NoReturn:
    raise UnsupportedError("attention mask", what, _WANTED, _REMEDY)


class Owner(Protocol):
    """A model's context, which makes the context of each sequence length."""

    def context(self, seq_len: int) -> ContextParallel:
        """Return the context for a number of tokens in the whole sequence."""


class ShardMask(_Carried):
    """The ``attention_mask`` of a rank's shard, which carries the facts about the whole batch to the mask function.

    transformers passes the attention mask of a forward pass to the mask function of each kind of layer. The facts thus
    belong to the batch: batches may alternate, be compiled, and come from another process.

    Args:
        owner: The model's context.
        seq_len: Number of tokens in the whole sequence.
        name: Name of the batch; ranks that compute different batches at the same time raise an error.
        local: (B, local) bool, whether each token of this rank exists.
        padding: (B or 1, N) bool, whether each token exists, or None.
        packed: (B, N), the number of each token's packed document, or None.
        positions: (B, N), positions that restart in each packed document, or None.
    """

    def __init__(
        self,
        owner: Owner,
        seq_len: int,
        name: str,
        local: Tensor,
        padding: Tensor | None,
        packed: Tensor | None,
        positions: Tensor | None,
    ):
        self.owner, self.seq_len, self.name = owner, seq_len, name
        self.local, self.padding, self.packed, self.positions = local, padding, packed, positions
        self.sizes = tuple(local.shape)
        # made here because torch.compile traces the layers and cannot make a context
        self.context = owner.context(seq_len).tagged(name)

    def __reduce__(self) -> Any:
        """Pickle without the context, because the connections of a process do not reach its DataLoader workers."""
        facts = self.local, self.padding, self.packed, self.positions
        return type(self), (self.owner, self.seq_len, self.name, *facts)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move the tensors to a device; a dtype has no effect."""
        device = kwargs.get("device", args[0] if args else None)
        if device is None or isinstance(device, torch.dtype) or torch.device(device) == self.local.device:
            return self
        return self._each(lambda x: x.to(device))

    def pin_memory(self) -> Self:
        """Move the tensors to pinned memory; a DataLoader calls this."""
        return self._each(Tensor.pin_memory)

    def _each(self, move: Callable[[Tensor], Tensor]) -> Self:
        moved = copy.copy(self)
        for name in ("local", "padding", "packed", "positions"):
            x = getattr(self, name)
            setattr(moved, name, None if x is None else move(x))
        return moved

    def whole(self, batch: int, queries: int, keys: int, mask_function: Callable[..., Any] | None) -> PatternMask:
        """Return the mask of the whole sequence, given the mask function of a rank's tokens.

        Raises:
            ShapeError: The call has other tokens than the shard, for example because of a cache.
            UnsupportedError: The mask consists of more than windows, chunks, packing and padding.
        """
        n, local = self.seq_len, self.sizes[1]
        if (batch, queries, keys) != (self.sizes[0], local, local):
            wanted = f"{self.sizes[0]} x {local} queries and keys, this rank's share of {n}"
            remedy = "Pass the model everything that shard() returned, and no cache."
            raise ShapeError("tokens", f"{batch} x {queries} queries, {keys} keys", wanted, remedy)
        positions = Positions(batch, n, n, 0, 0)
        try:
            pattern, rows = read_sharded(
                mask_function or causal_mask_function,
                Positions(batch, queries, keys, 0, 0),
                positions,
                self.padding,
                self.packed,
                self.positions,
            )
        except _UNREAD as why:
            raise _unshared(f"a mask that cannot be read as a pattern ({in_a_line(why)})") from why
        bounds: Documents | KeyPadding | None = rows
        if self.padding is not None:
            pattern, bounds = _padded(positions, pattern, rows, self.padding)
        return PatternMask(Facts(pattern, (batch, 1, local, local), 0, bounds, context=self.context))

    # ---- values that models read, for this rank's tokens -------------------------------------------------------------

    def cumsum(self, dim: int) -> Tensor:
        """Return the running count of tokens that exist; Llama 4 counts the padding before them."""
        return self.local.cumsum(dim)

    def sum(self) -> Tensor:
        """Return the number of tokens that exist; the Trainer counts tokens."""
        return self.local.sum()

    def reshape(self, *sizes: int) -> Tensor:
        """Flatten the mask; losses that balance experts weigh tokens with it."""
        return self.local.reshape(-1) if sizes == (-1,) else _refuse_values(f"mask.reshape{sizes}")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Tensor:
        """Support ``torch.zeros_like``, and refuse other operations."""
        if func is torch.zeros_like and args:
            like: Tensor = torch.zeros_like(args[0].local, *args[1:], **(kwargs or {}))
            return like
        return _refuse_values(f"torch.{func.__name__} of it")

    def __getitem__(self, at: object) -> NoReturn:
        _refuse_values(f"mask[{at!r}]")

    def __eq__(self, other: object) -> bool:
        return self is other or _refuse_values("a comparison with it")

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"ShardMask({self.context!r}, {self.name})"


def _unshared(got: str) -> UnsupportedError:
    return UnsupportedError("context", got, "windows, chunks, packing and padding", "Run this model on one device.")


def pattern_mask(
    batch_size: int,
    q_length: int | None = None,
    kv_length: int = 0,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | ShardMask | None = None,
    *,
    cache_position: Tensor | None = None,
    device: torch.device | None = None,
    **ignored: object,
) -> PatternMask:
    """Make the mask of a call; transformers calls this function if the implementation is ``"ringweave"``.

    Args:
        batch_size: Number of batch elements.
        q_length: Number of queries.
        kv_length: Number of keys.
        q_offset: Position of the first query; a 0-d tensor for a static cache.
        kv_offset: Position of the first key.
        mask_function: ``f(batch, head, query, key)`` of positions; causal by default.
        attention_mask: (B, N) bool, whether each position exists; or the mask of a rank's shard.
        cache_position: Positions of the queries, in place of ``q_length`` and ``q_offset`` (transformers before 5.3).
        device: Device of the mask's values, if a model reads them.
        ignored: Arguments for other implementations.
    Returns:
        The mask that carries the pattern to attention.
    Raises:
        UnsupportedError: The function cannot be read as a pattern while torch.compile traces.
        PatternError: The function is not a mask_mod either.
    """
    if cache_position is not None:
        q_length, q_offset = cache_position.shape[0], cache_position[0]
    if q_length is None:
        raise UnsupportedError("mask", "neither q_length nor cache_position", "one", "Use transformers 5.")
    if isinstance(attention_mask, ShardMask):
        return attention_mask.whole(batch_size, q_length, kv_length, mask_function)
    sizes = batch_size, q_length, kv_length
    if isinstance(q_offset, Tensor) and not torch.compiler.is_compiling():
        if q_length == 1:
            try:
                # the bounds of keys are tensors: compiled steps share one graph, and no step waits for a GPU
                return _made(Positions(*sizes, q_offset, kv_offset), mask_function, attention_mask, device)
            except UnsupportedError:
                if q_offset.device.type != "cpu":
                    raise
        q_offset = int(q_offset)
    return _made(Positions(*sizes, q_offset, kv_offset), mask_function, attention_mask, device)


def _made(
    positions: Positions,
    mask_function: Callable[..., Any] | None,
    attention_mask: Tensor | None,
    device: torch.device | None,
) -> PatternMask:
    """Return the mask of a call with queries and keys at the given positions."""
    mask_function = mask_function or causal_mask_function
    rows: Documents | KeyPadding | None
    try:
        pattern, rows = read(mask_function, positions)
    except _UNREAD as why:
        pattern, rows = positions.function(mask_function, why), None
    if attention_mask is not None:
        pattern, rows = _padded(positions, pattern, rows, attention_mask)
    whole = rows is None and positions.nq == positions.nk and not torch.compiler.is_compiling()
    given = positions_of_the_call() if whole else None
    sizes, first, origin = (positions.batch, 1, positions.nq, positions.nk), positions.first, positions.kv_offset
    return PatternMask(Facts(pattern, sizes, first, rows, origin, row=positions.row, device=device, positions=given))


def _padded(
    positions: Positions, pattern: Pattern, rows: Documents | KeyPadding | None, padding: Tensor
) -> tuple[Pattern, Documents | KeyPadding | None]:
    """Restrict a pattern to the keys that exist; return it, and the bounds of each sequence's tokens."""
    known = positions.padding(padding)
    if known is None:
        return pattern, rows
    bounds, mask = known
    return joined([pattern, bounds] if mask is None else [pattern, bounds, mask]), bounds
