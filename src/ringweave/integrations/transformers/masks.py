"""Masks of transformers as patterns: the function that makes one, and what carries it through a model."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from ...errors import UnsupportedError, message
from ...patterns import Documents, Keys, Pattern
from .mask_reading import Unread, read
from .positions import Place, bounds_of, joined

if TYPE_CHECKING:
    from ...parallel import ContextParallel

# what calling a function with symbols may raise where it wants tensors
_RAISED = (Unread, TypeError, ValueError, RuntimeError, AttributeError, IndexError)


class PatternMask(BlockMask):
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
        rows: Documents | Keys | None = None,
        k_offset: int = 0,
        context: ContextParallel | None = None,
        row: Tensor | None = None,
    ):
        self.pattern, self.sizes, self.q_offset = pattern, shape, q_offset
        self.rows, self.k_offset, self.context, self.row = rows, k_offset, context, row
        # whether positions were looked at, for packing that the mask was not told of
        self.positions_seen = False

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Its sizes as a mask."""
        return self.sizes

    @property
    def ndim(self) -> int:
        """Always 4."""
        return 4

    def dim(self) -> int:
        """Always 4."""
        return 4

    def size(self, dim: int | None = None) -> Any:
        """Its sizes, as of a tensor."""
        return self.sizes if dim is None else self.sizes[dim]

    def contiguous(self) -> Self:
        """Be it already: generate calls this."""
        return self

    def clone(self) -> Self:
        """Be it: it never changes."""
        return self

    def to(self, *args: object, **kwargs: object) -> Self:
        """Be on every device."""
        return self

    def __getitem__(self, at: object) -> PatternMask:
        # models of before the interface cut a mask to the keys that there are
        *before, last = at if isinstance(at, tuple) else (at,)
        whole = all(each == slice(None) or each is Ellipsis for each in before)
        rows = whole and (len(before) == 3 or Ellipsis in before) and isinstance(last, slice)
        if rows and last.start in (None, 0) and last.step is None and last.stop == self.sizes[3]:
            return self
        return _refuse_values(f"mask[{at!r}]")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        # an AttributeError, so that hasattr answers
        raise AttributeError(message("mask", f"a use of .{name}", "a mask that goes to attention as it is", _REMEDY))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """Refuse to be joined with other masks, or whatever else torch would do with values."""
        _refuse_values(f"torch.{func.__name__}")

    def _no_arithmetic(self, other: object = None) -> NoReturn:
        _refuse_values("arithmetic with it")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __and__ = __or__ = __invert__ = _no_arithmetic
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"PatternMask({self.pattern!r}, {self.sizes})"

    __str__ = __repr__


_REMEDY = "This model reads the values of its mask: use attn_implementation='sdpa' or 'eager' for it."


def _refuse_values(what: str) -> NoReturn:
    raise UnsupportedError(message("attention mask", what, "a mask that goes to attention as it is", _REMEDY))


class _Running(threading.local):
    """What the model that this thread runs now is sharded by; None: it has the whole sequence."""

    sharded: Any = None


RUNNING = _Running()


def pattern_mask(
    batch_size: int,
    q_length: int | None = None,
    kv_length: int = 0,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
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
        attention_mask: (B, N) bool, the positions that exist.
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
    sharded = RUNNING.sharded
    if sharded is not None:
        whole: PatternMask = sharded.mask(batch_size, q_length, mask_function)
        return whole
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
    parts: list[Pattern] = []
    rows: Documents | Keys | None = None
    if mask_function is None:
        parts.append(place.near(((0, None),)))
    else:
        try:
            relation = read(mask_function)
            parts.append(place.pattern(relation))
            packed = place.packing(relation)
            rows = None if packed is None else place.documents(packed.table, packed.known)
        except _RAISED as why:
            parts.append(place.function(mask_function, why))
    if attention_mask is not None:
        known = place.padding(attention_mask)
        if known is not None:
            parts.append(known)
            rows = bounds_of(known) or rows
    shape = place.batch, 1, place.nq, place.nk
    return PatternMask(joined(parts), shape, place.first, rows, place.kv_offset, row=place.row)
