"""One sequence of a model of transformers on several ranks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers.masking_utils import causal_mask_function, create_masks_for_generate, find_packed_sequence_indices

from ...errors import ShapeError, UnsupportedError, message, shown
from ...parallel import ContextParallel
from ...patterns import Documents, Keys, Pattern
from .interface import require
from .mask_reading import All, Chunks, Distances, Relation, Same, read
from .masks import RUNNING, PatternMask
from .positions import Place, bounds_of

if TYPE_CHECKING:
    from ...parallel.transport.mesh import DeviceMesh, ProcessGroup

IGNORED = -100
# lengths whose placements are kept
_KEPT = 8


class Sharded:
    """What a forward pass over a rank's tokens is told of the whole sequence.

    Attributes:
        context: Who holds which tokens.
        padding: (B, N) bool, or None.
        packed: (B, N), the number of each token's sequence, or None.
        positions: (B, N), those that restart in it.
    """

    def __init__(
        self, context: ContextParallel, padding: Tensor | None, packed: Tensor | None, positions: Tensor | None
    ):
        self.context, self.padding, self.packed, self.positions = context, padding, packed, positions
        self._masks: dict[object, PatternMask] = {}

    def mask(self, batch: int, local: int, mask_function: Callable[..., Any] | None) -> PatternMask:
        """The whole sequence's mask of a function that was made for a rank's tokens."""
        n = self.context.seq_len
        if local != self.context.local:
            wanted = f"{self.context.local}, this rank's share of {n}"
            raise ShapeError(message("tokens", local, wanted, "Pass the model what shard() gave."))
        place = Place(batch, n, n, 0, 0)
        pattern = place.pattern(self._of_whole(read(mask_function or causal_mask_function)))
        rows: Documents | Keys | None = None if self.packed is None else place.documents(self.packed, known=False)
        known = None if self.padding is None else place.padding(self.padding)
        if known is not None:
            pattern = pattern & known
            rows = bounds_of(known) or rows
        # layers of one kind have one mask, and one plan
        mask = PatternMask(pattern, (batch, 1, local, local), 0, rows, context=self.context)
        return self._masks.setdefault(pattern.key(), mask)

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
                got = f"a mask with {type(part).__name__.strip('_').lower()} of its own"
                wanted = "windows, chunks, packing and padding"
                raise UnsupportedError(message("context", got, wanted, "Run this model on one device."))
        if self.packed is not None:
            parts.append(Same(self.packed))
        return All(tuple(parts))


class ModelContext:
    """A model whose sequences lie on several ranks: what :func:`context_parallel` makes.

    Every rank gives :meth:`shard` the same whole batch, and the model what comes of it. Layers with windows, chunks and
    without share one placement for each length; padding and packing are those of the whole sequence. Gradients are
    those of this rank's tokens: DDP or FSDP, over these ranks too, average them to the whole's.

    Args:
        model: A model of transformers with the implementation ``"ringweave"``, or DDP or FSDP around one.
        mesh: As of :class:`ringweave.ContextParallel`.
        options: Of :class:`ringweave.ContextParallel`: schedule, placement, wire, deadline.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh | ProcessGroup | None = None, **options: Any):
        inner: Any = getattr(model, "module", model)
        if not hasattr(inner, "config"):
            raise UnsupportedError(message("model", shown(model), "one of transformers", "Pass it, or DDP around it."))
        config = inner.config.get_text_config()
        require(config)
        self.config, self.mesh, self.options = config, mesh, options
        self.heads = config.num_attention_heads, getattr(config, "num_key_value_heads", config.num_attention_heads)
        self._contexts: OrderedDict[int, ContextParallel] = OrderedDict()
        self._now: Sharded | None = None
        inner.register_forward_pre_hook(self._enter)
        inner.register_forward_hook(self._leave, always_call=True)

    def context(self, seq_len: int) -> ContextParallel:
        """The context for sequences of a length, with all of the model's patterns under one placement.

        Args:
            seq_len: Tokens of the whole sequence.
        """
        known = self._contexts.pop(seq_len, None)
        if known is None:
            # the transport, once there is one, serves all lengths
            first = next(iter(self._contexts.values()), None)
            mesh: Any = self.mesh if first is None else first.transport
            known = ContextParallel(mesh, self.patterns(seq_len), seq_len, heads=self.heads, **self.options)
        self._contexts[seq_len] = known
        while len(self._contexts) > _KEPT:
            self._contexts.popitem(last=False)
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
            ``input_ids``, ``position_ids``, ``use_cache=False``, and with labels ``labels``, ``shift_labels`` and
            ``num_items_in_batch``.
        Raises:
            ShapeError: Sizes that differ.
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
        padding = None if attention_mask is None else attention_mask.bool()
        self._now = Sharded(context, padding, packed, position_ids)
        found: dict[str, Any] = {
            "input_ids": context.shard(input_ids), "position_ids": local_positions, "use_cache": False,
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
            RingError: A rank is lost.
        """
        context = self._current().context
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

    def unshard(self, x: Tensor, dim: int = 1) -> Tensor:
        """Put all ranks' parts of something together; see :meth:`ringweave.ContextParallel.unshard`."""
        return self._current().context.unshard(x, dim)

    def collate(self, inner: Callable[[Any], Mapping[str, Tensor]]) -> Callable[[Any], dict[str, Any]]:
        """A data collator that gives the Trainer this rank's part; all ranks' samplers must draw the same samples.

        Args:
            inner: The collator of whole batches.
        """

        def collate(features: Any) -> dict[str, Any]:
            whole = inner(features)
            return self.shard(**{name: whole[name] for name in _TAKEN if name in whole})

        return collate

    def _current(self) -> Sharded:
        if self._now is None:
            raise UnsupportedError(message("context", "no batch yet", "one", "Call shard() first."))
        return self._now

    def _enter(self, module: nn.Module, args: object) -> None:
        RUNNING.sharded = self._current()

    def _leave(self, module: nn.Module, args: object, output: object) -> None:
        RUNNING.sharded = None


_TAKEN = ("input_ids", "labels", "attention_mask", "position_ids")


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
