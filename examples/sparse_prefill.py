"""Read a long prompt with a sparse pattern, then decode densely over the cache.

python examples/sparse_prefill.py --tokens 4096

The model is tiny and has random weights, so its output is meaningless: put your own checkpoint in its place. It reads
the prompt with a window and sinks, and each decoding step attends the whole cache.
"""

from __future__ import annotations

import argparse
import time

import torch
import transformers

import ringweave as rw
from ringweave.integrations.transformers import patch, set_pattern


def main() -> None:
    """Read the prompt and decode."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096, help="length of the prompt")
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--sinks", type=int, default=16)
    parser.add_argument("--new", type=int, default=8, help="number of tokens to decode")
    args = parser.parse_args()
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=args.tokens + args.new,
    )  # fmt: skip
    torch.manual_seed(0)
    model = patch(transformers.LlamaForCausalLM(config).eval())
    prompt = torch.randint(3, 256, (1, args.tokens))
    with torch.no_grad():
        for name, pattern in (("dense", None), ("sparse", rw.SlidingWindow(args.window) | rw.Sinks(args.sinks))):
            set_pattern(model, pattern)
            began = time.perf_counter()
            read = model(prompt, use_cache=True, logits_to_keep=1)
            seconds = time.perf_counter() - began
            set_pattern(model, None)
            token, said = read.logits.argmax(-1), []
            for _ in range(args.new):
                said.append(int(token))
                token = model(token, cache=read.cache).logits.argmax(-1)
            print(f"{name}: {args.tokens} tokens read in {seconds:.3f} s, then {said}")


if __name__ == "__main__":
    main()
