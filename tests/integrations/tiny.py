"""Tiny random models of transformers, by name, for tests and scripts."""

from __future__ import annotations

from typing import Any

import torch
import transformers

import ringweave.integrations.transformers  # noqa: F401  (registers the name)
from ringweave.integrations.transformers.model_cache import CACHE

__all__ = ["CACHE", "DECODERS", "ENCODERS", "SMALL", "config_of", "model_of"]

SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "attention_dropout": 0.0,
}  # fmt: skip
_TYPES = {"layer_types": ["sliding_attention", "full_attention"]}
# every token uses all experts: a choice may depend on rounding, and with one expert the router has no gradient
_EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 2}

#: the class of each model, and the entries that differ from SMALL
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "mistral": ("MistralForCausalLM", {"sliding_window": 5}),
    "qwen2": ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "gemma2": ("Gemma2ForCausalLM", {"sliding_window": 5, **_TYPES, "query_pre_attn_scalar": 8}),
    "gemma3_text": ("Gemma3ForCausalLM", {"sliding_window": 5, **_TYPES, "query_pre_attn_scalar": 8}),
    "gemma4_text": (
        "Gemma4ForCausalLM",
        {
            "sliding_window": 5, **_TYPES, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64,
            "num_kv_shared_layers": 0, "global_head_dim": 8,
        },
    ),
    "gpt_oss": ("GptOssForCausalLM", {"sliding_window": 5, **_TYPES, **_EXPERTS}),
    "llama4_text": (
        "Llama4ForCausalLM",
        {
            "attention_chunk_size": 5, **_EXPERTS, "intermediate_size_mlp": 48, "interleave_moe_layer_step": 2,
            "layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0],
        },
    ),
    "phi": ("PhiForCausalLM", {"resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "phi3": ("Phi3ForCausalLM", {"sliding_window": 5, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "mixtral": ("MixtralForCausalLM", {"sliding_window": 5, **_EXPERTS}),
}  # fmt: skip

_BERT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "type_vocab_size": 1}
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertForMaskedLM", _BERT),
    "roberta": ("RobertaForMaskedLM", {**_BERT, "pad_token_id": 1}),
    "modernbert": (
        "ModernBertForMaskedLM",
        {
            "local_attention": 6, "global_attn_every_n_layers": 2, "embedding_dropout": 0.0, "mlp_dropout": 0.0,
            "cls_token_id": 1, "sep_token_id": 2,
        },
    ),
}  # fmt: skip


def config_of(name: str, **changes: Any) -> Any:
    """Make a tiny config by the model type of transformers."""
    _, own = (DECODERS | ENCODERS)[name]
    kind = transformers.CONFIG_MAPPING[name]
    return kind(**(SMALL | own | changes))


def model_of(name: str, attention: str, config: Any = None) -> Any:
    """Make a tiny model with random weights, the same for every implementation."""
    config = config_of(name) if config is None else config
    config._attn_implementation = attention
    torch.manual_seed(0)
    model = getattr(transformers, (DECODERS | ENCODERS)[name][0])(config)
    # large weights, so that attention changes the results
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.mul_(4.0)
    return model
