"""Tiny random models of the families that choose their keys, by name."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers

import ringweave.integrations.transformers  # noqa: F401  (registers the name)

# with many index heads no two scores are equal: the relu of all heads is never 0 at once
_INDEX = {"index_topk": 6, "index_head_dim": 16, "index_n_heads": 16}
_SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
# every token uses all experts: a choice may depend on rounding
_EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}
_LATENT: dict[str, Any] = {
    "intermediate_size": 48, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 12, "moe_intermediate_size": 24, **_EXPERTS, **_INDEX,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
}  # fmt: skip
_SHARED = {"indexer_types": ["full", "shared", "full"]}

#: the model's class, the class of its text config, and the entries of this config that differ from _SMALL
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "deepseek_v32": ("DeepseekV32ForCausalLM", "DeepseekV32Config", _LATENT),
    "glm_moe_dsa": ("GlmMoeDsaForCausalLM", "GlmMoeDsaConfig", {**_LATENT, **_SHARED}),
    "mistral_large4": (
        "MistralLarge4ForConditionalGeneration", "MistralLarge4TextConfig",
        {
            **{name: value for name, value in _LATENT.items() if name != "q_lora_rank"}, **_SHARED,
            "kv_source_layers": [0, 1, 0], "no_rope_layers": [1, 0, 1],
        },
    ),
    "hy_v4": ("HYV4ForCausalLM", "HYV4Config", {**_LATENT, **_SHARED, "learnable_sink_init": 0.5, "hc_mult": 2}),
    "hy_v4_vl": (
        "HYV4VLForConditionalGeneration", "HYV4VLTextConfig",
        {
            **_LATENT, **_SHARED, "learnable_sink_init": 0.5, "hc_mult": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
        },
    ),
    "axk2": ("AXK2ForCausalLM", "AXK2Config", {**_LATENT, "gated_norm_rank": 4}),
    "dots3_note": (
        "Dots3NoteForCausalLM", "Dots3NoteTextConfig",
        {
            **_LATENT, "head_dim": 16, "shared_experts_intermediate_size": 24, "sliding_window_size": 5,
            "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"],
            "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 24, "swa_kv_lora_rank": 16,
            "swa_head_dim": 16, "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 8,
        },
    ),
    "minimax_m3_vl": (
        "MiniMaxM3VLForCausalLM", "MiniMaxM3VLTextConfig",
        {
            "intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 16, "rotary_dim": 8, "index_head_dim": 16,
            "index_n_heads": 2, "index_block_size": 4, "index_topk_blocks": 2, "num_local_experts": 4,
            "num_experts_per_tok": 4, "dense_intermediate_size": 48, "shared_intermediate_size": 24,
            "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
    ),
    "glm5_next": (
        "Glm5NextForConditionalGeneration", "Glm5NextTextConfig",
        {
            **_LATENT, "qk_rope_head_dim": 0, "index_topk": 8, "index_kpool": 2, "linear_head_dim": 8,
            "linear_num_heads": 4, "hc_mult": 2,
            "layer_types": ["linear_attention", "indexed_attention", "indexed_attention"],
            "indexer_types": ["full", "full", "shared"],
        },
    ),
    "qwen4_exp": (
        "Qwen4ExpForCausalLM", "Qwen4ExpTextConfig",
        {
            "num_key_value_heads": 2, "head_dim": 16, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
            "linear_num_key_heads": 2, "linear_num_value_heads": 4, "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 4, "hc_count": 2,
            "hc_lowrank": 8, "indexer_n_heads": 8, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8,
            "indexer_compress_ratio": 2, "layer_types": ["linear_attention", "indexed_attention", "indexed_attention"],
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1], "mrope_interleaved": True,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "deepseek_v4": (
        "DeepseekV4ForCausalLM", "DeepseekV4Config",
        {
            "moe_intermediate_size": 24, "num_key_value_heads": 1, "head_dim": 16, "q_lora_rank": 24,
            "n_routed_experts": 4, "num_experts_per_tok": 4, "n_shared_experts": 1, "hc_mult": 2, "sliding_window": 6,
            "o_groups": 2, "o_lora_rank": 8, **_INDEX, "index_topk": 3, "partial_rotary_factor": 0.5,
            "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
            "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
            "mlp_layer_types": ["moe", "moe", "moe"],
        },
    ),
}  # fmt: skip

# of the installed version
FAMILIES = {name: family for name, family in FAMILIES.items() if hasattr(transformers, family[1])}
# models with images: the config's class and the vision config; the tests pass text only
_SEEING: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral_large4": (
        "MistralLarge4Config",
        {
            "model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
            "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
        },
    ),
    "hy_v4_vl": (
        "HYV4VLConfig",
        {
            "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
            "out_hidden_size": 32, "max_image_size": 32,
        },
    ),
    "glm5_next": (
        "Glm5NextConfig",
        {
            "depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 32, "intermediate_size": 16,
            "image_size": 28, "projection_intermediate_size": 16,
        },
    ),
}  # fmt: skip


def chooser(name: str, attention: str, **changes: Any) -> Any:
    """Make a tiny model with random weights, the same for every implementation, with a config of its own."""
    kind, config_kind, own = FAMILIES[name]
    config = getattr(transformers, config_kind)(**copy.deepcopy({**_SMALL, **own, **changes}))
    if name in _SEEING:
        whole, vision = _SEEING[name]
        config = getattr(transformers, whole)(text_config=config, vision_config=copy.deepcopy(vision))
    config._attn_implementation = attention
    torch.manual_seed(0)
    model = getattr(transformers, kind)(config)
    with torch.no_grad():
        for weight in model.parameters():
            # large weights, so that attention changes the results
            if weight.ndim > 1:
                weight.mul_(4.0)
            elif not weight.any():
                weight.normal_()
        # a padding token that a generation finds would have equal scores for all keys
        model.get_input_embeddings().weight[0].normal_()
    return model
