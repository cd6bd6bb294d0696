"""Context parallelism for models of transformers: each sequence is sharded over several ranks."""

from __future__ import annotations

import hashlib
import inspect
import uuid
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers.masking_utils import create_masks_for_generate, find_packed_sequence_indices

from ...cache import LRUCache
from ...errors import ShapeError, UnsupportedError, shown
from ...parallel import ContextParallel
from ...parallel.transport.protocol import Counters
from ...patterns import Full, Pattern
from .masks import PatternMask, ShardMask
from .model_cache import CACHE
from .saved_patterns import require

if TYPE_CHECKING:
    from ...parallel.transport.mesh import DeviceMesh, ProcessGroup

IGNORED = -100
# number of sequence lengths with a cached placement
_KEPT = 8
# the contexts of this process by name: a batch from a DataLoader worker finds its context here
_LIVE: weakref.WeakValueDictionary[str, ModelContext] = weakref.WeakValueDictionary()


class ModelContext:
    """A context that shards a model's sequences over ranks; :func:`context_parallel` makes it.

    Every rank passes the same whole batch to :meth:`shard`, and the result to the model. All layers share one placement
    per sequence length, with and without windows and chunks. Padding and packing apply to the whole sequence. Gradients
    are those of this rank's tokens; DDP or FSDP over the same ranks average them to the gradients of the whole.

    A sharded batch carries all facts that its forward pass needs. Batches may be sharded ahead of time, in other
    threads and in workers of a DataLoader, and be computed in any order that is the same on all ranks. The model does
    not change: a forward pass without a sharded batch is an ordinary one, and so is ``generate``.

    Args:
        model: A model of transformers with the implementation ``"ringweave"``, or DDP or FSDP around one.
        mesh: See :class:`ringweave.ContextParallel`.
        options: Options of :class:`ringweave.ContextParallel`: schedule, placement, wire, deadline.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh | ProcessGroup | None = None, **options: Any):
        inner: Any = getattr(model, "module", model)
        if not hasattr(inner, "config"):
            raise UnsupportedError("model", shown(model), "one of transformers", "Pass it, or DDP around it.")
        require(inner.config.get_text_config())
        takes = inspect.signature(inner.forward).parameters
        if inner.config.is_encoder_decoder or not {"attention_mask", "position_ids"} <= takes.keys():
            wanted = "one sequence, with attention_mask and position_ids"
            raise UnsupportedError("model", type(inner).__name__, wanted, "Run this model on one device.")
        self._begin(uuid.uuid4().hex, inner.config.get_text_config(), options, mesh)

    def _begin(self, name: str, config: Any, options: dict[str, Any], mesh: Any) -> None:
        self.config, self.options, self._name = config, options, name
        self.heads = config.num_attention_heads, getattr(config, "num_key_value_heads", config.num_attention_heads)
        # the contexts of all lengths share its connections; it only sums losses, so its length is 1
        self._root = ContextParallel(mesh, Full(), 1, heads=self.heads, **{**options, "placement": "contiguous"})
        self._contexts: LRUCache[ContextParallel] = LRUCache(max_bytes=1, most=_KEPT)
        _LIVE[name] = self

    def __reduce__(self) -> Any:
        """Pickle by name: in this process it loads as the same object, in another process as one that only shards."""
        return _found, (self._name, self.config, self.options, self._root.rank, self._root.size)

    def context(self, seq_len: int) -> ContextParallel:
        """Return the context for a sequence length, with one placement for all patterns of the model.

        Args:
            seq_len: Number of tokens in the whole sequence.
        """
        known = self._contexts.get(seq_len)
        if known is None:
            patterns = self.patterns(seq_len)
            known = ContextParallel(self._root, patterns, seq_len, heads=self.heads, **self.options)
            self._contexts.put(seq_len, known, 0)
        return known

    def patterns(self, seq_len: int) -> list[Pattern]:
        """Return the distinct patterns of the model's layers over a whole sequence.

        Args:
            seq_len: Number of tokens in the whole sequence.
        """
        like = torch.empty(1, seq_len, 0, device="cpu")
        masks = create_masks_for_generate(self.config, like, attention_mask=None, **_whole(seq_len))
        masks = list(masks.values()) if isinstance(masks, dict) else [masks]
        if not all(isinstance(mask, PatternMask) for mask in masks):
            got = f"{type(self.config).__name__}, a model with layers that have no mask of pairs"
            raise UnsupportedError("model", got, "one whose layers are all attention", "Run it on one device.")
        return list({mask.pattern: None for mask in masks})

    def shard(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> dict[str, Any]:
        """Return this rank's share of a batch as the model's arguments.

        Labels are shifted before the tokens are sharded, because shifting within a shard gives another loss. With
        ``labels``, the mean over ranks of the model's own loss is the loss of the whole batch.

        Args:
            input_ids: (B, N), the same on all ranks.
            labels: (B, N), not shifted, as the model takes them; -100 for tokens without a loss.
            attention_mask: (B, N), the padding.
            position_ids: (B or 1, N); a packed document begins at each restart.
        Returns:
            ``input_ids``, ``attention_mask``, ``position_ids``, ``use_cache=False``, and with labels ``labels``,
            ``shift_labels`` and ``num_items_in_batch``. Pass all of them: the mask describes the whole batch, and
            without it the model attends this rank's tokens only.
        Raises:
            ShapeError: The sizes differ.
            RingError: In the forward pass, if the ranks have sharded different batches.
        """
        batch, n = input_ids.shape
        for name, x in (("labels", labels), ("attention_mask", attention_mask), ("position_ids", position_ids)):
            if x is not None and (x.ndim != 2 or x.shape[1] != n or x.shape[0] not in (1, batch)):
                raise ShapeError(name, tuple(x.shape), f"{(batch, n)}", "Pass the whole batch.")
        context = self.context(n)
        packed = None
        if position_ids is not None:
            position_ids = position_ids.expand(batch, -1)
            packed = None if attention_mask is not None else find_packed_sequence_indices(position_ids)
            # padding of the shard repeats an existing position, in case the model looks positions up in a table
            local_positions = context.shard(position_ids)
        else:
            local_positions = context.positions.to(input_ids.device).clamp(max=n - 1)[None].expand(batch, -1)
        exist = torch.ones_like(input_ids, dtype=torch.bool)
        padding = None if attention_mask is None or bool(attention_mask.all()) else attention_mask.bool()
        local = context.shard(exist if padding is None else padding.expand(batch, -1))
        name = _digest(input_ids, labels, attention_mask, position_ids) if context.size > 1 else ""
        mask = ShardMask(self, n, name, local, padding, packed, None if packed is None else position_ids)
        found: dict[str, Any] = {
            "input_ids": context.shard(input_ids), "attention_mask": mask, "position_ids": local_positions,
            "use_cache": False,
        }  # fmt: skip
        if labels is not None:
            targets = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
            # shard() pads with zeros, which would be the label 0
            local = context.shard(targets - IGNORED) + IGNORED
            found |= {"labels": local, "shift_labels": local}
            found["num_items_in_batch"] = (targets != IGNORED).sum() / context.size
        return found

    def cross_entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss over the tokens of all ranks, which is the same number on every rank.

        The gradient is that of this rank's tokens times the number of ranks. The mean over ranks, which DDP and FSDP
        compute, is then the gradient of the whole batch.

        Args:
            logits: (B, local, vocabulary).
            targets: (B, local), shifted, such as ``shard()["shift_labels"]``; -100 for tokens without a loss.
        Returns:
            A scalar in float32.
        Raises:
            ShapeError: The logits do not match the targets.
            RingError: A rank is lost.
        """
        context = self._root
        if logits.shape[:2] != targets.shape:
            wanted = f"{tuple(targets.shape)} and a vocabulary, as the targets"
            raise ShapeError("logits", tuple(logits.shape), wanted, "Pass the logits of the same batch.")
        total = cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum")
        mine = torch.stack([total.detach().double(), (targets != IGNORED).sum().double()])
        with context.call.call_scope(context._tag, shape="loss", dtype="float64") as call:
            every, pending = call.all_gather(mine, "losses")
            pending.wait()
        whole, count = torch.stack(every).sum(0)
        loss = total * (context.size / count)
        # the value is that of all ranks, the gradient that of this rank
        joined: Tensor = loss.float() + (whole / count - loss.detach()).float()
        return joined

    def unshard(self, x: Tensor, batch: Mapping[str, Any], dim: int = 1) -> Tensor:
        """Gather a tensor's shards from all ranks; see :meth:`ringweave.ContextParallel.unshard`.

        Args:
            x: (..., local, ...), such as the logits of this rank's tokens.
            batch: The result of :meth:`shard` that x was computed from.
            dim: The dimension of tokens.
        """
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else batch
        if not isinstance(mask, ShardMask) or mask.owner is not self:
            raise UnsupportedError("batch", shown(mask), "a result of shard() of this context", "Pass it.")
        return mask.context.unshard(x, dim)

    def collate(self, inner: Callable[[Any], Mapping[str, Tensor]]) -> Callable[[Any], dict[str, Any]]:
        """Return a data collator that gives the Trainer this rank's share; all ranks must draw the same samples.

        Args:
            inner: The collator of whole batches; it must support pickling if DataLoader workers are spawned. A batch
                may have the arguments of :meth:`shard`, and beside ``position_ids`` the bounds of documents.
        """
        return partial(self._collate, inner)

    def _collate(self, inner: Callable[[Any], Mapping[str, Tensor]], features: Any) -> dict[str, Any]:
        whole = inner(features)
        known = {*_TAKEN, *(_PACKED if "position_ids" in whole else ())}
        if others := [name for name in whole if name not in known]:
            wanted = f"only {', '.join(_TAKEN)}"
            raise UnsupportedError("batch", f"{', '.join(others)} of the collator", wanted, "Leave out all others.")
        return self.shard(**{name: whole[name] for name in _TAKEN if name in whole})


_TAKEN = ("input_ids", "labels", "attention_mask", "position_ids")
# other names of the documents that position_ids mark
_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


class _Elsewhere:
    """A rank of a group in another process: a context with it shards batches, but computes nothing."""

    def __init__(self, rank: int, size: int, options: dict[str, Any]):
        self.rank, self.size, self.call_count = rank, size, 0
        self.deadline, self.retries = options.get("deadline", 0.0), options.get("retries", 0)
        self.counters, self.trace = Counters(size), None

    def open(self) -> str:
        """Return an empty name, since the context communicates with no other."""
        return ""

    def using(self, *args: object, **kwargs: object) -> NoReturn:
        """Refuse a call."""
        wanted, remedy = "the process that made it", "Shard the batch in the process that computes."
        raise UnsupportedError("context", "a call of another process", wanted, remedy)

    agree = exchange = using

    def close(self) -> None:
        """Do nothing, because there are no connections."""


def _found(name: str, config: Any, options: dict[str, Any], rank: int, size: int) -> ModelContext:
    """Return the context with a name, or make one that only shards in another process."""
    known = _LIVE.get(name)
    if known is None:
        known = object.__new__(ModelContext)
        known._begin(name, config, options, _Elsewhere(rank, size, options))
    return known


def _whole(seq_len: int) -> dict[str, Any]:
    """Return the arguments of transformers' mask functions for a whole sequence without a cache."""
    parameter = inspect.signature(create_masks_for_generate).parameters.get("cache_position")
    # transformers before 5.3 require the positions of the queries
    required = parameter is not None and parameter.default is parameter.empty
    return {CACHE: None} | ({"cache_position": torch.arange(seq_len, device="cpu")} if required else {})


def _digest(*tensors: Tensor | None) -> str:
    """Return a name for a batch that depends on its values, so equal batches have equal names on all ranks."""
    found = hashlib.blake2b(digest_size=8)
    for x in tensors:
        found.update(b"" if x is None else f"{tuple(x.shape)}".encode() + x.long().cpu().contiguous().numpy().tobytes())
        found.update(b"|")
    return f"batch {found.hexdigest()}"


def context_parallel(model: nn.Module, mesh: DeviceMesh | ProcessGroup | None = None, **options: Any) -> ModelContext:
    """Shard a model's sequences over ranks, with its windows, chunks, sinks, packing and padding.

    Args:
        model: A model of transformers with the implementation ``"ringweave"``, or DDP or FSDP around one.
        mesh: A device mesh of one or two dimensions, a process group, or None for this process alone.
        options: Options of :class:`ringweave.ContextParallel`: schedule, placement, wire, deadline.
    Returns:
        The context, which shards batches and combines losses.
    Raises:
        UnsupportedError: The model has another implementation, or cannot be sharded.
    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from ringweave.integrations.transformers import patch
        >>> config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        ...                      num_attention_heads=4, num_key_value_heads=2)
        >>> model = patch(LlamaForCausalLM(config))
        >>> ctx = context_parallel(model)
        >>> text = torch.arange(24)[None]
        >>> batch = ctx.shard(text, labels=text)
        >>> loss = ctx.cross_entropy(model(**batch).logits, batch["shift_labels"])
    """
    return ModelContext(model, mesh, **options)
