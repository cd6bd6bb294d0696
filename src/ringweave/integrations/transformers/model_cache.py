"""A cache for transformers that stores keys and values in pages, where attention reads them."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any, NoReturn, Self

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer
from transformers.masking_utils import create_causal_mask

from ...checks import whole
from ...errors import ShapeError, UnsupportedError, shown
from ...kv_cache import SIZES, PagedCache
from ...precision import NATIVE, Precision, Scales, as_precision

#: Name of the argument of models and of ``generate`` that takes a cache; before transformers 5.24 past_key_values.
CACHE = "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"
# the argument of ``crop`` was the number of tokens to keep, and became the number to remove
_REMOVES = "tokens_to_remove" in inspect.signature(DynamicLayer.crop).parameters
_OTHER = f"Pass {CACHE}=DynamicCache(config=model.config)"
_REMEDY = f"{_OTHER}, or call patch(model) if this model has another attention implementation."


class ModelCache(Cache):
    """The keys and values of a model's layers in pages: ``generate(..., cache=ModelCache())``.

    A step writes its token and attends the pages that the layer's pattern allows, and beams share the pages of their
    common tokens. Layers with windows keep all tokens, too. The cache works with the implementation ``"ringweave"``,
    without gradients. Call ``reset()`` before another conversation. The argument of ``generate`` is
    ``past_key_values=`` before transformers 5.24.

    A call that fails in its update or its attention leaves the cache as it was. If a call fails elsewhere in the model,
    between two layers, the next call removes its tokens and raises an error: repeat that one. After a failure that
    follows the attention of the last layer, call ``crop(-n)`` for its n tokens.

    Args:
        max_tokens: Largest number of tokens in a sequence, padding included; rounded up to whole pages. By default the
            cache doubles its pages when sequences outgrow them; with a number, it never copies pages and never grows.
        page: Number of tokens in a page: 16, 32, 64, 128 or 256.
        precision: Precision policy. If it has an 8-bit ``kv``, each head's row of a token is rounded once, when it is
            written, and attention reads it in 8 bits.
    Raises:
        ShapeError: ``max_tokens`` is below 1, or the page has another size.
        UnsupportedError: ``precision`` is not a policy.
    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from ringweave.integrations.transformers import patch
        >>> config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        ...                      num_attention_heads=4, num_key_value_heads=2)
        >>> model = patch(LlamaForCausalLM(config)).eval()
        >>> prompt = torch.arange(3, 11)[None]
        >>> model.generate(prompt, cache=ModelCache(), max_new_tokens=4, min_new_tokens=4).shape
        torch.Size([1, 12])
        >>> small = ModelCache(max_tokens=64, precision=rw.Precision(kv=torch.int8))
        >>> model.generate(prompt, cache=small, max_new_tokens=4, min_new_tokens=4).shape
        torch.Size([1, 12])
    """

    def __init__(
        self,
        max_tokens: int | None = None,
        page: int = 64,
        *,
        precision: Precision | None = None,
    ):
        if page not in SIZES:
            raise ShapeError("page", shown(page), "16, 32, 64, 128 or 256", "Choose one of these.")
        if max_tokens is not None:
            max_tokens = -(-whole("max_tokens", max_tokens, 1, error=ShapeError) // page) * page
        self.max_tokens, self.page = max_tokens, page
        make: Any = partial(PagedLayer, max_tokens, page, as_precision(precision), Writes())
        super().__init__(layer_class_to_replicate=make)
        self._make = make
        self.layers: list[Any] = _Unmade()

    def get_mask_sizes(self, query_length: int | Tensor, layer_idx: int) -> tuple[int, int]:
        """Return the number of keys that attention gets with a call's queries, and the position of the first."""
        # transformers makes a layer when it gets its first keys
        layers = self.layers
        if type(layers) is _Unmade:
            # the model makes a mask, so it has layers of keys, and their steps index a plain list
            layers = self.layers = [*layers]
        layer = layers[layer_idx] if layer_idx < len(layers) else self._make()
        sizes: tuple[int, int] = layer.get_mask_sizes(query_length)
        return sizes

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return the largest number of tokens in a sequence; -1 if the cache grows."""
        return -1 if self.max_tokens is None else self.max_tokens

    get_max_cache_shape = get_max_length


class _Unmade(list[Any]):
    """The layers of a cache whose model has made no mask; a model that reads their states gets a typed error."""

    def __getitem__(self, at: Any) -> Any:
        try:
            return super().__getitem__(at)
        except IndexError:
            raise refused("beside states of other layers") from None


class Writes:
    """The layers of a cache that the running call of the model has written to, so that a failed call leaves no token.

    Attributes:
        before: The number of tokens of each such layer before the call; filled until the next call begins.
        attended: The layers that have attended what they wrote last.
    """

    def __init__(self) -> None:
        self.before: dict[PagedLayer, int] = {}
        self.attended: set[PagedLayer] = set()

    def undo(self) -> None:
        """Remove the tokens of the running call."""
        for layer, tokens in self.before.items():
            layer.cut(tokens)
        self.before.clear()

    def repair(self, layer: PagedLayer) -> NoReturn:
        """Remove the tokens of earlier calls that failed between two layers, and raise UnsupportedError.

        Args:
            layer: The layer that the running call writes to next.
        """
        kept = layer.kept if layer.waits and layer not in self.attended else layer.seen
        tokens = min([*self.before.values(), kept])
        for each in (*self.before, layer):
            each.cut(tokens)
        self.before.clear()
        got = "the tokens of a call that failed between two layers; they are removed now"
        remedy = f"Repeat the call: each layer holds {tokens} tokens."
        raise UnsupportedError(CACHE, got, "layers with the same tokens", remedy)


class PagedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """The keys and values of one layer in a :class:`ModelCache`.

    Args:
        max_tokens: Largest number of tokens in a sequence; None for a layer that grows.
        page: Number of tokens in a page.
        precision: Precision policy of the stored values.
        writes: The record that the layers of a cache share.
    """

    is_sliding = False
    is_croppable = True

    def __init__(self, max_tokens: int | None, page: int, precision: Precision = NATIVE, writes: Writes | None = None):
        super().__init__()  # type: ignore[no-untyped-call]
        self.max_tokens, self.page, self.precision = max_tokens, page, precision
        self.writes = Writes() if writes is None else writes
        # number of tokens, and that before the last update
        self.seen = self.kept = 0
        # whether the layer attends what it writes; a caller of update may have another use for it
        self.waits = False
        # number of tokens of a sequence that fit into its pages: the number of keys in a mask
        self.length = 0 if max_tokens is None else max_tokens
        self.pages: PagedCache | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the pages.

        Args:
            key_states: Keys of the shape (B, Hkv, any, D).
            value_states: Values of the shape (B, Hkv, any, Dv).
        """
        batch, heads, tokens, dim = key_states.shape
        length = self._room(max(1, tokens))
        dtype = key_states.dtype if self.precision.kv is None else None
        pages = PagedCache.empty(
            batch, length, heads, dim, value_dim=value_states.shape[3], page=self.page, dtype=dtype,
            device=key_states.device, precision=self.precision,
        )  # fmt: skip
        self.batch_size, self.length, self.pages, self.is_initialized = batch, length, pages, True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[PagedStates, PagedStates]:
        """Write the next tokens.

        Args:
            key_states: (B, Hkv, tokens, D).
            value_states: (B, Hkv, tokens, Dv).
            args: Arguments for other caches.
            kwargs: Arguments for other caches.
        Returns:
            References to all keys and to all values of the layer.
        Raises:
            ShapeError: A sequence gets longer than the cache allows.
            UnsupportedError: An earlier call failed between two layers; its tokens are removed, and the call may be
                repeated.
        """
        writes, tokens = self.writes, key_states.shape[2]
        if self in writes.before:
            # the model begins its next call
            writes.before.clear()
        try:
            failed = self.waits and self not in writes.attended
            if failed or (writes.before and next(iter(writes.before.values())) != self.seen):
                writes.repair(self)
            if self.pages is None or (self.seen == 0 and self.batch_size != len(key_states)):
                # after reset() the next batch may have another size
                self.lazy_initialization(key_states, value_states)
            if self.seen + tokens > self.length:
                self._grow(tokens)
            pages = self.pages
            assert pages is not None
            writes.before[self] = self.kept = self.seen
            self.waits = self in writes.attended
            writes.attended.discard(self)
            pages.append(key_states.detach(), value_states.detach())
            self.seen += tokens
            keys = PagedStates(self, key_states)
            # a reference has only a shape, so keys and values of equal shape share one
            same = value_states.shape == key_states.shape
            return keys, keys if same else PagedStates(self, value_states)
        except BaseException:
            writes.undo()
            raise

    def cut(self, tokens: int) -> None:
        """Keep the first tokens of each sequence."""
        self.waits = False
        if self.pages is not None:
            every = range(self.batch_size)
            self.pages.fork(every, every, tokens)
        self.seen = tokens

    def update_index(self, *args: object, **kwargs: object) -> NoReturn:
        """Refuse the keys of an indexer, which are stored beside keys and values."""
        self.writes.undo()
        raise refused("beside the keys of an indexer")

    store_compression_weights = update_index

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Return the number of keys that attention gets with a call's queries, and the position of the first.

        The number is that of the tokens for which there is room, so it is the same in almost all steps.

        Args:
            query_length: Number of queries; their positions in transformers before 5.3.
        """
        tokens = self.seen + (len(query_length) if isinstance(query_length, Tensor) else query_length)
        return self.length if tokens <= self.length else self._room(tokens), 0

    def get_seq_length(self) -> int:
        """Return the number of tokens that were written."""
        return self.seen

    def get_max_length(self) -> int:
        """Return the largest number of tokens in a sequence; -1 if the layer grows."""
        return -1 if self.max_tokens is None else self.max_tokens

    get_max_cache_shape = get_max_length

    def reset(self) -> None:
        """Free all pages, so that another conversation may begin."""
        self.waits = False
        if self.pages is not None:
            self.pages.free()
        self.seen = 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace the sequences by others of the batch; copies share pages.

        Args:
            beam_idx: (B,), indices of the sequences to continue.
        Raises:
            ShapeError: ``beam_idx`` is empty.
        """
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence; the copies share pages.

        Args:
            repeats: Number of copies of each sequence.
        Raises:
            ShapeError: ``repeats`` is below 1.
        """
        repeats = whole("repeats", repeats, 1, error=ShapeError)
        if self.seen:
            self.batch_select_indices(torch.arange(self.batch_size, device="cpu").repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Select sequences, in the given order and possibly several times.

        Args:
            indices: Indices of the sequences to continue.
        Raises:
            ShapeError: ``indices`` is empty.
        """
        old = self.pages
        if old is None or not self.seen:
            return
        # a later step may run outside of inference mode
        with torch.inference_mode(False):
            rows = torch.arange(self.batch_size, device="cpu")[torch.as_tensor(indices, device="cpu")]
            if rows.ndim != 1 or not len(rows):
                remedy = "Call reset() to forget all sequences."
                raise ShapeError("indices", shown(indices), "one sequence or more", remedy)
            if len(rows) == self.batch_size:
                old.fork(rows.tolist(), range(self.batch_size))
            else:
                self._select(rows.tolist(), self.length)

    def _room(self, tokens: int) -> int:
        """Return the number of tokens for which a sequence has room once it has a number of tokens."""
        if self.max_tokens is not None or tokens <= self.length:
            return self.length
        return max(2 * self.length, -(-tokens // self.page) * self.page)

    def _grow(self, tokens: int) -> None:
        """Make room for the next tokens of each sequence, or raise ShapeError if the cache does not grow."""
        if self.max_tokens is not None:
            got = f"{self.max_tokens}, with {self.seen} tokens in the cache and {tokens} more"
            wanted = f"at least {self.seen + tokens}: the tokens of a prompt + max_new_tokens"
            remedy = "Leave max_tokens out for a cache that grows; call reset() before another conversation."
            raise ShapeError("max_tokens", got, wanted, remedy)
        self._select(list(range(self.batch_size)), self._room(self.seen + tokens))

    def _select(self, rows: list[int], length: int) -> None:
        """Continue with some sequences, in a pool with room for a number of tokens of each."""
        old = self.pages
        assert old is not None
        # a later step may run outside of inference mode
        with torch.inference_mode(False):
            k, v, scales = old.k, old.v, old.scales
            columns = length // self.page
            if (count := len(rows) * columns) > len(k):
                # each sequence may write its full length
                k, v, *more = (_grown(x, count) for x in (k, v, *(scales or ())))
                scales = Scales(*more) if more else None
            kept = torch.tensor(rows, device=k.device)
            table = old.table.new_zeros(len(rows), columns)
            table[:, : old.table.shape[1]] = old.table[kept]
            # the first write to the table counts the references to shared pages
            pages = PagedCache(k, v, table, old.lengths[kept], scales=scales)
        self.pages, self.batch_size, self.length = pages, len(rows), length

    def offload(self) -> None:
        """Raise an error, because pages stay on the device that attention reads them from.

        Raises:
            UnsupportedError: Always.
        """
        remedy = "Pass precision=Precision(kv=torch.int8) for less memory, or DynamicCache(offloading=True)."
        raise UnsupportedError("cache", "a layer to move to the host", "pages that stay", remedy)

    prefetch = offload

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens.

        Args:
            tokens_to_remove: The number of tokens as a negative number, or 0. In versions of transformers with
                ``crop(max_length)``, a number from 0 is that of the tokens to keep.
        Raises:
            ShapeError: The number is positive, or exceeds the tokens in the cache.
        """
        if not _REMOVES and tokens_to_remove >= 0:
            tokens_to_remove = min(0, tokens_to_remove - self.seen)
        if not -self.seen <= tokens_to_remove <= 0:
            wanted = f"a number from {-self.seen} to 0"
            raise ShapeError("tokens_to_remove", tokens_to_remove, wanted, "Pass a negative number of tokens.")
        if tokens_to_remove:
            self.cut(self.seen + tokens_to_remove)


class PagedStates(Tensor):
    """A reference to the keys or values of a layer, with a tensor's shape; reading its values raises an error.

    Args:
        layer: The layer, which has written the newest tokens.
        new: (B, Hkv, tokens, D), the newest tokens.
    """

    pages: PagedCache
    seen: int
    writes: Writes
    layer: PagedLayer
    #: The shape; reading this attribute is faster than ``shape``, which calls ``__torch_function__``.
    sizes: tuple[int, int, int, int]

    def __new__(cls, layer: PagedLayer, new: Tensor) -> Self:
        """Make the reference."""
        batch, heads, _, dim = new.shape
        sizes = batch, heads, layer.length, dim
        # only the shape, dtype and device are used, so one element is expanded
        made: Self = new.new_empty(()).expand(sizes).as_subclass(cls)
        assert layer.pages is not None
        made.pages, made.seen, made.writes, made.layer, made.sizes = layer.pages, layer.seen, layer.writes, layer, sizes
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PagedStates({tuple(self.shape)})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the shape, dtype and device; refuse other operations."""
        name = getattr(func, "__name__", str(func))
        getters = name == "__get__" and getattr(func, "__self__", None) in _KNOWN
        if getters or func in (Tensor.size, Tensor.dim):
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        raise _misused(name, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        """Refuse operations that bypass ``__torch_function__``."""
        raise _misused(str(func), args, kwargs)


def _misused(use: str, args: Any, kwargs: Any) -> UnsupportedError:
    """Make the error for an operation on references, and undo the call that made them."""
    given = (*args, *(kwargs or {}).values())
    for each in (x for arg in given for x in (arg if isinstance(arg, (list, tuple)) else (arg,))):
        if isinstance(each, PagedStates):
            each.writes.undo()
    return refused(use, _REMEDY)


def _grown(x: Tensor, pages: int) -> Tensor:
    """Copy a pool into a larger one."""
    grown = torch.zeros(pages, *x.shape[1:], dtype=x.dtype, device=x.device)
    grown[: len(x)].copy_(x)
    return grown


def refused(use: str, remedy: str = f"{_OTHER}.") -> UnsupportedError:
    """Make the error for a model that uses its cache otherwise than to attend all keys.

    Args:
        use: Words for the use.
        remedy: Another remedy than another cache.
    """
    got = f"a use of keys in pages ({use})"
    return UnsupportedError(CACHE, got, "keys that go to attention as they are", remedy)


_KNOWN = (Tensor.shape, Tensor.dtype, Tensor.device, Tensor.ndim, Tensor.requires_grad, Tensor.is_cuda)
