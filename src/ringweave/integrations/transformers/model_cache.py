"""A cache of transformers whose keys and values lie in pages, and are attended there."""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn, Self

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from ...errors import ShapeError, UnsupportedError, message, shown
from ...kv_cache import SIZES, PagedCache
from ...patterns.validate import whole
from ...precision import NATIVE, Precision, Scales, as_precision

_REMEDY = "Use attn_implementation='ringweave', or past_key_values=DynamicCache() for this model."


class ModelCache(Cache):
    """Keys and values of a model's layers in pages: ``generate(..., past_key_values=ModelCache(length))``.

    A step writes its token and attends the pages that the layer's pattern allows; nothing is moved or joined as
    sequences grow, and beams share the pages of what they have in common. For the implementation ``"ringweave"``,
    without gradients. Layers with windows keep what lies behind them, too.

    Args:
        length: Most tokens of a sequence, padding included.
        page: Tokens of a page: 16, 32, 64, 128 or 256.
        precision: A policy, of whose ``kv`` all layers are stored in 8 bits: each row of a head is rounded once,
            when it is written, and attended as it is stored.
    Raises:
        ShapeError: A length below 1, or a page of another size.
        UnsupportedError: What is no policy.
    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from ringweave.integrations.transformers import patch
        >>> config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        ...                      num_attention_heads=4, num_key_value_heads=2)
        >>> model = patch(LlamaForCausalLM(config)).eval()
        >>> prompt = torch.arange(3, 11)[None]
        >>> model.generate(prompt, past_key_values=ModelCache(64), max_new_tokens=4, min_new_tokens=4).shape
        torch.Size([1, 12])
        >>> small = ModelCache(64, precision=rw.Precision(kv=torch.int8))
        >>> model.generate(prompt, past_key_values=small, max_new_tokens=4, min_new_tokens=4).shape
        torch.Size([1, 12])
    """

    def __init__(self, length: int, page: int = 64, *, precision: Precision | None = None):
        length = whole("length", length, 1, error=ShapeError)
        if page not in SIZES:
            raise ShapeError(message("page", shown(page), "16, 32, 64, 128 or 256", "Choose one of these."))
        self.length = -(-length // page) * page
        make: Any = partial(PagedLayer, self.length, page, as_precision(precision))
        super().__init__(layer_class_to_replicate=make)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Count all places, as of a static cache, so that masks are alike at each step; the first has position 0."""
        return self.length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Count the tokens that there is room for, in every layer."""
        return self.length


class PagedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """The part of a :class:`ModelCache` that one layer writes.

    Args:
        length: Most tokens of a sequence.
        page: Tokens of a page.
        precision: In what they are stored.
    """

    is_sliding = False
    is_croppable = True

    def __init__(self, length: int, page: int, precision: Precision = NATIVE):
        super().__init__()  # type: ignore[no-untyped-call]
        self.length, self.page, self.precision, self.seen = length, page, precision, 0
        self.pages: PagedCache | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make room for sequences of a shape.

        Args:
            key_states: (B, Hkv, any, D).
            value_states: (B, Hkv, any, Dv).
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
            args: What other caches need to know.
            kwargs: The same.
        Returns:
            What stands for all keys, and for all values.
        Raises:
            ShapeError: More tokens than there is room for.
        """
        if self.pages is None or (self.seen == 0 and self.batch_size != len(key_states)):
            # also after reset(), for another batch
            self.lazy_initialization(key_states, value_states)
        pages = self.pages
        assert pages is not None
        pages.append(key_states.detach(), value_states.detach())
        self.seen += key_states.shape[2]
        keys = PagedStates(pages, key_states, self.length, self.seen)
        return keys, PagedStates(pages, value_states, self.length, self.seen)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Give all places, and the position of the first."""
        return self.length, 0

    def get_seq_length(self) -> int:
        """Count the tokens that were written."""
        return self.seen

    def get_max_length(self) -> int:
        """Count the tokens that there is room for."""
        return self.length

    def reset(self) -> None:
        """Give all pages back."""
        if self.pages is not None:
            self.pages.free()
        self.seen = 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let each sequence go on as another; they share pages.

        Args:
            beam_idx: (B,), which one.
        Raises:
            ShapeError: No sequence is named.
        """
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Let several sequences go on from each one; they share pages.

        Args:
            repeats: How many.
        Raises:
            ShapeError: Fewer than one.
        """
        repeats = whole("repeats", repeats, 1, error=ShapeError)
        if self.seen:
            self.batch_select_indices(torch.arange(self.batch_size, device="cpu").repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Let some sequences go on, in an order; one that is named several times goes on several times.

        Args:
            indices: Which ones.
        Raises:
            ShapeError: No sequence is named.
        """
        old = self.pages
        if old is None or not self.seen:
            return
        # made for a later step, in whatever mode
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
                # room for each sequence to write all of its tokens
                k, v, *more = (_grown(x, count) for x in (k, v, *(scales or ())))
                scales = Scales(*more) if more else None
            rows = rows.to(k.device)
            # the pages that rows of the table have in common are counted when it is first written to
            self.pages = PagedCache(k, v, old.table[rows], old.lengths[rows], scales=scales)
            self.batch_size = len(rows)

    def offload(self) -> None:
        """Refuse: pages stay where attention reads them.

        Raises:
            UnsupportedError: Always.
        """
        remedy = "Pass precision=Precision(kv=torch.int8) for less memory, or DynamicCache(offloading=True)."
        raise UnsupportedError(message("cache", "a layer to move to the host", "pages that stay", remedy))

    prefetch = offload

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens.

        Args:
            tokens_to_remove: How many, as a negative number; 0: none.
        Raises:
            ShapeError: A positive number, or more tokens than there are.
        """
        if not -self.seen <= tokens_to_remove <= 0:
            wanted = f"a number from {-self.seen} to 0"
            raise ShapeError(message("tokens_to_remove", tokens_to_remove, wanted, "Say how many, below 0."))
        if tokens_to_remove and self.pages is not None:
            every = range(self.batch_size)
            self.pages.fork(every, every, self.seen + tokens_to_remove)
            self.seen += tokens_to_remove


class PagedStates(Tensor):
    """Keys or values in pages, with the shape that they would have as a tensor; a use of their numbers raises.

    Args:
        pages: Where they are.
        new: (B, Hkv, tokens, D), the last ones.
        length: Tokens that there is room for.
        seen: How many there are.
    """

    pages: PagedCache
    seen: int
    #: Its shape, for whoever knows what it is: that of a tensor passes through ``__torch_function__``.
    sizes: tuple[int, int, int, int]

    def __new__(cls, pages: PagedCache, new: Tensor, length: int, seen: int) -> Self:
        """Stand for the tokens of a cache."""
        batch, heads, _, dim = new.shape
        sizes = batch, heads, length, dim
        # only shape, dtype and device are ever looked at: one element, which is repeated
        made: Self = new.new_empty(()).expand(sizes).as_subclass(cls)
        made.pages, made.seen, made.sizes = pages, seen, sizes
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PagedStates({tuple(self.shape)})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Give sizes and types; refuse the rest."""
        name = getattr(func, "__name__", str(func))
        getters = name == "__get__" and getattr(func, "__self__", None) in _KNOWN
        if getters or func in (Tensor.size, Tensor.dim):
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        raise _used(name)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        """Refuse what came another way."""
        raise _used(str(func))


def _grown(x: Tensor, pages: int) -> Tensor:
    """A pool with more pages."""
    grown = torch.zeros(pages, *x.shape[1:], dtype=x.dtype, device=x.device)
    grown[: len(x)].copy_(x)
    return grown


def _used(name: str) -> UnsupportedError:
    got = f"a use of keys in pages ({name})"
    return UnsupportedError(message("past_key_values", got, "keys that go to attention as they are", _REMEDY))


_KNOWN = (Tensor.shape, Tensor.dtype, Tensor.device, Tensor.ndim, Tensor.requires_grad, Tensor.is_cuda)
