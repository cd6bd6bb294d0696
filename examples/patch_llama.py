"""Give a Llama a pattern of your own, and print the time and the change of the loss.

    python examples/patch_llama.py                                   a tiny one with random weights
    python examples/patch_llama.py --name PATH-OR-ID --text FILE     your own checkpoint, on your own text

The model reads the text with its own attention, with ringweave's, which gives the same result, and with a window and
sinks.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
import transformers

import ringweave as rw
from ringweave.integrations.transformers import patch, set_pattern


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", help="a path or id of a model (default: a tiny Llama that reads bytes)")
    parser.add_argument("--text", type=Path, default=Path(__file__), help="the text to read")
    parser.add_argument("--tokens", type=int, default=2048, help="number of tokens to read")
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--sinks", type=int, default=16)
    return parser.parse_args()


def model_and_text(args: argparse.Namespace) -> tuple[Any, torch.Tensor]:
    """Return the model and the text as tokens, (1, tokens)."""
    if args.name is not None:
        tokenizer = transformers.AutoTokenizer.from_pretrained(args.name)
        ids = tokenizer(args.text.read_text("utf-8"), return_tensors="pt").input_ids
        return transformers.AutoModelForCausalLM.from_pretrained(args.name).eval(), ids[:, : args.tokens]
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=args.tokens,
    )  # fmt: skip
    torch.manual_seed(0)
    # a short file is repeated
    data = args.text.read_bytes()
    data = (data * (args.tokens // len(data) + 1))[: args.tokens]
    return transformers.LlamaForCausalLM(config).eval(), torch.tensor(list(data))[None]


def main() -> None:
    """Read the text with each attention."""
    args = arguments()
    model, ids = model_and_text(args)
    pattern = rw.SlidingWindow(args.window) | rw.Sinks(args.sinks)

    def read(what: str) -> torch.Tensor:
        with torch.no_grad():
            model(ids[:, :64], use_cache=False)
            began = time.perf_counter()
            out = model(ids, labels=ids, use_cache=False)
        print(f"{what}: loss {float(out.loss):.4f}, {time.perf_counter() - began:.3f} s for {ids.shape[1]:,} tokens")
        return out.logits

    own = read("its own attention")
    patch(model)  # the only line that changes the model
    same = read("ringweave, as the model says")
    print(f"largest difference of logits: {float((same - own).abs().max()):.1e}")
    print(f"set in {len(set_pattern(model, pattern))} layers: {pattern}")
    read("a window and sinks")


if __name__ == "__main__":
    main()
