"""The case ``models``: models of transformers with random weights, ringweave next to the library's own attention."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ringweave.errors import UnsupportedError
from ringweave.units import nbytes

from ...tune.measure import interleaved, ratio
from ...tune.session import Say
from ..peak import peak_memory
from ..record import Measuring, Options, Target

#: Maximum bytes of eager's or sdpa's tensors of tokens x tokens; larger models are skipped.
_MOST = 8 * 2**30
_QUICK = 128
_WORDS = 512


@dataclass(frozen=True)
class _Shape:
    """A model to measure.

    Attributes:
        name: Name in tables.
        kind: Prefix of transformers' class names, before ``Model`` and ``Config``.
        tokens: Sequence length.
        heads: Query heads of 64 channels.
        sizes: Other settings of its configuration.
        share: Query heads of a key head; None if the configuration does not have the number of key heads.
        bound: Upper bound on ringweave's time over sdpa's.
        chooses: Whether the model chooses its keys, so that ringweave replaces its indexer too.
    """

    name: str
    kind: str
    tokens: int
    heads: int
    sizes: dict[str, Any]
    share: int | None = None
    bound: float | None = None
    chooses: bool = False


_SHAPES = (
    _Shape("a Llama-like layer", "Llama", 512, 16, {"num_hidden_layers": 1}, share=4, bound=1.05),
    _Shape(
        "ModernBERT's shape, 3 layers", "ModernBert", 8192, 12,
        {"num_hidden_layers": 3, "intermediate_size": 1152, "local_attention": 128, "global_attn_every_n_layers": 3},
    ),
    _Shape(
        "Mistral-like, window 1,024", "Mistral", 16384, 8,
        {"num_hidden_layers": 2, "sliding_window": 1024}, share=4,
    ),
    _Shape(
        "DeepSeek-V3.2's shape, a layer, 512 keys", "DeepseekV32", 4096, 16,
        {"num_hidden_layers": 1, "hidden_size": 2048, "mlp_layer_types": ["dense"], "n_routed_experts": 4,
         "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1, "index_topk": 512, "index_n_heads": 16},
        share=1, bound=0.2, chooses=True,
    ),
)  # fmt: skip


def measure(options: Options, say: Say) -> Measuring:
    """Check that all attentions give the same results, and time them in turn."""
    try:
        transformers = importlib.import_module("transformers")
    except ModuleNotFoundError:
        wanted = "transformers, to build its models"
        raise UnsupportedError("transformers", "not installed", wanted, "pip install transformers.") from None
    importlib.import_module("ringweave.integrations.transformers")
    said = []
    shapes = [shape for shape in _SHAPES if options.part in (None, shape.kind)]
    if not shapes:
        raise UnsupportedError("part", repr(options.part), f"one of {', '.join(x.kind for x in _SHAPES)}", "Pass one.")
    for shape in shapes:
        tokens, heads = (
            options.tokens or (_QUICK if options.quick else shape.tokens),
            options.heads or (4 if options.quick else shape.heads),
        )
        size = f"{tokens:,} tokens, {heads} heads"
        if not hasattr(transformers, f"{shape.kind}Config"):
            yield Target(shape.name, size, None, None, True, reason=f"transformers {transformers.__version__} has none")
            continue
        models = {name: _model(transformers, shape, name, tokens, heads) for name in ("ringweave", "sdpa", "eager")}
        # sdpa needs a mask of bytes; eager needs scores and weights, and backward keeps one of them for each layer; the
        # indexer of transformers has scores for each of its heads
        scores = 4 * heads * (shape.sizes["num_hidden_layers"] + 1)
        for name, squares in (("sdpa", scores if shape.chooses else 1), ("eager", scores)):
            if squares * tokens**2 > _MOST:
                del models[name]
                reason = f"{nbytes(squares * tokens**2)} of tokens times tokens"
                yield Target(f"{shape.name}: {name}", size, None, None, True, reason=reason)
        ids = torch.randint(3, _WORDS, (1, tokens), generator=torch.Generator().manual_seed(0))
        for direction, call in (("inference", _inference), ("training step", _step)):
            calls = {name: call(model, ids.to(options.device)) for name, model in models.items()}
            say(f"models, {shape.name}, {size}, {direction}")
            results = {name: each() for name, each in calls.items()}
            for name, result in results.items():
                if not torch.allclose(result, results["ringweave"], atol=1e-3, rtol=1e-3):
                    raise UnsupportedError("models", f"another result from {name}", "the same", "Report it.")
            peaks = {name: peak_memory(each, device=options.device, warm=False).nbytes for name, each in calls.items()}
            rounds = options.rounds or (3 if options.quick else 5)
            timings = interleaved(calls, rounds=rounds, warmup=0, device=options.device, budget=240)
            mine = f"{shape.name}, {direction}: ringweave's"
            yield Target(f"{mine} time", size, timings["ringweave"].median, None, False, "s")
            yield Target(f"{mine} peak memory", size, peaks["ringweave"] / 2**20, None, False, "MiB")
            for name in models:
                if name == "ringweave":
                    continue
                over = ratio(timings["ringweave"], timings[name]).medians
                bound = shape.bound if name == "sdpa" and not options.sized else None
                yield Target(f"{shape.name}, {direction}: ringweave's time over {name}'s", size, over, bound, False)
                memory = peaks["ringweave"] / max(peaks[name], 1)
                yield Target(f"{shape.name}, {direction}: peak memory over {name}'s", size, memory, None, False)
                said.append(f"{over:.2f} of {name}'s ({shape.name}, {direction})")
    return f"ringweave's time: {', '.join(said)}."


def _model(transformers: Any, shape: _Shape, attention: str, tokens: int, heads: int) -> Any:
    sizes: dict[str, Any] = {
        "vocab_size": _WORDS, "hidden_size": 64 * heads, "intermediate_size": 128 * heads, "num_attention_heads": heads,
        "max_position_embeddings": tokens, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1,
        "sep_token_id": 2,
    }  # fmt: skip
    shared = {} if shape.share is None else {"num_key_value_heads": max(1, heads // shape.share)}
    config = getattr(transformers, f"{shape.kind}Config")(**(sizes | shape.sizes | shared))
    config._attn_implementation = attention
    torch.manual_seed(0)
    model = getattr(transformers, f"{shape.kind}Model")(config).eval()
    if shape.chooses and attention == "ringweave":
        importlib.import_module("ringweave.integrations.transformers").patch(model)
    return model


def _inference(model: Any, ids: torch.Tensor) -> Callable[[], torch.Tensor]:
    options = {"use_cache": False} if hasattr(model.config, "use_cache") else {}
    model = model.to(ids.device)

    def call() -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = model(ids, **options)[0]
        return found

    return call


def _step(model: Any, ids: torch.Tensor) -> Callable[[], torch.Tensor]:
    options = {"use_cache": False} if hasattr(model.config, "use_cache") else {}

    def call() -> torch.Tensor:
        model.zero_grad()
        model(ids, **options)[0].square().mean().backward()
        first: torch.Tensor = next(model.parameters()).grad
        return first.clone()

    return call
