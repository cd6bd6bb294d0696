"""The attention function that transformers calls, and functions that give a model's layers a pattern."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import transformers
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import guard_scalar
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from ...api import attention, paged_attention
from ...axes import Axes
from ...errors import PatternError, ShapeError, UnsupportedError, shown, warn_once
from ...patterns import And, Causal, Documents, Full, KeyPadding, Pattern, Selected, SlidingWindow, Tree, parse
from ...patterns.base import parts_of
from ...patterns.batch_axis import Packing
from ...patterns.fitting import refuse
from ...patterns.global_tokens import within_length
from ...terms import Bias, Softcap, Term
from ...torch_compat import version
from ...weights import COLUMNS, by_columns
from .indexers import all_keys, swap
from .keywords import DOCUMENTS, OTHER, POSITIONS, READ, apart, check, same_documents
from .latents import Latents, expand_later, states_of
from .masks import ORIGIN, Facts, PatternMask, pattern_mask
from .model_cache import CACHE, PagedStates
from .models.deepseek_v4 import entries_of
from .packing import (
    TAKES_NO_PACKING,
    breaks_of,
    refuse_packed,
    refuse_restarts,
    warn_of_own_mask,
    warn_of_packing,
)
from .saved_patterns import (
    ATTRIBUTE,
    NAME,
    RECORD,
    first_use,
    numbered,
    record,
    require,
    restore,
    self_attention,
    separate,
    tell_when_saved,
    text_of,
)

_KEYS = Axes("indices: [B Nq n]")
_BLOCKS = Axes("block_indices: [B heads Nq n]; Hq % heads")
_MASK = Axes("attention_mask: [B|1 Hq|1 Nq|1 Nk|1]")

M = TypeVar("M", bound=nn.Module)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: PatternMask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    position_bias: Tensor | None = None,
    sliding_window: int | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    output_attentions: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute a layer's attention; transformers calls this function if the implementation is ``"ringweave"``.

    Args:
        module: The layer, which may have a pattern.
        query: (B, Hq, q, D).
        key: (B, Hkv, k, D), with the cached keys.
        value: (B, Hkv, k, Dv), with the cached values.
        attention_mask: A mask from :func:`pattern_mask`; or a mask (B or 1, H or 1, q, k), either bool or added to the
            scores; None for causal attention if the layer is causal, else full attention.
        dropout: Probability of dropping a weight; 0 in evaluation.
        scaling: Factor of the scores.
        is_causal: Whether attention without a mask is causal; by default the layer's ``is_causal``.
        softcap: Bound on the absolute value of the scores.
        s_aux: (Hq,), learned sinks.
        sinks: Another name for ``s_aux``.
        position_bias: (B or 1, Hq or 1, q, k), added to the scores.
        sliding_window: Number of last tokens that a query attends, if the call has no mask; masks hold the window.
        indices: (B, q, n), the keys that the layer chose for each query, among which the mask may forbid some.
        block_indices: (B, H, q, n), the blocks of keys that the layer chose; -1 is no block.
        output_attentions: Whether to return the weights too, for which each layer computes attention again.
        kwargs: Documents by ``cu_seq_lens_q`` and ``cu_seq_lens_k``, flash-attn's bounds, or by ``seq_idx``; and
            keywords for other implementations, see :mod:`.keywords`.
    Returns:
        The output (B, q, Hq, Dv), contiguous; and the weights (B, Hq, q, k), or None without ``output_attentions``.
    Raises:
        UnsupportedError: An argument that ringweave does not implement.
    """
    try:
        absorbed = None
        if isinstance(key, Latents):
            absorbs = scaling is not None and not dropout and position_bias is None
            key, value, attention_mask, indices, absorbed = states_of(
                module, query, key, attention_mask, indices, output_attentions, absorbs
            )
        call = LayerCall(module, query, key, value, kwargs)
        mask, bias = call.mask(attention_mask, is_causal, sliding_window)
        facts = mask.facts
        if call.restricts:
            call.check_choice(attention_mask, mask, indices, block_indices)
        pattern, q_offset = call.restricted(mask) if call.restricts else (facts.pattern, facts.q_offset)
        if absorbed is None and (indices is not None or block_indices is not None):
            pattern = call.chosen(mask, indices, block_indices) & pattern
        # the number becomes part of the call's text, so torch.compile must not replace it by a symbol
        terms: list[Term] = [] if softcap is None else [Softcap(guard_scalar(softcap))]
        if bias is not None:
            terms.append(call.bias(bias))
        if position_bias is not None:
            if parts_of(pattern, Tree):
                remedy = "Give each path a row: the model takes the distances of its bias from places in the row."
                raise UnsupportedError("position_bias", "a bias in a layer with a Tree", "none", remedy)
            terms.append(call.bias(position_bias))
        options: dict[str, Any] = {"scale": scaling, "terms": terms, "sink_logits": s_aux if sinks is None else sinks}
        if call.pages is not None:
            numbers = bias is not None or position_bias is not None
            call.check_pages(attention_mask, facts, numbers, output_attentions, dropout)
            out = paged_attention(call.query, call.pages.pages, pattern, **options)
            # nothing may fail after the layer counts as attended; add returns None
            return out.transpose(1, 2).contiguous(), call.pages.writes.attended.add(call.pages.layer)  # type: ignore[func-returns-value]
        if absorbed is not None:
            assert indices is not None
            out = absorbed.attend(call.query, indices, pattern, q_offset, options)
            return out.transpose(1, 2).contiguous(), None
        options["q_offset"] = q_offset
        tensors = call.query, call.key, call.value
        out = attention(*tensors, pattern, dropout=dropout, context=facts.context, **options)
        weights = None
        if output_attentions:
            if dropout or facts.context is not None:
                got = f"dropout of {dropout}" if dropout else "a sharded batch"
                wanted = "evaluation on one device"
                raise UnsupportedError("output_attentions", got, wanted, "Call model.eval(), without shard().")
            weights = _weights(call.query, call.key, pattern, options)
        return out.transpose(1, 2).contiguous(), weights
    except BaseException:
        # a ModelCache forgets what the failed call wrote to this layer and to those before it
        if isinstance(key, PagedStates):
            key.writes.undo()
        raise


class LayerCall:
    """A layer's call of attention: its tensors, and the pairs that its mask, its keywords and its pattern allow.

    Args:
        module: The layer.
        query: (B, Hq, q, D); of one batch element if all share learned queries.
        key: (B, Hkv, k, D).
        value: (B, Hkv, k, Dv).
        given: The keywords that the attention function does not name.
    Raises:
        UnsupportedError: ringweave does not implement a keyword or the layer.
    """

    def __init__(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, given: dict[str, Any]):
        if not READ.issuperset(given):
            check(given)
        if hasattr(module, "keep_window_size"):
            # Doge ignores its own mask if the library's mask is a BlockMask
            raise UnsupportedError("layer", type(module).__name__, "one that chooses no keys by content", OTHER)
        self.pages = key if isinstance(key, PagedStates) else None
        sizes = key.shape if self.pages is None else self.pages.sizes
        if query.shape[0] != sizes[0]:
            # learned queries, which all batch elements share
            batch = max(query.shape[0], sizes[0])
            query, key, value = (x.expand(batch, *x.shape[1:]) for x in (query, key, value))
        self.module, self.query, self.key, self.value, self.given = module, query, key, value, given
        self.batch, self.heads, self.nq = query.shape[:3]
        self.nk: int = sizes[2]
        self.pattern: Pattern | None = getattr(module, ATTRIBUTE, None)
        if self.pattern is None and hasattr(getattr(module, "config", None), RECORD):
            self.pattern = first_use(module)
        self.packed = not DOCUMENTS.isdisjoint(given)
        # whether anything but the mask matters: a step of a layer without a pattern has no more to ask
        self.restricts = self.nq > 1 or self.pattern is not None or self.packed

    def mask(
        self, mask: PatternMask | Tensor | None, is_causal: bool | None, window: int | None
    ) -> tuple[PatternMask, Tensor | None]:
        """Return the mask as a pattern, and numbers to add to the scores or None."""
        if isinstance(mask, PatternMask):
            entries = entries_of(self.module) if "compressor" in self.module._modules else None
            facts = mask.facts
            if facts.sizes[2:] != (self.nq, self.nk - (0 if entries is None else entries.number)):
                wanted = f"({self.nq}, {self.nk}), the queries and keys of {type(self.module).__name__}"
                raise ShapeError("attention mask", f"one of {facts.sizes[2:]}", wanted, OTHER)
            if entries is None:
                return mask, None
            if self.pattern is not None or facts.context is not None:
                got = f"a layer with compressed entries, {type(self.module).__name__}"
                remedy = "Remove the layer's pattern, and do not shard the batch."
                raise UnsupportedError("pattern", got, "the model's own pattern on one device", remedy)
            return mask.with_pattern(entries.beside(facts.pattern, self.nk), self.nk), None
        if isinstance(mask, Tensor):
            return self._made(Full()), self._numbers(mask)
        if mask is not None:
            raise UnsupportedError("attention mask", shown(mask), "a mask of 4 dimensions", OTHER)
        causal = getattr(self.module, "is_causal", True) if is_causal is None else is_causal
        # as in transformers: a single query is the last position
        pattern: Pattern = Causal() if self.nq > 1 and causal else Full()
        if window is not None:
            pattern = pattern & SlidingWindow(window - 1, window - 1)
        return self._made(pattern, 0 if self.nq > 1 else self.nk - 1), None

    def _made(self, pattern: Pattern, q_offset: int = 0) -> PatternMask:
        """Return the mask of a call that has no PatternMask."""
        mask = PatternMask(Facts(pattern, (self.batch, 1, self.nq, self.nk), q_offset))
        # such a mask knows no positions
        mask.found.positions_seen = True
        return mask

    def _numbers(self, mask: Tensor) -> Tensor:
        """Return the numbers that a mask adds to the scores; a bool mask adds -inf."""
        if getattr(self.module, ATTRIBUTE, None) is not None:
            raise UnsupportedError("attention mask", shown(mask), "none, or (B, tokens), with a pattern", OTHER)
        if mask.ndim == 4 and mask.shape[2] == 1 < self.nq == self.nk:
            warn_of_own_mask(type(self.module).__name__, self.nk)
        if mask.dtype == torch.bool:
            return torch.zeros_like(mask, dtype=self.query.dtype).masked_fill(~mask, -torch.inf)
        return mask

    def check_pages(self, mask: object, facts: Facts, numbers: bool, weights: bool | None, dropout: float) -> None:
        """Raise UnsupportedError for a call that keys in pages cannot have.

        Args:
            mask: The mask that the layer passed.
            facts: The facts of the call's mask.
            numbers: Whether numbers are added to the scores.
            weights: Whether the call returns weights.
            dropout: Probability of dropping a weight.
        """
        pages = self.pages
        assert pages is not None
        remedy = f"Pass {CACHE}=DynamicCache()."
        # without a mask a layer attends all earlier tokens, so a longer call must be the first one
        later = mask is None and 1 < self.nq != pages.seen
        if later or numbers:
            got = "a mask or bias of numbers, or no mask for several queries after cached tokens"
            raise UnsupportedError(CACHE, got, "a mask (B, tokens) with keys in pages", remedy)
        if facts.cut and facts.q_offset + self.nq != pages.seen:
            got = f"{self.nq} queries from number {facts.q_offset} on, of {pages.seen} tokens"
            raise UnsupportedError(CACHE, got, "the last queries with keys in pages", remedy)
        if weights:
            raise UnsupportedError("output_attentions", "keys in pages", "another cache", remedy)
        if dropout:
            got, remedy = f"{dropout} with keys in pages", f"Call model.eval(). {remedy}"
            raise UnsupportedError("dropout", got, "0, as in evaluation", remedy)

    def check_choice(
        self, given: PatternMask | Tensor | None, mask: PatternMask, keys: Tensor | None, blocks: Tensor | None
    ) -> None:
        """Raise UnsupportedError if the layer chose keys without the documents that restrict them here.

        Args:
            given: The mask that the layer passed.
            mask: The mask of the call.
            keys: The chosen keys, or None.
            blocks: The chosen blocks, or None.
        """
        module, kind = self.module, type(self.module).__name__
        compressed = module._modules.get("compressor") is not None
        if keys is None and blocks is None and not compressed and getattr(module, "indexer", None) is None:
            return
        # the mask that an indexer read
        read = getattr(given, ORIGIN, None) if isinstance(given, Tensor) else mask
        rows = None if read is None else read.facts.rows
        told = [name for name in sorted(DOCUMENTS) if self.given.get(name) is not None]
        if self.pattern is not None and _of_the_batch(self.pattern):
            refuse_packed("pattern", kind, "which chose keys without the layer's pattern", POSITIONS)
        whole = "which chooses among all keys of the row"
        if read is None or blocks is not None or compressed:
            if told:
                refuse_packed(told[0], kind, whole, TAKES_NO_PACKING)
            if isinstance(rows, Documents):
                refuse_packed("position_ids", kind, whole, TAKES_NO_PACKING, breaks_of(rows))
        elif told:
            # a mask without documents may hold lists that count from the row's start
            known = isinstance(rows, Documents) and not torch.compiler.is_compiling()
            documents = apart(read, self.given, self.batch)[1] if known else None
            if documents is None or not same_documents(rows, documents, self.batch, self.nk):  # type: ignore[arg-type]
                refuse_packed(told[0], kind, "which chose keys without them", POSITIONS)
        elif isinstance(rows, Documents) and "linear_attention" in (getattr(module.config, "layer_types", None) or ()):
            choice = "beside layers of linear attention, which carry a state across documents"
            remedy = (
                "Give each document a row; or pass cu_seq_lens_q and cu_seq_lens_k too, with flash-linear-attention."
            )
            refuse_packed("position_ids", kind, choice, remedy, breaks_of(rows))
        if self.nq > 1 and rows is None and mask.facts.context is None:
            positions = self.given.get("position_ids")
            positions = read.facts.positions if positions is None and read is not None else positions
            exists = self._exists(given) if read is None and isinstance(given, Tensor) else None
            refuse_restarts(kind, positions, self.nq, exists)

    @staticmethod
    def _exists(mask: Tensor) -> Tensor:
        """Return the tokens of a mask of numbers that attend any key, (B, queries); others are padding."""
        allowed = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min
        return allowed[:, 0].any(-1)

    def restricted(self, mask: PatternMask) -> tuple[Pattern, int | Tensor]:
        """Return the pattern of the mask, of documents in keywords and of the layer, and the first query's index."""
        facts = mask.facts
        pattern, documents = facts.pattern, None
        if self.packed:
            pattern, documents = apart(mask, self.given, self.batch)
        own = self.pattern
        separated = documents is not None or facts.rows is not None or facts.context is not None
        if self.nq > 1 and not separated and not mask.found.positions_seen and (own is None or not _of_the_batch(own)):
            positions = self.given.get("position_ids")
            positions = facts.positions if positions is None else positions
            # the layers of a call share the mask, so one of them looks at the positions
            mask.found.positions_seen = warn_of_packing(type(self.module).__name__, positions, self.nk)
        if own is None:
            return pattern, facts.q_offset
        if facts.k_offset:
            got = f"a cache that has dropped its first {facts.k_offset} keys"
            raise UnsupportedError("pattern", got, "one that keeps all keys", f"Pass {CACHE}=DynamicCache().")
        # the layer's pattern is counted from the first token of each sequence or document
        rows = facts.rows if documents is None else documents
        own = own if rows is None or _of_the_batch(own) else own.within(rows)
        if not facts.q_offset:
            # a layer's pattern is for texts of every length, so it may list tokens that this one does not have
            own = within_length(own, self.nk if facts.context is None else facts.context.seq_len)
        _check_tree(pattern, own, type(self.module).__name__)
        return pattern & own, facts.q_offset if facts.row is None else facts.row

    def chosen(self, mask: PatternMask, keys: Tensor | None, blocks: Tensor | None) -> Pattern:
        """Return the pattern of the keys, or of the blocks of keys, that the layer chose; layers may share lists."""
        given = blocks if keys is None else keys
        assert given is not None
        name = "block_indices" if keys is None else "indices"
        if self.pages is not None or mask.facts.context is not None:
            got = "keys chosen by index " + ("in a sharded batch" if self.pages is None else "in pages")
            raise UnsupportedError(name, got, "all keys of the call on one device", f"Pass {CACHE}=DynamicCache().")
        if torch.compiler.is_compiling():
            return self._lists(name, given)
        if keys is not None and all_keys(keys, self.nk):
            return Full()
        held = version(given)
        known = mask.found.lists
        if known is None or known[0] is not given or known[1] != held:
            known = mask.found.lists = given, held, self._lists(name, given)
        return known[2]

    def _lists(self, name: str, given: Tensor) -> Selected:
        """Return lists of keys, or of blocks of keys, as a pattern."""
        if name == "indices":
            _KEYS.fit(indices=given, B=self.batch, Nq=self.nq, empty=("n",), remedy="List the keys of each query.")
            return Selected(given[:, None])
        size = getattr(getattr(self.module, "indexer", None), "block_size", None)
        if not isinstance(size, int):
            got = f"blocks without a size in {type(self.module).__name__}"
            raise UnsupportedError(name, got, "a size in indexer.block_size", OTHER)
        sizes: dict[str, Any] = {"B": self.batch, "Nq": self.nq, "Hq": self.heads}
        _BLOCKS.fit(block_indices=given, **sizes, empty=("n",), remedy="List the blocks of each query.")
        if given.shape[1] in (1, self.key.shape[1]):
            return Selected(given, size, heads="kv")
        return Selected(given.repeat_interleave(self.heads // given.shape[1], 1), size)

    def bias(self, table: Tensor) -> Bias:
        """Return a table of numbers as a term of the scores."""
        sizes: dict[str, Any] = {"B": self.batch, "Hq": self.heads, "Nq": self.nq, "Nk": self.nk}
        _MASK.fit(attention_mask=table, **sizes, remedy=OTHER)
        return Bias(table.expand(-1, -1, self.nq, self.nk))


def _of_the_batch(pattern: Pattern) -> bool:
    """Whether a pattern holds the documents of a batch, so that it already counts the tokens of whole rows."""
    return bool(parts_of(pattern, Packing))  # type: ignore[type-abstract]


def _check_tree(pattern: Pattern, own: Pattern, kind: str) -> None:
    """Raise UnsupportedError if a layer's pattern has a tree, and the mask counts distances, or separates documents."""
    parts = pattern.parts if isinstance(pattern, And) else (pattern,)
    if parts_of(own, Tree) and not all(isinstance(part, Causal | Full | KeyPadding) for part in parts):
        got = f"a Tree in {kind}, beside a mask that counts places in the row, {pattern}"
        remedy = (
            "With position_ids=tree.positions(), pass an attention_mask of ones too: without it transformers takes "
            "positions that restart for packed documents. A model with windows has no call with a Tree."
        )
        raise UnsupportedError("pattern", got, "a mask of padding and causality", remedy)


def _weights(query: Tensor, key: Tensor, pattern: Pattern, options: dict[str, Any]) -> Tensor:
    """Return the weights (B, Hq, q, k) of a call."""
    batch, heads, nk = key.shape[:3]
    if not torch.compiler.is_compiling():
        numbers = f"{batch * query.shape[1] * query.shape[2] * nk:,} weights of each layer"
        remedy = f"Each layer computes attention {1 + -(-nk // COLUMNS)} times and keeps all pairs."
        warn_once("output_attentions", "output_attentions", numbers, "False where weights are not read", remedy)

    def attended(values: Tensor) -> Tensor:
        return attention(query, key, values.expand(batch, heads, -1, -1), pattern, **options)

    return by_columns(attended, torch.arange(nk, device=key.device), nk, key.dtype)


def register() -> None:
    """Register the name ``"ringweave"`` with transformers.

    Importing this package calls it.

    Example:
        >>> from ringweave.integrations.transformers import register
        >>> register()
    """
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, pattern_mask)


def set_pattern(model: nn.Module, pattern: Pattern | str | None, layers: Sequence[int] | None = None) -> list[str]:
    """Restrict a model's self-attention layers to a pattern: they attend the pairs that the model *and* it allow.

    A layer still attends no padding, no other packed document and no future token that the model hides. In sequences
    that are packed or padded on the left, the pattern counts from the first token of each sequence; a pattern with
    :class:`ringweave.Documents` counts from the first token of the row.
    Cross-attention is not restricted, since a pattern relates the positions of one sequence.

    The pattern is stored as text in the model's config (``config.ringweave``), so that ``save_pretrained`` saves it and
    a loaded model has it again. The model gets its own copy of the config; pass the whole model to save its patterns,
    since a part has a config of its own then. A pattern of tensors or functions has no text; a warning says so when the
    model is saved. Other attention implementations ignore the pattern.

    Args:
        model: A model of transformers with the implementation ``"ringweave"``.
        pattern: The pattern, or its text; None to remove the layers' pattern.
        layers: Numbers (``layer_idx``) of the layers to set; by default all.
    Returns:
        The names of the modules that were set.
    Raises:
        PatternError: The pattern is not a pattern, or is a mixture.
        UnsupportedError: The model has another implementation, or no such layers.
    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from ringweave.integrations.transformers import patch
        >>> config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        ...                      num_attention_heads=4, num_key_value_heads=2)
        >>> model = patch(LlamaForCausalLM(config))
        >>> set_pattern(model, rw.SlidingWindow(128) | rw.Sinks(4), layers=[1])
        ['model.layers.1.self_attn']
        >>> model.config.ringweave
        {'layers': {'1': 'SlidingWindow(128) | Sinks(4)'}}
    """
    pattern = _relation(pattern)
    modules = _layers(model, layers)
    if pattern is not None:
        for module in modules.values():
            require(module.config)
    _set(model, modules, pattern)
    return list(modules)


def _set(model: nn.Module, modules: dict[str, nn.Module], pattern: Pattern | None) -> None:
    """Set the pattern of some of a model's layers, and write the change to the configs."""
    text = text_of(pattern)
    # a pattern of each batch's documents has no text, and changes no config
    changes = text is not None or not all(map(_without_text, modules.values()))
    if changes:
        restore(model)
    for module in modules.values():
        setattr(module, ATTRIBUTE, pattern)
    unsaved = record(model) if changes else []
    if text is None:
        for module in modules.values() if pattern is not None else ():
            tell_when_saved(module)
    elif unsaved:
        got = f"{pattern}, set in {', '.join(unsaved)} but not in other layers of the same numbers"
        remedy = "save_pretrained does not save it: call patch(model, pattern) again after from_pretrained."
        warn_once(f"unsaved {type(model).__name__}", "pattern", got, "one pattern for all of these layers", remedy)


def _without_text(module: nn.Module) -> bool:
    """Whether a layer has no pattern that a config holds."""
    if ATTRIBUTE not in vars(module):
        return getattr(module.config, RECORD, None) is None
    return text_of(vars(module)[ATTRIBUTE]) is None


def _relation(pattern: object) -> Pattern | None:
    """Check a pattern of layers, and parse its text."""
    if isinstance(pattern, str):
        if pattern == "eager" or pattern in ALL_ATTENTION_FUNCTIONS.valid_keys():
            got = f"{pattern!r}, the name of an attention implementation"
            remedy = f"Call model.set_attn_implementation({pattern!r}), or patch(model) for ringweave."
            raise PatternError("pattern", got, "a pattern or its text", remedy)
        pattern = parse(pattern)
    if pattern is None:
        return None
    if not isinstance(pattern, Pattern):
        refuse(pattern)
    if not pattern.combinable:
        wanted = "a relation, such as SlidingWindow(1024) | Sinks(4)"
        raise PatternError("pattern", shown(pattern), wanted, "A mixture is not a mask: use rw.longnet_attention.")
    return pattern


def _layers(model: nn.Module, layers: Sequence[int] | None) -> dict[str, Any]:
    """Return the self-attention modules of a model by name, all or those with certain numbers."""
    found = {
        name: module
        for name, module, number in numbered(model)
        if self_attention(name, module) and (layers is None or number in layers)
    }
    if not found:
        got = f"{type(model).__name__}, which has no attention layer" + (
            "" if layers is None else f" numbered {list(layers)}"
        )
        raise UnsupportedError("model", got, "layers with a layer_idx", "Name layers that the model has.")
    return found


def patch(model: M, pattern: Pattern | str | None = None, layers: Sequence[int] | None = None) -> M:
    """Switch a model to ringweave, as ``attn_implementation="ringweave"`` does when the model is made.

    The model gets its own copy of its config, so another model that was made from the same config does not change.

    Args:
        model: A model of transformers.
        pattern: A pattern for its layers, or its text; see :func:`set_pattern`. By default the layers keep their
            patterns, and a loaded model gets the patterns in its config.
        layers: Numbers of the layers that get the pattern; by default all.
    Returns:
        The model.
    Raises:
        UnsupportedError: The model does not call attention through transformers' interface.
        PatternError: The pattern is not a pattern, or is a mixture.
    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        ...                      num_attention_heads=4, num_key_value_heads=2)
        >>> model = patch(LlamaForCausalLM(config), rw.SlidingWindow(128) | rw.Sinks(4))
        >>> model(torch.arange(8)[None]).logits.shape
        torch.Size([1, 8, 64])
        >>> model.config.ringweave
        {'pattern': 'SlidingWindow(128) | Sinks(4)'}
    """
    if not isinstance(model, transformers.PreTrainedModel):
        raise UnsupportedError("model", shown(model), "a PreTrainedModel", "Use ringweave.nn for other modules.")
    if not model._can_set_attn_implementation():
        got = f"{type(model).__name__}, which does not call attention through transformers' interface"
        raise UnsupportedError("model", got, "one that does", "Replace its attention with rw.attention.")
    pattern = _relation(pattern)
    modules = {} if pattern is None else _layers(model, layers)
    configs = [vars(module).get("config") for module in model.modules()]
    if any(getattr(config, "_attn_implementation", NAME) != NAME for config in configs):
        separate(model)
    model.set_attn_implementation(NAME)
    swap(model)
    expand_later(model)
    restore(model)
    if pattern is not None:
        _set(model, modules, pattern)
    return model
