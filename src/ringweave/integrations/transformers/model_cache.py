"""A cache for transformers that stores keys and values in pages, where attention reads them."""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn, Self

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from ...errors import ShapeError, UnsupportedError, message, shown
from ...kv_cache import SIZES, PagedCache
from ...names import renamed, warn_renamed
from ...patterns.validate import whole
from ...precision import NATIVE, Precision, Scales, as_precision

_REMEDY = "Use attn_implementation='ringweave', or past_key_values=DynamicCache() for this model."


class ModelCache(Cache):
    """The keys and values of a model's layers in pages: ``generate(..., past_key_values=ModelCache(max_tokens=512))``.

    A step writes its token and attends the pages that the layer's pattern allows. Nothing is copied as sequences grow,
    and beams share the pages of their common tokens. Layers with windows keep all tokens, too. The cache works with the
    implementation ``"ringweave"``, without gradients.

    Args:
        max_tokens: Largest number of tokens in a sequence, padding included; rounded up to whole pages.
        page: Number of tokens in a page: 16, 32, 64, 128 or 256.
        precision: Precision policy. If it has an 8-bit ``kv``, each head's row of a token is rounded once, when it is
            written, and attention reads it in 8 bits.
        length: The old name of ``max_tokens``.
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
        >>> model.generate(prompt, past_key_values=ModelCache(max_tokens=64), max_new_tokens=4, min_new_tokens=4).shape
        torch.Size([1, 12])
        >>> small = ModelCache(max_tokens=64, precision=rw.Precision(kv=torch.int8))
        >>> model.generate(prompt, past_key_values=small, max_new_tokens=4, min_new_tokens=4).shape
        torch.Size([1, 12])
    """

    def __init__(
        self,
        max_tokens: int | None = None,
        page: int = 64,
        *,
        precision: Precision | None = None,
        length: int | None = None,
    ):
        if length is not None:
            warn_renamed("ModelCache(length=)", "ModelCache(max_tokens=)")
            if max_tokens is not None:
                raise ShapeError(message("length", shown(length), "max_tokens alone", "Leave out the old name."))
            max_tokens = length
        max_tokens = whole("max_tokens", max_tokens, 1, error=ShapeError)
        if page not in SIZES:
            raise ShapeError(message("page", shown(page), "16, 32, 64, 128 or 256", "Choose one of these."))
        self.max_tokens = -(-max_tokens // page) * page
        make: Any = partial(PagedLayer, self.max_tokens, page, as_precision(precision))
        super().__init__(layer_class_to_replicate=make)

    length = renamed("ModelCache", "length", "max_tokens")

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the number of keys, the same at each step as with a static cache, and the position of the first."""
        return self.max_tokens, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return the largest number of tokens in a sequence."""
        return self.max_tokens


class PagedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """The keys and values of one layer in a :class:`ModelCache`.

    Args:
        length: Largest number of tokens in a sequence.
        page: Number of tokens in a page.
        precision: Precision policy of the stored values.
    """

    is_sliding = False
    is_croppable = True

    def __init__(self, length: int, page: int, precision: Precision = NATIVE):
        super().__init__()  # type: ignore[no-untyped-call]
        self.length, self.page, self.precision, self.seen = length, page, precision, 0
        self.pages: PagedCache | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the pages.

        Args:
            key_states: Keys of the shape (B, Hkv, any, D).
            value_states: Values of the shape (B, Hkv, any, Dv).
        """
        batch, heads, _, dim = key_states.shape
        self.batch_size = batch
        dtype = key_states.dtype if self.precision.kv is None else None
        self.pages = PagedCache.empty(
            batch, self.length, heads, dim, value_dim=value_states.shape[3], page=self.page, dtype=dtype,
            device=key_states.device, precision=self.precision,
        )  # fmt: skip
        self.is_initialized = True

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
        """
        if self.pages is None or (self.seen == 0 and self.batch_size != len(key_states)):
            # after reset() the next batch may have another size
            self.lazy_initialization(key_states, value_states)
        pages = self.pages
        assert pages is not None
        pages.append(key_states.detach(), value_states.detach())
        self.seen += key_states.shape[2]
        keys = PagedStates(pages, key_states, self.length, self.seen)
        return keys, PagedStates(pages, value_states, self.length, self.seen)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys and the position of the first."""
        return self.length, 0

    def get_seq_length(self) -> int:
        """Return the number of tokens that were written."""
        return self.seen

    def get_max_length(self) -> int:
        """Return the largest number of tokens in a sequence."""
        return self.length

    def reset(self) -> None:
        """Free all pages."""
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
                raise ShapeError(message("indices", shown(indices), "one sequence or more", remedy))
            if len(rows) == self.batch_size:
                old.fork(rows.tolist(), range(self.batch_size))
                return
            k, v, scales = old.k, old.v, old.scales
            if (count := len(rows) * old.table.shape[1]) > len(k):
                # each sequence may write its full length
                k, v, *more = (_grown(x, count) for x in (k, v, *(scales or ())))
                scales = Scales(*more) if more else None
            rows = rows.to(k.device)
            # the first write to the table counts the references to shared pages
            self.pages = PagedCache(k, v, old.table[rows], old.lengths[rows], scales=scales)
            self.batch_size = len(rows)

    def offload(self) -> None:
        """Raise an error, because pages stay on the device that attention reads them from.

        Raises:
            UnsupportedError: Always.
        """
        remedy = "Pass precision=Precision(kv=torch.int8) for less memory, or DynamicCache(offloading=True)."
        raise UnsupportedError(message("cache", "a layer to move to the host", "pages that stay", remedy))

    prefetch = offload

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens.

        Args:
            tokens_to_remove: The number of tokens as a negative number, or 0.
        Raises:
            ShapeError: The number is positive, or exceeds the tokens in the cache.
        """
        if not -self.seen <= tokens_to_remove <= 0:
            wanted = f"a number from {-self.seen} to 0"
            raise ShapeError(message("tokens_to_remove", tokens_to_remove, wanted, "Pass a negative number of tokens."))
        if tokens_to_remove and self.pages is not None:
            every = range(self.batch_size)
            self.pages.fork(every, every, self.seen + tokens_to_remove)
            self.seen += tokens_to_remove


class PagedStates(Tensor):
    """A reference to the keys or values of a layer, with a tensor's shape; reading its values raises an error.

    Args:
        pages: The pages with the keys and values.
        new: (B, Hkv, tokens, D), the newest tokens.
        length: Largest number of tokens in a sequence.
        seen: Number of tokens in the pages.
    """

    pages: PagedCache
    seen: int
    #: The shape; reading this attribute is faster than ``shape``, which calls ``__torch_function__``.
    sizes: tuple[int, int, int, int]

    def __new__(cls, pages: PagedCache, new: Tensor, length: int, seen: int) -> Self:
        """Make the reference."""
        batch, heads, _, dim = new.shape
        sizes = batch, heads, length, dim
        # only the shape, dtype and device are used, so one element is expanded
        made: Self = new.new_empty(()).expand(sizes).as_subclass(cls)
        made.pages, made.seen, made.sizes = pages, seen, sizes
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
        raise _used(name)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        """Refuse operations that bypass ``__torch_function__``."""
        raise _used(str(func))


def _grown(x: Tensor, pages: int) -> Tensor:
    """Copy a pool into a larger one."""
    grown = torch.zeros(pages, *x.shape[1:], dtype=x.dtype, device=x.device)
    grown[: len(x)].copy_(x)
    return grown


def _used(name: str) -> UnsupportedError:
    got = f"a use of keys in pages ({name})"
    return UnsupportedError(message("past_key_values", got, "keys that go to attention as they are", _REMEDY))


_KNOWN = (Tensor.shape, Tensor.dtype, Tensor.device, Tensor.ndim, Tensor.requires_grad, Tensor.is_cuda)
