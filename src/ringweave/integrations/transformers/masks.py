"""Masks of transformers as patterns: the function that makes one, and what carries it through a model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from transformers.masking_utils import causal_mask_function

from ...errors import ShapeError, UnsupportedError, in_a_line, message
from ...patterns import Documents, KeyPadding, Pattern
from .mask_reading import All, Chunks, Distances, Relation, Same, Unread, read
from .positions import Place, bounds_of, joined

if TYPE_CHECKING:
    from ...parallel import ContextParallel
    from .model_context import ModelContext

_CAUSAL = ((0, None),)
# what calling a function with symbols may raise where it wants tensors
_RAISED = (Unread, TypeError, ValueError, RuntimeError, AttributeError, IndexError)


class _Carried:
    """An argument that a model takes for a mask and passes on. A use of its values raises a typed error."""

    sizes: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Its sizes as a mask."""
        return self.sizes

    @property
    def ndim(self) -> int:
        """The number of its dimensions."""
        return len(self.sizes)

    def dim(self) -> int:
        """The number of its dimensions."""
        return len(self.sizes)

    def size(self, dim: int | None = None) -> Any:
        """Its sizes, as of a tensor."""
        return self.sizes if dim is None else self.sizes[dim]

    def contiguous(self) -> Self:
        """Return self; ``generate`` calls this."""
        return self

    def clone(self) -> Self:
        """Return self: a mask never changes."""
        return self

    def to(self, *args: object, **kwargs: object) -> Self:
        """Return self: patterns belong to no device."""
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        # an AttributeError, so that hasattr answers
        raise AttributeError(message("mask", f"a use of .{name}", _WANTED, _REMEDY))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse to be joined with other masks, and every other operation of torch on values."""
        _refuse_values(f"torch.{func.__name__}")

    def _no_arithmetic(self, other: object = None) -> NoReturn:
        _refuse_values("arithmetic with it")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __and__ = __or__ = __invert__ = _no_arithmetic


class PatternMask(_Carried, BlockMask):
    """A mask that is a pattern: what the registered mask function gives, and the registered attention takes.

    It goes through a model as a mask of shape (B, 1, queries, keys) would, without holding one: nothing grows with
    queries times keys. transformers takes a 4-D mask that it is given for finished if it is a tensor or a BlockMask;
    this is the second, in name. A call that would read its values raises.

    Args:
        pattern: Which places of keys each query attends.
        shape: (B, 1, queries, keys).
        q_offset: Place of the first query among the keys.
        rows: Where sequences begin and end, if they are packed or padded on the left; a pattern of a user is counted
            from there.
        k_offset: Position of the first key.
        context: Ranks that share the sequence, of which the pattern then is, and the shape this rank's share.
        row: Place of the only query, where that is a tensor: the pattern is bounds of keys, wherever it stands.
    """

    def __init__(
        self,
        pattern: Pattern,
        shape: tuple[int, int, int, int],
        q_offset: int = 0,
        rows: Documents | KeyPadding | None = None,
        k_offset: int = 0,
        context: ContextParallel | None = None,
        row: Tensor | None = None,
    ):
        self.pattern, self.sizes, self.q_offset = pattern, shape, q_offset
        self.rows, self.k_offset, self.context, self.row = rows, k_offset, context, row
        # whether positions were looked at, for packing that the mask was not told of
        self.positions_seen = False

    def __getitem__(self, at: object) -> PatternMask:
        # models of before the interface cut a mask to the keys that there are
        *before, last = at if isinstance(at, tuple) else (at,)
        whole = all(each == slice(None) or each is Ellipsis for each in before)
        rows = whole and (len(before) == 3 or Ellipsis in before) and isinstance(last, slice)
        if rows and last.start in (None, 0) and last.step is None and last.stop == self.sizes[3]:
            return self
        return _refuse_values(f"mask[{at!r}]")

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"PatternMask({self.pattern!r}, {self.sizes})"

    __str__ = __repr__


_WANTED = "a mask that goes to attention as it is"
_REMEDY = "This model reads the values of its mask: use attn_implementation='sdpa' or 'eager' for it."


def _refuse_values(what: str) -> NoReturn:
    raise UnsupportedError(message("attention mask", what, _WANTED, _REMEDY))


class ShardMask(_Carried):
    """The ``attention_mask`` of a rank's shard, which carries the facts of its own whole batch to the layers' masks.

    transformers hands the attention mask of a forward pass to the mask function of each kind of layer. So each forward
    pass brings its own batch, in turn with others, with and without torch.compile, and from another process.

    Args:
        owner: The model's context.
        seq_len: Tokens of the whole sequence.
        name: The batch's name; ranks that compute different batches at the same time raise.
        local: (B, local) bool, the tokens of this rank that exist.
        padding: (B or 1, N) bool, or None.
        packed: (B, N), the number of each token's sequence, or None.
        positions: (B, N), those that restart in each packed sequence, or None.
    """

    def __init__(
        self,
        owner: ModelContext,
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
        # here, and not when a layer asks: torch.compile traces the layers
        self.context = owner.context(seq_len).tagged(name)

    def __reduce__(self) -> Any:
        """Leave the context behind: a worker of a DataLoader has none of its process's connections."""
        facts = self.local, self.padding, self.packed, self.positions
        return type(self), (self.owner, self.seq_len, self.name, *facts)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move its tensors to a device; the type of its values stays."""
        device = kwargs.get("device", args[0] if args else None)
        if device is None or isinstance(device, torch.dtype) or torch.device(device) == self.local.device:
            return self
        return self._each(lambda x: x.to(device))

    def pin_memory(self) -> Self:
        """Move its tensors to pinned memory; a DataLoader calls this."""
        return self._each(Tensor.pin_memory)

    def _each(self, move: Callable[[Tensor], Tensor]) -> Self:
        moved = copy.copy(self)
        for name in ("local", "padding", "packed", "positions"):
            x = getattr(self, name)
            setattr(moved, name, None if x is None else move(x))
        return moved

    def whole(self, batch: int, queries: int, keys: int, mask_function: Callable[..., Any] | None) -> PatternMask:
        """Make the mask of the whole sequence from a function that was made for a rank's tokens.

        Raises:
            ShapeError: Other tokens than those of the shard, such as with a cache.
            UnsupportedError: A mask with more than windows, chunks, packing and padding.
        """
        n, local = self.seq_len, self.sizes[1]
        if (batch, queries, keys) != (self.sizes[0], local, local):
            wanted = f"{self.sizes[0]} x {local} queries and keys, this rank's share of {n}"
            remedy = "Pass the model all that shard() gave, and no cache."
            raise ShapeError(message("tokens", f"{batch} x {queries} queries, {keys} keys", wanted, remedy))
        try:
            relation = read(mask_function or causal_mask_function)
        except _RAISED as why:
            raise _unshared(f"a mask that is read as no pattern ({in_a_line(why)})") from why
        place = Place(batch, n, n, 0, 0)
        pattern, rows = _padded(place, *_placed(place, self._of_whole(relation)), self.padding)
        return PatternMask(pattern, (batch, 1, local, local), 0, rows, context=self.context)

    def _of_whole(self, relation: Relation) -> Relation:
        """A relation of a rank's tokens as that of the whole sequence: what tables hold of the shard is left out."""
        parts: list[Relation] = []
        for part in relation.parts if isinstance(relation, All) else (relation,):
            if isinstance(part, Distances):
                parts.append(Distances(part.runs))
            elif isinstance(part, Chunks):
                origin = None if self.padding is None else (self.padding.cumsum(-1) == 0).sum(-1)
                parts.append(Chunks(part.length, origin, None if self.packed is None else self.positions))
            elif not isinstance(part, Same):
                # a shard's tokens lie apart, and a rank's positions restart: packing is found in the whole
                raise _unshared(f"a mask with {type(part).__name__.strip('_').lower()} of its own")
        if self.packed is not None:
            parts.append(Same(self.packed))
        return All(tuple(parts))

    # ---- what models read of the mask's values, which are those of this rank's tokens --------------------------------

    def cumsum(self, dim: int) -> Tensor:
        """Count the tokens that exist; Llama 4 counts the padding before them."""
        return self.local.cumsum(dim)

    def sum(self) -> Tensor:
        """Count the tokens that exist; the Trainer counts what it has seen."""
        return self.local.sum()

    def reshape(self, *sizes: int) -> Tensor:
        """Flatten it; losses that balance experts weigh tokens so."""
        return self.local.reshape(-1) if sizes == (-1,) else _refuse_values(f"mask.reshape{sizes}")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Tensor:
        """Let ``torch.zeros_like`` see its sizes, and nothing else."""
        if func is torch.zeros_like:
            local: Tensor = args[0].local
            like: Tensor = torch.zeros_like(local)
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
    return UnsupportedError(
        message("context", got, "windows, chunks, packing and padding", "Run this model on one device.")
    )


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
    **ignored: object,
) -> PatternMask:
    """Make the mask of a call: what transformers calls where the implementation is ``"ringweave"``.

    Args:
        batch_size: Batch elements.
        q_length: Queries.
        kv_length: Keys.
        q_offset: Position of the first query; a 0-d tensor for a static cache.
        kv_offset: Position of the first key.
        mask_function: ``f(batch, head, query, key)``, on positions; causal by default.
        attention_mask: (B, N) bool, the positions that exist; or that of a rank's shard.
        cache_position: Positions of the queries, in place of ``q_length`` and ``q_offset`` (transformers before 5.3).
        ignored: What other implementations need to know.
    Returns:
        What carries the pattern to attention.
    Raises:
        UnsupportedError: The function is none that can be read, while torch.compile traces.
        PatternError: Nor can it be a mask_mod.
    """
    if cache_position is not None:
        q_length, q_offset = cache_position.shape[0], cache_position[0]
    if q_length is None:
        raise UnsupportedError(message("mask", "neither q_length nor cache_position", "one", "Use transformers 5."))
    if isinstance(attention_mask, ShardMask):
        return attention_mask.whole(batch_size, q_length, kv_length, mask_function)
    sizes = batch_size, q_length, kv_length
    if isinstance(q_offset, Tensor) and not torch.compiler.is_compiling():
        if q_length == 1:
            try:
                # bounds of keys are tensors then: compiled steps are one graph, and no step waits for a GPU
                return _made(Place(*sizes, q_offset, kv_offset), mask_function, attention_mask)
            except UnsupportedError:
                if q_offset.device.type != "cpu":
                    raise
        q_offset = int(q_offset)
    return _made(Place(*sizes, q_offset, kv_offset), mask_function, attention_mask)


def _made(place: Place, mask_function: Callable[..., Any] | None, attention_mask: Tensor | None) -> PatternMask:
    """The mask of a call at a place."""
    rows: Documents | KeyPadding | None = None
    if mask_function is None:
        pattern = place.near(_CAUSAL)
    else:
        try:
            relation = read(mask_function)
            if type(relation) is Distances and relation.table is None:
                pattern = place.near(relation.runs)
            else:
                pattern, rows = _placed(place, relation)
        except _RAISED as why:
            pattern = place.function(mask_function, why)
    pattern, rows = _padded(place, pattern, rows, attention_mask)
    shape = place.batch, 1, place.nq, place.nk
    return PatternMask(pattern, shape, place.first, rows, place.kv_offset, row=place.row)


def _placed(place: Place, relation: Relation) -> tuple[Pattern, Documents | KeyPadding | None]:
    """The pattern of a relation, and the rows where packed sequences begin and end."""
    packed = place.packing(relation)
    return place.pattern(relation), None if packed is None else place.documents(packed.table, packed.known)


def _padded(
    place: Place, pattern: Pattern, rows: Documents | KeyPadding | None, padding: Tensor | None
) -> tuple[Pattern, Documents | KeyPadding | None]:
    """Restrict a pattern to the keys that exist, and take the rows from their bounds."""
    known = None if padding is None else place.padding(padding)
    if known is None:
        return pattern, rows
    return joined([pattern, known]), bounds_of(known) or rows
