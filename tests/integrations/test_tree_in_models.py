"""A model of transformers over a tree computes each path as a row of its own, or refuses a mask that counts places."""

from __future__ import annotations

import pytest
import torch

import ringweave as rw

transformers = pytest.importorskip("transformers")

from ringweave.integrations.transformers import patch, set_pattern  # noqa: E402

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


def packed() -> rw.trees.Packed:
    return rw.trees.pack(torch.randint(0, 64, (30,)), [torch.randint(0, 64, (n,)) for n in (5, 9, 17)])


@torch.no_grad()
def test_a_model_over_a_tree_has_the_logits_of_separate_rows() -> None:
    torch.manual_seed(0)
    model = patch(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))).eval()
    made = packed()
    wanted = [model(row[None]).logits[0] for row in rw.trees.unpack(made.tokens, made)]
    set_pattern(model, made.tree)
    ids, positions = made.tokens[None], made.tree.positions()[None]
    out = model(ids, position_ids=positions, attention_mask=torch.ones_like(ids)).logits[0]
    torch.testing.assert_close(rw.trees.unpack(out, made), wanted)


@torch.no_grad()
def test_positions_that_are_read_as_packing_are_refused() -> None:
    """Without a cache and a mask, transformers takes positions that restart for packed documents."""
    model = patch(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))).eval()
    made = packed()
    set_pattern(model, rw.Causal().within(made.tree))
    with pytest.raises(rw.UnsupportedError, match=r"a Tree in LlamaAttention, .* Documents.*pass an attention_mask"):
        model(made.tokens[None], position_ids=made.tree.positions()[None], use_cache=False)


@torch.no_grad()
def test_windows_that_count_places_are_refused() -> None:
    config = transformers.MistralConfig(sliding_window=8, **SIZES)
    model, made = patch(transformers.MistralForCausalLM(config)).eval(), packed()
    set_pattern(model, made.tree)
    ids = made.tokens[None]
    with pytest.raises(rw.UnsupportedError, match=r"a Tree in MistralAttention, .* SlidingWindow\(7\)"):
        model(ids, position_ids=made.tree.positions()[None], attention_mask=torch.ones_like(ids))


@torch.no_grad()
def test_a_bias_of_places_is_refused() -> None:
    config = transformers.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4)
    model, made = patch(transformers.T5EncoderModel(config)).eval(), packed()
    set_pattern(model, made.tree)
    with pytest.raises(rw.UnsupportedError, match="Tree"):
        model(made.tokens[None])
