"""One sequence of a model of transformers on several ranks."""

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
from ...errors import ShapeError, UnsupportedError, message, shown
from ...parallel import ContextParallel
from ...parallel.transport.protocol import Counters
from ...patterns import Full, Pattern
from .interface import require
from .masks import ShardMask

if TYPE_CHECKING:
    from ...parallel.transport.mesh import DeviceMesh, ProcessGroup

IGNORED = -100
# lengths whose placements are kept
_KEPT = 8
# the contexts of this process by name: what comes back from a worker of a DataLoader finds its own
_LIVE: weakref.WeakValueDictionary[str, ModelContext] = weakref.WeakValueDictionary()


class ModelContext:
    """A model whose sequences lie on several ranks: what :func:`context_parallel` makes.

    Every rank gives :meth:`shard` the same whole batch, and passes the model what comes of it. Layers with windows,
    chunks and without share one placement for each length; padding and packing are those of the whole sequence.
    Gradients are those of this rank's tokens: DDP or FSDP, over these ranks too, average them to the whole's.

    A sharded batch carries all that its forward pass needs to know of it. So batches may be sharded ahead, in other
    threads and in workers of a DataLoader, and passed in any order that is the same on all ranks. The model itself is
    not changed: a forward pass that was given no sharded batch is an ordinary one, and so is ``generate``.

    Args:
        model: A model of transformers with the implementation ``"ringweave"``, or DDP or FSDP around one.
        mesh: As of :class:`ringweave.ContextParallel`.
        options: Of :class:`ringweave.ContextParallel`: schedule, placement, wire, deadline.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh | ProcessGroup | None = None, **options: Any):
        inner: Any = getattr(model, "module", model)
        if not hasattr(inner, "config"):
            raise UnsupportedError(message("model", shown(model), "one of transformers", "Pass it, or DDP around it."))
        require(inner.config.get_text_config())
        takes = inspect.signature(inner.forward).parameters
        if inner.config.is_encoder_decoder or not {"attention_mask", "position_ids"} <= takes.keys():
            wanted = "one sequence, with attention_mask and position_ids"
            raise UnsupportedError(message("model", type(inner).__name__, wanted, "Run this model on one device."))
        self._begin(uuid.uuid4().hex, inner.config.get_text_config(), options, mesh)

    def _begin(self, name: str, config: Any, options: dict[str, Any], mesh: Any) -> None:
        self.config, self.options, self._name = config, options, name
        self.heads = config.num_attention_heads, getattr(config, "num_key_value_heads", config.num_attention_heads)
        # those of each length share its connections; of one token, since it only joins losses
        self._root = ContextParallel(mesh, Full(), 1, heads=self.heads, **{**options, "placement": "contiguous"})
        self._contexts: LRUCache[ContextParallel] = LRUCache(max_bytes=1, most=_KEPT)
        _LIVE[name] = self

    def __reduce__(self) -> Any:
        """Leave the model and its connections behind: elsewhere it only shards, here it is this one."""
        return _found, (self._name, self.config, self.options, self._root.rank, self._root.size)

    def context(self, seq_len: int) -> ContextParallel:
        """The context for sequences of a length, with all of the model's patterns under one placement.

        Args:
            seq_len: Tokens of the whole sequence.
        """
        known = self._contexts.get(seq_len)
        if known is None:
            patterns = self.patterns(seq_len)
            known = ContextParallel(self._root, patterns, seq_len, heads=self.heads, **self.options)
            self._contexts.put(seq_len, known, 0)
        return known

    def patterns(self, seq_len: int) -> list[Pattern]:
        """The patterns of the model's layers over a whole sequence, each once.

        Args:
            seq_len: Its tokens.
        """
        like = torch.empty(1, seq_len, 0, device="cpu")
        masks = create_masks_for_generate(self.config, like, attention_mask=None, past_key_values=None)
        found = {mask.pattern: None for mask in (masks.values() if isinstance(masks, dict) else [masks])}
        return list(found)

    def shard(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> dict[str, Any]:
        """This rank's part of a batch, as the arguments of the model.

        Labels are shifted here, before tokens are dealt out: a model that shifts them inside a shard computes another
        loss. With ``labels`` the model's own loss is such that its mean over ranks is the whole's.

        Args:
            input_ids: (B, N), the same on all ranks.
            labels: (B, N), not shifted, as the model takes them; -100 where there is no loss.
            attention_mask: (B, N), the padding.
            position_ids: (B or 1, N); where they restart a packed sequence begins.
        Returns:
            ``input_ids``, ``attention_mask``, ``position_ids``, ``use_cache=False``, and with labels ``labels``,
            ``shift_labels`` and ``num_items_in_batch``. The mask tells the model of the whole batch: pass all of them.
            A model that is given these tokens without the mask attends this rank's tokens alone.
        Raises:
            ShapeError: Sizes that differ.
            RingError: In the forward pass: ranks have sharded different batches.
        """
        batch, n = input_ids.shape
        for name, x in (("labels", labels), ("attention_mask", attention_mask), ("position_ids", position_ids)):
            if x is not None and (x.ndim != 2 or x.shape[1] != n or x.shape[0] not in (1, batch)):
                raise ShapeError(message(name, tuple(x.shape), f"{(batch, n)}", "Pass the whole batch."))
        context = self.context(n)
        packed = None
        if position_ids is not None:
            position_ids = position_ids.expand(batch, -1)
            packed = None if attention_mask is not None else find_packed_sequence_indices(position_ids)
            # what is padded repeats a position that there is
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
            # a shard's padding is zeros, and 0 is a word
            local = context.shard(targets - IGNORED) + IGNORED
            found |= {"labels": local, "shift_labels": local}
            found["num_items_in_batch"] = (targets != IGNORED).sum() / context.size
        return found

    def cross_entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The mean loss over the tokens of all ranks; the same number on each.

        Its gradient is that of this rank's tokens times the number of ranks, so that the mean over ranks, which DDP and
        FSDP take, is the gradient of the whole.

        Args:
            logits: (B, local, words).
            targets: (B, local), shifted; -100 where there is no loss: ``shard()["shift_labels"]``.
        Returns:
            A scalar, in float32.
        Raises:
            ShapeError: Logits of other tokens.
            RingError: A rank is lost.
        """
        context = self._root
        if logits.shape[:2] != targets.shape:
            wanted = f"{tuple(targets.shape)} and words, as the targets"
            raise ShapeError(message("logits", tuple(logits.shape), wanted, "Pass those of the same batch."))
        total = cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum")
        mine = torch.stack([total.detach().double(), (targets != IGNORED).sum().double()])
        with context.call.calling(context._tag, shape="loss", dtype="float64") as call:
            every, pending = call.all_gather(mine, "losses")
            pending.wait()
        whole, count = torch.stack(every).sum(0)
        loss = total * (context.size / count)
        # the value of all ranks, the gradient of this one
        joined: Tensor = loss.float() + (whole / count - loss.detach()).float()
        return joined

    def unshard(self, x: Tensor, batch: Mapping[str, Any], dim: int = 1) -> Tensor:
        """Put all ranks' parts of something together; see :meth:`ringweave.ContextParallel.unshard`.

        Args:
            x: (..., local, ...), such as the logits of this rank's tokens.
            batch: What :meth:`shard` gave, of which x was computed.
            dim: The dimension of tokens.
        """
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else batch
        if not isinstance(mask, ShardMask) or mask.owner is not self:
            raise UnsupportedError(message("batch", shown(mask), "what shard() gave", "Pass it beside x."))
        return mask.context.unshard(x, dim)

    def collate(self, inner: Callable[[Any], Mapping[str, Tensor]]) -> Callable[[Any], dict[str, Any]]:
        """A data collator that gives the Trainer this rank's part; all ranks' samplers must draw the same samples.

        Args:
            inner: The collator of whole batches; for workers that are spawned it can be pickled.
        """
        return partial(self._collate, inner)

    def _collate(self, inner: Callable[[Any], Mapping[str, Tensor]], features: Any) -> dict[str, Any]:
        whole = inner(features)
        return self.shard(**{name: whole[name] for name in _TAKEN if name in whole})


_TAKEN = ("input_ids", "labels", "attention_mask", "position_ids")


class _Elsewhere:
    """A rank's place in a group of another process: with it a context deals tokens out, and computes nothing."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size, self.deadline, self.retries, self.step = rank, size, 0.0, 0, 0
        self.counters, self.trace = Counters(size), None

    def open(self) -> str:
        """Name a context, which meets no other."""
        return ""

    def using(self, *args: object, **kwargs: object) -> NoReturn:
        """Refuse a call."""
        wanted, remedy = "the process that made it", "Shard the batch in the process that computes."
        raise UnsupportedError(message("context", "a call of another process", wanted, remedy))

    agree = exchange = using

    def close(self) -> None:
        """Do nothing: it has no connections."""


def _found(name: str, config: Any, options: dict[str, Any], rank: int, size: int) -> ModelContext:
    """Find the context by its name, or in another process make one that only shards."""
    known = _LIVE.get(name)
    if known is None:
        known = object.__new__(ModelContext)
        known._begin(name, config, options, _Elsewhere(rank, size))
    return known


def _digest(*tensors: Tensor | None) -> str:
    """Name a batch by its values, the same on all ranks that have the same one."""
    found = hashlib.blake2b(digest_size=8)
    for x in tensors:
        found.update(b"" if x is None else f"{tuple(x.shape)}".encode() + x.long().cpu().contiguous().numpy().tobytes())
        found.update(b"|")
    return f"batch {found.hexdigest()}"


def context_parallel(model: nn.Module, mesh: DeviceMesh | ProcessGroup | None = None, **options: Any) -> ModelContext:
    """Share a model's sequences among ranks: windows, chunks, sinks, packing and padding included.

    Args:
        model: A model of transformers with the implementation ``"ringweave"``, or DDP or FSDP around one.
        mesh: A device mesh of one or two dimensions, a process group, or None for this process alone.
        options: Of :class:`ringweave.ContextParallel`: schedule, placement, wire, deadline.
    Returns:
        What shards batches and joins losses.
    Raises:
        UnsupportedError: A model with another implementation.
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
