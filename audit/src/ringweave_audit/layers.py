"""Audit every attention call of a model against the masks that its configuration implies.

Calls are intercepted where models make them: transformers' attention interface, ``scaled_dot_product_attention``,
``flex_attention``, ``multi_head_attention_forward`` and ringweave's operator. Each call is first probed with its mask
and arguments, and then executed unchanged.
"""

from __future__ import annotations

import copy
import functools
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ringweave.errors import ShapeError
from ringweave.patterns import Causal, Documents, Full, KeyPadding, Pattern, Segments, SlidingWindow
from ringweave.patterns.traced import of_keys

from .counts import Counts
from .verdict import Comparison, compare, named
from .weight_probe import Attended, attended


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One intercepted attention call.

    Attributes:
        name: Name of the module that made the call.
        through: Name of the implementation in transformers, or of the function.
        module: The module, or None if unknown.
        found: The attended pairs.
        bias: Whether the call passed a bias in addition to its mask.
        sinks: Whether the module has learned sinks.
        causal: Causality as passed in the call, or None.
        scale: Factor of the scores that the call passed; "fitted" if unknown.
        softcap: Cap of the scores that the call passed, None or 0 for no cap; "fitted" if unknown.
    """

    name: str
    through: str
    module: nn.Module | None
    found: Attended
    bias: bool
    sinks: bool
    causal: bool | None = None
    scale: float | Literal["fitted"] | None = "fitted"
    softcap: float | Literal["fitted"] | None = "fitted"


@dataclass(frozen=True, eq=False)
class AttentionLayer:
    """The verdict on one attention call.

    Attributes:
        name: Name of the module that made the call.
        through: Name of the implementation in transformers, or of the function.
        comparison: Attended pairs against the expected pattern; None if no pattern is expected.
        found: The attended pairs.
        named: Pattern attended by the first batch element and head, or None if no known pattern fits.
    """

    name: str
    through: str
    comparison: Comparison | None
    found: Attended
    named: Pattern | None

    @property
    def agrees(self) -> bool | None:
        """Whether the call attends the expected pattern; None if it was not examined, as no pattern is expected."""
        return None if self.comparison is None else self.comparison.agrees

    @property
    def sentence(self) -> str:
        """Description of the result."""
        if self.comparison is not None:
            return self.comparison.sentence
        found = "pairs that fit no known pattern" if self.named is None else repr(self.named)
        return f"not examined, as no pattern is expected: attends {found}"

    def as_dict(self) -> dict[str, Any]:
        """Return the verdict as values that can be written as JSON."""
        sinks = self.found.sinks
        return {
            "layer": self.name,
            "through": self.through,
            "agrees": self.agrees,
            "sentence": self.sentence,
            "attends": None if self.named is None else repr(self.named),
            "scale": self.found.scale,
            "sinks": None if sinks is None or bool(sinks.isneginf().all()) else sinks.tolist(),
        }


@dataclass(frozen=True, eq=False)
class ModelAudit:
    """The verdicts on all attention calls of a model.

    Attributes:
        layers: Verdicts in the order of the calls.
        bypassed: Largest difference between the model's outputs with and without interception, 0 if they agree. A
            difference means that a fused path bypasses a module. None if the outputs could not be compared.
    """

    layers: tuple[AttentionLayer, ...]
    bypassed: float | None

    @property
    def counts(self) -> Counts:
        """Numbers of calls that agree, differ and were not examined."""
        return Counts.of(layer.agrees for layer in self.layers)

    @property
    def agrees(self) -> bool | None:
        """Whether every call attends the expected pattern, and no fused path bypasses a module.

        None if nothing differs, but a call or the outputs were not examined, or no call was seen.
        """
        outputs = None if self.bypassed is None else self.bypassed == 0
        return Counts.of([self.counts.agrees, outputs]).agrees

    def remarks(self) -> list[str]:
        """Describe the findings that belong to no single call."""
        said = [] if self.layers else ["not examined: no attention call was seen"]
        if self.bypassed is None:
            said.append("not examined: the outputs with and without the audit could not be compared")
        elif self.bypassed:
            said.append(f"a fused path bypasses a module: without the audit the output differs by {self.bypassed:.2g}")
        return said

    def __str__(self) -> str:
        lines = [f"{layer.name} ({layer.through}): {layer.sentence}" for layer in self.layers]
        return "\n".join(lines + self.remarks())


# a probe's calls go past every other mode of torch functions; torch has no public name for that
_no_modes = getattr(torch._C, "DisableTorchFunction", nullcontext)
# interception patches functions of the whole process, so only one thread may intercept at a time
_one = threading.RLock()


@contextmanager
def intercepted(model: nn.Module | None = None) -> Iterator[list[AttentionCall]]:
    """Probe every attention call that this thread makes inside the block; blocks of other threads wait.

    Args:
        model: Model from which calls get the names of their modules.
    Returns:
        The list of calls, which grows with each call.
    Example:
        >>> with rw.audit.intercepted() as calls:
        ...     _ = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        >>> rw.audit.compare(calls[0].found, rw.Causal()).agrees
        True
    """
    watch = _Watch(model)
    with _one, watch.patched(), watch.followed(), _Mode(watch):
        yield watch.calls


def model(
    model: nn.Module,
    inputs: Mapping[str, Any] | tuple[Any, ...] | Tensor,
    expect: Pattern | Mapping[str, Pattern] | Callable[[AttentionCall], Pattern | None] | None = None,
    *,
    q_offset: int = 0,
) -> ModelAudit:
    """Audit every attention call of a model.

    For a transformers model, the expected patterns follow from the configuration (causality, each layer's window or
    chunk) and from ``inputs`` (padding, and documents packed by position ids). The model is called twice, in evaluation
    mode, from the same state of torch's random number generators; the state is restored afterwards.

    Args:
        model: Any module. Memory grows with the square of the number of tokens, so use a small one.
        inputs: Arguments of the model: a mapping of keyword arguments, a tuple, or a single tensor.
        expect: Expected patterns if no configuration implies them: one pattern for all calls, patterns by module name,
            or a function from a :class:`AttentionCall` to a pattern or None.
        q_offset: Position of the first query, for a step with a cache.
    Returns:
        A :class:`ModelAudit`; ``agrees`` is the overall result, ``str()`` lists every call.
    Raises:
        ShapeError: ``expect`` names a module that makes no attention call.
    Example:
        >>> encoder = torch.nn.TransformerEncoderLayer(32, 4, batch_first=True).eval()
        >>> print(rw.audit.model(encoder, torch.randn(2, 16, 32), expect=rw.Full()))
        self_attn (multi_head_attention_forward): agrees with Full()
    """
    named_args: dict[str, Any] = dict(inputs) if isinstance(inputs, Mapping) else {}
    args = () if isinstance(inputs, Mapping) else inputs if isinstance(inputs, tuple) else (inputs,)
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        # run compiled parts eagerly: the masks are the same, and each probe would be compiled again
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            # fork the random state, so that dropout and other random parts draw the same numbers in both calls
            with torch.random.fork_rng():
                plain = _plain(model, args, named_args)
            with torch.random.fork_rng(), intercepted(model) as calls:
                seen = _first(model(*args, **named_args))
    finally:
        # restore each module's mode: some parts may have been in evaluation mode
        for module, mode in training.items():
            module.training = mode
    unknown = sorted({*expect} - {call.name for call in calls}) if isinstance(expect, Mapping) else []
    if unknown:
        seen_names = ", ".join(sorted({call.name for call in calls})) or "none"
        raise ShapeError("expect", ", ".join(unknown), f"modules that attend: {seen_names}", "Correct the name.")
    promises = _Promises(model, named_args, q_offset)
    return ModelAudit(tuple(_layer(call, expect, promises) for call in calls), _apart(plain, seen))


def _layer(call: AttentionCall, expect: Any, promises: _Promises) -> AttentionLayer:
    pairs = call.found.pairs
    nk = pairs.shape[3]
    name = named(pairs[0, 0].cpu(), promises.q_offset)
    if expect is None:
        pattern, rows, k_offset = promises.of(call)
    else:
        rows, k_offset = None, 0
        pattern = expect if isinstance(expect, Pattern) else None
        if isinstance(expect, Mapping):
            pattern = expect.get(call.name)
        elif pattern is None and callable(expect):
            pattern = expect(call)
    if pattern is None:
        return AttentionLayer(call.name, call.through, None, call.found, name)
    offset = promises.q_offset if pairs.shape[2] <= nk + k_offset else 0
    comparison = compare(
        call.found, pattern, q_offset=offset, k_offset=k_offset, rows=rows, bias=call.bias, sinks=call.sinks,
        scale=call.scale, softcap=call.softcap,
    )  # fmt: skip
    return AttentionLayer(call.name, call.through, comparison, call.found, name)


def _plain(model: nn.Module, args: tuple[Any, ...], named_args: dict[str, Any]) -> Tensor | None:
    """Call a model without the audit, on copies of inputs with a state, such as caches; None if they have no copy."""
    try:
        # a model does not write to its tensors, but to a cache
        tensors = {id(x): x for x in (*args, *named_args.values()) if isinstance(x, Tensor)}
        args, named_args = copy.deepcopy((args, named_args), tensors)
    except (TypeError, RuntimeError, NotImplementedError):
        return None
    return _first(model(*args, **named_args))


def _first(found: Any) -> Tensor | None:
    """Return the first tensor of numbers in a model's outputs: the logits before a loss."""
    if isinstance(found, Tensor):
        return found if found.is_floating_point() else None
    if isinstance(found, Mapping):
        names = [name for name in ("logits", "last_hidden_state") if name in found]
        found = [found[name] for name in (*names, *found)]
    inner = map(_first, found) if isinstance(found, (tuple, list)) else ()
    return next((each for each in inner if each is not None), None)


def _apart(plain: Tensor | None, seen: Tensor | None) -> float | None:
    if plain is None or seen is None or plain.shape != seen.shape:
        return None
    apart = float((plain.double() - seen.double()).abs().nan_to_num(0.0).max())
    size = float(plain.double().abs().nan_to_num(0.0).max())
    return apart if apart > 1000 * torch.finfo(plain.dtype).eps * max(size, 1.0) else 0.0


class _Watch:
    """A recorder of attention calls, with the stack of running modules."""

    def __init__(self, model: nn.Module | None):
        self.model = model
        self.calls: list[AttentionCall] = []
        self.names = {} if model is None else {id(module): name for name, module in model.named_modules()}
        self.stack: list[nn.Module] = []
        self.probing = False
        self._thread = threading.get_ident()

    @property
    def passes(self) -> bool:
        """Whether to ignore a call, because it is a probe or comes from another thread."""
        return self.probing or threading.get_ident() != self._thread

    def record(
        self,
        fn: Callable[[Tensor, Tensor, Tensor], Any],
        tensors: tuple[Tensor, Tensor, Tensor],
        through: str,
        module: nn.Module | None = None,
        bias: bool = False,
        **says: Any,
    ) -> None:
        with self.passing(), torch.no_grad(), _no_modes():
            found = attended(fn, *(x.detach() for x in tensors))
        if module is None and self.stack:
            module = self.stack[-1]
        name = self.names.get(id(module), "") if module is not None else ""
        sinks = module is not None and isinstance(getattr(module, "sinks", None), Tensor)
        self.calls.append(AttentionCall(name or f"call {len(self.calls)}", through, module, found, bias, sinks, **says))

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Ignore calls inside the block: they are probes, or part of a call that was recorded."""
        self.probing = True
        try:
            yield
        finally:
            self.probing = False

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Track by hooks which module is running."""
        handles = []

        def leave(*_: object) -> None:
            self.stack.pop()

        for module in self.model.modules() if self.model is not None else ():
            handles.append(module.register_forward_pre_hook(lambda module, _: self.stack.append(module)))
            handles.append(module.register_forward_hook(leave, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Patch the entry points that are not torch functions: transformers' interface and flex_attention."""
        undo: list[tuple[Any, str, Any]] = []
        utils = sys.modules.get("transformers.modeling_utils")
        if utils is not None:
            undo += self._interface(utils.AttentionInterface)
        flex = sys.modules.get("torch.nn.attention.flex_attention")
        if flex is not None:
            wrapper = self._flex(flex.flex_attention)
            # Models import the function by name, so patch it in every module. gc.get_referrers would be faster, but it
            # misses objects that were frozen by gc.freeze, as servers do.
            found = [(flex, "flex_attention", flex.flex_attention)]
            for holder in list(sys.modules.values()):
                if holder is not flex:
                    names = list(getattr(holder, "__dict__", {}).items())
                    found += [(holder, name, value) for name, value in names if value is flex.flex_attention]
            for holder, name, _ in found:
                setattr(holder, name, wrapper)
            undo += found
        try:
            yield
        finally:
            for holder, name, value in undo:
                setattr(holder, name, value)

    def _interface(self, interface: Any) -> list[tuple[Any, str, Any]]:
        """Patch transformers' table of attention functions; return the replaced attributes."""
        if hasattr(interface, "get_interface"):
            original = interface.get_interface

            @functools.wraps(original)
            def get_interface(these: Any, implementation: str, default: Any) -> Any:
                return self._wrapped(original(these, implementation, default), implementation or "eager")

            interface.get_interface = get_interface
            return [(interface, "get_interface", original)]
        # the first versions of transformers 5 index the table, and call each model's own function for eager attention
        item = interface.__getitem__

        @functools.wraps(item)
        def get_item(these: Any, implementation: str) -> Any:
            return self._wrapped(item(these, implementation), implementation)

        interface.__getitem__ = get_item
        undo = [(interface, "__getitem__", item)]
        for name, holder in list(sys.modules.items()):
            eager = getattr(holder, "__dict__", {}).get("eager_attention_forward")
            if name.startswith("transformers.models.") and callable(eager):
                holder.eager_attention_forward = self._wrapped(eager, "eager")  # type: ignore[attr-defined]
                undo.append((holder, "eager_attention_forward", eager))
        return undo

    def _wrapped(self, function: Callable[..., Any], implementation: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Any:
            if self.passes:
                return function(module, query, key, value, *args, **options)

            def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                out: Tensor = function(module, q, k, v, *args, **options)[0]
                return out.transpose(1, 2)

            # some models pass the mask by keyword
            mask = args[0] if args else options.get("attention_mask")
            bias = options.get("position_bias") is not None or _is_bias(mask)
            says = {"causal": options.get("is_causal"), "softcap": options.get("softcap")}
            if options.get("scaling") is not None:
                says["scale"] = options["scaling"]
            self.record(fn, (query, key, value), implementation, module, bias, **says)
            with self.passing():
                return function(module, query, key, value, *args, **options)

        return call

    def _flex(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Any:
            def fn(q: Tensor, k: Tensor, v: Tensor) -> Any:
                return function(q, k, v, *args, **options)

            if self.passes:
                return fn(query, key, value)
            bias = (args[0] if args else options.get("score_mod")) is not None
            says: dict[str, Any] = {"scale": options.get("scale"), "softcap": "fitted" if bias else None}
            self.record(fn, (query, key, value), "flex_attention", bias=bias, **says)
            with self.passing():
                return fn(query, key, value)

        return call


def _is_bias(mask: Any) -> bool:
    """Whether a dense mask contains a bias: finite values other than 0 and large negative ones, which mask."""
    if not isinstance(mask, Tensor) or not mask.is_floating_point():
        return False
    return bool(((mask != 0) & (mask > -1e3)).any())


def _with_heads(x: Tensor) -> Tensor:
    """Reshape (..., N, D) to (B, H, N, D): flatten leading dimensions to the batch, and add missing ones of size 1."""
    return x[:, None] if x.ndim == 3 else x[None, None] if x.ndim < 3 else x.flatten(0, -4)


def _is_ours(function: Any) -> bool:
    """Whether a function is one of ringweave's forward operators."""
    if getattr(function, "namespace", "") != "ringweave":
        return False
    name = str(function.overloadpacket.__name__)
    return name.startswith("attention") and "backward" not in name


class _Mode(TorchFunctionMode):
    """A mode that sees calls of torch functions, under whatever name a model imported them."""

    def __init__(self, watch: _Watch):
        super().__init__()
        self.watch = watch

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # a mode is active in its thread only, so ask `probing`, not `passes`; torch.compile traces this code too
        if self.watch.probing:
            return function(*args, **kwargs)
        name = getattr(function, "__name__", "")
        if function is torch.nn.functional.scaled_dot_product_attention:
            self._sdpa(function, args, kwargs)
        elif name == "multi_head_attention_forward":
            self._multi_head(function, args, kwargs)
            with self.watch.passing():
                return function(*args, **kwargs)
        elif _is_ours(function):
            self.watch.record(lambda q, k, v: function(q, k, v, *args[3:], **kwargs)[0], args[:3], "ringweave")
        return function(*args, **kwargs)

    def _sdpa(self, function: Any, args: Any, kwargs: Any) -> None:
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        bound = dict(zip(names, args, strict=False)) | kwargs
        tensors = tuple(bound.pop(name) for name in names[:3])
        bound["dropout_p"] = 0.0
        bias = _is_bias(bound.get("attn_mask"))
        shapes = [x.shape for x in tensors]

        def fn(*four: Tensor) -> Tensor:
            out: Tensor = function(*(x.reshape(shape) for x, shape in zip(four, shapes, strict=True)), **bound)
            return _with_heads(out)

        says = {"scale": bound.get("scale"), "softcap": None}
        self.watch.record(fn, tuple(map(_with_heads, tensors)), "scaled_dot_product_attention", bias=bias, **says)  # type: ignore[arg-type]

    def _multi_head(self, function: Any, args: Any, kwargs: Any) -> None:
        """Record a call of multi_head_attention_forward, with its projections replaced by identities."""
        import inspect

        bound = inspect.signature(function).bind(*args, **kwargs)
        bound.apply_defaults()
        options = dict(bound.arguments)
        query, key, value = (options.pop(name) for name in ("query", "key", "value"))
        heads, width = options["num_heads"], options["embed_dim_to_check"]
        batched = query.ndim == 3
        if not batched:
            query, key, value = query[:, None], key[:, None], value[:, None]
        eye = torch.eye(width, dtype=query.dtype, device=query.device)
        options |= dict.fromkeys(("in_proj_weight", "in_proj_bias", "bias_k", "bias_v", "out_proj_bias"))
        options |= dict.fromkeys(("q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj_weight"), eye)
        options |= {"use_separate_proj_weight": True, "dropout_p": 0.0, "training": False}

        def heads_first(x: Tensor) -> Tensor:
            return torch.empty(x.shape[1], heads, x.shape[0], width // heads, dtype=query.dtype, device=query.device)

        def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            flat = (x.permute(2, 0, 1, 3).flatten(2) for x in (q, k, v))
            out: Tensor = function(*(x if batched else x[:, 0] for x in flat), **options)[0]
            out = (out if batched else out[:, None]).unflatten(2, (heads, -1))
            return out.permute(1, 2, 0, 3)

        shapes = heads_first(query), heads_first(key), heads_first(value)
        self.watch.record(fn, shapes, "multi_head_attention_forward", bias=_is_bias(options.get("attn_mask")))


_CROSS = re.compile(r"cross|enc\w*_att|encdec").search
_NOT_TEXT = re.compile("vision|image|video|audio|speech").match


class _Promises:
    """The patterns that a transformers configuration and the inputs imply for each call."""

    def __init__(self, model: nn.Module, inputs: Mapping[str, Any], q_offset: int):
        self.config = getattr(model, "config", None)
        self.q_offset = q_offset
        self.padding = inputs.get("attention_mask")
        generates = getattr(model, "can_generate", None)
        self.decodes = bool(generates and generates()) and not getattr(self.config, "is_encoder_decoder", False)
        ids = inputs.get("position_ids")
        self.documents = None
        parts = {name: getattr(self.config, name, None) for name in getattr(self.config, "sub_configs", ())}
        self.unread = {part.model_type for name, part in parts.items() if part is not None and _NOT_TEXT(name)}
        if self.padding is None and isinstance(ids, Tensor) and ids.ndim == 2:
            restarts = ids.diff(dim=1) != 1
            if bool(restarts.any()):
                self.documents = Documents(ids=nn.functional.pad(restarts.long().cumsum(1), (1, 0)))

    def of(self, call: AttentionCall) -> tuple[Pattern | None, Tensor | None, int]:
        """Return the expected pattern, the queries to compare, and the position of the first key."""
        module, (nq, nk) = call.module, call.found.pairs.shape[2:]
        config: Any = getattr(module, "config", None) or self.config
        if module is None or not hasattr(config, "model_type"):
            return None, None, 0
        total = self.q_offset + nq
        usual = self.decodes and config.model_type not in self.unread
        # a call with is_causal=False may still pass a causal mask, so also ask the module and the model
        causal = bool(call.causal or getattr(module, "is_causal", usual))
        # some decoders set only is_decoder, and set it for attention to an encoder too
        causal |= bool(getattr(module, "is_decoder", False)) and nk >= total
        # cross-attention may attend all keys of the encoder, regardless of the layer's kind
        crosses = _CROSS(call.name.lower()) is not None
        causal &= not crosses
        k_offset = max(0, total - nk) if causal else 0
        local = Full() if crosses else _local(config, module, causal)
        pattern, rows = local, None
        padding = self.padding
        known = isinstance(padding, Tensor) and padding.ndim == 2 and padding.shape[1] in (total, nk)
        # an image can have the same number of tokens as the text, so sizes cannot tell them apart
        known &= config.model_type not in self.unread
        if isinstance(padding, Tensor) and known and not bool(padding.bool().all()):
            there = padding[:, : total if causal else nk].cpu() != 0
            # a static cache has room for tokens to come
            keys, bounds = _keys(nn.functional.pad(there, (0, max(0, k_offset + nk - there.shape[1]))))
            pattern = (local.within(bounds) if "Segments" in local.spec else local) & keys
            if padding.shape[1] >= total and causal | (nq == nk):
                rows = padding[:, total - nq : total].cpu() != 0
        elif nk > total and causal:
            pattern = local & KeyPadding(total)
        if self.documents is not None and nq == nk:
            pattern = local.within(self.documents)
        return pattern, rows, k_offset


def _keys(there: Tensor) -> tuple[Pattern, KeyPadding]:
    """Return the pattern of the keys that exist, padding between them included, and their bounds."""
    keys = of_keys(there)
    return keys, next(part for part in (keys, *keys.parts_within()) if isinstance(part, KeyPadding))


def _local(config: Any, module: nn.Module, causal: bool) -> Pattern:
    """Return the pattern that a layer's kind implies, without padding."""
    base: Pattern = Causal() if causal else Full()
    index = getattr(module, "layer_idx", None)
    kinds = getattr(config, "layer_types", None)
    kind = kinds[index] if kinds and index is not None and index < len(kinds) else None
    window = getattr(config, "sliding_window", None)
    if kind is None and window and getattr(config, "use_sliding_window", True) and not kinds:
        kind = "sliding_attention"
    if kind == "chunked_attention":
        return Segments(int(config.attention_chunk_size)) & base
    if kind == "sliding_attention" and window:
        # causal: the last `window` tokens, including the query's; otherwise `window` tokens on each side
        return SlidingWindow(int(window) - 1) if causal else SlidingWindow(int(window), int(window))
    return base


__all__ = ["AttentionCall", "AttentionLayer", "ModelAudit", "intercepted", "model"]
